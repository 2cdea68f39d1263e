"""The trainer's baseline. Right values: bytes that a test wrote, and digests by the plain-integer twin."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
from tensor_bytes import WORDS, copied, listed, random_tensor, raw_bytes, tensor_of


@pytest.fixture(
    params=[
        "cpu from cpu",
        "mmap from cpu",
        *(pytest.param(f"{place} from cpu", marks=pytest.mark.gpu) for place in ("pinned", "cuda", "cuda:0")),
        *(pytest.param(f"{place} from cuda", marks=pytest.mark.gpu) for place in ("cpu", "mmap", "pinned", "cuda")),
    ]
)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Where a source's weights are, and the options of a baseline for each placement."""
    placement, source = request.param.split(" from ")
    folder = {"folder": tmp_path} if placement == "mmap" else {}
    return source, {"placement": placement, "run_id": "run", **folder}


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


def _tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Every dtype in an odd size, 0-d and empty; not in the order of the names."""
    rng = np.random.default_rng(1)
    made = {f"p.{name}": random_tensor(rng, name, (3, 5)) for name in reversed(WORDS)}
    made |= {"scalar": random_tensor(rng, "bfloat16", ()), "empty": random_tensor(rng, "float32", (2, 0))}
    return {name: tensor.to(device) for name, tensor in made.items()}


def _bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()}


def _held(state: WeightState) -> dict[str, bytes]:
    return _bytes({memory.name: memory.tensor for memory in state.memories})


def _everything(baseline: Baseline) -> tuple[object, ...]:
    state = baseline.state
    return _held(state), state.version, state.digest, state.audited_versions.tolist()


def test_the_copy_is_private(setting: tuple[str, dict[str, Any]]) -> None:
    """The source may be overwritten, freed or turned: the baseline keeps the bits that it saw, wherever it is."""
    device, options = setting
    tensors = _tensors(device)
    kept = _bytes(tensors)
    baseline = Baseline(_Source(tensors), version=4, **options)
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8).zero_()
    assert _held(baseline.state) == kept
    assert (baseline.version, baseline.state.audit()) == (4, [])
    rows = [
        (meta.name, meta.dtype, meta.shape, bytes_fingerprint(kept[meta.name], WORDS[meta.dtype][0]))
        for meta, _ in listed(tensors)
    ]
    assert baseline.digest == digests(rows)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["pinned", "cpu", "cuda"])
def test_bits_that_are_still_being_made_are_waited_for(placement: str) -> None:
    """A copy into page-locked memory that nobody waited for once gave a baseline of other bits than its digest."""
    cuda: Any = torch.cuda  # untyped
    ones = torch.ones(1 << 26, dtype=torch.int16, device="cuda")
    weights = torch.zeros_like(ones).view(torch.bfloat16)
    cuda.synchronize()
    cuda._sleep(1_000_000_000)  # cycles
    weights.view(torch.int16).copy_(ones)
    baseline = Baseline(_Source({"w": weights}), run_id="r", placement=placement)
    digest = WeightState({"w": weights}).digest
    assert (baseline.digest, baseline.state.audit()) == (digest, [])


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
def test_signalling_nans_and_zeros_are_copied_as_bits(
    dtype: str, raw: str, setting: tuple[str, dict[str, Any]]
) -> None:
    """Signalling NaNs stay signalling, -0.0 and subnormals stay, contiguous or not."""
    device, options = setting
    whole = tensor_of(dtype, bytes.fromhex(raw), (4,))
    turns: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t, lambda t: t[::2], lambda t: t.view(2, 2).t(), lambda t: t[:1].expand(3)
    ]  # fmt: skip
    for turn in turns:
        baseline = Baseline(_Source({"w": turn(whole.to(device))}), **options)
        assert _held(baseline.state)["w"] == raw_bytes(turn(whole))


def test_lazy_conjugates_and_leaves_are_copied_resolved() -> None:
    """What is kept is what the tensor stands for, without a graph."""
    weight = torch.nn.Parameter(torch.ones(2))
    number = torch.tensor([1 + 2j, 3 - 4j]).conj()
    baseline = Baseline(_Source({"c": number, "w": weight}), run_id="r")
    assert baseline.state.memory("c").tensor.tolist() == [1 - 2j, 3 + 4j]
    assert not baseline.state.memory("w").tensor.requires_grad


def test_a_diff_moves_nothing_and_an_update_owns_its_memory(setting: tuple[str, dict[str, Any]]) -> None:
    """The baseline stays at its version until it advances, by what was sent, not by what the source then is."""
    device, options = setting
    tensors = _tensors(device)
    source = _Source(tensors)
    baseline = Baseline(source, epoch=2, version=3, **options)
    worker = WeightState(copied({name: tensor.cpu() for name, tensor in tensors.items()}), version=3)
    before = _everything(baseline)
    tensors["p.float32"].view(torch.int32)[1, 2] ^= 5
    tensors["p.complex64"].view(torch.float32)[0, 1] = -0.0
    tensors["scalar"].view(torch.int16).bitwise_xor_(1)
    sent = _bytes(tensors)
    update = baseline.diff(source, optimizer_step=77)
    assert {patch.name for patch in update.patches} == {"p.float32", "p.complex64", "scalar"}
    assert _everything(baseline) == before
    assert (update.run_id, update.epoch, update.base_version, update.target_version) == ("run", 2, 3, 4)
    assert update.optimizer_step == 77
    for tensor in tensors.values():  # the optimizer's next step comes before the decision
        tensor.view(-1).view(torch.uint8).fill_(1)
    staged = baseline.stage(update)
    assert _everything(baseline) == before
    apply_update(worker, update)
    baseline.advance(staged)
    assert _held(baseline.state) == _held(worker) == sent
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


def test_seeds_and_repairs_come_from_the_baseline(setting: tuple[str, dict[str, Any]]) -> None:
    """A seed gives an empty worker the baseline's bits and version; a repair is for the names given, tied or not."""
    device, options = setting
    tensors = {"embed": torch.arange(4.0, device=device), "w": torch.ones(3, device=device)}
    baseline = Baseline(_Source(tensors, {"head": "embed"}), version=6, **options)
    worker = WeightState({name: torch.empty(tensor.shape) for name, tensor in tensors.items()})
    apply_update(worker, baseline.seed())
    assert (worker.version, worker.digest) == (6, baseline.digest)
    worker.memory("embed").tensor[2] = 9.0
    repair = baseline.seed(["head", "embed"])
    assert [patch.name for patch in repair.patches] == ["embed"]
    apply_update(worker, repair)
    assert worker.audit() == []
    with pytest.raises(TableError):
        baseline.seed(["nobody"])


