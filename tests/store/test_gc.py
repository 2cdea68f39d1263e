"""Retention: what stays is whole, what goes is not needed, whoever else is at work.

Right values: what must stay is written down by hand or counted by a naive loop; weights are the test's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from deltacast.delta.errors import FencedError, FormatError, InputError, StoreError, VerificationError
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.gc import DAY_S, GcReport
from deltacast.store.names import version_path
from deltacast.store.objects import Buffer, ObjectBackend
from deltacast.store.readers import MAX_TTL_S, register_reader
from deltacast.store.version_store import VersionStore
from failing_backend import FailingBackend, nothing
from store_setups import (
    KEY,
    Weights,
    filled_store,
    new_backend,
    new_store,
    next_weights,
    replayed,
    same,
    source_of,
    update_between,
)

ANCHORS = (0, 5, 8)
NEWEST = 10


class Clocked(MemoryBackend):
    """A store in memory whose clock the test turns, and that calls back before an object is created or deleted.

    Attributes:
        now: its time.
        before: called with `create` or `delete` and how often that was asked for; not from within itself.
    """

    def __init__(self) -> None:
        self.now = 1e9
        self.before: Callable[[str, int], None] | None = None
        self._asked = {"create": 0, "delete": 0}
        super().__init__(secrets.token_hex(8), clock=lambda: self.now)

    def create(self, name: str, data: Buffer) -> None:
        self._call_back("create")
        super().create(name, data)

    def delete(self, name: str) -> None:
        self._call_back("delete")
        super().delete(name)

    def _call_back(self, what: str) -> None:
        self._asked[what] += 1
        if self.before is not None:
            hook, self.before = self.before, None
            hook(what, self._asked[what])
            self.before = hook


def anchored_store(backend: ObjectBackend, key: bytes | None = None) -> tuple[VersionStore, list[Weights]]:
    """Versions 0 to 10 with a fold of 0 to 8, and snapshots of 0, 5 and 8."""
    store, weights = filled_store(backend, NEWEST, key=key)
    for version in ANCHORS[1:]:
        store.add_anchor(version, source_of(weights[version]))
    return store, weights


def assert_whole(store: VersionStore, weights: list[Weights], oldest: int, *, stray: bool = False) -> None:
    """Assert that the versions from `oldest` on, and no others, are there and can be had; and nothing that is stray."""
    assert store.versions() == range(oldest, len(weights))
    for version in store.versions():
        plan = store.plan(None, version)
        assert plan.snapshot is not None
        base = weights[plan.snapshot.version]
        assert same(replayed(base, plan.snapshot.version, store.updates(plan)), weights[version])
    report = store.fsck()
    assert (report.damaged, report.lost, bool(report.stray)) == ((), (), stray)
    assert report.materialisable == tuple(store.versions())


def names(backend: ObjectBackend, prefix: str = "") -> list[str]:
    return [info.name for info in backend.list(prefix)]


@pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])
@pytest.mark.parametrize(
    ("keep", "oldest"), [(1, 8), (2, 8), (3, 8), (4, 5), (6, 5), (7, 0), (10, 0), (11, 0), (1000, 0)]
)
def test_the_newest_stay_and_all_down_to_a_snapshot(keep: int, oldest: int, key: bytes | None) -> None:
    """With snapshots of 0, 5 and 8, the versions that stay begin with the newest of these that is old enough."""
    backend = Clocked()
    store, weights = anchored_store(backend, key)
    there = {info.name: info.num_bytes for info in backend.list("")}
    report = store.gc(keep, min_age_s=0)
    assert_whole(store, weights, oldest)
    gone = there.keys() - set(names(backend))
    assert report.versions == tuple(range(oldest))
    assert gone == {*report.objects, *map(version_path, report.versions)}
    assert report.num_bytes == sum(there[name] for name in gone)
    assert (report.oldest, report.held_by) == (oldest, ())
    assert len(names(backend, "updates/")) == NEWEST - max(oldest - 1, 0)
    assert len(names(backend, "snapshots/")) == 3 * sum(anchor >= oldest for anchor in ANCHORS)
    assert len(names(backend, "folds/")) == (oldest == 0)


def test_a_dry_run_says_what_would_go_and_removes_nothing() -> None:
    """Its report is that of the run that follows."""
    backend = Clocked()
    store, _ = anchored_store(backend)
    there = names(backend)
    report = store.gc(2, min_age_s=0, dry_run=True)
    assert names(backend) == there
    removed: list[int] = []
    assert store.gc(2, min_age_s=0, progress=removed.append) == report
    assert sum(removed) == report.num_bytes > 0


@pytest.mark.parametrize(
    ("version", "oldest"), [(10, 8), (9, 8), (7, 5), (5, 5), (4, 0), (0, 0), (99, 8)]
)  # fmt: skip
def test_what_a_live_reader_needs_stays(version: int, oldest: int) -> None:
    """A reader holds all from its version on until its lease ends by the store's clock; then the lease goes too."""
    backend = Clocked()
    store, weights = anchored_store(backend)
    register_reader(backend, "reader", version, 60)
    register_reader(backend, "at the head", 10, 60)
    backend.now += 59
    report = store.gc(3, min_age_s=30)
    assert_whole(store, weights, oldest)
    assert report.held_by == (("reader",) if version < 8 else ())
    following = [store.record(later).update for later in range(version + 1, NEWEST + 1)]
    assert {update.object.path for update in following if update is not None} <= set(names(backend))
    backend.now += 31
    store.gc(3, min_age_s=30)
    assert_whole(store, weights, 8)
    assert names(backend, "readers/") == []


