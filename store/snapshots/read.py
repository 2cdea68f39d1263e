"""Read a snapshot: into a folder, or over a mapping where it lies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from io import BufferedRandom
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.checkpoint_files import fsync_folder
from deltacast.delta.errors import ChecksumError, FormatError, InputError, StoreError
from deltacast.delta.table import ParameterTable
from deltacast.delta.threads import in_order
from deltacast.store.objects import ObjectBackend
from deltacast.store.snapshots.manifest import FileHash, Manifest, SnapshotFile

__all__ = ["download_snapshot", "open_snapshot", "read_extra_files"]

_PIECE_BYTES: Final = 16 << 20
_CANNOT_CLONE: Final = {
    errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.ETXTBSY,
    errno.EIO,  # of either file: who reads one and writes the other learns which
}  # fmt: skip


def download_snapshot(
    backend: ObjectBackend,
    manifest: Manifest,
    out: str | os.PathLike[str],
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> None:
    """Fetch a snapshot into a folder that `safetensors` and `transformers` load; blocks until it is on the disk.

    Files come one after the other, each in ranges that `threads` fetch at a time; every byte is held to the content
    digest of its file. From a store on a disk the file system copies, or shares the blocks where it can, and what it
    made is read back. Memory: `threads` + 2 pieces of 16 MiB.

    The index comes last, so that a folder in which a killed process left a part of the files is no checkpoint.

    Args:
        backend: the store.
        manifest: from `read_manifest`.
        out: an empty folder, or one that is not there yet, in a folder that is.
        threads: ranges that are fetched at a time.
        progress: told about the bytes of all files as they are checked.

    Raises:
        InputError: `out` is no empty folder; nothing was touched.
        MissingObjectError: a file is gone from the store.
        ChecksumError: a file has another size or content than the manifest says; the message names the object.
        StoreError: the store failed.
        OSError: the folder cannot be made, the disk is full. In every case no file is left in `out`.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("the output is no empty folder", found=str(out), hint="Name a path that does not exist.")
    out.mkdir(exist_ok=True)
    with ExitStack() as undo:
        for file in sorted(manifest.files, key=lambda file: file.role == "index"):
            target = out / file.name
            with target.open("x+b") as opened:
                undo.callback(target.unlink, missing_ok=True)
                for num_bytes in _download(backend, manifest.object_name(file), file, opened, threads):
                    if progress is not None:
                        progress(num_bytes)
        fsync_folder(out)
        undo.pop_all()


def _download(
    backend: ObjectBackend, path: str, file: SnapshotFile, opened: BufferedRandom, threads: int
) -> Iterator[int]:
    """Fill an empty file and bring it to the disk; yields the number of bytes that were checked since the last time."""
    _require_size(backend, path, file)
    descriptor = opened.fileno()
    if _clone(backend.path(path), descriptor, file.num_bytes):
        for piece in _checked(partial(_read_at, descriptor, path), path, file, threads):
            yield len(piece)
    else:
        for piece in _checked(partial(backend.read_into, path), path, file, threads):
            opened.write(piece)
            yield len(piece)
        opened.flush()
    os.fsync(descriptor)


def _clone(source: Path | None, target: int, num_bytes: int) -> bool:
    """Let the file system copy a file; False, with an empty target, where there is none or it cannot."""
    if source is None:
        return False
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # whoever reads it through the backend is told why
    try:
        at = 0
        while at < num_bytes:
            copied = os.copy_file_range(descriptor, target, num_bytes - at, at, at)
            if not copied:
                break
            at += copied
    except OSError as err:
        if err.errno not in _CANNOT_CLONE:
            raise
        at = -1
    finally:
        os.close(descriptor)
    if at != num_bytes:
        os.ftruncate(target, 0)
    return at == num_bytes


def _read_at(descriptor: int, path: str, start: int, out: memoryview) -> None:
    """Fill `out` from a local file, as `ObjectBackend.read_into`."""
    while out:
        got = os.preadv(descriptor, [out], start)
        if not got:
            raise StoreError(f"the copy of {path} is too short")
        out, start = out[got:], start + got


