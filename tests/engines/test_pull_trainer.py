"""A trainer of workers that pull: what stands is in the store, and who holds it is in the report."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltacast.delta.errors import (
    InputError,
    StateError,
    TransportError,
)
from deltacast.engines.base import ServingStatus, WorkerStatus
from deltacast.engines.clients import InProcessClient
from deltacast.engines.pull_trainer import statuses_of_servers
from deltacast.engines.vllm.client import ServerStatus
from deltacast.store.version_store import VersionStore
from engine_processes import NoClient, Policy, weights_of
from engine_setups import RUN, trainer_of
from pull_setups import publish, pull, pulling_trainer, worker_of
from s3_service import BUCKET, environment, s3_service
from stored_runs import covered, stored

pytestmark = pytest.mark.timeout(120)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """An empty store in a folder."""
    return VersionStore.create(tmp_path / "store", run_id=RUN)


@pytest.fixture(params=["folder", "memory", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place for a store, of each kind."""
    if request.param != "s3":
        yield str(tmp_path / "store") if request.param == "folder" else f"memory://{secrets.token_hex(8)}"
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    with s3_service() as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/store"


@DEVICES
def test_workers_in_this_process_follow_a_trainer(where: str, device: str) -> None:
    """Each version: every bit is the trainer's, by the worker's status and by the store's own copy."""
    policy, served = Policy(0), [Policy(5).to(device), Policy(0).to(device)]
    store = VersionStore.create(where, run_id=RUN)
    workers = {f"worker {number}": worker_of(each, where, device=device) for number, each in enumerate(served)}
    client = InProcessClient(list(workers.values()))
    with pulling_trainer(policy, store, client, lambda: {name: w.status for name, w in workers.items()}) as trainer:
        assert [worker.verified for worker in trainer.update_workers()] == [True, True]
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights(optimizer_step=step)
            record = store.record(report.target_version)
            assert (report.error, report.num_verified, report.wire) == ("", 2, "pull")
            assert (report.base_version, report.target_version, report.optimizer_step) == (step, step + 1, step)
            assert {worker.digest for worker in report.workers} == {record.state_digest}
            assert [weights_of(each) for each in served] == [weights_of(policy)] * 2
        assert stored(store, 3) == covered(policy)
        statuses = [worker.status for worker in workers.values()]
        assert [(status.status, status.run_id, status.version, status.optimizer_step) for status in statuses] == [
            (ServingStatus.SERVING, RUN, 3, 2)
        ] * 2


def test_a_worker_of_rounds_pulls_once_its_trainer_is_gone_and_takes_part_again(store: VersionStore) -> None:
    """Connected, it is refused; afterwards it goes on in the same run, by rounds or by pulls."""
    policy, served = Policy(0), Policy(8)
    worker = worker_of(served, store)
    client = InProcessClient([worker])
    with trainer_of(policy, client, 1, store=store) as trainer:
        policy.step(0)
        trainer.send_weights()
        with pytest.raises(StateError, match="a trainer is connected"):
            worker.receive_weights(pull(store, 1))
        policy.step(1)
        assert trainer.send_weights().num_verified == 1
    with pulling_trainer(policy, VersionStore.open(store.backend.url), client, lambda: {"": worker.status}) as puller:
        policy.step(2)
        report = puller.send_weights()
        assert (report.num_verified, report.epoch) == (1, 2)
        assert weights_of(served) == weights_of(policy)
    with trainer_of(policy, client, 1, store=VersionStore.open(store.backend.url)) as trainer:
        policy.step(3)
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served) == weights_of(policy)
    worker.shutdown()


class BadClient(InProcessClient):
    """A client that cannot tell its workers of updates, while it has a reason."""

    why: BaseException | None = None
    num_finished = 0

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.why is not None:
            raise self.why
        super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        self.num_finished += 1


def test_a_version_stands_whoever_holds_it_and_the_report_says_who(store: VersionStore) -> None:
    """A worker that was not reached is not verified; it gets there with the next call."""
    policy, served = Policy(0), Policy(0)
    worker = worker_of(served, store)
    client = BadClient([worker])
    with pulling_trainer(policy, store, client, lambda: {"it": worker.status}) as trainer:
        policy.step(0)
        assert trainer.send_weights().num_verified == 1
        client.why = TransportError("nobody answers")
        policy.step(1)
        report = trainer.send_weights()
        assert report.committed
        assert (report.num_verified, report.error) == (0, "TransportError: nobody answers")
        assert [(verdict.name, verdict.digest) for verdict in report.workers] == [("it", store.record(1).state_digest)]
        client.why = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            trainer.update_workers()
        assert client.num_finished == 3  # nobody stays paused
        client.why = None
        assert [verdict.verified for verdict in trainer.update_workers()] == [True]
        assert weights_of(served) == weights_of(policy)


def test_what_servers_say_of_their_ranks_becomes_statuses() -> None:
    """One that holds a version, one that serves nothing whole, one of another backend, and one that cannot be asked."""
    rank = {
        "serves": True, "state": "serving", "run_id": RUN, "version": 3, "digest": "d", "audited_through": 2,
        "optimizer_step": None, "error": "",
    }  # fmt: skip
    stranger = {"serves": False, "version": None, "error": "not deltacast"}
    servers = [
        ServerStatus("a", (rank, rank | {"serves": False, "error": "no memory"})),
        ServerStatus("b", (stranger,)),
        ServerStatus("c", (), "refused"),
    ]
    assert statuses_of_servers(servers) == {
        "a rank 0": WorkerStatus(ServingStatus.SERVING, RUN, 3, "d", 2),
        "a rank 1": WorkerStatus(ServingStatus.EMPTY, "", None, "d", None, "no memory"),
        "b rank 0": WorkerStatus(ServingStatus.EMPTY, "", None, "", None, "not deltacast"),
        "c": WorkerStatus(ServingStatus.EMPTY, "", None, "", None, "refused"),
    }


def test_a_trainer_goes_on_from_its_store(store: VersionStore) -> None:
    """With other weights of its own; a worker that follows it gets from the old ones to the new by updates."""
    weights, served = publish(store, 2), Policy(0)
    worker = worker_of(served, store)
    worker.receive_weights(pull(store, 2))
    policy = Policy(6)
    heir = VersionStore.open(store.backend.url)
    with pulling_trainer(policy, heir, InProcessClient([worker]), lambda: {"": worker.status}) as trainer:
        assert weights_of(served) == weights[2]
        report = trainer.send_weights()
        assert (report.num_verified, report.base_version, report.target_version, report.epoch) == (1, 3, 4, 2)
    assert weights_of(served) == weights_of(policy)


def test_a_trainer_without_a_store_is_refused() -> None:
    """It has nowhere to publish to."""
    store: Any = None
    with pytest.raises(InputError, match="without a store"), pulling_trainer(Policy(0), store, NoClient()):
        pass
