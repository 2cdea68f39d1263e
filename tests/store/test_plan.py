"""Plans: the cheapest way to a version, over updates, folds and snapshots, in few reads."""

from __future__ import annotations

import functools
import logging
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import store_setups as setups
from deltacast.delta.errors import ChecksumError, MissingObjectError, StoreError, VerificationError
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.fetch import ObjectRef
from deltacast.store.folds import FoldRef
from deltacast.store.names import fold_path, update_path
from deltacast.store.objects import ObjectBackend
from deltacast.store.plan import READ_COST_BYTES, Plan, cheapest_way
from deltacast.store.records import UpdateRef, VersionRecord
from deltacast.store.snapshots import list_snapshots
from deltacast.store.version_store import VersionStore

DIGEST = "xxh3_128:" + "5a" * 16


@pytest.fixture
def memory(tmp_path: Path) -> ObjectBackend:
    return setups.new_backend("memory", tmp_path)


def record(version: int, update_bytes: int | None) -> VersionRecord:
    """A record whose update has so many bytes; None for a version that was published whole."""
    update = None
    snapshot = setups.a_snapshot_ref(version) if update_bytes is None else None
    if update_bytes is not None:
        update = UpdateRef(ObjectRef(update_path(version - 1, version, DIGEST), update_bytes, DIGEST), version - 1, 1)
    return VersionRecord(
        run_id="run", epoch=1, writer="0" * 16, version=version, state_digest=DIGEST, table_digest=DIGEST, num_words=9,
        published="2026-11-30T08:00:00Z", optimizer_step=None, update=update, snapshot=snapshot,
        previous=DIGEST if version else None,
    )  # fmt: skip


def a_fold(base: int, target: int, num_bytes: int) -> FoldRef:
    return FoldRef(ObjectRef(fold_path(base, target, DIGEST), num_bytes, DIGEST), base, target)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[VersionRecord], list[FoldRef], int, int]:
    num = draw(st.integers(2, 12))
    sizes = st.integers(1, 4 * READ_COST_BYTES)
    records = [record(0, None), *(record(n, draw(st.one_of(sizes, sizes, st.none()))) for n in range(1, num))]
    spans = st.tuples(st.integers(0, num), st.integers(0, num)).filter(lambda span: span[0] < span[1])
    folds = [a_fold(base, target, draw(sizes)) for base, target in draw(st.lists(spans, max_size=8))]
    start = draw(st.integers(0, num - 1))
    return records, folds, start, draw(st.integers(start, num - 1))


@given(chains())
@settings(max_examples=300, deadline=None)
def test_the_cheapest_way_is_found(case: tuple[list[VersionRecord], list[FoldRef], int, int]) -> None:
    """No other sequence of updates and folds costs less, by trying them all; steps follow one another."""
    records, folds, start, want = case
    edges = [(r.version - 1, r.version, r.update.object.num_bytes) for r in records if r.update is not None]
    edges += [(fold.base_version, fold.target_version, fold.object.num_bytes) for fold in folds]

    @functools.cache
    def cost(at: int) -> float:
        if at == want:
            return 0
        return min((size + 65536 + cost(to) for base, to, size in edges if base == at and to <= want), default=1e300)

    way = cheapest_way(reversed(records), folds, start, want)
    if way is None:
        assert cost(start) >= 1e300
        return
    assert way.cost_bytes == cost(start) == sum(step.object.num_bytes + 65536 for step in way.steps)
    assert [step.base.version for step in way.steps][:1] in ([start], [])
    assert [step.target.version for step in way.steps][-1:] in ([want], [])
    assert all(before.target is after.base for before, after in pairwise(way.steps))
    assert (start == want) == (not way.steps)


def targets(plan: Plan) -> list[int]:
    return [step.target.version for step in plan.updates]


def test_a_reader_that_is_there_needs_nothing(memory: ObjectBackend) -> None:
    """Have equals want: an empty plan; a version that does not exist is an error either way."""
    store, _ = setups.filled_store(memory, 2)
    plan = store.plan(2)
    assert (plan.have, plan.want, plan.snapshot, plan.updates, plan.num_bytes) == (2, 2, None, (), 0)
    for have, want in ((3, 3), (None, 3), (0, 3), (0, -1)):
        with pytest.raises(StoreError, match="versions 0 to 2"):
            store.plan(have, want)


def test_one_version_behind_is_one_update(memory: ObjectBackend) -> None:
    """The common case takes the one update and no snapshot."""
    store, _ = setups.filled_store(memory, 9)
    plan = store.plan(8)
    assert plan.snapshot is None
    assert [step.object for step in plan.updates] == [store.record(9).update.object]  # type: ignore[union-attr]
    assert not plan.updates[0].is_fold
    assert plan.num_bytes == plan.updates[0].object.num_bytes


def test_nothing_at_hand_begins_with_the_newest_snapshot(memory: ObjectBackend) -> None:
    """Without a version, with one that is gone, or with a newer one, the plan begins with a snapshot at or below."""
    store, weights = setups.filled_store(memory, 6)
    store.add_anchor(4, setups.source_of(weights[4]))
    for have, want, start, steps in ((None, 6, 4, [5, 6]), (None, 3, 0, [1, 2, 3]), (6, 5, 4, [5]), (99, 4, 4, [])):
        plan = store.plan(have, want)
        assert plan.snapshot is not None
        assert (plan.snapshot.version, targets(plan)) == (start, steps)
        sizes = [step.object.num_bytes for step in plan.updates]
        assert plan.num_bytes == plan.snapshot.weights_bytes + sum(sizes)


