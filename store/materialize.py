"""Make one version a checkpoint folder on disk: a snapshot, patched, proven, and only then visible."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from deltacast.delta.apply import apply_portions
from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import Progress, digest_checkpoint
from deltacast.delta.checkpoint_files import CheckpointFiles, MappedFile, fsync_folder
from deltacast.delta.errors import (
    DeltacastError,
    FormatError,
    InputError,
    StateError,
    StoreError,
    VerificationError,
)
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.store.disk_failures import DISK_HINTS, disk_failure
from deltacast.store.log import VersionLog
from deltacast.store.plan import Plan, Step, find_plan
from deltacast.store.records import VersionRecord
from deltacast.store.replay import replay_portions
from deltacast.store.snapshots import Manifest, download_snapshot

__all__ = ["materialize"]

_LOG: Final = logging.getLogger(__name__)
_MOST_WAYS: Final = 8
"""How many ways are tried: each of them may fetch a snapshot."""


def materialize(
    log: VersionLog, version: int, out: Path, *, threads: int = 4, progress: Progress | None = None
) -> VersionRecord:
    """Write a version as a checkpoint folder that `safetensors` and `transformers` load.

    It is made beside `out` under a temporary name and renamed once the digest of every bit that was written is the
    version's. A killed process leaves `.<name>.<random>.tmp` behind, never a partial `out`. If an object is damaged or
    gone (retention may remove it meanwhile), the next best way without it is taken; a warning names the object.

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
        StoreError: no such version, nothing leads there, the store failed, or the disk under `out` did (full, for one).
        ChecksumError, FormatError: an object is damaged, and there is no way around it. Where several objects are of no
            use, the error is that of the first, and its message names them all.
        VerificationError: likewise, or the result is not the version. In every case there is no `out`.
    """
    out = out.absolute()
    if os.path.lexists(out):
        raise InputError("the output exists already", found=str(out), hint="Name a path that does not exist.")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"no folder {out.parent}")
    record = log.record(version)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        _Making(log, record, temporary, threads, progress).run()
        fsync_folder(temporary)
        temporary.rename(out)
        fsync_folder(out.parent)
    except OSError as err:
        if isinstance(err, DeltacastError) or err.errno not in DISK_HINTS:
            raise  # `progress` may have failed, for one
        raise disk_failure(err, "write", out) from err
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


class _Making:
    """The folder of one version while it is made; nobody else sees it.

    Attributes:
        unusable: name of each object that failed -> how. No plan goes by way of these.
    """

    def __init__(
        self, log: VersionLog, record: VersionRecord, folder: Path, threads: int, progress: Progress | None
    ) -> None:
        self.unusable: dict[str, DeltacastError] = {}
        self._log, self._record, self._version, self._folder = log, record, record.version, folder
        self._threads, self._progress = threads, progress

    def run(self) -> None:
        """Go the cheapest way; when an object fails, start again on the cheapest one without it."""
        for _ in range(_MOST_WAYS):
            plan, known = self._plan(), set(self.unusable)
            try:
                self._follow(plan)
            except DeltacastError as err:
                failed = self.unusable.keys() - known
                if not failed:
                    raise  # nothing that the store holds is to blame
                _LOG.warning("version %d is to be made without %s: %s", self._version, ", ".join(failed), err)
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                return
        raise self._failure()

    def _plan(self) -> Plan:
        try:
            return find_plan(self._log, None, self._version, without=self.unusable.keys())
        except StoreError as err:
            if not self.unusable:
                raise
            self._log.record(self._version)  # raises if retention has taken the version itself
            raise self._failure() from err

    def _failure(self) -> DeltacastError:
        first, *others = self.unusable.values()
        if not others:
            return first
        reasons = "; ".join(f"{path}: {err.message}" for path, err in self.unusable.items())
        return type(first)(f"no way leads around the objects that failed: {reasons}", version=self._version)

    @contextmanager
    def _blaming(self, path: str) -> Iterator[None]:
        """Note an object if what is done with it fails; what this machine refuses (`InputError`) is no fault of its."""
        try:
            yield
        except (FormatError, StateError, StoreError) as err:
            self.unusable[path] = err
            raise

    def _follow(self, plan: Plan) -> None:
        assert plan.snapshot is not None
        self._folder.mkdir()
        with self._blaming(plan.snapshot.path):
            download_snapshot(
                self._log.backend, plan.snapshot, self._folder, threads=self._threads, progress=self._progress
            )
            if not plan.updates:
                self._prove()
                return
        self._patch(plan.snapshot, plan.updates)
        self._prove()

    def _patch(self, snapshot: Manifest, steps: Iterable[Step]) -> None:
        """Apply updates to the files of a snapshot."""
        files = [MappedFile(path, shared=True) for path in CheckpointFiles(self._folder).files]
        try:
            with self._blaming(snapshot.path):
                state = _state_of(snapshot, files, self._threads)
            for step in steps:
                for update, portions in replay_portions(self._log, (step,), self.unusable, threads=self._threads):
                    with self._blaming(step.object.path):
                        _apply(state, update, portions, step)
            for mapped in files:
                mapped.flush()
        finally:
            for mapped in files:
                mapped.close()

    def _prove(self) -> None:
        """Read every bit back from the files."""
        with CheckpointSource(self._folder) as source:
            found = digest_checkpoint(source, threads=self._threads, progress=self._progress)
        if (found.table.digest, found.state_digest) != (self._record.table_digest, self._record.state_digest):
            raise VerificationError("what was written is not the version", version=self._version,
                                    expected=self._record.state_digest, found=found.state_digest)  # fmt: skip


def _state_of(snapshot: Manifest, files: Iterable[MappedFile], threads: int) -> WeightState:
    """Return a snapshot's weights over its mapped files, if they are what it says."""
    tensors = {slot.meta.name: mapped.tensor(slot) for mapped in files for slot in mapped.header.slots}
    state = WeightState(tensors, version=snapshot.version, threads=threads)
    if state.digest != snapshot.state_digest:
        raise VerificationError(f"the weights of {snapshot.path} are not what it says", version=snapshot.version,
                                expected=snapshot.state_digest, found=state.digest)  # fmt: skip
    return state


def _apply(
    state: WeightState, update: WeightUpdate, portions: Iterable[Sequence[SparseWeightPatch]], step: Step
) -> None:
    try:
        apply_portions(state, update, portions)
    except (StateError, InputError) as err:  # the container is the one that was published: the publisher was wrong
        raise VerificationError(f"{step.object.path} does not make the version that it says: {err}",
                                version=step.target.version) from err  # fmt: skip
