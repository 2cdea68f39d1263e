"""The linear 64-bit fingerprint of one parameter's bits (docs/fingerprint.md).

``fingerprint = sum_i x_i * key(i) mod 2^64`` over the 16-bit units ``x_i`` of the canonical bytes. Because it is
linear, it updates in O(changes), adds up over shards in any cut, and folds when updates fold. Integer addition
commutes, so threads and GPUs give the same value in any order. It detects errors; it is no cryptographic hash.

Positions here are *global word* positions: flat, row-major, in the full (unsharded) parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import Words, numpy_words, words
from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError

__all__ = [
    "Box",
    "add",
    "box_positions",
    "change_sums",
    "fingerprint",
    "format_sum",
    "keys",
    "parse_sum",
    "shard_fingerprint",
    "words_fingerprint",
]

U64: TypeAlias = NDArray[np.uint64]
Box: TypeAlias = tuple[tuple[int, int], ...]
"""A shard's place in the full tensor: `[lo, hi)` per dim."""

_SEED_INNER = 0x64656C7461636173
_SEED_OUTER = 0x7470617463686573
_ROW = 1024
_CHUNK_ROWS = 64
_CHUNK_WORDS = _ROW * _CHUNK_ROWS
_MASK = (1 << 64) - 1


def _splitmix64(z: U64) -> U64:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=1)
def _inner_keys() -> U64:
    return _splitmix64(np.uint64(_SEED_INNER) + np.arange(_ROW, dtype=np.uint64)) | np.uint64(1)


def _outer_keys(first_row: int, num_rows: int) -> U64:
    rows = np.arange(first_row, first_row + num_rows, dtype=np.uint64)
    return _splitmix64(np.uint64(_SEED_OUTER) + rows) | np.uint64(1)


@lru_cache(maxsize=4)
def _outer_table(log2_rows: int) -> U64:
    table = _outer_keys(0, 1 << log2_rows)
    table.flags.writeable = False
    return table


def keys(positions: NDArray[np.int64] | U64) -> U64:
    """Return `key(i)` for each unit position (int64 or uint64, any order), as uint64 of the same shape."""
    positions = positions.astype(np.int64, copy=False)
    inner: U64 = _inner_keys()[positions & (_ROW - 1)]
    rows = positions >> 10
    last = int(rows.max(initial=0))
    if last < 1 << 22:  # a table of at most 32 MiB covers 2^32 units; beyond it, hash each row
        inner *= _outer_table(max(last, 1).bit_length())[rows]
    else:
        inner *= _splitmix64(np.uint64(_SEED_OUTER) + rows.astype(np.uint64)) | np.uint64(1)
    return inner


def add(a: int, b: int) -> int:
    """Add two sums modulo 2^64; `b` may be negative."""
    return (a + b) & _MASK


def format_sum(value: int) -> str:
    """Write a 64-bit sum the way headers and reports do: 16 hex digits."""
    return f"{value & _MASK:016x}"


def parse_sum(text: object) -> int:
    """Read 16 lower-case hex digits.

    Raises:
        InputError: anything else.
    """
    if not isinstance(text, str) or len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise InputError("bad 64-bit sum", expected="16 lower-case hex digits", found=repr(text))
    return int(text, 16)


