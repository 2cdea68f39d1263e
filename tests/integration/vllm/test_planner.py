"""The plan of a real vLLM model, against a second model that is loaded from a changed checkpoint.

`plain` keeps weights in the layout that vLLM uses on GPUs; `repacked` is vLLM's CPU build as it is, and only there.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="runs in a venv of its own (make test-vllm)")

from torch import nn

from deltacast.delta.errors import PatchError, StateError, TableError
from deltacast.delta.fingerprint import fingerprint, shard_fingerprint
from deltacast.delta.table import ParamMeta
from deltacast.engines.vllm.planner import Plan, trace
from deltacast.engines.vllm.skeleton import runtime_tensors
from vllm_models import (
    ON_GPU,
    bits_of,
    change_one_rank,
    changed_bits,
    load_model,
    make_checkpoint,
    one_group,
    plain_layouts,
    planned,
    weights_of,
    with_weights,
    write_changes,
)
from vllm_offline import needs_gpus

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "gpt_oss": ("gpt_oss", {}),  # experts stacked and transposed in the checkpoint
}
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"

# vLLM and the libraries under it warn of much that is not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_group(tmp_path_factory.mktemp("group") / "store"):
        yield


class Loaded:
    """A model with the checkpoint that it was loaded from."""

    def __init__(self, folder: Path, kind: str, *, plain: bool) -> None:
        family, changes = KINDS[kind]
        self.folder, self.plain = make_checkpoint(folder / "base", family, 0, **changes), plain
        self.weights = weights_of(self.folder)
        self.model = self.load(self.folder)

    def load(self, folder: Path) -> nn.Module:
        with plain_layouts() if self.plain else nullcontext():
            return load_model(folder)

    @property
    def plan(self) -> Plan:
        return planned(self.model, self.weights)


@pytest.fixture
def plain(tmp_path: Path, request: pytest.FixtureRequest) -> Loaded:
    return Loaded(tmp_path, getattr(request, "param", "qwen3"), plain=True)


@pytest.fixture
def repacked(tmp_path: Path, request: pytest.FixtureRequest) -> Loaded:
    if ON_GPU:
        pytest.skip("vLLM repacks weights on CPUs only")
    return Loaded(tmp_path, getattr(request, "param", "qwen3"), plain=False)


@pytest.mark.parametrize("plain", KINDS, indirect=True)
def test_written_changes_give_the_model_of_the_changed_checkpoint(plain: Loaded, tmp_path: Path) -> None:
    """In the plain layout every parameter is direct, and writing what changed equals loading the changed checkpoint."""
    plan, after = plain.plan, changed_bits(plain.weights, seed=1)
    assert {p.reason for p in plan.placements.values()} == {""}
    write_changes(plan, plain.weights, after)
    fresh = plain.load(with_weights(tmp_path / "after", plain.folder, after))
    assert bits_of(plain.model) == bits_of(fresh)


@pytest.mark.parametrize("repacked", KINDS, indirect=True)
def test_repacked_weights_are_reloaded_and_the_others_written(repacked: Loaded, tmp_path: Path) -> None:
    """What vLLM repacks is told from what it keeps: norms and sinks are written, and equal loading; the rest is reload.

    Biases are kept as well, but a linear layer is loaded whole.
    """
    plan, after = repacked.plan, changed_bits(repacked.weights, seed=2)
    assert set(plan.names("direct")) == {n for n in repacked.weights if "norm" in n or "sinks" in n}
    assert set(plan.names("reload")) == repacked.weights.keys() - set(plan.names("direct"))
    write_changes(plan, repacked.weights, after)
    fresh = bits_of(repacked.load(with_weights(tmp_path / "after", repacked.folder, after)))
    held = bits_of(repacked.model)
    direct = {piece.runtime for name in plan.names("direct") for piece in plan.placement(name).pieces}
    assert {name: held[name] for name in direct} == {name: fresh[name] for name in direct}


@pytest.mark.parametrize("plain", ["qwen3 tied", "qwen3_moe", "gpt_oss"], indirect=True)
def test_whole_parameters_are_live_memory(plain: Loaded) -> None:
    """Seen whole, fused, stacked and transposed weights have the checkpoint's shape and bits, and writes reach them."""
    plan = plain.plan
    for name, tensor in plain.weights.items():
        whole = plan.whole(name)
        assert whole is not None
        assert torch.equal(whole.view(torch.int16).cpu(), tensor.view(torch.int16))
        whole.zero_()
    assert not any(plain.model.get_parameter(name).any() for name in plan.tensors if name.endswith("proj.weight"))


