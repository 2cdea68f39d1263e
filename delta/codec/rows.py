"""Rounds: the same four tables as binary rows, for two ends that hold the same parameter table already.

A round's rows are a few u64 per changed parameter, read and checked without a Python loop: JSON for 40,000
parameters would cost more than the transfer. The payload is the same groups as in a file. docs/format.md, "Rows".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacast.delta.boxes import check_box, check_disjoint, to_global
from deltacast.delta.codec import layout as lay
from deltacast.delta.codec.choose import ValuesChoice
from deltacast.delta.codec.container import ReadBuffer
from deltacast.delta.codec.decode import Checked, EntryData, check_layout, decode_entries
from deltacast.delta.codec.encode import encode_patches
from deltacast.delta.codec.envelope import Envelope, as_format_error, dump_json, load_json
from deltacast.delta.codec.header import check_parts, fill_entries
from deltacast.delta.codec.layout import ENTRY, GROUP, SPAN, STREAM, Layout
from deltacast.delta.errors import ChecksumError, FormatError, InputError, TableError
from deltacast.delta.fingerprint import Box
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import ParameterTable

__all__ = ["EncodedRound", "RoundRows", "decode_round", "encode_round", "read_rows"]

I64: TypeAlias = NDArray[np.int64]

MAGIC: Final = b"\x89DCR\r\n\x1a\n"
_PREFIX: Final = struct.Struct("<8s6I")
_DIGEST_BYTES: Final = 16
_TABLES: Final = (ENTRY, GROUP, SPAN, STREAM)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRound:
    """A round ready to send.

    Attributes:
        rows: the binary header.
        groups: the payload's groups, each of which can travel and be decoded alone.
    """

    rows: bytes
    groups: list[bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        return len(self.rows) + sum(map(len, self.groups))


@dataclass(frozen=True, slots=True, eq=False)
class RoundRows:
    """Parsed and checked rows.

    Attributes:
        envelope: update-level fields.
        checked: the tables; `checked.payload_bytes` is what the payload must have, `checked.offsets` its groups.
        boxes: entry -> box, for entries that are parts.
    """

    envelope: Envelope
    checked: Checked
    boxes: dict[int, Box]

    @property
    def values_bytes(self) -> int:
        """Bytes of all words that the round writes: what undoing it takes."""
        layout = self.checked.layout
        return int(layout.entries["num_changed"] @ layout.word_bytes)


@lru_cache(maxsize=4)
def _columns(table: ParameterTable) -> tuple[I64, I64]:
    """Return every parameter's number of words and bytes per word."""
    num = len(table)
    words = np.fromiter((meta.num_words for meta in table), np.int64, num)
    return words, np.fromiter((meta.row.word_bytes for meta in table), np.int64, num)


@lru_cache(maxsize=4)
def _places(table: ParameterTable) -> dict[str, int]:
    return {meta.name: place for place, meta in enumerate(table)}


def encode_round(
    update: WeightUpdate, table: ParameterTable, *, values: ValuesChoice = "auto", threads: int = 1
) -> EncodedRound:
    """Encode an update for workers that hold its parameter table.

    Args:
        update: as for `encode_update`; no parameter may be new, removed, or of another dtype or shape.
        table: the table that both ends hold.
        values: as for `encode_update`.
        threads: groups that are encoded at once.

    Raises:
        TableError: the update is about another table.
        PatchError, InputError: as `encode_update`.
    """
    patches, envelope = update.patches, Envelope.of(update)
    _check_table(envelope, table)
    check_parts(envelope, patches)
    entries = fill_entries(patches)
    entries["param"] = _params(patches, table)
    words, widths = _columns(table)
    positions, word_bytes = words[entries["param"]], widths[entries["param"]]
    boxes = {entry: patch.box for entry, patch in enumerate(patches) if patch.box is not None}
    for entry, box in boxes.items():
        positions[entry] = check_box(patches[entry].meta, box)
    encoded = encode_patches(patches, entries, positions, word_bytes, values=values, threads=threads)
    return EncodedRound(_write(envelope, encoded.layout, boxes), encoded.payloads)


