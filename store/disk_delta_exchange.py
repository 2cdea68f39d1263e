"""Bring a range of a store's versions into the layout of SGLang and slime, and such a folder into a store.

Both ways keep one version's weights in a scratch folder, mapped, and patch them there: memory goes with the changes,
not with the model. What is kept and what is lost: docs/disk_delta.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.apply import apply_update
from deltacast.delta.bits import Words
from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_files import CheckpointFiles, MappedFile
from deltacast.delta.diff import changed_words, diff_state, diff_words
from deltacast.delta.errors import BaseError, InputError, VerificationError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.sources import checked, table_of
from deltacast.delta.state import WeightState
from deltacast.store.disk_delta import (
    Change,
    DeltaEncoding,
    DeltaIndex,
    read_delta,
    read_index,
    version_folder,
    write_delta,
)
from deltacast.store.plan import Step
from deltacast.store.records import VersionRecord
from deltacast.store.snapshots import extra_files_of
from deltacast.store.version_store import VersionStore

__all__ = ["Exchanged", "export_versions", "import_versions"]

_BASE: Final = 0
"""The version that an engine's own checkpoint is."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One version that was exported or imported.

    Attributes:
        version: its number, the same on both sides.
        kind: whether the folder holds it whole, or a delta against the version before.
        num_bytes: of the folder's files.
        state_digest: of the version.
    """

    version: int
    kind: Literal["full", "delta"]
    num_bytes: int
    state_digest: str


def export_versions(
    store: VersionStore,
    root: Path,
    *,
    first: int,
    last: int | None = None,
    encoding: DeltaEncoding = "xor",
    threads: int = 1,
) -> Iterator[Exchanged]:
    """Write a range of versions as folders: the first whole, each later one as a delta where it is an update.

    Needs room for one more copy of the weights beside the folders while it runs. What a failure leaves are whole
    folders of the versions before it.

    Args:
        store: read only.
        root: the folder that trainer and engines share; made if it is not there.
        first: the first version. Engines never look for a folder of version 0: it is what they are started with.
        last: the last one; the head by default.
        encoding: of the deltas.
        threads: parameters that are worked on at once.

    Yields:
        Each version, once its folder is there.

    Raises:
        InputError: a version's folder is there already, the store does not have these versions, or a parameter is
            too large for `overwrite`.
        StoreError: the store failed, or lacks something of a version.
        FormatError, StateError: something of the store is damaged.
    """
    records = _records(store, first, last)
    for record in records:
        if version_folder(root, record.version).exists():
            raise InputError("the version folder is there already", version=record.version,
                             found=str(version_folder(root, record.version)))  # fmt: skip
    root.mkdir(exist_ok=True)
    for chain in _chains(records):
        whole, folder = chain[0], version_folder(root, chain[0].version)
        store.materialize(whole.version, folder, threads=threads)
        yield Exchanged(whole.version, "full", _folder_bytes(folder), whole.state_digest)
        if len(chain) > 1:
            yield from _export_deltas(store, folder, chain, encoding=encoding, threads=threads)


def _records(store: VersionStore, first: int, last: int | None) -> list[VersionRecord]:
    versions = store.versions()
    last = versions.stop - 1 if last is None else last
    if first > last or first not in versions or last not in versions:
        there = f"versions {versions[0]} to {versions[-1]}" if versions else "no version"
        raise InputError("no such range of versions", expected=there, found=f"{first} to {last}")
    return store.version_log.between(first, last)[::-1]


def _chains(records: Iterable[VersionRecord]) -> list[list[VersionRecord]]:
    """Cut versions into chains: one that goes whole, and those that are deltas on top of it."""
    chains: list[list[VersionRecord]] = []
    for record in records:
        if chains and record.update is not None:  # updates keep the parameter table
            chains[-1].append(record)
        else:
            chains.append([record])
    return chains


def _export_deltas(
    store: VersionStore, base: Path, records: list[VersionRecord], *, encoding: DeltaEncoding, threads: int
) -> Iterator[Exchanged]:
    root = base.parent
    with TemporaryDirectory(prefix=".deltacast-", dir=root) as scratch:
        weights = shutil.copytree(base, Path(scratch) / "weights")
        with _mapped(weights, records[0].version, threads) as state:
            for before, record in pairwise(records):
                assert record.update is not None  # or it would not be in a chain
                update = store.read_update(Step(record.update.object, before, record), threads=threads)
                changes = _applied(state, update)
                index = DeltaIndex(record.version, before.version, encoding, state_digest=record.state_digest)
                num_bytes = write_delta(root, index, changes, threads=threads)
                yield Exchanged(record.version, "delta", num_bytes, record.state_digest)


def _applied(state: WeightState, update: WeightUpdate) -> list[Change]:
    """Apply an update, proven, and return what it changed: each parameter once, bits that stayed left out."""
    before = {patch.name: _overwritten(state, patch) for patch in update.patches}
    apply_update(state, update)
    changes: list[Change] = []
    for name, (positions, old) in before.items():
        whole = state.memory(name).read_all()
        found = changed_words(old, whole) if positions is None else (positions, old, whole[positions])
        change = Change(state.table[name], *found, whole)
        if change.positions.size:
            changes.append(change)
    return changes


def _overwritten(state: WeightState, patch: SparseWeightPatch) -> tuple[NDArray[np.int64] | None, Words]:
    """Return where a patch is about to write and what is there; for one that sends all or a part, all there is."""
    memory = state.memory(patch.name)
    if patch.indices is not None and patch.box is None:
        return patch.indices, memory.read(patch.indices)
    return None, np.array(memory.read_all(), copy=True)


def import_versions(
    store: VersionStore,
    root: Path,
    *,
    base: Path | None = None,
    last: int | None = None,
    threads: int = 1,
) -> Iterator[Exchanged]:
    """Publish the versions of such a folder that come after a store's head, under the same numbers.

    An empty store begins with `base` as version 0, or without one with the lowest version there is, which must be a
    full one. Deltas become updates; so do full versions of the same parameter table, whatever their size. Can be
    called again when there are new folders. Needs room for one copy of the weights in the folder for temporary files.

    Args:
        store: its claim is the caller's business.
        root: the folder; only read.
        base: the checkpoint that the engines were started with; only for an empty store.
        last: the last version to take; up to the first gap by default.
        threads: parameters that are worked on at once.

    Yields:
        Each version, once it is published.

    Raises:
        FileNotFoundError: there is no such folder.
        InputError: a base for a store that has versions, or nothing to begin with.
        BaseError: a delta that is not for the version before it.
        FormatError, TableError: a folder is damaged, or does not fit. Versions before it were published, it was not.
        VerificationError: a folder of ours does not give the state digest that it states.
        StoreError, FencedError: as `VersionStore.publish_update`.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}")
    if store.head() is None:
        yield _import_first(store, root, base, threads)
    elif base is not None:
        raise InputError("the store has versions already", found=f"base {base}", hint="Leave the base out.")
    while _next_folder(store, root, last) is not None:
        with TemporaryDirectory(prefix="deltacast-") as scratch:
            weights = Path(scratch) / "weights"
            head = store.materialize(None, weights, threads=threads)
            with _mapped(weights, head.version, threads) as state:
                for imported in _import_onto(store, root, state, last):
                    if store.anchor_due():
                        _anchor(store, imported.version, weights, threads)
                    yield imported


