"""Patch checkpoints on disk: in a copy that appears whole or not at all, or in place with an undo journal."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_files import INDEX_NAME, UNDO_SUFFIX, CheckpointFiles, MappedFile, fsync_folder
from deltacast.delta.errors import InputError, StateError
from deltacast.delta.undo_journal import restore_from_journal, write_journal

__all__ = ["PatchableCheckpoint", "is_weights_name", "open_for_patching", "patched_copy", "recover"]

_WEIGHT_SUFFIXES: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pkl", UNDO_SUFFIX}
)


@contextmanager
def patched_copy(base: str | os.PathLike[str], out: str | os.PathLike[str]) -> Generator[dict[str, torch.Tensor]]:
    """Copy a checkpoint, hand out its weights to be written, and let the result appear whole or not at all.

    The copy is made beside `out` under a temporary name. On a clean exit it is fsynced and renamed to `out`; on any
    exception it is removed. A killed process leaves `.<name>.<random>.tmp` behind, never a partial `out`. Of a
    folder, everything is copied along but hidden entries and weights that are no part of the checkpoint: other
    formats, adapters; they would be stale.

    Args:
        base: a safetensors file or a Hugging Face folder; only read.
        out: where the result goes. An existing file is replaced; an existing folder is refused, because folders
            cannot be replaced in one step.

    Yields:
        Tensors by name over a shared mapping of the copy: a write to one is a write to the file, and takes no
        memory of its own. Do not write to them after the block.

    Raises:
        InputError: `out` is an existing folder, or one of them is a folder and the other an existing file.
        FileNotFoundError, FormatError, StateError: as `CheckpointSource(base)`.
    """
    base, out = Path(base), Path(out).absolute()
    if out.is_dir() or (base.is_dir() and out.exists()):
        raise InputError("the output exists already", found=out, hint="Name a path that does not exist.")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no folder {out.parent}")
    CheckpointSource(base).close()
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        _copy(base, temporary)
        files = [MappedFile(path, shared=True) for path in CheckpointFiles(temporary).files]
        try:
            yield _tensors(files)
            for mapped in files:
                mapped.flush()
        finally:
            for mapped in files:
                mapped.close()
        _fsync_tree(temporary)
        temporary.replace(out)
        fsync_folder(out.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def _copy(base: Path, to: Path) -> None:
    if not base.is_dir():
        shutil.copyfile(base, to)
        return
    keep = {path.name for path in CheckpointFiles(base).files}

    def skip(folder: str, names: list[str]) -> set[str]:
        kept = keep if Path(folder) == base else set()
        return {name for name in names if name.startswith(".") or (is_weights_name(name) and name not in kept)}

    shutil.copytree(base, to, ignore=skip, copy_function=shutil.copyfile)


def is_weights_name(name: str) -> bool:
    """Whether a file of this name holds weights in any format, or an index of them; safetensors' own index does not.

    Beside a checkpoint that was patched they would be stale, and some loaders unpickle what they find.
    """
    return name != INDEX_NAME and Path(name.removesuffix(".index.json")).suffix in _WEIGHT_SUFFIXES


def _fsync_tree(path: Path) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            _fsync(Path(folder) / name)
        fsync_folder(Path(folder))
    if not path.is_dir():
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PatchableCheckpoint:
    """A checkpoint that is open for patching in place; made by `open_for_patching`.

    Attributes:
        tensors: by name, over a shared mapping: a write to one is a write to the file. Read them freely; write only
            after `protect` has returned, and only what it was told about.
    """

    def __init__(self, files: list[MappedFile], undo_path: Path) -> None:
        self.tensors = _tensors(files)
        self._files = files
        self._undo_path = undo_path
        self._protected = False

    def protect(self, changes: Iterable[tuple[str, NDArray[np.int64] | None]]) -> None:
        """Put the words that are about to be overwritten on disk; blocks until they are safe there.

        Call once, before the first write. From its return until the block ends, the checkpoint cannot be opened
        by a `CheckpointSource`.

        Args:
            changes: parameter name and flat word positions (`patch.name, patch.indices`); None for every word.

        Raises:
            StateError: called twice.
            TableError, InputError: no such parameter or position.
            OSError: the disk is full. No weight was touched in any of these cases.
        """
        if self._protected:
            raise StateError("protect() was called twice", hint="Pass all changes in one call.")
        write_journal(self._undo_path, self._files, changes)
        self._protected = True

    def _finish(self) -> None:
        for mapped in self._files:
            mapped.flush()
        _remove(self._undo_path)

    def _undo(self) -> None:
        if self._protected:
            restore_from_journal(self._undo_path, self._files)
            self._finish()


@contextmanager
def open_for_patching(path: str | os.PathLike[str]) -> Generator[PatchableCheckpoint]:
    """Open a checkpoint to be patched in place, so that a crash at any moment can be undone.

    `protect` puts the old words on disk (`<checkpoint>.deltacast-undo`) before anything is overwritten. On a clean
    exit the weights are flushed and the journal is removed. On an exception the old words are put back first. If the
    process is killed or the power fails in between, the journal stays: `CheckpointSource` refuses the half-written
    checkpoint, and the next `open_for_patching` or `recover` restores the base, bit by bit. Readers that had
    opened the files before see them change under their hands; stop them first.

    One process at a time: the first file is locked (`flock`; freed when the process ends).

    Args:
        path: a safetensors file or a Hugging Face folder.

    Yields:
        The tensors, and `protect`, which has to come before the first write.

    Raises:
        StateError: another process is patching it; or a journal that is there belongs to other files.
        CorruptionError: the journal of an interrupted patch is damaged.
        FileNotFoundError, FormatError: as `CheckpointSource`. In every case nothing was written.
    """
    checkpoint = CheckpointFiles(path)
    with _locked(checkpoint.files[0]):
        files = _open_restored(checkpoint)
        try:
            patchable = PatchableCheckpoint(files, checkpoint.undo_path)
            try:
                yield patchable
            except BaseException:
                patchable._undo()  # noqa: SLF001 - only this function ends a patch
                raise
            patchable._finish()  # noqa: SLF001
        finally:
            for mapped in files:
                mapped.close()


def recover(path: str | os.PathLike[str]) -> bool:
    """Restore a checkpoint after an interrupted in-place patch.

    Returns:
        Whether there was anything to restore.

    Raises:
        As `open_for_patching`.
    """
    interrupted = CheckpointFiles(path).undo_path.exists()
    with open_for_patching(path):
        return interrupted


def _open_restored(checkpoint: CheckpointFiles) -> list[MappedFile]:
    files: list[MappedFile] = []
    try:
        files.extend(MappedFile(file, shared=True) for file in checkpoint.files)
        if checkpoint.undo_path.exists():
            restore_from_journal(checkpoint.undo_path, files)
            for mapped in files:
                mapped.flush()
            _remove(checkpoint.undo_path)
        checkpoint.require_whole()
        checkpoint.require_map((mapped.path, mapped.header) for mapped in files)
    except BaseException:
        for mapped in files:
            mapped.close()
        raise
    return files


def _remove(journal: Path) -> None:
    if journal.exists():
        journal.unlink()
        fsync_folder(journal.parent)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise StateError(f"another process is patching {path}", hint="Wait for it, or patch a copy.") from err
        yield
    finally:
        os.close(descriptor)


def _tensors(files: list[MappedFile]) -> dict[str, torch.Tensor]:
    return {slot.meta.name: mapped.tensor(slot) for mapped in files for slot in mapped.header.slots}
