"""Engine ipc: rounds through shared memory between real processes, strangers, deaths, and nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.errors import (
    AuthenticationError,
    DeadlineError,
    InputError,
    ProtocolError,
    RoundAbortedError,
    TransportError,
)
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.control import Deadline, Task
from deltacast.engines.ipc import IpcTrainer, IpcWorker
from deltacast.engines.registry import trainer_engine, worker_engine
from deltacast.engines.shared_group import SharedGroup, SharedRendezvous
from dense_processes import group_of
from engine_processes import DIE_AT, EngineProcess, Policy, WorkerError, weights_of
from engine_setups import (
    DEVICES,
    EVERY_WIRE,
    SEED_WIRES,
    freeze_and_thaw,
    num_descriptors,
    policy_on,
    run_generation,
    serving,
    wait_for_connection,
)
from ipc_processes import (
    TIMEOUT_S,
    ipc_trainer,
    ipc_workers,
    lead,
    num_mappings,
    num_unix_sockets,
    serve_member,
    shared_group,
)

pytestmark = pytest.mark.timeout(120)
ANYBODY = 65534  # "nobody", on every Linux


def placed(device: str) -> dict[str, Any]:
    """Options of a trainer on the CPU, or on GPU 0."""
    return {} if device == "cpu" else {"device": "cuda:0", "placement": "cuda"}


# Rounds.


@DEVICES
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_workers_hold_the_trainers_bytes_after_every_round(wire: str, num_workers: int, device: str) -> None:
    """Whole state dicts are compared as bytes, outside every digest; payloads are larger than all slabs together."""
    policy = policy_on(device)
    with (
        ipc_workers(*[0] * num_workers, device=device) as client,
        ipc_trainer(policy, client, num_workers, wire=wire, **placed(device)) as trainer,
    ):
        client.reports()
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights()
            assert (report.committed, report.target_version, report.wire) == (True, step + 1, wire)
            assert report.num_verified == num_workers
            assert [reply.version for reply in client.reports()] == [step + 1] * num_workers
            for worker in client.workers:
                assert worker.ask("weights") == weights_of(policy)


@DEVICES
@pytest.mark.parametrize("seed_wire", SEED_WIRES)
def test_a_worker_with_other_weights_is_seeded(seed_wire: str, device: str) -> None:
    """With slabs of the usual size; the other worker only takes part."""
    policy, options = policy_on(device), {"seed_wire": seed_wire, "slab_bytes": 1024, **placed(device)}
    with (
        ipc_workers(0, 7, device=device) as client,
        ipc_trainer(policy, client, 2, IpcTrainer, **options) as trainer,
    ):
        assert [worker.reply().status for worker in client.workers] == [ServingStatus.SERVING] * 2
        assert client.workers[1].ask("weights") == weights_of(policy)
        policy.step(0)
        assert trainer.send_weights().num_verified == 2


@DEVICES
@pytest.mark.parametrize("step", DIE_AT)
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_worker_killed_at_any_step_is_named_and_the_next_round_succeeds(wire: str, step: str, device: str) -> None:
    """The survivor is wholly at one version, audited; the trainer goes on with new memory and no restart."""
    policy, die = policy_on(device), {1: (step, 2, signal.SIGKILL)}
    with (
        ipc_workers(0, 0, die=die, device=device) as client,
        ipc_trainer(policy, client, 2, wire=wire, **placed(device)) as trainer,
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
        assert [survivor.reply(), survivor.reply()][-1].version == (2 if committed else 1)
        assert survivor.ask("weights") == (weights_of(policy) if committed else before)
        assert survivor.ask("audit") == []
        client.workers.remove(victim)
        victim.stop()
        policy.step(2)
        report = trainer.send_weights()
        assert (report.num_verified, report.generation) == (1, 2)
        assert survivor.reply().version == report.target_version
        assert survivor.ask("weights") == weights_of(policy)


@pytest.mark.parametrize("step", ["ready", "payload", "voted"])
@pytest.mark.parametrize("wire", ["container", "raw"])
def test_a_frozen_worker_is_named_within_the_timeout_and_never_serves_what_it_missed(wire: str, step: str) -> None:
    """SIGSTOP past every timeout: the others go on; thawed, it is at one whole version, says so, and comes again."""
    policy = Policy(0)
    die = {1: (step, 1, signal.SIGSTOP)}
    with ipc_workers(0, 0, die=die) as client, ipc_trainer(policy, client, 2, wire=wire, timeout_s=2.0) as trainer:
        freeze_and_thaw(client, trainer, policy, step)


def test_fifty_generations_leave_no_descriptor_no_thread_and_no_mapping() -> None:
    """Groups that were formed, dropped, broken by an abort or refused: all of them are gone."""
    policy = Policy(0)
    with serving(IpcWorker, Policy(0), Policy(0)) as (workers, client), ipc_trainer(policy, client, 2) as trainer:
        run_generation(trainer, workers[0], policy, 1)  # torch opens some things once
        counts = threading.active_count(), num_descriptors(), num_mappings(), num_unix_sockets()
        assert counts[2:] == (3, 4)  # the trainer's and two workers'; two connections, both ends
        for number in range(2, 52):
            run_generation(trainer, workers[0], policy, number)
        assert (threading.active_count(), num_descriptors(), num_mappings(), num_unix_sockets()) == counts
        assert trainer._workers.generation >= 50
    assert (num_mappings(), num_unix_sockets()) == (0, 0)


def test_a_worker_with_another_secret_never_hears_of_the_group() -> None:
    """It is refused at the control connection, where the place and its key would be told."""
    policy, stranger = Policy(0), IpcWorker(ModuleSource(Policy(0)))
    with serving(IpcWorker, Policy(0)) as (_, client), ipc_trainer(policy, client, 1) as trainer:
        told = {**trainer.worker_init_info, "secret": "00" * 32}
        joining = Task("join", lambda: stranger.init_transfer_engine(told))
        wait_for_connection(trainer)
        policy.step(0)
        assert trainer.send_weights().num_verified == 1
        assert joining.join(TIMEOUT_S)
        assert isinstance(joining.error, AuthenticationError)
    stranger.shutdown()


def test_the_registry_finds_both_halves_by_name() -> None:
    """Key, file and class share a stem."""
    assert (trainer_engine("ipc"), worker_engine("ipc")) == (IpcTrainer, IpcWorker)


# The group alone.


class Group:
    """Rank 0 in this process, the others in theirs."""

    def __init__(self, group: SharedGroup, members: list[EngineProcess]) -> None:
        self.group, self.members = group, members

    def send(self, *tensors: torch.Tensor) -> list[list[bytes]]:
        """Send one payload and return what arrived where, as raw bytes."""
        for member in self.members:
            member.tell(
                "receive", *[(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
            )
        self.group.post(tensors, Deadline(TIMEOUT_S))
        self.group.wait(Deadline(TIMEOUT_S))
        return [member.reply() for member in self.members]


@contextmanager
def members(num_workers: int, device: str = "cpu") -> Iterator[list[EngineProcess]]:
    processes = [
        EngineProcess(serve_member, rank + 1, num_workers + 1, at(device, rank)) for rank in range(num_workers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.stop()


def at(device: str, number: int) -> str:
    return device if device == "cpu" else f"cuda:{-number % torch.cuda.device_count()}"


@contextmanager
def met(num_workers: int = 1, device: str = "cpu", *, slab_bytes: int = 64, num_slabs: int = 2) -> Iterator[Group]:
    """A group that has met."""
    rendezvous = SharedRendezvous("", num_workers + 1, TIMEOUT_S, slab_bytes=slab_bytes, num_slabs=num_slabs)
    group = shared_group(0, num_workers + 1, device if device == "cpu" else "cuda:0")
    with members(num_workers, device) as processes:
        for process in processes:
            process.tell("join", rendezvous.host)
        group.meet(rendezvous.store)
        for process in processes:
            process.reply()
        try:
            yield Group(group, processes)
        finally:
            group.close()


def raw_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes()


@DEVICES
@pytest.mark.parametrize(("slab_bytes", "num_slabs"), [(16, 1), (64, 2), (1 << 20, 3)])
def test_payloads_of_every_size_arrive_bit_by_bit(device: str, slab_bytes: int, num_slabs: int) -> None:
    """Larger than all slabs, smaller than one, of several dtypes, 0-d, empty, and nothing at all."""
    place = device if device == "cpu" else "cuda:0"
    floats = torch.linspace(-3, 3, 1001, device=place)
    payloads = [
        [floats, floats[:7].to(torch.bfloat16), torch.empty(0, device=place), floats[5].to(torch.float64)],
        [torch.arange(16, dtype=torch.uint8, device=place)],
        [torch.tensor([float("nan"), -0.0], device=place), floats[:1] > 0],
        [torch.empty(0, device=place), torch.empty(0, 3, dtype=torch.int64, device=place)],
        [],
        [floats],
    ]
    with met(2, device, slab_bytes=slab_bytes, num_slabs=num_slabs) as party:
        for payload in payloads:
            assert party.send(*payload) == [[raw_of(tensor) for tensor in payload]] * 2


def test_any_sizes_in_any_order_arrive() -> None:
    """One group takes them all: what one payload leaves in the slabs disturbs no later one."""
    with met(1, slab_bytes=48, num_slabs=3) as party:

        @settings(max_examples=60, deadline=None)
        @given(st.lists(st.binary(max_size=300), max_size=6))
        def check(raws: list[bytes]) -> None:
            tensors = [torch.tensor(list(raw), dtype=torch.uint8) for raw in raws]
            assert party.send(*tensors) == [raws]

        check()


@DEVICES
def test_a_host_buffer_is_broadcast(device: str) -> None:
    """Of several pieces, on either kind of device."""
    raw = bytes(range(256)) * 4096
    with met(2, device, slab_bytes=1 << 16) as party:
        for member in party.members:
            member.tell("broadcast", len(raw))
        party.group.broadcast(torch.frombuffer(bytearray(raw), dtype=torch.uint8), Deadline(TIMEOUT_S))
        assert [member.reply() for member in party.members] == [raw] * 2


def test_the_link_is_measured_and_posts_do_not_return_at_once() -> None:
    """A rate above zero after a large payload, none before."""
    with met(slab_bytes=1 << 20) as party:
        assert party.group.link_bytes_per_s is None
        party.send(torch.zeros(4 << 20, dtype=torch.uint8))
        assert (party.group.link_bytes_per_s or 0) > 0
        assert not party.group.posts_at_once


@DEVICES
def test_a_member_that_is_killed_ends_a_post_that_waits_for_it(device: str) -> None:
    """At once, not at the deadline; then everything is closed."""
    with met(2, device) as party:
        payload = [torch.zeros(1000, dtype=torch.uint8, device=party.group.device)]
        party.members[0].tell("receive", ("uint8", (1000,)))
        posting = Task("post", lambda: party.group.post(payload, Deadline(TIMEOUT_S)))
        party.members[1].signal(signal.SIGKILL)
        assert posting.join(5)
        assert isinstance(posting.error, TransportError)
        assert "rank 2" in str(posting.error)
        with pytest.raises(WorkerError, match="rank 0 of the payload group is gone"):
            party.members[0].reply()
        assert (num_mappings(), num_unix_sockets()) == (0, 0)


def test_a_member_that_freezes_is_named_at_the_deadline_and_finds_the_group_closed() -> None:
    """In `post` once all slabs are full, in `wait` before that."""
    for num_bytes in (1000, 100):
        with met() as party:
            party.members[0].signal(signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(DeadlineError, match="rank 1"):  # noqa: PT012 - which of the two it is depends on size
                party.group.post([torch.zeros(num_bytes, dtype=torch.uint8)], Deadline(0.3))
                party.group.wait(Deadline(0.3))
            assert time.monotonic() - started < 5
            party.members[0].signal(signal.SIGCONT)
            with pytest.raises(WorkerError, match="TransportError"):
                party.members[0].ask("receive", ("uint8", (1000,)))
            assert party.members[0].ask("abort") == (0, 0)


def test_a_payload_of_another_size_is_refused() -> None:
    """The member says what it expected; the trainer finds it gone."""
    with met() as party:
        party.members[0].tell("receive", ("uint8", (50,)))
        with pytest.raises(TransportError, match="rank 1"):
            party.group.post([torch.zeros(1000, dtype=torch.uint8)], Deadline(TIMEOUT_S))
        with pytest.raises(WorkerError, match="another slab than was to come"):
            party.members[0].reply()


def test_a_trainer_that_is_killed_leaves_a_member_with_an_error_and_nothing_else() -> None:
    """It had filled every slab and would have filled more."""
    trainer = EngineProcess(lead, "", 128)
    try:
        group = shared_group(1, 2)
        group.join(trainer.hear(), 0)
        assert trainer.hear() == "posted"
        trainer.signal(signal.SIGKILL)
        assert trainer.exit_code() == -signal.SIGKILL
        with pytest.raises(TransportError, match="rank 0 of the payload group is gone"):
            group.post([torch.ones(128, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)], Deadline(TIMEOUT_S))
        assert (num_mappings(), num_unix_sockets()) == (0, 0)
    finally:
        trainer.stop()


def wait_until(begun: Callable[[], object]) -> None:
    """Until another thread is in the middle of a call, which can end no more by itself."""
    deadline = Deadline(5.0)
    while not begun():
        deadline.left_s("the other thread")


@pytest.mark.parametrize("side", ["trainer", "member"])
def test_an_abort_from_another_thread_wakes_both_sides(side: str) -> None:
    """Whoever waits for the other hears of it at once, and may call `abort` again."""
    rendezvous = SharedRendezvous("", 2, TIMEOUT_S, slab_bytes=64, num_slabs=1)
    trainer, member = shared_group(0, 2), shared_group(1, 2)
    joining = Task("join", lambda: member.join(rendezvous.host, 0))
    trainer.meet(rendezvous.store)
    assert joining.join(5)
    waiting, other = (trainer, member) if side == "trainer" else (member, trainer)
    task = Task("post", lambda: waiting.post([torch.zeros(640, dtype=torch.uint8)], Deadline(TIMEOUT_S)))
    wait_until(lambda: waiting._num_users)
    waiting.abort()
    assert task.join(5)
    assert isinstance(task.error, TransportError)
    with pytest.raises(TransportError):
        other.post([torch.zeros(640, dtype=torch.uint8)], Deadline(TIMEOUT_S))
    for group in (waiting, other, waiting):
        group.abort()
        with pytest.raises(TransportError, match="closed"):
            group.wait(Deadline(1.0))
    assert (num_mappings(), num_unix_sockets()) == (0, 0)


def test_an_abort_wakes_a_trainer_that_waits_for_its_workers() -> None:
    """And nothing of it is left; who comes later finds nobody."""
    rendezvous, group = SharedRendezvous("", 2, TIMEOUT_S), shared_group(0, 2)
    meeting = Task("meet", lambda: group.meet(rendezvous.store))
    wait_until(lambda: group._memory)  # taken right before the door opens
    group.abort()
    assert meeting.join(5)
    assert isinstance(meeting.error, TransportError)
    del meeting
    with pytest.raises(TransportError, match="nobody listens"):
        shared_group(1, 2).join(rendezvous.host, 0)
    assert (num_mappings(), num_unix_sockets()) == (0, 0)


def test_workers_that_do_not_come_are_a_deadline_error() -> None:
    """After the group's own timeout."""
    rendezvous = SharedRendezvous("", 2, TIMEOUT_S)
    with pytest.raises(DeadlineError, match="a worker of the payload group"):
        shared_group(0, 2, timeout_s=0.1).meet(rendezvous.store)
    assert (num_mappings(), num_unix_sockets()) == (0, 0)


