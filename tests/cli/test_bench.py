"""`deltacast bench`: rows that make sense; speed itself is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Run, RunJson
from deltacast.bench.diff import bench_diff
from deltacast.delta.errors import InputError


def test_bench_diff_measures_each_density(run: Run, run_json: RunJson) -> None:
    """The number of changes is what the density asks for; rates are positive."""
    args = ("bench", "diff", "--elements", 20_000, "--repeats", 1, "--preset", 0, "--preset", 50, "--preset", 100)
    rows = run_json(*args)
    assert [row["density"] for row in rows] == [0, 0.5, 1]
    assert rows[0]["num_changed"] == 0
    assert 9_000 < rows[1]["num_changed"] < 11_000
    assert rows[2]["num_changed"] == 20_000
    assert all(row[key] > 0 for row in rows for key in ("compare_gbps", "diff_gbps", "memcpy_gbps"))
    assert "memcpy GB/s" in run(*args).stdout


def test_the_default_densities_are_measured(run_json: RunJson) -> None:
    """From idle steps to nearly everything."""
    rows = run_json("bench", "diff", "--elements", 100, "--repeats", 1)
    assert [row["density"] for row in rows] == [0.0005, 0.006, 0.012, 0.03, 0.08, 0.17, 0.45, 0.9]


def test_nonsense_is_refused() -> None:
    """By name."""
    with pytest.raises(InputError, match="nothing to measure"):
        list(bench_diff(num_elements=0))


def test_bench_codec_measures_the_generator(run: Run, run_json: RunJson) -> None:
    """One row per preset and chain, with the facts that the table shows."""
    args = ("bench", "codec", "--elements", 40_000, "--repeats", 1, "--preset", 3, "--chain", 2)
    document = run_json(*args)
    assert [row["preset"] for row in document] == ["3 %", "1.2 %, fold of 2"]
    row = document[0]
    assert {"source", "encoding", "xor_zstd_bits", "encode_gbps", "decode_apply_gbps", "memcpy_gbps"} <= set(row)
    assert 0.02 < row["density"] < 0.04
    assert row["floor_bits_given_exponent"] <= row["floor_bits"] <= row["bits_per_change"]
    assert "XOR+zstd" in run(*args).stdout


def test_a_folder_that_is_no_trace_exits_2(tmp_path: Path, run_json: RunJson) -> None:
    """Nothing is generated instead."""
    assert "no trace" in run_json("bench", "codec", "--trace", tmp_path, code=2)["error"]["message"]
