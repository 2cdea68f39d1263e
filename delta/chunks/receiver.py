"""The worker's side of a streamed round: chunks are checked, written with undo, and proven against the sender's sums.

Until `finish` has proven them the words written are nobody's version; `rollback` restores what was there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deltacast.delta.chunks.device import Lane, SumBuffer
from deltacast.delta.chunks.headers import Begin, Sums
from deltacast.delta.chunks.plan import ChunkPlan
from deltacast.delta.chunks.proof import require_sums
from deltacast.delta.errors import BaseError, CorruptionError, FormatError, InputError, VerificationError
from deltacast.delta.kernels import (
    NO_FAULT,
    Arena,
    ParamGroup,
    RawChunk,
    UndoLog,
    apply_group,
    undo_group,
)
from deltacast.delta.state import WeightState

__all__ = ["ChunkReceiver", "device_of"]


class ChunkReceiver:
    """Applies streamed rounds to live weights by the kernels, in buffers that are made once and used again.

    One thread at a time uses it, but that `take` may run beside `apply` of an earlier chunk. A round is `begin`, then
    for each chunk in order `take` and `apply`, then `finish`, then `commit` or `rollback`.

    Args:
        state: the weights, contiguous, on one device.
        begin: the header of the first round that it is for; `fits` says whether another one can use it too.
        undo_budget_bytes: refuse if undo may take more; None for no bound.

    Attributes:
        plan: groups and chunks.
        groups: the plan's groups over the weights.
        nbytes: memory on the weights' device that is kept between rounds.

    Raises:
        InputError: undo could exceed its budget, or the weights do not lie as above. Nothing was allocated.
        FormatError: the header's capacities do not fit its plan.
    """

    def __init__(self, state: WeightState, begin: Begin, *, undo_budget_bytes: int | None = None) -> None:
        self._state, self._begin = state, begin
        self.plan = ChunkPlan(state.table, begin.order.tolist(), begin.chunk_bytes)
        if len(begin.capacities) != len(self.plan.members):
            found = len(begin.capacities)
            raise FormatError("a round's begin is about other groups", expected=len(self.plan.members), found=found)
        self._places = [np.array(members) for members in self.plan.members]
        self.device = device_of(state)
        self._check_budget(undo_budget_bytes)
        self.groups = [self._group(group) for group in range(len(self.plan.members))]
        chunks = [self.plan.num_chunks(group) for group in range(len(self.groups))]
        sizes = zip(self.groups, begin.capacities, chunks, strict=True)
        self._arenas = [Arena(group, capacity, count) for group, capacity, count in sizes]
        self._undo = [UndoLog(arena) for arena in self._arenas]
        self._sums = SumBuffer(2, [group.num_params for group in self.groups], self.device)
        self._applying = Lane(self.device)
        self._taken: list[RawChunk] = []
        self._compile()

    def fits(self, begin: Begin) -> bool:
        """Say whether a round can use these buffers."""
        mine = self._begin
        same = (mine.chunk_bytes, mine.capacities) == (begin.chunk_bytes, begin.capacities)
        return same and np.array_equal(mine.order, begin.order)

    @property
    def nbytes(self) -> int:
        """Arenas, undo logs, tables and keys."""
        kept = [arena.nbytes + undo.nbytes for arena, undo in zip(self._arenas, self._undo, strict=True)]
        return sum(kept) + sum(group.nbytes + group.keys.nbytes for group in self.groups)

    @property
    def capacities(self) -> tuple[int, ...]:
        """The most changes of a round, of each group."""
        return self._begin.capacities

    @property
    def num_taken(self) -> int:
        """Chunks of this round so far."""
        return len(self._taken)

    def begin(self, begin: Begin) -> None:
        """Start a round, forgetting the last.

        Raises:
            BaseError: it starts from another version or digest than the state's.
        """
        state = self._state
        if (begin.base_version, begin.base_digest) != (state.version, state.digest):
            raise BaseError(
                "wrong base",
                expected=f"version {state.version} with {state.digest}",
                found=f"version {begin.base_version} with {begin.base_digest}",
            )
        for arena, undo in zip(self._arenas, self._undo, strict=True):
            arena.reset()
            undo.reset()
        self._taken.clear()
        self._sums.reset()
        self._applying.follow_caller()  # forward passes that still read, and the lines above

    def take(self, num_changes: int) -> RawChunk:
        """Make room for the next chunk and return it: counts, offsets and values are to be received into its views.

        Raises:
            InputError: more chunks or changes than the header announced.
        """
        if len(self._taken) == len(self.plan.spans):
            raise InputError("more chunks than the plan has", expected=len(self.plan.spans))
        span = self.plan.spans[len(self._taken)]
        chunk = self._arenas[span.group].chunk(span.first_block, span.num_blocks, num_changes)
        self._taken.append(chunk)
        return chunk

    def apply(self, number: int) -> None:
        """Check chunk `number` and write it, after all that the calling thread's current stream has; waits for nothing.

        If a chunk is at fault, it and all later ones of its group are not written, and `finish` says so.
        """
        span, chunk = self.plan.spans[number], self._taken[number]
        self._applying.follow_caller()
        with self._applying.active():
            apply_group(
                self.groups[span.group],
                chunk,
                self._undo[span.group],
                sums=self._sums.parts[span.group],
                fault=self._sums.faults[span.group],
            )
        if number + 1 == len(self.plan.spans):
            self._sums.fetch(self._applying)

    def audit_ahead(self, step: int, of: int) -> None:
        """Start the state's `audit_rolling(step, of)` behind everything that was applied so far; waits for nothing."""
        with self._applying.active():
            self._state.begin_rolling(step, of)

    def finish(self, version: int, sums: Sums, digest: str) -> None:
        """Check that everything arrived and adds up, and move the state to the version. Blocks until all is written.

        Raises:
            FormatError: a chunk is missing, or has counts or offsets that cannot be.
            CorruptionError: the words that were overwritten are not those that the sender knows; roll back and audit.
            VerificationError: the result is not what the sums or the digest promise.
        """
        if len(self._taken) != len(self.plan.spans):
            raise FormatError("a round ended early", expected=f"{len(self.plan.spans)} chunks", found=len(self._taken))
        found, faulty = self._sums.read(self._applying)
        self._require_no_fault(faulty)
        state = self._state
        after, promised_after = state.fingerprints.copy(), state.fingerprints.copy()
        old_sums, promised_old = np.zeros((2, len(after)), np.uint64)
        for places, (old, new) in zip(self._places, found, strict=True):
            after[places] += new - old
            old_sums[places] = old
        promised_old[sums.places], promised_after[sums.places] = sums.old_sums, sums.after
        overwritten = "the words that were overwritten are not the sender's"
        result = "a parameter does not have the promised fingerprint"
        require_sums(state.table, old_sums, promised_old, CorruptionError, overwritten)
        require_sums(state.table, after, promised_after, VerificationError, result)
        if (found_digest := state.table.state_digest(after)) != digest:
            raise VerificationError("the round does not give its digest", expected=digest, found=found_digest)
        state.advance(version, after)

    def rollback(self) -> None:
        """Restore what was overwritten, whatever part of a round was applied. Blocks. Version and fingerprints stay."""
        with self._applying.active():
            for group, undo in zip(self.groups, self._undo, strict=True):
                undo_group(group, undo)
        self._applying.wait()

    def _compile(self) -> None:
        """Have the kernels compiled now, by chunks without changes: it takes seconds, when nobody should be waiting."""
        if self.device.type != "cuda":
            return
        self._applying.follow_caller()
        with self._applying.active():
            for number, (group, arena, undo) in enumerate(zip(self.groups, self._arenas, self._undo, strict=True)):
                if not group.num_blocks:
                    continue
                chunk = arena.chunk(0, 1, 0)
                chunk.counts.zero_()
                apply_group(group, chunk, undo, sums=self._sums.parts[number], fault=self._sums.faults[number])
                undo_group(group, undo)
        self._applying.lead_caller()

    def _group(self, number: int) -> ParamGroup:
        memories = [self._state.memories[place] for place in self.plan.members[number]]
        return ParamGroup([memory.tensor for memory in memories], names=[memory.name for memory in memories])

    def _check_budget(self, undo_budget_bytes: int | None) -> None:
        capacities = zip(self._begin.capacities, self.plan.word_bytes, strict=True)
        needed = sum(capacity * width for capacity, width in capacities)
        if undo_budget_bytes is not None and needed > undo_budget_bytes:
            raise InputError(
                "undo could exceed its budget",
                expected=f"at most {undo_budget_bytes} bytes",
                found=needed,
                hint="Lower the trainer's max_density, or raise the budget.",
            )

    def _require_no_fault(self, faulty: Sequence[int]) -> None:
        for members, group, block in zip(self.plan.members, self.groups, faulty, strict=True):
            if block != NO_FAULT:
                name = self._state.table.metas[members[group.params_of(block, 1)[0]]].name
                raise FormatError("a chunk's counts or offsets are wrong", parameter=name, found=f"in block {block}")


def device_of(state: WeightState) -> torch.device:
    """Return the one device of all weights.

    Raises:
        InputError: there are none, or one is elsewhere, or not contiguous.
    """
    if not state.memories:
        raise InputError("no weights to write")
    device = state.memories[0].tensor.device
    for memory in state.memories:
        if memory.tensor.device != device or not memory.tensor.is_contiguous():
            raise InputError(
                "weights that the kernels cannot write",
                parameter=memory.name,
                expected=f"contiguous, on {device}",
                found=f"strides {memory.tensor.stride()}, on {memory.tensor.device}",
            )
    return device
