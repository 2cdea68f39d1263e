"""Faults that other systems shipped, one test each. Every right value is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltacast.delta.apply import Transaction, apply_update
from deltacast.delta.bits import Words
from deltacast.delta.diff import diff_state, seed
from deltacast.delta.errors import BaseError, CorruptionError, InputError, PatchError, TableError, VerificationError
from deltacast.delta.fingerprint import shard_fingerprint
from deltacast.delta.memory import WordMemory
from deltacast.delta.module_source import ModuleSource
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.sources import checked
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from deltacast.store.baseline import Baseline
from tensor_bytes import listed, raw_bytes, state_bytes, tensor_of


def _f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _state(version: int = 0, **tensors: torch.Tensor) -> WeightState:
    return WeightState(tensors, version=version)


def _diff(state: WeightState, **tensors: torch.Tensor) -> WeightUpdate:
    return diff_state(state, listed(tensors), run_id="r")


def _sent(update: WeightUpdate) -> dict[str, list[tuple[int, int]]]:
    """(position, new word) of every change, by name; dense patches count every position."""
    return {
        patch.name: list(
            zip(
                range(patch.values.size) if patch.indices is None else patch.indices.tolist(),
                patch.values.tolist(),
                strict=True,
            )
        )
        for patch in update.patches
    }


# --- diff ------------------------------------------------------------------------------------------------------------


def test_plus_zero_to_minus_zero() -> None:
    """Fault: `+0.0 -> -0.0` missed, because the two are equal as floats."""
    assert _sent(_diff(_state(w=_f32(0.0, 1.0)), w=_f32(-0.0, 1.0))) == {"w": [(0, 0x80000000)]}


def test_identical_nan() -> None:
    """Fault: an identical NaN counted as changed at every step, because NaN != NaN."""
    nan = tensor_of("float32", bytes.fromhex("0100c07f0000803f"), (2,))
    assert _sent(_diff(_state(w=nan.clone()), w=nan)) == {}


def test_new_nan() -> None:
    """Fault: a new NaN dropped, because the sentinel for "unchanged" was NaN."""
    state = _state(w=_f32(1.0, 2.0, 3.0))
    update = _diff(state, w=tensor_of("float32", bytes.fromhex("0000803f3412c07f00004040"), (3,)))
    assert _sent(update) == {"w": [(1, 0x7FC01234)]}
    apply_update(state, update)
    assert raw_bytes(state.memory("w").tensor).hex() == "0000803f3412c07f00004040"


def test_fp32_beside_bf16() -> None:
    """Fault: a float32 router beside bf16 weights was cast down, so its small changes never arrived."""
    state = _state(router=_f32(1.0), w=torch.ones(1, dtype=torch.bfloat16))
    update = _diff(state, router=_f32(1.0000001), w=torch.ones(1, dtype=torch.bfloat16))
    assert _sent(update) == {"router": [(0, 0x3F800001)]}
    assert update.patches[0].meta.dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "old", "new", "word"),
    [("float8_e4m3fn", "38", "39", 0x39), ("int8", "ff", "fe", 0xFE), ("float64", "00" * 8, "01" + "00" * 7, 1)],
)
def test_other_dtypes_stay_what_they_are(dtype: str, old: str, new: str, word: int) -> None:
    """Fault: fp8, int8 and fp64 came back as float32."""
    state = _state(w=tensor_of(dtype, bytes.fromhex(old), (1,)))
    update = _diff(state, w=tensor_of(dtype, bytes.fromhex(new), (1,)))
    assert _sent(update) == {"w": [(0, word)]}
    apply_update(state, update)
    assert str(state.memory("w").tensor.dtype) == f"torch.{dtype}"
    assert raw_bytes(state.memory("w").tensor).hex() == new


def test_zero_dimensional_parameter() -> None:
    """Fault: a 0-d parameter (a logit scale) raised."""
    state = _state(scale=torch.tensor(1.0))
    apply_update(state, _diff(state, scale=torch.tensor(2.0)))
    assert state.memory("scale").tensor.item() == 2.0


def test_strided_source() -> None:
    """Fault: `[0, 1, 2, 3][::2]` arrived as `[0, 1]`, the memory's order instead of the tensor's."""
    state = _state(w=torch.zeros(2))
    apply_update(state, _diff(state, w=_f32(0.0, 1.0, 2.0, 3.0)[::2]))
    assert state.memory("w").tensor.tolist() == [0.0, 2.0]


def test_transposed_destination() -> None:
    """Fault: a non-contiguous parameter raised, or was written to a copy."""
    weight = torch.zeros(2, 3)
    state = _state(w=weight.t())
    apply_update(state, _diff(state, w=torch.tensor([[0.0, 0.0], [0.0, 5.0], [0.0, 0.0]])))
    assert weight.tolist() == [[0, 0, 0], [0, 5, 0]]


def test_two_dimensional_change() -> None:
    """Fault: an index error for 2-D parameters; positions are flat and row-major."""
    new = torch.zeros(3, 4)
    new[2, 1] = 1.0
    assert _sent(_diff(_state(w=torch.zeros(3, 4)), w=new)) == {"w": [(9, 0x3F800000)]}


def test_sign_flip() -> None:
    """Fault: a detector that looks at low bytes is blind to a flipped sign."""
    old = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    new = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert _sent(_diff(_state(w=old), w=new)) == {"w": [(1, 0xC000)]}


# --- patch -----------------------------------------------------------------------------------------------------------


def _forged(state: WeightState, indices: list[int], values: list[int]) -> WeightUpdate:
    """An update of `w` that a faulty sender could have made."""
    honest = _diff(state, w=_f32(9.0, 1.0, 2.0))
    patch = SparseWeightPatch(honest.patches[0].meta, np.array(indices), np.array(values, np.uint32), 0)
    return replace(honest, patches=(patch,))


@pytest.mark.parametrize(
    ("indices", "fault"),
    [
        ([-1], "index -1 wrote the last element"),
        ([1, 1], "duplicates were accepted"),
        ([3], "an index out of range killed the worker"),
        ([2, 0], "indices out of order were accepted"),
    ],
)
def test_positions_that_others_wrote(indices: list[int], fault: str) -> None:
    """Faults: index -1 wrote the last element, duplicates were accepted, out-of-range killed the worker."""
    state = _state(w=_f32(0.0, 1.0, 2.0))
    with pytest.raises(PatchError) as caught:
        apply_update(state, _forged(state, indices, [7] * len(indices)))
    assert caught.value.parameter == "w", fault
    assert state.memory("w").tensor.tolist() == [0.0, 1.0, 2.0]


def test_int32_positions() -> None:
    """Fault: int32 positions wrapped beyond 2^31 elements; they are refused at once, and int64 is not."""
    meta = ParamMeta("w", "uint8", (2**32,))
    far = SparseWeightPatch(meta, np.array([2**31, 2**32 - 1]), np.zeros(2, np.uint8), 0)
    far.check_indices()
    narrow: Any = np.array([0, 1], np.int32)
    with pytest.raises(PatchError, match="int64"):
        SparseWeightPatch(meta, narrow, np.zeros(2, np.uint8), 0)
    assert meta.nbytes == 4 * 2**30


def test_one_flipped_bit_on_the_way() -> None:
    """Fault: 107 of 130 flipped bits decoded without complaint; here every bit of the values is covered."""
    state = _state(w=_f32(0.0, 1.0, 2.0))
    update = _diff(state, w=_f32(9.0, 1.0, 2.0))
    for bit in range(32):
        wrong = update.patches[0].values ^ np.uint32(1 << bit)
        with pytest.raises(VerificationError):
            apply_update(state, replace(update, patches=(replace(update.patches[0], values=wrong),)))
    assert (state.version, state.memory("w").tensor.tolist()) == (0, [0.0, 1.0, 2.0])


# --- digest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "tensors"),
    [
        ("reshape", {"a": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "b": _f32(5, 6, 7, 8)}),
        ("rename", {"a": _f32(1, 2, 3, 4), "c": _f32(5, 6, 7, 8)}),
        ("swap of contents", {"a": _f32(5, 6, 7, 8), "b": _f32(1, 2, 3, 4)}),
        ("reorder inside", {"a": _f32(2, 1, 3, 4), "b": _f32(5, 6, 7, 8)}),
        ("dtype", {"a": _f32(1, 2, 3, 4).view(torch.int32), "b": _f32(5, 6, 7, 8)}),
    ],
)
def test_digests_that_stayed_the_same(fault: str, tensors: dict[str, torch.Tensor]) -> None:
    """Fault: a digest unchanged by reshape, rename, swap or reorder."""
    assert _state(a=_f32(1, 2, 3, 4), b=_f32(5, 6, 7, 8)).digest != WeightState(tensors, version=0).digest, fault


class _Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("correction", torch.zeros(2))


def test_buffers_are_in_the_digest() -> None:
    """Fault: persistent buffers were not covered by the digest, nor sent."""
    module = _Norm()
    state = WeightState({meta.name: t.clone() for meta, t in checked(ModuleSource(module))}, version=0)
    module.get_buffer("correction")[1] = 1.0
    update = diff_state(state, checked(ModuleSource(module)), run_id="r")
    assert _sent(update) == {"correction": [(1, 0x3F800000)]}
    assert update.target_digest != update.base_digest


# --- state -----------------------------------------------------------------------------------------------------------


class _Source:
    """One float32 parameter whose values a test sets."""

    aliases: Mapping[str, str] = MappingProxyType({})
    not_covered: tuple[str, ...] = ()

    def __init__(self, *values: float) -> None:
        self.weight = _f32(*values)

    def metas(self) -> list[ParamMeta]:
        return [ParamMeta("w", "float32", tuple(self.weight.shape))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self.weight


def test_the_senders_baseline_waits_for_the_commit() -> None:
    """Fault: the sender's baseline was ahead of an apply that failed, so the next delta was against the wrong base."""
    source = _Source(1.0, 2.0, 3.0)
    baseline, worker = Baseline(source, run_id="r"), _state(w=_f32(1.0, 2.0, 3.0))
    source.weight[1] = 5.0
    lost = baseline.diff(source)
    baseline.stage(lost).rollback()  # the round ended in ABORT
    source.weight[2] = 6.0
    update = baseline.diff(source)
    assert (baseline.version, update.base_version) == (0, 0)
    apply_update(worker, update)
    assert worker.memory("w").tensor.tolist() == [1.0, 5.0, 6.0]


