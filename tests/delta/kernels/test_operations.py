"""Diff, apply, undo and audit of groups. Right values: numpy over the words, and the project's own CPU fingerprints.

The same bodies run on the torch twin (CPU and GPU), on the Triton kernels (`-m gpu`), and on the kernels in Triton's
interpreter where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.bits import Words, from_words, numpy_words
from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.fingerprint import change_sums, words_fingerprint
from deltacast.delta.kernels import (
    BLOCK_WORDS,
    NO_FAULT,
    Backend,
    ParamGroup,
    RawChunk,
    UndoLog,
    apply_group,
    audit_group,
    available,
    diff_group,
    faults,
    masks,
    undo_group,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # Triton 3.6's interpreter, on numpy < 2.4
]

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", "torch"), id="twin"),
        pytest.param(("cpu", "triton"), id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="not set")),
        pytest.param(("cuda", "torch"), id="gpu-twin", marks=pytest.mark.gpu),
        pytest.param(("cuda", "triton"), id="gpu", marks=pytest.mark.gpu),
    ],
)
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


def run_diff(case: Case, backend: Backend, capacity: int | None = None) -> tuple[RawChunk, list[list[int]]]:
    group = case.group
    chunk = RawChunk.allocate(group, group.num_blocks, case.total if capacity is None else capacity)
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device=group.device)
    diff_group(group, chunk, sums=sums, scratch=masks(group, group.num_blocks), audit_baseline=True, backend=backend)
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
    count = chunk.read_total()
    word = np.dtype(f"<u{case.group.word_bytes}")
    return (
        chunk.counts[: chunk.num_blocks].tolist(),
        chunk.offsets[:count].cpu().numpy().view("<u2").tolist(),
        chunk.values[:count].cpu().numpy().view(word).tolist(),
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


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_diff_of_every_dtype_holds_counts_offsets_values_and_sums(place: Place, dtype: str) -> None:
    """All bit patterns; a scalar, an empty tensor, and tensors that end inside a block."""
    device, backend = place
    check_diff(make_case(device, dtype, [(), (0, 3), (5, 1031), (3, 7, 211)], 0.2), backend)


@PLACES
@pytest.mark.parametrize("word_bytes", NAME_OF_WIDTH)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_sizes_around_every_boundary_and_unaligned_starts(place: Place, word_bytes: int, shift: int) -> None:
    """Vectors, rows, tiles and blocks; memory aligned to nothing but its word."""
    device, backend = place
    check_diff(make_case(device, NAME_OF_WIDTH[word_bytes], [(size,) for size in EDGES], shift=shift), backend)


@PLACES
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nothing_half_and_everything_changed(place: Place, share: float) -> None:
    """The loops over set bits run as often as they must: never, long, and through full blocks."""
    device, backend = place
    check_diff(make_case(device, "bfloat16", [(65536 + 100,), (1,)], share), backend)


@PLACES
def test_bits_are_compared_and_not_values(place: Place) -> None:
    """-0.0 differs from 0.0, and a NaN with the same payload is no change."""
    device, backend = place
    old = np.array([0x0000, 0x7FC1, 0x7FC1, 0x8000], "<u2")
    new = np.array([0x8000, 0x7FC1, 0x7FC2, 0x8000], "<u2")
    base, target = (tensor_at(words, "bfloat16", (4,), device) for words in (old, new))
    chunk = check_diff(Case([old], [new], [base], ParamGroup([base], [target])), backend)
    assert chunk.offsets[:2].tolist() == [0, 2]


@PLACES
def test_chunks_of_a_group_join_to_the_whole(place: Place) -> None:
    """Ranges of blocks can be diffed apart, into one set of sums."""
    device, backend = place
    case = make_case(device, "bfloat16", [(150000,), (3,), (0,), (70000,)])
    group, scratch = case.group, masks(case.group, 2)
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device=device)
    parts = []
    for first in range(0, group.num_blocks, 2):
        chunk = RawChunk.allocate(group, 2, case.total)
        count = min(2, group.num_blocks - first)
        diff_group(group, chunk, sums=sums, scratch=scratch, first_block=first, num_blocks=count, backend=backend)
        parts.append(found(case, chunk))
    assert tuple([value for part in parts for value in part[i]] for i in range(3)) == expected(case)
    assert unsigned(sums)[0] == [words_fingerprint(words) for words in case.new]
    assert unsigned(sums)[2] == [0] * group.num_params


@PLACES
def test_an_overflow_tells_the_total_and_writes_nothing_past_the_end(place: Place) -> None:
    """The chunk holds the first changes; the bytes behind its buffers stay."""
    device, backend = place
    case = make_case(device, "bfloat16", [(70000,), (70000,)])
    counts, offsets, values = expected(case)
    for capacity in (0, 1, counts[0] + 5, case.total - 1):
        room = [torch.full((case.total,), -7, dtype=torch.int16, device=device) for _ in range(2)]
        chunk = RawChunk.allocate(case.group, case.group.num_blocks, 0)
        chunk.offsets, chunk.values = (buffer[:capacity] for buffer in room)
        sums = torch.zeros(3, 2, dtype=torch.int64, device=device)
        diff_group(case.group, chunk, sums=sums, scratch=masks(case.group, case.group.num_blocks), backend=backend)
        assert chunk.read_total() == case.total
        assert chunk.counts.tolist() == counts
        assert chunk.offsets.cpu().numpy().view("<u2").tolist() == offsets[:capacity]
        assert chunk.values.cpu().numpy().view("<u2").tolist() == values[:capacity]
        assert all((buffer[capacity:] == -7).all() for buffer in room)


@PLACES
def test_equal_inputs_give_equal_bytes(place: Place) -> None:
    """Two runs, buffers poisoned differently before each."""
    device, backend = place
    case = make_case(device, "float32", [(200000,), (1000,)])
    runs = []
    for poison in (1, 2):
        chunk = RawChunk.allocate(case.group, case.group.num_blocks, case.total)
        for buffer in (chunk.counts, chunk.offsets, chunk.values, chunk.count_sums):
            buffer.fill_(poison)
        scratch = masks(case.group, case.group.num_blocks).fill_(-poison)
        sums = torch.zeros(3, 2, dtype=torch.int64, device=device)
        diff_group(case.group, chunk, sums=sums, scratch=scratch, backend=backend)
        runs.append((found(case, chunk), sums.tolist()))
    assert runs[0] == runs[1]


@PLACES
@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shift", [0, 1])
def test_apply_writes_keeps_and_sums_and_undo_takes_it_back(place: Place, dtype: str, shift: int) -> None:
    """After apply the baseline has the new bits, and both sums are those of its changed words."""
    device, backend = place
    case = make_case(device, dtype, [(70000,), (), (0,), (3, 500)], 0.1, shift)
    chunk, (_, change, _) = run_diff(case, backend)
    undo = UndoLog.allocate(case.group, case.total)
    sums = torch.zeros(2, case.group.num_params, dtype=torch.int64, device=device)
    fault = faults(case.group)
    apply_group(case.group, chunk, case.total, undo, sums=sums, fault=fault, backend=backend)
    assert fault.tolist() == [NO_FAULT] * 2
    assert words_of(case.base) == [words.tolist() for words in case.new]
    before = [change_sums(p, a[p], b[p])[0] for p, a, b in zip(case.positions, case.old, case.new, strict=True)]
    assert unsigned(sums) == [before, change]
    for _ in range(2):
        undo_group(case.group, chunk, undo, backend=backend)
        assert words_of(case.base) == [words.tolist() for words in case.old]


@PLACES
def test_chunks_can_be_applied_and_undone_apart(place: Place) -> None:
    """Each chunk has its own log; undoing one leaves the other."""
    device, backend = place
    case = make_case(device, "bfloat16", [(150000,), (70000,)])
    group = case.group
    sums = torch.zeros(2, group.num_params, dtype=torch.int64, device=device)
    done = []
    for first, count in ((0, 2), (2, 3)):
        chunk, undo = RawChunk.allocate(group, count, case.total), UndoLog.allocate(group, case.total)
        diff = torch.zeros(3, group.num_params, dtype=torch.int64, device=device)
        diff_group(
            group, chunk, sums=diff, scratch=masks(group, count), first_block=first, num_blocks=count, backend=backend
        )
        apply_group(group, chunk, chunk.read_total(), undo, sums=sums, fault=faults(group), backend=backend)
        done.append((chunk, undo))
    assert words_of(case.base) == [words.tolist() for words in case.new]
    undo_group(group, *done[0], backend=backend)
    cut = 2 * BLOCK_WORDS
    assert numpy_words(case.base[0]).tolist() == [*case.old[0][:cut].tolist(), *case.new[0][cut:].tolist()]
    assert numpy_words(case.base[1]).tolist() == case.new[1].tolist()


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


@PLACES
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
    undo = UndoLog.allocate(case.group, case.total)
    sums = torch.zeros(2, 1, dtype=torch.int64, device=device)
    fault = faults(case.group)
    for chunk in (bad, good):
        apply_group(case.group, chunk, case.total, undo, sums=sums, fault=fault, backend=backend)
        undo.values.fill_(77)
        undo_group(case.group, chunk, undo, backend=backend)
        assert fault.tolist() == fault_blocks
        assert words_of(case.base) == [words.tolist() for words in case.old]
        assert sums.tolist() == [[0], [0]]


@PLACES
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
    apply_group(
        case.group, chunk, case.total, UndoLog.allocate(case.group, case.total), sums=sums, fault=faults(case.group)
    )
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
    chunk, undo = RawChunk.allocate(group, group.num_blocks, 10), UndoLog.allocate(group, 10)
    sums = torch.zeros(3, 1, dtype=torch.int64, device="cuda")
    diff_group(group, chunk, sums=sums, scratch=masks(group, group.num_blocks), backend="triton")
    assert chunk.read_total() == 6
    blocks = torch.repeat_interleave(chunk.counts.to(torch.int64))
    offsets = chunk.offsets[:6].to(torch.int64) & 0xFFFF
    assert (blocks * BLOCK_WORDS + offsets).tolist() == positions.tolist()
    assert unsigned(sums)[0] == [words_fingerprint(numpy_words(new))]
    before = old[positions].clone()
    apply_sums = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    apply_group(group, chunk, 6, undo, sums=apply_sums, fault=faults(group), backend="triton")
    assert torch.equal(old, new)
    undo_group(group, chunk, undo, backend="triton")
    assert torch.equal(old[positions], before)
    audit = torch.zeros(1, dtype=torch.int64, device="cuda")
    audit_group(group, audit, backend="triton")
    assert int(audit) == int(sums[0] - apply_sums[1] + apply_sums[0])


def _tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(4, 6, dtype=dtype)]


@pytest.mark.parametrize(
    ("baseline", "new", "error"),
    [
        ([], None, InputError),
        ([torch.zeros(4, 6).t()], None, InputError),
        ([torch.zeros(4, device="meta")], None, InputError),
        ([torch.zeros(4), torch.zeros(4, device="meta")], None, InputError),
        ([torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)], None, TableError),
        (_tensors(), _tensors(torch.float16), TableError),
        (_tensors(), [torch.zeros(6, 4, dtype=torch.bfloat16)], TableError),
        (_tensors(), [], InputError),
    ],
)
def test_a_group_refuses_what_it_cannot_address(
    baseline: list[torch.Tensor], new: list[torch.Tensor] | None, error: type[Exception]
) -> None:
    """Before anything runs, by a named error."""
    with pytest.raises(error):
        ParamGroup(baseline, new)


def test_errors_name_the_parameter() -> None:
    """By the name that the caller gave."""
    with pytest.raises(TableError, match=r"lm_head") as caught:
        ParamGroup(_tensors(), [torch.zeros(3)], names=["lm_head"])
    assert caught.value.parameter == "lm_head"


def test_buffers_that_do_not_fit_are_refused() -> None:
    """Sums, scratch, chunk, log and fault record are checked before the first launch."""
    group = ParamGroup(_tensors(), _tensors())
    other = ParamGroup(_tensors(torch.float32))
    chunk, undo, scratch = RawChunk.allocate(group, 1, 10), UndoLog.allocate(group, 10), masks(group, 1)
    sums3, sums2 = (torch.zeros(rows, 1, dtype=torch.int64) for rows in (3, 2))
    refused: list[Callable[[], None]] = [
        lambda: diff_group(group, chunk, sums=sums2, scratch=scratch),
        lambda: diff_group(group, chunk, sums=sums3.to(torch.int32), scratch=scratch),
        lambda: diff_group(group, chunk, sums=sums3, scratch=scratch[:-1]),
        lambda: diff_group(group, RawChunk.allocate(group, 0, 10), sums=sums3, scratch=scratch),
        lambda: diff_group(group, RawChunk.allocate(other, 1, 10), sums=sums3, scratch=scratch),
        lambda: diff_group(group, chunk, sums=sums3, scratch=scratch, first_block=1, num_blocks=1),
        lambda: diff_group(other, RawChunk.allocate(other, 1, 10), sums=sums3, scratch=masks(other, 1)),
        lambda: apply_group(group, chunk, 11, undo, sums=sums2, fault=faults(group)),
        lambda: apply_group(group, chunk, -1, undo, sums=sums2, fault=faults(group)),
        lambda: apply_group(group, chunk, 0, UndoLog.allocate(other, 10), sums=sums2, fault=faults(group)),
        lambda: apply_group(group, chunk, 0, undo, sums=sums3, fault=faults(group)),
        lambda: apply_group(group, chunk, 0, undo, sums=sums2, fault=faults(group)[:1]),
        lambda: undo_group(group, chunk, UndoLog.allocate(other, 10)),
        lambda: audit_group(group, sums2),
        lambda: audit_group(group, sums2[0], first_block=-1),
    ]
    for call in refused:
        with pytest.raises(InputError):
            call()
    if not INTERPRETED:
        with pytest.raises(InputError, match="do not run here"):
            diff_group(group, chunk, sums=sums3, scratch=scratch, backend="triton")
    assert sums3.tolist() == [[0]] * 3


def test_importing_the_kernels_does_not_import_triton() -> None:
    """Triton is imported by the first launch."""
    import subprocess
    import sys

    code = "import sys, deltacast.delta.kernels; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
