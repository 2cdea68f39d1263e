"""Updates between checkpoints on disk: make one from two checkpoints, and apply one to a checkpoint.

Unlike live weights, files may gain and lose parameters and change their dtypes and shapes. `diff_checkpoints` reads
both sides once, a parameter at a time; only patches accumulate. `apply_to_checkpoint` proves the base before it
writes and the result before anybody can see it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from deltacast.delta.apply import Transaction, apply_update
from deltacast.delta.bits import numpy_words
from deltacast.delta.checkpoint import CheckpointSource, CheckpointWriter
from deltacast.delta.checkpoint_digest import CheckpointDigest, Progress, digest_checkpoint
from deltacast.delta.checkpoint_files import CheckpointFiles
from deltacast.delta.diff import dense_patch, diff_words
from deltacast.delta.errors import BaseError, CorruptionError, InputError, VerificationError
from deltacast.delta.fingerprint import add, fingerprint, format_sum, words_fingerprint
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.patching import open_for_patching, patched_copy
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParameterTable, ParamMeta
from deltacast.delta.threads import in_order

__all__ = ["apply_to_checkpoint", "diff_checkpoints"]


@dataclass(frozen=True, slots=True)
class _Change:
    """What became of one name: its metas and fingerprints on both sides, and the patch between them."""

    base: ParamMeta | None
    new: ParamMeta | None
    before: int = 0
    after: int = 0
    patch: SparseWeightPatch | None = None


def diff_checkpoints(
    base: CheckpointSource,
    new: CheckpointSource,
    *,
    run_id: str,
    base_version: int = 0,
    target_version: int | None = None,
    epoch: int = 0,
    optimizer_step: int | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> WeightUpdate:
    """Make the update from one checkpoint to another.

    Parameters that are new, or whose dtype or shape changed, travel whole; those that are gone are listed as removed.

    Args:
        base: an open checkpoint; stays open.
        new: another; layout, order and `__metadata__` do not count.
        run_id: the lineage of versions.
        base_version: the version that `base` is.
        target_version: the version that `new` is; one more by default.
        epoch: the writer's.
        optimizer_step: metadata.
        threads: parameters that are compared at once.
        progress: told about each parameter's bytes, of the larger side.

    Raises:
        InputError: the versions do not go up.
    """
    target_version = base_version + 1 if target_version is None else target_version
    if base_version < 0 or target_version <= base_version:
        raise InputError("the target version must be above the base version",
                         expected=f"above {max(base_version, 0)}", found=target_version)  # fmt: skip
    in_base, in_new = ({meta.name: meta for meta in source.metas()} for source in (base, new))

    def change(name: str) -> _Change:
        return _change(base, new, in_base.get(name), in_new.get(name))

    changes: list[_Change] = []
    for one in in_order(change, [*in_new, *(name for name in in_base if name not in in_new)], threads):
        changes.append(one)
        if progress is not None:
            progress(max(meta.nbytes for meta in (one.base, one.new) if meta is not None))
    before = CheckpointDigest.of((one.base, one.before) for one in changes if one.base is not None)
    after = CheckpointDigest.of((one.new, one.after) for one in changes if one.new is not None)
    patches = [one.patch for one in changes if one.patch is not None]
    return WeightUpdate(
        run_id=run_id,
        epoch=epoch,
        base_version=base_version,
        target_version=target_version,
        base_digest=before.state_digest,
        target_digest=after.state_digest,
        table_digest=after.table.digest,
        patches=tuple(sorted(patches, key=lambda patch: patch.name.encode())),
        optimizer_step=optimizer_step,
        removed=tuple(meta.name for meta in before.table if meta.name not in in_new),
    )


def _change(
    source: CheckpointSource, target: CheckpointSource, base: ParamMeta | None, new: ParamMeta | None
) -> _Change:
    if base is None:
        assert new is not None
        patch = dense_patch(new, target.tensor(new.name))
        return _Change(base, new, after=patch.fingerprint_after, patch=patch)
    old = numpy_words(source.tensor(base.name), name=base.name)
    before = words_fingerprint(old)
    if new is None:
        return _Change(base, new, before=before)
    if new != base:
        dense = replace(dense_patch(new, target.tensor(new.name)), base_meta=base)
        return _Change(base, new, before, dense.fingerprint_after, dense)
    changed = diff_words(new, old, numpy_words(target.tensor(new.name), name=new.name), before)
    return _Change(base, new, before, before if changed is None else changed.fingerprint_after, changed)


def apply_to_checkpoint(
    update: WeightUpdate,
    base: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    *,
    force: bool = False,
    threads: int = 1,
    progress: Progress | None = None,
) -> None:
    """Apply an update to a checkpoint: a copy that appears whole and proven or not at all, or in place.

    Every bit of the base is fingerprinted and compared with the update's base digest before the first write. The
    result's changed parameters are read back from the written file and must give the target digest before it is
    renamed into place (or, in place, before the undo journal is dropped).

    An update that adds, removes or reshapes parameters makes one fresh safetensors file with the base's
    `__metadata__`; in place it needs a checkpoint of a single file, which is replaced.

    Args:
        update: from `diff_checkpoints`, an engine, a store; a seed fits any base.
        base: a safetensors file or a Hugging Face folder.
        out: where the result goes; None patches `base` in place (deltacast.delta.patching.open_for_patching).
        force: replace a file that is at `out`. A folder is never replaced.
        threads: for scans.
        progress: told about the base's bytes as they are proven.

    Raises:
        InputError: `out` exists, or a change of the table cannot be made in place.
        BaseError: the update was made for other weights; nothing was written.
        CorruptionError, VerificationError, PatchError, TableError: as `deltacast.delta.apply.Transaction`;
            `base` is what it was, and there is no `out`.
        FormatError, StateError, OSError: as `CheckpointSource`, `patched_copy` and `open_for_patching`.
    """
    base = Path(base)
    if out is None:
        if not _patched_in_place(update, base, threads):
            _rewrite(update, base, _only_file(base))
        return
    out = Path(out)
    if os.path.lexists(out) and (out.is_dir() or not force):
        hint = "A folder is never replaced: name another path." if out.is_dir() else "Name another path, or force it."
        raise InputError("the output exists already", found=str(out), hint=hint)
    with CheckpointSource(base) as source:
        found = digest_checkpoint(source, threads=threads, progress=progress)
    _require_base(update, found)
    if found.table.digest != update.table_digest:
        _rewrite(update, base, out)
        return
    with patched_copy(base, out) as tensors:
        state = WeightState(tensors, version=update.base_version, threads=threads)
        transaction = Transaction.stage(state, update, undo=False)
        transaction.write()
        _require_result(update, state)
        transaction.commit()


def _patched_in_place(update: WeightUpdate, base: Path, threads: int) -> bool:
    """Patch in place; return False, having written nothing, where the update changes the parameter table."""
    with open_for_patching(base) as patchable:
        state = WeightState(patchable.tensors, version=update.base_version, threads=threads)
        _require_base(update, CheckpointDigest(state.table, state.fingerprints))
        if state.table.digest != update.table_digest:
            return False
        transaction = Transaction.stage(state, update, undo=False)  # the journal is the undo log
        patchable.protect((patch.name, patch.indices) for patch in update.patches)
        transaction.write()
        _require_result(update, state)
        transaction.commit()
        return True


def _only_file(base: Path) -> Path:
    files = CheckpointFiles(base)
    if files.weight_map is not None:
        raise InputError("an update that changes the parameter table cannot be applied in place to a sharded folder",
                         found=str(base), hint="Write the result to a new file with -o.")  # fmt: skip
    return files.anchor


def _require_base(update: WeightUpdate, found: CheckpointDigest) -> None:
    """Raise unless a checkpoint has the bits that an update was made for, naming a parameter that has not."""
    if update.is_seed or update.base_digest == found.state_digest:
        return
    if update.target_digest == found.state_digest:
        raise BaseError("the checkpoint is at the update's target already", version=update.target_version,
                        expected=update.base_digest, found=found.state_digest)  # fmt: skip
    other = next(
        (p.name for p in update.patches if p.box is None and p.fingerprint_before is not None and (
            p.name not in found.table or found.fingerprint(p.name) != p.fingerprint_before)), None,
    )  # fmt: skip
    raise BaseError(
        "the checkpoint is not the update's base", parameter=other, version=update.base_version,
        expected=update.base_digest, found=found.state_digest,
        hint="Take the checkpoint of that version, or an update that was made for this one.",
    )  # fmt: skip


def _require_result(update: WeightUpdate, state: WeightState) -> None:
    """Read the written parameters once more; the others were scanned when `state` was made."""
    damage = state.audit({patch.name for patch in update.patches})
    if damage:
        raise CorruptionError("the file does not hold what was written", parameter=damage[0].parameter,
                              expected=format_sum(damage[0].expected), found=format_sum(damage[0].found))  # fmt: skip
    if state.digest != update.target_digest:
        raise VerificationError("the result does not have the update's target digest", version=update.target_version,
                                expected=update.target_digest, found=state.digest)  # fmt: skip


def _rewrite(update: WeightUpdate, base: Path, out: Path) -> None:
    """Write the result as one fresh file, a parameter in memory at a time."""
    patches: dict[str, list[SparseWeightPatch]] = {}
    for patch in update.patches:
        patches.setdefault(patch.name, []).append(patch)
    with CheckpointSource(base) as source:
        metas = _resulting_metas(update, source)
        with CheckpointWriter(out, metas, metadata=source.metadata) as writer:
            written: list[tuple[ParamMeta, int]] = []
            for meta in metas:
                tensor = _resulting_tensor(update, source, meta, tuple(patches.get(meta.name, ())))
                writer.write(meta.name, tensor)
                written.append((meta, fingerprint(tensor, name=meta.name)))
            found = CheckpointDigest.of(written).state_digest
            if found != update.target_digest:
                raise VerificationError("the result does not have the update's target digest", found=found,
                                        version=update.target_version, expected=update.target_digest)  # fmt: skip


def _resulting_metas(update: WeightUpdate, source: CheckpointSource) -> tuple[ParamMeta, ...]:
    kept = {} if update.is_seed else {meta.name: meta for meta in source.metas() if meta.name not in update.removed}
    kept.update({patch.name: patch.meta for patch in update.patches})
    table = ParameterTable(kept.values())
    if table.digest != update.table_digest:
        raise VerificationError("the result does not have the update's parameter table", version=update.target_version,
                                expected=update.table_digest, found=table.digest)  # fmt: skip
    return table.metas


def _resulting_tensor(
    update: WeightUpdate, source: CheckpointSource, meta: ParamMeta, patches: tuple[SparseWeightPatch, ...]
) -> torch.Tensor:
    """Return one parameter of the result: the base's own, or a copy that `apply_update` has patched and proven."""
    if not patches:
        return source.tensor(meta.name)
    fresh = update.is_seed or any(patch.base_meta is not None or patch.fingerprint_before is None for patch in patches)
    tensor = torch.zeros(meta.shape, dtype=meta.row.torch_dtype) if fresh else source.tensor(meta.name).clone()
    state = WeightState({meta.name: tensor}, version=None if fresh else update.base_version)
    after = int(state.fingerprints[0])
    for patch in patches:
        after = add(after, patch.fingerprint_after - (patch.fingerprint_before or 0))
    alone = WeightUpdate(
        run_id=update.run_id, epoch=update.epoch, base_version=state.version, target_version=update.target_version,
        base_digest=None if fresh else state.digest, table_digest=state.table.digest,
        target_digest=state.table.state_digest(np.array([after], np.uint64)),
        patches=tuple(replace(patch, base_meta=None) for patch in patches),
    )  # fmt: skip
    apply_update(state, alone)
    return tensor
