"""From patches to groups: cut into groups, fill the tables, compress.

Read `encode_patches` first. Nothing here knows how the tables are written; header.py and rows.py do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.boxes import to_local
from deltacast.delta.codec import layout as lay
from deltacast.delta.codec.choose import ValuesChoice, choose_encodings, choose_values, join
from deltacast.delta.codec.layout import GROUP, SPAN, STREAM, Layout, Pools, Spans, pool_spans
from deltacast.delta.codec.streams import encode_bitmap, encode_gaps, pack_codes, split_planes
from deltacast.delta.errors import FormatError, PatchError
from deltacast.delta.patch import SparseWeightPatch
from deltacast.delta.threads import in_order

__all__ = ["Encoded", "encode_patches"]

I64: TypeAlias = NDArray[np.int64]

GROUP_WEIGHT: Final = 1 << 20  # changes (bits of a bitmap) per group: pools are large, and threads have work
FRAME: Final = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, write_content_size=True, write_checksum=False
)
"""These bytes are noise of few symbols: short matches are accidents that cost more than the literals they replace."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An update's tables and payload.

    Attributes:
        layout: the four tables.
        payloads: the bytes of each group.
        sha256: the SHA-256 of each group, empty unless asked for.
    """

    layout: Layout
    payloads: list[bytes]
    sha256: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What every group's encoder reads.

    Attributes:
        patches: the patches, in header order.
        indices: each patch's positions in its box; None where dense.
        entries: their records.
        positions: words of each patch's box.
        word_bytes: bytes of each patch's words.
        codes: per word width, the pooled codes of the delta entries.
    """

    patches: Sequence[SparseWeightPatch]
    indices: list[I64 | None]
    entries: NDArray[Any]
    positions: I64
    word_bytes: I64
    codes: dict[int, Words]

    def local(self, entry: int) -> I64:
        """Return the positions of an entry that is not dense."""
        indices = self.indices[entry]
        assert indices is not None
        return indices


def encode_patches(
    patches: Sequence[SparseWeightPatch], entries: NDArray[Any], positions: I64, word_bytes: I64, *,
    values: ValuesChoice, threads: int, hash_groups: bool = False,
) -> Encoded:  # fmt: skip
    """Encode patches into groups.

    Args:
        patches: in the order they shall have.
        entries: records of `ENTRY`, one per patch; `param`, sums and flags filled in. The rest is filled here.
        positions: int64, words of each patch's box.
        word_bytes: int64, bytes of each patch's words.
        values: the form to send; `auto` sends differences wherever they are known and smaller.
        threads: at most so many groups are encoded at once.
        hash_groups: whether to compute each group's SHA-256, for a signed header.

    Raises:
        PatchError: a patch breaks the policy (order, range), or does not change what it says it changes.
        InputError: the form asked for cannot be made from a patch.
    """
    choose_encodings(patches, entries, positions)
    codes = choose_values(patches, entries, word_bytes, values)
    indices = [patch.indices if patch.box is None or patch.indices is None
               else to_local(patch.indices, patch.meta, patch.box) for patch in patches]  # fmt: skip
    job = _Job(patches, indices, entries, positions, word_bytes, codes)
    spans, partial, num_partial = _cut(job)
    pools = pool_spans(entries, word_bytes, spans)
    first = _first_changes(spans)
    results = list(
        in_order(lambda g: _encode_group(job, spans, first, pools, g), range(spans.bounds.size - 1), threads)
    )
    payloads = [payload for _, payload in results]
    groups = np.zeros(len(results), GROUP)
    groups["first"] = spans.entry[spans.bounds[:-1]]
    groups["end"] = spans.entry[spans.bounds[1:] - 1] + 1
    groups["num_spans"] = num_partial
    groups["num_streams"] = [len(streams) for streams, _ in results]
    for record, payload in zip(groups, payloads, strict=True):
        record["xxh3_128"] = np.frombuffer(xxhash.xxh3_128_digest(payload), np.uint8)
    streams = np.concatenate([np.zeros(0, STREAM), *(streams for streams, _ in results)])
    tables = Layout(entries, positions, word_bytes, groups, partial, streams, lambda entry: patches[entry].name)
    digests = list(in_order(lambda g: hashlib.sha256(g).digest(), payloads, threads)) if hash_groups else []
    return Encoded(tables, payloads, digests)


