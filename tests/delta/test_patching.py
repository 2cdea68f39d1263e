"""Patched copies and patches in place, through real exceptions and real SIGKILL."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deltacast.delta.apply import apply_update
from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.diff import diff_state
from deltacast.delta.errors import CorruptionError, InputError, StateError, TableError
from deltacast.delta.patching import open_for_patching, patched_copy, recover
from deltacast.delta.sources import checked
from deltacast.delta.state import WeightState

_INDEX = "model.safetensors.index.json"


def _positions(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    save_file({"a": torch.arange(8.0), "b": torch.arange(4, dtype=torch.int16), "s": torch.tensor(3)}, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with two shards and the files that usually lie beside them."""
    folder = tmp_path / "hf"
    (folder / "chat").mkdir(parents=True)
    (folder / ".cache").mkdir()
    save_file({"a": torch.arange(8.0)}, folder / "model-1.safetensors")
    save_file({"b": torch.arange(4.0)}, folder / "model-2.safetensors")
    (folder / _INDEX).write_text('{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}')
    beside = "config.json tokenizer.model chat/template.jinja .cache/x pytorch_model.bin old.safetensors"
    for name in beside.split():
        (folder / name).write_text(name)
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return folder


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --- copies -----------------------------------------------------------------------------------------------------


def test_a_copy_has_the_writes_and_the_base_does_not(base: Path, tmp_path: Path) -> None:
    before, out = base.read_bytes(), tmp_path / "out.safetensors"
    with patched_copy(base, out) as tensors:
        tensors["a"][3] = -1.0
        tensors["s"].fill_(9)
        assert not out.exists()
    stock = load_file(out)
    assert stock["a"].tolist() == [0, 1, 2, -1, 4, 5, 6, 7]
    assert stock["s"].item() == 9
    assert base.read_bytes() == before
    assert _listing(tmp_path) == ["base.safetensors", "out.safetensors"]


def test_a_folder_is_copied_with_what_belongs_to_it(folder: Path, tmp_path: Path) -> None:
    """Config and tokenizer come along; weights in other formats would be stale."""
    out = tmp_path / "out"
    with patched_copy(folder, out) as tensors:
        tensors["b"].fill_(5)
    assert sorted(_tree(out)) == [
        "chat/template.jinja", "config.json", "model-1.safetensors", "model-2.safetensors", _INDEX, "tokenizer.model",
    ]  # fmt: skip
    assert load_file(out / "model-2.safetensors")["b"].tolist() == [5] * 4
    assert (out / "model-1.safetensors").read_bytes() == (folder / "model-1.safetensors").read_bytes()


def test_links_become_files_so_that_the_cache_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    blob, shard = tmp_path / "blob", folder / "model-1.safetensors"
    shard.rename(blob)
    shard.symlink_to(blob)
    before = blob.read_bytes()
    with patched_copy(folder, tmp_path / "out") as tensors:
        tensors["a"].zero_()
    assert blob.read_bytes() == before
    assert not (tmp_path / "out" / "model-1.safetensors").is_symlink()


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_a_failed_copy_leaves_nothing(base: Path, folder: Path, tmp_path: Path, error: BaseException) -> None:
    before = _listing(tmp_path)
    for source in (base, folder):
        with pytest.raises(type(error)), patched_copy(source, tmp_path / "out") as tensors:  # noqa: PT012 - the block is the patch that fails
            tensors["a"].zero_()
            raise error
    assert _listing(tmp_path) == before


