"""Hold a payload to a rate: a cap for links that are shared, and how benchmarks simulate slower ones."""

from __future__ import annotations

import time

__all__ = ["Pace"]


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

    def pass_on(self, num_bytes: int) -> None:
        """Block until a link of this rate has delivered so many bytes."""
        time.sleep(self.delay_s(num_bytes))
