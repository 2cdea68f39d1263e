"""Trainers and workers as the engine tests set them up, and ways to look at them from outside."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import Client, TrainerInitInfo, WorkerInitInfo
from deltacast.engines.clients import InProcessClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy

RUN = "run"
WIRES = ("raw", "coded")
"""Of streamed rounds; on the CPU `auto` takes none of them."""
EVERY_WIRE = ("container", *WIRES)
SEED_WIRES = ("container", "dense")
"""Of seeds and repairs; on the CPU `auto` takes the first."""


def info(num_workers: int, **options: Any) -> TrainerInitInfo:
    return TrainerInitInfo(**{"num_workers": num_workers, "timeout_s": 20.0, "run_id": RUN, **options})


@contextmanager
def trainer_of(policy: Policy, client: Client, num_workers: int, **options: Any) -> Iterator[SparseNcclTrainer]:
    """Make a trainer that has admitted its workers; it is shut down afterwards."""
    trainer = SparseNcclTrainer.trainer_init(info(num_workers, **options), ModuleSource(policy), client)
    try:
        yield trainer
    finally:
        trainer.shutdown()


@contextmanager
def in_process(*policies: Policy, device: str = "cpu") -> Iterator[tuple[list[SparseNcclWorker], InProcessClient]]:
    """Make worker engines in this process, where the policies are, and a client of theirs; shut down afterwards."""
    workers = [SparseNcclWorker(ModuleSource(policy), device=device) for policy in policies]
    try:
        yield workers, InProcessClient(workers)
    finally:
        for worker in workers:
            worker.shutdown()


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


def wait_for_connection(trainer: SparseNcclTrainer) -> None:
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


def listening_addresses() -> set[str]:
    """Return the local addresses that sockets of this process listen on, as /proc/net writes them, without ports."""
    ours = {link for file in Path("/proc/self/fd").iterdir() if (link := _target(file)).startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in ours:
                found.add(words[1].split(":")[0])
    return found


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:  # the descriptor of the listing itself
        return ""
