"""The JSON header of a container file: what it says, and how it is written and read.

`UpdateHeader` is what `deltacast inspect` shows; its tables (`Layout`) are what the decoder works from. The field
list is docs/format.md, "Header".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Protocol

import numpy as np
import zstandard

from deltacast.delta.boxes import check_box, check_disjoint
from deltacast.delta.codec import layout as lay
from deltacast.delta.codec.decode import inflate, stated_size
from deltacast.delta.codec.envelope import Envelope, Fields, as_format_error, dump_json, load_json
from deltacast.delta.codec.layout import ENTRY, GROUP, SPAN, STREAM, Layout
from deltacast.delta.errors import FormatError, InputError, PatchError
from deltacast.delta.fingerprint import Box, format_sum
from deltacast.delta.patch import SparseWeightPatch
from deltacast.delta.table import ParamMeta

__all__ = ["EntryHeader", "GroupHeader", "UpdateHeader", "check_parts", "fill_entries", "read_json", "write_json"]

MAX_HEADER_BYTES: Final = 64 << 20
_HEADER_RATIO: Final = 128
_LEVEL: Final = 19
_QUICK_LEVEL: Final = 3
_QUICK_BYTES: Final = 1 << 20


_COLUMNS: Final = (
    ("part", "part", 0),
    ("after", "fingerprint_after", 0),
    ("before", "fingerprint_before", lay.HAS_BEFORE),
    ("old_sum", "old_sum", lay.HAS_OLD_SUM),
)
"""Field of an entry's record, attribute of a patch, and the flag that says whether it is known."""


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What the header says about one part of one parameter; fields as in `SparseWeightPatch`."""

    meta: ParamMeta
    encoding: str
    values: str
    num_changed: int
    fingerprint_after: int
    fingerprint_before: int | None = None
    old_sum: int | None = None
    part: int = 0
    box: Box | None = None
    base_meta: ParamMeta | None = None

    @property
    def is_dense(self) -> bool:
        """Whether every word is sent."""
        return self.encoding == "dense"


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What the header says about one group.

    Attributes:
        first: its first entry.
        end: the entry after its last one.
        num_bytes: its size in the file.
        xxh3_128: its checksum, 16 bytes.
        sha256: its SHA-256 in a signed header, else None.
        streams: stream kind -> (coding, stored bytes, decoded bytes).
    """

    first: int
    end: int
    num_bytes: int
    xxh3_128: bytes
    sha256: bytes | None
    streams: dict[str, tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """A container's header, parsed and checked; the payload has not been looked at.

    Attributes:
        envelope: update-level fields.
        entries: one per patch, in order.
        groups: in file order.
        header_bytes: size of the compressed header.
        file_bytes: size of the whole file.
        signed: whether the file carries a signature (not whether it is right).
        layout: the tables that the decoder works from.
    """

    envelope: Envelope
    entries: tuple[EntryHeader, ...]
    groups: tuple[GroupHeader, ...]
    header_bytes: int
    layout: Layout = field(repr=False, compare=False)
    file_bytes: int = 0
    signed: bool = False

    @property
    def num_changed(self) -> int:
        """Words sent, over all entries."""
        return sum(entry.num_changed for entry in self.entries)

    @property
    def stream_bytes(self) -> dict[str, int]:
        """Stored bytes per stream kind, over all groups."""
        total: Counter[str] = Counter()
        for group in self.groups:
            total.update({kind: stored for kind, (_, stored, _) in group.streams.items()})
        return dict(total)


def fill_entries(patches: tuple[SparseWeightPatch, ...]) -> np.ndarray[Any, Any]:
    """Return records of `ENTRY` with part, flags and sums set; the encoder fills in the rest."""
    entries = np.zeros(len(patches), ENTRY)
    for key, attribute, flag in _COLUMNS:
        values = list(map(attrgetter(attribute), patches))
        present: Any = True
        if None in values:
            present = np.array([value is not None for value in values])
            values = [value or 0 for value in values]
        entries[key] = np.array(values, ENTRY[key])
        entries["flags"] += np.where(present, np.uint16(flag), np.uint16(0))
    boxes = list(map(attrgetter("box"), patches))
    if any(box is not None for box in boxes):
        entries["flags"] += np.array([box is not None for box in boxes], np.uint16) * np.uint16(lay.HAS_BOX)
    return entries


def _header_bound(num_stored: int) -> int:
    """Return how many bytes a header of `num_stored` compressed bytes may decode to."""
    return min(MAX_HEADER_BYTES, (1 << 20) + _HEADER_RATIO * num_stored)


def write_json(
    envelope: Envelope, patches: tuple[SparseWeightPatch, ...], layout: Layout, sha256: list[bytes]
) -> bytes:
    """Return the compressed header.

    Raises:
        InputError: it is larger than a reader may accept.
    """
    value = envelope.to_json()
    value["entries"] = [_entry_json(patch, record) for patch, record in zip(patches, layout.entries, strict=True)]
    value["groups"] = _groups_json(layout, sha256)
    raw = dump_json(value)
    level = _LEVEL if len(raw) < _QUICK_BYTES else _QUICK_LEVEL
    stored = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)
    if len(raw) > _header_bound(len(stored)):
        raise InputError("the header is too large", expected=f"at most {_header_bound(len(stored))}", found=len(raw))
    return stored


