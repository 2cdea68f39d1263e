"""Rounds over one arena, chunk by chunk: diff, receive, apply, undo. Right values: numpy over the words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from deltacast.delta.bits import Words, from_words, numpy_words
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import InputError
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.kernels import (
    BLOCK_WORDS,
    NO_FAULT,
    Arena,
    Backend,
    ParamGroup,
    RawChunk,
    UndoLog,
    advance_group,
    apply_group,
    diff_group,
    faults,
    mask_bytes,
    masks,
    undo_group,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # Triton 3.6's interpreter

Place = tuple[str, Backend]

SIZES = (150000, 3, 0, 70000)
"""3 + 1 + 0 + 2 blocks."""
RANGES = ((0, 2), (2, 1), (3, 0), (3, 3))
"""The first cuts a parameter, the last begins with a short block and crosses parameters."""


class Weights:
    """Old and new words of one dtype, as numpy arrays and as a group that diffs them."""

    def __init__(self, device: str, dtype: str = "bfloat16", share: float = 0.02, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        row = DTYPES[dtype]
        high = 1 << (8 * row.word_bytes)
        self.old: list[Words] = [rng.integers(0, high, size, np.uint64).astype(row.numpy_word) for size in SIZES]
        self.new: list[Words] = [words ^ (rng.random(words.size) < share).astype(words.dtype) for words in self.old]
        base, new = ([from_words(words, row, (words.size,)) for words in side] for side in (self.old, self.new))
        self.base = [tensor.clone().to(device) for tensor in base]
        self.group = ParamGroup(self.base, [tensor.to(device) for tensor in new])

    def changes(self, first_block: int, num_blocks: int) -> tuple[list[int], list[int], list[int]]:
        """Counts, offsets and values of a range of blocks, one block after the other."""
        blocks = [
            (old[at : at + BLOCK_WORDS], new[at : at + BLOCK_WORDS])
            for old, new in zip(self.old, self.new, strict=True)
            for at in range(0, old.size, BLOCK_WORDS)
        ][first_block : first_block + num_blocks]
        found = [np.flatnonzero(old != new) for old, new in blocks]
        pairs = [(int(at), int(new[at])) for offsets, (_, new) in zip(found, blocks, strict=True) for at in offsets]
        return [len(offsets) for offsets in found], [at for at, _ in pairs], [value for _, value in pairs]

    def holds(self, side: list[Words]) -> bool:
        return all(np.array_equal(numpy_words(tensor), words) for tensor, words in zip(self.base, side, strict=True))


def unsigned(tensor: torch.Tensor) -> list[int]:
    width = 8 * tensor.element_size()
    return [value % (1 << width) for value in tensor.tolist()]


def contents(chunk: RawChunk) -> tuple[list[int], list[int], list[int]]:
    return chunk.counts.tolist(), unsigned(chunk.offsets), unsigned(chunk.values)


def diff_round(
    weights: Weights, arena: Arena, backend: Backend, ranges: Sequence[tuple[int, int]] = RANGES
) -> tuple[list[RawChunk], torch.Tensor]:
    """Launch the diffs of all chunks before any total is read."""
    group = weights.group
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device=group.device)
    scratch = masks(group, max(num_blocks for _, num_blocks in ranges))
    arena.reset()
    chunks = [arena.chunk(*blocks) for blocks in ranges]
    for chunk in chunks:
        diff_group(group, chunk, sums=sums, scratch=scratch, backend=backend)
    return chunks, sums


def settle(arena: Arena, chunks: list[RawChunk]) -> None:
    for chunk, total in zip(chunks, arena.totals.tolist(), strict=False):
        arena.settle(chunk, total)


def sent(weights: Weights, backend: Backend) -> list[RawChunk]:
    """The chunks of a round as a sender has them."""
    arena = Arena(weights.group, 20000, 4)
    chunks, _ = diff_round(weights, arena, backend)
    settle(arena, chunks)
    return chunks


def receive(arena: Arena, chunk: RawChunk) -> RawChunk:
    """Copy what travels into a chunk of another arena; nothing but sizes and contents is known of the sender's."""
    got = arena.chunk(chunk.first_block, chunk.num_blocks, chunk.num_changes)
    for target, source in ((got.counts, chunk.counts), (got.offsets, chunk.offsets), (got.values, chunk.values)):
        target.copy_(source)
    return got


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_chunks_of_a_round_are_the_changes_of_their_blocks(place: Place, dtype: str) -> None:
    """In one arena, into one set of sums, each chunk from the next multiple of 16 on."""
    device, backend = place
    weights = Weights(device, dtype)
    arena = Arena(weights.group, 20000, 5)
    chunks, sums = diff_round(weights, arena, backend)
    settle(arena, chunks)
    expected = [weights.changes(*blocks) for blocks in RANGES]
    assert [contents(chunk) for chunk in chunks] == expected
    totals = [len(offsets) for _, offsets, _ in expected]
    assert arena.totals.tolist() == [*totals, 0]
    starts = [0]
    for total in totals:
        starts.append(starts[-1] + (total + 15) // 16 * 16)
    assert [chunk.start for chunk in chunks] == starts[:4]
    assert arena.starts.tolist() == [*starts, 0]
    assert unsigned(sums[0]) == [words_fingerprint(words) for words in weights.new]
    assert sums[2].tolist() == [0] * 4
    aligned = [chunk.offsets for chunk in chunks[:2]] + [chunk.values for chunk in chunks[:2]]
    assert all(view.data_ptr() % 16 == 0 for view in aligned)


@pytest.mark.parametrize("full", [0, 1, 3])
def test_after_an_overflow_earlier_chunks_are_right_and_later_ones_harmless(place: Place, full: int) -> None:
    """Whichever chunk overflows, by one change: totals are true, and nothing is written past the capacity."""
    device, backend = place
    weights = Weights(device)
    totals = [len(weights.changes(*blocks)[1]) for blocks in RANGES]
    starts = np.cumsum([0] + [(total + 15) // 16 * 16 for total in totals]).tolist()
    capacity = starts[full] + totals[full] - 1
    room = [torch.full((30000,), -7, dtype=torch.int16, device=device) for _ in range(2)]
    arena = Arena(weights.group, 0, 4)
    arena.offsets, arena.values = (buffer[:capacity] for buffer in room)
    chunks, _ = diff_round(weights, arena, backend)
    assert arena.totals.tolist() == totals
    for chunk in chunks[:full]:
        arena.settle(chunk, totals[chunk.number])
        assert contents(chunk) == weights.changes(*RANGES[chunk.number])
    with pytest.raises(InputError, match="no room"):
        arena.settle(chunks[full], totals[full])
    arena.settle(chunks[full], totals[full] - 1)  # what did fit
    assert contents(chunks[full])[1:] == tuple(part[:-1] for part in weights.changes(*RANGES[full])[1:])
    assert all((buffer[capacity:] == -7).all() for buffer in room)
    assert [count for chunk in chunks for count in chunk.counts.tolist()] == weights.changes(0, 6)[0]


def test_an_arena_used_again_gives_the_same_bytes(place: Place) -> None:
    """Whatever an earlier round, or memory, left in it; what lies between chunks is not written."""
    device, backend = place
    weights, others = Weights(device), Weights(device, share=0.03, seed=1)
    arena = Arena(weights.group, 20000, 4)
    runs = []
    for poison in (1, 2):
        diff_round(others, arena, backend)
        for buffer in (arena.counts, arena.offsets, arena.values, arena.count_sums, arena.totals, arena.starts[1:]):
            buffer.fill_(poison)
        chunks, sums = diff_round(weights, arena, backend)
        settle(arena, chunks)
        runs.append(([contents(chunk) for chunk in chunks], arena.totals.tolist(), sums.tolist()))
        end = chunks[0].place.stop
        assert end % 16
        assert arena.offsets[end : chunks[1].start].eq(poison).all()
        assert arena.values[end : chunks[1].start].eq(poison).all()
    assert runs[0] == runs[1]
    assert runs[0][0] == [weights.changes(*blocks) for blocks in RANGES]


def test_received_chunks_are_applied_and_undone_apart_or_together(place: Place) -> None:
    """Round after round in the same arena and log."""
    device, backend = place
    weights = Weights(device)
    group, arena = weights.group, Arena(weights.group, 20000, 4)
    undo, chunks = UndoLog(arena), sent(weights, backend)
    for _ in range(2):
        arena.reset()
        undo.reset()
        sums = torch.zeros(2, group.num_params, dtype=torch.int64, device=device)
        for chunk in chunks:
            apply_group(group, receive(arena, chunk), undo, sums=sums, fault=faults(group), backend=backend)
        assert weights.holds(weights.new)
        moved = (sums[1] - sums[0]).tolist()
        for words, target, by in zip(weights.old, weights.new, moved, strict=True):
            assert (words_fingerprint(words) + by) % (1 << 64) == words_fingerprint(target)
        first, cut = undo.chunks[0], 2 * BLOCK_WORDS
        undo_group(group, undo, first, backend=backend)
        mixed = np.concatenate([weights.old[0][:cut], weights.new[0][cut:]])
        assert weights.holds([mixed, *weights.new[1:]])
        for _ in range(2):
            undo_group(group, undo, backend=backend)
            assert weights.holds(weights.old)


def _bad_offset(chunk: RawChunk) -> None:
    chunk.offsets[-1] = chunk.offsets[-2]


def _bad_count(chunk: RawChunk) -> None:
    chunk.counts[0] = -(2**31)


@pytest.mark.parametrize(("harm", "fault_blocks"), [(_bad_offset, [NO_FAULT, 5]), (_bad_count, [3, NO_FAULT])])
@pytest.mark.parametrize("poison", [0, 1])
def test_a_hostile_chunk_ends_the_round_and_undo_takes_the_others_back(
    place: Place, harm: Callable[[RawChunk], None], fault_blocks: list[int], poison: int
) -> None:
    """Whatever the log held before, undo passes the hostile chunk over."""
    device, backend = place
    weights = Weights(device)
    group, arena = weights.group, Arena(weights.group, 20000, 4)
    undo, fault, chunks = UndoLog(arena), faults(group), sent(weights, backend)
    undo.applied.fill_(poison)
    undo.values.fill_(77)
    undo.reset()
    sums = torch.zeros(2, group.num_params, dtype=torch.int64, device=device)
    for chunk in chunks:
        got = receive(arena, chunk)
        if chunk.number == 3:
            harm(got)
        apply_group(group, got, undo, sums=sums, fault=fault, backend=backend)
    assert fault.tolist() == fault_blocks
    assert weights.holds([weights.new[0], *weights.old[1:]])
    undo_group(group, undo, backend=backend)
    assert weights.holds(weights.old)


def test_a_chunk_without_changes_or_without_blocks_is_applied_and_undone(place: Place) -> None:
    """An empty round moves nothing."""
    device, backend = place
    weights = Weights(device, share=0.0)
    group, chunks = weights.group, sent(weights, backend)
    undo = UndoLog(chunks[0].arena)
    sums = torch.zeros(2, group.num_params, dtype=torch.int64, device=device)
    for chunk in chunks:
        assert chunk.num_changes == 0
        apply_group(group, chunk, undo, sums=sums, fault=faults(group), backend=backend)
    undo_group(group, undo, backend=backend)
    assert weights.holds(weights.old)
    assert sums.tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("share", [0.0, 0.02])
@pytest.mark.parametrize("size", [1, 2, 4, 6, 9])
def test_a_round_of_our_own_is_written_at_once(place: Place, dtype: str, share: float, size: int) -> None:
    """Whatever size its chunks have, round after round."""
    device, backend = place
    weights = Weights(device, dtype, share)
    arena = Arena(weights.group, 20000, 6)
    ranges = [(first, min(size, 6 - first)) for first in range(0, 6, size)]
    for _ in range(2):
        chunks, _ = diff_round(weights, arena, backend, ranges)
        settle(arena, chunks)
        advance_group(weights.group, chunks, backend=backend)
        assert weights.holds(weights.new)


def test_only_a_whole_round_of_even_chunks_is_written_at_once() -> None:
    """Chunks of several sizes, some of them, and another order are refused before anything is written."""
    weights = Weights("cpu")
    arena = Arena(weights.group, 20000, 6)
    chunks, _ = diff_round(weights, arena, "torch", [(0, 2), (2, 2), (4, 2)])
    settle(arena, chunks)
    uneven = sent(weights, "torch")
    for some in (uneven, chunks[:2], chunks[1:], chunks[::-1], []):
        with pytest.raises(InputError, match="whole round"):
            advance_group(weights.group, some)
    assert weights.holds(weights.old)


def test_one_read_brings_sums_totals_and_faults(place: Place) -> None:
    """Sums and fault record may be views of one buffer."""
    device, backend = place
    weights = Weights(device)
    group, chunks = weights.group, sent(weights, backend)
    record = torch.zeros(9, dtype=torch.int64, device=device)
    fault, undo = record[8:].view(torch.int32).fill_(NO_FAULT), UndoLog(chunks[0].arena)
    for chunk in chunks:
        apply_group(group, chunk, undo, sums=record[:8].view(2, 4), fault=fault, backend=backend)
    old_sums, new_sums = np.array_split(np.array(record.tolist()[:8]), 2)
    moved = [words_fingerprint(b) - words_fingerprint(a) for a, b in zip(weights.old, weights.new, strict=True)]
    assert [int(by) % (1 << 64) for by in new_sums - old_sums] == [by % (1 << 64) for by in moved]
    assert record[8].item() == NO_FAULT << 32 | NO_FAULT


def test_an_arena_refuses_chunks_that_would_share_memory_or_do_not_fit() -> None:
    """By a named error that leaves the round as it was."""
    arena = Arena(Weights("cpu").group, 100, 3)
    assert arena.capacity == 112
    arena.chunk(0, 2, 17)
    refused: list[Callable[[], object]] = [
        lambda: arena.chunk(1, 1, 0),
        lambda: arena.chunk(2, -1, 0),
        lambda: arena.chunk(2, 5, 0),
        lambda: arena.chunk(2, 1, -1),
        lambda: arena.chunk(2, 1, 81),
        lambda: arena.chunk(2, 0, 1),
    ]
    for call in refused:
        with pytest.raises(InputError):
            call()
    second, third = arena.chunk(2, 1), arena.chunk(3, 3)
    with pytest.raises(InputError, match="more chunks"):
        arena.chunk(6, 0)
    with pytest.raises(InputError, match="not settled"):
        _ = second.offsets
    with pytest.raises(InputError, match="in order"):
        arena.settle(third, 0)
    arena.settle(second, 80)
    with pytest.raises(InputError, match="in order"):
        arena.settle(second, 80)
    with pytest.raises(InputError, match="at most 0"):
        arena.settle(third, 1)
    arena.settle(third, 0)
    assert [second.start, third.start] == [32, 112]
    arena.reset()
    assert arena.chunk(0, 6, 112).start == 0


def test_a_chunk_is_logged_once() -> None:
    """Applying it again would log its new bits as old ones."""
    weights = Weights("cpu")
    group, chunk = weights.group, sent(weights, "torch")[0]
    undo = UndoLog(chunk.arena)
    sums = torch.zeros(2, group.num_params, dtype=torch.int64)
    apply_group(group, chunk, undo, sums=sums, fault=faults(group))
    with pytest.raises(InputError, match="logged already"):
        apply_group(group, chunk, undo, sums=sums, fault=faults(group))
    undo_group(group, undo)
    assert weights.holds(weights.old)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "int64"])
def test_memory_is_known_before_it_is_allocated(dtype: str) -> None:
    """Arena, log, masks and table: as computed by hand for 6 blocks, 112 changes and 4 chunks."""
    group = Weights("cpu", dtype).group
    width = DTYPES[dtype].word_bytes
    arena = Arena(group, 100, 4)
    undo = UndoLog(arena)
    assert arena.nbytes == Arena.bytes_for(group, 100, 4) == 6 * 4 + 112 * (2 + width) + 5 * 8 + 4 * 8 + 4 * 4
    assert undo.nbytes == UndoLog.bytes_for(group, 100, 4) == 112 * width + 4 * 4
    assert masks(group, 3).nbytes == mask_bytes(group, 3) == 3 * 65536 // {1: 8, 2: 8, 8: 2}[width]
    assert group.nbytes == ParamGroup.bytes_for(SIZES) == 6 * 32