def read_extra_files(backend: ObjectBackend, manifest: Manifest) -> dict[str, bytes]:
    """Return what lies beside a snapshot's weights, held to the manifest: name -> bytes, at most 64 MiB each.

    Raises:
        MissingObjectError: a file is gone from the store.
        ChecksumError: a file has another size or content than the manifest says; the message names the object.
        StoreError: the store failed.
    """
    found: dict[str, bytes] = {}
    for file in manifest.files:
        if file.role == "extra":
            path = manifest.object_name(file)
            _require_size(backend, path, file)
            found[file.name] = b"".join(_checked(partial(backend.read_into, path), path, file, 1))
    return found


def open_snapshot(backend: ObjectBackend, manifest: Manifest) -> CheckpointSource:
    """Map a snapshot's weights where they lie; nothing is read before a tensor is looked at.

    Sizes, names and the parameter table are checked here, bits are not: take the state digest where it matters
    (`digest_checkpoint`).

    Returns:
        An open checkpoint; the caller closes it.

    Raises:
        InputError: the store's objects are no files of this machine.
        MissingObjectError: a file is gone.
        ChecksumError: a file has another size, or the files hold other parameters than the manifest says.
        FormatError: a header or the index is damaged.
    """
    index = next(file for file in manifest.files if file.role == "index")
    path = backend.path(manifest.object_name(index))
    if path is None:
        raise InputError("the snapshot's files are not on this machine", found=backend.url, hint="Download it.")
    for file in manifest.files:
        _require_size(backend, manifest.object_name(file), file)
    source = CheckpointSource(path.parent)
    try:
        _require_listed(source, manifest)
    except BaseException:
        source.close()
        raise
    return source


def _require_listed(source: CheckpointSource, manifest: Manifest) -> None:
    """Raise unless files and parameters are those that a manifest lists."""
    listed = {file.name for file in manifest.files if file.role == "weights"}
    found = {file.name for file in source.files.files}
    if found != listed:
        raise FormatError(f"{source.files.anchor}: the index and the manifest list other files",
                          expected=sorted(listed)[:3], found=sorted(found)[:3])  # fmt: skip
    table = ParameterTable(source.metas(), manifest.aliases)
    if table.digest != manifest.table_digest:
        raise ChecksumError(f"the files of {manifest.path} hold other parameters than it says",
                            expected=manifest.table_digest, found=table.digest)  # fmt: skip


def _require_size(backend: ObjectBackend, path: str, file: SnapshotFile) -> None:
    found = backend.stat(path).num_bytes
    if found != file.num_bytes:
        raise ChecksumError(f"{path} has another size", expected=file.num_bytes, found=found)


def _checked(
    read: Callable[[int, memoryview], None], path: str, file: SnapshotFile, threads: int
) -> Iterator[memoryview]:
    """Yield a file's bytes in order; each piece is valid until the next one is asked for.

    Raises:
        ChecksumError: after the last piece, if they are not what the manifest says.
    """
    content = FileHash(secure=file.sha256 is not None)
    for piece in _pieces(read, file.num_bytes, threads):
        content.update(piece)
        yield piece
    content.require(file, path)


def _pieces(read: Callable[[int, memoryview], None], num_bytes: int, threads: int) -> Iterator[memoryview]:
    starts = range(0, num_bytes, _PIECE_BYTES)
    threads = max(1, min(threads, len(starts)))
    free: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
    for _ in range(threads + 2):  # being fetched, fetched and waiting, and in the consumer's hands
        free.put(np.empty(min(_PIECE_BYTES, num_bytes), np.uint8))

    def fetch(start: int) -> tuple[NDArray[np.uint8], memoryview]:
        buffer = free.get()
        piece = buffer[: num_bytes - start].data
        read(start, piece)
        return buffer, piece

    for buffer, piece in in_order(fetch, starts, threads):
        yield piece
        free.put(buffer)
