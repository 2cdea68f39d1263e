"""`deltacast verify`, against differences put there by hand."""

from __future__ import annotations

from pathlib import Path

from command_line import Run, RunJson
from golden_checkpoint import GOLDEN, GOLDEN_STATE_DIGEST, NEXT_STATE_DIGEST, Raw, write_raw


def test_the_same_weights_are_identical(base: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """In another order and with other metadata."""
    other = write_raw(tmp_path / "other.safetensors", dict(reversed(GOLDEN.items())))
    document = run_json("verify", base, other)
    assert document["identical"] is True
    assert document["differences"] == []
    assert document["a"]["state_digest"] == document["b"]["state_digest"] == GOLDEN_STATE_DIGEST
    assert GOLDEN_STATE_DIGEST in run("verify", base, other).stdout


def test_differing_elements_are_counted_and_named(base: Path, new: Path, run_json: RunJson) -> None:
    """Position, index and bits on both sides, in table order."""
    document = run_json("verify", base, new, code=1)
    assert document["identical"] is False
    assert (document["a"]["state_digest"], document["b"]["state_digest"]) == (GOLDEN_STATE_DIGEST, NEXT_STATE_DIGEST)
    assert document["differences"] == [
        {
            "name": "model.layers.0.w",
            "kind": "bits",
            "a": {"dtype": "bfloat16", "shape": [40, 64]},
            "b": {"dtype": "bfloat16", "shape": [40, 64]},
            "num_differing": 1,
            "first": [{"position": 65, "index": [1, 1], "a": "a7a0", "b": "a7a1"}],
        },
        {
            "name": "router",
            "kind": "bits",
            "a": {"dtype": "float32", "shape": [30, 50]},
            "b": {"dtype": "float32", "shape": [30, 50]},
            "num_differing": 2,
            "first": [
                {"position": 0, "index": [0, 0], "a": "18110a03", "b": "18110a02"},
                {"position": 1499, "index": [29, 49], "a": "4f48413a", "b": "cf48413a"},
            ],
        },
    ]


def test_people_see_a_table(base: Path, new: Path, run: Run) -> None:
    """Names, counts and first differences; what is left out is said."""
    output = run("verify", base, new, code=1).stdout
    assert "[1, 1] a7a0 -> a7a1" in output
    assert "[0, 0] 18110a03 -> 18110a02, [29, 49] 4f48413a -> cf48413a" in output
    short = run("verify", base, new, "--limit", 1, "--first", 0, code=1).stdout
    assert "1 not shown" in short
    assert "router" not in short


def test_a_parameter_on_one_side_and_another_dtype_or_shape_are_named(
    base: Path, tmp_path: Path, run: Run, run_json: RunJson
) -> None:
    """With what each side has."""
    tensors: dict[str, Raw] = dict(GOLDEN)
    del tensors["one"]
    tensors |= {
        "extra": ("U8", [1], b"x"),
        "scalar": ("I32", [], bytes(4)),
        "fp8": ("F8_E4M3", [5, 1], GOLDEN["fp8"][2]),
    }
    other = write_raw(tmp_path / "other.safetensors", tensors)
    found = {d["name"]: (d["kind"], d["a"], d["b"]) for d in run_json("verify", base, other, code=1)["differences"]}
    assert found == {
        "one": ("only in A", {"dtype": "bfloat16", "shape": [1]}, None),
        "extra": ("only in B", None, {"dtype": "uint8", "shape": [1]}),
        "scalar": ("dtype", {"dtype": "float32", "shape": []}, {"dtype": "int32", "shape": []}),
        "fp8": ("shape", {"dtype": "float8_e4m3fn", "shape": [5]}, {"dtype": "float8_e4m3fn", "shape": [5, 1]}),
    }
    assert "bfloat16[1] -> nothing" in run("verify", base, other, code=1).stdout
