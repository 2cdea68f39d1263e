"""Diff, apply, undo, advance and audit of groups of parameters: Triton kernels on GPUs, their torch twin anywhere else.

A chunk of many parameters goes through one launch, none waits for the device (the twin does), and equal inputs give
equal bytes on either backend. Results stay on the device: sums are 64 bits in int64, wrapping.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from deltacast.delta.errors import InputError
from deltacast.delta.kernels import twin
from deltacast.delta.kernels.arena import RawChunk, mask_bytes
from deltacast.delta.kernels.group import ParamGroup
from deltacast.delta.kernels.undo import UndoLog, faults

__all__ = [
    "Backend",
    "advance_group",
    "apply_group",
    "audit_group",
    "available",
    "diff_group",
    "gather_group",
    "undo_group",
]

Backend: TypeAlias = Literal["auto", "triton", "torch"]
"""Which implementation: `auto` takes Triton where it is available."""


def available(device: torch.device) -> bool:
    """Say whether the Triton kernels run on a device: Triton is installed and it is an NVIDIA GPU of capability 8.0 up.

    On the CPU only under Triton's own interpreter (`TRITON_INTERPRET=1`), for tests.
    """
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    return device.type == "cuda" and _cuda_runs(device)


@cache
def _cuda_runs(device: torch.device) -> bool:
    return (
        find_spec("triton") is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def diff_group(
    group: ParamGroup,
    chunk: RawChunk,
    *,
    sums: torch.Tensor,
    scratch: torch.Tensor,
    audit_baseline: bool = False,
    backend: Backend = "auto",
) -> None:
    """Find which words of a chunk's blocks differ from the baseline; reads both sides once, writes neither.

    Fills the chunk's counts and total and, from where the chunk before it ends, as many offsets and values as the
    arena has room for; nothing past it is written. If they did not fit, `sums[1]` lacks what is missing. Chunks of a
    round are diffed in their order, on one stream, and can be before the total of any of them was read.

    Args:
        group: parameters with new tensors.
        chunk: of an arena made for the group; overwritten.
        sums: int64 [3, num_params], contiguous, on the group's device; *added to*, so zero it before a round, and
            give chunks that may have to be repeated sums of their own. Row 0 gains the fingerprints of the new bits
            (of a whole parameter, once all its blocks went through), row 1 the sums of new unit * key over changed
            words, row 2 the fingerprints of the baseline's bits as they were read, only if `audit_baseline`.
            `old_sum = sums[1] - sums[0] + fingerprint of the baseline`.
        scratch: `masks(group, max_blocks)`; free again when the diff has run.
        audit_baseline: fill row 2, which costs about 2 % more time.
        backend: which implementation.

    Raises:
        InputError: no new tensors, blocks of a staged baseline that are not on the device, an arena of another
            group, or a buffer of another size, dtype or device; nothing was run.
    """
    _check_chunk(group, chunk, diff=True)
    _check_sums(group, sums, (3, group.num_params))
    needed = mask_bytes(group, chunk.num_blocks) // 4
    if scratch.dtype != torch.int32 or scratch.device != group.device or scratch.numel() < needed:
        raise InputError("unfit scratch", expected=f"int32 [{needed}] on {group.device}", found=_named(scratch))
    if chunk.num_blocks == 0 or not _triton(group, backend):
        twin.diff_blocks(group, chunk, sums, audit_baseline=audit_baseline)
        return
    from deltacast.delta.kernels import launch

    with _current(group):
        group.upload(chunk.first_block, chunk.num_blocks)
        launch.diff_blocks(group, chunk, sums, scratch, audit_baseline=audit_baseline)


def apply_group(
    group: ParamGroup,
    chunk: RawChunk,
    undo: UndoLog,
    *,
    sums: torch.Tensor,
    fault: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """Check a chunk that came from outside, and write it into the baseline: all of it or nothing.

    Checked before the first write: every count fits its block, they add up to `num_changes`, and offsets lie in
    their block and ascend strictly. If anything is wrong, the first such block is recorded in `fault` and nothing is
    written, nor is any later chunk with the same record.

    Args:
        group: what to write to; new tensors are not touched.
        chunk: of an arena made for the group, settled, its counts, offsets and values as received; read only.
        undo: logs the chunk; arena and log must stay as they are until the round is decided.
        sums: int64 [2, num_params], contiguous, on the group's device; *added to*: row 0 the sums of old unit * key
            over the changed words (to compare with the sender's), row 1 of new ones. The fingerprint moves by
            `sums[1] - sums[0]`.
        fault: `faults(group)`, one for a round. Read it once, with the sums.
        backend: which implementation.

    Raises:
        InputError: a chunk that is not settled or was logged before, blocks of a staged baseline that are not on the
            device, arena or log of another group, or a buffer of another size, dtype or device; nothing was run.
    """
    _check_chunk(group, chunk)
    _check_sums(group, sums, (2, group.num_params))
    if fault.dtype != torch.int32 or fault.shape != (2,) or fault.device != group.device:
        raise InputError("unfit fault record", expected=f"int32 [2] on {group.device}", found=_named(fault))
    triton = _triton(group, backend)
    if chunk.num_blocks == 0:
        return
    undo.add(chunk)
    if triton:
        from deltacast.delta.kernels import launch

        with _current(group):
            group.upload(chunk.first_block, chunk.num_blocks)
            launch.check_blocks(group, chunk, fault)
            launch.apply_blocks(group, chunk, undo, sums, fault)
    else:
        twin.check_blocks(group, chunk, fault)
        twin.apply_blocks(group, chunk, undo, sums, fault)


def advance_group(group: ParamGroup, chunks: Sequence[RawChunk], *, backend: Backend = "auto") -> None:
    """Write a round of our own into the baseline, all its chunks in one launch: unchecked, and never taken back.

    Args:
        group: what to write to; new tensors are not touched.
        chunks: a whole round as `diff_group` left it, settled: all blocks of the group, in chunks of one size but for
            the last, which may be smaller.
        backend: which implementation.

    Raises:
        InputError: other chunks, one that is not settled, or a baseline that is not on the device; nothing was run.
    """
    for chunk in chunks:
        _check_chunk(group, chunk)
    size = max(chunks[0].num_blocks, 1) if chunks else 1
    firsts = range(0, group.num_blocks, size)
    whole = [(number, first, min(size, group.num_blocks - first)) for number, first in enumerate(firsts)]
    if [(chunk.number, chunk.first_block, chunk.num_blocks) for chunk in chunks] != whole:
        raise InputError("not the chunks of a whole round, all of one size", found=f"{len(chunks)} chunks")
    if not chunks:
        return
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            group.upload(0, group.num_blocks)
            launch.advance_blocks(group, chunks[0].arena, size)
    else:
        for chunk in chunks:
            twin.advance_blocks(group, chunk)


def undo_group(group: ParamGroup, undo: UndoLog, chunk: RawChunk | None = None, *, backend: Backend = "auto") -> None:
    """Write back what applying a round's chunks overwrote; chunks that were at fault are passed over. May be repeated.

    Args:
        group: what to write to.
        undo: the log that `apply_group` filled; it, its arena and the chunks must be as that left them.
        chunk: one of the logged; by default all of them.
        backend: which implementation.

    Raises:
        InputError: a chunk that is not logged, blocks of a staged baseline that are not on the device (give chunk by
            chunk), or a log of another group; nothing was written.
    """
    chunks = undo.chunks if chunk is None else [chunk]
    for one in chunks:
        if one not in undo.chunks:
            raise InputError(f"chunk {one.number} is not logged")
        _check_chunk(group, one)
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            for one in chunks:
                group.upload(one.first_block, one.num_blocks)
                launch.undo_blocks(group, one, undo)
    else:
        for one in chunks:
            twin.undo_blocks(group, one, undo)


def gather_group(group: ParamGroup, chunk: RawChunk, *, backend: Backend = "auto") -> torch.Tensor:
    """Return the words that a chunk would overwrite: what its values are coded against.

    Args:
        group: whose baseline is read.
        chunk: settled, its counts and offsets checked already: ours, or decoded with their checks.
        backend: which implementation.

    Returns:
        [num_changes] words on the group's device, new memory, in the order of the current stream.

    Raises:
        InputError: a chunk that is not settled, of another group, or of blocks that are not on the device.
    """
    _check_chunk(group, chunk)
    out = torch.empty_like(chunk.values)
    if chunk.num_blocks == 0 or chunk.num_changes == 0:
        return out
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            group.upload(chunk.first_block, chunk.num_blocks)
            launch.gather_blocks(group, chunk, out, faults(group))
    else:
        twin.gather_blocks(group, chunk, out)
    return out


def audit_group(
    group: ParamGroup,
    sums: torch.Tensor,
    *,
    first_block: int = 0,
    num_blocks: int | None = None,
    backend: Backend = "auto",
) -> None:
    """Fingerprint a range of blocks of the baseline, reading them once.

    Args:
        group: the parameters.
        sums: int64 [num_params], contiguous, on the group's device; *added to*: the fingerprint of each parameter,
            once all its blocks went through.
        first_block: the group's number of the first block.
        num_blocks: how many; by default all that follow.
        backend: which implementation.

    Raises:
        InputError: no such blocks, blocks of a staged baseline that are not on the device, or sums of another size,
            dtype or device; nothing was run.
    """
    first_block, num_blocks = group.block_range(first_block, num_blocks)
    group.check_pointed(first_block, num_blocks, new=False)
    _check_sums(group, sums, (group.num_params,))
    if num_blocks == 0:
        return
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            group.upload(first_block, num_blocks)
            launch.audit_blocks(group, sums, first_block, num_blocks)
    else:
        twin.audit_blocks(group, sums, first_block, num_blocks)


def _triton(group: ParamGroup, backend: Backend) -> bool:
    if backend == "auto":
        return group.device.type == "cuda" and available(group.device)
    if backend == "triton" and not available(group.device):
        raise InputError("the Triton kernels do not run here", found=group.device, hint="Use backend='torch'.")
    return backend == "triton"


def _current(group: ParamGroup) -> AbstractContextManager[object]:
    """Triton launches on the current device and stream."""
    return torch.cuda.device(group.device) if group.device.type == "cuda" else nullcontext()


def _check_sums(group: ParamGroup, sums: torch.Tensor, shape: tuple[int, ...]) -> None:
    if sums.dtype != torch.int64 or sums.shape != shape or sums.device != group.device or not sums.is_contiguous():
        raise InputError("unfit sums", expected=f"int64 {list(shape)} on {group.device}", found=_named(sums))


def _check_chunk(group: ParamGroup, chunk: RawChunk, *, diff: bool = False) -> None:
    arena = chunk.arena
    found = (arena.counts.numel(), arena.values.dtype, arena.counts.device)
    if found != (group.num_blocks, group.torch_word, group.device):
        raise InputError(
            "a chunk of an arena made for another group",
            expected=f"{group.num_blocks} blocks of {group.torch_word} on {group.device}",
            found="{} blocks of {} on {}".format(*found),
        )
    if not diff and chunk.num_changes is None:
        raise InputError(f"chunk {chunk.number} is not settled", hint="Call Arena.settle.")
    group.check_pointed(chunk.first_block, chunk.num_blocks, new=diff)


def _named(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
