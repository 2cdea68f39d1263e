"""Trainers and workers as the engine tests set them up, and ways to look at them from outside."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import torch

from deltacast.delta.errors import RoundAbortedError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import Client, ServingStatus, TrainerInitInfo, WorkerInitInfo
from deltacast.engines.clients import InProcessClient
from deltacast.engines.report import RoundReport
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.engines.trainer import RoundTrainer
from deltacast.engines.worker import RoundWorker
from engine_processes import PipeClient, Policy, WorkerError, weights_of

AnyTrainer = TypeVar("AnyTrainer", bound=RoundTrainer)
AnyWorker = TypeVar("AnyWorker", bound=RoundWorker)

RUN = "run"
WIRES = ("raw", "coded")
"""Of streamed rounds; on the CPU `auto` takes none of them."""
EVERY_WIRE = ("container", *WIRES)
SEED_WIRES = ("container", "dense")
"""Of seeds and repairs; on the CPU `auto` takes the first."""
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def policy_on(device: str, seed: int = 0) -> Policy:
    """Make the trainer's policy, on the CPU or on GPU 0."""
    return Policy(seed).to("cpu" if device == "cpu" else "cuda:0")


def placed(device: str, num_workers: int) -> dict[str, Any]:
    """Options of a trainer on GPU 0 with its workers on the GPUs after it; skips where there are too few."""
    if device == "cpu":
        return {}
    if torch.cuda.device_count() <= num_workers:
        pytest.skip(f"needs {num_workers + 1} GPUs")
    return {"device": "cuda:0", "placement": "cuda"}


def num_workers_on(device: str) -> int:
    """Two workers, or the one for which two GPUs have room."""
    return 2 if device == "cpu" or torch.cuda.device_count() > 2 else 1


def info(num_workers: int, **options: Any) -> TrainerInitInfo:
    return TrainerInitInfo(**{"num_workers": num_workers, "timeout_s": 20.0, "run_id": RUN, **options})


@contextmanager
def running(
    engine: type[AnyTrainer], policy: Policy, client: Client, num_workers: int, **options: Any
) -> Iterator[AnyTrainer]:
    """Make a trainer that has admitted its workers; it is shut down afterwards."""
    trainer = engine.trainer_init(info(num_workers, **options), ModuleSource(policy), client)
    try:
        yield trainer
    finally:
        trainer.shutdown()


def trainer_of(
    policy: Policy, client: Client, num_workers: int, **options: Any
) -> AbstractContextManager[SparseNcclTrainer]:
    """Make a trainer of the usual engine; as `running`."""
    return running(SparseNcclTrainer, policy, client, num_workers, **options)


@contextmanager
def serving(
    engine: type[AnyWorker], *policies: Policy, device: str = "cpu"
) -> Iterator[tuple[list[AnyWorker], InProcessClient]]:
    """Make worker engines in this process, where the policies are, and a client of theirs; shut down afterwards."""
    workers = [engine(ModuleSource(policy), device=device) for policy in policies]
    try:
        yield workers, InProcessClient(workers)
    finally:
        for worker in workers:
            worker.shutdown()


def in_process(
    *policies: Policy, device: str = "cpu"
) -> AbstractContextManager[tuple[list[SparseNcclWorker], InProcessClient]]:
    """Make workers of the usual engine; as `serving`."""
    return serving(SparseNcclWorker, *policies, device=device)


def run_generation(trainer: RoundTrainer, worker: RoundWorker, policy: Policy, number: int) -> None:
    """Form a group, and publish through it to both workers, or every fifth time be refused by one."""
    trainer._workers.drop_group()
    worker._undo_budget_bytes = 0 if number % 5 == 0 else None
    policy.step(number, share=0.2)
    if number % 5:
        assert trainer.send_weights().num_verified == 2
    else:
        with pytest.raises(RoundAbortedError):
            trainer.send_weights()


