"""Updates for codec tests, and containers taken apart and put together again around a changed header."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash
import zstandard

from deltacast.delta.bits import Words
from deltacast.delta.fingerprint import Box, add, change_sums, words_fingerprint
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered
from deltacast.delta.table import ParameterTable, ParamMeta

BASE = "xxh3_128:" + "0b" * 16
TARGET = "xxh3_128:" + "1c" * 16


def random_words(rng: np.random.Generator, meta: ParamMeta) -> Words:
    """Return any bits at all: NaN, infinities and -0.0 among them."""
    return rng.integers(0, 256, meta.num_words * meta.row.word_bytes, np.uint8).view(meta.row.numpy_word)


def step(rng: np.random.Generator, old: Words, indices: np.ndarray[Any, Any]) -> Words:
    """Return new words that differ at exactly these positions, mostly by one."""
    new = old.copy()
    moves = rng.choice(np.array([1, -1, 1, -1, 2, -3, 7, -8, 9, 100, 0x7F]), indices.size).astype(np.int64)
    new[indices] += moves.astype(old.dtype)
    return new


def difference(meta: ParamMeta, old: Words, new: Words) -> Words:
    """Return `o(new) - o(old)` modulo 2^n."""
    signed = meta.row.signed_magnitude
    return ordered(new, signed_magnitude=signed) - ordered(old, signed_magnitude=signed)


def patch_of(
    meta: ParamMeta, old: Words, new: Words, *, form: str = "based", box: Box | None = None, part: int = 0,
    indices: np.ndarray[Any, Any] | None = None,
) -> SparseWeightPatch:  # fmt: skip
    """Return a patch: `based` (absolute with base values), `absolute`, `delta` or `dense`."""
    if form == "dense":
        return SparseWeightPatch(meta, None, new.copy(), words_fingerprint(new), part=part, box=box)
    at = np.flatnonzero(old != new).astype(np.int64) if indices is None else indices
    before = words_fingerprint(old)
    old_sum, new_sum = change_sums(at, old[at], new[at])
    values = difference(meta, old[at], new[at]) if form == "delta" else new[at]
    return SparseWeightPatch(
        meta, at, values, add(before, new_sum - old_sum), "delta" if form == "delta" else "absolute",
        old[at] if form == "based" else None, old_sum, before, part, box,
    )  # fmt: skip


def update_of(
    patches: Sequence[SparseWeightPatch], table: ParameterTable | None = None, **changes: Any
) -> WeightUpdate:
    """Return an update from version 3 to 4."""
    fields: dict[str, Any] = {
        "run_id": "run", "epoch": 1, "base_version": 3, "target_version": 4, "base_digest": BASE,
        "target_digest": TARGET, "table_digest": table.digest if table else TARGET, "patches": tuple(patches),
        "optimizer_step": 40,
    }  # fmt: skip
    return WeightUpdate(**(fields | changes))


def assert_same(sent: WeightUpdate, got: WeightUpdate) -> None:
    """Assert that a decoded update is what was sent, bit by bit; base values do not travel."""
    for key in ("run_id", "epoch", "base_version", "target_version", "base_digest", "target_digest", "table_digest",
                "optimizer_step", "removed"):  # fmt: skip
        assert getattr(sent, key) == getattr(got, key), key
    assert dict(sent.aliases) == dict(got.aliases)
    assert len(sent.patches) == len(got.patches)
    for a, b in zip(sent.patches, got.patches, strict=True):
        for key in ("meta", "part", "box", "base_meta", "old_sum", "fingerprint_before", "fingerprint_after"):
            assert getattr(a, key) == getattr(b, key), (a.name, key)
        assert (a.indices is None) == (b.indices is None), a.name
        if a.indices is not None and b.indices is not None:
            assert a.indices.tolist() == b.indices.tolist(), a.name
        values = a.values
        if (a.form, b.form) == ("absolute", "delta"):
            assert a.base_values is not None
            values = difference(a.meta, a.base_values, a.values)
        else:
            assert a.form == b.form, a.name
        assert values.tobytes() == b.values.tobytes(), a.name


def reseal(raw: bytes, change: Callable[[dict[str, Any]], object], payload: bytes | None = None) -> bytes:
    """Return an unsigned container with a changed JSON header, its checksums right again."""
    size = int.from_bytes(raw[8:16], "little")
    header = json.loads(zstandard.ZstdDecompressor().decompress(raw[16 : 16 + size]))
    if payload is None:
        payload = raw[(16 + size + 7) // 8 * 8 : -24]
    change(header)
    return seal(json.dumps(header).encode(), payload)


def seal(text: bytes, payload: bytes = b"") -> bytes:
    """Return an unsigned container around any header bytes."""
    return seal_stored(zstandard.ZstdCompressor().compress(text), payload)


def seal_stored(stored: bytes, payload: bytes = b"") -> bytes:
    """Return an unsigned container around an already compressed header."""
    body = b"\x89DCU\r\n\x1a\n" + len(stored).to_bytes(8, "little") + stored
    body += bytes(-len(body) % 8) + payload + bytes(8)
    return body + xxhash.xxh3_128_digest(body)


def rehash(group: dict[str, Any], payload: bytes) -> None:
    """Make a group's checksum right for other bytes."""
    group["xxh3_128"] = xxhash.xxh3_128_hexdigest(payload)
