"""Rounds between real processes over Gloo, and in this process where nothing has to die."""

from __future__ import annotations

import copy
import signal
import socket
import threading
import time

import pytest
import torch

from deltacast.delta.errors import (
    AuthenticationError,
    DeadlineError,
    InputError,
    RoundAbortedError,
    StateError,
    TableError,
    TransportError,
)
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.engines.base import ServingStatus, WorkerInitInfo
from deltacast.engines.clients import InProcessClient
from deltacast.engines.registry import trainer_engine, worker_engine
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import DIE_AT, PipeClient, Policy, WorkerError, WorkerProcess, weights_of, worker_processes
from engine_setups import (
    DEVICES,
    EVERY_WIRE,
    freeze_and_thaw,
    in_process,
    info,
    num_descriptors,
    num_workers_on,
    placed,
    policy_on,
    raised,
    trainer_of,
    wait_for_connection,
)

pytestmark = pytest.mark.timeout(120)
SECRET = "5e" * 32


@DEVICES
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_workers_hold_the_trainers_bytes_after_every_round(wire: str, num_workers: int, device: str) -> None:
    """Whole state dicts are compared as bytes, outside every digest."""
    policy, options = policy_on(device), placed(device, num_workers)
    with (
        worker_processes(*[0] * num_workers, device=device) as client,
        trainer_of(policy, client, num_workers, wire=wire, **options) as trainer,
    ):
        client.reports()
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights(optimizer_step=step)
            assert (report.committed, report.target_version, report.wire) == (True, step + 1, wire)
            assert report.num_verified == num_workers
            assert [reply.version for reply in client.reports()] == [step + 1] * num_workers
            for worker in client.workers:
                assert worker.ask("weights") == weights_of(policy)


def test_a_worker_with_other_weights_is_seeded() -> None:
    """One worker starts with the trainer's weights and is left alone, one with others and gets them whole."""
    policy = Policy(0)
    with worker_processes(0, 7) as client, trainer_of(policy, client, 2) as trainer:
        statuses = [worker.reply() for worker in client.workers]
        assert [status.status for status in statuses] == [ServingStatus.SERVING] * 2
        assert {status.digest for status in statuses} == {trainer.baseline.digest}
        assert client.workers[1].ask("weights") == weights_of(policy)


@DEVICES
@pytest.mark.parametrize("step", DIE_AT)
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_worker_killed_at_any_step_is_named_and_the_next_round_succeeds(wire: str, step: str, device: str) -> None:
    """The survivor is wholly at one version, audited; the trainer goes on with a new group and no restart."""
    policy, options = policy_on(device), placed(device, 2)
    die = {1: (step, 2, signal.SIGKILL)}
    with (
        worker_processes(0, 0, die=die, device=device) as client,
        trainer_of(policy, client, 2, wire=wire, **options) as trainer,
    ):
        client.reports()
        survivor, victim = client.workers
        policy.step(0)
        trainer.send_weights()
        before = weights_of(policy)
        policy.step(1)
        committed = step in {"voted", "decided", "acked"}  # its verdict was in
        if committed:
            report = trainer.send_weights()
            assert step == "acked" or f":{victim.pid}" in report.evicted[0]
        else:
            with pytest.raises(RoundAbortedError, match=f":{victim.pid}"):
                trainer.send_weights()
        assert victim.exit_code() == -signal.SIGKILL
        reports = [survivor.reply(), survivor.reply()]
        assert reports[-1].version == (2 if committed else 1)
        assert survivor.ask("weights") == (weights_of(policy) if committed else before)
        assert survivor.ask("audit") == []
        assert trainer.baseline.state.audit() == []
        assert survivor.ask("status").status is ServingStatus.SERVING
        client.workers.remove(victim)
        victim.stop()
        policy.step(2)
        report = trainer.send_weights()
        assert report.committed
        assert report.generation == 2
        assert survivor.reply().version == report.target_version
        assert survivor.ask("weights") == weights_of(policy)


@DEVICES
@pytest.mark.parametrize("step", ["ready", "payload", "voted"])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_frozen_worker_is_named_within_the_timeout_and_never_serves_what_it_missed(
    wire: str, step: str, device: str
) -> None:
    """SIGSTOP past every timeout: the round aborts, the others go on; thawed, it is at its old version and says so."""
    policy = policy_on(device)
    die, options = {1: (step, 1, signal.SIGSTOP)}, {"wire": wire, "timeout_s": 2.0, **placed(device, 2)}
    with (
        worker_processes(0, 0, die=die, device=device) as client,
        trainer_of(policy, client, 2, **options) as trainer,
    ):
        report = freeze_and_thaw(client, trainer, policy, step)
        assert [": replay (" in said for said in report.seeded] == [True]


