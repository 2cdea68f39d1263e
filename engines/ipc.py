"""The `ipc` engine: trainer and workers on one host, payload through memory that they share.

On CPUs host memory, on GPUs memory of the trainer's, by CUDA IPC (`shared_group.py`). All but the payload's way is that
of `sparse_nccl`: control connections, wires, audits and decisions.
"""

from __future__ import annotations

from typing import ClassVar

from deltacast.engines.group import Transport
from deltacast.engines.shared_group import SHARED_MEMORY
from deltacast.engines.trainer import RoundTrainer
from deltacast.engines.worker import RoundWorker

__all__ = ["IpcTrainer", "IpcWorker"]


class IpcTrainer(RoundTrainer):
    """Trainer half: creates the memory and fills it.

    Attributes:
        transport: with the slabs' size and number; those of `SharedRendezvous` by default.
    """

    transport: ClassVar[Transport] = SHARED_MEMORY


class IpcWorker(RoundWorker):
    """Worker half: a process of the trainer's user, on the trainer's host.

    Its GPU may be any of the host's, the trainer's too; with GPUs it must be another process than the trainer's.
    """

    transport: ClassVar[Transport] = SHARED_MEMORY