def test_a_snapshot_is_taken_where_it_is_cheaper(memory: ObjectBackend) -> None:
    """A reader far behind takes the anchor, one that is close behind its updates: by bytes and reads."""
    store, weights = setups.filled_store(memory, 12, folds=False)
    store.add_anchor(11, setups.source_of(weights[11]))
    far, close = store.plan(0), store.plan(10)
    assert far.snapshot is not None
    assert (far.snapshot.version, targets(far)) == (11, [12])
    assert (close.snapshot, targets(close)) == (None, [11, 12])


@pytest.mark.parametrize("how", ["flipped", "other weights", "gone"])
def test_a_snapshot_that_cannot_be_used_is_passed_over(
    memory: ObjectBackend, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A damaged manifest, or one of other weights, costs a warning and the way from the snapshot before it."""
    store, weights = setups.filled_store(memory, 3)
    if how == "other weights":
        with pytest.raises(VerificationError):
            store.add_anchor(2, setups.source_of(weights[1]))
    else:
        path = store.add_anchor(2, setups.source_of(weights[2])).path
        raw = memory.read(path)
        memory.delete(path) if how == "gone" else memory.replace(path, raw[:-9] + b"!" + raw[-8:])
    with caplog.at_level(logging.WARNING):
        plan = store.plan(None)
    assert plan.snapshot is not None
    assert (plan.snapshot.version, targets(plan)) == (0, [1, 2, 3])
    assert ("cannot be used" in caplog.text) == (how != "gone")


def test_a_plan_does_without_what_it_is_told_to(memory: ObjectBackend) -> None:
    """Each object that it named, in turn, until nothing leads there: no plan names one of them again."""
    store, weights = setups.filled_store(memory, 9)
    store.add_anchor(5, setups.source_of(weights[5]))
    without: list[str] = []
    starts: list[int] = []
    while True:
        try:
            plan = store.plan(None, 9, without=without)
        except StoreError:
            break
        assert plan.snapshot is not None
        used = [plan.snapshot.path, *(step.object.path for step in plan.updates)]
        assert set(used).isdisjoint(without)
        starts.append(plan.snapshot.version)
        without.append(used[1] if len(used) > 2 else used[0])
    assert starts == [5, 0]  # without update 6 only the fold leads to 9, and without the fold nothing
    last = store.record(9).update
    assert last is not None
    with pytest.raises(StoreError):
        store.plan(8, without=[last.object.path, *(path for _, path in list_snapshots(memory))])


def test_a_version_that_nothing_leads_to_is_named(memory: ObjectBackend) -> None:
    """Without any snapshot left, a reader without a version is told so; one with a version goes on."""
    store, _ = setups.filled_store(memory, 3)
    for info in list(memory.list("snapshots/")):
        memory.delete(info.name)
    with pytest.raises(StoreError, match="no snapshot leads to that version"):
        store.plan(None)
    assert targets(store.plan(1)) == [2, 3]


class Counting(MemoryBackend):
    """Counts what is asked of it."""

    reads = 0
    lists = 0

    def read(self, name: str) -> bytes:
        self.reads += 1
        return super().read(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.reads += 1
        super().read_into(name, start, out)

    def list(self, prefix: str, *, after: str = "") -> object:  # type: ignore[override]
        self.lists += 1
        return super().list(prefix, after=after)


@pytest.mark.timeout(300)
def test_a_thousand_updates_take_few_reads(tmp_path: Path) -> None:
    """Over 1000 versions, a plan and all that is in it take a few dozen reads, and give the bits.

    17 of them are of version files. Then at most 7 objects for each power of 8 on the way up and down: 33 from 1.
    """
    backend = Counting("thousand")
    _, weights = setups.filled_store(backend, 1000)
    for have, most in ((0, 40), (1, 50), (500, 40), (999, 3), (None, 40)):
        backend.reads = backend.lists = 0
        reader = VersionStore.open(backend)
        plan = reader.plan(have)
        updates = list(reader.updates(plan))
        assert backend.reads <= most, (have, backend.reads)
        assert backend.lists <= 5, (have, backend.lists)
        start = 0 if have is None else have
        assert setups.same(setups.replayed(weights[start], start, updates), weights[1000])
    reader.materialize(1000, tmp_path / "out")
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[1000])


def test_reading_a_removed_update_says_plan_again(memory: ObjectBackend) -> None:
    """What retention took since the plan was made is missing by name."""
    store, _ = setups.filled_store(memory, 2)
    plan = store.plan(0)
    memory.delete(plan.updates[1].object.path)
    updates = store.updates(plan)
    assert next(updates).target_version == 1
    with pytest.raises(MissingObjectError, match=plan.updates[1].object.path):
        next(updates)


def test_updates_are_held_to_their_records(memory: ObjectBackend) -> None:
    """Damage, another length and another good container in an update's place are named errors."""
    store, weights = setups.filled_store(memory, 2)
    path = store.plan(1).updates[0].object.path
    raw = memory.read(path)
    for at in range(len(raw)):
        memory.replace(path, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(ChecksumError, match=path):
            list(store.updates(store.plan(1)))
    for other in (raw[:-1], raw + b"\0", b"", memory.read(store.plan(0, 1).updates[0].object.path)):
        memory.replace(path, other)
        with pytest.raises(ChecksumError, match=path):
            store.read_update(store.plan(1).updates[0])
    memory.replace(path, raw)
    assert setups.same(setups.replayed(weights[1], 1, store.updates(store.plan(1))), weights[2])
