"""The trainer's half of the protocol: propose, send, collect verdicts, decide, advance.

Everything that any transport shares is here and in `membership.py`; `sparse_nccl.py` names the transport. The states
are those of `protocol.TRAINER_STEPS`. The baseline moves once a COMMIT is on record, by applying what was sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np
import torch

from deltacast.delta.apply import Transaction
from deltacast.delta.codec import EncodedRound, encode_round
from deltacast.delta.errors import DeadlineError, RoundAbortedError, StateError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource
from deltacast.engines.base import Client, TrainerEngine, TrainerInitInfo
from deltacast.engines.control import Deadline, Task, wait_any
from deltacast.engines.membership import Member, Membership
from deltacast.engines.protocol import (
    TRAINER_STEPS,
    Ack,
    Decision,
    DecisionLog,
    Finish,
    Machine,
    Propose,
    Ready,
    RoundKey,
    TrainerState,
    Verdict,
)
from deltacast.engines.report import RoundReport, StageTimes, WorkerVerdict
from deltacast.store.baseline import Baseline

__all__ = ["RoundTrainer"]

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outcome:
    """How one round went. `errors` by rank; rank 0 is the trainer's own side."""

    key: RoundKey
    committed: bool = False
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    acks: dict[int, Ack] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    ready_s: float = 0.0
    send_s: float = 0.0
    commit_s: float = 0.0

    @property
    def damaged(self) -> list[tuple[int, str]]:
        return [(rank, name) for rank, verdict in sorted(self.verdicts.items()) for name in verdict.damaged]


