"""Remove what no version needs any more: version files first, then what only they named.

What stays: the newest versions, everything that live readers need, and all down to a snapshot from which the oldest
of these can be made. A crash at any point, a second collector or a writer at work lose nothing: a version file goes
before what it names, and an object that no version names goes only when it is older than any publish in flight.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.errors import (
    FormatError,
    InputError,
    MissingObjectError,
    StoreError,
    VerificationError,
)
from deltacast.store.log import VersionLog
from deltacast.store.names import (
    FOLDS,
    MANIFEST_NAME,
    READERS,
    SNAPSHOTS,
    UPDATES,
    parse_fold_path,
    parse_manifest_path,
    parse_version_path,
    snapshot_folder,
    version_path,
)
from deltacast.store.objects import ObjectBackend, ObjectInfo
from deltacast.store.plan import require_snapshot_of
from deltacast.store.readers import Lease, list_leases
from deltacast.store.records import VersionRecord
from deltacast.store.snapshots import read_manifest

__all__ = ["DAY_S", "GcReport", "collect"]

_LOG: Final = logging.getLogger(__name__)

DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection removed, or would have.

    Attributes:
        versions: whose version files went, oldest first.
        objects: names of everything else that went, leases that ended long ago among them.
        num_bytes: of both together.
        oldest: the oldest version that stays; None in a store without versions.
        held_by: readers that hold on to versions older than the ones that were to be kept; None stands for a lease
            that cannot be read.
    """

    versions: tuple[int, ...]
    objects: tuple[str, ...]
    num_bytes: int
    oldest: int | None
    held_by: tuple[str | None, ...]


def collect(
    log: VersionLog, keep: int, *, min_age_s: float = DAY_S, dry_run: bool = False, progress: Progress | None = None
) -> GcReport:
    """Remove old versions, and objects that no version names.

    Any process may do it at any time; neither the writer nor readers need to stop. Of a snapshot only the presence
    and the sizes of its files are looked at before older versions are given up for it: where disks are not to be
    trusted, run fsck first. Where no whole snapshot is left for the oldest version to stay, nothing is removed at all:
    what is missing may be put back, and what else it takes does not look needed until then.

    Args:
        log: the store's versions.
        keep: how many of the newest versions stay; at least 1.
        min_age_s: objects that no version names stay until they are so old, by the store's clock. It must exceed the
            time that any publish takes: what a slower one wrote may be gone before its version file names it.
        dry_run: report what would go, and remove nothing; needs no right to write.
        progress: told the bytes of each object that was removed.

    Raises:
        InputError: `keep` or `min_age_s` out of range; nothing was removed.
        FormatError: a version file that has to be read is damaged, or one is gone between others; nothing was removed.
        StoreError: the store failed; every version from `GcReport.oldest` on is as it was.
    """
    if keep < 1 or not (math.isfinite(min_age_s) and min_age_s >= 0):
        raise InputError("a store keeps at least one version, and no age is negative", found=(keep, min_age_s))
    look = _Look(log, min_age_s, dry_run=dry_run)
    look.require_unbroken()
    wanted, held_by = look.oldest_wanted(keep)
    oldest = look.oldest_to_stay(wanted)
    if oldest is None:
        _LOG.warning("nothing is removed: no version up to %d has a whole snapshot; fsck says what is damaged", wanted)
        return GcReport((), (), 0, min(look.records), held_by)
    retired, unneeded = look.retired(oldest), look.unneeded(oldest)
    if not dry_run:
        retired = _remove(log.backend, retired, progress)
        unneeded = _remove(log.backend, unneeded, progress)
        log.backend.sweep(min_age_s)
    return GcReport(
        versions=tuple(version for info in retired if (version := parse_version_path(info.name)) is not None),
        objects=tuple(info.name for info in unneeded),
        num_bytes=sum(info.num_bytes for info in (*retired, *unneeded)),
        oldest=max(oldest, min(look.records)) if look.records else None,
        held_by=held_by,
    )


def _remove(backend: ObjectBackend, infos: Iterable[ObjectInfo], progress: Progress | None) -> list[ObjectInfo]:
    """Remove objects in their order, and return them; who publishes one again since the listing keeps it."""
    removed: list[ObjectInfo] = []
    for info in infos:
        if _is_written_again(backend, info):
            continue
        backend.delete(info.name)
        removed.append(info)
        if progress is not None:
            progress(info.num_bytes)
    return removed


def _is_written_again(backend: ObjectBackend, info: ObjectInfo) -> bool:
    """Whether an object is younger than when it was listed: something is about to name it, or a lease was renewed."""
    try:
        return backend.stat(info.name).modified_s > info.modified_s
    except MissingObjectError:  # another collector was faster
        return False


