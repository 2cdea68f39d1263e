"""Diff, apply, undo and audit of groups of parameters: Triton kernels on GPUs, their torch twin anywhere else.

All parameters of a group go through one launch each, none of them waits for the device (the twin does), and equal
inputs give equal bytes on either backend. Results stay on the device: sums are 64 bits in int64, wrapping.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from deltacast.delta.errors import InputError
from deltacast.delta.kernels import twin
from deltacast.delta.kernels.chunk import RawChunk, UndoLog
from deltacast.delta.kernels.group import ParamGroup

__all__ = ["Backend", "apply_group", "audit_group", "available", "diff_group", "undo_group"]

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
    first_block: int = 0,
    num_blocks: int | None = None,
    audit_baseline: bool = False,
    backend: Backend = "auto",
) -> None:
    """Find which words of a range of blocks differ from the baseline; reads both sides once, writes neither.

    Fills the chunk: its range, counts, total, and as many offsets and values as it has capacity for; nothing past it
    is written. If `total` exceeds the capacity, `sums[1]` lacks what did not fit.

    Args:
        group: parameters with new tensors.
        chunk: on the group's device; overwritten.
        sums: int64 [3, num_params], contiguous, on the group's device; *added to*, so zero it before a round, and
            give chunks that may have to be repeated sums of their own. Row 0 gains the fingerprints of the new bits
            (of a whole parameter, once all its blocks went through), row 1 the sums of new unit * key over changed
            words, row 2 the fingerprints of the baseline's bits as they were read, only if `audit_baseline`.
            `old_sum = sums[1] - sums[0] + fingerprint of the baseline`.
        scratch: `chunk.masks(group, max_blocks)`; free again when the diff has run.
        first_block: the group's number of the first block.
        num_blocks: how many; by default all that follow.
        audit_baseline: fill row 2, which costs about 2 % more time.
        backend: which implementation.

    Raises:
        InputError: no new tensors, no such blocks, or a buffer of another size, dtype or device; nothing was run.
    """
    first_block, num_blocks = group.block_range(first_block, num_blocks)
    if not group.has_new:
        raise InputError("a group without new tensors cannot be diffed")
    chunk.check(group, num_blocks)
    _check_sums(group, sums, (3, group.num_params))
    needed = num_blocks * (65536 * max(group.word_bytes, 2) // 64)
    if scratch.dtype != torch.int32 or scratch.device != group.device or scratch.numel() < needed:
        raise InputError("unfit scratch", expected=f"int32 [{needed}] on {group.device}", found=_named(scratch))
    chunk.first_block, chunk.num_blocks = first_block, num_blocks
    if num_blocks == 0:
        chunk.total.zero_()
    elif _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            launch.diff_blocks(group, chunk, sums, scratch, audit_baseline=audit_baseline)
    else:
        twin.diff_blocks(group, chunk, sums, audit_baseline=audit_baseline)


def apply_group(
    group: ParamGroup,
    chunk: RawChunk,
    num_changes: int,
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
        group: what to write to; `new` is not touched.
        chunk: `first_block`, `num_blocks`, counts, offsets and values as received; read only.
        num_changes: offsets and values in it.
        undo: gains the overwritten words; keep chunk and log until the round is decided.
        sums: int64 [2, num_params], contiguous, on the group's device; *added to*: row 0 the sums of old unit * key
            over the changed words (to compare with the sender's), row 1 of new ones. The fingerprint moves by
            `sums[1] - sums[0]`.
        fault: `chunk.faults(group)`, one for a round. Read it once, with the sums.
        backend: which implementation.

    Raises:
        InputError: no such blocks, more changes than chunk or log hold, or a buffer of another size, dtype or
            device; nothing was run.
    """
    group.block_range(chunk.first_block, chunk.num_blocks)
    chunk.check(group, chunk.num_blocks)
    _check_log(group, undo)
    _check_sums(group, sums, (2, group.num_params))
    if not 0 <= num_changes <= min(chunk.capacity, chunk.values.numel(), undo.values.numel()):
        raise InputError(
            "more changes than there is room for",
            expected=f"at most {min(chunk.capacity, undo.values.numel())}",
            found=num_changes,
        )
    if fault.dtype != torch.int32 or fault.shape != (2,) or fault.device != group.device:
        raise InputError("unfit fault record", expected=f"int32 [2] on {group.device}", found=_named(fault))
    undo.applied.zero_()
    if chunk.num_blocks == 0:
        return
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            launch.check_blocks(group, chunk, num_changes, fault)
            launch.apply_blocks(group, chunk, undo, sums, fault)
    else:
        twin.check_blocks(group, chunk, num_changes, fault)
        twin.apply_blocks(group, chunk, undo, sums, fault)


def undo_group(group: ParamGroup, chunk: RawChunk, undo: UndoLog, *, backend: Backend = "auto") -> None:
    """Write back what applying a chunk overwrote; does nothing if that chunk was not applied. May be repeated.

    Chunk and log must be as `apply_group` left them. Chunks that share no block can be undone in any order.

    Raises:
        InputError: a chunk or log of another group.
    """
    group.block_range(chunk.first_block, chunk.num_blocks)
    chunk.check(group, chunk.num_blocks)
    _check_log(group, undo)
    if chunk.num_blocks == 0:
        return
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
            launch.undo_blocks(group, chunk, undo)
    else:
        twin.undo_blocks(group, chunk, undo)


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
        InputError: no such blocks, or sums of another size, dtype or device.
    """
    first_block, num_blocks = group.block_range(first_block, num_blocks)
    _check_sums(group, sums, (group.num_params,))
    if num_blocks == 0:
        return
    if _triton(group, backend):
        from deltacast.delta.kernels import launch

        with _current(group):
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


def _check_log(group: ParamGroup, undo: UndoLog) -> None:
    if undo.values.dtype != group.torch_word or undo.values.device != group.device:
        raise InputError(
            "an undo log made for another group",
            expected=f"{group.torch_word} on {group.device}",
            found=_named(undo.values),
        )


def _named(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
