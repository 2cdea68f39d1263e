"""Read everything that a store holds, and say what is damaged and what can still be made of the rest.

Nothing is taken on the word of what names it: version files are walked from the newest back by digest, containers are
decoded, snapshots fingerprinted. One object is held in memory at a time, of a snapshot's file a few MiB, and of each
version its record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from itertools import count, takewhile

from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.errors import DeltacastError, FormatError, MissingObjectError, VerificationError
from deltacast.store.fetch import fetch
from deltacast.store.folds import list_folds
from deltacast.store.fsck.findings import Damage, Finding, Findings, FsckReport
from deltacast.store.fsck.snapshots import check_snapshot
from deltacast.store.fsck.versions import walk_versions
from deltacast.store.log import VersionLog, head_hint
from deltacast.store.names import HEAD_PATH, MANIFEST_NAME, RUN_PATH, VERSIONS, parse_version_path, version_path
from deltacast.store.objects import ObjectBackend
from deltacast.store.plan import Step, require_snapshot_of
from deltacast.store.readers import list_leases
from deltacast.store.records import MAX_RUN_FILE_BYTES, MAX_VERSION_FILE_BYTES, RunRecord, VersionFile, VersionRecord
from deltacast.store.replay import read_step
from deltacast.store.snapshots import list_snapshots, read_manifest

__all__ = ["check", "find_log"]


def find_log(backend: ObjectBackend, key: bytes | None) -> VersionLog:
    """Return the versions of a store, also of one whose `run.json` is lost: then its newest version says of which run.

    Args:
        backend: where the store is.
        key: signing key; with one, only what is signed with it counts.

    Raises:
        MissingObjectError: there is no `run.json`, and no version file that can be read.
        ChecksumError, FormatError: `run.json` is damaged, and no version file can be read.
        StoreError: the store failed.
    """
    try:
        raw = fetch(backend, RUN_PATH, max_bytes=MAX_RUN_FILE_BYTES)
        return VersionLog(backend, RunRecord.from_bytes(raw, key).run_id, key)
    except (FormatError, MissingObjectError):
        found = (parse_version_path(info.name) for info in backend.list(VERSIONS))
        for version in sorted((version for version in found if version is not None), reverse=True):
            with suppress(FormatError, MissingObjectError):
                raw = fetch(backend, version_path(version), max_bytes=MAX_VERSION_FILE_BYTES)
                return VersionLog(backend, VersionFile.from_bytes(raw, key, version).record.run_id, key)
        raise


def check(log: VersionLog, *, progress: Progress | None = None) -> FsckReport:
    """Read a whole store and check every byte of it against what names it.

    Only reads; needs no right to write. A writer may go on meanwhile. If retention removes versions meanwhile, and
    something seemed damaged or lost, everything is read once more.

    Args:
        log: the store's versions.
        progress: told about bytes as they are read.

    Raises:
        StoreError: the store cannot be listed. An object that cannot be read is damage, and no error.
    """
    while True:
        first = log.versions().start
        report = _Check(log, progress).report()
        if not (report.damaged or report.lost) or log.versions().start == first:
            return report


class _Check:
    """One reading of a store.

    Attributes:
        findings: what is wrong.
        walk: what the version files say.
        named: objects that something names.
        bases: version -> the versions from which a sound step leads to it; None stands for a sound snapshot of it.
    """

    def __init__(self, log: VersionLog, progress: Progress | None) -> None:
        self.log, self.findings = log, Findings(progress)
        self.named = {RUN_PATH, HEAD_PATH}
        self.bases: dict[int, set[int | None]] = defaultdict(set)
        hint = self.findings.attempt(HEAD_PATH, None, self._hint)  # before the listing: HEAD follows the version files
        self.listed = [info.name for info in log.backend.list("")]
        versions = {version for name in self.listed if (version := parse_version_path(name)) is not None}
        newest = max(versions, default=-1)
        if hint is not None and hint > newest:
            what = "it names a version that has no file"
            self.findings.damaged.append(Finding(HEAD_PATH, None, what, f"at most {newest}", str(hint)))
        self.walk = walk_versions(log, versions, self.findings)
        self.named |= {version_path(version) for version in self.walk.chain}

    def report(self) -> FsckReport:
        """Check everything that the versions need, and say what follows."""
        self.findings.attempt(RUN_PATH, None, self._run_record)
        for version in reversed(self.walk.chain):
            self._check_version(version)
        self._check_folds()
        for version, path in list_snapshots(self.log.backend):
            self._check_snapshot(version, path)
        self._check_leases()
        in_reach = self._in_reach()
        made = self._made(in_reach)
        chain = sorted(self.walk.chain)
        lost = dict.fromkeys(version for version in chain if version not in made)  # ordered, and quick to ask
        return FsckReport(
            damaged=tuple(self._damage(finding, lost, in_reach) for finding in self.findings.damaged),
            stray=tuple(name for name in self.listed if name not in self.named),
            materialisable=tuple(version for version in chain if version in made),
            lost=tuple(lost),
        )

    def _hint(self) -> int:
        """Return the version that HEAD names; -1 if there is no HEAD, or the empty one that a power cut leaves."""
        try:
            raw = fetch(self.log.backend, HEAD_PATH, max_bytes=len(head_hint(0)) + 18)
        except MissingObjectError:
            raw = b""
        if not raw:
            return -1
        digits = raw.rstrip()
        if not digits.isdigit() or raw != head_hint(int(digits)):
            raise FormatError("it does not name a version", found=ascii(raw))
        return int(digits)

    def _run_record(self) -> RunRecord:
        raw = fetch(self.log.backend, RUN_PATH, max_bytes=MAX_RUN_FILE_BYTES)
        run = RunRecord.from_bytes(raw, self.log.key)
        if run.run_id != self.log.run_id:
            raise VerificationError("it is of another run", expected=ascii(self.log.run_id), found=ascii(run.run_id))
        return run

    def _check_version(self, version: int) -> None:
        """Check what a version's own record names."""
        record, base = self.walk.known.get(version), self.walk.known.get(version - 1)
        if record is None:
            return
        if record.update is not None and base is not None:
            self._check_step(Step(record.update.object, base, record), version)
        if record.snapshot is not None and record.snapshot.path not in self.listed:
            self.findings.damaged.append(Finding(record.snapshot.path, version, "there is no such manifest"))

    def _check_step(self, step: Step, version: int | None) -> None:
        path = step.object.path
        self.named.add(path)
        self.findings.read(step.object.num_bytes)
        if self.findings.attempt(path, version, partial(read_step, self.log, step)) is not None:
            self.bases[step.target.version].add(step.base.version)

    def _check_folds(self) -> None:
        """Check the folds between versions that there are; no version needs one."""
        records = {version: self.walk.known[version] for version in self.walk.chain if version in self.walk.known}
        for fold in list_folds(self.log.backend):
            base, target = records.get(fold.base_version), records.get(fold.target_version)
            if base is not None and target is not None:
                self._check_step(Step(fold.object, base, target), None)

    def _check_snapshot(self, version: int, path: str) -> None:
        """Check a snapshot of a version that there is.

        One that says of itself that it holds other weights is no damage: a source that was not what it was said to
        be left it, and no reader uses it.
        """
        record = self.walk.known.get(version)
        if record is None or version not in self.walk.chain:
            return
        digest = record.snapshot.digest if record.snapshot is not None and record.snapshot.path == path else None
        read = partial(read_manifest, self.log.backend, path, self.log.key, digest=digest)
        manifest = self.findings.attempt(path, version, read)
        if manifest is None:
            folder = path.removesuffix(MANIFEST_NAME)
            self.named |= {name for name in self.listed if name.startswith(folder)}
            return
        try:
            require_snapshot_of(manifest, record)
        except VerificationError as err:
            if digest is not None:
                self.findings.add(path, version, err)
            return
        self.named |= {path, *map(manifest.object_name, manifest.files)}
        if check_snapshot(self.log.backend, manifest, self.findings):
            self.bases[version].add(None)

    def _check_leases(self) -> None:
        for lease in list_leases(self.log.backend, signing_key=self.log.key):
            self.named.add(lease.path)
            if lease.name is None:
                what = "a lease that cannot be read: it keeps every version until it ends"
                self.findings.damaged.append(Finding(lease.path, None, what))

    def _in_reach(self) -> set[int]:
        """Return the versions that a reader finds who walks back from the newest as far as version files let it."""
        found: set[int] = set()
        for version in self.walk.chain:  # damage to the newest files keeps nobody from the versions before them
            with suppress(DeltacastError):
                found.update(record.version for record in self.log.up_to(version).records())
            if found:
                break
        return found.intersection(self.walk.chain)

    def _made(self, in_reach: set[int]) -> set[int]:
        """Return the versions to which sound steps lead from a sound snapshot."""
        made: set[int | None] = {None}
        for version in sorted(in_reach):
            if not made.isdisjoint(self.bases[version]):
                made.add(version)
        return {version for version in made if version is not None}

    def _damage(self, finding: Finding, lost: Collection[int], in_reach: Collection[int]) -> Damage:
        """Say what damage costs: the versions that a version file hides, or those from the damaged object's on."""
        versions: Iterable[int] = ()
        record: VersionRecord | None = None
        if finding.version is not None and parse_version_path(finding.path) is not None:
            versions = (version for version in lost if version <= finding.version and version not in in_reach)
            record = self.walk.known.get(finding.version)
        elif finding.version is not None:
            versions = takewhile(lost.__contains__, count(finding.version))
        return Damage(finding.path, finding.what, finding.expected, finding.found, tuple(versions), record)