def freeze_and_thaw(client: PipeClient, trainer: RoundTrainer, policy: Policy, step: str) -> RoundReport:
    """Go on without a second worker that froze at `step` of round 1, thaw it, and have it come again.

    Frozen, it is named; thawed, it is at one whole version and says so. Returns the report of the round it came to.
    """
    client.reports()
    before = weights_of(policy)
    survivor, frozen = client.workers
    policy.step(0)
    if step == "voted":  # its verdict arrived: the round commits and the silent worker is dropped
        assert f":{frozen.pid}" in trainer.send_weights().evicted[0]
    else:
        with pytest.raises(RoundAbortedError, match=f":{frozen.pid}"):
            trainer.send_weights()
    survivor.reply()
    first = weights_of(policy)
    client.workers.remove(frozen)
    policy.step(1)
    assert trainer.send_weights().num_verified == 1
    survivor.reply()
    frozen.signal(signal.SIGCONT)
    with pytest.raises(WorkerError):
        frozen.reply()
    status = frozen.ask("status")
    assert (status.status, status.version) == (ServingStatus.STALE, 1 if step == "voted" else 0)
    assert frozen.ask("weights") == (first if step == "voted" else before)
    frozen.tell("init", trainer.worker_init_info)
    wait_for_connection(trainer)
    policy.step(2)
    report = trainer.send_weights()
    assert report.num_verified == 2
    assert frozen.reply().version == report.target_version
    assert frozen.ask("weights") == weights_of(policy)
    frozen.stop()
    return report


class TolerantClient(InProcessClient):
    """A client that does not tell the trainer of workers' errors; they are kept in `errors`."""

    def __init__(self, workers: list[SparseNcclWorker]) -> None:
        super().__init__(workers)
        self.errors: list[Exception] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            super().update_weights(update_info)
        except Exception as err:  # noqa: BLE001 - handed to the test
            self.errors.append(err)


def wait_for_connection(trainer: RoundTrainer) -> None:
    """Block until a worker knocks at the control port."""
    assert select.select([trainer._workers._listener._sock], [], [], 30)[0]


def raised(worker: SparseNcclWorker, init_info: WorkerInitInfo | dict[str, object]) -> BaseException:
    """Return what a worker's `init_transfer_engine` raises, for threads."""
    try:
        worker.init_transfer_engine(init_info)
    except BaseException as err:  # noqa: BLE001 - handed to the test's thread
        return err
    raise AssertionError("it was admitted")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@dataclass(frozen=True)
class Footprint:
    """What a process holds of its system, by what the kernel says.

    Attributes:
        descriptors: open files and sockets, listening ones included.
        ports: sockets among them that listen.
        threads: native ones, Python's among them.
        children: processes that were started and not waited for.
    """

    descriptors: int
    ports: int
    threads: int
    children: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        """Look."""
        tasks = list(Path("/proc/self/task").iterdir())
        children = frozenset(child for task in tasks for child in _words(task / "children"))
        return cls(num_descriptors(), len(listeners()), len(tasks), children)

    def exceeds(self, before: Footprint) -> bool:
        """Whether anything is here that was not there before."""
        more = self.descriptors > before.descriptors or self.ports > before.ports or self.threads > before.threads
        return more or not self.children <= before.children


def nothing_left_since(before: Footprint) -> bool:
    """Whether all is gone that came since; Gloo's and the rendezvous' threads end a moment after they were told to."""
    deadline = time.monotonic() + 5
    while Footprint.now().exceeds(before) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return not Footprint.now().exceeds(before)


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def listening_addresses(*, besides: set[str]) -> set[str]:
    """Return the addresses of the `listeners` that are not among some earlier ones, without ports."""
    return {address.split(":")[0] for address in listeners() - besides}


def listeners() -> set[str]:
    """Return the local addresses and ports that sockets of this process listen on, as /proc/net writes them."""
    ours = {link for file in Path("/proc/self/fd").iterdir() if (link := _target(file)).startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in ours:
                found.add(words[1])
    return found


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:  # the descriptor of the listing itself
        return ""


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # a thread that has ended meanwhile
        return []
