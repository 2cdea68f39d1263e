"""What a check finds, while it reads and when it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.errors import DeltacastError
from deltacast.store.records import VersionRecord

__all__ = ["Damage", "Finding", "Findings", "FsckReport"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damage:
    """One object that is not what it should be, or not there.

    Attributes:
        path: the object.
        what: what is wrong.
        expected: what should be there; None where `what` says it all.
        found: what is there.
        versions: versions that cannot be materialised any more and would need it, oldest first. Empty where there is
            another way to each of them, or nothing ever needs the object (a hint, a cache): remove it then.
        record: of a version file, what later ones repeat of it: the version's record; None where none does.
    """

    path: str
    what: str
    expected: str | None
    found: str | None
    versions: tuple[int, ...]
    record: VersionRecord | None = None

    def __str__(self) -> str:
        text = self.what if self.path in self.what else f"{self.path}: {self.what}"
        if self.expected is None and self.found is None:
            return text
        return f"{text}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What is in a store.

    Attributes:
        damaged: objects that are not what they should be.
        stray: objects that no version names: of a publish in flight, or left by a writer that died or was fenced. No
            reader looks at them, and gc removes them in time.
        materialisable: versions that can be made, oldest first.
        lost: versions that exist and cannot be made, oldest first: for damage, or because a collection was interrupted
            that had removed what they begin with.
    """

    damaged: tuple[Damage, ...]
    stray: tuple[str, ...]
    materialisable: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with an object.

    Attributes:
        path: the object.
        version: of the version that it is about; None for one that no version needs.
        what: what is wrong.
        expected: what should be there.
        found: what is there.
    """

    path: str
    version: int | None
    what: str
    expected: str | None = None
    found: str | None = None


@dataclass(slots=True)
class Findings:
    """What a check has found so far.

    Attributes:
        progress: told about the bytes of each object that was looked at.
        damaged: what is wrong, in the order in which it was found.
    """

    progress: Progress | None = None
    damaged: list[Finding] = field(default_factory=list)

    def attempt(self, path: str, version: int | None, read: Callable[[], T]) -> T | None:
        """Return what `read` does; None, and a finding, if it raises an error of ours.

        Whatever keeps one object from being read is damage to that object: a disk may fail at one place only.
        """
        try:
            return read()
        except DeltacastError as err:
            self.add(path, version, err)
            return None

    def add(self, path: str, version: int | None, err: DeltacastError) -> None:
        """Note what an error says of an object."""
        expected, found = (None if fact is None else str(fact) for fact in (err.expected, err.found))
        self.damaged.append(Finding(path, version, err.message, expected, found))

    def read(self, num_bytes: int) -> None:
        """Note that so many bytes were looked at."""
        if self.progress is not None:
            self.progress(num_bytes)
