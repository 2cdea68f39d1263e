"""Which encoding and which value form each patch gets: by counts, never by trial.

Exceptions are counted on the codes themselves, so the codes of all delta entries are made here, pooled per word
width over the whole update; the group encoder slices them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.codec import layout as lay
from deltacast.delta.codec.streams import difference_codes, zigzag
from deltacast.delta.errors import InputError, PatchError
from deltacast.delta.patch import SparseWeightPatch

__all__ = ["ValuesChoice", "choose_encodings", "choose_values", "join"]

ValuesChoice: TypeAlias = Literal["auto", "delta", "absolute"]
"""`auto` sends differences wherever they are known and smaller; the other two insist."""

I64: TypeAlias = NDArray[np.int64]

_BATCH: Final = 1 << 18
_BITMAP_ABOVE: Final = 5  # one in five: from 10 to 30 % both are as small, and up to here gaps decode faster


def choose_encodings(patches: Sequence[SparseWeightPatch], entries: NDArray[Any], positions: I64) -> None:
    """Set each entry's `num_changed` and `encoding`: a bitmap where more than one word in five changed.

    Raises:
        PatchError: more changes than words.
    """
    num = len(patches)
    counts = np.fromiter((patch.values.size for patch in patches), np.int64, num)
    dense = np.fromiter((patch.indices is None for patch in patches), np.bool_, num)
    over = counts > positions
    if over.any():
        patches[int(over.argmax())].check_indices()
        raise PatchError("more changes than words", parameter=patches[int(over.argmax())].name)
    entries["num_changed"] = counts
    sparse_or_bitmap = np.where((counts > positions // _BITMAP_ABOVE) & (counts > 0), lay.BITMAP, lay.SPARSE)
    entries["encoding"] = np.where(dense, lay.DENSE, sparse_or_bitmap)


def choose_values(
    patches: Sequence[SparseWeightPatch], entries: NDArray[Any], word_bytes: I64, values: ValuesChoice
) -> dict[int, Words]:
    """Set each entry's value form; return the pooled codes of the delta entries per word width."""
    if values not in ("auto", "delta", "absolute"):
        raise InputError("unknown value form", expected="auto, delta or absolute", found=repr(values))
    num = len(patches)
    is_delta = np.fromiter((patch.form == "delta" for patch in patches), np.bool_, num)
    dense = entries["encoding"] == lay.DENSE
    if values == "absolute":
        if is_delta.any():
            raise InputError("a delta patch has no absolute values", parameter=patches[int(is_delta.argmax())].name,
                             hint="Encode it with values='auto' or 'delta', or fold it onto its base.")  # fmt: skip
        entries["values"] = lay.ABSOLUTE
        return {}
    known = is_delta | np.fromiter((patch.base_values is not None for patch in patches), np.bool_, num)
    known &= ~dense
    if values == "delta" and not (known | dense).all():
        raise InputError("differences need the base's words", hint="Diff with base values, or send absolute.",
                         parameter=patches[int((known | dense).argmin())].name)  # fmt: skip
    entries["values"] = np.where(known, lay.DELTA, lay.ABSOLUTE)
    pools = {}
    for width in lay.WIDTHS:
        mine = np.flatnonzero(known & (word_bytes == width))
        if mine.size:
            pools[width] = _pool_codes(patches, entries, mine, may_change=~is_delta & (values == "auto"))
    return pools


def _pool_codes(
    patches: Sequence[SparseWeightPatch], entries: NDArray[Any], mine: I64, may_change: NDArray[np.bool_]
) -> Words:
    """Return the codes of the entries `mine` (one width), less those that are smaller as absolute words."""
    counts = entries["num_changed"][mine]
    ends = np.cumsum(counts)
    pool: Words = np.empty(int(ends[-1]), patches[mine[0]].values.dtype)
    batch: list[int] = []
    filled = size = 0
    for place, entry in enumerate(mine.tolist()):
        batch.append(entry)
        size += patches[entry].values.size
        if size >= _BATCH or place + 1 == mine.size:
            _fill_codes([patches[e] for e in batch], pool[filled : filled + size])
            filled, size, batch = filled + size, 0, []
    exceptions = np.flatnonzero(pool >= 15)
    per_entry = np.diff(np.searchsorted(exceptions, ends), prepend=0)
    unchanged = np.searchsorted(ends, exceptions[pool[exceptions] == np.iinfo(pool.dtype).max], side="right")
    # 4 bits per code and a word per exception, against a word of which about a quarter compresses away.
    bits = 8 * pool.itemsize
    absolute = 4 * counts + bits * per_entry > 3 * bits * counts // 4
    absolute[unchanged] = True
    stuck = np.zeros(mine.size, np.bool_)
    stuck[unchanged] = ~may_change[mine[unchanged]]
    if stuck.any():
        raise PatchError("a value did not change", parameter=patches[mine[int(stuck.argmax())]].name)
    absolute &= may_change[mine]
    entries["values"][mine[absolute]] = lay.ABSOLUTE
    return pool[np.repeat(~absolute, counts)] if absolute.any() else pool


def _fill_codes(patches: list[SparseWeightPatch], out: Words) -> None:
    if all(patch.form == "delta" for patch in patches):
        zigzag(join([patch.values for patch in patches]), out)
        return
    if any(patch.form == "delta" for patch in patches):
        start = 0
        for patch in patches:
            _fill_codes([patch], out[start : start + patch.values.size])
            start += patch.values.size
        return
    new = join([patch.values for patch in patches])
    old = join([patch.base_values for patch in patches if patch.base_values is not None])
    flags = [patch.meta.row.signed_magnitude for patch in patches]
    signed: NDArray[np.bool_] | bool = flags[0]
    if any(flag != flags[0] for flag in flags):
        signed = np.repeat(np.array(flags), [patch.values.size for patch in patches])
    difference_codes(new, old.view(new.dtype), out, signed_magnitude=signed)


def join(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays end to end; a single one as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
