"""Ranks of a server in processes of their own, which meet over Gloo; some fail where a test says.

Targets of spawned processes must be importable by a child, hence a module here and not in a test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import WorkerInitInfo
from deltacast.engines.shard_exchange import Exchange
from deltacast.engines.shards import ShardWorker
from engine_processes import EngineProcess, PipeClient, answer_commands
from shard_models import Checkpoint, Runtime
from tensor_bytes import raw_bytes


@dataclass(frozen=True)
class Fault:
    """What a rank does in the round of this number.

    Attributes:
        what: `payload lost`: it does not get the payload. `payload changed`: it gets other bytes. `refuses`: it is not
            READY. `killed`: right after the payload. `frozen`: likewise, until it is continued.
        round: of the trainer's.
    """

    what: str
    round: int


class FaultyRank(ShardWorker):
    """A rank with faults."""

    faults: Sequence[Fault] = ()

    def _at(self, what: str, current: Any) -> bool:
        return Fault(what, current.propose.key.round) in self.faults

    def _prepare(self, current: Any, header: bytes) -> str:
        return "it will not" if self._at("refuses", current) else super()._prepare(current, header)

    def _receive_payload(self, current: Any) -> Any:
        decision = super()._receive_payload(current)
        if self._at("killed", current):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._at("frozen", current):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._at("payload lost", current):
            self._drop_group()
        if self._at("payload changed", current):
            current.payload._buffer[-1] ^= 1
        return decision


def gloo(folder: str, rank: int, num_ranks: int, timeout_s: float) -> ProcessGroupGloo:
    """Meet the other ranks at a file in a folder that is theirs alone."""
    kind: Any = ProcessGroupGloo  # torch's stubs leave out its options
    options = kind._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [kind.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(FileStore(str(Path(folder, "ranks")), num_ranks), rank, num_ranks, options)


def together(*calls: Callable[[], object]) -> list[object]:
    """Run calls side by side in threads, and return what they return, or raise."""
    with ThreadPoolExecutor(len(calls)) as pool:
        results = []
        for call in [pool.submit(call) for call in calls]:
            try:
                results.append(call.result())
            except Exception as err:  # noqa: BLE001 - handed to the test
                results.append(err)
        return results


class Rank:
    """What one rank's process holds between commands; each command is a method's name."""

    def __init__(self, worker: FaultyRank) -> None:
        self.worker = worker

    def init(self, info: WorkerInitInfo | dict[str, Any]) -> Any:
        self.worker.init_transfer_engine(info)
        return self.worker.status

    def receive(self, update_info: dict[str, Any]) -> Any:
        return self.worker.receive_weights(update_info)

    def disconnect(self) -> None:
        self.worker.shutdown()

    def forget(self) -> None:
        self.worker.state.forget()

    def status(self) -> Any:
        return self.worker.status

    def audit(self) -> list[str]:
        return [damage.parameter for damage in self.worker.state.audit()]


class CutRank(Rank):
    """A rank whose tensors were cut by hand."""

    def __init__(self, worker: FaultyRank, runtime: Runtime) -> None:
        super().__init__(worker)
        self.runtime = runtime

    def weights(self) -> dict[str, bytes]:
        return {name: raw_bytes(tensor.cpu()) for name, tensor in self.runtime.tensors.items()}

    def flip(self, name: str, place: int, bit: int) -> None:
        self.runtime.flip(name, place, bit)


@dataclass(frozen=True)
class Place:
    """Which rank of which server a process is.

    Attributes:
        folder: the server's own, where its ranks meet.
        rank, num_ranks: of the server.
        seed: of the checkpoint that it was loaded with.
        device: of its weights.
        exchange_s: how long it waits for the others.
        loaded: whether it claims what it was loaded with.
        faults: in rounds.
        flips: (tensor, byte, bit) after it was loaded.
    """

    folder: str
    rank: int
    num_ranks: int
    seed: int
    device: str
    exchange_s: float
    loaded: bool
    faults: Sequence[Fault]
    flips: Sequence[tuple[str, int, int]]


def serve_rank(pipe: Connection, place: Place) -> None:
    """Run one rank, answering commands until the pipe closes; `make` comes first."""
    faulthandler.enable()
    torch.set_num_threads(1)
    checkpoint = Checkpoint(place.seed)
    source = ModuleSource(checkpoint)
    runtime = Runtime(checkpoint, place.rank, place.num_ranks, place.device)
    group = gloo(place.folder, place.rank, place.num_ranks, 60.0)
    exchange = Exchange(group, timeout_s=place.exchange_s, patience_s=place.exchange_s)
    held: list[CutRank] = []

    def answer(command: str, *arguments: Any) -> object:
        if command != "make":
            return getattr(held[0], command)(*arguments)
        for flip in place.flips:
            runtime.flip(*flip)
        worker = FaultyRank(source.metas(), source.aliases, runtime.views, exchange, loaded=place.loaded)
        worker.faults = place.faults
        held.append(CutRank(worker, runtime))
        return worker.state.digest

    answer_commands(pipe, answer)
    for one in held:
        one.worker.shutdown()


class Servers(PipeClient):
    """A client of all ranks of some servers."""

    def made(self) -> list[str]:
        """Have every rank make its worker, and return the digests that they claim."""
        for rank in self.workers:
            rank.tell("make")
        return [rank.reply() for rank in self.workers]


@contextmanager
def server_processes(
    *seeds: int,
    num_ranks: int,
    faults: dict[int, list[Fault]] | None = None,
    device: str = "cpu",
    flips: dict[int, list[tuple[str, int, int]]] | None = None,
    exchange_s: float = 20.0,
    loaded: bool = True,
) -> Iterator[Servers]:
    """Start one server per seed, each of so many ranks; `faults` and `flips` by the rank's number over all servers.

    With device `cuda` their weights are on the GPUs that there are, in turn; payloads travel by Gloo all the same, as
    NCCL has no two ranks on one GPU.
    """
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for server, seed in enumerate(seeds):
                meeting = Path(folder, str(server))
                meeting.mkdir()
                for rank in range(num_ranks):
                    number = len(ranks)
                    gpu = device if device == "cpu" else f"{device}:{number % torch.cuda.device_count()}"
                    faulty, flipped = (faults or {}).get(number, ()), (flips or {}).get(number, ())
                    place = Place(str(meeting), rank, num_ranks, seed, gpu, exchange_s, loaded, faulty, flipped)
                    ranks.append(EngineProcess(serve_rank, place))
            yield Servers(ranks)
        finally:
            for process in ranks:
                process.stop()
