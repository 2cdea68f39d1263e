"""Workers of engine ipc, and members of shared groups, in processes of their own.

Targets of spawned processes must be importable by a child, hence a module here and not in a test.
"""

from __future__ import annotations

import faulthandler
import hmac
import mmap
import os
import socket
import struct
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from deltacast.engines.base import Client
from deltacast.engines.control import Deadline
from deltacast.engines.group import Transport
from deltacast.engines.ipc import IpcTrainer, IpcWorker
from deltacast.engines.shared_group import SharedGroup, SharedRendezvous
from engine_processes import DyingWorker, Policy, WorkerProcess, answer_commands, worker_processes
from engine_setups import running

TIMEOUT_S = 20.0


class DyingIpcWorker(IpcWorker, DyingWorker):
    """See `DyingWorker`."""


class IpcWorkerProcess(WorkerProcess):
    """A worker."""

    engine = DyingIpcWorker

    @staticmethod
    def gpu(number: int) -> int:
        """See `WorkerProcess`: from the last one on, so that it is the trainer's too if there is no other."""
        return (-1 - number) % torch.cuda.device_count()


class SmallSlabs(IpcTrainer):
    """A trainer through whose slabs even the test's models go in several."""

    transport = Transport(SharedGroup, partial(SharedRendezvous, slab_bytes=256, num_slabs=2))


ipc_workers = partial(worker_processes, process=IpcWorkerProcess)


def ipc_trainer(
    policy: Policy, client: Client, num_workers: int, engine: type[IpcTrainer] = SmallSlabs, **options: Any
) -> AbstractContextManager[IpcTrainer]:
    """Make a trainer that has admitted its workers; it is shut down afterwards."""
    return running(engine, policy, client, num_workers, **options)


def shared_group(rank: int, world_size: int, device: str = "cpu", timeout_s: float = TIMEOUT_S) -> SharedGroup:
    """A group that has not met yet."""
    return SharedGroup(
        rank=rank,
        world_size=world_size,
        generation=1,
        device=torch.device(device),
        timeout_s=timeout_s,
        interface="127.0.0.1",
    )


class MemberProcess:
    """What a member of a shared group holds between commands."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.device, self.group = device, shared_group(rank, world_size, device)

    def join(self, place: str) -> None:
        self.group.join(place, 0)

    def receive(self, *shapes: tuple[str, tuple[int, ...]]) -> list[bytes]:
        """Take one payload into fresh tensors of these dtypes and shapes, and return their bytes."""
        tensors = [torch.full(shape, 1, dtype=getattr(torch, dtype), device=self.device) for dtype, shape in shapes]
        self.group.post(tensors, Deadline(TIMEOUT_S))
        self.group.wait(Deadline(TIMEOUT_S))
        return [tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]

    def broadcast(self, num_bytes: int) -> bytes:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.group.broadcast(buffer, Deadline(TIMEOUT_S))
        return buffer.numpy().tobytes()

    def write_to_memory(self) -> list[str]:
        """Try to write to the trainer's memory in the ways there are; what the system says to each."""
        memory: Any = self.group._memory
        errors = []
        for attempt in (
            lambda: memory._mapping.write(b"x"),
            lambda: mmap.mmap(memory.descriptor, 1),
            lambda: os.pwrite(memory.descriptor, b"x", 0),
            lambda: os.ftruncate(memory.descriptor, 1),
        ):
            try:
                attempt()
            except (OSError, TypeError) as err:
                errors.append(type(err).__name__)
        return errors

    def become(self, user: int) -> None:
        os.setresuid(user, user, user)

    def knock(self, place: str) -> bytes:
        """Say by hand what rank 1 has to say, and return the answer: nothing if there is none."""
        name, key, message = place[:32], bytes.fromhex(place[32:]), struct.pack("<I4s", 1, b"cpu")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(f"\0deltacast-{name}")
            sock.send(message + hmac.digest(key, b"worker" + message, "sha256"))
            try:
                return sock.recv(100)
            except ConnectionResetError:  # closed before it was read
                return b""

    def abort(self) -> tuple[int, int]:
        """End the group; how many mappings and sockets are left."""
        self.group.abort()
        return num_mappings(), num_unix_sockets()


def num_mappings() -> int:
    """How many of our blocks this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:deltacast")


def num_unix_sockets() -> int:
    """How many unix sockets of messages this process has, besides the one that the CUDA driver keeps for itself."""
    ours = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    mine = [row for row in rows if row[4] == "0005" and f"socket:[{row[6]}]" in ours]
    return sum(not row[-1].startswith("@cuda") for row in mine)


def serve_member(pipe: Connection, rank: int, world_size: int, device: str) -> None:
    """Answer commands (names of `MemberProcess` methods) until the pipe closes."""
    faulthandler.enable()
    torch.set_num_threads(1)
    member = MemberProcess(rank, world_size, device)
    answer_commands(pipe, lambda command, *arguments: getattr(member, command)(*arguments))
    member.group.close()


def lead(pipe: Connection, place: str, num_bytes: int) -> None:
    """Be a trainer that fills its slabs, says so, and then waits for ever."""
    del place
    torch.set_num_threads(1)
    group, rendezvous = shared_group(0, 2), SharedRendezvous("", 2, TIMEOUT_S, slab_bytes=64, num_slabs=2)
    pipe.send(rendezvous.host)
    group.meet(rendezvous.store)
    group.post([torch.zeros(num_bytes, dtype=torch.uint8)], Deadline(TIMEOUT_S))
    pipe.send("posted")
    pipe.recv()
