"""Whether parts of parameters, spread over ranks in any cut, are a checkpoint; sums are those of the naive twin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deltacast.delta.checkpoint_digest import CheckpointDigest
from deltacast.delta.table import ParamMeta
from deltacast.engines.vllm.server_digest import HeldPart, PartFault, compare_parts
from fingerprint_twin import box_fingerprint, bytes_fingerprint

Box = tuple[tuple[int, int], ...]

SHAPE = (8, 6)
DATA = np.random.default_rng(0).integers(0, 1 << 16, SHAPE, np.uint16).tobytes()
CHECKPOINT = CheckpointDigest.of([(ParamMeta("w", "bfloat16", SHAPE), bytes_fingerprint(DATA, 2))])


def held(
    rank: int, *box: tuple[int, int], shape: Sequence[int] = SHAPE, data: bytes = DATA, name: str = "w"
) -> HeldPart:
    return HeldPart(rank, name, tuple(shape), box, box_fingerprint(data, 2, 1, shape, box))


def fault_of(*parts: HeldPart) -> PartFault:
    [fault] = compare_parts(CHECKPOINT, parts)
    assert fault.name == "w"
    return fault


@pytest.mark.parametrize(
    "parts",
    [
        [held(0, (0, 8), (0, 6))],
        [held(0, (0, 4), (0, 6)), held(1, (4, 8), (0, 6))],
        [held(0, (0, 8), (0, 1)), held(1, (0, 8), (1, 5)), held(2, (0, 8), (5, 6))],
        [held(rank, (lo, lo + 4), (0, 6)) for rank, lo in enumerate((0, 0, 4, 4))],
        [held(0, (0, 8), (0, 6)), held(0, (0, 0), (0, 6))],
        [held(0, (0, 48), shape=(48,)), held(1, (0, 8), (0, 6))],
        [held(0, (0, 2), (0, 12), shape=(4, 12)), held(1, (4, 8), (0, 6))],
        [held(0, (0, 1), (0, 2), (0, 12), shape=(1, 4, 12)), held(1, (24, 48), shape=(48,))],
    ],
    ids=["one rank", "rows", "uneven columns", "replicated", "nothing beside it", "flat", "two shapes", "three dims"],
)
def test_parts_that_are_all_of_a_parameter_are_the_parameter(parts: list[HeldPart]) -> None:
    """In any cut over any ranks, replicas or not."""
    assert compare_parts(CHECKPOINT, parts) == []


def test_a_flipped_bit_is_found() -> None:
    """The bits of one rank's part are not the checkpoint's."""
    damaged = DATA[:70] + bytes([DATA[70] ^ 1]) + DATA[71:]
    fault = fault_of(held(0, (0, 4), (0, 6)), held(1, (4, 8), (0, 6), data=damaged))
    assert fault.kind == "bits"
    assert f"{bytes_fingerprint(DATA, 2):016x} -> {bytes_fingerprint(damaged, 2):016x}, at ranks 0, 1" in fault.detail


def test_replicas_that_disagree_are_named_with_their_ranks() -> None:
    """Nobody is outvoted: each value has the ranks that say it."""
    damaged = DATA[:2] + bytes([DATA[2] ^ 4]) + DATA[3:]
    fault = fault_of(*(held(rank, (0, 8), (0, 6), data=damaged if rank == 1 else DATA) for rank in range(3)))
    assert fault.kind == "replicas"
    good, bad = bytes_fingerprint(DATA, 2), bytes_fingerprint(damaged, 2)
    assert fault.detail == f"[[0, 8], [0, 6]]: {good:016x} at ranks 0, 2, {bad:016x} at rank 1"


@pytest.mark.parametrize(
    ("parts", "detail"),
    [
        ([held(0, (0, 4), (0, 6))], "24 of 48 elements, in [8, 6], at rank 0"),
        ([held(0, (0, 5), (0, 6)), held(1, (4, 8), (0, 6))], "overlap"),
        ([held(0, (0, 3), (0, 6)), held(1, (4, 8), (0, 6))], "42 of 48 elements"),
        ([HeldPart(0, "w", SHAPE, ((0, 9), (0, 6)), 0)], "outside"),
        ([HeldPart(0, "w", SHAPE, ((0, 48),), 0)], "outside"),
        ([HeldPart(0, "w", (8, 7), ((0, 8), (0, 7)), 0)], "another number of elements"),
        ([held(0, (0, 8), (0, 3)), held(1, (3, 24), (0, 2), shape=(24, 2))], "different shapes, and not into runs"),
        ([held(0, (0, 30), shape=(48,)), held(1, (4, 8), (0, 6))], "overlap"),
    ],
    ids=["half", "overlap", "a hole", "outside", "other dims", "more elements", "no runs", "overlapping runs"],
)
def test_parts_that_are_not_the_whole_once_are_a_fault(parts: list[HeldPart], detail: str) -> None:
    """Their sum would prove nothing."""
    fault = fault_of(*parts)
    assert fault.kind == "cut"
    assert detail in fault.detail


def test_what_only_one_side_has_is_named() -> None:
    """Parameters of the checkpoint first, in table order."""
    metas = [ParamMeta(name, "bfloat16", SHAPE) for name in ("b", "a", "w")]
    checkpoint = CheckpointDigest.of([(meta, bytes_fingerprint(DATA, 2)) for meta in metas])
    whole: Box = ((0, 8), (0, 6))
    faults = compare_parts(checkpoint, [held(0, *whole), held(3, *whole, name="extra"), held(1, *whole, name="b")])
    assert [(fault.name, fault.kind) for fault in faults] == [("a", "missing"), ("extra", "unknown")]
    assert faults[1].detail == "at rank 3"


def test_scalars_and_empty_parameters_have_parts_too() -> None:
    """An empty one adds nothing, but a server that does not name it does not hold it."""
    metas = [ParamMeta("scalar", "float32", ()), ParamMeta("empty", "bfloat16", (0, 4))]
    one = bytes.fromhex("0000803f")
    checkpoint = CheckpointDigest.of([(metas[0], bytes_fingerprint(one, 4)), (metas[1], 0)])
    scalar = HeldPart(0, "scalar", (), (), bytes_fingerprint(one, 4))
    empty = HeldPart(0, "empty", (0, 4), ((0, 0), (0, 4)), 0)
    assert compare_parts(checkpoint, [scalar, empty, scalar]) == []
    assert [fault.name for fault in compare_parts(checkpoint, [scalar])] == ["empty"]
