"""Compare two checkpoints bit by bit and say where they differ; one parameter in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from deltacast.delta.bits import Words, numpy_words
from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import CheckpointDigest, Progress
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.table import ParamMeta
from deltacast.delta.threads import in_order

__all__ = ["Comparison", "ElementDifference", "ParameterDifference", "compare_checkpoints"]

DifferenceKind: TypeAlias = Literal["only in A", "only in B", "dtype", "shape", "bits"]

_CHUNK_ELEMENTS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """One element whose bits differ.

    Attributes:
        position: flat row-major element position.
        index: the same as one index per dim; empty for a scalar.
        a: the element's bits in A, big-endian hex digits.
        b: likewise in B.
    """

    position: int
    index: tuple[int, ...]
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """One parameter that is not the same in both checkpoints.

    Attributes:
        name: its name.
        a: what it is in A; None if it is only in B.
        b: likewise.
        num_differing: elements with other bits; None where dtype, shape or presence differ already.
        first: the first of them.
    """

    name: str
    a: ParamMeta | None
    b: ParamMeta | None
    num_differing: int | None = None
    first: tuple[ElementDifference, ...] = ()

    @property
    def kind(self) -> DifferenceKind:
        """What differs; of several things the one that stands first in a table entry."""
        if self.a is None or self.b is None:
            return "only in B" if self.a is None else "only in A"
        if self.a.dtype != self.b.dtype:
            return "dtype"
        return "shape" if self.a.shape != self.b.shape else "bits"


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The outcome: both digests, and every difference in table order (`differences` empty: every bit is the same)."""

    a: CheckpointDigest
    b: CheckpointDigest
    differences: tuple[ParameterDifference, ...]

    @property
    def identical(self) -> bool:
        """Whether names, dtypes, shapes and all bits are the same."""
        return not self.differences


@dataclass(frozen=True, slots=True)
class _Compared:
    meta_a: ParamMeta | None
    meta_b: ParamMeta | None
    fingerprint_a: int
    fingerprint_b: int
    difference: ParameterDifference | None


def compare_checkpoints(
    a: CheckpointSource,
    b: CheckpointSource,
    *,
    num_first: int = 3,
    threads: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Compare all bits of two checkpoints; shards, order in the files and `__metadata__` do not count.

    Args:
        a: an open checkpoint; stays open.
        b: another.
        num_first: how many differing elements to name per parameter.
        threads: parameters that are compared at once.
        progress: told about each parameter's bytes, of the larger side.
    """
    in_a, in_b = ({meta.name: meta for meta in source.metas()} for source in (a, b))
    names = [*in_a, *(name for name in in_b if name not in in_a)]

    def compare(name: str) -> _Compared:
        return _compare(name, (a, in_a.get(name)), (b, in_b.get(name)), num_first)

    found: list[_Compared] = []
    for one in in_order(compare, names, threads):
        found.append(one)
        if progress is not None:
            progress(max(meta.nbytes for meta in (one.meta_a, one.meta_b) if meta is not None))
    differences = [one.difference for one in found if one.difference is not None]
    return Comparison(
        a=CheckpointDigest.of((one.meta_a, one.fingerprint_a) for one in found if one.meta_a is not None),
        b=CheckpointDigest.of((one.meta_b, one.fingerprint_b) for one in found if one.meta_b is not None),
        differences=tuple(sorted(differences, key=lambda difference: difference.name.encode())),
    )


def _compare(
    name: str,
    a: tuple[CheckpointSource, ParamMeta | None],
    b: tuple[CheckpointSource, ParamMeta | None],
    num_first: int,
) -> _Compared:
    (source_a, meta_a), (source_b, meta_b) = a, b
    words_a = numpy_words(source_a.tensor(name), name=name) if meta_a is not None else None
    words_b = numpy_words(source_b.tensor(name), name=name) if meta_b is not None else None
    fingerprint_a = words_fingerprint(words_a) if words_a is not None else 0
    if meta_a is None or words_a is None or words_b is None or meta_a != meta_b:
        fingerprint_b = words_fingerprint(words_b) if words_b is not None else 0
        return _Compared(meta_a, meta_b, fingerprint_a, fingerprint_b, ParameterDifference(name, meta_a, meta_b))
    num_differing, first = _differences(meta_a, words_a, words_b, num_first)
    if not num_differing:
        return _Compared(meta_a, meta_b, fingerprint_a, fingerprint_a, None)
    difference = ParameterDifference(name, meta_a, meta_b, num_differing, first)
    return _Compared(meta_a, meta_b, fingerprint_a, words_fingerprint(words_b), difference)


def _differences(meta: ParamMeta, a: Words, b: Words, num_first: int) -> tuple[int, tuple[ElementDifference, ...]]:
    """Count differing elements in chunks that stay in cache; memory does not grow with their number."""
    size = meta.row.itemsize  # a complex64 is one element of 8 bytes here, though two words in a patch
    a, b = a.view(f"<u{size}"), b.view(f"<u{size}")
    total, positions = 0, list[int]()
    for start in range(0, a.size, _CHUNK_ELEMENTS):
        differs = a[start : start + _CHUNK_ELEMENTS] != b[start : start + _CHUNK_ELEMENTS]
        here = int(np.count_nonzero(differs))
        if here and len(positions) < num_first:
            positions += [start + int(i) for i in np.flatnonzero(differs)[: num_first - len(positions)]]
        total += here
    first = tuple(
        ElementDifference(
            at,
            tuple(int(i) for i in np.unravel_index(at, meta.shape)),
            f"{a[at]:0{2 * size}x}",
            f"{b[at]:0{2 * size}x}",
        )
        for at in positions
    )
    return total, first
