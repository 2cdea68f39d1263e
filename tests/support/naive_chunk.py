"""Packed chunks in plain Python: the outside source of right values for tests of `deltacast.delta.chunk_codec`.

Loops over integers; shares no code with the package. `write_chunk` stores every piece as it is, and writes whatever
it is told, so that hostile chunks can be made with it; `read_chunk` trusts its input.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash
import zstandard

STREAMS = ("counts", "gap_low", "gap_quads", "gap_high", "nibbles", "exceptions")
PIECE_BYTES = 512 * 1024


def in_order(word: int, bits: int, *, signed_magnitude: bool) -> int:
    """Map a word to its place in the order of values."""
    negative = signed_magnitude and word >> (bits - 1)
    return word ^ ((1 << (bits - 1)) - 1) if negative else word


def value_code(new: int, old: int, bits: int, *, signed_magnitude: bool) -> int:
    """Return `zigzag(o(new) - o(old)) - 1`."""
    a, b = (in_order(word, bits, signed_magnitude=signed_magnitude) for word in (new, old))
    difference = (a - b) % (1 << bits)
    if difference >= 1 << (bits - 1):
        difference -= 1 << bits
    return 2 * difference - 1 if difference > 0 else -2 * difference - 2


def pack_bits(codes: Sequence[int], bits: int) -> bytes:
    """Put codes of 2 or 4 bits into bytes, lowest bits first."""
    per_byte = 8 // bits
    groups = [codes[at : at + per_byte] for at in range(0, len(codes), per_byte)]
    return bytes(sum(code << bits * lane for lane, code in enumerate(group)) for group in groups)


def make_streams(
    blocks: Sequence[Sequence[tuple[int, int, int]]], word_bytes: int, signed_magnitude: Sequence[bool]
) -> dict[str, bytes]:
    """Return the streams of blocks of `(offset, new word, old word)`, with a flag for each block."""
    gaps, codes = [], []
    for block, signed in zip(blocks, signed_magnitude, strict=True):
        previous = -1
        for offset, new, old in block:
            gaps.append(offset - previous - 1)
            previous = offset
            codes.append(value_code(new, old, 8 * word_bytes, signed_magnitude=signed))
    exceptions = [code for code in codes if code >= 15]
    return {
        "counts": b"".join(struct.pack("<I", len(block)) for block in blocks),
        "gap_low": bytes(gap % 256 for gap in gaps),
        "gap_quads": pack_bits([min(gap // 256, 3) for gap in gaps], 2),
        "gap_high": bytes(gap // 256 for gap in gaps if gap // 256 >= 3),
        "nibbles": pack_bits([min(code, 15) for code in codes], 4),
        "exceptions": bytes(code >> 8 * byte & 255 for byte in range(word_bytes) for code in exceptions),
    }


def write_chunk(
    streams: dict[str, bytes], word_bytes: int = 2, *, version: int = 1, num_changes: int | None = None,
    num_high: int | None = None, num_exceptions: int | None = None, stored: Sequence[bytes] | None = None,
) -> bytes:  # fmt: skip
    """Write a chunk with a right checksum; numbers and stored pieces follow from the streams unless they are given."""
    if stored is None:
        parts = [streams[name][at : at + PIECE_BYTES] for name in STREAMS for at in range(0, len(streams[name]), PIECE_BYTES)]  # fmt: skip  # noqa: E501
    else:
        parts = list(stored)
    numbers = (
        len(streams["counts"]) // 4,
        len(streams["gap_low"]) if num_changes is None else num_changes,
        len(streams["gap_high"]) if num_high is None else num_high,
        len(streams["exceptions"]) // word_bytes if num_exceptions is None else num_exceptions,
    )
    table = b"".join(struct.pack("<I", len(part)) for part in parts)
    return sealed(struct.pack("<HH4I", version, word_bytes, *numbers) + table + b"".join(parts))


def sealed(rest: bytes) -> bytes:
    """Put the checksum before the rest of a chunk."""
    return xxhash.xxh3_128(rest).digest() + rest


def read_chunk(packed: bytes) -> dict[str, bytes]:
    """Return the decoded streams of a chunk."""
    _, word_bytes, num_blocks, num_changes, num_high, num_exceptions = struct.unpack_from("<HH4I", packed, 16)
    half, quarter = (num_changes + 1) // 2, (num_changes + 3) // 4
    sizes = (4 * num_blocks, num_changes, quarter, num_high, half, num_exceptions * word_bytes)
    pieces = [[min(PIECE_BYTES, size - at) for at in range(0, size, PIECE_BYTES)] for size in sizes]
    table, at = 36, 36 + 4 * sum(map(len, pieces))
    streams = {}
    for name, decoded_sizes in zip(STREAMS, pieces, strict=True):
        streams[name] = b""
        for decoded in decoded_sizes:
            (stored,) = struct.unpack_from("<I", packed, table)
            part = packed[at : at + stored]
            streams[name] += part if stored == decoded else zstandard.ZstdDecompressor().decompress(part)
            table, at = table + 4, at + stored
    assert at == len(packed)
    return streams