class RoundTrainer(TrainerEngine):
    """A trainer that publishes to workers over control connections and one payload group.

    Make one with `trainer_init`. One thread calls it; a second `send_weights` while one runs is refused.

    Attributes:
        baseline: what every worker holds; read it, never move it.
        decisions: the record of every round's decision.
    """

    def __init__(self, init_info: TrainerInitInfo, source: WeightSource, client: Client) -> None:
        self._info = init_info
        self._source, self._client = source, client
        self.baseline = Baseline(
            source,
            run_id=init_info.run_id,
            epoch=init_info.epoch,
            version=init_info.version,
            placement=init_info.placement,
            threads=init_info.threads,
        )
        self.decisions = DecisionLog()
        self._workers = Membership(init_info, self.baseline)
        self._round_number = 0
        self._machine = Machine(TRAINER_STEPS, TrainerState.IDLE)
        self._busy = threading.Lock()
        self._seeded: list[str] = []

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, source: WeightSource, client: Client) -> Self:
        """See `TrainerEngine`."""
        engine = cls(init_info, source, client)
        try:
            engine._admit_first()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    @property
    def worker_init_info(self) -> dict[str, object]:
        """What a worker that joins later must be told (`WorkerInitInfo.as_dict`)."""
        return self._info.for_workers(*self._workers.address).as_dict()

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The workers that take part, by rank from 1."""
        return tuple(member.name for member in self._workers.members)

    def send_weights(self, *, optimizer_step: int | None = None) -> RoundReport:
        """See `TrainerEngine`."""
        if not self._busy.acquire(blocking=False):
            raise StateError("send_weights is already running", hint="Call it from one thread.")
        try:
            return self._send_weights(optimizer_step)
        finally:
            self._busy.release()

    def shutdown(self) -> None:
        """See `TrainerEngine`."""
        self._workers.close()

    def _admit_first(self) -> None:
        info = self.worker_init_info
        with self._session(Task("client", lambda: self._client.init_transfer_engine(info))):
            deadline = Deadline(self._info.join_timeout_s)
            while len(self._workers.members) < self._info.num_workers:
                self._workers.admit_next(deadline)
            self._catch_up()

    def _send_weights(self, optimizer_step: int | None) -> RoundReport:
        started = time.perf_counter()
        self._seeded, self._workers.evicted = [], []
        self._client.start_weight_update()
        with self._session(Task("client", lambda: self._client.update_weights({"run_id": self._info.run_id}))):
            self._workers.notice_closed()
            self._workers.admit_waiting()
            self._catch_up()
            report = self._publish(optimizer_step)
            report = replace(report, times=replace(report.times, total_s=time.perf_counter() - started))
            _LOG.info("%s", report.line())
            if not report.committed:
                raise _aborted(report)
        self._client.finish_weight_update()
        return report

    @contextmanager
    def _session(self, client_task: Task) -> Iterator[None]:
        """One call of ours: the workers answer it until they are told that it is over."""
        error = ""
        self._workers.client_task = client_task
        try:
            yield
        except BaseException as err:
            error = str(err) or type(err).__name__
            raise
        finally:
            finish = Finish(self._info.run_id, self._key(), self.baseline.version, error)
            self._workers.tell(self._workers.members, finish, Deadline(self._info.timeout_s))
            self._workers.evict()
            returned = client_task.join(self._info.timeout_s)
        if not returned:
            raise DeadlineError("the client's call did not return", hint="Is a worker stuck outside deltacast?")
        self._workers.raise_client_error()

    def _catch_up(self) -> None:
        """Give every new worker the baseline's bits: all of them, or the parameters that were damaged.

        A worker that fails at this is dropped, and the rest start over: a bad joiner stops nobody.

        Raises:
            TransportError: no worker is left.
        """
        while True:
            self._workers.ensure_group()
            behind = [member for member in self._workers.members if member.action != "leave"]
            if not behind:
                return
            action = behind[0].action
            receivers = [member for member in behind if member.action == action]
            names = {name for member in receivers for name in member.hello.damaged} if action == "repair" else None
            if self._send_baseline(names, receivers):
                for member in receivers:
                    self._seeded.append(f"{member.name}: {member.action} ({member.reason})")
                    member.action = "leave"

    def _send_baseline(self, names: set[str] | None, receivers: Sequence[Member]) -> bool:
        """Send the baseline, or some parameters of it; False if members were lost over it."""
        update = self.baseline.seed(names)
        outcome = self._round(update, self._encode(update), receivers, advance=False)
        if not outcome.committed and not any(outcome.errors):
            raise RoundAbortedError(f"catching up failed: {outcome.errors[0]}", version=self.baseline.version)
        for member in self._workers.members:
            member.lost = member.lost or outcome.errors.get(member.rank, "")
        return outcome.committed

    def _publish(self, optimizer_step: int | None) -> RoundReport:
        """Diff, send, and decide; once more if a worker turned out damaged and could be repaired."""
        started = time.perf_counter()
        target_version = max(self.baseline.version, self._workers.newest_reported) + 1
        update = self.baseline.diff(self._source, target_version=target_version, optimizer_step=optimizer_step)
        diff_s = time.perf_counter() - started
        encoded = self._encode(update)
        encode_s = time.perf_counter() - started - diff_s
        outcome = self._round(update, encoded, self._workers.members, advance=True)
        repaired: list[tuple[int, str]] = []
        if not outcome.committed and outcome.damaged and not any(member.lost for member in self._workers.members):
            repaired = outcome.damaged
            _LOG.warning("deltacast repairs %s", repaired)
            self._workers.ensure_group()
            if self._send_baseline({name for _, name in repaired}, self._workers.members):
                outcome = self._round(update, encoded, self._workers.members, advance=True)
        return self._report(update, encoded, outcome, StageTimes(diff_s, encode_s), repaired)

    def _encode(self, update: WeightUpdate) -> EncodedRound:
        return encode_round(update, self.baseline.state.table, values=self._info.values, threads=self._info.threads)

    def _round(
        self, update: WeightUpdate, encoded: EncodedRound, receivers: Sequence[Member], *, advance: bool
    ) -> _Outcome:
        """Run one round to its end: every live worker has acted on the decision, or is lost."""
        self._round_number += 1
        outcome = _Outcome(self._key())
        staged = self.baseline.stage(update) if advance else None
        try:
            self._propose(update, encoded, receivers, outcome)
            if not outcome.errors:
                self._machine.step("all ready")
                self._send_payload(encoded, outcome)
            if not outcome.errors:
                self._machine.step("sent")
                self._hear_verdicts(update, outcome)
        except BaseException as err:
            outcome.errors[0] = f"{type(err).__name__}: {err}"
            raise
        finally:  # whatever happened, there is a decision and everybody is told
            self._settle(staged, outcome)
        return outcome

    def _propose(
        self, update: WeightUpdate, encoded: EncodedRound, receivers: Sequence[Member], outcome: _Outcome
    ) -> None:
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        propose = Propose(
            self._info.run_id,
            outcome.key,
            base_version=-1 if update.base_version is None else update.base_version,
            target_version=update.target_version,
            target_digest=update.target_digest,
            payload_bytes=sum(len(group) for group in encoded.groups),
            receivers=[member.rank for member in receivers],
        )
        self._machine.step("propose")
        self._workers.tell(self._workers.members, propose, deadline, encoded.rows)
        ready, errors = self._workers.collect(Ready, outcome.key, deadline)
        outcome.errors |= errors | {rank: answer.error for rank, answer in ready.items() if answer.error}
        outcome.ready_s = time.perf_counter() - started

    def _send_payload(self, encoded: EncodedRound, outcome: _Outcome) -> None:
        """Broadcast; a worker that is lost meanwhile ends it."""
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        buffer, group = _joined(encoded.groups), self._workers.group
        assert group is not None
        task = Task("payload", lambda: group.broadcast(buffer, deadline))
        try:
            self._watch_payload(task, outcome)
        finally:
            if not task.done or task.error is not None:
                self._workers.drop_group()
            ended = task.join(self._info.timeout_s)
        if not ended:
            raise DeadlineError("a collective did not end", hint="Restart this trainer.")
        if task.error is not None and not outcome.errors:
            outcome.errors |= self._blame(task.error)
        outcome.send_s = time.perf_counter() - started

    def _watch_payload(self, task: Task, outcome: _Outcome) -> None:
        deadline = Deadline(self._info.timeout_s * 2)  # the broadcast's own comes first
        while not task.done and not outcome.errors:
            waiting = [m for m in self._workers.members if not m.lost and m.rank not in outcome.verdicts]
            ready = wait_any([member.channel for member in waiting], deadline, task)
            member = self._workers.heard(waiting, ready)
            if member is not None:
                self._workers.hear(member, Verdict, outcome.key, outcome.verdicts, outcome.errors)

    def _blame(self, error: BaseException) -> dict[int, str]:
        """Say who broke the payload: the members whose connection is gone, else nobody in particular."""
        self._workers.notice_closed()
        lost = {member.rank: member.lost for member in self._workers.members if member.lost}
        return lost or {0: str(error)}

    def _hear_verdicts(self, update: WeightUpdate, outcome: _Outcome) -> None:
        deadline = Deadline(self._info.timeout_s)
        outcome.verdicts, errors = self._workers.collect(Verdict, outcome.key, deadline, outcome.verdicts)
        outcome.errors |= errors
        for rank, verdict in outcome.verdicts.items():
            if verdict.error:
                outcome.errors[rank] = verdict.error
            elif verdict.digest != update.target_digest:
                outcome.errors[rank] = f"digest {verdict.digest}, expected {update.target_digest}"

    def _settle(self, staged: Transaction | None, outcome: _Outcome) -> None:
        """Write the record, act on it, and hear that everybody else did."""
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        members = self._workers.members
        unanimous = not outcome.errors and len(outcome.verdicts) == len(members)
        outcome.committed = self.decisions.decide(outcome.key, commit=unanimous)
        self._machine.step("decide")
        if len(outcome.verdicts) < len(members):
            self._workers.drop_group()  # wakes workers that still wait for payload
        self._workers.tell(members, Decision(self._info.run_id, outcome.key, outcome.committed), deadline)
        if outcome.committed and staged is not None:
            self.baseline.advance(staged)
        outcome.acks, errors = self._workers.collect(Ack, outcome.key, deadline)
        for member in members:
            ack = outcome.acks.get(member.rank)
            if not member.lost and (ack is None or (outcome.committed and ack.digest != self.baseline.digest)):
                member.lost = errors.get(member.rank) or f"acknowledged {ack.digest if ack else 'nothing'}"
        self._machine.step("settled")
        outcome.commit_s = time.perf_counter() - started

    def _key(self) -> RoundKey:
        return RoundKey(self._info.epoch, self._workers.generation, self._round_number)

    def _report(
        self,
        update: WeightUpdate,
        encoded: EncodedRound,
        outcome: _Outcome,
        times: StageTimes,
        repaired: Sequence[tuple[int, str]],
    ) -> RoundReport:
        table, members = self.baseline.state.table, self._workers.members
        verdicts = outcome.verdicts.values()
        times = replace(
            times,
            ready_s=outcome.ready_s,
            send_s=outcome.send_s,
            apply_s=max((verdict.apply_s for verdict in verdicts), default=0.0),
            audit_s=max((verdict.audit_s for verdict in verdicts), default=0.0),
            commit_s=outcome.commit_s,
        )
        return RoundReport(
            run_id=self._info.run_id,
            epoch=outcome.key.epoch,
            generation=outcome.key.generation,
            round=outcome.key.round,
            base_version=update.base_version or 0,
            target_version=update.target_version,
            committed=outcome.committed,
            num_changed=update.num_changed,
            num_words=sum(meta.num_words for meta in table),
            num_parameters=len(update.patches),
            dense_bytes=table.nbytes,
            sent_bytes=encoded.num_bytes,
            times=times,
            workers=tuple(_verdict_of(member, outcome, update.target_digest) for member in members),
            repaired=tuple(repaired),
            evicted=(*self._workers.evicted, *(member.name for member in members if member.lost)),
            seeded=tuple(self._seeded),
            error=outcome.errors.get(0, ""),
        )


def _joined(groups: Sequence[bytes]) -> torch.Tensor:
    buffer = np.empty(sum(len(group) for group in groups), np.uint8)
    place = 0
    for group in groups:
        buffer[place : place + len(group)] = np.frombuffer(group, np.uint8)
        place += len(group)
    return torch.from_numpy(buffer)


def _verdict_of(member: Member, outcome: _Outcome, target_digest: str) -> WorkerVerdict:
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
    )


def _reasons(errors: dict[int, str], names: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} ({names.get(rank, 'trainer')}): {why}" for rank, why in sorted(errors.items()))


def _aborted(report: RoundReport) -> RoundAbortedError:
    errors = {worker.rank: worker.error for worker in report.workers if worker.error}
    names = {worker.rank: worker.name for worker in report.workers}
    reasons = _reasons(errors, names) or report.error or "see the log"
    error = RoundAbortedError(
        f"the round was aborted and everybody alive is at version {report.base_version}: {reasons}",
        version=report.target_version,
        rank=next(iter(errors), None),
    )
    error.report = report
    return error
