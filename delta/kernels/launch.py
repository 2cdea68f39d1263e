"""Launching the Triton programs: grids, tile sizes and registers, measured on an H200 (benchmarks/kernels.py)."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from deltacast.delta.kernels import apply_programs, emit_programs, scan_programs
from deltacast.delta.kernels.arena import COUNTS_PER_SUM, Arena, RawChunk
from deltacast.delta.kernels.group import ParamGroup
from deltacast.delta.kernels.language import tl
from deltacast.delta.kernels.undo import UndoLog

__all__ = [
    "advance_blocks",
    "apply_blocks",
    "audit_blocks",
    "check_blocks",
    "diff_blocks",
    "gather_blocks",
    "undo_blocks",
]

_EMIT_OPTIONS: Final = {"lanes": 256, "tile": 1024, "num_warps": 8}
_CHECK_OPTIONS: Final = {"tile": 512, "num_warps": 2}
_AUDIT_ROWS: Final = {1: 1, 2: 2, 4: 8, 8: 8}
_APPLY_OPTIONS: Final = {"tile": 2048, "num_warps": 8}
_FIRST_LAUNCH: Final = threading.Lock()
_LAUNCHED: Final[set[tuple[object, ...]]] = set()


def _launch(program: Any, grid: tuple[int], *arguments: Any, **constants: Any) -> None:
    """Launch a program on the current device; at first, when Triton compiles it, nothing else is launched meanwhile.

    Triton lets a thread launch what another one has compiled, but not loaded yet.
    """
    variant = (program, torch.cuda.current_device(), *constants.items())
    if variant in _LAUNCHED:
        program[grid](*arguments, **constants)
        return
    with _FIRST_LAUNCH:
        program[grid](*arguments, **constants)
        _LAUNCHED.add(variant)


def _word(group: ParamGroup) -> dict[str, Any]:
    types = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
    return {"word": types[group.word_bytes], "word_bytes": group.word_bytes}


def _scan_options(group: ParamGroup, *, audit: bool) -> dict[str, Any]:
    """Rows of a tile and registers of a thread: as many reads in flight as fit (ptxas would start fewer threads)."""
    small = audit and group.word_bytes > 1
    return {"rows": 2 if small else 4, "num_warps": 4, "maxnreg": 72 if small else 96}


def diff_blocks(
    group: ParamGroup, chunk: RawChunk, sums: torch.Tensor, scratch: torch.Tensor, *, audit_baseline: bool
) -> None:
    """Diff the chunk's blocks; see `operations.diff_group`."""
    arena, keys, blocks = chunk.arena, group.keys, group.table.blocks
    word, options = _word(group), _scan_options(group, audit=audit_baseline)
    chunk.count_sums.zero_()
    _launch(
        scan_programs.compare_program, (chunk.num_blocks,),
        blocks, keys.inner, keys.outer, scratch, chunk.counts, chunk.count_sums, sums,
        chunk.first_block, group.num_params, audit=audit_baseline, **word, **options,
    )  # fmt: skip
    _launch(
        emit_programs.emit_program, (chunk.num_blocks,),
        blocks, keys.inner, keys.outer, scratch, chunk.counts, chunk.count_sums, arena.offsets, arena.values,
        arena.starts, arena.totals, sums, chunk.number, chunk.first_block, chunk.num_blocks, group.num_params,
        arena.capacity, rows=options["rows"], **word, **_EMIT_OPTIONS,
    )  # fmt: skip


def check_blocks(group: ParamGroup, chunk: RawChunk, fault: torch.Tensor) -> None:
    """Check counts and offsets of a chunk; see `operations.apply_group`."""
    blocks, place = group.table.blocks, (chunk.first_block, chunk.num_blocks)
    _launch(
        apply_programs.count_program, (-(-chunk.num_blocks // COUNTS_PER_SUM),),
        blocks, chunk.counts, chunk.count_sums, fault, *place,
    )  # fmt: skip
    _launch(
        apply_programs.check_program, (chunk.num_blocks,),
        blocks, chunk.counts, chunk.count_sums, chunk.offsets, fault, *place, chunk.num_changes, **_CHECK_OPTIONS,
    )  # fmt: skip


def apply_blocks(group: ParamGroup, chunk: RawChunk, undo: UndoLog, sums: torch.Tensor, fault: torch.Tensor) -> None:
    """Write a checked chunk; see `operations.apply_group`."""
    old, applied = _log_of(chunk, undo)
    _launch(
        apply_programs.apply_program, (chunk.num_blocks,),
        group.table.blocks, group.keys.inner, group.keys.outer, chunk.counts, chunk.count_sums, chunk.offsets,
        chunk.values, old, sums, fault, applied, chunk.first_block, group.num_params,
        **_APPLY_OPTIONS, **_word(group),
    )  # fmt: skip


def advance_blocks(group: ParamGroup, arena: Arena, chunk_blocks: int) -> None:
    """Write a round's changes; see `operations.advance_group`."""
    _launch(
        apply_programs.advance_program, (group.num_blocks,),
        group.table.blocks, arena.counts, arena.count_sums, arena.starts, arena.offsets, arena.values, chunk_blocks,
        arena.count_sums.shape[1], word=_word(group)["word"], **_APPLY_OPTIONS,
    )  # fmt: skip


def undo_blocks(group: ParamGroup, chunk: RawChunk, undo: UndoLog) -> None:
    """Write back what applying the chunk overwrote; see `operations.undo_group`."""
    _launch(
        apply_programs.undo_program, (chunk.num_blocks,),
        group.table.blocks, chunk.counts, chunk.count_sums, chunk.offsets, *_log_of(chunk, undo), chunk.first_block,
        word=_word(group)["word"], **_APPLY_OPTIONS,
    )  # fmt: skip


def gather_blocks(group: ParamGroup, chunk: RawChunk, out: torch.Tensor, fault: torch.Tensor) -> None:
    """Copy the words that a trusted chunk would overwrite; see `operations.gather_group`."""
    blocks = group.table.blocks
    _launch(
        apply_programs.count_program, (-(-chunk.num_blocks // COUNTS_PER_SUM),),
        blocks, chunk.counts, chunk.count_sums, fault, chunk.first_block, chunk.num_blocks,
    )  # fmt: skip
    _launch(
        apply_programs.gather_program, (chunk.num_blocks,),
        blocks, chunk.counts, chunk.count_sums, chunk.offsets, out, chunk.first_block,
        word=_word(group)["word"], **_APPLY_OPTIONS,
    )  # fmt: skip


def _log_of(chunk: RawChunk, undo: UndoLog) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a chunk's old words and its flag."""
    return undo.values[chunk.place], undo.applied[chunk.number :]


def audit_blocks(group: ParamGroup, sums: torch.Tensor, first_block: int, num_blocks: int) -> None:
    """Fingerprint blocks of the baseline; see `operations.audit_group`."""
    _launch(
        scan_programs.audit_program, (num_blocks,),
        group.table.blocks, group.keys.inner, group.keys.outer, sums, first_block,
        rows=_AUDIT_ROWS[group.word_bytes], num_warps=4, **_word(group),
    )  # fmt: skip