def test_an_existing_file_is_replaced_and_an_existing_folder_is_not(base: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    with pytest.raises(RuntimeError), patched_copy(base, out):
        raise RuntimeError
    assert out.read_bytes() == b"old"
    with pytest.raises(InputError, match="exists"), patched_copy(folder, out):
        pass
    with patched_copy(base, out):
        pass
    assert out.read_bytes() == base.read_bytes()
    for source in (base, folder):
        with pytest.raises(InputError, match="exists"), patched_copy(source, folder):
            pass
    with pytest.raises(FileNotFoundError), patched_copy(folder, tmp_path / "no" / "out"):
        pass
    assert not (tmp_path / "no").exists()


def test_a_file_may_be_replaced_by_its_own_patched_copy(base: Path) -> None:
    with CheckpointSource(base) as reader:
        with patched_copy(base, base) as tensors:
            tensors["a"].zero_()
        assert reader.tensor("a").tolist() == list(range(8))
    assert load_file(base)["a"].tolist() == [0] * 8


def test_an_update_is_applied_to_a_copy_and_in_place(base: Path, tmp_path: Path) -> None:
    """Files patched both ways equal, byte for byte, the target that the stock library wrote."""
    target = tmp_path / "target.safetensors"
    wanted = {name: tensor.clone() for name, tensor in load_file(base).items()}
    wanted["a"][[1, 6]] = torch.tensor([-0.0, float("nan")])
    wanted["b"][0] = -7
    save_file(wanted, target)
    with CheckpointSource(base) as source:
        old = WeightState(dict(source.tensors()), version=1)
        update = diff_state(old, checked(CheckpointSource(target)), run_id="r", target_version=2)
    with patched_copy(base, tmp_path / "out") as tensors:
        apply_update(WeightState(tensors, version=1), update)
    with open_for_patching(base) as checkpoint:
        state = WeightState(checkpoint.tensors, version=1)
        checkpoint.protect((patch.name, patch.indices) for patch in update.patches)
        apply_update(state, update)
    assert (tmp_path / "out").read_bytes() == base.read_bytes() == target.read_bytes()


# --- in place ---------------------------------------------------------------------------------------------------


def test_a_patch_in_place_leaves_no_trace_but_the_writes(base: Path) -> None:
    inode = base.stat().st_ino
    with open_for_patching(base) as checkpoint:
        checkpoint.protect([("a", _positions(5, 1)), ("s", None)])
        checkpoint.tensors["a"][[5, 1]] = torch.tensor([-5.0, -1.0])
        checkpoint.tensors["s"].fill_(4)
        with pytest.raises(StateError, match="patched in place"):
            CheckpointSource(base)
    assert load_file(base)["a"].tolist() == [0, -1, 2, 3, 4, -5, 6, 7]
    assert load_file(base)["s"].item() == 4
    assert (base.stat().st_ino, _listing(base.parent)) == (inode, [base.name])
    assert recover(base) is False


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_an_exception_in_the_middle_restores_the_base(folder: Path, error: BaseException) -> None:
    before = _tree(folder)
    with pytest.raises(type(error)), open_for_patching(folder) as checkpoint:  # noqa: PT012 - the block is the patch that fails
        checkpoint.protect([("a", _positions(0, 7)), ("b", None)])
        checkpoint.tensors["a"][0] = 9
        checkpoint.tensors["b"].fill_(9)
        raise error
    assert _tree(folder) == before


def test_an_exception_before_protect_touches_nothing(folder: Path) -> None:
    before = _tree(folder)
    with pytest.raises(RuntimeError), open_for_patching(folder):
        raise RuntimeError
    assert _tree(folder) == before


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([("a", _positions(0)), ("nope", None)], TableError),
        ([("a", _positions(8))], InputError),
        ([("a", _positions(-1))], InputError),
    ],
)
def test_what_cannot_be_protected_leaves_no_journal(
    base: Path, changes: list[tuple[str, np.ndarray[tuple[int], np.dtype[np.int64]]]], error: type[Exception]
) -> None:
    before = base.read_bytes()
    with pytest.raises(error), open_for_patching(base) as checkpoint:
        checkpoint.protect(changes)
    assert (base.read_bytes(), _listing(base.parent)) == (before, [base.name])


def test_protect_twice_is_an_error(base: Path) -> None:
    with pytest.raises(StateError, match="twice"), open_for_patching(base) as checkpoint:  # noqa: PT012 - the block is the patch that fails
        checkpoint.protect([("a", None)])
        checkpoint.tensors["a"].zero_()
        checkpoint.protect([("b", None)])
    assert load_file(base)["a"].tolist() == list(range(8))