def _check_table(envelope: Envelope, table: ParameterTable) -> None:
    """Check that an update leaves the table that both ends hold as it is.

    Raises:
        TableError: it is about another table, names a parameter that is not there, or removes one.
    """
    if envelope.table_digest != table.digest:
        raise TableError("another parameter table", expected=table.digest, found=envelope.table_digest)
    if envelope.removed:
        raise TableError("removing a parameter needs a new table", parameter=envelope.removed[0])
    for alias, name in envelope.aliases.items():
        if alias in table or name not in table:
            raise TableError("an alias must be another name of a listed parameter", parameter=name, found=alias)


def _params(patches: Sequence[SparseWeightPatch], table: ParameterTable) -> list[int]:
    """Return each patch's place in the table."""
    places, metas = _places(table), table.metas
    mine = list(map(attrgetter("meta"), patches))
    try:
        params = [places[meta.name] for meta in mine]
    except KeyError as err:
        raise TableError("no such parameter in the table", parameter=err.args[0]) from None
    if [metas[param] for param in params] != mine:  # identity first, so that this is cheap
        wrong = next(patch for param, patch in zip(params, patches, strict=True) if metas[param] != patch.meta)
        raise TableError("a patch is about another parameter", parameter=wrong.name,
                         expected=metas[places[wrong.name]], found=wrong.meta)  # fmt: skip
    for patch in patches:
        if patch.base_meta is not None:
            raise InputError("a parameter of another dtype or shape needs a new table", parameter=patch.name)
    return params


def _write(envelope: Envelope, layout: Layout, boxes: dict[int, Box]) -> bytes:
    raw = dump_json(envelope.to_json())
    bounds = np.array([bound for box in boxes.values() for dim in box for bound in dim], "<i8")
    tables = (layout.entries, layout.groups, layout.spans, layout.streams)
    head = _PREFIX.pack(MAGIC, len(raw), *map(len, tables), bounds.size) + raw
    parts = [head, bytes(-len(head) % 8), *(table.tobytes() for table in tables), bounds.tobytes()]
    body = b"".join(parts)
    return body + xxhash.xxh3_128_digest(body)


def read_rows(rows: ReadBuffer, table: ParameterTable) -> RoundRows:
    """Parse and check rows that are not trusted; a few milliseconds for 40,000 parameters.

    Raises:
        ChecksumError: the bytes do not have their checksum.
        FormatError: they break a rule of format 1.
        TableError: they are about another parameter table.
    """
    view = memoryview(rows).cast("B")
    if len(view) < _PREFIX.size + _DIGEST_BYTES:
        raise FormatError("not a round's rows: too short", found=f"{len(view)} bytes")
    magic, num_json, *counts, num_bounds = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise FormatError("not a round's rows: bad magic", expected=MAGIC.hex(), found=magic.hex())
    if xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES]) != bytes(view[-_DIGEST_BYTES:]):
        raise ChecksumError("a round's rows do not have their checksum")
    start = _PREFIX.size + num_json
    padding = -start % 8
    sizes = [count * record.itemsize for count, record in zip(counts, _TABLES, strict=True)]
    if start + padding + sum(sizes) + 8 * num_bounds + _DIGEST_BYTES != len(view):
        raise FormatError("a round's rows have another size than they state", found=f"{len(view)} bytes")
    envelope = Envelope.from_fields(load_json(bytes(view[_PREFIX.size : start]), "the rows"))
    _check_table(envelope, table)
    if any(view[start : start + padding]):
        raise FormatError("the padding after the rows' fields is not zero")
    tables, place = [], start + padding
    for size, record in zip(sizes, _TABLES, strict=True):
        tables.append(np.frombuffer(view[place : place + size], record))
        place += size
    bounds = np.frombuffer(view[place : place + 8 * num_bounds], "<i8")
    return _check(envelope, table, tables, bounds)


