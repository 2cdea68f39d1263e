"""Workers whose own side fails in the middle: whole at one version, or serving nothing and saying so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltacast.delta.errors import RoundAbortedError, StateError, TransportError
from deltacast.delta.memory import WordMemory
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus, WorkerStatus
from deltacast.engines.control import Task
from deltacast.engines.protocol import Decision
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import EVERY_WIRE, TolerantClient, in_process, info, raised, trainer_of, wait_for_connection

pytestmark = pytest.mark.timeout(60)


class Flaky:
    """A parameter's memory whose writes go wrong: each write takes the next fault, None being a good one."""

    def __init__(self, memory: WordMemory, *faults: BaseException | Callable[[WordMemory], None] | None) -> None:
        self._memory, self._faults = memory, list(faults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def write(self, positions: Any, words: Any) -> None:
        self._fail(lambda: self._memory.write(positions, words))

    def write_all(self, words: Any) -> None:
        self._fail(lambda: self._memory.write_all(words))

    def _fail(self, write: Callable[[], None]) -> None:
        fault = self._faults.pop(0) if self._faults else None
        if isinstance(fault, BaseException):
            raise fault
        write()
        if fault is not None:
            fault(self._memory)


def make_flaky(worker: SparseNcclWorker, name: str, *faults: Any) -> None:
    place = worker.state.table.index(name)
    memories: list[Any] = list(worker.state.memories)
    memories[place] = Flaky(memories[place], *faults)
    worker.state.memories = tuple(memories)


def flip(memory: WordMemory) -> None:
    memory.write_all(np.array(memory.read_all(), copy=True) ^ 1)


FAULTS = [OSError(5, "Input/output error"), RuntimeError("CUDA error"), MemoryError(), OverflowError(), ValueError("x")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_any_error_while_writing_is_a_vote_against_and_everybody_is_at_the_base(fault: Exception) -> None:
    """Whatever class it has: the round aborts by verdict, and the worker stays in the run."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before = weights_of(policy)
    with in_process(*served) as (workers, client), trainer_of(policy, client, 2) as trainer:
        make_flaky(workers[0], "up", fault)
        policy.step(0)
        with pytest.raises(RoundAbortedError, match=type(fault).__name__):
            trainer.send_weights()
        for worker, module in zip(workers, served, strict=True):
            assert weights_of(module) == before
            assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 0)
            assert worker.state.audit() == []
        assert trainer.send_weights().num_verified == 2
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_worker_that_cannot_restore_serves_nothing_and_is_seeded_when_it_comes_again(fault: Exception) -> None:
    """Writing the second parameter fails, and so does putting the first one back: the bits are half and half."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    with in_process(*served) as (workers, _):
        client = TolerantClient(workers)
        with trainer_of(policy, client, 2) as trainer:
            make_flaky(workers[0], "embed", None, fault)
            make_flaky(workers[0], "up", fault)
            policy.step(0)
            with pytest.raises(RoundAbortedError) as caught:
                trainer.send_weights()
            assert len(caught.value.report.evicted) == 1
            assert (workers[0].status.status, workers[0].status.version) == (ServingStatus.EMPTY, None)
            assert (workers[1].status.status, workers[1].status.version) == (ServingStatus.SERVING, 0)
            assert trainer.send_weights().num_verified == 1
            thread = threading.Thread(target=lambda: workers[0].init_transfer_engine(trainer.worker_init_info))
            thread.start()
            wait_for_connection(trainer)
            policy.step(1)
            report = trainer.send_weights()
            thread.join(20)
            assert "seed" in report.seeded[0]
            assert [weights_of(module) for module in served] == [weights_of(policy)] * 2
            assert workers[0].status.status is ServingStatus.SERVING


@pytest.mark.parametrize("step", ["_prepare", "_receive_payload", "_stage", "_apply", "_audit", "_await_decision"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_an_interrupted_worker_leaves_at_the_base_and_the_trainer_hears_at_once(
    wire: str, step: str, fault: Any
) -> None:
    """Ctrl-C anywhere in a round: restored, audited, disconnected, stale; and it can come again."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before = weights_of(policy)

    def interrupt(*args: Any, **options: Any) -> None:
        getattr(SparseNcclWorker, step)(workers[0], *args, **options)
        raise fault

    class Client(TolerantClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            try:
                super().update_weights(update_info)
            except (KeyboardInterrupt, SystemExit):
                interrupted.append(True)

    interrupted: list[bool] = []
    with in_process(*served) as (workers, _), trainer_of(policy, Client(workers), 2, wire=wire) as trainer:
        setattr(workers[0], step, interrupt)
        policy.step(0)
        if step == "_await_decision":  # it had voted
            assert len(trainer.send_weights().evicted) == 1
        else:
            with pytest.raises(RoundAbortedError, match=r"(closed|lost) the connection"):
                trainer.send_weights()
        assert interrupted
        assert weights_of(served[0]) == before
        assert (workers[0].status.status, workers[0].status.version) == (ServingStatus.STALE, 0)
        assert workers[0].state.audit() == []
        delattr(workers[0], step)
        thread = threading.Thread(target=lambda: workers[0].init_transfer_engine(trainer.worker_init_info))
        thread.start()
        wait_for_connection(trainer)
        policy.step(1)
        assert trainer.send_weights().num_verified == 2
        thread.join(20)
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


def test_nothing_is_served_between_the_first_write_and_the_decision() -> None:
    """Another thread that asks for the status meanwhile must not be told a version that may still be undone."""
    policy, served = Policy(0), Policy(0)
    seen: list[WorkerStatus] = []
    with in_process(served) as (workers, client), trainer_of(policy, client, 1) as trainer:
        worker = workers[0]
        real = worker._await_decision

        def look(*args: Any) -> Decision:
            seen.append(worker.status)
            return real(*args)

        worker._await_decision = look  # type: ignore[assignment, method-assign]
        policy.step(0)
        trainer.send_weights()
        assert [(status.status, status.version) for status in seen] == [(ServingStatus.EMPTY, None)]
        assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 1)


def test_a_damaged_worker_says_that_it_serves_nothing_until_it_is_repaired() -> None:
    """Found by the audit of its handshake: the trainer sends the parameter, and the label comes back with it."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, client):
        with trainer_of(policy, client, 1):
            pass
        flip(workers[0].state.memory("up"))
        with pytest.raises(TransportError):
            workers[0].init_transfer_engine(info(1).for_workers("127.0.0.1", 1))
        with trainer_of(policy, client, 1, epoch=1) as trainer:
            assert weights_of(served) == weights_of(policy)
            assert (workers[0].status.status, workers[0].status.version) == (ServingStatus.SERVING, 0)
            assert trainer.send_weights().num_verified == 1


def test_a_worker_that_cannot_reach_a_trainer_calls_itself_stale() -> None:
    """It has left its old trainer by then."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, client), trainer_of(policy, client, 1):
        assert isinstance(raised(workers[0], info(1).for_workers("127.0.0.1", 1)), TransportError)
        assert (workers[0].status.status, workers[0].status.version) == (ServingStatus.STALE, 0)


def test_damage_in_several_parameters_of_both_workers_is_repaired_in_one_go() -> None:
    """Each worker gets what it needs, and the others' weights are not written."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    with in_process(*served) as (workers, client), trainer_of(policy, client, 2, audit="full") as trainer:
        flip(workers[0].state.memory("up"))
        flip(workers[0].state.memory("bias"))
        flip(workers[1].state.memory("router"))
        policy.step(0, share=0.9)
        report = trainer.send_weights()
        assert sorted(name for _, name in report.repaired) == ["bias", "router", "up"]
        assert report.num_verified == 2
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


@pytest.mark.parametrize("audit", ["off", 4, 16])
def test_damage_where_the_update_writes_is_found_without_any_audit(audit: Any) -> None:
    """All words are damaged and some are overwritten: that those have the right result proves nothing of the rest."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, client), trainer_of(policy, client, 1, audit=audit) as trainer:
        for name in ("up", "router"):
            flip(workers[0].state.memory(name))
        policy.step(0, share=0.05)
        report = trainer.send_weights()
        assert sorted(name for _, name in report.repaired) == ["router", "up"]
        assert weights_of(served) == weights_of(policy)


def test_damage_that_a_rolling_audit_finds_later_is_repaired_then() -> None:
    """Four rounds at most for a quarter each; nothing else in the update touches it."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, client), trainer_of(policy, client, 1, audit=4) as trainer:
        flip(workers[0].state.memory("bias"))
        reports = [trainer.send_weights() for _ in range(4)]
        assert [name for report in reports for _, name in report.repaired] == ["bias"]
        assert weights_of(served) == weights_of(policy)


def test_a_worker_whose_memory_flips_back_is_named_and_let_go() -> None:
    """One repair is tried; then the others go on without it, and never were written to for its sake."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    with in_process(*served) as (workers, _), trainer_of(policy, TolerantClient(workers), 2, audit="full") as trainer:
        place = workers[0].state.table.index("up")
        flip(workers[0].state.memories[place])
        make_flaky(workers[0], "up", flip)  # the repair's write does not last
        policy.step(0)
        report = trainer.send_weights()
        assert [name for _, name in report.repaired] == ["up"]
        assert (report.num_verified, len(report.workers), len(report.evicted)) == (1, 1, 1)
        assert workers[0].status.status is ServingStatus.EMPTY
        assert weights_of(served[1]) == weights_of(policy)
        assert workers[1].state.audit() == []


def test_the_only_worker_beyond_repair_is_named() -> None:
    """It flips again after a repair that went well: named, let go, and the next call says that nobody is left."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, _), trainer_of(policy, TolerantClient(workers), 1, audit="full") as trainer:
        memory = workers[0].state.memory("up")
        flip(memory)
        real, rounds = workers[0]._prepare, [0]

        def flip_after_the_repair(*args: Any) -> str:
            rounds[0] += 1
            if rounds[0] == 3:
                flip(memory)
            return real(*args)

        workers[0]._prepare = flip_after_the_repair  # type: ignore[assignment, method-assign]
        policy.step(0)
        with pytest.raises(RoundAbortedError, match=r"weights are damaged.*up"):
            trainer.send_weights()
        assert workers[0].status.status is ServingStatus.EMPTY
        with pytest.raises(TransportError, match=r"no worker is left.*damaged again after it was sent whole: up"):
            trainer.send_weights()


def test_damage_found_by_the_audit_after_a_rollback_is_repaired_at_the_next_call() -> None:
    """The round aborts for another reason; what the audit found then is not forgotten."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    with in_process(*served) as (workers, client), trainer_of(policy, client, 2, audit="off") as trainer:
        flip(workers[0].state.memory("bias"))
        make_flaky(workers[1], "up", OSError(5, "Input/output error"))
        policy.get_parameter("up").data.mul_(2)
        try:
            trainer.send_weights()
        except RoundAbortedError:
            trainer.send_weights()
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


def test_a_second_call_while_one_runs_is_refused_and_a_repeated_one_returns_the_same_report() -> None:
    """An HTTP client that tries again must not have two threads read one connection."""
    policy, served = Policy(0), Policy(0)
    outcomes: list[Any] = []

    class Twice(TolerantClient):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            super().update_weights(update_info)
            outcomes.append(workers[0]._last_report)
            outcomes.append(workers[0].receive_weights(update_info))

    with in_process(served) as (workers, _), trainer_of(policy, Twice(workers), 1) as trainer:
        real = workers[0]._round

        def call_again(*args: Any) -> None:
            with pytest.raises(StateError, match="while another call runs"):
                workers[0].receive_weights()
            real(*args)

        workers[0]._round = call_again  # type: ignore[assignment, method-assign]
        policy.step(0)
        assert trainer.send_weights().num_verified == 1
        assert outcomes[0] == outcomes[1]
        assert outcomes[0].version == 1


def test_a_worker_not_admitted_leaves_the_run() -> None:
    """The call that should have seeded it failed: it raises, and the trainer finds its connection closed."""
    policy, joining = Policy(0), Policy(5)
    joiner = SparseNcclWorker(ModuleSource(joining))
    errors: list[BaseException] = []
    with in_process(copy.deepcopy(policy)) as (_, client), trainer_of(policy, client, 1) as trainer:
        thread = threading.Thread(target=lambda: errors.append(raised(joiner, trainer.worker_init_info)))
        thread.start()
        wait_for_connection(trainer)

        def fail() -> list[str]:
            trainer._workers.welcome()
            raise ZeroDivisionError

        trainer._catch_up = fail  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            trainer.send_weights()
        thread.join(20)
        del trainer._catch_up
        assert isinstance(errors[0], StateError)
        assert (joiner.status.status, joiner.status.version) == (ServingStatus.EMPTY, None)
        report = trainer.send_weights()
        assert (report.num_verified, len(report.workers)) == (1, 1)


def test_a_collective_that_never_ended_keeps_the_process_out() -> None:
    """Lost is lost while the thread is there; once it has ended the worker can come again."""
    policy, served = Policy(0), Policy(0)
    leave = threading.Event()
    with in_process(served) as (workers, client):
        trainer = SparseNcclTrainer.trainer_init(info(1), ModuleSource(policy), client)
        trainer.shutdown()

        def wait() -> None:
            assert leave.wait(20)

        stuck = workers[0]._stuck = Task("stuck", wait)
        assert isinstance(raised(workers[0], info(1).for_workers("127.0.0.1", 1)), StateError)
        leave.set()
        assert stuck.join(20)
        with trainer_of(policy, client, 1, epoch=1) as trainer:
            assert trainer.send_weights().num_verified == 1
