"""Workers that pull from a store: all of the way or nothing, whatever the store holds and whatever is asked for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacast.delta.errors import (
    BaseError,
    ChecksumError,
    CorruptionError,
    DeltacastError,
    FormatError,
    InputError,
    MissingObjectError,
    StateError,
    StoreError,
    TableError,
)
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.delta.shards import ShardState
from deltacast.delta.table import ParamMeta
from deltacast.engines.base import ServingStatus
from deltacast.engines.pulling import PullingWorker, PullSettings
from deltacast.store.version_store import VersionStore
from engine_processes import Policy, WorkerError, weights_of
from engine_setups import RUN, num_descriptors
from pull_setups import BreakingWorker, publish, pull, pull_processes, worker_of
from store_setups import KEY

pytestmark = pytest.mark.timeout(120)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
STEPS = 4


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """An empty store in a folder."""
    return VersionStore.create(tmp_path / "store", run_id=RUN)


def spoil(store: VersionStore, name: str) -> None:
    """Flip a bit in the middle of an object."""
    raw = bytearray(store.backend.read(name))
    raw[len(raw) // 2] ^= 1
    store.backend.replace(name, raw)


def update_path(store: VersionStore, version: int) -> str:
    """The name of the update that leads to a version."""
    update = store.record(version).update
    assert update is not None
    return update.object.path


def with_snapshot(store: VersionStore, version: int) -> None:
    """Add a snapshot of a version that `publish` made."""
    policy = Policy(0)
    for step in range(version):
        policy.step(step)
    store.add_anchor(version, ModuleSource(policy))


def test_workers_in_other_processes_follow_and_one_that_comes_late_catches_up(store: VersionStore) -> None:
    """The late one, of other weights, gets a version whole, and then goes the same way as the others."""
    weights = publish(store, STEPS)
    with pull_processes(store.backend.url, 0, 7) as workers:
        for version in (2, 3):
            for worker in workers:
                worker.tell("pull", pull(store, version))
            assert [worker.reply().version for worker in workers] == [version] * 2
            assert [worker.ask("weights") for worker in workers] == [weights[version]] * 2
        with pull_processes(store.backend.url, 9) as [late]:
            for worker in (*workers, late):
                assert worker.ask("pull", pull(store, STEPS)).version == STEPS
                assert worker.ask("weights") == weights[STEPS]
                assert worker.ask("status").digest == store.record(STEPS).state_digest


@pytest.mark.parametrize("step", ["fetching", "writing", "written"])
def test_a_worker_killed_in_a_pull_is_gone_and_a_fresh_one_catches_up(store: VersionStore, step: str) -> None:
    """Nothing of it stays in the way."""
    weights = publish(store, STEPS)
    with pull_processes(store.backend.url, 0, die_at=step) as [worker]:
        worker.tell("pull", pull(store, STEPS))
        assert worker.exit_code() == -signal.SIGKILL
    with pull_processes(store.backend.url, 3) as [fresh]:
        assert fresh.ask("pull", pull(store, STEPS)).version == STEPS
        assert fresh.ask("weights") == weights[STEPS]
    assert store.fsck().damaged == ()


def test_a_checkpoint_that_is_a_version_is_known_by_its_bits(store: VersionStore) -> None:
    """Such a worker needs no snapshot, and holds the base that is asked for."""
    weights = publish(store, STEPS)
    for info in list(store.backend.list("snapshots/")):
        store.backend.delete(info.name)
    for base in (None, 0):
        policy = Policy(0)
        worker_of(policy, store).receive_weights(pull(store, STEPS, base=base))
        assert weights_of(policy) == weights[STEPS]
    with pytest.raises(BaseError, match=r"wrong base.*expected version None, found 1"):
        worker_of(Policy(0), store).receive_weights(pull(store, STEPS, base=1))
    with pytest.raises(StoreError, match="no snapshot leads to that version"):
        worker_of(Policy(1), store).receive_weights(pull(store, STEPS))


def test_a_pull_that_was_done_is_answered_again_and_reads_no_update(store: VersionStore) -> None:
    """A client that never heard the first answer may repeat the call, base included if it names what is held."""
    publish(store, 2)
    worker = worker_of(Policy(0), store)
    first = worker.receive_weights(pull(store, 2))
    store.backend.delete(update_path(store, 2))
    assert worker.receive_weights(pull(store, 2)) == first
    assert (first.version, first.committed, first.optimizer_step) == (2, True, 10)


REFUSED: list[tuple[str, dict[str, Any], type[DeltacastError], str]] = [
    ("another run", {"run_id": "other"}, BaseError, "the store keeps another run.*'other'.*'run'"),
    ("an older base", {"base": 0}, BaseError, "wrong base.*version 3.*expected version 1, found 0"),
    ("a newer base", {"base": 2}, BaseError, "wrong base.*version 3.*expected version 1, found 2"),
    ("a version that is not there", {"target": 9}, StoreError, "version 9.*versions 0 to 4"),
    ("an older version", {"target": 0}, BaseError, "beyond that version.*found version 1.*Restart"),
    ("a place that is not allowed", {"where": "/etc"}, InputError, "does not allow that store.*'/etc'"),
    ("another scheme", {"where": "s3://bucket/x"}, InputError, "does not allow that store"),
    ("a number for a place", {"where": 3}, InputError, "not a pull"),
    ("a negative version", {"target": -1}, InputError, "not a pull"),
    ("a text for a version", {"target": "3"}, InputError, "not a pull"),
    ("a truth for a version", {"base": True}, InputError, "not a pull"),
]


@pytest.mark.parametrize(("changes", "error", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_a_wrong_call_is_refused_by_name_and_nothing_is_written(
    store: VersionStore, changes: dict[str, Any], error: type[DeltacastError], message: str
) -> None:
    """What was served is served, `last_error` says why, and the next right call clears that."""
    weights, policy = publish(store, STEPS), Policy(0)
    worker = worker_of(policy, store)
    worker.receive_weights(pull(store, 1))
    before = worker.status
    call = {"pull": pull(store, 3)["pull"] | changes}
    with pytest.raises(error, match=message) as caught:
        worker.receive_weights(call)
    assert worker.status == replace(before, last_error=f"{error.__name__}: {caught.value}")
    assert weights_of(policy) == weights[1]
    worker.receive_weights(pull(store, 3, base=1))
    assert worker.status.last_error == ""
    assert weights_of(policy) == weights[3]


@pytest.mark.parametrize("call", [None, 3, [], {}, {"where": "x", "run_id": "y"}])
def test_what_is_no_pull_at_all_is_refused(store: VersionStore, call: object) -> None:
    """The message says what belongs there."""
    with pytest.raises(InputError, match=r"not a pull.*expected where, run_id and target"):
        worker_of(Policy(0), store).receive_weights({"pull": call})


@pytest.mark.parametrize(
    ("where", "allowed"),
    [
        ("/runs", True), ("/runs/a", True), ("/runs/a/b-1.x", True), ("s3://bucket/runs/7", True), ("/runs2", False),
        ("/runs/../etc", False), ("/runs/", False), ("/runs//a", False), ("/runs/.hidden", False), ("/run", False),
        ("runs", False), ("", False), ("file:///runs", False), ("s3://bucket/other", False),
        ("s3://bucket/runs/a?endpoint=x", False), ("s3://bucket/runs/%2e%2e/b", False), ("/runs/a\n", False),
    ],
)  # fmt: skip
def test_only_what_is_listed_or_below_is_allowed(where: str, allowed: bool) -> None:
    """Names are compared as they are written, and nothing climbs out."""
    settings = PullSettings(allowed=("/runs", "s3://bucket/runs/"))
    if allowed:
        settings.require_allowed(where)
    else:
        with pytest.raises(InputError, match="does not allow that store"):
            settings.require_allowed(where)


def test_a_worker_that_allows_nothing_pulls_nothing(store: VersionStore) -> None:
    """That is the default."""
    publish(store, 1)
    worker = PullingWorker(ModuleSource(Policy(0)))
    with pytest.raises(InputError, match="expected one of none"):
        worker.receive_weights(pull(store, 1))


def test_with_a_key_only_what_is_signed_with_it_is_read(tmp_path: Path) -> None:
    """The key is the worker's own: a key in the call does not count, and is in no message."""
    for name, key in {"signed": KEY, "other": b"another key", "plain": None}.items():
        publish(VersionStore.create(tmp_path / name, run_id=RUN, signing_key=key), 1)
    policy = Policy(0)
    worker = worker_of(policy, str(tmp_path), settings={"signing_key": KEY})
    before = weights_of(policy)
    for name in ("other", "plain"):
        call = pull(str(tmp_path / name), 1)
        call["pull"]["signing_key"] = "another key"
        with pytest.raises(FormatError, match="sign"):
            worker.receive_weights(call)
        assert weights_of(policy) == before
    worker.receive_weights(pull(str(tmp_path / "signed"), 1))
    assert worker.status.version == 1
    assert KEY.decode() not in repr(worker.pulls)