# Strangers.


def connection_to(place: str) -> socket.socket:
    """Connect to where a trainer listens, as everybody can read in /proc/net/unix."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(f"\0deltacast-{place[:32]}")
    sock.settimeout(10)
    return sock


def test_strangers_are_dropped_and_the_members_meet() -> None:
    """Silent ones by the hundred, one that says nonsense, and one that has the wrong key."""
    rendezvous = SharedRendezvous("", 2, TIMEOUT_S, slab_bytes=64)
    group, wrong_key = shared_group(0, 2), rendezvous.host[:32] + "00" * 32
    silent = [connection_to(rendezvous.host) for _ in range(100)]
    with members(1) as (member,):
        meeting = Task("meet", lambda: group.meet(rendezvous.store))
        nonsense = connection_to(rendezvous.host)
        nonsense.send(b"\xff" * 76)
        assert nonsense.recv(100) == b""
        with pytest.raises(TransportError, match="is gone"):
            shared_group(1, 2).join(wrong_key, 0)
        member.ask("join", rendezvous.host)
        assert meeting.join(5)
        assert meeting.error is None
        with pytest.raises(TransportError, match="nobody listens"):
            shared_group(1, 2).join(rendezvous.host, 0)  # everybody is there: the door is closed
        assert Group(group, [member]).send(torch.arange(9)) == [[raw_of(torch.arange(9))]]
    group.close()
    for sock in (*silent, nonsense):
        assert sock.recv(100) == b""
        sock.close()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


@needs_root
@pytest.mark.parametrize("user", [0, ANYBODY])
def test_another_users_process_is_not_let_in_though_it_knows_the_key(user: int) -> None:
    """By what the kernel says of it; the same message from one's own user is answered."""
    rendezvous, group = SharedRendezvous("", 2, TIMEOUT_S, slab_bytes=64), shared_group(0, 2, timeout_s=1.0)
    with members(1) as (member,):
        meeting = Task("meet", lambda: group.meet(rendezvous.store))
        member.ask("become", user)
        assert bool(member.ask("knock", rendezvous.host)) == (user == 0)
        assert meeting.join(5)
        assert isinstance(meeting.error, DeadlineError) == (user != 0)
    group.close()


