"""The version store: what is published is there, in order, once, whoever else writes and whatever fails."""

from __future__ import annotations

import json
import multiprocessing
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

import store_setups as setups
from deltacast.delta.codec import decode_update
from deltacast.delta.errors import (
    BaseError,
    ChecksumError,
    DeltacastError,
    FencedError,
    FormatError,
    InputError,
    MissingObjectError,
    ObjectExistsError,
    StoreError,
    TableError,
    VerificationError,
)
from deltacast.delta.patch import WeightUpdate
from deltacast.store.anchors import Anchors
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.names import version_path
from deltacast.store.objects import Buffer, ObjectBackend, ObjectInfo
from deltacast.store.records import VersionFile, VersionRecord
from deltacast.store.sealed import seal
from deltacast.store.version_store import VersionStore

KINDS = ("memory", "local")


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectBackend:
    return setups.new_backend(request.param, tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> ObjectBackend:
    return setups.new_backend("memory", tmp_path)


def names(backend: ObjectBackend) -> list[str]:
    return [info.name for info in backend.list("")]


def an_update(seed: int = 5, **changes: Any) -> WeightUpdate:
    """An update of the weights that `filled_store(_, 0)` holds."""
    old = setups.first_weights()
    update = setups.update_between(old, setups.next_weights(old, seed), 0)
    return replace(update, **changes)


def test_an_empty_store_says_so(backend: ObjectBackend) -> None:
    """A store without versions can be opened, has no head, and names what is missing when it is asked for more."""
    made = setups.new_store(backend)
    store = VersionStore.open(backend)
    assert (made.run_id, store.run_id) == (setups.RUN, setups.RUN)
    assert store.head() is None
    assert list(store.log()) == []
    assert store.versions() == range(0)
    for ask in (lambda: store.record(0), lambda: store.plan(None), lambda: store.plan(None, 0)):
        with pytest.raises(StoreError, match="no version"):
            ask()
    with pytest.raises(InputError, match="an empty store"):
        store.publish_update(an_update())
    assert store.claim() is None
    assert names(backend) == ["run.json"]


def test_negative_numbers_are_refused(memory: ObjectBackend) -> None:
    """No version and no length of a log is below 0; nothing is made."""
    store, _ = setups.filled_store(memory, 3)
    asked: list[Callable[[], object]] = [
        lambda: store.plan(-1), lambda: store.plan(-1, 2), lambda: store.fold(-5, 3), lambda: store.log(-1),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(InputError, match=r"count from 0|fewer than 0"):
            ask()
    assert list(store.log(0)) == []


def test_a_store_is_made_once(backend: ObjectBackend) -> None:
    """A second create is refused, also by the same run id; opening what is not there is refused."""
    with pytest.raises(MissingObjectError, match="no store at"):
        VersionStore.open(backend)
    setups.new_store(backend)
    with pytest.raises(ObjectExistsError, match="Open it"):
        setups.new_store(backend)
    assert VersionStore.open(backend).run_id == setups.RUN


def test_run_ids_are_random_and_folders_are_made(tmp_path: Path) -> None:
    """Without a run id each store gets one of its own; create makes the folder, open does not."""
    with VersionStore.create(tmp_path / "a") as a, VersionStore.create(str(tmp_path / "b")) as b:
        assert a.run_id != b.run_id
    with pytest.raises(StoreError):
        VersionStore.open(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_is_published_is_recorded(backend: ObjectBackend) -> None:
    """A snapshot and two updates: records state versions, digests, sizes and steps as they are."""
    store, weights = setups.filled_store(backend, 2)
    records = list(VersionStore.open(backend).log())
    assert [record.version for record in records] == [2, 1, 0]
    assert [record.state_digest for record in records] == [setups.state_digest(each) for each in reversed(weights)]
    assert {record.table_digest for record in records} == {setups.digests(weights[0])[0]}
    assert {record.num_words for record in records} == {51}
    assert [record.optimizer_step for record in records] == [20, 10, None]
    assert [record.epoch for record in records] == [1, 1, 1]
    assert len({record.writer for record in records}) == 1
    assert store.head() == records[0]
    assert [store.record(version) for version in (2, 1, 0)] == records
    assert list(store.log(limit=1)) == records[:1]
    with pytest.raises(StoreError, match=r"version 3.*versions 0 to 2"):
        store.record(3)


def test_updates_are_stored_before_the_version_that_names_them(memory: ObjectBackend) -> None:
    """Whoever sees a version file finds everything that it names; HEAD comes last."""
    order: list[str] = []

    class Recording(MemoryBackend):
        def create(self, name: str, data: Buffer) -> None:
            order.append(name)
            super().create(name, data)

        def write(self, name: str, pieces: Iterable[Buffer]) -> int:
            order.append(name)
            return super().write(name, pieces)

        def replace(self, name: str, data: Buffer) -> None:
            order.append(name)
            super().replace(name, data)

    setups.filled_store(Recording("recorded"), 1)
    first, second = order.index(version_path(0)), order.index(version_path(1))
    assert order[0] == "run.json"
    assert all(name.startswith("snapshots/") for name in order[1:first])
    assert order[first - 1].endswith("/manifest.json")
    assert order[first + 1] == "HEAD"
    assert [name.split("/")[0] for name in order[first + 2 :]] == ["updates", "versions", "HEAD"]
    assert second == len(order) - 2


def test_containers_are_plain_format_1(backend: ObjectBackend) -> None:
    """An update object is a container that any reader of docs/format.md decodes, with the store's epoch in it."""
    store, weights = setups.filled_store(backend, 1)
    record = store.record(1)
    assert record.update is not None
    update = decode_update(backend.read(record.update.object.path))
    assert (update.epoch, update.base_version, update.target_version) == (1, 0, 1)
    assert setups.same(setups.replayed(weights[0], 0, [update]), weights[1])
    assert {patch.form for patch in update.patches} == {"delta"}
    assert record.update.num_changed == sum(int((weights[0][name] != weights[1][name]).sum()) for name in weights[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"run_id": "other"}, BaseError, "another run"),
        ({"base_version": 1, "target_version": 2}, BaseError, "not based on the newest"),
        ({"base_digest": setups.state_digest(setups.first_weights(1))}, BaseError, "not based on the newest"),
        ({"target_version": 2}, InputError, "without a gap"),
        ({"base_version": None, "base_digest": None}, InputError, "publish_snapshot"),
        ({"table_digest": "xxh3_128:" + "0" * 32}, TableError, "publish_snapshot"),
        ({"removed": ("x",)}, TableError, "publish_snapshot"),
    ],
)
def test_updates_that_do_not_follow_are_refused(
    memory: ObjectBackend, changes: dict[str, Any], error: type[DeltacastError], message: str
) -> None:
    """An update of another run, base, number or table is refused by name, and nothing is written."""
    store, _ = setups.filled_store(memory, 0)
    before = names(memory)
    with pytest.raises(error, match=message):
        store.publish_update(an_update(**changes))
    assert names(memory) == before


def test_a_repair_and_words_without_a_base_are_refused(memory: ObjectBackend) -> None:
    """A repair makes no version; absolute words whose base is not known cannot be folded, so they are not stored."""
    store, weights = setups.filled_store(memory, 0)
    digest = setups.state_digest(weights[0])
    with pytest.raises(InputError, match="without a gap"):
        store.publish_update(an_update(target_version=0, target_digest=digest))
    bare = tuple(replace(patch, base_values=None) for patch in an_update().patches)
    with pytest.raises(InputError):
        store.publish_update(replace(an_update(), patches=bare))
    assert store.versions() == range(1)


def test_an_empty_update_is_a_version(backend: ObjectBackend) -> None:
    """Nothing changed is no failure: the version moves, the weights do not."""
    store, weights = setups.filled_store(backend, 1)
    record = store.publish_update(setups.update_between(weights[1], weights[1], 1))
    assert (record.version, record.state_digest) == (2, setups.state_digest(weights[1]))
    assert setups.same(setups.replayed(weights[0], 0, store.updates(store.plan(0))), weights[1])


def test_the_first_version_has_the_number_that_the_store_was_made_for(memory: ObjectBackend) -> None:
    """All first publishes want the same name, so that one of two writers loses; other numbers are refused."""
    store = setups.new_store(memory, first_version=17)
    other = VersionStore.open(memory)
    source = setups.source_of(setups.first_weights())
    with pytest.raises(InputError, match="expected 17, found 5"):
        store.publish_snapshot(source, version=5)
    assert store.publish_snapshot(source, version=17, optimizer_step=3).optimizer_step == 3
    other._writer._knows_tip, other._writer._epoch = True, 1  # it looked at the store before
    with pytest.raises(FencedError):
        other.publish_snapshot(source)
    assert store.versions() == range(17, 18)


def test_a_version_may_be_published_whole(backend: ObjectBackend, tmp_path: Path) -> None:
    """A full version needs no update; who is before it fetches it whole, who is after it replays from it."""
    store, weights = setups.filled_store(backend, 1)
    fresh = setups.first_weights(9)
    assert store.publish_snapshot(setups.source_of(fresh)).version == 2
    newest = setups.next_weights(fresh, 10)
    store.publish_update(setups.update_between(fresh, newest, 2))
    plan = store.plan(1)
    assert plan.snapshot is not None
    assert (plan.snapshot.version, [step.target.version for step in plan.updates]) == (2, [3])
    store.materialize(1, tmp_path / "one")
    store.materialize(None, tmp_path / "three")
    assert setups.same(setups.folder_weights(tmp_path / "one"), weights[1])
    assert setups.same(setups.folder_weights(tmp_path / "three"), newest)


def test_a_second_writer_takes_over_with_its_first_publish(backend: ObjectBackend) -> None:
    """The new writer's epoch is higher; the old one finds out at its next publish, and stays out."""
    old, weights = setups.filled_store(backend, 1)
    new = VersionStore.open(backend)
    third = setups.next_weights(weights[1], 7)
    record = new.publish_update(setups.update_between(weights[1], third, 1))
    assert record.epoch == 2
    mine = setups.update_between(weights[1], setups.next_weights(weights[1], 8), 1)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"epoch 1, writer [0-9a-f]{16}, found epoch 2"):
            old.publish_update(mine)
        with pytest.raises(FencedError):
            old.claim()
    assert old.head() == record
    assert VersionStore.open(backend).record(2) == record


