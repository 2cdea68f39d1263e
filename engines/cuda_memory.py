"""Memory of one GPU that other processes of the host map: CUDA IPC, through the driver's own functions.

Not torch's allocator: its blocks are parts of larger segments (whose handles would show a worker much more), cannot be
shared this way with expandable segments, and stay taken for ever if a reader is killed. Not torch's tensors either: a
reader's GPU may be another than the memory's, and the latter need not be visible to it, so bytes are copied by address.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import threading
from typing import Any, Final

import torch

from deltacast.delta.errors import TransportError
from deltacast.engines.shared_memory import SharedMemory

__all__ = ["CudaMemory"]

_HANDLE_BYTES: Final = 64
_LAZY_ENABLE_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class CudaMemory(SharedMemory):
    """A block of GPU memory, with a pipe that counts its readers.

    CUDA leaves undefined what a reader sees of memory that its creator has freed. So `descriptor` is a pipe's write
    end: each reader holds a copy until it has unmapped the memory or is dead, and the creator frees the memory once the
    read end says that nobody does. What a frozen reader holds is freed when the next block is created or closed.
    """

    def __init__(self, device: torch.device, address: int, num_bytes: int, *, descriptor: int, readers: int) -> None:
        self.num_bytes, self.descriptor = num_bytes, descriptor
        self._device, self._address, self._readers = device, address, readers

    @classmethod
    def create(cls, num_bytes: int, device: torch.device) -> CudaMemory:
        """Take memory of `device`.

        Raises:
            TransportError: there is no room for it, or it cannot be shared.
        """
        _free_unread()
        address, handle = ctypes.c_uint64(), _Handle()
        _call(device, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        try:
            _call(device, "cuIpcGetMemHandle", ctypes.byref(handle), address)
        except TransportError:
            _call(device, "cuMemFree_v2", address)
            raise
        readers, descriptor = os.pipe()
        memory = cls(device, address.value, num_bytes, descriptor=descriptor, readers=readers)
        memory.handle = bytes(handle)
        return memory

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, descriptor: int, device: torch.device) -> CudaMemory:
        """Map what another process created, for `device` to read; takes the descriptor, and closes it if this fails.

        Raises:
            TransportError: it cannot be mapped: this is the process that created it, say, or GPUs without peer access.
        """
        address = ctypes.c_uint64()
        try:
            theirs = _Handle.from_buffer_copy(handle.ljust(_HANDLE_BYTES, b"\0"))
            flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            _call(device, "cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, flags)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(device, address.value, num_bytes, descriptor=descriptor, readers=-1)

    def put(self, offset: int, source: torch.Tensor) -> None:
        """See `SharedMemory`. In the order of the current stream."""
        self._copy(self._address + offset, source.data_ptr(), source.numel())

    def take(self, offset: int, target: torch.Tensor) -> None:
        """See `SharedMemory`. In the order of the current stream."""
        self._copy(target.data_ptr(), self._address + offset, target.numel())

    def settle(self) -> None:
        """See `SharedMemory`. Blocks this thread until the current stream is done."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See `SharedMemory`. The creator's is freed now, or when its last reader has gone."""
        if self._readers < 0:
            try:
                _call(self._device, "cuIpcCloseMemHandle", ctypes.c_uint64(self._address))
            finally:
                os.close(self.descriptor)  # last: this is what lets the creator free it
            return
        os.close(self.descriptor)
        with _LENT_LOCK:
            _LENT.append(self)
        _free_unread()

    def free_if_unread(self) -> bool:
        """Free a block that was closed, unless a reader holds it, and say whether it is free."""
        poll = select.poll()
        poll.register(self._readers, 0)
        if not poll.poll(0):  # a hang-up is told without being asked for
            return False
        os.close(self._readers)
        _call(self._device, "cuMemFree_v2", ctypes.c_uint64(self._address))
        return True

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        _call(
            self._device,
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            stream,
        )


_LENT: Final[list[CudaMemory]] = []  # closed here and still mapped elsewhere: the process's own, as GPU memory is
_LENT_LOCK: Final = threading.Lock()


def _free_unread() -> None:
    with _LENT_LOCK:
        _LENT[:] = [memory for memory in _LENT if not memory.free_if_unread()]


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(device: torch.device, function: str, *arguments: Any) -> None:
    """Call the driver in the context that torch uses for `device`.

    Raises:
        TransportError: it failed; by the name of the error.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # makes the context this thread's: a new thread has none
        code = getattr(_driver(), function)(*arguments)
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise TransportError(f"{function} failed on {device}: {(name.value or b'?').decode()}")
