"""The trainer's half of the protocol: admit workers, propose, send, collect verdicts, decide, advance.

Everything that any transport shares is here; `sparse_nccl.py` adds how the payload leaves. The states are those of
`protocol.TRAINER_STEPS`. The baseline moves after a COMMIT is on record and before it is announced to the caller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self, TypeVar

import numpy as np
import torch

from deltacast.delta.apply import Transaction
from deltacast.delta.codec import EncodedRound, encode_round
from deltacast.delta.errors import (
    DeadlineError,
    ProtocolError,
    RoundAbortedError,
    StateError,
    TransportError,
)
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource
from deltacast.engines.base import Client, TrainerEngine, TrainerInitInfo
from deltacast.engines.control import Channel, Deadline, Listener, Task, wait_any
from deltacast.engines.group import PayloadGroup, Rendezvous
from deltacast.engines.protocol import (
    TRAINER_STEPS,
    Ack,
    Decision,
    DecisionLog,
    Finish,
    Form,
    Formed,
    Hello,
    Machine,
    Message,
    Propose,
    Ready,
    RoundKey,
    TrainerState,
    Verdict,
    Welcome,
    expect,
)
from deltacast.engines.report import RoundReport, StageTimes, WorkerVerdict
from deltacast.store.baseline import Baseline

__all__ = ["RoundTrainer"]

_LOG: Final = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=Message)


@dataclass(slots=True)
class _Member:
    """One worker as the trainer knows it. `lost` says why it is no longer heard."""

    channel: Channel
    hello: Hello
    action: str
    reason: str
    rank: int = 0
    lost: str = ""

    @property
    def name(self) -> str:
        return self.hello.name


@dataclass(slots=True)
class _Outcome:
    """How one round went."""

    committed: bool
    key: RoundKey
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

    Use `trainer_init`. One thread calls it; a second `send_weights` while one runs is refused.
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
        self._listener = Listener(init_info.host, init_info.port, bytes.fromhex(init_info.secret))
        self._members: list[_Member] = []
        self._group: PayloadGroup | None = None
        self._rendezvous: Rendezvous | None = None
        self._generation = self._round_number = 0
        self._newest_version = init_info.version
        self._machine = Machine(TRAINER_STEPS, TrainerState.IDLE)
        self._busy = threading.Lock()
        self._seeded: list[str] = []
        self._evicted: list[str] = []

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
        return self._info.for_workers(self._listener.host, self._listener.port).as_dict()

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The workers that take part, by rank from 1."""
        return tuple(member.name for member in self._members)

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
        for member in self._members:
            member.channel.close()
        self._members.clear()
        self._drop_group()
        self._rendezvous = None
        self._listener.close()

    # Sessions: one call of ours, which the workers answer until they are told that it is over.

    def _admit_first(self) -> None:
        info = self._info.for_workers(self._listener.host, self._listener.port).as_dict()
        task = Task("client", lambda: self._client.init_transfer_engine(info))
        with self._session(task):
            deadline = Deadline(self._info.timeout_s)
            while len(self._members) < self._info.num_workers:
                _raise_client_error(task)
                self._handshake(self._listener.accept(deadline), deadline)
            self._catch_up()

    def _send_weights(self, optimizer_step: int | None) -> RoundReport:
        started = time.perf_counter()
        self._seeded, self._evicted = [], []
        self._client.start_weight_update()
        task = Task("client", lambda: self._client.update_weights({"run_id": self._info.run_id}))
        with self._session(task):
            self._admit_waiting()
            self._catch_up()
            report = self._publish(optimizer_step)
            report = replace(report, times=replace(report.times, total_s=time.perf_counter() - started))
            _LOG.info("%s", report.line())
            if not report.committed:
                raise _aborted(report)
        self._client.finish_weight_update()
        return report

    def _session(self, task: Task) -> _Session:
        return _Session(self, task)

    def _end_session(self, task: Task, error: str) -> None:
        """Tell everybody that the call is over, and wait for the client to return."""
        deadline = Deadline(self._info.timeout_s)
        self._tell(self._members, lambda key: Finish(self._info.run_id, key, self.baseline.version, error), deadline)
        self._evict()
        if not task.join(self._info.timeout_s):
            raise DeadlineError("the client's call did not return", hint="Is a worker stuck outside deltacast?")

    # Membership: handshakes, generations, catching up.

    def _admit_waiting(self) -> None:
        self._evict_closed()
        while self._listener.has_waiting():
            channel = self._listener.accept_waiting()
            if channel is not None:
                self._handshake(channel, Deadline(self._info.timeout_s))

    def _handshake(self, channel: Channel, deadline: Deadline) -> None:
        """Hear what a worker holds and tell it how it will catch up; a worker we cannot serve is told why."""
        try:
            hello = expect(channel.receive(deadline)[0], Hello)
            channel.peer = f"worker {hello.name}"
            action, reason = self._judge(hello)
            key = self._key()
            channel.send(Welcome(self._info.run_id, key, action, self.baseline.version, reason), deadline)
        except TransportError as err:
            channel.close()
            _LOG.warning("deltacast dropped a worker at its handshake: %s", err)
            return
        if action == "refuse":
            channel.close()
            raise StateError(f"worker {hello.name} cannot join: {reason}")
        _LOG.info("deltacast admits worker %s: %s (%s)", hello.name, action, reason)
        self._members.append(_Member(channel, hello, action, reason))
        self._drop_group()
        if hello.run_id == self._info.run_id:
            self._newest_version = max(self._newest_version, hello.version)

    def _judge(self, hello: Hello) -> tuple[str, str]:
        if hello.table_digest != self.baseline.state.table.digest:
            return "refuse", f"its parameter table is {hello.table_digest}, ours {self.baseline.state.table.digest}"
        if hello.run_id == self._info.run_id and hello.key.epoch > self._info.epoch:
            return (
                "refuse",
                f"it has seen epoch {hello.key.epoch} of this run, this trainer is epoch {self._info.epoch}",
            )
        if hello.damaged and hello.version == self.baseline.version and hello.run_id == self._info.run_id:
            return "repair", f"damaged: {', '.join(hello.damaged[:3])}"
        if hello.digest != self.baseline.digest or hello.damaged:
            return "seed", f"it holds {hello.digest}, we are at {self.baseline.digest}"
        return "leave", "it holds our bits"

    def _catch_up(self) -> None:
        """Form the group if membership changed, and give every new worker the baseline's bits."""
        self._evict()
        if not self._members:
            raise TransportError("no worker is left", hint="Start one with this trainer's worker_init_info.")
        if self._group is None:
            self._form_group()
        seeds = [member for member in self._members if member.action == "seed"]
        repairs = [member for member in self._members if member.action == "repair"]
        if seeds:
            self._catch_up_with(self.baseline.seed(), seeds)
        if repairs:
            names = {name for member in repairs for name in member.hello.damaged}
            self._catch_up_with(self.baseline.seed(names), repairs)
        for member in self._members:
            if member.action in ("seed", "repair"):
                self._seeded.append(f"{member.name}: {member.action} ({member.reason})")
            member.action = "leave"

    def _catch_up_with(self, update: WeightUpdate, members: Sequence[_Member]) -> None:
        outcome = self._round(update, self._encode(update), members, advance=False)
        if not outcome.committed:
            raise _failed_round("catching up failed", outcome, self.baseline.version, self._members)

    def _form_group(self) -> None:
        """Meet every member under the next generation; a member that does not come is evicted and it starts over."""
        while self._members:
            self._generation += 1
            deadline = Deadline(self._info.timeout_s)
            for number, member in enumerate(self._members, start=1):
                member.rank = number
            self._rendezvous = Rendezvous(self._info.host, len(self._members) + 1, self._info.timeout_s)
            if self._try_form(self._rendezvous, deadline):
                return
            self._drop_group()
            self._evict()
        raise TransportError("no worker is left", hint="Start one with this trainer's worker_init_info.")

    def _try_form(self, meeting: Rendezvous, deadline: Deadline) -> bool:
        world_size = len(self._members) + 1
        host = self._members[0].channel.local_host
        for member in self._members:
            form = Form(self._info.run_id, self._key(), host, meeting.port, member.rank, world_size)
            self._tell([member], lambda _, form=form: form, deadline)
        task = Task("form", lambda: self._meet(meeting, world_size, host))
        formed, errors = self._collect(Formed, deadline)
        ended = task.join(self._info.timeout_s)
        if not ended:
            raise DeadlineError("forming the payload group did not end")
        if task.error is not None or errors or len(formed) < len(self._members):
            _LOG.warning("deltacast could not form generation %d: %s %s", self._generation, task.error, errors)
            for member in self._members:
                if member.rank in errors and not member.lost:
                    member.lost = errors[member.rank]
            return False
        return True

    def _meet(self, meeting: Rendezvous, world_size: int, interface: str) -> None:
        self._group = PayloadGroup(
            meeting.store,
            rank=0,
            world_size=world_size,
            generation=self._generation,
            device=torch.device(self._info.device),
            timeout_s=self._info.timeout_s,
            interface=interface,
        )

    # Rounds.

    def _publish(self, optimizer_step: int | None) -> RoundReport:
        """Diff, send, and decide; once more if a worker turned out damaged and could be repaired."""
        started = time.perf_counter()
        update = self.baseline.diff(
            self._source, target_version=self._newest_version + 1, optimizer_step=optimizer_step
        )
        diff_s = time.perf_counter() - started
        encoded = self._encode(update)
        encode_s = time.perf_counter() - started - diff_s
        outcome = self._round(update, encoded, self._members, advance=True)
        repaired: list[tuple[int, str]] = []
        if not outcome.committed and outcome.damaged and not any(member.lost for member in self._members):
            repaired = outcome.damaged
            _LOG.warning("deltacast repairs %s", repaired)
            self._catch_up()
            self._catch_up_with(self.baseline.seed({name for _, name in repaired}), self._members)
            outcome = self._round(update, encoded, self._members, advance=True)
        return self._report(update, encoded, outcome, StageTimes(diff_s, encode_s), repaired)

    def _encode(self, update: WeightUpdate) -> EncodedRound:
        return encode_round(update, self.baseline.state.table, values=self._info.values, threads=self._info.threads)

    def _round(
        self, update: WeightUpdate, encoded: EncodedRound, receivers: Iterable[_Member], *, advance: bool
    ) -> _Outcome:
        """Run one round to its end: every live worker has acted on the decision, or is evicted."""
        self._round_number += 1
        outcome = _Outcome(committed=False, key=self._key())
        staged = self.baseline.stage(update) if advance else None
        self._propose(update, encoded, [member.rank for member in receivers], outcome)
        if not outcome.errors:
            self._machine.step("all ready")
            self._send_payload(encoded, outcome)
        if not outcome.errors:
            self._machine.step("sent")
            self._hear_verdicts(update, outcome)
        self._settle(staged, outcome)
        return outcome

    def _propose(self, update: WeightUpdate, encoded: EncodedRound, receivers: list[int], outcome: _Outcome) -> None:
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        base_version = -1 if update.base_version is None else update.base_version
        payload_bytes = sum(len(group) for group in encoded.groups)
        propose = Propose(
            self._info.run_id,
            outcome.key,
            base_version,
            update.target_version,
            update.target_digest,
            payload_bytes,
            receivers,
        )
        self._machine.step("propose")
        self._tell(self._members, lambda _: propose, deadline, encoded.rows)
        ready, errors = self._collect(Ready, deadline)
        outcome.errors |= errors | {rank: answer.error for rank, answer in ready.items() if answer.error}
        outcome.ready_s = time.perf_counter() - started

    def _send_payload(self, encoded: EncodedRound, outcome: _Outcome) -> None:
        """Broadcast; a worker that is lost or gives up meanwhile ends it."""
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        buffer = _joined(encoded.groups)
        group = self._group
        assert group is not None
        task = Task("payload", lambda: group.broadcast(buffer, deadline))
        try:
            self._watch_payload(task, deadline, outcome)
        finally:
            if not task.done or task.error is not None:
                self._drop_group()
            if not task.join(self._info.timeout_s):
                raise DeadlineError("a collective did not end", hint="Restart this trainer.")
        if task.error is not None and not outcome.errors:
            outcome.errors |= self._blame(task.error)
        outcome.send_s = time.perf_counter() - started

    def _watch_payload(self, task: Task, deadline: Deadline, outcome: _Outcome) -> None:
        while not task.done and not outcome.errors:
            waiting = [m for m in self._members if not m.lost and m.rank not in outcome.verdicts]
            try:
                ready = wait_any([member.channel for member in waiting], Deadline(deadline.seconds * 2), task)
            except DeadlineError as err:
                outcome.errors |= self._blame(err)
                return
            for member in waiting:
                if member.channel is ready:
                    self._hear(member, Verdict, outcome.verdicts, outcome.errors, outcome.key)

    def _blame(self, error: BaseException) -> dict[int, str]:
        """Find who broke the payload: the members whose connection is gone, else nobody in particular."""
        self._evict_closed(keep=True)
        lost = {member.rank: member.lost for member in self._members if member.lost}
        return lost or {0: str(error)}

    def _hear_verdicts(self, update: WeightUpdate, outcome: _Outcome) -> None:
        deadline = Deadline(self._info.timeout_s)
        verdicts, errors = self._collect(Verdict, deadline, outcome.verdicts)
        outcome.verdicts, outcome.errors = verdicts, outcome.errors | errors
        for rank, verdict in verdicts.items():
            if verdict.error:
                outcome.errors[rank] = verdict.error
            elif verdict.digest != update.target_digest:
                outcome.errors[rank] = f"digest {verdict.digest}, expected {update.target_digest}"

    def _settle(self, staged: Transaction | None, outcome: _Outcome) -> None:
        """Write the record, act on it, and hear that everybody else did."""
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        good = not outcome.errors and len(outcome.verdicts) == len(self._members)
        outcome.committed = self.decisions.decide(outcome.key, commit=good)
        self._machine.step("decide")
        decision = Decision(self._info.run_id, outcome.key, outcome.committed)
        self._tell(self._members, lambda _: decision, deadline)
        if outcome.committed and staged is not None:
            self.baseline.advance(staged)
            self._newest_version = self.baseline.version
        acks, errors = self._collect(Ack, deadline)
        outcome.acks = acks
        for member in self._members:
            ack = acks.get(member.rank)
            if not member.lost and (ack is None or ack.digest != self.baseline.digest):
                member.lost = errors.get(member.rank) or f"acknowledged {ack.digest if ack else 'nothing'}"
        self._machine.step("settled")
        outcome.commit_s = time.perf_counter() - started

    # Talking.

    def _key(self) -> RoundKey:
        return RoundKey(self._info.epoch, self._generation, self._round_number)

    def _tell(
        self,
        members: Sequence[_Member],
        make: Callable[[RoundKey], Message],
        deadline: Deadline,
        bulk: bytes = b"",
    ) -> None:
        for member in members:
            if not member.lost:
                try:
                    member.channel.send(make(self._key()), deadline, bulk)
                except TransportError as err:
                    member.lost = str(err)

    def _collect(
        self, cls: type[Answer], deadline: Deadline, have: dict[int, Answer] | None = None
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Hear one answer from every member; stop at the first failure, except for acks, which all must have a say."""
        answers = dict(have or {})
        errors = {member.rank: member.lost for member in self._members if member.lost}
        patient = cls is Ack
        while patient or not errors:
            waiting = [m for m in self._members if not m.lost and m.rank not in answers]
            if not waiting:
                break
            try:
                ready = wait_any([member.channel for member in waiting], deadline)
            except DeadlineError as err:
                for member in waiting:
                    member.lost = errors[member.rank] = str(err)
                break
            member = next(member for member in waiting if member.channel is ready)
            self._hear(member, cls, answers, errors, self._key())
        return answers, errors

    def _hear(
        self,
        member: _Member,
        cls: type[Answer],
        answers: dict[int, Answer],
        errors: dict[int, str],
        key: RoundKey,
    ) -> None:
        """Take what a member has sent; answers that an abort has overtaken are dropped."""
        try:
            frame = member.channel.poll()
            if frame is None:
                return
            message = frame[0]
            if cls is Ack and isinstance(message, (Ready, Verdict)) and message.key == key:
                return
            answer = expect(message, cls)
            if answer.key != key:
                raise ProtocolError("an answer of another round", expected=key, found=answer.key)
            answers[member.rank] = answer
        except TransportError as err:
            member.lost = errors[member.rank] = str(err)

    def _evict(self) -> None:
        """Drop members that are lost; the group cannot go on without them."""
        lost = [member for member in self._members if member.lost]
        for member in lost:
            _LOG.warning("deltacast evicts worker %s: %s", member.name, member.lost)
            self._evicted.append(member.name)
            member.channel.close()
        if lost:
            self._members = [member for member in self._members if not member.lost]
            self._drop_group()

    def _evict_closed(self, *, keep: bool = False) -> None:
        """Notice connections that were closed while nobody listened."""
        for member in self._members:
            if not member.lost and (reason := member.channel.gone()):
                member.lost = reason
        if not keep:
            self._evict()

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _report(
        self,
        update: WeightUpdate,
        encoded: EncodedRound,
        outcome: _Outcome,
        times: StageTimes,
        repaired: Sequence[tuple[int, str]],
    ) -> RoundReport:
        table = self.baseline.state.table
        verdicts = outcome.verdicts.values()
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
            sent_bytes=len(encoded.rows) + sum(len(group) for group in encoded.groups),
            times=replace(
                times,
                ready_s=outcome.ready_s,
                send_s=outcome.send_s,
                apply_s=max((verdict.apply_s for verdict in verdicts), default=0.0),
                audit_s=max((verdict.audit_s for verdict in verdicts), default=0.0),
                commit_s=outcome.commit_s,
            ),
            workers=tuple(_verdict_of(member, outcome, update.target_digest) for member in self._members),
            repaired=tuple(repaired),
            evicted=tuple(self._evicted) + tuple(member.name for member in self._members if member.lost),
            seeded=tuple(self._seeded),
        )


class _Session:
    """One call of the trainer's, from the client's call to the workers until they were told that it is over."""

    def __init__(self, trainer: RoundTrainer, task: Task) -> None:
        self._trainer, self._task = trainer, task

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._trainer._end_session(self._task, str(error) if error else "")  # noqa: SLF001 - its own trainer
        if error is None:
            _raise_client_error(self._task)


def _raise_client_error(task: Task) -> None:
    if task.done and task.error is not None:
        raise TransportError(f"the client failed: {task.error}") from task.error


def _joined(groups: Sequence[bytes]) -> torch.Tensor:
    buffer = np.empty(sum(len(group) for group in groups), np.uint8)
    place = 0
    for group in groups:
        buffer[place : place + len(group)] = np.frombuffer(group, np.uint8)
        place += len(group)
    return torch.from_numpy(buffer)


def _verdict_of(member: _Member, outcome: _Outcome, target_digest: str) -> WorkerVerdict:
    verdict, ack = outcome.verdicts.get(member.rank), outcome.acks.get(member.rank)
    verified = outcome.committed and ack is not None and not member.lost and ack.digest == target_digest
    return WorkerVerdict(
        rank=member.rank,
        name=member.name,
        verified=verified,
        digest=ack.digest if ack else verdict.digest if verdict else "",
        audited_through=ack.audited_through if ack else -1,
        error=outcome.errors.get(member.rank, member.lost),
        damaged=tuple(verdict.damaged) if verdict else (),
    )


def _failed_round(what: str, outcome: _Outcome, version: int, members: Sequence[_Member]) -> RoundAbortedError:
    names = {member.rank: member.name for member in members}
    reasons = "; ".join(f"rank {rank} ({names.get(rank, 'trainer')}): {why}" for rank, why in outcome.errors.items())
    return RoundAbortedError(f"{what}: {reasons}", version=version, rank=next(iter(outcome.errors), None))


def _aborted(report: RoundReport) -> RoundAbortedError:
    bad = [worker for worker in report.workers if worker.error]
    reasons = "; ".join(f"rank {worker.rank} ({worker.name}): {worker.error}" for worker in bad)
    error = RoundAbortedError(
        f"round aborted, everybody alive is at version {report.base_version}: {reasons or 'see the log'}",
        version=report.target_version,
        rank=bad[0].rank if bad else None,
    )
    error.report = report
    return error