def words_fingerprint(array: Words, first_word: int = 0) -> int:
    """Return the (partial) fingerprint of a contiguous run of words.

    Args:
        array: flat unsigned words, contiguous.
        first_word: the global position of the first one.

    Returns:
        The sum modulo 2^64; partial sums of disjoint runs add up to the whole.
    """
    unit_bytes = min(array.itemsize, 2)
    units = array.view(f"<u{unit_bytes}")
    first = first_word * (array.itemsize // unit_bytes)
    head = min(-first % _ROW, units.size)
    total = _ragged(units[:head], first)
    body = (units.size - head) // _ROW * _ROW
    total += _rows_sum(units[head : head + body].reshape(-1, _ROW), (first + head) // _ROW)
    total += _ragged(units[head + body :], first + head + body)
    return total & _MASK


def _ragged(units: Words, first: int) -> int:
    positions = np.arange(first, first + units.size, dtype=np.int64)
    return int((units.astype(np.uint64) * keys(positions)).sum(dtype=np.uint64))


def _rows_sum(rows: Words, first_row: int) -> int:
    # key = inner * outer, so a row of 1024 units needs one table of inner keys and a single outer factor.
    inner, total = _inner_keys(), np.uint64(0)
    buffer = np.empty((min(_CHUNK_ROWS, len(rows)), _ROW), np.uint64)
    with np.errstate(over="ignore"):
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[start : start + _CHUNK_ROWS]
            products = np.multiply(chunk, inner, out=buffer[: len(chunk)])
            outer = _outer_keys(first_row + start, len(chunk))
            total += (products.sum(axis=1, dtype=np.uint64) * outer).sum(dtype=np.uint64)
    return int(total)


def change_sums(positions: NDArray[np.int64], old: Words, new: Words) -> tuple[int, int]:
    """Return `(old_sum, new_sum)`: the sums of old and of new units times key over changed words.

    `fingerprint(after) = fingerprint(before) - old_sum + new_sum`, and a holder of the base can check `old_sum`
    against the bits it is about to overwrite.

    Args:
        positions: int64 global word positions, one per word.
        old: the words there now.
        new: the words that replace them; same dtype and length.
    """
    unit_bytes = min(old.itemsize, 2)
    per_word = old.itemsize // unit_bytes
    old_units = old.view(f"<u{unit_bytes}").reshape(-1, per_word)
    new_units = new.view(f"<u{unit_bytes}").reshape(-1, per_word)
    old_sum = new_sum = 0
    for start in range(0, positions.size, _CHUNK_WORDS):  # chunks stay in cache
        part = slice(start, start + _CHUNK_WORDS)
        for j in range(per_word):
            key = keys(positions[part] * per_word + j)
            old_sum += int((key * old_units[part, j]).sum(dtype=np.uint64))
            new_sum += int((key * new_units[part, j]).sum(dtype=np.uint64))
    return old_sum & _MASK, new_sum & _MASK


def fingerprint(tensor: torch.Tensor, *, name: str = "tensor") -> int:
    """Return the fingerprint of a whole tensor of any dtype of the table, on its own device.

    Raises:
        DTypeError, InputError: the tensor's bits cannot be addressed (deltacast.delta.bits).
    """
    if tensor.device.type == "cpu":
        return words_fingerprint(numpy_words(tensor, name=name))
    return _torch_fingerprint(words(tensor, name=name))


def _torch_fingerprint(flat: torch.Tensor, chunk: int = 1 << 22) -> int:
    """The same sum in torch's wrapping int64 arithmetic, for tensors that live on a GPU."""
    units = flat if flat.element_size() == 1 else flat.view(torch.int16)
    mask = 0xFF if flat.element_size() == 1 else 0xFFFF
    inner = torch.from_numpy(_inner_keys().view(np.int64)).to(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, units.numel(), chunk):
        part = units[start : start + chunk].to(torch.int64) & mask
        part = torch.nn.functional.pad(part, (0, -part.numel() % _ROW)).view(-1, _ROW)
        outer = torch.from_numpy(_outer_keys(start // _ROW, len(part)).view(np.int64)).to(flat.device)
        total += ((part * inner).sum(1) * outer).sum()
    return int(total) & _MASK


def box_positions(
    full_shape: Sequence[int], box: Box, words_per_element: int = 1, *, name: str = "tensor"
) -> Iterable[tuple[int, int, int]]:
    """Yield the contiguous runs of a box as `(local word, global word, number of words)`, in row-major order.

    Raises:
        InputError: the box does not lie in the shape.
    """
    if len(box) != len(full_shape) or any(not 0 <= lo <= hi <= n for (lo, hi), n in zip(box, full_shape, strict=True)):
        raise InputError(
            "a shard's box lies outside the parameter",
            parameter=name,
            expected=f"inside {tuple(full_shape)}",
            found=box,
        )
    extents = [hi - lo for lo, hi in box]
    if 0 in extents:
        return
    axis = len(box)  # dims from `axis` on are whole, so dims from `axis - 1` on are contiguous in memory
    while axis > 0 and extents[axis - 1] == full_shape[axis - 1]:
        axis -= 1
    inner = math.prod(full_shape[axis:])
    cut = max(axis - 1, 0)
    run = inner * (extents[cut] if axis else 1)
    lo_offset = box[cut][0] * inner if axis else 0
    strides = [math.prod(full_shape[d + 1 :]) for d in range(len(box))]
    for number, place in enumerate(np.ndindex(*extents[:cut])):
        start = lo_offset + sum((lo + i) * s for (lo, _), i, s in zip(box, place, strides, strict=False))
        yield number * run * words_per_element, start * words_per_element, run * words_per_element


def shard_fingerprint(shard: torch.Tensor, full_shape: Sequence[int], box: Box, *, name: str = "tensor") -> int:
    """Return the partial fingerprint of a shard, with global positions.

    Sums over shards that cover every element exactly once equal `fingerprint` of the full tensor; a shard made
    of several blocks (fused qkv) is several calls.

    Args:
        shard: the local tensor, of the box's shape, any layout.
        full_shape: the full parameter's shape.
        box: `[lo, hi)` per dim of the full shape.
        name: what error messages call it.

    Raises:
        InputError: the box lies outside, or the shard has another shape than the box.
    """
    extents = tuple(hi - lo for lo, hi in box)
    if tuple(shard.shape) != extents:
        raise InputError("a shard does not fill its box", parameter=name, expected=extents, found=tuple(shard.shape))
    local = numpy_words(shard, name=name)
    factor = dtype_of(shard.dtype).words_per_element
    total = 0
    for here, there, count in box_positions(full_shape, box, factor, name=name):
        total += words_fingerprint(local[here : here + count], there)
    return total & _MASK
