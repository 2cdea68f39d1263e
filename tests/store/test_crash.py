"""A writer that dies, a disk that fills up: at every single call that changes the disk, what was committed stays.

Right values: the weights that the test made, and their digests by the plain-integer twin.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Final

import pytest

import crashing_store as crash
from crashing_store import DyingProcess, FailingDisk, Fault, weights_of
from deltacast.delta.errors import MissingObjectError, StoreError
from deltacast.store.backends import open_backend
from deltacast.store.fsck import check
from deltacast.store.gc import collect
from deltacast.store.version_store import VersionStore
from store_setups import (
    Weights,
    filled_store,
    new_store,
    next_weights,
    replayed,
    same,
    source_of,
    state_digest,
    update_between,
)

_HEX: Final = re.compile("[0-9a-f]{16,}(?=[./])")

STRIKES: Final[dict[Fault, tuple[str, ...]]] = {
    "killed": ("open", "write", "link", "rename", "unlink", "mkdir"),
    "torn write": ("write",),
    "power cut": ("fsync",),
    "power cut, names kept": ("link", "rename", "mkdir"),
}
"""After which calls a fault can leave another disk than after the call before: so these are all that it can leave."""


@dataclass(frozen=True)
class Scenario:
    """An operation, and the store that it finds.

    Attributes:
        operation: what is done.
        before: versions that are there before; None for an empty folder.
        after: versions that are there when it has returned.
        same_weights: whether the new version has the weights of the one before it.
    """

    operation: Callable[[Path], None]
    before: range | None
    after: range
    same_weights: bool = False

    def prepare(self, root: Path) -> None:
        """Make the store in an empty folder."""
        if self.before is None:
            return
        if not self.before:
            new_store(open_backend(root))
            return
        store, weights = filled_store(open_backend(root), self.before[-1])
        if self.operation is crash.collect_garbage:
            store.add_anchor(5, source_of(weights[5]))
        if self.operation is crash.renew_lease:
            crash.renew_lease(root)

    def weights(self, version: int) -> Weights:
        """The weights of a version, also of one that the test publishes next."""
        return weights_of(version - 1 if self.same_weights and version == self.after[-1] else version)


SCENARIOS: Final = {
    "create a store": Scenario(crash.create_store, None, range(0)),
    "first snapshot": Scenario(crash.publish_snapshot, range(0), range(1)),
    "later snapshot": Scenario(crash.publish_snapshot, range(3), range(4)),
    "update": Scenario(crash.publish_update, range(3), range(4)),
    "update and fold": Scenario(crash.publish_update, range(8), range(9)),
    "claim": Scenario(crash.claim, range(3), range(4), same_weights=True),
    "anchor": Scenario(crash.add_anchor, range(3), range(3)),
    "lease": Scenario(crash.renew_lease, range(3), range(3)),
    "gc": Scenario(crash.collect_garbage, range(10), range(5, 10)),
}


@lru_cache
def _digest(version: int) -> str:
    return state_digest(weights_of(version))


@pytest.fixture(scope="module")
def dying() -> Iterator[DyingProcess]:
    process = DyingProcess()
    yield process
    process.stop()


@pytest.fixture(scope="module", params=list(SCENARIOS.values()), ids=list(SCENARIOS))
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scenario, Path]:
    """A scenario, and a folder with the store that it finds, to be copied."""
    root = tmp_path_factory.mktemp("prepared")
    with FailingDisk(root):  # without a fault it only spares the waiting for fsync
        request.param.prepare(root)
    return request.param, root


def assert_readable(store: VersionStore, version: int, weights: Weights) -> None:
    """Assert that a version can be had, and is these weights: replayed from a snapshot whose bits fsck has checked."""
    plan = store.plan(None, version)
    assert plan.snapshot is not None
    start = plan.snapshot.version
    base = weights_of(start)
    assert plan.snapshot.state_digest == state_digest(base)
    assert store.record(version).state_digest == state_digest(weights)
    assert same(replayed(base, start, store.updates(plan)), weights)


def assert_whole(scenario: Scenario, root: Path, *, returned: bool) -> None:
    """Assert that a store is as before or as after an operation, whole, and that the next writer goes on from there."""
    try:
        store = VersionStore.open(root)
    except MissingObjectError:
        assert scenario.before is None
        assert not returned
        crash.create_store(root)
        store = VersionStore.open(root)
    versions, before = store.versions(), scenario.before or range(0)
    assert versions == scenario.after if returned else versions.stop in (before.stop, scenario.after.stop)
    for version in versions[-len(scenario.after) :]:
        assert_readable(store, version, scenario.weights(version))
    report = check(store.version_log)
    assert report.damaged == ()
    assert set(report.lost).isdisjoint(scenario.after)
    assert_goes_on(scenario, store)


def assert_goes_on(scenario: Scenario, store: VersionStore) -> None:
    """Assert that the next version can be published and had, and that gc leaves nothing that nobody needs."""
    versions = store.versions()
    if versions:
        old = scenario.weights(versions[-1])
        new = next_weights(old, 99)
        store.publish_update(update_between(old, new, versions[-1]))
    else:
        new = weights_of(0)
        store.publish_snapshot(source_of(new), threads=1)
    assert_readable(store, versions.stop, new)
    collect(store.version_log, len(scenario.after) + 1, min_age_s=0)
    report = check(store.version_log)
    assert (report.damaged, report.stray, report.lost) == ((), (), ())
    assert_readable(store, versions.stop, new)


@pytest.mark.parametrize("fault", STRIKES)
def test_a_process_that_dies_leaves_the_old_or_the_new_version(
    prepared: tuple[Scenario, Path], fault: Fault, dying: DyingProcess, tmp_path: Path
) -> None:
    """Whatever call it dies at: no version is lost or half there, fsck finds no damage, the next writer goes on."""
    scenario, template = prepared
    calls = dying.run(scenario.operation, _copied(template, tmp_path / "whole"))
    strikes = [number for number, call in enumerate(calls, 1) if call in STRIKES[fault]]
    root, seen = _copied(template, tmp_path / "0"), set[frozenset[tuple[str, int]]]()
    for at in (*strikes, len(calls) + 1):
        if _visible(root) != _visible(template):
            root = _copied(template, tmp_path / str(at))
        assert not dying.run(scenario.operation, root, fault, at), "it lived on"
        left, returned = _visible(root), at > len(calls)
        if left not in seen or returned:
            seen.add(left)
            scratch = _copied(root, tmp_path / f"{at} read")
            with FailingDisk(scratch):
                assert_whole(scenario, scratch, returned=returned)


def _copied(template: Path, root: Path) -> Path:
    shutil.copytree(template, root)
    return root


def _visible(root: Path) -> frozenset[tuple[str, int]]:
    """What of a store a reader can see: names and sizes, with digests and nonces, which differ each time, left out."""
    files = (path for path in root.rglob("*") if path.is_file() and path.parent.name != ".tmp")
    return frozenset((_HEX.sub("", str(path.relative_to(root))), path.stat().st_size) for path in files)


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """A store of versions 0 to 7, to be copied."""
    root = tmp_path / "committed"
    with FailingDisk(root):
        filled_store(open_backend(root, create=True), 7)
    return root


def assert_still_there(root: Path) -> None:
    """Assert that the first eight versions are whole, for a reader who looks for the first time."""
    store = VersionStore.open(root)
    assert_readable(store, 7, weights_of(7))
    report = check(store.version_log)
    assert report.damaged == ()
    assert report.materialisable[:8] == tuple(range(8))


@pytest.mark.parametrize("fault", ["full", "failing"])
@pytest.mark.parametrize("whole", [False, True], ids=["update", "snapshot"])
def test_a_writer_goes_on_once_the_disk_works_again(committed: Path, tmp_path: Path, whole: bool, fault: Fault) -> None:
    """Whatever call the disk refuses: a named error or success, all versions readable, and the same writer goes on."""

    def publish(store: VersionStore) -> None:
        if not whole:
            store.publish_update(crash.next_update(7))
        elif store.versions()[-1] == 7:  # a snapshot that failed may have been published all the same
            store.publish_snapshot(source_of(weights_of(8)), threads=1)

    counted = _copied(committed, tmp_path / "counted")
    with FailingDisk(counted) as disk:
        publish(VersionStore.open(counted))
    refused: list[str] = []
    for at in range(1, len(disk.calls) + 1):
        root = _copied(committed, tmp_path / str(at))
        store = VersionStore.open(root)
        with FailingDisk(root, fault, at):
            try:
                publish(store)
            except StoreError as err:
                refused.append(str(err))
            assert_still_there(root)
        with FailingDisk(root):
            publish(store)
        assert_readable(VersionStore.open(root), 8, weights_of(8))
        assert check(store.version_log).damaged == ()
    why = {"full": "No space left on device", "failing": "Input/output error"}[fault]
    assert len(refused) > (10 if fault == "full" else 5)  # a create that fails once is made up for
    assert all(why in message for message in refused)


def test_what_has_been_published_is_durable_though_a_call_failed(committed: Path, tmp_path: Path) -> None:
    """Whatever call fails once: when a publish has returned, maybe the second one, a power cut takes nothing of it."""
    update, at = crash.next_update(7), 0
    for at in count(1):
        root = _copied(committed, tmp_path / str(at))
        store = VersionStore.open(root)
        with FailingDisk(root, "failing", at) as disk:
            try:
                store.publish_update(update, folds=False)
            except StoreError:
                store.publish_update(update, folds=False)
            assert disk.not_durable().isdisjoint({"updates", "versions"}), (at, disk.calls)
        if at > len(disk.calls):
            break
    assert at > 15


def test_a_publish_waits_for_the_disk_four_times(committed: Path) -> None:
    """Bytes and name of the update, then bytes and name of the version file; HEAD waits for nothing."""
    store = VersionStore.open(committed)
    store.publish_update(crash.next_update(7), folds=False)  # the first one also flushes the names of the folders
    with FailingDisk(committed) as disk:
        store.publish_update(crash.next_update(8), folds=False)
    assert [call for call in disk.calls if call in ("fsync", "fdatasync", "link", "rename")] == [
        "fsync", "link", "fsync", "fsync", "link", "fsync", "rename",
    ]  # fmt: skip


@pytest.mark.parametrize("fault", ["full", "failing"])
def test_a_claim_that_failed_is_made_again_by_the_same_object(committed: Path, tmp_path: Path, fault: Fault) -> None:
    """Whatever call the disk refuses, the object claims once it works again, and publishes."""
    counted = _copied(committed, tmp_path / "counted")
    with FailingDisk(counted) as disk:
        crash.claim(counted)
    for at in range(1, len(disk.calls) + 1):
        root = _copied(committed, tmp_path / str(at))
        store = VersionStore.open(root)
        with FailingDisk(root, fault, at):
            with suppress(StoreError):
                store.claim()
            assert_still_there(root)
        with FailingDisk(root):
            store.claim()
            newest = store.versions()[-1]
            store.publish_update(update_between(weights_of(7), weights_of(8), newest))
        assert_readable(VersionStore.open(root), newest + 1, weights_of(8))


def test_a_folder_that_cannot_be_written_is_still_a_store_for_readers(committed: Path) -> None:
    """Every change is refused with a named error; all versions can be had, and fsck reads everything."""
    store = VersionStore.open(committed)
    changes: list[Callable[[], object]] = [
        lambda: store.publish_update(crash.next_update(7)),
        lambda: store.publish_snapshot(source_of(weights_of(8)), threads=1),
        lambda: store.add_anchor(7, source_of(weights_of(7)), threads=1),
        lambda: collect(store.version_log, 1),
        lambda: crash.renew_lease(committed),
        store.claim,
    ]
    with FailingDisk(committed, "read-only", at=1):
        for change in changes:
            with pytest.raises(StoreError, match="Read-only file system"):
                change()
        assert_still_there(committed)
