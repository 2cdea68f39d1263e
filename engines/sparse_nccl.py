"""The `sparse_nccl` engine: only the changes travel, in a few large broadcasts.

NCCL between GPUs, Gloo between CPUs; the same code. The payload group is ours alone, so the user's own process
groups are never touched. The round itself is `trainer.py` and `worker.py`.
"""

from __future__ import annotations

from deltacast.engines.trainer import RoundTrainer
from deltacast.engines.worker import RoundWorker

__all__ = ["SparseNcclTrainer", "SparseNcclWorker"]


class SparseNcclTrainer(RoundTrainer):
    """Trainer half: rank 0 of the payload group."""


class SparseNcclWorker(RoundWorker):
    """Worker half: rank 1 and up."""