@pytest.mark.parametrize("repacked", ["qwen3", "qwen3 tied", "qwen2"], indirect=True)
def test_images_are_what_was_packed_away(repacked: Loaded) -> None:
    """Filled from the checkpoint, the image of a repacked tensor has the plain layout's bits; the padding is left."""
    plan = repacked.plan
    with plain_layouts():
        held = runtime_tensors(load_model(repacked.folder))
    for target in (f"{ATTENTION}.qkv_proj.weight", f"{MLP}.down_proj.weight", "model.embed_tokens.weight"):
        image = torch.zeros(plan.shapes[target], dtype=torch.bfloat16)
        names = [name for name, placement in plan.placements.items() if target in placement.targets]
        assert all(plan.fill(name, repacked.weights[name], image, target) for name in names)
        assert torch.equal(image.view(torch.int16), held[target].view(torch.int16))
        assert sum(plan.placement(name).targets[target] for name in names) == image.numel() - plan.uncovered.get(
            target, 0
        )


@pytest.mark.parametrize("repacked", ["qwen2", "qwen3 tied", "qwen3_moe"], indirect=True)
def test_tracing_leaves_the_model_as_it_was(repacked: Loaded) -> None:
    """After a trace the model has the same tensor objects, at the same addresses, with the same bits."""
    before, bits = runtime_tensors(repacked.model), bits_of(repacked.model)
    addresses = [tensor.data_ptr() for tensor in before.values()]
    assert repacked.plan.placements
    after = runtime_tensors(repacked.model)
    assert list(after) == list(before)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert [tensor.data_ptr() for tensor in after.values()] == addresses
    assert bits_of(repacked.model) == bits


def test_a_refused_trace_leaves_the_model_as_it_was(plain: Loaded) -> None:
    """A parameter that the model has no place for is refused by name, and the model is untouched."""
    before, bits = runtime_tensors(plain.model), bits_of(plain.model)
    with pytest.raises(StateError, match=r"refuses a parameter.*'model\.layers\.0\.unheard_of\.weight'"):
        trace(plain.model, [ParamMeta("model.layers.0.unheard_of.weight", "bfloat16", (2, 2))])
    assert all(tensor is before[name] for name, tensor in runtime_tensors(plain.model).items())
    assert bits_of(plain.model) == bits


def test_fused_members_are_row_ranges(plain: Loaded) -> None:
    """Query, key and value lie one after the other in one tensor, as do gate and up."""
    plan = plain.plan
    expected = {
        f"{ATTENTION}.q_proj.weight": ("qkv_proj", 0),
        f"{ATTENTION}.k_proj.weight": ("qkv_proj", 128 * 128),
        f"{ATTENTION}.v_proj.weight": ("qkv_proj", (128 + 64) * 128),
        f"{MLP}.gate_proj.weight": ("gate_up_proj", 0),
        f"{MLP}.up_proj.weight": ("gate_up_proj", 192 * 128),
    }
    for name, (module, offset) in expected.items():
        (found,) = plan.locate(name, np.array([0, 5, 1000]))
        assert found.runtime == f"{name.rsplit('.', 2)[0]}.{module}.weight"
        assert found.positions.tolist() == [offset, offset + 5, offset + 1000]


@pytest.mark.parametrize("plain", ["qwen3", "qwen3 tied"], indirect=True)
def test_padding_is_covered_by_nothing(plain: Loaded) -> None:
    """The 12 rows that pad a vocabulary of 500 to 512, once per memory, and attention scales are all that is left."""
    uncovered = dict(plain.plan.uncovered)
    assert uncovered.pop("model.embed_tokens.weight") == 12 * 128
    assert uncovered.pop("lm_head.weight", 0) == (12 * 128 if "lm_head.weight" in plain.weights else 0)
    assert all(name.endswith("_scale") and count == 1 for name, count in uncovered.items())


