"""Fold consecutive updates into one, so that a late joiner replays one update instead of many.

Differences add modulo 2^n, absolute words overwrite, fingerprints telescope. What cannot be said in one form without
the base's words (absolute words at some positions, differences at others) is refused unless the caller has the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.boxes import to_local
from deltacast.delta.errors import BaseError, InputError
from deltacast.delta.fingerprint import add, change_sums, format_sum
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered, unordered
from deltacast.delta.table import ParamMeta

__all__ = ["BaseWords", "fold"]

BaseWords: TypeAlias = Callable[[str], Words]
"""A parameter's name -> its flat words at the base of the first update (read, not kept)."""

I64: TypeAlias = NDArray[np.int64]
_Parts: TypeAlias = dict[int, SparseWeightPatch]


def fold(updates: Sequence[WeightUpdate], *, base: BaseWords | None = None) -> WeightUpdate:
    """Return the one update that does what consecutive updates do.

    `old_sum` stays exact where it can be known: with `base`, where the updates touch different positions, or where
    the earlier one holds absolute words. Elsewhere it is None, and a reader audits the parameter before it writes.
    Updates that shall fold without their base are best encoded with `values="delta"`: `auto` may send a parameter's
    differences in one update and its words in the next.

    Args:
        updates: in version order, of one run; each one's base is the target before it. At least one.
        base: the words of the first update's base, where the caller holds them. Then every patch comes out absolute,
            with base values, and nothing has to be refused.

    Returns:
        The update from the first base to the last target. Parameters whose bits are known to end where they began
        are left out. Its patches may share arrays with the inputs.

    Raises:
        BaseError: the updates do not follow one another, naming the version or the parameter.
        InputError: no updates; or a mix of forms, or of cuts into parts, that cannot be folded without the base.
    """
    if not updates:
        raise InputError("there is nothing to fold")
    first, last = updates[0], updates[-1]
    for earlier, later in pairwise(updates):
        _check_chain(earlier, later)
    if len(updates) == 1:
        return first
    folder = _Folder(base, is_seed=first.is_seed)
    for update in updates:
        folder.take(update)
    return replace(
        last, base_version=first.base_version, base_digest=first.base_digest, patches=folder.sorted_patches(),
        removed=tuple(sorted(folder.removed, key=str.encode)),
    )  # fmt: skip


def _check_chain(earlier: WeightUpdate, later: WeightUpdate) -> None:
    if later.run_id != earlier.run_id:
        raise BaseError("updates of two runs", expected=earlier.run_id, found=later.run_id)
    if later.base_version != earlier.target_version or later.base_digest != earlier.target_digest:
        raise BaseError(
            "an update does not follow the one before it", version=later.target_version,
            expected=f"base {earlier.target_version} {earlier.target_digest}",
            found=f"base {later.base_version} {later.base_digest}",
        )  # fmt: skip
    if later.epoch < earlier.epoch:
        raise BaseError("an update of an older epoch", version=later.target_version, expected=earlier.epoch,
                        found=later.epoch)  # fmt: skip


@dataclass(slots=True)
class _Folder:
    """What is folded so far, always against the first update's base.

    Attributes:
        base: the base's words, if at hand.
        is_seed: whether there is no base.
        patches: name -> part -> patch.
        removed: names that the base has and the result has not.
        replaced: names that were removed on the way and came back.
        origins: what removed names were in the base, where that is known: their meta and fingerprint.
    """

    base: BaseWords | None
    is_seed: bool
    patches: dict[str, _Parts] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    origins: dict[str, tuple[ParamMeta, int | None]] = field(default_factory=dict)

    def take(self, update: WeightUpdate) -> None:
        """Fold one more update in."""
        for name in update.removed:
            self._remove(name)
        theirs: dict[str, _Parts] = {}
        for patch in update.patches:
            theirs.setdefault(patch.name, {})[patch.part] = patch
        for name, parts in theirs.items():
            mine = self.patches.setdefault(name, {})
            _check_cut(mine, parts, update)
            for part, patch in parts.items():
                earlier = mine.pop(part, None)
                folded = self._first(patch) if earlier is None else _combine(earlier, patch, self.base)
                if folded is not None:
                    mine[part] = folded

    def sorted_patches(self) -> tuple[SparseWeightPatch, ...]:
        """Return the patches by name and part."""
        names = sorted(self.patches, key=str.encode)
        return tuple(self.patches[name][part] for name in names for part in sorted(self.patches[name]))

    def _remove(self, name: str) -> None:
        patches = list(self.patches.pop(name, {}).values())
        is_new = any(patch.fingerprint_before is None and patch.base_meta is None for patch in patches)
        if self.is_seed or (is_new and name not in self.replaced):
            return  # the base does not have it
        self.removed.add(name)
        if len(patches) == 1 and name not in self.origins:
            self.origins[name] = (_base_meta(patches[0]), patches[0].fingerprint_before)

    def _first(self, patch: SparseWeightPatch) -> SparseWeightPatch | None:
        """Take the first patch of a parameter; one that was removed on the way replaces what the base has."""
        if patch.name in self.removed:
            self.removed.remove(patch.name)
            self.replaced.add(patch.name)
        if patch.name in self.replaced:
            if patch.indices is not None:
                raise BaseError("a sparse patch of a parameter that was removed", parameter=patch.name)
            meta, before = self.origins.get(patch.name, (patch.meta, None))
            if meta != patch.meta:
                return replace(patch, fingerprint_before=None, base_meta=meta)
            return replace(patch, fingerprint_before=before if patch.box is None else None, base_meta=None)
        if self.base is None or patch.indices is None:
            return patch
        return _resolved(patch, patch, self.base(patch.name))


