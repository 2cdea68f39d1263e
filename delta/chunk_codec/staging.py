"""A chunk's streams on their way to the host, where the two of escapes are told how long they are.

The device lays them out for the worst case, every change an escape, so that no size is waited for; what that costs is
`1 + word_bytes` more bytes on the bus for each change. Behind the streams stand, as int32 [2], the numbers of high
gaps and of exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch

from deltacast.delta.chunk_codec.layout import BLOCK_WORDS, Bytes, ChunkHeader, cut
from deltacast.delta.errors import InputError

__all__ = ["StagedChunk", "staged_bytes"]

_NUMBERS_BYTES: Final = 8


def staged_bytes(word_bytes: int, num_blocks: int, num_changes: int) -> int:
    """Return the bytes of a staged chunk: about `2.75 + word_bytes` for each change, and 4 for each block."""
    return _worst(word_bytes, num_blocks, num_changes).num_bytes + _NUMBERS_BYTES


def _worst(word_bytes: int, num_blocks: int, num_changes: int) -> ChunkHeader:
    return ChunkHeader(word_bytes, num_blocks, num_changes, num_changes, num_changes)


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunk:
    """Streams that are being copied to the host.

    Attributes:
        worst: a header that says where they lie.
        host: uint8 [staged_bytes], pinned if they come from a GPU; torch's allocator hands the memory out again after
            the copy, once nothing refers to it.
        copied: when they are there; None on the CPU.
        sources: what the device reads until then, kept from being freed: memory of another stream would be handed out
            again at once.
    """

    worst: ChunkHeader
    host: torch.Tensor
    copied: torch.cuda.Event | None
    sources: tuple[object, ...]

    @classmethod
    def of(
        cls, streams: torch.Tensor, *, word_bytes: int, num_blocks: int, num_changes: int, sources: tuple[object, ...]
    ) -> Self:
        """Start copying what `encode_streams` returned, in the order of the current stream; waits for nothing."""
        worst = _worst(word_bytes, num_blocks, num_changes)
        if streams.device.type != "cuda":
            return cls(worst, streams, None, sources)
        host = torch.empty(streams.shape, dtype=streams.dtype, pin_memory=True)
        host.copy_(streams, non_blocking=True)
        event: Any = torch.cuda.Event  # untyped
        copied: torch.cuda.Event = event(blocking=True)  # who waits sleeps: the cores are for those that compress
        copied.record(torch.cuda.current_stream(streams.device))
        return cls(worst, host, copied, sources)

    def read(self) -> tuple[ChunkHeader, list[Bytes]]:
        """Wait for the copy, and return the chunk's header and its pieces, not yet compressed: views of the memory.

        Raises:
            InputError: counts are out of range, or do not add up.
        """
        if self.copied is not None:
            self.copied.synchronize()
        staged, worst = self.host.numpy(), self.worst
        num_high, num_exceptions = staged[worst.num_bytes :].view("<i4").tolist()
        streams = {stream: staged[place] for stream, place in worst.streams().items()}
        _check_counts(streams["counts"].view("<i4"), worst.num_changes)
        streams["gap_high"] = streams["gap_high"][:num_high]
        planes = streams["exceptions"].reshape(worst.word_bytes, worst.num_changes)
        streams["exceptions"] = planes[:, :num_exceptions].ravel()
        header = ChunkHeader(worst.word_bytes, worst.num_blocks, worst.num_changes, num_high, num_exceptions)
        return header, [piece for stream in streams.values() for piece in cut(stream)]


def _check_counts(counts: np.ndarray[tuple[int], np.dtype[np.int32]], num_changes: int) -> None:
    wrong = int(np.count_nonzero((counts < 0) | (counts > BLOCK_WORDS)))
    total = int(counts.sum(dtype=np.int64))
    if wrong or total != num_changes:
        raise InputError(
            "counts do not add up, or are out of range",
            expected=f"{num_changes} changes, each count at most {BLOCK_WORDS}",
            found=f"{total}, {wrong} out of range",
        )
