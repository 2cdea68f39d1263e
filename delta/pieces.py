"""Places: which elements of a checkpoint parameter are which elements of a runtime tensor, as boxes and strides.

A loader moves weights by views (`narrow`, `chunk`, indexing, `transpose`), so what it moves is a *lattice*: an offset
and a stride per dim. `Piece.between` writes a pair of lattices as one box of the checkpoint parameter; all that a plan
holds is a few such boxes per parameter, whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.fingerprint import Box

__all__ = ["Lattice", "Located", "Piece", "View", "disjoint", "through"]


@dataclass(frozen=True, slots=True)
class Lattice:
    """The elements of a strided view, as positions in its flat memory.

    Attributes:
        offset: position of the first element.
        extents: number of elements per dim.
        strides: positions from one to the next, per dim.
    """

    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Lattice:
        """Return where a view (any device, meta too) lies in its storage, in elements of its dtype."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.extents)

    @property
    def last(self) -> int:
        """Position of the last element; strides are not negative in torch."""
        return self.offset + sum((n - 1) * stride for n, stride in zip(self.extents, self.strides, strict=True))


def through(view: Lattice, copy: Lattice, original: Lattice) -> Lattice | None:
    """Return where the elements of a view of a temporary copy lie in what was copied.

    Args:
        view: a view of the copy's memory.
        copy: the whole copy.
        original: what was copied, of the same extents.

    Returns:
        The view's lattice in the original's memory; None if a dim of the view runs across several dims of the copy,
        so that no one stride describes it.
    """
    dims = [dim for dim in zip(copy.strides, copy.extents, original.strides, strict=True) if dim[1] > 1]
    dims.sort(reverse=True)
    rest, offset = view.offset - copy.offset, original.offset
    reached, strides = list[int](), list[int]()
    for place, _, stride in dims:
        digit, rest = divmod(rest, place)
        reached.append(digit)
        offset += digit * stride
    for extent, step in zip(view.extents, view.strides, strict=True):
        i = next((i for i, (place, _, _) in enumerate(dims) if place <= step), None)
        if extent <= 1:
            strides.append(0)
        elif i is None or step % dims[i][0]:
            return None
        else:
            steps = step // dims[i][0]
            reached[i] += (extent - 1) * steps
            strides.append(steps * dims[i][2])
    crosses = any(last >= extent for last, (_, extent, _) in zip(reached, dims, strict=True))
    return None if crosses else Lattice(offset, view.extents, tuple(strides))


class View(NamedTuple):
    """A box of a checkpoint parameter as the running model holds it.

    `shard_fingerprint(view.tensor, view.shape, view.box)` is its share of the parameter's fingerprint.

    Attributes:
        shape: the parameter's shape, cut anew (`Piece.shape`).
        box: `[lo, hi)` per dim of `shape`.
        tensor: the live memory, in the box's extents.
    """

    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