def test_a_claim_stops_every_older_writer(backend: ObjectBackend) -> None:
    """A claim is an empty update of a higher epoch; claiming twice changes nothing more."""
    old, weights = setups.filled_store(backend, 1)
    new = VersionStore.open(backend)
    head = new.claim()
    assert head is not None
    assert new.claim() == new.head() == head
    assert (head.version, head.epoch, head.state_digest) == (2, 2, setups.state_digest(weights[1]))
    assert head.update is not None
    assert head.update.num_changed == 0
    with pytest.raises(FencedError):
        old.publish_update(setups.update_between(weights[1], setups.next_weights(weights[1], 8), 1))
    assert new.publish_update(setups.update_between(weights[1], weights[1], 2)).epoch == 2


def test_claims_that_lose_a_race_are_made_again(memory: ObjectBackend) -> None:
    """A writer that publishes between a claim's look and its create is overtaken, not given in to."""
    old, weights = setups.filled_store(memory, 0)

    class Overtaken(MemoryBackend):
        tries = 0

        def create(self, name: str, data: Buffer) -> None:
            if self.tries < 3:
                self.tries += 1
                head = old.head()
                assert head is not None
                old.publish_update(setups.update_between(weights[0], weights[0], head.version))
            super().create(name, data)

    new = VersionStore.open(Overtaken(memory.url.removeprefix("memory://")))
    head = new.claim()
    assert head is not None
    assert (head.version, head.epoch) == (4, 2)
    with pytest.raises(FencedError):
        old.publish_update(setups.update_between(weights[0], weights[0], 3))


