"""Objects in this process's memory: for tests and examples. Nothing outlives the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from deltacast.delta.errors import InputError, MissingObjectError, ObjectExistsError, StoreError
from deltacast.store.objects import Buffer, ObjectBackend, ObjectInfo, check_listing, check_object_name

__all__ = ["MemoryBackend"]


@dataclass(slots=True)
class _Space:
    """The objects of one name: name -> bytes and the time they were written."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_SPACES: Final[dict[str, _Space]] = {}
_SPACES_LOCK: Final = threading.Lock()


class MemoryBackend(ObjectBackend):
    """A dict behind a lock. Every backend of one name in this process has the same objects, for the process's life.

    Args:
        name: one part of an object's name, as in `memory://NAME`.
        clock: the time in seconds since 1970 that dates this backend's writes; tests pass their own.

    Raises:
        InputError: not such a name.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.time) -> None:
        if "/" in check_object_name(name):
            raise InputError("not a name for a store in memory", expected="memory://NAME, without a /", found=name)
        self._name = name
        self._clock = clock
        with _SPACES_LOCK:
            self._space = _SPACES.setdefault(name, _Space())

    @property
    def url(self) -> str:
        """`memory://NAME`."""
        return f"memory://{self._name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    def create(self, name: str, data: Buffer) -> None:
        """Write a small object if there is none of that name; see `ObjectBackend.create`."""
        with self._space.lock:
            if check_object_name(name) in self._space.objects:
                raise ObjectExistsError(f"there is an object {name} already in {self.url}")
            self._space.objects[name] = bytes(data), self._clock()

    def write(self, name: str, pieces: Iterable[Buffer]) -> int:
        """Write an object whose name says what it holds; see `ObjectBackend.write`.

        Raises:
            StoreError: an object of that name and another size is there, which is left alone.
        """
        check_object_name(name)
        data = b"".join(bytes(piece) for piece in pieces)
        with self._space.lock:
            there = self._space.objects.get(name)
            if there is not None and len(there[0]) != len(data):
                raise StoreError(
                    f"{name} in {self.url} is not what its name says",
                    expected=f"{len(data)} bytes",
                    found=f"{len(there[0])} bytes",
                )
            self._space.objects[name] = data, self._clock()
        return len(data)

    def replace(self, name: str, data: Buffer) -> None:
        """Write a small object over whatever is there; see `ObjectBackend.replace`."""
        with self._space.lock:
            self._space.objects[check_object_name(name)] = bytes(data), self._clock()

    def read(self, name: str) -> bytes:
        """Return a whole object; see `ObjectBackend.read`."""
        return self._get(name)[0]

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with an object's bytes from `start` on; see `ObjectBackend.read_into`."""
        data = self._get(name)[0]
        if start + out.nbytes > len(data):
            raise StoreError(
                f"{name} in {self.url} is too short", expected=f"{start + out.nbytes} bytes", found=len(data)
            )
        out.cast("B")[:] = data[start : start + out.nbytes]

    def stat(self, name: str) -> ObjectInfo:
        """Say an object's size and age; see `ObjectBackend.stat`."""
        data, modified_s = self._get(name)
        return ObjectInfo(name, len(data), modified_s)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a folder as they are now; see `ObjectBackend.list`."""
        check_listing(prefix, after)
        with self._space.lock:
            found = sorted(
                (name, len(data), modified_s)
                for name, (data, modified_s) in self._space.objects.items()
                if name.startswith(prefix) and name > after
            )
        return (ObjectInfo(*each) for each in found)

    def delete(self, name: str) -> None:
        """Remove an object; that there is none is no error."""
        with self._space.lock:
            self._space.objects.pop(check_object_name(name), None)

    def sweep(self, older_than_s: float) -> int:  # noqa: ARG002 - a write is whole or was never there
        """Return 0: nothing unfinished is ever stored."""
        return 0

    def now_s(self) -> float:
        """Return the time by the clock that dates this backend's writes."""
        return self._clock()

    def _get(self, name: str) -> tuple[bytes, float]:
        with self._space.lock:
            found = self._space.objects.get(check_object_name(name))
        if found is None:
            raise MissingObjectError(f"there is no object {name} in {self.url}")
        return found
