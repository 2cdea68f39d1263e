"""Named objects of bytes: what the durable store needs of a disk or a bucket, and nothing else.

An object is written once and never changed; the few that may be replaced (hints, leases) go through `replace`. One
conformance suite, `tests/store/test_backends.py`, says in full what a backend must do; every backend passes it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from deltacast.delta.errors import InputError

__all__ = ["Buffer", "ObjectBackend", "ObjectInfo", "check_listing", "check_object_name", "is_object_name"]

Buffer: TypeAlias = bytes | bytearray | memoryview

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}){0,3}")


def is_object_name(name: str) -> bool:
    """Say whether a string is an object's name: what a listing shows, and what `check_object_name` accepts."""
    return _NAME.fullmatch(name) is not None


def check_object_name(name: str) -> str:
    """Return an object's name if it is one: up to four parts of A-Z a-z 0-9 . _ -, none of which begins with a dot.

    The one place where names become paths or keys; names of parameters, runs and readers never come here.

    Raises:
        InputError: it is not.
    """
    if not is_object_name(name):
        raise InputError(
            "not a name for an object", expected="parts of A-Za-z0-9._- between single /", found=repr(name)
        )
    return name


def check_listing(prefix: str, after: str) -> None:
    """Check what `ObjectBackend.list` was asked: a folder's name and a /, or nothing for all; and a name, or nothing.

    Raises:
        InputError: it is not; nothing was listed.
    """
    if prefix and not prefix.endswith("/"):
        raise InputError("not a folder of objects", expected="a name that ends with a /", found=repr(prefix))
    if prefix:
        check_object_name(prefix[:-1])
    if after:
        check_object_name(after)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        name: its name below the store's root.
        num_bytes: its size.
        modified_s: when it was written, by the store's own clock, in seconds since 1970.
    """

    name: str
    num_bytes: int
    modified_s: float


class ObjectBackend(ABC):
    """Objects below one root. Safe to use from several threads and by several processes at a time.

    No object may have the name of a folder that others are in: a disk could not hold both.

    Every method raises `StoreError` (or a leaf of it) where the disk or the service fails, and `InputError` for a
    name that `check_object_name` refuses. What a method has returned from is durable, except for `hint`.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """What `open_backend` made this from, without any secret in it."""

    @abstractmethod
    def create(self, name: str, data: Buffer) -> None:
        """Write a small object if there is none of that name: of any number of writers exactly one succeeds.

        A reader sees no object or the whole of it, also after a crash.

        Raises:
            ObjectExistsError: there is one already, maybe this very one (a retried request): read it to know. It is
                durable, whoever wrote it.
        """

    @abstractmethod
    def write(self, name: str, pieces: Iterable[Buffer]) -> int:
        """Write an object whose name only these bytes can have: it holds a digest of them, or a nonce of this writer.

        Pieces are consumed one at a time and not kept. An object of that name that is there already is written again,
        so that it is young again for a collector that goes by age. A reader sees no object or the whole of it, also
        after a crash or if `pieces` raises; what `pieces` raises is passed on.

        Returns:
            The number of bytes.

        Raises:
            StoreError: there is an object of that name and of another size; it is left as it is.
        """

    @abstractmethod
    def replace(self, name: str, data: Buffer) -> None:
        """Write a small object over whatever is there; a reader sees the old bytes or the new, whole."""

    def hint(self, name: str, data: Buffer) -> None:
        """Write a small object that nobody relies on, as `replace` does, but without waiting for a disk.

        After a power cut it may be the old one, or empty.
        """
        self.replace(name, data)

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a whole object.

        Raises:
            MissingObjectError: there is none.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` (writable bytes) with an object's bytes from `start` on.

        Raises:
            MissingObjectError: there is none.
            StoreError: it ends before `out` is full; what `out` holds then is undefined.
        """

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Say an object's size and age.

        Raises:
            MissingObjectError: there is none.
        """

    @abstractmethod
    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a folder (`prefix` ends with a /; empty for all), by name, those above `after`.

        Objects that are created or deleted meanwhile may be missing or there. Unfinished writes are never listed, nor
        is anything whose name `check_object_name` refuses.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; that there is none is no error."""

    @abstractmethod
    def sweep(self, older_than_s: float) -> int:
        """Remove what writers that died left unfinished, if it is older than that by the store's clock.

        Returns:
            How many unfinished writes were removed. 0 where a backend leaves none that it could see.
        """

    @abstractmethod
    def now_s(self) -> float:
        """Return the store's own time in seconds since 1970: what `ObjectInfo.modified_s` is to be compared with."""

    def path(self, name: str) -> Path | None:  # noqa: ARG002 - only a backend on a disk has paths
        """Return the file that holds an object, to be read or mapped and never written; None if there is no file."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of connections; may be called twice."""
