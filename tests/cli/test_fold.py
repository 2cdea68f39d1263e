"""`deltacast fold`: one update that does what a chain does."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Run, RunJson
from golden_checkpoint import GOLDEN_STATE_DIGEST, NEXT, NEXT_STATE_DIGEST, Raw, write_raw


@pytest.fixture
def chain(base: Path, new: Path, tmp_path: Path, run: Run) -> list[Path]:
    """Two updates: base to new, and from there to a third checkpoint (`third.safetensors`)."""
    w = bytearray(NEXT["model.layers.0.w"][2])
    w[2 * 65] ^= 1  # back to what it was
    w[2 * 70] ^= 3
    router = bytearray(NEXT["router"][2])
    router[4 * 3] ^= 1
    tensors: dict[str, Raw] = NEXT | {
        "model.layers.0.w": ("BF16", [40, 64], bytes(w)), "router": ("F32", [30, 50], bytes(router)),
    }  # fmt: skip
    third = write_raw(tmp_path / "third.safetensors", tensors)
    run("diff", base, new, "-o", tmp_path / "1.dcu")
    run("diff", new, third, "-o", tmp_path / "2.dcu", "--base-version", 1)
    return [tmp_path / "1.dcu", tmp_path / "2.dcu"]


def test_a_folded_chain_gives_the_last_checkpoint(
    base: Path, chain: list[Path], tmp_path: Path, run: Run, run_json: RunJson
) -> None:
    """A word that went there and back is not sent."""
    folded = tmp_path / "folded.dcu"
    document = run_json("fold", *chain, "-o", folded)
    assert (document["base_version"], document["target_version"], document["num_updates"]) == (0, 2, 2)
    assert (document["base_digest"], document["num_changed"]) == (GOLDEN_STATE_DIGEST, 4)
    assert document["update_bytes"] == folded.stat().st_size
    assert document["input_bytes"] == sum(path.stat().st_size for path in chain)
    run("apply", folded, base, "-o", tmp_path / "out.safetensors")
    run("verify", tmp_path / "out.safetensors", tmp_path / "third.safetensors")


def test_mixed_forms_fold_with_the_base(base: Path, new: Path, chain: list[Path], tmp_path: Path, run: Run) -> None:
    """And are refused without it, saying so; a wrong base is a mismatch."""
    third, folded = tmp_path / "third.safetensors", tmp_path / "folded.dcu"
    run("diff", new, third, "-o", chain[1], "--base-version", 1, "--values", "absolute", "--force")
    assert "base" in run("fold", *chain, "-o", folded, code=2).stderr
    assert "first update's base" in run("fold", *chain, "-o", folded, "--base", new, code=1).stderr
    assert not folded.exists()
    run("fold", *chain, "-o", folded, "--base", base)
    run("apply", folded, base, "--in-place")
    run("verify", base, third)


def test_updates_that_do_not_follow_one_another_exit_1(chain: list[Path], tmp_path: Path, run_json: RunJson) -> None:
    """Named by version, expected and found."""
    error = run_json("fold", *reversed(chain), "-o", tmp_path / "folded.dcu", code=1)["error"]
    assert error["type"] == "BaseError"
    assert error["found"] == f"base 0 {GOLDEN_STATE_DIGEST}"
    assert not (tmp_path / "folded.dcu").exists()


def test_people_see_where_it_leads(chain: list[Path], tmp_path: Path, run: Run) -> None:
    """One update alone is copied."""
    output = run("fold", chain[0], "-o", tmp_path / "folded.dcu").stdout
    assert "0 -> 1 of run offline" in output
    assert NEXT_STATE_DIGEST in output


def test_a_damaged_update_exits_3(chain: list[Path], tmp_path: Path, run: Run) -> None:
    """And nothing is written."""
    chain[1].write_bytes(chain[1].read_bytes()[:-1])
    run("fold", *chain, "-o", tmp_path / "folded.dcu", code=3)
    assert not (tmp_path / "folded.dcu").exists()
