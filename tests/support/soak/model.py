"""What the soak serves: a few hundred thousand elements of every kind, moved by numpy and never through an engine."""

from __future__ import annotations

import random
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from engine_processes import weights_of

Weights: TypeAlias = dict[str, bytes]
"""Every name of a state dict and its bytes."""

Bit: TypeAlias = tuple[str, int, int]
"""Name, byte and bit."""

TIED = ("head", "embed")
"""An alias and the name that it stands for."""
_MOST_FLIPPED = 64


class SoakModel(nn.Module):
    """Parameters and buffers of all word widths, a tied pair, 0-d and empty ones; contiguous, as streamed wires ask."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype), requires_grad=False)

        self.embed = make(1500, 96)
        self.head = self.embed
        self.up = make(96, 384)
        self.down = make(384, 96, dtype=torch.float16)
        self.router = make(96, 64, dtype=torch.float32)
        self.experts = make(64, 512, dtype=torch.float8_e4m3fn)
        self.scale = make()
        self.nothing = make(0, 8)
        self.register_buffer("moments", make(3000, dtype=torch.float64).data)
        self.register_buffer("seen", torch.tensor(seed, dtype=torch.int64))
        self.register_buffer("counts", torch.randint(-128, 128, (500,), generator=generator, dtype=torch.int8))
        self.register_buffer("mask", torch.rand(1000, generator=generator) < 0.5)


_WIDTHS = {name: tensor.element_size() for name, tensor in SoakModel().state_dict().items()}


def new_weights(seed: int) -> Weights:
    """Return the weights of a model of this seed."""
    return weights_of(SoakModel(seed))


def load(module: nn.Module, weights: Weights) -> None:
    """Write weights into a model, in place."""
    for name, tensor in module.state_dict().items():
        if weights[name]:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(weights[name]), dtype=torch.uint8))


def moved(weights: Weights, rng: random.Random, share: float) -> Weights:
    """Return the weights after a step that moves about this share of each tensor's elements by a few bit patterns."""
    generator = np.random.default_rng(rng.getrandbits(64))
    after: Weights = {}
    for name, raw in weights.items():
        lowest = np.frombuffer(raw, dtype=np.uint8).reshape(-1, _WIDTHS[name]).copy()
        chosen = generator.random(len(lowest)) < share
        by = 1 if name == "mask" else generator.integers(1, 4, int(chosen.sum()), dtype=np.uint8)
        lowest[chosen, 0] ^= by  # little-endian: the lowest byte; bools stay 0 or 1
        after[name] = lowest.tobytes()
    after[TIED[0]] = after[TIED[1]]
    return after


def flipped(before: Weights, after: Weights) -> set[Bit] | None:
    """Return the bits in which two models differ, a tied pair's once; None if they are more than corruption can be."""
    found = set[Bit]()
    for name, raw in before.items():
        if name != TIED[0] and raw != after[name]:
            differs = np.frombuffer(raw, dtype=np.uint8) ^ np.frombuffer(after[name], dtype=np.uint8)
            places = np.flatnonzero(differs)
            if len(places) > _MOST_FLIPPED:
                return None
            found |= {(name, int(place), bit) for place in places for bit in range(8) if differs[place] >> bit & 1}
    return found


def changed_places(before: Weights, after: Weights, name: str) -> list[int]:
    """Return the bytes of a tensor that differ."""
    differs = np.frombuffer(before[name], dtype=np.uint8) != np.frombuffer(after[name], dtype=np.uint8)
    return [int(place) for place in np.flatnonzero(differs)]
