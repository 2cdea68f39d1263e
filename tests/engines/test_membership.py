"""Forming groups and admitting workers, with strangers, dead and frozen ones among them."""

from __future__ import annotations

import copy
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from deltacast.delta.errors import InputError, RoundAbortedError, StateError, TransportError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.control import Deadline
from deltacast.engines.group import Rendezvous
from deltacast.engines.opening import listening_socket
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, WorkerProcess, weights_of, worker_processes
from engine_setups import (
    SEED_WIRES,
    Footprint,
    TolerantClient,
    in_process,
    info,
    listeners,
    listening_addresses,
    nothing_left_since,
    num_descriptors,
    raised,
    resident_bytes,
    run_generation,
    trainer_of,
    wait_for_connection,
)

pytestmark = pytest.mark.timeout(60)


def address_of(trainer: SparseNcclTrainer) -> tuple[str, int]:
    return trainer._workers.address


def test_nothing_listens_but_on_the_chosen_interface() -> None:
    """Control, rendezvous and payload, of trainer and worker alike: 127.0.0.1, as /proc/net/tcp writes it."""
    policy, before = Policy(0), listeners()
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
        trainer.send_weights()
        assert listening_addresses(besides=before) == {"0100007F"}
        assert trainer._workers._rendezvous is not None


def test_only_ports_of_the_range_are_listened_on() -> None:
    """The first free ones; a range whose ports are all taken is an error that says so."""
    with ExitStack() as stack:
        first = next(port for port in range(20_000, 60_000, 7) if free(port, 3))
        opened = [stack.enter_context(listening_socket("127.0.0.1", range(first, first + 3))) for _ in range(3)]
        assert [sock.getsockname()[1] for sock in opened] == [first, first + 1, first + 2]
        with pytest.raises(TransportError, match="already in use, at each of 3 ports"):
            Rendezvous("127.0.0.1", 1, 5.0, range(first, first + 3))
        opened[1].close()
        with in_process(Policy(0)) as (_, client), pytest.raises(TransportError, match="already in use"):
            SparseNcclTrainer.trainer_init(info(1, port_range=(first, first + 2)), ModuleSource(Policy(0)), client)
        opened[0].close()
        opened[2].close()
        with (
            in_process(Policy(0)) as (_, client),
            trainer_of(Policy(0), client, 1, port_range=(first, first + 2)) as trainer,
        ):
            assert trainer.worker_init_info["port"] == first
            assert trainer._workers._rendezvous.port == first + 1  # type: ignore[union-attr]


