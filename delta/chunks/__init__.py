"""A round worked off in chunks by the kernels: what the trainer sends and the worker applies while more is made.

`plan.py` cuts a table into groups and chunks, alike on both sides; `sender.py` diffs chunk after chunk, `receiver.py`
applies them, with undo and proof; `coder.py` codes them for slow links; `headers.py` is what travels beside them
(docs/format.md, "Chunks"); `kept.py` makes a round an update, to be stored. Transports and control connections are in
`deltacast.engines`.
"""

from deltacast.delta.chunks.coder import ChunkCoder
from deltacast.delta.chunks.headers import Begin, Sums
from deltacast.delta.chunks.kept import KeptRound
from deltacast.delta.chunks.plan import ChunkPlan, Span, even_chunk_bytes
from deltacast.delta.chunks.receiver import ChunkReceiver, device_of
from deltacast.delta.chunks.sender import ChunkSender, SentChunk

__all__ = [
    "Begin",
    "ChunkCoder",
    "ChunkPlan",
    "ChunkReceiver",
    "ChunkSender",
    "KeptRound",
    "SentChunk",
    "Span",
    "Sums",
    "device_of",
    "even_chunk_bytes",
]