class _Look:
    """One look at a store: what is there, and what of it may go."""

    def __init__(self, log: VersionLog, min_age_s: float, *, dry_run: bool) -> None:
        self.log, self.min_age_s = log, min_age_s
        # Listed before the head is read: what a version names that is committed in between is then seen to be named.
        self.listed = {info.name: info for info in log.backend.list("")}
        self.records = {record.version: record for record in log.records()}
        self.leases = {lease.path: lease for lease in list_leases(log.backend, signing_key=log.key)}
        self.now_s = self._time_s(dry_run=dry_run)

    def _time_s(self, *, dry_run: bool) -> float:
        """Return the store's time. To ask for it is to write: who may only look takes that of the youngest object."""
        try:
            return self.log.backend.now_s()
        except StoreError:
            if not dry_run:
                raise
            return max((info.modified_s for info in self.listed.values()), default=0.0)

    def require_unbroken(self) -> None:
        """Raise if a version file is gone that hides others: their versions are lost once what they name is removed.

        Retention leaves no file below a gap. A writer that slept may, and the records above do not rest on its file.
        """
        oldest = min(self.records, default=0)
        found = (parse_version_path(name) for name in self.listed)
        hidden = max((version for version in found if version is not None and version < oldest), default=oldest)
        if hidden >= oldest - 1:
            return  # nothing is below, or what another collection has removed since it was listed
        for record in self.log.read(oldest).recent:
            if record.version == hidden + 1 and self.log.read(hidden).digest == record.previous:
                raise FormatError(f"{version_path(record.version)} is gone, and hides the versions before it",
                                  version=record.version, hint="Put it back: fsck says what it held.")  # fmt: skip

    def oldest_wanted(self, keep: int) -> tuple[int, tuple[str | None, ...]]:
        """Return the oldest version that somebody wants, and the readers who want more than the newest `keep`.

        A reader whose version is gone wants none: nothing leads on from there, it begins with a snapshot.
        """
        first, newest = min(self.records, default=0), max(self.records, default=0)
        wanted = max(first, newest - keep + 1)

        def start(lease: Lease) -> int:
            return first if lease.name is None else lease.version

        live = (lease for lease in self.leases.values() if lease.expires_s > self.now_s)
        holding = [lease for lease in live if first <= start(lease) < wanted]
        return min([wanted, *map(start, holding)]), tuple(lease.name for lease in holding)

    def oldest_to_stay(self, wanted: int) -> int | None:
        """Return the newest version at or below `wanted` that has a whole snapshot; 0 in a store without versions.

        None where no snapshot is left: one is damaged or gone, or another collection is at work or was interrupted.
        """
        manifests = sorted(
            (version, name) for name in self.listed if (version := parse_manifest_path(name)) is not None
        )
        for version, name in reversed(manifests):
            if version <= wanted and version in self.records and self._is_whole(version, name):
                return version
        return None if self.records else 0

    def retired(self, oldest: int) -> list[ObjectInfo]:
        """List the version files below `oldest`, oldest first: a crash leaves an unbroken run up to the head."""
        versions = sorted((version, name) for name in self.listed if (version := parse_version_path(name)) is not None)
        return [self.listed[name] for version, name in versions if version < oldest]

    def unneeded(self, oldest: int) -> list[ObjectInfo]:
        """List the other objects that no version from `oldest` on needs, if they are old enough to go.

        A snapshot's files go together, when the youngest of them is old enough, and its manifest before them: without
        it they are no snapshot.
        """
        kept = {version: record for version, record in self.records.items() if version >= oldest}
        updates = {record.update.object.path for record in kept.values() if record.update is not None}
        found: list[ObjectInfo] = []
        for unit, names in groupby(sorted(self.listed), _unit):
            infos = [self.listed[name] for name in names]
            if all(map(self._is_old, infos)) and not self._is_needed(unit, kept, updates):
                found += sorted(infos, key=lambda info: not info.name.endswith(MANIFEST_NAME))
        return found

    def _is_needed(self, unit: str, kept: Mapping[int, VersionRecord], updates: Container[str]) -> bool:
        if unit.startswith(UPDATES):
            return unit in updates
        if unit.startswith(FOLDS):
            fold = parse_fold_path(unit)
            return fold is not None and fold[0] in kept and fold[1] in kept
        if unit.startswith(SNAPSHOTS):
            return self._is_snapshot_needed(unit + MANIFEST_NAME, kept)
        return not unit.startswith(READERS)

    def _is_snapshot_needed(self, path: str, kept: Mapping[int, VersionRecord]) -> bool:
        """Whether a manifest is there and makes one of the versions, or might: damage is for fsck to name."""
        record = kept.get(parse_manifest_path(path) or 0)
        if path not in self.listed or record is None:
            return False
        try:
            require_snapshot_of(read_manifest(self.log.backend, path, self.log.key), record)
        except (FormatError, MissingObjectError):
            return True
        except VerificationError:  # written from a source that held other weights
            return False
        return True

    def _is_old(self, info: ObjectInfo) -> bool:
        lease = self.leases.get(info.name)
        return self.now_s - (lease.expires_s if lease else info.modified_s) >= self.min_age_s

    def _is_whole(self, version: int, manifest_path: str) -> bool:
        """Whether a snapshot is one of its version, and all of its files are there in their size."""
        try:
            manifest = read_manifest(self.log.backend, manifest_path, self.log.key)
            require_snapshot_of(manifest, self.records[version])
        except (FormatError, MissingObjectError, VerificationError):
            return False
        found = [self.listed.get(manifest.object_name(file)) for file in manifest.files]
        sizes = [None if info is None else info.num_bytes for info in found]
        return sizes == [file.num_bytes for file in manifest.files]


def _unit(name: str) -> str:
    """Return what is kept or removed as one: a snapshot's folder, or any other object by itself."""
    return snapshot_folder(name) or name
