"""What a round says of itself: to the caller, to a log, to a dashboard."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["RoundReport", "StageTimes", "WorkerReport", "WorkerVerdict"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of each stage, on the trainer's clock unless said otherwise.

    Attributes:
        diff_s: comparing the source with the baseline.
        encode_s: writing the container.
        ready_s: from PROPOSE to the last READY.
        send_s: the payload's broadcast.
        apply_s: decoding, staging, writing and reading back: the slowest worker's own clock.
        audit_s: rescanning: the slowest worker's own clock.
        publish_s: waiting for the store to have the version, where that comes before the decision.
        commit_s: from the last verdict to the last ACK, `publish_s` and the baseline's advance included.
        round_s: from the start of the diff to the last ACK: all of the round, without the calls through the client.
        total_s: the whole `send_weights`, but for the client's `finish_weight_update`.
        paused_s: how long workers were kept from generating, `finish_weight_update` included; None if the client is no
            `PausingClient`. Always None where a round aborted.
    """

    diff_s: float = 0.0
    encode_s: float = 0.0
    ready_s: float = 0.0
    send_s: float = 0.0
    apply_s: float = 0.0
    audit_s: float = 0.0
    publish_s: float = 0.0
    commit_s: float = 0.0
    round_s: float = 0.0
    total_s: float = 0.0
    paused_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerVerdict:
    """One worker in one round.

    Attributes:
        rank: 1 and up.
        name: host and process.
        verified: whether its digest was the target's and it acted on the decision.
        digest: the digest it reported.
        audited_through: the newest version through which it rescanned every parameter; -1 if never.
        error: what it, or the connection to it, reported; empty if nothing.
        damaged: parameters whose bits it found changed behind our back.
        buffer_bytes: extra memory that the round took there, by its bound.
    """

    rank: int
    name: str
    verified: bool
    digest: str
    audited_through: int
    error: str = ""
    damaged: tuple[str, ...] = ()
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One `send_weights`.

    Attributes:
        run_id, epoch, generation, round: which round this was.
        base_version, target_version: from and to.
        committed: whether `target_version` is now what everybody serves.
        optimizer_step: what the caller gave; None if nothing.
        wire: how the payload was written: `raw`, `coded` or `container`.
        num_changed, num_words: words sent and words there are.
        num_parameters: parameters with a patch.
        dense_bytes: what sending everything would cost.
        sent_bytes: rows and payload, once (a broadcast).
        times: seconds by stage.
        workers: one verdict per worker of the round.
        repaired: `(rank, parameter)` sent whole before this round, after a worker found damage.
        evicted: names of workers that were dropped.
        buffer_bytes: extra memory that the round took on the trainer, by its bound.
        seeded: workers that came to this round by a handshake, or were repaired before it: left as they were, replayed,
            repaired or seeded, and why.
        published_through: the newest version that the store had at the end of the call; None without a store.
        error: what failed on the trainer's own side; empty if nothing. Workers' errors are in `workers`. With
            `committed`, it is the client's call that failed after all workers had acknowledged.
    """

    run_id: str
    epoch: int
    generation: int
    round: int
    base_version: int
    target_version: int
    committed: bool
    wire: str
    num_changed: int
    num_words: int
    num_parameters: int
    dense_bytes: int
    sent_bytes: int
    times: StageTimes
    workers: tuple[WorkerVerdict, ...]
    repaired: tuple[tuple[int, str], ...] = ()
    evicted: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()
    error: str = ""
    buffer_bytes: int = 0
    optimizer_step: int | None = None
    published_through: int | None = None

    @property
    def density(self) -> float:
        """Share of the words that changed."""
        return self.num_changed / self.num_words if self.num_words else 0.0

    @property
    def times_smaller(self) -> float:
        """Dense bytes over sent bytes."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else float("inf")

    @property
    def num_verified(self) -> int:
        """Workers that hold the target's bits, by digest."""
        return sum(worker.verified for worker in self.workers)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values, derived ones included."""
        derived = {"density": self.density, "times_smaller": self.times_smaller, "num_verified": self.num_verified}
        return asdict(self) | derived

    def line(self) -> str:
        """Return one line for a log."""
        what = "committed" if self.committed else "ABORTED"
        took = f"in {self.times.total_s * 1e3:.0f} ms"
        if self.times.paused_s is not None:
            took += f", paused {self.times.paused_s * 1e3:.0f} ms"
        return (
            f"{what} version {self.target_version} (from {self.base_version}): {self.density:.3%} changed, "
            f"{self.sent_bytes} of {self.dense_bytes} bytes ({self.wire}, {self.times_smaller:.1f} times smaller), "
            f"verified by {self.num_verified} of {len(self.workers)} workers {took}"
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One `receive_weights`.

    Attributes:
        version: the version this worker serves now; None if none.
        committed: whether the trainer's call published a new version.
        error: why not; empty if it did.
        repaired: parameters that were sent whole again because their bits had changed.
        optimizer_step: that the version was published with; None if none was told.
    """

    version: int | None
    committed: bool
    error: str = ""
    repaired: tuple[str, ...] = field(default=())
    optimizer_step: int | None = None
