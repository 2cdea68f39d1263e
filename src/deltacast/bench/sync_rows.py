"""What `bench sync` is asked, what it finds out about the machine, and one row of its result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from deltacast.delta.errors import InputError
from deltacast.engines.base import AuditPolicy

__all__ = ["LINKS_GBITS", "PLACEMENTS", "Facts", "Method", "SyncOptions", "SyncRow", "Timing", "Wire"]

Wire: TypeAlias = Literal["raw", "coded"]
Method: TypeAlias = Literal["dense", "peer", "raw", "coded"]
Timing: TypeAlias = Literal["measured", "paced", "computed"]
"""Where a time is from. Measured: nothing was slowed down. Paced: run for real while the sender held its payload to the
simulated link's rate. Computed: the larger of the time measured without a simulated link and bytes / rate."""

LINKS_GBITS: Final = (100.0, 25.0, 10.0, 1.0)
"""The links that are simulated unless others are asked for."""

PLACEMENTS: Final = ("device", "cpu", "pinned", "mmap")

_PHASE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """What to measure.

    Attributes:
        world: ranks; rank 0 is the trainer, the others are workers.
        model: a name or path that `bench.shapes.model_metas` knows.
        scale: about the share of the model's elements to keep.
        percents: of bf16 words that change before each round; each is measured in turn.
        wires: of ours.
        audit: how much workers rescan in each round.
        placement: where the trainer's baseline lies: `device` for that of the weights, or `cpu`, `pinned`, `mmap`.
        links_gbits: links to simulate, in 10^9 bits per second, after the machine's own.
        repeats: rounds per row, after one that warms up.
        threads: of each rank on the host.
        seed: of weights and changes.

    Raises:
        InputError: an option out of range.
    """

    world: int = 2
    model: str = "qwen2.5-7b"
    scale: float = 1.0
    percents: tuple[float, ...] = (1.0,)
    wires: tuple[Wire, ...] = ("raw", "coded")
    audit: AuditPolicy = 16
    placement: str = "device"
    links_gbits: tuple[float, ...] = LINKS_GBITS
    repeats: int = 3
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.world < 2 or self.repeats < 1 or self.threads < 1:
            raise InputError("nothing to measure", expected="world >= 2, repeats and threads >= 1",
                             found=f"world {self.world}, repeats {self.repeats}, threads {self.threads}")  # fmt: skip
        if not self.percents or not all(0 < percent <= 90 for percent in self.percents):
            raise InputError("bad density", expected="percent above 0, at most 90", found=list(self.percents))
        if not all(rate > 0 for rate in self.links_gbits):
            raise InputError("bad link", expected="Gbit/s above 0", found=list(self.links_gbits))
        if self.audit != "full" and not (isinstance(self.audit, int) and self.audit >= 1):
            raise InputError("bad audit", expected="a number of rounds >= 1, or full", found=self.audit)
        if self.placement not in PLACEMENTS:
            raise InputError("bad placement", expected=f"one of {', '.join(PLACEMENTS)}", found=self.placement)
        if not self.wires or not set(self.wires) <= {"raw", "coded"}:
            raise InputError("bad wire", expected="raw or coded", found=list(self.wires))

    def phase_s(self, model_bytes: int) -> float:
        """Return how long one phase of a round may take: no payload is larger than a few times the weights."""
        slowest = min(self.links_gbits, default=1.0)
        return _PHASE_S + 4 * model_bytes / bytes_per_s(slowest)


def bytes_per_s(gbits: float) -> float:
    """Return a link's rate in bytes."""
    return gbits * 1e9 / 8


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured on, and its bounds.

    Attributes:
        device: `cuda` (NCCL) or `cpu` (Gloo).
        device_name: the GPU's or the processor's.
        versions: of torch, NCCL, Python.
        cores: that this process may use.
        num_tensors, num_words, model_bytes: of the weights.
        copy_bytes_per_s: bytes read plus bytes written by a copy on rank 0's device.
        broadcast_bytes_per_s: bytes of one big broadcast to all workers, over its time.
    """

    device: Literal["cuda", "cpu"]
    device_name: str
    versions: Mapping[str, str]
    cores: int
    num_tensors: int
    num_words: int
    model_bytes: int
    copy_bytes_per_s: float
    broadcast_bytes_per_s: float

    @property
    def read_floor_s(self) -> float:
        """The time to read the new weights and the old ones once."""
        return 2 * self.model_bytes / self.copy_bytes_per_s

    def link_name(self, link_gbits: float | None) -> str:
        """Return what tables and pictures call a link."""
        if link_gbits is not None:
            return f"{link_gbits:g} Gbit/s, simulated"
        what = "NCCL between GPUs" if self.device == "cuda" else "Gloo on one CPU"
        return f"{what}, {self.broadcast_bytes_per_s / 1e9:.1f} GB/s"

    def link_floor_s(self, num_bytes: float, link_gbits: float | None) -> float:
        """Return the time that bytes take on a simulated link, or (None) on the machine's own."""
        return num_bytes / (self.broadcast_bytes_per_s if link_gbits is None else bytes_per_s(link_gbits))


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One way to bring the workers to the trainer's weights, on one link.

    Attributes:
        link_gbits: the simulated link; None for the machine's own.
        percent: of the bf16 words that were to change.
        method: `dense`, `peer`, or one of our wires.
        audit: what workers rescanned; None where nothing is verified.
        timing: where the times are from.
        wall_s: one per round, around everything.
        stages_s: medians; stages may overlap, so they need not add up.
        density: share of all words that changed, in the mean; None where nobody counted.
        sent_bytes: per round, once (a broadcast), in the mean.
        read_floor_s: reading both states once; None for dense, which compares nothing.
        link_floor_s: the bytes sent, on the link.
        trainer_extra_bytes: most memory that a round took besides weights and baseline; None if unknown.
        worker_extra_bytes: likewise, on the worker that took most.
        trainer_buffer_bytes, worker_buffer_bytes: the engine's own bounds for the same; None where nobody states any.
    """

    link_gbits: float | None
    percent: float
    method: Method
    audit: AuditPolicy | None
    timing: Timing
    wall_s: tuple[float, ...]
    stages_s: Mapping[str, float]
    density: float | None
    sent_bytes: int
    read_floor_s: float | None
    link_floor_s: float
    trainer_extra_bytes: int | None
    worker_extra_bytes: int | None
    trainer_buffer_bytes: int | None = None
    worker_buffer_bytes: int | None = None

    @property
    def median_s(self) -> float:
        """The median round."""
        return statistics.median(self.wall_s)

    @property
    def bound_s(self) -> float:
        """The larger bound: no round that compares both states and sends these bytes can be faster."""
        return max(self.read_floor_s or 0.0, self.link_floor_s)

    @property
    def label(self) -> str:
        """The method as tables and pictures call it."""
        if self.audit is None:
            return {"dense": "dense", "peer": "index + value"}[self.method]
        return f"{self.method}, audit {self.audit if isinstance(self.audit, str) else f'1/{self.audit}'}"

    def as_dict(self, dense_s: float) -> dict[str, Any]:
        """Return it as JSON-ready values, with what follows from them.

        Args:
            dense_s: the dense row's median on the same link.
        """
        derived = {
            "wall_median_s": self.median_s,
            "wall_min_s": min(self.wall_s),
            "wall_max_s": max(self.wall_s),
            "times_faster_than_dense": dense_s / self.median_s,
            "bound_s": self.bound_s,
            "of_bound": self.bound_s / self.median_s,
        }
        return asdict(self) | derived
