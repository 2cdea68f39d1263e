"""Which parameters the models have that are measured: names and shapes of published ones, or a checkpoint's.

Weights are made up; only names, shapes and their number matter to how fast changes are found and carried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.errors import InputError
from deltacast.delta.table import ParamMeta

__all__ = ["MODELS", "model_metas", "qwen2_5_7b", "qwen3_30b_a3b"]


def model_metas(model: str, scale: float = 1.0) -> tuple[ParamMeta, ...]:
    """Return the parameters of a model.

    Args:
        model: one of `MODELS`, or the path of a safetensors file or Hugging Face folder, of which only the headers
            are read.
        scale: about the share of the elements to keep, for machines that the whole model does not fit: every side of
            a tensor shrinks alike, the number of tensors stays.

    Raises:
        InputError: neither a known name nor a path, or a scale outside (0, 1].
        FormatError: the checkpoint is damaged.
    """
    if not 0 < scale <= 1:
        raise InputError("bad scale", expected="above 0, at most 1", found=scale)
    if model in MODELS:
        metas = tuple(MODELS[model]())
    elif Path(model).exists():
        with CheckpointSource(model) as source:
            metas = tuple(source.metas())
    else:
        raise InputError("no such model", expected=f"{', '.join(MODELS)}, or a safetensors file or folder", found=model)
    return tuple(ParamMeta(meta.name, meta.dtype, _shrunk(meta.shape, scale)) for meta in metas)


def qwen2_5_7b() -> Iterator[ParamMeta]:
    """Yield the 339 tensors of Qwen2.5-7B: dense, grouped queries with biases, 7.6 thousand million parameters."""
    hidden, inter, kv, vocab = 3584, 18944, 512, 152064
    yield _bf16("model.embed_tokens.weight", vocab, hidden)
    for layer in range(28):
        prefix = f"model.layers.{layer}"
        yield _bf16(f"{prefix}.input_layernorm.weight", hidden)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            yield _bf16(f"{prefix}.self_attn.{name}_proj.weight", rows, hidden)
            yield _bf16(f"{prefix}.self_attn.{name}_proj.bias", rows)
        yield _bf16(f"{prefix}.self_attn.o_proj.weight", hidden, hidden)
        yield _bf16(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield from _gated_mlp(f"{prefix}.mlp", hidden, inter)
    yield _bf16("model.norm.weight", hidden)
    yield _bf16("lm_head.weight", vocab, hidden)


def qwen3_30b_a3b() -> Iterator[ParamMeta]:
    """Yield the 18,867 tensors of Qwen3-30B-A3B: 128 experts a layer, 30.5 thousand million parameters."""
    hidden, inter, head_dim, vocab = 2048, 768, 128, 151936
    queries, kv = 32 * head_dim, 4 * head_dim
    yield _bf16("model.embed_tokens.weight", vocab, hidden)
    for layer in range(48):
        prefix = f"model.layers.{layer}"
        yield _bf16(f"{prefix}.input_layernorm.weight", hidden)
        for name, rows in (("q", queries), ("k", kv), ("v", kv)):
            yield _bf16(f"{prefix}.self_attn.{name}_proj.weight", rows, hidden)
        yield _bf16(f"{prefix}.self_attn.o_proj.weight", hidden, queries)
        yield _bf16(f"{prefix}.self_attn.q_norm.weight", head_dim)
        yield _bf16(f"{prefix}.self_attn.k_norm.weight", head_dim)
        yield _bf16(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield _bf16(f"{prefix}.mlp.gate.weight", 128, hidden)
        for expert in range(128):
            yield from _gated_mlp(f"{prefix}.mlp.experts.{expert}", hidden, inter)
    yield _bf16("model.norm.weight", hidden)
    yield _bf16("lm_head.weight", vocab, hidden)


MODELS: Final[dict[str, Callable[[], Iterator[ParamMeta]]]] = {
    "qwen2.5-7b": qwen2_5_7b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
}
"""Models by the name that `--model-shapes` takes."""


def _gated_mlp(prefix: str, hidden: int, inter: int) -> Iterator[ParamMeta]:
    yield _bf16(f"{prefix}.gate_proj.weight", inter, hidden)
    yield _bf16(f"{prefix}.up_proj.weight", inter, hidden)
    yield _bf16(f"{prefix}.down_proj.weight", hidden, inter)


def _bf16(name: str, *shape: int) -> ParamMeta:
    return ParamMeta(name, "bfloat16", shape)


def _shrunk(shape: Sequence[int], scale: float) -> tuple[int, ...]:
    factor = scale ** (1 / max(1, len(shape)))
    return tuple(max(1, round(size * factor)) if size else 0 for size in shape)