@pytest.mark.parametrize("plain", ["qwen3 tied"], indirect=True)
def test_a_tied_head_is_the_memory_of_the_embedding(plain: Loaded) -> None:
    """One storage has one placement, which names both modules that are made of it."""
    plan = plain.plan
    assert plan.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert plan.placement("model.embed_tokens.weight").modules == ("model.embed_tokens", "lm_head")


@pytest.mark.parametrize("plain", ["qwen3", "qwen3_moe"], indirect=True)
def test_views_give_the_checkpoint_s_fingerprints(plain: Loaded) -> None:
    """Summed over a parameter's views, what the model holds has the fingerprint of the checkpoint's tensor."""
    plan = plain.plan
    for name, tensor in plain.weights.items():
        views = plan.views(name)
        assert sum(shard_fingerprint(v.tensor, v.shape, v.box) for v in views) % 2**64 == fingerprint(tensor), name


def test_a_member_that_is_not_held_takes_its_module_with_it(plain: Loaded) -> None:
    """Where one bit of a key projection is not as loaded, nothing of its fused module is written directly."""
    plain.model.get_parameter(f"{ATTENTION}.qkv_proj.weight").data.view(torch.int16)[130, 7] ^= 1
    plan = plain.plan
    assert set(plan.names("reload")) == {f"{ATTENTION}.{member}_proj.weight" for member in "qkv"}
    assert "other bits than were loaded" in plan.placement(f"{ATTENTION}.k_proj.weight").reason
    assert "together with" in plan.placement(f"{ATTENTION}.q_proj.weight").reason
    with pytest.raises(StateError, match="strategy direct"):
        plan.locate(f"{ATTENTION}.q_proj.weight", np.array([0]))


@pytest.mark.parametrize("repacked", ["qwen3_moe"], indirect=True)
def test_what_is_reloaded_together_is_known(repacked: Loaded) -> None:
    """One query projection stands for q, k and v; one expert's, for all experts of its layer."""
    plan = repacked.plan
    modules, names = plan.reload_group([f"{ATTENTION}.q_proj.weight"])
    assert modules == (f"{ATTENTION}.qkv_proj",)
    assert set(names) == {f"{ATTENTION}.{member}_proj.weight" for member in "qkv"}
    _, names = plan.reload_group([f"{MLP}.experts.2.up_proj.weight"])
    assert set(names) == {name for name in repacked.weights if name.startswith(f"{MLP}.experts.")}


@pytest.mark.parametrize("repacked", ["qwen3_moe", "qwen3 tied"], indirect=True)
def test_packed_copies_are_seen(repacked: Loaded) -> None:
    """Experts that keep their shape but not their bits, and embeddings with a packed copy beside them, are found."""
    plan = repacked.plan
    assert "cpu_linear beside it" in plan.placement("model.embed_tokens.weight").reason
    for name in plan.placements:
        if ".experts." in name:
            assert "other bits than were loaded" in plan.placement(name).reason


def test_bad_questions_are_refused(plain: Loaded) -> None:
    """Unknown names, and positions that are out of order or out of range, are errors by name."""
    plan = plain.plan
    with pytest.raises(TableError, match="nobody"):
        plan.locate("nobody", np.array([0]))
    for positions in ([1, 1], [-1, 0], [0, 128]):
        with pytest.raises(PatchError, match=r"model\.norm\.weight"):
            plan.locate("model.norm.weight", np.array(positions))
    with pytest.raises(TableError, match=r"missing.*model\.norm\.weight"):
        plan.proven((name, tensor) for name, tensor in plain.weights.items() if name != "model.norm.weight")


class Odd(nn.Module):
    """A model whose loader puts two parameters into one memory, lets two overlap, and drops one."""

    def __init__(self) -> None:
        super().__init__()
        self.tied, self.crowded = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            target = {"a": self.tied.weight, "b": self.tied.weight, "bias": self.tied.bias,
                      "upper": self.crowded.weight[:3], "lower": self.crowded.weight[1:]}.get(name)  # fmt: skip
            if target is not None:
                target.data.copy_(weight)


