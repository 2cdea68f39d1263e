"""Patches turned into the delta form by plain integers, word by word: a slow twin of what the codec does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from tensor_bytes import SIGN_AND_MAGNITUDE


def _rank(word: int, bits: int) -> int:
    half = 1 << (bits - 1)
    return word if word < half else half + (half - 1 - (word - half))


def as_delta(patch: SparseWeightPatch) -> SparseWeightPatch:
    """The same change as differences of ordered words; dense patches stay absolute."""
    if patch.indices is None or patch.base_values is None:
        return patch
    bits = patch.values.itemsize * 8
    pairs = zip(patch.base_values.tolist(), patch.values.tolist(), strict=True)
    if patch.meta.dtype in SIGN_AND_MAGNITUDE:
        steps = [(_rank(new, bits) - _rank(old, bits)) % (1 << bits) for old, new in pairs]
    else:
        steps = [(new - old) % (1 << bits) for old, new in pairs]
    return replace(patch, form="delta", values=np.array(steps, patch.values.dtype), base_values=None)


def update_as_delta(update: WeightUpdate) -> WeightUpdate:
    """All patches of an update in the delta form."""
    return replace(update, patches=tuple(as_delta(patch) for patch in update.patches))
