"""The worker's half of the protocol: hold weights, receive updates, prove what is held, obey the decision.

Everything that any transport shares is here; how a payload arrives is `payload.py` and the `*_wire.py`. The states are
those of `protocol.WORKER_STEPS`; weights are written before VOTED only: from RECEIVED on, or as chunks arrive.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from deltacast.delta.chunks import Begin, ChunkCoder, ChunkReceiver
from deltacast.delta.errors import (
    BaseError,
    CorruptionError,
    DeadlineError,
    InputError,
    ProtocolError,
    StateError,
    TransportError,
)
from deltacast.delta.sources import WeightSource, checked
from deltacast.delta.state import Damage, WeightState
from deltacast.engines.base import AuditPolicy, ServingStatus, WorkerEngine, WorkerInitInfo, WorkerStatus
from deltacast.engines.chunk_wire import ChunkIncoming
from deltacast.engines.container_wire import ContainerDrain, ContainerIncoming
from deltacast.engines.control import Channel, Deadline, Task, wait_any
from deltacast.engines.dense_wire import DenseDrain, DenseIncoming
from deltacast.engines.group import COLLECTIVES, PayloadGroup, Transport
from deltacast.engines.leave import WriteLeave
from deltacast.engines.opening import connect
from deltacast.engines.payload import Inbox, Incoming, Limits
from deltacast.engines.protocol import (
    WORKER_STEPS,
    Ack,
    Chunk,
    Decision,
    End,
    Finish,
    Form,
    Formed,
    Hello,
    Machine,
    Message,
    Propose,
    Ready,
    RoundKey,
    Verdict,
    Welcome,
    WorkerState,
    expect,
)
from deltacast.engines.report import WorkerReport
from deltacast.engines.wires import STREAMED, wires_into

__all__ = ["RoundWorker"]

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Round:
    """One round in progress; `payload` is None if this worker was not READY, and once it is undone."""

    propose: Propose
    deadline: Deadline
    served_before: ServingStatus
    payload: Incoming | None = None
    error: str = ""
    damaged: list[Damage] = field(default_factory=list)
    receive_error: str = ""
    receive_s: float = 0.0
    apply_s: float = 0.0
    audit_s: float = 0.0


class RoundWorker(WorkerEngine):
    """A worker over live tensors that are written in place: `data_ptr()` never changes.

    Args:
        source: the live tensors and their names, as the serving checkpoint calls them (`ModuleSource(model)`).
            What it yields is written to, so it must not convert dtypes. Or a state that was made of them.
        device: where the payload arrives: `cpu` (Gloo) or `cuda:N` (NCCL).
        undo_budget_bytes: refuse, before anything is written, rounds whose undo log would need more; None for no
            bound.
        max_payload_bytes: likewise for the payload's buffer.
        threads: for decoding and scans; a state has its own.

    Attributes:
        transport: how payloads travel to it; the trainer's engine has the same.

    Raises:
        InputError: a tensor cannot be written in place.
    """

    transport: ClassVar[Transport] = COLLECTIVES

    def __init__(
        self,
        source: WeightSource | WeightState,
        *,
        device: str = "cpu",
        undo_budget_bytes: int | None = None,
        max_payload_bytes: int | None = None,
        threads: int = 1,
    ) -> None:
        self._state = source if isinstance(source, WeightState) else _live(source, threads)
        self._receive_on(torch.device(device))
        self._undo_budget_bytes = undo_budget_bytes
        self._max_payload_bytes = max_payload_bytes
        self._receiver: ChunkReceiver | None = None
        self._coder: ChunkCoder | None = None
        self._info: WorkerInitInfo | None = None
        self._channel: Channel | None = None
        self._group: PayloadGroup | None = None
        self._rank = 0
        self._run_id, self._epoch = "", 0
        self._serving, self._last_error = ServingStatus.EMPTY, ""
        self._machine = Machine(WORKER_STEPS, WorkerState.IDLE)
        self._committed_at: float | None = None
        self._newest = -1  # version of this run that was named here, so that no other bits are ever given its number
        self._busy = threading.Lock()
        self._stuck: Task | None = None
        self._repaired: list[str] = []
        self._published = False
        self._rolling = 0  # slices of the rolling audit
        self._optimizer_step: int | None = None  # of the state's version
        self._last_call, self._last_report = 0, WorkerReport(None, committed=False)
        self._leave = WriteLeave(None)  # of the present call
        self._written = False  # since the last time that something was undone or decided

    @property
    def status(self) -> WorkerStatus:
        """What this worker serves and how sure it is; `empty` while an update is written and not yet decided."""
        state, serving = self._state, self._serving
        serves = serving in (ServingStatus.SERVING, ServingStatus.STALE)
        version, step = (state.version, self._optimizer_step) if serves else (None, None)
        return WorkerStatus(
            status=serving,
            run_id=self._run_id,
            version=version,
            digest=state.digest,
            audited_through=state.audited_through,
            last_error=self._last_error,
            optimizer_step=step,
            committed_at=self._committed_at,
        )

    @property
    def state(self) -> WeightState:
        """The weights and their running fingerprints; read it between rounds only."""
        return self._state

    def init_transfer_engine(self, init_info: WorkerInitInfo | Mapping[str, Any]) -> None:
        """See `WorkerEngine`. Audits everything first, so that what is reported is what is there."""
        info = init_info if isinstance(init_info, WorkerInitInfo) else WorkerInitInfo.from_dict(init_info)
        with self._alone("init_transfer_engine"):
            self._disconnect()
            if self._stuck is not None and not self._stuck.done:
                raise StateError("a collective has still not ended", hint="Restart this process.")
            self._agree_on_device(info.payload_device)
            self._info = info
            hello = self._hello()  # before connecting: a long scan must keep nobody waiting
            deadline, admission = Deadline(info.timeout_s), Deadline(info.idle_timeout_s)
            self._channel = connect(info.host, info.port, bytes.fromhex(info.secret), deadline, admission)
            self._channel.send(hello, deadline, self._state.table.to_json())
            self._enter(expect(self._channel.receive(admission)[0], Welcome))
            self._rolling = info.audit if isinstance(info.audit, int) else 0
            if self._rolling:
                self._state.prepare_rolling(self._rolling)
            self._leave = WriteLeave(None)
            report = self._serve(info, call=0)
            if self._serving is not ServingStatus.SERVING:
                raise StateError("not admitted", hint=report.error)

    def receive_weights(
        self, update_info: Mapping[str, Any] | None = None, *, before_write: Callable[[], object] | None = None
    ) -> WorkerReport:
        """See `WorkerEngine`. A call that is repeated after its end returns the same report.

        Args:
            update_info: as there.
            before_write: called at most once, on a thread of its own, in the call's first round, when all of it is
                there that can be had without writing: a container staged and proven; of a payload that is written as
                it arrives, nothing. Every write waits for its return, for up to half of `timeout_s`. So whoever reads
                the weights (an engine that generates) has to stop only then. If the round ends before it returns,
                nothing was written, and nobody waits for it; if it raises, this worker votes against every round of
                the call in which it would write.
        """
        call = update_info.get("call") if update_info else None
        if self._channel is None or self._info is None:
            raise StateError("this worker is not connected", hint="Call init_transfer_engine first.")
        with self._alone("receive_weights"):
            repeated = isinstance(call, int) and 0 < call <= self._last_call
            if repeated and not self._connected().gone():  # another trainer's call may have the same number
                return self._last_report
            self._leave = WriteLeave(before_write)
            try:
                return self._serve(self._info, call if isinstance(call, int) else 0)
            finally:
                self._leave.close()

    def interrupt(self) -> None:
        """End a call that waits for the trainer, from another thread: it fails as if the trainer were gone."""
        channel = self._channel
        if channel is not None:
            channel.interrupt()

    def shutdown(self) -> None:
        """See `WorkerEngine`."""
        self._disconnect()
        self._drop_buffers()

    @contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise StateError(f"{what} while another call runs", hint="Call it from one thread.")
        try:
            yield
        finally:
            self._busy.release()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call at a time; one that fails ends the connection, so that the trainer hears at once."""
        with self._one_at_a_time(what):
            try:
                yield
            except BaseException as err:
                self._lose(err)
                raise

    def _receive_on(self, device: torch.device) -> None:
        """Have payload arrive there from the next handshake on."""
        self._device, self._wires = device, wires_into(self._state, device)

    def _agree_on_device(self, sent_from: str) -> None:
        """Raise unless payload can arrive where this worker receives; one that may receive elsewhere goes there."""
        if sent_from not in {"", self._device.type}:
            raise InputError(
                "the trainer's payload travels another way",
                expected=f"a trainer on {self._device.type}, as this worker's device {str(self._device)!r} says",
                found=sent_from,
                hint=f"Give the trainer a device of {self._device.type}, or this worker one of {sent_from}.",
            )

    def _hello(self) -> Hello:
        damage = self._state.audit()
        if damage and self._state.version is None:
            self._state.rescan()
            damage = []
        if damage:
            self._serving = ServingStatus.EMPTY
        name = f"{socket.gethostname()}:{os.getpid()}"
        version = -1 if self._state.version is None else self._state.version
        names = [item.parameter for item in damage]
        key = RoundKey(self._epoch, 0, 0)
        return Hello(self._run_id, key, name, version, self._state.digest, names, self._wires, self._newest)

    def _enter(self, welcome: Welcome) -> None:
        if welcome.action == "refuse":
            raise StateError(f"the trainer refused this worker: {welcome.reason}")
        if welcome.run_id == self._run_id and welcome.key.epoch < self._epoch:
            raise BaseError("an older writer of this run", expected=f"epoch >= {self._epoch}", found=welcome.key.epoch)
        if (welcome.run_id, welcome.version) != (self._run_id, self._state.version):
            self._optimizer_step = None  # the trainer's number for these bits comes without one
        self._newest = max(self._newest if welcome.run_id == self._run_id else -1, welcome.version)
        self._run_id, self._epoch, self._last_call = welcome.run_id, welcome.key.epoch, 0
        if welcome.action in {"leave", "replay"}:
            self._state.version = welcome.version
            self._state.mark_audited()
        if welcome.action == "leave":
            self._weights_written(None)  # they may have come by a round whose last step failed
            self._serving = ServingStatus.SERVING
        elif welcome.action == "seed":
            self._serving = ServingStatus.EMPTY
            self._state.forget()

    def _serve(self, info: WorkerInitInfo, call: int) -> WorkerReport:
        """Answer the trainer until it says that this call of its is over."""
        self._repaired, self._published = [], False
        while True:
            message, bulk = self._connected().receive(Deadline(info.idle_timeout_s))
            if message.run_id != self._run_id:
                raise ProtocolError("a message of another run", expected=self._run_id, found=message.run_id)
            if isinstance(message, Form):
                self._form(message, info)
            elif isinstance(message, Propose):
                self._round(message, bulk, info)
            elif expect(message, Finish).call >= call:
                return self._finish(expect(message, Finish))

    def _finish(self, finish: Finish) -> WorkerReport:
        self._last_error, self._last_call = finish.error, finish.call
        status, repaired = self.status, tuple(sorted(set(self._repaired)))
        committed = self._published or not finish.error
        self._last_report = WorkerReport(status.version, committed, finish.error, repaired, status.optimizer_step)
        return self._last_report

    def _form(self, form: Form, info: WorkerInitInfo) -> None:
        """Join a group; left behind if the trainer goes on without it."""
        self._drop_group()
        channel, error = self._connected(), ""
        self._send(Ready(self._run_id, form.key), info)
        group = self.transport.group(
            rank=form.rank,
            world_size=form.world_size,
            generation=form.key.generation,
            device=self._device,
            timeout_s=info.timeout_s,
            interface=channel.local_host,
        )
        task = Task("form", lambda: group.join(form.host, form.port))
        try:
            wait_any([channel], Deadline(info.timeout_s * 2), task)
        finally:
            overtaken = not task.done
            if overtaken:
                group.abort()
            task.join(0.0)
        if overtaken:
            return
        if task.error is None:
            self._group, self._rank = group, form.rank
        else:
            error = _describe(task.error)
        self._send(Formed(self._run_id, form.key, error), info)

    def _round(self, propose: Propose, rows: bytes, info: WorkerInitInfo) -> None:
        """Take part in one round: whatever happens, what is written is decided, or restored."""
        self._machine.step("propose")
        self._newest = max(self._newest, propose.target_version)
        deadline = Deadline(info.timeout_s * 2)  # the others get ready, and the payload comes
        current = _Round(propose, deadline, self._serving)
        try:
            decision = self._until_decided(current, rows, info)
            ack = self._obey(current, commit=decision.commit)
        except BaseException:  # nobody will decide; without a COMMIT it is an ABORT
            self._undo_round(current)
            raise
        finally:
            self._machine.step("decision")
        self._send(ack, info)

    def _until_decided(self, current: _Round, rows: bytes, info: WorkerInitInfo) -> Decision:
        key = current.propose.key
        current.error = self._prepare(current, rows)
        if self._asks_first(current.propose):
            early = self._await_leave(current, info)
            if early is not None:
                return early
        self._send(Ready(self._run_id, key, current.error), info)
        if not current.error:
            early = self._receive_payload(current)
            if early is not None:
                return early
            self._machine.step("received")
            said = self._vote(current, info)
            if isinstance(said, Decision):
                return said
            self._send(said, info)
            self._machine.step("voted")
            return self._await_decision(key, Deadline(info.decision_timeout_s))
        decision = self._await_decision(key, Deadline(info.decision_timeout_s))
        self._drop_group()  # Gloo sends through members: whoever waits for payload behind this one must hear
        return decision

    def _prepare(self, current: _Round, header: bytes) -> str:
        """Check everything that can be checked without the payload, and take the room for it; say what is wrong."""
        propose = current.propose
        try:
            self._check_propose(propose)
            current.payload = self._incoming(propose, header)
        except Exception as err:  # noqa: BLE001 - the round's boundary: the trainer must hear
            return _describe(err)
        return ""

    def _incoming(self, propose: Propose, header: bytes) -> Incoming:
        limits = Limits(self._undo_budget_bytes, self._max_payload_bytes, self._state.threads)
        if propose.wire not in self._wires:
            raise ProtocolError("unknown wire", expected=f"one of {', '.join(self._wires)}", found=propose.wire)
        if propose.wire in STREAMED:
            receiver = self._receiver_for(header)
            coder = self._coder_for(receiver) if propose.wire == "coded" else None
            return ChunkIncoming(propose, receiver, self._state, self._stop_serving, coder, rolling=self._rolling)
        receives = self._rank in propose.receivers
        if propose.wire == "dense":
            assert self._group is not None
            if not receives:
                return DenseDrain(propose, header, self._state.table, self._group)
            return DenseIncoming(propose, header, self._state, self._group, self._stop_serving)
        if not receives:
            return ContainerDrain(propose)
        return ContainerIncoming(propose, header, self._state, limits, self._stop_serving)

    def _receiver_for(self, header: bytes) -> ChunkReceiver:
        """Return buffers for a streamed round, those of the last one if they fit, and begin it."""
        begin = Begin.from_bytes(header, self._state.table)
        if self._receiver is None or not self._receiver.fits(begin):
            self._drop_buffers()  # first, so that their memory is free
            self._receiver = ChunkReceiver(self._state, begin, undo_budget_bytes=self._undo_budget_bytes)
        self._receiver.begin(begin)
        return self._receiver

    def _coder_for(self, receiver: ChunkReceiver) -> ChunkCoder:
        if self._coder is None:
            state = self._state
            self._coder = ChunkCoder(
                state.table, receiver.plan, receiver.groups, threads=state.threads, capacities=receiver.capacities
            )
        return self._coder

    def _drop_buffers(self) -> None:
        """Let go of what streamed rounds keep from one to the next."""
        if self._coder is not None:
            self._coder.close()
        self._coder = self._receiver = None

    def _stop_serving(self) -> None:
        """From the first write to the decision nothing is served."""
        self._serving, self._written = ServingStatus.EMPTY, True

    def _check_propose(self, propose: Propose) -> None:
        if self._group is None:
            raise StateError("no payload group")
        if propose.key.epoch < self._epoch:
            raise BaseError("an older writer", expected=f"epoch >= {self._epoch}", found=propose.key.epoch)
        base, target, streamed = propose.base_version, propose.target_version, propose.wire in STREAMED
        if self._rank in propose.receivers and base != self._state.version and (base != -1 or streamed):
            raise BaseError("wrong base", version=target, expected=f"version {self._state.version}", found=base)
        if propose.wire == "dense" and not propose.overlaps:
            raise ProtocolError("whole parameters that are not written as they arrive", found=propose.wire)
        if target < base + streamed:
            raise ProtocolError(
                "a target version that does not follow its base", expected=f"above {base}", found=target
            )
        limit = self._max_payload_bytes
        if propose.payload_bytes < 0 or (limit is not None and propose.payload_bytes > limit):
            raise InputError("payload too large", expected=f"at most {limit} bytes", found=propose.payload_bytes)

    def _receive_payload(self, current: _Round) -> Decision | None:
        """Drain the payload; a decision that comes first (it can only be ABORT) ends the wait and is returned."""
        started = time.perf_counter()
        group, payload, inbox, deadline = self._group, current.payload, Inbox("the trainer"), current.deadline
        assert group is not None
        assert payload is not None
        task = Task("payload", lambda: payload.receive(group, inbox, deadline))
        try:
            decision = self._pass_on(current, inbox, task)
        finally:
            inbox.close()
            self._end_payload(task, deadline.seconds)
        # The text alone: its traceback would keep the group's connections open, and peers waiting.
        current.receive_error = "" if task.error is None else _describe(task.error)
        current.receive_s = time.perf_counter() - started
        return decision

    def _pass_on(self, current: _Round, inbox: Inbox, task: Task) -> Decision | None:
        """Pass on what the trainer tells of the payload, until that has ended or a decision comes."""
        deadline, channel = Deadline(current.deadline.seconds * 2), self._connected()
        while isinstance(wait_any([channel], deadline, task), Channel) and not task.done:
            frame = channel.poll()
            if frame is None:
                continue
            message = frame[0]
            if isinstance(message, Decision):
                return self._same_round(message, current.propose.key)
            if not isinstance(message, (Chunk, End)) or message.key != current.propose.key:
                raise ProtocolError("a message out of turn in the middle of a payload", found=message.kind)
            inbox.put(frame)
        return None

    def _end_payload(self, task: Task, timeout_s: float) -> None:
        if not task.done or task.error is not None:
            self._drop_group()
        if not task.join(timeout_s):
            self._stuck, self._serving = task, ServingStatus.LOST
            raise DeadlineError("a collective did not end; this worker's memory may still change")

    def _await_leave(self, current: _Round, info: WorkerInitInfo) -> Decision | None:
        """Wait for leave to write; a decision that comes first (it can only be ABORT) is returned.

        A worker that will not write in this round asks too: who gives leave may wait until all have asked. It waits for
        less than the trainer does, which is to hear its vote.
        """
        error, given = current.error, True
        with _noting_errors(current, self._state):
            given = self._leave.wait(self._connected(), info.timeout_s / 2)
        if current.payload is not None and current.payload.drains:
            current.error = error  # nothing of it is written here; a refusal holds for the rounds after this one
        return None if given else self._await_decision(current.propose.key, Deadline(info.timeout_s))

    def _asks_first(self, propose: Propose) -> bool:
        """Whether a round needs leave to write before it is received."""
        return propose.overlaps

    def _vote(self, current: _Round, info: WorkerInitInfo) -> Verdict | Decision:
        """Apply (unless the round is for others), audit, and say what this worker now holds.

        A decision that comes before it may write is returned instead.
        """
        started = time.perf_counter()
        with _noting_errors(current, self._state):
            self._stage(current)
        current.apply_s = time.perf_counter() - started
        if not self._asks_first(current.propose):
            early = self._await_leave(current, info)
            if early is not None:
                return early
        if not current.error:
            with _noting_errors(current, self._state):
                self._apply(current, info)
        return Verdict(
            self._run_id,
            current.propose.key,
            self._state.digest,
            current.error,
            [item.parameter for item in current.damaged],
            current.receive_s,
            current.apply_s,
            current.audit_s,
            current.payload.buffer_bytes if current.payload else 0,
        )

    def _stage(self, current: _Round) -> None:
        if self._group is None:
            raise TransportError(f"the payload did not arrive: {current.receive_error or 'the group is gone'}")
        assert current.payload is not None
        current.payload.stage()

    def _apply(self, current: _Round, info: WorkerInitInfo) -> None:
        started = time.perf_counter()
        assert current.payload is not None
        current.payload.apply()
        self._weights_written(current.payload)
        written = time.perf_counter()
        current.damaged = self._audit(current, info)
        current.apply_s += written - started
        current.audit_s = time.perf_counter() - written
        if current.damaged:
            current.damaged = self._state.audit()  # so that one repair mends it all
            current.error = f"weights are damaged: {current.damaged[0]}"

    def _weights_written(self, payload: Incoming | None) -> None:
        """Bring after the weights whatever is made from them; an engine whose model is not these very tensors has that.

        Called after every write, before the vote. An error fails the vote; after an undo it ends the connection, and
        nothing is served.

        Args:
            payload: what wrote; None after an undo.
        """

    def _audit(self, current: _Round, info: WorkerInitInfo) -> list[Damage]:
        seeded = current.payload is not None and current.payload.is_seed
        known_damage = current.served_before is ServingStatus.EMPTY
        if seeded or known_damage:
            return self._state.audit()
        return self._audit_some(current.propose.target_version, info.audit)

    def _audit_some(self, version: int, policy: AuditPolicy) -> list[Damage]:
        """Rescan as much as the policy says of what is said to be a version."""
        if policy == "full":
            return self._state.audit()
        return [] if policy == "off" else self._state.audit_rolling(version, policy)

    def _await_decision(self, key: RoundKey, deadline: Deadline) -> Decision:
        message = self._connected().receive(deadline)[0]
        while isinstance(message, (Chunk, End)) and message.key == key:  # of a payload that broke on this side
            message = self._connected().receive(deadline)[0]
        return self._same_round(expect(message, Decision), key)

    def _same_round(self, decision: Decision, key: RoundKey) -> Decision:
        if decision.key != key:
            raise ProtocolError("a decision of another round", expected=key, found=decision.key)
        return decision

    def _obey(self, current: _Round, *, commit: bool) -> Ack:
        """Act on the record: keep what was written, or restore and audit."""
        damaged: list[Damage] = []
        if not commit:
            damaged = self._undo_round(current)
        elif current.error:
            raise ProtocolError("a COMMIT that this worker did not vote for", found=current.error)
        elif current.payload is not None:
            step = current.propose.optimizer_step
            self._keep(current.payload, None if step == -1 else step)
        error = f"weights are damaged: {damaged[0]}" if damaged else ""
        version = -1 if self._state.version is None else self._state.version
        through = -1 if self._state.audited_through is None else self._state.audited_through
        names = [item.parameter for item in damaged]
        return Ack(self._run_id, current.propose.key, version, self._state.digest, through, error, names)

    def _keep(self, payload: Incoming, optimizer_step: int | None) -> None:
        payload.commit()
        self._written = False
        if not payload.drains:
            self._committed_at = time.time()
            self._serving = ServingStatus.SERVING
            self._optimizer_step = optimizer_step
        self._repaired += payload.repairs
        self._published = self._published or payload.publishes

    def _undo_round(self, current: _Round) -> list[Damage]:
        payload, current.payload = current.payload, None
        return self._undo(payload, current.served_before)

    def _undo(self, payload: Incoming | None, served_before: ServingStatus) -> list[Damage]:
        """Restore and audit; where that fails or finds damage, nothing is served any more.

        What was served still is, if nothing was written.
        """
        serving = ServingStatus.LOST if self._serving is ServingStatus.LOST else served_before
        if payload is not None:
            payload.rollback()
        damaged = self._state.audit()
        if damaged or self._state.version is None:
            self._serving = ServingStatus.LOST if serving is ServingStatus.LOST else ServingStatus.EMPTY
        else:
            if self._written:
                self._weights_written(None)
            self._serving = serving
        self._written = False
        return damaged

    def _send(self, message: Message, info: WorkerInitInfo) -> None:
        self._connected().send(message, Deadline(info.timeout_s))

    def _connected(self) -> Channel:
        if self._channel is None:
            raise StateError("this worker is not connected", hint="Call init_transfer_engine first.")
        return self._channel

    def _lose(self, err: BaseException) -> None:
        """Note that the trainer is out of reach; what is served stays one whole version under its label."""
        self._last_error = _describe(err)
        if self._serving is ServingStatus.SERVING:
            self._serving = ServingStatus.STALE
        self._machine = Machine(WORKER_STEPS, WorkerState.IDLE)
        _LOG.warning("deltacast worker lost the trainer: %s", err)
        self._disconnect()

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _disconnect(self) -> None:
        self._drop_group()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _live(source: WeightSource, threads: int) -> WeightState:
    tensors = {meta.name: tensor for meta, tensor in checked(source)}
    return WeightState(tensors, aliases=dict(source.aliases), threads=threads)


@contextmanager
def _noting_errors(current: _Round, state: WeightState) -> Iterator[None]:
    """Make what fails first the round's error: its boundary; the trainer must hear, and decide."""
    try:
        yield
    except Exception as err:  # noqa: BLE001 - see above
        if not current.error:
            current.error = _describe(err)
            current.damaged = state.audit() if isinstance(err, CorruptionError) else []


def _describe(err: BaseException) -> str:
    return f"{type(err).__name__}: {err}"
