"""Triton program that writes a diff's offsets and values from the masks that comparing left.

Offsets come first: each lane walks the set bits of its own stretch of masks, so the turns are as many as the fullest
stretch has changes. Values are gathered by the offsets afterwards: scattered reads, coalesced writes. Above about a
fifth of the words changed the lanes' scattered offsets cost more than sending the blocks whole would.
"""

# Kernels take many pointers and sizes; a launch passes them by position, and constants by name.
# ruff: noqa: PLR0917

from __future__ import annotations

from deltacast.delta.kernels.language import constexpr, jit, program, tensor, tl
from deltacast.delta.kernels.unit_programs import bit_count, lowest_bit, start_of, weigh_at

__all__ = ["emit_program"]


@jit
def _write_offsets(
    masks_ptr: tensor, num_masks: tensor, offsets_ptr: tensor, room: tensor, lanes: constexpr, word_bytes: constexpr
) -> None:
    """Write a block's in-block offsets in ascending order, at most `room` of them.

    Each lane holds a stretch of the masks, 32 bits at a time; in each turn it writes the offset of its next set bit.
    """
    width: constexpr = 16 // word_bytes
    stretch: constexpr = 65536 * word_bytes // 16 * (2 if word_bytes == 1 else 1) // 4 // lanes
    lane = tl.arange(0, lanes)
    slot = tl.arange(0, stretch)
    masks_at = masks_ptr + lane[:, None] * stretch + slot[None, :]
    mask = tl.load(masks_at, mask=(lane * stretch < num_masks)[:, None], other=0)
    count = tl.sum(bit_count(mask), 1)
    filled = tl.sum((mask != 0).to(tl.int32) << slot[None, :], 1)
    place = tl.cumsum(count, 0) - count
    chosen = lane * 0
    bits = lane * 0
    for _ in range(tl.max(count, 0)):
        take = (bits == 0) & (filled != 0)
        chosen = tl.where(take, lowest_bit(filled), chosen)
        filled = tl.where(take, filled & (filled - 1), filled)
        bits = tl.where(take, tl.load(masks_ptr + lane * stretch + chosen, mask=take, other=0), bits)
        bit = lowest_bit(bits)
        if width >= 8:
            offset = (lane * stretch + chosen) * 32 + bit
        else:  # a vector of fewer than 8 words leaves the upper bits of its byte unused
            offset = ((lane * stretch + chosen) * 4 + (bit >> 3)) * width + (bit & 7)
        tl.store(offsets_ptr + place, offset.to(tl.int16), mask=(bits != 0) & (place < room))
        bits = bits & (bits - 1)
        place += 1


@jit
def _write_values(
    new_ptr: tensor, offsets_ptr: tensor, values_ptr: tensor, count: tensor, inner_ptr: tensor, outer_ptr: tensor,
    tile: constexpr, word_bytes: constexpr,
) -> tensor:  # fmt: skip
    """Gather the words at `count` written offsets, and return the sum of their units * keys."""
    sums = tl.zeros([tile], tl.int64)
    lane = tl.arange(0, tile)
    for first in range(0, count, tile):
        index = first + lane
        live = index < count
        offset = tl.load(offsets_ptr + index, mask=live, other=0).to(tl.int32) & 0xFFFF
        value = tl.load(new_ptr + offset, mask=live, other=0)
        tl.store(values_ptr + index, value, mask=live)
        sums += weigh_at(value, offset, live, inner_ptr, outer_ptr, word_bytes)
    return tl.sum(sums, 0)


@program
def emit_program(
    blocks_ptr: tensor, inner_ptr: tensor, outer_ptr: tensor, masks_ptr: tensor, counts_ptr: tensor,
    count_sums_ptr: tensor, offsets_ptr: tensor, values_ptr: tensor, starts_ptr: tensor, totals_ptr: tensor,
    sums_ptr: tensor, number: tensor, first_block: tensor, num_blocks: tensor, num_params: tensor, capacity: tensor,
    rows: constexpr, lanes: constexpr, tile: constexpr, word: constexpr, word_bytes: constexpr,
) -> None:  # fmt: skip
    """Write one block's changes where those of the blocks before it end, as far as the capacity goes.

    Chunk `number` begins where the last one's diff said; the last block says where the next chunk does.
    """
    width: constexpr = 16 // word_bytes
    tile_words: constexpr = rows * 1024 // ((word_bytes + 1) // 2)
    mask_bytes: constexpr = 2 if word_bytes == 1 else 1
    block = num_blocks - 1 - tl.program_id(0)  # backwards: what was compared last may still be in the cache
    count = tl.load(counts_ptr + block)
    chunk_start = tl.load(starts_ptr + number)
    before = start_of(counts_ptr, count_sums_ptr, block)
    start = chunk_start + before
    if block == num_blocks - 1:
        tl.store(totals_ptr + number, before + count)
        tl.store(starts_ptr + number + 1, chunk_start + (before + count + 15) // 16 * 16)
    room = tl.maximum(tl.minimum(capacity - start, 65536), 0).to(tl.int32)
    if (count > 0) & (room > 0):
        entry = blocks_ptr + (first_block + block).to(tl.int64) * 4
        new_ptr = tl.load(entry).to(tl.pointer_type(word))
        size = tl.load(entry + 2)
        num_words = (size & 0xFFFFFFFF).to(tl.int32)
        outer_at = outer_ptr + tl.load(entry + 3)
        tiles = (num_words + tile_words - 1) // tile_words
        num_masks = tiles * (tile_words // width * mask_bytes // 4)
        masks_at = masks_ptr + block.to(tl.int64) * (65536 // width * mask_bytes // 4)
        _write_offsets(masks_at, num_masks, offsets_ptr + start, room, lanes, word_bytes)
        tl.debug_barrier()  # other threads read these offsets
        change = _write_values(
            new_ptr, offsets_ptr + start, values_ptr + start, tl.minimum(count, room), inner_ptr, outer_at,
            tile, word_bytes,
        )  # fmt: skip
        tl.atomic_add(sums_ptr + num_params + (size >> 32), change, sem="relaxed")
