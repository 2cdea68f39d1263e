"""The descriptor table that the kernels read: one row per block of 65,536 words, on the host and on the device.

Addresses are written on the host and uploaded before a launch that reads them. A row belongs to one block, so chunks
of a round share no row, even where a parameter lies in two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.errors import InputError

__all__ = ["BASELINE", "BLOCK_WORDS", "NEW", "BlockTable"]

BLOCK_WORDS: Final = 65536
NEW: Final = 0
BASELINE: Final = 1
_MAX_BLOCKS: Final = 2**31 - 1


class BlockTable:
    """Where the words of every block are, and how many.

    Args:
        num_words: words of each parameter.
        word_bytes: 1, 2, 4 or 8.
        device: where the kernels run.

    Attributes:
        first_blocks: int64 [num_params + 1] on the host: parameter `i` has blocks `first_blocks[i]` to
            `first_blocks[i + 1]`.
        rows: int64 [num_blocks, 4] on the host: address of the new words, of the baseline's (0: nowhere yet),
            parameter << 32 | number of words, first row of outer keys.
        blocks: the same on the device, as of the last upload; on the CPU it is the memory of `rows`.

    Raises:
        InputError: more than 2^31 - 1 blocks.
    """

    def __init__(self, num_words: Sequence[int], word_bytes: int, device: torch.device) -> None:
        words = np.array(num_words, np.int64)
        self.first_blocks: NDArray[np.int64] = np.zeros(words.size + 1, np.int64)
        np.cumsum(-(-words // BLOCK_WORDS), out=self.first_blocks[1:])
        num_blocks = int(self.first_blocks[-1])
        if num_blocks > _MAX_BLOCKS:
            raise InputError("too many blocks for one group", expected=f"at most {_MAX_BLOCKS}", found=num_blocks)
        param = np.repeat(np.arange(words.size), np.diff(self.first_blocks))
        number = np.arange(num_blocks) - self.first_blocks[param]
        self.rows: NDArray[np.int64] = np.zeros((num_blocks, 4), np.int64)
        self.rows[:, 2] = param << 32 | np.minimum(words[param] - number * BLOCK_WORDS, BLOCK_WORDS)
        self.rows[:, 3] = number * key_rows_per_block(word_bytes)
        self._steps = number * (BLOCK_WORDS * word_bytes)
        self._stale = np.zeros(num_blocks, np.bool_)
        self.blocks = torch.from_numpy(self.rows).to(device)

    @property
    def num_words(self) -> NDArray[np.int64]:
        """Words of each block, int64 [num_blocks]."""
        return self.rows[:, 2] & 0xFFFFFFFF

    def addresses(self, param: int, start: int) -> NDArray[np.int64]:
        """Return the address of each block of a parameter that starts at an address."""
        return self._steps[slice(*self.first_blocks[param : param + 2])] + start

    def point(self, side: int, first_block: int, addresses: NDArray[np.int64]) -> None:
        """Say where consecutive blocks are, on side `NEW` or `BASELINE`; rows that differ are uploaded next time."""
        rows = slice(first_block, first_block + addresses.size)
        self._stale[rows] |= self.rows[rows, side] != addresses
        self.rows[rows, side] = addresses

    def point_param(self, side: int, param: int, start: int) -> None:
        """Say where a parameter starts that lies in one piece; fast if it is there already."""
        first, end = self.first_blocks[param : param + 2]
        if first < end and self.rows[first, side] != start:
            self.point(side, first, self.addresses(param, start))

    def upload(self, first_block: int, num_blocks: int) -> None:
        """Bring a range of rows on the device up to date, on its current stream; nothing if nothing changed.

        Does not wait. The rows go through a pinned copy of their own, which torch uses again only when the transfer
        has ended: so rows may be pointed elsewhere at once, with earlier uploads still in flight. On the device they
        change in the order of the stream; work on other streams that reads them must have ended.
        """
        stale = np.flatnonzero(self._stale[first_block : first_block + num_blocks])
        if stale.size == 0:
            return
        rows = slice(first_block + int(stale[0]), first_block + int(stale[-1]) + 1)
        if self.blocks.device.type != "cpu":
            pinned = torch.from_numpy(self.rows[rows]).pin_memory()
            self.blocks[rows].copy_(pinned, non_blocking=True)
        self._stale[rows] = False


def key_rows_per_block(word_bytes: int) -> int:
    """Return how many rows of outer keys (1024 units each) a whole block takes."""
    return BLOCK_WORDS * ((word_bytes + 1) // 2) // 1024
