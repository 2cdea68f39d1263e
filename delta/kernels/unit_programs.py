"""Triton functions that the kernels share: units and keys, bits of masks, and where a block's changes begin."""

# Kernels take many pointers and sizes; a launch passes them by position, and constants by name.
# ruff: noqa: PLR0917

from __future__ import annotations

from deltacast.delta.kernels.language import constexpr, jit, tensor, tl

__all__ = ["bit_count", "lowest_bit", "start_of", "weigh", "weigh_at"]


@jit
def weigh(word: tensor, key0: tensor, key1: tensor, key2: tensor, key3: tensor, word_bytes: constexpr) -> tensor:
    """Sum a word's units times their keys, modulo 2^64, as int64; a word has one, two or four units."""
    wide = word.to(tl.int64)
    if word_bytes == 1:
        total = (wide & 0xFF) * key0
    elif word_bytes == 2:
        total = (wide & 0xFFFF) * key0
    elif word_bytes == 4:
        total = (wide & 0xFFFF) * key0 + ((wide >> 16) & 0xFFFF) * key1
    else:
        total = (wide & 0xFFFF) * key0 + ((wide >> 16) & 0xFFFF) * key1
        total += ((wide >> 32) & 0xFFFF) * key2 + ((wide >> 48) & 0xFFFF) * key3
    return total


@jit
def weigh_at(
    word: tensor, offset: tensor, live: tensor, inner_ptr: tensor, outer_ptr: tensor, word_bytes: constexpr
) -> tensor:
    """Weigh words at in-block offsets, keys from the tables; `outer_ptr` is that of the block's first row."""
    units: constexpr = (word_bytes + 1) // 2
    first = offset * units
    inner_at = inner_ptr + (first & 1023)
    key0 = tl.load(inner_at, mask=live, other=0)
    key1 = key0
    key2 = key0
    key3 = key0
    if units > 1:
        key1 = tl.load(inner_at + 1, mask=live, other=0)
    if units > 2:
        key2 = tl.load(inner_at + 2, mask=live, other=0)
        key3 = tl.load(inner_at + 3, mask=live, other=0)
    return weigh(word, key0, key1, key2, key3, word_bytes) * tl.load(outer_ptr + (first >> 10), mask=live, other=0)


@jit
def bit_count(word: tensor) -> tensor:
    """Count the set bits of each int32 (LLVM makes one instruction of it)."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@jit
def lowest_bit(word: tensor) -> tensor:
    """Find the lowest set bit of each int32: the exponent of that power of two as a float; below 0 if none is set."""
    lowest = (word & -word).to(tl.uint32, bitcast=True).to(tl.float32)
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127


@jit
def start_of(counts_ptr: tensor, sums_ptr: tensor, block: tensor) -> tensor:
    """Sum the counts of the blocks before `block`, as int64; `sums_ptr` holds those of each 256 blocks, int32."""
    near = tl.arange(0, 256)
    head = block // 256 * 256
    before = tl.load(counts_ptr + head + near, mask=head + near < block, other=0).to(tl.int64)
    for first in range(0, block // 256, 256):
        before += tl.load(sums_ptr + first + near, mask=first + near < block // 256, other=0)
    return tl.sum(before, 0)
