"""The worker's half of the protocol: hold weights, receive updates, prove what is held, obey the decision.

Everything that any transport shares is here; `sparse_nccl.py` adds how the payload arrives. The states are those of
`protocol.WORKER_STEPS`; weights are written between RECEIVED and VOTED and nowhere else.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from deltacast.delta.apply import Transaction
from deltacast.delta.codec import RoundRows, decode_round, read_rows
from deltacast.delta.errors import (
    BaseError,
    CorruptionError,
    DeadlineError,
    DeltacastError,
    InputError,
    ProtocolError,
    StateError,
    TransportError,
)
from deltacast.delta.sources import WeightSource, checked
from deltacast.delta.state import Damage, WeightState
from deltacast.engines.base import ServingStatus, WorkerEngine, WorkerInitInfo, WorkerStatus
from deltacast.engines.control import Channel, Deadline, Task, connect, wait_any
from deltacast.engines.group import PayloadGroup
from deltacast.engines.protocol import (
    WORKER_STEPS,
    Ack,
    Decision,
    Finish,
    Form,
    Formed,
    Hello,
    Machine,
    Propose,
    Ready,
    RoundKey,
    Verdict,
    Welcome,
    WorkerState,
    expect,
)
from deltacast.engines.report import WorkerReport

__all__ = ["RoundWorker"]

_LOG: Final = logging.getLogger(__name__)
_NOWHERE: Final = RoundKey(0, 0, 0)


@dataclass(slots=True)
class _Round:
    """One round in progress."""

    propose: Propose
    rows: RoundRows | None
    deadline: Deadline
    buffer: torch.Tensor
    transaction: Transaction | None = None
    receive_s: float = 0.0
    apply_s: float = 0.0
    audit_s: float = 0.0


class RoundWorker(WorkerEngine):
    """A worker over live tensors that are written in place: `data_ptr()` never changes.

    Args:
        source: the live tensors and their names, as the serving checkpoint calls them (`ModuleSource(model)`).
            What it yields is written to, so it must not convert dtypes.
        device: where the payload arrives: `cpu` (Gloo) or `cuda:N` (NCCL).
        undo_budget_bytes: refuse, before anything is written, rounds whose undo log would need more; None for no
            bound.
        max_payload_bytes: likewise for the payload's buffer.
        threads: for decoding and scans.

    Raises:
        InputError: a tensor cannot be written in place.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: str = "cpu",
        undo_budget_bytes: int | None = None,
        max_payload_bytes: int | None = None,
        threads: int = 1,
    ) -> None:
        tensors = {meta.name: tensor for meta, tensor in checked(source)}
        self._state = WeightState(tensors, aliases=dict(source.aliases), threads=threads)
        self._device = torch.device(device)
        self._undo_budget_bytes = undo_budget_bytes
        self._max_payload_bytes = max_payload_bytes
        self._info: WorkerInitInfo | None = None
        self._channel: Channel | None = None
        self._group: PayloadGroup | None = None
        self._rank = 0
        self._run_id, self._epoch = "", 0
        self._serving, self._last_error = ServingStatus.EMPTY, ""
        self._machine = Machine(WORKER_STEPS, WorkerState.IDLE)
        self._repaired: list[str] = []

    @property
    def status(self) -> WorkerStatus:
        """What this worker serves and how sure it is."""
        state = self._state
        return WorkerStatus(
            self._serving, self._run_id, state.version, state.digest, state.audited_through, self._last_error
        )

    @property
    def state(self) -> WeightState:
        """The weights and their running fingerprints; read it between rounds only."""
        return self._state

    def init_transfer_engine(self, init_info: WorkerInitInfo | Mapping[str, Any]) -> None:
        """See `WorkerEngine`. Audits everything first, so that what is reported is what is there."""
        info = init_info if isinstance(init_info, WorkerInitInfo) else WorkerInitInfo.from_dict(init_info)
        self._disconnect()
        self._info = info
        deadline = Deadline(info.timeout_s)
        self._channel = connect(info.host, info.port, bytes.fromhex(info.secret), deadline)
        try:
            self._say_hello(deadline)
            welcome = expect(self._channel.receive(Deadline(info.idle_timeout_s))[0], Welcome)
            self._enter(welcome)
            report = self._serve(info)
        except DeltacastError as err:
            self._lose(err)
            raise
        if self._serving is not ServingStatus.SERVING:
            raise StateError("not admitted", hint=report.error)

    def receive_weights(self, update_info: Mapping[str, Any] | None = None) -> WorkerReport:  # noqa: ARG002 - vLLM's
        """See `WorkerEngine`. `update_info` is not needed: the trainer's proposal says it all."""
        if self._channel is None or self._info is None:
            raise StateError("this worker is not connected", hint="Call init_transfer_engine first.")
        try:
            return self._serve(self._info)
        except TransportError as err:
            self._lose(err)
            raise

    def shutdown(self) -> None:
        """See `WorkerEngine`."""
        self._disconnect()

    def _say_hello(self, deadline: Deadline) -> None:
        damage = self._state.audit()
        if damage and self._state.version is None:
            self._state.rescan()
            damage = []
        name = f"{socket.gethostname()}:{os.getpid()}"
        key = RoundKey(self._epoch, 0, 0)
        version = -1 if self._state.version is None else self._state.version
        names = [item.parameter for item in damage]
        hello = Hello(self._run_id, key, name, version, self._state.digest, names)
        self._connected().send(hello, deadline, self._state.table.to_json())

    def _enter(self, welcome: Welcome) -> None:
        if welcome.action == "refuse":
            raise StateError(f"the trainer refused this worker: {welcome.reason}")
        if welcome.run_id == self._run_id and welcome.key.epoch < self._epoch:
            raise BaseError("an older writer of this run", expected=f"epoch >= {self._epoch}", found=welcome.key.epoch)
        self._run_id, self._epoch = welcome.run_id, welcome.key.epoch
        if welcome.action == "leave":
            self._state.version = welcome.version
            self._state.mark_audited()
            self._serving = ServingStatus.SERVING
        elif welcome.action == "seed":
            self._state.forget()
            self._serving = ServingStatus.EMPTY

    def _serve(self, info: WorkerInitInfo) -> WorkerReport:
        """Answer the trainer until it says that its call is over."""
        self._repaired = []
        while True:
            message, bulk = self._connected().receive(Deadline(info.idle_timeout_s))
            if message.run_id != self._run_id:
                raise ProtocolError("a message of another run", expected=self._run_id, found=message.run_id)
            if isinstance(message, Form):
                self._form(message, info)
            elif isinstance(message, Propose):
                self._round(message, bulk, info)
            else:
                finish = expect(message, Finish)
                self._last_error = finish.error
                return WorkerReport(
                    self._state.version, not finish.error, finish.error, tuple(sorted(set(self._repaired)))
                )

    def _form(self, form: Form, info: WorkerInitInfo) -> None:
        self._drop_group()
        error = ""
        try:
            self._group = PayloadGroup.join(
                form.host,
                form.port,
                rank=form.rank,
                world_size=form.world_size,
                generation=form.key.generation,
                device=self._device,
                timeout_s=info.timeout_s,
                interface=self._connected().local_host,
            )
            self._rank = form.rank
        except TransportError as err:
            error = str(err)
        self._connected().send(Formed(self._run_id, form.key, error), Deadline(info.timeout_s))

    def _round(self, propose: Propose, rows: bytes, info: WorkerInitInfo) -> None:
        self._machine.step("propose")
        current, error = self._prepare(propose, rows, info)
        try:
            self._send(Ready(self._run_id, propose.key, error), info)
            if not error:
                early = self._receive_payload(current)
                if early is None:
                    self._machine.step("received")
                    self._send(self._vote(current, info), info)
                    self._machine.step("voted")
                    early = self._await_decision(propose.key, Deadline(info.decision_timeout_s))
            else:
                early = self._await_decision(propose.key, Deadline(info.decision_timeout_s))
        except TransportError:
            self._undo(current)
            self._machine.step("decision")  # nobody will decide; without a COMMIT it is an ABORT
            raise
        ack = self._obey(current, commit=early.commit)
        self._machine.step("decision")
        self._send(ack, info)

    def _prepare(self, propose: Propose, rows: bytes, info: WorkerInitInfo) -> tuple[_Round, str]:
        """Check everything that can be checked without the payload, and take the buffer for it."""
        current = _Round(propose, None, Deadline(info.timeout_s), torch.empty(0, dtype=torch.uint8))
        try:
            if self._group is None:
                raise StateError("no payload group")
            self._check_propose(propose)
            if self._rank in propose.receivers:
                current.rows = read_rows(rows, self._state.table)
                self._check_rows(propose, current.rows)
            current.buffer = torch.empty(propose.payload_bytes, dtype=torch.uint8)
        except (DeltacastError, RuntimeError) as err:  # RuntimeError: torch could not allocate
            return current, _describe(err)
        return current, ""

    def _check_propose(self, propose: Propose) -> None:
        if propose.key.epoch < self._epoch:
            raise BaseError("an older writer", expected=f"epoch >= {self._epoch}", found=propose.key.epoch)
        limit = self._max_payload_bytes
        if propose.payload_bytes < 0 or (limit is not None and propose.payload_bytes > limit):
            raise InputError("payload too large", expected=f"at most {limit} bytes", found=propose.payload_bytes)

    def _check_rows(self, propose: Propose, rows: RoundRows) -> None:
        state, header = self._state, rows.envelope
        if header.run_id != propose.run_id or header.target_digest != propose.target_digest:
            raise ProtocolError("rows of another round", expected=propose.target_digest, found=header.target_digest)
        if rows.checked.payload_bytes != propose.payload_bytes:
            raise ProtocolError(
                "rows of another payload", expected=propose.payload_bytes, found=rows.checked.payload_bytes
            )
        if header.base_version is None:
            return
        if header.base_version != state.version or header.base_digest != state.digest:
            raise BaseError(
                "wrong base",
                version=header.target_version,
                expected=f"version {state.version} with {state.digest}",
                found=f"version {header.base_version} with {header.base_digest}",
            )
        if self._undo_budget_bytes is not None and rows.values_bytes > self._undo_budget_bytes:
            raise InputError(
                "undo would exceed its budget",
                expected=f"at most {self._undo_budget_bytes} bytes",
                found=rows.values_bytes,
            )

    def _receive_payload(self, current: _Round) -> Decision | None:
        """Drain the payload; a decision that comes first (it can only be ABORT) ends the wait and is returned."""
        started = time.perf_counter()
        group, channel = self._group, self._connected()
        assert group is not None
        task = Task("payload", lambda: group.broadcast(current.buffer, current.deadline))
        try:
            ready = wait_any([channel], Deadline(current.deadline.seconds * 2), task)
            decision = None
            if isinstance(ready, Channel) and not task.done:
                decision = self._await_decision(current.propose.key, current.deadline)
        finally:
            ended = self._end_payload(task, current.deadline.seconds)
        current.receive_s = time.perf_counter() - started
        if not ended:
            self._serving = ServingStatus.LOST
            raise DeadlineError("a collective did not end; this worker's memory may still change")
        return decision

    def _end_payload(self, task: Task, timeout_s: float) -> bool:
        if not task.done or task.error is not None:
            self._drop_group()
        return task.join(timeout_s)

    def _vote(self, current: _Round, info: WorkerInitInfo) -> Verdict:
        """Apply (unless the round is for others), audit, and say what this worker now holds."""
        started, error = time.perf_counter(), ""
        names: list[str] = []
        try:
            if self._group is None:
                raise TransportError("the payload did not arrive")
            if current.rows is not None:
                self._apply(current)
            current.apply_s = time.perf_counter() - started
            damaged = self._audit(current, info)
            current.audit_s = time.perf_counter() - started - current.apply_s
            names = [item.parameter for item in damaged]
            error = f"weights are damaged: {damaged[0]}" if damaged else ""
        except CorruptionError as err:
            error, names = _describe(err), [str(err.parameter)]
        except (DeltacastError, RuntimeError, MemoryError) as err:
            error = _describe(err)
        return Verdict(
            self._run_id,
            current.propose.key,
            self._state.digest,
            error,
            names,
            current.receive_s,
            current.apply_s,
            current.audit_s,
        )

    def _apply(self, current: _Round) -> None:
        assert current.rows is not None
        state = self._state
        update = decode_round(current.rows, current.buffer.numpy().data, state.table, threads=state.threads)
        transaction = Transaction.stage(
            state, update, undo=not update.is_seed, undo_budget_bytes=self._undo_budget_bytes
        )
        transaction.write()
        current.transaction = transaction

    def _audit(self, current: _Round, info: WorkerInitInfo) -> list[Damage]:
        if current.rows is not None and current.rows.envelope.base_version is None:
            return self._state.audit()
        if info.audit == "off":
            return []
        if info.audit == "full":
            return self._state.audit()
        return self._state.audit_rolling(current.propose.target_version, info.audit)

    def _await_decision(self, key: RoundKey, deadline: Deadline) -> Decision:
        decision = expect(self._connected().receive(deadline)[0], Decision)
        if decision.key != key:
            raise ProtocolError("a decision of another round", expected=key, found=decision.key)
        return decision

    def _obey(self, current: _Round, *, commit: bool) -> Ack:
        """Act on the record: keep what was written, or restore and audit."""
        key, error = current.propose.key, ""
        if commit and current.transaction is not None:
            update = current.transaction.update
            current.transaction.commit()
            if update.base_version == update.target_version:
                self._repaired += [patch.name for patch in update.patches]
            self._serving = ServingStatus.SERVING
        elif not commit:
            damaged = self._undo(current)
            error = f"weights are damaged: {damaged[0]}" if damaged else ""
        version = -1 if self._state.version is None else self._state.version
        through = self._state.audited_through
        return Ack(self._run_id, key, version, self._state.digest, -1 if through is None else through, error)

    def _undo(self, current: _Round) -> list[Damage]:
        if current.transaction is not None:
            current.transaction.rollback()
            current.transaction = None
            if self._state.version is None:
                self._serving = ServingStatus.EMPTY
        return self._state.audit()

    def _send(self, message: Ready | Verdict | Ack, info: WorkerInitInfo) -> None:
        self._connected().send(message, Deadline(info.timeout_s))

    def _connected(self) -> Channel:
        if self._channel is None:
            raise StateError("this worker is not connected", hint="Call init_transfer_engine first.")
        return self._channel

    def _lose(self, err: DeltacastError) -> None:
        """Note that the trainer is out of reach; what is served stays one whole version under its label."""
        self._last_error = _describe(err)
        if self._serving is ServingStatus.SERVING:
            self._serving = ServingStatus.STALE
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


def _describe(err: BaseException) -> str:
    return f"{type(err).__name__}: {err}"