@pytest.mark.parametrize("removed", [0, 3, 8])
def test_a_writer_that_slept_cannot_bring_an_old_number_back(backend: ObjectBackend, removed: int) -> None:
    """A frozen writer's create may succeed once its number was removed: it is told, and no reader is led there."""
    old, weights = setups.filled_store(backend, 1)
    new = VersionStore.open(backend)
    for version in range(1, 9):
        weights.append(setups.next_weights(weights[-1], 50 + version))
        new.publish_update(setups.update_between(weights[-2], weights[-1], version))
    new.add_anchor(8, setups.source_of(weights[8]))
    for version in range(removed):  # what gc does: the oldest files first
        backend.delete(version_path(version))
    records = list(VersionStore.open(backend).log())
    with pytest.raises(FencedError):
        old.publish_update(setups.update_between(weights[1], setups.next_weights(weights[1], 99), 1))
    reader = VersionStore.open(backend)
    assert list(reader.log())[: len(records)] == records
    assert setups.same(setups.replayed(weights[8], 8, reader.updates(reader.plan(8))), weights[9])
    backend.delete("HEAD")
    assert VersionStore.open(backend).head() == records[0]


class Flaky(MemoryBackend):
    """Creates of version files fail in a chosen way: `after` (it happened), `before` (it did not), `late`.

    So many `times`; by default once.
    """

    how = ""
    times = 1
    late: tuple[str, bytes] | None = None
    blind = False

    def create(self, name: str, data: Buffer) -> None:
        if not name.startswith("versions/") or not self.how:
            return super().create(name, data)
        how, self.times = self.how, self.times - 1
        if not self.times:
            self.how = ""
        if how == "after":
            with suppress(ObjectExistsError):
                super().create(name, data)
        if how == "late":
            self.late = name, bytes(data)
        if how == "twice":
            super().create(name, data)
            return super().create(name, data)
        raise StoreError("timed out")

    def stat(self, name: str) -> ObjectInfo:
        if self.blind and name.startswith("versions/"):
            raise StoreError("timed out")
        return super().stat(name)


