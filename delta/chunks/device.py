"""Streams and events where there are any: the same code runs on CPUs, where everything is in order anyway."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.kernels import NO_FAULT

__all__ = ["Lane", "SumBuffer", "pinned"]


class Lane:
    """One CUDA stream of one device; on the CPU nothing but the order of calls.

    Args:
        device: where it works.
        priority: -1 for one whose work goes before others', 0 for any.
    """

    __slots__ = ("_stream", "device")

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        cuda: Any = torch.cuda
        self.device = device
        self._stream = cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make it the current stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that comes when what was enqueued so far is done."""
        return None if self._stream is None else self._stream.record_event()

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Let what is enqueued from now on wait for an event of another lane."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def follow_caller(self) -> None:
        """Let what is enqueued from now on wait for all that the calling thread's current stream has."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead_caller(self) -> None:
        """Let the calling thread's current stream wait for all that is enqueued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Block until all that is enqueued here is done."""
        if self._stream is not None:
            self._stream.synchronize()


class SumBuffer:
    """Sums of several groups, and their fault records, in one buffer, so that one read brings them all.

    Args:
        rows: sums per parameter.
        sizes: parameters of each group.
        device: where they are.

    Attributes:
        parts: int64 [rows, size] of each group, views.
        faults: int32 [2] of each group, views.
    """

    def __init__(self, rows: int, sizes: Sequence[int], device: torch.device) -> None:
        ends = [rows * size for size in sizes]
        self._none = torch.zeros(sum(ends) + len(sizes), dtype=torch.int64, device=device)
        self._none[sum(ends) :].view(torch.int32).fill_(NO_FAULT)
        self._values = self._none.clone()
        *parts, faults = torch.split(self._values, [*ends, len(sizes)])
        self.parts = [part.view(rows, -1) for part in parts]
        self.faults = list(faults.view(torch.int32).view(-1, 2))
        self._host = pinned(self._values.numel(), device)
        *found, blocks = np.split(self._host.numpy().view(np.uint64), np.cumsum(ends))
        self._found = [sums.reshape(rows, -1) for sums in found]
        self._blocks = blocks.view(np.int32).reshape(-1, 2)
        self._arrived: torch.cuda.Event | None = None
        self._fetched = False

    def reset(self) -> None:
        """Set sums to zero and faults to none, in the order of the current stream."""
        self._fetched = False
        self._values.copy_(self._none)

    def fetch(self, lane: Lane) -> None:
        """Let what is there once a lane's present work is done be what `read` returns; waits for nothing."""
        with lane.active():
            self._host.copy_(self._values, non_blocking=True)
        self._arrived, self._fetched = lane.mark(), True

    def read(self, lane: Lane) -> tuple[list[NDArray[np.uint64]], list[int]]:
        """Return sums, uint64 [rows, size] per group, and first faulty blocks, as `fetch` found them. Blocks for that.

        Without a `fetch` since `reset`, what is there once all of the lane's work is done. The sums are views of this
        buffer's memory on the host, valid until the next `fetch`.
        """
        if not self._fetched:
            self.fetch(lane)
        self._fetched = False
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._found, self._blocks.min(axis=1).tolist()


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Allocate int64 [size] on the host, page-locked if a GPU copies to it."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
