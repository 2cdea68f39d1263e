"""Apply an update to one rank's pieces: proven by all ranks together before the first write, or not at all.

States of a `ShardTransaction`, as those of a `Transaction`::

    stage() --> STAGED --prove--> STAGED --write()--> WRITTEN --commit()--> COMMITTED
       |           |                                     |
       |           +----------------rollback()-----------+---rollback()--> ROLLED_BACK
       +--> error: nothing was written

Sparse changes are proven together: each rank counts the old and the new words at the changed positions that it holds,
and over one cover of the parameter these sums must lead from its fingerprint to the one that the update promises. A
parameter that is sent whole is proven alone: its fingerprint is that of the words at hand, whatever was there before.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.apply import TransactionState, check_base, take_back
from deltacast.delta.bits import Words
from deltacast.delta.errors import CorruptionError, InputError, PatchError, TableError, VerificationError
from deltacast.delta.fingerprint import add, change_sums, format_sum, words_fingerprint
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered, unordered
from deltacast.delta.pieces import Piece
from deltacast.delta.shard_cover import Cover
from deltacast.delta.shards import Shard, ShardState
from deltacast.delta.state import Damage
from deltacast.delta.threads import in_order

__all__ = ["ShardTransaction"]

U64: TypeAlias = NDArray[np.uint64]
I64: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class _Write:
    """A pending write into one piece.

    Attributes:
        positions: int64 in the piece; None: all of it.
        sums: of old and of new words at these positions of the parameter; none where it is sent whole.
        fingerprint_change: of the piece: from its running fingerprint, or from 0 where all of it is written.
    """

    shard: Shard
    positions: I64 | None
    new: Words
    old: Words | None
    sums: tuple[int, int] | None
    fingerprint_change: int


class ShardTransaction:
    """One update on its way into one rank's pieces. Use `stage`, a `prove_...`, `write`, then `commit` or `rollback`.

    Attributes:
        sums: uint64 [pieces of `places`, 2]: old and new words at this rank's changed positions; for the other ranks.
        state: where it stands.
    """

    def __init__(self, state: ShardState, update: WeightUpdate, writes: list[_Write], *, undo: bool) -> None:
        self._owner, self._update, self._writes, self._undo = state, update, writes, undo
        self._sparse = [patch for patch in _by_place(state, update) if not patch.is_dense]
        self._places = np.array([state.table.index(patch.name) for patch in self._sparse], np.int64)
        self.sums: U64 = np.array([w.sums for w in writes if w.sums is not None], np.uint64).reshape(-1, 2)
        self._after: U64 | None = None
        self._before = state.label()
        self._num_written = 0
        self.state = TransactionState.STAGED

    @classmethod
    def stage(cls, state: ShardState, update: WeightUpdate, *, undo: bool = True) -> ShardTransaction:
        """Check what one rank can check, and read what it is about to overwrite. Writes nothing.

        Args:
            state: what this rank holds, at the update's base.
            update: patches of whole parameters, in either form; the same on every rank.
            undo: keep what is overwritten by parameters that are sent whole; else a rollback leaves no version.

        Raises:
            TableError, PatchError, BaseError, InputError: it does not fit this state.
            VerificationError: a parameter that is sent whole does not have the fingerprint that it promises, or the
                update was made against other bits.
        """
        check_base(state, update)
        update.check_covers(state.table)
        staged = in_order(lambda patch: _stage_patch(state, update, patch), _by_place(state, update), state.threads)
        return cls(state, update, [write for writes in staged for write in writes], undo=undo)

    def prove_together(self, cover: Cover, sums: Sequence[U64]) -> None:
        """Prove the result by what all ranks found at the changed positions.

        Args:
            cover: of the server's ranks.
            sums: each rank's `sums`, by rank.

        Raises:
            CorruptionError: this rank's weights are damaged, or two ranks hold other bits of the same piece.
            VerificationError: the changes do not lead to what the update promises.
            InputError: a rank's sums are of other pieces than it holds.
        """
        totals = cover.add_up(self._places, sums)
        after = self._whole_after()
        for patch, place, (old, new) in zip(self._sparse, self._places.tolist(), totals.tolist(), strict=True):
            if patch.old_sum is not None and old != patch.old_sum:
                raise self._wrong_base(patch, old)
            after[place] = result = add(int(self._owner.fingerprints[place]), new - old)
            if result != patch.fingerprint_after:
                raise _broken_promise(self._update, patch, result)
        self._require_target(after)

    def prove_alone(self) -> None:
        """Prove the result of an update that sends whole parameters only.

        Raises:
            PatchError: it has sparse patches.
            VerificationError: it does not lead to the digest that it promises.
        """
        if self._sparse:
            raise PatchError("what one rank is to prove alone must be sent whole", parameter=self._sparse[0].name)
        self._require_target(self._whole_after())

    def write(self) -> None:
        """Write all staged words, read them back, and move the state.

        Raises:
            VerificationError: memory does not hold what was written. Everything was rolled back first; so it is for
                any other exception.
        """
        assert self.state is TransactionState.STAGED, self.state
        assert self._after is not None, "not proven"
        self.state = TransactionState.WRITTEN
        pieces = self._owner.piece_fingerprints
        try:
            for write in self._writes:
                if write.old is None and self._undo:
                    write.old = np.array(write.shard.memory.read_all(), copy=True)
                self._num_written += 1
                _put(write, write.new)
                before = 0 if write.positions is None else int(pieces[write.shard.slot])
                pieces[write.shard.slot] = add(before, write.fingerprint_change)
            for write in self._writes:
                _read_back(write)
            self._owner.move(self._update.target_version, self._after, pieces)
        except BaseException:
            self.rollback()
            raise

    def commit(self) -> None:
        """Drop the undo log; the state is at the target version for good."""
        assert self.state is TransactionState.WRITTEN, self.state
        self._writes.clear()
        self.state = TransactionState.COMMITTED

    def rollback(self) -> None:
        """Restore overwritten words, fingerprints and version together. Audit afterwards; may be called again.

        Where words were overwritten without undo, or cannot be put back, the state is left without a version.
        """
        if self.state not in {TransactionState.STAGED, TransactionState.WRITTEN}:
            return
        written = self._writes[: self._num_written]
        self.state = TransactionState.ROLLED_BACK
        take_back(self._owner, self._before, written, _put)
        self._writes.clear()

    def _whole_after(self) -> U64:
        """Return the fingerprints after the update, of what it sends whole or leaves as it is."""
        after = self._owner.fingerprints.copy()
        for patch in self._update.patches:
            if patch.is_dense:
                after[self._owner.table.index(patch.name)] = patch.fingerprint_after
        return after

    def _require_target(self, after: U64) -> None:
        digest = self._owner.table.state_digest(after)
        if digest != self._update.target_digest:
            raise VerificationError("the update does not give the digest it promises",
                                    version=self._update.target_version, expected=self._update.target_digest,
                                    found=digest)  # fmt: skip
        self._after = after

    def _wrong_base(self, patch: SparseWeightPatch, found: int) -> CorruptionError | VerificationError:
        damage = self._owner.audit([patch.name])
        if damage:
            return _damaged(damage[0])
        return VerificationError("some rank of this server holds other bits than the update was made against",
                                 parameter=patch.name, expected=format_sum(patch.old_sum or 0),
                                 found=format_sum(found))  # fmt: skip


def _by_place(state: ShardState, update: WeightUpdate) -> list[SparseWeightPatch]:
    """Return patches in table order: that of every rank's sums."""
    return [patch for _, patch in sorted(((state.table.index(patch.name), patch) for patch in update.patches),
                                         key=operator.itemgetter(0))]  # fmt: skip


