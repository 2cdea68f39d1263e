"""`deltacast bench sync`: rows that make sense, failures that are told; speed itself is not tested."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from deltacast.bench.shapes import model_metas
from deltacast.bench.sync import bench_sync
from deltacast.bench.sync_ranks import run_ranks
from deltacast.bench.sync_rows import Facts, SyncOptions
from deltacast.bench.sync_trainer import measure
from deltacast.bench.sync_weights import LiveWeights
from deltacast.bench.sync_worker import serve
from deltacast.cli import app
from deltacast.delta.errors import InputError, TransportError, VerificationError
from deltacast.delta.table import ParamMeta
from failing_ranks import fail, serve_carelessly

CPU = torch.device("cpu")
METAS = (
    ParamMeta("embed", "bfloat16", (300, 400)),
    ParamMeta("bias", "float32", (64,)),
    ParamMeta("norm", "bfloat16", (400,)),
    ParamMeta("scale", "bfloat16", ()),
)
NUM_WORDS = 300 * 400 + 64 + 400 + 1
MODEL_BYTES = 2 * 300 * 400 + 4 * 64 + 2 * 400 + 2
TIMEOUT_S = 40.0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the ranks run: they take GPUs if they see enough of them."""
    if request.param == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A checkpoint with the names, dtypes and shapes of `METAS`."""
    path = tmp_path / "tiny.safetensors"
    save_file({meta.name: torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in METAS}, path)
    return str(path)


def command(*args: object, code: int = 0) -> str:
    """Run the command line and return what it prints on stdout; it must print nothing else unless it fails."""
    result = CliRunner().invoke(app, ["bench", "sync", *map(str, args)])
    assert result.exit_code == code, result.output
    assert code or result.stderr == ""
    return result.stdout


def test_published_models_have_their_published_sizes() -> None:
    """Parameters as the model cards count them, in as many tensors as the checkpoints hold."""
    qwen2, qwen3 = model_metas("qwen2.5-7b"), model_metas("qwen3-30b-a3b")
    assert (len(qwen2), sum(meta.numel for meta in qwen2)) == (339, 7_615_616_512)
    assert (len(qwen3), sum(meta.numel for meta in qwen3)) == (18_867, 30_532_122_624)
    assert len({meta.name for meta in qwen3}) == len(qwen3)


def test_a_checkpoint_lends_its_shapes(model: str) -> None:
    """Names, dtypes and shapes of a file are taken as they are, or shrunk without losing a tensor."""
    assert set(model_metas(model)) == set(METAS)
    shrunk = {meta.name: meta.shape for meta in model_metas(model, 0.01)}
    assert shrunk == {"embed": (30, 40), "bias": (1,), "norm": (4,), "scale": ()}


def test_a_step_moves_its_share_by_a_little_and_nothing_else() -> None:
    """Nine in ten changed words move to a neighbouring value, large weights less often; what is not bf16 stays."""
    weights = LiveWeights([ParamMeta("w", "bfloat16", (1000, 1001)), METAS[1]], CPU, seed=1)
    before = weights.words.numpy().copy()
    weights.take_step(3.0)
    after = weights.words.numpy().astype(np.int64)
    moved = np.flatnonzero(after != before)
    assert moved.size / 1_001_000 == pytest.approx(0.03, rel=0.03)
    assert moved.max() < 1_001_000  # between the tensors, nothing moves
    ordered_after, ordered_before = (np.where(w < 0, -1 - (w & 0x7FFF), w) for w in (after, before.astype(np.int64)))
    steps = np.abs(ordered_after - ordered_before)[moved]
    assert steps.min() == 1
    assert (steps == 1).mean() == pytest.approx(0.88, abs=0.02)
    magnitude = (before[:1_001_000] & 0x7FFF).view(np.uint16).astype(np.uint32) << 16
    values = magnitude.view(np.float32)
    large, small = (values > 0.02), (values < 0.005)
    changed = after[:1_001_000] != before[:1_001_000]
    assert changed[small].mean() > 3 * changed[large].mean()
    assert not weights.live[1].any()


def test_ranks_make_the_same_weights_and_every_step_moves_others() -> None:
    """Same seed, same bits; two steps differ in where they change."""
    one, two = (LiveWeights(METAS, CPU, seed=3) for _ in range(2))
    assert torch.equal(one.words, two.words)
    one.take_step(1.0)
    first = one.words != two.words
    two.words.copy_(one.words)
    one.take_step(1.0)
    assert not torch.equal(first, one.words != two.words)


def by_way(document: dict[str, Any], link: float | None) -> dict[tuple[str, object], dict[str, Any]]:
    return {(row["method"], row["audit"]): row for row in document["rows"] if row["link_gbits"] == link}


def test_the_command_measures_every_way_on_every_link(model: str, tmp_path: Path, device: str) -> None:
    """All rows are there and agree with themselves; the picture is a PNG."""
    picture = tmp_path / "sync.png"
    args = ("--model-shapes", model, "--density", 2, "--link", 0.01, "--link", 0.1, "--repeats", 2, "--threads", 1)
    document = json.loads(command(*args, "--plot", picture, "--json"))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    own, slow, faster = (by_way(document, link) for link in (None, 0.01, 0.1))
    assert set(slow) == {("dense", None), ("peer", None), ("raw", 16), ("coded", 16)}
    assert set(own) == set(slow) | {("raw", "full")}
    machine = document["machine"]
    assert (machine["num_words"], machine["model_bytes"], machine["num_tensors"]) == (NUM_WORDS, MODEL_BYTES, 4)
    assert machine["device"] == device
    check_rows([*own.values(), *slow.values(), *faster.values()], machine)
    assert slow["dense", None]["timing"] == "computed"
    assert slow["dense", None]["wall_median_s"] == pytest.approx(MODEL_BYTES / 1.25e6, rel=0.2)
    fastest_s = max(own["dense", None]["wall_median_s"], MODEL_BYTES / 1.25e7)
    assert faster["dense", None]["wall_median_s"] == pytest.approx(fastest_s, rel=0.2)  # whatever was measured before
    assert own["peer", None]["sent_bytes"] == pytest.approx(6 * 0.02 * 120_400, rel=0.1)
    assert slow["peer", None]["wall_min_s"] >= slow["peer", None]["link_floor_s"]
    for way in (("raw", 16), ("coded", 16)):
        assert slow[way]["sent_bytes"] < own["peer", None]["sent_bytes"]
        assert slow[way]["density"] == pytest.approx(0.02, rel=0.1)
        assert {"diff", "send", "apply", "audit", "commit"} <= set(slow[way]["stages_s"])


def check_rows(rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    """What follows from the times of a row follows from them."""
    for row in rows:
        dense = next(r for r in rows if r["method"] == "dense" and r["link_gbits"] == row["link_gbits"])
        assert len(row["wall_s"]) == 2
        assert 0 < row["wall_min_s"] <= row["wall_median_s"] <= row["wall_max_s"]
        assert row["times_faster_than_dense"] == pytest.approx(dense["wall_median_s"] / row["wall_median_s"])
        rate = machine["broadcast_bytes_per_s"] if row["link_gbits"] is None else row["link_gbits"] * 1e9 / 8
        assert row["link_floor_s"] == pytest.approx(row["sent_bytes"] / rate)
        read_floor_s = 0 if row["method"] == "dense" else 2 * MODEL_BYTES / machine["copy_bytes_per_s"]
        assert row["of_bound"] == pytest.approx(max(read_floor_s, row["link_floor_s"]) / row["wall_median_s"])


def test_people_get_a_table_per_link(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the machine and what is simulated said above it; three ranks work as well as two, and a baseline on disk."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    args = ("--model-shapes", model, "--link", 25, "--wire", "coded", "--audit", "full", "--repeats", 1)
    text = command(*args, "--world", 3, "--threads", 1, "--placement", "mmap")
    for said in ("no GPU was measured", "Gloo on one CPU", "25 Gbit/s, simulated", "coded, audit full", "2 worker(s)"):
        assert said in text
    assert "raw" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model-shapes", "gpt-7"), "no such model"),
        (("--density", "0"), "bad density"),
        (("--wire", "zip"), "bad wire"),
        (("--audit", "off"), "bad audit"),
        (("--audit", "0"), "bad audit"),
        (("--link", "-1"), "bad link"),
        (("--placement", "disk"), "bad placement"),
        (("--scale", "2"), "bad scale"),
        (("--plot", "/nowhere/a.png"), "no such folder"),
    ],
)
def test_bad_arguments_are_named(args: tuple[str, ...], message: str) -> None:
    """Before a process is started."""
    error = json.loads(command(*args, "--json", code=2))["error"]
    assert message in error["message"]


def test_a_model_in_which_nothing_would_change_is_refused(tmp_path: Path) -> None:
    """Only bf16 words are changed."""
    path = tmp_path / "fp32.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(InputError, match="no parameter is bf16"):
        next(bench_sync(SyncOptions(model=str(path))))


@pytest.fixture
def options(model: str, device: str) -> SyncOptions:
    return SyncOptions(model=model, links_gbits=(), repeats=1)


def test_a_rank_that_raises_is_named_with_its_traceback(options: SyncOptions) -> None:
    """Not the ranks that fail because of it; and no process is left."""
    with pytest.raises(TransportError, match="a rank failed: ZeroDivisionError: join is too much for rank 1") as caught:
        list(run_ranks(options, TIMEOUT_S, measure, fail))
    assert caught.value.rank == 1
    assert "failing_ranks.py" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_a_rank_that_is_killed_is_named(options: SyncOptions) -> None:
    """Whatever the others were doing."""
    items = run_ranks(replace(options, repeats=1000), TIMEOUT_S, measure, serve)
    next(item for item in items if isinstance(item, Facts))
    started = sorted(multiprocessing.active_children(), key=lambda process: int(process.name.rsplit("-", 1)[1]))
    assert started[-1].pid is not None
    os.kill(started[-1].pid, signal.SIGKILL)
    with pytest.raises(TransportError, match="died") as caught:
        list(items)
    assert caught.value.rank == 1
    assert not multiprocessing.active_children()


def test_a_word_that_is_wrong_fails_the_run(options: SyncOptions) -> None:
    """The parameter is named, and no row is reported for the way that lost it."""
    rows: list[object] = []
    with pytest.raises(VerificationError, match="are not the trainer's") as caught:
        rows.extend(run_ranks(options, TIMEOUT_S, measure, serve_carelessly))
    assert (caught.value.rank, caught.value.parameter) == (1, "norm")
    assert not multiprocessing.active_children()
