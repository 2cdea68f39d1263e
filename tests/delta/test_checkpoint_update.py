"""Updates between checkpoints: apply(diff(a, b), a) is b, bit by bit; everything else leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_update import apply_to_checkpoint, diff_checkpoints
from deltacast.delta.codec import decode_update, encode_update
from deltacast.delta.diff import seed
from deltacast.delta.errors import BaseError, CorruptionError, FormatError, InputError, VerificationError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.state import WeightState
from golden_checkpoint import GOLDEN, GOLDEN_STATE_DIGEST, Raw, write_raw

Tensors = dict[str, torch.Tensor]


def _diff(a: Path, b: Path, **options: Any) -> WeightUpdate:
    """Diff two checkpoints, and let the update go through its container once."""
    with CheckpointSource(a) as base, CheckpointSource(b) as new:
        return decode_update(encode_update(diff_checkpoints(base, new, run_id="r", **options)))


def _bits(path: Path) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """What the stock library reads."""
    return {
        name: (
            t.dtype,
            list(t.shape),
            t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"",
        )
        for name, t in load_file(path).items()
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    tensors = {"w": torch.arange(600.0).view(20, 30).bfloat16(), "b": torch.arange(4.0), "s": torch.tensor(3)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """The base with one word, one sign of zero and a scalar changed."""
    path = tmp_path / "new.safetensors"
    w = torch.arange(600.0).view(20, 30).bfloat16()
    w[7, 3] = float("nan")
    w[0, 0] = -0.0
    save_file({"w": w, "b": torch.arange(4.0), "s": torch.tensor(-3000)}, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def reshaped(tmp_path: Path) -> Path:
    """A checkpoint with another table: `b` gone, `n` new, `s` of another dtype, `w` changed in one word."""
    path = tmp_path / "reshaped.safetensors"
    w = torch.arange(600.0).view(20, 30).bfloat16()
    w[19, 29] = 1.0
    save_file({"w": w, "n": torch.ones(2, 2, dtype=torch.float16), "s": torch.tensor(3, dtype=torch.int32)}, path)
    return path


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("threads", [1, 3])
def test_only_what_changed_travels(base: Path, new: Path, threads: int) -> None:
    """Three words in two parameters, at the positions where they were changed by hand."""
    update = _diff(base, new, base_version=4, optimizer_step=9, threads=threads)
    assert (update.base_version, update.target_version, update.optimizer_step) == (4, 5, 9)
    positions = {patch.name: None if patch.indices is None else patch.indices.tolist() for patch in update.patches}
    assert positions == {"s": None, "w": [0, 7 * 30 + 3]}  # a scalar that moved far is sent whole
    assert update.num_changed == 3


@pytest.mark.parametrize("threads", [1, 3])
def test_apply_gives_the_new_checkpoint(base: Path, new: Path, tmp_path: Path, threads: int) -> None:
    """Bit by bit in the stock library's eyes; metadata stays, the base stays."""
    before, out = base.read_bytes(), tmp_path / "out.safetensors"
    apply_to_checkpoint(_diff(base, new), base, out, threads=threads)
    assert _bits(out) == _bits(new)
    assert base.read_bytes() == before
    with CheckpointSource(out) as source:
        assert source.metadata == {"format": "pt"}


def test_in_place_gives_the_new_checkpoint(base: Path, new: Path, tmp_path: Path) -> None:
    """And leaves no journal."""
    expected = _bits(new)
    apply_to_checkpoint(_diff(base, new), base, None)
    assert _bits(base) == expected
    assert _listing(tmp_path) == ["base.safetensors", "new.safetensors"]


def test_the_same_weights_make_an_empty_update(base: Path, tmp_path: Path) -> None:
    """Which is legal, applies, and advances the version."""
    update = _diff(base, base)
    assert (update.patches, update.removed, update.target_version) == ((), (), 1)
    assert update.base_digest == update.target_digest
    apply_to_checkpoint(update, base, tmp_path / "out.safetensors")
    assert _bits(tmp_path / "out.safetensors") == _bits(base)


