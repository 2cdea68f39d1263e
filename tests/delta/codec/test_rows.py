"""Rounds: rows and groups for two ends that hold the parameter table already."""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import made_updates as made
from deltacast.delta.codec import decode_round, decode_update, encode_round, encode_update, read_rows
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import FormatError, InputError, PatchError, TableError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import ParameterTable, ParamMeta

TABLE = ParameterTable([ParamMeta(f"p{i:02}.{dtype}", dtype, (i, 7)) for i, dtype in enumerate(DTYPES)],
                       {"head": "p00.bfloat16"})  # fmt: skip


def patch(meta: ParamMeta, num: int, form: str, seed: int = 0) -> SparseWeightPatch:
    rng = np.random.default_rng(seed)
    old = made.random_words(rng, meta)
    at = np.sort(rng.choice(meta.num_words, min(num, meta.num_words), replace=False)).astype(np.int64)
    return made.patch_of(meta, old, made.step(rng, old, at), form=form)


@st.composite
def rounds(draw: st.DrawFn) -> WeightUpdate:
    chosen = draw(st.lists(st.sampled_from(TABLE.metas), unique=True, max_size=8))
    forms = st.sampled_from(["based", "absolute", "delta", "dense"])
    patches = [patch(meta, draw(st.integers(0, 60)), draw(forms), draw(st.integers(0, 99))) for meta in chosen]
    return made.update_of(patches, TABLE, aliases=TABLE.aliases)


@given(rounds(), st.integers(1, 2))
@settings(deadline=None, max_examples=60)
def test_round_trip(update: WeightUpdate, threads: int) -> None:
    """Any patches of the table's parameters, in any order, come back by bits."""
    sent = encode_round(update, TABLE, threads=threads)
    made.assert_same(update, decode_round(sent.rows, b"".join(sent.groups), TABLE, threads=threads))
    assert sent.num_bytes == len(sent.rows) + sum(map(len, sent.groups))


def test_groups_are_those_of_a_file() -> None:
    """The payload of a round is byte for byte the payload of the container."""
    update = made.update_of([patch(meta, 20, "based") for meta in TABLE], TABLE, aliases=TABLE.aliases)
    sent = encode_round(update, TABLE)
    assert b"".join(sent.groups) in encode_update(update)
    made.assert_same(decode_update(encode_update(update)), decode_round(sent.rows, b"".join(sent.groups), TABLE))


def test_rows_can_be_read_before_the_payload_comes() -> None:
    """Parsed rows say how much payload there is, and where each group lies."""
    update = made.update_of([patch(meta, 20, "based") for meta in TABLE], TABLE)
    sent = encode_round(update, TABLE)
    parsed = read_rows(sent.rows, TABLE)
    assert parsed.envelope.target_version == 4
    assert parsed.checked.payload_bytes == sum(map(len, sent.groups))
    made.assert_same(update, decode_round(parsed, b"".join(sent.groups), TABLE))


def test_parts_with_boxes() -> None:
    """Row shards of one parameter, 0-d boxes included."""
    meta, scalar = ParamMeta("w", "float32", (6, 5)), ParamMeta("s", "float32", ())
    table = ParameterTable([meta, scalar])
    rng = np.random.default_rng(0)
    old = made.random_words(rng, meta)
    patches = []
    for part, (lo, hi) in enumerate([(0, 4), (4, 6)]):
        at = np.array([lo * 5 + 1, hi * 5 - 1], np.int64)
        patches.append(made.patch_of(meta, old, made.step(rng, old, at), box=((lo, hi), (0, 5)), part=part, indices=at))
    patches.append(SparseWeightPatch(scalar, None, np.zeros(1, "<u4"), 5, box=()))
    update = made.update_of(patches, table)
    sent = encode_round(update, table)
    made.assert_same(update, decode_round(sent.rows, b"".join(sent.groups), table))


