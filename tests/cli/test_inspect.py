"""`deltacast inspect`."""

from __future__ import annotations

from pathlib import Path

from command_line import Run, RunJson
from golden_checkpoint import (
    GOLDEN_FINGERPRINTS,
    GOLDEN_STATE_DIGEST,
    GOLDEN_TABLE_DIGEST,
    NEXT_STATE_DIGEST,
    write_raw,
)


def test_the_document_holds_the_header(update: Path, run_json: RunJson) -> None:
    """Envelope, sizes and entries; fingerprints are the twin's."""
    document = run_json("inspect", update, "--check")
    size = update.stat().st_size
    assert (document["format"], document["run_id"], document["epoch"]) == (1, "offline", 0)
    assert (document["base_version"], document["target_version"]) == (0, 1)
    assert (document["base_digest"], document["target_digest"]) == (GOLDEN_STATE_DIGEST, NEXT_STATE_DIGEST)
    assert document["table_digest"] == GOLDEN_TABLE_DIGEST
    assert (document["file_bytes"], document["num_changed"], document["bits_per_change"]) == (size, 3, 8 * size / 3)
    assert (document["signed"], document["payload_checked"]) == (False, True)
    assert document["header_bytes"] + sum(document["stream_bytes"].values()) < size
    w, router = document["entries"]
    assert (w["name"], w["dtype"], w["shape"], w["num_changed"]) == ("model.layers.0.w", "bfloat16", [40, 64], 1)
    assert w["fingerprint_before"] == GOLDEN_FINGERPRINTS["model.layers.0.w"]
    assert w["fingerprint_after"] == "670fb130eee92723"
    assert (router["name"], router["fingerprint_after"]) == ("router", "3cf557ab3218af6d")
    assert (router["encoding"], router["num_changed"]) == ("sparse", 2)


def test_people_see_entries_and_streams(update: Path, run: Run) -> None:
    """Bytes by stream kind, and bits per change."""
    output = run("inspect", update).stdout
    for text in ("model.layers.0.w", "bytes by stream kind", "header", "payload not checked", NEXT_STATE_DIGEST):
        assert text in output
    short = run("inspect", update, "--limit", 1).stdout
    assert "entries not shown: 1" in short
    assert "router" not in short


def test_an_empty_update_and_one_that_changes_the_table_are_shown(base: Path, tmp_path: Path, run: Run) -> None:
    """No division by the number of changes, and removed names."""
    run("diff", base, base, "-o", tmp_path / "empty.dcu")
    assert "0 words, entries: 0" in run("inspect", tmp_path / "empty.dcu", "--check").stdout
    other = write_raw(tmp_path / "other.safetensors", {"one": ("F32", [1], b"abcd")})
    run("diff", base, other, "-o", tmp_path / "u.dcu")
    output = run("inspect", tmp_path / "u.dcu").stdout
    assert "removed" in output
    assert "modèle.ß" in output


def test_a_flipped_payload_bit_is_found_by_check(update: Path, run: Run) -> None:
    """A plain inspect reads the header only, and says so."""
    raw = bytearray(update.read_bytes())
    raw[-40] ^= 1
    update.write_bytes(raw)
    run("inspect", update, "--check", code=3)


def test_signed_updates_are_checked_with_the_key(base: Path, new: Path, tmp_path: Path, run: Run) -> None:
    """Without it they are only said to be signed."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    run("diff", base, new, "-o", tmp_path / "s.dcu", "--signing-key", tmp_path / "key")
    assert ", signed" in run("inspect", tmp_path / "s.dcu").stdout
    run("inspect", tmp_path / "s.dcu", "--signing-key", tmp_path / "key", "--check")
    (tmp_path / "key").write_bytes(b"o" * 32)
    run("inspect", tmp_path / "s.dcu", "--signing-key", tmp_path / "key", code=3)


def test_files_that_are_no_updates_exit_3(base: Path, tmp_path: Path, run: Run) -> None:
    """Foreign, empty; a missing one is usage."""
    run("inspect", base, code=3)
    (tmp_path / "empty").write_bytes(b"")
    run("inspect", tmp_path / "empty", code=3)
    run("inspect", tmp_path / "missing", code=2)
