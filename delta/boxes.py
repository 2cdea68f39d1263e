"""Positions of a part: between the parameter's flat words and the words of the part's box.

In memory a patch's indices are always global flat word positions. In a container they count within the box, in
row-major order, so that a shard codes as tightly as a whole parameter and no index can point outside its box.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.errors import PatchError
from deltacast.delta.fingerprint import Box
from deltacast.delta.table import ParamMeta

__all__ = ["MAX_PARTS", "check_box", "check_disjoint", "to_global", "to_local"]

I64 = NDArray[np.int64]

MAX_PARTS = 4096


def check_box(meta: ParamMeta, box: Box) -> int:
    """Return the number of words in a box.

    Raises:
        PatchError: the box does not lie in the parameter.
    """
    if len(box) != len(meta.shape) or any(not 0 <= lo <= hi <= n for (lo, hi), n in zip(box, meta.shape, strict=True)):
        raise PatchError("a part's box lies outside the parameter", parameter=meta.name,
                         expected=f"inside {list(meta.shape)}", found=box)  # fmt: skip
    return math.prod(hi - lo for lo, hi in box) * meta.row.words_per_element


def _dims(meta: ParamMeta, box: Box) -> tuple[list[tuple[int, int, int]], int]:
    """Return `(lo, extent, stride)` in words per dim, outermost first, and the words of the contiguous tail."""
    strides = [math.prod(meta.shape[dim + 1 :]) * meta.row.words_per_element for dim in range(len(box))]
    dims = [(lo, hi - lo, stride) for (lo, hi), stride in zip(box, strides, strict=True)]
    tail = meta.row.words_per_element
    while dims and dims[-1][1] == meta.shape[len(dims) - 1]:
        tail *= dims.pop()[1]
    return dims, tail


def to_global(local: I64, meta: ParamMeta, box: Box) -> I64:
    """Map positions in a box to positions in the parameter, in place; order is kept."""
    dims, tail = _dims(meta, box)
    if not dims or not local.size:
        return local
    if len(dims) == 1:
        local += dims[0][0] * dims[0][2]
        return local
    rest, inner = np.divmod(local, tail)
    local[...] = inner
    for lo, extent, stride in reversed(dims):
        rest, here = np.divmod(rest, extent)
        here += lo
        here *= stride
        local += here
    return local


def to_local(indices: I64, meta: ParamMeta, box: Box) -> I64:
    """Map positions in the parameter to positions in a box; order is kept.

    Raises:
        PatchError: a position outside the box.
    """
    check_box(meta, box)
    dims, tail = _dims(meta, box)
    if not dims or not indices.size:
        return indices
    local = np.zeros_like(indices)
    rest = indices
    inside = np.ones(indices.size, np.bool_)
    scale = math.prod(extent for _, extent, _ in dims) * tail
    for lo, extent, stride in dims:
        place, rest = np.divmod(rest, stride)
        place -= lo
        inside &= (place >= 0) & (place < extent)
        scale //= max(extent, 1)
        place *= scale
        local += place
    local += rest
    if not inside.all():
        raise PatchError("an index lies outside the part's box", parameter=meta.name, expected=box,
                         found=int(indices[int(inside.argmin())]))  # fmt: skip
    return local


def check_disjoint(name: str, boxes: list[Box | None]) -> None:
    """Check that the parts of one parameter do not overlap.

    Raises:
        PatchError: two parts overlap, one covers the whole beside others, or there are too many.
    """
    if len(boxes) < 2:
        return
    if len(boxes) > MAX_PARTS:
        raise PatchError("too many parts", parameter=name, expected=f"at most {MAX_PARTS}", found=len(boxes))
    filled = [box for box in boxes if box is not None]
    if len(filled) != len(boxes):
        raise PatchError("a part without a box covers the whole parameter", parameter=name)
    array = np.array(filled, np.int64).reshape(len(filled), -1, 2)
    array = array[(array[:, :, 0] < array[:, :, 1]).all(axis=1)]  # an empty box overlaps nothing
    for dim in range(array.shape[1]):
        order = np.argsort(array[:, dim, 0], kind="stable")
        if (array[order[:-1], dim, 1] <= array[order[1:], dim, 0]).all():
            return  # apart along this dim
    for number, box in enumerate(array[:-1]):
        others = array[number + 1 :]
        if ((box[:, 0] < others[:, :, 1]) & (others[:, :, 0] < box[:, 1])).all(axis=1).any():
            raise PatchError("two parts of a parameter overlap", parameter=name, found=box.tolist())
