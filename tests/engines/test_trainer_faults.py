"""Trainers that die, freeze or fail in the middle: workers hold one whole version under its own label, and say so."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from deltacast.delta.errors import RoundAbortedError, TransportError, VerificationError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus, TrainerInitInfo, Wire
from deltacast.engines.protocol import RoundKey
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from engine_processes import (
    TRAINER_DIES_AT,
    PipeClient,
    Policy,
    TrainerProcess,
    WorkerError,
    weights_of,
    worker_processes,
)
from engine_setups import (
    DEVICES,
    EVERY_WIRE,
    TolerantClient,
    in_process,
    info,
    num_workers_on,
    placed,
    policy_on,
    trainer_of,
)

pytestmark = pytest.mark.timeout(60)


def policy_at(*steps: int, device: str = "cpu") -> Policy:
    policy = policy_on(device)
    for step in steps:
        policy.step(step)
    return policy


def start(client: PipeClient, trainer: TrainerProcess) -> None:
    """Have the workers join a trainer process, and publish version 1."""
    client.init_transfer_engine(trainer.hear())
    assert trainer.hear() == "admitted"
    client.reports()
    client.update_weights({"call": 1})
    trainer.tell(1)
    assert trainer.reply() == 1
    client.reports()


@DEVICES
@pytest.mark.parametrize("step", TRAINER_DIES_AT)
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_trainer_killed_at_any_step_leaves_workers_whole_and_a_new_one_goes_on(
    wire: Wire, step: str, device: str
) -> None:
    """The survivors: stale, each wholly at the version it says, audited; then admitted by an heir of the run."""
    num = num_workers_on(device)
    options = {"wire": wire, **placed(device, num)}
    trainer = TrainerProcess(info(num, **options), step, 2, signal.SIGKILL)
    with worker_processes(*[0] * num, device=device) as client:
        try:
            start(client, trainer)
            client.update_weights({"call": 2})
            trainer.tell(2)
            assert trainer.exit_code() == -signal.SIGKILL
        finally:
            trainer.stop()
        weights = {1: weights_of(policy_at(1)), 2: weights_of(policy_at(1, 2))}
        for worker in client.workers:
            with pytest.raises(WorkerError, match="the connection"):
                worker.reply()
        statuses = [worker.ask("status") for worker in client.workers]
        newest = {"one told": [1, 2], "all told": [2, 2], "settled": [2, 2]}.get(step, [1, 1])[-num:]
        assert sorted(status.version for status in statuses) == newest
        for worker, status in zip(client.workers, statuses, strict=True):
            assert status.status is ServingStatus.STALE
            assert worker.ask("weights") == weights[status.version]
            assert worker.ask("audit") == []
        heir = policy_at(*range(1, newest[-1] + 1), device=device)
        with trainer_of(heir, client, num, epoch=1, version=newest[-1], **options) as successor:
            assert [worker.reply().status for worker in client.workers] == [ServingStatus.SERVING] * num
            heir.step(3)
            report = successor.send_weights()
            version = 2 if step == "idle" else 3  # a number that was named once means nothing else
            assert (report.num_verified, report.target_version) == (num, version)
            assert [worker.reply().version for worker in client.workers] == [version] * num
            assert [worker.ask("weights") for worker in client.workers] == [weights_of(heir)] * num


@pytest.mark.parametrize(
    ("step", "num_workers"),
    [("proposed", 2), ("sending", 2), ("sent", 1), ("sent", 2), ("all voted", 1), ("all voted", 2)],
)
@DEVICES
def test_a_trainer_frozen_past_every_timeout_raises_when_it_thaws(step: str, num_workers: int, device: str) -> None:
    """Its workers have given up by then: it must not commit on verdicts that it hears too late."""
    timeout_s = 1.0 if device == "cpu" else 5.0  # kernels are compiled in the first round
    options = {"timeout_s": timeout_s, "decision_timeout_s": timeout_s, **placed(device, num_workers)}
    trainer = TrainerProcess(info(num_workers, **options), step, 2, signal.SIGSTOP)
    with worker_processes(*[0] * num_workers, device=device) as client:
        try:
            start(client, trainer)
            client.update_weights({"call": 2})
            trainer.tell(2)
            for worker in client.workers:
                with pytest.raises(WorkerError):
                    worker.reply()
                status = worker.ask("status")
                assert (status.status, status.version) == (ServingStatus.STALE, 1)
            trainer.signal(signal.SIGCONT)
            with pytest.raises(WorkerError):
                trainer.reply()
        finally:
            trainer.stop()
        for worker in client.workers:
            assert worker.ask("weights") == weights_of(policy_at(1))
            assert worker.ask("audit") == []


@pytest.mark.parametrize("step", ["_propose", "_send_payload", "_watch_payload", "_hear_verdicts"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_trainer_interrupted_in_a_round_aborts_it_and_can_go_on(wire: Wire, step: str, fault: Any) -> None:
    """Ctrl-C, no memory, a bug: everybody hears ABORT at once, and the next call publishes."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    before = weights_of(policy)
    with in_process(*served) as (workers, client), trainer_of(policy, client, 2, wire=wire) as trainer:
        real = getattr(trainer, step)

        def interrupt(*args: Any) -> None:
            real(*args)
            raise fault

        policy.step(0)
        setattr(trainer, step, interrupt)
        with pytest.raises(fault):
            trainer.send_weights()
        delattr(trainer, step)
        assert trainer.decisions.lookup(RoundKey(0, 1, 1)) is False
        assert [weights_of(module) for module in served] == [before] * 2
        assert [worker.status.version for worker in workers] == [0, 0]
        assert trainer.send_weights().num_verified == 2
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError, VerificationError("memory")])
@pytest.mark.parametrize("step", ["tell", "advance", "collect"])
def test_a_trainer_that_fails_at_its_decision_lets_everybody_come_again(step: str, fault: Any) -> None:
    """Nobody can say who heard what: each worker is whole at 0 or 1, stale, and a handshake settles it."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    weights = [weights_of(policy)]
    with in_process(*served) as (workers, _):
        client = TolerantClient(workers)
        with trainer_of(policy, client, 2) as trainer:
            settle = trainer._settle
            owner = trainer.baseline if step == "advance" else trainer._workers

            def interrupt(*_: Any) -> None:
                raise fault

            def fail_now(*args: Any) -> None:
                setattr(owner, step, interrupt)
                try:
                    settle(*args)
                finally:
                    delattr(owner, step)

            trainer._settle = fail_now  # type: ignore[assignment, method-assign]
            policy.step(0)
            weights.append(weights_of(policy))
            with pytest.raises(type(fault) if isinstance(fault, Exception) else fault):
                trainer.send_weights()
            del trainer._settle
            for worker, module in zip(workers, served, strict=True):
                assert worker.status.status is ServingStatus.STALE
                assert worker.status.version == (0 if step == "tell" else 1)
                assert weights_of(module) == weights[worker.status.version or 0]
            with pytest.raises(TransportError, match=r"no worker is left.*the trainer failed at its decision"):
                trainer.send_weights()
            newest = trainer.baseline.version
        with trainer_of(policy, client, 2, epoch=1, version=newest) as heir:
            report = heir.send_weights()
            assert report.num_verified == 2
            assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


def test_a_version_whose_number_was_used_is_not_used_for_other_bits() -> None:
    """A trainer restarted from an older checkpoint publishes what it has as a new version."""
    policy, other = Policy(0), Policy(9)
    with in_process(Policy(0), Policy(0)) as (workers, client):
        with trainer_of(policy, client, 2) as trainer:
            for step in range(3):
                policy.step(step)
                trainer.send_weights()
        with trainer_of(other, client, 2, epoch=1, version=1) as trainer:
            assert trainer.baseline.version == 4
            assert [worker.status.version for worker in workers] == [4, 4]
            assert trainer.send_weights().target_version == 5


def test_a_number_that_a_seed_was_named_by_is_not_used_for_other_bits() -> None:
    """All workers forget their version when they are seeded, and the trainer dies in it: they still know the number."""
    served = Policy(0)
    with in_process(served) as ([worker], client):
        with trainer_of(policy_at(0, 1, 2), client, 1, version=3) as trainer:
            assert worker.status.version == trainer.baseline.version == 3
        dying = SparseNcclTrainer(info(1, epoch=1), ModuleSource(Policy(8)), TolerantClient([worker]))
        real = dying._propose

        def propose(*arguments: Any) -> None:
            real(*arguments)
            raise MemoryError

        dying._propose = propose  # type: ignore[assignment, method-assign]
        with pytest.raises(MemoryError):
            dying._admit_first()
        assert (worker.state.version, dying.baseline.version) == (None, 4)
        dying.shutdown()
        with trainer_of(Policy(9), client, 1, epoch=2, version=1) as trainer:
            assert trainer.baseline.version == 5
            assert worker.status.version == 5


def test_a_trainer_that_stood_still_after_the_payload_had_left_commits_nothing() -> None:
    """The worker had voted by then, and has given up: once, the clock of the decision started when the trainer woke."""
    policy, served, gave_up = Policy(0), Policy(0), threading.Event()
    before = weights_of(served)
    with (
        in_process(served) as ([worker], _),
        trainer_of(policy, TolerantClient([worker]), 1, timeout_s=3.0, decision_timeout_s=3.0) as trainer,
    ):
        lose, make = worker._lose, trainer._container_of_source

        def note(err: BaseException) -> None:
            lose(err)
            gave_up.set()

        def made(*arguments: Any) -> Any:
            payload = make(*arguments)
            send = payload.send

            def send_and_stand_still(route: Any) -> None:
                send(route)
                assert gave_up.wait(30)

            payload.send = send_and_stand_still  # type: ignore[method-assign]
            return payload

        worker._lose = note  # type: ignore[method-assign]
        trainer._container_of_source = made  # type: ignore[assignment, method-assign]
        policy.step(0)
        with pytest.raises((RoundAbortedError, TransportError)):
            trainer.send_weights()
        assert trainer.baseline.version == 0
        assert (worker.status.status, worker.status.version) == (ServingStatus.STALE, 0)
        assert weights_of(served) == before


def test_a_trainer_restarted_with_the_workers_bits_takes_over_their_version() -> None:
    """Nothing is sent, whatever number its caller gave."""
    policy = Policy(0)
    with in_process(Policy(0)) as (workers, client):
        with trainer_of(policy, client, 1) as trainer:
            policy.step(0)
            trainer.send_weights()
        with trainer_of(policy, client, 1, epoch=1) as trainer:
            assert (trainer.baseline.version, workers[0].status.version) == (1, 1)
            report = trainer.send_weights()
            assert (report.base_version, report.target_version, report.seeded) == (1, 2, ())


def test_workers_that_go_before_the_start_are_waited_for_again() -> None:
    """`num_workers` means workers that are there: one that died after its hello does not count."""
    policy = Policy(0)
    with worker_processes(0, 0) as client:
        first, second = client.workers

        class Replacing(PipeClient):
            def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
                first.tell("init", init_info)
                admitted.append(init_info)

        admitted: list[dict[str, Any]] = []
        trainer = SparseNcclTrainer(info(2), ModuleSource(policy), Replacing([first]))
        admit = trainer._workers.admit_next

        def kill_the_first(deadline: Any) -> None:
            admit(deadline)
            if len(trainer._workers.members) == 1 and first.pid != second.pid and not killed:
                killed.append(first.pid)
                first.signal(signal.SIGKILL)
                first.exit_code()
                second.tell("init", admitted[0])
                third.tell("init", admitted[0])

        killed: list[int] = []
        with worker_processes(0) as others:
            third = others.workers[0]
            trainer._workers.admit_next = kill_the_first  # type: ignore[method-assign]
            trainer._admit_first()
            assert len(trainer.worker_names) == 2
            assert not any(str(killed[0]) in name for name in trainer.worker_names)
            trainer.shutdown()


def test_abort_is_what_the_record_says_when_the_client_is_gone_before_the_round() -> None:
    """It failed while the trainer compared weights: nobody is asked for anything, and the next call goes well."""
    policy, served = Policy(0), [Policy(0), Policy(0)]

    class FailsOnce(TolerantClient):
        failures = 1

        def update_weights(self, update_info: dict[str, Any]) -> None:
            if self.failures:
                self.failures = 0
                raise OSError("503 from http://worker-0")
            super().update_weights(update_info)

    with in_process(*served) as (workers, _), trainer_of(policy, FailsOnce(workers), 2) as trainer:
        policy.step(0)
        with pytest.raises((TransportError, RoundAbortedError), match="503 from http://worker-0"):
            trainer.send_weights()
        report = trainer.send_weights()
        assert (report.num_verified, report.evicted) == (2, ())
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 2


def test_a_secret_is_in_no_text_that_a_trainer_makes(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in what it logs, nor in reprs, errors or reports."""
    policy, secret = Policy(0), "5e" * 32
    caplog.set_level("DEBUG")
    with in_process(Policy(0)) as (workers, client), trainer_of(policy, client, 1, secret=secret) as trainer:
        report = trainer.send_weights()
        texts = [caplog.text, repr(report), str(report.as_dict()), repr(trainer._info), repr(workers[0]._info)]
    with pytest.raises(ValueError, match="out of range") as caught:
        TrainerInitInfo(num_workers=0, secret=secret)
    assert not any(secret in text for text in [*texts, str(caught.value), repr(caught.value)])