@pytest.fixture
def flaky(tmp_path: Path) -> tuple[Flaky, VersionStore]:
    backend = Flaky(setups.new_backend("memory", tmp_path).url.removeprefix("memory://"))
    return backend, setups.filled_store(backend, 0)[0]


@pytest.mark.parametrize("how", ["after", "twice"])
def test_a_create_that_happened_is_success(flaky: tuple[Flaky, VersionStore], how: str) -> None:
    """A lost answer, or a request that was sent twice: the file that is there is ours, so the version is published."""
    backend, store = flaky
    backend.how = how
    assert store.publish_update(an_update()).version == 1
    weights = setups.next_weights(setups.first_weights(), 5)
    assert store.publish_update(setups.update_between(weights, weights, 1)).version == 2
    assert store.versions() == range(3)


def test_a_create_that_did_not_happen_can_be_repeated(flaky: tuple[Flaky, VersionStore]) -> None:
    """A writer tries twice; then the same update is published again, by the same writer."""
    backend, store = flaky
    backend.how, backend.times = "before", 2
    with pytest.raises(StoreError, match="timed out"):
        store.publish_update(an_update())
    assert store.versions() == range(1)
    assert store.publish_update(an_update()).epoch == 1
    assert store.versions() == range(2)


def test_a_create_that_nobody_can_tell_is_found_at_the_next_try(flaky: tuple[Flaky, VersionStore]) -> None:
    """It happened, but could not be read back: publishing the same update once more returns its record."""
    backend, store = flaky
    backend.how, backend.times, backend.blind = "after", 2, True
    with pytest.raises(StoreError, match="not known"):
        store.publish_update(an_update())
    backend.blind = False
    record = store.publish_update(an_update())
    assert record == store.head()
    assert store.versions() == range(2)
    with pytest.raises(BaseError, match="not based on the newest"):
        store.publish_update(an_update(seed=6))


def test_a_create_that_lands_late_is_not_overwritten(flaky: tuple[Flaky, VersionStore]) -> None:
    """A request that arrives after the writer looked for it wins its number; the writer's other update does not."""
    backend, store = flaky
    backend.how, backend.times = "late", 2
    with pytest.raises(StoreError):
        store.publish_update(an_update())
    assert backend.late is not None
    late = backend.late
    backend.create(*late)
    with pytest.raises(BaseError):
        store.publish_update(an_update(seed=6))
    assert backend.read(version_path(1)) == late[1]
    assert store.publish_update(an_update()) == store.head()


