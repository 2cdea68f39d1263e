"""Entropy floors: how few bits per changed word a codec could need, under two stated models.

Unconditional: a parameter with n words of which k changed costs `n * h(k / n)` bits for the positions (h is the
binary entropy), and the ordered differences cost their order-0 entropy, pooled over the update. Given the exponent:
the same with each parameter's words split by the exponent that they have in the baseline, and the differences
pooled per exponent. Neither counts names, shapes, checksums or the tables of the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.patch import ordered
from deltacast.delta.table import ParamMeta

__all__ = ["Change", "Floors", "floors"]

_FRACTION_BITS: Final = {
    "bfloat16": 7, "float16": 10, "float32": 23, "float64": 52, "float8_e4m3fn": 3, "float8_e5m2": 2,
    "float8_e4m3fnuz": 3, "float8_e5m2fnuz": 2, "complex32": 10, "complex64": 23, "complex128": 52,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One parameter's change: its words before, the positions that change, and the words they change to."""

    meta: ParamMeta
    old: Words
    indices: NDArray[np.int64]
    new: Words


@dataclass(frozen=True, slots=True)
class Floors:
    """Bits that an update needs at least, in total.

    Attributes:
        unconditional: knowing nothing but each parameter's number of changes.
        given_exponent: knowing the baseline's exponents too.
    """

    unconditional: float
    given_exponent: float


def position_bits(num_words: int, num_changed: int) -> float:
    """Return `n * h(k / n)`, the bits that tell which k of n words changed."""
    if num_changed in {0, num_words}:
        return 0.0
    share = num_changed / num_words
    return -num_words * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def value_bits(values: NDArray[Any]) -> float:
    """Return the order-0 entropy of an array, times its size, in bits."""
    if not values.size:
        return 0.0
    _, counts = np.unique(values, return_counts=True)
    return float(-(counts * np.log2(counts / values.size)).sum())


def _exponents(words: Words, meta: ParamMeta) -> NDArray[np.int64]:
    """Return each word's exponent field; one class for dtypes that have none."""
    fraction = _FRACTION_BITS.get(meta.dtype)
    if fraction is None:
        return np.zeros(words.size, np.int64)
    without_sign = words & words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
    exponents: NDArray[np.int64] = (without_sign >> words.dtype.type(fraction)).astype(np.int64)
    return exponents


def floors(changes: Iterable[Change]) -> Floors:
    """Return both floors of one update.

    Args:
        changes: every parameter that changed; those that did not cost nothing under either model.
    """
    plain = split = 0.0
    differences: list[NDArray[np.int64]] = []
    classes: list[NDArray[np.int64]] = []
    for change in changes:
        meta, at = change.meta, change.indices
        plain += position_bits(change.old.size, at.size)
        exponents = _exponents(change.old, meta)
        present = np.bincount(exponents)
        changed = np.bincount(exponents[at], minlength=present.size)
        split += sum(position_bits(n, k) for n, k in zip(present.tolist(), changed.tolist(), strict=True) if n)
        signed = meta.row.signed_magnitude
        step = ordered(change.new, signed_magnitude=signed) - ordered(change.old[at], signed_magnitude=signed)
        differences.append(step.view(f"<i{step.itemsize}").astype(np.int64))
        classes.append(exponents[at] + (meta.row.word_bytes << 32))
    if not differences:
        return Floors(0.0, 0.0)
    pooled, group = np.concatenate(differences), np.concatenate(classes)
    plain += value_bits(pooled)
    split += sum(value_bits(pooled[group == one]) for one in np.unique(group))
    return Floors(plain, split)