def _cut(job: _Job) -> tuple[Spans, NDArray[Any], I64]:
    """Cut entries into spans and spans into groups.

    Returns:
        All spans; the records of those that are not a whole entry; how many of these each group has.
    """
    counts, encoding = job.entries["num_changed"], job.entries["encoding"]
    weight = np.where(encoding == lay.BITMAP, job.positions, counts)
    pieces = np.maximum(-(-weight // GROUP_WEIGHT), 1)
    entry = np.repeat(np.arange(len(counts)), pieces)
    lo, hi, count = np.zeros(entry.size, np.int64), job.positions[entry], counts[entry]
    piece_weight = -(-weight // pieces)[entry]
    starts = np.cumsum(pieces) - pieces
    for big in np.flatnonzero(pieces > 1).tolist():
        part = slice(int(starts[big]), int(starts[big] + pieces[big]))
        lo[part], hi[part], count[part] = _split(job, big, int(pieces[big]))
    window = (np.cumsum(piece_weight) - piece_weight) // GROUP_WEIGHT
    cuts = np.flatnonzero((np.diff(window) > 0) | (entry[1:] == entry[:-1])) + 1  # an entry once per group
    bounds = np.array([0, *cuts.tolist(), entry.size] if entry.size else [0], np.int64)
    split = pieces[entry] > 1
    partial = np.zeros(int(split.sum()), SPAN)
    partial["entry"], partial["lo"], partial["hi"] = entry[split], lo[split], hi[split]
    partial["num_changed"] = count[split]
    num_partial = np.add.reduceat(split.astype(np.int64), bounds[:-1]) if entry.size else bounds[:0]
    return Spans(entry, lo, hi, count, bounds), partial, num_partial


def _split(job: _Job, entry: int, pieces: int) -> tuple[I64, I64, I64]:
    """Return lo, hi and the number of changes of each piece of a large entry."""
    words, changed = int(job.positions[entry]), int(job.entries["num_changed"][entry])
    if job.entries["encoding"][entry] == lay.SPARSE:
        step = -(-changed // pieces)
        cuts = np.minimum(np.arange(pieces + 1) * step, changed)
        inner = job.local(entry)[cuts[1:-1]]
        if inner.size and (inner[0] <= 0 or (np.diff(inner) <= 0).any() or inner[-1] >= words):
            job.patches[entry].check_indices()
        edges = np.concatenate((np.zeros(1, np.int64), inner, np.array([words])))
        return edges[:-1], edges[1:], np.diff(cuts)
    step = -(-words // pieces)
    step += -step % 8
    edges = np.minimum(np.arange(pieces + 1) * step, words)
    if job.entries["encoding"][entry] == lay.DENSE:
        return edges[:-1], edges[1:], np.diff(edges)
    return edges[:-1], edges[1:], np.diff(np.searchsorted(job.local(entry), edges))


def _first_changes(spans: Spans) -> I64:
    """Return, per span, how many changes of its entry lie in earlier spans."""
    before = np.cumsum(spans.num_changed) - spans.num_changed
    return before - before[np.searchsorted(spans.entry, spans.entry)]


def _encode_group(job: _Job, every: Spans, first: I64, pools: Pools, group: int) -> tuple[NDArray[Any], bytes]:
    """Return a group's stream records and its bytes."""
    spans = every.of_group(group)
    first = first[int(every.bounds[group]) : int(every.bounds[group + 1])]
    encoding = job.entries["encoding"][spans.entry]
    absolute = job.entries["values"][spans.entry] == lay.ABSOLUTE
    raw: dict[int, NDArray[Any]] = {}
    if pools.counts[group, lay.POOL_SPARSE]:
        chosen = (encoding == lay.SPARSE) & (spans.num_changed > 0)
        raw |= _encode_sparse(job, spans.select(chosen), first[chosen])
    if pools.bitmap_bytes[group]:
        chosen = encoding == lay.BITMAP
        raw[lay.BITS] = _encode_bits(job, spans.select(chosen), first[chosen])
    for place, width in enumerate(lay.WIDTHS):
        pool = lay.POOL_DELTA + place
        if pools.counts[group, pool]:
            codes = job.codes[width][int(pools.offsets[group, pool]) : int(pools.offsets[group + 1, pool])]
            raw[lay.NIBBLES + place], exceptions = pack_codes(codes)
            raw[lay.EXCEPTIONS + place] = join(split_planes(exceptions))
        if pools.counts[group, lay.POOL_ABSOLUTE + place]:
            words = _absolute_words(job, spans, first, absolute & (job.word_bytes[spans.entry] == width))
            raw |= {lay.FIRST_PLANE[place] + byte: plane for byte, plane in enumerate(split_planes(words))}
    return _compress({kind: data for kind, data in sorted(raw.items()) if data.size})


def _slices(spans: Spans, first: I64) -> list[tuple[int, slice]]:
    """Return, per span, its entry and where its changes lie in the entry's patch."""
    ends = first + spans.num_changed
    return [(e, slice(a, b)) for e, a, b in zip(spans.entry.tolist(), first.tolist(), ends.tolist(), strict=True)]


def _encode_sparse(job: _Job, spans: Spans, first: I64) -> dict[int, NDArray[Any]]:
    indices = join([job.local(entry)[part] for entry, part in _slices(spans, first)])
    ends = np.cumsum(spans.num_changed)
    try:
        gaps = encode_gaps(indices, ends - spans.num_changed, spans.lo)
    except FormatError:
        _blame_order(job, spans)
        raise
    if (indices[ends - 1] >= spans.hi).any():
        _blame_order(job, spans)
    wide = gaps.wide.view(np.uint8)
    return {lay.GAP_LOW: gaps.low, lay.GAP_QUADS: gaps.quads, lay.GAP_HIGH: gaps.high, lay.WIDE: wide}


def _encode_bits(job: _Job, spans: Spans, first: I64) -> NDArray[np.uint8]:
    indices = join([job.local(entry)[part] for entry, part in _slices(spans, first)])
    sizes = (spans.hi - spans.lo + 7) // 8 * 8
    first_bits = np.cumsum(sizes) - sizes
    shift = first_bits - spans.lo
    bits = indices + (shift[0] if shift.size == 1 else np.repeat(shift, spans.num_changed))
    some = spans.num_changed > 0
    ends = np.cumsum(spans.num_changed)[some]
    # Ascending throughout, with each span's ends inside it, is in order and in range everywhere.
    inside = (bits[ends - spans.num_changed[some]] >= first_bits[some]).all()
    inside &= (indices[ends - 1] < spans.hi[some]).all()
    if not inside or (bits[1:] <= bits[:-1]).any():
        _blame_order(job, spans)
    return encode_bitmap(bits, int(sizes.sum()))


def _blame_order(job: _Job, spans: Spans) -> None:
    """Raise the error of the first patch whose positions break the policy."""
    for entry in spans.entry.tolist():
        job.patches[entry].check_indices()
    raise PatchError("a patch's indices are out of order or range")


def _absolute_words(job: _Job, spans: Spans, first: I64, chosen: NDArray[np.bool_]) -> Words:
    return join([job.patches[entry].values[part] for entry, part in _slices(spans.select(chosen), first[chosen])])


def _compress(raw: dict[int, NDArray[Any]]) -> tuple[NDArray[Any], bytes]:
    """Compress each stream alone; one that does not shrink is stored as it is."""
    compressor = zstandard.ZstdCompressor(compression_params=FRAME)
    records = np.zeros(len(raw), STREAM)
    parts = []
    for record, (kind, data) in zip(records, raw.items(), strict=True):
        stored = compressor.compress(data.data)
        coding = lay.ZSTD if len(stored) < data.size else lay.RAW
        parts.append(stored if coding == lay.ZSTD else data.tobytes())
        record["kind"], record["coding"], record["stored"], record["decoded"] = kind, coding, len(parts[-1]), data.size
    return records, b"".join(parts)
