"""Seeded weights and updates that look like mixed-precision RL fine-tuning, at any share of changed words.

bf16 weights under fp32 masters: the chance that a step changes the stored word halves with each binade of |w|, nine
in ten changes are one step of the ordered integer, and a tail is larger. 5 % of the tensors are idle, there are
an fp32 router bias, a 0-d and a zero-size tensor, a tied head (one storage, recorded as an alias), and -0.0, NaN and
infinities among the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.patch import ordered, unordered
from deltacast.delta.table import ParameterTable, ParamMeta

__all__ = ["PRESETS", "Model", "make_model", "take_step"]

PRESETS: Final = (0.05, 0.6, 1.2, 3.0, 8.0, 17.0, 45.0, 90.0)
"""Percent of words changed per step."""

_HIDDEN: Final = 1024
_IDLE_SHARE: Final = 0.05
_SPECIALS: Final = (0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x0000)
_TAIL: Final = np.array([1] * 88 + [2] * 6 + [3] * 2 + [4, 5, 9, 40], np.int64)


@dataclass(slots=True, eq=False)
class Model:
    """Generated weights.

    Attributes:
        table: the parameters, the tied head as an alias.
        words: name -> flat words; `take_step` makes new arrays and leaves these alone.
        idle: names that never change.
    """

    table: ParameterTable
    words: dict[str, Words]
    idle: frozenset[str]


def _metas(num_elements: int) -> list[ParamMeta]:
    rows = max(8, num_elements // (4 * _HIDDEN))
    metas = [ParamMeta("model.embed_tokens.weight", "bfloat16", (rows, _HIDDEN))]
    left, layer = num_elements - rows * _HIDDEN, 0
    while left >= 3 * _HIDDEN:
        width = min(_HIDDEN, left // (3 * _HIDDEN))
        names = ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
        metas += [ParamMeta(f"model.layers.{layer}.{name}.weight", "bfloat16", (width, _HIDDEN)) for name in names]
        metas.append(ParamMeta(f"model.layers.{layer}.input_layernorm.weight", "bfloat16", (_HIDDEN,)))
        metas.append(ParamMeta(f"model.layers.{layer}.mlp.router.bias", "float32", (64,)))
        left, layer = left - 3 * _HIDDEN * width, layer + 1
    return [*metas, ParamMeta("model.scale", "bfloat16", ()), ParamMeta("model.unused", "bfloat16", (0, _HIDDEN))]


def make_model(num_elements: int = 1 << 24, seed: int = 0) -> Model:
    """Return weights of about `num_elements` elements; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    table = ParameterTable(_metas(num_elements), {"lm_head.weight": "model.embed_tokens.weight"})
    words: dict[str, Words] = {}
    for meta in table:
        values = rng.standard_normal(meta.num_words, np.float32) * np.float32(rng.choice([0.01, 0.02, 0.05]))
        bits = values.view("<u4")
        if meta.dtype == "float32":
            words[meta.name] = bits
            continue
        words[meta.name] = (bits >> 16).astype("<u2")
        if meta.num_words > 1000:
            places = rng.integers(0, meta.num_words, len(_SPECIALS))
            words[meta.name][places] = _SPECIALS
    matrices = [meta.name for meta in table if len(meta.shape) == 2 and meta.numel]
    num_idle = max(1, round(_IDLE_SHARE * len(matrices)))
    return Model(table, words, frozenset(rng.choice(matrices, num_idle, replace=False).tolist()))


def take_step(model: Model, percent: float, rng: np.random.Generator) -> Iterator[tuple[ParamMeta, Words]]:
    """Yield each parameter with its words after one step that changes about `percent` of all words.

    The chance per word is `min(1, c / 2^exponent)`, with c chosen for the share; a word whose step would be none (a
    saturated tail) takes one step of 1.
    """
    scale = _scale(model, percent / 100)
    for meta in model.table:
        old = model.words[meta.name]
        if meta.name in model.idle:
            yield meta, old
            continue
        if meta.dtype == "float32":
            yield meta, old + rng.integers(1, 1000, old.size).astype(old.dtype)  # masters: every word moves
            continue
        hit = np.flatnonzero(rng.random(old.size, np.float32) < _chance(scale)[(old >> 7) & 0xFF])
        steps = rng.choice(_TAIL, hit.size) * rng.choice(np.array([-1, 1]), hit.size)
        new = old.copy()
        moved = ordered(old[hit], signed_magnitude=True) + steps.astype(np.uint16)
        new[hit] = unordered(moved, signed_magnitude=True)
        yield meta, new


def _chance(scale: float) -> NDArray[np.float32]:
    """Return the chance of a change per bf16 exponent field; NaN and infinity stay."""
    chance = np.minimum(1.0, np.exp2(scale - np.arange(256, dtype=np.float64)))
    chance[255] = 0.0
    return chance.astype(np.float32)


def _scale(model: Model, share: float) -> float:
    """Return the exponent below which every word changes, for the wanted share of all words."""
    counts = np.zeros(256, np.int64)
    for meta in model.table:
        if meta.dtype == "bfloat16" and meta.name not in model.idle:
            counts += np.bincount((model.words[meta.name] >> 7) & 0xFF, minlength=256)
    wanted = min(share * sum(meta.num_words for meta in model.table), 0.999 * counts.sum())
    low, high = -64.0, 320.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(counts @ _chance(middle)) < wanted else (low, middle)
    return high
