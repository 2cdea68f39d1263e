"""Tiny random checkpoints, and vLLM models that are loaded from them without a server. Needs vLLM."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from deltacast.delta.bits import numpy_words
from deltacast.delta.dtypes import dtype_of
from deltacast.delta.fingerprint import shard_fingerprint
from deltacast.delta.memory import WordMemory
from deltacast.delta.table import ParamMeta
from deltacast.engines.vllm.planner import Plan, trace
from deltacast.engines.vllm.skeleton import runtime_tensors

ON_GPU: Final = torch.cuda.is_available()
"""Whether vLLM runs on GPUs here. There it repacks nothing: every layout is the plain one."""

_TINY: Final = {
    "vocab_size": 500,  # no multiple of 64, so that vLLM pads
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_EXPERTS: Final = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "mixtral": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "deepseek_v2": {
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "vocab_size": 512},
}


def make_checkpoint(folder: Path, kind: str, seed: int, **changes: Any) -> Path:
    """Write a random checkpoint in bf16: any bits but those of infinities and NaN, as long as they are small."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**_TINY, **_KINDS.get(kind, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint of one file, in the order of the file."""
    return load_file(folder / "model.safetensors")


def with_weights(folder: Path, base: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint with another's config."""
    folder.mkdir()
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def one_group(store: Path, tensor_parallel: int = 1, rank: int = 0) -> Iterator[None]:
    """Be one rank of a tensor-parallel group over Gloo, as a worker of vLLM is."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as state

    if ON_GPU:
        torch.cuda.set_device(rank)
    with set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(tensor_parallel, rank, f"file://{store}", rank, "gloo")
        state.ensure_model_parallel_initialized(tensor_parallel, 1)
    try:
        yield
    finally:
        state.cleanup_dist_env_and_memory()


def load_model(folder: Path, tensor_parallel: int = 1, rank: int = 0) -> nn.Module:
    """Load a checkpoint the way a worker of vLLM does."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="mp" if tensor_parallel > 1 else None,
    )
    config = args.create_engine_config()
    config.parallel_config.rank = rank
    if not ON_GPU:
        torch.accelerator.empty_cache = lambda: None  # vLLM's CPU worker does so: without a device torch's raises
    with set_current_vllm_config(config):
        model: nn.Module = get_model(vllm_config=config)
    return model


@contextmanager
def plain_layouts(*, experts: bool = True) -> Iterator[None]:
    """Have models that are loaded and run meanwhile keep weights in their plain layout, as on GPUs.

    vLLM on CPUs repacks them. Linear layers compute as well without that; experts are repacked in each forward pass.
    On GPUs this does nothing.

    Args:
        experts: whether this is for experts too.
    """
    if ON_GPU:
        yield
        return
    import vllm.model_executor.layers.utils as layers
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    run = CPUUnquantizedExperts.apply

    def pack_and_run(experts: Any, *, w1: torch.Tensor, w2: torch.Tensor, **others: Any) -> None:
        w1, w2 = (ops.cpu_prepack_moe_weight(weight, experts.isa) for weight in (w1, w2))
        run(experts, w1=w1, w2=w2, **others)

    switches: list[tuple[Any, str, object]] = [
        (ops, "_supports_onednn", False),
        (layers, "check_cpu_sgl_kernel", lambda n, k, dtype: False),
    ]
    if experts:
        switches += [
            (CPUUnquantizedExperts, "process_weights_after_loading", lambda experts, layer: None),
            (CPUUnquantizedExperts, "apply", pack_and_run),
        ]
    before = [getattr(owner, name) for owner, name, _ in switches]
    for owner, name, switched in switches:
        setattr(owner, name, switched)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)


def changed_bits(weights: Mapping[str, torch.Tensor], seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    """Return other weights, with random bits (any: NaN, infinities, -0.0) in a share of each tensor's words."""
    rng = np.random.default_rng(seed)
    changed = {}
    for name, tensor in weights.items():
        changed[name] = tensor.clone()
        number = max(1, int(share * tensor.numel()))
        places = torch.from_numpy(rng.choice(tensor.numel(), number, replace=False))
        noise = torch.from_numpy(rng.integers(1, 1 << 15, number, np.int16))
        changed[name].view(torch.int16).view(-1)[places] ^= noise
    return changed


def planned(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Plan:
    """Return the proven plan of a model that holds these weights."""
    metas = [ParamMeta(name, dtype_of(tensor.dtype).name, tuple(tensor.shape)) for name, tensor in weights.items()]
    return trace(model, metas).proven(weights.items())


def write_changes(plan: Plan, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Write what differs between two checkpoints into the runtime tensors, where the plan says."""
    for name in plan.names("direct"):
        old, new = numpy_words(before[name]), numpy_words(after[name])
        positions = np.flatnonzero(old != new)
        for found in plan.locate(name, positions):
            WordMemory(plan.tensors[found.runtime]).write(found.positions, new[positions[found.which]])


def bits_of(model: nn.Module) -> dict[str, bytes]:
    """Return the bytes of every runtime tensor."""
    return {name: numpy_words(tensor).tobytes() for name, tensor in runtime_tensors(model).items()}


@dataclass(frozen=True)
class RankReport:
    """What one tensor-parallel rank found.

    Attributes:
        strategies: of each parameter.
        differing: runtime tensors that are not those of a model loaded from the changed checkpoint.
        boxes: the boxes of each parameter's pieces, with the shapes that they are in.
        sums: each parameter's part of the fingerprint, after the change.
    """

    strategies: dict[str, str]
    differing: list[str]
    boxes: dict[str, list[Any]]
    sums: dict[str, int]


def change_one_rank(rank: int, size: int, store: Path, before: Path, after: Path) -> RankReport:
    """Be one rank: load a checkpoint, write the changes to another by the plan, and compare with loading that one."""
    with one_group(store, size, rank), plain_layouts():
        model, old, new = load_model(before, size, rank), weights_of(before), weights_of(after)
        plan = planned(model, old)
        write_changes(plan, old, new)
        held, fresh = bits_of(model), bits_of(load_model(after, size, rank))
        views = {name: plan.views(name) for name in plan.names("direct")}
        return RankReport(
            strategies={name: placement.strategy for name, placement in plan.placements.items()},
            differing=[name for name in fresh if held[name] != fresh[name]],
            boxes={name: [(view.shape, view.box) for view in each] for name, each in views.items()},
            sums={name: sum(shard_fingerprint(v.tensor, v.shape, v.box) for v in each) for name, each in views.items()},
        )


os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
