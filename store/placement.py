"""Where a trainer's baseline lives, and how: one flat buffer of words per word width, on the host, on disk or on a GPU.

Flat, because a diff that streams a baseline through the GPU takes many parameters in one copy.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from deltacast.delta.bits import copy_bits
from deltacast.delta.errors import InputError
from deltacast.delta.table import ParamMeta

__all__ = ["Extent", "FlatMemory", "Placement", "check_placement"]

Placement: TypeAlias = str
"""`cpu`, `pinned`, `mmap`, `cuda` or `cuda:N`; see `deltacast.store.baseline.Baseline`, and `check_placement`."""

_ALIGNMENT_BYTES = 16  # what one GPU thread reads at once
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: locked for every GPU of the process


def check_placement(placement: object, folder: str | os.PathLike[str] | None = None) -> Placement:
    """Return a placement that came from a user; looks at no device and no disk.

    Raises:
        InputError: not a placement, `mmap` without a folder, or a folder that the placement has no use for.
    """
    if not isinstance(placement, str) or not re.fullmatch(r"cpu|pinned|mmap|cuda(:(0|[1-9][0-9]*))?", placement):
        raise InputError(
            "unknown baseline placement", expected="cpu, pinned, mmap, cuda or cuda:N", found=repr(placement)
        )
    if placement == "mmap" and folder is None:
        raise InputError("a baseline on disk needs a folder", expected="a folder to keep its file in", found=folder)
    if placement != "mmap" and folder is not None:
        raise InputError("only a baseline on disk has a folder", expected="placement mmap", found=placement)
    return placement


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one parameter lies: `buffers[word_bytes][first_word : first_word + num_words]`.

    Attributes:
        meta: the parameter.
        first_word: where it begins, in words of its width; a multiple of 16 bytes.
    """

    meta: ParamMeta
    first_word: int

    @property
    def word_bytes(self) -> int:
        """Which buffer: 1, 2, 4 or 8."""
        return self.meta.row.word_bytes

    @property
    def num_words(self) -> int:
        """Words of the parameter, padding left out."""
        return self.meta.num_words


class FlatMemory:
    """Words of parameters in one flat buffer per word width.

    Parameters of one width lie in the order in which they were listed, each padded to a multiple of 16 bytes, so that
    any number of them that follow each other, or parts of them, are one contiguous run. Padding is never written.

    Args:
        metas: the parameters, names unique.
        placement: where the buffers are; uninitialised at first.
        folder: for `mmap`: an existing folder that can be written.

    Attributes:
        buffers: word_bytes -> flat integer tensor (`DType.torch_word`) of all words of that width, owned by this and
            alive as long as any view of it.
        extents: name -> where it lies, in the order of `metas`.

    Raises:
        InputError: as `check_placement`; or there is no such device, no CUDA to lock memory for, or no room that could
            be locked or reserved on disk. Nothing is left behind.
    """

    def __init__(
        self,
        metas: Iterable[ParamMeta],
        placement: Placement = "cpu",
        *,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        check_placement(placement, folder)
        self.extents: dict[str, Extent] = {}
        num_bytes: dict[torch.dtype, int] = {}
        for meta in metas:
            taken = num_bytes.setdefault(meta.row.torch_word, 0)
            self.extents[meta.name] = Extent(meta, taken // meta.row.word_bytes)
            num_bytes[meta.row.torch_word] = taken + -(-meta.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        device = _device(placement)
        self.buffers: dict[int, torch.Tensor] = {
            word.itemsize: _room(size, placement, folder, device).view(word) for word, size in num_bytes.items()
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return a parameter as a tensor of its dtype and shape: a view, so writes reach the buffer."""
        extent = self.extents[name]
        row, shape = extent.meta.row, extent.meta.shape
        flat = self.buffers[extent.word_bytes][extent.first_word :][: extent.num_words].view(row.torch_part)
        if row.words_per_element == 2:
            return torch.view_as_complex(flat.view(*shape, 2))
        return flat.view(shape)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the bits of a tensor of the parameter's dtype and shape in, from any device and layout.

        Raises:
            DTypeError, InputError: it has no plain memory; nothing was written.
        """
        copy_bits(self.tensor(name), tensor, name=name)


def _device(placement: Placement) -> torch.device:
    """Return where a placement's tensors are; `cuda` is the current GPU."""
    if placement in {"cpu", "mmap"}:
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if not num_devices:
        raise InputError(f"placement {placement!r} needs a GPU", hint="Use placement='cpu'.")
    if placement == "pinned":
        return torch.device("cpu")
    number = int(placement.removeprefix("cuda:")) if ":" in placement else torch.cuda.current_device()
    if number >= num_devices:
        raise InputError("no such GPU", expected=f"below cuda:{num_devices}", found=placement)
    return torch.device("cuda", number)


def _room(
    num_bytes: int, placement: Placement, folder: str | os.PathLike[str] | None, device: torch.device
) -> torch.Tensor:
    """Take memory; the uint8 tensor owns it."""
    if placement == "mmap" and num_bytes:  # no bytes cannot be mapped
        return _on_disk(num_bytes, folder)
    if placement == "pinned" and num_bytes:
        return _page_locked(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _on_disk(num_bytes: int, folder: str | os.PathLike[str] | None) -> torch.Tensor:
    """Map a file that has no name, so that nothing is left behind however the process ends."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk is an error now, not a SIGBUS later
            mapping = mmap.mmap(file.fileno(), num_bytes)  # keeps the file open
    except OSError as err:
        raise InputError(
            "no file for the baseline could be made", expected=f"{num_bytes} bytes in {folder}", found=err.strerror
        ) from err
    return torch.from_numpy(np.frombuffer(mapping, np.uint8))


def _page_locked(num_bytes: int) -> torch.Tensor:
    """Lock pages of our own: torch's allocator of pinned memory rounds up to a power of two, so to twice the model."""
    room = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    cuda: Any = torch.cuda  # `cudart` has no types
    address, runtime = room.ctypes.data, cuda.cudart()
    error = runtime.cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE)
    if int(error):
        raise InputError(
            "host memory for the baseline could not be page-locked",
            expected=f"{num_bytes} bytes",
            found=f"CUDA error {int(error)}",
            hint="Use placement='cpu'.",
        )
    # an array dies before the mapping under it, so the pages are unlocked before they are unmapped
    weakref.finalize(room, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(room)
