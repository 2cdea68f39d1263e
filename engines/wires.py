"""Which wire a round takes: what everybody can do, what fits the buffers, and what the link makes fastest.

`raw` and `coded` find the changes alike. What differs is the bytes on the link, and the time to code them; whichever
of the two takes longer sets the pace, because chunks are coded while others travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from deltacast.delta.chunks import device_of
from deltacast.delta.errors import InputError
from deltacast.delta.kernels import available
from deltacast.delta.state import WeightState
from deltacast.engines.base import SeedWire, Wire

__all__ = ["STREAMED", "LastRound", "WireChoice", "choose_seed_wire", "choose_wire", "wires_into"]

STREAMED: Final = frozenset({"raw", "coded"})
_CODED_BYTES: Final = 1.25  # per changed bf16 (docs/cli.md, "bench codec")
_RAW_BYTES: Final = 4.0
_CODED_PER_S: Final = 45e6  # changes per thread: `bench sync --wire coded`, 14 threads, two H200s: 43 to 51 million
_FIRST_DENSITY: Final = 0.01  # before anything is known


@dataclass(frozen=True, slots=True)
class WireChoice:
    """A wire, and why."""

    wire: Wire | SeedWire
    reason: str


@dataclass(frozen=True, slots=True)
class LastRound:
    """What the rounds before this one say about the next.

    Attributes:
        density: share of the words that changed; None before the first.
        link_bytes_per_s: the best rate seen; None if nothing large was sent yet.
    """

    density: float | None
    link_bytes_per_s: float | None


def wires_into(state: WeightState, device: torch.device) -> list[str]:
    """Return what can be received into live weights: streamed rounds need them contiguous, on the payload's device."""
    anyway = ["container", "dense"]
    try:
        here = device_of(state)
    except InputError:
        return anyway
    index = device.index if device.index is not None or device.type == "cpu" else torch.cuda.current_device()
    streams = (here.type, here.index) == (device.type, index)
    return [*anyway, *(sorted(STREAMED) if streams else [])]


def choose_wire(
    asked: Wire,
    *,
    workers: Iterable[tuple[str, Iterable[str]]],
    device: torch.device,
    num_words: int,
    max_density: float,
    threads: int,
    last: LastRound,
) -> WireChoice:
    """Choose the next round's wire.

    Args:
        asked: the user's choice.
        workers: names, and the wires that each can receive.
        device: the payload's.
        num_words: of all parameters.
        max_density: what the buffers of streamed rounds are made for.
        threads: for coding.
        last: what is known.

    Raises:
        InputError: a wire was asked for by name that a worker cannot receive.
    """
    unable = next((name for name, wires in workers if not set(wires) >= STREAMED), None)
    if asked != "auto":
        if unable is not None and asked in STREAMED:
            raise InputError(
                f"worker {unable} cannot receive wire {asked!r}",
                expected="contiguous weights on the payload's device",
                hint="Use wire='auto' or 'container'.",
            )
        return WireChoice(asked, "as asked")
    if unable is not None:
        return WireChoice("container", f"worker {unable} can receive nothing else")
    if not available(device):
        return WireChoice("container", f"no kernels on {device}")
    density = _FIRST_DENSITY if last.density is None else last.density
    if density > max_density:
        return WireChoice("container", f"{density:.2%} changed last time, above max_density {max_density:.2%}")
    return _by_link(density * num_words, threads, last.link_bytes_per_s)


def choose_seed_wire(
    asked: SeedWire, *, workers: Iterable[tuple[str, Iterable[str]]], device: torch.device
) -> WireChoice:
    """Choose the wire of a seed or repair.

    Args:
        asked: the user's choice.
        workers: names, and the wires that each can receive; of all that are in the payload group, receivers or not.
        device: the payload's.

    Raises:
        InputError: `dense` was asked for by name, and a worker cannot receive it.
    """
    unable = next((name for name, wires in workers if "dense" not in wires), None)
    if asked == "dense" and unable is not None:
        raise InputError(f"worker {unable} cannot receive wire 'dense'", hint="Use seed_wire='auto' or 'container'.")
    if asked != "auto":
        return WireChoice(asked, "as asked")
    if unable is not None:
        return WireChoice("container", f"worker {unable} cannot receive it dense")
    if device.type != "cuda":
        return WireChoice("container", f"the payload travels between hosts' memory ({device})")
    return WireChoice("dense", f"the payload travels between GPUs ({device})")


def _by_link(num_changes: float, threads: int, link_bytes_per_s: float | None) -> WireChoice:
    if link_bytes_per_s is None:
        return WireChoice("raw", "the link is not measured yet")
    raw_s = num_changes * _RAW_BYTES / link_bytes_per_s
    coded_s = max(num_changes * _CODED_BYTES / link_bytes_per_s, num_changes / (_CODED_PER_S * threads))
    reason = (
        f"{num_changes:,.0f} changes at {link_bytes_per_s / 1e9:.2f} GB/s would take {raw_s * 1e3:.1f} ms raw and "
        f"{coded_s * 1e3:.1f} ms coded by {threads} threads"
    )
    return WireChoice("raw" if raw_s <= coded_s else "coded", reason)
