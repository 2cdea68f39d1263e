"""Ranks that hold pieces of one checkpoint: what they cover, and updates that only all of them can prove."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltacast.delta.codec import ValuesChoice, decode_round, encode_round
from deltacast.delta.diff import diff_state
from deltacast.delta.errors import CorruptionError, InputError, PatchError, TableError, VerificationError
from deltacast.delta.module_source import ModuleSource
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.pieces import View
from deltacast.delta.shard_apply import ShardTransaction
from deltacast.delta.shard_cover import Cover
from deltacast.delta.shards import Claim, ShardState
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParameterTable, ParamMeta
from deltacast.store.baseline import Baseline
from fingerprint_twin import box_fingerprint, bytes_fingerprint
from shard_models import PADDING, Checkpoint, Runtime, bits_of, cut_by_hand

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
ROW = ParamMeta("w", "int16", (4, 6))


class Server:
    """All ranks of a server in this process, at version 0 of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, num_ranks: int, device: str = "cpu") -> None:
        self.trainer = Baseline(ModuleSource(checkpoint), run_id="run")
        table = self.trainer.state.table
        self.runtimes = [Runtime(checkpoint, rank, num_ranks, device) for rank in range(num_ranks)]
        self.states = [
            ShardState(table.metas, runtime.views, aliases=table.aliases, threads=2) for runtime in self.runtimes
        ]
        self.cover = Cover(table, [state.claims() for state in self.states])
        for state in self.states:
            state.adopt(self.cover.totals())
            state.version = 0

    def staged(self, update: WeightUpdate) -> list[ShardTransaction]:
        return [ShardTransaction.stage(state, update) for state in self.states]

    def proven(self, update: WeightUpdate) -> list[ShardTransaction]:
        staged = self.staged(update)
        sums = [transaction.sums for transaction in staged]
        for transaction in staged:
            transaction.prove_together(self.cover, sums)
        return staged

    def assert_holds(self, weights: dict[str, Any]) -> None:
        """Compare every rank's tensors with what numpy cuts out, bit by bit; and the ranks' own view of it."""
        for rank, (runtime, state) in enumerate(zip(self.runtimes, self.states, strict=True)):
            found, wanted = runtime.bits(), cut_by_hand(weights, rank, len(self.runtimes))
            assert {name: array.tolist() for name, array in found.items()} == {
                name: array.tolist() for name, array in wanted.items()
            }
            assert state.audit() == []


def sent(update: WeightUpdate, table: ParameterTable, values: ValuesChoice) -> WeightUpdate:
    """Return an update as a worker decodes it."""
    encoded = encode_round(update, table, values=values)
    return decode_round(encoded.rows, b"".join(encoded.groups), table)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_add_up_to_the_whole_parameters_fingerprints(num_ranks: int) -> None:
    """Fused, uneven, padded, replicated: what all claim is each parameter's fingerprint, by the naive twin."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, num_ranks)
    expected = {
        name: bytes_fingerprint(array.tobytes(), array.itemsize) for name, array in checkpoint.weights().items()
    }
    for state in server.states:
        assert dict(zip([meta.name for meta in state.table], state.fingerprints.tolist(), strict=True)) == expected
        assert state.digest == server.trainer.digest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("values", ["auto", "absolute"])
def test_updates_are_written_into_every_ranks_own_layout(num_ranks: int, values: ValuesChoice, device: str) -> None:
    """After three rounds, one of them dense, every rank holds its cut of the trainer's bits, and its digest."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, num_ranks, device)
    for number, share in enumerate([0.05, 0.0, 0.9], start=1):
        checkpoint.step(number, share)
        update = server.trainer.diff(ModuleSource(checkpoint))
        for transaction in server.proven(sent(update, server.trainer.state.table, values)):
            transaction.write()
            transaction.commit()
        server.trainer.advance(server.trainer.stage(update))
        server.assert_holds(checkpoint.weights())
        assert {(state.version, state.digest) for state in server.states} == {(number, server.trainer.digest)}
    assert int(server.runtimes[-1].bits()["embed"][-1, -1]) == bits_of(torch.tensor(PADDING, dtype=torch.int16))


