"""Chunks on a wire that codes them: between arenas and the packed bytes of `deltacast.delta.chunk_codec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from deltacast.delta.chunk_codec import ChunkCodec, PackingChunk, UnpackingChunk, staged_bytes, transform_bytes
from deltacast.delta.chunks.device import Lane
from deltacast.delta.chunks.plan import ChunkPlan
from deltacast.delta.chunks.sender import SentChunk
from deltacast.delta.errors import FormatError
from deltacast.delta.kernels import BLOCK_WORDS, ParamGroup, RawChunk, gather_group
from deltacast.delta.table import ParameterTable

__all__ = ["ChunkCoder"]

_MOST_CHANGES: Final = 2**31 - 1


class ChunkCoder:
    """Packs and unpacks the chunks of one plan; close it to end its threads.

    Args:
        table: the parameters.
        plan: how they are cut.
        groups: the plan's, over the baseline (sender) or the weights (receiver).
        threads: pieces that are compressed or inflated at once.
        capacities: for each group, the most changes of a round (`Begin.capacities`); None if every word may change.
    """

    def __init__(
        self,
        table: ParameterTable,
        plan: ChunkPlan,
        groups: Sequence[ParamGroup],
        *,
        threads: int,
        capacities: Sequence[int] | None = None,
    ) -> None:
        self._groups = groups
        self._capacities = [group.num_blocks * BLOCK_WORDS for group in groups] if capacities is None else capacities
        self._codecs = [
            ChunkCodec(
                group.device,
                group.word_bytes,
                max_changes=min(plan.max_blocks(number) * BLOCK_WORDS, self._capacities[number], _MOST_CHANGES),
                threads=threads,
            )
            for number, group in enumerate(groups)
        ]
        self._lanes = [Lane(group.device) for group in groups]
        self._sizes = [torch.from_numpy(group.table.num_words).to(group.device) for group in groups]
        self._signed = [
            _signed_blocks(table, members, group) for members, group in zip(plan.members, groups, strict=True)
        ]

    def close(self) -> None:
        """End the threads; may be called twice."""
        for codec in self._codecs:
            codec.close()

    @property
    def nbytes(self) -> int:
        """Memory that coding takes at most, about: what a round's chunks are staged in, and one chunk's transforms.

        The first is on the host, if the weights are on a GPU page-locked, and grows with the changes of a round: all of
        its chunks may be pending. The second is on the weights' device. After a round that was given up, chunks of it
        may still hold theirs for a moment.
        """
        staged = (
            staged_bytes(group.word_bytes, group.num_blocks, capacity)
            for group, capacity in zip(self._groups, self._capacities, strict=True)
        )
        transforms = (transform_bytes(codec.word_bytes, codec.max_changes) for codec in self._codecs)
        return sum(staged) + max(transforms, default=0)

    def pack(self, sent: SentChunk) -> PackingChunk:
        """Start packing a chunk whose old words were kept, on a stream of the coder's own; waits for nothing.

        That stream is one for all rounds: torch keeps the memory of temporaries apart by stream.
        """
        assert sent.old is not None
        changes, number = sent.changes, sent.span.group
        lane = self._lanes[number]
        lane.follow(sent.ready)
        with lane.active():
            return self._codecs[number].pack(
                changes.counts,
                changes.offsets,
                changes.values,
                sent.old,
                signed_magnitude=self._signed_of(number, changes),
            )

    def unpack(self, group: int, chunk: RawChunk, packed: torch.Tensor) -> UnpackingChunk:
        """Start unpacking bytes that came for a chunk: flat uint8 on the host.

        Raises:
            ChecksumError, FormatError: they are not a chunk of these blocks.
        """
        blocks = slice(chunk.first_block, chunk.first_block + chunk.num_blocks)
        return self._codecs[group].unpack(packed.numpy(), self._sizes[group][blocks])

    def finish(self, group: int, chunk: RawChunk, pending: UnpackingChunk) -> None:
        """Fill a chunk with what was unpacked, in the order of the current stream.

        Raises:
            FormatError: it is damaged, or holds another number of changes than was said.
        """
        found = pending.result()
        if found.offsets.numel() != chunk.num_changes:
            raise FormatError(
                "a chunk of another size", expected=f"{chunk.num_changes} changes", found=found.offsets.numel()
            )
        chunk.counts.copy_(found.counts)
        chunk.offsets.copy_(found.offsets)
        old = gather_group(self._groups[group], chunk)
        chunk.values.copy_(found.values(old, signed_magnitude=self._signed_of(group, chunk)))

    def _signed_of(self, group: int, chunk: RawChunk) -> torch.Tensor | bool:
        signed = self._signed[group]
        return signed if isinstance(signed, bool) else signed[chunk.first_block : chunk.first_block + chunk.num_blocks]


def _signed_blocks(table: ParameterTable, members: Sequence[int], group: ParamGroup) -> torch.Tensor | bool:
    """Say of which blocks the words are of sign and magnitude: one bool where all are alike."""
    signed = torch.tensor([table.metas[place].row.signed_magnitude for place in members])
    if signed.all() or not signed.any():
        return bool(signed.all())
    per_param = torch.from_numpy(group.first_blocks).diff()
    return signed.repeat_interleave(per_param).to(group.device)
