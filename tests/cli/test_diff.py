"""`deltacast diff`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command_line import Run, RunJson
from deltacast.delta.codec import read_update
from deltacast.delta.errors import ChecksumError
from golden_checkpoint import GOLDEN, GOLDEN_STATE_DIGEST, GOLDEN_TABLE_DIGEST, NEXT_STATE_DIGEST, write_raw


def test_the_document_says_what_was_written(base: Path, new: Path, tmp_path: Path, run_json: RunJson) -> None:
    """Versions, digests, counts, and the size that the file really has."""
    out = tmp_path / "u.dcu"
    document = run_json("diff", base, new, "-o", out, "--run-id", "r7", "--base-version", 6, "--target-version", 9)
    size, total = out.stat().st_size, sum(len(data) for _, _, data in GOLDEN.values())
    assert document == {
        "update": str(out), "run_id": "r7", "base_version": 6, "target_version": 9,
        "base_digest": GOLDEN_STATE_DIGEST, "target_digest": NEXT_STATE_DIGEST, "table_digest": GOLDEN_TABLE_DIGEST,
        "num_parameters": 15, "num_words": 6650, "checkpoint_bytes": total, "update_bytes": size,
        "num_changed_parameters": 2, "num_removed_parameters": 0, "num_changed": 3, "density": 3 / 6650,
        "bits_per_change": 8 * size / 3, "times_smaller": total / size,
    }  # fmt: skip


@pytest.mark.parametrize("values", ["auto", "delta", "absolute"])
def test_the_update_is_the_one_that_was_asked_for(base: Path, new: Path, tmp_path: Path, run: Run, values: str) -> None:
    """Read back with the library: form, positions, words."""
    run("diff", base, new, "-o", tmp_path / "u.dcu", "--values", values)
    update = read_update(tmp_path / "u.dcu")
    assert (update.run_id, update.base_version, update.target_version) == ("offline", 0, 1)
    found = {p.name: (p.indices.tolist(), p.values.tolist()) for p in update.patches if p.indices is not None}
    if values == "absolute":
        assert found == {"model.layers.0.w": ([65], [0xA7A1]), "router": ([0, 1499], [0x18110A02, 0xCF48413A])}
    assert [positions for positions, _ in found.values()] == [[65], [0, 1499]]


def test_the_same_inputs_make_the_same_bytes(base: Path, new: Path, tmp_path: Path, run: Run) -> None:
    """Nothing random and no clock goes in."""
    for name in ("a.dcu", "b.dcu"):
        run("diff", base, new, "-o", tmp_path / name)
    assert (tmp_path / "a.dcu").read_bytes() == (tmp_path / "b.dcu").read_bytes()


def test_a_key_signs_the_update(base: Path, new: Path, tmp_path: Path, run: Run) -> None:
    """The bytes of the file are the key, exactly."""
    (tmp_path / "key").write_bytes(b"secret\n")
    run("diff", base, new, "-o", tmp_path / "u.dcu", "--signing-key", tmp_path / "key")
    assert read_update(tmp_path / "u.dcu", signing_key=b"secret\n").target_digest == NEXT_STATE_DIGEST
    with pytest.raises(ChecksumError):
        read_update(tmp_path / "u.dcu", signing_key=b"secret")
    (tmp_path / "empty").write_bytes(b"")
    refused = run("diff", base, new, "-o", tmp_path / "v.dcu", "--signing-key", tmp_path / "empty", code=2)
    assert "empty" in refused.stderr


def test_people_see_sizes_and_removed_parameters(base: Path, tmp_path: Path, run: Run) -> None:
    """Without numbers of changes that there are not."""
    smaller = write_raw(tmp_path / "smaller.safetensors", {name: GOLDEN[name] for name in ("one", "fp8")})
    output = run("diff", base, smaller, "-o", tmp_path / "u.dcu").stdout
    assert "13 parameters" in output
    assert "bits per change" not in output


def test_an_output_that_exists_is_refused_before_any_work(base: Path, new: Path, tmp_path: Path, run: Run) -> None:
    """Unless --force; a folder always, and a folder that does not exist."""
    out = tmp_path / "u.dcu"
    out.write_bytes(b"mine")
    assert "--force" in run("diff", base, new, "-o", out, code=2).stderr
    assert out.read_bytes() == b"mine"
    run("diff", base, new, "-o", out, "--force")
    assert read_update(out).target_digest == NEXT_STATE_DIGEST
    run("diff", base, new, "-o", tmp_path, "--force", code=2)
    assert "no such folder" in run("diff", base, new, "-o", tmp_path / "no" / "u.dcu", code=2).stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_exits_2(base: Path, new: Path, tmp_path: Path, run: Run) -> None:
    """With the system's own words."""
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    assert "Permission denied" in run("diff", base, new, "-o", folder / "u.dcu", code=2).stderr


def test_versions_that_do_not_go_up_exit_2(base: Path, new: Path, tmp_path: Path, run: Run) -> None:
    """And leave nothing."""
    run("diff", base, new, "-o", tmp_path / "u.dcu", "--base-version", 4, "--target-version", 4, code=2)
    assert not (tmp_path / "u.dcu").exists()