def test_a_rollback_restores_bits_version_and_fingerprints() -> None:
    """Also after everything was written."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, 2)
    before, digest = checkpoint.weights(), server.trainer.digest
    before = {name: array.copy() for name, array in before.items()}
    checkpoint.step(1, 0.5)
    for transaction in server.proven(server.trainer.diff(ModuleSource(checkpoint))):
        transaction.write()
        transaction.rollback()
    server.assert_holds(before)
    assert {(state.version, state.digest) for state in server.states} == {(0, digest)}


def test_one_rank_proves_a_seed_and_a_repair_by_itself() -> None:
    """Whole parameters have the promised fingerprints, whatever this rank held."""
    checkpoint, other = Checkpoint(0), Checkpoint(1)
    server, target = Server(other, 2), Baseline(ModuleSource(checkpoint), run_id="run")
    for state in server.states:
        state.forget()
        assert state.digest == ""
        transaction = ShardTransaction.stage(state, target.seed(), undo=False)
        transaction.prove_alone()
        transaction.write()
        transaction.commit()
        assert (state.version, state.digest) == (0, target.digest)
    server.assert_holds(checkpoint.weights())
    server.runtimes[1].tensors["down"].view(torch.int16)[3, 2] ^= 64
    assert [damage.parameter for damage in server.states[1].audit()] == ["down"]
    repair = ShardTransaction.stage(server.states[1], target.seed(["down"]))
    repair.prove_alone()
    repair.write()
    server.assert_holds(checkpoint.weights())


def test_a_sparse_update_cannot_be_proven_alone() -> None:
    """A rank knows nothing of the others' words."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, 2)
    checkpoint.step(1)
    with pytest.raises(PatchError, match="sent whole"):
        server.staged(server.trainer.diff(ModuleSource(checkpoint)))[0].prove_alone()


def test_a_damaged_word_that_is_overwritten_is_found_before_the_first_write() -> None:
    """By the sum of the words that were there: the rank that has it names it, the other says that some rank has."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, 2)
    server.runtimes[0].tensors["o"].view(torch.int16)[1, 1] ^= 8
    broken = server.runtimes[0].bits()["o"].tolist()
    checkpoint.o.data.view(torch.int16)[1, 1] ^= 1
    staged = server.staged(server.trainer.diff(ModuleSource(checkpoint)))
    sums = [transaction.sums for transaction in staged]
    with pytest.raises(CorruptionError) as damaged:
        staged[0].prove_together(server.cover, sums)
    with pytest.raises(VerificationError, match="some rank"):
        staged[1].prove_together(server.cover, sums)
    assert damaged.value.parameter == "o"
    assert server.runtimes[0].bits()["o"].tolist() == broken


def test_a_damaged_word_under_an_update_that_does_not_know_what_was_there_is_found_too() -> None:
    """A fold of deltas has no sum of the words before it: the rank looks at its own."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, 2)
    server.runtimes[0].tensors["o"].view(torch.int16)[1, 1] ^= 8
    checkpoint.o.data.view(torch.int16)[1, 1] ^= 1
    update = server.trainer.diff(ModuleSource(checkpoint))
    update = replace(update, patches=tuple(replace(patch, old_sum=None) for patch in update.patches))
    with pytest.raises(CorruptionError) as damaged:
        ShardTransaction.stage(server.states[0], update)
    assert damaged.value.parameter == "o"
    ShardTransaction.stage(server.states[1], update).rollback()