def test_every_dtype_of_the_format_survives(tmp_path: Path) -> None:
    """Each parameter of the golden checkpoint with its last byte flipped, and back again to the golden digest."""
    flipped: dict[str, Raw] = {
        name: (code, shape, data[:-1] + bytes([data[-1] ^ 1]) if data else data)
        for name, (code, shape, data) in GOLDEN.items()
    }
    a = write_raw(tmp_path / "a.safetensors", flipped)
    b = write_raw(tmp_path / "b.safetensors", GOLDEN)
    update = _diff(a, b)
    assert update.target_digest == GOLDEN_STATE_DIGEST
    apply_to_checkpoint(update, a, None)
    with CheckpointSource(a) as patched, CheckpointSource(b) as wanted:
        for name in GOLDEN:
            have, want = patched.tensor(name), wanted.tensor(name)
            assert have.view(-1).view(torch.uint8).equal(want.view(-1).view(torch.uint8)), name


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_apply_of_diff_is_the_new_checkpoint(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any two checkpoints, with parameters that come, go and change dtype, shape and bits."""
    folder = tmp_path_factory.mktemp("pair")
    kind = st.sampled_from([("BF16", 2), ("F32", 4), ("U8", 1), ("F64", 8)])

    def checkpoint(path: Path) -> Path:
        tensors: dict[str, Raw] = {}
        for name in data.draw(st.lists(st.sampled_from("abcd"), unique=True)):
            code, size = data.draw(kind)
            shape = data.draw(st.sampled_from([[], [0], [3], [2, 2]]))
            num = size * int(np.prod(shape, dtype=int))
            tensors[name] = (code, shape, data.draw(st.binary(min_size=num, max_size=num)))
        return write_raw(path, tensors)

    a, b, out = checkpoint(folder / "a"), checkpoint(folder / "b"), folder / "out"
    apply_to_checkpoint(_diff(a, b), a, out)
    assert _bits(out) == _bits(b)


def test_a_change_of_the_table_makes_a_fresh_file(base: Path, reshaped: Path, tmp_path: Path) -> None:
    """New and changed parameters travel whole, with what they were; removed ones are listed."""
    update = _diff(base, reshaped)
    assert update.removed == ("b",)
    assert {p.name: (p.is_dense, p.base_meta.dtype if p.base_meta else None) for p in update.patches} == {
        "n": (True, None), "s": (True, "int64"), "w": (False, None),
    }  # fmt: skip
    apply_to_checkpoint(update, base, tmp_path / "out.safetensors")
    assert _bits(tmp_path / "out.safetensors") == _bits(reshaped)
    with CheckpointSource(tmp_path / "out.safetensors") as source:
        assert source.metadata == {"format": "pt"}


def test_a_change_of_the_table_in_place_replaces_the_single_file(base: Path, reshaped: Path, tmp_path: Path) -> None:
    """Also where the file is all that a folder holds."""
    folder = tmp_path / "hf"
    folder.mkdir()
    base.rename(folder / "model.safetensors")
    apply_to_checkpoint(_diff(folder, reshaped), folder, None)
    assert _bits(folder / "model.safetensors") == _bits(reshaped)
    assert _listing(folder) == ["model.safetensors"]


def _sharded(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_sharded_folder_keeps_its_layout(base: Path, new: Path, tmp_path: Path) -> None:
    """The copy has the same files; the base may be a folder where the other side is a file."""
    folder = _sharded(tmp_path / "hf", load_file(base))
    apply_to_checkpoint(_diff(base, new), folder, tmp_path / "out")
    assert _listing(tmp_path / "out") == _listing(folder)
    assert _bits(tmp_path / "out" / "w.safetensors")["w"] == _bits(new)["w"]
    apply_to_checkpoint(_diff(base, new), folder, None)
    assert _bits(folder / "s.safetensors")["s"] == _bits(new)["s"]


def test_a_change_of_the_table_in_a_sharded_folder_is_refused(base: Path, reshaped: Path, tmp_path: Path) -> None:
    """In place; to a new file it works."""
    folder = _sharded(tmp_path / "hf", load_file(base))
    update, before = _diff(base, reshaped), {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(InputError, match="sharded"):
        apply_to_checkpoint(update, folder, None)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    apply_to_checkpoint(update, folder, tmp_path / "out.safetensors")
    assert _bits(tmp_path / "out.safetensors") == _bits(reshaped)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_wrong_base_is_refused_by_name_before_anything_is_written(
    base: Path, new: Path, tmp_path: Path, in_place: bool
) -> None:
    """One flipped bit in a parameter that the update changes."""
    update = _diff(base, new)
    raw = bytearray(base.read_bytes())
    raw[-1] ^= 1  # the last byte of `w`: the narrowest dtype lies last
    base.write_bytes(raw)
    listing = _listing(tmp_path)
    with pytest.raises(BaseError) as caught:
        apply_to_checkpoint(update, base, None if in_place else tmp_path / "out.safetensors")
    assert caught.value.parameter == "w"
    assert caught.value.expected == update.base_digest
    assert base.read_bytes() == bytes(raw)
    assert _listing(tmp_path) == listing


def test_damage_where_the_update_changes_nothing_is_found_too(base: Path, new: Path, tmp_path: Path) -> None:
    """The whole base is proven, not only the words that are overwritten."""
    update = _diff(base, new)
    tensors = load_file(base)
    tensors["b"][1] = 7.0
    save_file(tensors, base)
    with pytest.raises(BaseError):
        apply_to_checkpoint(update, base, tmp_path / "out.safetensors")


def test_a_second_application_says_that_it_was_done_before(base: Path, new: Path) -> None:
    """A replay is no silent success and no damage."""
    update = _diff(base, new)
    apply_to_checkpoint(update, base, None)
    before = base.read_bytes()
    with pytest.raises(BaseError, match="target already"):
        apply_to_checkpoint(update, base, None)
    assert base.read_bytes() == before


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("other", ["new", "reshaped"])
def test_an_update_that_lies_about_its_result_leaves_nothing(
    base: Path, tmp_path: Path, request: pytest.FixtureRequest, other: str, in_place: bool
) -> None:
    """The target digest decides, before the result has its name."""
    update = replace(_diff(base, request.getfixturevalue(other)), target_digest="xxh3_128:" + "0" * 32)
    before, listing = base.read_bytes(), _listing(tmp_path)
    with pytest.raises(VerificationError):
        apply_to_checkpoint(update, base, None if in_place else tmp_path / "out.safetensors")
    assert base.read_bytes() == before
    assert _listing(tmp_path) == listing


def test_an_update_that_lies_about_its_table_is_refused(base: Path, reshaped: Path, tmp_path: Path) -> None:
    """Names, dtypes and shapes are part of the promise."""
    update = replace(_diff(base, reshaped), removed=())
    with pytest.raises(VerificationError, match="parameter table"):
        apply_to_checkpoint(update, base, tmp_path / "out.safetensors")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_word_that_the_file_does_not_keep_is_found_and_undone(
    base: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """The audit after the write is the last thing that can fail: no copy appears, or every word is put back."""
    update, before, listing = _diff(base, new), base.read_bytes(), _listing(tmp_path)
    audit: Callable[..., Any] = WeightState.audit

    def after_damage(state: WeightState, names: Any = None) -> Any:
        state.memory("w").write(np.array([0], np.int64), np.array([1], "<u2"))
        return audit(state, names)

    monkeypatch.setattr(WeightState, "audit", after_damage)
    with pytest.raises(CorruptionError) as caught:
        apply_to_checkpoint(update, base, None if in_place else tmp_path / "out.safetensors")
    assert caught.value.parameter == "w"
    assert base.read_bytes() == before
    assert _listing(tmp_path) == listing


def test_outputs_that_exist_are_not_replaced_unasked(base: Path, new: Path, tmp_path: Path) -> None:
    """A folder never is, a dangling link counts as there."""
    update, out = _diff(base, new), tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match="exists already"):
        apply_to_checkpoint(update, base, out)
    assert out.read_bytes() == b"mine"
    apply_to_checkpoint(update, base, out, force=True)
    assert _bits(out) == _bits(new)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(InputError, match="exists already"):
        apply_to_checkpoint(update, base, tmp_path / "link")
    with pytest.raises(InputError, match="never replaced"):
        apply_to_checkpoint(update, base, tmp_path, force=True)


def test_a_seed_fits_any_base_and_any_table(base: Path, new: Path, reshaped: Path, tmp_path: Path) -> None:
    """It brings every parameter itself."""
    update = seed(WeightState(load_file(new), version=7), run_id="r")
    for number, other in enumerate((base, reshaped)):
        out = tmp_path / f"out{number}.safetensors"
        apply_to_checkpoint(decode_update(encode_update(update)), other, out)
        assert _bits(out) == _bits(new)


def test_parts_of_a_new_parameter_are_put_together(base: Path, tmp_path: Path) -> None:
    """Two trainer ranks sent a half each, of one new and of one known parameter."""
    grown = load_file(base) | {"n": torch.arange(8.0).view(4, 2)}
    save_file(grown, tmp_path / "grown.safetensors")
    update = _diff(base, tmp_path / "grown.safetensors")
    [whole] = update.patches
    halves = []
    for part, (lo, hi) in enumerate(((0, 3), (3, 4))):
        half = torch.zeros(4, 2)
        half[lo:hi] = grown["n"][lo:hi]
        after = int(WeightState({"n": half}).fingerprints[0])  # a sum over units: zeros elsewhere add nothing
        box = ((lo, hi), (0, 2))
        halves.append(replace(whole, values=whole.values[2 * lo : 2 * hi], fingerprint_after=after, part=part, box=box))
    apply_to_checkpoint(replace(update, patches=tuple(halves)), base, tmp_path / "out.safetensors")
    assert _bits(tmp_path / "out.safetensors") == _bits(tmp_path / "grown.safetensors")


@pytest.mark.parametrize(("base_version", "target_version"), [(3, 3), (3, 2), (-1, None)])
def test_versions_must_go_up(base: Path, new: Path, base_version: int, target_version: int | None) -> None:
    """Nothing is read for an update that nobody may apply."""
    with pytest.raises(InputError, match="above the base version"):
        _diff(base, new, base_version=base_version, target_version=target_version)


def test_a_damaged_base_is_a_format_error(base: Path, new: Path, tmp_path: Path) -> None:
    """A truncated file is named, and there is no output."""
    update = _diff(base, new)
    base.write_bytes(base.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"base\.safetensors"):
        apply_to_checkpoint(update, base, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
