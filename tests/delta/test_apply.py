"""Applying updates. Right values: the bytes of the new weights, before and after, and the plain-integer twin."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from delta_form import update_as_delta
from deltacast.delta.apply import Transaction, TransactionState, apply_portions, apply_update
from deltacast.delta.bits import Words, strided_words
from deltacast.delta.diff import diff_state, seed
from deltacast.delta.errors import (
    BaseError,
    CorruptionError,
    DeltacastError,
    InputError,
    PatchError,
    TableError,
    VerificationError,
)
from deltacast.delta.memory import WordMemory
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from fingerprint_twin import box_fingerprint, bytes_fingerprint
from tensor_bytes import (
    WORDS,
    copied,
    element_bytes,
    everything,
    listed,
    random_raw,
    random_tensor,
    raw_bytes,
    state_bytes,
    tensor_of,
)

_SPECIAL: dict[str, list[str]] = {
    "bfloat16": ["0000", "0080", "c07f", "817f", "81ff", "807f", "80ff", "0100", "0180"],
    "float16": ["0000", "0080", "007e", "017d", "01fd", "007c", "00fc", "0100", "ff83"],
    "float32": ["00000000", "00000080", "0000c07f", "0100a07f", "0100a0ff", "0000807f", "000080ff", "01000000"],
    "float64": ["00" * 8, "00" * 7 + "80", "010000000000f07f", "010000000000f8ff", "000000000000f0ff", "01" + "00" * 7],
}
"""Zeros, quiet and signalling NaNs, infinities and subnormals, little-endian."""


def _pair(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Old and new bytes that differ in about a third of the elements, special values among them."""
    numel, size = int(np.prod(shape)), element_bytes(dtype)
    old, fresh = random_raw(rng, dtype, numel), random_raw(rng, dtype, numel)
    special = [bytes.fromhex(text) for text in _SPECIAL.get(dtype, [])]
    pieces = []
    for i in range(numel):
        here = slice(i * size, (i + 1) * size)
        draw = rng.random()
        pieces.append(
            old[here] if draw > 0.35 else special[i % len(special)] if special and draw < 0.15 else fresh[here]
        )
    return old, b"".join(pieces)


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "stepped": lambda t: t[::2],
    "offset": lambda t: t[1:, 2:],
    "column": lambda t: t[:, 3],
    "0-d": lambda t: t[2, 1],
    "empty": lambda t: t[:, :0],
}


@pytest.mark.parametrize("delta_form", [False, True], ids=["absolute", "delta"])
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("name", WORDS)
def test_applying_a_diff_gives_the_new_bits(name: str, layout: str, delta_form: bool) -> None:
    """For every dtype, layout and form: the worker's bytes are the new bytes, in the memory that they were in."""
    rng = np.random.default_rng(1)
    tensor = _LAYOUTS[layout](random_tensor(rng, name, (8, 12)))
    shape = tuple(tensor.shape)
    old, new = _pair(rng, name, shape)
    state = WeightState({"w": tensor}, version=0)
    state.memories[0].write_all(np.frombuffer(old, state.memories[0].numpy_word))
    state.rescan()
    address = tensor.data_ptr()
    update = diff_state(state, listed({"w": tensor_of(name, new, shape)}), run_id="r")
    apply_update(state, update_as_delta(update) if delta_form else update)
    assert raw_bytes(tensor) == new
    assert tensor.data_ptr() == address
    assert (state.version, state.digest, state.audit()) == (1, update.target_digest, [])
    assert state.fingerprints.tolist() == [bytes_fingerprint(new, WORDS[name][0])]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_diff_applied_is_the_new_weights_bit_for_bit(data: st.DataObject) -> None:
    """Any dtype, shape, share of changes and form, over several parameters at once."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    old, new = {}, {}
    for number in range(data.draw(st.integers(0, 4))):
        name = data.draw(st.sampled_from(sorted(WORDS)))
        shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
        share = data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
        raw, fresh = (random_raw(rng, name, int(np.prod(shape))) for _ in range(2))
        size = element_bytes(name)
        picked = [fresh if rng.random() < share else raw for _ in range(len(raw) // size)]
        mixed = b"".join(part[i * size : (i + 1) * size] for i, part in enumerate(picked))
        old[f"p{number}"] = tensor_of(name, raw, shape)
        new[f"p{number}"] = tensor_of(name, mixed, shape)
    state = WeightState(old, version=3)
    update = diff_state(state, listed(new), run_id="r")
    apply_update(state, update_as_delta(update) if data.draw(st.booleans()) else update)
    assert state_bytes(state) == {name: raw_bytes(tensor) for name, tensor in new.items()}
    assert (state.digest, state.audit(), state.version) == (update.target_digest, [], 4)


def test_new_weights_may_come_expanded_conjugated_or_negated() -> None:
    """The source's layout and lazy bits are resolved; a leaf that requires grad is written and stays a leaf."""
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    number = torch.zeros(4, dtype=torch.complex64)
    state = WeightState({"w": parameter, "c": number, "i": torch.zeros(4)}, version=0)
    lazy = torch.tensor([1 + 2j, -0.0j, 3.0, -4j]).conj()
    new = {"w": torch.tensor([[1.0], [-0.0], [3.0]]).expand(3, 4), "c": lazy, "i": lazy.imag}
    update = diff_state(state, listed(new), run_id="r")
    apply_update(state, update)
    assert parameter.tolist() == [[1.0] * 4, [-0.0] * 4, [3.0] * 4]
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert raw_bytes(number) == raw_bytes(lazy.resolve_conj())
    assert raw_bytes(state.memory("i").tensor) == raw_bytes(lazy.imag.resolve_neg())


