"""A slow reader of format 1, written from docs/format.md alone: the outside source of right values for tests.

Plain Python integers and lists; shares no code with `deltacast.delta.codec`. It trusts its input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zstandard

WORD_BITS = {"float64": 64, "complex128": 64, "int64": 64, "uint64": 64, "float32": 32, "complex64": 32, "int32": 32,
             "uint32": 32, "bfloat16": 16, "float16": 16, "complex32": 16, "int16": 16, "uint16": 16}  # fmt: skip


@dataclass
class NaiveEntry:
    """One entry: positions in its box (None where dense) and words or signed differences modulo 2^n."""

    header: dict[str, Any]
    indices: list[int] | None
    values: list[int]


def split_file(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the JSON header and all bytes after the header's padding."""
    size = int.from_bytes(raw[8:16], "little")
    header = json.loads(zstandard.ZstdDecompressor().decompress(raw[16 : 16 + size]))
    return header, raw[(16 + size + 7) // 8 * 8 :]


def num_words(entry: dict[str, Any]) -> int:
    """Return how many words an entry's parameter or box has."""
    extents = [hi - lo for lo, hi in entry["box"]] if "box" in entry else entry["shape"]
    return int(math.prod(extents)) * (2 if entry["dtype"].startswith("complex") else 1)


def read(raw: bytes) -> tuple[dict[str, Any], list[NaiveEntry]]:
    """Decode a container."""
    header, rest = split_file(raw)
    entries = [NaiveEntry(e, None if e["encoding"] == "dense" else [], []) for e in header["entries"]]
    for group in header["groups"]:
        streams = {}
        for kind, coding, stored, decoded in group["streams"]:
            part, rest = rest[:stored], rest[stored:]
            streams[kind] = zstandard.ZstdDecompressor().decompress(part) if coding == "zstd" else part
            assert len(streams[kind]) == decoded
        partial = {entry: (lo, hi, count) for entry, lo, hi, count in group.get("spans", [])}
        gaps = _gaps(streams)
        bitmap = iter(streams.get("bitmap", b""))
        words = {(form, bits): source(streams, bits) for form, source in (("delta", _differences), ("absolute", _words))
                 for bits in (8, 16, 32, 64)}  # fmt: skip
        for number in range(group["first"], group["end"]):
            entry = entries[number]
            lo, hi, count = partial.get(number, (0, num_words(entry.header), entry.header["num_changed"]))
            if entry.indices is not None and entry.header["encoding"] == "sparse":
                previous = lo - 1
                for _ in range(count):
                    previous += next(gaps) + 1
                    entry.indices.append(previous)
            elif entry.indices is not None:
                mine = [next(bitmap) for _ in range(-(-(hi - lo) // 8))]
                entry.indices += [lo + i for i in range(8 * len(mine)) if mine[i // 8] >> (i % 8) & 1]
            source = words[entry.header["values"], WORD_BITS.get(entry.header["dtype"], 8)]
            entry.values += [next(source) for _ in range(count)]
    return header, entries


def _gaps(streams: dict[str, bytes]) -> Iterator[int]:
    high, wide = iter(streams.get("gap_high", b"")), streams.get("wide", b"")
    for number, low in enumerate(streams.get("gap_low", b"")):
        code = streams["gap_quads"][number // 4] >> (2 * (number % 4)) & 3
        gap = low + 256 * (next(high) if code == 3 else code)
        if gap == 65535:
            gap, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        yield gap


def _differences(streams: dict[str, bytes], bits: int) -> Iterator[int]:
    planes = streams.get(f"exceptions{bits}", b"")
    num = len(planes) // (bits // 8)
    exceptions = iter([sum(planes[byte * num + i] << 8 * byte for byte in range(bits // 8)) for i in range(num)])
    for pair in streams.get(f"nibbles{bits}", b""):
        for code in (pair & 15, pair >> 4):
            step = (next(exceptions) if code == 15 else code) + 1
            yield (step // 2 if step % 2 == 0 else -(step + 1) // 2) % (1 << bits)


def _words(streams: dict[str, bytes], bits: int) -> Iterator[int]:
    planes = [streams.get(f"words{bits}.{byte}", b"") for byte in range(bits // 8)]
    for row in zip(*planes, strict=True):
        yield sum(part << 8 * byte for byte, part in enumerate(row))


def order(word: int, bits: int, *, signed_magnitude: bool) -> int:
    """The ordered integer of a word."""
    return word ^ ((1 << bits - 1) - 1) if signed_magnitude and word >> (bits - 1) else word
