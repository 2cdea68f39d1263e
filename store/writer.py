"""One writer of a run: what it publishes, in which order, and how it finds out that it has to stop.

States of a `Writer`::

    NEW --first look at the head--> OPEN --publish--> OPEN
                                     |  ^-- look again --+-- the store failed: what came of it is unknown
                                     +--> FENCED: another writer has gone on from our base, or is of a higher epoch

A version exists from the moment its file `versions/<v>.json` was created, and versions follow one another without a
gap: so of all writers that go on from one base exactly one succeeds, whatever they believe about each other. Every
object is written before the version file that names it; HEAD comes after, and may fail.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from deltacast.delta.codec import encode_update
from deltacast.delta.errors import (
    BaseError,
    FencedError,
    InputError,
    MissingObjectError,
    ObjectExistsError,
    StoreError,
    TableError,
)
from deltacast.delta.patch import WeightUpdate
from deltacast.store.fetch import ObjectRef, content_digest
from deltacast.store.log import VersionLog, head_hint
from deltacast.store.names import HEAD_PATH, VERSIONS, parse_version_path, update_path
from deltacast.store.objects import ObjectBackend
from deltacast.store.records import NUM_RECENT, RunRecord, SnapshotRef, UpdateRef, VersionFile, VersionRecord
from deltacast.store.snapshots import Manifest

__all__ = ["Writer", "utc_now"]

_LOG: Final = logging.getLogger(__name__)
_CLAIM_ATTEMPTS: Final = 8
_NONCE_BYTES: Final = 8


def utc_now() -> str:
    """Return the time for people to read: `2026-11-30T08:00:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Writer:
    """Publishes versions of one run. Not thread-safe: one publish at a time.

    Args:
        backend: where the store is.
        run: which run it is of.
        key: signs all that is written.

    Attributes:
        nonce: tells this writer's versions from another's; 16 hex digits.
    """

    def __init__(self, backend: ObjectBackend, run: RunRecord, key: bytes | None) -> None:
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self._backend = backend
        self._run = run
        self._key = key
        self._log = VersionLog(backend, run.run_id, key)
        self._epoch: int | None = None
        self._tip: VersionFile | None = None
        self._knows_tip = False
        self._fenced_by: VersionRecord | None = None

    def open(self) -> VersionFile | None:
        """Return the file that the next version follows; None before the first. Looks at the store if it must.

        Raises:
            FencedError: another writer has taken over.
            ChecksumError, FormatError, StoreError: the newest version cannot be read.
        """
        self._require_unfenced()
        if not self._knows_tip:
            tip = self._log.head()
            if self._epoch is None:
                self._epoch = 1 if tip is None else tip.record.epoch + 1
            elif tip is not None and tip.record.writer != self.nonce and tip.record.epoch >= self._epoch:
                raise self._fence(tip.record)
            self._tip, self._knows_tip = tip, True
        return self._tip

    def claim(self) -> VersionRecord | None:
        """Take over the run: publish an empty update under a higher epoch, so that every older writer stops.

        Older writers that publish meanwhile are overtaken.

        Returns:
            The newest version's record, which is this writer's. None for an empty store: it has no writer yet, and
            nothing is published.

        Raises:
            FencedError: this writer was fenced before, or lost too many times in a row.
            StoreError: the store failed; the claim may have happened, and may be made again.
        """
        self._require_unfenced()
        attempts_left = _CLAIM_ATTEMPTS
        while True:
            try:
                tip = self.open()
                if tip is None:
                    return None
                if tip.record.writer == self.nonce:
                    return tip.record
                return self.publish_update(_nothing_changed(tip.record))
            except FencedError:
                attempts_left -= 1
                if not attempts_left:
                    raise
                self._epoch, self._knows_tip, self._fenced_by = None, False, None

    def publish_update(self, update: WeightUpdate, *, threads: int = 1) -> VersionRecord:
        """Publish the version that an update leads to. Publishing the newest version once more returns its record.

        Args:
            update: from the newest version to the one after it, sparse patches with base values or as differences.
                Its epoch does not count: the writer's is written.
            threads: for the encoder.

        Raises:
            BaseError: another run, or not based on the newest version.
            TableError: it changes the parameter table.
            InputError: a seed, another number than the next one, or words without what the base has there.
            FencedError: another writer has taken over. The version may stand if that writer goes on from it.
            StoreError: the store failed; the version may have been published. Publish it again to know.
        """
        tip = self.open()
        if tip is not None and tip.record.writer == self.nonce and _leads_to(update, tip.record):
            record = self._commit(tip)  # an attempt that failed may have created the file, and not made it durable
            self._keep_object(record, self._encode(update, threads))
            return record
        head = self._require_follows(update, None if tip is None else tip.record)
        data = self._encode(update, threads)
        digest = content_digest(data)
        ref = ObjectRef(update_path(head.version, update.target_version, digest), len(data), digest)
        self._backend.write(ref.path, [data])
        record = self._publish(
            version=update.target_version, state_digest=update.target_digest, table_digest=head.table_digest,
            num_words=head.num_words, optimizer_step=update.optimizer_step,
            update=UpdateRef(ref, head.version, update.num_changed),
        )  # fmt: skip
        self._keep_object(record, data)
        return record

    def publish_snapshot(
        self,
        write: Callable[[int], tuple[Manifest, SnapshotRef]],
        *,
        version: int | None = None,
        optimizer_step: int | None = None,
    ) -> VersionRecord:
        """Publish the next version whole: the first of a run, or one that no update leads to.

        Args:
            write: called once, with the version's number; writes the snapshot.
            version: the number that it must get; None for the next one.
            optimizer_step: metadata.

        Raises:
            InputError: `version` is not the next one.
            FencedError, StoreError: as `publish_update`. And whatever `write` raises.
        """
        tip = self.open()
        following = self._run.first_version if tip is None else tip.record.version + 1
        if version not in (None, following):
            raise InputError("versions of a store follow one another without a gap", expected=following, found=version)
        manifest, ref = write(following)
        return self._publish(
            version=following, state_digest=manifest.state_digest, table_digest=manifest.table_digest,
            num_words=manifest.num_words, optimizer_step=optimizer_step, snapshot=ref,
        )  # fmt: skip

    def _encode(self, update: WeightUpdate, threads: int) -> bytes:
        assert self._epoch is not None
        own = replace(update, epoch=self._epoch)
        return encode_update(own, values="delta", signing_key=self._key, threads=threads)

    def _keep_object(self, record: VersionRecord, data: bytes) -> None:
        """Write a version's update again if it is gone: gc took it for a dead writer's while this one was held up.

        Once is enough: from the version file on the object is named, and no collection takes it.
        """
        if record.update is None:
            return
        ref = record.update.object
        try:
            self._backend.stat(ref.path)
        except MissingObjectError as err:
            if content_digest(data) != ref.digest:
                raise StoreError(f"the version is published, but {ref.path} is gone", version=record.version,
                                 expected=ref.digest, found=content_digest(data),
                                 hint="Publish the next version whole (publish_snapshot).") from err  # fmt: skip
            _LOG.warning("%s was removed while version %d was published; it is written again", ref.path, record.version)
            self._backend.write(ref.path, [data])

    def _require_follows(self, update: WeightUpdate, head: VersionRecord | None) -> VersionRecord:
        """Return the head, to which an update must apply."""
        if update.run_id != self._run.run_id:
            raise BaseError("an update of another run", version=update.target_version,
                            expected=ascii(self._run.run_id), found=ascii(update.run_id))  # fmt: skip
        if update.is_seed or head is None:
            raise InputError("the store needs a base for an update", version=update.target_version,
                             found="a seed" if update.is_seed else "an empty store",
                             hint="publish_snapshot publishes a version whole.")  # fmt: skip
        if update.base_version != head.version or update.base_digest != head.state_digest:
            raise BaseError("the update is not based on the newest version", version=update.target_version,
                            expected=f"base {head.version} {head.state_digest}",
                            found=f"base {update.base_version} {update.base_digest}")  # fmt: skip
        if update.target_version != head.version + 1:
            raise InputError("versions of a store follow one another without a gap", expected=head.version + 1,
                             found=update.target_version)  # fmt: skip
        changed = (*update.removed, *(patch.name for patch in update.patches if patch.base_meta is not None))
        if update.table_digest != head.table_digest or changed:
            raise TableError("an update that changes the parameter table", version=update.target_version,
                             parameter=changed[0] if changed else None, expected=head.table_digest,
                             found=update.table_digest,
                             hint="publish_snapshot publishes such a version whole.")  # fmt: skip
        return head

    def _publish(
        self, *, version: int, state_digest: str, table_digest: str, num_words: int, optimizer_step: int | None,
        update: UpdateRef | None = None, snapshot: SnapshotRef | None = None,
    ) -> VersionRecord:  # fmt: skip
        """Publish a version whose objects are all written."""
        assert self._epoch is not None
        tip = self._tip
        record = VersionRecord(
            run_id=self._run.run_id, epoch=self._epoch, writer=self.nonce, version=version, state_digest=state_digest,
            table_digest=table_digest, num_words=num_words, published=utc_now(), optimizer_step=optimizer_step,
            update=update, snapshot=snapshot, previous=None if tip is None else tip.digest,
        )  # fmt: skip
        return self._commit(VersionFile(record, () if tip is None else (tip.record, *tip.recent)[:NUM_RECENT]))

    def _commit(self, file: VersionFile) -> VersionRecord:
        """Make a version exist, durably; one of ours that exists already stays as it is."""
        raw, version = file.to_bytes(self._key), file.record.version
        file = replace(file, digest=content_digest(raw))
        self._knows_tip = False  # until all is well, what stands in the store is to be looked at
        self._create(file, raw)
        self._require_newest(file)
        self._tip, self._knows_tip = file, True
        try:
            self._backend.hint(HEAD_PATH, head_hint(version))
        except StoreError as err:
            _LOG.warning("version %d is published, but HEAD could not be moved to it: %s", version, err)
        return file.record

    def _create(self, file: VersionFile, raw: bytes) -> None:
        """Create a version file; twice, if the first attempt fails.

        What failed may have made the file and not made it durable: to be told by the second that there is one does.
        """
        try:
            try:
                self._backend.create(file.path, raw)
            except ObjectExistsError:
                raise
            except StoreError as err:
                _LOG.warning("version %d is created once more: %s", file.record.version, err)
                self._backend.create(file.path, raw)
        except StoreError as err:
            self._settle(file, err)

    def _settle(self, file: VersionFile, failure: StoreError) -> None:
        """Find out what came of a create that failed; return if it has made our file, durably.

        "There is one already" may well mean our own: requests are retried below us, and their answers get lost.
        """
        version = file.record.version
        try:
            found = self._log.read(version)
        except MissingObjectError:
            raise failure from None
        except StoreError as err:
            raise StoreError("whether the version was published is not known", version=version, found=failure,
                             hint="Publish it again.") from err  # fmt: skip
        if found.digest != file.digest:
            raise self._fence(found.record) from failure
        if not isinstance(failure, ObjectExistsError):
            raise StoreError("the version was published, but a power cut may undo it", version=version, found=failure,
                             hint="Publish it again.") from failure  # fmt: skip

    def _require_newest(self, file: VersionFile) -> None:
        """Raise if there are higher versions: a writer that slept may create a number anew that was removed.

        The newest version is never removed, so a number that was given away before is always below it. Our file is
        then left where it is: no reader follows it, and it must not be one that has a successor.
        """
        for info in self._backend.list(VERSIONS, after=file.path):
            version = parse_version_path(info.name)
            if version is not None:
                raise self._fence(self._log.read(version).record)

    def _fence(self, other: VersionRecord) -> FencedError:
        self._fenced_by = other
        return FencedError(
            "another writer has taken over the run", version=other.version,
            expected=f"epoch {self._epoch}, writer {self.nonce}", found=f"epoch {other.epoch}, writer {other.writer}",
            hint="Open the store anew to go on from its newest version.",
        )  # fmt: skip

    def _require_unfenced(self) -> None:
        if self._fenced_by is not None:
            raise self._fence(self._fenced_by)


def _nothing_changed(head: VersionRecord) -> WeightUpdate:
    return WeightUpdate(
        run_id=head.run_id, epoch=head.epoch, base_version=head.version, target_version=head.version + 1,
        base_digest=head.state_digest, target_digest=head.state_digest, table_digest=head.table_digest, patches=(),
        optimizer_step=head.optimizer_step,
    )  # fmt: skip


def _leads_to(update: WeightUpdate, head: VersionRecord) -> bool:
    return (
        update.base_version == head.version - 1
        and update.target_version == head.version
        and update.target_digest == head.state_digest
        and update.run_id == head.run_id
    )
