"""Transforms between positions, words and the byte streams of format 1 (docs/format.md, "Streams").

Pure numpy, no compression and no I/O. Everything works on arrays that are pooled over the spans of one group, so
that 40,000 small parameters cost as little as one large one. Decoders check what they read: a stream that
contradicts its counts is a `FormatError`, and positions come out strictly ascending and in range by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.errors import FormatError
from deltacast.delta.patch import ordered

__all__ = [
    "GapStreams",
    "decode_bitmap",
    "decode_gaps",
    "difference_codes",
    "encode_bitmap",
    "encode_gaps",
    "join_planes",
    "pack_codes",
    "split_planes",
    "unpack_codes",
    "zigzag",
]

Bytes: TypeAlias = NDArray[np.uint8]
I64: TypeAlias = NDArray[np.int64]

_CHUNK: Final = 1 << 16  # elements per pass: temporaries of a few hundred KiB stay in the second-level cache
_ESCAPE: Final = 65535
_LIMIT: Final = 1 << 62  # no sum of gaps may come near int64's end


@dataclass(frozen=True, slots=True, eq=False)
class GapStreams:
    """The four streams of pooled sparse positions.

    Attributes:
        low: low bytes, one per gap.
        quads: high bytes as 2-bit codes, four to a byte; 3 means 3 or more.
        high: the high bytes of 3 and more, in order.
        wide: the gaps that need more than 16 bits, in order.
    """

    low: Bytes
    quads: Bytes
    high: Bytes
    wide: NDArray[np.uint64]


def encode_gaps(indices: I64, starts: I64, floors: I64) -> GapStreams:
    """Turn pooled ascending positions into gap streams.

    Args:
        indices: int64 positions of all spans, one span after the other.
        starts: where each span that has changes begins in `indices`.
        floors: the first position that each of those spans covers.

    Raises:
        FormatError: positions descend or repeat within a span (the caller knows which parameter).
    """
    gaps = np.empty_like(indices)
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps -= 1
    gaps[starts] = indices[starts] - floors
    if gaps.size and gaps.min() < 0:
        raise FormatError("positions are not strictly ascending")
    wide = gaps[gaps >= _ESCAPE].astype("<u8")
    if wide.size:
        np.minimum(gaps, _ESCAPE, out=gaps)
    planes = gaps.astype("<u2").view(np.uint8)
    high = planes[1::2].copy()
    codes = np.zeros(high.size + -high.size % 4, np.uint8)
    np.minimum(high, 3, out=codes[: high.size])
    fours = codes.view("<u4")
    fours |= fours >> 6
    fours |= fours >> 12
    return GapStreams(planes[0::2].copy(), fours.astype(np.uint8), high[high >= 3], wide)


def decode_gaps(streams: GapStreams, counts: I64, floors: I64, ceilings: I64, out: I64) -> None:
    """Write the positions of pooled spans to `out`, each strictly ascending within `[floor, ceiling)`.

    Args:
        streams: the four streams; `low` is as long as `out`.
        counts: changes per span, all above 0, adding up to `out.size`.
        floors: first position of each span.
        ceilings: first position after each span.
        out: int64, written whole.

    Raises:
        FormatError: codes and what they announce do not match, or a position leaves its span.
    """
    gaps = _high_bytes(streams, out.size).astype("<u2")
    gaps <<= 8
    gaps |= streams.low
    out[...] = gaps
    escapes = np.flatnonzero(gaps == _ESCAPE)
    if escapes.size != streams.wide.size:
        raise FormatError("stream wide does not match the escapes", expected=escapes.size, found=streams.wide.size)
    if escapes.size:
        _check_wide(streams.wide, out.size)
        out[escapes] = streams.wide.astype(np.int64)
    out += 1
    np.cumsum(out, out=out)
    ends = np.cumsum(counts)
    before = np.concatenate((np.zeros(1, np.int64), out[ends[:-1] - 1])) if ends.size else ends
    shift = floors - before - 1
    if shift.size == 1:
        out += shift[0]
    else:
        out += np.repeat(shift, counts)
    beyond = out[ends - 1] >= ceilings
    if beyond.any():
        span = int(beyond.argmax())
        raise FormatError("a position lies outside its span", expected=f"below {ceilings[span]}",
                          found=int(out[ends[span] - 1]))  # fmt: skip


@lru_cache(maxsize=1)
def _fours() -> NDArray[np.uint32]:
    """Four bytes for each byte of four 2-bit codes."""
    byte = np.arange(256)
    return ((byte & 3) | (byte >> 2 & 3) << 8 | (byte >> 4 & 3) << 16 | (byte >> 6) << 24).astype(np.uint32)


def _high_bytes(streams: GapStreams, num_gaps: int) -> Bytes:
    padded = _fours()[streams.quads].view(np.uint8)
    if padded[num_gaps:].any():
        raise FormatError("the padding of stream gap_quads is not zero")
    high = padded[:num_gaps]
    places = np.flatnonzero(high == 3)
    if places.size != streams.high.size:
        raise FormatError("stream gap_high does not match gap_quads", expected=places.size, found=streams.high.size)
    if streams.high.size:
        if int(streams.high.min()) < 3:
            raise FormatError("a byte of stream gap_high is below 3", found=int(streams.high.min()))
        high[places] = streams.high
    return high


def _check_wide(wide: NDArray[np.uint64], num_changes: int) -> None:
    if int(wide.min()) < _ESCAPE:
        raise FormatError("a wide gap fits 16 bits", expected=f"at least {_ESCAPE}", found=int(wide.min()))
    # Summed in floating point: exact sums may wrap, and the bound is far from int64's end.
    if float(wide.sum(dtype=np.float64)) + 65536.0 * num_changes >= _LIMIT:
        raise FormatError("wide gaps leave the 62-bit range", found=int(wide.max()))


def encode_bitmap(positions: I64, num_bits: int) -> Bytes:
    """Set one bit per position (lowest bit of a byte first) in a bitmap of `num_bits`, a multiple of 8."""
    bits = np.zeros(num_bits, np.uint8)
    bits[positions] = 1
    return np.packbits(bits, bitorder="little")


def decode_bitmap(bitmap: Bytes, counts: I64, floors: I64, ceilings: I64, out: I64) -> None:
    """Write the positions of pooled bitmap spans to `out`; each span begins at a byte of its own.

    Args:
        bitmap: the pooled stream, `ceil((ceiling - floor) / 8)` bytes per span.
        counts: set bits per span, adding up to `out.size`.
        floors: first position of each span.
        ceilings: first position after each span.
        out: int64, written whole.

    Raises:
        FormatError: a span has another number of set bits, or a padding bit is set.
    """
    filled = 0
    for start in range(0, bitmap.size, _CHUNK):
        bits = np.unpackbits(bitmap[start : start + _CHUNK], bitorder="little")
        found = np.flatnonzero(bits.view(np.bool_))
        if filled + found.size > out.size:
            raise FormatError("a bitmap has more bits set than changes", expected=out.size)
        np.add(found, start * 8, out=out[filled : filled + found.size])
        filled += found.size
    if filled != out.size:
        raise FormatError("a bitmap has fewer bits set than changes", expected=out.size, found=filled)
    sizes = (ceilings - floors + 7) // 8 * 8
    first_bits = np.cumsum(sizes) - sizes
    ends = np.cumsum(counts)
    if (np.searchsorted(out, first_bits + sizes) != ends).any():
        raise FormatError("a bitmap's bits do not match its entry's number of changes")
    out += np.repeat(floors - first_bits, counts)
    some = counts > 0
    if (out[ends[some] - 1] >= ceilings[some]).any():
        raise FormatError("a bitmap has a padding bit set")


def difference_codes(new: Words, old: Words, out: Words, *, signed_magnitude: NDArray[np.bool_] | bool) -> None:
    """Write `zigzag(o(new) - o(old)) - 1` per word to `out`; a word that did not change gives all ones.

    Args:
        new: unsigned words after.
        old: unsigned words before, as many.
        out: unsigned words of the same width, written whole.
        signed_magnitude: which words take part in the order of IEEE floats: one bool for all, or one per word.
    """
    for start in range(0, new.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        mask = signed_magnitude if isinstance(signed_magnitude, bool) else signed_magnitude[part]
        zigzag(_order(new[part], signed_magnitude=mask) - _order(old[part], signed_magnitude=mask), out[part])


def _order(array: Words, *, signed_magnitude: NDArray[np.bool_] | bool) -> Words:
    if isinstance(signed_magnitude, bool):
        return ordered(array, signed_magnitude=signed_magnitude)
    return np.where(signed_magnitude, ordered(array, signed_magnitude=True), array)


def zigzag(differences: Words, out: Words) -> None:
    """Write `zigzag(d) - 1` per difference to `out`: 1, -1, 2, -2 ... become 1, 0, 3, 2 ... and 0 all ones."""
    signed = differences.view(f"<i{differences.itemsize}")
    sign = (signed >> (8 * differences.itemsize - 1)).view(differences.dtype)
    np.left_shift(differences, 1, out=out)
    out ^= sign
    out -= 1


def pack_codes(codes: Words) -> tuple[Bytes, Words]:
    """Return the nibble stream and the exceptions (codes of 15 and more, in order) of pooled codes."""
    packed = np.zeros((codes.size + 1) // 2, np.uint8)
    exceptions = []
    for start in range(0, codes.size, _CHUNK):  # _CHUNK is even, so chunks begin at a whole byte
        part = codes[start : start + _CHUNK]
        nibbles = np.zeros(part.size + part.size % 2, np.uint8)
        np.minimum(part, 15, out=nibbles[: part.size], casting="unsafe")
        pairs = nibbles.view("<u2")
        packed[start // 2 : start // 2 + pairs.size] = pairs | (pairs >> 4)
        exceptions.append(part[np.flatnonzero(nibbles[: part.size] == 15)])
    return packed, np.concatenate(exceptions) if exceptions else codes[:0]


@lru_cache(maxsize=4)
def _pairs(word_bytes: int) -> NDArray[Any]:
    """Two words for each byte of two nibbles; 0, which is no difference, stands where an exception goes."""
    code = np.arange(1, 17, dtype=f"<u{word_bytes}")
    words = (code >> 1) ^ (0 - (code & 1))
    words[15] = 0
    both = np.stack((np.tile(words, 16), np.repeat(words, 16)), axis=1)
    return both.view(f"<u{2 * word_bytes}").reshape(-1) if word_bytes < 8 else both


def unpack_codes(packed: Bytes, exceptions: Words, out: Words) -> None:
    """Write the differences `o(new) - o(old)` of pooled codes to `out`; none of them is 0.

    Raises:
        FormatError: the exceptions do not match the nibbles, are out of range, or the padding nibble is set.
    """
    table = _pairs(out.itemsize)
    half = _CHUNK // 2
    whole = out.size // 2
    for start in range(0, whole, half):
        stop = min(start + half, whole)
        out[2 * start : 2 * stop] = np.take(table, packed[start:stop], axis=0).reshape(-1).view(out.dtype)
    if out.size % 2:
        if packed[-1] >> 4:
            raise FormatError("the padding nibble is not zero")
        out[-1] = table[packed[-1]].reshape(1).view(out.dtype)[0] if out.itemsize < 8 else table[packed[-1], 0]
    places = np.flatnonzero(out == 0)
    if places.size != exceptions.size:
        raise FormatError("exceptions do not match the nibbles", expected=places.size, found=exceptions.size)
    if exceptions.size:
        highest = (1 << 8 * out.itemsize) - 2
        if int(exceptions.min()) < 15 or int(exceptions.max()) > highest:
            raise FormatError("an exception is out of range", expected=f"15 to {highest}")
        codes = exceptions + exceptions.dtype.type(1)
        out[places] = (codes >> 1) ^ (0 - (codes & 1))


def split_planes(words: Words) -> list[Bytes]:
    """Return the byte planes of words, least significant first, each contiguous."""
    size = words.itemsize
    flat = np.ascontiguousarray(words).view(np.uint8)
    return [flat[byte::size].copy() for byte in range(size)]


def join_planes(planes: list[Bytes], out: Words) -> None:
    """Write the words that byte planes stand for (least significant first) to `out`."""
    if out.itemsize == 1:
        out[...] = planes[0]
        return
    for start in range(0, out.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        target = out[part]
        target[...] = planes[-1][part]
        for plane in planes[-2::-1]:
            target <<= 8
            target |= plane[part]
