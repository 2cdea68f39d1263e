"""Streams: expected bytes by hand, and what their decoders refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.codec.streams import (
    GapStreams,
    decode_bitmap,
    decode_gaps,
    difference_codes,
    encode_bitmap,
    encode_gaps,
    join_planes,
    pack_codes,
    split_planes,
    unpack_codes,
)
from deltacast.delta.errors import FormatError


def i64(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def u8(*values: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(values, np.uint8)


def gaps(low: Any, quads: Any, high: Any = (), wide: Any = ()) -> GapStreams:
    return GapStreams(u8(*low), u8(*quads), u8(*high), np.array(wide, "<u8"))


def decoded(streams: GapStreams, counts: Any, floors: Any, ceilings: Any) -> list[int]:
    out = np.empty(streams.low.size, np.int64)
    decode_gaps(streams, i64(*counts), i64(*floors), i64(*ceilings), out)
    return out.tolist()


def test_gaps_by_hand() -> None:
    """Two spans: each restarts at its floor; 3 and more in the high byte goes to its own stream."""
    # span of floor 0: positions 5, 6, 263, 1033, 66569; gaps 5, 0, 256, 769, 65535 -> wide
    # span of floor 100: position 100, gap 0
    streams = encode_gaps(i64(5, 6, 263, 1033, 66569, 100), i64(0, 5), i64(0, 100))
    assert streams.low.tolist() == [5, 0, 0, 1, 255, 0]
    assert streams.quads.tolist() == [0b11_01_00_00, 0b00_11]
    assert streams.high.tolist() == [3, 255]
    assert streams.wide.tolist() == [65535]
    assert decoded(streams, [5, 1], [0, 100], [70000, 101]) == [5, 6, 263, 1033, 66569, 100]


@pytest.mark.parametrize("positions", [[4, 4], [5, 4], [0, 9, 8]])
def test_gaps_refuse_disorder(positions: list[int]) -> None:
    """A repeated or descending position is not written."""
    with pytest.raises(FormatError, match="strictly ascending"):
        encode_gaps(i64(*positions), i64(0), i64(0))


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (gaps([9], [0]), "outside its span"),
        (gaps([255], [3], [255]), "does not match the escapes"),
        (gaps([255], [3], [255], [7, 7]), "does not match the escapes"),
        (gaps([0], [0], [], [70000]), "does not match the escapes"),
        (gaps([255], [3], [255], [65534]), "fits 16 bits"),
        (gaps([255], [3], [255], [2**64 - 1]), "62-bit"),
        (gaps([255], [3], [255], [2**63]), "62-bit"),
        (gaps([255, 255], [15], [255, 255], [2**61, 2**61]), "62-bit"),
        (gaps([255] * 4, [255], [255] * 4, [2**62 - 1] * 4), "62-bit"),
        (gaps([0], [3]), "gap_high does not match"),
        (gaps([0], [0], [5]), "gap_high does not match"),
        (gaps([0], [3], [2]), "below 3"),
        (gaps([0], [0b100]), "padding of stream gap_quads"),
    ],
)
def test_gaps_refuse_contradictions(streams: GapStreams, message: str) -> None:
    """Escapes, their streams and the span have to agree; sums near 2^64 do not wrap into range."""
    with pytest.raises(FormatError, match=message):
        decoded(streams, [streams.low.size], [0], [9])


@given(st.lists(st.integers(1, 300_000) | st.integers(1, 900), min_size=1, max_size=60), st.integers(0, 40))
@settings(deadline=None, max_examples=80)
def test_gaps_round_trip(steps: list[int], floor: int) -> None:
    """Any ascending positions come back."""
    positions = np.cumsum(np.array(steps)) + floor - 1
    streams = encode_gaps(positions, i64(0), i64(floor))
    assert decoded(streams, [positions.size], [floor], [int(positions[-1]) + 1]) == positions.tolist()


def test_bitmap_by_hand() -> None:
    """Lowest bit first; each span begins at a byte of its own."""
    assert encode_bitmap(i64(0, 3, 9, 16), 24).tolist() == [0b1001, 0b10, 0b1]
    out = np.empty(4, np.int64)
    decode_bitmap(u8(0b1001, 0b10, 0b1), i64(3, 1), i64(0, 50), i64(10, 53), out)
    assert out.tolist() == [0, 3, 9, 50]


@pytest.mark.parametrize(
    ("bitmap", "message"),
    [
        ([0b1000, 0b1], "fewer bits"),
        ([0b1111, 0b1], "more bits"),
        ([0b1011, 0], "do not match its entry"),
        ([0b0011, 0b1000], "padding bit"),
    ],
)
def test_bitmap_refuses_contradictions(bitmap: list[int], message: str) -> None:
    """Two spans of 8 and 3 positions with 2 and 1 changes."""
    with pytest.raises(FormatError, match=message):
        decode_bitmap(u8(*bitmap), i64(2, 1), i64(0, 8), i64(8, 11), np.empty(3, np.int64))


def test_codes_by_hand() -> None:
    """+1, -1, +2, -2 become 1, 0, 3, 2; floats count in the order of their values."""
    new, old = np.array([11, 9, 12, 8], "<u2"), np.array([10] * 4, "<u2")
    out = np.empty_like(new)
    difference_codes(new, old, out, signed_magnitude=True)
    assert out.tolist() == [1, 0, 3, 2]
    # -0.0 (8000) is just below +0.0 in that order, and 8001 below -0.0
    difference_codes(np.array([0x8001], "<u2"), np.array([0], "<u2"), out[:1], signed_magnitude=True)
    assert out[0] == 2
    difference_codes(np.array([0x8001], "<u2"), np.array([0], "<u2"), out[:1], signed_magnitude=False)
    assert out[0] == 0xFFFC  # 0x8001 is -0x7fff modulo 2^16: zigzag 0xfffd, less one


def test_nibbles_by_hand() -> None:
    """Low nibble first; 15 takes the next exception; an odd count is padded with zero."""
    packed, exceptions = pack_codes(np.array([1, 0, 14, 15, 300], "<u2"))
    assert packed.tolist() == [0x01, 0xFE, 0x0F]
    assert exceptions.tolist() == [15, 300]
    out = np.empty(5, "<u2")
    unpack_codes(packed, exceptions, out)
    assert out.tolist() == [1, 0xFFFF, 0x10000 - 8, 8, 0x10000 - 151]


@pytest.mark.parametrize(
    ("packed", "exceptions", "message"),
    [
        ([0x01, 0x10], [], "padding nibble"),
        ([0xF1, 0x00], [], "exceptions do not match"),
        ([0x01, 0x00], [20], "exceptions do not match"),
        ([0xF1, 0x00], [14], "out of range"),
        ([0xF1, 0x00], [0xFFFF], "out of range"),
    ],
)
def test_nibbles_refuse_contradictions(packed: list[int], exceptions: list[int], message: str) -> None:
    """Three codes whose exceptions are missing, left over, too small, or stand for no change."""
    with pytest.raises(FormatError, match=message):
        unpack_codes(u8(*packed), np.array(exceptions, "<u2"), np.empty(3, "<u2"))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_difference_round_trips(width: int) -> None:
    """All differences of small words, and the corners of large ones."""
    corners = [1, 2, 7, 8, 15, 16, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1]
    wanted = np.array([*range(1, 256), *corners] if width < 8 else corners, f"<u{width}")
    codes = np.empty_like(wanted)
    difference_codes(wanted, np.zeros_like(wanted), codes, signed_magnitude=False)
    packed, exceptions = pack_codes(codes)
    out = np.empty_like(wanted)
    unpack_codes(packed, exceptions, out)
    assert out.tolist() == wanted.tolist()


def test_planes_by_hand() -> None:
    """Least significant byte first."""
    planes = split_planes(np.array([0x04030201, 0x08070605], "<u4"))
    assert [plane.tolist() for plane in planes] == [[1, 5], [2, 6], [3, 7], [4, 8]]
    out = np.empty(2, "<u4")
    join_planes(planes, out)
    assert out.tolist() == [0x04030201, 0x08070605]
