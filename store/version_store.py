"""The durable store of a run's versions: what a trainer publishes, and how anybody gets any of it back.

`VersionStore` is the one entry, and decides nothing itself: each method says which module does. `writer.py` publishes;
`log.py` finds versions; `plan.py`, `replay.py` and `materialize.py` get them. docs/store.md says what a reader may rely
on.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.errors import DeltacastError, InputError, MissingObjectError, ObjectExistsError, StoreError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource
from deltacast.store.anchors import Anchors, anchor_due, carried_files
from deltacast.store.backends import open_backend
from deltacast.store.fetch import fetch
from deltacast.store.folds import (
    FOLD_WIDTH,
    FoldRef,
    aligned_spans,
    fold_updates,
    list_folds,
    worth_folding,
    write_fold,
)
from deltacast.store.fsck import FsckReport, check
from deltacast.store.gc import DAY_S, GcReport, collect
from deltacast.store.log import VersionLog
from deltacast.store.materialize import materialize
from deltacast.store.names import RUN_PATH, VERSIONS
from deltacast.store.objects import ObjectBackend
from deltacast.store.plan import Plan, Step, cheapest_way, find_plan, require_snapshot_of
from deltacast.store.readers import Lease, register_reader, unregister_reader
from deltacast.store.records import MAX_RUN_FILE_BYTES, RunRecord, SnapshotRef, VersionRecord
from deltacast.store.replay import read_step, replay
from deltacast.store.sealed import check_key, is_signed
from deltacast.store.snapshots import Manifest, write_snapshot
from deltacast.store.writer import Writer, utc_now

__all__ = ["VersionStore"]

_LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")


class VersionStore:
    """One run's versions, kept in a folder or a bucket.

    Any number of processes may read, each with its own object. Of writers only one goes on: see `claim`. One object is
    for one thread at a time, except that reading methods, `fold_aligned` and `add_anchor` may be called from others
    while it publishes. Methods that change the store raise `InputError`, and change nothing, if it is signed and was
    opened without its key. Made by `create` or `open`.

    Attributes:
        backend: where the objects are.
        signing_key: with one, everything written is signed, and nothing is read that is not.
        is_signed: whether the store was made with a key. Without that key it can be read, and not changed.
        run_id: the lineage of versions.
        version_log: the version files themselves.
    """

    def __init__(self, backend: ObjectBackend, run: RunRecord, signing_key: bytes | None, *, is_signed: bool) -> None:
        self.backend = backend
        self.signing_key = signing_key
        self.is_signed = is_signed
        self.run_id = run.run_id
        self.version_log = VersionLog(backend, run.run_id, signing_key)
        self._writer = Writer(backend, run, signing_key)

    @classmethod
    def create(
        cls, where: str | os.PathLike[str] | ObjectBackend, *, run_id: str | None = None, first_version: int = 0,
        signing_key: bytes | None = None,
    ) -> Self:  # fmt: skip
        """Make an empty store.

        Args:
            where: a folder, a URL (`deltacast.store.backends.open_backend`), or a backend.
            run_id: the lineage of versions; random by default.
            first_version: the number of the first version. All later ones follow without a gap.
            signing_key: signs everything.

        Raises:
            InputError: a bad URL, run id, number or key.
            ObjectExistsError: there is a store already, or one of which only `run.json` is lost.
            StoreError: the store failed.
        """
        key = check_key(signing_key)
        run = RunRecord(secrets.token_hex(16) if run_id is None else run_id, utc_now(), first_version)
        backend = where if isinstance(where, ObjectBackend) else open_backend(where, create=True)
        _require_no_versions(backend)
        try:
            backend.create(RUN_PATH, run.to_bytes(key))
        except ObjectExistsError as err:
            raise ObjectExistsError(f"there is a store at {backend.url} already", hint="Open it.") from err
        return cls(backend, run, key, is_signed=key is not None)

    @classmethod
    def open(cls, where: str | os.PathLike[str] | ObjectBackend, *, signing_key: bytes | None = None) -> Self:
        """Open a store that is there, to read or to write.

        A store is signed or not from its first file on. Without its key a signed one is only read; with a key one that
        is not signed is refused here.

        Raises:
            InputError: a bad URL or key.
            MissingObjectError: there is no store.
            ChecksumError, FormatError: `run.json` is damaged, or not signed as it must be.
            StoreError: the store failed.
        """
        key = check_key(signing_key)
        backend = where if isinstance(where, ObjectBackend) else open_backend(where)
        try:
            raw = fetch(backend, RUN_PATH, max_bytes=MAX_RUN_FILE_BYTES)
        except MissingObjectError as err:
            raise MissingObjectError(f"there is no store at {backend.url}", hint="`deltacast store init` makes one.") \
                from err  # fmt: skip
        return cls(backend, RunRecord.from_bytes(raw, key), key, is_signed=is_signed(raw))

    def close(self) -> None:
        """Let go of connections; may be called twice."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def head(self) -> VersionRecord | None:
        """Return the newest version's record; None before the first version.

        Raises:
            ChecksumError, FormatError: its file is damaged, or not signed as it must be.
            StoreError: the store failed.
        """
        file = self.version_log.head()
        return None if file is None else file.record

    def versions(self) -> range:
        """Return the versions that there are, all in a row; takes one listing and reads nothing."""
        return self.version_log.versions()

    def record(self, version: int) -> VersionRecord:
        """Return a version's record.

        Raises:
            StoreError: there is no such version; the message says which there are.
            ChecksumError, FormatError: a version file between it and the newest is damaged.
        """
        return self.version_log.record(version)

    def log(self, limit: int | None = None) -> Iterator[VersionRecord]:
        """Yield the versions' records, newest first; at most `limit`.

        Raises:
            InputError: a negative limit.
            ChecksumError, FormatError, StoreError: as `VersionLog.records`, while it is iterated.
        """
        if limit is not None and limit < 0:
            raise InputError("a log has no fewer than 0 versions", found=limit)
        return islice(self.version_log.records(), limit)

    def follow(
        self, after: int, *, poll_s: tuple[float, float] = (0.05, 2.0), stop: threading.Event | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[VersionRecord]:  # fmt: skip
        """Yield versions above `after` in order, and wait for more.

        Args:
            after: the last version that the caller knows; -1 for none. Versions that are gone are passed over.
            poll_s: the first and the longest pause between two looks; it doubles while nothing comes.
            stop: ends it, at once.
            timeout_s: ends it when nothing has come for so long; None for never.

        Raises:
            ChecksumError, FormatError, StoreError: as `head`; call it again to go on.
        """
        stop = threading.Event() if stop is None else stop
        shortest_s, longest_s = poll_s
        if not 0 < shortest_s <= longest_s:
            raise InputError("bad pauses", expected="0 < first <= longest", found=poll_s)
        pause_s, deadline_s = shortest_s, _after(timeout_s)
        while not stop.is_set():
            found = list(self.version_log.records(after + 1))
            for record in reversed(found):
                yield record
                after = record.version
            if found:
                pause_s, deadline_s = shortest_s, _after(timeout_s)
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or stop.wait(min(pause_s, left_s)):
                return
            pause_s = min(2 * pause_s, longest_s)

    def claim(self) -> VersionRecord | None:
        """Take over the run: whoever wrote it before can publish nothing more once this has returned.

        It publishes an empty update under a higher epoch. A writer that does not claim takes over with its first
        publish.

        Returns:
            The record of the newest version, which is this writer's; None in an empty store, where nothing is
            published.

        Raises:
            FencedError: this object was fenced before, or lost too many times in a row.
            StoreError: the store failed; claim again.
        """
        self._require_key()
        return self._writer.claim()

    def publish_snapshot(
        self, source: WeightSource, *, version: int | None = None, optimizer_step: int | None = None,
        shard_bytes: int = 4 << 30, extra_files: Mapping[str, Path] | None = None, threads: int = 4,
        progress: Progress | None = None,
    ) -> VersionRecord:  # fmt: skip
        """Publish the next version whole: the first of a run, or one that no update leads to (another table).

        Readers of earlier versions fetch it whole too; to have a snapshot beside an update, see `add_anchor`.

        Args:
            source: the weights; read once.
            version: the number that it must get; None for the next one.
            optimizer_step: metadata.
            shard_bytes: as `deltacast.store.snapshots.write_snapshot`, like the arguments after it.
            extra_files: files that are kept beside the weights: config, tokenizer.
            threads: files that are written at once.
            progress: told about each parameter's bytes.

        Raises:
            InputError: `version` is not the next one, or the source breaks its contract.
            FencedError, StoreError: as `publish_update`, but it cannot be repeated: look at `head` first.
        """
        self._require_key()
        write = partial(
            self._write_snapshot, source, shard_bytes=shard_bytes, extra_files=extra_files, threads=threads,
            progress=progress,
        )  # fmt: skip
        return self._writer.publish_snapshot(write, version=version, optimizer_step=optimizer_step)

    def publish_update(self, update: WeightUpdate, *, folds: bool = True, threads: int = 1) -> VersionRecord:
        """Publish the version that an update leads to; once this returns, it is durable and every reader sees it.

        Publishing the newest version once more returns its record, so an attempt that failed can be repeated.

        Args:
            update: from the newest version to the next. Sparse patches need base values or the delta form. The epoch
                that is written is this writer's; the update's own does not count.
            folds: make the aligned folds that end here before returning. Every eighth publish takes longer for it; who
                must not wait passes False, and calls `fold_aligned` elsewhere once the version is out.
            threads: for the codec.

        Raises:
            BaseError: another run, or not based on the newest version; the message names both.
            TableError: it changes the parameter table: `publish_snapshot` publishes such a version.
            InputError: a seed, a gap in the numbers, or words of which the base's are not known.
            FencedError: another writer has taken over, and this one must stop. The version may stand, if that writer
                goes on from it.
            StoreError: the store failed; the version may have been published. Publish it again.
        """
        self._require_key()
        record = self._writer.publish_update(update, threads=threads)
        if folds:
            self.fold_aligned(record.version, threads=threads)
        return record

    def add_anchor(
        self, version: int, source: WeightSource, *, shard_bytes: int = 4 << 30,
        extra_files: Mapping[str, Path] | None = None, threads: int = 4, progress: Progress | None = None,
    ) -> SnapshotRef:  # fmt: skip
        """Add a snapshot of a version that is published, so that its readers need not begin at an older one.

        Args:
            version: which; `anchor_due` says when it is time.
            source: the weights of that version, bit by bit.
            shard_bytes: as `publish_snapshot`, like the arguments after it.
            extra_files: files beside the weights; None for those of the newest snapshot up to this version.
            threads: files that are written at once.
            progress: told about each parameter's bytes.

        Raises:
            StoreError: no such version, or the store failed. There is no anchor then, or none that is used.
            VerificationError: the source has other weights; what was written of them is never used.
        """
        self._require_key()
        record = self.record(version)
        files = carried_files(self.version_log, version) if extra_files is None else extra_files
        manifest, ref = self._write_snapshot(
            source, version, shard_bytes=shard_bytes, extra_files=files, threads=threads, progress=progress
        )
        require_snapshot_of(manifest, record)
        return ref

    def anchor_due(self, anchors: Anchors | None = None) -> bool:
        """Whether the newest version should get an anchor (`deltacast.store.anchors`).

        Raises:
            ChecksumError, FormatError, StoreError: as `head`.
        """
        return anchor_due(self.version_log, anchors or Anchors())

    def plan(self, have: int | None, want: int | None = None, *, without: Collection[str] = ()) -> Plan:
        """Find the way to a version that takes the fewest bytes: a snapshot or none, then updates and folds.

        Args:
            have: the version that the reader has; None for none.
            want: the version to get; None for the newest.
            without: names of containers and manifests that were found to be of no use.

        Raises:
            InputError: `have` is negative.
            StoreError: no such version, or nothing leads there.
            ChecksumError, FormatError: a version file on the way is damaged.
        """
        if have is not None:
            _check_base(have)

        def find(version: int) -> Plan:
            return find_plan(self.version_log.up_to(version), have, version, without=without)

        return self._newest(find) if want is None else find(want)

    def read_update(self, step: Step, *, threads: int = 1) -> WeightUpdate:
        """Read one container of a plan, proven to be what the version files say.

        Raises:
            MissingObjectError: it is gone; plan again.
            ChecksumError, FormatError, VerificationError: it is damaged, or another one; the message names it.
        """
        return read_step(self.version_log, step, threads=threads)

    def updates(self, plan: Plan, *, threads: int = 1) -> Iterator[WeightUpdate]:
        """Yield a plan's updates in order, one at a time in memory; a fold that cannot be used is done without.

        Raises:
            As `read_update`.
        """
        return replay(self.version_log.up_to(plan.want), plan.updates, threads=threads)

    def materialize(
        self, version: int | None, out: str | os.PathLike[str], *, threads: int = 4, progress: Progress | None = None
    ) -> VersionRecord:
        """Write a version (None: the newest) as a checkpoint folder, proven bit by bit, or not at all.

        Arguments and errors as `deltacast.store.materialize.materialize`.
        """

        def make(version: int) -> VersionRecord:
            return materialize(self.version_log.up_to(version), version, Path(out), threads=threads, progress=progress)

        return self._newest(make) if version is None else make(version)

    def fold(self, base: int, target: int, *, threads: int = 1) -> FoldRef:
        """Fold the updates between two versions into one object, and store it as a cache.

        Memory: the fold and one update, decoded.

        Raises:
            InputError: a negative version, there are not two updates to fold, or they do not fold.
            StoreError: no such versions, or no updates between them.
            ChecksumError, FormatError, VerificationError: an update is damaged.
        """
        self._require_key()
        _check_base(base)
        if target < base + 2:
            raise InputError(
                "a fold stands for two updates or more", expected=f"a target above {base + 1}", found=target
            )
        records = self.version_log.between(base, target)
        way = cheapest_way(records, list_folds(self.backend, base), base, target)
        if way is None:
            raise StoreError("no updates lead from one version to the other", version=target, found=f"base {base}")
        folded = fold_updates(replay(self.version_log, way.steps, threads=threads))
        return write_fold(self.backend, folded, self.signing_key, threads=threads)

    def fold_aligned(self, version: int, *, threads: int = 1) -> list[FoldRef]:
        """Make the folds of 8, 64, 512, ... updates that end at a version where it is a multiple of these.

        Only where these change few words together (`deltacast.store.folds.worth_folding`). Folds are a cache: what
        cannot be made is logged and left. Any process may call it, at any time, once the
        version is published.
        """
        made: list[FoldRef] = []
        versions = self.versions() if version % FOLD_WIDTH == 0 else range(0)
        for base, target in aligned_spans(version, versions.start):
            try:
                if not worth_folding(self.version_log.between(base + 1, target)):
                    break  # nor are wider spans
                made.append(self.fold(base, target, threads=threads))
            except DeltacastError as err:
                _LOG.warning("versions %d to %d could not be folded: %s", base, target, err)
        return made

    def gc(
        self, keep: int, *, min_age_s: float = DAY_S, dry_run: bool = False, progress: Progress | None = None
    ) -> GcReport:
        """Remove all but the newest `keep` versions and what readers need; `deltacast.store.gc.collect` says how."""
        self._require_key()
        return collect(self.version_log, keep, min_age_s=min_age_s, dry_run=dry_run, progress=progress)

    def fsck(self, *, progress: Progress | None = None) -> FsckReport:
        """Read everything, and say what is damaged and what can still be made; as `deltacast.store.fsck.check`."""
        return check(self.version_log, progress=progress)

    def register_reader(self, name: str, version: int, ttl_s: float) -> Lease:
        """Keep versions from `version` on from being removed; as `deltacast.store.readers.register_reader`."""
        self._require_key()
        return register_reader(self.backend, name, version, ttl_s, signing_key=self.signing_key)

    def unregister_reader(self, name: str) -> None:
        """End a reader's lease; as `deltacast.store.readers.unregister_reader`."""
        unregister_reader(self.backend, name)

    def _require_key(self) -> None:
        """Raise if what is about to be written could not be read by those who have the store's key."""
        if self.is_signed and self.signing_key is None:
            raise InputError("the store is signed, and only read without its key", found=self.backend.url,
                             hint="Open it with the signing key to change it.")  # fmt: skip

    def _newest(self, get: Callable[[int], T]) -> T:
        """Return what `get` makes of the newest version; of a newer one, if retention took that one meanwhile."""
        versions = self.versions()
        if not versions:
            raise StoreError("the store has no version yet")
        while True:
            newest = versions[-1]
            try:
                return get(newest)
            except StoreError:
                versions = self.versions()
                if not versions or newest in versions:
                    raise

    def _write_snapshot(
        self, source: WeightSource, version: int, *, shard_bytes: int,
        extra_files: Mapping[str, Path | bytes] | None, threads: int, progress: Progress | None,
    ) -> tuple[Manifest, SnapshotRef]:  # fmt: skip
        return write_snapshot(
            self.backend, source, run_id=self.run_id, version=version, shard_bytes=shard_bytes,
            extra_files=extra_files or {}, signing_key=self.signing_key, threads=threads, progress=progress,
        )  # fmt: skip


def _require_no_versions(backend: ObjectBackend) -> None:
    """Raise if there are versions of a run of which nothing says any more which it is."""
    if next(iter(backend.list(VERSIONS)), None) is None:
        return
    try:
        backend.stat(RUN_PATH)
    except MissingObjectError as err:
        raise ObjectExistsError(f"there is a store at {backend.url} already, and its {RUN_PATH} is lost",
                                hint="docs/store.md, section 7, says how to put it back.") from err  # fmt: skip


def _check_base(version: int) -> None:
    """Raise if nothing can begin at a number because it is no version's: -1 does not stand for none."""
    if version < 0:
        raise InputError("versions count from 0", found=version)


def _after(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s