def _check_cut(mine: _Parts, theirs: _Parts, update: WeightUpdate) -> None:
    """Check that a parameter is cut into the same parts as before."""
    boxes = {part: patch.box for part, patch in theirs.items()}
    if any(boxes.get(part, patch.box) != patch.box for part, patch in mine.items()) or (
        mine and None in {patch.box for patch in (*mine.values(), *theirs.values())} and mine.keys() != theirs.keys()
    ):
        name = next(iter(theirs.values())).name
        raise InputError("a parameter is cut into other parts than before", parameter=name,
                         version=update.target_version, hint="Fold up to the version before it.")  # fmt: skip


def _base_meta(patch: SparseWeightPatch) -> ParamMeta:
    return patch.base_meta or patch.meta


def _combine(first: SparseWeightPatch, then: SparseWeightPatch, base: BaseWords | None) -> SparseWeightPatch | None:
    """Return the patch that does what two do, one after the other; None if it does nothing."""
    if then.fingerprint_before is not None and then.fingerprint_before != first.fingerprint_after:
        raise BaseError("a patch was made for other bits than the one before it leaves", parameter=first.name,
                        expected=format_sum(first.fingerprint_after),
                        found=format_sum(then.fingerprint_before))  # fmt: skip
    if then.indices is None:
        origin = _base_meta(first)
        return replace(then, fingerprint_before=first.fingerprint_before,
                       base_meta=None if origin == then.meta else origin)  # fmt: skip
    if then.meta != first.meta:
        raise BaseError("a sparse patch has another dtype or shape than the one before it leaves", parameter=first.name,
                        expected=first.meta, found=then.meta)  # fmt: skip
    if first.indices is None:
        return _onto_dense(first, then)
    if base is not None:
        return _resolved(first, then, base(first.name))
    if "delta" in (first.form, then.form):
        left, right = _differences(first), _differences(then)
        if left is not None and right is not None:
            return _add_differences(left, right)
    return _overwrite(first, then)


def _onto_dense(first: SparseWeightPatch, then: SparseWeightPatch) -> SparseWeightPatch:
    assert then.indices is not None
    places = then.indices if then.box is None else to_local(then.indices, then.meta, then.box)
    values = first.values.copy()
    values[places] = _resolve(values[places], then)
    return replace(first, values=values, fingerprint_after=then.fingerprint_after)


def _resolve(old: Words, patch: SparseWeightPatch) -> Words:
    """Return the new words at a patch's positions, given the old ones."""
    if patch.form == "absolute":
        return patch.values
    signed = patch.meta.row.signed_magnitude
    return unordered(ordered(old, signed_magnitude=signed) + patch.values, signed_magnitude=signed)


def _differences(patch: SparseWeightPatch) -> SparseWeightPatch | None:
    """Return a sparse patch in delta form, or None where only its new words are known."""
    if patch.form == "delta":
        return patch
    if patch.base_values is None:
        return None
    signed = patch.meta.row.signed_magnitude
    values = ordered(patch.values, signed_magnitude=signed) - ordered(patch.base_values, signed_magnitude=signed)
    return _kept(replace(patch, form="delta", values=values), values != 0)


