"""What a sender keeps of a round is the update that a diff of the weights makes, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltacast.delta.apply import apply_update
from deltacast.delta.chunks import ChunkSender, KeptRound
from deltacast.delta.codec import decode_update, encode_update
from deltacast.delta.diff import diff_state
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.store.placement import FlatMemory
from made_updates import assert_same
from tensor_bytes import WORDS, copied, listed, random_tensor, raw_bytes, state_bytes, tensor_of

Weights = dict[str, torch.Tensor]
CHUNK_BYTES = 1 << 19
PLACES = pytest.mark.parametrize(
    ("home", "device"),
    [
        ("cpu", "cpu"),
        pytest.param("cuda:0", "cuda:0", marks=pytest.mark.gpu),
        pytest.param("pinned", "cuda:0", marks=pytest.mark.gpu),
    ],
)


def every_dtype() -> Weights:
    """All dtypes, a parameter of three chunks, one of several blocks, and nothing at all."""
    rng = np.random.default_rng(0)
    shapes: list[tuple[str, str, tuple[int, ...]]] = [(f"a {dtype}", dtype, (40, 25)) for dtype in WORDS]
    shapes += [("wide", "bfloat16", (600, 1000)), ("long", "float32", (70_000,)), ("empty", "bfloat16", (0, 7))]
    return {name: random_tensor(rng, dtype, shape) for name, dtype, shape in shapes}


def stepped(weights: Weights, seed: int, share: float) -> Weights:
    """This share of the bytes has its lowest bit flipped; every other parameter stays as it is."""
    rng, new = np.random.default_rng(seed), Weights()
    for number, (name, tensor) in enumerate(weights.items()):
        raw = np.frombuffer(raw_bytes(tensor), np.uint8)
        flips = rng.random(raw.size) < (share if number % 2 == seed % 2 else 0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        new[name] = tensor_of(dtype, (raw ^ flips).tobytes(), tensor.shape)
    return new


def baseline(weights: Weights, home: str) -> WeightState:
    """The weights at version 4, in a baseline's own memory; the first has another name too."""
    memory = FlatMemory([meta for meta, _ in listed(weights)], home)
    for name, tensor in weights.items():
        memory.write(name, tensor)
    tied = {"tied": next(iter(weights))}
    return WeightState({name: memory.tensor(name) for name in weights}, version=4, aliases=tied)


def sender_of(base: WeightState, weights: Weights, device: str) -> ChunkSender:
    order = [base.table.index(name) for name in weights]
    return ChunkSender(base, order, torch.device(device), chunk_bytes=CHUNK_BYTES, max_density=1.0)


def send(sender: ChunkSender, new: Weights) -> KeptRound:
    """Diff everything, and keep it."""
    sender.begin()
    for _ in sender.chunks(new.values()):
        pass
    sender.sums()
    return sender.keep()


def update_of(kept: KeptRound, version: int) -> WeightUpdate:
    return kept.update(run_id="run", epoch=2, target_version=version, optimizer_step=7)


def diffed(base: WeightState, new: Weights, version: int) -> WeightUpdate:
    return diff_state(base, listed(new), run_id="run", epoch=2, target_version=version, optimizer_step=7)


@PLACES
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1])
def test_a_kept_round_is_the_update_that_a_diff_makes(share: float, home: str, device: str) -> None:
    """Every dtype, several groups and chunks, rounds one after the other; base values too. An empty round is one."""
    weights = every_dtype()
    base = baseline(weights, home)
    sender = sender_of(base, weights, device)
    for seed in range(3):
        new = stepped(weights, seed, share)
        expected = diffed(base, new, 5 + seed)
        got = update_of(send(sender, new), 5 + seed)
        assert_same(expected, got)
        for ours, theirs in zip(got.patches, expected.patches, strict=True):
            assert ours.base_values is not None
            assert theirs.base_values is not None
            assert ours.base_values.tobytes() == theirs.base_values.tobytes()
        sender.advance(5 + seed)
        assert (got.base_version, got.target_digest) == (4 + seed, base.digest)
        weights = new


@PLACES
def test_what_keeping_takes_is_known_before(home: str, device: str) -> None:
    """Bytes of the tensors that are kept, added up; none for a round without changes."""
    weights = every_dtype()
    sender = sender_of(baseline(weights, home), weights, device)
    for share in (0.0, 0.01):
        kept = send(sender, stepped(weights, 1, share))
        tensors = [t for chunk in kept.chunks for t in (chunk.counts, chunk.offsets, chunk.values, chunk.old)]
        assert sender.kept_bytes == sum(tensor.nbytes for tensor in tensors)
        assert bool(tensors) == (share > 0)


@PLACES
def test_a_kept_round_stays_what_it_was_when_the_next_ones_are_sent(home: str, device: str) -> None:
    """Three rounds are kept before any is looked at; each applies, through a container, to the weights before it."""
    weights = [every_dtype()]
    base, served = baseline(weights[0], home), WeightState(copied(weights[0]), version=4)
    sender, kept = sender_of(base, weights[0], device), []
    for seed in range(3):
        weights.append(stepped(weights[-1], seed, 0.01))
        kept.append(send(sender, weights[-1]))
        sender.advance(5 + seed)
    for number, (round_kept, new) in enumerate(zip(kept, weights[1:], strict=True)):
        raw = encode_update(update_of(round_kept, 5 + number), values="delta")
        apply_update(served, decode_update(raw, max_decoded_bytes=1 << 30))
        assert state_bytes(served) == {name: raw_bytes(tensor) for name, tensor in new.items()}


@PLACES
def test_what_a_diff_would_send_whole_is_kept_as_changes(home: str, device: str) -> None:
    """A scalar, and words that change in all their bits: positions and words, and the same bits after."""
    rng = np.random.default_rng(1)
    weights = {"master": random_tensor(rng, "float32", (1000,)), "scale": random_tensor(rng, "float16", ())}
    new = {
        name: tensor_of(dtype, bytes(255 - byte for byte in raw_bytes(weights[name])), weights[name].shape)
        for name, dtype in (("master", "float32"), ("scale", "float16"))
    }
    served = WeightState(copied(weights), version=4)
    update = update_of(send(sender_of(baseline(weights, home), weights, device), new), 5)
    assert [(patch.name, patch.is_dense, patch.num_changed) for patch in update.patches] == [
        ("master", False, 1000), ("scale", False, 1),
    ]  # fmt: skip
    apply_update(served, update)
    assert state_bytes(served) == {name: raw_bytes(tensor) for name, tensor in new.items()}