def test_settings_come_from_a_configuration(tmp_path: Path) -> None:
    """The key from its file; names that are not known, and values that cannot be, are refused."""
    (tmp_path / "key").write_bytes(KEY)
    values = {"allowed": ["/runs"], "key_file": str(tmp_path / "key"), "audit": "full", "folder": "/scratch"}
    assert PullSettings.from_dict(values) == PullSettings(
        allowed=("/runs",), signing_key=KEY, audit="full", folder="/scratch"
    )
    (tmp_path / "key").write_bytes(b"")
    for bad in (values, {"alowed": ["/runs"]}, {"allowed": "/runs"}, {"allowed": [""]}, {"audit": 0}):
        with pytest.raises(InputError):
            PullSettings.from_dict(bad)


def test_another_model_is_refused(store: VersionStore) -> None:
    """Before anything is fetched."""
    publish(store, 1)
    tensors = {"embed": torch.zeros(3)}
    worker = PullingWorker(StateDictSource(tensors))
    worker.pulls = PullSettings(allowed=(store.backend.url,))
    with pytest.raises(TableError, match="another parameter table"):
        worker.receive_weights(pull(store, 1))
    assert tensors["embed"].tolist() == [0, 0, 0]


def test_a_worker_of_pieces_is_refused(store: VersionStore) -> None:
    """By name: what it holds could be neither written nor proven by itself."""
    publish(store, 1)
    worker = PullingWorker(ShardState([ParamMeta("embed", "bfloat16", (60, 32))], {}))
    worker.pulls = PullSettings(allowed=(store.backend.url,))
    with pytest.raises(StateError, match="holds pieces of parameters cannot pull"):
        worker.receive_weights(pull(store, 1))


