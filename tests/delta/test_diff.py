"""Bitwise differences. Right values: positions and words by plain loops over bytes, and the plain-integer twin."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.bits import numpy_words
from deltacast.delta.diff import (
    _device_diff,
    changed_words,
    dense_patch,
    diff_parameter,
    diff_state,
    diff_words,
    seed,
)
from deltacast.delta.errors import InputError, StateError, TableError
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.memory import WordMemory
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from fingerprint_twin import bytes_fingerprint, digests, unit_key
from tensor_bytes import WORDS, copied, element_bytes, flipped, listed, random_raw, random_tensor, raw_bytes, tensor_of


def _changes(old: bytes, new: bytes, width: int) -> dict[int, bytes]:
    """Position -> new word, by looking at each word's bytes."""
    pairs = ((at // width, old[at : at + width], new[at : at + width]) for at in range(0, len(old), width))
    return {position: word for position, before, word in pairs if before != word}


def _diff(old: torch.Tensor, new: torch.Tensor) -> SparseWeightPatch | None:
    (meta, _), *_ = listed({"w": old})
    memory = WordMemory(old)
    return diff_parameter(meta, memory, new, memory.fingerprint())


def _mutated(rng: np.random.Generator, raw: bytes, dtype: str, share: float) -> bytes:
    """The bytes with about this share of the elements replaced by random ones."""
    size = element_bytes(dtype)
    fresh = random_raw(rng, dtype, len(raw) // size)
    picked = rng.random(len(raw) // size) < share
    return b"".join((fresh if take else raw)[i * size : (i + 1) * size] for i, take in enumerate(picked.tolist()))


@pytest.mark.parametrize("name", WORDS)
def test_a_diff_holds_exactly_the_changed_words_of_every_dtype(name: str) -> None:
    """Positions, old and new words, sums and fingerprints are what plain loops over the bytes give."""
    rng = np.random.default_rng(1)
    width = WORDS[name][0]
    old = random_raw(rng, name, 700)
    new = _mutated(rng, old, name, 0.3)
    patch = _diff(tensor_of(name, old, (7, 100)), tensor_of(name, new, (7, 100)))
    expected = _changes(old, new, width)
    assert patch is not None
    assert patch.indices is not None
    assert patch.indices.tolist() == list(expected)
    assert patch.values.tobytes() == b"".join(expected.values())
    assert patch.base_values is not None
    assert patch.base_values.tobytes() == b"".join(old[i * width : (i + 1) * width] for i in expected)
    assert patch.fingerprint_before == bytes_fingerprint(old, width)
    assert patch.fingerprint_after == bytes_fingerprint(new, width)
    per_word = max(width // 2, 1)
    old_sum = sum(bytes_fingerprint(old[i * width : (i + 1) * width], width, i * per_word) for i in expected)
    assert patch.old_sum == old_sum % 2**64
    assert (patch.form, patch.part, patch.box, patch.base_meta) == ("absolute", 0, None, None)
    patch.check_indices()


@pytest.mark.parametrize(
    ("dtype", "old", "new", "changed"),
    [
        ("float32", "00000000", "00000080", True),  # +0.0 -> -0.0
        ("bfloat16", "0000", "0080", True),
        ("float8_e4m3fn", "00", "80", True),
        ("float32", "0100c07f", "0100c07f", False),  # the same NaN
        ("float32", "0100c07f", "0200c07f", True),  # another payload
        ("float32", "0100a07f", "0100e07f", True),  # signalling -> quiet
        ("bfloat16", "803f", "c07f", True),  # a new NaN
        ("bfloat16", "c0ff", "c07f", True),  # NaNs of either sign
        ("float64", "000000000000f07f", "000000000000f0ff", True),  # inf -> -inf
        ("float16", "0100", "0000", True),  # a subnormal flushed
        ("float16", "0100", "0100", False),
        ("bfloat16", "803f", "80bf", True),  # only the sign
        ("int64", "0000000000000080", "0000000000000000", True),  # only the top bit
        ("uint64", "0000000000000001", "0000000000000000", True),  # lost by float64
        ("complex64", "0000000000000000", "0000000000000080", True),  # imaginary -0.0
        ("bool", "00", "01", True),
    ],
)
def test_bits_decide_what_changed(dtype: str, old: str, new: str, changed: bool) -> None:
    """Zeros of either sign differ, equal NaNs do not; nothing is looked at as a number."""
    pair = [tensor_of(dtype, bytes.fromhex(text) + bytes(40 * element_bytes(dtype)), (41,)) for text in (old, new)]
    patch = _diff(*pair)
    assert (patch is not None) is changed
    if patch is not None:
        assert patch.num_changed == 1
        assert patch.values.tobytes() in bytes.fromhex(new)


@pytest.mark.parametrize("name", WORDS)
def test_layouts_of_either_side_do_not_matter(name: str) -> None:
    """Transposed, stepped, offset and expanded tensors are compared by their indices, not by their memory."""
    rng = np.random.default_rng(2)
    base, other = random_tensor(rng, name, (6, 6)), random_tensor(rng, name, (12, 12))
    for new in (other[:6, :6], other[::2, 1::2], other[:6, :6].t(), other[5:6, :6].expand(6, 6)):
        expected = _changes(raw_bytes(base.t()), raw_bytes(new), WORDS[name][0])
        patch = _diff(base.t(), new)
        assert patch is not None
        if patch.is_dense:
            assert patch.values.tobytes() == raw_bytes(new)
        else:
            assert patch.indices is not None
            assert dict(zip(patch.indices.tolist(), patch.values.tolist(), strict=True)) == {
                position: int.from_bytes(word, "little") for position, word in expected.items()
            }


def test_scalars_and_empty_tensors_are_parameters_like_any_other() -> None:
    """A 0-d change is one change; a zero-size tensor never changes."""
    patch = _diff(torch.tensor(1.0), torch.tensor(-1.0))
    assert patch is not None
    assert patch.values.tolist() == [0xBF800000]
    assert _diff(torch.tensor(1.0), torch.tensor(1.0)) is None
    assert _diff(torch.zeros(0, 3), torch.zeros(0, 3)) is None


@pytest.mark.parametrize(("num_changed", "dense"), [(15, False), (16, True), (0, False)])
def test_the_whole_parameter_is_sent_above_fifteen_sixteenths(num_changed: int, dense: bool) -> None:
    """15 of 16 words are still sparse, 16 of 16 are not; both give the same fingerprint as the twin."""
    old = torch.zeros(16)
    new = torch.cat([torch.ones(num_changed), torch.zeros(16 - num_changed)])
    patch = _diff(old, new)
    if not num_changed:
        assert patch is None
        return
    assert patch is not None
    assert patch.is_dense is dense
    assert patch.fingerprint_after == bytes_fingerprint(raw_bytes(new), 4)
    assert patch.num_changed == num_changed


def test_small_steps_are_sparse_even_where_every_word_changed() -> None:
    """One step of the ordered integer per word is coded in a nibble: a learning rate may move them all."""
    words = np.arange(0x3F80, 0x3F80 + 64, dtype=np.uint16)
    meta = ParamMeta("w", "bfloat16", (64,))
    patch = diff_words(meta, words, words + np.uint16(1), words_fingerprint(words))
    assert patch is not None
    assert not patch.is_dense
    far = diff_words(meta, words, words ^ np.uint16(0x4000), words_fingerprint(words))
    assert far is not None
    assert far.is_dense


def test_positions_across_chunks_are_found() -> None:
    """The first and last words of every chunk, and of the ragged end, are not missed."""
    chunk = 1 << 18
    for size in (1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5):
        old = np.zeros(size, np.uint8)
        places = sorted({0, size - 1, *(p for k in (1, 2, 3) for p in (k * chunk - 1, k * chunk) if p < size)})
        new = old.copy()
        new[places] = 1
        found, before, after = changed_words(old, new)
        assert found.tolist() == places
        assert (set(before.tolist()), set(after.tolist())) == ({0}, {1})
        assert found.dtype == np.int64
    assert changed_words(np.zeros(0, np.uint16), np.zeros(0, np.uint16))[0].tolist() == []


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_device_path_gives_the_patch_of_the_host_path(name: str, share: float) -> None:
    """The code that runs on a GPU, run here on the CPU, makes the same patch, dense switch included."""
    rng = np.random.default_rng(3)
    raw = random_raw(rng, name, 200)
    old, new = (tensor_of(name, data, (20, 10)) for data in (raw, _mutated(rng, raw, name, share)))
    (meta, _), *_ = listed({"w": old})
    memory = WordMemory(old)
    here = diff_words(meta, memory.read_all(), numpy_words(new), memory.fingerprint())
    there = _device_diff(meta, memory, new, memory.fingerprint())
    assert _described(here) == _described(there)


def _described(patch: SparseWeightPatch | None) -> tuple[Any, ...] | None:
    if patch is None:
        return None
    arrays = (patch.indices, patch.values, patch.base_values)
    return (
        patch.meta,
        *(None if array is None else (array.dtype.str, array.tobytes()) for array in arrays),
        patch.fingerprint_before,
        patch.fingerprint_after,
        patch.old_sum,
        patch.form,
    )


def test_a_patch_owns_its_memory() -> None:
    """The optimizer may overwrite the new weights, and the update the old ones, while the patch is on its way."""
    for share in (1, 32):
        old, new = torch.zeros(32), torch.zeros(32)
        new[:share] = 1.0
        patch = _diff(old, new)
        assert patch is not None
        old.fill_(5.0)
        new.fill_(6.0)
        assert patch.values.tolist() == [0x3F800000] * share
        assert patch.base_values is None or patch.base_values.tolist() == [0]
    whole = torch.ones(3)
    sent = dense_patch(ParamMeta("w", "float32", (3,)), whole)
    whole.fill_(2.0)
    assert sent.values.tolist() == [0x3F800000] * 3
    assert sent.fingerprint_after == bytes_fingerprint(bytes.fromhex("0000803f" * 3), 4)


# --- whole states --------------------------------------------------------------------------------------------------


def _base(threads: int = 1, num: int = 12) -> WeightState:
    rng = np.random.default_rng(4)
    tensors = {f"p{i}": random_tensor(rng, name, (4, 9)) for i, name in enumerate(list(WORDS)[:num])}
    return WeightState(tensors, aliases={"tied": "p0"}, version=7, threads=threads)


def _new(state: WeightState, seed_: int = 5, share: float = 0.2) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed_)
    made = {}
    for memory in state.memories:
        meta = state.table[memory.name]
        raw = _mutated(rng, raw_bytes(memory.tensor), meta.dtype, share)
        made[meta.name] = tensor_of(meta.dtype, raw, meta.shape)
    return made


def _described_update(update: WeightUpdate) -> tuple[Any, ...]:
    return (
        *(update.run_id, update.epoch, update.base_version, update.target_version, update.optimizer_step),
        *(update.base_digest, update.target_digest, update.table_digest, update.removed, dict(update.aliases)),
        *(_described(patch) for patch in update.patches),
    )


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_update_does_not_depend_on_threads_or_order(threads: int) -> None:
    """Any number of threads and any order of the source give the same patches, sums and digests, byte for byte."""
    base = _base()
    new = _new(base)
    expected = _described_update(diff_state(base, listed(new), run_id="r"))
    threaded = _base(threads)
    for order in (sorted(new), sorted(new, reverse=True)):
        update = diff_state(threaded, listed({name: new[name] for name in order}), run_id="r")
        assert _described_update(update) == expected


def test_the_digests_of_an_update_are_the_twins() -> None:
    """Base, target and table digest are those of the bytes on either side."""
    base = _base()
    before = {memory.name: memory.tensor for memory in base.memories}
    new = _new(base)
    update = diff_state(base, listed(new), run_id="r", epoch=3, target_version=20, optimizer_step=-4)

    def rows(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        for meta, tensor in listed(tensors):
            yield meta.name, meta.dtype, meta.shape, bytes_fingerprint(raw_bytes(tensor), WORDS[meta.dtype][0])

    assert (update.table_digest, update.base_digest) == digests(rows(before))
    assert (update.table_digest, update.target_digest) == digests(rows(new))
    assert (update.base_version, update.target_version, update.epoch, update.optimizer_step) == (7, 20, 3, -4)
    assert update.aliases == {"tied": "p0"}
    assert [patch.name for patch in update.patches] == sorted(
        name for name in new if raw_bytes(new[name]) != raw_bytes(before[name])
    )


def test_no_change_is_an_empty_update_that_advances_the_version() -> None:
    """A step that changed nothing is an update, not a failure."""
    base = _base()
    update = diff_state(base, listed(copied({m.name: m.tensor for m in base.memories})), run_id="r")
    assert (update.patches, update.num_changed) == ((), 0)
    assert (update.base_version, update.target_version) == (7, 8)
    assert update.base_digest == update.target_digest == base.digest


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ("missing", "p3"),
        ("unknown", "stranger"),
        ("twice", "p3"),
        ("twice under its tied name", "tied"),
        ("shape", "p3"),
        ("dtype", "p3"),
    ],
)
def test_weights_that_are_not_the_baselines_are_refused_by_name(change: str, parameter: str, threads: int) -> None:
    """Missing, unknown, repeated, reshaped and cast parameters are named; the baseline stays what it was."""
    base = _base(threads)
    digest = base.digest
    pairs = list(listed(_new(base)))
    place = next(i for i, (meta, _) in enumerate(pairs) if meta.name == "p3")
    meta, tensor = pairs[place]
    if change == "missing":
        del pairs[place]
    elif change == "unknown":
        pairs.append((ParamMeta("stranger", "int8", (1,)), torch.zeros(1, dtype=torch.int8)))
    elif change == "twice":
        pairs.append(pairs[place])
    elif change == "twice under its tied name":
        pairs.append((ParamMeta("tied", "int8", (1,)), torch.zeros(1, dtype=torch.int8)))
    elif change == "shape":
        pairs[place] = (meta, tensor.view(9, 4))
    else:
        pairs[place] = (meta, tensor.view(torch.int64))
    with pytest.raises(TableError) as caught:
        diff_state(base, pairs, run_id="r")
    assert caught.value.parameter == parameter
    assert (base.digest, base.audit()) == (digest, [])


def test_fp32_beside_bf16_is_compared_in_its_own_dtype() -> None:
    """A change below bf16's resolution is found in a float32 router; handing it over cast is refused by name."""
    tensors = {"router": torch.tensor([1.0, 2.0]), "w": torch.ones(2, dtype=torch.bfloat16)}
    base = WeightState(copied(tensors), version=0)
    tensors["router"][1] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    update = diff_state(base, listed(tensors), run_id="r")
    assert [(patch.name, patch.values.tolist()) for patch in update.patches] == [("router", [0x40000001])]
    cast = {**tensors, "router": tensors["router"].bfloat16()}
    with pytest.raises(TableError, match=r"float32\[2\].*bfloat16\[2\]") as caught:
        diff_state(base, listed(cast), run_id="r")
    assert caught.value.parameter == "router"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_source_that_converts_is_streamed(threads: int) -> None:
    """Only a few converted tensors are alive at once, however many parameters there are."""
    count = 40
    base = WeightState({f"p{i:02}": torch.zeros(64) for i in range(count)}, version=0, threads=threads)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def converting() -> Iterator[tuple[ParamMeta, torch.Tensor]]:
        nonlocal most
        for meta in base.table:
            tensor = torch.ones(64, dtype=torch.float64).to(torch.float32)
            alive.add(tensor)
            most = max(most, len(alive))
            yield meta, tensor
            del tensor

    gc.disable()  # what is freed here is freed by reference counts
    try:
        update = diff_state(base, converting(), run_id="r")
    finally:
        gc.enable()
    assert len(update.patches) == count
    assert most <= threads + 3


def test_an_error_in_the_source_comes_out_as_it_is() -> None:
    """A source that fails half way fails the diff, threads or not, and no update comes out."""

    def failing(base: WeightState) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
        for number, pair in enumerate(listed(_new(base))):
            if number == 5:
                raise OSError("disk gone")
            yield pair

    for threads in (1, 3):
        base = _base(threads)
        with pytest.raises(OSError, match="disk gone"):
            diff_state(base, failing(base), run_id="r")


def test_weights_without_a_version_are_not_published() -> None:
    """A state whose bits are of no known version is the base of nothing; a version is never used twice."""
    unknown = WeightState({"w": torch.zeros(2)})
    new = {"w": torch.ones(2)}
    with pytest.raises(StateError, match="without a version"):
        diff_state(unknown, listed(new), run_id="r")
    with pytest.raises(StateError, match="without a version"):
        seed(unknown, run_id="r")
    with pytest.raises(StateError, match="without a version"):
        seed(unknown, run_id="r", names=["w"])
    known = WeightState({"w": torch.zeros(2)}, version=5)
    for target in (5, 4):
        with pytest.raises(InputError, match="version"):
            diff_state(known, listed(new), run_id="r", target_version=target)


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_a_seed_is_every_parameter_whole() -> None:
    """All bits of all parameters, from no base, with the twin's fingerprints; it owns its memory."""
    base = _base()
    contents = {memory.name: raw_bytes(memory.tensor) for memory in base.memories}
    made = seed(base, run_id="r", epoch=2)
    assert (made.base_version, made.base_digest, made.target_version, made.epoch) == (None, None, 7, 2)
    assert made.target_digest == base.digest
    for memory in base.memories:
        memory.write_all(np.zeros(memory.num_words, memory.numpy_word))
    assert {patch.name: patch.values.tobytes() for patch in made.patches} == contents
    for patch in made.patches:
        assert patch.fingerprint_after == bytes_fingerprint(contents[patch.name], WORDS[patch.meta.dtype][0])
        assert patch.is_dense
    made.check_covers(base.table)


def test_a_repair_is_the_named_parameters_once_each() -> None:
    """Names may repeat and may be tied names; base and target are the state's own version."""
    base = _base()
    made = seed(base, run_id="r", names=["p3", "tied", "p0", "p3"])
    assert [patch.name for patch in made.patches] == ["p0", "p3"]
    assert (made.base_version, made.target_version) == (7, 7)
    assert made.base_digest == made.target_digest == base.digest
    with pytest.raises(TableError) as caught:
        seed(base, run_id="r", names=["nobody"])
    assert caught.value.parameter == "nobody"
    assert seed(base, run_id="r", names=[]).patches == ()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_one_flipped_bit_is_one_change_of_the_right_word(data: st.DataObject) -> None:
    """Any dtype, any bit: exactly the word that holds it is sent, and the fingerprint moves by that unit's key."""
    name = data.draw(st.sampled_from(sorted(set(WORDS) - {"bool"})))
    numel = data.draw(st.integers(2, 40))
    raw = random_raw(np.random.default_rng(data.draw(st.integers(0, 99))), name, numel)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    new = flipped(raw, bit)
    patch = _diff(tensor_of(name, raw, (numel,)), tensor_of(name, new, (numel,)))
    width = WORDS[name][0]
    unit = min(width, 2)
    assert patch is not None
    assert patch.indices is not None
    assert patch.indices.tolist() == [bit // 8 // width]
    assert patch.fingerprint_before is not None
    step = int.from_bytes(new, "little") >> bit & 1
    key = unit_key(bit // 8 // unit) << bit % (8 * unit)
    assert (patch.fingerprint_after - patch.fingerprint_before - (key if step else -key)) % 2**64 == 0
