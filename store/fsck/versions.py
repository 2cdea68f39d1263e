"""Walk all version files, from the newest back, and tell what is damaged from what was removed or is stray."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from deltacast.delta.errors import FormatError
from deltacast.store.fetch import fetch
from deltacast.store.fsck.findings import Finding, Findings
from deltacast.store.log import VersionLog
from deltacast.store.names import version_path
from deltacast.store.records import MAX_VERSION_FILE_BYTES, VersionFile, VersionRecord

__all__ = ["Walk", "walk_versions"]


@dataclass(slots=True)
class Walk:
    """What the version files say.

    Attributes:
        chain: the versions that exist or should, newest first, without a gap.
        known: their records, and those of versions that were removed but are still repeated.
        repeated: what files say about earlier versions: version -> record -> the version whose file first had it.
    """

    chain: list[int] = field(default_factory=list)
    known: dict[int, VersionRecord] = field(default_factory=dict)
    repeated: dict[int, dict[VersionRecord, int]] = field(default_factory=lambda: defaultdict(dict))

    def learn(self, file: VersionFile, findings: Findings) -> None:
        """Take over a file's records. Its own is right: newer files that repeat another one are wrong."""
        version = file.record.version
        self.known[version] = file.record
        for record, other in self.repeated.pop(version, {}).items():
            if record != file.record:
                what = f"its record of version {version} is not the one in {file.path}"
                findings.damaged.append(Finding(version_path(other), other, what))
        for record in file.recent:
            self.known.setdefault(record.version, record)
            self.repeated[record.version].setdefault(record, version)


def walk_versions(log: VersionLog, listed: Collection[int], findings: Findings) -> Walk:
    """Read every version file that belongs to the newest one's past.

    Each must have the digest that the one after it was built on, and repeat the records of those before it as they
    are. A file that is whole and has another digest is a fenced writer's, which no reader follows: it is passed over.
    Where files are missing between two that are there, they are damage; below the oldest, they were removed.

    Args:
        log: the store's versions.
        listed: those that have a file.
        findings: gets what is wrong.
    """
    walk, missing = Walk(), list[int]()
    version, digest = max(listed, default=-1), None
    while version in listed or version in walk.known:
        file, is_ours = _read(log, version, digest, findings) if version in listed else (None, False)
        if is_ours:
            gone = "there is no such version file, and no reader gets past it"
            findings.damaged += [Finding(version_path(gap), gap, gone) for gap in missing]
            walk.chain += [*missing, version]
            missing.clear()
        else:
            missing.append(version)
        if file is not None:
            walk.learn(file, findings)
        record = walk.known.get(version)
        if record is not None and record.previous is None:
            break
        version, digest = version - 1, record.previous if record is not None else None
    return walk


def _read(log: VersionLog, version: int, digest: str | None, findings: Findings) -> tuple[VersionFile | None, bool]:
    """Return a version's file, if it can be used, and whether it belongs to the chain."""
    path = version_path(version)

    def read() -> VersionFile:
        raw = fetch(log.backend, path, max_bytes=MAX_VERSION_FILE_BYTES)
        findings.read(len(raw))
        file = VersionFile.from_bytes(raw, log.key, version)
        if file.record.run_id != log.run_id:
            raise FormatError(
                "a version file of another run", expected=ascii(log.run_id), found=ascii(file.record.run_id)
            )
        return file

    file = findings.attempt(path, version, read)
    if file is None:
        return None, True
    return (None, False) if digest not in (None, file.digest) else (file, True)
