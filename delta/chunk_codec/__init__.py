"""Chunks for slow links: the changes of consecutive blocks, entropy-coded on the way out and decoded on arrival.

Start with `codec.py`, whose `ChunkCodec` is the API. `transforms.py` turns counts, offsets and words into byte
streams and back, in torch operations on any device; `staging.py` brings them to the host; `layout.py` says what the
packed bytes are, and checks them.
The streams are those of format 1 (docs/format.md, "Streams") with positions counted inside blocks.
"""

from deltacast.delta.chunk_codec.codec import ChunkCodec, PackingChunk, UnpackingChunk
from deltacast.delta.chunk_codec.staging import staged_bytes
from deltacast.delta.chunk_codec.transforms import UnpackedChunk, transform_bytes

__all__ = ["ChunkCodec", "PackingChunk", "UnpackingChunk", "UnpackedChunk", "staged_bytes", "transform_bytes"]