def test_a_serving_worker_stays_in_its_run(store: VersionStore, tmp_path: Path) -> None:
    """Another run's versions have the same numbers."""
    publish(store, 1)
    other = VersionStore.create(tmp_path / "other", run_id="other")
    publish(other, 2)
    worker = worker_of(Policy(0), str(tmp_path))
    worker.receive_weights(pull(store, 1))
    with pytest.raises(BaseError, match=r"this worker serves another run.*'other'.*'run'"):
        worker.receive_weights(pull(other, 2, run_id="other"))
    assert worker.status.version == 1


def test_a_store_that_an_older_writer_goes_on_with_is_refused(store: VersionStore, tmp_path: Path) -> None:
    """A copy of the store that missed the takeover has the same run and higher numbers."""
    publish(store, 1)
    copy = VersionStore.create(tmp_path / "copy", run_id=RUN)
    for _ in range(2):  # the second one takes the run over
        publish(VersionStore.open(store.backend.url), 1)
    publish(copy, 6)
    worker = worker_of(Policy(0), str(tmp_path))
    worker.receive_weights(pull(store, 5))
    with pytest.raises(BaseError, match=r"an older writer.*expected epoch >= 3, found 1"):
        worker.receive_weights(pull(copy, 6))
    assert worker.status.version == 5


