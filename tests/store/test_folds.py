"""Folds and the whole store against a naive model: whatever is published, folded, damaged and read, bits are bits."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import made_updates as made
import store_setups as setups
from deltacast.delta.codec import decode_update, encode_update
from deltacast.delta.errors import FencedError, InputError, StoreError
from deltacast.delta.patch import WeightUpdate
from deltacast.store import folds
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.fetch import content_digest
from deltacast.store.folds import aligned_spans, fold_updates, list_folds, worth_folding
from deltacast.store.names import fold_path, update_path
from deltacast.store.objects import ObjectBackend
from deltacast.store.version_store import VersionStore


@pytest.fixture(params=["memory", "local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectBackend:
    return setups.new_backend(request.param, tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> ObjectBackend:
    return setups.new_backend("memory", tmp_path)


def spans(backend: ObjectBackend) -> list[tuple[int, int]]:
    return [(fold.base_version, fold.target_version) for fold in list_folds(backend)]


def test_spans_are_aligned_to_powers_of_eight() -> None:
    """Which folds end at a version, and that none begins before the first version there is."""
    assert list(aligned_spans(7, 0)) == []
    assert list(aligned_spans(8, 0)) == [(0, 8)]
    assert list(aligned_spans(8, 1)) == []
    assert list(aligned_spans(72, 0)) == [(64, 72)]
    assert list(aligned_spans(64, 0)) == [(56, 64), (0, 64)]
    assert list(aligned_spans(512, 10)) == [(504, 512), (448, 512)]
    assert list(aligned_spans(1024, 0)) == [(1016, 1024), (960, 1024), (512, 1024)]


def test_the_writer_folds_aligned_spans(backend: ObjectBackend) -> None:
    """After 64 updates every span of eight has a fold, and so has the whole; each is one container with its bits."""
    store, weights = setups.filled_store(backend, 66)
    assert spans(backend) == sorted([(base, base + 8) for base in range(0, 64, 8)] + [(0, 64)])
    plan = store.plan(0)
    assert [(step.base.version, step.target.version) for step in plan.updates] == [(0, 64), (64, 65), (65, 66)]
    assert [step.is_fold for step in plan.updates] == [True, False, False]
    for have in (0, 3, 8, 57, 63):
        assert setups.same(setups.replayed(weights[have], have, store.updates(store.plan(have))), weights[66])


def test_what_changes_much_is_not_folded(memory: ObjectBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 51 words 6 are an eighth: spans whose changes add up to more are left, and so are the wider ones over them."""
    monkeypatch.setattr(folds, "_FEW_CHANGES", 0)
    store, weights = setups.filled_store(memory, 0)
    for version in range(72):
        num_changed = int(version % 8 < 2) if version < 64 else 0
        weights.append(setups.next_weights(weights[-1], version, num_changed))
        store.publish_update(setups.update_between(weights[-2], weights[-1], version))
    assert spans(memory) == [(base, base + 8) for base in range(0, 72, 8)]
    records = list(store.log())
    assert worth_folding(records[8:16])
    assert not worth_folding(records[8:])
    assert setups.same(setups.replayed(weights[0], 0, store.updates(store.plan(0))), weights[72])


def test_few_changes_are_folded_however_small_the_model(memory: ObjectBackend) -> None:
    """More than there are words, but nobody minds the memory."""
    store, _ = setups.filled_store(memory, 8)
    changes = [record.update.num_changed for record in store.log() if record.update is not None]
    assert sum(changes) > 51
    assert spans(memory) == [(0, 8)]


def test_folds_can_be_left_to_others(memory: ObjectBackend) -> None:
    """A writer in a hurry publishes without them; whoever has time makes them."""
    store, weights = setups.filled_store(memory, 16, folds=False)
    assert spans(memory) == []
    reader = VersionStore.open(memory)
    assert [fold.base_version for fold in reader.fold_aligned(16)] == [8]
    made_here = reader.fold(3, 12)
    assert spans(memory) == [(3, 12), (8, 16)]
    assert memory.stat(made_here.object.path).num_bytes == made_here.object.num_bytes
    updates = list(store.updates(store.plan(3, 12)))
    assert [(update.base_version, update.target_version) for update in updates] == [(3, 12)]
    assert setups.same(setups.replayed(weights[3], 3, updates), weights[12])


def test_what_cannot_be_folded_is_said(memory: ObjectBackend) -> None:
    """Fewer than two updates, versions that do not exist, and a version published whole in between."""
    store, weights = setups.filled_store(memory, 3)
    for base, target in ((1, 1), (1, 2), (2, 1)):
        with pytest.raises(InputError, match="two updates"):
            store.fold(base, target)
    store.publish_snapshot(setups.source_of(weights[3]))
    for base, target in ((2, 9), (7, 9), (2, 4)):
        with pytest.raises(StoreError, match="no updates lead"):
            store.fold(base, target)
    with pytest.raises(InputError, match="nothing to fold"):
        fold_updates([])


