"""An object backend that a test can make fail, or wait, at any call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from deltacast.delta.errors import StoreError
from deltacast.store.objects import Buffer, ObjectBackend, ObjectInfo


def nothing(_call: str, _name: str) -> None:
    """Let it pass."""


class FailingBackend(ObjectBackend):
    """Passes everything on.

    Attributes:
        before: called with a method and an object's name (a prefix, for `list`) before it is passed on; what it raises
            is raised instead.
        after: likewise, once it was done: for answers that are lost.
    """

    def __init__(self, inner: ObjectBackend) -> None:
        self._inner = inner
        self.before: Callable[[str, str], None] = nothing
        self.after: Callable[[str, str], None] = nothing

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, name: str, data: Buffer) -> None:
        self.before("create", name)
        self._inner.create(name, data)
        self.after("create", name)

    def write(self, name: str, pieces: Iterable[Buffer]) -> int:
        self.before("write", name)
        num_bytes = self._inner.write(name, pieces)
        self.after("write", name)
        return num_bytes

    def replace(self, name: str, data: Buffer) -> None:
        self.before("replace", name)
        self._inner.replace(name, data)

    def read(self, name: str) -> bytes:
        self.before("read", name)
        return self._inner.read(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.before("read_into", name)
        self._inner.read_into(name, start, out)

    def stat(self, name: str) -> ObjectInfo:
        self.before("stat", name)
        return self._inner.stat(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.before("list", prefix)
        return self._inner.list(prefix, after=after)

    def delete(self, name: str) -> None:
        self.before("delete", name)
        self._inner.delete(name)

    def sweep(self, older_than_s: float) -> int:
        return self._inner.sweep(older_than_s)

    def now_s(self) -> float:
        return self._inner.now_s()

    def path(self, name: str) -> Path | None:
        return self._inner.path(name)

    def close(self) -> None:
        self._inner.close()


class FullDisk:
    """A disk without room for anything.

    Attributes:
        tried: released once for each write that was refused.
    """

    def __init__(self) -> None:
        self.tried = threading.Semaphore(0)

    def __call__(self, call: str, name: str) -> None:
        if call in {"create", "write", "replace"}:
            self.tried.release()
            raise StoreError(f"no room for {name}")


def cut_off(call: str, name: str) -> None:
    """A service that cannot be reached."""
    raise StoreError(f"no answer to {call} {name}")


def only(call: str, prefix: str) -> Callable[[str, str], None]:
    """Fail at one kind of call."""

    def fail(found: str, name: str) -> None:
        if found == call and name.startswith(prefix):
            raise StoreError(f"no answer to {call} {name}")

    return fail


def cut_off_from(call: str, prefix: str, backend: FailingBackend) -> Callable[[str, str], None]:
    """Fail at one kind of call, and at every call after that."""
    first = only(call, prefix)

    def fail(found: str, name: str) -> None:
        try:
            first(found, name)
        except StoreError:
            backend.before = cut_off
            raise

    return fail


class Gate:
    """Holds up every write until it is opened."""

    def __init__(self) -> None:
        self._open, self._reached = threading.Event(), threading.Event()

    def __call__(self, call: str, _name: str) -> None:
        if call in {"create", "write"}:
            self._reached.set()
            assert self._open.wait(60)

    def wait_until_reached(self) -> None:
        """Block until a write is held up."""
        assert self._reached.wait(60)

    def open(self) -> None:
        """Let everything pass from now on."""
        self._open.set()