# --- words that came by other means -----------------------------------------------------------------------------------


def test_it_adopts_a_version_that_was_written_into_its_memory(setting: tuple[str, dict[str, Any]]) -> None:
    """Version and fingerprints move together; the bits are those that were written, and count as not audited yet."""
    device, options = setting
    tensors = {"w": torch.arange(70.0, device=device), "b": torch.ones(3, dtype=torch.bfloat16, device=device)}
    source = _Source(tensors)
    baseline = Baseline(source, version=3, **options)
    extent = baseline.memory.extents["w"]
    baseline.memory.buffers[4][extent.first_word + 69] ^= -(2**31)
    tensors["w"][69] = -69.0
    said = np.array([bytes_fingerprint(raw, width) for raw, width in zip(*_in_table_order(tensors), strict=True)])
    baseline.adopt(9, said.astype(np.uint64))
    assert (baseline.version, baseline.state.audited_through) == (9, 3)
    assert baseline.diff(source).patches == ()
    assert _held(baseline.state) == _bytes(tensors)
    assert baseline.state.audit() == []
    assert baseline.state.audited_through == 9


def _in_table_order(tensors: Mapping[str, torch.Tensor]) -> tuple[list[bytes], list[int]]:
    names = sorted(tensors)
    return [_bytes(tensors)[name] for name in names], [tensors[name].element_size() for name in names]


@pytest.mark.parametrize(
    ("version", "fingerprints"),
    [(3, np.zeros(1, np.uint64)), (2, np.zeros(1, np.uint64)), (4, np.zeros(2, np.uint64)), (4, np.zeros(1))],
)
def test_adopting_what_cannot_be_moves_nothing(version: int, fingerprints: Any) -> None:
    """A version that is not newer, or not one unsigned sum per parameter."""
    baseline = Baseline(_Source({"w": torch.ones(3)}), run_id="r", version=3)
    before = _everything(baseline)
    with pytest.raises(InputError):
        baseline.adopt(version, fingerprints)
    assert _everything(baseline) == before


# --- what cannot be a baseline -------------------------------------------------------------------------------------


def test_the_source_is_copied_one_parameter_at_a_time() -> None:
    """When a parameter is made, at most the one before it is still alive."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Lazy(_Source):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.held.items():
                alive.append(sum(ref() is not None for ref in made))
                copy = tensor.clone()
                made.append(weakref.ref(copy))
                yield name, copy
                del copy

    Baseline(Lazy(_tensors()), run_id="r")
    assert max(alive) <= 1
    assert all(ref() is None for ref in made)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"placement": "disk"}, "disk"),
        ({"placement": "CPU"}, "CPU"),
        ({"placement": None}, "None"),
        ({"placement": "mmap"}, "needs a folder"),
        ({"placement": "cpu", "folder": "/tmp"}, "only a baseline on disk"),
        ({"epoch": -1}, "epoch -1"),
        ({"version": -1}, "version -1"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    """An unknown placement, a folder too few or too many, a negative epoch or version: before the source is read."""

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