def test_a_damaged_update_is_named_and_the_old_version_served(store: VersionStore) -> None:
    """Nothing leads around it; once it is there again, the same call works."""
    weights, policy = publish(store, STEPS), Policy(0)
    worker = worker_of(policy, store)
    worker.receive_weights(pull(store, 1))
    for snapshot in list(store.backend.list("snapshots/")):
        store.backend.delete(snapshot.name)
    name = update_path(store, 3)
    whole = store.backend.read(name)
    spoil(store, name)
    with pytest.raises(ChecksumError, match=name):
        worker.receive_weights(pull(store, STEPS))
    store.backend.delete(name)
    with pytest.raises(MissingObjectError, match=name):
        worker.receive_weights(pull(store, STEPS))
    assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 1)
    assert name in worker.status.last_error
    assert weights_of(policy) == weights[1]
    store.backend.replace(name, whole)
    worker.receive_weights(pull(store, STEPS))
    assert weights_of(policy) == weights[STEPS]


def test_a_snapshot_may_lead_around_a_damaged_update(
    store: VersionStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The update would have been cheaper; a warning names it. What was fetched is not left behind."""
    weights, policy = publish(store, 2), Policy(0)
    worker = worker_of(policy, store, settings={"folder": str(tmp_path)})
    worker.receive_weights(pull(store, 1))
    with_snapshot(store, 2)
    name = update_path(store, 2)
    spoil(store, name)
    worker.receive_weights(pull(store, 2))
    assert name in caplog.text
    assert weights_of(policy) == weights[2]
    assert worker.status.digest == store.record(2).state_digest
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_updates_may_lead_around_a_damaged_fold(store: VersionStore, caplog: pytest.LogCaptureFixture) -> None:
    """A fold is a cache."""
    weights, policy = publish(store, 9), Policy(0)
    worker = worker_of(policy, store)
    [fold] = store.backend.list("folds/")
    spoil(store, fold.name)
    worker.receive_weights(pull(store, 9))
    assert fold.name in caplog.text
    assert weights_of(policy) == weights[9]


def leave_only_a_snapshot(store: VersionStore) -> None:
    """Remove all updates; the newest version gets a snapshot."""
    with_snapshot(store, STEPS)
    for info in list(store.backend.list("updates/")):
        store.backend.delete(info.name)


WAYS: dict[str, Callable[[VersionStore], None]] = {"updates": lambda _: None, "a snapshot": leave_only_a_snapshot}


def at_version_1(
    store: VersionStore, way: str, device: str, folder: Path
) -> tuple[list[dict[str, bytes]], Policy, BreakingWorker]:
    """Publish all versions, have a worker get the first, and leave one way to the last."""
    weights, policy = publish(store, STEPS), Policy(0).to(device)
    worker = worker_of(policy, store, settings={"folder": str(folder)}, device=device)
    worker.receive_weights(pull(store, 1))
    WAYS[way](store)
    return weights, policy, worker


@DEVICES
@pytest.mark.parametrize("way", WAYS)
def test_what_fails_after_the_writing_is_undone(store: VersionStore, way: str, device: str, tmp_path: Path) -> None:
    """All of the way: every bit is the old version's again, which is served; the next call gets there."""
    weights, policy, worker = at_version_1(store, way, device, tmp_path)
    before = worker.status
    worker.times = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.receive_weights(pull(store, STEPS))
    after = worker.status
    assert replace(after, last_error="", audited_through=None) == replace(before, audited_through=None)
    assert (after.last_error, after.audited_through) == ("RuntimeError: out of memory, say", 1)
    assert weights_of(policy) == weights[1]
    worker.receive_weights(pull(store, STEPS, base=1))
    assert weights_of(policy) == weights[STEPS]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@DEVICES
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written_before_leave_is_given(store: VersionStore, way: str, device: str, tmp_path: Path) -> None:
    """Until then the old version is there and served, with all fetched; without leave it stays, and no file is left."""
    weights, policy, worker = at_version_1(store, way, device, tmp_path)
    seen: list[object] = []

    def refuse() -> None:
        raise RuntimeError("still generating")

    with pytest.raises(RuntimeError, match="still generating"):
        worker.receive_weights(pull(store, STEPS), before_write=refuse)
    assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 1)
    worker.receive_weights(
        pull(store, STEPS),
        before_write=lambda: seen.append((worker.status.status, worker.status.version, weights_of(policy))),
    )
    assert seen == [(ServingStatus.SERVING, 1, weights[1])]
    assert weights_of(policy) == weights[STEPS]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_undone_leaves_nothing_to_serve_until_a_whole_version_has_come(
    store: VersionStore, way: str
) -> None:
    """The status is `lost`; no update is believed to lead from there."""
    weights, policy = publish(store, STEPS), Policy(0)
    worker = worker_of(policy, store)
    worker.receive_weights(pull(store, 1))
    WAYS[way](store)
    worker.times = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.receive_weights(pull(store, STEPS))
    assert (worker.status.status, worker.status.version) == (ServingStatus.LOST, None)
    with pytest.raises(BaseError, match=r"wrong base.*expected version None, found 1"):
        worker.receive_weights(pull(store, STEPS, base=1))
    assert worker.status.status is ServingStatus.LOST
    worker.receive_weights(pull(store, STEPS))
    assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, STEPS)
    assert weights_of(policy) == weights[STEPS]


