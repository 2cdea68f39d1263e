"""Triton programs that check a raw chunk, write it with an undo log, and take it back; and that write a whole round.

One program, one block.
"""

# Kernels take many pointers and sizes; a launch passes them by position, and constants by name.
# ruff: noqa: PLR0917

from __future__ import annotations

from deltacast.delta.kernels.language import constexpr, program, tensor, tl
from deltacast.delta.kernels.unit_programs import start_of, weigh_at

__all__ = ["advance_program", "apply_program", "check_program", "count_program", "gather_program", "undo_program"]


@program
def count_program(
    blocks_ptr: tensor, counts_ptr: tensor, count_sums_ptr: tensor, fault_ptr: tensor, first_block: tensor,
    num_blocks: tensor,
) -> None:  # fmt: skip
    """Check the counts of 256 blocks against the blocks' sizes, and add them up; record the first wrong in fault[0]."""
    block = tl.program_id(0) * 256 + tl.arange(0, 256)
    here = block < num_blocks
    count = tl.load(counts_ptr + block, mask=here, other=0)
    size = tl.load(blocks_ptr + (first_block + block).to(tl.int64) * 4 + 2, mask=here, other=0) & 0xFFFFFFFF
    wrong = (count < 0) | (count > size)
    tl.store(count_sums_ptr + tl.program_id(0), tl.sum(tl.where(wrong, 0, count), 0))
    tl.atomic_min(fault_ptr + block * 0, first_block + block, mask=wrong, sem="relaxed")


@program
def check_program(
    blocks_ptr: tensor, counts_ptr: tensor, count_sums_ptr: tensor, offsets_ptr: tensor, fault_ptr: tensor,
    first_block: tensor, num_blocks: tensor, num_changes: tensor, tile: constexpr,
) -> None:  # fmt: skip
    """Check a block's offsets: strictly ascending, inside the block, no more than there are; else fault[1].

    With a wrong count nobody knows where a block's offsets begin, so then none are looked at.
    """
    if tl.load(fault_ptr) != 2147483647:
        return
    block = tl.program_id(0)
    count = tl.load(counts_ptr + block)
    start = start_of(counts_ptr, count_sums_ptr, block)
    num_words = (tl.load(blocks_ptr + (first_block + block).to(tl.int64) * 4 + 2) & 0xFFFFFFFF).to(tl.int32)
    wrong = (start + count > num_changes) | ((block == num_blocks - 1) & (start + count != num_changes))
    if not wrong:
        lane = tl.arange(0, tile)
        bad = lane < 0
        for first in range(0, count, tile):
            index = first + lane
            offset = tl.load(offsets_ptr + start + index, mask=index < count, other=0).to(tl.int32) & 0xFFFF
            before = tl.load(offsets_ptr + start + index - 1, mask=(index < count) & (index > 0), other=0)
            falls = (index > 0) & ((before.to(tl.int32) & 0xFFFF) >= offset)
            bad = bad | ((index < count) & (falls | (offset >= num_words)))
        wrong = tl.max(bad.to(tl.int32), 0) > 0
    if wrong:
        tl.atomic_min(fault_ptr + 1, first_block + block, sem="relaxed")