def free(first: int, count: int) -> bool:
    """Say whether nobody listens on these ports now."""
    try:
        for port in range(first, first + count):
            listening_socket("127.0.0.1", (port,)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("ports", [(0, 9), (5, 6), (9, 5), (65_530, 65_536)])
def test_a_port_range_that_cannot_be_is_refused(ports: tuple[int, int]) -> None:
    """Before anything is opened."""
    with pytest.raises(InputError, match="port_range"):
        info(1, port_range=ports)


def test_a_rendezvous_listens_on_ipv6_where_told_to() -> None:
    """::1 and nothing else."""
    before = listeners()
    rendezvous = Rendezvous("::1", 1, 5.0)
    assert listening_addresses(besides=before) == {"00000000000000000000000001000000"}
    del rendezvous


def test_strangers_that_dribble_hold_a_round_up_for_the_documented_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes a second, on many connections: one opening's time in all, while a worker that joins is let in."""
    monkeypatch.setattr("deltacast.engines.opening._OPENING_S", 1.0)
    policy, joining, stop = Policy(0), Policy(3), threading.Event()
    joiner = SparseNcclWorker(ModuleSource(joining))
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
        strangers = [socket.create_connection(address_of(trainer)) for _ in range(20)]

        def dribble() -> None:
            while not stop.wait(0.2):
                for stranger in strangers:
                    try:
                        stranger.send(b"x")
                    except OSError:
                        return

        threads = [threading.Thread(target=dribble)]
        threads.append(threading.Thread(target=lambda: joiner.init_transfer_engine(trainer.worker_init_info)))
        for thread in threads:
            thread.start()
        started = time.monotonic()
        report = trainer.send_weights()
        while len(trainer.worker_names) < 2:
            report = trainer.send_weights()
        assert time.monotonic() - started < 5
        assert report.num_verified == 2
        stop.set()
        for thread in threads:
            thread.join(20)
        for stranger in strangers:
            stranger.close()
        assert weights_of(joining) == weights_of(policy)
    joiner.shutdown()


def test_silent_strangers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them are held than there is room for, and a worker behind them gets in."""
    monkeypatch.setattr("deltacast.engines.opening._OPENING_S", 1.0)
    policy, joiner = Policy(0), SparseNcclWorker(ModuleSource(Policy(3)))
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
        before = num_descriptors()
        strangers = [socket.create_connection(address_of(trainer)) for _ in range(100)]
        thread = threading.Thread(target=lambda: joiner.init_transfer_engine(trainer.worker_init_info))
        thread.start()
        while len(trainer.worker_names) < 2:
            trainer.send_weights()
        thread.join(20)
        for stranger in strangers:
            stranger.close()
        assert num_descriptors() <= before + 64 + 16  # the worker's own are a dozen
    joiner.shutdown()


def test_descriptors_above_1023_work() -> None:
    """`select` cannot watch those, and a process that serves has many."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, hard), hard))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        policy = Policy(0)
        with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
            policy.step(0)
            assert trainer.send_weights().num_verified == 1
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_waits_for_its_admission_longer_than_for_an_answer() -> None:
    """A trainer lets workers in between its own steps, which may take minutes: `idle_timeout_s` is for that."""
    policy, joining = Policy(0), Policy(3)
    joiner = SparseNcclWorker(ModuleSource(joining))
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
        knocked = threading.Thread(
            target=lambda: joiner.init_transfer_engine({**trainer.worker_init_info, "timeout_s": 0.2})
        )
        knocked.start()
        wait_for_connection(trainer)
        knocked.join(0.5)  # longer than its timeout
        policy.step(0)
        assert trainer.send_weights().num_verified == 2
        knocked.join(20)
        assert weights_of(joining) == weights_of(policy)
    joiner.shutdown()


def test_a_joiner_with_another_table_is_told_why_and_the_other_joiner_is_admitted() -> None:
    """In one and the same call."""
    policy, good, bad = Policy(0), Policy(3), Policy(4)
    bad.up = type(bad.up)(bad.up.data[:, :95].clone())
    joiners = [SparseNcclWorker(ModuleSource(module)) for module in (good, bad)]
    before, errors = weights_of(bad), list[BaseException]()
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
        address = trainer.worker_init_info
        refused = threading.Thread(target=lambda: errors.append(raised(joiners[1], address)))
        admitted = threading.Thread(target=lambda: joiners[0].init_transfer_engine(address))
        refused.start()
        admitted.start()
        report = trainer.send_weights()
        while refused.is_alive() or admitted.is_alive():
            report = trainer.send_weights()
        assert isinstance(errors[0], StateError)
        assert "'up'" in str(errors[0])
        assert (joiners[1].status.status, weights_of(bad)) == (ServingStatus.EMPTY, before)
        assert report.num_verified == 2
        assert weights_of(good) == weights_of(policy)
    for joiner in joiners:
        joiner.shutdown()


@pytest.mark.parametrize("step", ["ready", "payload", "received", "written", "voted", "decided"])
@pytest.mark.parametrize("seed_wire", SEED_WIRES)
def test_a_joiner_that_dies_while_it_is_seeded_stops_nobody(seed_wire: str, step: str) -> None:
    """The round of the others is published in the same call."""
    policy = Policy(0)
    with worker_processes(0) as client, trainer_of(policy, client, 1, seed_wire=seed_wire, slab_bytes=1024) as trainer:
        client.reports()
        joiner = WorkerProcess(3, (step, 1, signal.SIGKILL))
        try:
            joiner.tell("init", trainer.worker_init_info)
            wait_for_connection(trainer)
            policy.step(0)
            report = trainer.send_weights()
            assert joiner.exit_code() == -signal.SIGKILL
            assert (report.committed, report.num_verified, len(report.evicted)) == (True, 1, 1)
            assert client.workers[0].reply().version == 1
            assert client.workers[0].ask("weights") == weights_of(policy)
        finally:
            joiner.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_while_a_group_forms_costs_the_others_nothing(how: signal.Signals) -> None:
    """It is asked to form again because somebody joined; the frozen one is dropped by deadline, the healthy stay."""
    policy = Policy(0)
    with worker_processes(0, 0) as client, trainer_of(policy, client, 2, timeout_s=2.0) as trainer:
        client.reports()
        victim = client.workers[1]
        victim.signal(how)
        if how is signal.SIGKILL:
            victim.exit_code()
        trainer._workers.drop_group()
        report = trainer.send_weights()
        assert (report.num_verified, len(report.evicted)) == (1, 1)
        assert f":{victim.pid}" in report.evicted[0]
        assert client.workers[0].reply().version == 1


def test_a_frozen_rendezvous_holds_a_worker_no_longer_than_its_timeouts() -> None:
    """TCPStore's calls go on past their own timeout while its host is frozen; the worker must not."""
    policy, served = Policy(0), Policy(0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        in_process(served) as (workers, client),
        trainer_of(policy, client, 1, timeout_s=1.0) as trainer,
    ):
        tell = trainer._workers.tell

        def lead_astray(members: Any, message: Any, *rest: Any) -> None:
            if message.kind == "form":
                message = replace(message, port=silent.getsockname()[1])
            tell(members, message, *rest)

        trainer._workers.tell = lead_astray  # type: ignore[assignment, method-assign]
        trainer._workers.drop_group()
        started = time.monotonic()
        with pytest.raises(TransportError):
            trainer.send_weights()
        assert time.monotonic() - started < 10
        assert (workers[0].status.status, workers[0].status.version) == (ServingStatus.STALE, 0)


@pytest.mark.timeout(120)
def test_two_hundred_generations_leave_nothing_behind() -> None:
    """Groups that were formed, dropped, broken by an abort: no thread, port, descriptor or process, and no memory."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    with in_process(*served) as (workers, client), trainer_of(policy, client, 2) as trainer:
        for number in range(20):  # torch opens some things once, and the allocator finds its size
            run_generation(trainer, workers[0], policy, number)
        run_generation(trainer, workers[0], policy, 1)  # so that there is a group, as at the end
        before, resident = Footprint.now(), resident_bytes()
        for number in range(200):
            run_generation(trainer, workers[0], policy, number)
        assert trainer._workers.generation >= 200
        assert nothing_left_since(before)
        assert resident_bytes() - resident < 16 << 20


def test_a_worker_that_does_not_read_makes_no_other_one_late() -> None:
    """Its socket's buffers are full: once, the deadline of telling it was everybody's, and all were dropped."""
    policy = Policy(0)
    with worker_processes(0, 0) as client, trainer_of(policy, client, 2, timeout_s=1.5) as trainer:
        client.reports()
        deaf, other = trainer._workers.members
        process = next(worker for worker in client.workers if f":{worker.pid}" in deaf.name)
        process.signal(signal.SIGSTOP)
        with pytest.raises(TransportError):
            deaf.channel.send_raw(bytes(64 << 20), Deadline(0.5))
        with pytest.raises(RoundAbortedError) as caught:
            trainer.send_weights()
        assert [f":{process.pid}" in name for name in caught.value.report.evicted] == [True]
        assert trainer.worker_names == (other.name,)
        client.workers.remove(process)
        client.reports()
        assert trainer.send_weights().num_verified == 1
        process.stop()


def test_workers_with_the_same_name_are_told_apart() -> None:
    """Containers share host names and process 1: ranks count, not names."""
    policy, served = Policy(0), [Policy(0), copy.deepcopy(Policy(0))]
    with in_process(*served) as (workers, _), trainer_of(policy, TolerantClient(workers), 2) as trainer:
        assert len(set(trainer.worker_names)) == 1
        workers[0]._undo_budget_bytes = 0
        policy.step(0)
        with pytest.raises(RoundAbortedError) as caught:
            trainer.send_weights()
        assert [bool(worker.error) for worker in caught.value.report.workers].count(True) == 1
        workers[0]._undo_budget_bytes = None
        assert trainer.send_weights().num_verified == 2
