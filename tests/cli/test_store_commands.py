"""`deltacast store ...`; digests come from the naive twin behind the golden checkpoints."""

from __future__ import annotations

import errno
import json
import resource
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from command_line import Run, RunJson
from deltacast.cli import app
from deltacast.commands.failures import exit_code
from deltacast.delta.errors import MissingObjectError, ObjectExistsError, StoreError
from golden_checkpoint import (
    GOLDEN,
    GOLDEN_STATE_DIGEST,
    GOLDEN_TABLE_DIGEST,
    NEXT_STATE_DIGEST,
    Raw,
    write_raw,
)
from naive_disk_delta import pulled, tensors_of
from s3_service import BUCKET, environment, s3_service

TOTAL = sum(len(data) for _, _, data in GOLDEN.values())


def raw_bytes(tensors: Mapping[str, Raw]) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in tensors.items()}


def hf_folder(path: Path, tensors: Mapping[str, Raw]) -> Path:
    """A checkpoint folder with a config beside the weights."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "tiny"}')
    write_raw(path / "model.safetensors", tensors, {"format": "pt"})
    return path


def stepped(number: int) -> dict[str, Raw]:
    """The golden checkpoint with one word of `router` set to a number."""
    code, shape, data = GOLDEN["router"]
    return GOLDEN | {"router": (code, shape, struct.pack("<I", 0x3F800000 + number) + data[4:])}


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> str:
    """An empty store, with files that can be mapped and without."""
    where = str(tmp_path / "store") if request.param == "folder" else f"memory://{secrets.token_hex(8)}"
    run("store", "init", where, "--run-id", "r")
    return where


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of ten versions: the golden checkpoint, and nine steps."""
    folder = tmp_path_factory.mktemp("made_once")
    invoke(["store", "init", str(folder / "store"), "--run-id", "r"])
    invoke(["store", "push", str(folder / "store"), str(hf_folder(folder / "v0", stepped(0)))])
    for number in range(1, 10):
        invoke(["store", "push", str(folder / "store"), str(write_raw(folder / "next", stepped(number)))])
    return folder / "store"


def invoke(args: list[str]) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output


@pytest.fixture
def chain(made_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made_once, tmp_path / "chain"))


