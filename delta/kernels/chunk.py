"""Buffers that the kernels fill and read: one chunk of a raw update, and what applying it overwrote.

All are allocated once and used again every round; nothing here allocates later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deltacast.delta.errors import InputError
from deltacast.delta.kernels.group import BLOCK_WORDS, ParamGroup

__all__ = ["COUNTS_PER_SUM", "NO_FAULT", "RawChunk", "UndoLog", "faults", "masks"]

NO_FAULT = 2**31 - 1
"""What `faults` holds as long as no block is at fault."""

COUNTS_PER_SUM = 256


@dataclass(slots=True)
class RawChunk:
    """The changes of consecutive blocks, as they travel: counts, then offsets, then values.

    Attributes:
        counts: int32 [max_blocks], changes of each block, at most 65,536; the first `num_blocks` count.
        offsets: int16 [capacity], the bits of u16 offsets inside a block; ascending in a block, blocks in order.
        values: [capacity] words, the new bits, in the same order.
        total: int64 [1], the number of changes that a diff found. If it exceeds the capacity, the chunk holds only
            the first of them: use a larger one, or send the blocks whole.
        count_sums: int32 scratch of the kernels, [ceil(max_blocks / 256)].
        first_block: the group's number of the first block.
        num_blocks: how many blocks the chunk covers.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor
    total: torch.Tensor
    count_sums: torch.Tensor
    first_block: int = field(default=0)
    num_blocks: int = field(default=0)

    @classmethod
    def allocate(cls, group: ParamGroup, max_blocks: int, capacity: int) -> RawChunk:
        """Allocate a chunk on a group's device: 4 bytes a block, 2 and a word a change.

        Args:
            group: gives device and word width.
            max_blocks: the most blocks that it is used for at a time.
            capacity: the most changes that it can hold.
        """

        def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=group.device)

        return cls(
            empty(max_blocks, torch.int32),
            empty(capacity, torch.int16),
            empty(capacity, group.torch_word),
            torch.zeros(1, dtype=torch.int64, device=group.device),
            empty(-(-max_blocks // COUNTS_PER_SUM), torch.int32),
        )

    @property
    def capacity(self) -> int:
        """Changes that fit."""
        return self.offsets.numel()

    def read_total(self) -> int:
        """Return the number of changes that the last diff found; waits for the device."""
        return int(self.total.item())

    def check(self, group: ParamGroup, num_blocks: int) -> None:
        """Raise unless the chunk fits a group and so many blocks.

        Raises:
            InputError: other device, other word width, or too few blocks.
        """
        if self.counts.device != group.device or self.values.dtype != group.torch_word:
            raise InputError(
                "a chunk made for another group",
                expected=f"{group.torch_word} on {group.device}",
                found=f"{self.values.dtype} on {self.counts.device}",
            )
        if num_blocks > self.counts.numel():
            raise InputError("more blocks than the chunk has", expected=self.counts.numel(), found=num_blocks)


@dataclass(slots=True)
class UndoLog:
    """What applying one chunk overwrote.

    Attributes:
        values: [capacity] words, the old bits, in the chunk's order.
        applied: int32 [1]: 1 once the chunk was applied; a log that says 0 undoes nothing.
    """

    values: torch.Tensor
    applied: torch.Tensor

    @classmethod
    def allocate(cls, group: ParamGroup, capacity: int) -> UndoLog:
        """Allocate a log on a group's device, one word per change."""
        applied = torch.zeros(1, dtype=torch.int32, device=group.device)
        return cls(torch.empty(capacity, dtype=group.torch_word, device=group.device), applied)


def masks(group: ParamGroup, max_blocks: int) -> torch.Tensor:
    """Allocate the scratch of a diff over at most so many blocks, int32.

    It takes 1/16 of the bytes of their words (1/8 for 1-byte words), and is free again when the diff has run, so
    diffs on one stream can share it.
    """
    size = max_blocks * (BLOCK_WORDS * max(group.word_bytes, 2) // 64)
    return torch.empty(size, dtype=torch.int32, device=group.device)


def faults(group: ParamGroup) -> torch.Tensor:
    """Allocate a round's fault record, int32 [2]: the first block with a wrong count, with wrong offsets.

    `NO_FAULT` where there is none. Set it back with `fill_(NO_FAULT)`.
    """
    return torch.full((2,), NO_FAULT, dtype=torch.int32, device=group.device)