def _entry_json(patch: SparseWeightPatch, record: Any) -> dict[str, Any]:
    value: dict[str, Any] = {"name": patch.name, "shape": list(patch.meta.shape), "dtype": patch.meta.dtype}
    value["encoding"] = lay.ENCODINGS[record["encoding"]]
    value["values"] = lay.VALUE_FORMS[record["values"]]
    value["num_changed"] = patch.num_changed
    if patch.fingerprint_before is not None:
        value["before"] = format_sum(patch.fingerprint_before)
    value["after"] = format_sum(patch.fingerprint_after)
    if patch.old_sum is not None:
        value["old_sum"] = format_sum(patch.old_sum)
    if patch.part:
        value["part"] = patch.part
    if patch.box is not None:
        value["box"] = [list(bounds) for bounds in patch.box]
    if patch.base_meta is not None:
        value["base_dtype"], value["base_shape"] = patch.base_meta.dtype, list(patch.base_meta.shape)
    return value


def _groups_json(layout: Layout, sha256: list[bytes]) -> list[dict[str, Any]]:
    values = []
    span = stream = 0
    for number, group in enumerate(layout.groups):
        spans = layout.spans[span : span + int(group["num_spans"])]
        streams = layout.streams[stream : stream + int(group["num_streams"])]
        span, stream = span + len(spans), stream + len(streams)
        value: dict[str, Any] = {"first": int(group["first"]), "end": int(group["end"])}
        if len(spans):
            value["spans"] = [[int(s[key]) for key in ("entry", "lo", "hi", "num_changed")] for s in spans]
        value["streams"] = [
            [lay.KINDS[s["kind"]], lay.CODINGS[s["coding"]], int(s["stored"]), int(s["decoded"])] for s in streams
        ]
        value["xxh3_128"] = group["xxh3_128"].tobytes().hex()
        if sha256:
            value["sha256"] = sha256[number].hex()
        values.append(value)
    return values


def read_json(stored: memoryview) -> UpdateHeader:
    """Parse and check a compressed header.

    Raises:
        FormatError: naming the field, and the parameter where there is one.
    """
    size = stated_size(stored, "the header")
    if size > _header_bound(len(stored)):
        raise FormatError("the header is too large", expected=f"at most {_header_bound(len(stored))}", found=size)
    fields = load_json(inflate(stored, size, "the header"), "the header")
    envelope = Envelope.from_fields(fields)
    entries = tuple(_read_entry(entry) for entry in fields.objects("entries"))
    groups, tables = _read_groups(fields.objects("groups"))
    metas = [entry.meta for entry in entries]
    layout = Layout(
        entries=_records(entries),
        positions=np.array([_num_words(entry) for entry in entries], np.int64),
        word_bytes=np.array([meta.row.word_bytes for meta in metas], np.int64),
        groups=tables[0], spans=tables[1], streams=tables[2],
        name_of=lambda number: metas[number].name,
    )  # fmt: skip
    as_format_error(lambda: check_parts(envelope, entries), "the header")
    return UpdateHeader(envelope, entries, groups, len(stored), layout)


def _read_entry(fields: Fields) -> EntryHeader:
    meta = _read_meta(fields, "dtype", "shape")
    box = fields.int_lists("box", 2) if fields.has("box") else None
    base_meta = None
    if fields.has("base_dtype") or fields.has("base_shape"):
        base_meta = _read_meta(fields, "base_dtype", "base_shape")
    return EntryHeader(
        meta=meta,
        encoding=lay.ENCODINGS[fields.one_of("encoding", lay.ENCODINGS)],
        values=lay.VALUE_FORMS[fields.one_of("values", lay.VALUE_FORMS)],
        num_changed=fields.number("num_changed"),
        fingerprint_after=int.from_bytes(fields.hex_bytes("after", 8)),
        fingerprint_before=int.from_bytes(fields.hex_bytes("before", 8)) if fields.has("before") else None,
        old_sum=int.from_bytes(fields.hex_bytes("old_sum", 8)) if fields.has("old_sum") else None,
        part=fields.number("part", (1 << 32) - 1) if fields.has("part") else 0,
        box=tuple((lo, hi) for lo, hi in box) if box is not None else None,
        base_meta=base_meta,
    )


def _read_meta(fields: Fields, dtype: str, shape: str) -> ParamMeta:
    sizes = fields.items(shape)
    if not all(type(size) is int for size in sizes) or not fields.has(shape):
        raise fields.wrong(shape, "a list of integers")
    return as_format_error(lambda: ParamMeta(fields.text("name"), fields.text(dtype), tuple(sizes)), "the header")