@needs_root
def test_a_worker_refuses_another_users_trainer() -> None:
    """Before it says anything."""
    rendezvous = SharedRendezvous("", 2, TIMEOUT_S)
    with members(1) as (member,):
        member.ask("become", ANYBODY)
        with pytest.raises(WorkerError, match="is another user's") as caught:
            member.ask("join", rendezvous.host)
        assert caught.value.kind == "AuthenticationError"
    rendezvous.door.close()


def test_a_trainer_without_the_key_is_refused() -> None:
    """Somebody of the same user who has taken the name."""
    place = "11" * 16 + "22" * 32
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind("\0deltacast-" + "11" * 16)
        impostor.listen()
        group = shared_group(1, 2)
        joining = Task("join", lambda: group.join(place, 0))
        theirs, _ = impostor.accept()
        theirs.recv(100)
        socket.send_fds(theirs, [b"\0" * 48], [impostor.fileno()])
        assert joining.join(5)
        assert isinstance(joining.error, AuthenticationError)
        theirs.close()


@pytest.mark.parametrize("place", ["127.0.0.1", "", "zz", "00" * 47])
def test_a_place_of_another_engine_is_refused_by_name(place: str) -> None:
    """What sparse_nccl says in Form; and the other way round, where torch would try, and log, the key for long."""
    with pytest.raises(TransportError, match="Use one engine on both sides"):
        shared_group(1, 2).join(place, 29500)
    with pytest.raises(TransportError, match="Use one engine on both sides"):
        group_of(1, 2, "cpu").join(SharedRendezvous("", 2, 1.0).host, 0)


