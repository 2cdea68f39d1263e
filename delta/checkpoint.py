"""Safetensors checkpoints as a weight source and as a file that is written: mapped, streamed, never whole in RAM."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch

from deltacast.delta.bits import numpy_words
from deltacast.delta.checkpoint_files import CheckpointFiles, MappedFile, fsync_folder
from deltacast.delta.errors import TableError
from deltacast.delta.safetensors_header import build_header
from deltacast.delta.sources import matched
from deltacast.delta.table import ParamMeta

__all__ = ["CheckpointSource", "CheckpointWriter", "write_checkpoint"]

_WRITE_BYTES: Final = 1 << 26


class CheckpointSource:
    """The weights of a checkpoint on disk: one safetensors file, or a Hugging Face folder.

    Files are mapped, so nothing is read before a tensor is looked at, and pages can be dropped again. Tensors are
    private to this process: writing to one changes neither the file nor another source. They outlive `close`.
    Replacing the files (`os.replace`) does not disturb an open source; truncating them in place ends the process.

    Names that are tied in the model are separate tensors here, each with bytes of its own, so `aliases` is empty.

    Args:
        path: a file or a folder.

    Raises:
        FileNotFoundError: no weights there.
        FormatError: a header or the index is damaged, naming file and tensor.
        StateError: an in-place patch of the checkpoint was interrupted (delta/patching.py).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = CheckpointFiles(path)
        self.files.require_whole()
        self._mapped: list[MappedFile] = []
        try:
            for file in self.files.files:
                self._mapped.append(MappedFile(file))
            self.files.require_map((mapped.path, mapped.header) for mapped in self._mapped)
        except BaseException:
            self.close()
            raise
        self._slots = {slot.meta.name: (mapped, slot) for mapped in self._mapped for slot in mapped.header.slots}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Always empty."""
        return {}

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Always empty: every tensor of every file is listed."""
        return ()

    @property
    def metadata(self) -> dict[str, str]:
        """The files' `__metadata__`; the first file that has a key decides."""
        return {key: value for mapped in reversed(self._mapped) for key, value in mapped.header.metadata.items()}

    def metas(self) -> list[ParamMeta]:
        """List the tensors by file name, then by place in the file."""
        return [slot.meta for _, slot in self._slots.values()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in the same order.

        Raises:
            InputError: the source was closed.
        """
        for name, (mapped, slot) in self._slots.items():
            yield name, mapped.tensor(slot)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor by name.

        Raises:
            TableError: no such tensor.
            InputError: the source was closed.
        """
        if name not in self._slots:
            raise TableError(f"no such tensor in {self.files.anchor}", parameter=name)
        mapped, slot = self._slots[name]
        return mapped.tensor(slot)

    def close(self) -> None:
        """Let go of the files; tensors that were handed out stay valid. Closing twice is fine."""
        for mapped in self._mapped:
            mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class CheckpointWriter:
    """Write one safetensors file tensor by tensor; it appears whole, or not at all.

    A context manager. Bytes go to a temporary file in the same folder, which on a clean exit is fsynced and renamed
    over `path`; on any exception it is removed and `path` is what it was. A killed process leaves a file called
    `.<name>.<random>.tmp` behind and nothing else. Memory: one tensor, and none for contiguous CPU tensors.

    Args:
        path: an existing file is replaced at the end.
        metas: every tensor that will be written; the layout is that of the stock library.
        metadata: the `__metadata__` entry.

    Raises:
        InputError, DTypeError: the metas cannot be laid out; no file was touched.
        OSError: the folder does not exist or cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], metas: Iterable[ParamMeta], *, metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(path)
        raw, self.header = build_header(metas, metadata)
        self._missing = {slot.meta.name: slot for slot in self.header.slots}
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_at(self._file, memoryview(raw), 0)
            os.ftruncate(self._file, self.header.data_end)
        except BaseException:
            self._discard()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, in any order of names; blocks.

        Raises:
            TableError: not listed, written before, or of another dtype or shape than its meta.
        """
        slot = self._missing.get(name)
        if slot is None:
            raise TableError("a tensor that is not listed, or was written before", parameter=name)
        for _ in matched([slot.meta], [(name, tensor)]):
            _write_at(self._file, numpy_words(tensor, name=name).view(np.uint8).data, slot.begin)
        del self._missing[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._discard()

    def _commit(self) -> None:
        if self._missing:
            raise TableError(f"{len(self._missing)} listed tensors were not written", parameter=min(self._missing))
        os.fsync(self._file)
        self._temporary.replace(self.path)
        fsync_folder(self.path.parent)

    def _discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._temporary.unlink(missing_ok=True)


def write_checkpoint(
    path: str | os.PathLike[str],
    metas: Iterable[ParamMeta],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Stream tensors into one safetensors file, which appears whole or not at all (`CheckpointWriter`).

    Args:
        path: an existing file is replaced.
        metas: what `tensors` will yield, in the same order; `write_checkpoint(p, s.metas(), s.tensors())` for a source.
        tensors: read one at a time.
        metadata: the `__metadata__` entry; transformers wants `{"format": "pt"}`.

    Raises:
        TableError: the tensors are not what the metas say (`deltacast.delta.sources.matched`).
        InputError, DTypeError: the metas cannot be laid out.
        OSError: the disk is full, the folder does not exist. In every case `path` is what it was.
    """
    metas = list(metas)
    with CheckpointWriter(path, metas, metadata=metadata) as writer:
        for meta, tensor in matched(metas, tensors):
            writer.write(meta.name, tensor)


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data[:_WRITE_BYTES], offset)
        data, offset = data[written:], offset + written