def test_shared_and_dropped_parameters_are_told_apart() -> None:
    """Names of one memory are aliases; parameters that overlap are not written directly; a dropped one is absent."""
    shapes = {"a": (4, 4), "b": (4, 4), "bias": (4,), "upper": (3, 4), "lower": (3, 4), "dropped": (2,)}
    plan = trace(Odd(), [ParamMeta(name, "float32", shape) for name, shape in shapes.items()])
    assert plan.aliases == {"b": "a"}
    assert plan.names("direct") == ("a", "b", "bias")
    assert plan.names("reload") == ("upper", "lower")
    assert "loaded over it in crowded.weight" in plan.placement("upper").reason
    assert plan.names("absent") == ("dropped",)


class Absorbing(nn.Module):
    """A layer that keeps a product of an inner layer's weight, made after loading, as MLA does on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def process_weights_after_loading(self) -> None:
        self.register_buffer("absorbed", self.inner.weight.detach().t().clone())


class Fed(nn.Module):
    """A model of one such layer and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.plain = Absorbing(), nn.Linear(4, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


def test_state_made_after_loading_is_seen() -> None:
    """A copy that was registered after loading keeps what it may be made from off the direct strategy."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = Fed()
    record_metadata_for_reloading(model)
    metas = [ParamMeta(name, "float32", (4, 4)) for name in ("layer.inner.weight", "plain.weight")]
    assert trace(model, metas).names("reload") == ()
    model.layer.process_weights_after_loading()
    plan = trace(model, metas)
    assert plan.names("direct") == ("plain.weight",)
    assert plan.placement("layer.inner.weight").modules == ("layer.inner", "layer")
    assert "layer.absorbed beside it" in plan.placement("layer.inner.weight").reason


@pytest.mark.parametrize("kind", ["deepseek_v2", "mamba2"])
def test_transformed_weights_are_reloaded(kind: str, tmp_path: Path) -> None:
    """What a loader transforms (Mamba's decay) or vLLM absorbs elsewhere (MLA's projection) is found, and no other."""
    folder = make_checkpoint(tmp_path / "base", kind, 5)
    weights = weights_of(folder)
    with plain_layouts():
        plan = planned(load_model(folder), weights)
    found = {name.rpartition("layers.0.")[2] for name in plan.names("reload") if ".layers.0." in name}
    if kind == "deepseek_v2":
        assert found == {"self_attn.kv_b_proj.weight"}
        assert any(
            "mla_attn" in module for module in plan.placement("model.layers.0.self_attn.kv_b_proj.weight").modules
        )
    else:
        assert found == {f"mixer.{each}" for each in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias")}
        assert "casts it" in plan.placement("backbone.layers.0.mixer.A_log").reason


@needs_gpus(2)
@pytest.mark.parametrize(("kind", "kv_heads"), [("qwen3", 2), ("qwen3", 1), ("qwen3_moe", 2)])
def test_each_of_two_ranks_has_its_part(kind: str, kv_heads: int, tmp_path: Path) -> None:
    """Ranks write only their shards, equal to loading; parts of fingerprints add up, and a replicated head is whole."""
    before = make_checkpoint(tmp_path / "before", kind, 3, num_key_value_heads=kv_heads)
    weights = weights_of(before)
    changed = changed_bits(weights, seed=4)
    after = with_weights(tmp_path / "after", before, changed)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(change_one_rank, rank, 2, tmp_path / "store", before, after) for rank in (0, 1)]
        one, two = (future.result(timeout=240) for future in futures)
    assert one.differing == two.differing == []
    assert set(one.strategies.values()) == set(two.strategies.values()) == {"direct"}
    for name, tensor in changed.items():
        whole = fingerprint(tensor)
        if one.boxes[name] == two.boxes[name]:
            assert one.sums[name] == two.sums[name] == whole, name
        else:
            assert (one.sums[name] + two.sums[name]) % 2**64 == whole, name
    replicated = {name for name in weights if one.boxes[name] == two.boxes[name]}
    assert any("k_proj" in name for name in replicated) is (kv_heads == 1)
    assert not any(
        part in name for name in replicated for part in ("q_proj", "o_proj", "down_proj", "embed", "lm_head")
    )