def test_a_lease_that_cannot_be_read_keeps_everything_until_it_ends() -> None:
    """Nobody knows what its reader needs."""
    backend = Clocked()
    store, weights = anchored_store(backend)
    backend.replace("readers/" + "0" * 32 + ".json", b"?")
    assert store.gc(1, min_age_s=0).held_by == (None,)
    assert store.fsck().materialisable == tuple(range(NEWEST + 1))
    backend.now += MAX_TTL_S
    assert store.gc(1, min_age_s=0).held_by == ()
    assert names(backend, "readers/") == []
    assert_whole(store, weights, 8)


def test_a_reader_whose_version_is_gone_holds_nothing() -> None:
    """It has to begin with a snapshot in any case."""
    backend = Clocked()
    store, weights = anchored_store(backend)
    store.gc(6, min_age_s=0)
    register_reader(backend, "late", 2, 60)
    report = store.gc(1, min_age_s=0)
    assert (report.oldest, report.held_by) == (8, ())
    assert_whole(store, weights, 8)


def test_the_last_snapshot_stays_with_all_that_needs_it() -> None:
    """Where the only snapshot is the first version, everything stays."""
    backend = Clocked()
    store, weights = filled_store(backend, 5)
    assert store.gc(1, min_age_s=0) == GcReport((), (), 0, 0, ())
    assert_whole(store, weights, 0)


@pytest.mark.parametrize("how", ["shard gone", "shard short", "manifest damaged"])
def test_nothing_is_given_up_for_a_snapshot_that_is_not_whole(how: str) -> None:
    """A newer snapshot counts only if its manifest can be read and its files are there in their sizes."""
    backend = Clocked()
    store, weights = filled_store(backend, 5)
    ref = store.add_anchor(4, source_of(weights[4]))
    shard = ref.path.replace("manifest.json", "weights-00001-of-00001.safetensors")
    if how == "shard gone":
        backend.delete(shard)
    elif how == "shard short":
        backend.replace(shard, backend.read(shard)[:-1])
    else:
        backend.replace(ref.path, backend.read(ref.path).replace(b'"version":4', b'"version":3'))
    report = store.gc(1, min_age_s=0)
    assert (report.versions, report.objects) == ((), ())
    assert store.versions() == range(6)


def test_a_snapshot_of_other_weights_is_no_snapshot_and_goes() -> None:
    """What `add_anchor` wrote before it saw that the weights are not the version's is removed, and nothing for it."""
    backend = Clocked()
    store, weights = filled_store(backend, 5)
    with pytest.raises(VerificationError):
        store.add_anchor(4, source_of(weights[3]))
    report = store.gc(1, min_age_s=0)
    assert (report.versions, len(report.objects)) == ((), 3)
    assert_whole(store, weights, 0)


def test_a_publish_in_flight_loses_nothing() -> None:
    """A collection between an update's object and its version file, or amid a snapshot's files, takes none of them."""
    backend = Clocked()
    store, weights = anchored_store(backend)
    weights += [next_weights(weights[-1], 77)]
    backend.now += 10 * DAY_S  # all that is there is old

    def meanwhile(what: str, number: int) -> None:
        backend.now += DAY_S - 1
        VersionStore.open(backend).gc(2)

    backend.before = meanwhile
    store.publish_update(update_between(weights[-2], weights[-1], NEWEST))
    assert_whole(store, weights, 8)
    store.add_anchor(11, source_of(weights[11]))
    backend.before = None
    assert store.gc(1).oldest == 11
    assert_whole(store, weights, 11)