def test_only_one_process_patches_at_a_time(base: Path) -> None:
    with open_for_patching(base), pytest.raises(StateError, match="another process"), open_for_patching(base):
        pass
    with open_for_patching(base):
        pass


# --- killed -----------------------------------------------------------------------------------------------------

_PRELUDE = """
import os, signal, sys
from pathlib import Path
import numpy as np, torch
from deltacast.delta import patching
from deltacast.delta.checkpoint_files import MappedFile
from deltacast.delta.patching import open_for_patching, patched_copy, recover
path = Path(sys.argv[1])
def die(*args): os.kill(os.getpid(), signal.SIGKILL)
"""

_PATCH = """
with open_for_patching(path) as checkpoint:
    checkpoint.protect([("a", np.array([0, 3, 7])), ("b", None)])
    checkpoint.tensors["a"][[0, 3]] = -1.0
    {here}
    checkpoint.tensors["a"][7] = -1.0
    checkpoint.tensors["b"].fill_(-1)
"""


def _killed(script: str, *args: Path) -> None:
    command = [sys.executable, "-P", "-c", _PRELUDE + script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def _bytes(path: Path) -> dict[str, bytes]:
    files = _tree(path) if path.is_dir() else {path.name: path.read_bytes()}
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("which", ["base", "folder"])
def test_a_kill_between_writes_is_undone_at_the_next_open(which: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(which)
    before = _bytes(path)
    _killed(_PATCH.format(here="die()"), path)
    assert _bytes(path) != before
    with pytest.raises(StateError, match="patched in place"):
        CheckpointSource(path)
    with pytest.raises(StateError, match="patched in place"), patched_copy(path, path.with_name("out")):
        pass
    with open_for_patching(path) as checkpoint:
        assert checkpoint.tensors["a"].tolist() == list(range(8))
    assert _bytes(path) == before
    assert CheckpointSource(path).tensor("a").tolist() == list(range(8))


def test_a_kill_after_the_last_write_is_undone(base: Path) -> None:
    """Until the journal is gone the base is what counts, even if every word was written."""
    before = _bytes(base)
    _killed("patching._remove = die\n" + _PATCH.format(here="pass"), base)
    assert load_file(base)["b"].tolist() == [-1] * 4
    assert recover(base) is True
    assert _bytes(base) == before


def test_a_kill_while_the_journal_is_written_needs_no_undo(base: Path) -> None:
    before = _bytes(base)
    _killed("os.fsync = die\n" + _PATCH.format(here="pass"), base)
    assert _bytes(base) == before
    assert any(name.endswith(".tmp") for name in _listing(base.parent))
    assert CheckpointSource(base).tensor("a").tolist() == list(range(8))
    with open_for_patching(base) as checkpoint:
        checkpoint.protect([("a", None)])
        checkpoint.tensors["a"].zero_()
    assert _listing(base.parent) == [base.name]


def test_a_kill_while_recovering_is_recovered_from(base: Path) -> None:
    before = _bytes(base)
    _killed(_PATCH.format(here="die()"), base)
    _killed("MappedFile.flush = die\nrecover(path)", base)
    assert recover(base) is True
    assert _bytes(base) == before


def test_a_killed_copy_leaves_no_output(folder: Path, tmp_path: Path) -> None:
    before = _tree(folder)
    _killed("with patched_copy(path, path.with_name('out')) as t:\n    t['a'].zero_(); die()", folder)
    assert not (tmp_path / "out").exists()
    assert _tree(folder) == before
    with patched_copy(folder, tmp_path / "out"):
        pass


_LOOP = """
for i in range(1, 1000):
    with open_for_patching(path) as checkpoint:
        checkpoint.protect([("a", None)])
        checkpoint.tensors["a"].fill_(i)
    print(i, flush=True)
"""


@pytest.mark.parametrize("num_rounds", [1, 5])
def test_a_kill_at_any_moment_leaves_one_whole_version(tmp_path: Path, num_rounds: int) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, path)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _PRELUDE + _LOOP, path], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        last = 0
        for _ in range(num_rounds):
            last = int(child.stdout.readline())
        child.kill()
        last = max([last, *map(int, child.stdout.read().split())])
    recover(path)
    tensor = load_file(path)["a"]
    assert tensor.eq(tensor[0]).all()
    assert tensor[0].item() in {last, last + 1}