def _num_words(entry: EntryHeader) -> int:
    if entry.box is None:
        return entry.meta.num_words
    box = entry.box
    return as_format_error(lambda: check_box(entry.meta, box), "the header")


def _records(entries: tuple[EntryHeader, ...]) -> np.ndarray[Any, Any]:
    records = np.zeros(len(entries), ENTRY)
    records["encoding"] = [lay.ENCODINGS.index(entry.encoding) for entry in entries]
    records["values"] = [lay.VALUE_FORMS.index(entry.values) for entry in entries]
    records["num_changed"] = [entry.num_changed for entry in entries]
    return records


def _read_groups(
    objects: list[Fields],
) -> tuple[tuple[GroupHeader, ...], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    groups = []
    records = np.zeros(len(objects), GROUP)
    spans: list[tuple[int, ...]] = []
    streams: list[tuple[object, ...]] = []
    highest = (1 << 32) - 1
    for record, fields in zip(records, objects, strict=True):
        first, end = fields.number("first", highest), fields.number("end", highest)
        mine = [_read_stream(fields, row) for row in fields.items("streams")]
        rows = fields.int_lists("spans", 4)
        if any(row[0] > highest for row in rows):
            raise fields.wrong("spans", "entry numbers below 2^32")
        digest = fields.hex_bytes("xxh3_128", 16)
        record["first"], record["end"], record["num_spans"], record["num_streams"] = first, end, len(rows), len(mine)
        record["xxh3_128"] = np.frombuffer(digest, np.uint8)
        spans += [(entry, 0, lo, hi, count) for entry, lo, hi, count in rows]
        streams += [(kind, coding, b"\0" * 6, stored, decoded) for kind, coding, stored, decoded in mine]
        sha256 = fields.hex_bytes("sha256", 32) if fields.has("sha256") else None
        sizes = {lay.KINDS[kind]: (lay.CODINGS[coding], stored, size) for kind, coding, stored, size in mine}
        groups.append(GroupHeader(first, end, sum(row[2] for row in mine), digest, sha256, sizes))
    table = np.zeros(len(streams), STREAM)
    for place, key in ((0, "kind"), (1, "coding"), (3, "stored"), (4, "decoded")):
        table[key] = [row[place] for row in streams]
    return tuple(groups), (records, np.array(spans, SPAN), table)


def _read_stream(fields: Fields, row: object) -> tuple[int, int, int, int]:
    if not isinstance(row, list) or len(row) != 4:
        raise fields.wrong("streams", "lists of kind, coding, stored and decoded bytes")
    stream = Fields(dict(zip(("kind", "coding", "stored", "decoded"), row, strict=True)), "a stream record")
    return (
        stream.one_of("kind", lay.KINDS), stream.one_of("coding", lay.CODINGS),
        stream.number("stored", lay.MAX_STREAM_BYTES), stream.number("decoded", lay.MAX_STREAM_BYTES),
    )  # fmt: skip


class _Part(Protocol):
    """What `SparseWeightPatch` and `EntryHeader` have in common."""

    @property
    def meta(self) -> ParamMeta: ...
    @property
    def part(self) -> int: ...
    @property
    def box(self) -> Box | None: ...
    @property
    def base_meta(self) -> ParamMeta | None: ...
    @property
    def is_dense(self) -> bool: ...


def check_parts(envelope: Envelope, entries: Sequence[_Part]) -> None:
    """Check what the entries of an update must satisfy together.

    Raises:
        PatchError: a (name, part) twice, parts that overlap or disagree about their parameter, a name that is both
            sent and removed, or something that needs a base in an update that has none.
    """
    if envelope.base_version is None or any(entry.base_meta is not None for entry in entries):
        for entry in entries:
            if not entry.is_dense and (envelope.base_version is None or entry.base_meta is not None):
                raise PatchError("an entry without a base must be dense", parameter=entry.meta.name)
    _check_names(envelope, entries)


def _check_names(envelope: Envelope, entries: Sequence[_Part]) -> None:
    names = Counter([entry.meta.name for entry in entries])
    for name in (*envelope.removed, *envelope.aliases):
        if name in names:
            raise PatchError("a parameter is sent, and also removed or an alias", parameter=name)
    if len(names) == len(entries):
        return
    parts: dict[str, list[_Part]] = {name: [] for name, count in names.items() if count > 1}
    for entry in entries:
        if entry.meta.name in parts:
            parts[entry.meta.name].append(entry)
    for name, mine in parts.items():
        if len({entry.part for entry in mine}) != len(mine):
            raise PatchError("a (name, part) appears twice", parameter=name)
        if any(entry.meta != mine[0].meta for entry in mine):
            raise PatchError("parts disagree about dtype or shape", parameter=name)
        check_disjoint(name, [entry.box for entry in mine])