def _check(envelope: Envelope, table: ParameterTable, tables: list[NDArray[Any]], bounds: I64) -> RoundRows:
    entries, groups, spans, streams = tables
    param = entries["param"].astype(np.int64)
    if (param >= len(table)).any():
        raise FormatError("a row names a parameter beyond the table", expected=f"below {len(table)}",
                          found=int(param.max()))  # fmt: skip
    words, widths = _columns(table)
    positions = words[param]
    boxes = _read_boxes(table, entries, bounds)
    for entry, box in boxes.items():
        meta = table.metas[int(param[entry])]
        positions[entry] = as_format_error(lambda meta=meta, box=box: check_box(meta, box), "the rows")  # type: ignore[misc]
    _check_unique(table, entries, boxes)
    if envelope.base_version is None and (entries["encoding"] != lay.DENSE).any():
        raise FormatError("a round without a base must be dense", version=envelope.target_version)
    layout = Layout(entries, positions, widths[param], groups, spans, streams,
                    lambda entry: table.metas[int(param[entry])].name)  # fmt: skip
    return RoundRows(envelope, check_layout(layout), boxes)


def _read_boxes(table: ParameterTable, entries: NDArray[Any], bounds: I64) -> dict[int, Box]:
    boxes: dict[int, Box] = {}
    values, start = bounds.tolist(), 0
    for entry in np.flatnonzero(entries["flags"] & lay.HAS_BOX).tolist():
        ndim = len(table.metas[int(entries["param"][entry])].shape)
        mine = values[start : start + 2 * ndim]
        if len(mine) != 2 * ndim:
            raise FormatError("the boxes end early", found=len(values))
        boxes[entry] = tuple(zip(mine[0::2], mine[1::2], strict=True))
        start += 2 * ndim
    if start != len(values):
        raise FormatError("there are more box bounds than boxes", expected=start, found=len(values))
    return boxes


def _check_unique(table: ParameterTable, entries: NDArray[Any], boxes: dict[int, Box]) -> None:
    """Check that no (parameter, part) comes twice, and that parts do not overlap."""
    key = entries["param"].astype(np.uint64) << np.uint64(32) | entries["part"]
    order = np.argsort(key, kind="stable")
    if (np.diff(key[order]) == 0).any():
        raise FormatError("a (parameter, part) appears twice")
    param = entries["param"][order]
    starts = np.flatnonzero(np.concatenate((np.ones(1, np.bool_), param[1:] != param[:-1]))) if param.size else param
    ends = np.append(starts[1:], param.size)
    for which in np.flatnonzero(ends - starts > 1).tolist():
        mine = [boxes.get(int(entry)) for entry in order[int(starts[which]) : int(ends[which])]]
        name = table.metas[int(param[int(starts[which])])].name
        as_format_error(lambda name=name, mine=mine: check_disjoint(name, mine), "the rows")  # type: ignore[misc]


def decode_round(
    rows: ReadBuffer | RoundRows, payload: ReadBuffer, table: ParameterTable, *, threads: int = 1
) -> WeightUpdate:
    """Decode a round whose bytes are not trusted.

    Args:
        rows: the binary header, or what `read_rows` made of it.
        payload: the groups, back to back, exactly; not kept.
        table: the table that both ends hold.
        threads: groups that are decoded at once.

    Returns:
        The update; its patches are in the form that was sent, their arrays slices of a few that belong to it alone.

    Raises:
        ChecksumError, FormatError, TableError: as `read_rows`, and for the payload as `decode_update`.
    """
    parsed = rows if isinstance(rows, RoundRows) else read_rows(rows, table)
    data = decode_entries(parsed.checked, memoryview(payload).cast("B"), threads=threads)
    patches = tuple(_patches(parsed, table, data))
    return as_format_error(lambda: parsed.envelope.with_patches(patches), "the rows")


def _patches(parsed: RoundRows, table: ParameterTable, data: Sequence[EntryData]) -> list[SparseWeightPatch]:
    entries = parsed.checked.layout.entries
    columns = (entries[key].tolist() for key in ("param", "part", "values", "flags", "before", "after", "old_sum"))
    patches = []
    for number, (param, part, form, flags, before, after, old_sum) in enumerate(zip(*columns, strict=True)):
        meta, box = table.metas[param], parsed.boxes.get(number)
        indices, values = data[number]
        if indices is not None and box is not None:
            indices = to_global(indices, meta, box)
        patches.append(
            SparseWeightPatch(
                meta=meta,
                indices=indices,
                values=values,
                fingerprint_after=after,
                form="delta" if form == lay.DELTA else "absolute",
                old_sum=old_sum if flags & lay.HAS_OLD_SUM else None,
                fingerprint_before=before if flags & lay.HAS_BEFORE else None,
                part=part,
                box=box,
            )
        )
    return patches
