"""A streamed round's changes in host memory of their own, and the update that they are: for whoever stores it.

The sender's arenas are overwritten by its next round. What is kept here is not, and is turned into patches on any
thread, however late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.chunks.plan import Span
from deltacast.delta.chunks.walk import changes_of
from deltacast.delta.kernels import ParamGroup
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import ParameterTable

__all__ = ["KeptChunk", "KeptRound", "on_host"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptChunk:
    """One chunk on the host.

    Attributes:
        span: which blocks it covers.
        counts: int32 [num_blocks].
        offsets: int16 [num_changes].
        values: [num_changes] words after.
        old: [num_changes] words before.
    """

    span: Span
    counts: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor
    old: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KeptRound:
    """Everything that a round changed.

    Attributes:
        table: the parameters.
        groups: the sender's; only where their parameters' blocks are is looked at.
        members: places in the table of each group's parameters.
        chunks: those that have changes, in sending order.
        ready: when their tensors are there; None if they are.
        sources: device memory that is still being copied from.
        base_version: what the round started from.
        before, after: uint64 [parameters], fingerprints.
        old_sums: uint64 [parameters], sums of old unit * key over the changed words.
    """

    table: ParameterTable
    groups: Sequence[ParamGroup]
    members: Sequence[Sequence[int]]
    chunks: Sequence[KeptChunk]
    ready: torch.cuda.Event | None
    sources: list[torch.Tensor]
    base_version: int
    before: NDArray[np.uint64]
    after: NDArray[np.uint64]
    old_sums: NDArray[np.uint64]

    def update(self, *, run_id: str, epoch: int, target_version: int, optimizer_step: int | None) -> WeightUpdate:
        """Return the round as an update of sparse patches with base values. Blocks until the copies are done.

        May be called on any thread, and again. But for parameters that a diff would send whole, it is what a diff of
        the weights would have made.

        Args:
            run_id: the lineage.
            epoch: the writer's.
            target_version: that the round led to.
            optimizer_step: metadata.
        """
        if self.ready is not None:
            self.ready.synchronize()
        self.sources.clear()
        return WeightUpdate(
            run_id=run_id,
            epoch=epoch,
            base_version=self.base_version,
            target_version=target_version,
            base_digest=self.table.state_digest(self.before),
            target_digest=self.table.state_digest(self.after),
            table_digest=self.table.digest,
            patches=self._patches(),
            optimizer_step=optimizer_step,
            aliases=self.table.aliases,
        )

    def _patches(self) -> tuple[SparseWeightPatch, ...]:
        """Put together what several chunks say of one parameter: their changes follow one another."""
        found: dict[int, list[tuple[NDArray[np.int64], Words, Words]]] = {}
        for chunk in self.chunks:
            group, members = self.groups[chunk.span.group], self.members[chunk.span.group]
            counts, offsets = chunk.counts.numpy(), chunk.offsets.numpy().view(np.uint16)
            values, old = chunk.values.numpy(), chunk.old.numpy()
            for change in changes_of(group, chunk.span.first_block, counts, offsets):
                words = (change.positions, values[change.part], old[change.part])
                found.setdefault(members[change.param], []).append(words)
        return tuple(self._patch(place, *_joined(found[place])) for place in sorted(found))

    def _patch(self, place: int, positions: NDArray[np.int64], new: Words, old: Words) -> SparseWeightPatch:
        meta = self.table.metas[place]
        return SparseWeightPatch(
            meta,
            positions,
            new.view(meta.row.numpy_word),
            int(self.after[place]),
            base_values=old.view(meta.row.numpy_word),
            old_sum=int(self.old_sums[place]),
            fingerprint_before=int(self.before[place]),
        )


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to host memory of its own, page-locked for a GPU, in the order of the current stream."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor, non_blocking=True)


def _joined(parts: Sequence[tuple[NDArray[np.int64], Words, Words]]) -> tuple[NDArray[np.int64], Words, Words]:
    positions, new, old = zip(*parts, strict=True)
    return np.concatenate(positions), np.concatenate(new), np.concatenate(old)
