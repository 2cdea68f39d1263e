"""Triton programs that stream whole tensors: compare with fingerprint, and fingerprint alone.

A program takes one block of 65,536 words. It reads it in *rows* of 1024 units, each thread a *vector* of 16 bytes of
a row. A row has one outer key, so units times inner keys are summed within a thread and multiplied by it once; the
inner keys of a thread's place in a row stay in its registers.

Comparing leaves a mask of 1 bit per word, a vector's in one byte (two for 1-byte words), in position order. The
changes are written from those masks (emit_programs.py): held in registers together, the two phases would halve the
number of threads that read.
"""

# Kernels take many pointers and sizes; a launch passes them by position, and constants by name.
# ruff: noqa: PLR0917, FBT003

from __future__ import annotations

from deltacast.delta.kernels.language import constexpr, jit, program, tensor, tl
from deltacast.delta.kernels.unit_programs import bit_count, weigh

__all__ = ["audit_program", "compare_program"]


@jit
def _inner_keys(inner_ptr: tensor, unit: constexpr, word_bytes: constexpr) -> tensor:
    """Load the keys [vectors of a row, 1, words of a vector] of unit `unit` of each word of a row."""
    units: constexpr = (word_bytes + 1) // 2
    width: constexpr = 16 // word_bytes
    vectors: constexpr = 1024 // (units * width)
    word = tl.arange(0, vectors)[:, None] * width + tl.arange(0, width)[None, :]
    key = tl.load(inner_ptr + word * units + unit % units)
    return key[:, None, :]


@jit
def _scan_tiles(
    new_ptr: tensor, base_ptr: tensor, outer_ptr: tensor, masks_ptr: tensor, num_words: tensor,
    first: tensor, last: tensor, new_sums: tensor, base_sums: tensor, changes: tensor,
    key0: tensor, key1: tensor, key2: tensor, key3: tensor,
    rows: constexpr, word_bytes: constexpr, compare: constexpr, audit: constexpr, whole: constexpr,
) -> tensor:  # fmt: skip
    """Add tiles [first, last) of `rows` rows to the running sums [vectors, rows], and write their masks.

    `whole`: the tiles lie inside the block and start at multiples of 16 bytes; else words past `num_words` are zero.
    """
    units: constexpr = (word_bytes + 1) // 2
    width: constexpr = 16 // word_bytes
    vectors: constexpr = 1024 // (units * width)
    # Vectors before rows: in that order the layout gives a warp one row, and a thread the same place in every row.
    row = tl.arange(0, rows)
    vector = row[None, :] * vectors + tl.arange(0, vectors)[:, None]
    place = vector[:, :, None] * width + tl.arange(0, width)[None, None, :]
    for tile in range(first, last):
        at = tile * (rows * vectors * width) + place
        new = tl.load(new_ptr + at) if whole else tl.load(new_ptr + at, mask=at < num_words, other=0)
        outer = tl.load(outer_ptr + tile * rows + row)[None, :]
        if compare:
            base = tl.load(base_ptr + at) if whole else tl.load(base_ptr + at, mask=at < num_words, other=0)
            bits = tl.sum((new != base).to(tl.int32) << tl.arange(0, width)[None, None, :], axis=2)
            tl.store(masks_ptr + tile * (rows * vectors) + vector, bits.to(masks_ptr.dtype.element_ty))
            changes += bit_count(bits)
            if audit:
                base_sums += tl.sum(weigh(base, key0, key1, key2, key3, word_bytes), axis=2) * outer
        new_sums += tl.sum(weigh(new, key0, key1, key2, key3, word_bytes), axis=2) * outer
    return new_sums, base_sums, changes


