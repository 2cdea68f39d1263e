"""Apply an update to live weights: all of it, proven, or nothing.

States of a `Transaction`::

    stage() --> STAGED --write()--> WRITTEN --commit()--> COMMITTED
       |           |                   |
       |           +----discard()------+---rollback()--> ROLLED_BACK
       +--> error: nothing was written

`stage` does all the checking: policy, base, the bits about to be overwritten (`old_sum`), each parameter's
resulting fingerprint and the resulting state digest, all computed from the staged words before any write. What can
still go wrong after it is the writing itself, which `write` reads back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.boxes import check_box, check_disjoint, to_global, to_local
from deltacast.delta.errors import BaseError, CorruptionError, InputError, TableError, VerificationError
from deltacast.delta.fingerprint import add, change_sums, format_sum, words_fingerprint
from deltacast.delta.memory import WordMemory
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered, unordered
from deltacast.delta.state import StateLabel, WeightState
from deltacast.delta.threads import in_order

__all__ = ["Transaction", "TransactionState", "apply_portions", "apply_update", "check_base", "take_back"]


class TransactionState(Enum):
    """Where a transaction stands."""

    STAGED = "staged"
    WRITTEN = "written"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


@dataclass(slots=True)
class _Write:
    """One parameter part's pending write: positions (None: every word), the new words, and the old ones.

    `fingerprint_change` counts from 0 where the update sends every word of the parameter (whatever was there before),
    else from the parameter's running fingerprint.
    """

    place: int
    memory: WordMemory
    positions: NDArray[np.int64] | None
    new: Words
    old: Words | None
    fingerprint_change: int


def check_base(state: WeightState, update: WeightUpdate) -> None:
    """Raise unless an update was made for exactly this state.

    Raises:
        TableError: another parameter table, or one that the update changes.
        BaseError: another version or digest (skipped version, replay, other lineage).
    """
    state.require_table(update.table_digest)
    if update.removed or any(patch.base_meta is not None for patch in update.patches):
        raise TableError(
            "this update changes the parameter table, which live weights cannot do",
            version=update.target_version,
            hint="Load a new checkpoint, or apply it to files.",
        )
    if update.is_seed:
        return
    if update.base_version != state.version:
        raise BaseError(
            "wrong base version",
            version=update.target_version,
            expected=f"base {state.version}",
            found=f"base {update.base_version}",
        )
    if update.base_digest != state.digest:
        raise BaseError(
            "wrong base digest", version=update.target_version, expected=state.digest, found=update.base_digest
        )


class Transaction:
    """One update on its way into one state. Use `Transaction.stage`, then `write`, then `commit` or `rollback`."""

    def __init__(
        self, state: WeightState, update: WeightUpdate, writes: list[_Write], after: NDArray[np.uint64], *, undo: bool
    ) -> None:
        self._owner = state
        self._undo = undo
        self._writes = writes
        self._after = after
        self._before = state.label()
        self._num_written = 0
        self.update = update
        self.state = TransactionState.STAGED

    @classmethod
    def stage(
        cls, state: WeightState, update: WeightUpdate, *, undo: bool = True, undo_budget_bytes: int | None = None
    ) -> Transaction:
        """Check everything and compute the result, writing nothing.

        Args:
            state: the weights, which must be at the update's base.
            update: patches in either form.
            undo: keep what dense patches overwrite. Without it (seeds: twice the model's memory) a rollback after
                a dense write leaves the state without a version.
            undo_budget_bytes: refuse if the overwritten words need more; None for no bound.

        Raises:
            TableError, PatchError, BaseError: it does not fit this state.
            CorruptionError: the weights at hand are damaged; `parameter` names the first. Nothing was written.
            VerificationError: applying it would not give the digest that it promises.
            InputError: undo would exceed its budget.
        """
        check_base(state, update)
        _check_patches(state, update)
        update.check_covers(state.table)
        undo_bytes = sum(patch.values.nbytes for patch in update.patches if undo or not _is_whole(patch))
        if undo_budget_bytes is not None and undo_bytes > undo_budget_bytes:
            raise InputError(
                "undo would exceed its budget",
                version=update.target_version,
                expected=f"at most {undo_budget_bytes} bytes",
                found=f"{undo_bytes} bytes",
            )
        whole = update.sent_whole()
        writes = list(in_order(lambda patch: _stage_patch(state, update, patch, whole), update.patches, state.threads))
        after = _resulting_fingerprints(state, update, writes, whole)
        return cls(state, update, writes, after, undo=undo)

    @property
    def undo_bytes(self) -> int:
        """Bytes of overwritten words kept until the decision."""
        return sum(write.new.nbytes for write in self._writes if self._undo or write.positions is not None)

    @property
    def target_digest(self) -> str:
        """The state digest that the staged words give; equals the update's."""
        return self._owner.table.state_digest(self._after)

    def write(self) -> None:
        """Write all staged words, read them back, and move the running fingerprints and version.

        Raises:
            BaseError: the state moved since this was staged; nothing was written.
            VerificationError: memory does not hold what was written (two parameters share it, or it is faulty).
                Everything was rolled back first; so it is for any other exception.
        """
        assert self.state is TransactionState.STAGED, self.state
        self._require_unmoved()
        self.state = TransactionState.WRITTEN
        try:
            for write in self._writes:
                if write.old is None and self._undo:
                    write.old = np.array(write.memory.read_all(), copy=True)
                self._num_written += 1
                _put(write, write.new)
            for write in self._writes:
                _read_back(write)
            self._owner.fingerprints[:] = self._after
            self._owner.version = self.update.target_version
        except BaseException:
            self.rollback()
            raise

    def commit(self) -> None:
        """Drop the undo log; the state is at the target version for good."""
        assert self.state is TransactionState.WRITTEN, self.state
        self._writes.clear()
        self.state = TransactionState.COMMITTED

    def rollback(self) -> None:
        """Restore overwritten words, running fingerprints and version together. Audit afterwards.

        Where dense words were written without undo, the state is left without a version, its fingerprints rescanned.
        So it is, but for the rescan, if memory cannot be written: half an update must not pass for a version.
        """
        assert self.state in {TransactionState.STAGED, TransactionState.WRITTEN}, self.state
        written = self._writes[: self._num_written]
        self.state = TransactionState.ROLLED_BACK
        take_back(self._owner, self._before, written, _put)
        self._num_written = 0
        self._writes.clear()

    def _require_unmoved(self) -> None:
        before = self._before
        if self._owner.version != before.version or not np.array_equal(self._owner.fingerprints, before.fingerprints):
            raise BaseError(
                "the weights moved since this update was staged",
                version=self.update.target_version,
                expected=f"base {before.version}",
                found=f"base {self._owner.version}",
                hint="Stage it again.",
            )


class _Undoable(Protocol):
    """A write, with the words that it overwrote; None if they were not kept."""

    old: Words | None


_W = TypeVar("_W", bound=_Undoable)


def take_back(state: WeightState, before: StateLabel, written: Sequence[_W], put: Callable[[_W, Words], None]) -> None:
    """Restore overwritten words, and what the state said before; for transactions.

    Args:
        state: whose words they are. Without a version afterwards if some were not kept, or cannot be put back.
        before: what it said before the first write.
        written: in the order of writing.
        put: writes words where a write went.

    Raises:
        Exception: what `put` raises.
    """
    try:
        for write in reversed(written):
            if write.old is not None:
                put(write, write.old)
    except BaseException:
        state.disown()
        raise
    state.restore(before)
    if any(write.old is None for write in written):
        state.forget()


def apply_update(state: WeightState, update: WeightUpdate) -> None:
    """Apply and commit an update on one state, all or nothing.

    Raises:
        As `Transaction.stage` and `Transaction.write`; the state is then what it was.
    """
    transaction = Transaction.stage(state, update)
    transaction.write()
    transaction.commit()


def apply_portions(state: WeightState, update: WeightUpdate, portions: Iterable[Sequence[SparseWeightPatch]]) -> None:
    """Apply an update whose patches come some at a time, each lot checked, written and let go before the next.

    For weights that nobody sees before they are proven: this is not all or nothing.

    Args:
        state: the weights, which must be at the update's base.
        update: without its patches (`deltacast.delta.codec.decode_portions`); no seed.
        portions: the patches; parts of one parameter need not come together.

    Raises:
        InputError: a seed; nothing was written.
        As `Transaction.stage` and `write`, and whatever `portions` raises: the state has no version then, and words of
            both versions. Throw them away.
    """
    if update.is_seed:
        raise InputError("a seed is not applied some patches at a time", version=update.target_version)
    check_base(state, update)
    after = state.fingerprints.copy()
    try:
        for patches in portions:
            _write_portion(state, replace(update, patches=tuple(patches)), after)
            del patches  # before the next ones are decoded
        _require_target(state, update, after)
    except BaseException:
        state.disown()
        raise
    state.advance(update.target_version, after)


def _write_portion(state: WeightState, portion: WeightUpdate, after: NDArray[np.uint64]) -> None:
    """Check and write some of an update's patches, and move the fingerprints `after`."""
    check_base(state, portion)
    _check_patches(state, portion)
    whole = portion.sent_whole()
    writes = list(in_order(lambda patch: _stage_patch(state, portion, patch, whole), portion.patches, state.threads))
    _move(state, after, writes, whole)
    for write in writes:
        _put(write, write.new)
    for write in writes:
        _read_back(write)


def _is_whole(patch: SparseWeightPatch) -> bool:
    """Whether a patch is written without positions, so that what it overwrites is read only for undo."""
    return patch.indices is None and patch.box is None


def _check_patches(state: WeightState, update: WeightUpdate) -> None:
    """Check what each patch says it is about, and that the parts of a parameter are disjoint."""
    by_name = sorted(update.patches, key=lambda patch: (patch.name, patch.part))
    for name, group in groupby(by_name, key=lambda patch: patch.name):
        parts = list(group)
        meta = state.table[name]
        for patch in parts:
            if patch.meta != meta:
                raise TableError(
                    "a patch has another dtype or shape",
                    parameter=name,
                    expected=f"{meta.dtype}{list(meta.shape)}",
                    found=f"{patch.meta.dtype}{list(patch.meta.shape)}",
                )
            if patch.box is not None:
                check_box(meta, patch.box)
        check_disjoint(name, [patch.box for patch in parts])


def _stage_patch(state: WeightState, update: WeightUpdate, patch: SparseWeightPatch, whole: frozenset[str]) -> _Write:
    place = state.table.index(patch.name)
    memory, running = state.memories[place], int(state.fingerprints[place])
    _check_positions(patch)
    if patch.box is None and patch.fingerprint_before not in {None, running}:
        raise _other_bits(patch, running, int(patch.fingerprint_before or 0))
    if _is_whole(patch):
        change = words_fingerprint(patch.values)
        _check_result(update, patch, change)
        return _Write(place, memory, None, patch.values, None, change)
    positions = _positions(patch)
    old = memory.read(positions)
    new = _new_words(patch, old)
    old_sum, new_sum = change_sums(positions, old, new)
    if patch.is_dense:
        _check_result(update, patch, new_sum)
    else:
        _check_overwritten(state, patch, place, old_sum)
        before = running if patch.box is None else patch.fingerprint_before
        if before is not None:
            _check_result(update, patch, add(before, new_sum - old_sum))
    change = new_sum if patch.name in whole else new_sum - old_sum
    return _Write(place, memory, positions, new, old, add(0, change))


def _check_positions(patch: SparseWeightPatch) -> None:
    patch.check_indices()
    if patch.indices is not None and patch.box is not None:
        to_local(patch.indices, patch.meta, patch.box)  # raises for a position outside the box


def _new_words(patch: SparseWeightPatch, old: Words) -> Words:
    if patch.form == "absolute":
        return patch.values
    signed = patch.meta.row.signed_magnitude
    return unordered(ordered(old, signed_magnitude=signed) + patch.values, signed_magnitude=signed)


def _positions(patch: SparseWeightPatch) -> NDArray[np.int64]:
    if patch.indices is not None:
        return patch.indices
    assert patch.box is not None
    return to_global(np.arange(patch.num_box_words, dtype=np.int64), patch.meta, patch.box)


def _check_overwritten(state: WeightState, patch: SparseWeightPatch, place: int, old_sum: int) -> None:
    """Check the bits about to be overwritten: an incremental verdict proves nothing about a damaged base."""
    if patch.old_sum == old_sum:
        return
    running = int(state.fingerprints[place])
    found = state.memories[place].fingerprint()
    if found != running:
        raise CorruptionError(
            "weights are damaged",
            parameter=patch.name,
            expected=format_sum(running),
            found=format_sum(found),
            hint="Repair it: have the trainer send this parameter whole.",
        )
    if patch.old_sum is not None:
        raise _other_bits(patch, patch.old_sum, old_sum)


def _other_bits(patch: SparseWeightPatch, expected: int, found: int) -> VerificationError:
    return VerificationError(
        "the update was made against other bits",
        parameter=patch.name,
        expected=format_sum(expected),
        found=format_sum(found),
    )


def _check_result(update: WeightUpdate, patch: SparseWeightPatch, found: int) -> None:
    if found != patch.fingerprint_after:
        raise VerificationError(
            "the patch does not give the fingerprint it promises",
            parameter=patch.name,
            version=update.target_version,
            expected=format_sum(patch.fingerprint_after),
            found=format_sum(found),
        )


def _resulting_fingerprints(
    state: WeightState, update: WeightUpdate, writes: Sequence[_Write], whole: frozenset[str]
) -> NDArray[np.uint64]:
    after = state.fingerprints.copy()
    _move(state, after, writes, whole)
    _require_target(state, update, after)
    return after


def _move(state: WeightState, after: NDArray[np.uint64], writes: Sequence[_Write], whole: frozenset[str]) -> None:
    """Move fingerprints, uint64 [parameters], as writes will move the words."""
    for name in whole:
        after[state.table.index(name)] = 0
    for write in writes:
        after[write.place] = add(int(after[write.place]), write.fingerprint_change)


def _require_target(state: WeightState, update: WeightUpdate, after: NDArray[np.uint64]) -> None:
    digest = state.table.state_digest(after)
    if digest != update.target_digest:
        raise VerificationError(
            "the update does not give the digest it promises",
            version=update.target_version,
            expected=update.target_digest,
            found=digest,
        )


def _put(write: _Write, words: Words) -> None:
    if write.positions is None:
        write.memory.write_all(words)
    else:
        write.memory.write(write.positions, words)


def _read_back(write: _Write) -> None:
    found = write.memory.read_all() if write.positions is None else write.memory.read(write.positions)
    if not np.array_equal(found, write.new):
        raise VerificationError(
            "memory does not hold what was written",
            parameter=write.memory.name,
            hint="Do two parameters share storage? Declare them as aliases.",
        )