def test_a_worker_on_another_kind_of_device_is_told_so() -> None:
    """By the worker, so that it is the one to be let go."""
    rendezvous, group = SharedRendezvous("", 2, TIMEOUT_S, slab_bytes=64), shared_group(0, 2)
    meeting = Task("meet", lambda: group.meet(rendezvous.store))
    with pytest.raises(ProtocolError, match="another kind of device: expected meta, found cpu"):
        shared_group(1, 2, "meta").join(rendezvous.host, 0)
    assert meeting.join(5)
    assert meeting.error is None
    group.close()


def test_a_worker_cannot_write_to_the_trainers_memory() -> None:
    """Not through its mapping, another one, the descriptor, nor by cutting it short: the kernel refuses."""
    with met() as party:
        assert party.members[0].ask("write_to_memory") == [
            "TypeError",
            "PermissionError",
            "PermissionError",
            "PermissionError",
        ]


@pytest.mark.parametrize("bad", [{"slab_bytes": 0}, {"slab_bytes": 24}, {"slab_bytes": -16}, {"num_slabs": 0}])
def test_slabs_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(InputError, match="bad slabs"):
        SharedRendezvous("", 2, 1.0, **bad)


def test_memory_that_is_not_to_be_had_is_an_error_by_name() -> None:
    """Here because of the process's own limit on the size of files; nothing is left of the group."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    rendezvous, group = SharedRendezvous("", 2, TIMEOUT_S, slab_bytes=1 << 13), shared_group(0, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(TransportError, match="cannot share 32768 bytes of memory"):
            group.meet(rendezvous.store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (num_mappings(), num_unix_sockets()) == (0, 0)
