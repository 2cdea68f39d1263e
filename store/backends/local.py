"""Objects as files below one folder, on any POSIX file system with hard links.

How an object appears: its bytes go to a hidden file in `.tmp/` below the root, which is flushed to the disk; then
link(2) gives it its name. A rename would write over another writer's object, a link fails. Last the folder is flushed,
so that the name survives a power cut as well. A crash at any point leaves the whole object, or a hidden file that
`sweep` removes.

Every change of the disk is a call of `os.open`, `os.write`, `os.fsync`, `os.link`, `os.rename`, `os.unlink` or
`os.mkdir`; tests stop a writer at each of them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from deltacast.delta.checkpoint_files import fsync_folder
from deltacast.delta.errors import MissingObjectError, ObjectExistsError, StoreError
from deltacast.store.disk_failures import DISK_HINTS, explained
from deltacast.store.objects import Buffer, ObjectBackend, ObjectInfo, check_listing, check_object_name, is_object_name

__all__ = ["LocalBackend"]

_HIDDEN: Final = ".tmp"
_NO_HARD_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalBackend(ObjectBackend):
    """A folder of this machine, or of a network file system (NFS, Lustre) that several machines share.

    A symbolic link below the root is no object: never listed, never followed. Empty folders stay behind when objects
    are deleted. Reading needs no right to write, except for `now_s`.

    Args:
        root: the folder; a relative one is resolved now.
        create: make it, and the folders above it, if there is none.

    Raises:
        MissingObjectError: there is no such folder.
        StoreError: it cannot be made, or is no folder.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        self._root = Path(os.path.realpath(root))
        if create:
            with explained("make the folder", self._root):
                _make_folders(self._root)
        if not self._root.exists():
            raise MissingObjectError(f"there is no store at {self._root}: no such folder")
        if not self._root.is_dir():
            raise StoreError(f"there is no store at {self._root}: not a folder", hint=DISK_HINTS[errno.ENOTDIR])
        self._kept = {self._root}  # folders whose names are known to be on disk

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def create(self, name: str, data: Buffer) -> None:
        """Write a small object if there is none of that name; see `ObjectBackend.create`.

        Raises:
            ObjectExistsError: there is one.
            StoreError: the disk failed. If flushing the folder did, the object is there but may not survive a crash:
                create it again, and the answer that there is one says that it does.
        """

        def link(draft: Path, target: Path) -> None:
            with _placing(draft, target):
                try:
                    _link(draft, target)
                except FileExistsError as err:
                    # Whoever made it may have died, or failed, before the folder was flushed; who is told of it
                    # builds on it.
                    fsync_folder(target.parent)
                    raise ObjectExistsError(f"there is an object {name} already in {self._root}") from err

        self._put(name, (data,), link)

    def write(self, name: str, pieces: Iterable[Buffer]) -> int:
        """Write an object whose name says what it holds; see `ObjectBackend.write`.

        Raises:
            StoreError: the disk failed, or an object of that name and another size is there, which is left alone.
            Exception: whatever `pieces` raised. In every case nothing is left behind.
        """

        def link_or_renew(draft: Path, target: Path) -> None:
            with _placing(draft, target):
                try:
                    _link(draft, target)
                except FileExistsError:
                    _same_size(draft, target)
                    # The same bytes, so this loses nothing. It makes the object young again: a collector that goes by
                    # age must not take what a publish in flight has just found to be there.
                    os.rename(draft, target)

        return self._put(name, pieces, link_or_renew)

    def replace(self, name: str, data: Buffer) -> None:
        """Write a small object over whatever is there; see `ObjectBackend.replace`."""
        self._put(name, (data,), _rename)

    def hint(self, name: str, data: Buffer) -> None:
        """Write a small object that nobody relies on; see `ObjectBackend.hint`. Flushes nothing."""
        self._put(name, (data,), _rename, durable=False)

    def read(self, name: str) -> bytes:
        """Return a whole object; see `ObjectBackend.read`."""
        path = self._file(name)
        with explained("read", path), self._opened(name, path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with an object's bytes from `start` on; see `ObjectBackend.read_into`."""
        path, left, at = self._file(name), out.cast("B"), start
        with explained("read", path), self._opened(name, path) as fd:
            while left:
                got = os.preadv(fd, [left], at)
                if not got:
                    size = os.fstat(fd).st_size
                    raise StoreError(f"{path} is too short", expected=f"{start + out.nbytes} bytes", found=size)
                left, at = left[got:], at + got

    def stat(self, name: str) -> ObjectInfo:
        """Say an object's size and age; see `ObjectBackend.stat`."""
        path = self._file(name)
        with explained("read", path):
            try:
                found = os.lstat(path)
            except FileNotFoundError as err:
                raise self._missing(name) from err
        if not stat.S_ISREG(found.st_mode):
            raise self._missing(name)
        return ObjectInfo(name, found.st_size, found.st_mtime)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a folder; see `ObjectBackend.list`. One folder at a time is read and sorted."""
        check_listing(prefix, after)
        self._check_inside(self._root / prefix)
        return self._walk(prefix, after)

    def delete(self, name: str) -> None:
        """Remove an object; that there is none is no error."""
        path = self._file(name)
        with explained("delete", path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            fsync_folder(path.parent)

    def sweep(self, older_than_s: float) -> int:
        """Remove drafts of writers that died; see `ObjectBackend.sweep`.

        A writer that is alive and has written nothing for that long loses its draft, and its write fails.
        """
        removed, now = 0, self.now_s()
        hidden = self._root / _HIDDEN
        self._check_inside(hidden)  # a link in its place would have somebody else's files removed
        with explained("sweep", hidden), os.scandir(hidden) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another sweep, or its writer, was faster
                    if now - entry.stat(follow_symlinks=False).st_mtime > older_than_s:
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def now_s(self) -> float:
        """Return the time by the clock that dates the files: a server's, on a network file system.

        Writes and removes an empty hidden file to learn it.
        """
        draft, fd = self._new_draft()
        try:
            with explained("read the time of", draft):
                return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            _discard(draft)

    def path(self, name: str) -> Path:
        """Return the file that holds an object, or would; to be read or mapped and never written."""
        return self._file(name)

    def _file(self, name: str) -> Path:
        path = self._root / check_object_name(name)
        self._check_inside(path.parent)
        return path

    def _check_inside(self, folder: Path) -> None:
        if os.path.realpath(folder) != str(folder):
            raise StoreError(f"{folder} leads out of the store", hint=DISK_HINTS[errno.ELOOP])

    def _missing(self, name: str) -> MissingObjectError:
        return MissingObjectError(f"there is no object {name} in {self._root}")

    @contextmanager
    def _opened(self, name: str, path: Path) -> Iterator[int]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as err:
            raise self._missing(name) from err
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._missing(name)
            yield fd
        finally:
            os.close(fd)

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        for name, entry in self._entries(prefix):
            if name.endswith("/"):
                if name > after or after.startswith(name):
                    yield from self._walk(name, after)
            elif name > after:
                with suppress(FileNotFoundError):  # deleted since the folder was read
                    found = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(name, found.st_size, found.st_mtime)

    def _entries(self, prefix: str) -> Sequence[tuple[str, os.DirEntry[str]]]:
        """Files and folders of a folder in the order of objects' names, in which a/x comes after a-b and a.b."""
        folder, found = self._root / prefix, []
        with explained("list", folder):
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        is_folder = entry.is_dir(follow_symlinks=False)
                        if is_object_name(prefix + entry.name) and (is_folder or entry.is_file(follow_symlinks=False)):
                            found.append((prefix + entry.name + "/" * is_folder, entry))
            except FileNotFoundError:
                pass
        return sorted(found, key=lambda pair: pair[0])

    def _put(
        self, name: str, pieces: Iterable[Buffer], place: Callable[[Path, Path], None], *, durable: bool = True
    ) -> int:
        """Write a draft, let `place` give it its name, flush the folder: two flushes for each object."""
        target = self._file(name)
        draft, num_bytes = self._write_draft(pieces, durable=durable)
        try:
            self._keep_folder(target.parent)
            place(draft, target)
        finally:
            _discard(draft)
        if durable:
            with explained("flush", target.parent):
                fsync_folder(target.parent)
        return num_bytes

    def _write_draft(self, pieces: Iterable[Buffer], *, durable: bool) -> tuple[Path, int]:
        draft, fd = self._new_draft()
        num_bytes = 0
        try:
            for piece in pieces:  # an OSError of the caller's own is passed on as it is
                with explained("write", draft):
                    num_bytes += _write_all(fd, piece)
            if durable:
                with explained("flush", draft):
                    os.fsync(fd)
        except BaseException:
            _discard(draft)
            raise
        finally:
            os.close(fd)
        return draft, num_bytes

    def _new_draft(self) -> tuple[Path, int]:
        draft = self._root / _HIDDEN / secrets.token_hex(16)
        self._keep_folder(draft.parent)
        self._check_inside(draft.parent)  # each time: unlike a folder of objects it stands between two file systems
        with explained("make a file in", draft.parent):
            return draft, os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _keep_folder(self, folder: Path) -> None:
        """Make a folder below the root, or find it there; either way its name is on disk afterwards.

        Flushed once by every backend even if it was there: whoever made it may have died before it could.
        """
        if folder in self._kept:
            return
        self._keep_folder(folder.parent)
        self._check_inside(folder)
        with explained("make the folder", folder):
            with suppress(FileExistsError):
                os.mkdir(folder)
            fsync_folder(folder.parent)
        self._kept.add(folder)


@contextmanager
def _placing(draft: Path, target: Path) -> Iterator[None]:
    """Explain what refuses a draft its name; a draft that is gone was taken by somebody's `sweep`."""
    with explained("write", target):
        try:
            yield
        except FileNotFoundError as err:
            if not draft.parent.is_dir() or os.path.lexists(draft):
                raise
            raise StoreError(
                f"cannot write {target}: its draft was swept away, as that of a writer that died",
                hint="Write it again. gc must wait (min_age_s) for longer than any writer is held up.",
            ) from err


def _link(draft: Path, target: Path) -> None:
    try:
        os.link(draft, target)
    except OSError as err:
        if err.errno not in _NO_HARD_LINKS:
            raise
        raise StoreError(
            f"cannot link {target}: {os.strerror(err.errno)}",
            expected="a file system with hard links, one for the whole folder",
            found=f"{target.parent} has none",
            hint="Keep the store on a file system that has them (ext4, xfs, NFS, Lustre), or in a bucket.",
        ) from err


def _rename(draft: Path, target: Path) -> None:
    with _placing(draft, target):
        os.rename(draft, target)


def _same_size(draft: Path, target: Path) -> None:
    """Check that an object is what its name, which the draft shares, says; as far as its size can tell."""
    with suppress(FileNotFoundError):  # deleted since: then there is nothing that it could differ from
        found, expected = os.lstat(target), os.lstat(draft).st_size
        if not stat.S_ISREG(found.st_mode) or found.st_size != expected:
            raise StoreError(
                f"{target} is not what its name says",
                expected=f"{expected} bytes",
                found=f"{found.st_size} bytes",
                hint="It is damaged, or another object has its name: `deltacast store fsck` says what needs it.",
            )


def _write_all(fd: int, piece: Buffer) -> int:
    left = memoryview(piece).cast("B")
    num_bytes = left.nbytes
    while left:  # the kernel may take a part: at most 2 GiB, less on a disk that fills up
        left = left[os.write(fd, left) :]
    return num_bytes


def _discard(draft: Path) -> None:
    with suppress(OSError):  # gone if it was renamed; what cannot be removed is left to `sweep`
        os.unlink(draft)


def _make_folders(folder: Path) -> None:
    if not folder.parent.is_dir():
        _make_folders(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
        fsync_folder(folder.parent)
