"""The kernels' twin in plain torch operations: the same results, bit by bit, on any device.

It is what runs where there is no Triton, and what the kernels are tested against. It works parameter by parameter,
waits for the device, and allocates: on a GPU it is several times slower.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deltacast.delta.kernels.arena import COUNTS_PER_SUM, RawChunk
from deltacast.delta.kernels.block_table import BLOCK_WORDS
from deltacast.delta.kernels.group import ParamGroup
from deltacast.delta.kernels.key_tables import unit_keys
from deltacast.delta.kernels.undo import NO_FAULT, UndoLog

__all__ = [
    "advance_blocks",
    "apply_blocks",
    "audit_blocks",
    "check_blocks",
    "diff_blocks",
    "gather_blocks",
    "undo_blocks",
]

_CHUNK_WORDS = 1 << 20


def _parts(group: ParamGroup, first_block: int, num_blocks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield `(parameter, first word, end word, number of its first block in the range)` of a range of blocks."""
    end_block = first_block + num_blocks
    for param in group.params_of(first_block, num_blocks):
        begin, end = (int(at) for at in group.first_blocks[param : param + 2])
        lo, hi = max(begin, first_block), min(end, end_block)
        if lo < hi:
            first_word = (lo - begin) * BLOCK_WORDS
            yield param, first_word, min((hi - begin) * BLOCK_WORDS, group.num_words[param]), lo - first_block