def test_tied_names_travel_once() -> None:
    """One storage under two names is one parameter; both names see the update."""
    embed = torch.zeros(6)
    state = WeightState({"embed": embed}, aliases={"lm_head": "embed"}, version=0)
    update = diff_state(state, listed({"embed": torch.tensor([0, 0, 1.0, 0, 0, 0])}), run_id="r")
    assert [patch.name for patch in update.patches] == ["embed"]
    apply_update(state, update)
    assert state.memory("lm_head").tensor[2] == 1.0


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_do_not_change_the_result(threads: int) -> None:
    """Staging on threads gives the same bits and digests."""
    first, second = _base(), _base(threads)
    update = _next(first)
    for state in (first, second):
        apply_update(state, update)
    assert state_bytes(first) == state_bytes(second)
    assert first.digest == second.digest == update.target_digest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 8 * 2**30, reason="two tensors of 2 GiB need 8 GiB"
)
def test_parameters_beyond_two_to_the_31_elements_are_addressed() -> None:
    """Changes below, at and above 2^31 and at the very end arrive; the fingerprint is the sum over them."""
    size = 2**31 + 100
    places = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, size - 1]
    old, new = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    for number, place in enumerate(places):
        new[place] = number + 1
    state = WeightState({"w": old}, version=0)
    update = diff_state(state, listed({"w": new}), run_id="r")
    (patch,) = update.patches
    assert patch.indices is not None
    assert patch.indices.tolist() == places
    expected = sum(bytes_fingerprint(bytes([number + 1]), 1, place) for number, place in enumerate(places))
    assert patch.fingerprint_after == expected % 2**64
    apply_update(state, update)
    assert torch.equal(old, new)
    assert state.audit() == []


# --- a small state that most tests below share -----------------------------------------------------------------------


def _base(threads: int = 1, version: int | None = 5) -> WeightState:
    rng = np.random.default_rng(11)
    tensors = {
        "a": random_tensor(rng, "bfloat16", (4, 6)),
        "b": random_tensor(rng, "float32", (5, 3)),
        "c": random_tensor(rng, "complex64", (3, 2)),
        "d": random_tensor(rng, "int64", ()),
        "e": random_tensor(rng, "uint8", (0,)),
        "f": random_tensor(rng, "float16", (6, 4)).t(),
    }
    return WeightState(tensors, version=version, threads=threads)


def _next_tensors(state: WeightState, seed_: int = 12) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed_)
    new = copied({memory.name: memory.tensor for memory in state.memories})
    for name, tensor in new.items():
        raw = bytearray(raw_bytes(tensor))
        size = tensor.element_size()
        for element in rng.choice(max(tensor.numel(), 1), tensor.numel() // 3, replace=False).tolist():
            raw[element * size] ^= 1 + int(rng.integers(0, 255))
        new[name] = tensor_of(str(tensor.dtype).removeprefix("torch."), bytes(raw), tensor.shape)
    return new


def _next(state: WeightState, seed_: int = 12) -> WeightUpdate:
    return diff_state(state, listed(_next_tensors(state, seed_)), run_id="r")


def _swap_patch(update: WeightUpdate, name: str, **fields: Any) -> WeightUpdate:
    """The update with fields of one patch replaced."""
    patches = [replace(patch, **fields) if patch.name == name else patch for patch in update.patches]
    return replace(update, patches=tuple(patches))


def _of(update: WeightUpdate, name: str) -> SparseWeightPatch:
    return next(patch for patch in update.patches if patch.name == name)


def _refused(state: WeightState, update: WeightUpdate, error: type[DeltacastError], **stage: Any) -> DeltacastError:
    """Stage an update that must be refused, and see that nothing at all moved."""
    before = everything(state)
    with pytest.raises(error) as caught:
        Transaction.stage(state, update, **stage)
    assert everything(state) == before
    return caught.value


# --- policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "indices",
    [[-1, 0], [0, 24], [3, 3], [4, 3], [2**31, 2**31 + 1], [-(2**63), 0], [0, 2**63 - 1]],
    ids=str,
)
def test_positions_that_break_the_policy_are_refused_before_the_first_write(indices: list[int]) -> None:
    """Negative, beyond the end, repeated, descending: named, with every parameter's bytes as they were."""
    state = _base()
    update = _next(state)
    values = np.zeros(2, np.uint16)
    error = _refused(
        state, _swap_patch(update, "a", indices=np.array(indices), values=values, base_values=None), PatchError
    )
    assert error.parameter == "a"