def test_a_half_applied_update_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an update that failed in its second parameter stayed half applied under the old version."""
    state = _state(a=_f32(1.0, 2.0, 3.0), b=_f32(4.0, 5.0, 6.0))
    update = _diff(state, a=_f32(7.0, 2.0, 3.0), b=_f32(8.0, 5.0, 6.0))
    transaction = Transaction.stage(state, update)
    honest, seen = WordMemory.write, []

    def failing_once(memory: WordMemory, positions: NDArray[np.int64], words: Words) -> None:
        seen.append(memory.name)
        if seen == ["a", "b"]:
            raise RuntimeError("second parameter")
        honest(memory, positions, words)

    monkeypatch.setattr(WordMemory, "write", failing_once)
    with pytest.raises(RuntimeError, match="second parameter"):
        transaction.write()
    assert [memory.tensor.tolist() for memory in state.memories] == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert (state.version, state.audit()) == (0, [])


def test_a_retry_is_not_applied_twice() -> None:
    """Fault: a retried XOR delta undid itself; a replay is refused, and the weights stay at the target."""
    state = _state(w=_f32(1.0, 2.0, 3.0))
    update = _diff(state, w=_f32(1.0, 2.0, 4.0))
    apply_update(state, update)
    with pytest.raises(BaseError, match="wrong base version"):
        apply_update(state, update)
    assert state.memory("w").tensor.tolist() == [1.0, 2.0, 4.0]


def test_a_missed_version_is_not_skipped() -> None:
    """Fault: a worker that missed a version replayed the next one on the wrong base."""
    trainer, worker = _state(w=_f32(1.0, 2.0, 3.0)), _state(w=_f32(1.0, 2.0, 3.0))
    apply_update(trainer, _diff(trainer, w=_f32(1.0, 5.0, 3.0)))
    second = _diff(trainer, w=_f32(1.0, 5.0, 6.0))
    with pytest.raises(BaseError, match="expected base 0, found base 1"):
        apply_update(worker, second)
    assert worker.memory("w").tensor.tolist() == [1.0, 2.0, 3.0]


def test_a_chain_is_not_replayed_on_other_weights_of_the_same_number() -> None:
    """Fault: a pruned chain was replayed on v0: the right number, but not the right bits."""
    trainer, worker = _state(4, w=_f32(1.0, 2.0, 3.0)), _state(4, w=_f32(1.0, 2.0, 3.5))
    with pytest.raises(BaseError, match="digest"):
        apply_update(worker, _diff(trainer, w=_f32(1.0, 2.0, 4.0)))
    assert worker.memory("w").tensor.tolist() == [1.0, 2.0, 3.5]


def test_a_seed_holds_parameters_that_did_not_change() -> None:
    """Fault: an anchor left out the parameters that had not changed since the last one."""
    trainer = _state(a=_f32(1.0), b=_f32(2.0))
    apply_update(trainer, _diff(trainer, a=_f32(3.0), b=_f32(2.0)))
    worker = WeightState({"a": torch.zeros(1), "b": torch.zeros(1)})
    apply_update(worker, seed(trainer, run_id="r"))
    assert [memory.tensor.item() for memory in worker.memories] == [3.0, 2.0]


def test_an_empty_step_is_a_step() -> None:
    """Fault: a step in which nothing changed was taken for a failure."""
    state = _state(w=_f32(1.0))
    apply_update(state, _diff(state, w=_f32(1.0)))
    assert (state.version, state.memory("w").tensor.tolist()) == (1, [1.0])


def test_a_version_is_not_used_twice() -> None:
    """Fault: the version restarted on resume, and one number stood for two sets of weights."""
    state = _state(7, w=_f32(1.0, 2.0))
    for version in (7, 0):
        with pytest.raises(InputError, match="version"):
            diff_state(state, listed({"w": _f32(1.0, 3.0)}), run_id="r", target_version=version)


def test_memory_that_was_never_seeded_has_no_version() -> None:
    """Fault: HTTP 200 with uninitialised memory; a worker's bits are of no version until a whole seed arrived."""
    trainer, worker = _state(3, w=_f32(1.0, 2.0, 3.0)), WeightState({"w": torch.empty(3)})
    with pytest.raises(BaseError):
        apply_update(worker, _diff(trainer, w=_f32(1.0, 2.0, 4.0)))
    assert (worker.version, worker.audited_through) == (None, None)
    apply_update(worker, seed(trainer, run_id="r"))
    assert (worker.version, worker.memory("w").tensor.tolist()) == (3, [1.0, 2.0, 3.0])


