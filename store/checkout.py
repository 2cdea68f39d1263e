"""Make one version a checkpoint folder on disk: a snapshot, patched, proven, and only then visible."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from deltacast.delta.apply import Transaction
from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import Progress, digest_checkpoint
from deltacast.delta.checkpoint_files import CheckpointFiles, MappedFile, fsync_folder
from deltacast.delta.errors import InputError, MissingObjectError, StateError, VerificationError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.store.log import VersionLog
from deltacast.store.plan import Plan, Step, find_plan
from deltacast.store.records import VersionRecord
from deltacast.store.replay import replay
from deltacast.store.snapshots import download_snapshot

__all__ = ["materialize"]


def materialize(
    log: VersionLog, version: int, out: Path, *, threads: int = 4, progress: Progress | None = None
) -> VersionRecord:
    """Write a version as a checkpoint folder that `safetensors` and `transformers` load.

    It is made beside `out` under a temporary name and renamed once the digest of every bit that was written is the
    version's. A killed process leaves `.<name>.<random>.tmp` behind, never a partial `out`. If an object was removed
    meanwhile (retention), a second way is planned, once.

    Args:
        log: the store's versions.
        version: which.
        out: where; must not exist.
        threads: for downloads and scans.
        progress: told about the snapshot's bytes as they come, and about the weights' as they are proven.

    Returns:
        The version's record.

    Raises:
        InputError: `out` exists.
        FileNotFoundError: the folder that it should be in does not.
        StoreError: no such version, nothing leads there, or the store failed.
        ChecksumError, FormatError: an object is damaged; the message names it.
        VerificationError: the result is not the version. In every case there is no `out`.
    """
    out = out.absolute()
    if os.path.lexists(out):
        raise InputError("the output exists already", found=str(out), hint="Name a path that does not exist.")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no folder {out.parent}")
    record = log.record(version)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            _build(log, find_plan(log, None, version), temporary, threads, progress)
        except MissingObjectError:
            shutil.rmtree(temporary, ignore_errors=True)
            _build(log, find_plan(log, None, version), temporary, threads, progress)
        _require_version(temporary, record, threads, progress)
        fsync_folder(temporary)
        temporary.rename(out)
        fsync_folder(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


def _build(log: VersionLog, plan: Plan, folder: Path, threads: int, progress: Progress | None) -> None:
    assert plan.snapshot is not None
    folder.mkdir()
    download_snapshot(log.backend, plan.snapshot, folder, threads=threads, progress=progress)
    if plan.updates:
        _patch(log, plan, folder, threads)


def _patch(log: VersionLog, plan: Plan, folder: Path, threads: int) -> None:
    """Apply a plan's updates to the files of a folder that nobody else sees."""
    assert plan.snapshot is not None
    files = [MappedFile(path, shared=True) for path in CheckpointFiles(folder).files]
    try:
        tensors = {slot.meta.name: mapped.tensor(slot) for mapped in files for slot in mapped.header.slots}
        state = WeightState(tensors, version=plan.snapshot.version, threads=threads)
        if state.digest != plan.snapshot.state_digest:
            raise VerificationError(f"the weights of {plan.snapshot.path} are not what it says",
                                    version=plan.snapshot.version, expected=plan.snapshot.state_digest,
                                    found=state.digest)  # fmt: skip
        for step in plan.updates:
            for update in replay(log, (step,), threads=threads):
                _apply(state, update, step)
        for mapped in files:
            mapped.flush()
    finally:
        for mapped in files:
            mapped.close()


def _apply(state: WeightState, update: WeightUpdate, step: Step) -> None:
    try:
        transaction = Transaction.stage(state, update, undo=False)
        transaction.write()
        transaction.commit()
    except (StateError, InputError) as err:  # the container is the one that was published: the publisher was wrong
        raise VerificationError(f"{step.object.path} does not make the version that it says: {err}",
                                version=step.target.version) from err  # fmt: skip


def _require_version(folder: Path, record: VersionRecord, threads: int, progress: Progress | None) -> None:
    """Read every bit back from the files."""
    with CheckpointSource(folder) as source:
        found = digest_checkpoint(source, threads=threads, progress=progress)
    if (found.table.digest, found.state_digest) != (record.table_digest, record.state_digest):
        raise VerificationError("what was written is not the version", version=record.version,
                                expected=record.state_digest, found=found.state_digest)  # fmt: skip
