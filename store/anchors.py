"""When a snapshot of the newest version is worth its bytes: so that who joins late need not replay a long chain."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from deltacast.delta.errors import FormatError, InputError, MissingObjectError
from deltacast.store.log import VersionLog
from deltacast.store.plan import usable_snapshots
from deltacast.store.snapshots import read_extra_files

__all__ = ["Anchors", "anchor_due", "carried_files"]

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Anchors:
    """How far the newest version may be from the last snapshot.

    Attributes:
        every: so many updates,
        fraction: or updates of this share of its bytes, whichever comes first.

    Raises:
        InputError: not positive.
    """

    every: int = 64
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1 or not self.fraction > 0:
            raise InputError("anchors need positive bounds", found=(self.every, self.fraction))


def anchor_due(log: VersionLog, anchors: Anchors) -> bool:
    """Whether the newest version should get a snapshot; always, where no snapshot before it can be used.

    Raises:
        ChecksumError, FormatError: a version file since the last snapshot is damaged.
        StoreError: the store failed.
    """
    versions = log.versions()
    for manifest, records in usable_snapshots(log, 0, versions.stop - 1):
        since = [record.update.object.num_bytes for record in records[:-1] if record.update is not None]
        return len(since) >= anchors.every or sum(since) > anchors.fraction * manifest.weights_bytes
    return bool(versions)


def carried_files(log: VersionLog, version: int) -> dict[str, bytes]:
    """Return what an anchor of a version takes over from the snapshot before it: name -> bytes of config, tokenizer.

    Readers begin at the newest snapshot and see no other one's files.

    Args:
        log: the store's versions.
        version: which gets an anchor.

    Raises:
        ChecksumError, FormatError: a version file on the way is damaged.
        StoreError: the store failed.
    """
    for manifest, _ in usable_snapshots(log, 0, version):
        try:
            return read_extra_files(log.backend, manifest)
        except (FormatError, MissingObjectError) as err:
            _LOG.warning("the files beside the weights of %s cannot be used: %s", manifest.path, err)
    return {}