# --- journals that cannot be trusted --------------------------------------------------------------------------------


def _interrupted(base: Path) -> Path:
    """Leave what a kill between writes leaves, without a second process."""
    journal = base.with_name(base.name + ".deltacast-undo")
    left = b"", b""
    with pytest.raises(RuntimeError), open_for_patching(base) as checkpoint:  # noqa: PT012 - as above
        checkpoint.protect([("a", _positions(0, 3, 7)), ("b", None)])
        checkpoint.tensors["a"][[0, 3]] = -1.0
        left = journal.read_bytes(), base.read_bytes()
        raise RuntimeError
    journal.write_bytes(left[0])
    with base.open("r+b") as file:
        file.write(left[1])
    return journal


def test_every_flipped_or_missing_byte_of_a_journal_is_noticed(base: Path) -> None:
    journal = _interrupted(base)
    raw, half_written = journal.read_bytes(), base.read_bytes()
    for damaged in (*(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :] for i in range(len(raw))), raw[:-1], raw[:10], b""):
        journal.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="journal"):
            recover(base)
        assert base.read_bytes() == half_written


def test_a_journal_is_not_replayed_on_a_checkpoint_that_was_replaced(base: Path, tmp_path: Path) -> None:
    """Somebody took a fresh copy from elsewhere; old words must not be written into it."""
    journal = _interrupted(base)
    fresh = tmp_path / "fresh"
    save_file({"a": torch.ones(8), "b": torch.ones(4, dtype=torch.int16), "s": torch.tensor(3)}, fresh)
    fresh.rename(base)
    with pytest.raises(StateError, match=r"other weight files.*delete the journal"):
        recover(base)
    assert load_file(base)["a"].tolist() == [1] * 8
    journal.unlink()
    assert CheckpointSource(base).tensor("a").tolist() == [1] * 8


def test_the_journal_is_what_its_description_says(base: Path) -> None:
    """Spelled out from the module's docstring."""
    raw = _interrupted(base).read_bytes()
    name = base.name.encode()
    assert raw.startswith(b"DCUNDO1\n" + struct.pack("<IH", 1, len(name)) + name)
    at = 14 + len(name)
    assert struct.unpack_from("<QQ", raw, at) == (base.stat().st_size, base.stat().st_ino)
    record_a = struct.pack("<Hcqqqq", 1, b"a", 3, 0, 3, 7) + struct.pack("<3f", 0, 3, 7)
    record_b = struct.pack("<Hcq", 1, b"b", -1) + struct.pack("<4h", 0, 1, 2, 3)
    assert raw[at + 32 : -16] == struct.pack("<I", 2) + record_a + record_b


_DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64])


@given(st.lists(st.tuples(_DTYPES, st.integers(0, 20)), min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_undo_restores_every_bit(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("undo") / "m.safetensors"
    save_file({f"p{i}": torch.ones(n, dtype=dtype) for i, (dtype, n) in enumerate(kinds)}, path)
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), open_for_patching(path) as checkpoint:  # noqa: PT012 - the block is the patch that fails
        changes = []
        for i, (dtype, n) in enumerate(kinds):
            whole = data.draw(st.booleans()) or n == 0
            picked = sorted(data.draw(st.sets(st.integers(0, max(n - 1, 0))))) if not whole else range(n)
            factor = 2 if dtype.is_complex else 1
            words = [p * factor + j for p in picked for j in range(factor)]
            changes.append((f"p{i}", None if whole else np.array(words, np.int64)))
            changes.append((f"p{i}", np.array(words, np.int64)))  # protected twice: both hold the old words
        checkpoint.protect(changes)
        for name, positions in changes:
            tensor = checkpoint.tensors[name]
            tensor[...] = 7 if positions is None else tensor
            if positions is not None:
                tensor[torch.from_numpy(positions // (2 if tensor.is_complex() else 1))] = 7
        raise ZeroDivisionError
    assert path.read_bytes() == before