@program
def apply_program(
    blocks_ptr: tensor, inner_ptr: tensor, outer_ptr: tensor, counts_ptr: tensor, count_sums_ptr: tensor,
    offsets_ptr: tensor, values_ptr: tensor, undo_ptr: tensor, sums_ptr: tensor, fault_ptr: tensor,
    applied_ptr: tensor, first_block: tensor, num_params: tensor,
    word: constexpr, word_bytes: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Write a block's changes, keep what they overwrite, and sum both; nothing at all if there is a fault."""
    if tl.minimum(tl.load(fault_ptr), tl.load(fault_ptr + 1)) != 2147483647:
        return
    block = tl.program_id(0)
    tl.store(applied_ptr, 1, mask=block == 0)
    count = tl.load(counts_ptr + block)
    if count == 0:
        return
    start = start_of(counts_ptr, count_sums_ptr, block)
    entry = blocks_ptr + (first_block + block).to(tl.int64) * 4
    base_at = tl.load(entry + 1).to(tl.pointer_type(word))
    param = tl.load(entry + 2) >> 32
    outer_at = outer_ptr + tl.load(entry + 3)
    lane = tl.arange(0, tile)
    old_sums = tl.zeros([tile], tl.int64)
    new_sums = tl.zeros([tile], tl.int64)
    for first in range(0, count, tile):
        index = first + lane
        live = index < count
        offset = tl.load(offsets_ptr + start + index, mask=live, other=0).to(tl.int32) & 0xFFFF
        new = tl.load(values_ptr + start + index, mask=live, other=0)
        old = tl.load(base_at + offset, mask=live, other=0)
        tl.store(undo_ptr + start + index, old, mask=live)
        tl.store(base_at + offset, new, mask=live)
        old_sums += weigh_at(old, offset, live, inner_ptr, outer_at, word_bytes)
        new_sums += weigh_at(new, offset, live, inner_ptr, outer_at, word_bytes)
    tl.atomic_add(sums_ptr + param, tl.sum(old_sums, 0), sem="relaxed")
    tl.atomic_add(sums_ptr + num_params + param, tl.sum(new_sums, 0), sem="relaxed")


@program
def advance_program(
    blocks_ptr: tensor, counts_ptr: tensor, count_sums_ptr: tensor, starts_ptr: tensor, offsets_ptr: tensor,
    values_ptr: tensor, chunk_blocks: tensor, num_sums: tensor, word: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Write a block's changes, whichever chunk it is in; each has `chunk_blocks` blocks and `num_sums` count sums."""
    block = tl.program_id(0)
    number = (block // chunk_blocks).to(tl.int64)
    first_block = number * chunk_blocks
    count = tl.load(counts_ptr + block)
    start = start_of(counts_ptr + first_block, count_sums_ptr + number * num_sums, block % chunk_blocks)
    start += tl.load(starts_ptr + number)
    base_at = tl.load(blocks_ptr + block.to(tl.int64) * 4 + 1).to(tl.pointer_type(word))
    lane = tl.arange(0, tile)
    for first in range(0, count, tile):
        index = first + lane
        live = index < count
        offset = tl.load(offsets_ptr + start + index, mask=live, other=0).to(tl.int32) & 0xFFFF
        tl.store(base_at + offset, tl.load(values_ptr + start + index, mask=live, other=0), mask=live)


@program
def undo_program(
    blocks_ptr: tensor, counts_ptr: tensor, count_sums_ptr: tensor, offsets_ptr: tensor, undo_ptr: tensor,
    applied_ptr: tensor, first_block: tensor, word: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Write a block's old words back, if the chunk was applied."""
    if tl.load(applied_ptr) == 0:
        return
    block = tl.program_id(0)
    count = tl.load(counts_ptr + block)
    start = start_of(counts_ptr, count_sums_ptr, block)
    base_at = tl.load(blocks_ptr + (first_block + block).to(tl.int64) * 4 + 1).to(tl.pointer_type(word))
    lane = tl.arange(0, tile)
    for first in range(0, count, tile):
        index = first + lane
        live = index < count
        offset = tl.load(offsets_ptr + start + index, mask=live, other=0).to(tl.int32) & 0xFFFF
        tl.store(base_at + offset, tl.load(undo_ptr + start + index, mask=live, other=0), mask=live)


@program
def gather_program(
    blocks_ptr: tensor, counts_ptr: tensor, count_sums_ptr: tensor, offsets_ptr: tensor, out_ptr: tensor,
    first_block: tensor, word: constexpr, tile: constexpr,
) -> None:  # fmt: skip
    """Copy the baseline's words at a block's offsets."""
    block = tl.program_id(0)
    count = tl.load(counts_ptr + block)
    start = start_of(counts_ptr, count_sums_ptr, block)
    base_at = tl.load(blocks_ptr + (first_block + block).to(tl.int64) * 4 + 1).to(tl.pointer_type(word))
    lane = tl.arange(0, tile)
    for first in range(0, count, tile):
        index = first + lane
        live = index < count
        offset = tl.load(offsets_ptr + start + index, mask=live, other=0).to(tl.int32) & 0xFFFF
        tl.store(out_ptr + start + index, tl.load(base_at + offset, mask=live, other=0), mask=live)
