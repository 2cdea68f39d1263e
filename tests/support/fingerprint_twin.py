"""A slow twin of the fingerprint and the digests, in plain integers, written from docs/fingerprint.md.

Shares no code with deltacast: what a test computes here is a right value from outside the code under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import xxhash

_WRAP = 2**64
_INNER_SEED = int.from_bytes(b"deltacas", "big")
_OUTER_SEED = int.from_bytes(b"tpatches", "big")


def _splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) % _WRAP
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WRAP
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WRAP
    return z ^ (z >> 31)


@cache
def _odd(seed: int) -> int:
    return _splitmix64(seed % _WRAP) | 1


def unit_key(position: int) -> int:
    """The key of one unit."""
    row, column = divmod(position, 1024)
    return _odd(_INNER_SEED + column) * _odd(_OUTER_SEED + row) % _WRAP


def unit_bytes(word_bytes: int) -> int:
    """Bytes of a unit: one for one-byte words, else two."""
    return 1 if word_bytes == 1 else 2


def bytes_fingerprint(data: bytes, word_bytes: int, first_unit: int = 0) -> int:
    """The (partial) fingerprint of canonical bytes whose first unit is at a global position."""
    size = unit_bytes(word_bytes)
    units = (int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size))
    return sum(unit * unit_key(first_unit + number) for number, unit in enumerate(units)) % _WRAP


def box_fingerprint(
    data: bytes, word_bytes: int, words_per_element: int, shape: Sequence[int], box: Sequence[tuple[int, int]]
) -> int:
    """The partial fingerprint of the elements of a box, from the full parameter's bytes, one element at a time."""
    element, size = word_bytes * words_per_element, unit_bytes(word_bytes)
    total = 0
    for number in range(len(data) // element):
        rest = number
        place: list[int] = []
        for extent in reversed(shape):
            rest, here = divmod(rest, extent)
            place.insert(0, here)
        if all(lo <= here < hi for here, (lo, hi) in zip(place, box, strict=True)):
            at = number * element
            total += bytes_fingerprint(data[at : at + element], word_bytes, at // size)
    return total % _WRAP


def _little(value: int, num_bytes: int) -> bytes:
    return value.to_bytes(num_bytes, "little")


def digests(parameters: Iterable[tuple[str, str, Sequence[int], int]]) -> tuple[str, str]:
    """The table digest and the state digest of `(name, dtype, shape, fingerprint)`, as they are written."""
    table, sums = xxhash.xxh3_128(), b""
    for name, dtype, shape, fingerprint in sorted(parameters, key=lambda row: row[0].encode("utf-8")):
        raw = name.encode("utf-8")
        table.update(_little(len(raw), 4) + raw + dtype.encode("ascii") + b"\x00")
        table.update(_little(len(shape), 4) + b"".join(_little(extent, 8) for extent in shape))
        sums += _little(fingerprint, 8)
    state = xxhash.xxh3_128(table.digest() + sums)
    return f"xxh3_128:{table.hexdigest()}", f"xxh3_128:{state.hexdigest()}"