def _import_first(store: VersionStore, root: Path, base: Path | None, threads: int) -> Exchanged:
    if base is not None:
        folder, version = base, _BASE
    else:
        prefix = version_folder(root, 0).name[:-6]
        numbers = (path.name.removeprefix(prefix) for path in root.glob(f"{prefix}*") if path.is_dir())
        versions = [int(number) for number in numbers if number.isascii() and number.isdecimal()]
        if not versions or read_index(version_folder(root, min(versions))) is not None:
            raise InputError("no full version to begin with", found=str(root),
                             hint="Pass the checkpoint that the engines were started with as the base.")  # fmt: skip
        version = min(versions)
        folder = version_folder(root, version)
    with CheckpointSource(folder) as source:
        record = store.publish_snapshot(source, version=version, extra_files=_extra_files(folder), threads=threads)
    return Exchanged(version, "full", _folder_bytes(folder), record.state_digest)


def _import_onto(store: VersionStore, root: Path, state: WeightState, last: int | None) -> Iterator[Exchanged]:
    """Publish one version after the other on top of the head; returns after one of another parameter table."""
    while (folder := _next_folder(store, root, last)) is not None:
        index = read_index(folder)
        if index is None:
            with CheckpointSource(folder) as source:
                if table_of(source) != state.table:
                    extra_files = _extra_files(folder)
                    record = store.publish_snapshot(source, extra_files=extra_files, threads=state.threads)
                    yield Exchanged(record.version, "full", _folder_bytes(folder), record.state_digest)
                    return
                update = diff_state(state, checked(source), run_id=store.run_id)
        else:
            update = _update_of(folder, index, state, store.run_id)
        store.publish_update(update, threads=state.threads)
        apply_update(state, update)
        kind: Literal["full", "delta"] = "full" if index is None else "delta"
        yield Exchanged(update.target_version, kind, _folder_bytes(folder), update.target_digest)


