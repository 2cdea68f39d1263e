"""The trainer's baseline. Right values: bytes that a test wrote, and digests by the plain-integer twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from deltacast.delta.apply import apply_update
from deltacast.delta.errors import BaseError, InputError, TableError
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from deltacast.store import Baseline
from fingerprint_twin import bytes_fingerprint, digests
from tensor_bytes import WORDS, copied, everything, listed, random_tensor, raw_bytes, state_bytes, tensor_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


class _Source:
    """A source over tensors that a test may change between passes."""

    not_covered: tuple[str, ...] = ()

    def __init__(self, tensors: dict[str, torch.Tensor], aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self.held = tensors
        self.aliases = aliases

    def metas(self) -> Sequence[ParamMeta]:
        return [meta for meta, _ in listed(self.held)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.held.items()


def _tensors() -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    return {f"p.{name}": random_tensor(rng, name, (3, 4)) for name in WORDS}


def test_the_copy_is_private() -> None:
    """The source may be overwritten, freed or turned: the baseline keeps the bits that it saw."""
    tensors = _tensors()
    kept = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    baseline = Baseline(_Source(tensors), run_id="r", version=4)
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_()
    assert state_bytes(baseline.state) == kept
    assert (baseline.version, baseline.state.audit()) == (4, [])
    rows = [
        (meta.name, meta.dtype, meta.shape, bytes_fingerprint(kept[meta.name], WORDS[meta.dtype][0]))
        for meta, _ in listed(tensors)
    ]
    assert baseline.digest == digests(rows)[1]


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        ("float32", "0100a07f010080ff0000008001000000"),
        ("bfloat16", "817f81ff00800100"),
        ("float16", "017d01fd00800100"),
        ("float64", "010000000000f07f010000000000f0ff00000000000000800100000000000000"),
        ("float8_e5m2", "7dfd8001"),
    ],
)
def test_signalling_nans_and_zeros_are_copied_as_bits(dtype: str, raw: str) -> None:
    """Signalling NaNs stay signalling, -0.0 and subnormals stay, contiguous or not."""
    whole = tensor_of(dtype, bytes.fromhex(raw), (4,))
    for tensor in (whole, whole[::2], whole.view(2, 2).t(), whole[:1].expand(3)):
        baseline = Baseline(_Source({"w": tensor}), run_id="r")
        assert state_bytes(baseline.state)["w"] == raw_bytes(tensor)


def test_lazy_conjugates_and_leaves_are_copied_resolved() -> None:
    """What is kept is what the tensor stands for, without a graph."""
    weight = torch.nn.Parameter(torch.ones(2))
    number = torch.tensor([1 + 2j, 3 - 4j]).conj()
    baseline = Baseline(_Source({"c": number, "w": weight}), run_id="r")
    assert baseline.state.memory("c").tensor.tolist() == [1 - 2j, 3 + 4j]
    assert not baseline.state.memory("w").tensor.requires_grad


def test_a_diff_moves_nothing_and_an_update_owns_its_memory() -> None:
    """The baseline stays at its version until it advances, by what was sent, not by what the source then is."""
    tensors = _tensors()
    source = _Source(tensors)
    baseline = Baseline(source, run_id="run", epoch=2, version=3)
    worker = WeightState(copied(tensors), version=3)
    before = everything(baseline.state)
    tensors["p.float32"].view(torch.int32)[1, 2] ^= 5
    tensors["p.complex64"].view(torch.float32)[0, 1] = -0.0
    sent = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    update = baseline.diff(source, optimizer_step=77)
    assert everything(baseline.state) == before
    assert (update.run_id, update.epoch, update.base_version, update.target_version) == ("run", 2, 3, 4)
    assert update.optimizer_step == 77
    for tensor in tensors.values():  # the optimizer's next step comes before the decision
        tensor.view(torch.uint8).fill_(1)
    staged = baseline.stage(update)
    assert everything(baseline.state) == before
    apply_update(worker, update)
    baseline.advance(staged)
    assert state_bytes(baseline.state) == state_bytes(worker) == sent
    assert baseline.digest == worker.digest == update.target_digest
    assert (baseline.version, baseline.state.audit()) == (4, [])


def test_an_abort_leaves_the_baseline_where_it_was() -> None:
    """What is not advanced is diffed again, from the same base, changes since included."""
    tensors = {"w": torch.zeros(4)}
    source = _Source(tensors)
    baseline = Baseline(source, run_id="r")
    tensors["w"][0] = 1.0
    baseline.stage(baseline.diff(source)).rollback()
    tensors["w"][1] = 2.0
    again = baseline.diff(source)
    assert (again.base_version, again.target_version) == (0, 1)
    assert again.patches[0].indices is not None
    assert again.patches[0].indices.tolist() == [0, 1]


def test_only_its_own_updates_advance_it() -> None:
    """An update of another base, or the same one twice, is refused and moves nothing."""
    tensors = {"w": torch.zeros(4)}
    source = _Source(tensors)
    baseline, other = Baseline(source, run_id="r"), Baseline(source, run_id="r", version=9)
    tensors["w"][0] = 1.0
    update = baseline.diff(source)
    with pytest.raises(BaseError):
        baseline.stage(other.diff(source))
    first, second = baseline.stage(update), baseline.stage(update)
    baseline.advance(first)
    with pytest.raises(BaseError):
        baseline.advance(second)
    with pytest.raises(BaseError):
        baseline.stage(update)
    assert (baseline.version, baseline.state.memory("w").tensor.tolist()) == (1, [1.0, 0, 0, 0])


def test_seeds_and_repairs_come_from_the_baseline() -> None:
    """A seed gives an empty worker the baseline's bits and version; a repair is for the names given, tied or not."""
    tensors = {"embed": torch.arange(4.0), "w": torch.ones(3)}
    baseline = Baseline(_Source(tensors, {"head": "embed"}), run_id="r", version=6)
    worker = WeightState({name: torch.empty_like(tensor) for name, tensor in tensors.items()})
    apply_update(worker, baseline.seed())
    assert (worker.version, worker.digest) == (6, baseline.digest)
    worker.memory("embed").tensor[2] = 9.0
    repair = baseline.seed(["head", "embed"])
    assert [patch.name for patch in repair.patches] == ["embed"]
    apply_update(worker, repair)
    assert worker.audit() == []
    with pytest.raises(TableError):
        baseline.seed(["nobody"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"placement": "disk"}, "disk"),
        ({"placement": "CPU"}, "CPU"),
        ({"placement": None}, "None"),
        ({"epoch": -1}, "epoch -1"),
        ({"version": -1}, "version -1"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    """An unknown placement, a negative epoch or version: named, and before the source is read."""

    class Unread(_Source):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise AssertionError("the source was read")

    with pytest.raises(InputError, match=said):
        Baseline(Unread({"w": torch.zeros(1)}), run_id="r", **fields)


def test_a_source_that_breaks_its_contract_is_refused_by_name() -> None:
    """Sparse and meta weights, and parameters that come and go, are named."""
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
        with pytest.raises(InputError) as caught:
            Baseline(_Source({"odd": tensor}), run_id="r")
        assert caught.value.parameter == "odd"
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    baseline = Baseline(_Source(tensors), run_id="r")
    for changed, parameter in (
        ({"a": tensors["a"]}, "b"),
        ({**tensors, "c": torch.zeros(1)}, "c"),
        ({**tensors, "b": torch.zeros(3)}, "b"),
        ({**tensors, "b": torch.zeros(2, dtype=torch.bfloat16)}, "b"),
    ):
        with pytest.raises(TableError) as refused:
            baseline.diff(_Source(changed))
        assert refused.value.parameter == parameter
    assert (baseline.version, baseline.state.audit()) == (0, [])