def _kept(patch: SparseWeightPatch, keep: NDArray[np.bool_]) -> SparseWeightPatch:
    """Return a patch of some of its positions; words that do not change add nothing to either sum alike."""
    if keep.all():
        return patch
    assert patch.indices is not None
    old = None if patch.base_values is None else patch.base_values[keep]
    indices, values = patch.indices[keep], patch.values[keep]
    old_sum = None if old is None else change_sums(indices, old, old)[0]
    return replace(patch, indices=indices, values=values, base_values=old, old_sum=old_sum)


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    """The positions of two patches together, and where each one's lie among them."""

    indices: I64
    first: I64
    then: I64
    shared: NDArray[np.bool_]

    @classmethod
    def of(cls, first: I64, then: I64) -> _Union:
        """Merge two ascending position arrays; `shared` says which of `then` are in `first` too."""
        place = np.searchsorted(first, then)
        shared = np.zeros(then.size, np.bool_)
        inside = place < first.size
        shared[inside] = first[place[inside]] == then[inside]
        fresh = ~shared
        # a position moves right by how many fresh ones come before it; what they leave free is the first's
        then_at = place + np.cumsum(fresh) - fresh
        is_first = np.ones(first.size + int(fresh.sum()), np.bool_)
        is_first[then_at[fresh]] = False
        first_at = np.flatnonzero(is_first)
        indices = np.empty(is_first.size, np.int64)
        indices[first_at] = first
        indices[then_at] = then
        return cls(indices, first_at, then_at, shared)


def _positions(patch: SparseWeightPatch) -> I64:
    assert patch.indices is not None
    return patch.indices


def _add_differences(first: SparseWeightPatch, then: SparseWeightPatch) -> SparseWeightPatch | None:
    union = _Union.of(_positions(first), _positions(then))
    values = np.zeros(union.indices.size, first.values.dtype)
    values[union.first] = first.values
    values[union.then] += then.values
    keep = values != 0
    if not keep.any():
        return None
    old = _base_values(first, then, union)
    folded = replace(
        first, indices=union.indices, values=values, base_values=old, fingerprint_after=then.fingerprint_after,
        old_sum=_old_sum(first, then, union) if old is None else change_sums(union.indices, old, old)[0],
    )  # fmt: skip
    return _kept(folded, keep)


def _overwrite(first: SparseWeightPatch, then: SparseWeightPatch) -> SparseWeightPatch | None:
    """Fold to absolute words; only with absolute words at every position that the other one does not settle."""
    union = _Union.of(_positions(first), _positions(then))
    settled = first.form == "absolute" or int(union.shared.sum()) == first.values.size
    settled &= then.form == "absolute" or bool(union.shared.all())
    if not settled:
        raise InputError(
            "absolute words and differences at different positions do not fold without the base",
            parameter=first.name, hint="Encode the updates in one form, or give the base.",
        )  # fmt: skip
    values = np.zeros(union.indices.size, first.values.dtype)
    values[union.first] = first.values
    values[union.then] = _resolve(values[union.then], then)
    folded = replace(
        first, indices=union.indices, values=values, form="absolute", base_values=_base_values(first, then, union),
        old_sum=_old_sum(first, then, union), fingerprint_after=then.fingerprint_after,
    )  # fmt: skip
    return folded if folded.base_values is None else _changed(folded)


def _base_values(first: SparseWeightPatch, then: SparseWeightPatch, union: _Union) -> Words | None:
    fresh = ~union.shared
    if first.base_values is None or (then.base_values is None and bool(fresh.any())):
        return None
    old = np.zeros(union.indices.size, first.values.dtype)
    if then.base_values is not None:
        old[union.then] = then.base_values
    old[union.first] = first.base_values
    return old


def _old_sum(first: SparseWeightPatch, then: SparseWeightPatch, union: _Union) -> int | None:
    """Return the base's sum over the union: what the second overwrote, less what the first had put there."""
    if first.old_sum is None or then.old_sum is None:
        return None
    if not union.shared.any():
        return add(first.old_sum, then.old_sum)
    left = first.values if first.form == "absolute" else None
    if first.base_values is not None:
        left = _resolve(first.base_values, first)
    if left is None:
        return None
    shared = union.then[union.shared]
    mine = np.zeros(union.indices.size, left.dtype)
    mine[union.first] = left
    put = change_sums(union.indices[shared], mine[shared], mine[shared])[0]
    return add(add(first.old_sum, then.old_sum), -put)


def _changed(patch: SparseWeightPatch) -> SparseWeightPatch | None:
    """Drop the positions of an absolute patch whose words are the base's; None if none is left."""
    keep = patch.values != patch.base_values
    return _kept(patch, keep) if keep.any() else None


def _resolved(first: SparseWeightPatch, then: SparseWeightPatch, base: Words) -> SparseWeightPatch | None:
    """Fold with the base at hand (a patch with itself stands for itself alone): absolute, exact, nothing idle."""
    union = _Union.of(_positions(first), _positions(then))
    old: Words = base[union.indices]
    values = old.copy()
    values[union.first] = _resolve(old[union.first], first)
    if then is not first:
        values[union.then] = _resolve(values[union.then], then)
    old_sum = change_sums(union.indices, old, old)[0]
    return _changed(
        replace(first, indices=union.indices, values=values, form="absolute", base_values=old, old_sum=old_sum,
                fingerprint_after=then.fingerprint_after)
    )  # fmt: skip
