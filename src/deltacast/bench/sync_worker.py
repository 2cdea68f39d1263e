"""Rank 1 and up of `bench sync`: one command at a time, as rank 0 says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from deltacast.bench.shapes import model_metas
from deltacast.bench.sync_memory import MemoryMeter
from deltacast.bench.sync_peer import receive_peer
from deltacast.bench.sync_ranks import device_of
from deltacast.bench.sync_rows import SyncOptions
from deltacast.bench.sync_weights import LiveWeights
from deltacast.engines.control import Deadline
from deltacast.engines.dense_nccl import DenseReceiver
from deltacast.engines.group import PayloadGroup
from deltacast.engines.sparse_nccl import SparseNcclWorker

__all__ = ["BenchWorker", "answer", "serve"]


def serve(options: SyncOptions, rank: int, pipe: Connection) -> None:
    """Be a worker: hold the run's weights, and do what rank 0 says until it is done."""
    answer(BenchWorker(options, rank), pipe)


def answer(worker: BenchWorker, pipe: Connection) -> None:
    """Run commands until the pipe closes; each names a method of the worker."""
    while True:
        try:
            command, *arguments = pipe.recv()
        except (EOFError, ConnectionError):  # rank 0 is done, or gone and says why itself
            return
        pipe.send(getattr(worker, command)(*arguments))


class BenchWorker:
    """A worker's weights, and every way to receive into them. Its methods are the commands.

    Args:
        options: the run's.
        rank: this worker's.
    """

    def __init__(self, options: SyncOptions, rank: int) -> None:
        self._options, self._rank = options, rank
        self._device = device_of(rank, options.world)
        self._weights = LiveWeights(model_metas(options.model, options.scale), self._device, options.seed)
        self._timeout_s = options.phase_s(self._weights.nbytes)
        self._meter = MemoryMeter(self._device)
        self._engine: SparseNcclWorker | None = None
        self._dense: DenseReceiver | None = None
        self._group: PayloadGroup

    def join(self, host: str, port: int) -> None:
        """Join the group of everything that is not our engine's. Collective."""
        self._group = PayloadGroup(rank=self._rank, world_size=self._options.world, generation=1, device=self._device,
                                   timeout_s=self._timeout_s, interface=host)  # fmt: skip
        self._group.join(host, port)

    def probe(self, num_words: int, count: int) -> None:
        """Receive so many words, so many times. Collective."""
        scratch = torch.empty(num_words, dtype=torch.int16, device=self._device)
        for _ in range(count):
            self._group.post([scratch], self._deadline())
            self._group.wait(self._deadline())

    def begin(self) -> None:
        """Start a row: memory counts from here."""
        self._meter = MemoryMeter(self._device)

    def prepare_dense(self) -> None:
        """Take the buffers that `dense` receives into."""
        self._dense = DenseReceiver(self._group)

    def dense(self) -> None:
        """Receive everything, packed, and copy it in. Collective."""
        assert self._dense is not None
        self._meter.begin()
        self._dense.receive(self._weights.live, self._weights.sizes, self._deadline())
        self._meter.end()

    def peer(self, counts: Sequence[int]) -> None:
        """Receive so many changes of each bf16 parameter. Collective."""
        self._meter.begin()
        receive_peer(self._group, self._weights.moving, counts, self._deadline())
        self._meter.end()

    def init(self, init_info: dict[str, Any]) -> None:
        """Join the trainer engine's run with a fresh worker engine."""
        self._engine = SparseNcclWorker(self._weights, device=str(self._device), threads=self._options.threads)
        self._engine.init_transfer_engine(init_info)

    def receive(self, update_info: dict[str, Any]) -> None:
        """Take part in one round of the engine."""
        assert self._engine is not None
        self._meter.begin()
        self._engine.receive_weights(update_info)
        self._meter.end()

    def end(self) -> int | None:
        """End a row, and return the most memory that one of its rounds took."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._dense = None
        gc.collect()
        return self._meter.extra_bytes()

    def compare(self) -> None:
        """Hold every word against rank 0's. Collective; raises VerificationError where one differs."""
        self._weights.compare(self._group, self._deadline())

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_s)
