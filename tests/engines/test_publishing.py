"""A trainer with a store: what workers committed is published, whole and in order, beside the next rounds."""

from __future__ import annotations

from typing import Any

import pytest

from deltacast.delta.errors import FencedError, InputError, StateError, StoreError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.store import Anchors
from deltacast.store.snapshots import list_snapshots
from engine_processes import Policy
from engine_setups import EVERY_WIRE, in_process, info, trainer_of
from failing_backend import FullDisk, Gate, cut_off_from, nothing
from stored_runs import covered, everything_in, failing_store, reopened, stored

pytestmark = pytest.mark.timeout(120)


PLACES = pytest.mark.parametrize(
    ("device", "placement"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda:0", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "pinned", marks=pytest.mark.gpu),
    ],
)


@PLACES
@pytest.mark.parametrize("durability", ["after_commit", "before_commit"])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_every_version_in_the_store_is_what_the_workers_held(
    wire: str, durability: str, device: str, placement: str
) -> None:
    """Twenty rounds, an empty one among them: digests, steps and bits of each; updates of little more than changes."""
    store, _ = failing_store()
    there = device.replace("0", "1")
    policy, served = Policy(0).to(device), Policy(0).to(there)
    versions = list[tuple[str, int | None, dict[str, bytes]]]()
    options: dict[str, Any] = {
        "wire": wire, "store": store, "durability": durability, "run_id": "", "device": device, "placement": placement,
    }  # fmt: skip
    with (
        in_process(served, device=there) as ([worker], client),
        trainer_of(policy, client, 1, **options) as trainer,
    ):
        versions.append((worker.status.digest, None, covered(served)))
        for step in range(20):
            if step != 7:
                policy.step(step)
            report = trainer.send_weights(optimizer_step=step)
            assert (report.wire, report.run_id, report.epoch, report.num_verified) == (wire, store.run_id, 1, 1)
            assert report.published_through is not None
            assert report.published_through <= step + 1
            assert durability == "after_commit" or report.published_through == step + 1
            versions.append((worker.status.digest, step, covered(served)))
    records = list(reopened(store).log())[::-1]
    assert [record.version for record in records] == list(range(21))
    for record, (digest, optimizer_step, weights) in zip(records, versions, strict=True):
        assert (record.state_digest, record.optimizer_step) == (digest, optimizer_step)
        assert stored(store, record.version) == weights
        assert record.update is None or record.update.object.num_bytes < 4096


def test_folds_and_anchors_are_made_beside_the_rounds_from_what_the_store_has() -> None:
    """Every fifth version gets a snapshot, with the bits that its workers held; eight updates are folded."""
    store, _ = failing_store()
    policy, weights = Policy(0), list[dict[str, bytes]]()
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, store=store, anchors=Anchors(every=5, fraction=9.0)) as trainer,
    ):
        weights.append(covered(policy))
        for step in range(12):
            policy.step(step)
            trainer.send_weights()
            weights.append(covered(policy))
    assert [name for name in everything_in(store) if name.startswith(f"folds/{0:020}-{8:020}-")]
    anchors = [version for version, _ in list_snapshots(store.backend)]
    assert anchors[0] == 0
    assert len(anchors) > 1
    assert all(stored(store, version) == weights[version] for version in anchors)
    assert store.fsck().damaged == ()


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_version_that_could_not_be_published_is_told_before_the_next_is_sent_and_tried_again(wire: str) -> None:
    """A full disk, then room again: the chain has no hole, and no round was lost."""
    store, backend = failing_store()
    policy, served = Policy(0), Policy(0)
    options: dict[str, Any] = {"wire": wire, "store": store, "max_unpublished": 1}
    with in_process(served) as ([worker], client), trainer_of(policy, client, 1, **options) as trainer:
        weights = [covered(served)]
        disk = backend.before = FullDisk()
        policy.step(0)
        assert trainer.send_weights().published_through == 0
        weights.append(covered(served))
        policy.step(1)
        for _ in range(2):
            assert disk.tried.acquire(timeout=20)
            with pytest.raises(StoreError, match=r"version 1 is committed.*no room for updates/") as caught:
                trainer.send_weights()
            assert caught.value.version == 1
            assert (worker.status.version, covered(served)) == (1, weights[1])
        assert disk.tried.acquire(timeout=20)  # set off by the call before, and failed as well
        backend.before = nothing
        with pytest.raises(StoreError, match="version 1 is committed"):
            trainer.send_weights()
        assert trainer.send_weights().target_version == 2
        weights.append(covered(served))
    assert [stored(store, version) for version in store.versions()] == weights


