"""The bytes of a packed chunk: a header, and six streams cut into pieces.

All integers are little-endian; a chunk's blocks and word width are known to both ends.

| section | size | content |
|---|---|---|
| checksum | 16 | xxh3_128, canonical (big-endian), of all bytes after it |
| version | u16 | 1 |
| word bytes | u16 | 1, 2, 4 or 8 |
| blocks, changes, high gaps, exceptions | 4 x u32 | at most 2^31 - 1 each |
| stored sizes | u32 per piece | in the order of the pieces |
| pieces | as stored | back to back, to the end |

The streams, in order: `counts` (u32 per block), `gap_low`, `gap_quads`, `gap_high`, `nibbles` and `exceptions` (as in
docs/format.md, where each block is a span of its own; a gap always fits 16 bits, so 65535 is a gap like any other).
Their decoded sizes follow from the header. A stream is cut every 512 KiB; a piece that is stored in as many bytes as it
decodes to is stored as it is, any other is one zstd frame that states its size. Equal streams give equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacast.delta.codec.container import ReadBuffer
from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.delta.kernels import BLOCK_WORDS

__all__ = ["BLOCK_WORDS", "Bytes", "ChunkHeader", "Piece", "check_streams", "cut", "packed_bytes", "parse", "seal"]

Bytes: TypeAlias = NDArray[np.uint8]
"""Flat, on the host."""

VERSION: Final = 1
PIECE_BYTES: Final = 1 << 19
"""Of a stream, per frame. 5 million changes make 20 pieces; smaller ones pack no better and cost more Python."""

_FIELDS: Final = struct.Struct("<HHIIII")
_DIGEST_BYTES: Final = 16
_HEADER_BYTES: Final = _DIGEST_BYTES + _FIELDS.size


class Piece(NamedTuple):
    """Up to 512 KiB of one stream.

    Attributes:
        stream: the stream's name.
        start: where the piece begins among the decoded bytes of all streams.
        stop: where it ends.
    """

    stream: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk holds.

    Attributes:
        word_bytes: 1, 2, 4 or 8.
        num_blocks: blocks, each with a count.
        num_changes: changes of all blocks.
        num_high: gaps whose high byte is 3 or more.
        num_exceptions: value codes of 15 and more.
    """

    word_bytes: int
    num_blocks: int
    num_changes: int
    num_high: int
    num_exceptions: int

    def streams(self) -> dict[str, slice]:
        """Return where each stream lies among the decoded bytes of all, in order, empty ones too."""
        sizes = {
            "counts": 4 * self.num_blocks,
            "gap_low": self.num_changes,
            "gap_quads": -(-self.num_changes // 4),
            "gap_high": self.num_high,
            "nibbles": -(-self.num_changes // 2),
            "exceptions": self.num_exceptions * self.word_bytes,
        }
        places, start = {}, 0
        for stream, size in sizes.items():
            places[stream] = slice(start, start + size)
            start += size
        return places

    @property
    def num_bytes(self) -> int:
        """Decoded bytes of all streams."""
        return sum(place.stop - place.start for place in self.streams().values())

    def num_pieces(self) -> int:
        """Return how many pieces the streams are cut into."""
        return sum(-(-(place.stop - place.start) // PIECE_BYTES) for place in self.streams().values())

    def pieces(self) -> list[Piece]:
        """Return the pieces in order."""
        return [
            Piece(stream, start, min(start + PIECE_BYTES, place.stop))
            for stream, place in self.streams().items()
            for start in range(place.start, place.stop, PIECE_BYTES)
        ]


def cut(stream: Bytes) -> Iterator[Bytes]:
    """Yield the pieces of one stream, as views."""
    return (stream[start : start + PIECE_BYTES] for start in range(0, stream.size, PIECE_BYTES))


def packed_bytes(stored: Sequence[ReadBuffer]) -> int:
    """Return the bytes of a chunk of these stored pieces."""
    return _HEADER_BYTES + 4 * len(stored) + sum(map(len, stored))


def seal(header: ChunkHeader, stored: Sequence[ReadBuffer], packed: Bytes) -> None:
    """Put header and stored pieces together, and the checksum before them; `packed` has exactly their size."""
    sizes = np.fromiter(map(len, stored), "<u4", len(stored))
    _FIELDS.pack_into(
        packed.data, _DIGEST_BYTES, VERSION, header.word_bytes, header.num_blocks, header.num_changes,
        header.num_high, header.num_exceptions,
    )  # fmt: skip
    at = _HEADER_BYTES + sizes.nbytes
    packed[_HEADER_BYTES:at] = sizes.view(np.uint8)
    for part in stored:
        packed[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    packed[:_DIGEST_BYTES] = np.frombuffer(xxhash.xxh3_128_digest(packed[_DIGEST_BYTES:].data), np.uint8)


def parse(
    packed: memoryview, word_bytes: int, num_blocks: int, max_changes: int
) -> tuple[ChunkHeader, list[tuple[Piece, memoryview]]]:
    """Check the bytes of a packed chunk against each other and against what the receiver expects.

    Args:
        packed: the chunk, exactly.
        word_bytes: bytes of its words.
        num_blocks: blocks that it has to have.
        max_changes: the most changes that the receiver takes.

    Returns:
        The header, and each piece with its stored bytes: views of `packed`.

    Raises:
        ChecksumError: the bytes are not the ones that were sent.
        FormatError: they contradict themselves or the arguments.
    """
    if len(packed) < _HEADER_BYTES:
        raise FormatError("a packed chunk ends inside its header", expected=_HEADER_BYTES, found=len(packed))
    if xxhash.xxh3_128_digest(packed[_DIGEST_BYTES:]) != packed[:_DIGEST_BYTES]:
        raise ChecksumError("a packed chunk does not have its checksum")
    version, *fields = _FIELDS.unpack_from(packed, _DIGEST_BYTES)
    if version != VERSION:
        raise FormatError("unknown version of packed chunks", expected=VERSION, found=version)
    header = ChunkHeader(*fields)
    _check_header(header, word_bytes, num_blocks, max_changes)
    table_end = _HEADER_BYTES + 4 * header.num_pieces()
    if table_end > len(packed):
        raise FormatError("a packed chunk ends inside its table of pieces", expected=table_end, found=len(packed))
    return header, _split(header.pieces(), packed[_HEADER_BYTES:table_end], packed[table_end:])


def _check_header(header: ChunkHeader, word_bytes: int, num_blocks: int, max_changes: int) -> None:
    if header.word_bytes != word_bytes:
        raise FormatError("a packed chunk of other words", expected=word_bytes, found=header.word_bytes)
    if header.num_blocks != num_blocks:
        raise FormatError("a packed chunk of other blocks", expected=num_blocks, found=header.num_blocks)
    most = min(max_changes, num_blocks * BLOCK_WORDS)
    if header.num_changes > most:
        raise FormatError("more changes in a packed chunk than its receiver takes", expected=f"at most {most}",
                          found=header.num_changes)  # fmt: skip
    for stream, found in (("gap_high", header.num_high), ("exceptions", header.num_exceptions)):
        if found > header.num_changes:
            raise FormatError(f"more in stream {stream} than there are changes", found=found,
                              expected=f"at most {header.num_changes}")  # fmt: skip


def _split(pieces: list[Piece], table: memoryview, stored: memoryview) -> list[tuple[Piece, memoryview]]:
    sizes = np.frombuffer(table, "<u4").tolist()
    for piece, size in zip(pieces, sizes, strict=True):
        if size > piece.stop - piece.start:
            raise FormatError(f"a piece of stream {piece.stream} is stored in more bytes than it decodes to",
                              expected=f"at most {piece.stop - piece.start}", found=size)  # fmt: skip
    if sum(sizes) != len(stored):
        raise FormatError("the pieces of a packed chunk do not fill it", expected=sum(sizes), found=len(stored))
    parts, start = [], 0
    for piece, size in zip(pieces, sizes, strict=True):
        parts.append((piece, stored[start : start + size]))
        start += size
    return parts


def check_streams(header: ChunkHeader, decoded: Bytes) -> None:
    """Check counts and paddings, so that counts can address changes on a device.

    Args:
        header: the header.
        decoded: all streams, in host memory, at a multiple of 4 bytes.

    Raises:
        FormatError: a count is over 65,536, counts do not add up, or a padding bit is set.
    """
    streams = header.streams()
    counts = decoded[streams["counts"]].view("<u4")
    if counts.size and int(counts.max()) > BLOCK_WORDS:
        raise FormatError("a count in stream counts exceeds its block", expected=f"at most {BLOCK_WORDS}",
                          found=int(counts.max()))  # fmt: skip
    total = int(counts.sum(dtype=np.int64))
    if total != header.num_changes:
        raise FormatError("stream counts does not add up", expected=header.num_changes, found=total)
    for stream, bits in (("gap_quads", 2), ("nibbles", 4)):
        used = header.num_changes * bits % 8
        if used and int(decoded[streams[stream]][-1]) >> used:
            raise FormatError(f"the padding of stream {stream} is not zero")