def test_a_replica_that_differs_is_named() -> None:
    """In a round by what is overwritten, and of a whole checkpoint by its bits: both ranks and the parameter."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, 4)
    server.runtimes[3].tensors["norm"].view(torch.int16)[2] ^= 8
    checkpoint.norm.data.view(torch.int16)[2] ^= 1
    with pytest.raises(CorruptionError, match="ranks 0 and 3") as found:
        server.proven(server.trainer.diff(ModuleSource(checkpoint)))
    assert found.value.parameter == "norm"
    with pytest.raises(CorruptionError, match="ranks 0 and 3"):
        Cover(server.trainer.state.table, [state.claims() for state in server.states]).totals()


@pytest.mark.parametrize("field", ["fingerprint_after", "values", "target_digest"])
def test_an_update_that_does_not_keep_its_promise_is_refused_by_all(field: str) -> None:
    """Before the first write: nobody's bits have moved."""
    checkpoint = Checkpoint()
    server = Server(checkpoint, 2)
    before = {name: array.copy() for name, array in checkpoint.weights().items()}
    checkpoint.step(1)
    update = server.trainer.diff(ModuleSource(checkpoint))
    wrong = copy.copy(update.patches[0])
    if field == "values":
        wrong = replace(wrong, values=wrong.values ^ 1)
    elif field == "fingerprint_after":
        wrong = replace(wrong, fingerprint_after=wrong.fingerprint_after ^ 1)
    digest = "xxh3_128:" + "00" * 16 if field == "target_digest" else update.target_digest
    update = replace(update, patches=(wrong, *update.patches[1:]), target_digest=digest)
    staged = server.staged(update)
    for transaction in staged:
        with pytest.raises(VerificationError):
            transaction.prove_together(server.cover, [other.sums for other in staged])
    server.assert_holds(before)


def claim(box: Sequence[tuple[int, int]], shape: tuple[int, ...] = (4, 6)) -> Claim:
    return Claim(0, shape, tuple(box), 0)


@pytest.mark.parametrize(
    "boxes",
    [
        [[claim([(0, 4), (0, 3)])], [claim([(0, 4), (3, 6)])]],
        [[claim([(0, 4), (0, 3)]), claim([(0, 4), (3, 6)])], [claim([(0, 4), (3, 6)])]],
        [[claim([(0, 2), (0, 6)])], [claim([(12, 24)], (24,))]],
        [[claim([(0, 12)], (24,))], [claim([(0, 2), (0, 6)]), claim([(2, 4), (0, 6)])]],
        [[claim([(0, 4), (0, 6)])], [claim([(4, 4), (0, 6)])]],
    ],
    ids=["columns", "a replica", "two cuts", "a replica in another cut", "an empty piece"],
)
def test_boxes_that_are_apart_or_equal_cover(boxes: list[list[Claim]]) -> None:
    """However each rank cuts the parameter."""
    assert Cover(ParameterTable([ROW]), boxes).totals().tolist() == [0]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([[claim([(0, 4), (0, 3)])], [claim([(0, 4), (4, 6)])]], "leave some of it out"),
        ([[claim([(0, 4), (0, 4)])], [claim([(0, 4), (3, 6)])]], "overlap"),
        ([[claim([(0, 4), (0, 3)])], [claim([(12, 24)], (24,))]], "overlap"),
        ([[], []], "leave some of it out"),
    ],
)
def test_boxes_that_are_neither_are_an_error_that_names_the_parameter(boxes: list[list[Claim]], message: str) -> None:
    """An element that is nowhere, or counted twice, would make a digest that is of something else."""
    with pytest.raises(InputError, match=message) as found:
        Cover(ParameterTable([ROW]), boxes)
    assert found.value.parameter == "w"


@pytest.mark.parametrize(
    "view",
    [
        View((4, 6), ((0, 2), (0, 6)), torch.zeros(3, 6, dtype=torch.int16)),
        View((4, 6), ((0, 2), (0, 6)), torch.zeros(2, 6, dtype=torch.int32)),
        View((4, 6), ((3, 5), (0, 6)), torch.zeros(2, 6, dtype=torch.int16)),
        View((4, 5), ((0, 2), (0, 5)), torch.zeros(2, 5, dtype=torch.int16)),
        View((4, 6), ((0, 2),), torch.zeros(2, dtype=torch.int16)),
        View((), (), torch.zeros((), dtype=torch.int16)),
    ],
    ids=["extents", "dtype", "outside", "another shape", "dims", "no dims"],
)
def test_a_view_that_is_no_box_of_its_parameter_is_refused(view: View) -> None:
    """By the parameter's name."""
    with pytest.raises(InputError, match="no box") as found:
        ShardState([ROW], {"w": [view]})
    assert found.value.parameter == "w"