@pytest.mark.parametrize("again", ["before", "while"])
def test_an_object_that_is_published_again_stays(again: str, tmp_path: Path) -> None:
    """A writer left an update without a version file; days later it is published again, before or while gc is at it."""
    backend = Clocked()
    store, weights = filled_store(backend, 2, folds=False)
    weights.append(next_weights(weights[2], 9))
    update = update_between(weights[2], weights[3], 2)
    rehearsal, _ = filled_store(new_backend("memory", tmp_path), 2, folds=False)
    ref = rehearsal.publish_update(update).update
    assert ref is not None
    backend.write(ref.object.path, [rehearsal.backend.read(ref.object.path)])
    backend.now += 2 * DAY_S
    seen = FailingBackend(backend)

    def publish(call: str, name: str) -> None:
        if call == "stat" and name == ref.object.path:
            seen.before = nothing
            store.publish_update(update)

    if again == "before":
        store.publish_update(update)
    else:
        seen.before = publish
    report = VersionStore.open(seen).gc(100)
    assert report == GcReport((), (), 0, 0, ())
    assert_whole(store, weights, 0)


@pytest.mark.parametrize("lost", ["the manifest", "version file 0", "version file 5"])
def test_what_a_lost_file_hides_is_not_collected(lost: str) -> None:
    """The only manifest or a version file vanishes, gc is run, the file is put back: every version is there."""
    backend = Clocked()
    store, weights = filled_store(backend, NEWEST)
    snapshot = store.record(0).snapshot
    assert snapshot is not None
    name = snapshot.path if lost == "the manifest" else version_path(int(lost[-1]))
    backend.now += 2 * DAY_S
    raw = backend.read(name)
    backend.delete(name)
    with suppress(FormatError):  # that it refuses is as good
        assert store.gc(2).objects == ()
    backend.create(name, raw)
    assert_whole(store, weights, 0)


def test_a_dry_run_needs_no_right_to_write() -> None:
    """Without a clock, which takes a write to read, things count as old as they are to the youngest object."""
    backend = Clocked()
    store, _ = anchored_store(backend)
    expected = store.gc(2, min_age_s=0, dry_run=True)
    assert expected.objects

    class ReadOnly(FailingBackend):
        def now_s(self) -> float:
            raise StoreError("Read-only file system")

    reader = VersionStore.open(ReadOnly(backend))
    assert reader.gc(2, min_age_s=0, dry_run=True) == expected
    with pytest.raises(StoreError, match="Read-only"):
        reader.gc(2, min_age_s=0)


def test_files_of_a_snapshot_go_together_and_none_before_the_youngest_is_old() -> None:
    """The shards of a push that takes days are as young as the last of them; without a manifest they go in the end."""
    backend = Clocked()
    store, weights = filled_store(backend, 2)
    folder = f"snapshots/{2:020}-{'a' * 16}/"
    backend.write(folder + "weights-00001-of-00002.safetensors", [b"1"])
    backend.now += 3 * DAY_S
    backend.write(folder + "weights-00002-of-00002.safetensors", [b"2"])
    backend.now += DAY_S - 1
    assert store.gc(9).objects == ()
    backend.now += 1
    assert len(store.gc(9).objects) == 2
    assert_whole(store, weights, 0)


def test_two_collectors_at_once_are_harmless() -> None:
    """Whichever object one of them is about to remove when the other begins and ends, what should stay is whole."""
    plan = anchored_store(Clocked())[0].gc(2, min_age_s=0, dry_run=True)
    for at in range(1, len(plan.versions) + len(plan.objects) + 1):
        backend = Clocked()
        store, weights = anchored_store(backend)
        seconds: list[GcReport] = []

        def second(what: str, number: int, *, at: int = at, backend: Clocked = backend) -> None:
            if number == at:
                seconds.append(VersionStore.open(backend).gc(4, min_age_s=0))  # noqa: B023 - called in this turn only

        backend.before = second
        store.gc(2, min_age_s=0)
        assert len(seconds) == 1
        assert_whole(store, weights, 8)


