"""Words of live tensors. Right values: storage bytes through numpy strides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from deltacast.delta.dtypes import DTYPES
from deltacast.delta.errors import DTypeError, InputError
from deltacast.delta.memory import WordMemory
from tensor_bytes import WORDS, random_raw, random_tensor, raw_bytes

_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "stepped": lambda t: t[::2, 1::3],
    "offset": lambda t: t[2:, 3:],
    "0-d": lambda t: t[3, 4],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("name", WORDS)
def test_reads_and_writes_reach_exactly_the_words_addressed(name: str, layout: str) -> None:
    """Every dtype and layout: row-major positions, no copy, no other byte touched."""
    rng = np.random.default_rng(1)
    base = random_tensor(rng, name, (6, 8))
    tensor = _LAYOUTS[layout](base)
    outside = _bytes_outside(base, tensor)
    memory = WordMemory(tensor, name="w")
    word = DTYPES[name].numpy_word
    expected = np.frombuffer(raw_bytes(tensor), word).copy()
    assert memory.num_words == expected.size
    positions = np.sort(rng.choice(expected.size, expected.size // 2, replace=False)).astype(np.int64)
    assert memory.read(positions).tobytes() == expected[positions].tobytes()
    assert memory.read_all().tobytes() == expected.tobytes()
    expected[positions] = np.frombuffer(random_raw(rng, name, 48), word)[: positions.size]
    memory.write(positions, expected[positions])
    assert raw_bytes(tensor) == expected.tobytes()
    expected = np.frombuffer(random_raw(rng, name, tensor.numel()), word)
    memory.write_all(expected)
    assert raw_bytes(tensor) == expected.tobytes()
    assert memory.tensor.data_ptr() == tensor.data_ptr()
    assert _bytes_outside(base, tensor) == outside


def _bytes_outside(base: torch.Tensor, view: torch.Tensor) -> bytes:
    places = torch.arange(base.numel()).view(base.shape)
    same = places.as_strided(view.shape, view.stride(), view.storage_offset())
    keep = np.setdiff1d(np.arange(base.numel()), same.numpy().ravel())
    return b"".join(raw_bytes(base.view(-1)[place]) for place in keep.tolist())


def test_what_is_read_is_the_callers_own() -> None:
    """Words that were gathered do not change with the tensor."""
    tensor = torch.zeros(4)
    taken = WordMemory(tensor).read(np.array([0, 1]))
    tensor.fill_(1.0)
    assert taken.tolist() == [0, 0]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_read_only_and_reversed_arrays_are_taken_without_a_warning(layout: str) -> None:
    """Arrays decoded from bytes are read-only, others may have negative strides; both are plain input."""
    tensor = _LAYOUTS[layout](torch.zeros(6, 8))
    memory = WordMemory(tensor)
    positions = np.frombuffer(np.array([1, 5], np.int64).tobytes(), np.int64)
    memory.write(positions, np.frombuffer(np.array([7, 8], np.uint32).tobytes(), np.uint32))
    assert memory.read(positions).tolist() == [7, 8]
    memory.write(np.array([5, 1])[::-1], np.array([9, 10], np.uint32)[::-1])
    assert memory.read(np.array([5, 1])[::-1]).tolist() == [10, 9]


def test_parameters_and_inference_tensors_can_be_written() -> None:
    """Leaves that require grad keep it; tensors made under inference_mode are written outside it."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    with torch.inference_mode():
        served = torch.zeros(3, 2).t()
    for tensor in (parameter, served):
        memory = WordMemory(tensor)
        memory.write(np.array([1]), np.array([0x3F800000], np.uint32))
        memory.write_all(np.full(tensor.numel(), 0x40000000, np.uint32))
        assert tensor.flatten().tolist() == [2.0] * tensor.numel()
    assert parameter.requires_grad
    assert parameter.is_leaf


_OVERLAPPING: dict[str, Callable[[], torch.Tensor]] = {
    "expanded rows": lambda: torch.zeros(1, 4).expand(3, 4),
    "expanded scalar": lambda: torch.zeros(()).expand(5),
    "expanded inside": lambda: torch.zeros(3, 1, 2).expand(3, 4, 2),
    "windows": lambda: torch.zeros(10).unfold(0, 4, 1),
    "odd strides": lambda: torch.zeros(30).as_strided((4, 3), (3, 6)),
    "expanded complex": lambda: torch.zeros(1, dtype=torch.complex64).expand(3),
}


@pytest.mark.parametrize("name", _OVERLAPPING)
def test_a_destination_that_overlaps_itself_is_refused_by_name(name: str) -> None:
    """Expanded tensors and overlapping windows cannot be written one word at a time."""
    with pytest.raises(InputError, match="expanded or overlapping") as caught:
        WordMemory(_OVERLAPPING[name](), name="tied.weight")
    assert caught.value.parameter == "tied.weight"


def test_odd_but_disjoint_layouts_are_not_refused() -> None:
    """Strides that interleave without meeting, size-one dims of stride 0, and empty expanded tensors are fine."""
    for tensor in (
        torch.zeros(20).as_strided((3, 2), (2, 3)),
        torch.zeros(4).as_strided((1, 4), (0, 1)),
        torch.zeros(1, 0).expand(5, 0),
        torch.zeros(2, 3, 4).permute(1, 2, 0),
    ):
        memory = WordMemory(tensor)
        memory.write_all(np.arange(tensor.numel(), dtype=np.uint32))
        assert memory.read_all().tolist() == list(range(tensor.numel()))


def test_what_cannot_be_written_at_all_is_refused() -> None:
    """Refused dtypes, meta tensors and lazy conjugates, by name."""
    with pytest.raises(DTypeError, match=r"bits8.*'w'"):
        WordMemory(torch.empty(3, dtype=torch.bits8), name="w")
    for tensor in (torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.complex64).conj()):
        with pytest.raises(InputError) as caught:
            WordMemory(tensor, name="w")
        assert caught.value.parameter == "w"
    with pytest.raises(InputError, match="lazily"):
        WordMemory(torch.zeros(3, dtype=torch.complex64).conj().imag)
