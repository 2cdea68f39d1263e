"""How fast a payload goes: measuring the link, and holding a payload to a rate.

A rate is a cap for links that are shared, and how benchmarks simulate slower ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from deltacast.delta.errors import DeadlineError
from deltacast.engines.control import Deadline

__all__ = ["LinkMeter", "Pace"]

_LEAST_BYTES: Final = 1 << 20
_SAMPLES: Final = 64  # of one generation; each costs the host some microseconds


class Pace:
    """A token bucket without burst: bytes are handed over when a link of this rate would have delivered them.

    One thread, the sender's, uses it.

    Args:
        bytes_per_s: the rate, above 0.
    """

    __slots__ = ("_free_at", "bytes_per_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def delay_s(self, num_bytes: int) -> float:
        """Put bytes on the link, behind those that are on it, and return the seconds until they are through."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
        return self._free_at - now

    def pass_on(self, num_bytes: int, deadline: Deadline) -> None:
        """Block until a link of this rate has delivered so many bytes.

        Raises:
            DeadlineError: it could not by the deadline; nothing was waited for.
        """
        delay_s = self.delay_s(num_bytes)
        if delay_s > deadline.left_s("the payload group"):
            raise DeadlineError(
                "the payload's rate is too low for its deadline",
                expected=f"{num_bytes} bytes within {deadline.remaining_s:.1f} s",
                found=f"{delay_s:.1f} s at {self.bytes_per_s:.0f} bytes/s",
                hint="Raise timeout_s or max_send_bytes_per_s, or lower chunk_bytes.",
            )
        time.sleep(delay_s)


class LinkMeter:
    """How fast a payload went: the best rate seen, since the others had to wait for somebody.

    Args:
        device: where posts happen; on CUDA they are timed by events on the current stream.
    """

    __slots__ = ("_device", "_num_measured", "_pending", "best_bytes_per_s")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: list[tuple[int, Any, Any]] = []
        self._num_measured = 0
        self.best_bytes_per_s: float | None = None

    @contextmanager
    def measured(self, num_bytes: int) -> Iterator[None]:
        """Time what is posted inside; small posts say nothing about the link."""
        if num_bytes < _LEAST_BYTES or self._num_measured >= _SAMPLES:
            yield
            return
        self._num_measured += 1
        if self._device.type == "cuda":
            event: Any = torch.cuda.Event  # its constructor has no types
            begin, end = event(enable_timing=True), event(enable_timing=True)
            stream = torch.cuda.current_stream(self._device)  # not the current device's, which may be another
            begin.record(stream)
            yield
            end.record(stream)
            self._pending.append((num_bytes, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._note(num_bytes, time.perf_counter() - started)

    def read(self) -> None:
        """Take in the times of posts that have ended on the device."""
        ended = [item for item in self._pending if item[2].query()]
        self._pending = [item for item in self._pending if item not in ended]
        for num_bytes, begin, end in ended:
            self._note(num_bytes, begin.elapsed_time(end) / 1e3)

    def _note(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            self.best_bytes_per_s = max(self.best_bytes_per_s or 0.0, num_bytes / seconds)
