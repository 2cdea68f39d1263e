"""Diff, apply, undo and audit of groups. Right values: numpy over the words, and the project's own CPU fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.bits import Words, from_words, numpy_words
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import InputError
from deltacast.delta.fingerprint import change_sums, words_fingerprint
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
    audit_group,
    available,
    diff_group,
    faults,
    masks,
    undo_group,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # Triton 3.6's interpreter, on numpy < 2.4
]

Place = tuple[str, Backend]

EDGES = [1, 7, 8, 15, 17, 1023, 1024, 1025, 4095, 4097, 65535, 65536, 65537, 131072 + 3]
NAME_OF_WIDTH = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "int64"}


def random_words(rng: np.random.Generator, dtype: str, count: int) -> Words:
    high = 2 if dtype == "bool" else 1 << (8 * DTYPES[dtype].word_bytes)
    words: Words = rng.integers(0, high, count, dtype=np.uint64).astype(DTYPES[dtype].numpy_word)
    return words


def changed(rng: np.random.Generator, words: Words, share: float) -> Words:
    """A copy with about this share of the words replaced, each by a flip of its lowest bit."""
    flipped: Words = words ^ (rng.random(words.size) < share).astype(words.dtype)
    return flipped


def tensor_at(words: Words, dtype: str, shape: tuple[int, ...], device: str, shift: int = 0) -> torch.Tensor:
    """A tensor whose memory begins `shift` elements into its storage."""
    row = DTYPES[dtype]
    padded = np.concatenate([np.zeros(shift * row.words_per_element, words.dtype), words])
    flat = from_words(padded, row, (padded.size // row.words_per_element,)).to(device)
    return flat[shift:].view(shape)


@dataclass
class Case:
    """Parameters of one dtype as numpy words, and the group made of them."""

    old: list[Words]
    new: list[Words]
    base: list[torch.Tensor]
    group: ParamGroup

    @property
    def positions(self) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        return [np.flatnonzero(a != b) for a, b in zip(self.old, self.new, strict=True)]

    @property
    def total(self) -> int:
        return sum(found.size for found in self.positions)


def make_case(
    device: str, dtype: str, shapes: Sequence[tuple[int, ...]], share: float = 0.02, shift: int = 0, *, seed: int = 0
) -> Case:
    rng = np.random.default_rng(seed)
    row = DTYPES[dtype]
    old = [random_words(rng, dtype, int(np.prod(shape)) * row.words_per_element) for shape in shapes]
    new = [changed(rng, words, share) for words in old]
    base = [tensor_at(words, dtype, shape, device, shift) for words, shape in zip(old, shapes, strict=True)]
    target = [tensor_at(words, dtype, shape, device, shift * 2) for words, shape in zip(new, shapes, strict=True)]
    return Case(old, new, base, ParamGroup(base, target))


def run_diff(case: Case, backend: Backend) -> tuple[RawChunk, list[list[int]]]:
    """Diff the whole group as one chunk; it and its sums."""
    group, arena = case.group, Arena(case.group, case.total, 1)
    chunk = arena.chunk(0, group.num_blocks)
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device=group.device)
    diff_group(group, chunk, sums=sums, scratch=masks(group, group.num_blocks), audit_baseline=True, backend=backend)
    arena.settle(chunk, int(chunk.total))
    return chunk, unsigned(sums)


def unsigned(sums: torch.Tensor) -> list[list[int]]:
    return [[value % (1 << 64) for value in row] for row in sums.tolist()]


def expected(case: Case) -> tuple[list[int], list[int], list[int]]:
    """Counts, offsets and values of the whole group, parameter after parameter, block after block."""
    counts, offsets, values = [], [], []
    for new, positions in zip(case.new, case.positions, strict=True):
        starts = range(0, new.size, BLOCK_WORDS)
        counts += [int(((positions >= start) & (positions < start + BLOCK_WORDS)).sum()) for start in starts]
        offsets += (positions % BLOCK_WORDS).tolist()
        values += new[positions].tolist()
    return counts, offsets, values


def found(case: Case, chunk: RawChunk) -> tuple[list[int], list[int], list[int]]:
    word = np.dtype(f"<u{case.group.word_bytes}")
    return (
        chunk.counts.tolist(),
        chunk.offsets.cpu().numpy().view("<u2").tolist(),
        chunk.values.cpu().numpy().view(word).tolist(),
    )


def check_diff(case: Case, backend: Backend) -> RawChunk:
    chunk, (after, change, before) = run_diff(case, backend)
    assert found(case, chunk) == expected(case)
    assert after == [words_fingerprint(words) for words in case.new]
    assert before == [words_fingerprint(words) for words in case.old]
    sums = [change_sums(p, a[p], b[p]) for p, a, b in zip(case.positions, case.old, case.new, strict=True)]
    assert change == [new_sum for _, new_sum in sums]
    old_sums = [(c - a + b) % (1 << 64) for a, c, b in zip(after, change, before, strict=True)]
    assert old_sums == [old_sum for old_sum, _ in sums]
    return chunk


def words_of(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    return [numpy_words(tensor).tolist() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_diff_of_every_dtype_holds_counts_offsets_values_and_sums(place: Place, dtype: str) -> None:
    """All bit patterns; a scalar, an empty tensor, and tensors that end inside a block."""
    device, backend = place
    check_diff(make_case(device, dtype, [(), (0, 3), (5, 1031), (3, 7, 211)], 0.2), backend)


@pytest.mark.parametrize("word_bytes", NAME_OF_WIDTH)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_sizes_around_every_boundary_and_unaligned_starts(place: Place, word_bytes: int, shift: int) -> None:
    """Vectors, rows, tiles and blocks; memory aligned to nothing but its word."""
    device, backend = place
    check_diff(make_case(device, NAME_OF_WIDTH[word_bytes], [(size,) for size in EDGES], shift=shift), backend)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nothing_half_and_everything_changed(place: Place, share: float) -> None:
    """The loops over set bits run as often as they must: never, long, and through full blocks."""
    device, backend = place
    check_diff(make_case(device, "bfloat16", [(65536 + 100,), (1,)], share), backend)


def test_bits_are_compared_and_not_values(place: Place) -> None:
    """-0.0 differs from 0.0, and a NaN with the same payload is no change."""
    device, backend = place
    old = np.array([0x0000, 0x7FC1, 0x7FC1, 0x8000], "<u2")
    new = np.array([0x8000, 0x7FC1, 0x7FC2, 0x8000], "<u2")
    base, target = (tensor_at(words, "bfloat16", (4,), device) for words in (old, new))
    chunk = check_diff(Case([old], [new], [base], ParamGroup([base], [target])), backend)
    assert chunk.offsets[:2].tolist() == [0, 2]


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shift", [0, 1])
def test_apply_writes_keeps_and_sums_and_undo_takes_it_back(place: Place, dtype: str, shift: int) -> None:
    """After apply the baseline has the new bits, and both sums are those of its changed words."""
    device, backend = place
    case = make_case(device, dtype, [(70000,), (), (0,), (3, 500)], 0.1, shift)
    chunk, (_, change, _) = run_diff(case, backend)
    undo = UndoLog(chunk.arena)
    sums = torch.zeros(2, case.group.num_params, dtype=torch.int64, device=device)
    fault = faults(case.group)
    apply_group(case.group, chunk, undo, sums=sums, fault=fault, backend=backend)
    assert fault.tolist() == [NO_FAULT] * 2
    assert words_of(case.base) == [words.tolist() for words in case.new]
    before = [change_sums(p, a[p], b[p])[0] for p, a, b in zip(case.positions, case.old, case.new, strict=True)]
    assert unsigned(sums) == [before, change]
    for _ in range(2):
        undo_group(case.group, undo, backend=backend)
        assert words_of(case.base) == [words.tolist() for words in case.old]


def _swap(chunk: RawChunk) -> None:
    chunk.offsets[:2] = chunk.offsets[:2].flip(0)


def _repeat(chunk: RawChunk) -> None:
    chunk.offsets[1] = chunk.offsets[0]


def _past_the_tail(chunk: RawChunk) -> None:
    chunk.offsets[-1] = 5000  # the last block has 4,464 words


def _past_32767(chunk: RawChunk) -> None:
    chunk.offsets[0] = -1  # 65,535: as a signed number it would pass for ascending


def _count_too_large(chunk: RawChunk) -> None:
    chunk.counts[1] = 5000


def _negative_count(chunk: RawChunk) -> None:
    chunk.counts[0] = -1


def _moved_count(chunk: RawChunk) -> None:
    chunk.counts[0] -= 1
    chunk.counts[1] += 1


def _one_more(chunk: RawChunk) -> None:
    chunk.counts[0] += 1


def _one_less(chunk: RawChunk) -> None:
    chunk.counts[1] -= 1


@pytest.mark.parametrize(
    ("harm", "fault_blocks"),
    [
        (_swap, [NO_FAULT, 0]),
        (_repeat, [NO_FAULT, 0]),
        (_past_the_tail, [NO_FAULT, 1]),
        (_past_32767, [NO_FAULT, 0]),
        (_count_too_large, [1, NO_FAULT]),
        (_negative_count, [0, NO_FAULT]),
        (_moved_count, [NO_FAULT, 1]),
        (_one_more, [NO_FAULT, 0]),
        (_one_less, [NO_FAULT, 1]),
    ],
)
def test_a_hostile_chunk_is_named_and_writes_nothing(
    place: Place, harm: Callable[[RawChunk], None], fault_blocks: list[int]
) -> None:
    """Nor does a good chunk of the same round, nor undo."""
    device, backend = place
    case = make_case(device, "bfloat16", [(70000,)])
    good, _ = run_diff(case, backend)
    bad, _ = run_diff(case, backend)
    harm(bad)
    sums = torch.zeros(2, 1, dtype=torch.int64, device=device)
    fault = faults(case.group)
    for chunk in (bad, good):
        undo = UndoLog(chunk.arena)
        undo.applied.fill_(1)
        undo.reset()
        apply_group(case.group, chunk, undo, sums=sums, fault=fault, backend=backend)
        undo.values.fill_(77)
        undo_group(case.group, undo, backend=backend)
        assert fault.tolist() == fault_blocks
        assert words_of(case.base) == [words.tolist() for words in case.old]
        assert sums.tolist() == [[0], [0]]


@pytest.mark.parametrize("word_bytes", NAME_OF_WIDTH)
def test_an_audit_is_the_fingerprint_and_slices_add_up(place: Place, word_bytes: int) -> None:
    """Block by block into one sum, or all at once."""
    device, backend = place
    case = make_case(device, NAME_OF_WIDTH[word_bytes], [(70000,), (0,), (1,), (1025,)], shift=1)
    whole, slices = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))
    audit_group(case.group, whole, backend=backend)
    for block in range(case.group.num_blocks):
        audit_group(case.group, slices, first_block=block, num_blocks=1, backend=backend)
    assert unsigned(whole[None])[0] == [words_fingerprint(words) for words in case.old]
    assert slices.tolist() == whole.tolist()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    word_bytes=st.sampled_from(sorted(NAME_OF_WIDTH)),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    share=st.floats(0, 1),
)
def test_apply_of_a_diff_gives_the_new_bits(
    data: st.DataObject, word_bytes: int, sizes: list[int], share: float
) -> None:
    """Any sizes and any share of changes, on the twin."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    case = make_case("cpu", NAME_OF_WIDTH[word_bytes], [(size,) for size in sizes], share, seed=seed)
    chunk, _ = run_diff(case, "torch")
    sums = torch.zeros(2, case.group.num_params, dtype=torch.int64)
    apply_group(case.group, chunk, UndoLog(chunk.arena), sums=sums, fault=faults(case.group))
    assert words_of(case.base) == [words.tolist() for words in case.new]


