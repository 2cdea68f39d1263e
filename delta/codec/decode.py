"""From groups back to patches: check, decompress, decode into pools, slice.

A group is decoded alone (`decode_group`); an update's pools are arrays over all its groups, and each entry's
patch is a slice of them, so nothing is copied twice. The tables were checked by layout.py before any allocation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.codec import layout as lay
from deltacast.delta.codec.layout import Layout, Pools, Spans, check_entries, check_streams, expand_spans, pool_spans
from deltacast.delta.codec.streams import GapStreams, decode_bitmap, decode_gaps, join_planes, unpack_codes
from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.delta.threads import in_order

__all__ = ["Checked", "EntryData", "check_decoded_size", "check_layout", "decode_entries", "decode_group"]

I64: TypeAlias = NDArray[np.int64]
EntryData: TypeAlias = "tuple[I64 | None, Words]"
"""An entry's positions in its box (None where dense) and its words or differences."""

_NO_BYTES = np.zeros(0, np.uint8)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_NO_SIZE = (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """Tables that hold together, ready to decode.

    Attributes:
        layout: the tables.
        spans: every span.
        pools: each group's place in the pools.
        offsets: int64, one more than groups: where each group's bytes begin in the payload.
        streams: int64, one more than groups: where each group's records begin in the stream table.
    """

    layout: Layout
    spans: Spans
    pools: Pools
    offsets: I64
    streams: I64

    @property
    def payload_bytes(self) -> int:
        """Bytes of all groups."""
        return int(self.offsets[-1])


def check_layout(layout: Layout) -> Checked:
    """Check the tables against each other, in vectorised form; allocates a few words per entry and group.

    Raises:
        FormatError: naming the section and, where known, the parameter.
    """
    check_entries(layout)
    spans = expand_spans(layout)
    pools = pool_spans(layout.entries, layout.word_bytes, spans)
    check_streams(layout, pools)
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(layout.streams["stored"])))
    last = np.concatenate((np.zeros(1, np.int64), np.cumsum(layout.groups["num_streams"], dtype=np.int64)))
    return Checked(layout, spans, pools, ends[last], last)


def decode_entries(
    checked: Checked, payload: memoryview, *, threads: int = 1,
    sha256: Sequence[bytes] = (), max_decoded_bytes: int | None = None,
) -> list[EntryData]:  # fmt: skip
    """Decode all groups.

    Args:
        checked: the tables.
        payload: the groups, back to back, exactly.
        threads: groups that are decoded at once.
        sha256: digests from a signed header to check; empty for none.
        max_decoded_bytes: refuse to decode to more; None for no bound.

    Raises:
        ChecksumError: a group's bytes are not the ones that the header names.
        FormatError: a stream contradicts its counts, or the patches would be too large.
    """
    if len(payload) != checked.payload_bytes:
        raise FormatError("the payload has another size than its groups", expected=checked.payload_bytes,
                          found=len(payload))  # fmt: skip
    check_decoded_size(checked, max_decoded_bytes)
    pools = _allocate(checked.pools)

    def decode(group: int) -> None:
        part = payload[int(checked.offsets[group]) : int(checked.offsets[group + 1])]
        if sha256 and hashlib.sha256(part).digest() != sha256[group]:
            raise ChecksumError(f"group {group} does not have the SHA-256 that was signed")
        decode_group(checked, group, part, pools)

    for _ in in_order(decode, range(len(checked.layout.groups)), threads):
        pass
    return _slice(checked.layout, pools)


def check_decoded_size(checked: Checked, max_decoded_bytes: int | None) -> None:
    """Raise if positions and words of all groups take more memory than the reader allows; None allows any.

    Raises:
        FormatError: they would.
    """
    total = _decoded_bytes(checked.pools)
    if max_decoded_bytes is not None and total > max_decoded_bytes:
        raise FormatError("the update decodes to more than its reader takes", expected=f"at most {max_decoded_bytes}",
                          found=total)  # fmt: skip


def _decoded_bytes(pools: Pools) -> int:
    widths = (8, 8, *lay.WIDTHS, *lay.WIDTHS)
    return sum(size * width for size, width in zip(pools.offsets[-1].tolist(), widths, strict=True))


