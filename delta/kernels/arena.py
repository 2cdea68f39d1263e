"""Everything that one group's round changes, in buffers that are allocated once and used again every round.

A round is worked off in chunks, ranges of blocks in ascending order. How many changes a chunk has is known on the
device first, so a diff finds there where its chunk begins; the host follows with `settle`. On the receiving
side the numbers come with the message.

Sender: `reset`, then for each chunk `chunk`, `diff_group`, and once its total has been read, `settle`; at COMMIT
`advance_group` for all of them.
Receiver: `reset`, then for each chunk `chunk(..., num_changes)`, receive into its views, `apply_group`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from deltacast.delta.errors import InputError
from deltacast.delta.kernels.block_table import BLOCK_WORDS
from deltacast.delta.kernels.group import ParamGroup

__all__ = ["COUNTS_PER_SUM", "Arena", "RawChunk", "mask_bytes", "masks"]

COUNTS_PER_SUM: Final = 256
_ALIGNMENT: Final = 16


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """The changes of one group, chunk after chunk.

    Each chunk begins at a multiple of 16 changes, so that its offsets and values are aligned to 16 bytes (NCCL is slow
    on others), and its counts are if its first block is a multiple of 4. What lies between chunks is never
    written and never travels: only a chunk's own views do, and equal inputs give equal bytes in those.

    Nothing is written past the capacity. If a chunk does not fit, it holds the first of its changes, later chunks
    hold none, all totals are still true, and `settle` refuses the first chunk that does not fit.

    Args:
        group: what it is for; gives device, word width and number of blocks.
        capacity: the most changes of a round, each chunk's rounded up to 16; itself rounded up likewise.
        max_chunks: the most chunks of a round.

    Attributes:
        counts: int32 [num_blocks], changes of each block, at most 65,536.
        offsets: int16 [capacity], the bits of u16 offsets inside a block; ascending in a block, blocks in order.
        values: [capacity] words, the new bits, in the same order.
        starts: int64 [max_chunks + 1], where each chunk begins; written by diffs.
        totals: int64 [max_chunks], the changes that each diff found; true even if they did not fit.
        count_sums: int32 [max_chunks, ceil(num_blocks / 256)], scratch of the kernels until the round has ended.
    """

    def __init__(self, group: ParamGroup, capacity: int, max_chunks: int) -> None:
        capacity, device = _aligned(capacity), group.device
        num_sums = -(-group.num_blocks // COUNTS_PER_SUM)
        self.counts = torch.empty(group.num_blocks, dtype=torch.int32, device=device)
        self.offsets = torch.empty(capacity, dtype=torch.int16, device=device)
        self.values = torch.empty(capacity, dtype=group.torch_word, device=device)
        self.starts = torch.zeros(max_chunks + 1, dtype=torch.int64, device=device)
        self.totals = torch.zeros(max_chunks, dtype=torch.int64, device=device)
        self.count_sums = torch.empty(max_chunks, num_sums, dtype=torch.int32, device=device)
        self.reset()

    @property
    def capacity(self) -> int:
        """Changes that fit."""
        return self.offsets.numel()

    @property
    def max_chunks(self) -> int:
        """Chunks that fit."""
        return self.totals.numel()

    @property
    def nbytes(self) -> int:
        """Device memory of the arena."""
        buffers = (self.counts, self.offsets, self.values, self.starts, self.totals, self.count_sums)
        return sum(buffer.nbytes for buffer in buffers)

    @staticmethod
    def bytes_for(group: ParamGroup, capacity: int, max_chunks: int) -> int:
        """Return the `nbytes` of an arena that is yet to be made."""
        num_sums = -(-group.num_blocks // COUNTS_PER_SUM)
        changes = _aligned(capacity) * (2 + group.word_bytes)
        return 4 * group.num_blocks + changes + 8 * (2 * max_chunks + 1) + 4 * max_chunks * num_sums

    def reset(self) -> None:
        """Begin a round: its chunks take the place of the last round's. Touches nothing on the device."""
        self._num_chunks = 0
        self._end_block = 0
        self._num_settled = 0
        self._end = 0

    def chunk(self, first_block: int, num_blocks: int, num_changes: int | None = None) -> RawChunk:
        """Return the round's next chunk.

        Args:
            first_block: the group's number of the first block; no earlier chunk of the round may reach it.
            num_blocks: how many; 0 is a chunk without changes.
            num_changes: how many changes it has; None if a diff is to find out.

        Raises:
            InputError: blocks that are not there or not past the last chunk's, too many chunks, or as
                `settle`; the arena stays as it was.
        """
        if not self._end_block <= first_block <= first_block + num_blocks <= self.counts.numel():
            raise InputError(
                "no such blocks, or of an earlier chunk",
                expected=f"in [{self._end_block}, {self.counts.numel()})",
                found=f"{first_block} and {num_blocks} more",
            )
        if self._num_chunks >= self.max_chunks:
            raise InputError("more chunks than the arena has", expected=self.max_chunks, found=self._num_chunks + 1)
        chunk = RawChunk(self, self._num_chunks, first_block, num_blocks)
        if num_changes is not None:
            self.settle(chunk, num_changes)
        self._num_chunks += 1
        self._end_block = first_block + num_blocks
        return chunk

    def settle(self, chunk: RawChunk, num_changes: int) -> None:
        """Say how many changes a chunk has: what its diff left in `total`, or what its sender says.

        Chunks are settled in their order. From then on a chunk's `offsets` and `values` are there.

        Raises:
            InputError: an earlier chunk is not settled, this one is, or the changes do not fit; nothing has changed.
        """
        room = min(self.capacity - self._end, chunk.num_blocks * BLOCK_WORDS)
        if chunk.number != self._num_settled:
            raise InputError("chunks are settled in order", expected=f"chunk {self._num_settled}", found=chunk.number)
        if not 0 <= num_changes <= room:
            raise InputError(
                f"no room for the changes of chunk {chunk.number}", expected=f"at most {room}", found=num_changes
            )
        chunk.start, chunk.num_changes = self._end, num_changes
        self._num_settled += 1
        self._end += _aligned(num_changes)


