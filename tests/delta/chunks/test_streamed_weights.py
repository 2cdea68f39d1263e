"""A sender and a receiver without engines: bits, proofs, refusals and undo. Right values: numpy over the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch

from deltacast.delta.chunks import Begin, ChunkReceiver, ChunkSender, SentChunk, Sums
from deltacast.delta.errors import (
    BaseError,
    CapacityError,
    CorruptionError,
    FormatError,
    InputError,
    TableError,
    VerificationError,
)
from deltacast.delta.kernels import RawChunk, apply_programs, launch
from deltacast.delta.state import WeightState
from tensor_bytes import WORDS, copied, random_tensor, raw_bytes, tensor_of

CHUNK_BYTES = 1 << 19
"""Four blocks of bfloat16."""
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
Weights: TypeAlias = dict[str, torch.Tensor]
Damage: TypeAlias = Callable[[int, RawChunk], object]


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def stepped(weights: Mapping[str, torch.Tensor], seed: int, share: float = 0.01) -> Weights:
    """Other weights of the same dtypes and shapes: this share of the bytes has its lowest bit flipped."""
    rng, new = np.random.default_rng(seed), Weights()
    for name, tensor in weights.items():
        raw = np.frombuffer(raw_bytes(tensor), np.uint8)
        new[name] = tensor_of(dtype_name(tensor), (raw ^ (rng.random(raw.size) < share)).tobytes(), tensor.shape)
    return new


def words_of(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]:
    return np.frombuffer(raw_bytes(tensor), f"<u{WORDS[dtype_name(tensor)][0]}")


def bytes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in weights.items()}


def held(state: WeightState) -> dict[str, bytes]:
    return {memory.name: raw_bytes(memory.tensor.cpu()) for memory in state.memories}


def mixed() -> Weights:
    """Every word width, in more than one chunk each but bytes; a scalar, and nothing at all."""
    rng = np.random.default_rng(0)
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("embed", "bfloat16", (600, 1000)), ("router", "float32", (200_000,)), ("master", "float64", (65_537,)),
        ("quantised", "float8_e4m3fn", (70_000,)), ("mask", "bool", (33,)), ("scale", "bfloat16", ()),
        ("empty", "bfloat16", (0, 7)), ("half", "float16", (3, 5)), ("phase", "complex64", (9,)),
    ]  # fmt: skip
    return {name: random_tensor(rng, dtype, shape) for name, dtype, shape in shapes}


def plain() -> Weights:
    """Chunk 0: three blocks of `a` and the first of `b`; chunk 1: the other 4,464 words of `b`."""
    rng = np.random.default_rng(0)
    return {"a": random_tensor(rng, "bfloat16", (150_000,)), "b": random_tensor(rng, "bfloat16", (70_000,))}


class Ends:
    """A sender and a receiver that hold the same weights at version 4, and nothing between them but this."""

    def __init__(self, weights: Weights, device: str = "cpu", *, max_density: float = 1.0, old: bool = False) -> None:
        self.base, self.served = (
            WeightState({name: tensor.to(device) for name, tensor in copied(weights).items()}, version=4)
            for _ in range(2)
        )
        self.names = list(weights)
        order = [self.base.table.index(name) for name in self.names]
        self.sender = ChunkSender(
            self.base, order, torch.device(device), chunk_bytes=CHUNK_BYTES, max_density=max_density, keeps_old=old
        )
        self.receiver = ChunkReceiver(self.served, self.sender.header())

    def deliver(self, new: Weights, damage: Damage = lambda _, __: None) -> tuple[Sums, str]:
        """Diff, carry over and write everything; `damage` may change what arrived before it is written."""
        self.sender.begin()
        self.receiver.begin(Begin.from_bytes(self.sender.header().to_bytes(), self.served.table))
        for sent in self.sender.chunks(new[name] for name in self.names):
            self.carry(sent, damage)
        sums, digest = self.sender.sums()
        return Sums.from_bytes(sums.to_bytes(), self.served.table), digest

    def carry(self, sent: SentChunk, damage: Damage = lambda _, __: None) -> None:
        """Copy one chunk to the receiver and have it written."""
        arrived = self.receiver.take(sent.changes.num_changes or 0)
        for here, there in zip((arrived.counts, arrived.offsets, arrived.values), sent.tensors, strict=True):
            here.copy_(there)
        damage(sent.number, arrived)
        self.receiver.apply(sent.number)

    def round(self, new: Weights, version: int) -> None:
        """A whole round that commits."""
        sums, digest = self.deliver(new)
        self.receiver.finish(version, sums, digest)
        self.sender.advance(version)

    def require_held(self, weights: Weights, version: int) -> None:
        """Both ends hold these bits and say so."""
        for state in (self.base, self.served):
            assert held(state) == bytes_of(weights)
            assert (state.version, state.digest) == (version, WeightState(copied(weights)).digest)
            assert state.audit() == []


@DEVICES
def test_both_ends_hold_the_new_bits_after_every_round(device: str) -> None:
    """Mixed dtypes of random bits, in an order that is not the table's; changes are counted by numpy."""
    weights = mixed()
    ends = Ends(weights, device)
    assert len(ends.sender.plan.spans) == 3 + 3 + 2 + 1
    for seed in range(3):
        new = stepped(weights, seed)
        ends.round(new, 5 + seed)
        ends.require_held(new, 5 + seed)
        assert ends.sender.num_changed == sum(int((words_of(new[n]) != words_of(weights[n])).sum()) for n in new)
        weights = new