def test_views_of_what_is_not_in_the_table_are_refused() -> None:
    """An alias neither: its memory is another parameter's."""
    view = View((24,), ((0, 24),), torch.zeros(24, dtype=torch.int16))
    for name in ("x", "tied"):
        with pytest.raises(TableError):
            ShardState([ROW], {"w": [view], name: [view]}, aliases={"tied": "w"})


def test_the_sums_of_another_number_of_pieces_are_refused() -> None:
    """A rank that tells of other pieces than it claimed is out of step."""
    server = Server(Checkpoint(), 2)
    with pytest.raises(InputError, match="rank 1"):
        server.cover.add_up(np.arange(2), [np.zeros((2, 2), np.uint64), np.zeros((3, 2), np.uint64)])


def test_rolling_audits_scan_every_piece_once_in_a_turn() -> None:
    """Damage in any parameter shows within as many rounds as there are slices, under the checkpoint's name."""
    server = Server(Checkpoint(), 2)
    server.runtimes[1].tensors["gate_up"].view(torch.int16)[0, 0] ^= 1
    found = [damage.parameter for step in range(4) for damage in server.states[1].audit_rolling(step, 4)]
    assert found == ["gate"]


@pytest.mark.parametrize("word", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("box", [((0, 50), (3, 41)), ((7, 49), (0, 64)), ((5, 6), (5, 6)), ((0, 50), (0, 0))])
def test_what_is_claimed_of_a_box_is_its_share_of_the_fingerprint(box: Any, word: str) -> None:
    """Runs long or short: by the naive twin, one element at a time."""
    shape, dtype = (50, 64), getattr(torch, word)
    raw = np.random.default_rng(0).bytes(50 * 64 * dtype.itemsize)
    whole = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
    part = whole[tuple(slice(low, high) for low, high in box)]
    state = ShardState([ParamMeta("w", word, shape)], {"w": [View(shape, box, part)]})
    assert [claim.partial for claim in state.claims()] == [box_fingerprint(raw, dtype.itemsize, 1, shape, box)]


@st.composite
def servers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, set[int]]]]:
    """A shape, and boxes of a grid over it with the ranks that hold each."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = list(itertools.product(*(itertools.pairwise(cut) for cut in cuts)))
    return shape, [(box, draw(st.sets(st.integers(0, 2), min_size=1))) for box in boxes]


@given(servers(), st.integers(0, 2**32), st.floats(0.0, 0.1))
def test_any_grid_of_pieces_on_any_ranks_follows_an_update(
    server: tuple[tuple[int, ...], list[tuple[Any, set[int]]]], rng_seed: int, share: float
) -> None:
    """Each rank's pieces hold their boxes of the new words, and all ranks the trainer's digest."""
    (shape, boxes), rng = server, np.random.default_rng(rng_seed)
    old = rng.integers(0, 1 << 16, shape, np.uint16)
    new = np.where(rng.random(shape) < share, old ^ 5, old).astype(np.uint16)
    meta, pieces, states = ParamMeta("w", "uint16", shape), list[tuple[torch.Tensor, Any]](), list[ShardState]()
    for rank in range(3):
        views = []
        for box, ranks in boxes:
            cut = tuple(slice(low, high) for low, high in box)
            if rank in ranks:
                views.append(View(shape, box, torch.from_numpy(old[cut].copy())))
                pieces.append((views[-1].tensor, new[cut]))
        states.append(ShardState([meta], {"w": views}))
    trainer = WeightState({"w": torch.from_numpy(old.copy())}, version=0)
    cover = Cover(trainer.table, [state.claims() for state in states])
    update = diff_state(trainer, [(meta, torch.from_numpy(new))], run_id="run")
    for state in states:
        state.adopt(cover.totals())
        state.version = 0
    staged = [ShardTransaction.stage(state, update) for state in states]
    for transaction in staged:
        transaction.prove_together(cover, [other.sums for other in staged])
        transaction.write()
    assert all(tensor.numpy().tolist() == wanted.tolist() for tensor, wanted in pieces)
    assert {state.digest for state in states} == {update.target_digest}
    assert [state.audit() for state in states] == [[], [], []]