def test_damage_under_a_delta_is_found() -> None:
    """Fault: a delta applied to damaged memory gave damaged weights that passed for verified."""
    trainer, worker = _state(w=_f32(1.0, 2.0, 3.0)), _state(w=_f32(1.0, 2.0, 3.0))
    worker.memory("w").tensor[1] = 2.5
    with pytest.raises(CorruptionError) as caught:
        apply_update(worker, _diff(trainer, w=_f32(1.0, 4.0, 3.0)))
    assert caught.value.parameter == "w"
    assert worker.memory("w").tensor.tolist() == [1.0, 2.5, 3.0]


# --- names and shards ------------------------------------------------------------------------------------------------


def test_tied_head_is_not_stale() -> None:
    """Fault: a tied lm_head stayed stale, or was a KeyError: both names are one storage."""
    embed = torch.nn.Embedding(3, 2, _weight=torch.zeros(3, 2))
    head = torch.nn.Linear(2, 3, bias=False)
    head.weight = embed.weight
    state = WeightState({"embed.weight": embed.weight}, aliases={"head.weight": "embed.weight"}, version=0)
    new = torch.zeros(3, 2)
    new[1, 1] = 1.0
    apply_update(state, _diff(state, **{"embed.weight": new}))
    assert head.weight.tolist() == [[0, 0], [0, 1], [0, 0]]
    assert state.memory("head.weight") is state.memory("embed.weight")