def test_init_says_what_was_made_and_happens_once(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """A random run id, unless one is given; a second time is refused."""
    document = run_json("store", "init", tmp_path / "s", "--first-version", 7)
    assert document | {"run_id": ""} == {
        "store": str(tmp_path / "s"), "run_id": "", "first_version": 7, "signed": False,
    }  # fmt: skip
    assert len(document["run_id"]) == 32
    assert "already" in run("store", "init", tmp_path / "s", code=2).stderr
    assert "run" in run("store", "init", tmp_path / "t").stdout


def test_push_stores_the_first_whole_and_then_what_changed(
    store: str, base: Path, new: Path, run: Run, run_json: RunJson
) -> None:
    """With the digests of the twin, and the counts of what differs between the golden checkpoints."""
    first = run_json("store", "push", store, base, "--optimizer-step", 5)
    assert (first["run_id"], first["version"], first["kind"]) == ("r", 0, "snapshot")
    assert (first["state_digest"], first["checkpoint_bytes"]) == (GOLDEN_STATE_DIGEST, TOTAL)
    assert (first["num_changed"], first["num_words"], first["anchored"]) == (6650, 6650, False)
    second = run_json("store", "push", store, new)
    assert (second["version"], second["kind"], second["num_changed"], second["density"]) == (1, "update", 3, 3 / 6650)
    assert second["state_digest"] == NEXT_STATE_DIGEST
    assert second["times_smaller"] == TOTAL / second["stored_bytes"] > 1
    rows = run_json("store", "log", store)
    assert [(row["version"], row["kind"], row["optimizer_step"]) for row in rows] == [
        (1, "update", None),
        (0, "snapshot", 5),
    ]
    assert "whole" in run("store", "log", store).stdout
    shown = run_json("store", "show", store, 1)
    assert shown["table_digest"] == GOLDEN_TABLE_DIGEST
    assert shown["update"]["num_changed"] == 3
    assert "3 of 6,650 words" in run("store", "show", store, 1).stdout


def test_any_version_comes_back_bit_by_bit(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """As a folder that loads: with what lay beside the first version's weights."""
    for number in (0, 5, 9):
        out = tmp_path / f"out{number}"
        document = run_json("store", "pull", chain, "-o", out, *([] if number == 9 else ["--version", number]))
        assert document["version"] == number
        assert tensors_of(out) == raw_bytes(stepped(number))
        assert json.loads((out / "config.json").read_text()) == {"model_type": "tiny"}
        run("digest", out, "--expect", document["state_digest"])
    assert "exists already" in run("store", "pull", chain, "-o", tmp_path / "out0", code=2).stderr
    assert "0 to 9" in run("store", "pull", chain, "-o", tmp_path / "no", "--version", 10, code=2).stderr
    assert not (tmp_path / "no").exists()
    assert "(proven)" in run("store", "pull", chain, "-o", tmp_path / "again").stdout


def test_log_lists_the_newest_first(chain: Path, run: Run, run_json: RunJson) -> None:
    """As many as wanted, and says if there may be more."""
    assert [row["version"] for row in run_json("store", "log", chain)] == list(range(9, -1, -1))
    assert [row["version"] for row in run_json("store", "log", chain, "--limit", 2)] == [9, 8]
    assert "--limit 0" in run("store", "log", chain, "--limit", 2).stdout
    assert len(run_json("store", "log", chain, "--limit", 0)) == 10


def test_plan_shows_folds_and_snapshots(chain: Path, run: Run, run_json: RunJson) -> None:
    """Fewest bytes; folds of eight are made on the way."""
    steps = run_json("store", "plan", chain, "--have", 0, "--want", 9)["steps"]
    assert [(step["kind"], step["base"], step["target"]) for step in steps] == [("fold", 0, 8), ("update", 8, 9)]
    document = run_json("store", "plan", chain)
    assert document["steps"][0]["kind"] == "snapshot"
    assert document["num_bytes"] == sum(step["num_bytes"] for step in document["steps"])
    assert "nothing to do" in run("store", "plan", chain, "--have", 4, "--want", 4).stdout
    assert "from nothing to version 9" in run("store", "plan", chain).stdout
    assert "0 to 9" in run("store", "plan", chain, "--want", 77, code=2).stderr


def test_fold_makes_one_object_of_a_span(chain: Path, run: Run, run_json: RunJson) -> None:
    """Which plans then use."""
    document = run_json("store", "fold", chain, 1, 5)
    assert document["num_bytes"] < document["bytes_before"]
    steps = run_json("store", "plan", chain, "--have", 1, "--want", 5)["steps"]
    assert [(step["kind"], step["path"]) for step in steps] == [("fold", document["path"])]
    assert document["path"] in run("store", "show", chain, 5).stdout
    assert "2 -> 4" in run("store", "fold", chain, 2, 4).stdout
    run("store", "fold", chain, 3, 4, code=2)


def test_a_cache_follows_the_newest_version(chain: Path, tmp_path: Path, run: Run) -> None:
    """It is fetched once, then patched; and holds the bits that were pushed."""
    for number in (10, 11):
        run("store", "push", chain, write_raw(tmp_path / "next", stepped(number)), "--cache", tmp_path / "cache")
        (cached,) = (tmp_path / "cache").iterdir()
        assert tensors_of(cached) == raw_bytes(stepped(number))
    (cached / "config.json").write_text("kept")
    run("store", "push", chain, write_raw(tmp_path / "next", stepped(12)), "--cache", tmp_path / "cache")
    (cached,) = (tmp_path / "cache").iterdir()
    assert (cached / "config.json").read_text() == "kept"


def test_a_wrong_cache_publishes_nothing(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """What is not the newest version's bits is no base."""
    digest = run_json("store", "show", chain, 9)["state_digest"]
    (tmp_path / "cache").mkdir()
    hf_folder(tmp_path / "cache" / digest.removeprefix("xxh3_128:"), stepped(8))
    next_one = write_raw(tmp_path / "next", stepped(10))
    assert "base" in run("store", "push", chain, next_one, "--cache", tmp_path / "cache", code=1).stderr
    assert run_json("store", "log", chain)[0]["version"] == 9


def test_other_parameters_need_a_snapshot(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """The error says so, and names the first; a snapshot may have any table, and updates go on from it."""
    grown = write_raw(tmp_path / "grown", stepped(1) | {"more": ("U8", [2], b"xy")})
    refused = run_json("store", "push", chain, grown, code=2)["error"]
    assert (refused["parameter"], refused["expected"], refused["found"]) == ("more", "no such parameter", "uint8[2]")
    assert "--snapshot" in refused["hint"]
    assert run_json("store", "push", chain, grown, "--snapshot")["kind"] == "snapshot"
    later = write_raw(tmp_path / "later", stepped(2) | {"more": ("U8", [2], b"xz")})
    assert run_json("store", "push", chain, later)["num_changed"] == 2
    run("store", "pull", chain, "-o", tmp_path / "out")
    assert tensors_of(tmp_path / "out")["more"] == b"xz"


def test_other_parameters_than_in_a_store_without_files(
    store: str, base: Path, tmp_path: Path, run: Run, run_json: RunJson
) -> None:
    """Are refused as well, with the way out; nothing is published."""
    run("store", "push", store, base)
    grown = write_raw(tmp_path / "grown", stepped(1) | {"more": ("U8", [2], b"xy")})
    assert "--snapshot" in run("store", "push", store, grown, code=2).stderr
    assert len(run_json("store", "log", store)) == 1


def test_the_newest_version_is_not_published_again(
    store: str, base: Path, new: Path, run: Run, run_json: RunJson
) -> None:
    """So a push can be repeated, also by its number; an empty version is made for who asks for it."""
    for checkpoint in (base, new):
        run("store", "push", store, checkpoint)
        assert "newest version already" in run("store", "push", store, checkpoint).stdout
    again = run_json("store", "push", store, new, "--version", 1)
    assert (again["published"], again["version"], again["state_digest"]) == (False, 1, NEXT_STATE_DIGEST)
    assert "would be version 2" in run("store", "push", store, base, "--version", 1, code=2).stderr
    assert len(run_json("store", "log", store)) == 2
    empty = run_json("store", "push", store, new, "--allow-empty")
    assert (empty["published"], empty["version"], empty["num_changed"]) == (True, 2, 0)
    assert "nothing" in run("store", "log", store).stdout


def test_a_version_number_is_only_confirmed(chain: Path, base: Path, run: Run, run_json: RunJson) -> None:
    """Versions have no gaps."""
    assert "expected 10, found 8" in run("store", "push", chain, base, "--version", 8, code=2).stderr
    assert "expected 10, found 12" in run("store", "push", chain, base, "--version", 12, code=2).stderr
    assert run_json("store", "push", chain, base, "--version", 10)["version"] == 10


def test_a_long_chain_gets_an_anchor(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """After so many bytes of updates that a late reader had better start anew."""
    rows = [run_json("store", "push", chain, base) for base in _unlike(tmp_path)]
    assert [row["anchored"] for row in rows].count(True) >= 1
    anchored = next(row["version"] for row in rows if row["anchored"])
    assert len(run_json("store", "show", chain, anchored)["snapshots"]) == 1


def _unlike(folder: Path) -> list[Path]:
    """Checkpoints that differ in nearly every word."""
    code, shape, data = GOLDEN["router"]
    raws = (bytes(byte ^ flip for byte in data) for flip in (0x11, 0x7E, 0x35, 0x49))
    return [
        write_raw(folder / f"unlike{number}", GOLDEN | {"router": (code, shape, raw)})
        for number, raw in enumerate(raws)
    ]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let every larger write of this process fail, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def noisy(seed: int) -> dict[str, Raw]:
    """A checkpoint of 640 KiB; two seeds differ in three fifths of it, by noise."""
    noise = np.random.default_rng(seed).bytes(384 << 10)
    return {"noise": ("U8", [384 << 10], noise), "still": ("U8", [256 << 10], bytes(256 << 10))}


def test_a_version_stands_without_its_anchor(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """A warning and exit code 0, in both forms; pushing it again adds the anchor."""
    store, (first, second, third) = tmp_path / "s", [write_raw(tmp_path / f"v{n}", noisy(n)) for n in range(3)]
    run("store", "init", store)
    run("store", "push", store, first)
    with files_of_at_most(600_000):
        document = run_json("store", "push", store, second)
    assert (document["published"], document["version"], document["anchored"]) == (True, 1, False)
    assert "store anchor" in document["warnings"][0]
    assert run_json("store", "push", store, second) | {"warnings": []} == document | {
        "published": False, "anchored": True, "warnings": [],
    }  # fmt: skip
    with files_of_at_most(600_000):
        done = run("store", "push", store, third)
    assert done.stderr.startswith("deltacast: warning: the version is published, but")
    assert done.stderr.count("\n") == 1
    assert (run_json("store", "fsck", store)["ok"], len(run_json("store", "log", store))) == (True, 3)


def test_a_disk_that_is_full_is_no_usage_error(tmp_path: Path, base: Path, run: Run, run_json: RunJson) -> None:
    """Exit code 4, whether it holds the store or what is pulled from it; nothing is left."""
    store = tmp_path / "s"
    run("store", "init", store)
    with files_of_at_most(1000):
        run("store", "push", store, base, code=4)
    assert run_json("store", "log", store) == []
    run("store", "push", store, base)
    with files_of_at_most(1000):
        run("store", "pull", store, "-o", tmp_path / "out", code=4)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_an_anchor_makes_a_version_stand_on_its_own(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """From what the store has; gc, which said what stands in its way, then lets older versions go."""
    gc = ("store", "gc", chain, "--keep", 3, "--min-age-hours", 0)
    assert "store anchor" in run(*gc).stdout
    anchor = run_json("store", "anchor", chain, "--version", 7)
    assert (anchor["version"], anchor["added"]) == (7, True)
    assert run_json("store", "anchor", chain, "--version", 7) == anchor | {"added": False}
    assert "was there already" in run("store", "anchor", chain, "--version", 7).stdout
    assert run_json(*gc)["oldest"] == 7
    run("store", "pull", chain, "-o", tmp_path / "out", "--version", 7)
    assert tensors_of(tmp_path / "out") == raw_bytes(stepped(7))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "tiny"}
    assert run_json("store", "anchor", chain)["version"] == 9


def test_gc_keeps_what_was_asked_for(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """And shows first what would go."""
    run("store", "push", chain, write_raw(tmp_path / "next", stepped(10)), "--snapshot")
    run("store", "push", chain, write_raw(tmp_path / "next", stepped(11)))
    args = ("store", "gc", chain, "--keep", 2, "--min-age-hours", 0)
    dry = run_json(*args, "--dry-run")
    assert (dry["versions"], dry["oldest"]) == (list(range(10)), 10)
    assert "would remove" in run(*args, "--dry-run").stdout
    assert run_json("store", "log", chain)[-1]["version"] == 0
    assert run_json(*args) == dry | {"dry_run": False}
    assert [row["version"] for row in run_json("store", "log", chain)] == [11, 10]
    assert "removed" in run(*args).stdout
    run("store", "pull", chain, "-o", tmp_path / "out")
    assert tensors_of(tmp_path / "out") == raw_bytes(stepped(11))


def test_fsck_exits_1_for_damage(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """Names the object and what it hits."""
    store = tmp_path / "s"
    run("store", "init", store)
    for number in range(3):
        run("store", "push", store, write_raw(tmp_path / "next", stepped(number)))
    assert run_json("store", "fsck", store) | {"stray": []} == {
        "ok": True, "damaged": [], "stray": [], "materialisable": [0, 1, 2], "lost": [],
    }  # fmt: skip
    assert "0 to 2" in run("store", "fsck", store).stdout
    path = run_json("store", "show", store, 1)["update"]["object"]["path"]
    raw = (store / path).read_bytes()
    (store / path).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    document = run_json("store", "fsck", store, code=1)
    assert [damage["path"] for damage in document["damaged"]] == [path]
    assert (document["ok"], document["materialisable"], document["lost"]) == (False, [0], [1, 2])
    output = run("store", "fsck", store, code=1).stdout
    assert path in output
    assert "(needed by 1 to 2)" in output
    run("store", "pull", store, "-o", tmp_path / "out", code=3)


def test_a_key_file_signs_and_is_asked_for(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By option or by the environment; the key itself is on no command line."""
    (tmp_path / "key").write_bytes(b"secret")
    (tmp_path / "other").write_bytes(b"another")
    store, key = tmp_path / "s", ("--key-file", tmp_path / "key")
    assert "yes" in run("store", "init", store, *key).stdout
    run("store", "push", store, write_raw(tmp_path / "v0", stepped(0)), *key)
    monkeypatch.setenv("DELTACAST_SIGNING_KEY_FILE", str(tmp_path / "key"))
    run("store", "push", store, write_raw(tmp_path / "v1", stepped(1)))
    run("store", "fsck", store)
    for wrong in (tmp_path / "other", tmp_path / "v0"):
        assert "signature" in run("store", "log", store, "--key-file", wrong, code=3).stderr
    run("store", "init", tmp_path / "unsigned", "--key-file", "", code=2)
    monkeypatch.delenv("DELTACAST_SIGNING_KEY_FILE")
    run("store", "init", tmp_path / "unsigned")
    assert "signed" in run("store", "log", tmp_path / "unsigned", *key, code=3).stderr
    (tmp_path / "empty").touch()
    assert "empty" in run("store", "log", store, "--key-file", tmp_path / "empty", code=2).stderr
    run("store", "log", store, "--key-file", tmp_path / "none", code=2)


def test_a_signed_store_is_not_written_without_its_key(tmp_path: Path, run: Run) -> None:
    """Readers with the key would refuse all that comes after."""
    (tmp_path / "key").write_bytes(b"secret")
    store, key = tmp_path / "s", ("--key-file", tmp_path / "key")
    run("store", "init", store, *key)
    run("store", "push", store, write_raw(tmp_path / "v0", stepped(0)), *key)
    assert "signed" in run("store", "push", store, write_raw(tmp_path / "v1", stepped(1)), code=2).stderr
    run("store", "pull", store, "-o", tmp_path / "out", *key)
    run("store", "pull", store, "-o", tmp_path / "unchecked")


def test_fsck_says_what_is_left_without_the_file_that_makes_a_store(chain: Path, run_json: RunJson) -> None:
    """Every other command stops there."""
    (chain / "run.json").unlink()
    document = run_json("store", "fsck", chain, code=1)
    assert [damage["path"] for damage in document["damaged"]] == ["run.json"]
    assert (document["materialisable"], document["lost"]) == (list(range(10)), [])


@pytest.mark.parametrize("args", [("log",), ("push", "x"), ("pull", "-o", "y"), ("fsck",), ("plan",)])
def test_without_a_store_the_way_to_one_is_said(
    tmp_path: Path, run: Run, run_json: RunJson, args: tuple[str, ...]
) -> None:
    """Exit code 2, in both forms."""
    where = tmp_path / "none"
    where.mkdir()
    command, *rest = args
    assert "store init" in run("store", command, where, *rest, code=2).stderr
    assert run_json("store", command, where, *rest, code=2)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    "args", [("show", 12), ("pull", "-o", "out", "--version", 12), ("plan", "--want", 12), ("fold", 8, 12),
             ("anchor", "--version", 12), ("export", "out", "--first", 12)],
)  # fmt: skip
def test_a_version_that_is_not_there_is_bad_input(
    chain: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[object, ...]
) -> None:
    """The message says which there are."""
    monkeypatch.chdir(tmp_path)
    command, *rest = args
    assert "expected 0 to 9, found 12" in run("store", command, chain, *rest, code=2).stderr
    assert not (tmp_path / "out").exists()


def test_a_store_that_lost_an_object_is_not_bad_input(chain: Path, tmp_path: Path, run: Run) -> None:
    """Exit code 4, and which command says more."""
    (weights,) = chain.glob("snapshots/*/weights*")
    weights.unlink()
    assert "store fsck" in run("store", "pull", chain, "-o", tmp_path / "out", code=4).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [StoreError("x"), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")])
def test_a_store_or_a_disk_that_fails_exits_4(error: Exception) -> None:
    """Try again, or look there: the input was right."""
    assert exit_code(error) == 4


@pytest.mark.parametrize(
    "error", [MissingObjectError("x"), ObjectExistsError("x"), PermissionError(), IsADirectoryError()]
)
def test_what_is_missing_or_taken_exits_2(error: Exception) -> None:
    """The input was wrong."""
    assert exit_code(error) == 2


def test_a_store_without_files_is_fetched_from(store: str, tmp_path: Path, run: Run) -> None:
    """The second update's base is a snapshot and an update, which cannot be mapped where they lie."""
    for number in range(3):
        run("store", "push", store, write_raw(tmp_path / "next", stepped(number)))
    run("store", "pull", store, "-o", tmp_path / "out")
    assert tensors_of(tmp_path / "out") == raw_bytes(stepped(2))


def test_a_bucket_is_a_store(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its URL; the same commands."""
    url = f"s3://{BUCKET}/run"
    with s3_service() as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        run("store", "init", url)
        for number in range(3):
            run("store", "push", url, write_raw(tmp_path / "next", stepped(number)), "--cache", tmp_path / "cache")
        run("store", "fsck", url)
        run("store", "anchor", url)
        run("store", "pull", url, "-o", tmp_path / "out", "--version", 1)
    assert tensors_of(tmp_path / "out") == raw_bytes(stepped(1))
    assert "try again" in run("store", "log", url, code=4).stderr


def test_an_empty_store_has_nothing_to_pull(store: str, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """Nor to plan; listing and checking it is fine."""
    assert "no version" in run("store", "pull", store, "-o", tmp_path / "out", code=2).stderr
    assert run_json("store", "log", store) == []
    assert run_json("store", "fsck", store)["materialisable"] == []


def test_export_and_import_are_each_others_way_back(chain: Path, tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """An engine's reader gets the weights from the folders; a second store gets the same versions."""
    rows = run_json("store", "export", chain, tmp_path / "shared", "--first", 2)
    assert [(row["version"], row["kind"]) for row in rows] == [(2, "full"), *((v, "delta") for v in range(3, 10))]
    assert pulled(tmp_path / "shared", 9) == raw_bytes(stepped(9))
    run("store", "init", tmp_path / "copy", "--first-version", 2)
    imported = run_json("store", "import", tmp_path / "copy", tmp_path / "shared")
    assert imported == rows
    assert "nothing new" in run("store", "import", tmp_path / "copy", tmp_path / "shared").stdout
    run("store", "import", tmp_path / "copy", tmp_path / "none", code=2)
    run("store", "pull", tmp_path / "copy", "-o", tmp_path / "out", "--version", 7)
    assert tensors_of(tmp_path / "out") == raw_bytes(stepped(7))


def test_bench_store_measures_each_chain(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """One row per length; what it wrote is gone."""
    args = ("bench", "store", "--elements", 20_000, "--repeats", 1, "--chain", 9, "--chain", 2, "--dir", tmp_path)
    rows = run_json(*args)
    assert [row["num_updates"] for row in rows] == [2, 9]
    assert list(tmp_path.iterdir()) == []
    assert "plain write" in run(*args).stdout


def test_help_lists_every_command(run: Run) -> None:
    """With a line on what it does."""
    output = run("store", "--help").stdout
    for command in ("init", "push", "pull", "log", "show", "plan", "fold", "anchor", "gc", "fsck", "export", "import"):
        assert f"  {command} " in output
