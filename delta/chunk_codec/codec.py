"""Packing and unpacking chunks: device work in the caller's stream, waiting and zstd in threads.

`pack` and `unpack` start the work on a chunk and return at once what is pending; `result()` finishes it. Keep a few
chunks pending, and chunk k + 1 is transformed while chunk k is compressed::

    sender:    transforms (device) -> one copy -> wait, cut (a thread) -> compress (threads) -> seal (a thread)
    receiver:  unpack(): checksum, header -> inflate pieces (threads) -> result(): one copy -> transforms (device)

`pack` never waits for the device. Host buffers are pinned and come from torch's own caching allocator, which hands them
out again once the copies from or to them have run: nothing is allocated anew after the first chunks, and a pending
chunk may simply be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
import zstandard

from deltacast.delta.chunk_codec.layout import (
    BLOCK_WORDS,
    Bytes,
    ChunkHeader,
    check_streams,
    packed_bytes,
    parse,
    seal,
)
from deltacast.delta.chunk_codec.staging import StagedChunk
from deltacast.delta.chunk_codec.transforms import UnpackedChunk, decode_streams, encode_streams
from deltacast.delta.codec.container import ReadBuffer
from deltacast.delta.codec.decode import inflate
from deltacast.delta.codec.encode import FRAME
from deltacast.delta.errors import InputError

__all__ = ["ChunkCodec", "PackingChunk", "UnpackingChunk"]

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class PackingChunk:
    """A chunk that is on its way from the device, or whose pieces are being compressed."""

    _packed: Future[torch.Tensor]

    def result(self) -> torch.Tensor:
        """Wait, and return the packed chunk: flat uint8 on the host, pinned if the device is a GPU.

        Raises:
            InputError: its counts are out of range or do not add up.
        """
        return self._packed.result()


@dataclass(frozen=True, slots=True, eq=False)
class UnpackingChunk:
    """A chunk whose pieces are being inflated."""

    _header: ChunkHeader
    _streams: torch.Tensor
    _pieces: Sequence[Future[None]]
    _block_sizes: torch.Tensor

    def result(self) -> UnpackedChunk:
        """Wait for the threads, copy to the device, and decode there, on the current stream.

        Raises:
            FormatError: naming the stream that does not decompress, contradicts another or leaves its block.
        """
        for piece in self._pieces:
            piece.result()
        check_streams(self._header, self._streams.numpy())
        streams = self._streams.to(self._block_sizes.device, non_blocking=True)
        return decode_streams(self._header, streams, self._block_sizes)


class ChunkCodec:
    """Packs and unpacks chunks of one word width on one device; use it as a context, or close it.

    Any thread may call it. Its threads end with `close`.

    Args:
        device: where counts, offsets and words are.
        word_bytes: 1, 2, 4 or 8.
        max_changes: the most changes of a chunk that is unpacked; it takes up to `(2.75 + word_bytes) * max_changes`
            bytes, pinned if the device is a GPU. At most 2^31 - 1.
        threads: pieces that are compressed or inflated at once.

    Raises:
        InputError: an argument out of range.
    """

    def __init__(self, device: torch.device, word_bytes: int, *, max_changes: int, threads: int = 8) -> None:
        if word_bytes not in _WORDS or not 0 <= max_changes <= _MOST or threads < 1:
            raise InputError(
                "unfit sizes of a chunk codec",
                expected=f"words of 1, 2, 4 or 8 bytes, up to {_MOST} changes, a thread",
                found=f"{word_bytes} bytes, {max_changes} changes, {threads} threads",
            )
        self.device = torch.empty(0, device=device).device  # with its index, as tensors name it
        self.word_bytes = word_bytes
        self.max_changes = max_changes
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="deltacast-chunk-wait")
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="deltacast-chunk-seal")
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="deltacast-chunk")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what has not begun and wait for the threads; a chunk still pending then raises `CancelledError`."""
        self._waiting.shutdown(wait=True, cancel_futures=True)  # first: it hands work to the others
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._sealing.shutdown(wait=True, cancel_futures=True)

    def pack(
        self,
        counts: torch.Tensor,
        offsets: torch.Tensor,
        values: torch.Tensor,
        old: torch.Tensor,
        *,
        signed_magnitude: torch.Tensor | bool,
    ) -> PackingChunk:
        """Start packing a chunk; waits neither for the device nor for threads.

        Equal arguments give equal bytes on every device. All tensors are contiguous and on the codec's device; they are
        read in the order of the current stream, so the caller may overwrite them there after the call, and drop them.
        A chunk takes `staged_bytes` of host memory until its result is taken, pinned if the device is a GPU.

        Args:
            counts: int32 [num_blocks], changes of each block of 65,536 words.
            offsets: int16 [num_changes], the bits of u16 offsets, strictly ascending in each block. A chunk that
                breaks this is packed to bytes that every receiver refuses.
            values: [num_changes] words (`DType.torch_word`) after, in the same order.
            old: [num_changes] words before. One that equals its value makes bytes that every receiver refuses.
            signed_magnitude: whether the words are floats of sign and magnitude (`DType.signed_magnitude`): one bool
                for all, or bool [num_blocks] where dtypes are mixed. The receiver has to know the same.

        Raises:
            InputError: a tensor of another dtype, size or device, or more changes than the blocks have words; nothing
                is pending. Counts are checked by `PackingChunk.result`.
        """
        self._check("counts", counts, torch.int32, counts.numel())
        for name, tensor in (("offsets", offsets), ("values", values), ("old", old)):
            self._check(name, tensor, torch.int16 if name == "offsets" else _WORDS[self.word_bytes], offsets.numel())
        num_blocks, num_changes = counts.numel(), offsets.numel()
        if num_changes > num_blocks * BLOCK_WORDS:
            raise InputError("more changes than words", expected=f"{num_blocks} blocks", found=num_changes)
        streams = encode_streams(counts, offsets, values, old, signed_magnitude=signed_magnitude)
        staged = StagedChunk.of(
            streams,
            word_bytes=self.word_bytes,
            num_blocks=num_blocks,
            num_changes=num_changes,
            sources=(counts, offsets, values, old, signed_magnitude),
        )
        return PackingChunk(self._sealing.submit(self._seal, self._waiting.submit(self._compress, staged)))

    def _compress(self, staged: StagedChunk) -> tuple[ChunkHeader, Sequence[Future[ReadBuffer]]]:
        header, pieces = staged.read()
        return header, [self._threads.submit(deflate_piece, piece.data) for piece in pieces]

    def _seal(self, cut: Future[tuple[ChunkHeader, Sequence[Future[ReadBuffer]]]]) -> torch.Tensor:
        header, pieces = cut.result()
        stored = [piece.result() for piece in pieces]
        packed = self._on_host(packed_bytes(stored))
        seal(header, stored, packed.numpy())
        return packed

    def unpack(self, packed: ReadBuffer | Bytes, block_sizes: torch.Tensor) -> UnpackingChunk:
        """Start unpacking a chunk that came from outside; what `result()` returns is checked in full.

        Args:
            packed: the bytes of what `PackingChunk.result` returned at the sender; must stay as it is until `result()`.
            block_sizes: int32 or int64 [num_blocks] on the codec's device, words of each block, at most 65,536.

        Raises:
            ChecksumError: the bytes are not the ones that were sent.
            FormatError: they contradict themselves, the blocks or `max_changes`; nothing is pending or allocated.
            InputError: block sizes of another dtype or device.
        """
        dtype = torch.int32 if block_sizes.dtype == torch.int32 else torch.int64
        self._check("block_sizes", block_sizes, dtype, block_sizes.numel())
        header, parts = parse(
            np.frombuffer(packed, np.uint8).data, self.word_bytes, block_sizes.numel(), self.max_changes
        )
        streams = self._on_host(header.num_bytes)
        decoded = streams.numpy()
        pieces = [
            self._threads.submit(inflate_piece, part, decoded[piece.start : piece.stop], piece.stream)
            for piece, part in parts
        ]
        return UnpackingChunk(header, streams, pieces, block_sizes)

    def _on_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int) -> None:
        fits = tensor.dtype == dtype and tensor.shape == (size,) and tensor.is_contiguous()
        if not fits or tensor.device != self.device or size > _MOST:
            raise InputError(
                f"unfit {name}",
                expected=f"{dtype} [{size}], contiguous, on {self.device}",
                found=f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
            )


def deflate_piece(part: memoryview) -> ReadBuffer:
    """Return one frame, or the bytes as they are if it is no smaller."""
    frame = zstandard.ZstdCompressor(compression_params=FRAME).compress(part)
    return frame if len(frame) < len(part) else part


def inflate_piece(part: memoryview, out: Bytes, stream: str) -> None:
    """Write what a piece decodes to; `out` has exactly that size."""
    whole = len(part) == out.size
    out[...] = np.frombuffer(part if whole else inflate(part, out.size, f"stream {stream}"), np.uint8)
