"""How a worker that holds an earlier version gets to the baseline: by the updates between the two, folded into one.

The last updates that were committed are kept in memory. What lies before them may be in the trainer's store::

    the worker's bits --store--> the oldest in memory --memory--> the baseline

Versions are found by digest alone: a worker that was restarted from a checkpoint knows no number, and a number proves
nothing. Whatever goes wrong here is an error that names the reason, and the worker is seeded instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeVar

from deltacast.delta.errors import (
    BaseError,
    CapacityError,
    DeadlineError,
    DeltacastError,
    StateError,
    VerificationError,
)
from deltacast.delta.patch import WeightUpdate
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.control import Task
from deltacast.engines.payload import Outgoing
from deltacast.store.baseline import Baseline
from deltacast.store.folds import fold_updates
from deltacast.store.plan import Plan
from deltacast.store.records import VersionRecord
from deltacast.store.version_store import VersionStore

__all__ = ["History", "KeptUpdate", "Replay"]

T = TypeVar("T")

_LEAST_BYTES: Final = 1 << 12  # of a version, however little changed: else empty ones would be kept without end
_SEARCHED: Final = 256  # versions of the store, in four or five files; further back a seed is hardly ever larger


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """Makes an update that was sent when it is called: on any thread, again and again.

    Attributes:
        make: does it.
        nbytes: host memory that `make` holds on to.
    """

    make: Callable[[], WeightUpdate]
    nbytes: int

    def __call__(self) -> WeightUpdate:
        """Make the update."""
        return self.make()


@dataclass(frozen=True, slots=True)
class _Step:
    """An update in memory, and what it applies to."""

    base_version: int
    base_digest: str
    update: KeptUpdate

    @property
    def nbytes(self) -> int:
        return max(self.update.nbytes, _LEAST_BYTES)


@dataclass(frozen=True, slots=True)
class Replay:
    """The way from an earlier version to the baseline. It holds the updates in memory, kept by the history or not.

    Attributes:
        version: the trainer's number for the bits that the worker holds.
        stored: what to read from the store first; None for nothing.
        kept: the updates that follow, from memory.
    """

    version: int
    stored: Plan | None
    kept: tuple[_Step, ...]

    def __str__(self) -> str:
        """Say it for a log."""
        parts = [f"{len(self.stored.updates)} from the store"] if self.stored else []
        parts += [f"{len(self.kept)} from memory"] if self.kept else []
        return f"it holds version {self.version}; updates: {' and '.join(parts)}"


class History:
    """What leads from earlier versions of a run to the baseline. Used by the trainer's thread.

    Args:
        info: the trainer's: how much to keep, the store, and how long to wait for it.
        baseline: where every way ends.

    Attributes:
        nbytes: host memory of the updates that are kept.
    """

    def __init__(self, info: TrainerInitInfo, baseline: Baseline) -> None:
        self._info, self._baseline = info, baseline
        self._steps: deque[_Step] = deque()
        self.nbytes = 0

    def note(self, payload: Outgoing) -> None:
        """Keep a payload's update, and drop the oldest that there is no more room for; makes and copies nothing.

        Call it once the decision is COMMIT, before the baseline moves. An update that cannot be kept breaks the chain,
        so that nothing before it is of use either.
        """
        if payload.target_version <= self._baseline.version:
            return  # a seed, a repair or a replay: the baseline stays
        if isinstance(payload.update, KeptUpdate):
            step = _Step(self._baseline.version, self._baseline.digest, payload.update)
            self._steps.append(step)
            self.nbytes += step.nbytes
            self._drop_to(self._info.history_bytes)
        else:
            self._drop_to(0)

    def find(self, digest: str) -> Replay:
        """Find the way from the newest version with these bits; reads version files of the store at most.

        Raises:
            BaseError: no version that is known has them.
            StateError: they are known, but not all that leads on from there.
            CapacityError: a seed takes fewer bytes.
            StoreError, FormatError, DeadlineError: the store failed, or did not answer in time.
        """
        steps = list(self._steps)
        place = next((i for i in reversed(range(len(steps))) if steps[i].base_digest == digest), None)
        if place is not None:
            return Replay(steps[place].base_version, None, tuple(steps[place:]))
        store = self._info.store
        if store is None:
            raise BaseError("no version in memory has these bits, and there is no store")
        return self._in_time(lambda: self._find_stored(store, digest))

    def make(self, replay: Replay) -> WeightUpdate:
        """Fold a way's updates into one, from the worker's version to the baseline's.

        Memory: the fold, and one update at a time.

        Raises:
            VerificationError: it does not lead to the baseline.
            InputError, BaseError: the updates do not fold.
            StoreError, FormatError, DeadlineError: the store failed, has lost an object, or did not answer in time.
        """
        return self._in_time(lambda: self._make(replay))

    def _drop_to(self, max_bytes: int) -> None:
        while self.nbytes > max_bytes:
            self.nbytes -= self._steps.popleft().nbytes

    def _find_stored(self, store: VersionStore, digest: str) -> Replay:
        """Find the way by the store, to the oldest update in memory or all the way."""
        goal = self._steps[0].base_digest if self._steps else self._baseline.digest
        records = [record for record in store.log(_SEARCHED) if record.version <= self._baseline.version]
        base = _newest(records, digest)
        if base is None:
            raise BaseError("no version in memory or among the store's newest has these bits")
        top = _newest(records, goal)
        if top is None or top.version <= base.version:
            raise StateError("what leads on from there is neither in memory nor published yet", version=base.version)
        plan = store.plan(base.version, top.version)
        if plan.snapshot is not None or plan.num_bytes > self._baseline.state.table.nbytes:
            raise CapacityError("the store's updates would take more bytes than a seed", version=base.version)
        return Replay(base.version, plan, tuple(self._steps))

    def _make(self, replay: Replay) -> WeightUpdate:
        stored: Iterable[WeightUpdate] = ()
        if replay.stored is not None:
            assert self._info.store is not None
            stored = self._info.store.updates(replay.stored, threads=self._info.threads)
        folded = fold_updates(_linked(chain(stored, (step.update() for step in replay.kept))))
        if folded.target_digest != self._baseline.digest:
            raise VerificationError("a replay does not lead to the baseline", version=self._baseline.version,
                                    expected=self._baseline.digest, found=folded.target_digest)  # fmt: skip
        return replace(folded, target_version=self._baseline.version, epoch=self._baseline.epoch)

    def _in_time(self, get: Callable[[], T]) -> T:
        """Return what a call returns. On a thread: a store that hangs must hold no round, nor its workers."""
        found: list[T] = []
        task = Task("replay", lambda: found.append(get()))
        if not task.join(self._info.timeout_s):
            raise DeadlineError("the updates could not be had in time", expected=f"within {self._info.timeout_s:g} s")
        if isinstance(task.error, DeltacastError):
            raise task.error
        if task.error is not None:
            raise StateError(f"{type(task.error).__name__}: {task.error}") from task.error
        return found[0]


def _newest(records: Iterable[VersionRecord], digest: str) -> VersionRecord | None:
    return next((record for record in records if record.state_digest == digest), None)


def _linked(updates: Iterable[WeightUpdate]) -> Iterator[WeightUpdate]:
    """Number updates so that each begins where the one before it ends: one state may go by two numbers.

    The store gives empty versions to the numbers that a trainer skips, and a baseline that is the same by its bits may
    be numbered anew. What links the updates is the digests, which `fold` checks.
    """
    version: int | None = None
    for update in updates:
        yield update if version is None else replace(update, base_version=version)
        version = update.target_version
