"""Which wire a round takes. Right values: bytes over bandwidth, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltacast.delta.errors import InputError
from deltacast.delta.state import WeightState
from deltacast.engines.base import Wire
from deltacast.engines.wires import LastRound, WireChoice, choose_wire, wires_into

EVERYTHING = ["container", "coded", "raw"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as a machine with a GPU would: the choice asks whether there are kernels, and launches none."""
    monkeypatch.setattr("deltacast.engines.wires.available", lambda _: True)


def choose(asked: Wire = "auto", **changed: Any) -> WireChoice:
    """Choose for 76 million changes and two workers that can do everything."""
    options: dict[str, Any] = {
        "workers": [("w1", EVERYTHING), ("w2", EVERYTHING)],
        "device": torch.device("cpu"),
        "num_words": 7_600_000_000,
        "max_density": 0.05,
        "threads": 8,
        "last": LastRound(0.01, None),
    }
    return choose_wire(asked, **{**options, **changed})


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("link_bytes_per_s", "threads", "wire"),
    [
        (300e9, 8, "raw"),  # 1 ms raw; coding takes 211 ms
        (12.5e9, 8, "raw"),  # 24 ms; 211 ms
        (1.25e9, 8, "coded"),  # 243 ms; 211 ms, while the link needs 76 ms
        (1.25e9, 1, "raw"),  # 243 ms; 1.69 s
        (0.125e9, 1, "coded"),  # 2.4 s; 1.69 s
        (0.125e9, 1000, "coded"),  # 2.4 s; 0.8 s of the link
    ],
)
def test_auto_takes_what_the_link_makes_fastest(link_bytes_per_s: float, threads: int, wire: Wire) -> None:
    """304 MB raw against 95 MB coded, or against the threads' time for 76 million changes, whichever is longer."""
    choice = choose(threads=threads, last=LastRound(0.01, link_bytes_per_s))
    assert choice.wire == wire
    assert f"76,000,000 changes at {link_bytes_per_s / 1e9:.2f} GB/s" in choice.reason


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("density", "wire", "reason"),
    [
        (None, "raw", "not measured"),
        (0.0, "raw", "not measured"),
        (0.05, "raw", "not measured"),
        (0.051, "container", "5.10% changed last time, above max_density 5.00%"),
    ],
)
def test_auto_goes_by_the_last_rounds_density(density: float | None, wire: Wire, reason: str) -> None:
    """Above what the buffers hold, a container; before the first round, streamed."""
    choice = choose(last=LastRound(density, None))
    assert choice.wire == wire
    assert reason in choice.reason


@pytest.mark.usefixtures("kernels")
def test_a_round_without_changes_divides_by_nothing() -> None:
    """Both take no time: raw."""
    assert choose(last=LastRound(0.0, 1e9)).wire == "raw"


def test_auto_takes_a_container_where_kernels_or_a_worker_cannot_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says which."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose() == WireChoice("container", "no kernels on cpu")
    unable = choose(workers=[("w1", EVERYTHING), ("w2", ["container", "raw"])])
    assert unable == WireChoice("container", "worker w2 can receive nothing else")


@pytest.mark.parametrize("asked", ["raw", "coded"])
def test_a_wire_by_name_is_taken_or_refused_never_replaced(asked: Wire) -> None:
    """With twins instead of kernels, on any link, at any density; but not if a worker cannot receive it."""
    assert choose(asked, last=LastRound(0.9, 1.0)).wire == asked
    with pytest.raises(InputError, match=f"worker w2 cannot receive wire '{asked}'"):
        choose(asked, workers=[("w1", EVERYTHING), ("w2", ["container"])])
    assert choose("container", workers=[("w2", ["container"])]).wire == "container"


@pytest.mark.parametrize(
    ("tensors", "device", "wires"),
    [
        ({"a": torch.zeros(3, 4), "b": torch.zeros(0)}, "cpu", ["container", "dense", "coded", "raw"]),
        ({"a": torch.zeros(3, 4), "b": torch.zeros(4, 3).t()}, "cpu", ["container", "dense"]),
        ({"a": torch.zeros(3, 4)}, "cuda:0", ["container", "dense"]),
        ({}, "cpu", ["container", "dense"]),
    ],
)
def test_what_weights_can_receive(tensors: dict[str, torch.Tensor], device: str, wires: list[str]) -> None:
    """Streamed rounds need all of them contiguous, and where the payload arrives."""
    assert wires_into(WeightState(tensors), torch.device(device)) == wires
