"""How much memory rounds take on top of what was there before them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import torch

__all__ = ["MemoryMeter"]

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Peak memory of one rank's rounds; what happens between rounds does not count.

    On a GPU: torch's allocations above those at its making, so that buffers which are taken once and kept count.
    On a CPU (Linux only): resident pages above those at the round's begin, a rough measure, since allocators keep
    pages that were freed.

    Args:
        device: this rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, device.type == "cuda"
        self._extra = 0
        self._known = True
        self._base = torch.cuda.memory_allocated(device) if self._gpu else 0

    def begin(self) -> None:
        """A round begins."""
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR_REFS.write_text("5")  # makes VmHWM what is resident now
        except OSError:
            self._known = False
        self._base = self._peak()

    def end(self) -> None:
        """It has ended."""
        self._extra = max(self._extra, self._peak() - self._base)

    def extra_bytes(self, held: int = 0) -> int | None:
        """Return what the round that took most took; None where it is unknown.

        Args:
            held: bytes of it that are no round's: on a GPU, a copy of the weights made after this meter.
        """
        return max(0, self._extra - (held if self._gpu else 0)) if self._known else None

    def _peak(self) -> int:
        if self._gpu:
            return torch.cuda.max_memory_allocated(self._device)
        found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE) if self._known else None
        self._known = found is not None
        return int(found[1]) * 1024 if found else 0
