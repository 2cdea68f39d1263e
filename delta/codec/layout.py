"""The tables behind a container's header, as numpy records: entries, groups, spans and streams.

The JSON header of a file (header.py) and the binary rows of a round (rows.py) are two ways to write the same four
tables, so everything that must hold between them is checked here, once, in vectorised form: 40,000 entries take a
few milliseconds. docs/format.md, "Tables", states the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.errors import FormatError

__all__ = [
    "CODINGS",
    "ENCODINGS",
    "ENTRY",
    "GROUP",
    "KINDS",
    "MAX_GROUP_CHANGES",
    "MAX_STREAM_BYTES",
    "SPAN",
    "STREAM",
    "VALUE_FORMS",
    "Layout",
    "Pools",
    "Spans",
    "check_entries",
    "expand_spans",
    "pool_spans",
    "check_streams",
]

I64: TypeAlias = NDArray[np.int64]
Records: TypeAlias = NDArray[Any]

ENTRY: Final = np.dtype(
    [("param", "<u4"), ("part", "<u4"), ("encoding", "u1"), ("values", "u1"), ("flags", "<u2"), ("zero", "<u4"),
     ("num_changed", "<i8"), ("before", "<u8"), ("after", "<u8"), ("old_sum", "<u8")]
)  # fmt: skip
GROUP: Final = np.dtype(
    [("first", "<u4"), ("end", "<u4"), ("num_spans", "<u4"), ("num_streams", "<u4"), ("xxh3_128", "u1", (16,))]
)
SPAN: Final = np.dtype([("entry", "<u4"), ("zero", "<u4"), ("lo", "<i8"), ("hi", "<i8"), ("num_changed", "<i8")])
STREAM: Final = np.dtype(
    [("kind", "u1"), ("coding", "u1"), ("zero", "u1", (6,)), ("stored", "<i8"), ("decoded", "<i8")]
)

# Places in these tuples are the codes in records; the names after each are for code that reads them.
ENCODINGS: Final = ("sparse", "bitmap", "dense")
SPARSE, BITMAP, DENSE = range(3)
VALUE_FORMS: Final = ("delta", "absolute")
DELTA, ABSOLUTE = range(2)
HAS_BEFORE, HAS_OLD_SUM, HAS_BOX = 1, 2, 4
CODINGS: Final = ("raw", "zstd")
RAW, ZSTD = range(2)
WIDTHS: Final = (1, 2, 4, 8)

KINDS: Final = (
    "gap_low", "gap_quads", "gap_high", "wide", "bitmap",
    "nibbles8", "nibbles16", "nibbles32", "nibbles64",
    "exceptions8", "exceptions16", "exceptions32", "exceptions64",
    *(f"words{8 * width}.{byte}" for width in WIDTHS for byte in range(width)),
)  # fmt: skip
"""Stream kinds; the place in this list is the number in binary rows and the order within a group."""
GAP_LOW, GAP_QUADS, GAP_HIGH, WIDE, BITS, NIBBLES, EXCEPTIONS, WORDS = 0, 1, 2, 3, 4, 5, 9, 13
FIRST_PLANE: Final = (WORDS, WORDS + 1, WORDS + 3, WORDS + 7)

MAX_GROUP_CHANGES: Final = 16 << 20
MAX_STREAM_BYTES: Final = 64 << 20
_MAX_EXPANSION: Final = 32768  # a zstd block of at least 4 bytes decodes to at most 128 KiB

_NUM_POOLS: Final = 10
POOL_SPARSE, POOL_BITMAP, POOL_DELTA, POOL_ABSOLUTE = 0, 1, 2, 6


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The four tables, and what the parameters say about each entry.

    Attributes:
        entries: records of `ENTRY`, in header order.
        positions: int64 per entry, the words of its parameter or box.
        word_bytes: int64 per entry, 1, 2, 4 or 8.
        groups: records of `GROUP`, in file order.
        spans: records of `SPAN`: the parts of entries that are split over groups, in group order.
        streams: records of `STREAM`, in group order.
        name_of: an entry's parameter name, for messages.
    """

    entries: Records
    positions: I64
    word_bytes: I64
    groups: Records
    spans: Records
    streams: Records
    name_of: Callable[[int], str]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Every (group, entry) pair in file order, whole entries included.

    Attributes:
        entry: int64, which entry.
        lo: int64, first position that the span covers.
        hi: int64, first position after it.
        num_changed: int64.
        bounds: int64, one more than groups: group `g` holds spans `bounds[g]` to `bounds[g + 1]`.
    """

    entry: I64
    lo: I64
    hi: I64
    num_changed: I64
    bounds: I64

    def of_group(self, group: int) -> Spans:
        """Return the spans of one group (views)."""
        part = slice(int(self.bounds[group]), int(self.bounds[group + 1]))
        return Spans(self.entry[part], self.lo[part], self.hi[part], self.num_changed[part], self.bounds[:0])

    def select(self, mask: NDArray[np.bool_]) -> Spans:
        """Return the spans of a mask (copies)."""
        return Spans(self.entry[mask], self.lo[mask], self.hi[mask], self.num_changed[mask], self.bounds[:0])


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """How many changes each group adds to each pool, and where in the pool they go.

    A pool is one array over a whole update. Pools 0 and 1 hold positions (sparse, bitmap), 2 to 5 differences of
    1, 2, 4 and 8 byte words, 6 to 9 absolute words likewise.

    Attributes:
        counts: int64 [groups, pools].
        offsets: int64 [groups + 1, pools]; the last row holds the pools' sizes.
        bitmap_bytes: int64 per group, size of stream `bitmap`.
    """

    counts: I64
    offsets: I64
    bitmap_bytes: I64


def _blame(message: str, layout: Layout, wrong: NDArray[np.bool_], **facts: object) -> FormatError:
    return FormatError(message, parameter=layout.name_of(int(wrong.argmax())), **facts)  # type: ignore[arg-type]


def check_entries(layout: Layout) -> None:
    """Check each entry on its own: known codes, and a number of changes that its parameter can have.

    Raises:
        FormatError: naming the parameter.
    """
    entries = layout.entries
    for field, names in (("encoding", ENCODINGS), ("values", VALUE_FORMS)):
        unknown = entries[field] >= len(names)
        if unknown.any():
            found = int(entries[field][unknown][0])
            raise _blame(f"unknown {field}", layout, unknown, expected=f"one of {', '.join(names)}", found=found)
    wrong = (entries["flags"] > 7) | (entries["zero"] != 0)
    if wrong.any():
        raise _blame("unknown entry flags", layout, wrong)
    counts = entries["num_changed"]
    wrong = (counts < 0) | (counts > layout.positions)
    if wrong.any():
        raise _blame("more changes than words", layout, wrong, found=int(counts[wrong][0]))
    dense = entries["encoding"] == DENSE
    wrong = dense & ((counts != layout.positions) | (entries["values"] != ABSOLUTE))
    if wrong.any():
        raise _blame("a dense entry must hold every word, absolute", layout, wrong)


def expand_spans(layout: Layout) -> Spans:
    """Return every span, after checking that groups and spans tile the entries without hole or overlap.

    Raises:
        FormatError: naming the group or the parameter.
    """
    groups, num_entries = layout.groups, len(layout.entries)
    first, end = groups["first"].astype(np.int64), groups["end"].astype(np.int64)
    previous = np.concatenate((np.zeros(1, np.int64), end[:-1])) if len(groups) else end
    chained = (first == previous) | ((first == previous - 1) & (previous > 0))
    if (int(end[-1]) if len(groups) else 0) != num_entries or not (chained & (end > first)).all():
        raise FormatError("groups do not carry the entries in order", expected=num_entries)
    sizes = end - first
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    entry = np.arange(int(bounds[-1]), dtype=np.int64) + np.repeat(first - bounds[:-1], sizes)
    lo = np.zeros(entry.size, np.int64)
    hi = layout.positions[entry]
    count = layout.entries["num_changed"][entry]
    if int(groups["num_spans"].sum(dtype=np.int64)) != len(layout.spans):
        raise FormatError("groups do not add up to the span table", expected=len(layout.spans))
    if len(layout.spans):
        group = np.repeat(np.arange(len(groups)), groups["num_spans"])
        offset = layout.spans["entry"].astype(np.int64) - first[group]
        if ((offset < 0) | (offset >= sizes[group]) | (layout.spans["zero"] != 0)).any():
            raise FormatError("a span names an entry outside its group")
        place = bounds[group] + offset
        if (np.diff(place) <= 0).any():
            raise FormatError("spans are not in entry order")
        lo[place], hi[place], count[place] = layout.spans["lo"], layout.spans["hi"], layout.spans["num_changed"]
    spans = Spans(entry, lo, hi, count, bounds)
    _check_tiling(layout, spans)
    return spans


def _check_tiling(layout: Layout, spans: Spans) -> None:
    if not spans.entry.size:
        return
    start = np.concatenate((np.ones(1, np.bool_), spans.entry[1:] != spans.entry[:-1]))
    stop = np.concatenate((start[1:], np.ones(1, np.bool_)))
    expected_lo = np.where(start, 0, np.concatenate((np.zeros(1, np.int64), spans.hi[:-1])))
    expected_hi = layout.positions[spans.entry]
    whole = start & stop
    good = (spans.lo == expected_lo) & np.where(stop, spans.hi == expected_hi, spans.hi < expected_hi)
    good &= whole | (spans.lo < spans.hi)
    good &= (spans.num_changed >= 0) & (spans.num_changed <= spans.hi - spans.lo)
    dense = layout.entries["encoding"][spans.entry] == DENSE
    good &= ~dense | (spans.num_changed == spans.hi - spans.lo)
    if good.all():
        totals = np.add.reduceat(spans.num_changed, np.flatnonzero(start))
        good = (totals == layout.entries["num_changed"])[spans.entry]
    if not good.all():
        entry = int(spans.entry[int(good.argmin())])
        raise FormatError("spans leave a hole, overlap or miscount", parameter=layout.name_of(entry))


def pool_spans(entries: Records, word_bytes: I64, spans: Spans) -> Pools:
    """Return each group's share of each pool.

    Raises:
        FormatError: a group holds more changes than one may.
    """
    num_groups = spans.bounds.size - 1
    group = np.repeat(np.arange(num_groups), np.diff(spans.bounds))
    encoding = entries["encoding"][spans.entry]
    width = np.log2(word_bytes).astype(np.int64)[spans.entry]
    value_pool = np.where(entries["values"][spans.entry] == DELTA, POOL_DELTA, POOL_ABSOLUTE) + width
    weights = spans.num_changed.astype(np.float64)  # exact up to the limit that is checked next
    size = num_groups * _NUM_POOLS
    counts = np.bincount(group * _NUM_POOLS + value_pool, weights, size)
    sparse = encoding != DENSE
    position_pool = np.where(encoding == BITMAP, POOL_BITMAP, POOL_SPARSE)
    counts += np.bincount((group * _NUM_POOLS + position_pool)[sparse], weights[sparse], size)
    counts = counts.reshape(num_groups, _NUM_POOLS)
    over = counts[:, POOL_DELTA:].sum(axis=1) > MAX_GROUP_CHANGES
    if over.any():
        group_number = int(over.argmax())
        raise FormatError(f"group {group_number} holds too many changes", expected=f"at most {MAX_GROUP_CHANGES}")
    bitmap = encoding == BITMAP
    bits = (spans.hi - spans.lo)[bitmap] // 8 + ((spans.hi - spans.lo)[bitmap] % 8 > 0)
    bitmap_bytes = np.bincount(group[bitmap], bits.astype(np.float64), num_groups)
    if (bitmap_bytes > MAX_STREAM_BYTES).any():
        raise FormatError("a bitmap is too large", expected=f"at most {MAX_STREAM_BYTES} bytes")
    whole = counts.astype(np.int64)
    offsets = np.concatenate((np.zeros((1, _NUM_POOLS), np.int64), np.cumsum(whole, axis=0)))
    return Pools(whole, offsets, bitmap_bytes.astype(np.int64))


def expected_sizes(pools: Pools) -> I64:
    """Return the decoded size of each stream of each group, int64 [groups, kinds].

    Where the counts do not fix it (`gap_high`, `wide`, exceptions) it is the largest that they allow.
    """
    counts = pools.counts
    sizes = np.zeros((len(counts), len(KINDS)), np.int64)
    sizes[:, GAP_LOW] = sizes[:, GAP_HIGH] = counts[:, POOL_SPARSE]
    sizes[:, GAP_QUADS] = (counts[:, POOL_SPARSE] + 3) // 4
    sizes[:, WIDE] = 8 * counts[:, POOL_SPARSE]
    sizes[:, BITS] = pools.bitmap_bytes
    for place, width in enumerate(WIDTHS):
        deltas = counts[:, POOL_DELTA + place]
        sizes[:, NIBBLES + place] = (deltas + 1) // 2
        sizes[:, EXCEPTIONS + place] = width * deltas
        sizes[:, FIRST_PLANE[place] : FIRST_PLANE[place] + width] = counts[:, [POOL_ABSOLUTE + place]]
    return sizes


def check_streams(layout: Layout, pools: Pools) -> None:
    """Check the stream table against the counts: kinds, order, codings, sizes, expansion.

    Raises:
        FormatError: naming the group and the stream.
    """
    streams, groups = layout.streams, layout.groups
    if int(groups["num_streams"].sum(dtype=np.int64)) != len(streams):
        raise FormatError("groups do not add up to the stream table", expected=len(streams))
    kind, stored, decoded = streams["kind"].astype(np.int64), streams["stored"], streams["decoded"]
    group = np.repeat(np.arange(len(groups)), groups["num_streams"])
    if (kind >= len(KINDS)).any():
        raise FormatError("unknown stream kind", expected=f"below {len(KINDS)}", found=int(kind.max()))
    if (streams["coding"] > ZSTD).any() or streams["zero"].any():
        raise FormatError("unknown stream coding", expected=f"one of {', '.join(CODINGS)}")
    if (np.diff(group * len(KINDS) + kind) <= 0).any():
        raise FormatError("a group's streams are not in order, or one is there twice")
    raw = streams["coding"] == RAW
    good = (stored > 0) & (stored <= decoded) & (decoded <= MAX_STREAM_BYTES)
    good &= np.where(raw, stored == decoded, decoded // _MAX_EXPANSION <= stored)
    sizes = np.zeros((len(groups), len(KINDS)), np.int64)
    sizes[group, kind] = decoded
    expected = expected_sizes(pools)
    free = np.zeros(len(KINDS), np.int64)
    free[[GAP_HIGH, WIDE, *range(EXCEPTIONS, EXCEPTIONS + 4)]] = (1, 8, *WIDTHS)
    fits = np.where(free > 0, (sizes <= expected) & (sizes % np.maximum(free, 1) == 0), sizes == expected)
    if not good.all() or not fits.all():
        _blame_stream(group, kind, good, fits)


def _blame_stream(group: I64, kind: I64, good: NDArray[np.bool_], fits: NDArray[np.bool_]) -> None:
    if good.all():
        at, which = (int(i) for i in np.unravel_index(int(fits.argmin()), fits.shape))
        raise FormatError(f"group {at}, stream {KINDS[which]}: its size does not match the entries")
    at = int(good.argmin())
    raise FormatError(f"group {group[at]}, stream {KINDS[kind[at]]}: its sizes are impossible")
