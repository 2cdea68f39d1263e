"""How a table is cut into groups of one word width and chunks of blocks: alike on both sides, from the same few facts.

A chunk is a run of consecutive blocks of one group. Chunks follow the order in which the trainer's source yields its
parameters, so that each can go as soon as its last parameter is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltacast.delta.errors import InputError
from deltacast.delta.kernels import BLOCK_WORDS
from deltacast.delta.table import ParameterTable

__all__ = ["ChunkPlan", "Span", "even_chunk_bytes"]

_MIN_CHANGES = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """The blocks of one chunk.

    Attributes:
        group: which group.
        first_block: the group's number of the first block.
        num_blocks: how many, at least 1.
        num_params: parameters of the plan's order that must be there before it can be diffed.
    """

    group: int
    first_block: int
    num_blocks: int
    num_params: int


class ChunkPlan:
    """The groups and chunks of a table.

    Args:
        table: the parameters.
        order: places in the table, each once: the order in which the source yields them.
        chunk_bytes: bytes of weights that a chunk covers, about.

    Attributes:
        order: as given.
        chunk_bytes: as given.
        word_bytes: of each group.
        members: places of each group, in order.
        spans: every chunk, in the order in which they are sent.

    Raises:
        InputError: the order is not one of the table, or the chunks are smaller than one block of 8-byte words.
    """

    def __init__(self, table: ParameterTable, order: Sequence[int], chunk_bytes: int) -> None:
        if sorted(order) != list(range(len(table))):
            raise InputError("not an order of the table's parameters", expected=f"each of {len(table)} once")
        if chunk_bytes < BLOCK_WORDS * 8:
            raise InputError("chunks are too small", expected=f"at least {BLOCK_WORDS * 8} bytes", found=chunk_bytes)
        self.order, self.chunk_bytes = tuple(order), chunk_bytes
        widths = {place: table.metas[place].row.word_bytes for place in order}
        self.word_bytes = tuple(dict.fromkeys(widths.values()))
        self.members = tuple(tuple(place for place in order if widths[place] == width) for width in self.word_bytes)
        self._num_words = tuple(sum(table.metas[place].num_words for place in group) for group in self.members)
        self.spans = tuple(self._cut(table))

    def _cut(self, table: ParameterTable) -> list[Span]:
        spans: list[Span] = []
        first, end = [0] * len(self.word_bytes), [0] * len(self.word_bytes)
        most = [self.chunk_bytes // (BLOCK_WORDS * width) for width in self.word_bytes]
        for number, place in enumerate(self.order, start=1):
            meta = table.metas[place]
            group = self.word_bytes.index(meta.row.word_bytes)
            end[group] += -(-meta.num_words // BLOCK_WORDS)
            while end[group] - first[group] >= most[group]:
                spans.append(Span(group, first[group], most[group], number))
                first[group] += most[group]
        left = (Span(i, first[i], end[i] - first[i], len(self.order)) for i in range(len(first)) if end[i] > first[i])
        return [*spans, *left]

    def max_blocks(self, group: int) -> int:
        """Return the most blocks of a group's chunks."""
        return max((span.num_blocks for span in self.spans if span.group == group), default=0)

    def num_chunks(self, group: int) -> int:
        """Return how many chunks a group has."""
        return sum(span.group == group for span in self.spans)

    def capacities(self, max_density: float) -> tuple[int, ...]:
        """Return the changes that each group's buffers hold if at most this share of its words changes in a round.

        At least a million, or all of them: small models change in larger shares.
        """
        rounding = (16 * self.num_chunks(group) for group in range(len(self.members)))
        return tuple(
            min(words, max(int(words * max_density), _MIN_CHANGES)) + spare
            for words, spare in zip(self._num_words, rounding, strict=True)
        )


def even_chunk_bytes(table: ParameterTable, chunk_bytes: int) -> int:
    """Return the chunk size that cuts a table's largest group into as many chunks as `chunk_bytes` does, all alike.

    The last chunk of a round is then never a small one that comes right behind a large one.
    """
    blocks: dict[int, int] = {}
    for meta in table.metas:
        width = meta.row.word_bytes
        blocks[width] = blocks.get(width, 0) - (-meta.num_words // BLOCK_WORDS)
    width, num_blocks = max(blocks.items(), key=lambda item: item[0] * item[1], default=(1, 0))
    most = chunk_bytes // (BLOCK_WORDS * width)
    if most == 0 or num_blocks <= most:
        return chunk_bytes
    num_chunks = -(-num_blocks // most)
    return max(-(-num_blocks // num_chunks) * BLOCK_WORDS * width, BLOCK_WORDS * 8)
