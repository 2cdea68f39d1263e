"""The versions of a store, as a reader finds them: from the newest back, each file proven by the one after it.

Which version is the newest is said by the listing of `versions/` alone; HEAD is a hint where to begin listing. Who
walks back follows `previous` digests, so that a file that a frozen writer made anew below the head is never followed.
What exists is what has a version file: removing versions begins with their files, oldest first. A file that is damaged
costs nothing while a newer one repeats its record; only of the newest there is no second copy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
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
_NO_LIMIT: Final = (1 << 63) - 1
_GO_ON: Final = "The versions before it can be read. docs/store.md, section 7, says how to publish this one again."


def head_hint(version: int) -> bytes:
    """Return what HEAD holds when `version` is the newest: its number and a line end."""
    return b"%d\n" % version


class VersionLog:
    """Read access to the version files of one run; keeps nothing, so it may be used from several threads.

    Args:
        backend: where the store is.
        run_id: the lineage that every record must belong to.
        key: signing key; with one, every file must be signed with it.
        highest: the newest version that is asked for, as `up_to` has it.

    Attributes:
        backend, run_id, key, highest: the same; they tell whoever reads more than the log how.
    """

    def __init__(self, backend: ObjectBackend, run_id: str, key: bytes | None, *, highest: int = _NO_LIMIT) -> None:
        self.backend = backend
        self.run_id = run_id
        self.key = key
        self.highest = highest

    def up_to(self, version: int) -> VersionLog:
        """Return the log for who wants no record above `version`: damage to the files of newer ones is passed over."""
        return VersionLog(self.backend, self.run_id, self.key, highest=version)

    def between(self, lowest: int, highest: int) -> list[VersionRecord]:
        """Return the records from `highest` down to `lowest`, or to the oldest; as `up_to` and `records`."""
        return list(self.up_to(highest).records(lowest))

    def head(self) -> VersionFile | None:
        """Read the newest version's file; None before the first version.

        Raises:
            ChecksumError, FormatError: that file is damaged, or not signed as it must be.
            StoreError: the store failed.
        """
        version = self._newest()
        while version is not None:
            try:
                return self._read_newest(version)
            except MissingObjectError:  # superseded and removed since the listing: then there is a newer one
                seen, version = version, self._newest()
                if version is None or version <= seen:
                    raise
        return None

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
            ChecksumError, FormatError: the newest version file is damaged, or so are all that repeat a record.
            StoreError: the store failed.
        """
        versions, file = self._begin(lowest)
        due = versions.stop - 1
        while file is not None:
            known = (file.record, *file.recent)
            for record in known:
                if record.version not in versions:
                    return
                if record.version <= min(due, self.highest):
                    yield record
            oldest = known[-1]
            due = oldest.version - 1
            if oldest.previous is None or due not in versions:
                return
            file = self._leading_on(known)

    def record(self, version: int) -> VersionRecord:
        """Return one version's record.

        Raises:
            StoreError: no such version; the message says which there are.
            ChecksumError, FormatError: as `records`, but for damage to the files of newer versions.
        """
        for record in self.up_to(version).records(version):
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

    def _begin(self, lowest: int) -> tuple[range, VersionFile | None]:
        """Return the versions from `lowest` on, and the newest of their files that can be used; None if there is none.

        A newest version that was superseded and removed since the listing is no failure: then there is a newer one.
        """
        versions = self._unbroken(lowest)
        while versions:
            try:
                return versions, self._newest_usable(versions)
            except MissingObjectError:
                seen, versions = versions, self._unbroken(lowest)
                if not versions or versions[-1] <= seen[-1]:
                    raise
        return versions, None

    def _newest_usable(self, versions: range) -> VersionFile | None:
        for version in reversed(versions):
            try:
                return self._read_newest(version)
            except FormatError as err:
                if version <= self.highest:
                    raise
                _LOG.warning("version %d is looked for without the file of a newer one: %s", self.highest, err)
        return None

    def _leading_on(self, known: Sequence[VersionRecord]) -> VersionFile | None:
        """Return the file that repeats or is what comes before records that are proven, newest first; None if none is.

        That is the file before the oldest record. If it is damaged, the one after it says the same, and so do others
        after that; each has the digest that the record after it was built on.
        """
        failure: FormatError | None = None
        for after in reversed(known):
            try:
                file = self.read(after.version - 1)
            except MissingObjectError:
                return None  # old versions are being removed while we read
            except FormatError as err:
                _LOG.warning("a version file is damaged, and newer ones are read in its place: %s", err)
                failure = failure or err
                continue
            if file.digest != after.previous:
                _LOG.warning("%s is not what version %d was built on: it ends the log", file.path, after.version)
                return None  # made anew by a writer that slept while the right one was removed
            if (file.record, *file.recent)[-1].version < known[-1].version:
                return file
        assert failure is not None  # the first file that is whole leads on
        raise failure

    def _read_newest(self, version: int) -> VersionFile:
        """Read a file of which no other repeats the record."""
        try:
            return self.read(version)
        except FormatError as err:
            err.hint = err.hint or _GO_ON
            raise

    def _newest(self) -> int | None:
        hint = self._hint()
        # From the hint itself on, so that a hint to nothing is seen for what it is.
        found = self._listed(hint)
        if not found and hint > 0:
            found = self._listed(0)
        return max(found, default=None)

    def _unbroken(self, lowest: int) -> range:
        versions = _last_run(self._listed(lowest))
        if versions and versions[0] > lowest:
            # A listing may miss what came while it was made. If so much stays missing, retention has removed it.
            versions = _last_run(self._listed(lowest))
        return versions

    def _listed(self, lowest: int) -> set[int]:
        """Return the versions from `lowest` on that have a file."""
        after = version_path(lowest - 1) if lowest > 0 else ""
        listed = self.backend.list(VERSIONS, after=after)
        return {version for info in listed if (version := parse_version_path(info.name)) is not None}

    def _hint(self) -> int:
        """Return the version that HEAD names; 0 where it is missing or damaged, or changes while it is read."""
        try:
            raw = fetch(self.backend, HEAD_PATH, max_bytes=_MAX_HINT_BYTES)
        except (StoreError, FormatError):  # a store that fails says so when it is asked for the listing
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
