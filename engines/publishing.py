"""Publishing what was committed to a durable store, on a thread of its own.

`Publisher` holds the versions that are not in the store yet, oldest first. What fails stays at its place, so that the
chain of stored versions never has a hole::

    WAITING --its turn--> STARTED --+--> PUBLISHED
       ^                            +--> FAILED      certainly not there (only if somebody waits for it)
       +-- the store failed: again  +--> UNKNOWN     may be there or not (likewise)
           at the next `make_room`

docs/protocol.md, "With a store", says what follows from each.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from deltacast.delta.errors import BaseError, DeltacastError, FencedError, StateError, StoreError
from deltacast.delta.patch import WeightUpdate
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.caretaking import Caretaker
from deltacast.engines.control import Deadline
from deltacast.store.records import VersionRecord
from deltacast.store.version_store import VersionStore

__all__ = ["Publisher", "publisher_of"]

_LOG: Final = logging.getLogger(__name__)
_MOST_SKIPPED: Final = 1024
"""Numbers that an update may leave out: each takes an empty version in the store."""


class _Fate(Enum):
    WAITING = "waiting"
    STARTED = "started"
    PUBLISHED = "published"
    FAILED = "failed"
    UNKNOWN = "unknown"


_RUNNING: Final = (_Fate.WAITING, _Fate.STARTED)


@dataclass(slots=True, eq=False)
class _Entry:
    """One version on its way.

    Attributes:
        version: its number.
        make: makes the update that leads to it.
        awaited: somebody waits for its fate and decides by it.
        digest: state digest of the version, once its update was made.
        error: of the last attempt.
    """

    version: int
    make: Callable[[], WeightUpdate]
    awaited: bool
    digest: str = ""
    fate: _Fate = _Fate.WAITING
    error: Exception | None = None


class Publisher:
    """Publishes the versions of one trainer in their order. Used by the trainer's thread.

    Args:
        store: written to by nobody else from here on, but for what `care` does with versions that exist.
        head: its newest version, published by `store` itself.
        bound: versions that may wait.
        threads: for the codec.
        care: told of each version that was published; closed with this object.
    """

    def __init__(self, store: VersionStore, head: VersionRecord, *, bound: int, threads: int, care: Caretaker) -> None:
        self._store, self._tip, self._bound, self._threads, self._care = store, head, bound, threads, care
        self._queue: deque[_Entry] = deque()
        self._error: Exception | None = None  # of the oldest entry; nothing is tried while it stands
        self._final: DeltacastError | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="deltacast-publish", daemon=True)
        self._thread.start()

    @property
    def published_through(self) -> int:
        """The newest version that the store has, as far as we have heard."""
        return self._tip.version

    def make_room(self, deadline: Deadline) -> None:
        """Wait until one more version can be held; first say what could not be published, and have it tried again.

        Raises:
            StoreError: the oldest version that waits could not be published, or there is no room in time. Call again.
            FencedError: another writer has taken over, now or earlier. This is final.
        """
        with self._changed:
            self._raise_failure()
            self._changed.wait_for(self._can_go_on, max(0.0, deadline.remaining_s))
            self._raise_failure()
            if len(self._queue) >= self._bound:
                raise StoreError(
                    f"the store does not keep up: versions {self._queue[0].version} to {self._queue[-1].version} wait",
                    expected=f"at most {self._bound - 1} that wait, after {deadline.seconds:g} s",
                    found=len(self._queue),
                    hint="Call again, or let more of them wait (max_unpublished).",
                )

    def check_reach(self, version: int) -> None:
        """Raise if a version is too far above the newest one: the store fills what lies between with empty versions.

        Raises:
            StateError: it is.
        """
        with self._changed:
            newest = self._queue[-1].version if self._queue else self._tip.version
        if version - newest > _MOST_SKIPPED:
            raise StateError(
                "a worker reports a version of this run that the store is far from",
                version=version - 1,
                expected=f"at most {newest + _MOST_SKIPPED - 1}",
                hint="Make a store whose first version is above it.",
            )

    def put(self, version: int, make: Callable[[], WeightUpdate]) -> None:
        """Have a version published that is committed; never blocks, never fails.

        Args:
            version: above all earlier ones.
            make: makes the update to it, on the publishing thread; called again if the store fails.
        """
        self._add(_Entry(version, make, awaited=False))

    def publish(self, version: int, make: Callable[[], WeightUpdate], deadline: Deadline) -> str:
        """Publish a version that is not decided yet, and wait for what comes of it.

        Returns:
            An empty string if it is published, else why it is certainly not; then it waits no more.

        Raises:
            StoreError: nobody knows. This publisher publishes nothing more; neither does one that was interrupted.
        """
        entry = self._add(_Entry(version, make, awaited=True))
        with self._changed:
            try:
                self._changed.wait_for(lambda: entry.fate not in _RUNNING, max(0.0, deadline.remaining_s))
            except BaseException:
                self._final = _undecided(version, None)
                raise
            if entry.fate is _Fate.PUBLISHED:
                return ""
            if entry.fate is _Fate.WAITING:
                self._queue.remove(entry)
                return f"version {version} could not be published in time"
            if entry.fate is _Fate.FAILED:
                return f"version {version} could not be published: {entry.error}"
            self._final = _undecided(version, entry.error)
            raise self._final

    def close(self, timeout_s: float) -> None:
        """Publish what still waits, and end the threads; may be called twice.

        Raises:
            StoreError: not all could be published in time; the message says which versions are in no store.
        """
        with self._changed:
            if self._closing:
                return
            self._closing, self._error = True, None
            self._changed.notify_all()
        deadline = Deadline(timeout_s)
        self._thread.join(timeout_s)
        self._care.close(deadline.remaining_s)
        with self._changed:
            left, error = [entry.version for entry in self._queue if not entry.awaited], self._error or self._final
        if left:
            raise StoreError(
                f"versions {left[0]} to {left[-1]} were committed and are not published: {error or 'out of time'}",
                version=left[0],
                hint="Workers may hold them; a trainer that starts from the store brings them back to its newest.",
            ) from error

    def _add(self, entry: _Entry) -> _Entry:
        with self._changed:
            self._queue.append(entry)
            self._changed.notify_all()
        return entry

    def _can_go_on(self) -> bool:
        return len(self._queue) < self._bound or self._error is not None or self._final is not None

    def _raise_failure(self) -> None:
        if self._final is not None:
            raise self._final.with_traceback(None)
        if self._error is not None:
            version, error, self._error = self._queue[0].version, self._error, None
            self._changed.notify_all()
            raise StoreError(
                f"version {version} is committed, and not known to be in the store: {error}",
                version=version,
                hint="It is tried again from now on. Call send_weights again.",
            ) from error

    # The publishing thread.

    def _run(self) -> None:
        while self._publish_next():
            pass  # and holds no version, while it waits, that is published

    def _publish_next(self) -> bool:
        """Wait for a version and try to publish it; False if there is nothing more to do."""
        entry = self._next()
        if entry is None:
            return False
        try:
            self._publish(entry)
        except Exception as err:  # noqa: BLE001 - a thread's boundary: whoever sends next is told
            self._failed(entry, err)
        else:
            self._settle(entry, _Fate.PUBLISHED)
        return True

    def _next(self) -> _Entry | None:
        """Wait for something to do; None if there is nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._can_start() or self._closing)
            if not self._can_start():
                return None
            self._queue[0].fate = _Fate.STARTED
            return self._queue[0]

    def _can_start(self) -> bool:
        return bool(self._queue) and self._error is None and self._final is None

    def _publish(self, entry: _Entry) -> None:
        """Publish an update, after empty ones for the numbers that it leaves out: a store has no gaps."""
        update = entry.make()
        entry.digest = update.target_digest
        for version in range(self._tip.version + 1, update.target_version):
            self._tip = self._store.publish_update(_empty(self._tip, version), folds=False)
        update = replace(update, base_version=self._tip.version)
        self._tip = self._store.publish_update(update, folds=False, threads=self._threads)

    def _failed(self, entry: _Entry, error: Exception) -> None:
        _LOG.warning("deltacast could not publish version %d: %s", entry.version, error)
        fate = self._looked_up(entry) if entry.awaited else _Fate.WAITING
        with self._changed:
            if isinstance(error, (FencedError, BaseError)):  # in either case the run has gone on without us
                self._final = _fenced(entry.version, error)
            elif fate is _Fate.WAITING:
                self._error = error
        self._settle(entry, fate, error)

    def _looked_up(self, entry: _Entry) -> _Fate:
        """Find out whether an attempt that failed has made its version exist nevertheless, and see to it that it stays.

        A version that can be read may still be undone by a power cut: to publish it once more makes it durable.
        """
        try:
            records = self._store.version_log.records(entry.version)
            found = next((record for record in records if record.version == entry.version), None)
            if found is None or (found.writer, found.state_digest) != (self._tip.writer, entry.digest):
                return _Fate.FAILED
            self._publish(entry)
        except Exception as err:  # noqa: BLE001 - that it cannot be known is the answer
            _LOG.warning("deltacast cannot see whether version %d is published: %s", entry.version, err)
            return _Fate.UNKNOWN
        return _Fate.PUBLISHED

    def _settle(self, entry: _Entry, fate: _Fate, error: Exception | None = None) -> None:
        with self._changed:
            entry.fate, entry.error = fate, error
            if fate is not _Fate.WAITING:
                self._queue.remove(entry)
            self._changed.notify_all()
        if fate is _Fate.PUBLISHED:
            self._care.note(entry.version)