def test_unknown_parameters_shapes_and_dtypes_are_refused_by_name() -> None:
    """A patch is for exactly one parameter of the table, or the whole update is refused."""
    state = _base()
    update = _next(state)
    good = _of(update, "a")
    for meta in (
        ParamMeta("stranger", "bfloat16", (4, 6)),
        ParamMeta("a", "bfloat16", (6, 4)),
        ParamMeta("a", "bfloat16", (24,)),
        ParamMeta("a", "float16", (4, 6)),
    ):
        lying = replace(good, meta=meta)
        error = _refused(state, replace(update, patches=(lying, *update.patches[1:])), TableError)
        assert error.parameter == meta.name


def test_a_patch_under_a_tied_name_is_refused() -> None:
    """Tied storage travels under its own name only."""
    state = WeightState({"embed": torch.zeros(4)}, aliases={"head": "embed"}, version=0)
    update = diff_state(state, listed({"embed": torch.tensor([0, 0, 0, 1.0])}), run_id="r")
    lying = replace(update.patches[0], meta=ParamMeta("head", "float32", (4,)))
    assert _refused(state, replace(update, patches=(lying,)), TableError).parameter == "head"


def test_another_base_is_refused() -> None:
    """Skipped versions, replays, other digests, other tables and unknown versions are told apart."""
    state = _base()
    update = _next(state)
    assert "base 6" in str(_refused(state, replace(update, base_version=6, target_version=7), BaseError))
    assert "base digest" in str(_refused(state, replace(update, base_digest=update.target_digest), BaseError))
    other = "xxh3_128:" + "0" * 32
    assert "table" in str(_refused(state, replace(update, table_digest=other), TableError))
    assert "table" in str(_refused(state, replace(update, removed=("a",)), TableError))
    reshaped = SparseWeightPatch(
        _of(update, "a").meta, None, np.zeros(24, np.uint16), 0, base_meta=ParamMeta("a", "bfloat16", (24,))
    )
    assert "table" in str(_refused(state, replace(update, patches=(reshaped,)), TableError))
    _refused(_base(version=None), update, BaseError)
    apply_update(state, update)
    assert "base 5" in str(_refused(state, update, BaseError)), "a replay"
    later = diff_state(state, listed(_next_tensors(state, 13)), run_id="r", target_version=9)
    apply_update(state, later)
    _refused(state, later, BaseError)


def test_promises_that_do_not_hold_are_refused() -> None:
    """A wrong fingerprint on either side, old_sum or target digest never gets as far as a write."""
    state = _base()
    update = _next(state)
    for name in ("a", "b", "c", "f"):
        patch = _of(update, name)
        assert patch.fingerprint_before is not None
        for fields in (
            {"fingerprint_after": patch.fingerprint_after ^ 1},
            {"fingerprint_after": patch.fingerprint_after ^ 1, "fingerprint_before": None},
            {"old_sum": (patch.old_sum or 0) ^ 1},
            {"fingerprint_before": patch.fingerprint_before + 1, "fingerprint_after": patch.fingerprint_after + 1},
            {"fingerprint_before": patch.fingerprint_before + 1},
        ):
            assert _refused(state, _swap_patch(update, name, **fields), VerificationError).parameter == name
    _refused(state, replace(update, target_digest=update.base_digest or ""), VerificationError)
    _refused(state, replace(update, patches=update.patches[1:]), VerificationError)
    _refused(state, replace(update, patches=()), VerificationError)


def test_a_dense_patch_says_what_it_replaces_or_nothing() -> None:
    """A whole parameter needs no base, but if it names the fingerprint before, that must be the one at hand."""
    state = _base()
    update = diff_state(state, listed({**_next_tensors(state), "d": state.memory("d").tensor ^ (1 << 40)}), run_id="r")
    patch = _of(update, "d")
    assert patch.is_dense
    assert patch.fingerprint_before is not None
    wrong = _swap_patch(update, "d", fingerprint_before=patch.fingerprint_before ^ 1)
    assert _refused(state, wrong, VerificationError).parameter == "d"
    apply_update(state, _swap_patch(update, "d", fingerprint_before=None))
    assert state.audit() == []


def test_changed_values_are_refused_in_either_form() -> None:
    """One wrong bit in a value or one position off does not give the promised digest."""
    state = _base()
    for form in (_next(state), update_as_delta(_next(state))):
        patch = _of(form, "b")
        assert patch.indices is not None
        wrong = patch.values.copy()
        wrong[0] ^= 1
        assert _refused(state, _swap_patch(form, "b", values=wrong), VerificationError).parameter == "b"
        moved = patch.indices.copy()
        moved[-1] += 1 if moved[-1] < 14 else 0
        moved[0] -= 1 if moved[0] > 0 else 0
        assert _refused(state, _swap_patch(form, "b", indices=moved), VerificationError).parameter == "b"


