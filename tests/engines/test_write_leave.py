"""Workers whose weights are still read while an update arrives: the first write waits for leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from deltacast.delta.errors import RoundAbortedError
from deltacast.engines.base import ServingStatus
from deltacast.engines.clients import InProcessClient
from deltacast.engines.sparse_nccl import SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import (
    DEVICES,
    EVERY_WIRE,
    in_process,
    num_workers_on,
    placed,
    policy_on,
    serving,
    trainer_of,
    wait_for_connection,
)

pytestmark = pytest.mark.timeout(60)

STAGED = [("container", True), ("raw", False), ("coded", False)]
"""Wires, and whether they write on arrival, of payloads that are all there before leave is asked."""


class AskingClient(InProcessClient):
    """Has each worker ask before it writes; keeps what each said in the end, report or error, in `said`."""

    def __init__(self, workers: Sequence[SparseNcclWorker], *before_write: Callable[[], object] | None) -> None:
        super().__init__(workers)
        self._calls = list(zip(workers, before_write, strict=True))
        self.said: list[Any] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        def receive(worker: SparseNcclWorker, before_write: Callable[[], object] | None) -> object:
            try:
                return worker.receive_weights(update_info, before_write=before_write)
            except Exception as err:  # noqa: BLE001 - handed to the test
                return err

        with ThreadPoolExecutor(len(self._calls)) as pool:
            self.said = list(pool.map(lambda call: receive(*call), self._calls))


def seen_by(worker: SparseNcclWorker, module: nn.Module) -> tuple[ServingStatus, int | None, dict[str, bytes]]:
    status = worker.status
    return status.status, status.version, weights_of(module)


@DEVICES
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_nothing_is_written_before_leave_is_given(wire: str, overlap: bool, device: str) -> None:
    """Until then the old version is there and served; leave is asked once a call; then all is as without."""
    count = num_workers_on(device)
    options = placed(device, count)
    policy, served = policy_on(device), [Policy(0).to(f"cuda:{n + 1}" if options else "cpu") for n in range(count)]
    seen: list[list[Any]] = [[] for _ in served]
    before = [weights_of(policy)]
    with in_process(*served, device="cuda:1" if options else "cpu") as (workers, _):
        asks = [lambda n=n: seen[n].append(seen_by(workers[n], served[n])) for n in range(count)]
        client = AskingClient(workers, *asks)
        with trainer_of(policy, client, count, wire=wire, overlap_apply=overlap, **options) as trainer:
            for step in range(2):
                policy.step(step)
                assert trainer.send_weights().num_verified == count
                before.append(weights_of(policy))
                assert [weights_of(module) for module in served] == [before[-1]] * count
    assert seen == [[(ServingStatus.SERVING, version, before[version]) for version in range(2)]] * count


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_who_gets_no_leave_votes_against_the_round(wire: str) -> None:
    """The error of whoever was asked is in the report; the old version is served, and the next round goes on."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before = weights_of(policy)
    refusals = [RuntimeError("still generating")]

    def ask() -> None:
        if refusals:
            raise refusals.pop()

    with in_process(*served) as (workers, _):
        client = AskingClient(workers, None, ask)
        with trainer_of(policy, client, 2, wire=wire) as trainer:
            policy.step(0)
            with pytest.raises(RoundAbortedError, match="RuntimeError: still generating"):
                trainer.send_weights()
            assert [weights_of(module) for module in served] == [before] * 2
            assert [worker.status.version for worker in workers] == [0, 0]
            assert trainer.send_weights().num_verified == 2
            assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_round_that_ends_before_leave_is_given_writes_nothing(wire: str) -> None:
    """A worker that waits hears that the round ended when another is lost; it never stops serving."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before, over = weights_of(policy), threading.Event()
    stopped: list[bool] = []

    class Watched(SparseNcclWorker):
        def _stop_serving(self) -> None:
            stopped.append(True)
            super()._stop_serving()

    class Leaving(SparseNcclWorker):
        def _prepare(self, current: Any, header: bytes) -> str:
            raise KeyboardInterrupt

    with serving(Watched, served[0]) as ((worker,), _), serving(Leaving, served[1]) as ((leaving,), _):
        client = AskingClient([worker, leaving], lambda: over.wait(30), None)
        with trainer_of(policy, client, 2, wire=wire) as trainer:
            stopped.clear()
            policy.step(0)
            with pytest.raises(RoundAbortedError, match="connection"):
                trainer.send_weights()
            assert not over.is_set()
            assert stopped == []
            assert seen_by(worker, served[0]) == (ServingStatus.SERVING, 0, before)
        over.set()


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_one_that_cannot_take_part_asks_too(wire: str) -> None:
    """Who gives leave once all have asked waits for nobody who has voted against the round already."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before, all_asked = weights_of(policy), threading.Barrier(2, timeout=15)
    with in_process(*served) as (workers, _):
        client = AskingClient(workers, all_asked.wait, all_asked.wait)
        workers[1]._undo_budget_bytes = 0  # refuses the round
        with trainer_of(policy, client, 2, wire=wire) as trainer:
            policy.step(0)
            with pytest.raises(RoundAbortedError, match="undo"):
                trainer.send_weights()
            assert [weights_of(module) for module in served] == [before] * 2


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_worker_whose_trainer_goes_while_it_waits_keeps_the_old_version(wire: str) -> None:
    """The connection is watched while leave is awaited."""
    policy, served = Policy(0), Policy(0)
    before, over = weights_of(policy), threading.Event()
    with in_process(served) as (workers, _):

        def ask() -> None:
            trainer._workers.close()  # as its process's end would
            over.wait(30)

        client = AskingClient(workers, ask)
        with trainer_of(policy, client, 1, wire=wire) as trainer:
            policy.step(0)
            with pytest.raises(Exception, match=r"."):
                trainer.send_weights()
        over.set()
        assert isinstance(client.said[0], Exception)
        assert seen_by(workers[0], served) == (ServingStatus.STALE, 0, before)