@pytest.mark.gpu
def test_kernels_and_twin_agree_on_many_parameters() -> None:
    """Shapes of a transformer layer, repeated: more than 256 blocks, so that starts cross the sums of counts."""
    shapes = [(512, 3584), (3584,), (3584, 3584), (1,), (256, 3584), (0,), (37, 1001)] * 2
    case = make_case("cuda", "bfloat16", shapes, 0.01)
    assert case.group.num_blocks > 256
    by_kernel, by_twin = run_diff(case, "triton"), run_diff(case, "torch")
    assert found(case, by_kernel[0]) == found(case, by_twin[0])
    assert by_kernel[1] == by_twin[1]


@pytest.mark.gpu
def test_the_default_on_a_gpu_is_the_kernels() -> None:
    """`auto` never takes the twin where Triton runs."""
    assert available(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_than_two_to_the_31_elements() -> None:
    """Positions past int32: changes at the ends and around 2^31, found, applied, undone and audited."""
    count = 2**31 + 70001
    old = torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda")
    new = old.clone()
    positions = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 65536, count - 1], device="cuda")
    new[positions] ^= 1
    group = ParamGroup([old], [new])
    arena = Arena(group, 10, 1)
    chunk, undo = arena.chunk(0, group.num_blocks), UndoLog(arena)
    sums = torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    diff_group(group, chunk, sums=sums, scratch=masks(group, group.num_blocks), backend="triton")
    arena.settle(chunk, int(chunk.total))
    assert chunk.num_changes == 6
    blocks = torch.repeat_interleave(chunk.counts.to(torch.int64))
    offsets = chunk.offsets.to(torch.int64) & 0xFFFF
    assert (blocks * BLOCK_WORDS + offsets).tolist() == positions.tolist()
    assert unsigned(sums)[0] == [words_fingerprint(numpy_words(new))]
    before = old[positions].clone()
    apply_sums = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    apply_group(group, chunk, undo, sums=apply_sums, fault=faults(group), backend="triton")
    assert torch.equal(old, new)
    undo_group(group, undo, backend="triton")
    assert torch.equal(old[positions], before)
    audit = torch.zeros(1, dtype=torch.int64, device="cuda")
    audit_group(group, audit, backend="triton")
    assert int(audit) == int(sums[0] - apply_sums[1] + apply_sums[0])


