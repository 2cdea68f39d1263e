"""How one round went, on the trainer's side, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deltacast.delta.errors import RoundAbortedError
from deltacast.engines.control import Deadline
from deltacast.engines.membership import Member
from deltacast.engines.payload import Outgoing
from deltacast.engines.protocol import Ack, RoundKey, Verdict
from deltacast.engines.report import RoundReport, StageTimes, WorkerVerdict
from deltacast.store.baseline import Baseline

__all__ = ["Outcome", "aborted", "report_of"]


@dataclass(slots=True)
class Outcome:
    """How one round went.

    Attributes:
        errors: by rank; rank 0 is the trainer's own side.
        commit_by: workers that have voted may have given up after this.
    """

    key: RoundKey
    committed: bool = False
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    acks: dict[int, Ack] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    ready_s: float = 0.0
    send_s: float = 0.0
    publish_s: float = 0.0
    commit_s: float = 0.0
    round_s: float = 0.0
    commit_by: Deadline | None = None

    @property
    def refusals(self) -> dict[int, str]:
        """Why workers failed whose weights are sound, by rank: such a one may have left in the middle of a payload."""
        return {rank: v.error for rank, v in self.verdicts.items() if v.error and not v.damaged}


def report_of(payload: Outgoing, baseline: Baseline, outcome: Outcome, members: Sequence[Member]) -> RoundReport:
    """Return the report of a round, but for what the call around it knows."""
    verdicts, table = outcome.verdicts.values(), baseline.state.table
    return RoundReport(
        run_id=baseline.run_id,
        epoch=outcome.key.epoch,
        generation=outcome.key.generation,
        round=outcome.key.round,
        base_version=payload.base_version or 0,
        target_version=payload.target_version,
        committed=outcome.committed,
        wire=payload.wire,
        num_changed=payload.num_changed,
        num_words=table.num_words,
        num_parameters=payload.num_parameters,
        dense_bytes=table.nbytes,
        sent_bytes=payload.sent_bytes,
        times=StageTimes(
            diff_s=payload.diff_s,
            encode_s=payload.encode_s,
            ready_s=outcome.ready_s,
            send_s=outcome.send_s,
            apply_s=max((verdict.apply_s for verdict in verdicts), default=0.0),
            audit_s=max((verdict.audit_s for verdict in verdicts), default=0.0),
            publish_s=outcome.publish_s,
            commit_s=outcome.commit_s,
            round_s=payload.diff_s + payload.encode_s + outcome.round_s if not payload.begun_at else outcome.round_s,
        ),
        workers=tuple(_verdict_of(member, outcome, payload.target_digest) for member in members),
        evicted=tuple(member.name for member in members if member.lost),
        error=outcome.errors.get(0, ""),
        buffer_bytes=payload.buffer_bytes,
        optimizer_step=payload.optimizer_step,
    )


def _verdict_of(member: Member, outcome: Outcome, target_digest: str) -> WorkerVerdict:
    verdict, ack = outcome.verdicts.get(member.rank), outcome.acks.get(member.rank)
    digest = ack.digest if ack else verdict.digest if verdict else ""
    return WorkerVerdict(
        rank=member.rank,
        name=member.name,
        verified=outcome.committed and ack is not None and not member.lost and digest == target_digest,
        digest=digest,
        audited_through=ack.audited_through if ack else -1,
        error=outcome.errors.get(member.rank, "") or member.lost or (ack.error if ack else ""),
        damaged=tuple(verdict.damaged) if verdict else (),
        buffer_bytes=verdict.buffer_bytes if verdict else 0,
    )


def aborted(report: RoundReport) -> RoundAbortedError:
    """Return the error that tells of a round that ended in ABORT, with its report."""
    errors = {worker.rank: worker.error for worker in report.workers if worker.error}
    reasons = [f"rank {worker.rank} ({worker.name}): {worker.error}" for worker in report.workers if worker.error]
    if report.error:
        reasons.insert(0, report.error)
    error = RoundAbortedError(
        f"the round was aborted and everybody alive is at version {report.base_version}: {'; '.join(reasons)}",
        version=report.target_version,
        rank=next(iter(errors), None),
    )
    error.report = report
    return error
