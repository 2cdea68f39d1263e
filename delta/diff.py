"""Bitwise difference of weights on the CPU: which words changed, and to what.

Chunks of 256 Ki words stay in cache. numpy releases the GIL while it compares, so parameters run on threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import Words, numpy_words, words
from deltacast.delta.errors import StateError, TableError
from deltacast.delta.fingerprint import add, change_sums, words_fingerprint
from deltacast.delta.memory import WordMemory
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from deltacast.delta.threads import in_order

__all__ = ["changed_words", "dense_patch", "diff_parameter", "diff_state", "diff_words", "seed"]

_CHUNK_WORDS = 1 << 18
_DENSE_ABOVE = 15 / 16
_SAMPLE_WORDS = 4096
_SMALL_STEP = 7  # as far as a nibble of the container reaches (docs/format.md, "Values")


def changed_words(old: Words, new: Words) -> tuple[NDArray[np.int64], Words, Words]:
    """Return where two equally long flat contiguous word arrays differ, ascending, and both sides' words there.

    Compares 8 bytes at a time and looks closer only at those that differ, so a sparse change costs little more than
    reading both sides; where half of them differ, words are compared directly.
    """
    per_group = 8 // old.itemsize
    num_grouped = old.size // per_group * per_group
    found = [(np.empty(0, np.int64), old[:0], new[:0])]
    for start in range(0, num_grouped, _CHUNK_WORDS):
        part = slice(start, min(start + _CHUNK_WORDS, num_grouped))
        found.append(_changed_in_chunk(old[part], new[part], start))
    found.append(_changed_directly(old[num_grouped:], new[num_grouped:], num_grouped))
    positions, before, after = zip(*found, strict=True)
    return np.concatenate(positions), np.concatenate(before), np.concatenate(after)


def _changed_in_chunk(old: Words, new: Words, start: int) -> tuple[NDArray[np.int64], Words, Words]:
    old_groups, new_groups = old.view(np.uint64), new.view(np.uint64)
    groups = np.flatnonzero(old_groups != new_groups)
    if groups.size > old_groups.size // 2:
        return _changed_directly(old, new, start)
    shift = (8 // old.itemsize).bit_length() - 1
    before, after = old_groups.take(groups).view(old.dtype), new_groups.take(groups).view(new.dtype)
    within = np.flatnonzero(before != after)
    positions = groups.take(within >> shift)
    positions <<= shift
    positions += within & ((1 << shift) - 1)
    positions += start
    return positions, before.take(within), after.take(within)


def _changed_directly(old: Words, new: Words, start: int) -> tuple[NDArray[np.int64], Words, Words]:
    positions = np.flatnonzero(old != new)
    before, after = old.take(positions), new.take(positions)
    positions += start
    return positions, before, after


def diff_words(meta: ParamMeta, old: Words, new: Words, before: int) -> SparseWeightPatch | None:
    """Make the patch that turns `old` into `new`.

    Args:
        meta: the parameter.
        old: flat words now held, `meta.num_words` of them.
        new: flat words wanted.
        before: fingerprint of `old`.

    Returns:
        An absolute patch with base values and sums, dense if nearly every word changed; None if no bit differs.
    """
    positions, old_words, new_words = changed_words(old, new)
    step = _sample_step(meta)
    if positions.size > _DENSE_ABOVE * meta.num_words and _costs_the_whole(meta, old[::step], new[::step]):
        return SparseWeightPatch(meta, None, new.copy(), words_fingerprint(new), fingerprint_before=before)
    return _sparse(meta, positions, old_words, new_words, before)


def diff_parameter(meta: ParamMeta, old: WordMemory, new: torch.Tensor, before: int) -> SparseWeightPatch | None:
    """Make the patch from a live baseline tensor to a new tensor of the same dtype and shape, on their device.

    The patch holds host memory of its own: the new tensor may be overwritten as soon as this returns.

    Raises:
        TableError: `new` has another dtype or shape than `meta`.
    """
    if new.dtype != old.tensor.dtype or new.shape != old.tensor.shape:
        raise TableError(
            "a tensor changed its dtype or shape",
            parameter=meta.name,
            expected=f"{old.tensor.dtype}{list(old.tensor.shape)}",
            found=f"{new.dtype}{list(new.shape)}",
        )
    if old.tensor.device.type == "cpu":
        return diff_words(meta, old.read_all(), numpy_words(new, name=meta.name), before)
    return _device_diff(meta, old, new, before)


def _device_diff(meta: ParamMeta, old: WordMemory, new: torch.Tensor, before: int) -> SparseWeightPatch | None:
    """Compare on the device and bring only the changes to the host."""
    old_flat = words(old.tensor, name=meta.name)
    new_flat = words(new, name=meta.name).to(old_flat.device)
    index = torch.nonzero(old_flat != new_flat).view(-1)
    sample = torch.arange(0, meta.num_words, _sample_step(meta), device=old_flat.device)
    if index.numel() > _DENSE_ABOVE * meta.num_words and _costs_the_whole(
        meta, *(flat.index_select(0, sample).cpu().numpy().view(meta.row.numpy_word) for flat in (old_flat, new_flat))
    ):
        return dense_patch(meta, new, before=before)
    positions = index.cpu().numpy()
    old_words = old_flat.index_select(0, index).cpu().numpy().view(meta.row.numpy_word)
    new_words = new_flat.index_select(0, index).cpu().numpy().view(meta.row.numpy_word)
    return _sparse(meta, positions, old_words, new_words, before)


def _sample_step(meta: ParamMeta) -> int:
    return max(1, meta.num_words // _SAMPLE_WORDS)


def _costs_the_whole(meta: ParamMeta, old: Words, new: Words) -> bool:
    """Estimate from a sample whether coding nearly every word costs as much as sending the parameter whole.

    A bitmap and a nibble per word, and the word itself where its step is too long for a nibble (fp32 masters).
    """
    signed, bits = meta.row.signed_magnitude, 8 * meta.row.word_bytes
    steps = ordered(new, signed_magnitude=signed) - ordered(old, signed_magnitude=signed)
    steps += meta.row.numpy_word.type(_SMALL_STEP)
    exceptions = float(np.mean(steps > 2 * _SMALL_STEP))
    return 1 + 4 + exceptions * bits >= bits


def _sparse(
    meta: ParamMeta, positions: NDArray[np.int64], old: Words, new: Words, before: int
) -> SparseWeightPatch | None:
    if positions.size == 0:
        return None
    old_sum, new_sum = change_sums(positions, old, new)
    return SparseWeightPatch(
        meta,
        positions,
        new,
        add(before, new_sum - old_sum),
        base_values=old,
        old_sum=old_sum,
        fingerprint_before=before,
    )


def dense_patch(meta: ParamMeta, tensor: torch.Tensor, *, before: int | None = None) -> SparseWeightPatch:
    """Make a patch that sends a whole parameter; the patch owns its memory."""
    values = np.array(numpy_words(tensor, name=meta.name), copy=True)
    return SparseWeightPatch(meta, None, values, words_fingerprint(values), fingerprint_before=before)


def diff_state(
    base: WeightState,
    new: Iterable[tuple[ParamMeta, torch.Tensor]],
    *,
    run_id: str,
    epoch: int = 0,
    target_version: int | None = None,
    optimizer_step: int | None = None,
) -> WeightUpdate:
    """Make the update from a baseline to new weights; reads both, writes neither.

    Args:
        base: the baseline, at a known version.
        new: every parameter of the baseline's table, in table order or any other (deltacast.delta.sources.checked).
        run_id: the lineage.
        epoch: the writer's.
        target_version: the new version; base + 1 by default.
        optimizer_step: metadata.

    Raises:
        TableError: a parameter is missing, unknown, there twice, or changed its dtype or shape.
        StateError: the baseline has no version.
    """
    version = _known_version(base)
    seen: set[int] = set()

    def places() -> Iterator[tuple[int, torch.Tensor]]:
        for meta, tensor in new:
            place = base.table.index(meta.name)
            if place in seen:
                raise TableError("the new weights hold a parameter twice", parameter=meta.name)
            seen.add(place)
            yield place, tensor

    def one(pair: tuple[int, torch.Tensor]) -> SparseWeightPatch | None:
        place, tensor = pair
        return diff_parameter(base.table.metas[place], base.memories[place], tensor, int(base.fingerprints[place]))

    found = list(in_order(one, places(), base.threads))
    missing = next((meta.name for i, meta in enumerate(base.table) if i not in seen), None)
    if missing is not None:
        raise TableError("the new weights lack a parameter of the baseline", parameter=missing)
    found.sort(key=lambda patch: -1 if patch is None else base.table.index(patch.name))
    patches = tuple(patch for patch in found if patch is not None)
    fingerprints = base.fingerprints.copy()
    for patch in patches:
        fingerprints[base.table.index(patch.name)] = patch.fingerprint_after
    return WeightUpdate(
        run_id=run_id,
        epoch=epoch,
        base_version=version,
        target_version=version + 1 if target_version is None else target_version,
        base_digest=base.digest,
        target_digest=base.table.state_digest(fingerprints),
        table_digest=base.table.digest,
        patches=patches,
        optimizer_step=optimizer_step,
        aliases=base.table.aliases,
    )


def _known_version(state: WeightState) -> int:
    if state.version is None:
        raise StateError("weights without a version cannot be published", hint="Seed the state, or set its version.")
    return state.version


def seed(state: WeightState, *, run_id: str, epoch: int = 0, names: Iterable[str] | None = None) -> WeightUpdate:
    """Make a dense update that gives a worker this state's weights.

    Args:
        state: where the bits come from, at a known version.
        run_id: the lineage.
        epoch: the writer's.
        names: only these parameters (a repair: base and target are both the state's version); all by default
            (a seed: needs no base).

    Raises:
        TableError: no such parameter.
        StateError: the state has no version.
    """
    version = _known_version(state)
    places = range(len(state.table)) if names is None else sorted({state.table.index(name) for name in names})
    metas = [state.table.metas[place] for place in places]
    patches = tuple(dense_patch(meta, state.memory(meta.name).tensor) for meta in metas)
    repair = names is not None
    return WeightUpdate(
        run_id=run_id,
        epoch=epoch,
        base_version=version if repair else None,
        target_version=version,
        base_digest=state.digest if repair else None,
        target_digest=state.digest,
        table_digest=state.table.digest,
        patches=patches,
        aliases=state.table.aliases,
    )
