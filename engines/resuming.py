"""Where a trainer begins: at its own weights, or at the newest version of its store.

A store that has a version says what the run is: whoever restarts takes its weights, number and epoch from there,
whatever weights it has itself. Its first round then publishes the difference to those.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.errors import InputError, MissingObjectError, StoreError, TableError, VerificationError
from deltacast.delta.sources import WeightSource, table_of
from deltacast.delta.table import ParameterTable, ParamMeta
from deltacast.engines.base import TrainerInitInfo
from deltacast.store.baseline import Baseline
from deltacast.store.plan import Plan
from deltacast.store.records import VersionRecord
from deltacast.store.snapshots import Manifest, download_snapshot, open_snapshot
from deltacast.store.version_store import VersionStore

__all__ = ["Beginning", "begin_run"]


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a trainer starts with.

    Attributes:
        info: what it was told, with the run id, epoch and version that hold.
        baseline: the weights of that version.
        head: its record in the store; None without a store.
    """

    info: TrainerInitInfo
    baseline: Baseline
    head: VersionRecord | None


def begin_run(info: TrainerInitInfo, source: WeightSource) -> Beginning:
    """Make the first baseline; with a store, take the run over from whoever wrote to it before.

    An empty store gets the source's weights as its first version. Of one that has versions the newest is read into the
    baseline, in bounded memory beside it: mapped if it is on this machine, else by way of a temporary folder.

    Raises:
        InputError: a run id that is not the store's, or a source that breaks its contract. The store is as it was.
        TableError: the store's weights have other parameters than the source. The store is as it was.
        FencedError: other writers take the run over again and again.
        StoreError, FormatError, VerificationError: the store failed, or its newest version cannot be made.
    """
    store = info.store
    if store is None:
        info = replace(info, run_id=info.run_id or secrets.token_hex(8))
        return Beginning(info, _baseline_of(source, info), None)
    if info.run_id not in {"", store.run_id}:
        raise InputError("the store keeps another run", expected=info.run_id, found=store.run_id,
                         hint="Open that run's store, or name no run.")  # fmt: skip
    info = replace(info, run_id=store.run_id)
    newest = store.head()
    if newest is None:
        baseline, head = _first_version(info, store, source)
    else:
        _require_table(store, newest, source)
        baseline, head = _newest_version(info, store, source)
    info = replace(info, epoch=head.epoch, version=head.version)
    return Beginning(info, baseline, head)


def _baseline_of(source: WeightSource, info: TrainerInitInfo) -> Baseline:
    return Baseline(
        source,
        run_id=info.run_id,
        epoch=info.epoch,
        version=info.version,
        placement=info.placement,
        folder=info.baseline_folder,
        threads=info.threads,
    )


def _first_version(info: TrainerInitInfo, store: VersionStore, source: WeightSource) -> tuple[Baseline, VersionRecord]:
    baseline = _baseline_of(source, info)
    kept = _Ordered(source, baseline.memory.tensor)  # and not the source, which may move
    head = store.publish_snapshot(kept, threads=info.threads)
    baseline.epoch, baseline.state.version = head.epoch, head.version
    baseline.state.mark_audited()
    return baseline, head


def _newest_version(info: TrainerInitInfo, store: VersionStore, source: WeightSource) -> tuple[Baseline, VersionRecord]:
    head = store.claim()
    if head is None:
        raise StoreError("the store had a version and has none any more", found=store.backend.url)
    info = replace(info, epoch=head.epoch)
    try:
        return _read(store, store.plan(None, head.version), info, source), head
    except MissingObjectError:  # removed by retention meanwhile
        return _read(store, store.plan(None, head.version), info, source), head


def _read(store: VersionStore, plan: Plan, info: TrainerInitInfo, source: WeightSource) -> Baseline:
    """Make the baseline of a plan: its snapshot, and what leads on from there, one update in memory at a time."""
    manifest = plan.snapshot
    assert manifest is not None  # a plan from nothing
    with ExitStack() as stack:
        kept = _opened(store, manifest, info, stack)
        baseline = _baseline_of(_Ordered(source, kept.tensor), replace(info, version=manifest.version))
    if baseline.digest != manifest.state_digest:
        raise VerificationError(f"the weights of {manifest.path} are not what it says", version=manifest.version,
                                expected=manifest.state_digest, found=baseline.digest)  # fmt: skip
    for update in store.updates(plan, threads=info.threads):
        baseline.advance(baseline.stage(update))
    return baseline


def _opened(store: VersionStore, manifest: Manifest, info: TrainerInitInfo, stack: ExitStack) -> CheckpointSource:
    if store.backend.path(manifest.path) is not None:
        return stack.enter_context(open_snapshot(store.backend, manifest))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deltacast-", dir=info.baseline_folder))
    download_snapshot(store.backend, manifest, folder, threads=info.threads)
    return stack.enter_context(CheckpointSource(folder))


def _require_table(store: VersionStore, head: VersionRecord, source: WeightSource) -> None:
    """Raise if the source has other parameters than the store; names one where its files are on this machine."""
    ours = table_of(source)
    if ours.digest == head.table_digest:
        return
    manifest = store.plan(None, head.version).snapshot
    if manifest is not None and store.backend.path(manifest.path) is not None:
        with open_snapshot(store.backend, manifest) as kept:
            ParameterTable(kept.metas()).require_equal(ours, who="the trainer's source")
    raise TableError("the trainer's source has another parameter table than the store", version=head.version,
                     expected=head.table_digest, found=ours.digest)  # fmt: skip


class _Ordered:
    """Weights that can be read by name, as a source that keeps to the trainer's order: baselines are streamed in it."""

    not_covered = ()

    def __init__(self, source: WeightSource, read: Callable[[str], torch.Tensor]) -> None:
        self.aliases: Mapping[str, str] = dict(source.aliases)
        self._metas, self._read = tuple(source.metas()), read

    def metas(self) -> Sequence[ParamMeta]:
        return self._metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._metas:
            yield meta.name, self._read(meta.name)
