"""Dense receivers and senders in processes of their own, and tensors laid out in memory by hand.

Targets of spawned processes must be importable by a child, hence a module here and not in a test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from deltacast.engines.control import Deadline
from deltacast.engines.dense_nccl import DenseReceiver, DenseSender
from deltacast.engines.group import PayloadGroup
from engine_processes import answer_commands
from tensor_bytes import element_bytes

UNTOUCHED: Final = 0xA5
"""What memory holds before anything is received."""


@dataclass(frozen=True)
class Layout:
    """A tensor's place in a storage: one element before it, one behind.

    `order` is `rows`, `columns` (Fortran's), or `gaps` (rows, with every second element left out).
    """

    dtype: str
    shape: tuple[int, ...]
    order: str = "rows"

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        strides, step = [], 2 if self.order == "gaps" else 1
        for size in self.shape if self.order == "columns" else reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(strides if self.order == "columns" else reversed(strides))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * element_bytes(self.dtype)

    def storage(self) -> NDArray[np.uint8]:
        """A storage in which nothing is touched yet."""
        span = sum(stride * max(size, 1) for stride, size in zip(self.strides, self.shape, strict=True)) + 3
        return np.full(span * element_bytes(self.dtype), UNTOUCHED, np.uint8)

    def cells(self, storage: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The tensor's bytes in a storage, as an array of its shape and one axis more; writes reach the storage."""
        size = element_bytes(self.dtype)
        strides = (*(stride * size for stride in self.strides), 1)
        return as_strided(storage[size:], (*self.shape, size), strides)

    def tensor(self, storage: NDArray[np.uint8], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor in (a copy on `device` of) a storage, and that storage as bytes."""
        base = torch.from_numpy(storage).to(device)
        elements = base.view(getattr(torch, self.dtype))
        return elements.as_strided(self.shape, self.strides, 1), base


def group_of(rank: int, world_size: int, device: str, timeout_s: float = 20.0) -> PayloadGroup:
    """A group that has not met yet; with `cuda`, rank N takes GPU N."""
    place = torch.device(device if device == "cpu" else f"{device}:{rank}")
    return PayloadGroup(
        rank=rank, world_size=world_size, generation=1, device=place, timeout_s=timeout_s, interface="127.0.0.1"
    )


class ReceiverProcess:
    """What a receiver's process holds between commands."""

    def __init__(self, pipe: Connection, rank: int, world_size: int, device: str) -> None:
        self.device = device if device == "cpu" else f"{device}:{rank}"
        self.group = group_of(rank, world_size, device)
        self.pipe = pipe

    def join(self, host: str, port: int, slab_bytes: int, num_slabs: int) -> None:
        self.group.join(host, port)
        self.receiver = DenseReceiver(self.group, slab_bytes, num_slabs)

    def receive(self, layouts: list[Layout], sizes: list[int], timeout_s: float) -> list[tuple[bytes, bool]]:
        """Receive into fresh tensors; each one's whole storage, and whether it stayed where it was."""
        tensors, bases = zip(*(layout.tensor(layout.storage(), self.device) for layout in layouts), strict=True)
        pointers = [tensor.data_ptr() for tensor in tensors]
        self.receiver.receive(tensors, sizes, Deadline(timeout_s))
        kept = [tensor.data_ptr() == pointer for tensor, pointer in zip(tensors, pointers, strict=True)]
        return [(base.cpu().numpy().tobytes(), stayed) for base, stayed in zip(bases, kept, strict=True)]


def serve_receiver(pipe: Connection, rank: int, world_size: int, device: str) -> None:
    """Answer commands (names of `ReceiverProcess` methods) until the pipe closes."""
    faulthandler.enable()
    torch.set_num_threads(1)
    process = ReceiverProcess(pipe, rank, world_size, device)
    answer_commands(pipe, lambda command, *arguments: getattr(process, command)(*arguments))
    process.group.close()


def send_and_die(pipe: Connection, address: tuple[str, int], device: str, sizes: list[int], slab_bytes: int) -> None:
    """Be a sender that is killed after half of its tensors."""
    torch.set_num_threads(1)
    group = group_of(0, 2, device)
    group.join(*address)

    def tensors() -> Iterator[torch.Tensor]:
        for number, size in enumerate(sizes):
            if number == len(sizes) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.zeros(size, dtype=torch.uint8, device=group.device)

    DenseSender(group, slab_bytes, 2).send(tensors(), sizes, Deadline(20.0))
    pipe.send(("ok", None))


Outcome = list[tuple[bytes, bool]]
"""What `ReceiverProcess.receive` returns."""


def check_landed(layouts: list[Layout], raws: list[bytes], outcome: Any) -> None:
    """Each storage holds these bits in the tensor's place and is untouched elsewhere; no tensor has moved."""
    for layout, raw, (storage, stayed) in zip(layouts, raws, outcome, strict=True):
        found, expected = np.frombuffer(storage, np.uint8), layout.storage()
        layout.cells(expected)[...] = np.frombuffer(raw, np.uint8).reshape(layout.cells(expected).shape)
        assert found.tobytes() == expected.tobytes(), layout
        assert stayed, layout