def test_a_create_that_may_not_be_durable_is_no_success(flaky: tuple[Flaky, VersionStore]) -> None:
    """Readers see the version, but its writer was not told that it is on the disk: publishing it again tells."""
    backend, store = flaky
    backend.how, backend.times = "after", 3
    with pytest.raises(StoreError, match=r"a power cut may undo it.*Publish it again"):
        store.publish_update(an_update())
    assert store.versions() == range(2)
    record = store.publish_update(an_update())  # once more told nothing, then that there is one
    assert (backend.times, record) == (0, store.head())


def test_one_failed_create_is_made_up_for(flaky: tuple[Flaky, VersionStore]) -> None:
    """Whether it happened or not, the second attempt makes the version or finds it."""
    for version, how in enumerate(("before", "after")):
        backend, store = flaky
        backend.how, backend.times = how, 1
        weights = setups.first_weights()
        assert store.publish_update(setups.update_between(weights, weights, version)).version == version + 1


def test_a_head_that_cannot_be_moved_is_no_failure(memory: ObjectBackend, caplog: pytest.LogCaptureFixture) -> None:
    """HEAD is a hint: the version is published without it, and found."""

    class Stuck(MemoryBackend):
        def replace(self, name: str, data: Buffer) -> None:
            raise StoreError("read-only")

    store, _ = setups.filled_store(Stuck(memory.url.removeprefix("memory://")), 2)
    assert store.versions() == range(3)
    head = store.head()
    assert head is not None
    assert head.version == 2
    assert "HEAD could not be moved" in caplog.text


@pytest.mark.parametrize(
    "hint", [b"", b"0\n", b"1\n", b"2\n", b"2", b"3\n", b"999\n", b"9" * 19 + b"\n", b"-1\n", b"x" * 30, b"\xff\n",
             "٢\n".encode()],
)  # fmt: skip
def test_a_damaged_head_hint_changes_nothing(backend: ObjectBackend, hint: bytes) -> None:
    """Whatever HEAD holds, or if it is gone, the newest version is the last one that is listed."""
    store, _ = setups.filled_store(backend, 2)
    expected = store.head()
    backend.replace("HEAD", hint)
    assert VersionStore.open(backend).head() == expected
    backend.delete("HEAD")
    assert VersionStore.open(backend).head() == expected


def test_a_listing_that_misses_a_new_version_is_made_again(memory: ObjectBackend) -> None:
    """Versions that came while a listing was made may be missing from it, out of order; older ones do not vanish."""

    class Torn(MemoryBackend):
        torn = False

        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            hide, self.torn = self.torn, False
            return (info for info in super().list(prefix, after=after) if not hide or info.name != version_path(2))

    store, _ = setups.filled_store(memory, 3)
    backend = Torn(memory.url.removeprefix("memory://"))
    reader = VersionStore.open(backend)
    for ask in (reader.versions, lambda: [record.version for record in reversed(list(reader.log()))]):
        backend.torn = True
        assert list(ask()) == [0, 1, 2, 3]
    backend.torn = True
    assert reader.head() == store.head()


