"""Rescanning many tensors at once. Right values: the plain-integer twin; for longer tensors numpy's fingerprints.

The same bodies run tensor by tensor, through the kernels' torch twin, and (`-m gpu`) through the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltacast.delta.bits import strided_words
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.kernels import Backend
from deltacast.delta.memory import WordMemory
from deltacast.delta.scan import Scanner
from deltacast.delta.state import rolling_slices
from deltacast.delta.table import ParameterTable, ParamMeta
from fingerprint_twin import bytes_fingerprint
from tensor_bytes import WORDS, random_tensor, raw_bytes

Place = tuple[str, Backend]
PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", "auto"), id="cpu"),
        pytest.param(("cpu", "torch"), id="twin"),
        pytest.param(("cuda", "auto"), id="gpu", marks=pytest.mark.gpu),
        pytest.param(("cuda", "torch"), id="gpu-twin", marks=pytest.mark.gpu),
    ],
)


def tensors_on(device: str) -> list[torch.Tensor]:
    """Every dtype, 0-d, empty, strided, unaligned, and one of more than one block."""
    rng = np.random.default_rng(0)
    made = [random_tensor(rng, name, (3, 5)) for name in WORDS]
    made += [random_tensor(rng, "float32", ()), random_tensor(rng, "bfloat16", (0, 4))]
    made += [random_tensor(rng, "bfloat16", (6, 4)).t(), random_tensor(rng, "int64", (9, 3))[::2]]
    made += [random_tensor(rng, "bfloat16", (40,))[3:], random_tensor(rng, "bfloat16", (65536 + 1025,))]
    return [tensor.to(device) for tensor in made]


def memories_of(tensors: list[torch.Tensor]) -> list[WordMemory]:
    return [WordMemory(tensor) for tensor in tensors]


def right_values(tensors: list[torch.Tensor]) -> list[int]:
    values = []
    for tensor in tensors:
        raw, width = raw_bytes(tensor.cpu()), WORDS[str(tensor.dtype).removeprefix("torch.")][0]
        long = words_fingerprint(np.frombuffer(raw, f"<u{width}")) if len(raw) > 10_000 else None
        values.append(bytes_fingerprint(raw, width) if long is None else long)
    return values


@PLACES
@pytest.mark.parametrize("threads", [1, 3])
def test_every_dtype_and_layout_has_the_twins_fingerprint(threads: int, place: Place) -> None:
    """All of them in one scan, and again by the tables that were kept."""
    device, backend = place
    tensors = tensors_on(device)
    scanner = Scanner(memories_of(tensors), threads, backend=backend)
    for _ in range(2):
        assert scanner.fingerprints(range(len(tensors))) == right_values(tensors)


@PLACES
def test_values_come_in_the_order_of_the_places_asked_for(place: Place) -> None:
    """Any choice, in any order, a place twice, or none."""
    device, backend = place
    tensors = tensors_on(device)
    right = right_values(tensors)
    scanner = Scanner(memories_of(tensors), backend=backend)
    for places in ([5], [27, 3, 0, 22, 3, 25], list(range(len(tensors)))[::-1], []):
        assert scanner.fingerprints(places) == [right[i] for i in places]


@PLACES
def test_a_write_between_two_scans_is_seen(place: Place) -> None:
    """What is kept are addresses, not bits: one flipped bit in each tensor in turn changes its value and no other."""
    device, backend = place
    tensors = [tensor for tensor in tensors_on(device) if tensor.numel()]
    scanner = Scanner(memories_of(tensors), backend=backend)
    before = scanner.fingerprints(range(len(tensors)))
    for tensor in tensors:
        words = strided_words(tensor)
        words[tuple(extent - 1 for extent in words.shape)] ^= 1
    after = scanner.fingerprints(range(len(tensors)))
    assert after == right_values(tensors)
    assert all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.gpu
def test_memories_of_several_devices_are_scanned_together() -> None:
    """Some on the host, some on each GPU."""
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    tensors = [tensor for device in devices for tensor in tensors_on(device)]
    scanner = Scanner(memories_of(tensors), threads=2)
    assert scanner.fingerprints(range(len(tensors))) == right_values(tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_scan_runs_on_the_current_stream(backend: Backend) -> None:
    """It comes after the writes that are queued there, with nobody waiting in between."""
    weight = torch.zeros(1 << 24, dtype=torch.int16, device="cuda")
    ones = torch.ones(1 << 24, dtype=torch.int16)
    scanner = Scanner([WordMemory(weight)], backend=backend)
    scanner.fingerprints([0])
    cuda: Any = torch.cuda  # some of it has no types
    cuda.synchronize()
    with cuda.stream(cuda.Stream()):
        for value in range(50):
            weight.fill_(value)
        weight.fill_(1)
        assert scanner.fingerprints([0]) == [words_fingerprint(ones.numpy().view("<u2"))]


def test_contiguous_tensors_share_a_group_per_word_width() -> None:
    """Strided and empty ones are scanned alone; on the CPU, all are, unless the kernels' twin is asked for."""
    tensors = tensors_on("cpu")
    everything = tuple(range(len(tensors)))
    forced, plain = (Scanner(memories_of(tensors), backend=backend) for backend in ("torch", "auto"))
    for scanner in (forced, plain):
        scanner.fingerprints(everything)
    (batch,) = forced._plans[everything].batches
    assert sorted(group.word_bytes for group in batch.groups) == [1, 2, 4, 8]
    alone = [tensors[i] for i in forced._plans[everything].alone]
    assert [tuple(tensor.shape) for tensor in alone] == [(0, 4), (4, 6), (5, 3)]
    assert (plain._plans[everything].batches, plain._plans[everything].alone) == ((), everything)


def test_a_prepared_scan_has_its_tables_on_the_device() -> None:
    """The first scan of these places uploads nothing: that could wait for every kernel."""
    tensors = tensors_on("cpu")
    scanner = Scanner(memories_of(tensors), backend="torch")
    scanner.prepare(range(len(tensors)))
    groups = [group for batch in scanner._plans[tuple(range(len(tensors)))].batches for group in batch.groups]
    assert len(groups) == 4
    assert not any(group.table._stale.any() for group in groups)


def test_a_turn_of_rolling_audits_beside_whole_ones_keeps_every_group() -> None:
    """All and each slice recur: their groups are made once."""
    tensors = tensors_on("cpu")
    scanner = Scanner(memories_of(tensors), backend="torch")
    table = ParameterTable(ParamMeta(f"p{i}", "int8", (i + 1,)) for i in range(len(tensors)))
    sets = [tuple(range(len(tensors))), *rolling_slices(table, 16)]
    for places in sets:
        scanner.fingerprints(places)
    kept = dict(scanner._plans)
    for places in sets:
        scanner.fingerprints(places)
        assert scanner._plans[places] is kept[places]
    assert scanner._plans.keys() == set(sets)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    """However many sets are asked for, each memory is listed twice at most on average."""
    tensors = [torch.full((4,), i, dtype=torch.int16) for i in range(8)]
    right = right_values(tensors)
    scanner = Scanner(memories_of(tensors), backend="torch")
    for first in range(8):
        for last in range(first, 8):
            places = tuple(range(first, last + 1))
            assert scanner.fingerprints(places) == right[first : last + 1]
            assert sum(map(len, scanner._plans)) <= 2 * len(tensors)
            assert list(scanner._plans)[-1] == places
    assert len(scanner._plans) > 3


def test_nothing_to_scan_is_no_error() -> None:
    """A state without parameters has no values."""
    assert Scanner([]).fingerprints([]) == []