def test_a_fold_that_fails_does_not_fail_the_publish(memory: ObjectBackend, caplog: pytest.LogCaptureFixture) -> None:
    """Folds are a cache: a full disk for them is a warning."""

    class Full(MemoryBackend):
        def write(self, name: str, pieces: object) -> int:
            if name.startswith("folds/"):
                raise StoreError("no space left")
            return super().write(name, pieces)  # type: ignore[arg-type]

    store, weights = setups.filled_store(Full(memory.url.removeprefix("memory://")), 8)
    assert store.versions() == range(9)
    assert "versions 0 to 8 could not be folded: no space left" in caplog.text
    assert setups.same(setups.replayed(weights[0], 0, store.updates(store.plan(0))), weights[8])


def test_changes_that_cancel_out_fold_to_nothing(memory: ObjectBackend) -> None:
    """There and back again: an empty fold, which is still a way."""
    store, weights = setups.filled_store(memory, 1)
    store.publish_update(setups.update_between(weights[1], weights[0], 1))
    fold = store.fold(0, 2)
    assert decode_update(memory.read(fold.object.path)).patches == ()
    assert setups.same(setups.replayed(weights[0], 0, store.updates(store.plan(0))), weights[0])


def dense(update: WeightUpdate) -> WeightUpdate:
    """The same update with every changed parameter sent whole."""
    new = setups.next_weights(setups.first_weights(), 1)
    patches = tuple(made.patch_of(p.meta, new[p.name], new[p.name], form="dense") for p in update.patches)
    before = {p.name: p.fingerprint_before for p in update.patches}
    return replace(update, patches=tuple(replace(p, fingerprint_before=before[p.name]) for p in patches))


def test_parameters_sent_whole_fold_too(memory: ObjectBackend) -> None:
    """Dense patches (fp32 masters) among sparse ones: the fold holds the last words."""
    store, weights = setups.filled_store(memory, 0)
    weights += [setups.next_weights(weights[0], 1)]
    weights += [setups.next_weights(weights[1], 2)]
    store.publish_update(dense(setups.update_between(weights[0], weights[1], 0)))
    store.publish_update(setups.update_between(weights[1], weights[2], 1))
    for have in (0, 1):
        assert setups.same(setups.replayed(weights[have], have, store.updates(store.plan(have))), weights[2])
    store.fold(0, 2)
    assert setups.same(setups.replayed(weights[0], 0, store.updates(store.plan(0))), weights[2])


def place(backend: ObjectBackend, update: WeightUpdate, base: int, target: int, key: bytes | None = None) -> str:
    """Put a container among the folds under a name that fits its bytes."""
    raw = encode_update(update, signing_key=key)
    path = fold_path(base, target, content_digest(raw))
    backend.write(path, [raw])
    return path