@jit
def _scan_block(
    new_address: tensor, base_address: tensor, outer_ptr: tensor, masks_ptr: tensor, num_words: tensor,
    key0: tensor, key1: tensor, key2: tensor, key3: tensor,
    rows: constexpr, word: constexpr, word_bytes: constexpr, compare: constexpr, audit: constexpr,
) -> tensor:  # fmt: skip
    """Return (sum of units * keys of the new words, of the baseline's, number of changes) of one block."""
    width: constexpr = 16 // word_bytes
    vectors: constexpr = 1024 // (((word_bytes + 1) // 2) * width)
    tile_words: constexpr = rows * vectors * width
    words: constexpr = tl.pointer_type(word)
    whole_tiles = tl.where((new_address | base_address) % 16 == 0, num_words // tile_words, 0)
    new_sums = tl.zeros([vectors, rows], tl.int64)
    base_sums = tl.zeros([vectors, rows], tl.int64)
    changes = tl.zeros([vectors, rows], tl.int32)
    new_sums, base_sums, changes = _scan_tiles(
        tl.multiple_of(new_address.to(words), 16), tl.multiple_of(base_address.to(words), 16), outer_ptr, masks_ptr,
        num_words, 0, whole_tiles, new_sums, base_sums, changes, key0, key1, key2, key3,
        rows, word_bytes, compare, audit, True,
    )  # fmt: skip
    new_sums, base_sums, changes = _scan_tiles(
        new_address.to(words), base_address.to(words), outer_ptr, masks_ptr, num_words, whole_tiles,
        (num_words + tile_words - 1) // tile_words, new_sums, base_sums, changes, key0, key1, key2, key3,
        rows, word_bytes, compare, audit, False,
    )  # fmt: skip
    return tl.sum(tl.sum(new_sums, 1), 0), tl.sum(tl.sum(base_sums, 1), 0), tl.sum(tl.sum(changes, 1), 0)


@program
def compare_program(
    blocks_ptr: tensor, inner_ptr: tensor, outer_ptr: tensor, mask_bytes_ptr: tensor, counts_ptr: tensor,
    count_sums_ptr: tensor, sums_ptr: tensor, first_block: tensor, num_params: tensor,
    rows: constexpr, word: constexpr, word_bytes: constexpr, audit: constexpr,
) -> None:  # fmt: skip
    """Write a block's masks and count; add its fingerprint to its parameter's, and with `audit` the baseline's."""
    mask: constexpr = tl.int16 if word_bytes == 1 else tl.int8
    key0 = _inner_keys(inner_ptr, 0, word_bytes)
    key1 = _inner_keys(inner_ptr, 1, word_bytes)
    key2 = _inner_keys(inner_ptr, 2, word_bytes)
    key3 = _inner_keys(inner_ptr, 3, word_bytes)
    block = tl.program_id(0).to(tl.int64)
    entry = blocks_ptr + (first_block + block) * 4
    size = tl.load(entry + 2)
    param = size >> 32
    # No alignment is known of this pointer; else the masks' stores are made wide, by a shuffle through shared memory.
    masks_at = mask_bytes_ptr.to(tl.pointer_type(mask)) + block * (65536 * word_bytes // 16)
    new_sum, base_sum, changes = _scan_block(
        tl.load(entry), tl.load(entry + 1), outer_ptr + tl.load(entry + 3), masks_at,
        (size & 0xFFFFFFFF).to(tl.int32), key0, key1, key2, key3, rows, word, word_bytes, True, audit,
    )  # fmt: skip
    tl.store(counts_ptr + block, changes)
    tl.atomic_add(count_sums_ptr + block // 256, changes, sem="relaxed")
    tl.atomic_add(sums_ptr + param, new_sum, sem="relaxed")
    if audit:
        tl.atomic_add(sums_ptr + 2 * num_params + param, base_sum, sem="relaxed")


@program
def audit_program(
    blocks_ptr: tensor, inner_ptr: tensor, outer_ptr: tensor, sums_ptr: tensor, first_block: tensor,
    rows: constexpr, word: constexpr, word_bytes: constexpr,
) -> None:  # fmt: skip
    """Add the fingerprint of one block of the baseline to its parameter's."""
    key0 = _inner_keys(inner_ptr, 0, word_bytes)
    key1 = _inner_keys(inner_ptr, 1, word_bytes)
    key2 = _inner_keys(inner_ptr, 2, word_bytes)
    key3 = _inner_keys(inner_ptr, 3, word_bytes)
    block = tl.program_id(0).to(tl.int64)
    entry = blocks_ptr + (first_block + block) * 4
    address = tl.load(entry + 1)
    size = tl.load(entry + 2)
    total, _, _ = _scan_block(
        address, address, outer_ptr + tl.load(entry + 3), inner_ptr, (size & 0xFFFFFFFF).to(tl.int32),
        key0, key1, key2, key3, rows, word, word_bytes, False, False,
    )  # fmt: skip
    tl.atomic_add(sums_ptr + (size >> 32), total, sem="relaxed")
