"""Faults that were found by trying to break the promises of docs/store.md, each by the shortest way to it.

A test leaves this file for the one of its module once the fault is mended; `strict` says when that is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import store_setups as setups
from deltacast.delta.errors import DeltacastError, StoreError
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.names import version_path
from deltacast.store.objects import ObjectInfo
from deltacast.store.version_store import VersionStore

DAY_S = 86400.0


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


class Interrupted(MemoryBackend):
    """Someone's view of a store in memory: once, right before it uses an object, something else happens.

    Attributes:
        before: (method, beginning of a name) -> what happens then.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name, clock=clock)
        self.before: dict[tuple[str, str], Callable[[], object]] = {}

    def stat(self, name: str) -> ObjectInfo:
        self._interrupt("stat", name)
        return super().stat(name)

    def read(self, name: str) -> bytes:
        self._interrupt("read", name)
        return super().read(name)

    def create(self, name: str, data: bytes | bytearray | memoryview) -> None:
        self._interrupt("create", name)
        super().create(name, data)

    def delete(self, name: str) -> None:
        self._interrupt("delete", name)
        super().delete(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self._interrupt("list", prefix)
        return super().list(prefix, after=after)

    def _interrupt(self, method: str, name: str) -> None:
        for key in [key for key in self.before if key[0] == method and name.startswith(key[1])]:
            self.before.pop(key)()


class Died(Exception):  # noqa: N818 - it stands for a SIGKILL
    """The process is gone."""


def die() -> None:
    raise Died


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(clock: Clock) -> Interrupted:
    """The objects as the process sees them that is interrupted."""
    return Interrupted(secrets.token_hex(8), clock)


@pytest.fixture
def elsewhere(backend: Interrupted, clock: Clock) -> MemoryBackend:
    """The same objects as every other process sees them."""
    return MemoryBackend(backend.url.removeprefix("memory://"), clock=clock)


def require_readable(store: VersionStore, weights: dict[int, setups.Weights], folder: Path) -> None:
    """Make versions, and hold them against what was published."""
    for version, expected in weights.items():
        store.materialize(version, folder / str(version))
        assert setups.same(setups.folder_weights(folder / str(version)), expected)


def test_what_a_missing_version_file_hides_is_not_collected(
    elsewhere: MemoryBackend, clock: Clock, tmp_path: Path
) -> None:
    """A version file vanishes, gc keeps everything, the file is put back from a backup: every version is there."""
    store, weights = setups.filled_store(elsewhere, 10, folds=False)
    clock.now_s += 2 * DAY_S
    raw = elsewhere.read(version_path(5))
    elsewhere.delete(version_path(5))
    with suppress(DeltacastError):  # that it refuses is as good
        store.gc(100)
    elsewhere.create(version_path(5), raw)
    require_readable(store, dict(enumerate(weights)), tmp_path)


@pytest.mark.xfail(strict=True, reason="gc removes what was old when it listed, also what was written again since")
def test_an_object_that_is_published_again_under_gc_stays(
    backend: Interrupted, elsewhere: MemoryBackend, clock: Clock, tmp_path: Path
) -> None:
    """A writer dies before its version file; two days later its update is published again while gc is at work."""
    _, weights = setups.filled_store(elsewhere, 2, folds=False)
    weights.append(setups.next_weights(weights[2], 9))
    update = setups.update_between(weights[2], weights[3], 2)
    backend.before["create", version_path(3)] = die
    with pytest.raises(Died):
        VersionStore.open(backend).publish_update(update)
    clock.now_s += 2 * DAY_S
    backend.before["delete", "updates/"] = lambda: VersionStore.open(elsewhere).publish_update(update)
    VersionStore.open(backend).gc(100)
    require_readable(VersionStore.open(elsewhere), {3: weights[3]}, tmp_path)


@pytest.mark.xfail(strict=True, reason="only head() looks again when the newest version was removed meanwhile")
@pytest.mark.parametrize("ask", [
    lambda store, _: list(store.log()),
    lambda store, _: store.plan(2),
    lambda store, _: list(store.follow(2, timeout_s=0.01)),
    lambda store, folder: store.materialize(None, folder / "out"),
])  # fmt: skip
def test_a_reader_survives_that_the_head_is_superseded_and_removed(
    backend: Interrupted, elsewhere: MemoryBackend, clock: Clock, tmp_path: Path,
    ask: Callable[[VersionStore, Path], object],
) -> None:  # fmt: skip
    """Between a reader's listing and its read, the newest version gets a successor with a snapshot, and is removed."""
    store, weights = setups.filled_store(elsewhere, 3, folds=False)
    clock.now_s += 2 * DAY_S

    def supersede() -> None:
        new = setups.next_weights(weights[3], 9)
        store.publish_update(setups.update_between(weights[3], new, 3))
        store.add_anchor(4, setups.source_of(new))
        store.gc(1)

    backend.before["stat", version_path(3)] = supersede
    ask(VersionStore.open(backend), tmp_path)


@pytest.mark.xfail(strict=True, reason="what is repeated in other version files is not used when one is damaged")
@pytest.mark.parametrize(("num_updates", "damaged", "readable"), [(10, 10, (0, 9)), (130, 65, (64, 66, 130))])
def test_one_damaged_version_file_costs_no_other_version(
    elsewhere: MemoryBackend, tmp_path: Path, num_updates: int, damaged: int, readable: tuple[int, ...]
) -> None:
    """One bit is flipped in the newest version file, or in one that the walk back reads: other versions can be had."""
    store, weights = setups.filled_store(elsewhere, num_updates, folds=False)
    raw = bytearray(elsewhere.read(version_path(damaged)))
    raw[len(raw) // 2] ^= 1
    elsewhere.replace(version_path(damaged), raw)
    require_readable(store, {version: weights[version] for version in readable}, tmp_path)


def test_fsck_beside_gc_reports_nothing_lost(backend: Interrupted, elsewhere: MemoryBackend, clock: Clock) -> None:
    """Versions that retention removes while fsck reads are not lost."""
    store, weights = setups.filled_store(elsewhere, 6, folds=False)
    store.add_anchor(6, setups.source_of(weights[6]))
    clock.now_s += 2 * DAY_S
    backend.before["list", "snapshots/"] = lambda: store.gc(1)
    report = VersionStore.open(backend).fsck()
    assert (report.damaged, report.lost) == ((), ())


def test_a_lease_that_the_disk_refuses_to_read_keeps_everything(
    backend: Interrupted, elsewhere: MemoryBackend, clock: Clock
) -> None:
    """A lease of a user with a private umask, or on a bad sector, counts as one that cannot be read."""
    store, weights = setups.filled_store(elsewhere, 6, folds=False)
    store.add_anchor(6, setups.source_of(weights[6]))
    store.register_reader("a user with umask 077", 6, 60.0)

    def refuse() -> None:
        raise StoreError("cannot read: Permission denied")

    clock.now_s += 2 * DAY_S
    backend.before["read", "readers/"] = backend.before["stat", "readers/"] = refuse
    report = VersionStore.open(backend).gc(1)
    assert (report.oldest, report.held_by) == (0, (None,))
