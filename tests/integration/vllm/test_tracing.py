"""What a trace of a loader says is where that loader really puts things. Needs torch only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch

from deltacast.delta.errors import StateError
from deltacast.delta.pieces import Lattice, Piece, disjoint
from deltacast.delta.table import ParamMeta
from deltacast.engines.vllm.tracing import Trace, trace_loader

SHAPE = (12, 8)
Loader = Callable[[torch.Tensor, torch.Tensor], object]


def _two_rows_apart(target: torch.Tensor, weight: torch.Tensor) -> None:
    target[:6].copy_(weight[0::2])
    target[6:].copy_(weight[1::2])


def _stacked(target: torch.Tensor, weight: torch.Tensor) -> None:
    for expert, part in enumerate(weight.view(3, 4, 8).unbind(0)):
        target.view(3, 8, 4)[2 - expert].copy_(part.t())


def _by_heads(target: torch.Tensor, weight: torch.Tensor) -> None:
    heads = weight.view(2, 3, 2, 8)
    for i in range(3):
        target[4 * i : 4 * i + 4].view(2, 2, 8).copy_(heads[:, i])


def _contiguous_first(target: torch.Tensor, weight: torch.Tensor) -> None:
    turned = weight.t().contiguous().to(torch.int32)
    target.view(8, 12)[2:4].copy_(turned.narrow(0, 4, 2))
    target.view(8, 12)[:2, 3:].copy_(turned[:2].narrow(1, 0, 9))


LOADERS: dict[str, Loader] = {
    "whole": lambda target, weight: target.copy_(weight),
    "rows of rank 1": lambda target, weight: target[:6].copy_(weight.narrow(0, 6, 6)),
    "columns of rank 1": lambda target, weight: target[:, :4].copy_(weight.chunk(2, dim=1)[1]),
    "columns to columns": lambda target, weight: target[:, 4:].copy_(weight[:, 4:]),
    "transposed": lambda target, weight: target.view(8, 12).copy_(weight.t()),
    "assigned to a slice": lambda target, weight: target.__setitem__(slice(4, 8), weight[8:]),
    "one element": lambda target, weight: target[3, 3].copy_(weight[11, 7]),
    "padding filled after it": lambda target, weight: (target[:4].copy_(weight[:4]), target[4:].fill_(0)),
    "interleaved rows": _two_rows_apart,
    "stacked and transposed": _stacked,
    "heads that hold q, k and v": _by_heads,
    "through a contiguous copy": _contiguous_first,
}


def _traced(load: Loader, dtype: str = "int32", target: torch.Tensor | None = None) -> Trace:
    into = torch.empty(SHAPE, dtype=torch.int32, device="meta") if target is None else target
    return trace_loader(_loader(load, into), [ParamMeta("w", dtype, SHAPE)], {"t": into})


def _loader(load: Loader, target: torch.Tensor) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    def run(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            load(target.data, weight)

    return run


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_elements_are_where_the_loader_puts_them(load: Loader) -> None:
    """Each element is found where a real run of the loader puts its number, and no other place is said to be filled."""
    real = torch.zeros(SHAPE, dtype=torch.int32)
    load(real, torch.arange(1, 97, dtype=torch.int32).view(SHAPE))
    found = np.zeros(96, np.int64)
    for landing in _traced(load).landings["w"]:
        piece = Piece.between(landing.here, 96, landing.target, landing.there)
        assert piece is not None
        located = piece.locate(np.arange(96))
        found[located.positions] = located.which + 1
    assert found.tolist() == real.flatten().tolist()


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_view_holds_the_box(load: Loader) -> None:
    """The view of a filled runtime tensor is the piece's box of the parameter in the shape that it states."""
    numbers = torch.arange(1, 97, dtype=torch.int32).view(SHAPE)
    real = torch.zeros(SHAPE, dtype=torch.int32)
    load(real, numbers)
    for landing in _traced(load).landings["w"]:
        piece = Piece.between(landing.here, 96, "t", landing.there)
        assert piece is not None
        box = numbers.view(piece.shape)[tuple(slice(low, high) for low, high in piece.box)]
        assert torch.equal(piece.view(real), box)


def test_a_whole_tensor_is_one_run() -> None:
    """However many dims there are, a copy that changes nothing is one range of positions."""
    (landing,) = _traced(LOADERS["whole"]).landings["w"]
    assert Piece.between(landing.here, 96, "t", landing.there) == Piece("t", (96,), ((0, 96),), 0, (1,))


