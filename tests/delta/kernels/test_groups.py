"""Groups: what they refuse, new tensors at other addresses, staged baselines, shared keys. Right values: numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from deltacast.delta.bits import Words, numpy_words
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.kernels import (
    Arena,
    Backend,
    KeyTables,
    ParamGroup,
    RawChunk,
    UndoLog,
    apply_group,
    audit_group,
    diff_group,
    faults,
    masks,
    undo_group,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # Triton 3.6's interpreter

Place = tuple[str, Backend]

SIZES = (150000, 0, 21, 70000)
"""3 + 0 + 1 + 2 blocks."""
CUT = 2
"""The first chunk ends inside the first parameter."""


def some_words(seed: int) -> list[Words]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1 << 16, size, np.uint16) for size in SIZES]


def tensors(words: list[Words], device: str) -> list[torch.Tensor]:
    return [torch.from_numpy(one.view(np.int16)).clone().view(torch.bfloat16).to(device) for one in words]


def in_one_buffer(words: list[Words]) -> list[torch.Tensor]:
    """Host tensors in one allocation, each at a multiple of 16 bytes."""
    starts = np.cumsum([0] + [-(-one.size // 8) * 8 for one in words])
    buffer = torch.full((int(starts[-1]),), -1, dtype=torch.int16).view(torch.bfloat16)
    views = [buffer[start : start + one.size] for start, one in zip(starts, words, strict=False)]
    for view, one in zip(views, words, strict=True):
        view.view(torch.int16).copy_(torch.from_numpy(one.view(np.int16)))
    return views


def diff(group: ParamGroup, chunk: RawChunk, backend: Backend) -> tuple[list[int], list[int]]:
    """Offsets and values of one chunk."""
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device=group.device)
    diff_group(group, chunk, sums=sums, scratch=masks(group, chunk.num_blocks), backend=backend)
    chunk.arena.settle(chunk, int(chunk.total))
    offsets, values = (part.cpu().numpy().view(np.uint16).tolist() for part in (chunk.offsets, chunk.values))
    return offsets, values


def changes(old: list[Words], new: list[Words], first_block: int, num_blocks: int) -> tuple[list[int], list[int]]:
    blocks = [
        (a[at : at + 65536], b[at : at + 65536])
        for a, b in zip(old, new, strict=True)
        for at in range(0, a.size, 65536)
    ]
    picked = [(np.flatnonzero(a != b), b) for a, b in blocks[first_block : first_block + num_blocks]]
    return [int(at) for found, _ in picked for at in found], [int(b[at]) for found, b in picked for at in found]


def unsigned(sums: torch.Tensor) -> list[int]:
    return [value % (1 << 64) for value in sums.tolist()]


def test_new_tensors_may_lie_elsewhere_each_round_and_chunk(place: Place) -> None:
    """A parameter in two chunks may move between their diffs; what the earlier diff reads stays."""
    device, backend = place
    old = some_words(0)
    group = ParamGroup(tensors(old, device))
    arena = Arena(group, 300000, 2)
    for seed in (1, 2, 3):
        new = some_words(seed)
        arena.reset()
        keep = []
        for first, count in ((0, CUT), (CUT, 6 - CUT)):
            keep.append(tensors(new, device))
            for param, tensor in enumerate(keep[-1]):
                group.point_new(param, tensor)
            chunk = arena.chunk(first, count)
            assert diff(group, chunk, backend) == changes(old, new, first, count)
        group.upload(0, group.num_blocks)
        assert group.table.blocks.tolist() == group.table.rows.tolist()


def test_the_tensor_that_was_pointed_last_counts(place: Place) -> None:
    """Also if it is the same object with other memory, and if only one parameter moved."""
    device, backend = place
    old, new = some_words(0), some_words(1)
    group = ParamGroup(tensors(old, device), tensors(old, device))
    moved = tensors(old, device)[0]
    arena = Arena(group, 300000, 3)
    group.point_new(0, moved)
    assert diff(group, arena.chunk(0, CUT), backend) == ([], [])
    moved.data = tensors(new, device)[0]
    group.point_new(0, moved)
    arena.reset()
    assert diff(group, arena.chunk(0, 6), backend) == changes(old, [new[0], *old[1:]], 0, 6)


def test_released_tensors_are_needed_again_and_freed() -> None:
    """A diff refuses, by name, blocks of parameters without new tensors; others it takes."""
    old = some_words(0)
    group = ParamGroup(tensors(old, "cpu"), names=["a", "empty", "b", "c"])
    arena = Arena(group, 300000, 4)
    with pytest.raises(InputError, match="'a'"):
        diff(group, arena.chunk(0, 1), "torch")
    for param in (0, 2, 3):
        group.point_new(param, group.baseline[param].view(torch.bfloat16))
    arena.reset()
    assert diff(group, arena.chunk(0, 4), "torch") == ([], [])
    group.release_new([3])
    group.release_new([])
    assert diff(group, arena.chunk(4, 0), "torch") == ([], [])
    with pytest.raises(InputError, match="'c'"):
        diff(group, arena.chunk(4, 1), "torch")
    group.release_new()
    arena.reset()
    with pytest.raises(InputError, match="'b'"):
        diff(group, arena.chunk(3, 1), "torch")


def test_a_staged_baseline_is_worked_on_run_by_run(place: Place) -> None:
    """Two slabs take turns; diff, apply, undo and audit see the run that was pointed last, the host's memory none."""
    device, backend = place
    old, new = some_words(0), some_words(1)
    host = in_one_buffer(old)
    group = ParamGroup(host, tensors(new, device), device=device)
    arena = Arena(group, 300000, 2)
    undo, fault = UndoLog(arena), faults(group)
    slabs = [torch.zeros(3 * 65536, dtype=torch.int16, device=device) for _ in range(2)]
    audit = torch.zeros(4, dtype=torch.int64, device=device)
    sums = torch.zeros(2, 4, dtype=torch.int64, device=device)
    for number, (first, count) in enumerate(((0, 3), (3, 3))):
        run, slab = group.baseline_run(first, count), slabs[number]
        slab[: run.numel()].copy_(run)
        group.point_baseline(first, count, slab)
        audit_group(group, audit, first_block=first, num_blocks=count, backend=backend)
        chunk = arena.chunk(first, count)
        assert diff(group, chunk, backend) == changes(old, new, first, count)
        apply_group(group, chunk, undo, sums=sums, fault=fault, backend=backend)
        run.copy_(slab[: run.numel()])
    assert unsigned(audit) == [words_fingerprint(words) for words in old]
    assert [numpy_words(tensor).tolist() for tensor in host] == [words.tolist() for words in new]
    for chunk in undo.chunks:
        run = group.baseline_run(chunk.first_block, chunk.num_blocks)
        group.point_baseline(chunk.first_block, chunk.num_blocks, slabs[chunk.number])
        undo_group(group, undo, chunk, backend=backend)
        run.copy_(slabs[chunk.number][: run.numel()])
    assert [numpy_words(tensor).tolist() for tensor in host] == [words.tolist() for words in old]
    assert host[2].untyped_storage().nbytes() == sum(-(-size // 8) * 16 for size in SIZES)


def test_a_run_is_the_memory_of_its_blocks_with_the_gaps() -> None:
    """From inside a parameter, over an empty one and a gap of three words, into the next."""
    old = some_words(0)
    group = ParamGroup(in_one_buffer(old), device="cpu")
    expected = [*old[0][131072:].tolist(), *old[2].tolist(), 65535, 65535, 65535, *old[3][:65536].tolist()]
    assert [value % 65536 for value in group.baseline_run(2, 3).tolist()] == expected
    assert group.baseline_run(6, 0).tolist() == []


def test_staging_refuses_what_is_not_there() -> None:
    """Runs in pieces, slabs that do not fit, blocks outside the run, and groups that are not staged."""
    old = some_words(0)
    host = in_one_buffer(old)
    group, pieces = ParamGroup(host, host, device="cpu"), ParamGroup(tensors(old, "cpu"), device="cpu")
    backwards = ParamGroup([host[3], host[0]], device="cpu")
    slab, sums = torch.zeros(65536 * 2, dtype=torch.int16), torch.zeros(4, dtype=torch.int64)
    pieces.point_baseline(0, 1, slab)
    refused: list[Callable[[], object]] = [
        lambda: audit_group(group, sums),
        lambda: diff(group, Arena(group, 10, 1).chunk(0, 1), "torch"),
        lambda: pieces.baseline_run(2, 2),
        lambda: backwards.baseline_run(1, 2),
        lambda: group.point_baseline(5, 2, slab),
        lambda: group.point_baseline(0, 3, slab),
        lambda: group.point_baseline(0, 1, slab.view(torch.bfloat16)),
        lambda: group.point_baseline(0, 1, slab[::2]),
        lambda: group.point_baseline(0, 1, slab.view(2, 65536)),
        lambda: ParamGroup(host, host).point_baseline(0, 1, slab),
    ]
    for call in refused:
        with pytest.raises(InputError):
            call()
    group.point_baseline(1, 2, slab)
    for first, count in ((0, 1), (0, 2), (2, 2), (3, 1)):
        with pytest.raises(InputError, match="blocks 1 to 2"):
            audit_group(group, sums, first_block=first, num_blocks=count)
    audit_group(group, sums, first_block=1, num_blocks=2)


def test_groups_share_keys_that_are_long_enough(place: Place) -> None:
    """Of a group over some of the parameters, as for a rolling audit."""
    device, backend = place
    old = some_words(0)
    whole = ParamGroup(tensors(old, device))
    part = ParamGroup(tensors(old, device)[2:], keys=whole.keys)
    assert part.keys is whole.keys
    assert whole.keys.nbytes == 8 * (1024 + 3 * 64)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    audit_group(part, sums, backend=backend)
    assert unsigned(sums) == [words_fingerprint(words) for words in old[2:]]
    with pytest.raises(InputError, match="192 rows"):
        ParamGroup(tensors(old, device), keys=KeyTables.on(torch.device(device), 191))


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


@pytest.mark.parametrize(
    ("param", "tensor", "error"),
    [
        (1, torch.zeros(4, 6, dtype=torch.bfloat16), InputError),
        (-1, torch.zeros(4, 6, dtype=torch.bfloat16), InputError),
        (0, torch.zeros(4, 6, dtype=torch.float16), TableError),
        (0, torch.zeros(24, dtype=torch.bfloat16), TableError),
        (0, torch.zeros(6, 4, dtype=torch.bfloat16).t(), InputError),
        (0, torch.zeros(4, 6, dtype=torch.bfloat16, device="meta"), InputError),
        (0, torch.zeros(4, 6, dtype=torch.bfloat16).to_sparse(), InputError),
    ],
)
def test_a_new_tensor_that_does_not_fit_is_refused(param: int, tensor: torch.Tensor, error: type[Exception]) -> None:
    """And the one that was there stays."""
    group = ParamGroup(_tensors(), _tensors())
    before = group.table.rows.tolist()
    with pytest.raises(error):
        group.point_new(param, tensor)
    assert group.table.rows.tolist() == before
    assert diff(group, Arena(group, 10, 1).chunk(0, 1), "torch") == ([], [])


def test_a_lazily_conjugated_new_tensor_is_refused() -> None:
    """Its memory has other bits than it shows."""
    group = ParamGroup([torch.zeros(4, dtype=torch.complex64)])
    with pytest.raises(InputError, match="conjugated"):
        group.point_new(0, torch.zeros(4, dtype=torch.complex64).conj())