def test_a_seed_must_cover_everything_whole() -> None:
    """A parameter left out, or sent sparse, is named; so an unsent word can never be taken for a seeded one."""
    state = _base(version=None)
    source = _base()
    made = seed(source, run_id="r")
    short = replace(made, patches=tuple(patch for patch in made.patches if patch.name != "c"))
    assert _refused(state, short, InputError).parameter == "c"
    dense = _of(made, "a")
    sparse = replace(dense, indices=np.arange(24), fingerprint_after=dense.fingerprint_after)
    mixed = replace(made, patches=(sparse, *made.patches[1:]))
    assert _refused(state, mixed, InputError).parameter == "a"
    wrong = replace(made, patches=(replace(dense, fingerprint_after=1), *made.patches[1:]))
    assert _refused(state, wrong, VerificationError).parameter == "a"
    apply_update(state, made)
    assert state_bytes(state) == state_bytes(source)
    assert (state.version, state.digest) == (5, source.digest)


# --- parts -----------------------------------------------------------------------------------------------------------

_BOXES = (((0, 3), (0, 6)), ((3, 4), (0, 2)), ((3, 4), (2, 6)))


def _in_parts(state: WeightState, patch: SparseWeightPatch, boxes: tuple[Any, ...] = _BOXES) -> list[SparseWeightPatch]:
    """Cut a patch of `a` (4 x 6) into parts, each with the twin's fingerprints of its own box."""
    assert patch.indices is not None
    old = raw_bytes(state.memory("a").tensor)
    words = np.frombuffer(old, np.uint16).copy()
    words[patch.indices] = patch.values
    parts = []
    for number, box in enumerate(boxes):
        inside = [
            all(lo <= here < hi for here, (lo, hi) in zip(divmod(int(at), 6), box, strict=True)) for at in patch.indices
        ]
        picked, values = patch.indices[inside], patch.values[inside]
        before, after = (box_fingerprint(raw, 2, 1, (4, 6), box) for raw in (old, words.tobytes()))
        old_sum = sum(bytes_fingerprint(old[2 * at : 2 * at + 2], 2, int(at)) for at in picked) % 2**64
        parts.append(
            replace(
                patch, indices=picked, values=values, base_values=None, box=box, part=number,
                old_sum=old_sum, fingerprint_before=before, fingerprint_after=after,
            )
        )  # fmt: skip
    return parts


def _with_parts(update: WeightUpdate, parts: list[SparseWeightPatch]) -> WeightUpdate:
    return replace(update, patches=(*parts, *(patch for patch in update.patches if patch.name != "a")))


def test_disjoint_parts_are_applied_together() -> None:
    """Parts from several trainer ranks give what one patch of the whole gives, in any order."""
    for reverse in (False, True):
        state, expected = _base(), _base()
        update = _next(state)
        apply_update(expected, update)
        parts = _in_parts(state, _of(update, "a"))
        assert sum(part.num_changed for part in parts) == _of(update, "a").num_changed
        apply_update(state, _with_parts(update, parts[::-1] if reverse else parts))
        assert state_bytes(state) == state_bytes(expected)
        assert state.audit() == []


def test_parts_that_overlap_or_lie_outside_are_refused_by_name() -> None:
    """Overlapping boxes, a boxless part beside others, boxes outside the parameter or of other dims."""
    state = _base()
    update = _next(state)
    one, two, three = _in_parts(state, _of(update, "a"))
    for parts in (
        [one, two, replace(three, box=((3, 4), (1, 6)))],
        [one, replace(two, box=None)],
        [one, two, replace(three, box=((3, 5), (2, 6)))],
        [one, two, replace(three, box=((3, 4), (6, 2)))],
        [one, two, replace(three, box=((-1, 0), (2, 6)))],
        [one, two, replace(three, box=((18, 24),))],
        [replace(one, box=((0, 4),))],
    ):
        assert _refused(state, _with_parts(update, parts), PatchError).parameter == "a"


def test_a_position_outside_its_parts_box_is_refused() -> None:
    """Two parts that both write one word would make undo and the running sum wrong, whatever their boxes say."""
    state = _base()
    update = _next(state)
    parts = _in_parts(state, _of(update, "a"))
    stray = parts[0].indices
    assert stray is not None
    assert stray.size
    for moved in (replace(parts[0], part=7, box=((3, 4), (0, 6))), replace(parts[0], box=((0, 1), (0, 1)))):
        assert "box" in str(_refused(state, _with_parts(update, [moved]), PatchError))