def test_live_targets_keep_their_bits() -> None:
    """A loader that is traced over live memory writes none of it."""
    live = torch.full(SHAPE, 7, dtype=torch.int32)
    trace = _traced(lambda target, weight: (target.fill_(0), target.copy_(weight), target.mul_(2)), target=live)
    assert bool((live == 7).all())
    assert "aten.mul_" in trace.transformed["w"]


TRANSFORMING: dict[str, tuple[Loader, str]] = {
    "a function of it": (lambda target, weight: target.copy_(-weight), "aten.neg"),
    "joined with others": (lambda target, weight: target.copy_(torch.cat([weight[6:], weight[:6]])), "aten.cat"),
    "changed where it lies": (lambda target, weight: target.copy_(weight).add_(1), "aten.add_"),
    "changed before": (lambda target, weight: target.copy_(weight.clone().neg_()), "aten.neg_"),
    "cast": (lambda target, weight: target.copy_(weight.to(torch.int64)), "casts it from torch.int32 to torch.int64"),
    "read": (lambda target, weight: target.copy_(weight * int(weight[0, 0])), "reads its values"),
    "overwritten": (lambda target, weight: (target.copy_(weight), target[:1].zero_()), "aten.zero_"),
    "by index": (lambda target, weight: target.__setitem__(torch.tensor([0, 2]), weight[:2]), "aten.index_put_"),
    "a buffer of the loader's": (
        lambda target, weight: target.copy_(torch.empty(SHAPE, dtype=torch.int32).copy_(weight)),
        "builds it up",
    ),
    "turned, copied, taken as rows": (
        lambda target, weight: target.view(-1)[:20].copy_(weight.t().reshape(-1)[:20]),
        "temporary copy",
    ),
}


@pytest.mark.parametrize(("load", "reason"), TRANSFORMING.values(), ids=TRANSFORMING)
def test_what_is_no_copy_of_bits_is_named(load: Loader, reason: str) -> None:
    """A parameter whose bits the loader does not simply copy is named with what was done to it, and with its target."""
    trace = _traced(load)
    assert reason in trace.transformed["w"]
    assert list(trace.targets["w"]) == ["t"]


def test_a_cast_by_the_copy_is_named() -> None:
    """A parameter of another dtype than its target has other bits there."""
    assert "bfloat16" in _traced(LOADERS["whole"], dtype="bfloat16").transformed["w"]


def test_a_repeated_element_is_no_box() -> None:
    """One element that fills many places cannot be written as a box."""
    trace = _traced(lambda target, weight: target.copy_(weight[:1]))
    (landing,) = trace.landings["w"]
    assert Piece.between(landing.here, 96, "t", landing.there) is None


def test_a_parameter_that_the_loader_leaves_alone_has_no_target() -> None:
    """A skipped parameter is in the trace, without places."""
    trace = _traced(lambda target, weight: None)
    assert (trace.landings, trace.targets, trace.transformed) == ({"w": []}, {"w": {}}, {})


def test_a_refused_parameter_is_named() -> None:
    """A loader that raises is an error that names the parameter and says what the loader said."""

    def refuse(target: torch.Tensor, weight: torch.Tensor) -> None:
        raise KeyError("no such module")

    with pytest.raises(StateError, match=r"refuses a parameter.*'w'.*KeyError.*no such module"):
        _traced(refuse)


def test_a_replaced_memory_is_named() -> None:
    """A loader that points a target at the checkpoint's own memory leaves nothing to write to."""
    target = torch.nn.Parameter(torch.empty(SHAPE, device="meta"))

    def replace(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            target.data = weight

    with pytest.raises(StateError, match=r"another memory.*'t'"):
        trace_loader(replace, [ParamMeta("w", "float32", SHAPE)], {"t": target})


@pytest.mark.parametrize(
    ("lattices", "apart"),
    [
        ([Lattice(0, (4,), (1,)), Lattice(4, (4,), (1,))], True),
        ([Lattice(0, (4,), (1,)), Lattice(3, (4,), (1,))], False),
        ([Lattice(0, (3, 2), (4, 1)), Lattice(2, (3, 2), (4, 1))], True),
        ([Lattice(0, (3, 2), (4, 1)), Lattice(1, (3, 2), (4, 1))], False),
        ([Lattice(0, (2, 2), (1, 1))], False),
        ([Lattice(0, (3,), (0,))], False),
        ([], True),
    ],
)
def test_overlap_is_found(lattices: list[Lattice], apart: bool) -> None:
    """Runs, columns side by side, shared elements and elements that come twice are told apart."""
    positions = [
        lattice.offset + sum(i * s for i, s in zip(place, lattice.strides, strict=True))
        for lattice in lattices
        for place in np.ndindex(*lattice.extents)
    ]
    assert disjoint(lattices) is apart
    assert apart is (len(set(positions)) == len(positions))
