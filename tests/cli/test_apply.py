"""`deltacast apply`: the result is proven, or there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from command_line import Run, RunJson
from deltacast.delta.checkpoint_files import MappedFile
from deltacast.delta.patching import open_for_patching
from golden_checkpoint import GOLDEN, NEXT, NEXT_STATE_DIGEST, write_raw


def _contents(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes as the stock library reads them."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return {name: bytes(t.reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


NEXT_BYTES = {name: data for name, (_, _, data) in NEXT.items()}


def test_apply_makes_the_new_checkpoint(base: Path, update: Path, tmp_path: Path, run_json: RunJson) -> None:
    """And says its digest; the base is not touched."""
    before, out = base.read_bytes(), tmp_path / "out.safetensors"
    document = run_json("apply", update, base, "-o", out)
    assert document == {
        "checkpoint": str(out), "in_place": False, "run_id": "offline", "base_version": 0, "target_version": 1,
        "num_changed": 3, "num_changed_parameters": 2, "state_digest": NEXT_STATE_DIGEST,
    }  # fmt: skip
    assert _contents(out) == NEXT_BYTES
    assert base.read_bytes() == before


def test_in_place_patches_the_file_itself(base: Path, update: Path, tmp_path: Path, run: Run) -> None:
    """And leaves nothing beside it."""
    listing = _listing(tmp_path)
    assert NEXT_STATE_DIGEST in run("apply", update, base, "--in-place").stdout
    assert _contents(base) == NEXT_BYTES
    assert _listing(tmp_path) == listing


@pytest.mark.parametrize("where", [[], ["-o", "x", "--in-place"]])
def test_the_place_of_the_result_must_be_said(base: Path, update: Path, run: Run, where: list[str]) -> None:
    """Exactly one of the two."""
    assert "--in-place" in run("apply", update, base, *where, code=2).stderr


@pytest.mark.parametrize("where", [["-o", "out.safetensors"], ["--in-place"]])
def test_a_wrong_base_exits_1_and_nothing_is_written(
    update: Path, tmp_path: Path, run_json: RunJson, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by the parameter that is not what it should be."""
    monkeypatch.chdir(tmp_path)
    other = write_raw(tmp_path / "other.safetensors", GOLDEN | {"router": ("F32", [30, 50], bytes(6000))})
    before, listing = other.read_bytes(), _listing(tmp_path)
    error = run_json("apply", update, other, *where, code=1)["error"]
    assert (error["type"], error["parameter"]) == ("BaseError", "router")
    assert {"expected", "found", "hint"} <= set(error)
    assert other.read_bytes() == before
    assert _listing(tmp_path) == listing


def test_every_truncation_and_every_flipped_byte_exits_3(
    base: Path, update: Path, tmp_path: Path, run: Run, run_json: RunJson
) -> None:
    """A damaged update never gets as far as a base."""
    whole, damaged, out = update.read_bytes(), tmp_path / "damaged.dcu", tmp_path / "out.safetensors"
    for size in (0, 7, 16, len(whole) // 2, len(whole) - 1):
        damaged.write_bytes(whole[:size])
        run("apply", damaged, base, "-o", out, code=3)
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert run_json("apply", damaged, base, "-o", out, code=3)["error"]["type"] in {"FormatError", "ChecksumError"}
    assert not out.exists()


def test_a_checkpoint_is_no_update(base: Path, tmp_path: Path, run: Run) -> None:
    """A foreign file is named as such; a missing one, and a folder, are usage."""
    assert "bad magic" in run("apply", base, base, "-o", tmp_path / "x", code=3).stderr
    run("apply", tmp_path / "missing", base, "-o", tmp_path / "x", code=2)
    assert "Is a directory" in run("apply", tmp_path, base, "-o", tmp_path / "x", code=2).stderr


def test_with_a_key_only_what_is_signed_with_it_is_applied(
    base: Path, new: Path, update: Path, tmp_path: Path, run: Run
) -> None:
    """Unsigned, signed with another key: bad data. The right key: done."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"o" * 32)
    run("diff", base, new, "-o", tmp_path / "signed.dcu", "--signing-key", tmp_path / "key")
    out = tmp_path / "out.safetensors"
    assert "not signed" in run("apply", update, base, "-o", out, "--signing-key", tmp_path / "key", code=3).stderr
    run("apply", tmp_path / "signed.dcu", base, "-o", out, "--signing-key", tmp_path / "other", code=3)
    run("apply", tmp_path / "signed.dcu", base, "-o", out, "--signing-key", tmp_path / "key")
    assert _contents(out) == NEXT_BYTES


def test_an_output_that_exists_is_replaced_only_with_force(base: Path, update: Path, tmp_path: Path, run: Run) -> None:
    """The base itself may be the output then."""
    assert "--force" in run("apply", update, base, "-o", base, code=2).stderr
    run("apply", update, base, "-o", base, "--force")
    assert _contents(base) == NEXT_BYTES
    assert "folder" in run("apply", update, base, "-o", tmp_path, "--force", code=2).stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_outputs_that_may_not_be_written_exit_2(base: Path, update: Path, tmp_path: Path, run: Run) -> None:
    """A read-only folder, and a read-only file in place."""
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    run("apply", update, base, "-o", folder / "out.safetensors", code=2)
    base.chmod(0o400)
    run("apply", update, base, "--in-place", code=2)


def test_an_interrupted_patch_is_refused_by_readers_and_restored_by_the_next(
    base: Path, update: Path, tmp_path: Path, run: Run
) -> None:
    """As after SIGKILL in the middle of the writes: the journal lies there, and the file is neither old nor new."""
    journal = base.with_name(base.name + ".deltacast-undo")
    with open_for_patching(base) as patchable:
        patchable.protect([("router", None)])
        left_behind = journal.read_bytes()
    journal.write_bytes(left_behind)
    mapped = MappedFile(base, shared=True)
    [slot] = [slot for slot in mapped.header.slots if slot.meta.name == "router"]
    mapped.tensor(slot).fill_(0.0)
    mapped.close()
    assert "being patched in place" in run("digest", base, code=1).stderr
    run("apply", update, base, "--in-place")
    assert _contents(base) == NEXT_BYTES


def test_a_change_of_the_table_makes_a_fresh_file(base: Path, tmp_path: Path, run: Run) -> None:
    """Removed, new and reshaped parameters."""
    tensors = dict(NEXT)
    del tensors["fp8"]
    tensors |= {"extra": ("U8", [3], b"abc"), "one": ("F32", [2], b"abcdefgh")}
    other = write_raw(tmp_path / "other.safetensors", tensors)
    run("diff", base, other, "-o", tmp_path / "u.dcu")
    run("apply", tmp_path / "u.dcu", base, "-o", tmp_path / "out.safetensors")
    run("verify", tmp_path / "out.safetensors", other)
    run("apply", tmp_path / "u.dcu", base, "--in-place")
    assert _contents(base) == {name: data for name, (_, _, data) in tensors.items()}
