"""Ranks of `bench sync` that do it wrong; importable by a child."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from deltacast.bench.sync_rows import SyncOptions
from deltacast.bench.sync_worker import BenchWorker, answer


def fail(options: SyncOptions, rank: int, pipe: Connection) -> None:
    """Raise at the first command."""
    raise ZeroDivisionError(f"{pipe.recv()[0]} is too much for rank {rank}")


class CarelessWorker(BenchWorker):
    """Moves one word after each round of the peer wire."""

    def peer(self, counts: Sequence[int]) -> None:
        super().peer(counts)
        self._weights.moving[1].view(torch.int16)[7] += 1


def serve_carelessly(options: SyncOptions, rank: int, pipe: Connection) -> None:
    """Be a worker that damages its weights."""
    answer(CarelessWorker(options, rank), pipe)
