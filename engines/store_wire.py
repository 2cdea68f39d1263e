"""What a worker takes from a store: the updates on its way made one, or a whole version by way of a folder.

To fetch writes no weight and disturbs nobody. Whatever is fetched is proven before the first write, and can be undone:
an update by the words that it overwrites, a whole version by a copy on the disk.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from deltacast.delta.apply import Transaction
from deltacast.delta.bits import copy_bits
from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.errors import DeltacastError, FormatError, InputError, StoreError, VerificationError
from deltacast.delta.fold import fold
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup
from deltacast.engines.payload import Inbox, Incoming, Limits, StagedIncoming
from deltacast.store.placement import FlatMemory
from deltacast.store.plan import Plan, Step
from deltacast.store.version_store import VersionStore

__all__ = ["StoreCheckpoint", "StoreUpdate", "fetch"]

_LOG: Final = logging.getLogger(__name__)
_MOST_WAYS: Final = 8
"""How many ways are tried around objects that are damaged or gone."""


def fetch(
    store: VersionStore, target: int, held: int | None, state: WeightState, *,
    limits: Limits, folder: str | None, on_write: Callable[[], None],
) -> Incoming:  # fmt: skip
    """Fetch what leads from one version to another, the cheapest way; blocks, and writes no weight.

    An object that is damaged or gone is named in a warning, and gone around where another way leads.

    Args:
        store: where from.
        target: the version to get, of the state's parameter table.
        held: the version that the state holds; None if it holds none, and gets one whole.
        state: what will be written to. Memory: what changes on the way, folded, and one update, decoded.
        limits: what may be used; `max_payload_bytes` is of updates as they are in the store.
        folder: where a whole version is put together, on a disk with room for it, or twice that if one is held; None
            for the system's folder of temporary files.
        on_write: called before the first write of what is returned.

    Raises:
        InputError: the updates exceed the limits, or cannot be folded.
        StoreError, FormatError, VerificationError: no way leads there; the error is that of the first object that
            failed, by name.
    """
    unusable: dict[str, DeltacastError] = {}
    for _ in range(_MOST_WAYS):
        plan = _plan(store, held, target, unusable)
        if plan.snapshot is not None:
            return StoreCheckpoint(_materialized(store, plan, limits.threads, folder), plan, state, folder, on_write)
        _require_room(plan, limits)
        update = _folded(store, plan.updates, unusable, limits.threads)
        if update is not None:
            return StoreUpdate(update, state, limits, on_write)
    raise _first(unusable)


def _plan(store: VersionStore, held: int | None, target: int, unusable: dict[str, DeltacastError]) -> Plan:
    try:
        return store.plan(held, target, without=unusable)
    except StoreError as err:
        if not unusable:
            raise
        raise _first(unusable) from err


def _first(unusable: dict[str, DeltacastError]) -> DeltacastError:
    return next(iter(unusable.values()))


def _require_room(plan: Plan, limits: Limits) -> None:
    highest = limits.max_payload_bytes
    if highest is not None and plan.num_bytes > highest:
        raise InputError(
            "payload too large", version=plan.want, expected=f"at most {highest} bytes", found=plan.num_bytes
        )


def _folded(
    store: VersionStore, steps: Iterable[Step], unusable: dict[str, DeltacastError], threads: int
) -> WeightUpdate | None:
    """Return one update that does what the steps do; None, and why, if an object cannot be used."""
    folded: WeightUpdate | None = None
    for step in steps:
        try:
            update = store.read_update(step, threads=threads)
        except (FormatError, VerificationError, StoreError) as err:
            unusable[step.object.path] = err
            _LOG.warning("deltacast looks for a way around %s: %s", step.object.path, err)
            return None
        folded = update if folded is None else fold([folded, update])
    return folded


def _materialized(store: VersionStore, plan: Plan, threads: int, folder: str | None) -> CheckpointSource:
    """Return a whole version, proven bit by bit, in mapped files that go with the process."""
    with tempfile.TemporaryDirectory(prefix="deltacast-pull-", dir=folder) as room:
        out = Path(room, "weights")
        store.materialize(plan.want, out, threads=threads)
        return CheckpointSource(out)


class StoreUpdate(StagedIncoming):
    """One update, in host memory.

    Args:
        update: leads from the state as it is to another version.
        state: the weights.
        limits: what undo may take.
        on_write: called before the first write.
    """

    def __init__(self, update: WeightUpdate, state: WeightState, limits: Limits, on_write: Callable[[], None]) -> None:
        super().__init__(on_write)
        self._update, self._state, self._limits = update, state, limits

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:
        """Nothing: it was fetched."""

    def _staged(self) -> Transaction:
        return Transaction.stage(self._state, self._update, undo_budget_bytes=self._limits.undo_budget_bytes)


class StoreCheckpoint(Incoming):
    """A whole version, in files.

    Args:
        source: its weights; closed when it was committed or rolled back.
        plan: which version it is. If the reader has one, that is copied before the first write.
        state: the weights.
        folder: where that copy is put, in a file without a name; None for the system's folder of temporary files.
        on_write: called before the first write.
    """

    is_seed = True

    def __init__(
        self, source: CheckpointSource, plan: Plan, state: WeightState, folder: str | None, on_write: Callable[[], None]
    ) -> None:
        self._source, self._plan, self._state, self._folder = source, plan, state, folder
        self._on_write = on_write
        self._label = state.label()
        self._kept: FlatMemory | None = None
        self._written = False

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:
        """Nothing: it was fetched."""

    def stage(self) -> None:
        """See `Incoming`. Copies what will be overwritten."""
        if self._plan.have is not None:
            self._kept = FlatMemory(self._state.table.metas, "mmap", folder=self._folder or tempfile.gettempdir())
            for memory in self._state.memories:
                self._kept.write(memory.name, memory.tensor)

    def apply(self) -> None:
        """See `Incoming`. The fingerprints are those of a scan of what was written."""
        state = self._state
        self._on_write()
        self._written = True
        for memory in state.memories:
            copy_bits(memory.tensor, self._source.tensor(memory.name), name=memory.name)
        state.version = self._plan.want
        state.rescan()

    def commit(self) -> None:
        """See `Incoming`."""
        self._source.close()
        self._kept = None

    def rollback(self) -> None:
        """See `Incoming`. Where no version was held, what is there is nobody's."""
        written, self._written = self._written, False
        self._source.close()
        if not written:
            return
        if self._kept is None:
            self._state.forget()
            return
        try:
            for memory in self._state.memories:
                copy_bits(memory.tensor, self._kept.tensor(memory.name), name=memory.name)
        except BaseException:
            self._state.disown()
            raise
        self._state.restore(self._label)
