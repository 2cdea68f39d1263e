"""The ways to bring workers to the trainer's weights that `bench sync` compares: rank 0's side of each."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory

from deltacast.bench.sync_peer import PeerSender
from deltacast.bench.sync_ranks import Workers
from deltacast.bench.sync_rows import Method, SyncOptions, Wire, bytes_per_s
from deltacast.bench.sync_weights import LiveWeights
from deltacast.delta.errors import StateError, VerificationError
from deltacast.engines.base import AuditPolicy, TrainerInitInfo
from deltacast.engines.control import Deadline
from deltacast.engines.dense_nccl import DenseSender
from deltacast.engines.group import PayloadGroup
from deltacast.engines.pace import Pace
from deltacast.engines.sparse_nccl import SparseNcclTrainer

__all__ = ["Dense", "Ours", "Peer", "Sample", "Setup", "Way"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One round.

    Attributes:
        wall_s: around everything: from the first look at the weights until every worker is known to hold them.
        stages_s: by name.
        sent_bytes: once (a broadcast).
        density: share of all words that changed; None where nobody counted.
        buffer_bytes: what the engine says that trainer and workers needed, at most; None where it says nothing.
    """

    wall_s: float
    stages_s: dict[str, float]
    sent_bytes: int
    density: float | None = None
    buffer_bytes: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Setup:
    """What every way works with.

    Attributes:
        options: the run's.
        weights: rank 0's, which every worker holds when a way is made.
        workers: the pipes to them.
        group: of everything that is not our engine's.
        percent: of the words that will change in each round.
        link_gbits: the simulated link; None for the machine's own.
    """

    options: SyncOptions
    weights: LiveWeights
    workers: Workers
    group: PayloadGroup
    percent: float
    link_gbits: float | None

    @property
    def rate(self) -> float | None:
        """Bytes per second of the simulated link."""
        return None if self.link_gbits is None else bytes_per_s(self.link_gbits)

    @property
    def timeout_s(self) -> float:
        """For each phase."""
        return self.options.phase_s(self.weights.nbytes)


class Way(ABC):
    """One way: made while all ranks hold the same weights, then a round after each step.

    Attributes:
        method: what rows call it.
        audit: what workers rescan; None where nothing is verified.
        held_bytes: memory that it keeps on rank 0's device from round to round: its copy of what workers hold.
    """

    method: Method
    audit: AuditPolicy | None = None
    held_bytes: int = 0

    @abstractmethod
    def round(self) -> Sample:
        """Bring the workers to the present weights. Blocks until every worker has said that it holds them."""

    def close(self) -> None:  # noqa: B027 - most hold nothing but memory
        """Let go of connections."""


class Dense(Way):
    """Everything, packed into a few large broadcasts, and copied into place. Never paced: it would only take time."""

    method = "dense"

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        setup.workers.ask("prepare_dense")
        self._sender = DenseSender(setup.group)

    def round(self) -> Sample:
        """See `Way`."""
        setup = self._setup
        watch = _Stopwatch()
        setup.workers.tell("dense")
        self._sender.send(setup.weights.live, setup.weights.sizes, Deadline(setup.timeout_s))
        watch.lap("send")
        setup.workers.hear()
        watch.lap("apply")
        return Sample(watch.total_s, watch.laps, setup.weights.nbytes, None, (self._sender.nbytes, self._sender.nbytes))


class Peer(Way):
    """Int32 indices and values, two broadcasts per parameter (`sync_peer.py`)."""

    method = "peer"

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._sender = PeerSender(setup.group, setup.weights.moving)
        self.held_bytes = sum(tensor.nbytes for tensor in setup.weights.moving)
        self._num_words = sum(meta.num_words for meta in setup.weights.metas())
        self._pace = None if setup.rate is None else Pace(setup.rate)

    def round(self) -> Sample:
        """See `Way`."""
        setup = self._setup
        watch = _Stopwatch()
        patches = self._sender.diff()
        watch.lap("diff")
        setup.workers.tell("peer", [index.numel() for index, _ in patches])
        self._sender.send(patches, Deadline(setup.timeout_s), self._pace)
        watch.lap("send")
        setup.workers.hear()
        watch.lap("apply")
        sent_bytes = sum(index.nbytes + values.nbytes for index, values in patches)
        num_changed = sum(index.numel() for index, _ in patches)
        return Sample(watch.total_s, watch.laps, sent_bytes, num_changed / self._num_words)


class Ours(Way):
    """The `sparse_nccl` engine, as anybody uses it: verified, audited, all or nothing."""

    def __init__(self, setup: Setup, wire: Wire, audit: AuditPolicy) -> None:
        self.method, self.audit = wire, audit
        self._setup = setup
        device, placement = str(setup.group.device), setup.options.placement
        self._folder = TemporaryDirectory(prefix="deltacast-")  # a baseline that is a file lies there
        info = TrainerInitInfo(
            num_workers=setup.options.world - 1,
            device=device,
            placement=device if placement == "device" else placement,
            baseline_folder=self._folder.name if placement == "mmap" else None,
            wire=wire,
            audit=audit,
            threads=setup.options.threads,
            max_send_bytes_per_s=setup.rate,
            max_density=min(1.0, 2 * setup.percent / 100),  # what is drawn spreads around the percentage
            timeout_s=setup.timeout_s,
            decision_timeout_s=setup.timeout_s,
        )
        self._trainer = SparseNcclTrainer.trainer_init(info, setup.weights, setup.workers)
        self.held_bytes = setup.weights.nbytes if placement == "device" else 0

    def round(self) -> Sample:
        """See `Way`.

        Raises:
            VerificationError: a worker is not verified.
            StateError: the engine took another wire than the one that is measured.
        """
        started = time.perf_counter()
        report = self._trainer.send_weights()
        wall_s = time.perf_counter() - started
        if report.num_verified < self._setup.options.world - 1:
            raise VerificationError("a worker is not verified", found=report.line())
        if report.wire != self.method:
            raise StateError("the engine took another wire", expected=self.method, found=report.wire)
        stages = asdict(report.times)
        del stages["total_s"], stages["paused_s"]  # of the client's calls too
        stages_s = {name.removesuffix("_s"): value for name, value in stages.items()}
        worker_bytes = max(worker.buffer_bytes for worker in report.workers)
        return Sample(wall_s, stages_s, report.sent_bytes, report.density, (report.buffer_bytes, worker_bytes))

    def close(self) -> None:
        """See `Way`."""
        self._trainer.shutdown()
        self._folder.cleanup()


@dataclass(slots=True)
class _Stopwatch:
    """Seconds from its making, and between laps."""

    started: float = field(default_factory=time.perf_counter)
    laps: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0

    def lap(self, name: str) -> None:
        total_s = time.perf_counter() - self.started
        self.laps[name], self.total_s = total_s - self.total_s, total_s
