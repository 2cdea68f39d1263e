"""A trainer that starts from a store: it goes on from the newest version there, whatever its own weights are."""

from __future__ import annotations

import secrets
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacast.delta.errors import InputError, StateError, StoreError, TableError
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.store import VersionStore, open_backend
from engine_processes import NoClient, Policy, TrainerProcess, WorkerError, weights_of, worker_processes
from engine_setups import EVERY_WIRE, RUN, TolerantClient, in_process, info, trainer_of, wait_for_connection
from failing_backend import FullDisk, Gate, nothing
from stored_runs import covered, everything_in, failing_store, reopened, stored

pytestmark = pytest.mark.timeout(120)
DURABILITY = pytest.mark.parametrize("durability", ["after_commit", "before_commit"])


def store_of(policy: Policy, *steps: int) -> VersionStore:
    """A store with a version of the policy, and one after each of these steps."""
    store, _ = failing_store()
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, store=store) as trainer:
        for step in steps:
            policy.step(step)
            trainer.send_weights(optimizer_step=step)
    return store


@DURABILITY
@pytest.mark.parametrize("step", ["idle", "sent", "all voted", "one told", "all told", "settled"])
def test_a_trainer_killed_in_a_round_is_followed_by_one_that_goes_on_from_the_store(
    step: str, durability: str, tmp_path: Path
) -> None:
    """With older weights than the store's: workers get the store's newest, and what it sends then follows that."""
    store = VersionStore.create(tmp_path / "store", run_id=RUN)
    trainer = TrainerProcess(info(2), step, 4, signal.SIGKILL, str(tmp_path / "store"), durability)
    with worker_processes(0, 0) as client:
        try:
            client.init_transfer_engine(trainer.hear())
            assert trainer.hear() == "admitted"
            assert [worker.reply().status for worker in client.workers] == [ServingStatus.SERVING] * 2
            for number in range(1, 5):
                client.update_weights({"run_id": RUN, "call": number})
                trainer.tell(number)
                if number < 4:
                    assert trainer.reply() == number
                    assert [report.version for report in client.reports()] == [number] * 2
            assert trainer.exit_code() == -signal.SIGKILL
        finally:
            trainer.stop()
        for worker in client.workers:
            with pytest.raises(WorkerError, match="the connection"):
                worker.reply()
        head = store.head()
        assert head is not None
        served = [worker.ask("status").version for worker in client.workers]
        if durability == "before_commit":
            assert head.version >= max(served)
        elsewhere = Policy(9)
        with trainer_of(elsewhere, client, 2, store=VersionStore.open(tmp_path / "store")) as heir:
            assert [worker.reply().status for worker in client.workers] == [ServingStatus.SERVING] * 2
            ours = covered_by(client.workers[0].ask("weights"))
            assert covered_by(client.workers[1].ask("weights")) == ours == stored(store, head.version)
            report = heir.send_weights()
            assert (report.num_verified, report.epoch) == (2, 2)
            assert report.target_version > max(*served, head.version + 1)
            assert [worker.reply().version for worker in client.workers] == [report.target_version] * 2
            assert [worker.ask("weights") for worker in client.workers] == [weights_of(elsewhere)] * 2
        assert store.versions() == range(report.target_version + 1)
        assert stored(store, report.target_version) == covered(elsewhere)
        assert store.fsck().damaged == ()


def covered_by(weights: dict[str, bytes]) -> dict[str, bytes]:
    return {name: raw for name, raw in weights.items() if name != "head"}


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_workers_that_hold_the_newest_version_keep_their_bits_and_others_get_them(wire: str) -> None:
    """One holds it, one does not; both go by its new number, and know its step."""
    policy, stranger = Policy(0), Policy(5)
    store = store_of(policy, 1, 2)
    holder = Policy(0)
    holder.load_state_dict(policy.state_dict())
    options: dict[str, Any] = {"wire": wire, "store": reopened(store)}
    fresh = Policy(8)
    with in_process(holder, stranger) as (workers, client), trainer_of(fresh, client, 2, **options) as trainer:
        reasons = [member.reason for member in trainer._workers.members]
        assert sum(reason == "it holds the trainer's bits" for reason in reasons) == 1
        assert weights_of(holder) == weights_of(stranger) == weights_of(policy)
        assert [worker.status.version for worker in workers] == [3, 3]
        assert trainer.baseline.epoch == 2
        assert trainer.send_weights().target_version == 4
        assert weights_of(holder) == weights_of(stranger) == weights_of(fresh)
    assert [record.epoch for record in store.log()] == [2, 2, 1, 1, 1]
    assert stored(store, 4) == covered(fresh)


def test_a_worker_that_joins_after_a_restart_is_given_the_present_version() -> None:
    """And takes part from then on."""
    store, late = store_of(Policy(0), 1, 2), Policy(3)
    policy, joiner = Policy(4), SparseNcclWorker(ModuleSource(late))
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, store=reopened(store)) as trainer:
        thread = threading.Thread(target=joiner.init_transfer_engine, args=[trainer.worker_init_info])
        thread.start()
        wait_for_connection(trainer)
        report = trainer.send_weights()
        thread.join(20)
        assert report.num_verified == 2
        assert weights_of(late) == weights_of(policy)
        assert joiner.status.version == report.target_version
    joiner.shutdown()