def test_a_late_joiner_is_admitted_between_rounds() -> None:
    """It is seeded to the present version and takes part in the next round, in a group of the next generation."""
    policy = Policy(0)
    with worker_processes(0) as client, trainer_of(policy, client, 1) as trainer:
        client.reports()
        policy.step(0)
        assert trainer.send_weights().generation == 1
        client.reports()
        joiner = WorkerProcess(3)
        try:
            joiner.tell("init", trainer.worker_init_info)
            policy.step(1)
            wait_for_connection(trainer)
            report = trainer.send_weights()
            assert (report.num_verified, report.generation) == (2, 2)
            assert joiner.reply().version == report.target_version
            assert joiner.ask("weights") == weights_of(policy)
        finally:
            joiner.stop()


@DEVICES
@pytest.mark.parametrize("place", [0, 11, 1000])
def test_a_bit_flipped_in_a_workers_memory_is_found_named_and_repaired(place: int, device: str) -> None:
    """Audits rescan everything each round here; the flip may or may not lie where the update writes."""
    num_workers = num_workers_on(device)
    policy, options = policy_on(device), placed(device, num_workers)
    with (
        worker_processes(*[0] * num_workers, device=device) as client,
        trainer_of(policy, client, num_workers, audit="full", **options) as trainer,
    ):
        client.reports()
        client.workers[0].ask("flip", "up", place, 3)
        policy.step(0, share=0.5)
        report = trainer.send_weights()
        assert [name for _, name in report.repaired] == ["up"]
        assert report.num_verified == num_workers
        assert [reply.repaired for reply in client.reports()] == [("up",), ()][:num_workers]
        for worker in client.workers:
            assert worker.ask("weights") == weights_of(policy)


def test_the_trainer_going_away_leaves_workers_at_their_version_and_stale() -> None:
    """A worker that waits for a round hears that the connection is gone, and serves on under its old label."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as (workers, client), trainer_of(policy, client, 1) as trainer:
        policy.step(0)
        trainer.send_weights()
        trainer.shutdown()
        with pytest.raises(TransportError, match="closed the connection"):
            workers[0].receive_weights()
        status = workers[0].status
        assert (status.status, status.version) == (ServingStatus.STALE, 1)
        assert status.last_error


@DEVICES
@pytest.mark.parametrize("step", DIE_AT)
def test_the_only_worker_killed_leaves_the_trainer_able_to_go_on_with_a_new_one(step: str, device: str) -> None:
    """It raises, or reports the eviction, within its timeout; a new worker is seeded and the next round holds."""
    policy, options = policy_on(device), placed(device, 1)
    die = {0: (step, 1, signal.SIGKILL)}
    with (
        worker_processes(0, die=die, device=device) as client,
        trainer_of(policy, client, 1, **options) as trainer,
        worker_processes(3, device=device) as others,
    ):
        client.reports()
        policy.step(0)
        if step in {"voted", "decided", "acked"}:
            assert trainer.send_weights().committed
        else:
            with pytest.raises(RoundAbortedError, match=f":{client.workers[0].pid}"):
                trainer.send_weights()
        assert client.workers[0].exit_code() == -signal.SIGKILL
        newcomer = others.workers[0]
        newcomer.tell("init", trainer.worker_init_info)
        policy.step(1)
        wait_for_connection(trainer)
        report = trainer.send_weights()
        assert report.num_verified == 1
        assert "seed" in report.seeded[0]
        assert newcomer.reply().version == report.target_version
        assert newcomer.ask("weights") == weights_of(policy)


@DEVICES
@pytest.mark.parametrize("step", ["ready", "payload", "received", "written", "voted"])
def test_the_only_worker_frozen_is_dropped_in_time_and_thaws_at_one_whole_version(step: str, device: str) -> None:
    """What it holds then is audited, under its label."""
    policy, die = policy_on(device), {0: (step, 1, signal.SIGSTOP)}
    options = {"timeout_s": 2.0 if device == "cpu" else 5.0, **placed(device, 1)}
    with (
        worker_processes(0, die=die, device=device) as client,
        trainer_of(policy, client, 1, **options) as trainer,
    ):
        client.reports()
        (frozen,) = client.workers
        weights = {0: weights_of(policy)}
        policy.step(0)
        weights[1] = weights_of(policy)
        if step == "voted":
            assert f":{frozen.pid}" in trainer.send_weights().evicted[0]
        else:
            with pytest.raises(RoundAbortedError, match=f":{frozen.pid}"):
                trainer.send_weights()
        frozen.signal(signal.SIGCONT)
        with pytest.raises(WorkerError):
            frozen.reply()
        status = frozen.ask("status")
        assert status.status is ServingStatus.STALE
        assert frozen.ask("weights") == weights[status.version]
        assert frozen.ask("audit") == []


def test_an_empty_step_advances_the_version() -> None:
    """No change is a legal update, not a failure."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as (_, client), trainer_of(policy, client, 1) as trainer:
        report = trainer.send_weights()
        assert (report.committed, report.num_changed, report.target_version) == (True, 0, 1)