def test_dense_parts_replace_whatever_was_there() -> None:
    """A seed in disjoint parts needs no base: it repairs damage, and each part's fingerprint is checked."""
    source = _base()
    raw = raw_bytes(source.memory("a").tensor)
    made = seed(source, run_id="r")
    grid = np.frombuffer(raw, np.uint16).reshape(4, 6)
    meta = source.table["a"]
    parts = [
        SparseWeightPatch(
            meta,
            None,
            np.ascontiguousarray(grid[lo:hi, left:right]).ravel(),
            box_fingerprint(raw, 2, 1, (4, 6), ((lo, hi), (left, right))),
            part=number,
            box=((lo, hi), (left, right)),
        )
        for number, ((lo, hi), (left, right)) in enumerate(_BOXES)
    ]
    for version in (None, 5):
        damaged = _base(version=version)
        _flip(damaged.memory("a").tensor, 3, 2)
        wrong = [replace(parts[0], fingerprint_after=parts[0].fingerprint_after ^ 1), *parts[1:]]
        assert _refused(damaged, _with_parts(made, wrong), VerificationError).parameter == "a"
        assert _refused(damaged, _with_parts(made, parts[:2]), InputError).parameter == "a"
        before = everything(damaged)
        transaction = Transaction.stage(damaged, _with_parts(made, parts))
        transaction.write()
        assert state_bytes(damaged) == state_bytes(source)
        assert damaged.audit() == []
        transaction.rollback()
        assert everything(damaged) == before
        apply_update(damaged, _with_parts(made, parts))
        assert (damaged.digest, damaged.audit()) == (source.digest, [])


# --- transactions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta_form", [False, True], ids=["absolute", "delta"])
def test_a_rollback_restores_everything(delta_form: bool) -> None:
    """Bits, digest, version and what was audited are as before, and the update can then be applied."""
    state = _base()
    update = update_as_delta(_next(state)) if delta_form else _next(state)
    before = everything(state)
    transaction = Transaction.stage(state, update)
    assert everything(state) == before
    assert transaction.target_digest == update.target_digest
    transaction.write()
    assert (state.version, state.digest) == (6, update.target_digest)
    assert state.audited_through == 5
    transaction.rollback()
    assert transaction.state is TransactionState.ROLLED_BACK
    assert everything(state) == before
    assert state.audit() == []
    apply_update(state, update)
    assert state.audit() == []


def test_a_staged_update_can_be_dropped() -> None:
    """Rolling back before the first write touches nothing."""
    state = _base()
    before = everything(state)
    Transaction.stage(state, _next(state)).rollback()
    assert everything(state) == before


def test_a_transaction_ends_once() -> None:
    """Write, commit and rollback out of turn are our own mistakes: assertions."""
    state = _base()
    transaction = Transaction.stage(state, _next(state))
    with pytest.raises(AssertionError):
        transaction.commit()
    transaction.write()
    with pytest.raises(AssertionError):
        transaction.write()
    transaction.commit()
    assert transaction.state is TransactionState.COMMITTED
    for again in (transaction.rollback, transaction.commit, transaction.write):
        with pytest.raises(AssertionError):
            again()
    assert (state.version, state.audit()) == (6, [])


def test_an_update_staged_before_the_state_moved_is_not_written() -> None:
    """What was checked against another version is refused, with nothing written, and can be dropped."""
    state = _base()
    late = Transaction.stage(state, _next(state, 13))
    apply_update(state, _next(state, 14))
    before = everything(state)
    with pytest.raises(BaseError, match="moved"):
        late.write()
    assert everything(state) == before


def test_undo_has_a_budget() -> None:
    """The overwritten words are counted exactly; one byte less is refused before anything is written."""
    state = _base()
    update = _next(state)
    needed = sum(patch.values.nbytes for patch in update.patches)
    error = _refused(state, update, InputError, undo_budget_bytes=needed - 1)
    assert error.found == f"{needed} bytes"
    transaction = Transaction.stage(state, update, undo_budget_bytes=needed)
    assert transaction.undo_bytes == needed
    made = seed(state, run_id="r")
    assert Transaction.stage(state, made, undo=False, undo_budget_bytes=0).undo_bytes == 0
    assert Transaction.stage(state, made, undo=True).undo_bytes == state.table.nbytes
    _refused(state, made, InputError, undo_budget_bytes=state.table.nbytes - 1)


def test_dense_parts_count_in_the_undo_budget_even_without_undo() -> None:
    """A part is read before it is overwritten, so its old words are kept and counted."""
    source = _base()
    made = seed(source, run_id="r")
    part = replace(_of(made, "a"), box=((0, 4), (0, 6)))
    in_parts = replace(made, patches=(part, *made.patches[1:]))
    assert Transaction.stage(source, in_parts, undo=False).undo_bytes == 48
    _refused(source, in_parts, InputError, undo=False, undo_budget_bytes=47)


