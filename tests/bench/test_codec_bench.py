"""The codec's measurements: floors against hand-made values, the generator's promises, and the rows' keys."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors.numpy import save

from deltacast.bench.codec import bench_codec
from deltacast.bench.floors import Change, floors
from deltacast.bench.generator import make_model, take_step
from deltacast.delta.errors import ChecksumError, InputError
from deltacast.delta.table import ParamMeta

KEYS = {"source", "encoding", "num_changed", "density", "bits_per_change", "floor_bits", "floor_bits_given_exponent",
        "stream_bits", "xor_zstd_bits", "times_smaller", "encode_gbps", "decode_apply_gbps",
        "verified_apply_gbps", "memcpy_gbps"}  # fmt: skip


def test_floors_by_hand() -> None:
    """Half of 8 words change: 8 bits for which; +1 and -1 in equal number: a bit each."""
    meta = ParamMeta("w", "bfloat16", (8,))
    old = np.full(8, 0x3F80, "<u2")
    at = np.array([0, 2, 4, 6], np.int64)
    new = np.array([0x3F81, 0x3F7F, 0x3F81, 0x3F7F], "<u2")
    bound = floors([Change(meta, old, at, new)])
    assert bound.unconditional == pytest.approx(8 + 4)
    assert bound.given_exponent == pytest.approx(8 + 4)


def test_floor_given_the_exponent_by_hand() -> None:
    """If all words of one exponent move and none of another, positions cost nothing once exponents are known."""
    meta = ParamMeta("w", "bfloat16", (8,))
    old = np.array([0x3F80] * 4 + [0x3E80] * 4, "<u2")
    at = np.arange(4, dtype=np.int64)
    bound = floors([Change(meta, old, at, old[:4] + np.uint16(1))])
    assert bound.unconditional == pytest.approx(8)
    assert bound.given_exponent == 0


def test_floor_of_nothing() -> None:
    """No change needs no bits, nor does a parameter that changes whole by one step."""
    assert floors([]).unconditional == 0
    meta = ParamMeta("w", "int32", (5,))
    old = np.arange(5, dtype="<u4")
    assert floors([Change(meta, old, np.arange(5), old + np.uint32(1))]).unconditional == 0


@pytest.mark.parametrize("percent", [0.05, 1.2, 17.0])
def test_generator_hits_its_share(percent: float) -> None:
    """The share of changed words is the preset's, nine in ten are one step, and small weights change more."""
    model = make_model(1 << 18, seed=1)
    total = changed = single = 0
    for meta, new in take_step(model, percent, np.random.default_rng(2)):
        old = model.words[meta.name]
        total += old.size
        if meta.dtype == "bfloat16":
            at = np.flatnonzero(old != new)
            assert not (at.size and meta.name in model.idle)
            changed += at.size
            step = np.abs(old[at].astype(np.int64) - new[at])
            single += int((step == 1).sum())
    assert changed / total == pytest.approx(percent / 100, rel=0.15)
    assert single / changed == pytest.approx(0.88, abs=0.06)


def test_generator_has_what_models_have() -> None:
    """Idle tensors, a tied head, fp32 beside bf16, 0-d and empty tensors, and special values."""
    model = make_model(1 << 18)
    assert model.idle
    assert model.table.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {meta.dtype for meta in model.table} == {"bfloat16", "float32"}
    assert {meta.shape for meta in model.table} >= {(), (0, 1024)}
    assert {0x8000, 0x7FC1, 0x7F80} <= set(model.words["model.embed_tokens.weight"].tolist())
    again = make_model(1 << 18)
    assert all((model.words[name] == again.words[name]).all() for name in model.words)


def test_rows_of_the_generator() -> None:
    """Every preset and chain gives one row, with all keys, and no file is above dense + 1 %."""
    rows = list(bench_codec(presets=(0.6, 90.0), chains=(3,), num_elements=1 << 17, repeats=1))
    assert [row["preset"] for row in rows] == ["0.6 %", "90 %", "1.2 %, fold of 3"]
    for row in rows:
        assert row.keys() == KEYS | {"preset"}
        assert row["floor_bits_given_exponent"] <= row["floor_bits"] <= row["bits_per_change"]
        assert row["times_smaller"] > 1 / 1.01
        assert row["density"] < 1
        assert row["memcpy_gbps"] > 0
    assert math.isclose(rows[0]["density"], 0.006, rel_tol=0.3)


def small_trace(folder: Path) -> None:
    """Write a trace of one run and two versions in the recorded trace's layout."""
    old = np.arange(4000, dtype=np.int16)
    at = np.arange(0, 4000, 50, dtype=np.int32)
    new = old.copy()
    new[at] += 1
    start = save({"w": old.reshape(40, 100)}).replace(b'"I16"', b'"BF16"')
    size = int.from_bytes(start[:8], "little")
    header = start[8 : 8 + size].rstrip()
    header += b" " * (-len(header) % 8)
    (folder / "v00000.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + old.tobytes())
    (folder / "run").mkdir()
    delta = zstandard.ZstdCompressor().compress(save({"w#idx": at, "w#val": new[at]}))
    (folder / "run" / "v00001.safetensors.zst").write_bytes(delta)
    digests = {"run": {str(v): {"w": xxhash.xxh3_128_hexdigest(array.data)} for v, array in enumerate((old, new))}}
    (folder / "digests.json").write_text(json.dumps(digests))


def test_rows_of_a_trace(tmp_path: Path) -> None:
    """A trace's versions are checked by digest and measured."""
    small_trace(tmp_path)
    (row,) = bench_codec(tmp_path, presets=(), chains=(), repeats=1)
    assert row.keys() == KEYS | {"version"}
    assert (row["source"], row["version"], row["num_changed"], row["encoding"]) == ("trace run", 1, 80, "sparse")


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    """Other bits than the digests say are not measured; a folder without a trace is named."""
    with pytest.raises(InputError, match="no trace"):
        list(bench_codec(tmp_path, presets=(), chains=()))
    small_trace(tmp_path)
    text = (tmp_path / "digests.json").read_text()
    (tmp_path / "digests.json").write_text(text.replace('"1": {"w": "', '"1": {"w": "0'))
    with pytest.raises(ChecksumError, match="damaged"):
        list(bench_codec(tmp_path, presets=(), chains=()))