@pytest.mark.parametrize("how", ["weights", "run", "epoch", "table", "versions", "bytes", "unsigned", "gone", "huge"])
def test_a_fold_is_trusted_only_if_it_says_what_the_versions_say(
    memory: ObjectBackend, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Whatever lies under a fold's name, the updates that it stands for come instead, and a warning names it."""
    key = setups.KEY
    store, weights = setups.filled_store(memory, 8, key=key, folds=False)
    good = fold_updates(store.updates(store.plan(0)))
    other = setups.next_weights(weights[8], 99)
    wrong = {
        "weights": {"target_digest": setups.state_digest(other)}, "run": {"run_id": "other"}, "epoch": {"epoch": 2},
        "table": {"table_digest": "xxh3_128:" + "0" * 32}, "versions": {"base_version": 1},
    }  # fmt: skip
    path = place(memory, replace(good, **wrong.get(how, {})), 0, 8, None if how == "unsigned" else key)  # type: ignore[arg-type]
    raw = memory.read(path)
    if how == "bytes":
        memory.replace(path, raw[:-1] + bytes([raw[-1] ^ 1]))
    plan = store.plan(0)
    assert [step.object.path for step in plan.updates] == [path]
    if how == "gone":
        memory.delete(path)
    if how == "huge":
        memory.replace(path, bytes(10 << 20))
    with caplog.at_level(logging.WARNING):
        updates = list(store.updates(plan))
    assert len(updates) == 8
    assert f"fold {path} cannot be used" in caplog.text
    assert setups.same(setups.replayed(weights[0], 0, updates), weights[8])


def test_other_names_among_folds_are_passed_over(memory: ObjectBackend) -> None:
    """What is no fold's name, or spans versions that do not exist, is in no plan."""
    store, _ = setups.filled_store(memory, 2)
    for name in ("folds/x.dcu", update_path(0, 2, "xxh3_128:" + "0" * 32).replace("updates", "folds") + "x",
                 fold_path(0, 9, "xxh3_128:" + "0" * 32), fold_path(5, 9, "xxh3_128:" + "0" * 32)):  # fmt: skip
        memory.write(name, [b"x"])
    assert [step.is_fold for step in store.plan(0).updates] == [False, False]


class StoreMachine(RuleBasedStateMachine):
    """A store, and the list of weights that were published, as plain arrays."""

    kind = "memory"
    key: bytes | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.weights: list[setups.Weights] = []
        self.outs = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(seed=st.integers(0, 99))
    def begin(self, seed: int) -> None:
        self.store = setups.new_store(setups.new_backend(self.kind, self.folder), key=self.key)
        self.weights = [setups.first_weights(seed)]
        self.store.publish_snapshot(setups.source_of(self.weights[0]))

    @rule(seed=st.integers(0, 10**6), num=st.integers(0, 60), times=st.integers(1, 6))
    def publish(self, seed: int, num: int, times: int) -> None:
        for step in range(times):
            new = setups.next_weights(self.weights[-1], seed + step, num)
            update = setups.update_between(self.weights[-1], new, len(self.weights) - 1)
            assert self.store.publish_update(update).version == len(self.weights)
            self.weights.append(new)

    @rule()
    def go_back(self) -> None:
        back = self.weights[max(0, len(self.weights) - 3)]
        self.store.publish_update(setups.update_between(self.weights[-1], back, len(self.weights) - 1))
        self.weights.append(back)

    @rule(seed=st.integers(0, 99))
    def publish_whole(self, seed: int) -> None:
        self.weights.append(setups.first_weights(seed))
        self.store.publish_snapshot(setups.source_of(self.weights[-1]))

    @rule(data=st.data())
    def anchor(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.weights) - 1))
        self.store.add_anchor(version, setups.source_of(self.weights[version]))

    @rule()
    def take_over(self) -> None:
        old, self.store = self.store, VersionStore.open(self.store.backend, signing_key=self.key)
        self.store.claim()
        self.weights.append(self.weights[-1])
        with pytest.raises(FencedError):
            old.publish_update(setups.update_between(self.weights[-1], self.weights[-1], len(self.weights) - 2))

    @precondition(lambda self: len(self.weights) > 2)
    @rule(data=st.data())
    def fold(self, data: st.DataObject) -> None:
        base = data.draw(st.integers(0, len(self.weights) - 3))
        target = data.draw(st.integers(base + 2, len(self.weights) - 1))
        whole = {record.version for record in self.store.log() if record.update is None}
        if whole & set(range(base + 1, target + 1)):
            with pytest.raises(StoreError, match="no updates lead"):
                self.store.fold(base, target)
        else:
            self.store.fold(base, target)

    @rule(data=st.data(), flip=st.booleans())
    def spoil_a_fold(self, data: st.DataObject, *, flip: bool) -> None:
        folds = [fold.object.path for fold in list_folds(self.store.backend)]
        if folds:
            path = data.draw(st.sampled_from(folds))
            raw = self.store.backend.read(path)
            self.store.backend.delete(path)
            if flip:
                at = data.draw(st.integers(0, len(raw) - 1))
                self.store.backend.replace(path, raw[:at] + bytes([raw[at] ^ 64]) + raw[at + 1 :])

    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        newest = len(self.weights) - 1
        want = data.draw(st.integers(0, newest))
        have = data.draw(st.one_of(st.none(), st.integers(0, newest + 2)))
        reader = VersionStore.open(self.store.backend, signing_key=self.key)
        plan = reader.plan(have, want)
        if plan.snapshot is not None:
            have = plan.snapshot.version
        assert have is not None
        assert setups.same(setups.replayed(self.weights[have], have, reader.updates(plan)), self.weights[want])

    @rule(data=st.data())
    def materialise(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.weights) - 1))
        self.outs += 1
        out = self.folder / f"out{self.outs}"
        self.store.materialize(version, out)
        assert setups.same(setups.folder_weights(out), self.weights[version])

    @invariant()
    def the_log_is_what_was_published(self) -> None:
        if self.weights:
            assert self.store.versions() == range(len(self.weights))
            head = self.store.head()
            assert head is not None
            assert head.state_digest == setups.state_digest(self.weights[-1])


class LocalStoreMachine(StoreMachine):
    """The same on a disk, signed."""

    kind = "local"
    key = setups.KEY


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestLocalStoreMachine = LocalStoreMachine.TestCase
TestLocalStoreMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