def publisher_of(info: TrainerInitInfo, head: VersionRecord) -> Publisher:
    """Make the publisher that a trainer was told to have.

    Args:
        info: the trainer's; it has a store.
        head: the store's newest version, published by the trainer.
    """
    assert info.store is not None
    care = Caretaker(info.store, anchors=info.anchors, folder=info.baseline_folder, threads=info.threads)
    return Publisher(info.store, head, bound=info.max_unpublished, threads=info.threads, care=care)


def _empty(tip: VersionRecord, version: int) -> WeightUpdate:
    return WeightUpdate(
        run_id=tip.run_id,
        epoch=tip.epoch,
        base_version=tip.version,
        target_version=version,
        base_digest=tip.state_digest,
        target_digest=tip.state_digest,
        table_digest=tip.table_digest,
        patches=(),
        optimizer_step=tip.optimizer_step,
    )


def _fenced(version: int, error: Exception) -> FencedError:
    return FencedError(
        f"the run has gone on without this trainer, at version {version} or before: {error}",
        version=version,
        hint="Shut this trainer down. One that starts from the store goes on from its newest version.",
    )


def _undecided(version: int, error: Exception | None) -> StoreError:
    return StoreError(
        f"nobody knows whether version {version} was published: {error or 'the store did not answer in time'}",
        version=version,
        hint="No worker is told; each goes back by itself. Start a trainer from the store: it goes on from its newest "
        "version, this one or the one before.",
    )