def test_a_worker_says_when_it_last_committed() -> None:
    """By the clock of its host; a worker that was left as it was at its handshake has committed nothing."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as ([worker], client), trainer_of(policy, client, 1) as trainer:
        assert worker.status.committed_at is None
        before = time.time()
        trainer.send_weights()
        first = worker.status.committed_at
        assert first is not None
        assert before <= first <= time.time()
        trainer.send_weights()
        assert (worker.status.committed_at or 0.0) > first


def test_data_pointers_do_not_move_and_tied_tensors_travel_once() -> None:
    """CUDA graphs hold addresses; the tied head shares the embedding's storage on the worker too."""
    policy, served = Policy(0), Policy(5)
    pointers = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    with in_process(served) as (_, client), trainer_of(policy, client, 1) as trainer:
        policy.step(0)
        trainer.send_weights()
        assert trainer.baseline.state.table.aliases == {"head": "embed"}
        assert "head" not in [meta.name for meta in trainer.baseline.state.table]
    assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == pointers
    assert weights_of(served) == weights_of(policy)


def test_another_parameter_table_is_refused_naming_the_parameter() -> None:
    """Nothing is written: the worker's weights are what they were."""
    policy, served = Policy(0), Policy(1)
    served.up = torch.nn.Parameter(torch.zeros(32, 97, dtype=torch.bfloat16))
    before = weights_of(served)
    with in_process(served) as (_, client), pytest.raises(TableError, match=r"'up'.*\[32, 96\].*\[32, 97\]"):
        SparseNcclTrainer.trainer_init(info(1), ModuleSource(policy), client)
    assert weights_of(served) == before


def test_a_source_that_changes_a_dtype_is_refused_before_anything_is_sent() -> None:
    """No worker is even told to start, and the next call works."""
    policy = Policy(0)
    tensors = dict(policy.state_dict())
    del tensors["head"]
    with in_process(copy.deepcopy(policy)) as (workers, client):
        trainer = SparseNcclTrainer.trainer_init(info(1), StateDictSource(tensors), client)
        tensors["up"] = tensors["up"].float()
        with pytest.raises(TableError, match="'up'"):
            trainer.send_weights()
        assert workers[0].status.version == 0
        assert workers[0].status.last_error == ""
        tensors["up"] = tensors["up"].bfloat16()
        assert trainer.send_weights().committed
        trainer.shutdown()


def test_undo_over_budget_is_refused_before_ready() -> None:
    """The worker says so instead of READY; no payload is sent and nobody moves."""
    policy, served = Policy(0), Policy(0)
    worker = SparseNcclWorker(ModuleSource(served), undo_budget_bytes=8)
    before = weights_of(served)
    with trainer_of(policy, InProcessClient([worker]), 1) as trainer:
        policy.step(0, share=0.5)
        with pytest.raises(RoundAbortedError, match="undo would exceed its budget"):
            trainer.send_weights()
        assert (weights_of(served), worker.status.version) == (before, 0)
        assert trainer.baseline.version == 0
    worker.shutdown()


def test_an_older_epoch_of_the_run_is_refused() -> None:
    """A worker that has seen epoch 2 does not follow a trainer of epoch 1 of the same run."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as (workers, client):
        with trainer_of(policy, client, 1, epoch=2) as trainer:
            trainer.send_weights()
        with pytest.raises(TableError, match="newer writer"):
            SparseNcclTrainer.trainer_init(info(1, epoch=1), ModuleSource(policy), client)
        assert workers[0].status.version == 1


def test_a_restarted_trainer_continues_above_every_reported_version() -> None:
    """Versions are never reused within a run, even if the new trainer believes that it is at version 0."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as (_, client):
        with trainer_of(policy, client, 1) as trainer:
            policy.step(0)
            trainer.send_weights()
            policy.step(1)
            assert trainer.send_weights().target_version == 2
        with trainer_of(policy, client, 1, epoch=1) as trainer:
            assert trainer.send_weights().target_version == 3


