"""The files that make up a safetensors checkpoint: which they are, and one of them mapped into memory."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import from_words
from deltacast.delta.errors import FormatError, InputError, StateError
from deltacast.delta.safetensors_header import SafetensorsHeader, TensorSlot, parse_header, strict_json

__all__ = ["INDEX_NAME", "UNDO_SUFFIX", "WEIGHTS_NAME", "CheckpointFiles", "MappedFile", "fsync_folder"]

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
UNDO_SUFFIX: Final = ".deltacast-undo"
"""What `open_for_patching` (delta/patching.py) adds to a checkpoint's name while it is half-written."""

_MAP_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python names it from 3.13 on
_UNTRACKED: Final[dict[str, Any]] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""A mapping needs no descriptor once it is made; a checkpoint of many shards would keep one for each."""


class CheckpointFiles:
    """Which files make up a checkpoint: one safetensors file, or a Hugging Face folder.

    A folder holds `model.safetensors`, or `model.safetensors.index.json` and the shards that it names by plain
    file name. Links are followed (the Hugging Face cache is made of them); a name with a separator is refused.

    Attributes:
        anchor: the single file, or the index.
        files: the safetensors files, sorted by name.
        weight_map: parameter -> file name from the index; None for a single file.

    Raises:
        FileNotFoundError: no such file, or no weights in the folder.
        FormatError: the index is damaged, escapes its folder, or the folder holds both layouts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        self.weight_map: dict[str, str] | None = None
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"no checkpoint at {path}")
            self.anchor = path
            self.files: tuple[Path, ...] = (path,)
            return
        single, index = path / WEIGHTS_NAME, path / INDEX_NAME
        if not index.exists():
            if not single.exists():
                raise FileNotFoundError(f"{path} holds neither {WEIGHTS_NAME} nor {INDEX_NAME}")
            self.anchor, self.files = single, (single,)
            return
        self.anchor = index
        self.weight_map = _weight_map(index)
        names = sorted(set(self.weight_map.values()))
        if single.exists() and WEIGHTS_NAME not in names:
            raise FormatError(f"{path} holds both {WEIGHTS_NAME} and {INDEX_NAME}", hint="Remove the stale one.")
        self.files = tuple(path / name for name in names)

    @property
    def undo_path(self) -> Path:
        """Where an interrupted in-place patch leaves the overwritten values."""
        return self.anchor.with_name(self.anchor.name + UNDO_SUFFIX)

    def require_whole(self) -> None:
        """Refuse a checkpoint that an in-place patch left half-written.

        Raises:
            StateError: an undo journal lies next to it.
        """
        folder_journal = self.anchor.with_name(INDEX_NAME + UNDO_SUFFIX)  # for a shard that is opened by itself
        for path in (self.undo_path, folder_journal):
            if path.exists():
                raise StateError(f"{self.anchor} was being patched in place, and that has not ended", found=path,
                                 hint="If that process is gone, recover() restores it.")  # fmt: skip

    def require_map(self, headers: Iterable[tuple[Path, SafetensorsHeader]]) -> None:
        """Check that no tensor is in two files, and that the index names exactly the tensors there are.

        Raises:
            FormatError: naming the tensor.
        """
        place: dict[str, str] = {}
        for file, header in headers:
            for slot in header.slots:
                if slot.meta.name in place:
                    raise FormatError(f"{file}: also in {place[slot.meta.name]}", parameter=slot.meta.name)
                place[slot.meta.name] = file.name
        wanted = place if self.weight_map is None else self.weight_map
        for name in sorted(place.keys() | wanted.keys()):
            if place.get(name) != wanted.get(name):
                raise FormatError(f"{self.anchor}: the index and the files disagree", parameter=name,
                                  expected=wanted.get(name), found=place.get(name))  # fmt: skip


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = strict_json(index.read_bytes(), where=str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index}: no weight_map, or an empty one")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise FormatError(f"{index}: not a plain file name", parameter=name, found=repr(file))
    return weight_map


class MappedFile:
    """One safetensors file, mapped; the mapping lives until the last tensor over it is gone.

    Args:
        path: the file.
        shared: False maps privately: a write to a tensor stays in this process. True maps the file itself: a write
            to a tensor is a write to the file.

    Raises:
        FormatError: the header is damaged.
        InputError: this process may open no more files. Before Python 3.13 every mapping keeps one.
        OSError: the file cannot be opened or mapped.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        try:
            self.stat, self._map = _map_file(path, shared=shared)
        except OSError as err:
            if err.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise InputError(f"cannot map {path}: {os.strerror(err.errno)}",
                             hint="Raise the limit of open files (ulimit -n) above the number of shards.") \
                from err  # fmt: skip
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        try:
            self.header = parse_header(memoryview(self._map), where=str(path))
        except BaseException:
            self.close()
            raise

    def tensor(self, slot: TensorSlot) -> torch.Tensor:
        """Return a tensor over the mapping; nothing is read until it is looked at.

        Raises:
            InputError: the file was closed.
        """
        if self._bytes is None:
            raise InputError(f"{self.path} is closed", parameter=slot.meta.name)
        row = slot.meta.row
        return from_words(self._bytes[slot.begin : slot.end].view(row.numpy_word), row, slot.meta.shape)

    def header_bytes(self) -> bytes:
        """Return the length field and JSON as they are in the file."""
        return bytes(self._map[: self.header.data_start])

    def flush(self) -> None:
        """Bring writes through a shared mapping to disk; blocks."""
        self._map.flush()

    def close(self) -> None:
        """Let go of the mapping; it ends with the last tensor over it. Closing twice is fine."""
        self._bytes = None
        with suppress(BufferError):  # tensors still look at it: unmapped when they are gone
            self._map.close()


def _map_file(path: Path, *, shared: bool) -> tuple[os.stat_result, mmap.mmap]:
    descriptor = os.open(path, os.O_RDWR if shared else os.O_RDONLY)
    try:
        stat = os.fstat(descriptor)
        if stat.st_size < 8:
            raise FormatError(f"{path}: too short for safetensors", found=f"{stat.st_size} bytes")
        # Private and writable rather than read-only: torch has no read-only tensors and warns about them.
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | _MAP_NORESERVE
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        return stat, mmap.mmap(descriptor, stat.st_size, flags=flags, prot=prot, **_UNTRACKED)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