def take_over_and_go_on(backend: ObjectBackend, weights: list[Weights], *, by_claim: bool, num_updates: int) -> None:
    """Be another writer: publish from version 2 on; extends `weights` by each version's."""
    writer = VersionStore.open(backend)
    if by_claim:
        writer.claim()
        weights.append(weights[-1])
    for _ in range(num_updates):
        weights.append(next_weights(weights[-1], 500 + len(weights)))
        writer.publish_update(update_between(weights[-2], weights[-1], len(weights) - 2))
    writer.add_anchor(len(weights) - 1, source_of(weights[-1]))


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.parametrize("by_claim", [True, False], ids=["claimed", "published"])
@pytest.mark.parametrize("gc_when", ["never", "before", "after"])
def test_a_writer_that_slept_is_fenced_and_destroys_nothing(
    kind: str, by_claim: bool, gc_when: str, tmp_path: Path
) -> None:
    """Its version may be created anew below the head, where gc removed that number; no reader ever follows it."""
    backend = new_backend(kind, tmp_path)
    sleeper, weights = filled_store(backend, 2)
    missed = update_between(weights[2], next_weights(weights[2], 9), 2)
    take_over_and_go_on(backend, weights, by_claim=by_claim, num_updates=3)
    newest, reader = len(weights) - 1, VersionStore.open(backend)
    if gc_when == "before":
        reader.gc(1, min_age_s=0)
    for _ in range(2):
        with pytest.raises(FencedError, match="another writer has taken over"):
            sleeper.publish_update(missed)
    with pytest.raises(FencedError):
        sleeper.claim()
    made_anew = gc_when == "before"
    report = reader.fsck()
    assert report.damaged == ()
    assert [name for name in report.stray if name.startswith("versions/")] == [version_path(3)] * made_anew
    if gc_when == "after":
        reader.gc(1, min_age_s=0)
    assert_whole(reader, weights, 0 if gc_when == "never" else newest, stray=made_anew or gc_when == "never")
    reader.gc(1, min_age_s=0)
    assert_whole(reader, weights, newest)
    weights.append(next_weights(weights[-1], 10))
    VersionStore.open(backend).publish_update(update_between(weights[-2], weights[-1], newest))
    assert_whole(reader, weights, newest)


def test_a_writer_that_slept_between_its_object_and_its_version_file_is_fenced() -> None:
    """When it wakes, object and number are gone; it creates a version file that names nothing, and is fenced."""
    backend = Clocked()
    sleeper, weights = filled_store(backend, 2)
    missed = update_between(weights[2], next_weights(weights[2], 9), 2)

    def meanwhile(what: str, number: int) -> None:
        take_over_and_go_on(backend, weights, by_claim=True, num_updates=3)
        VersionStore.open(backend).gc(1, min_age_s=0)

    backend.before = meanwhile
    with pytest.raises(FencedError):
        sleeper.publish_update(missed)
    backend.before = None
    reader = VersionStore.open(backend)
    report = reader.fsck()
    assert (report.damaged, report.stray, report.materialisable) == ((), (version_path(3),), (6,))
    reader.gc(1, min_age_s=0)
    assert_whole(reader, weights, 6)


def test_a_number_that_is_made_anew_right_below_the_oldest_version_is_stray_too() -> None:
    """It is in a row with the others, and still no version: the digest that its successor was built on tells."""
    backend = new_backend("memory", Path())
    sleeper, weights = filled_store(backend, 2)
    missed = update_between(weights[2], next_weights(weights[2], 9), 2)
    take_over_and_go_on(backend, weights, by_claim=True, num_updates=1)
    reader = VersionStore.open(backend)
    reader.gc(1, min_age_s=0)
    with pytest.raises(FencedError):
        sleeper.publish_update(missed)
    report = reader.fsck()
    assert (report.damaged, report.lost, report.materialisable) == ((), (), (4,))
    assert version_path(3) in report.stray
    reader.gc(1, min_age_s=0)
    assert_whole(reader, weights, 4)


def test_a_damaged_version_file_in_the_way_stops_it() -> None:
    """What cannot be read cannot be given up either: nothing is removed."""
    backend = Clocked()
    store, _ = anchored_store(backend)
    backend.replace(version_path(NEWEST), backend.read(version_path(NEWEST))[:-1] + b" ")
    there = names(backend)
    with pytest.raises(FormatError, match=version_path(NEWEST)):
        store.gc(2, min_age_s=0)
    assert names(backend) == there


def test_an_empty_store_has_nothing_to_keep() -> None:
    """No version, no error; what a dead writer left goes when it is old."""
    backend = Clocked()
    store = new_store(backend)
    backend.write("updates/left.dcu", [b"1"])
    assert store.gc(1) == GcReport((), (), 0, None, ())
    backend.now += DAY_S
    assert store.gc(1) == GcReport((), ("updates/left.dcu",), 1, None, ())
    assert names(backend) == ["run.json"]


@pytest.mark.parametrize(("keep", "min_age_s"), [(0, 1.0), (-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_bad_arguments_are_refused(keep: int, min_age_s: float) -> None:
    """No version to keep, or an age that is none: nothing is removed."""
    backend = Clocked()
    store, weights = anchored_store(backend)
    with pytest.raises(InputError):
        store.gc(keep, min_age_s=min_age_s)
    assert_whole(store, weights, 0)