class Located(NamedTuple):
    """Some elements of a checkpoint parameter, where one runtime tensor holds them.

    Attributes:
        runtime: the runtime tensor's name.
        which: int64 places in the positions that were asked for, ascending.
        positions: int64 flat row-major positions in the runtime tensor, one for each of `which`.
    """

    runtime: str
    which: NDArray[np.int64]
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint parameter and where it lies in a runtime tensor.

    Attributes:
        runtime: the runtime tensor's name.
        shape: the checkpoint parameter's shape, cut anew: dims that run on in both memories are one, and a dim that
            the loader takes apart is several. Flat row-major positions are those of the parameter.
        box: `[lo, hi)` per dim of `shape`.
        offset: flat row-major position of the box's first element in the runtime tensor, which is contiguous.
        strides: positions in the runtime tensor from one element to the next, per dim of `shape`.
    """

    runtime: str
    shape: tuple[int, ...]
    box: Box
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def between(cls, here: Lattice, numel: int, runtime: str, there: Lattice) -> Piece | None:
        """Write a copy of one lattice onto another as a piece.

        Args:
            here: what is copied, in a checkpoint parameter.
            numel: elements of that parameter.
            runtime: the runtime tensor's name.
            there: where it goes, in the runtime tensor; extents as in `here`.

        Returns:
            The piece; None if what is copied is no box in any cut of the parameter (an element that is repeated,
            overlapping windows, a step that does not divide the shape).
        """
        dims = _joined(here, there)
        rest, place = here.offset, numel
        shape, box, strides = list[int](), list[tuple[int, int]](), list[int]()
        for stride, extent, step in dims:
            if stride < 1 or place % stride:
                return None
            low, rest = divmod(rest, stride)
            if low + extent > place // stride:
                return None
            shape.append(place // stride)
            box.append((low, low + extent))
            strides.append(step)
            place = stride
        if place > 1 or not dims:
            shape.append(place)
            box.append((rest, rest + 1))
            strides.append(0)
        return cls(runtime, tuple(shape), tuple(box), there.offset, tuple(strides))

    @property
    def here(self) -> Lattice:
        """The box's elements, as positions in the checkpoint parameter."""
        steps = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        offset = sum(low * step for (low, _), step in zip(self.box, steps, strict=True))
        return Lattice(offset, self.extents, steps)

    @property
    def there(self) -> Lattice:
        """The same elements, as positions in the runtime tensor."""
        return Lattice(self.offset, self.extents, self.strides)

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements of the box per dim of `shape`."""
        return tuple(high - low for low, high in self.box)

    def locate(self, positions: NDArray[np.int64]) -> Located:
        """Find those of some elements that lie in the box.

        Args:
            positions: int64 flat positions in the checkpoint parameter, in range, any order.
        """
        digits = np.unravel_index(positions, self.shape) if len(self.shape) > 1 else (positions,)
        inside = np.ones(positions.shape, bool)
        for digit, (low, high), size in zip(digits, self.box, self.shape, strict=True):
            if high - low < size:
                inside &= (digit >= low) & (digit < high)
        which = np.flatnonzero(inside)
        found = np.full(which.shape, self.offset, np.int64)
        for digit, (low, _), stride in zip(digits, self.box, self.strides, strict=True):
            found += (digit[which] - low) * stride
        return Located(self.runtime, which, found)

    def view(self, runtime: torch.Tensor) -> torch.Tensor:
        """View a contiguous runtime tensor as the box: no copy, so writes reach it.

        Returns:
            A tensor of the box's extents; element for element what the box of the parameter, in `shape`, holds.
        """
        return runtime.detach().as_strided(self.extents, self.strides, runtime.storage_offset() + self.offset)


def _joined(here: Lattice, there: Lattice) -> list[tuple[int, int, int]]:
    """Return `(stride here, extent, stride there)` per dim, outermost first, joining dims that run on in both."""
    dims = [dim for dim in zip(here.strides, here.extents, there.strides, strict=True) if dim[1] > 1]
    joined: list[tuple[int, int, int]] = []
    for stride, extent, step in sorted(dims, key=lambda dim: -dim[0]):
        if joined and joined[-1][0] == stride * extent and joined[-1][2] == step * extent:
            joined[-1] = (stride, joined[-1][1] * extent, step)
        else:
            joined.append((stride, extent, step))
    return joined


def disjoint(lattices: Sequence[Lattice]) -> bool:
    """Tell whether no position of a flat memory is in two lattices, or twice in one.

    Lattices that follow one another need no memory; others (columns side by side) take a byte per position that they
    span, while it runs.
    """
    last = -1
    for lattice in sorted(lattices, key=lambda lattice: lattice.offset):
        if lattice.offset <= last or not _runs(lattice):
            return _disjoint_by_mark(lattices)
        last = lattice.last
    return True


def _runs(lattice: Lattice) -> bool:
    """Whether strides are those of nested loops, so that no position comes twice."""
    reach = 0
    for stride, extent in sorted(zip(lattice.strides, lattice.extents, strict=True)):
        if extent > 1 and stride <= reach:
            return False
        reach += (extent - 1) * stride
    return True


def _disjoint_by_mark(lattices: Sequence[Lattice]) -> bool:
    marks = torch.zeros(max(lattice.last for lattice in lattices) + 1, dtype=torch.bool)
    for lattice in lattices:
        if not _runs(lattice):
            return False
        place = marks.as_strided(lattice.extents, lattice.strides, lattice.offset)
        if bool(place.any()):
            return False
        place.fill_(True)  # noqa: FBT003
    return True
