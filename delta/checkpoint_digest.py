"""The state digest of a checkpoint on disk: the very value that engines compute for live weights of the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.fingerprint import fingerprint
from deltacast.delta.sources import table_of
from deltacast.delta.table import ParameterTable, ParamMeta
from deltacast.delta.threads import in_order

__all__ = ["CheckpointDigest", "Progress", "digest_checkpoint"]

Progress: TypeAlias = Callable[[int], None]
"""Called in the caller's thread with the number of bytes that were done since the last call."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointDigest:
    """A checkpoint's parameter table and the fingerprint of each parameter's bits.

    Attributes:
        table: every tensor of the checkpoint. Tied names that the files hold twice count twice.
        fingerprints: uint64, in table order.
    """

    table: ParameterTable
    fingerprints: NDArray[np.uint64]

    @classmethod
    def of(cls, pairs: Iterable[tuple[ParamMeta, int]]) -> CheckpointDigest:
        """Make one from fingerprints in any order.

        Raises:
            TableError: a name twice.
        """
        found = {meta.name: (meta, value) for meta, value in pairs}
        table = ParameterTable(meta for meta, _ in found.values())
        return cls(table, np.array([found[meta.name][1] for meta in table], np.uint64))

    @property
    def state_digest(self) -> str:
        """The digest of the whole state, written `xxh3_128:<hex>`."""
        return self.table.state_digest(self.fingerprints)

    def fingerprint(self, name: str) -> int:
        """Return one parameter's fingerprint.

        Raises:
            TableError: no such parameter.
        """
        return int(self.fingerprints[self.table.index(name)])


def digest_checkpoint(
    source: CheckpointSource, *, threads: int = 1, progress: Progress | None = None
) -> CheckpointDigest:
    """Read a whole checkpoint once and fingerprint every parameter; `threads` parameters at a time.

    Args:
        source: an open checkpoint; stays open.
        threads: parameters that are scanned at once.
        progress: told about each parameter's bytes.
    """
    table = table_of(source)
    fingerprints = np.zeros(len(table), np.uint64)

    def scan(meta: ParamMeta) -> tuple[ParamMeta, int]:
        return meta, fingerprint(source.tensor(meta.name), name=meta.name)

    for meta, value in in_order(scan, source.metas(), threads):
        fingerprints[table.index(meta.name)] = value
        if progress is not None:
            progress(meta.nbytes)
    return CheckpointDigest(table, fingerprints)
