"""A chunk's changes parameter by parameter, on the host: for baselines that live there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.kernels import BLOCK_WORDS, ParamGroup

__all__ = ["ParamChanges", "changes_of"]


@dataclass(frozen=True, slots=True, eq=False)
class ParamChanges:
    """The changes of one parameter in one chunk.

    Attributes:
        param: its number in the group.
        positions: int64, flat word positions in the parameter, ascending.
        part: which of the chunk's values they are.
    """

    param: int
    positions: NDArray[np.int64]
    part: slice


def changes_of(
    group: ParamGroup, first_block: int, counts: NDArray[Any], offsets: NDArray[np.uint16]
) -> Iterator[ParamChanges]:
    """Yield a trusted chunk's changes by parameter.

    Args:
        group: which the chunk is of.
        first_block: the chunk's.
        counts: [num_blocks], changes per block.
        offsets: all of them, in block order.
    """
    end_block = first_block + len(counts)
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    for param in group.params_of(first_block, len(counts)):
        begin, end = (int(block) for block in group.first_blocks[param : param + 2])
        lo, hi = max(begin, first_block), min(end, end_block)
        part = slice(int(ends[lo - first_block]), int(ends[hi - first_block]))
        if part.start < part.stop:
            blocks = np.arange(lo - begin, hi - begin, dtype=np.int64) * BLOCK_WORDS
            positions = np.repeat(blocks, counts[lo - first_block : hi - first_block])
            positions += offsets[part]
            yield ParamChanges(param, positions, part)
