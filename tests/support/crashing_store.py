"""A disk that fails at any one call that changes it, processes that die there, and what they do to a store.

`FailingDisk` stands in for the functions of `os` that change a disk. `DyingProcess` runs one of the operations at the
end in a process of its own, forked from a warm one, so that a run costs milliseconds.
"""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

from deltacast.delta.patch import WeightUpdate
from deltacast.store.backends import open_backend
from deltacast.store.gc import collect
from deltacast.store.readers import register_reader
from deltacast.store.version_store import VersionStore
from store_setups import (
    Weights,
    filled_store,
    first_weights,
    new_backend,
    new_store,
    next_weights,
    source_of,
    update_between,
)

Fault: TypeAlias = Literal[
    "none", "killed", "torn write", "power cut", "power cut, names kept", "full", "read-only", "failing"
]  # fmt: skip
"""What happens at the chosen call.

`killed`: the process ends right after it; what it did to the disk stays. `torn write`: half of the bytes are written,
then the process ends. `power cut`: it ends after the call, and everything that no fsync has made durable is gone: names
and bytes, or, `names kept`, bytes only. `full`: this call and all later ones that need room raise ENOSPC. `read-only`:
this and all later ones raise EROFS. `failing`: this one alone raises EIO.
"""

CALLS: Final = (
    "open", "write", "writev", "pwrite", "ftruncate", "truncate", "copy_file_range", "sendfile", "fsync", "fdatasync",
    "link", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "utime",
)  # fmt: skip
_NEED_ROOM: Final = frozenset(CALLS) - {"unlink", "remove", "rmdir", "fsync", "fdatasync", "utime"}
_ERRORS: Final = {"full": errno.ENOSPC, "read-only": errno.EROFS, "failing": errno.EIO}
_NEW: Final = os.O_CREAT | os.O_TRUNC
REPLY_S: Final = 60.0


@dataclass(slots=True)
class _NotDurable:
    """What a power cut would take: names since their folder's last fsync, bytes since their file's.

    Attributes:
        limbo: a folder on the same disk, where removed files wait until their removal is durable.
        names: folder and what undoes a change of a name in it, oldest first.
        files: per file (device, inode) with bytes that are not durable, a descriptor. All its bytes count as lost.
    """

    limbo: Path
    names: list[tuple[str, Callable[[], object]]] = field(default_factory=list)
    files: dict[tuple[int, int], int] = field(default_factory=dict)

    def before(self, call: str, arguments: tuple[Any, ...]) -> Callable[[], object] | None:
        """Return what undoes a call that is about to change a name; None for one that does not."""
        if call in ("link", "mkdir") or (call == "open" and not os.path.lexists(arguments[0])):
            path = os.fspath(arguments[1] if call == "link" else arguments[0])
            return lambda: self._remove(path)
        if call in ("rename", "replace", "unlink", "remove"):
            target = os.fspath(arguments[-1])
            kept = self.limbo / str(len(list(self.limbo.iterdir())))
            if os.path.lexists(target):
                REAL["link"](target, kept)
            return lambda: self._put_back(arguments, target, kept)
        return (lambda: REAL["mkdir"](arguments[0])) if call == "rmdir" else None

    @staticmethod
    def _remove(path: str) -> None:
        if Path(path).is_dir():
            shutil.rmtree(path)
        with suppress(FileNotFoundError):  # renamed into another folder, whose names are durable
            REAL["unlink"](path)

    @staticmethod
    def _put_back(arguments: tuple[Any, ...], target: str, kept: Path) -> None:
        if len(arguments) == 2:
            REAL["rename"](target, arguments[0])
        if kept.exists():
            REAL["link"](kept, target)

    def after(self, call: str, arguments: tuple[Any, ...], undo: Callable[[], object] | None, durable: bool) -> None:
        """Note what a call has done."""
        if undo is not None:
            named = arguments[1] if call in ("link", "rename", "replace") else arguments[0]
            self.names.append((str(Path(named).parent.resolve()), undo))
        elif call in ("write", "writev", "pwrite", "ftruncate", "copy_file_range", "sendfile"):
            descriptor = arguments[1] if call == "copy_file_range" else arguments[0]
            if _inode(descriptor) not in self.files:
                self.files[_inode(descriptor)] = os.dup(descriptor)
        elif durable:
            self._synced(arguments[0])

    def _synced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            folder = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            self.names = [(where, undo) for where, undo in self.names if where != folder]
        elif _inode(descriptor) in self.files:
            os.close(self.files.pop(_inode(descriptor)))

    def lose(self, *, names: bool) -> None:
        """Take it all back, the newest first."""
        for descriptor in self.files.values():
            REAL["ftruncate"](descriptor, 0)
        for _, undo in reversed(self.names) if names else ():
            undo()