def test_only_for_the_table_at_both_ends() -> None:
    """Another table, an unknown or changed parameter is refused before anything is sent."""
    meta = TABLE.metas[5]
    update = made.update_of([patch(meta, 5, "based")], TABLE)
    other = ParameterTable(TABLE.metas[:6])
    with pytest.raises(TableError, match="another parameter table"):
        encode_round(update, other)
    with pytest.raises(TableError, match="another parameter table"):
        read_rows(encode_round(update, TABLE).rows, other)
    with pytest.raises(TableError, match="no such parameter"):
        encode_round(made.update_of([patch(ParamMeta("x", "int8", (5,)), 2, "based")], TABLE), TABLE)
    for changes in ({"removed": ("gone",)}, {"aliases": {meta.name: meta.name}}, {"aliases": {"x": "gone"}}):
        with pytest.raises(TableError, match=r"needs a new table|another name"):
            encode_round(made.update_of([], TABLE, **changes), TABLE)
    changed = ParamMeta(meta.name, "int8", meta.shape)
    with pytest.raises(TableError, match="another parameter"):
        encode_round(made.update_of([patch(changed, 2, "based")], TABLE), TABLE)
    was = SparseWeightPatch(meta, None, np.zeros(meta.num_words, meta.row.numpy_word), 1, base_meta=changed)
    with pytest.raises(InputError, match="needs a new table"):
        encode_round(made.update_of([was], TABLE), TABLE)
    with pytest.raises(PatchError, match="must be dense"):
        encode_round(made.update_of([patch(meta, 2, "based")], TABLE, base_version=None, base_digest=None), TABLE)


SENT = encode_round(made.update_of([patch(TABLE.metas[i], 9, "based") for i in (4, 5, 9)], TABLE), TABLE)
JSON_BYTES = struct.unpack_from("<I", SENT.rows, 8)[0]
ENTRIES = (32 + JSON_BYTES + 7) // 8 * 8


def changed(offset: int, form: str, value: Any) -> bytes:
    """Return rows with one field changed and the checksum made right."""
    rows = bytearray(SENT.rows)
    struct.pack_into(form, rows, offset, value)
    return bytes(rows[:-16]) + xxhash.xxh3_128_digest(rows[:-16])


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (8, "<I", 1 << 31, "another size"), (12, "<I", 1 << 31, "another size"), (16, "<I", 0, "another size"),
        (28, "<I", 1, "another size"), (12, "<I", (1 << 32) - 1, "another size"),
        (ENTRIES, "<I", len(TABLE), "beyond the table"), (ENTRIES, "<I", (1 << 32) - 1, "beyond the table"),
        (ENTRIES, "<I", 5, "twice"), (ENTRIES, "<I", 0, "more changes than words"),
        (ENTRIES + 8, "<B", 3, "unknown encoding"), (ENTRIES + 8, "<B", 2, "dense entry"),
        (ENTRIES + 9, "<B", 2, "unknown values"), (ENTRIES + 10, "<H", 8, "flags"),
        (ENTRIES + 10, "<H", 7, "boxes end"), (ENTRIES + 12, "<I", 1, "flags"),
        (ENTRIES + 16, "<q", -1, "more changes"), (ENTRIES + 16, "<q", 8, "size|bits"),
        (ENTRIES + 16, "<q", 1 << 62, "more changes"),
        (ENTRIES + 3 * 48, "<I", 1, "groups do not carry"), (ENTRIES + 3 * 48 + 4, "<I", 9, "groups do not carry"),
        (ENTRIES + 3 * 48 + 8, "<I", 1, "span table"), (ENTRIES + 3 * 48 + 12, "<I", 1, "stream table"),
        (ENTRIES + 3 * 48 + 32, "<B", 99, "unknown stream kind"),
        (ENTRIES + 3 * 48 + 33, "<B", 2, "unknown stream coding"),
        (ENTRIES + 3 * 48 + 34, "<B", 1, "unknown stream coding"), (ENTRIES + 3 * 48 + 40, "<q", -5, "impossible"),
        (ENTRIES + 3 * 48 + 40, "<q", 1 << 62, "impossible"), (ENTRIES + 3 * 48 + 48, "<q", 1 << 62, "impossible"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(offset: int, form: str, value: Any, message: str) -> None:
    """One wrong number under a right checksum."""
    with pytest.raises(FormatError, match=message):
        decode_round(changed(offset, form, value), b"".join(SENT.groups), TABLE)


def test_rows_of_40000_parameters_are_cheap() -> None:
    """Reading them is vectorised; the bound is loose, for slow machines (docs/format.md has the measured figure)."""
    metas = [ParamMeta(f"layers.{i}", "bfloat16", (8, 8)) for i in range(40_000)]
    table = ParameterTable(metas)
    at, old, new = np.array([3, 60], np.int64), np.array([1, 2], "<u2"), np.array([2, 1], "<u2")
    patches = [SparseWeightPatch(meta, at, new, 1, base_values=old, old_sum=2, fingerprint_before=3) for meta in table]
    sent = encode_round(made.update_of(patches, table), table)
    assert len(sent.rows) < 50 * 40_000
    times = []
    for _ in range(3):
        start = time.process_time()
        read_rows(sent.rows, table)
        times.append(time.process_time() - start)
    assert min(times) < 0.1
