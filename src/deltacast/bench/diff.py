"""How fast two states are compared on this machine, against copying memory in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltacast.bench.generator import PRESETS
from deltacast.delta.diff import changed_words, diff_words
from deltacast.delta.errors import InputError
from deltacast.delta.table import ParamMeta

__all__ = ["DENSITIES", "DiffRow", "bench_diff"]

DENSITIES: Final = tuple(percent / 100 for percent in PRESETS)
"""Shares of changed elements: those of the codec's presets."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One density, one thread. Rates are bytes of *one* side per second / 10^9, medians over interleaved repeats.

    Attributes:
        density: share of elements that differ.
        num_elements: bf16 elements of a side.
        num_changed: elements that differ.
        compare_gbps: finding the changed positions.
        diff_gbps: the whole patch: positions, old and new values, old_sum and the new fingerprint.
        memcpy_gbps: copying one side to another buffer.
    """

    density: float
    num_elements: int
    num_changed: int
    compare_gbps: float
    diff_gbps: float
    memcpy_gbps: float


def bench_diff(
    *, num_elements: int = 1 << 26, densities: Sequence[float] = DENSITIES, repeats: int = 5, seed: int = 0
) -> Iterator[DiffRow]:
    """Measure each density in turn; takes about 8 bytes of memory an element, and 8 more a change.

    Args:
        num_elements: bf16 elements of a side.
        densities: shares of elements to change, spread at random.
        repeats: of each measurement; the three are interleaved, so that all see the same neighbours.
        seed: of the weights and of where they change.

    Raises:
        InputError: a size or density that cannot be measured.
    """
    if num_elements < 1 or repeats < 1 or not all(0 <= density <= 1 for density in densities):
        raise InputError("nothing to measure", expected="elements and repeats of 1 or more, densities from 0 to 1",
                         found=f"{num_elements} elements, {repeats} repeats, {list(densities)}")  # fmt: skip
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, num_elements, dtype=np.uint16)
    target = np.empty_like(old)
    meta = ParamMeta("weight", "bfloat16", (num_elements,))
    for density in densities:
        new = _changed(old, density, rng)
        compare_s, diff_s, memcpy_s = _medians(
            (
                lambda new=new: changed_words(old, new),  # type: ignore[misc]
                lambda new=new: diff_words(meta, old, new, 0),  # type: ignore[misc]
                lambda new=new: np.copyto(target, new),  # type: ignore[misc]
            ),
            repeats,
        )
        num_changed, gigabytes = int(np.count_nonzero(old != new)), old.nbytes / 1e9
        yield DiffRow(
            density, num_elements, num_changed, gigabytes / compare_s, gigabytes / diff_s, gigabytes / memcpy_s
        )


def _changed(old: NDArray[np.uint16], density: float, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Return a copy in which about `density` of the words are one step further."""
    new = old.copy()
    chunk = 1 << 20
    for start in range(0, old.size, chunk):
        part = new[start : start + chunk]
        part += rng.random(part.size, dtype=np.float32) < density
    return new


def _medians(functions: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Time functions in turn, `repeats` rounds after one that warms up, and return each one's median in seconds."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(repeats + 1):
        for mine, function in zip(times, functions, strict=True):
            start = time.perf_counter()
            function()
            if number:
                mine.append(max(time.perf_counter() - start, 1e-9))
    return [statistics.median(mine) for mine in times]