def test_a_seed_without_undo_that_is_rolled_back_leaves_no_version() -> None:
    """The bits are whatever they are; the digest says so truthfully and no version is claimed."""
    state, source = _base(), _base()
    apply_update(source, _next(source))
    made = seed(source, run_id="r")
    transaction = Transaction.stage(state, made, undo=False)
    transaction.write()
    transaction.rollback()
    assert (state.version, state.audited_through, state.audit()) == (None, None, [])
    truth = [
        bytes_fingerprint(raw_bytes(memory.tensor), WORDS[state.table[memory.name].dtype][0])
        for memory in state.memories
    ]
    assert state.fingerprints.tolist() == truth
    apply_update(state, made)
    assert state_bytes(state) == state_bytes(source)


class _Failing(WordMemory):
    """Memory that fails at the n-th write, having written half of it."""

    def __init__(self, inner: WordMemory, fail_at: list[int], *, error: BaseException) -> None:
        super().__init__(inner.tensor, name=inner.name)
        self.countdown = fail_at  # shared by all memories of a state
        self.error = error

    def _tick(self) -> bool:
        self.countdown[0] -= 1
        return self.countdown[0] == 0

    def write(self, positions: np.ndarray[Any, np.dtype[np.int64]], words: Words) -> None:
        if self._tick():
            half = len(positions) // 2
            super().write(positions[:half], words[:half])
            raise self.error
        super().write(positions, words)

    def write_all(self, words: Words) -> None:
        if self._tick():
            half = np.arange(words.size // 2)
            super().write(half, words[half])
            raise self.error
        super().write_all(words)


@pytest.mark.parametrize("error", [RuntimeError("ECC"), MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_write_that_fails_half_way_is_rolled_back(kind: str, error: BaseException) -> None:
    """Whichever write fails and however, every bit, the version and the fingerprints are as before."""
    state = _base()
    update = _next(state) if kind == "sparse" else seed(_base(), run_id="r")
    if kind == "dense":
        state.memory("b").write_all(np.zeros(15, np.uint32))
        state.rescan()
    before = everything(state)
    countdown = [0]
    inner = state.memories
    state.memories = tuple(_Failing(memory, countdown, error=error) for memory in inner)
    for fail_at in range(1, len(update.patches) + 1):
        countdown[0] = fail_at
        transaction = Transaction.stage(state, update)
        with pytest.raises(type(error)):
            transaction.write()
        assert transaction.state is TransactionState.ROLLED_BACK
        assert everything(state) == before, fail_at
    countdown[0] = 0
    apply_update(state, update)
    assert (state.digest, state.audit()) == (update.target_digest, [])


def test_memory_that_can_no_longer_be_written_takes_the_version_away() -> None:
    """If even the rollback fails, half an update must not pass for a version."""
    state = _base()
    update = _next(state)

    class Dead(_Failing):
        def _tick(self) -> bool:
            self.countdown[0] -= 1
            return self.countdown[0] <= 0

    countdown = [2]
    state.memories = tuple(Dead(memory, countdown, error=RuntimeError("gone")) for memory in state.memories)
    with pytest.raises(RuntimeError, match="gone"):
        Transaction.stage(state, update).write()
    assert (state.version, state.audited_through) == (None, None)
    assert state.audit() != []


def test_memory_that_does_not_keep_what_is_written_is_found() -> None:
    """A stuck bit is a VerificationError by name, and everything else is rolled back."""
    state = _base()
    update = _next(state)

    class Stuck(WordMemory):
        def write(self, positions: np.ndarray[Any, np.dtype[np.int64]], words: Words) -> None:
            super().write(positions[:-1], words[:-1])

    before = everything(state)
    state.memories = tuple(Stuck(m.tensor, name=m.name) if m.name == "b" else m for m in state.memories)
    transaction = Transaction.stage(state, update)
    with pytest.raises(VerificationError, match="does not hold") as caught:
        transaction.write()
    assert caught.value.parameter == "b"
    assert everything(state) == before


def test_one_storage_at_two_addresses_is_found_by_reading_back() -> None:
    """Memory mapped twice looks like two tensors; what one write did to the other is found and rolled back."""
    with mmap.mmap(-1, 64) as pages:
        tensor = torch.frombuffer(pages, dtype=torch.float32)
        tensor.zero_()
        state = WeightState({"embed": tensor, "head": torch.zeros(16)}, version=0)
        update = diff_state(state, listed({"embed": _one_hot(3, 1.0), "head": _one_hot(3, 2.0)}), run_id="r")
        again = WordMemory(torch.frombuffer(pages, dtype=torch.float32), name="head")
        state.memories = (state.memories[0], again)
        before = everything(state)
        with pytest.raises(VerificationError, match="aliases") as caught:
            Transaction.stage(state, update).write()
        assert caught.value.parameter == "embed"
        assert everything(state) == before
        del again, tensor, state


def _one_hot(place: int, value: float) -> torch.Tensor:
    tensor = torch.zeros(16)
    tensor[place] = value
    return tensor


# --- damage ----------------------------------------------------------------------------------------------------------


def _flip(tensor: torch.Tensor, position: int, bit: int) -> None:
    """Flip one bit of the word at a flat position, as a fault of the memory would."""
    words = strided_words(tensor)
    place = np.unravel_index(position, tuple(words.shape))
    one = torch.tensor(1, dtype=words.dtype) << bit
    words[place] ^= one


@pytest.mark.parametrize("form", ["absolute", "delta"])
def test_a_flip_under_a_changed_position_is_never_committed(form: str) -> None:
    """1,000 seeded flips per form: named before the first write, nothing touched, repaired, then applied."""
    rng = np.random.default_rng(99)
    trainer, state = _base(), _base()
    update = _next(trainer)
    if form == "delta":
        update = update_as_delta(update)
    healthy = state_bytes(state)
    sparse = [patch for patch in update.patches if patch.indices is not None and patch.indices.size]
    for trial in range(1000):
        patch = sparse[int(rng.integers(len(sparse)))]
        assert patch.indices is not None
        position = int(patch.indices[int(rng.integers(patch.indices.size))])
        bit = int(rng.integers(8 * patch.values.itemsize))
        _flip(state.memory(patch.name).tensor, position, bit)
        error = _refused(state, update, CorruptionError)
        assert error.parameter == patch.name, trial
        apply_update(state, seed(trainer, run_id="r", names=[patch.name]))
        assert state_bytes(state) == healthy, trial
        transaction = Transaction.stage(state, update)
        transaction.write()
        assert state.digest == update.target_digest
        assert state.audit() == []
        transaction.rollback()
    apply_update(state, update)
    assert state.audit() == []


@pytest.mark.parametrize("form", ["absolute", "delta"])
def test_without_old_sum_the_parameter_is_audited_first(form: str) -> None:
    """The control: a patch that does not say what it overwrites costs a scan, and finds the flip just the same."""
    rng = np.random.default_rng(98)
    trainer, state = _base(), _base()
    update = update_as_delta(_next(trainer)) if form == "delta" else _next(trainer)
    update = replace(update, patches=tuple(replace(patch, old_sum=None) for patch in update.patches))
    for _ in range(50):
        patch = update.patches[int(rng.integers(len(update.patches)))]
        position = int(rng.integers(patch.meta.num_words))  # anywhere: the scan does not care
        _flip(state.memory(patch.name).tensor, position, int(rng.integers(8 * patch.values.itemsize)))
        assert _refused(state, update, CorruptionError).parameter == patch.name
        apply_update(state, seed(trainer, run_id="r", names=[patch.name]))
    apply_update(state, update)
    assert state.audit() == []


def test_without_any_check_the_flip_would_be_committed_as_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other control, and what old_sum is for: the delta form carries a flip along, and every sum still fits."""
    trainer, state = _base(), _base()
    update = update_as_delta(_next(trainer))
    apply_update(trainer, update)
    patch = _of(update, "b")
    assert patch.indices is not None
    _flip(state.memory("b").tensor, int(patch.indices[0]), 30)
    monkeypatch.setattr("deltacast.delta.apply._check_overwritten", lambda *_: None)
    apply_update(state, update)
    assert state.digest == update.target_digest
    assert state_bytes(state) != state_bytes(trainer)
    assert [item.parameter for item in state.audit()] == ["b"]


def test_a_flip_elsewhere_is_left_to_the_audit() -> None:
    """A flip at an unchanged position passes the round, and the next full or rolling audit names it."""
    trainer, state = _base(), _base()
    update = _next(trainer)
    patch = _of(update, "b")
    assert patch.indices is not None
    unchanged = int(np.setdiff1d(np.arange(15), patch.indices)[0])
    _flip(state.memory("b").tensor, unchanged, 3)
    apply_update(state, update)
    assert [item.parameter for item in state.audit()] == ["b"]
    assert [item.parameter for step in range(4) for item in state.audit_rolling(step, 4)] == ["b"]
    apply_update(trainer, update)
    apply_update(state, seed(trainer, run_id="r", names=["b"]))
    assert state_bytes(state) == state_bytes(trainer)
    assert state.audit() == []


def test_an_update_for_other_bits_of_an_intact_base_is_not_called_damage() -> None:
    """If the weights are what they should be, a wrong old_sum is the update's fault."""
    state = _base()
    update = _next(state)
    error = _refused(state, _swap_patch(update, "a", old_sum=1), VerificationError)
    assert not isinstance(error, CorruptionError)


# --- forgeries -------------------------------------------------------------------------------------------------------

_SHAPE = (3, 4)


def _boxes() -> st.SearchStrategy[Any]:
    pairs = [st.tuples(st.integers(-1, n + 1), st.integers(-1, n + 1)) for n in _SHAPE]
    whole_rows = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda rows: ((min(rows), max(rows)), (0, 4)))
    return st.none() | whole_rows | st.tuples(*pairs) | st.just(((0, 12),))


@st.composite
def _forged_patches(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Fields of a few patches of one 3 x 4 parameter: mostly wrong, or a row each and mostly right."""
    plausible = draw(st.booleans())
    made = []
    for part in range(draw(st.integers(1, 3))):
        box = ((part, part + 1), (0, 4)) if plausible else draw(_boxes())
        indices = None
        if draw(st.booleans()):
            lowest, highest = (4 * part, 4 * part + 3) if plausible and draw(st.integers(0, 9)) else (-1, 12)
            picked = draw(st.lists(st.integers(lowest, highest), max_size=6, unique=plausible))
            indices = np.array(sorted(picked) if plausible or draw(st.booleans()) else picked, np.int64)
        extents = _SHAPE if box is None else [hi - lo for lo, hi in box]
        size = max(int(np.prod(extents)), 0) if indices is None else indices.size
        values = draw(st.lists(st.integers(0, 2**16 - 1), min_size=size, max_size=size))
        made.append(
            {
                "indices": indices,
                "values": np.array(values, np.uint16),
                "fingerprint_after": draw(st.integers(0, 3)),
                "form": "absolute" if indices is None else draw(st.sampled_from(["absolute", "delta"])),
                "old_sum": draw(st.none() | st.just(0)),
                "fingerprint_before": draw(st.none() | st.integers(0, 3)),
                "part": part,
                "box": box,
            }
        )
    return made


@given(_forged_patches(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_whatever_is_committed_is_what_the_fingerprints_say(fields: list[dict[str, Any]], is_seed: bool) -> None:
    """A forger who corrects every sum that is refused never gets bits committed under a digest that is not theirs.

    Every refusal is one of our errors and leaves everything as it was.
    """
    state = WeightState({"w": random_tensor(np.random.default_rng(3), "bfloat16", _SHAPE)}, version=1)
    before = everything(state)
    target = state.digest
    for _ in range(3 * len(fields) + 2):
        try:
            patches = tuple(SparseWeightPatch(ParamMeta("w", "bfloat16", _SHAPE), **each) for each in fields)
            update = WeightUpdate(
                run_id="r", epoch=0, base_version=None if is_seed else 1, target_version=2,
                base_digest=None if is_seed else state.digest, target_digest=target,
                table_digest=state.table.digest, patches=patches,
            )  # fmt: skip
            apply_update(state, update)
        except VerificationError as err:
            assert everything(state) == before
            if err.parameter is None:
                target = str(err.found)
                continue
            _correct(fields, str(err.message), str(err.expected), str(err.found))
        except DeltacastError:
            assert everything(state) == before
            return
        else:
            event(f"committed {len(fields)} patches")
            truth = bytes_fingerprint(raw_bytes(state.memories[0].tensor), 2)
            assert state.fingerprints.tolist() == [truth]
            assert (state.digest, state.audit()) == (target, [])
            return


def _correct(fields: list[dict[str, Any]], message: str, expected: str, found: str) -> None:
    """Do as a forger would: put in whatever sum the error says was found."""
    for each in fields:
        if "promises" in message and each["fingerprint_after"] == int(expected, 16):
            each["fingerprint_after"] = int(found, 16)
            return
        if "other bits" in message and each["old_sum"] == int(expected, 16):
            each["old_sum"] = int(found, 16)
            return
        if "other bits" in message and each["fingerprint_before"] == int(found, 16):
            each["fingerprint_before"] = int(expected, 16)
            return


def test_patches_may_come_some_at_a_time() -> None:
    """One by one: the same words, version and digest as all together."""
    state, other = _base(), _base()
    update = _next(state)
    apply_portions(state, replace(update, patches=()), ([patch] for patch in update.patches))
    apply_update(other, update)
    assert (state.version, state.digest) == (other.version, other.digest) == (6, update.target_digest)
    assert [m.read_all().tobytes() for m in state.memories] == [m.read_all().tobytes() for m in other.memories]
    assert state.audit() == []


def test_patches_that_end_early_leave_no_version() -> None:
    """One is missing, or what yields them fails: the words are of no version, and the state says so."""
    for failing in (False, True):
        state = _base()
        update = _next(state)

        def come(patches: tuple[SparseWeightPatch, ...] = update.patches, *, fail: bool = failing) -> Any:
            yield from ([patch] for patch in patches[:-1])
            if fail:
                raise OSError("the disk failed")

        with pytest.raises(OSError if failing else VerificationError):
            apply_portions(state, replace(update, patches=()), come())
        assert state.version is None


def test_patches_for_another_base_or_of_a_seed_are_not_asked_for() -> None:
    """Nothing is written, and the state keeps its version."""
    state = _base()
    update = replace(_next(state), patches=())
    none: list[Any] = []
    with pytest.raises(BaseError):
        apply_portions(state, replace(update, base_version=4), none)
    with pytest.raises(InputError, match="seed"):
        apply_portions(state, replace(update, base_version=None, base_digest=None), none)
    assert state.version == 5