def test_of_racing_processes_one_goes_on(tmp_path: Path) -> None:
    """Two processes publish on the newest version, again and again: one unbroken chain holds what they were told of.

    A writer that is overtaken right after its create is told that it was fenced, and its version stands.
    """
    store, weights = setups.filled_store(setups.new_backend("local", tmp_path), 0)
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(2)
    processes = [
        spawn.Process(target=setups.race_to_publish, args=(str(tmp_path / "store"), writer, 15, start))
        for writer in (1, 2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    told = [process.exitcode for process in processes]
    records = list(store.log())
    assert [record.version for record in records] == list(range(len(records)))[::-1]
    steps = [record.optimizer_step for record in records[:-1]]
    assert len(set(steps)) == len(steps)
    for writer, published in enumerate(told, 1):
        assert published is not None
        assert 0 < published <= sum(step is not None and step // 1000 == writer for step in steps)
    final = setups.replayed(weights[0], 0, store.updates(store.plan(0)))
    assert setups.state_digest(final) == records[0].state_digest


def publish_at(start: threading.Barrier, store: VersionStore, update: WeightUpdate, told: list[bool]) -> None:
    start.wait(60)
    try:
        store.publish_update(update)
        told.append(True)
    except (FencedError, BaseError):
        told.append(False)


def test_of_racing_threads_one_goes_on() -> None:
    """Likewise for eight writers in one process, twenty times: one is told so, and its version stands."""
    for _ in range(20):
        store, weights = setups.filled_store(setups.new_backend("memory", Path()), 0)
        start = threading.Barrier(8)
        news = [setups.next_weights(weights[0], writer) for writer in range(8)]
        told: list[list[bool]] = [[] for _ in news]
        threads = [
            threading.Thread(
                target=publish_at,
                args=(start, VersionStore.open(store.backend), setups.update_between(weights[0], new, 0), mine),
            )
            for new, mine in zip(news, told, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(told) == [[False]] * 7 + [[True]]
        winner = news[told.index([True])]
        assert setups.same(setups.replayed(weights[0], 0, store.updates(store.plan(0))), winner)


def signed_store(memory: ObjectBackend) -> VersionStore:
    return setups.filled_store(memory, 9, key=setups.KEY)[0]


def test_a_signed_store_is_read_with_its_key_only(memory: ObjectBackend, tmp_path: Path) -> None:
    """With the key all is well; another key is refused at once; without one the store can be read."""
    signed_store(memory)
    with pytest.raises(ChecksumError, match=r"run\.json"):
        VersionStore.open(memory, signing_key=b"other")
    for key in (setups.KEY, None):
        store = VersionStore.open(memory, signing_key=key)
        out = tmp_path / f"{key!r}"
        store.materialize(9, out)
        assert len(list(store.updates(store.plan(0)))) == 2


def test_without_its_key_a_signed_store_is_only_read(memory: ObjectBackend) -> None:
    """Whatever would change it is refused by name, and changes nothing; so what the key's owners read stays whole."""
    store, weights = setups.filled_store(memory, 2, key=setups.KEY)
    keyless = VersionStore.open(memory)
    assert (store.is_signed, keyless.is_signed) == (True, True)
    assert not VersionStore.open(setups.filled_store(setups.new_backend("memory", Path()), 0)[0].backend).is_signed
    before = {name: memory.read(name) for name in names(memory)}
    source = setups.source_of(weights[2])
    for change in (
        lambda: keyless.publish_update(setups.update_between(weights[2], weights[2], 2)),
        lambda: keyless.publish_snapshot(source),
        keyless.claim,
        lambda: keyless.add_anchor(2, source),
        lambda: keyless.fold(0, 2),
        lambda: keyless.register_reader("reader", 2, 60),
        lambda: keyless.gc(1, min_age_s=0),
    ):
        with pytest.raises(InputError, match=r"is signed.*signing key"):
            change()
    assert keyless.fold_aligned(8) == []
    assert {name: memory.read(name) for name in names(memory)} == before
    assert keyless.head() == store.head()


def test_a_version_rests_on_the_bytes_of_the_one_before(memory: ObjectBackend) -> None:
    """Not on what this code would write: a file in which a later writer says more is followed as it is."""
    store, weights = setups.filled_store(memory, 1)
    fields = json.loads(memory.read(version_path(1)))
    del fields["checksum"], fields["signature"]
    raw = seal({**fields, "mood": "good"}, None)
    memory.replace(version_path(1), raw)
    record = VersionStore.open(memory).publish_update(setups.update_between(weights[1], weights[1], 1))
    assert record.previous == f"xxh3_128:{xxhash.xxh3_128(raw).hexdigest()}"
    assert [each.version for each in store.log()] == [2, 1, 0]


def test_with_a_key_an_unsigned_store_is_refused(memory: ObjectBackend) -> None:
    """What was written without a key is not taken for signed, file by file."""
    setups.filled_store(memory, 1)
    with pytest.raises(ChecksumError, match=r"run\.json is not signed"):
        VersionStore.open(memory, signing_key=setups.KEY)
    other = f"memory://{secrets.token_hex(8)}"
    signed = VersionStore.create(other, run_id=setups.RUN, signing_key=setups.KEY)
    memory.replace("run.json", signed.backend.read("run.json"))
    with pytest.raises(ChecksumError, match=r"versions/.* is not signed"):
        VersionStore.open(memory, signing_key=setups.KEY).head()


def test_signed_files_do_not_count_in_another_place(memory: ObjectBackend, tmp_path: Path) -> None:
    """A signed version file under another number, or in another run's store, is refused."""
    store = signed_store(memory)
    memory.create(version_path(10), memory.read(version_path(9)))
    with pytest.raises(ChecksumError, match="another place"):
        store.head()
    other = VersionStore.create(setups.new_backend("memory", tmp_path), run_id="other", signing_key=setups.KEY)
    other.backend.create(version_path(0), memory.read(version_path(0)))
    with pytest.raises(FormatError, match="of another run"):
        other.head()


def test_an_earlier_version_file_cannot_be_exchanged(memory: ObjectBackend) -> None:
    """Another well-signed file of the same run and version is not followed: it is not what its successor names."""
    store, weights = setups.filled_store(memory, 0, key=setups.KEY)
    other = setups.filled_store(setups.new_backend("memory", Path()), 0, key=setups.KEY)[0]
    for version in range(70):
        store.publish_update(setups.update_between(weights[0], weights[0], version), folds=False)
        other.publish_update(setups.update_between(weights[0], weights[0], version), folds=False)
    memory.replace(version_path(5), other.backend.read(version_path(5)))  # 70 to 6 are read from one file
    assert [record.version for record in store.log()] == list(range(70, 5, -1))
    assert store.version_log.read(5).record.writer != store.record(6).writer
    with pytest.raises(StoreError):
        store.record(5)


@pytest.mark.parametrize("key", [None, setups.KEY])
def test_every_flipped_byte_of_the_newest_version_file_is_noticed(memory: ObjectBackend, key: bytes | None) -> None:
    """Reading a store whose newest version file is damaged names that file, and a writer does not go on from it."""
    store, _ = setups.filled_store(memory, 1, key=key)
    raw = memory.read(version_path(1))
    for at in range(0, len(raw), 7):
        memory.replace(version_path(1), raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(FormatError, match=version_path(1)):
            store.head()
    with pytest.raises(FormatError, match=version_path(1)):
        VersionStore.open(memory, signing_key=key).publish_update(an_update())


def test_a_huge_version_file_is_not_read(memory: ObjectBackend) -> None:
    """The size is looked at first."""
    store, _ = setups.filled_store(memory, 1)
    memory.replace(version_path(1), bytes(2 << 20))
    with pytest.raises(FormatError, match="too large"):
        store.head()


def test_a_long_log_is_read_in_strides(memory: ObjectBackend) -> None:
    """Every version comes once, newest first, and a version file that is gone ends the log there."""
    store, weights = setups.filled_store(memory, 0)
    for version in range(140):
        store.publish_update(setups.update_between(weights[0], weights[0], version))
    assert [record.version for record in store.log()] == list(range(140, -1, -1))
    assert store.record(3).version == 3
    for version in range(30):
        memory.delete(version_path(version))
    assert [record.version for record in store.log()] == list(range(140, 29, -1))
    assert store.versions() == range(30, 141)
    with pytest.raises(StoreError, match=r"version 29.*versions 30 to 140"):
        store.record(29)
    file = store.version_log.read(140)
    assert isinstance(file, VersionFile)
    assert len(file.recent) == 64


def test_anchors_are_snapshots_of_published_versions(backend: ObjectBackend) -> None:
    """An anchor must have its version's weights; plans then begin with it."""
    store, weights = setups.filled_store(backend, 3)
    plan = store.plan(None)
    assert plan.snapshot is not None
    assert plan.snapshot.version == 0
    with pytest.raises(VerificationError, match="no snapshot of its version"):
        store.add_anchor(2, setups.source_of(weights[1]))
    plan = store.plan(None)
    assert plan.snapshot is not None
    assert plan.snapshot.version == 0
    ref = store.add_anchor(2, setups.source_of(weights[2]))
    plan = store.plan(None)
    assert plan.snapshot is not None
    assert (plan.snapshot.version, plan.snapshot.path) == (2, ref.path)
    with pytest.raises(StoreError, match="versions 0 to 3"):
        store.add_anchor(4, setups.source_of(weights[3]))


def test_an_anchor_is_due_after_so_many_updates_or_bytes(memory: ObjectBackend) -> None:
    """Counted since the last snapshot that can be used; without one it is always due, in an empty store never."""
    store = setups.new_store(memory)
    assert not store.anchor_due()
    store, weights = setups.filled_store(setups.new_backend("memory", Path()), 5)
    update = store.record(5).update
    whole = store.record(0).snapshot
    assert update is not None
    assert whole is not None
    share = 5 * update.object.num_bytes / whole.weights_bytes  # all five are of about one size
    many = 10**6
    assert [store.anchor_due(Anchors(every, many)) for every in (4, 5, 6)] == [True, True, False]
    assert [store.anchor_due(Anchors(many, share * factor)) for factor in (0.8, 1.2)] == [True, False]
    store.add_anchor(3, setups.source_of(weights[3]))
    assert [store.anchor_due(Anchors(every, many)) for every in (2, 3)] == [True, False]
    for info in list(store.backend.list("snapshots/")):
        store.backend.delete(info.name)
    assert store.anchor_due(Anchors(many, many))
    for every, fraction in ((0, 0.5), (1, 0.0), (1, float("nan"))):
        with pytest.raises(InputError, match="positive"):
            Anchors(every, fraction)


def test_a_head_that_is_removed_while_it_is_looked_for_is_looked_for_again(memory: ObjectBackend) -> None:
    """A newer version came and retention took the one that was listed: the reader finds the newer one."""
    store, weights = setups.filled_store(memory, 2)

    class Overtaken(MemoryBackend):
        def stat(self, name: str) -> ObjectInfo:
            if name == version_path(2) and len(store.versions()) == 3:
                store.publish_snapshot(setups.source_of(weights[2]))
                for version in range(3):
                    self.delete(version_path(version))
            return super().stat(name)

    reader = VersionStore.open(Overtaken(memory.url.removeprefix("memory://")))
    assert reader.head() == store.head()
    memory.delete(version_path(3))
    assert reader.head() is None


def test_following_yields_each_version_once(memory: ObjectBackend) -> None:
    """Old versions come at once, new ones as they are published, in order; a stop ends the wait."""
    store, weights = setups.filled_store(memory, 2)
    stop = threading.Event()
    seen = threading.Semaphore(0)
    found: list[int] = []

    def follow(versions: Iterator[VersionRecord]) -> None:
        for record in versions:
            found.append(record.version)
            seen.release()

    versions = VersionStore.open(memory).follow(0, poll_s=(0.001, 0.01), stop=stop)
    reader = threading.Thread(target=follow, args=(versions,))
    reader.start()
    for version in range(2, 5):
        store.publish_update(setups.update_between(weights[2], weights[2], version))
    for _ in range(5):
        assert seen.acquire(timeout=30)
    stop.set()
    reader.join(30)
    assert found == [1, 2, 3, 4, 5]
    assert [record.version for record in store.follow(2, timeout_s=0.0)] == [3, 4, 5]
    assert list(store.follow(5, timeout_s=0.01)) == []
    with pytest.raises(InputError, match="pauses"):
        next(store.follow(5, poll_s=(0, 1)))


def test_version_files_are_json_that_people_can_read(memory: ObjectBackend) -> None:
    """A version file is one JSON object; its record says where the update is."""
    setups.filled_store(memory, 1)
    record = json.loads(memory.read(version_path(1)))["record"]
    assert record["version"] == 1
    assert memory.stat(record["update"]["object"]["path"]).num_bytes == record["update"]["object"]["num_bytes"]