def test_buffers_that_do_not_fit_are_refused() -> None:
    """Chunk, sums, scratch, log and fault record are checked before the first launch."""
    weight = torch.zeros(4, 6, dtype=torch.bfloat16)
    group = ParamGroup([weight], [weight.clone()])
    blind, other = ParamGroup([weight]), ParamGroup([weight.float()], [weight.float()])
    longer = ParamGroup([torch.zeros(65537, dtype=torch.bfloat16)])
    chunk, scratch, fault = Arena(group, 10, 1).chunk(0, 1, 0), masks(group, 1), faults(group)
    foreign, open_chunk = (Arena(owner, 10, 1).chunk(0, 1) for owner in (other, group))
    undo = UndoLog(chunk.arena)
    sums3, sums2 = (torch.zeros(rows, 1, dtype=torch.int64) for rows in (3, 2))
    refused: list[Callable[[], None]] = [
        lambda: diff_group(group, chunk, sums=sums2, scratch=scratch),
        lambda: diff_group(group, chunk, sums=sums3.to(torch.int32), scratch=scratch),
        lambda: diff_group(group, chunk, sums=sums3, scratch=scratch[:-1]),
        lambda: diff_group(group, foreign, sums=sums3, scratch=scratch),
        lambda: diff_group(group, Arena(longer, 10, 1).chunk(1, 1), sums=sums3, scratch=scratch),
        lambda: diff_group(blind, chunk, sums=sums3, scratch=scratch),
        lambda: apply_group(group, open_chunk, UndoLog(open_chunk.arena), sums=sums2, fault=fault),
        lambda: advance_group(group, [open_chunk]),
        lambda: advance_group(group, [chunk, chunk]),
        lambda: advance_group(group, []),
        lambda: apply_group(group, chunk, UndoLog(foreign.arena), sums=sums2, fault=fault),
        lambda: apply_group(group, chunk, undo, sums=sums3, fault=fault),
        lambda: apply_group(group, chunk, undo, sums=sums2, fault=fault[:1]),
        lambda: undo_group(group, undo, chunk),
        lambda: audit_group(group, sums2),
        lambda: audit_group(group, sums2[0], first_block=-1),
    ]
    for call in refused:
        with pytest.raises(InputError):
            call()
    assert undo.chunks == []
    assert sums3.tolist() == [[0]] * 3


@pytest.mark.skipif(available(torch.device("cpu")), reason="the interpreter is on")
def test_kernels_that_do_not_run_here_are_refused() -> None:
    """Asking for Triton on a CPU is an error, not a silent change to the twin."""
    with pytest.raises(InputError, match="do not run here"):
        audit_group(ParamGroup([torch.zeros(1)]), torch.zeros(1, dtype=torch.int64), backend="triton")


def test_importing_the_kernels_does_not_import_triton() -> None:
    """Triton is imported by the first launch."""
    import subprocess
    import sys

    code = "import sys, deltacast.delta.kernels; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
