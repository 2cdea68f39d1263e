r"""The undo journal of an in-place patch: the words that will be overwritten, on disk before the first write.

Layout, little-endian::

    "DCUNDO1\n"
    u32 files     { u16 length, name | u64 size | u64 inode | 16 bytes xxh3_128 of the header }
    u32 records   { u16 length, name | i64 words (-1: the whole tensor) | i64 positions... | words... }
    16 bytes      xxh3_128 of all before

A journal appears by rename after fsync, so one under its final name is complete; what a crash leaves under the
temporary name means that no weight was written. Restoring is idempotent.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacast.delta.bits import Words, numpy_words
from deltacast.delta.checkpoint_files import MappedFile, fsync_folder
from deltacast.delta.errors import CorruptionError, InputError, StateError, TableError

__all__ = ["restore_from_journal", "write_journal"]

_MAGIC: Final = b"DCUNDO1\n"
_READ_BYTES: Final = 1 << 24


def write_journal(
    path: Path, files: Sequence[MappedFile], changes: Iterable[tuple[str, NDArray[np.int64] | None]]
) -> None:
    """Write and fsync the words that are about to be overwritten; blocks.

    Args:
        path: the journal's final name.
        files: the checkpoint's files, mapped shared, nothing written yet.
        changes: parameter name and flat word positions in any order, or None for every word.

    Raises:
        TableError: no such parameter.
        InputError: a position outside the parameter.
        OSError: the disk is full. In every case there is no journal, and no weight was touched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            _Hashed(file).write_all(files, list(changes))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()

    def write_all(self, files: Sequence[MappedFile], changes: list[tuple[str, NDArray[np.int64] | None]]) -> None:
        self._write(_MAGIC + struct.pack("<I", len(files)))
        for mapped in files:
            self._write(_identity(mapped))
        self._write(struct.pack("<I", len(changes)))
        words = _Words(files)
        for name, positions in changes:
            self._record(name, words[name], positions)
        self._file.write(self._hash.digest())

    def _record(self, name: str, words: Words, positions: NDArray[np.int64] | None) -> None:
        raw = name.encode()
        count = -1 if positions is None else positions.size
        self._write(struct.pack("<H", len(raw)) + raw + struct.pack("<q", count))
        if positions is None:
            self._write(words.data)
            return
        if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < words.size:
            raise InputError("a position lies outside the parameter", parameter=name, expected=f"below {words.size}")
        self._write(np.ascontiguousarray(positions, "<i8").data)
        self._write(words[positions].data)

    def _write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)


def restore_from_journal(path: Path, files: Sequence[MappedFile]) -> None:
    """Put back the words that a journal holds; the caller flushes the files and then removes it.

    Args:
        path: the journal.
        files: the checkpoint's files, mapped shared.

    Raises:
        CorruptionError: the journal is damaged; nothing was written.
        StateError: it belongs to other files (somebody replaced them since); nothing was written.
    """
    _check_sum(path)
    with path.open("rb") as file:
        expected = _MAGIC + struct.pack("<I", len(files)) + b"".join(_identity(mapped) for mapped in files)
        if file.read(len(expected)) != expected:
            raise StateError(f"{path} belongs to other weight files than those beside it",
                             hint="If the checkpoint was replaced since, delete the journal.")  # fmt: skip
        (num_records,) = struct.unpack("<I", file.read(4))
        all_words = _Words(files)
        for _ in range(num_records):
            (length,) = struct.unpack("<H", file.read(2))
            words = all_words[file.read(length).decode()]
            (count,) = struct.unpack("<q", file.read(8))
            if count < 0:
                words[:] = np.fromfile(file, words.dtype, words.size)
            else:
                positions = np.fromfile(file, "<i8", count)
                words[positions] = np.fromfile(file, words.dtype, count)


def _check_sum(path: Path) -> None:
    state, left = xxhash.xxh3_128(), path.stat().st_size - 16
    with path.open("rb") as file:
        while left > 0 and (data := file.read(min(left, _READ_BYTES))):
            state.update(data)
            left -= len(data)
        stored = file.read()
    if state.digest() != stored:
        raise CorruptionError(f"the undo journal {path} is damaged", expected=stored.hex(), found=state.hexdigest(),
                              hint="The weights are half-written: take the checkpoint from elsewhere.")  # fmt: skip


def _identity(mapped: MappedFile) -> bytes:
    name = os.fsencode(mapped.path.name)
    digest = xxhash.xxh3_128_digest(mapped.header_bytes())
    return struct.pack("<H", len(name)) + name + struct.pack("<QQ", mapped.stat.st_size, mapped.stat.st_ino) + digest


class _Words:
    """The words of every tensor by name, over the mapping."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._slots = {slot.meta.name: (mapped, slot) for mapped in files for slot in mapped.header.slots}

    def __getitem__(self, name: str) -> Words:
        if name not in self._slots:
            raise TableError("no such tensor in the checkpoint", parameter=name)
        mapped, slot = self._slots[name]
        return numpy_words(mapped.tensor(slot), name=name)