def _update_of(folder: Path, index: DeltaIndex, state: WeightState, run_id: str) -> WeightUpdate:
    """Make the update that a delta folder is; nothing is written."""
    assert state.version is not None
    version = state.version + 1
    if (index.base_version, index.version) != (state.version, version):
        raise BaseError("a delta for other versions than its folder", version=version, found=f"{index.base_version} -> "
                        f"{index.version}", expected=f"{state.version} -> {version}")  # fmt: skip
    patches: list[SparseWeightPatch] = []
    after = state.fingerprints.copy()
    for name, words in read_delta(folder, index, lambda name: state.memory(name).read_all(), threads=state.threads):
        place = state.table.index(name)
        patch = diff_words(state.table.metas[place], state.memory(name).read_all(), words, int(after[place]))
        if patch is not None:
            patches.append(patch)
            after[place] = patch.fingerprint_after
    digest = state.table.state_digest(after)
    if index.state_digest not in (None, digest):
        raise VerificationError("a delta does not give the state digest that it states", version=version,
                                expected=index.state_digest, found=digest)  # fmt: skip
    return WeightUpdate(
        run_id=run_id, epoch=0, base_version=state.version, target_version=version, base_digest=state.digest,
        target_digest=digest, table_digest=state.table.digest,
        patches=tuple(sorted(patches, key=lambda patch: patch.name.encode())),
    )  # fmt: skip


def _anchor(store: VersionStore, version: int, weights: Path, threads: int) -> None:
    with CheckpointSource(weights) as source:
        store.add_anchor(version, source, extra_files=_extra_files(weights), threads=threads)


def _extra_files(checkpoint: Path) -> Mapping[str, Path]:
    return extra_files_of(checkpoint) if checkpoint.is_dir() else {}


def _next_folder(store: VersionStore, root: Path, last: int | None) -> Path | None:
    version = store.versions().stop
    folder = version_folder(root, version)
    return folder if folder.is_dir() and (last is None or version <= last) else None


@contextmanager
def _mapped(folder: Path, version: int, threads: int) -> Generator[WeightState]:
    """Map a scratch checkpoint for writing: nothing that anybody needs is lost if this dies half-way."""
    files: list[MappedFile] = []
    try:
        files.extend(MappedFile(path, shared=True) for path in CheckpointFiles(folder).files)
        tensors = {slot.meta.name: mapped.tensor(slot) for mapped in files for slot in mapped.header.slots}
        yield WeightState(tensors, version=version, threads=threads)
    finally:
        for mapped in files:
            mapped.close()


def _folder_bytes(checkpoint: Path) -> int:
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files if file.is_file())
