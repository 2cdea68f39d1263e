"""What travels beside the chunks, on the control connections: `Begin` before them, `Sums` after (docs/format.md).

Little-endian; each ends with the xxh3_128 of all before it, and is checked whole before any of it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacast.delta.errors import ChecksumError, FormatError, TableError
from deltacast.delta.table import ParameterTable

__all__ = ["Begin", "Sums"]

_BEGIN_MAGIC: Final = b"\x89DCB\r\n\x1a\n"
_SUMS_MAGIC: Final = b"\x89DCS\r\n\x1a\n"
_BEGIN: Final = struct.Struct("<8sIIQq16s16s")
_SUMS: Final = struct.Struct("<8sI4x")
_DIGEST_BYTES: Final = 16
_MAX_GROUPS: Final = 4  # word widths
_MAX_BYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """A streamed round: from where, for which table, cut how, and how large it may get.

    Attributes:
        base_version: the version that the chunks start from.
        base_digest: its state digest.
        table_digest: of the parameter table that both ends hold.
        chunk_bytes: bytes of weights that a chunk covers (`ChunkPlan`).
        capacities: for each group of the plan, the most changes of the round, each chunk's rounded up to 16.
        order: uint32 [parameters], the plan's order.
    """

    base_version: int
    base_digest: str
    table_digest: str
    chunk_bytes: int
    capacities: tuple[int, ...]
    order: NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        """Write it."""
        head = _BEGIN.pack(
            _BEGIN_MAGIC,
            len(self.order),
            len(self.capacities),
            self.chunk_bytes,
            self.base_version,
            _digest_bytes(self.base_digest),
            _digest_bytes(self.table_digest),
        )
        capacities = np.array(self.capacities, "<u8").tobytes()
        return _sealed(head + capacities + self.order.astype("<u4").tobytes())

    @classmethod
    def from_bytes(cls, raw: bytes, table: ParameterTable) -> Begin:
        """Read one that is not trusted.

        Raises:
            ChecksumError, FormatError: it is damaged, or breaks a rule.
            TableError: it is about another parameter table.
        """
        body = _opened(raw, _BEGIN_MAGIC, _BEGIN.size)
        _, num_params, num_groups, chunk_bytes, version, base, table_digest = _BEGIN.unpack_from(body)
        if num_groups > _MAX_GROUPS or len(body) != _BEGIN.size + 8 * num_groups + 4 * num_params:
            raise FormatError("a round's begin has another size than it states", found=f"{len(raw)} bytes")
        if _digest_text(table_digest) != table.digest:
            found = _digest_text(table_digest)
            raise TableError("made for another parameter table", expected=table.digest, found=found)
        capacities = np.frombuffer(body, "<u8", num_groups, _BEGIN.size)
        order = np.frombuffer(body, "<u4", num_params, _BEGIN.size + 8 * num_groups)
        if not 0 < chunk_bytes < _MAX_BYTES or (capacities > _MAX_BYTES).any():
            raise FormatError("a round's begin states absurd sizes", found=f"{chunk_bytes}, {capacities.tolist()}")
        if num_params != len(table) or (np.sort(order) != np.arange(num_params)).any():
            raise FormatError("a round's begin does not order the table", expected=len(table), found=num_params)
        return cls(version, _digest_text(base), table.digest, chunk_bytes, tuple(capacities.tolist()), order)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What the chunks must add up to, for every changed parameter.

    Attributes:
        places: uint32 [changed], in the table, ascending.
        after: uint64 [changed], fingerprints at the target version.
        old_sums: uint64 [changed], sums of old unit * key over the changed words.
    """

    places: NDArray[np.uint32]
    after: NDArray[np.uint64]
    old_sums: NDArray[np.uint64]

    def to_bytes(self) -> bytes:
        """Write it."""
        places = self.places.astype("<u4").tobytes()
        places += bytes(-len(places) % 8)
        sums = (self.after.astype("<u8").tobytes(), self.old_sums.astype("<u8").tobytes())
        return _sealed(_SUMS.pack(_SUMS_MAGIC, len(self.places)) + places + b"".join(sums))

    @classmethod
    def from_bytes(cls, raw: bytes, table: ParameterTable) -> Sums:
        """Read one that is not trusted.

        Raises:
            ChecksumError, FormatError: it is damaged, or names parameters that are not there, or one twice.
        """
        body = _opened(raw, _SUMS_MAGIC, _SUMS.size)
        count = _SUMS.unpack_from(body)[1]
        padded = (count + 1) // 2 * 8
        if len(body) != _SUMS.size + padded + 16 * count:
            raise FormatError("a round's sums have another size than they state", found=f"{len(raw)} bytes")
        places = np.frombuffer(body, "<u4", count, _SUMS.size)
        after, old_sums = np.frombuffer(body, "<u8", 2 * count, _SUMS.size + padded).reshape(2, count)
        if (np.diff(places.astype(np.int64)) <= 0).any() or (count and int(places[-1]) >= len(table)):
            raise FormatError("a round's sums are not about parameters of the table, each once and in order")
        return cls(places, after, old_sums)


def _sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


def _opened(raw: bytes, magic: bytes, head_bytes: int) -> bytes:
    body = raw[:-_DIGEST_BYTES]
    if len(body) < head_bytes or body[: len(magic)] != magic:
        raise FormatError("not a streamed round's header", expected=magic.hex(), found=raw[: len(magic)].hex())
    if xxhash.xxh3_128_digest(body) != raw[-_DIGEST_BYTES:]:
        raise ChecksumError("a streamed round's header does not have its checksum")
    return body


def _digest_bytes(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("xxh3_128:"))


def _digest_text(digest: bytes) -> str:
    return f"xxh3_128:{digest.hex()}"