@pytest.mark.parametrize(("wire", "overlap"), [*STAGED, ("raw", True)])
def test_leave_that_does_not_come_in_time_is_an_abort(wire: str, overlap: bool) -> None:
    """The wait is as long as a phase of the round, and the message says what was waited for."""
    policy, served = Policy(0), Policy(0)
    before, over = weights_of(policy), threading.Event()
    with in_process(served) as (workers, _):
        client = AskingClient(workers, lambda: over.wait(30))
        with trainer_of(policy, client, 1, wire=wire, overlap_apply=overlap, timeout_s=1.5) as trainer:
            policy.step(0)
            with pytest.raises(RoundAbortedError, match=r"leave to write|silent|in time"):
                trainer.send_weights()
            assert weights_of(served) == before
            assert workers[0].status.version == 0
        over.set()


def test_a_call_of_two_rounds_asks_once() -> None:
    """One worker is damaged: the others wait for leave while it votes, and write in the round after its repair."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    asked: list[int] = []
    leave = threading.Event()

    def ask() -> None:
        asked.append(1)
        leave.wait(30)

    with in_process(*served) as (workers, _):
        client = AskingClient(workers, leave.set, ask)
        with trainer_of(policy, client, 2, wire="container", audit="full") as trainer:
            policy.step(0)
            served[0].get_buffer("bias")[3] += 1.0
            report = trainer.send_weights()
            assert report.repaired
            assert report.num_verified == 2
    assert asked == [1]
    assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_refusal_holds_for_every_round_of_the_call(wire: str) -> None:
    """Another worker is damaged and repaired, so that the call has a second round: that is voted against as well."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before = weights_of(policy)

    def refuse() -> None:
        raise RuntimeError("still generating")

    with in_process(*served) as (workers, _):
        client = AskingClient(workers, None, refuse)
        with trainer_of(policy, client, 2, wire=wire, audit="full") as trainer:
            policy.step(0)
            served[0].get_buffer("bias")[3] += 1.0
            with pytest.raises(RoundAbortedError, match="still generating"):
                trainer.send_weights()
            assert weights_of(served[1]) == before
            assert (workers[1].status.status, workers[1].status.version) == (ServingStatus.SERVING, 0)


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_leave_that_comes_late_costs_nobody_its_place(wire: str) -> None:
    """The vote against is heard in time: the workers stay in the run, and the next call goes on."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    over = threading.Event()
    waits: list[Callable[[], object]] = [lambda: over.wait(30)]
    with in_process(*served) as (workers, _):
        client = AskingClient(workers, lambda: waits.pop()() if waits else None, None)
        with trainer_of(policy, client, 2, wire=wire, timeout_s=3.0) as trainer:
            policy.step(0)
            with pytest.raises(RoundAbortedError, match="no leave to write"):
                trainer.send_weights()
            assert len(trainer.worker_names) == 2
            report = trainer.send_weights()
            assert (report.num_verified, report.evicted) == (2, ())
        over.set()


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_what_is_made_from_weights_is_left_alone_where_nothing_was_written(wire: str) -> None:
    """It is read still, when a round ends before leave was given."""
    made: list[object] = []

    class Making(SparseNcclWorker):
        def _weights_written(self, payload: Any) -> None:
            made.append(payload)

    def refuse() -> None:
        raise RuntimeError("still generating")

    policy, served = Policy(0), Policy(0)
    with serving(Making, served) as (workers, _):
        client = AskingClient(workers, refuse)
        with trainer_of(policy, client, 1, wire=wire) as trainer:
            made.clear()
            policy.step(0)
            with pytest.raises(RoundAbortedError, match="still generating"):
                trainer.send_weights()
            assert made == []


def test_a_worker_that_only_lets_a_seed_pass_needs_no_leave_for_it() -> None:
    """It refuses the update, and stays in the run; so does the worker that came."""
    policy, served, late = Policy(0), Policy(0), Policy(7)
    refusals = [RuntimeError("still generating")]

    def ask() -> None:
        if refusals:
            raise refusals.pop()

    with in_process(served, late) as (workers, _), trainer_of(policy, AskingClient(workers[:1], ask), 1) as trainer:
        joining = threading.Thread(target=lambda: workers[1].init_transfer_engine(trainer.worker_init_info))
        joining.start()
        wait_for_connection(trainer)
        policy.step(0)
        with pytest.raises(RoundAbortedError, match="still generating"):
            trainer.send_weights()
        assert len(trainer.worker_names) == 2
        trainer._client = AskingClient(workers, None, None)
        joining.join(20)
        assert trainer.send_weights().num_verified == 2
        assert [weights_of(served), weights_of(late)] == [weights_of(policy)] * 2