def _allocate(pools: Pools) -> list[NDArray[Any]]:
    sizes = pools.offsets[-1].tolist()
    dtypes = ("<i8", "<i8", *(f"<u{width}" for width in lay.WIDTHS * 2))
    try:
        return [np.empty(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    except MemoryError as err:
        raise FormatError("the update decodes to more than there is memory",
                          found=f"{_decoded_bytes(pools)} bytes") from err  # fmt: skip


def _slice(layout: Layout, pools: list[NDArray[Any]]) -> list[EntryData]:
    """Return each entry's slices of the pools."""
    entries = layout.entries
    counts = entries["num_changed"]
    width = np.log2(layout.word_bytes).astype(np.int64)
    value_pool = np.where(entries["values"] == lay.DELTA, lay.POOL_DELTA, lay.POOL_ABSOLUTE) + width
    position_pool = np.where(entries["encoding"] == lay.DENSE, -1, entries["encoding"].astype(np.int64))
    value_start, position_start = np.zeros_like(counts), np.zeros_like(counts)
    for pool in range(len(pools)):
        for which, start in ((position_pool, position_start), (value_pool, value_start)):
            mine = which == pool
            start[mine] = np.cumsum(counts[mine]) - counts[mine]
    columns = (position_pool, position_start, value_pool, value_start, counts)
    return [
        (pools[p][i : i + n] if p >= 0 else None, pools[v][j : j + n])
        for p, i, v, j, n in zip(*(column.tolist() for column in columns), strict=True)
    ]


def decode_group(checked: Checked, group: int, data: memoryview, pools: list[NDArray[Any]]) -> None:
    """Check and decode one group into its part of the pools; other groups are not needed.

    Raises:
        ChecksumError, FormatError: naming the group.
    """
    layout = checked.layout
    if xxhash.xxh3_128_digest(data) != layout.groups["xxh3_128"][group].tobytes():
        raise ChecksumError(f"group {group} does not have its checksum")
    try:
        streams = _read_streams(checked, group, data)
        _decode_positions(checked, group, streams, pools)
        _decode_values(checked, group, streams, pools)
    except FormatError as err:
        name = layout.name_of(int(layout.groups["first"][group]))
        raise FormatError(f"group {group}, which begins with {name!r}: {err.message}",
                          expected=err.expected, found=err.found) from err  # fmt: skip


def _read_streams(checked: Checked, group: int, data: memoryview) -> dict[int, NDArray[np.uint8]]:
    records = checked.layout.streams[int(checked.streams[group]) : int(checked.streams[group + 1])]
    found, start = {}, 0
    for kind, coding, stored, decoded in records[["kind", "coding", "stored", "decoded"]].tolist():
        part = data[start : start + stored]
        found[kind] = np.frombuffer(part if coding == lay.RAW else inflate(part, decoded, lay.KINDS[kind]), np.uint8)
        start += stored
    return found


def stated_size(frame: memoryview, what: str) -> int:
    """Return the content size that a zstd frame states, without decompressing it.

    Raises:
        FormatError: not a zstd frame, one without a content size, or one that needs a dictionary.
    """
    try:
        parameters = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as err:
        raise FormatError(f"{what} is not a zstd frame: {err}") from err
    if bytes(frame[:4]) != _ZSTD_MAGIC or parameters.dict_id or parameters.content_size in _NO_SIZE:
        raise FormatError(f"{what} is not a plain zstd frame that states its size")
    return int(parameters.content_size)


def inflate(frame: memoryview, size: int, what: str) -> bytes:
    """Decompress exactly one zstd frame whose stated content size is `size`.

    Raises:
        FormatError: another size, no size, a dictionary, damage, or bytes after the frame.
    """
    stated = stated_size(frame, what)
    if stated != size:
        raise FormatError(f"{what} states another size", expected=size, found=stated)
    try:
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise FormatError(f"{what} does not decompress: {err}") from err
    if len(data) != size:
        raise FormatError(f"{what} has another size", expected=size, found=len(data))
    return data


def _range(checked: Checked, group: int, pool: int) -> slice:
    return slice(int(checked.pools.offsets[group, pool]), int(checked.pools.offsets[group + 1, pool]))


def _decode_positions(
    checked: Checked, group: int, streams: dict[int, NDArray[np.uint8]], pools: list[NDArray[Any]]
) -> None:
    spans = checked.spans.of_group(group)
    encoding = checked.layout.entries["encoding"][spans.entry]
    if checked.pools.counts[group, lay.POOL_SPARSE]:
        chosen = spans.select((encoding == lay.SPARSE) & (spans.num_changed > 0))
        wide = streams.get(lay.WIDE, _NO_BYTES).view("<u8")
        gaps = GapStreams(streams[lay.GAP_LOW], streams[lay.GAP_QUADS], streams.get(lay.GAP_HIGH, _NO_BYTES), wide)
        out = pools[lay.POOL_SPARSE][_range(checked, group, lay.POOL_SPARSE)]
        decode_gaps(gaps, chosen.num_changed, chosen.lo, chosen.hi, out)
    if checked.pools.bitmap_bytes[group]:
        chosen = spans.select(encoding == lay.BITMAP)
        out = pools[lay.POOL_BITMAP][_range(checked, group, lay.POOL_BITMAP)]
        decode_bitmap(streams[lay.BITS], chosen.num_changed, chosen.lo, chosen.hi, out)


def _decode_values(
    checked: Checked, group: int, streams: dict[int, NDArray[np.uint8]], pools: list[NDArray[Any]]
) -> None:
    for place, width in enumerate(lay.WIDTHS):
        pool = lay.POOL_DELTA + place
        if checked.pools.counts[group, pool]:
            planes = streams.get(lay.EXCEPTIONS + place, _NO_BYTES).reshape(width, -1)
            exceptions: Words = np.empty(planes.shape[1], f"<u{width}")
            join_planes(list(planes), exceptions)
            unpack_codes(streams[lay.NIBBLES + place], exceptions, pools[pool][_range(checked, group, pool)])
        pool = lay.POOL_ABSOLUTE + place
        if checked.pools.counts[group, pool]:
            first = lay.FIRST_PLANE[place]
            join_planes([streams[first + byte] for byte in range(width)], pools[pool][_range(checked, group, pool)])
