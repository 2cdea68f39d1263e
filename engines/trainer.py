"""The trainer's half of the protocol: propose, send, collect verdicts, decide, advance.

Everything that any transport shares is here and in `membership.py`; `sparse_nccl.py` names the transport. The states
are those of `protocol.TRAINER_STEPS`. The baseline moves once a COMMIT is on record, by applying what was sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final, Self

import torch

from deltacast.delta.errors import CapacityError, DeadlineError, StateError, TransportError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource
from deltacast.engines.base import Client, Pausing, TrainerEngine, TrainerInitInfo
from deltacast.engines.catching_up import CatchingUp
from deltacast.engines.container_wire import ContainerOutgoing
from deltacast.engines.control import Deadline, Task, wait_any
from deltacast.engines.group import COLLECTIVES, Transport
from deltacast.engines.history import History
from deltacast.engines.membership import Member, Membership
from deltacast.engines.outcome import Outcome, aborted, report_of
from deltacast.engines.payload import Outgoing, Route
from deltacast.engines.pending import PendingUpdate
from deltacast.engines.protocol import (
    TRAINER_STEPS,
    Ack,
    Decision,
    DecisionLog,
    Finish,
    Machine,
    Message,
    Propose,
    Ready,
    RoundKey,
    TrainerState,
    Verdict,
    check_step,
)
from deltacast.engines.publishing import Publisher, publisher_of
from deltacast.engines.report import RoundReport
from deltacast.engines.resuming import begin_run
from deltacast.engines.streams import Streams

__all__ = ["RoundTrainer"]

_LOG: Final = logging.getLogger(__name__)


class RoundTrainer(TrainerEngine):
    """A trainer that publishes to workers over control connections and one payload group.

    Make one with `trainer_init`. One thread calls it; a second `send_weights` while one runs is refused.

    Attributes:
        baseline: what every worker holds; read it, never move it.
        decisions: the record of every round's decision.
        transport: how payloads travel; the workers' engine has the same.
    """

    transport: ClassVar[Transport] = COLLECTIVES

    def __init__(self, init_info: TrainerInitInfo, source: WeightSource, client: Client) -> None:
        beginning = begin_run(init_info, source)
        self._info, self.baseline, head = beginning.info, beginning.baseline, beginning.head
        self._source, self._client = source, client
        self.decisions = DecisionLog()
        self._history = History(self._info, self.baseline)
        self._workers = Membership(self._info, self.baseline, self._history, self.transport)
        self._behind = CatchingUp(self._info, self.baseline, self._workers, self._history)
        self._round_number = 0
        self._machine = Machine(TRAINER_STEPS, TrainerState.IDLE)
        self._busy = threading.Lock()
        self._pending: PendingUpdate | None = None
        self._source_read: Callable[[], None] | None = None  # of a pending update: its caller may change the weights
        self._num_calls = 0
        self._optimizer_step = None if head is None else head.optimizer_step  # the baseline's
        self._client_error = ""
        self._streams = Streams(self._info, source, self.baseline)
        self._publisher = None if head is None else publisher_of(self._info, head)
        self._early: tuple[tuple[Member, ...], Outgoing] | None = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, source: WeightSource, client: Client) -> Self:
        """See `TrainerEngine`."""
        engine = cls(init_info, source, client)
        try:
            with client.paused() if isinstance(client, Pausing) else nullcontext():
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
        step = self._begin_call(optimizer_step)
        try:
            return self._send_weights(step)
        finally:
            self._busy.release()

    def send_weights_async(self, *, optimizer_step: int | None = None) -> PendingUpdate:
        """See `TrainerEngine`."""
        step = self._begin_call(optimizer_step)
        try:
            self._pending = PendingUpdate(partial(self._send_pending, step), torch.device(self._info.device))
        except BaseException:
            self._busy.release()
            raise
        return self._pending

    def shutdown(self) -> None:
        """See `TrainerEngine`."""
        if self._pending is not None:
            self._pending.wait()
        self._workers.close()
        self._streams.close()
        if self._publisher is not None:
            self._publisher.close(self._info.timeout_s)

    def _begin_call(self, optimizer_step: int | None) -> int | None:
        """Check the argument, and keep other calls out until `_busy` is released."""
        step = None if optimizer_step is None else check_step(optimizer_step)
        if not self._busy.acquire(blocking=False):
            raise StateError("send_weights is already running", hint="Wait until it has ended.")
        if self._workers.closed:
            self._busy.release()
            raise StateError("this trainer is shut down")
        return step

    def _send_pending(self, step: int | None, source_read: Callable[[], None]) -> RoundReport:
        self._source_read = source_read
        try:
            return self._send_weights(step)
        finally:
            self._source_read = None
            self._busy.release()

    def _admit_first(self) -> None:
        info = self.worker_init_info
        try:
            with self._session(lambda: self._client.init_transfer_engine(info)):
                deadline = Deadline(self._info.join_timeout_s)
                while len(self._workers.members) < self._info.num_workers:  # also those that went meanwhile
                    while len(self._workers.members) < self._info.num_workers:
                        self._workers.admit_next(deadline)
                    self._catch_up()
        except BaseException:
            self._workers.close()  # who waits for the others must hear now that they will not come
            raise
        if self._client_error:
            raise TransportError(self._client_error)

    def _send_weights(self, optimizer_step: int | None) -> RoundReport:
        started = time.perf_counter()
        if self._publisher is not None:
            self._publisher.make_room(Deadline(self._info.timeout_s))
        self._num_calls += 1
        self._early = None
        self._begin_early(optimizer_step)  # first: whom nobody told to start must not be told to finish
        try:
            self._client_call("start the update", self._client.start_weight_update)
            report = self._update_workers(optimizer_step)
        except BaseException:  # nobody stays paused over a call that failed
            early, self._early = self._early, None
            if early is not None:
                early[1].discard()
            try:
                self._client.finish_weight_update()
            except Exception as err:  # noqa: BLE001 - the user's code; the first error is the one to report
                _LOG.warning("deltacast: the client could not finish the update either: %s", err)
            raise
        report = replace(report, times=replace(report.times, total_s=time.perf_counter() - started))
        try:
            self._client_call("finish the update, though it is committed", self._client.finish_weight_update, report)
            if isinstance(self._client, Pausing):
                report = replace(report, times=replace(report.times, paused_s=self._client.paused_s))
        finally:
            _LOG.info("%s", report.line())
        return report

    def _begin_early(self, optimizer_step: int | None) -> None:
        """Diff while nobody is paused yet: all of a container, of a streamed round what it can without the workers."""
        if self._workers.members:
            payload = self._streams.payload(self._workers)
            if payload is None:
                payload = self._container_of_source(self._next_version(), optimizer_step)
            self._early = tuple(self._workers.members), payload
            payload.begin()

    def _early_payload(self) -> Outgoing | None:
        """Return the payload that was begun early, else a streamed one, if any; streams are for the workers at hand."""
        early, self._early = self._early, None
        if early is not None and (early[0] == tuple(self._workers.members) or not early[1].reads_source):
            return early[1]
        return self._streams.payload(self._workers)

    def _update_workers(self, optimizer_step: int | None) -> RoundReport:
        update_info = {"run_id": self._info.run_id, "call": self._num_calls}
        self._workers.evicted = []
        with self._session(lambda: self._client.update_weights(update_info)):
            for member in self._workers.members:
                member.repaired = False
            self._workers.notice_closed()
            self._workers.admit_waiting()
            report = self._publish(optimizer_step, self._catch_up())
            if not report.committed:
                _LOG.info("%s", report.line())
                raise aborted(report)
        through = None if self._publisher is None else self._publisher.published_through
        return replace(report, error=self._client_error, published_through=through)

    def _client_call(self, what: str, call: Callable[[], None], report: RoundReport | None = None) -> None:
        try:
            call()
        except Exception as err:
            version = None if report is None else report.target_version
            raise TransportError(f"the client could not {what}: {err}", version=version) from err

    @contextmanager
    def _session(self, client_call: Callable[[], None]) -> Iterator[None]:
        """One call of ours: the workers answer it until they are told that it is over.

        What goes wrong with the client's call after its purpose was served is left in `_client_error`.
        """
        error, self._client_error = "", ""
        task = self._workers.client_task = Task("client", client_call)
        try:
            yield
        except BaseException as err:
            error = str(err) or type(err).__name__
            raise
        finally:
            finish = Finish(self._info.run_id, self._key(), self.baseline.version, self._num_calls, error)
            self._workers.tell(self._workers.members, finish, Deadline(self._info.timeout_s))
            self._workers.evict()
            if not task.join(self._info.timeout_s):
                self._client_error = "the client's call did not return: is a worker stuck outside deltacast?"
            elif task.error is not None:
                self._client_error = f"the client failed: {task.error}"
            if self._client_error:
                _LOG.warning("deltacast: %s", self._client_error)

    def _catch_up(self) -> list[str]:
        """Bring every member to the baseline's bits; returns who was welcomed or caught up, how and why."""
        return self._behind.run(self._optimizer_step, self._round)

    def _publish(self, optimizer_step: int | None, seeded: Sequence[str]) -> RoundReport:
        """Diff, send, and decide; once more if a worker turned out damaged and could be repaired."""
        payload, outcome = self._publish_once(optimizer_step)
        repaired: list[tuple[int, str]] = []
        damaged = self._behind.note_damage(outcome)
        may_read_again = self._source_read is None and not any(member.lost for member in self._workers.members)
        if damaged and not outcome.committed and may_read_again:
            repaired = [(rank, name) for rank, names in damaged.items() for name in names]
            _LOG.warning("deltacast repairs %s", repaired)
            self._catch_up()
            payload, outcome = self._publish_once(optimizer_step)
            self._behind.note_damage(outcome)
        report = report_of(payload, self.baseline, outcome, self._workers.members)
        self._streams.note(report)
        return replace(
            report,
            repaired=tuple(repaired),
            seeded=tuple(seeded),
            evicted=(*self._workers.evicted, *report.evicted),
        )

    def _publish_once(self, optimizer_step: int | None) -> tuple[Outgoing, Outcome]:
        """Run a round; as a container after all if there were more changes than a streamed one has room for."""
        target_version = self._next_version()
        if self._publisher is not None:
            self._publisher.check_reach(target_version)
        payload = self._early_payload()
        if payload is not None and payload.reads_source:
            payload.target_version, payload.optimizer_step = target_version, optimizer_step
            try:
                return payload, self._publish_payload(payload)
            except CapacityError as err:
                _LOG.warning("deltacast sends a container instead: %s", err)
                self._streams.note_too_dense()
                self._catch_up()
                payload = None
        if payload is None or payload.target_version != target_version:  # a worker came that knows newer ones
            payload = self._container_of_source(target_version, optimizer_step)
        self._note_read()
        return payload, self._publish_payload(payload)

    def _next_version(self) -> int:
        return max(self.baseline.version, self._workers.newest_reported) + 1

    def _note_read(self) -> None:
        if self._source_read is not None:
            self._source_read()

    def _publish_payload(self, payload: Outgoing) -> Outcome:
        self._workers.raise_client_error()  # before workers that it did not reach are asked for anything
        return self._round(payload, self._workers.members)

    def _container_of_source(self, target_version: int, optimizer_step: int | None) -> Outgoing:
        started = time.perf_counter()
        update = self.baseline.diff(self._source, target_version=target_version, optimizer_step=optimizer_step)
        diff_s = time.perf_counter() - started
        values, threads = self._info.values, self._info.threads
        payload = ContainerOutgoing.of(update, self.baseline, values=values, threads=threads)
        payload.optimizer_step = optimizer_step
        payload.diff_s, payload.encode_s = diff_s, time.perf_counter() - started - diff_s
        return payload

    def _round(self, payload: Outgoing, receivers: Sequence[Member]) -> Outcome:
        """Run one round to its end: every live worker has acted on the decision, or is lost."""
        self._round_number += 1
        outcome, started = Outcome(self._key()), time.perf_counter()
        receiving = {member.rank for member in receivers}
        for member in self._workers.members:
            member.stands_by = member.action != "leave" and member.rank not in receiving
        self._machine.step("propose")
        try:
            payload.begin()
            self._propose(payload, receivers, outcome)
            if not outcome.errors:
                self._machine.step("all ready")
                self._send_payload(payload, outcome)
            if not outcome.errors:
                self._machine.step("sent")
                payload.stage()  # while the workers do the same
                self._hear_verdicts(payload, outcome)
        except BaseException as err:
            outcome.errors[0] = f"{type(err).__name__}: {err}"
            raise
        finally:  # whatever happened, there is a decision and everybody is told
            self._end(payload, outcome)
        outcome.round_s = time.perf_counter() - (payload.begun_at or started)
        return outcome

    def _end(self, payload: Outgoing, outcome: Outcome) -> None:
        """Settle the round; if that fails, nobody can say who heard what, so that every member must come again."""
        try:
            self._settle(payload, outcome)
        except BaseException as err:
            self._workers.lose_all(f"the trainer failed at its decision: {type(err).__name__}: {err}")
            self._machine = Machine(TRAINER_STEPS, TrainerState.IDLE)
            raise

    def _propose(self, payload: Outgoing, receivers: Sequence[Member], outcome: Outcome) -> None:
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        propose = Propose(
            self._info.run_id,
            outcome.key,
            wire=payload.wire,
            base_version=-1 if payload.base_version is None else payload.base_version,
            target_version=payload.target_version,
            target_digest=payload.target_digest,
            payload_bytes=payload.payload_bytes,
            overlaps=payload.overlaps,
            receivers=[member.rank for member in receivers],
            optimizer_step=-1 if payload.optimizer_step is None else payload.optimizer_step,
        )
        self._workers.tell(self._workers.members, propose, deadline, payload.header)
        payload.run_ahead()
        ready, errors = self._workers.collect(Ready, outcome.key, deadline)
        outcome.errors |= errors | {rank: answer.error for rank, answer in ready.items() if answer.error}
        outcome.ready_s = time.perf_counter() - started

    def _send_payload(self, payload: Outgoing, outcome: Outcome) -> None:
        """Broadcast; a worker that is lost meanwhile, or will not take the rest, ends it."""
        started, deadline = time.perf_counter(), Deadline(self._info.timeout_s)
        group = self._workers.group
        assert group is not None

        def tell(message: Message, bulk: bytes) -> None:
            self._workers.tell_all(message, deadline, bulk)

        route = Route(self._info.run_id, outcome.key, group, tell, deadline)

        patience = Deadline(max(self._info.decision_timeout_s, self._info.timeout_s))  # of a worker that votes at once

        def send() -> None:
            payload.send(route)  # workers may vote before this returns
            outcome.commit_by = Deadline(min(self._info.timeout_s, patience.remaining_s))

        task = Task("payload", send)
        try:
            with group.aborted_by(deadline):
                payload.produce(route)
            if payload.reads_source:
                self._note_read()
            self._watch_payload(task, outcome)
        finally:
            if not task.done or task.error is not None:
                payload.discard()  # wakes a thread that still waits for something to send
                self._workers.drop_group()
            ended = task.join(self._info.timeout_s)
        if not ended:
            raise DeadlineError("a collective did not end", hint="Restart this trainer.")
        if task.error is not None and not outcome.errors:
            outcome.errors |= self._blame(task.error)
        outcome.send_s = time.perf_counter() - started

    def _watch_payload(self, task: Task, outcome: Outcome) -> None:
        deadline = Deadline(self._info.timeout_s * 2)  # the broadcast's own comes first
        while not task.done and not outcome.errors:
            waiting = [m for m in self._workers.members if not m.lost and m.rank not in outcome.verdicts]
            ready = wait_any([member.channel for member in waiting], deadline, task)
            member = self._workers.heard(waiting, ready)
            if member is not None:
                self._workers.hear(member, Verdict, outcome.key, outcome.verdicts, outcome.errors)
                outcome.errors |= outcome.refusals

    def _blame(self, error: BaseException) -> dict[int, str]:
        """Say who broke the payload: the members whose connection is gone, else nobody in particular."""
        self._workers.notice_closed()
        lost = {member.rank: member.lost for member in self._workers.members if member.lost}
        return lost or {0: str(error)}

    def _hear_verdicts(self, payload: Outgoing, outcome: Outcome) -> None:
        assert outcome.commit_by is not None
        outcome.verdicts, errors = self._workers.collect(Verdict, outcome.key, outcome.commit_by, outcome.verdicts)
        outcome.errors |= errors
        free = {member.rank for member in self._workers.members if member.stands_by}
        for rank, verdict in outcome.verdicts.items():
            if verdict.error:
                outcome.errors[rank] = verdict.error
            elif verdict.digest != payload.target_digest and rank not in free:
                outcome.errors[rank] = f"digest {verdict.digest}, expected {payload.target_digest}"

    def _settle(self, payload: Outgoing, outcome: Outcome) -> None:
        """Write the record, act on it, and hear that everybody else did."""
        started, members = time.perf_counter(), self._workers.members
        outcome.committed = self._decide(payload, outcome)
        deadline = Deadline(self._info.timeout_s)
        if outcome.refusals or len(outcome.verdicts) < len(members):
            self._workers.drop_group()  # wakes workers that still wait for payload; one that failed may have left
        self._workers.tell(members, Decision(self._info.run_id, outcome.key, outcome.committed), deadline)
        if outcome.committed:
            self._history.note(payload)
            payload.advance()
            self._optimizer_step = payload.optimizer_step
        else:
            payload.discard()
        outcome.acks, errors = self._workers.collect(Ack, outcome.key, deadline)
        for member in members:
            ack = outcome.acks.get(member.rank)
            bound = member.action == "leave" or (outcome.committed and not member.stands_by)  # to hold the baseline
            if ack is None or (bound and (ack.version, ack.digest) != (self.baseline.version, self.baseline.digest)):
                found = f"version {ack.version} with {ack.digest}" if ack else "nothing"
                member.lost = member.lost or errors.get(member.rank) or f"acknowledged {found}"
        self._machine.step("settled")
        outcome.commit_s = time.perf_counter() - started

    def _decide(self, payload: Outgoing, outcome: Outcome) -> bool:
        """Write the record, and see to it that a committed version is stored."""
        if outcome.commit_by is not None and outcome.commit_by.expired and not outcome.errors:
            outcome.errors[0] = "the trainer was stopped for too long: workers may have given up"
        publisher, update = self._publisher, payload.update
        first = self._info.durability == "before_commit"
        unanimous = not outcome.errors and len(outcome.verdicts) == len(self._workers.members)
        if unanimous and publisher is not None and update is not None and first:
            unanimous = self._publish_first(publisher, payload.target_version, update, outcome)
        committed = self.decisions.decide(outcome.key, commit=unanimous)
        self._machine.step("decide")
        if committed:
            self._workers.newest_reported = max(self._workers.newest_reported, payload.target_version)
            if publisher is not None and update is not None and not first:
                publisher.put(payload.target_version, update)
        return committed

    def _publish_first(
        self, publisher: Publisher, version: int, update: Callable[[], WeightUpdate], outcome: Outcome
    ) -> bool:
        """Make the store's version file the record; return whether it says COMMIT.

        Once it does, nothing changes that: not even that workers have given up meanwhile. They come again.

        Raises:
            StoreError: nobody knows what it says, so nothing is decided, and this trainer has ended.
        """
        assert outcome.commit_by is not None
        started = time.perf_counter()
        try:
            error = publisher.publish(version, update, outcome.commit_by)
        except BaseException:
            self._workers.close()  # tells nobody anything
            raise
        outcome.publish_s = time.perf_counter() - started
        if error:
            outcome.errors[0] = error
        return not error

    def _key(self) -> RoundKey:
        return RoundKey(self._info.epoch, self._workers.generation, self._round_number)