def test_versions_that_were_never_published_give_their_numbers_to_nobody() -> None:
    """Workers go back to the store's newest weights, and forward in numbers; the store fills what lies between."""
    store, backend = failing_store()
    policy, served = Policy(0), Policy(0)
    first = covered(policy)
    with in_process(served) as ([worker], _):
        client = TolerantClient([worker])
        trainer = SparseNcclTrainer.trainer_init(info(1, store=store), ModuleSource(policy), client)
        gate = backend.before = Gate()
        for step in range(3):
            policy.step(step)
            trainer.send_weights()
        backend.before = backend.after = FullDisk()
        gate.open()
        with pytest.raises(StoreError, match="versions 1 to 3 were committed and are not published"):
            trainer.shutdown()
        backend.before = backend.after = nothing
        fresh = Policy(6)
        with trainer_of(fresh, client, 1, store=reopened(store)) as heir:
            assert (worker.status.version, covered(served)) == (4, first)
            assert heir.send_weights().target_version == 5
            assert covered(served) == covered(fresh)
    assert store.versions() == range(6)
    assert [stored(store, version) == first for version in store.versions()] == [True] * 5 + [False]
    assert stored(store, 5) == covered(fresh)


def test_a_worker_that_reports_an_absurd_version_of_the_run_cannot_fill_the_store() -> None:
    """The call is refused before anything is sent."""
    store = store_of(Policy(0))
    with in_process(Policy(0)) as ([worker], client):
        with trainer_of(Policy(0), client, 1, version=1_000_000) as trainer:
            trainer.send_weights()
        with trainer_of(Policy(1), TolerantClient([worker]), 1, store=reopened(store), epoch=1) as heir, \
                pytest.raises(StateError, match="a worker reports a version"):  # fmt: skip
            heir.send_weights()
    assert store.versions() == range(2)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_another_run_is_refused_and_the_store_left_as_it_is(kind: str, tmp_path: Path) -> None:
    """The message names both."""
    store = VersionStore.create(
        open_backend(tmp_path if kind == "local" else f"memory://{secrets.token_hex(8)}", create=True)
    )
    store.publish_snapshot(ModuleSource(Policy(0)))
    before = everything_in(store)
    with pytest.raises(InputError, match=f"another run.*{RUN}.*{store.run_id}"):
        SparseNcclTrainer.trainer_init(info(1, store=reopened(store)), ModuleSource(Policy(0)), NoClient())
    assert everything_in(store) == before


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_another_parameter_table_is_refused_and_the_store_left_as_it_is(kind: str, tmp_path: Path) -> None:
    """Where the store's files are at hand the message names the parameter."""
    store = VersionStore.create(
        open_backend(tmp_path if kind == "local" else f"memory://{secrets.token_hex(8)}", create=True)
    )
    store.publish_snapshot(StateDictSource({"a": torch.zeros(3), "b": torch.zeros(2)}))
    before = everything_in(store)
    other = StateDictSource({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    message = "'b'.*float32.*bfloat16" if kind == "local" else "another parameter table than the store"
    with pytest.raises(TableError, match=message):
        SparseNcclTrainer.trainer_init(info(1, run_id="", store=reopened(store)), other, NoClient())
    assert everything_in(store) == before


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_baseline_lies_in_the_order_of_the_source_whatever_the_order_in_the_store(
    kind: str, tmp_path: Path
) -> None:
    """A streamed round copies it in that order; nothing is left in the folder that was used on the way."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    store = VersionStore.create(
        open_backend(tmp_path / "s" if kind == "local" else f"memory://{secrets.token_hex(8)}", create=True)
    )
    tensors = {name: torch.arange(4.0) + number for number, name in enumerate("zebra")}
    store.publish_snapshot(StateDictSource(dict(sorted(tensors.items()))))
    options: dict[str, Any] = {"placement": "mmap", "baseline_folder": str(scratch), "run_id": ""}
    with in_process(Policy(0)):
        trainer = SparseNcclTrainer(info(1, store=reopened(store), **options), StateDictSource(tensors), NoClient())
    assert list(trainer.baseline.memory.extents) == list("zebra")
    assert {name: trainer.baseline.memory.tensor(name).tolist() for name in tensors} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    trainer.shutdown()
    assert list(scratch.iterdir()) == []


def test_a_run_of_signed_objects_goes_on() -> None:
    """With the key; the anchor that is due is signed as well."""
    backend = open_backend(f"memory://{secrets.token_hex(8)}", create=True)
    store = VersionStore.create(backend, run_id=RUN, signing_key=b"key" * 11)
    policy = Policy(0)
    for step in range(2):
        opened = VersionStore.open(backend, signing_key=b"key" * 11)
        with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, store=opened) as trainer:
            policy.step(step)
            trainer.send_weights()
    assert store.versions() == range(4)
    assert stored(store, 3) == covered(policy)
