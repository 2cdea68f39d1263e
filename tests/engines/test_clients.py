"""Clients that fail, hang or are late: workers are released, and the caller learns what was committed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deltacast.delta.errors import RoundAbortedError, StateError, TransportError
from deltacast.engines.clients import InProcessClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import PipeClient, Policy, weights_of, worker_processes
from engine_setups import in_process, trainer_of

pytestmark = pytest.mark.timeout(60)


class Recorded(InProcessClient):
    """Notes its calls, and fails at those that `fail` names; a failing call reaches the workers first."""

    def __init__(self, workers: list[SparseNcclWorker]) -> None:
        super().__init__(workers)
        self.calls: list[str] = []
        self.fail: set[str] = set()

    def start_weight_update(self) -> None:
        super().start_weight_update()
        self._note("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(update_info)
        self._note("update")

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._note("finish")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fail:
            raise OSError("503 from http://worker-0")


@contextmanager
def setting() -> Iterator[tuple[Policy, Policy, Recorded, SparseNcclTrainer]]:
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, _):
        client = Recorded(workers)
        with trainer_of(policy, client, 1) as trainer:
            policy.step(0)
            yield policy, served, client, trainer


def test_workers_are_released_when_a_round_aborts() -> None:
    """An engine that paused at start must not stay paused: `finish_weight_update` comes after every start."""
    with setting() as (_, _, client, trainer):
        worker = client._workers[0]
        assert isinstance(worker, SparseNcclWorker)
        worker._undo_budget_bytes = 0
        with pytest.raises(RoundAbortedError, match="undo would exceed its budget"):
            trainer.send_weights()
        assert client.calls == ["start", "update", "finish"]
        worker._undo_budget_bytes = None
        assert trainer.send_weights().num_verified == 1


def test_workers_are_released_when_the_start_fails() -> None:
    """Some of them may have heard it. Nothing was sent, and the error is the client's."""
    with setting() as (_, _, client, trainer):
        client.fail = {"start", "finish"}
        with pytest.raises(TransportError, match="could not start the update: 503"):
            trainer.send_weights()
        assert client.calls == ["start", "finish"]
        client.fail = set()
        assert trainer.send_weights().target_version == 1


def test_a_finish_that_fails_says_that_the_version_stands() -> None:
    """The baseline and the workers have moved; the next version is one more."""
    with setting() as (policy, served, client, trainer):
        client.fail = {"finish"}
        with pytest.raises(TransportError, match=r"could not finish the update, though it is committed.*503") as caught:
            trainer.send_weights()
        assert caught.value.version == 1
        assert weights_of(served) == weights_of(policy)
        client.fail = set()
        assert trainer.send_weights().target_version == 2


def test_an_update_call_that_fails_after_the_commit_is_in_the_report() -> None:
    """Every worker has acknowledged by then: the call's own failure must not pass for a failed publish."""
    with setting() as (policy, served, client, trainer):
        client.fail = {"update"}
        report = trainer.send_weights()
        assert (report.committed, report.num_verified) == (True, 1)
        assert report.error == "the client failed: 503 from http://worker-0"
        assert weights_of(served) == weights_of(policy)
        client.fail = set()
        assert trainer.send_weights().error == ""


def test_an_update_call_that_hangs_after_the_commit_is_in_the_report() -> None:
    """It is waited for no longer than one timeout, and its thread ends when it does."""
    leave = threading.Event()

    class Hanging(InProcessClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            super().update_weights(update_info)
            assert leave.wait(30)

    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, _), trainer_of(policy, Hanging(workers), 1, timeout_s=1.0) as trainer:
        report = trainer.send_weights()
        assert (report.committed, report.num_verified) == (True, 1)
        assert "did not return" in report.error
        leave.set()


def test_a_client_that_reaches_one_worker_of_two_aborts_and_drops_the_other() -> None:
    """The worker that was never called cannot answer: it is dropped by deadline, and says so when it is called."""
    policy = Policy(0)

    class Half(PipeClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.workers[0].tell("receive", update_info)
            raise OSError("no route to worker 1")

    with worker_processes(0, 0) as client, trainer_of(policy, client, 2, timeout_s=1.0) as trainer:
        client.reports()
        before = weights_of(policy)
        policy.step(0)
        trainer._client = Half(client.workers)
        with pytest.raises((RoundAbortedError, TransportError), match="no route to worker 1"):
            trainer.send_weights()
        assert client.workers[0].reply().version == 0
        assert client.workers[0].ask("weights") == client.workers[1].ask("weights") == before
        trainer._client = client
        report = trainer.send_weights()
        assert report.committed
        replies = []
        for worker in client.workers:
            try:
                replies.append(worker.reply().version)
            except AssertionError:
                replies.append(None)
        assert replies.count(1) == report.num_verified


def test_a_trainer_that_was_shut_down_says_so() -> None:
    """Not with whatever a closed socket raises."""
    with setting() as (_, _, client, trainer):
        trainer.shutdown()
        with pytest.raises(StateError, match="shut down"):
            trainer.send_weights()
        assert client.calls == []