@dataclass(slots=True, eq=False)
class RawChunk:
    """The changes of consecutive blocks, as they travel: `counts`, then `offsets`, then `values`.

    Made by `Arena.chunk`, whose memory it is; valid until the arena is reset.

    Attributes:
        arena: where its buffers are.
        number: which chunk of the round it is, from 0.
        first_block: the group's number of the first block.
        num_blocks: how many blocks it covers.
        start: where it begins in the arena; 0 until it is settled.
        num_changes: its changes; None until it is settled.
    """

    arena: Arena
    number: int
    first_block: int
    num_blocks: int
    start: int = field(default=0, init=False)
    num_changes: int | None = field(default=None, init=False)

    @property
    def counts(self) -> torch.Tensor:
        """int32 [num_blocks], the changes of each block."""
        return self.arena.counts[self.first_block : self.first_block + self.num_blocks]

    @property
    def offsets(self) -> torch.Tensor:
        """int16 [num_changes], the offsets of all changes in their blocks, once settled."""
        return self.arena.offsets[self.place]

    @property
    def values(self) -> torch.Tensor:
        """[num_changes] words, the new bits, once settled."""
        return self.arena.values[self.place]

    @property
    def total(self) -> torch.Tensor:
        """int64 [], the number of changes that the diff found."""
        return self.arena.totals[self.number]

    @property
    def count_sums(self) -> torch.Tensor:
        """int32, the sums of each 256 counts."""
        return self.arena.count_sums[self.number]

    @property
    def place(self) -> slice:
        """Which changes of the arena are the chunk's.

        Raises:
            InputError: the chunk is not settled.
        """
        if self.num_changes is None:
            raise InputError(f"chunk {self.number} is not settled", hint="Call Arena.settle.")
        return slice(self.start, self.start + self.num_changes)


def masks(group: ParamGroup, max_blocks: int) -> torch.Tensor:
    """Allocate the scratch of a diff over at most so many blocks, int32 [mask_bytes / 4].

    It is free again when the diff has run, so diffs on one stream can share it.
    """
    return torch.empty(mask_bytes(group, max_blocks) // 4, dtype=torch.int32, device=group.device)


def mask_bytes(group: ParamGroup, max_blocks: int) -> int:
    """Return the bytes of `masks`: 1/16 of those of the blocks' words (1/8 for 1-byte words)."""
    return max_blocks * (BLOCK_WORDS * max(group.word_bytes, 2) // 16)
