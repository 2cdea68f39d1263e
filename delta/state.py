"""A set of live weights with running fingerprints: a worker's model and the trainer's baseline alike.

The running fingerprints say what the weights *should* hold; an audit rescans the bits and compares. Between the
two, updates move the running values in O(changes) (delta/apply.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.fingerprint import format_sum
from deltacast.delta.memory import WordMemory
from deltacast.delta.overlap import require_apart
from deltacast.delta.scan import Scan, Scanner
from deltacast.delta.table import ParameterTable, ParamMeta

__all__ = ["Damage", "StateLabel", "WeightState", "rolling_slices"]


@dataclass(frozen=True, slots=True)
class Damage:
    """One parameter whose bits are not what the running fingerprint says.

    Attributes:
        parameter: its name.
        expected: running fingerprint.
        found: fingerprint of the bits that are there.
    """

    parameter: str
    expected: int
    found: int

    def __str__(self) -> str:
        return f"{self.parameter}: expected {format_sum(self.expected)}, found {format_sum(self.found)}"


@dataclass(frozen=True, slots=True, eq=False)
class StateLabel:
    """What a state says of its words at one time: what whoever takes words back puts back beside them.

    Attributes:
        version: None while unknown.
        fingerprints: uint64 [parameters], a copy.
        audited_versions: int64 [parameters], a copy.
    """

    version: int | None
    fingerprints: NDArray[np.uint64]
    audited_versions: NDArray[np.int64]


class WeightState:
    """Live tensors under their names, with version and running fingerprints.

    Not thread-safe; one owner. The tensors are the caller's, never move, and are written in place only by
    `deltacast.delta.apply.Transaction`, or by whoever says so with `advance`. Scans of tensors on a GPU run on its
    current stream.

    Args:
        tensors: name -> tensor, each storage once.
        aliases: alias -> name, of tied tensors.
        version: the version the bits are; None while unknown (a worker before its first seed).
        threads: for scans on the host.

    Raises:
        DTypeError, InputError, TableError: a tensor cannot be addressed or written, two of them share memory
            without being declared as aliases, a bad name, or a negative version.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        aliases: Mapping[str, str] | None = None,
        version: int | None = None,
        threads: int = 1,
    ) -> None:
        if version is not None and version < 0:
            raise InputError("versions count from 0", found=version)
        metas = [ParamMeta(name, dtype_of(t.dtype, name=name).name, tuple(t.shape)) for name, t in tensors.items()]
        self.table = ParameterTable(metas, aliases)
        self.memories = tuple(WordMemory(tensors[meta.name], name=meta.name) for meta in self.table)
        require_apart((memory.name, memory.tensor) for memory in self.memories)
        self.version = version
        self.threads = max(1, threads)
        self._scanner = Scanner(self.memories, self.threads)
        self._begun: Scan | None = None
        self.fingerprints = np.zeros(len(self.table), np.uint64)
        self.audited_versions = np.full(len(self.table), -1 if version is None else version, np.int64)
        self.rescan()

    @property
    def digest(self) -> str:
        """State digest of the running fingerprints."""
        return self.table.state_digest(self.fingerprints)

    @property
    def audited_through(self) -> int | None:
        """The newest version at or before which every parameter's bits were rescanned; None if never."""
        oldest = int(self.audited_versions.min()) if len(self.audited_versions) else self.version
        return None if oldest is None or oldest < 0 else oldest

    def memory(self, name: str) -> WordMemory:
        """Return the memory of a parameter; aliases resolve.

        Raises:
            TableError: no such parameter.
        """
        return self.memories[self.table.index(name)]

    def rescan(self) -> None:
        """Set the running fingerprints from the bits that are there (bootstrap only: this trusts them)."""
        self.fingerprints[:] = self._scanner.fingerprints(range(len(self.table)))
        self.mark_audited()

    def advance(self, version: int, fingerprints: NDArray[np.uint64]) -> None:
        """Move to a version whose words the tensors hold already (a kernel wrote them), version and sums together.

        Whoever calls it has written exactly the words that give these fingerprints. Nothing is rescanned and nothing
        counts as audited; the next audit finds what is not as it was said to be. Whoever may take words back keeps a
        `label`.

        Args:
            version: what the words now are.
            fingerprints: uint64 [parameters], in table order; copied.

        Raises:
            InputError: a negative version, or not one uint64 per parameter. Nothing moved.
        """
        if version < 0:
            raise InputError("versions count from 0", found=version)
        if fingerprints.dtype != np.uint64 or fingerprints.shape != self.fingerprints.shape:
            raise InputError(
                "unfit fingerprints",
                version=version,
                expected=f"uint64 {list(self.fingerprints.shape)}",
                found=f"{fingerprints.dtype} {list(fingerprints.shape)}",
            )
        self.fingerprints[:] = fingerprints
        self.version = version

    def label(self) -> StateLabel:
        """Return what the state says of its words now."""
        return StateLabel(self.version, self.fingerprints.copy(), self.audited_versions.copy())

    def restore(self, label: StateLabel) -> None:
        """Say again what was said then; whoever calls it has put the words back."""
        self._begun = None
        self.version = label.version
        self.fingerprints[:] = label.fingerprints
        self.audited_versions[:] = label.audited_versions

    def disown(self) -> None:
        """Drop the version without a scan: words could not be put back, and half an update must not pass for one."""
        self._begun = None
        self.version = None
        self.audited_versions[:] = -1

    def forget(self) -> None:
        """Drop the version: the bits are whatever they are. Rescans, so that the digest says what that is."""
        self.disown()
        self.rescan()

    def mark_audited(self) -> None:
        """Note that every parameter was just rescanned at the present version."""
        self._mark_audited(range(len(self.table)))

    def audit(self, names: Iterable[str] | None = None) -> list[Damage]:
        """Rescan parameters (all by default) and return those whose bits differ from the running fingerprint.

        Changes no weight and no fingerprint. O(bytes of the parameters scanned).

        Raises:
            TableError: no such parameter.
        """
        self._begun = None
        places = range(len(self.table)) if names is None else sorted({self.table.index(name) for name in names})
        return self._audit_places(places)

    def audit_rolling(self, step: int, of: int) -> list[Damage]:
        """Rescan slice `step mod of` of the parameters, cut so that slices hold about equal bytes.

        Raises:
            InputError: `of` is not positive.
        """
        places, begun, self._begun = rolling_slices(self.table, of)[step % of], self._begun, None
        return self._audit_places(places, begun if begun is not None and begun.places == places else None)

    def begin_rolling(self, step: int, of: int) -> None:
        """Start what `audit_rolling(step, of)` is to find, on the current streams; waits for nothing.

        No bit may change from here to that audit; any other one, or a `restore`, forgets it.

        Raises:
            InputError: `of` is not positive.
        """
        self._begun = self._scanner.begin(rolling_slices(self.table, of)[step % of])

    def prepare_rolling(self, of: int) -> None:
        """Make ready for `audit_rolling(_, of)`: the first of each slice then takes no longer than later ones."""
        for places in rolling_slices(self.table, of):
            self._scanner.prepare(places)

    def require_table(self, table_digest: str) -> None:
        """Raise unless an update's parameter table is this state's.

        Raises:
            TableError: it is another one.
        """
        if table_digest != self.table.digest:
            raise TableError("made for another parameter table", expected=self.table.digest, found=table_digest)

    def _audit_places(self, places: Sequence[int], begun: Scan | None = None) -> list[Damage]:
        found = self._scanner.finish(begun or self._scanner.begin(places))
        expected: list[int] = self.fingerprints[list(places)].tolist()
        damage = [
            Damage(self.table.metas[place].name, should, value)
            for place, should, value in zip(places, expected, found, strict=True)
            if value != should
        ]
        if not damage:
            self._mark_audited(places)
        return damage

    def _mark_audited(self, places: Sequence[int]) -> None:
        if self.version is not None:
            self.audited_versions[list(places)] = self.version


@lru_cache(maxsize=4)  # every round asks anew, and 40,000 parameters take 0.2 s
def rolling_slices(table: ParameterTable, of: int) -> tuple[tuple[int, ...], ...]:
    """Cut a table into `of` slices of about equal bytes: largest parameter first, into the lightest slice.

    Deterministic, so that trainer and workers mean the same slice. Returns table places.

    Raises:
        InputError: `of` is not positive.
    """
    if of < 1:
        raise InputError("a rolling audit needs a positive number of slices", expected="1 or more", found=of)
    slices: list[list[int]] = [[] for _ in range(of)]
    lightest_first = [(0, number) for number in range(of)]
    for i in sorted(range(len(table)), key=lambda i: (-table.metas[i].nbytes, i)):
        weight, number = lightest_first[0]
        slices[number].append(i)
        heapq.heapreplace(lightest_first, (weight + table.metas[i].nbytes, number))
    return tuple(tuple(sorted(places)) for places in slices)
