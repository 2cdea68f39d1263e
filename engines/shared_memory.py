"""Memory that a trainer writes and the workers of its host read.

It has no name. Whoever is to read it gets a descriptor over a unix socket, and the kernel counts who holds it: it is
free once the last holder has closed it or is dead, however it died. `HostMemory` is for CPUs; GPUs have
`cuda_memory.py`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from typing import Final

import numpy as np
import torch

from deltacast.delta.errors import ProtocolError, TransportError

__all__ = ["HostMemory", "SharedMemory"]

_F_SEAL_FUTURE_WRITE: Final = 0x10  # Python has no name for it


class SharedMemory(ABC):
    """A block of bytes, open in this process. One thread at a time uses it.

    Attributes:
        num_bytes: its size.
        descriptor: what a reader must be sent; ours, and closed with the block.
        handle: what a reader must be told beside it.
    """

    num_bytes: int
    descriptor: int
    handle: bytes = b""

    @abstractmethod
    def put(self, offset: int, source: torch.Tensor) -> None:
        """Copy bytes in; done at `settle`. The creator's side only.

        Args:
            offset: where, in bytes; all of them fit.
            source: flat uint8, contiguous, on the block's kind of device.
        """

    @abstractmethod
    def take(self, offset: int, target: torch.Tensor) -> None:
        """Copy bytes out to `target`; done at `settle`. Arguments as `put`."""

    @abstractmethod
    def settle(self) -> None:
        """Block until what was copied in or out is there."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the block; call once, while nobody uses it here. Other processes keep theirs."""


class HostMemory(SharedMemory):
    """A memfd, mapped. Nobody but its creator can write to it, and nobody can resize it; both are up to the kernel."""

    def __init__(self, descriptor: int, mapping: mmap.mmap) -> None:
        self.descriptor, self.num_bytes, self._mapping = descriptor, len(mapping), mapping

    @classmethod
    def create(cls, num_bytes: int) -> HostMemory:
        """Take memory, all of it now: what goes wrong with it then goes wrong here, and not at some later page.

        Raises:
            TransportError: the system has no room for it, or is not Linux 5.1 or later.
        """
        try:
            descriptor = os.memfd_create("deltacast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as err:
            raise TransportError("this system has no memfd", hint="Use engine sparse_nccl.") from err
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError as err:
            os.close(descriptor)
            raise TransportError(f"cannot share {num_bytes} bytes of memory: {err.strerror}") from err
        return cls(descriptor, mapping)

    @classmethod
    def open(cls, descriptor: int, num_bytes: int) -> HostMemory:
        """Map what another process created, for reading; takes the descriptor, and closes it if this fails.

        Raises:
            ProtocolError: it is no memory of that size.
        """
        try:
            return cls(descriptor, mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ))
        except (OSError, ValueError) as err:  # ValueError: it is smaller than that
            os.close(descriptor)
            raise ProtocolError("the trainer's memory cannot be mapped", expected=f"{num_bytes} bytes") from err

    def put(self, offset: int, source: torch.Tensor) -> None:
        """See `SharedMemory`."""
        self._bytes(offset, source.numel())[:] = source.numpy()

    def take(self, offset: int, target: torch.Tensor) -> None:
        """See `SharedMemory`."""
        target.numpy()[:] = self._bytes(offset, target.numel())

    def settle(self) -> None:
        """See `SharedMemory`. Copies are done when they return."""

    def close(self) -> None:
        """See `SharedMemory`."""
        self._mapping.close()
        os.close(self.descriptor)

    def _bytes(self, offset: int, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """View some of it; not to be kept, since a mapping with views cannot be closed."""
        return np.frombuffer(self._mapping, np.uint8, num_bytes, offset)