def test_a_second_send_while_one_runs_is_refused() -> None:
    """One round at a time; the first is not disturbed."""
    policy = Policy(0)
    entered, leave = threading.Event(), threading.Event()

    class Slow(InProcessClient):
        def start_weight_update(self) -> None:
            entered.set()
            assert leave.wait(20)

    worker = SparseNcclWorker(ModuleSource(copy.deepcopy(policy)))
    with trainer_of(policy, Slow([worker]), 1) as trainer:
        reports = []
        thread = threading.Thread(target=lambda: reports.append(trainer.send_weights()))
        thread.start()
        assert entered.wait(20)
        with pytest.raises(StateError, match="already running"):
            trainer.send_weights()
        leave.set()
        thread.join(20)
        assert reports[0].committed
    worker.shutdown()


def test_a_client_that_fails_ends_the_call_at_once_with_its_error() -> None:
    """Its error is the message; no timeout has to pass."""

    class Broken(InProcessClient):
        def init_transfer_engine(self, init_info: dict[str, object]) -> None:
            raise OSError("503 from http://worker-0")

    with pytest.raises(TransportError, match="503 from http://worker-0"):
        SparseNcclTrainer.trainer_init(info(1, join_timeout_s=60.0), ModuleSource(Policy(0)), Broken([]))


def test_no_worker_in_time_is_a_deadline_error() -> None:
    """The message says what was waited for and how long."""
    with pytest.raises(DeadlineError, match=r"a worker did not answer in time: expected within 0.3 s"):
        SparseNcclTrainer.trainer_init(info(1, join_timeout_s=0.3), ModuleSource(Policy(0)), PipeClient([]))


def test_strangers_are_dropped_unread_and_the_run_goes_on() -> None:
    """Wrong secrets, HTTP and noise on the control port disturb nobody."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as (_, client), trainer_of(policy, client, 1, secret=SECRET) as trainer:
        address = trainer.worker_init_info
        host, port = str(address["host"]), int(str(address["port"]))
        noise = [socket.create_connection((host, port)) for _ in range(2)]
        noise[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        noise[1].close()
        stranger = SparseNcclWorker(ModuleSource(Policy(1)))
        wrong = WorkerInitInfo(host=host, port=port, secret="00" * 32, run_id="run", timeout_s=5.0)
        errors: list[BaseException] = []
        thread = threading.Thread(target=lambda: errors.append(raised(stranger, wrong)))
        thread.start()
        policy.step(0)
        wait_for_connection(trainer)
        report = trainer.send_weights()
        while thread.is_alive():  # the noise may have come before the stranger
            report = trainer.send_weights()
        assert report.num_verified == len(report.workers) == 1
        assert isinstance(errors[0], AuthenticationError)
        noise[0].close()


def test_nothing_is_left_open_after_shutdown() -> None:
    """Threads and descriptors are what they were, also after a failed init."""
    policy = Policy(0)

    def run_once() -> None:
        with in_process(copy.deepcopy(policy)) as (_, client), trainer_of(policy, client, 1) as trainer:
            policy.step(0)
            trainer.send_weights()
        with pytest.raises(DeadlineError):
            SparseNcclTrainer.trainer_init(info(1, join_timeout_s=0.05), ModuleSource(policy), PipeClient([]))

    run_once()  # torch opens some things once
    threads, descriptors = threading.active_count(), num_descriptors()
    for _ in range(3):
        run_once()
    assert threading.active_count() == threads
    assert num_descriptors() == descriptors


def test_the_users_default_process_group_is_not_touched() -> None:
    """Our group is our own: the default one stays uninitialised, or the user's."""
    policy = Policy(0)
    with in_process(copy.deepcopy(policy)) as (_, client), trainer_of(policy, client, 1) as trainer:
        trainer.send_weights()
        assert not torch.distributed.is_initialized()


def test_the_registry_finds_both_halves_by_name() -> None:
    """Key, file and class share a stem."""
    assert trainer_engine("sparse_nccl") is SparseNcclTrainer
    assert worker_engine("sparse_nccl") is SparseNcclWorker
    with pytest.raises(ValueError, match="unknown engine: expected one of ipc, sparse_nccl"):
        trainer_engine("carrier_pigeon")


def test_a_worker_elsewhere_than_the_trainers_payload_is_refused_before_it_connects() -> None:
    """Else nobody could form a group, and each would blame the other's timeout."""
    policy = Policy(0)
    with in_process(Policy(0)) as ((worker,), client), trainer_of(policy, client, 1) as trainer:
        told = dict(trainer.worker_init_info)
        assert told["payload_device"] == "cpu"
        with pytest.raises(InputError, match=r"travels another way: expected a trainer on cpu.*found cuda"):
            worker.init_transfer_engine(told | {"payload_device": "cuda"})