def test_a_first_version_that_fails_leaves_nothing_to_serve(store: VersionStore) -> None:
    """There is nothing to go back to; the next call gets there."""
    weights, policy = publish(store, 1), Policy(4)
    worker = worker_of(policy, store)
    worker.times = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.receive_weights(pull(store, 1))
    assert (worker.status.status, worker.status.version) == (ServingStatus.EMPTY, None)
    worker.times = 1  # its bits are the version's by now, and known by their digest; what is made of them is not
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.receive_weights(pull(store, 1))
    worker.receive_weights(pull(store, 1))
    assert worker.status.status is ServingStatus.SERVING
    assert weights_of(policy) == weights[1]


@DEVICES
@pytest.mark.parametrize("audit", ["full", "off"])
def test_damaged_weights_are_found_and_come_whole(store: VersionStore, audit: Any, device: str) -> None:
    """By the audit, or where the update writes; nothing is served until a whole version has come."""
    weights, policy = publish(store, STEPS), Policy(0).to(device)
    worker = worker_of(policy, store, settings={"audit": audit}, device=device)
    worker.receive_weights(pull(store, 1))
    with torch.no_grad():
        policy.embed.view(torch.int16).bitwise_xor_(1)
    with pytest.raises(CorruptionError, match="embed"):
        worker.receive_weights(pull(store, 3))
    assert (worker.status.status, worker.status.version) == (ServingStatus.EMPTY, None)
    worker.receive_weights(pull(store, 3))
    assert weights_of(policy) == weights[3]
    assert (worker.status.version, worker.status.audited_through) == (3, 3)


@pytest.mark.parametrize("limit", ["undo_budget_bytes", "max_payload_bytes"])
def test_the_workers_limits_hold(store: VersionStore, limit: str) -> None:
    """Before anything is written."""
    weights, policy = publish(store, 2), Policy(0)
    worker = worker_of(policy, store, **dict[str, Any]({limit: 10}))
    with pytest.raises(InputError, match="at most 10 bytes"):
        worker.receive_weights(pull(store, 2))
    assert worker.status.version == 0  # known by its bits
    assert weights_of(policy) == weights[0]


def test_a_workers_error_comes_back_to_whoever_called(store: VersionStore) -> None:
    """From another process, by its class and words."""
    publish(store, 1)
    with pull_processes(store.backend.url, 0) as [worker]:
        with pytest.raises(WorkerError, match=r"StoreError.*version 7.*versions 0 to 1"):
            worker.ask("pull", pull(store, 7))
        assert worker.ask("status").last_error.startswith("StoreError")


def test_pulls_leave_nothing_open(store: VersionStore, tmp_path: Path) -> None:
    """Whole versions and updates, done and undone: as many files as before, and no folder."""
    publish(store, STEPS)
    before = num_descriptors()
    mapped = Path("/proc/self/maps").read_text().count(str(tmp_path))
    for seed in range(3):
        worker = worker_of(Policy(seed), store, settings={"folder": str(tmp_path)})
        for version in range(STEPS + 1):
            worker.times = version % 2
            for _ in range(1 + version % 2):
                with suppress(RuntimeError):
                    worker.receive_weights(pull(store, version))
            assert worker.status.version == version
    assert num_descriptors() == before
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == mapped
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