@pytest.mark.gpu
def test_what_writes_is_compiled_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may be paused for the round: no program that writes is launched in it for the first time."""
    launched: set[tuple[object, ...]] = set()
    monkeypatch.setattr(launch, "_LAUNCHED", launched)
    writes = [getattr(apply_programs, name) for name in apply_programs.__all__]
    weights = mixed()
    new, ends = stepped(weights, 0), Ends(weights, "cuda")
    before = set(launched)
    assert {variant[0] for variant in before} == set(writes)
    ends.deliver(new)
    ends.sender.keep()
    ends.receiver.rollback()
    ends.round(new, 5)
    ends.require_held(new, 5)
    assert {variant for variant in launched if variant[0] in writes} == before


@DEVICES
def test_a_round_without_changes_has_no_sums_and_the_same_digest(device: str) -> None:
    """The version moves."""
    weights = mixed()
    ends = Ends(weights, device)
    sums, digest = ends.deliver(weights)
    assert (sums.places.tolist(), digest, ends.sender.num_changed) == ([], ends.base.digest, 0)
    ends.round(weights, 9)
    ends.require_held(weights, 9)


@DEVICES
def test_chunks_are_the_changed_words_in_order(device: str) -> None:
    """Counts, offsets, values and, where asked for, the words before: block by block, by numpy."""
    weights = plain()
    new = stepped(weights, 1)
    ends = Ends(weights, device, old=True)
    ends.sender.begin()
    sent = list(ends.sender.chunks(new.values()))
    pairs = [(words_of(weights[name])[at : at + 65536], words_of(new[name])[at : at + 65536])
             for name in new for at in range(0, new[name].numel(), 65536)]  # fmt: skip
    for chunk, blocks in zip(sent, (pairs[:4], pairs[4:]), strict=True):
        places = [np.flatnonzero(old != now) for old, now in blocks]
        assert chunk.old is not None
        expected = [
            [len(place) for place in places],
            np.concatenate(places).tolist(),
            np.concatenate([now[place] for place, (_, now) in zip(places, blocks, strict=True)]).tolist(),
            np.concatenate([old[place] for place, (old, _) in zip(places, blocks, strict=True)]).tolist(),
        ]
        counts, *words = (tensor.cpu().numpy() for tensor in (*chunk.tensors, chunk.old))
        assert [counts.tolist(), *(part.view(np.uint16).tolist() for part in words)] == expected


@DEVICES
def test_new_weights_may_have_any_layout(device: str) -> None:
    """Transposed, strided, or with a lazy conjugate: what counts is what they show."""
    weights = {"t": torch.zeros(300, 500), "s": torch.zeros(70_000), "c": torch.zeros(6, dtype=torch.complex64)}
    ends = Ends(weights, device)
    new = {
        "t": torch.arange(150_000.0, device=device).view(500, 300).t(),
        "s": torch.arange(140_000.0)[1::2],
        "c": torch.arange(6).to(torch.complex64).mul(1j).to(device).conj(),
    }
    shown = {
        "t": torch.from_numpy(np.arange(150_000, dtype=np.float32).reshape(500, 300).T.copy()),
        "s": torch.from_numpy(np.arange(1, 140_000, 2, dtype=np.float32)),
        "c": torch.from_numpy((np.arange(6).astype(np.complex64) * np.complex64(1j)).conj()),
    }
    ends.round(new, 5)
    for name, tensor in shown.items():
        assert np.array_equal(ends.served.memory(name).tensor.cpu().numpy(), tensor.numpy())
    assert ends.base.digest == ends.served.digest
    assert ends.base.audit() == ends.served.audit() == []


@DEVICES
def test_more_changes_than_there_is_room_for_are_refused_and_the_next_round_works(device: str) -> None:
    """The argument to raise is named; nothing moved. There is room for 2^20 changes however small the share."""
    weights = {"first": torch.zeros(5), "large": torch.zeros((1 << 20) + 70_000, dtype=torch.bfloat16)}
    ends = Ends(weights, device, max_density=1e-6)
    with pytest.raises(CapacityError, match="Raise max_density"):
        ends.deliver({"first": torch.ones(5), "large": weights["large"] + 1})
    ends.receiver.rollback()
    ends.require_held(weights, 4)
    new = stepped(weights, 1)
    ends.round(new, 5)
    ends.require_held(new, 5)


@pytest.mark.parametrize("max_density", [0.0, -1.0, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(max_density: float) -> None:
    """Before anything is allocated."""
    with pytest.raises(InputError, match="bad max_density"):
        Ends(plain(), max_density=max_density)


@DEVICES
@pytest.mark.parametrize("place", [0, 149_999])
def test_damage_of_the_trainers_baseline_is_named(place: int, device: str) -> None:
    """A diff reads all of it, so that a flipped bit is found whether or not the word changes."""
    weights = plain()
    ends = Ends(weights, device)
    ends.base.memory("a").tensor.view(torch.int16)[place] ^= 1 << 9
    new = stepped(weights, 1)
    with pytest.raises(CorruptionError, match="baseline is damaged") as caught:
        ends.deliver(new)
    assert (caught.value.parameter, ends.base.version) == ("a", 4)
    ends.receiver.rollback()
    ends.base.memory("a").tensor.view(torch.int16)[place] ^= 1 << 9
    ends.round(new, 5)
    ends.require_held(new, 5)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"b": None, "none": None}, TableError, "end before a parameter.*'b'"),
        ({"b": torch.zeros(70_001, dtype=torch.bfloat16)}, TableError, "'b'"),
        ({"b": torch.zeros(70_000, dtype=torch.float16)}, TableError, "'b'"),
        ({"b": torch.zeros(70_000, dtype=torch.bfloat16, device="meta")}, InputError, "'b'.*meta"),
        ({"none": None}, TableError, "end before a parameter.*'none'"),
        ({"none": torch.zeros(1)}, TableError, "'none'"),
        ({"more": torch.zeros(1)}, TableError, "more new weights"),
    ],
)
def test_new_weights_that_are_not_the_baselines_are_refused(
    wrong: dict[str, torch.Tensor | None], error: type[Exception], message: str
) -> None:
    """Also behind the last chunk; the baseline stays, and the next round works."""
    weights = {**plain(), "none": torch.zeros(0)}
    ends = Ends(weights)
    given = {**stepped(weights, 1), **wrong}
    ends.sender.begin()
    with pytest.raises(error, match=message):
        list(ends.sender.chunks(tensor for tensor in given.values() if tensor is not None))
    ends.require_held(weights, 4)
    new = stepped(weights, 2)
    ends.round(new, 5)
    ends.require_held(new, 5)


def put(number: int, part: str, place: int, value: int) -> Damage:
    """Damage that sets one count, offset or value of one chunk."""

    def damage(at: int, chunk: RawChunk) -> None:
        if at == number:
            getattr(chunk, part)[place] = value

    return damage


def swap_counts(number: int, chunk: RawChunk) -> None:
    """One change more in the first block, one fewer in the second: the sum is right."""
    if number == 0:
        chunk.counts[:2] += torch.tensor([1, -1], dtype=torch.int32, device=chunk.counts.device)


HOSTILE: dict[str, tuple[Damage, str]] = {
    "a count above the block": (put(0, "counts", 1, 65537), "a"),
    "a negative count": (put(0, "counts", 2, -1), "a"),
    "a count above a short block": (put(1, "counts", 0, 4465), "b"),
    "counts that add up to less": (put(1, "counts", 0, 0), "b"),
    "a count moved to the next block": (swap_counts, "a"),
    "an offset twice": (lambda _, chunk: chunk.offsets[1:2].copy_(chunk.offsets[:1]), "a"),
    "offsets that descend": (put(1, "offsets", 0, -1), "b"),
    "an offset behind a short block": (put(1, "offsets", -1, 4464), "b"),
}


@DEVICES
@pytest.mark.parametrize("case", HOSTILE)
def test_counts_and_offsets_that_cannot_be_are_refused_by_name_and_undone(case: str, device: str) -> None:
    """The chunk at fault and all behind it are not written; after the rollback nobody can tell."""
    damage, name = HOSTILE[case]
    weights = plain()
    ends = Ends(weights, device)
    sums, digest = ends.deliver(stepped(weights, 1), damage)
    with pytest.raises(FormatError, match="counts or offsets are wrong") as caught:
        ends.receiver.finish(5, sums, digest)
    assert caught.value.parameter == name
    if name == "a":  # in the first chunk
        assert held(ends.served) == bytes_of(weights)
    ends.receiver.rollback()
    ends.require_held(weights, 4)
    new = stepped(weights, 2)
    ends.round(new, 5)
    ends.require_held(new, 5)


@DEVICES
def test_a_word_that_differs_from_the_senders_is_corruption_and_comes_back_as_it_was(device: str) -> None:
    """Under a change: the result would have been right, but the rest of the parameter is not to be trusted."""
    weights = plain()
    new = stepped(weights, 1)
    ends = Ends(weights, device)
    place = int(np.flatnonzero(words_of(weights["b"]) != words_of(new["b"]))[0])
    ends.served.memory("b").tensor.view(torch.int16)[place] ^= 1
    before = held(ends.served)
    sums, digest = ends.deliver(new)
    with pytest.raises(CorruptionError, match="overwritten") as caught:
        ends.receiver.finish(5, sums, digest)
    assert caught.value.parameter == "b"
    ends.receiver.rollback()
    assert held(ends.served) == before
    assert [damage.parameter for damage in ends.served.audit()] == ["b"]


@DEVICES
def test_what_does_not_add_up_is_not_verified(device: str) -> None:
    """A value changed on the way, other sums, a parameter without sums, another digest: never a new version."""
    weights = plain()
    new = stepped(weights, 1)
    ends = Ends(weights, device)
    sums, digest = ends.deliver(new, lambda number, chunk: number or chunk.values[:1].bitwise_xor_(64))
    with pytest.raises(VerificationError, match="'a'"):
        ends.receiver.finish(5, sums, digest)
    ends.receiver.rollback()
    sums, digest = ends.deliver(new)
    wrong: list[tuple[Sums, str, type[Exception]]] = [
        (replace(sums, after=sums.after ^ np.array([0, 1], np.uint64)), digest, VerificationError),
        (replace(sums, old_sums=sums.old_sums + np.array([1, 0], np.uint64)), digest, CorruptionError),
        (Sums(sums.places[:1], sums.after[:1], sums.old_sums[:1]), digest, CorruptionError),
        (sums, "xxh3_128:" + "0" * 32, VerificationError),
    ]
    for promised, target, error in wrong:
        with pytest.raises(error):
            ends.receiver.finish(5, promised, target)
        assert ends.served.version == 4
    ends.receiver.finish(5, sums, digest)
    ends.sender.advance(5)
    ends.require_held(new, 5)


@DEVICES
def test_rollback_restores_at_any_point_and_again(device: str) -> None:
    """Before anything, twice, after some chunks, and after a round that was finished but not decided."""
    weights = plain()
    ends = Ends(weights, device)
    ends.receiver.rollback()
    sums, digest = ends.deliver(stepped(weights, 1))
    assert held(ends.served) != bytes_of(weights)
    ends.receiver.rollback()
    ends.receiver.rollback()
    ends.require_held(weights, 4)
    ends.receiver.begin(ends.sender.header())
    ends.sender.begin()
    sent = next(ends.sender.chunks(stepped(weights, 2).values()))
    ends.carry(sent)
    ends.receiver.rollback()
    ends.require_held(weights, 4)
    fingerprints = ends.served.fingerprints.copy()
    sums, digest = ends.deliver(stepped(weights, 3))
    ends.receiver.finish(5, sums, digest)
    ends.receiver.rollback()
    assert (ends.served.version, held(ends.served)) == (5, bytes_of(weights))  # the label is the caller's to restore
    ends.served.advance(4, fingerprints)
    ends.require_held(weights, 4)


def test_a_round_that_ends_early_or_goes_on_too_long_is_refused() -> None:
    """A chunk fewer, a chunk more, or more changes than the chunk's blocks or the round have words."""
    ends = Ends(plain())
    ends.receiver.begin(ends.sender.header())
    for num_changes in (-1, 4 * 65536 + 1, 1 << 40):
        with pytest.raises(InputError, match="no room"):
            ends.receiver.take(num_changes)
    assert ends.receiver.num_taken == 0
    ends.receiver.take(0)
    nothing = np.zeros(0, np.uint64)
    with pytest.raises(FormatError, match="ended early: expected 2 chunks, found 1"):
        ends.receiver.finish(5, Sums(nothing.astype(np.uint32), nothing, nothing), ends.base.digest)
    ends.receiver.take(0)
    with pytest.raises(InputError, match="more chunks"):
        ends.receiver.take(0)