def _inode(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


REAL: Final[dict[str, Callable[..., Any]]] = {name: getattr(os, name) for name in CALLS}


class FailingDisk:
    """Stand in for `os` while a context lasts, and fail at one call that changes what is below `root`.

    Attributes:
        calls: the calls so far, by name; the last one may have failed.
    """

    def __init__(self, root: Path, fault: Fault = "none", at: int = 0) -> None:
        """Fail at call number `at`, from 1 on."""
        self.root, self.fault, self.at = root.resolve(), fault, at
        self.calls: list[str] = []
        self._lock = threading.RLock()
        self._lost: _NotDurable | None = None
        self._inside = threading.local()
        if fault.startswith("power cut") or fault == "failing":
            self._lost = _NotDurable(Path(tempfile.mkdtemp(prefix=f"{root.name}.limbo", dir=self.root.parent)))

    def __enter__(self) -> Self:
        for name in CALLS:
            setattr(os, name, self._standing_in(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, function in REAL.items():
            setattr(os, name, function)
        for descriptor in self._lost.files.values() if self._lost else ():
            os.close(descriptor)

    def not_durable(self) -> set[str]:
        """Return the folders, by their names, in which a power cut would undo a change now; drafts do not count."""
        assert self._lost is not None
        return {Path(folder).name for folder, _ in self._lost.names} - {".tmp"}

    def refuse_other_ways(self) -> None:
        """End the process at a write that gets past this disk, for the rest of its life."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open" or not isinstance(arguments[0], str) or getattr(self._inside, "call", False):
                return
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | _NEW) and self._is_below_root(arguments[0]):
                sys.stderr.write(f"{arguments[0]} was opened for writing by other means than os.open\n")
                traceback.print_stack()
                os._exit(3)

        sys.addaudithook(hook)

    def _is_below_root(self, path: object) -> bool:
        return Path(os.path.realpath(os.fspath(path))).is_relative_to(self.root)  # type: ignore[call-overload]

    def _changes(self, call: str, arguments: tuple[Any, ...]) -> bool:
        """Whether a call changes something below the root."""
        where = arguments[1] if call in ("link", "rename", "replace", "copy_file_range") else arguments[0]
        if isinstance(where, int):
            return self._is_below_root(f"/proc/self/fd/{where}")
        return self._is_below_root(where) and (call != "open" or bool(arguments[1] & _NEW))

    def _standing_in(self, call: str) -> Callable[..., Any]:
        def function(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if not self._changes(call, arguments):
                    return self._really(call, arguments, options)
                self.calls.append(call)
                return self._do(call, arguments, options)

        return function

    def _do(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        reached = len(self.calls) == self.at
        refuses = {
            "full": len(self.calls) >= self.at and call in _NEED_ROOM,
            "read-only": len(self.calls) >= self.at,
            "failing": reached,
        }
        if refuses.get(self.fault):
            raise OSError(_ERRORS[self.fault], os.strerror(_ERRORS[self.fault]))
        if reached and self.fault == "torn write" and call == "write":
            data = memoryview(arguments[1]).cast("B")
            self._really(call, (arguments[0], data[: len(data) // 2], *arguments[2:]), options)
            self.die()
        try:
            return self._noted(call, arguments, options)
        finally:  # a call that failed is one as well
            if reached and self.fault not in ("none", *_ERRORS):
                self.die()

    def _noted(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._lost is None:
            return self._really(call, arguments, options)
        undo = self._lost.before(call, arguments)
        result = self._really(call, arguments, options)
        self._lost.after(call, arguments, undo, durable=call in ("fsync", "fdatasync"))
        return result

    def _really(self, call: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if call in ("fsync", "fdatasync"):
            return None  # no plug is pulled here, and a real one takes milliseconds
        self._inside.call = True
        try:
            return REAL[call](*arguments, **options)
        finally:
            self._inside.call = False

    def die(self) -> None:
        """End the process as the fault has it."""
        lost, self._lost = self._lost, None
        if lost:
            lost.lose(names=self.fault == "power cut")
        os.kill(os.getpid(), signal.SIGKILL)


def _run(pipe: Connection, operation: Callable[[Path], object], root: Path, fault: Fault, at: int) -> None:
    """Be the process that dies: say which calls were made, if it lives that long."""
    try:
        disk = FailingDisk(root, fault, at)
        disk.refuse_other_ways()
        with disk:
            operation(root)
            if at > len(disk.calls):
                disk.die()
        pipe.send(disk.calls)
    except BaseException:  # noqa: BLE001 - a process's boundary: the test sees it
        pipe.send(traceback.format_exc())
    finally:
        os._exit(0)


def _fork_forever(pipe: Connection) -> None:
    """Be the warm process: one fork for each order, until the pipe closes."""
    faulthandler.enable()
    filled_store(new_backend("memory", Path()), 8)  # so that forks find warm caches
    while True:
        try:
            order = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        child = os.fork()
        if child == 0:
            _run(pipe, *order)
        _, status = os.waitpid(child, 0)
        pipe.send(os.waitstatus_to_exitcode(status))


class DyingProcess:
    """A warm process that forks one to run an operation on a store's folder, and to die in it if told so."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_fork_forever, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, operation: Callable[[Path], object], root: Path, fault: Fault = "none", at: int = 0) -> list[str]:
        """Run `operation(root)`; return the calls that changed the disk, or nothing if the process died of its fault.

        `operation` is a function of a module that a child can import. What it raises is an AssertionError here. If
        `at` is above the number of its calls, the process dies when the operation has returned.
        """
        self._pipe.send((operation, root, fault, at))
        calls: list[str] = []
        while True:
            assert self._pipe.poll(REPLY_S), "the process does not answer"
            said = self._pipe.recv()
            if isinstance(said, int):
                assert said == (0 if calls else -signal.SIGKILL), f"the process ended with {said}"
                return calls
            assert isinstance(said, list), said
            calls = said

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._process.close()


def weights_of(version: int) -> Weights:
    """The weights of a version in these tests: those that `filled_store` makes."""
    weights = first_weights()
    for number in range(version):
        weights = next_weights(weights, number)
    return weights


def next_update(version: int) -> WeightUpdate:
    """The update that leads from a version to the next."""
    return update_between(weights_of(version), weights_of(version + 1), version)


def create_store(root: Path) -> None:
    """Make an empty store in an empty folder."""
    new_store(open_backend(root))


def publish_snapshot(root: Path) -> None:
    """Publish the next version whole."""
    store = VersionStore.open(root)
    store.publish_snapshot(source_of(weights_of(store.versions().stop)), threads=1)


def publish_update(root: Path) -> None:
    """Publish the next version by an update; every eighth one is followed by a fold."""
    store = VersionStore.open(root)
    store.publish_update(next_update(store.versions()[-1]))


def claim(root: Path) -> None:
    """Take over the run: publish a version that changes nothing."""
    VersionStore.open(root).claim()


def add_anchor(root: Path) -> None:
    """Add a snapshot of the newest version."""
    store = VersionStore.open(root)
    newest = store.versions()[-1]
    store.add_anchor(newest, source_of(weights_of(newest)), threads=1)


def collect_garbage(root: Path) -> None:
    """Remove all but the newest three versions, and everything that no version names."""
    collect(VersionStore.open(root).version_log, 3, min_age_s=0)


def renew_lease(root: Path) -> None:
    """Register a reader, in place of its earlier lease if there is one."""
    register_reader(open_backend(root), "reader", 2, 60)
