"""`Begin` and `Sums`: their bytes, and what is refused. Right values: struct, from docs/format.md, section 6."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import xxhash

from deltacast.delta.chunks import Begin, Sums
from deltacast.delta.errors import ChecksumError, FormatError, TableError
from deltacast.delta.table import ParameterTable, ParamMeta

TABLE = ParameterTable(
    [ParamMeta("a", "bfloat16", (3, 5)), ParamMeta("b", "float32", ()), ParamMeta("c", "bfloat16", (7,))]
)
BASE = bytes(range(16))
Part: TypeAlias = tuple[str, tuple[int | bytes, ...]]


def sealed(*parts: Part) -> bytes:
    """Little-endian fields and a right checksum behind them."""
    body = b"".join(struct.pack("<" + form, *values) for form, values in parts)
    return body + xxhash.xxh3_128(body).digest()


def begin_bytes(
    *, num_params: int = 3, num_groups: int = 2, chunk_bytes: int = 1 << 19, table: bytes | None = None,
    capacities: tuple[int, ...] = (22, 1), order: tuple[int, ...] = (2, 0, 1), magic: bytes = b"\x89DCB\r\n\x1a\n",
) -> bytes:  # fmt: skip
    digest = bytes.fromhex(TABLE.digest.removeprefix("xxh3_128:")) if table is None else table
    head = ("8sIIQq16s16s", (magic, num_params, num_groups, chunk_bytes, 41, BASE, digest))
    return sealed(head, (f"{len(capacities)}Q", capacities), (f"{len(order)}I", order))


def sums_bytes(
    count: int = 2, places: tuple[int, ...] = (0, 2), padding: int = 0, sums: tuple[int, ...] = (5, 2**64 - 1, 7, 0)
) -> bytes:
    head = ("8sI4x", (b"\x89DCS\r\n\x1a\n", count))
    return sealed(head, (f"{len(places)}I{padding}x", places), (f"{len(sums)}Q", sums))


def test_a_begin_is_written_as_documented_and_read_back() -> None:
    """Byte for byte, and field for field."""
    begin = Begin(41, f"xxh3_128:{BASE.hex()}", TABLE.digest, 1 << 19, (22, 1), np.array([2, 0, 1], np.uint32))
    assert begin.to_bytes() == begin_bytes()
    read = Begin.from_bytes(begin_bytes(), TABLE)
    assert (read.base_version, read.base_digest, read.table_digest) == (41, begin.base_digest, TABLE.digest)
    assert (read.chunk_bytes, read.capacities, read.order.tolist()) == (1 << 19, (22, 1), [2, 0, 1])


@pytest.mark.parametrize(
    ("places", "padding", "sums"),
    [((), 0, ()), ((1,), 4, (2**63, 3)), ((0, 2), 0, (5, 2**64 - 1, 7, 0)), ((0, 1, 2), 4, (1, 2, 3, 4, 5, 6))],
)
def test_sums_are_written_as_documented_and_read_back(
    places: tuple[int, ...], padding: int, sums: tuple[int, ...]
) -> None:
    """Places padded to eight bytes, then all sums after, then all of the old words; none is legal."""
    half = len(places)
    after, old_sums = np.array(sums[:half], np.uint64), np.array(sums[half:], np.uint64)
    expected = sums_bytes(half, places, padding, sums)
    assert Sums(np.array(places, np.uint32), after, old_sums).to_bytes() == expected
    read = Sums.from_bytes(expected, TABLE)
    assert (*read.places.tolist(),) == places
    assert (*read.after.tolist(), *read.old_sums.tolist()) == sums


@pytest.mark.parametrize(("read", "good"), [(Begin.from_bytes, begin_bytes()), (Sums.from_bytes, sums_bytes())])
def test_every_flipped_byte_and_every_truncation_is_noticed(
    read: Callable[[bytes, ParameterTable], object], good: bytes
) -> None:
    """In the magic by name, elsewhere by the checksum."""
    for place in range(len(good)):
        for flip in (1, 0x80, 0xFF):
            with pytest.raises(FormatError if place < 8 else ChecksumError):
                read(good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :], TABLE)
        with pytest.raises(FormatError):
            read(good[:place], TABLE)
        with pytest.raises(FormatError):  # with a checksum that fits
            read(sealed((f"{place}s", (good[:place],))) if place < len(good) - 16 else good + b"\0", TABLE)


@pytest.mark.parametrize(
    "raw",
    [
        begin_bytes(num_params=2),
        begin_bytes(num_params=4),
        begin_bytes(num_params=2**32 - 1),
        begin_bytes(num_groups=1),
        begin_bytes(num_groups=3),
        begin_bytes(num_groups=2**32 - 1),
        begin_bytes(num_groups=5, capacities=(1, 1, 1, 1, 1)),
        begin_bytes(num_params=2, order=(0, 1)),
        begin_bytes(num_params=4, order=(0, 1, 2, 3)),
        begin_bytes(num_params=1, num_groups=3, capacities=(22, 1, 1), order=(0,)),
        begin_bytes(chunk_bytes=0),
        begin_bytes(chunk_bytes=1 << 50),
        begin_bytes(chunk_bytes=2**64 - 1),
        begin_bytes(capacities=(22, (1 << 50) + 1)),
        begin_bytes(capacities=(2**64 - 1, 1)),
        begin_bytes(order=(0, 1, 1)),
        begin_bytes(order=(0, 1, 3)),
        begin_bytes(order=(0, 1, 2**32 - 1)),
        begin_bytes(magic=b"\x89DCS\r\n\x1a\n"),
    ],
)
def test_a_begin_that_breaks_a_rule_is_refused(raw: bytes) -> None:
    """With a right checksum; absurd sizes take no memory."""
    with pytest.raises(FormatError):
        Begin.from_bytes(raw, TABLE)


def test_a_begin_for_another_table_is_refused_with_both_digests() -> None:
    """A worker knows only its own table."""
    with pytest.raises(TableError, match=f"expected {TABLE.digest}, found xxh3_128:{'07' * 16}"):
        Begin.from_bytes(begin_bytes(table=b"\7" * 16), TABLE)


@pytest.mark.parametrize(
    "raw",
    [
        sums_bytes(count=1),
        sums_bytes(count=3),
        sums_bytes(count=2**32 - 1),
        sums_bytes(places=(2, 0)),
        sums_bytes(places=(1, 1)),
        sums_bytes(places=(0, 3)),
        sums_bytes(places=(0, 2**32 - 1)),
        sums_bytes(sums=(5, 6, 7)),
        sums_bytes(padding=4),
    ],
)
def test_sums_that_break_a_rule_are_refused(raw: bytes) -> None:
    """Another size than stated, places twice, out of order, or not there."""
    with pytest.raises(FormatError):
        Sums.from_bytes(raw, TABLE)
