"""What a round overwrote, and the record of what was wrong with it."""

from __future__ import annotations

from typing import Final

import torch

from deltacast.delta.errors import InputError
from deltacast.delta.kernels.arena import Arena, RawChunk
from deltacast.delta.kernels.group import ParamGroup

__all__ = ["NO_FAULT", "UndoLog", "faults"]

NO_FAULT: Final = 2**31 - 1
"""What `faults` holds as long as no block is at fault."""


class UndoLog:
    """What applying an arena's chunks overwrote.

    Args:
        arena: whose chunks it serves.

    Attributes:
        arena: whose chunks it serves.
        values: [capacity] words, the old bits, where the arena has the new ones.
        applied: int32 [max_chunks]: 1 for a logged chunk that was written, 0 for one that was at fault.
        chunks: those that `apply_group` logged in this round, in its order.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.values = torch.empty_like(arena.values)
        self.applied = torch.zeros(arena.max_chunks, dtype=torch.int32, device=arena.values.device)
        self.chunks: list[RawChunk] = []

    @property
    def nbytes(self) -> int:
        """Device memory of the log."""
        return self.values.nbytes + self.applied.nbytes

    @staticmethod
    def bytes_for(group: ParamGroup, capacity: int, max_chunks: int) -> int:
        """Return the `nbytes` of the log of an arena that is yet to be made with these arguments."""
        return -(-capacity // 16) * 16 * group.word_bytes + 4 * max_chunks

    def reset(self) -> None:
        """Forget what was logged, when the round is decided, in the order of the current stream; waits for nothing."""
        self.applied.zero_()
        self.chunks.clear()

    def add(self, chunk: RawChunk) -> None:
        """Log a chunk that is about to be applied. Touches nothing on the device, where it is not yet written.

        Raises:
            InputError: a log for another arena, or a chunk of this number is logged: applied twice, or a log that was
                not reset. Nothing has changed.
        """
        if chunk.arena is not self.arena:
            raise InputError("an undo log made for another arena")
        if any(logged.number == chunk.number for logged in self.chunks):
            raise InputError(f"chunk {chunk.number} is logged already", hint="Reset the log before each round.")
        self.chunks.append(chunk)


def faults(group: ParamGroup) -> torch.Tensor:
    """Allocate a round's fault record, int32 [2]: the first block with a wrong count, with wrong offsets.

    `NO_FAULT` where there is none. Set it back with `fill_(NO_FAULT)`. Any int32 [2] on the device will do, as the
    last int64 of a buffer that begins with the round's sums: `buffer[-1:].view(torch.int32)`. One read brings both.
    """
    return torch.full((2,), NO_FAULT, dtype=torch.int32, device=group.device)