def test_undeclared_tie_is_not_two_parameters() -> None:
    """Fault: a tied storage that was taken for two parameters was written twice, or out of step."""
    weight = torch.zeros(4)
    with pytest.raises(InputError, match="share memory"):
        _state(embed=weight, head=weight)


def test_uneven_shards() -> None:
    """Fault: 5 rows over 2 ranks (3 + 2) failed or were padded."""
    full = torch.arange(10, dtype=torch.uint8).view(5, 2)
    parts = [
        shard_fingerprint(full[:3], (5, 2), ((0, 3), (0, 2))),
        shard_fingerprint(full[3:], (5, 2), ((3, 5), (0, 2))),
    ]
    assert sum(parts) % 2**64 == _state(w=full).fingerprints.tolist()[0]
    padded = torch.cat([full, torch.zeros(1, 2, dtype=torch.uint8)])
    with pytest.raises(InputError, match="box"):
        shard_fingerprint(padded[3:], (5, 2), ((3, 6), (0, 2)))


def test_expert_axis() -> None:
    """Fault: experts were split along the wrong axis; the sums of such shards are not those of the full tensor."""
    full = torch.arange(16, dtype=torch.uint8).view(4, 2, 2)
    right = [shard_fingerprint(full[e : e + 2], (4, 2, 2), ((e, e + 2), (0, 2), (0, 2))) for e in (0, 2)]
    wrong = [
        shard_fingerprint(full[:, :, c].reshape(2, 2, 2), (4, 2, 2), ((2 * c, 2 * c + 2), (0, 2), (0, 2)))
        for c in (0, 1)
    ]
    whole = _state(w=full).fingerprints.tolist()[0]
    assert sum(right) % 2**64 == whole
    assert sum(wrong) % 2**64 != whole


