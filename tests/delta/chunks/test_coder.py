"""Coded chunks between a sender's and a receiver's buffers. Right values: the raw chunks, and sizes by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch

from deltacast.delta.chunks import ChunkCoder, ChunkReceiver, ChunkSender
from deltacast.delta.errors import FormatError
from deltacast.delta.state import WeightState
from tensor_bytes import copied, random_tensor

CHUNK_BYTES = 1 << 19
SHAPES = {
    "embed": ("bfloat16", 600_000),
    "places": ("int16", 70_000),  # two's complement in one group with sign and magnitude
    "half": ("float16", 300),
    "router": ("float32", 200_000),
    "master": ("float64", 65_537),
    "quantised": ("float8_e4m3fn", 70_000),
    "mask": ("bool", 33),
}


class Ends:
    """A sender and a receiver that hold the same random bits, and a coder at each end."""

    def __init__(self, device: str, stack: ExitStack, *, capacities: bool = True) -> None:
        rng = np.random.default_rng(0)
        self.weights = {name: random_tensor(rng, dtype, (size,)) for name, (dtype, size) in SHAPES.items()}
        base, self.served = (
            WeightState({name: tensor.to(device) for name, tensor in copied(self.weights).items()}, version=4)
            for _ in range(2)
        )
        self.names = list(SHAPES)
        order = [base.table.index(name) for name in self.names]
        self.sender = ChunkSender(
            base, order, torch.device(device), chunk_bytes=CHUNK_BYTES, max_density=1.0, keeps_old=True
        )
        self.begin = self.sender.header()
        self.receiver = ChunkReceiver(self.served, self.begin)
        bound = self.begin.capacities if capacities else None
        self.packing, self.unpacking = (
            stack.enter_context(closing(ChunkCoder(base.table, end.plan, end.groups, threads=2, capacities=bound)))
            for end in (self.sender, self.receiver)
        )

    def stepped(self, seed: int) -> list[torch.Tensor]:
        """New weights in the order of the plan: one byte of a hundredth of the words is another."""
        rng, new = np.random.default_rng(seed), copied(self.weights)
        for tensor in new.values():
            raw = tensor.view(torch.uint8).numpy().reshape(-1, tensor.itemsize)
            hit = rng.random(len(raw)) < 0.01
            raw[hit, rng.integers(0, tensor.itemsize)] ^= np.uint8(1 if tensor.dtype == torch.bool else seed + 2)
        return [new[name] for name in self.names]


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(request.param, stack)


def test_what_is_unpacked_is_what_the_raw_wire_would_have_carried(ends: Ends) -> None:
    """All word widths, dtypes mixed in one group, every chunk of a round pending at once, and round after round."""
    for seed in range(3):
        new = ends.stepped(seed)
        ends.sender.begin()
        ends.receiver.begin(ends.begin)
        sent = list(ends.sender.chunks(tensor.to(ends.sender.device) for tensor in new))
        pending = [ends.packing.pack(chunk) for chunk in sent]
        for chunk, packing in zip(sent, pending, strict=True):
            arrived, packed = ends.receiver.take(chunk.changes.num_changes or 0), packing.result()
            group = chunk.span.group
            ends.unpacking.finish(group, arrived, ends.unpacking.unpack(group, arrived, packed))
            for found, wanted in zip((arrived.counts, arrived.offsets, arrived.values), chunk.tensors, strict=True):
                assert torch.equal(found, wanted)


def test_a_chunk_of_another_number_of_changes_than_told_is_refused(ends: Ends) -> None:
    """The number rides beside it."""
    ends.sender.begin()
    ends.receiver.begin(ends.begin)
    first = next(ends.sender.chunks(tensor.to(ends.sender.device) for tensor in ends.stepped(1)))
    arrived = ends.receiver.take((first.changes.num_changes or 0) + 1)
    packed = ends.packing.pack(first).result()
    pending = ends.unpacking.unpack(0, arrived, packed)
    with pytest.raises(FormatError, match="a chunk of another size"):
        ends.unpacking.finish(0, arrived, pending)


def test_memory_is_bounded_by_what_a_round_may_change() -> None:
    """Every word changes, in chunks of at most four blocks of 2-byte words."""
    with ExitStack() as stack:
        bounded, unbounded = Ends("cpu", stack), Ends("cpu", stack, capacities=False)
    words = {1: 70_033, 2: 670_300, 4: 200_000, 8: 65_537}
    chunks, blocks = {1: 1, 2: 4, 4: 2, 8: 2}, {1: 3, 2: 10 + 2 + 1, 4: 4, 8: 2}
    counts = {width: words[width] + 16 * chunks[width] for width in words}
    staged = sum(
        4 * blocks[width] + (2 + width) * count + -(-count // 4) + -(-count // 2) + 8 for width, count in counts.items()
    )
    largest = max((16 + 3 * 1) * 70_049, (16 + 3 * 2) * 4 * 65_536, (16 + 3 * 4) * 2 * 65_536, (16 + 3 * 8) * 65_536)
    assert bounded.packing.nbytes == bounded.unpacking.nbytes == staged + largest
    assert unbounded.packing.nbytes > bounded.packing.nbytes