def test_a_receiver_is_for_one_base_one_plan_and_weights_that_it_can_write() -> None:
    """Everything is refused before the first chunk."""
    weights = plain()
    ends = Ends(weights)
    begin = ends.sender.header()
    for other in (replace(begin, base_version=5), replace(begin, base_digest="xxh3_128:" + "0" * 32)):
        assert ends.receiver.fits(other)
        with pytest.raises(BaseError, match="wrong base"):
            ends.receiver.begin(other)
    assert not ends.receiver.fits(replace(begin, chunk_bytes=1 << 20))
    assert not ends.receiver.fits(replace(begin, capacities=(1 << 18,)))
    assert not ends.receiver.fits(replace(begin, order=begin.order[::-1]))
    with pytest.raises(FormatError, match="other groups: expected 1, found 2"):
        ChunkReceiver(ends.served, replace(begin, capacities=(1, 1)))
    with pytest.raises(InputError, match="chunks are too small"):
        ChunkReceiver(ends.served, replace(begin, chunk_bytes=1))
    strided = WeightState({"a": torch.zeros(300_000, dtype=torch.bfloat16)[::2], "b": weights["b"]}, version=4)
    with pytest.raises(InputError, match=r"'a'.*contiguous"):
        ChunkReceiver(strided, begin)


def test_undo_over_its_budget_is_refused() -> None:
    """By what the header lets a round change: 220,000 words of two bytes, and 16 for each of two chunks."""
    ends = Ends(plain())
    begin, needed = ends.sender.header(), 2 * (220_000 + 32)
    ChunkReceiver(ends.served, begin, undo_budget_bytes=needed)
    with pytest.raises(InputError, match=f"at most {needed - 1} bytes, found {needed}.*max_density"):
        ChunkReceiver(ends.served, begin, undo_budget_bytes=needed - 1)