def test_a_version_whose_publish_was_never_answered_is_published_once() -> None:
    """It is there, but nobody could tell: the next attempt finds it, and the chain goes on from it."""
    store, backend = failing_store()
    policy = Policy(0)
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, store=store) as trainer:
        backend.after = cut_off_from("create", "versions/", backend)
        policy.step(0)
        trainer.send_weights()
        publisher = trainer._publisher
        assert publisher is not None
        with publisher._changed:
            assert publisher._changed.wait_for(lambda: publisher._error is not None, 20)
        backend.before = backend.after = nothing
        policy.step(1)
        with pytest.raises(StoreError, match="version 1 is committed, and not known to be in the store"):
            trainer.send_weights()
        assert trainer.send_weights().target_version == 2
    assert store.versions() == range(3)
    assert stored(store, 2) == covered(policy)


def test_a_store_that_does_not_keep_up_holds_up_the_next_round_and_then_refuses_it() -> None:
    """Within the deadline nothing moves; once there is room the same call goes through."""
    store, backend = failing_store()
    policy, served, gate = Policy(0), Policy(0), Gate()
    options: dict[str, Any] = {"store": store, "max_unpublished": 2, "timeout_s": 0.5}
    with in_process(served) as ([worker], client), trainer_of(policy, client, 1, **options) as trainer:
        backend.before = gate
        for step in range(2):
            policy.step(step)
            trainer.send_weights()
        with pytest.raises(StoreError, match="does not keep up: versions 1 to 2 wait"):
            trainer.send_weights()
        assert worker.status.version == 2
        gate.open()
        assert trainer.send_weights().target_version == 3
    assert store.versions() == range(4)


def test_shutdown_publishes_what_waits() -> None:
    """Four versions that a slow store has not taken yet."""
    store, backend = failing_store()
    policy, gate = Policy(0), Gate()
    with in_process(Policy(0)) as (_, client):
        with trainer_of(policy, client, 1, store=store) as trainer:
            backend.before = gate
            for step in range(4):
                policy.step(step)
                trainer.send_weights()
            assert store.versions() == range(1)
            gate.open()
        assert store.versions() == range(5)
        assert stored(store, 4) == covered(policy)


def test_shutdown_says_what_it_could_not_publish() -> None:
    """By number; and everything is closed nevertheless."""
    store, backend = failing_store()
    policy, gate = Policy(0), Gate()
    with in_process(Policy(0)) as (_, client):
        trainer = SparseNcclTrainer.trainer_init(info(1, store=store), ModuleSource(policy), client)
        backend.before = gate
        for step in range(3):
            policy.step(step)
            trainer.send_weights()
        backend.before = backend.after = FullDisk()
        gate.open()
        with pytest.raises(StoreError, match="versions 1 to 3 were committed and are not published: no room"):
            trainer.shutdown()
        trainer.shutdown()
        with pytest.raises(StateError, match="shut down"):
            trainer.send_weights()
    assert store.versions() == range(1)


def test_a_trainer_whose_run_was_taken_over_stops_for_good() -> None:
    """It hears of it by its own publish; then nothing more is sent, however often it is asked."""
    store, _ = failing_store()
    policy, served, heir = Policy(0), Policy(0), Policy(0)
    with in_process(served) as ([worker], client):
        trainer = SparseNcclTrainer.trainer_init(info(1, store=store, max_unpublished=1), ModuleSource(policy), client)
        with in_process(Policy(0)) as (_, others), trainer_of(heir, others, 1, store=reopened(store)) as successor:
            heir.step(5)
            assert successor.send_weights().epoch == 2
        policy.step(0)
        trainer.send_weights()
        before = covered(served)
        policy.step(1)
        for _ in range(2):
            with pytest.raises(FencedError, match="gone on without this trainer, at version 1 or before"):
                trainer.send_weights()
        assert (worker.status.version, covered(served)) == (1, before)
        with pytest.raises(StoreError, match="versions 1 to 1 were committed and are not published"):
            trainer.shutdown()
    assert store.versions() == range(3)
    assert stored(store, 2) == covered(heir)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "at once"}, "unknown durability"),
        ({"durability": "before_commit"}, "needs a store"),
        ({"max_unpublished": 0}, "max_unpublished"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    """Before anything is made."""
    with pytest.raises(InputError, match=message):
        TrainerInitInfo(num_workers=1, **options)


def test_without_a_store_nothing_is_said_of_one() -> None:
    """And a run gets an id of its own."""
    with in_process(Policy(0)) as (_, client), trainer_of(Policy(0), client, 1, run_id="") as trainer:
        report = trainer.send_weights()
        assert report.published_through is None
        assert len(report.run_id) == 16