def test_padded_vocabulary() -> None:
    """Fault: a padded vocabulary went unnoticed; another shape is refused by name, never cut or filled."""
    with pytest.raises(TableError) as caught:
        _diff(_state(embed=torch.zeros(5, 2)), embed=torch.zeros(8, 2))
    assert caught.value.parameter == "embed"
    assert (caught.value.expected, caught.value.found) == ("torch.float32[5, 2]", "torch.float32[8, 2]")


def test_absent_parameter() -> None:
    """Fault: a parameter that the sender no longer had was dropped with a warning."""
    with pytest.raises(TableError, match="lack") as caught:
        _diff(_state(a=_f32(1.0), b=_f32(2.0)), a=_f32(1.0))
    assert caught.value.parameter == "b"


# --- model state -----------------------------------------------------------------------------------------------------


def test_captured_pointers_stay_valid() -> None:
    """Fault: CUDA-graph pointers went stale after a reload; every write is in place."""
    weight, turned = torch.zeros(4), torch.zeros(2, 3).t()
    addresses = [weight.data_ptr(), turned.data_ptr()]
    state = _state(t=turned, w=weight)
    apply_update(state, _diff(state, t=torch.ones(3, 2), w=_f32(0, 0, 0, 1)))
    apply_update(state, seed(state, run_id="r"))
    assert [weight.data_ptr(), turned.data_ptr()] == addresses
    assert (weight.tolist(), turned.tolist()) == ([0, 0, 0, 1], [[1, 1]] * 3)


def test_out_of_memory_during_the_update() -> None:
    """Fault: running out of memory half way left half an update; the undo budget is checked before the first write."""
    state = _state(w=_f32(1.0, 2.0, 3.0))
    with pytest.raises(InputError, match="at most 3 bytes, found 4 bytes"):
        Transaction.stage(state, _diff(state, w=_f32(1.0, 2.0, 4.0)), undo_budget_bytes=3)
    assert state_bytes(state)["w"].hex() == "0000803f0000004000004040"