def _weigh(group: ParamGroup, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sum units * keys of words at int64 positions in their parameter, modulo 2^64; int64 [1]."""
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    per_word = group.units_per_word
    mask = 0xFF if group.word_bytes == 1 else 0xFFFF
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = slice(start, start + _CHUNK_WORDS)
        wide = words[part].to(torch.int64)
        for unit in range(per_word):
            keys = unit_keys(group.keys, positions[part] * per_word + unit)
            total += (((wide >> (16 * unit)) & mask) * keys).sum()
    return total


def _weigh_run(group: ParamGroup, words: torch.Tensor, first_word: int) -> torch.Tensor:
    """Sum units * keys of consecutive words; int64 [1]."""
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        first = first_word + start
        total += _weigh(group, part, torch.arange(first, first + part.numel(), device=words.device))
    return total


def diff_blocks(group: ParamGroup, chunk: RawChunk, sums: torch.Tensor, *, audit_baseline: bool) -> None:
    """Diff the chunk's blocks; see `operations.diff_group`."""
    arena, counts = chunk.arena, chunk.counts
    start = filled = int(arena.starts[chunk.number])
    for param, lo, hi, first in _parts(group, chunk.first_block, chunk.num_blocks):
        new, base = group.new_words(param)[lo:hi], group.baseline_words(param, lo, hi)
        index = torch.nonzero(new != base).view(-1)
        blocks = -(-(hi - lo) // BLOCK_WORDS)
        counts[first : first + blocks] = torch.bincount(index // BLOCK_WORDS, minlength=blocks)
        kept = index[: max(arena.capacity - filled, 0)]
        place = slice(filled, filled + kept.numel())
        values = new[kept]
        arena.offsets[place] = (kept % BLOCK_WORDS).to(torch.int16)
        arena.values[place] = values
        filled += index.numel()
        sums[0, param] += _weigh_run(group, new, lo)[0]
        sums[1, param] += _weigh(group, values, kept + lo)[0]
        if audit_baseline:
            sums[2, param] += _weigh_run(group, base, lo)[0]
    chunk.total.fill_(filled - start)
    arena.starts[chunk.number + 1] = start + -(-(filled - start) // 16) * 16


def check_blocks(group: ParamGroup, chunk: RawChunk, fault: torch.Tensor) -> None:
    """Check counts and offsets of a chunk; see `operations.apply_group`."""
    sizes = torch.from_numpy(group.table.num_words)[chunk.first_block :][: chunk.num_blocks].to(group.device)
    counts = chunk.counts.to(torch.int64)
    _record(fault[:1], (counts < 0) | (counts > sizes), chunk.first_block)
    if int(fault[0]) != NO_FAULT:
        return
    for number, first in enumerate(range(0, chunk.num_blocks, COUNTS_PER_SUM)):
        chunk.count_sums[number] = counts[first : first + COUNTS_PER_SUM].sum()
    ends = counts.cumsum(0)
    wrong = ends > chunk.offsets.numel()
    wrong[-1] |= ends[-1] != chunk.offsets.numel()
    owner = torch.repeat_interleave(counts)[: chunk.offsets.numel()]
    offsets = chunk.offsets[: owner.numel()].to(torch.int64) & 0xFFFF
    bad = offsets >= sizes[owner]
    bad[1:] |= (offsets[1:] <= offsets[:-1]) & (owner[1:] == owner[:-1])
    wrong[owner[bad]] = True
    _record(fault[1:], wrong, chunk.first_block)


def _record(fault: torch.Tensor, wrong: torch.Tensor, first_block: int) -> None:
    found = torch.nonzero(wrong).view(-1)
    if found.numel():
        fault[0] = min(int(fault[0]), first_block + int(found[0]))


def _places(group: ParamGroup, chunk: RawChunk) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor, int]]:
    """Yield `(parameter, its changes in the chunk, its words there, their int64 indices in those, the first word)`."""
    counts, filled = chunk.counts.to(torch.int64), 0
    for param, lo, hi, first in _parts(group, chunk.first_block, chunk.num_blocks):
        mine = counts[first : first - (lo - hi) // BLOCK_WORDS]
        place = slice(filled, filled + int(mine.sum()))
        filled = place.stop
        index = (chunk.offsets[place].to(torch.int64) & 0xFFFF) + torch.repeat_interleave(mine) * BLOCK_WORDS
        yield param, place, group.baseline_words(param, lo, hi), index, lo


def apply_blocks(group: ParamGroup, chunk: RawChunk, undo: UndoLog, sums: torch.Tensor, fault: torch.Tensor) -> None:
    """Write a checked chunk; see `operations.apply_group`."""
    if int(fault.min()) != NO_FAULT:
        return
    undo.applied[chunk.number] = 1
    for param, place, words, index, first_word in _places(group, chunk):
        old, new = words[index], chunk.values[place]
        undo.values[chunk.place][place] = old
        sums[0, param] += _weigh(group, old, index + first_word)[0]
        sums[1, param] += _weigh(group, new, index + first_word)[0]
        words.index_copy_(0, index, new)


def advance_blocks(group: ParamGroup, chunk: RawChunk) -> None:
    """Write a trusted chunk; see `operations.advance_group`."""
    for _, place, words, index, _ in _places(group, chunk):
        words.index_copy_(0, index, chunk.values[place])


def undo_blocks(group: ParamGroup, chunk: RawChunk, undo: UndoLog) -> None:
    """Write back what applying the chunk overwrote; see `operations.undo_group`."""
    if not int(undo.applied[chunk.number]):
        return
    old = undo.values[chunk.place]
    for _, place, words, index, _ in _places(group, chunk):
        words.index_copy_(0, index, old[place])


def gather_blocks(group: ParamGroup, chunk: RawChunk, out: torch.Tensor) -> None:
    """Copy the words that a trusted chunk would overwrite; see `operations.gather_group`."""
    for _, place, words, index, _ in _places(group, chunk):
        out[place] = words[index]


def audit_blocks(group: ParamGroup, sums: torch.Tensor, first_block: int, num_blocks: int) -> None:
    """Fingerprint blocks of the baseline; see `operations.audit_group`."""
    for param, lo, hi, _ in _parts(group, first_block, num_blocks):
        sums[param] += _weigh_run(group, group.baseline_words(param, lo, hi), lo)[0]