def _stage_patch(state: ShardState, update: WeightUpdate, patch: SparseWeightPatch) -> list[_Write]:
    place = state.table.index(patch.name)
    _check_patch(state, place, patch)
    shards = state.of(place)
    if patch.indices is None:
        found = words_fingerprint(patch.values)
        if found != patch.fingerprint_after:
            raise _broken_promise(update, patch, found)
        return [_whole_write(shard, shard.cut(patch.values)) for shard in shards]
    if patch.old_sum is None and (damage := state.audit([patch.name])):  # nothing else says what was there
        raise _damaged(damage[0])
    return [_sparse_write(shard, patch, patch.indices) for shard in shards]


def _check_patch(state: ShardState, place: int, patch: SparseWeightPatch) -> None:
    meta, running = state.table.metas[place], int(state.fingerprints[place])
    if patch.meta != meta:
        raise TableError("a patch has another dtype or shape", parameter=patch.name,
                         expected=f"{meta.dtype}{list(meta.shape)}",
                         found=f"{patch.meta.dtype}{list(patch.meta.shape)}")  # fmt: skip
    if patch.box is not None or patch.part:
        raise InputError("parts of a parameter cannot be written into pieces", parameter=patch.name, found=patch.box)
    patch.check_indices()
    if patch.fingerprint_before not in {None, running}:
        raise VerificationError("the update was made against other bits", parameter=patch.name,
                                expected=format_sum(running),
                                found=format_sum(patch.fingerprint_before or 0))  # fmt: skip


def _damaged(damage: Damage) -> CorruptionError:
    return CorruptionError("weights are damaged", parameter=damage.parameter, expected=format_sum(damage.expected),
                           found=format_sum(damage.found),
                           hint="Repair it: have the trainer send this parameter whole.")  # fmt: skip


def _whole_write(shard: Shard, new: Words) -> _Write:
    return _Write(shard, None, new, None, None, words_fingerprint(new))


def _sparse_write(shard: Shard, patch: SparseWeightPatch, indices: I64) -> _Write:
    which, positions = _located(shard.piece, indices)
    old = shard.memory.read(positions)
    new = patch.values[which]
    if patch.form == "delta":
        signed = patch.meta.row.signed_magnitude
        new = unordered(ordered(old, signed_magnitude=signed) + new, signed_magnitude=signed)
    old_here, new_here = change_sums(positions, old, new)  # the same words, by their places in the piece
    return _Write(shard, positions, new, old, change_sums(indices[which], old, new), new_here - old_here)


def _located(piece: Piece, indices: I64) -> tuple[I64, I64]:
    """Return which of some ascending positions of the parameter lie in a piece, and where there."""
    here = piece.here
    if not here.numel:
        return indices[:0], indices[:0]
    first, end = np.searchsorted(indices, [here.offset, here.last + 1])
    located = piece.locate(indices[first:end])
    return located.which + first, located.positions


def _broken_promise(update: WeightUpdate, patch: SparseWeightPatch, found: int) -> VerificationError:
    return VerificationError("the patch does not give the fingerprint it promises", parameter=patch.name,
                             version=update.target_version, expected=format_sum(patch.fingerprint_after),
                             found=format_sum(found))  # fmt: skip


def _put(write: _Write, words: Words) -> None:
    if write.positions is None:
        write.shard.memory.write_all(words)
    else:
        write.shard.memory.write(write.positions, words)


def _read_back(write: _Write) -> None:
    memory = write.shard.memory
    found = memory.read_all() if write.positions is None else memory.read(write.positions)
    if not np.array_equal(found, write.new):
        raise VerificationError("memory does not hold what was written", parameter=write.shard.piece.runtime,
                                hint="Do two parameters share storage? Declare them as aliases.")  # fmt: skip
