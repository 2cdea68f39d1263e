"""`deltacast digest`, against values of a naive big-integer twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import Run, RunJson
from golden_checkpoint import GOLDEN, GOLDEN_FINGERPRINTS, GOLDEN_STATE_DIGEST, GOLDEN_TABLE_DIGEST, write_raw


def test_the_document_holds_digests_and_sizes(base: Path, run_json: RunJson) -> None:
    """Of the golden checkpoint."""
    assert run_json("digest", base) == {
        "checkpoint": str(base),
        "state_digest": GOLDEN_STATE_DIGEST,
        "table_digest": GOLDEN_TABLE_DIGEST,
        "num_parameters": 15,
        "num_elements": 1 + 2 + 2 + 3 + 1 + 0 + 5 + 2 + 3 + 2 + 2560 + 2560 + 1500 + 4 + 3,
        "total_bytes": sum(len(data) for _, _, data in GOLDEN.values()),
    }


def test_parameters_are_listed_in_table_order(base: Path, run_json: RunJson) -> None:
    """By the bytes of their names, with fingerprints of 16 hex digits."""
    rows = run_json("digest", base, "--parameters", "--threads", 3)["parameters"]
    assert [row["name"] for row in rows] == sorted(GOLDEN, key=str.encode)
    assert {row["name"]: row["fingerprint"] for row in rows} == GOLDEN_FINGERPRINTS
    assert rows[0] == {"name": "bool", "dtype": "bool", "shape": [3], "fingerprint": "d2b0d0efc90fd7fc"}


def test_people_see_the_same(base: Path, run: Run) -> None:
    """Digests and fingerprints are not cut off where stdout is no terminal."""
    output = run("digest", base, "--parameters").stdout
    for text in (GOLDEN_STATE_DIGEST, GOLDEN_TABLE_DIGEST, *GOLDEN_FINGERPRINTS, *GOLDEN_FINGERPRINTS.values()):
        assert text in output


def test_names_cannot_steer_the_terminal(tmp_path: Path, run: Run) -> None:
    """Escape sequences, line ends and rich's own markup are shown as what they are."""
    path = write_raw(tmp_path / "w.safetensors", {"a\x1b[2Jb\r\n[bold]c": ("U8", [1], b"x")})
    output = run("digest", path, "--parameters").stdout
    assert r"a\x1b[2Jb\r\n[bold]c" in output
    assert "\x1b" not in output


def test_an_expected_digest_decides_the_exit_code(base: Path, run: Run, run_json: RunJson) -> None:
    """0 if it is the checkpoint's, 1 if it is another."""
    assert run_json("digest", base, "--expect", GOLDEN_STATE_DIGEST)["matches"] is True
    other = "xxh3_128:" + "0" * 32
    assert run_json("digest", base, "--expect", other, code=1)["matches"] is False
    assert other in run("digest", base, "--expect", other, code=1).stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too short"),
        (b"not safetensors at all", "bad header length"),
        (b"\xff" * 8, "bad header length"),
        (b"\2\0\0\0\0\0\0\0{]", "not strict JSON"),
        (b"\2\0\0\0\0\0\0\0{}?", "elsewhere"),
    ],
)
def test_foreign_files_exit_3(tmp_path: Path, run_json: RunJson, content: bytes, words: str) -> None:
    """By name, with what is wrong."""
    (tmp_path / "bad.safetensors").write_bytes(content)
    error = run_json("digest", tmp_path / "bad.safetensors", code=3)["error"]
    assert error["type"] == "FormatError"
    assert "bad.safetensors" in error["message"]
    assert words in error["message"]


def test_damaged_files_and_unknown_dtypes_exit_3(base: Path, tmp_path: Path, run_json: RunJson) -> None:
    """A truncated file; a dtype that does not exist, by parameter."""
    base.write_bytes(base.read_bytes()[:-1])
    assert "elsewhere" in run_json("digest", base, code=3)["error"]["message"]
    write_raw(base, {"w": ("Q7_9", [4], bytes(4))})
    error = run_json("digest", base, code=3)["error"]
    assert (error["parameter"], error["found"]) == ("w", "'Q7_9'")


def test_paths_that_hold_no_checkpoint_exit_2(tmp_path: Path, run: Run) -> None:
    """A missing file, a folder without safetensors, a file used as a folder."""
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "file" / "x"):
        assert str(path) in run("digest", path, code=2).stderr
