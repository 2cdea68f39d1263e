"""The versions of a store, as a reader finds them: from the newest back, each file proven by the one after it.

Which version is the newest is said by the listing of `versions/` alone; HEAD is a hint where to begin listing. Who
walks back follows `previous` digests, so that a file that a frozen writer made anew below the head is never followed.
What exists is what has a version file: removing versions begins with their files, oldest first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Final

from deltacast.delta.errors import FormatError, MissingObjectError, StoreError
from deltacast.store.fetch import fetch
from deltacast.store.names import HEAD_PATH, VERSIONS, parse_version_path, version_path
from deltacast.store.objects import ObjectBackend
from deltacast.store.records import MAX_VERSION_FILE_BYTES, VersionFile, VersionRecord

__all__ = ["VersionLog", "head_hint"]

_LOG: Final = logging.getLogger(__name__)
_HINT: Final = re.compile(rb"[0-9]{1,19}\n")
_MAX_HINT_BYTES: Final = 20


def head_hint(version: int) -> bytes:
    """Return what HEAD holds when `version` is the newest: its number and a line end."""
    return b"%d\n" % version


class VersionLog:
    """Read access to the version files of one run; keeps nothing, so it may be used from several threads.

    Args:
        backend: where the store is.
        run_id: the lineage that every record must belong to.
        key: signing key; with one, every file must be signed with it.

    Attributes:
        backend, run_id, key: the same; they tell whoever reads more than the log how.
    """

    def __init__(self, backend: ObjectBackend, run_id: str, key: bytes | None) -> None:
        self.backend = backend
        self.run_id = run_id
        self.key = key

    def head(self) -> VersionFile | None:
        """Read the newest version's file; None before the first version.

        Raises:
            ChecksumError, FormatError: that file is damaged, or not signed as it must be.
            StoreError: the store failed.
        """
        version = self._newest()
        if version is None:
            return None
        try:
            return self.read(version)
        except MissingObjectError:  # superseded and removed since the listing: then there is a newer one
            newer = self._newest()
            if newer is None or newer == version:
                raise
            return self.read(newer)

    def versions(self) -> range:
        """Return the versions that exist: an unbroken run that ends with the newest. Reads no file.

        So it cannot tell a file that a frozen writer made anew right below the oldest version from the one that was
        removed there: it may begin too low, where the true record still comes but nothing leads.
        """
        return self._unbroken(0)

    def records(self, lowest: int = 0) -> Iterator[VersionRecord]:
        """Yield the records of existing versions from the newest down to `lowest`; one read for each 65.

        Of a removed version whose number a frozen writer used anew, right below the oldest that exists, the true
        record may still come: from the files above it.

        Raises:
            ChecksumError, FormatError: a version file that has to be read is damaged.
            StoreError: the store failed.
        """
        versions = self._unbroken(lowest)
        if not versions:
            return
        file = self.read(versions[-1])
        while True:
            for record in (file.record, *file.recent):
                if record.version not in versions:
                    return
                yield record
            oldest = (file.record, *file.recent)[-1]
            if oldest.previous is None or oldest.version - 1 not in versions:
                return
            try:
                file = self.read(oldest.version - 1)
            except MissingObjectError:
                return  # old versions are being removed while we read
            if file.digest != oldest.previous:
                _LOG.warning("%s is not what version %d was built on: it ends the log", file.path, oldest.version)
                return  # made anew by a writer that slept while the right one was removed

    def record(self, version: int) -> VersionRecord:
        """Return one version's record.

        Raises:
            StoreError: no such version; the message says which there are.
            ChecksumError, FormatError: as `records`.
        """
        for record in self.records(version):
            if record.version == version:
                return record
        versions = self.versions()
        there = f"versions {versions[0]} to {versions[-1]}" if versions else "no version at all"
        raise StoreError("the store does not have that version", version=version, found=there)

    def read(self, version: int) -> VersionFile:
        """Read one version's file, whether or not the newest version leads back to it.

        Raises:
            MissingObjectError: there is none.
            ChecksumError, FormatError: it is damaged, wrongly signed, or another run's.
        """
        path = version_path(version)
        file = VersionFile.from_bytes(fetch(self.backend, path, max_bytes=MAX_VERSION_FILE_BYTES), self.key, version)
        if file.record.run_id != self.run_id:
            raise FormatError(f"{path} is of another run", version=version, expected=ascii(self.run_id),
                              found=ascii(file.record.run_id))  # fmt: skip
        return file

    def _newest(self) -> int | None:
        hint = self._hint()
        # From the hint itself on, so that a hint to nothing is seen for what it is.
        found = self._listed(hint)
        if not found and hint > 0:
            found = self._listed(0)
        return max(found, default=None)

    def _unbroken(self, lowest: int) -> range:
        found = self._listed(lowest)
        versions = _last_run(found)
        if found and versions[0] != min(found):
            # A listing may miss what came while it was made. If the gap stays, a writer that slept left a file below.
            versions = _last_run(self._listed(lowest))
        return versions

    def _listed(self, lowest: int) -> set[int]:
        """Return the versions from `lowest` on that have a file."""
        after = version_path(lowest - 1) if lowest > 0 else ""
        listed = self.backend.list(VERSIONS, after=after)
        return {version for info in listed if (version := parse_version_path(info.name)) is not None}

    def _hint(self) -> int:
        """Return the version that HEAD names; 0 where it is missing or damaged."""
        try:
            raw = fetch(self.backend, HEAD_PATH, max_bytes=_MAX_HINT_BYTES)
        except (MissingObjectError, FormatError):
            return 0
        return int(raw) if _HINT.fullmatch(raw) else 0


def _last_run(found: set[int]) -> range:
    """Return the unbroken run of numbers that ends with the highest."""
    if not found:
        return range(0)
    newest = first = max(found)
    while first - 1 in found:
        first -= 1
    return range(first, newest + 1)
