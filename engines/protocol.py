"""The round protocol: its messages, its two state machines, and the write-once decision record.

::

    trainer   IDLE --propose--> PROPOSED --all ready--> SENDING --sent--> VOTING --decide--> DECIDED --settled--> IDLE
                                    |                      |                 |                  ^
                                    +----------------------+-----------------+----- decide -----+
    worker    IDLE --propose--> READY --received--> RECEIVED --voted--> VOTED --decision--> IDLE
                                  |                    |                                     ^
                                  +--------------------+-------------- decision -------------+

A worker acts on the trainer's decision only. COMMIT needs the target digest from every worker; anything else, and
the first deadline that passes anywhere, makes the record ABORT. Messages are plain dataclasses sent as JSON; bulk
(the update's rows) rides beside them as bytes. docs/protocol.md tells the whole story.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Final, SupportsIndex, TypeVar

from deltacast.delta.errors import InputError, ProtocolError

__all__ = [
    "PROTOCOL_VERSION",
    "Ack",
    "Chunk",
    "Decision",
    "DecisionLog",
    "End",
    "Finish",
    "Form",
    "Formed",
    "Hello",
    "Machine",
    "Message",
    "Propose",
    "Ready",
    "RoundKey",
    "TRAINER_STEPS",
    "TrainerState",
    "Verdict",
    "WORKER_STEPS",
    "Welcome",
    "WorkerState",
    "check_step",
    "decode_message",
    "encode_message",
    "expect",
]

PROTOCOL_VERSION: Final = 1
_MAX_INT: Final = 1 << 62  # so that the next version still fits where it is kept


class TrainerState(Enum):
    """Where the trainer stands in a round."""

    IDLE = "idle"
    PROPOSED = "proposed"
    SENDING = "sending"
    VOTING = "voting"
    DECIDED = "decided"


class WorkerState(Enum):
    """Where a worker stands in a round."""

    IDLE = "idle"
    READY = "ready"
    RECEIVED = "received"
    VOTED = "voted"


TRAINER_STEPS: Final[Mapping[tuple[Enum, str], Enum]] = {
    (TrainerState.IDLE, "propose"): TrainerState.PROPOSED,
    (TrainerState.PROPOSED, "all ready"): TrainerState.SENDING,
    (TrainerState.SENDING, "sent"): TrainerState.VOTING,
    (TrainerState.PROPOSED, "decide"): TrainerState.DECIDED,
    (TrainerState.SENDING, "decide"): TrainerState.DECIDED,
    (TrainerState.VOTING, "decide"): TrainerState.DECIDED,
    (TrainerState.DECIDED, "settled"): TrainerState.IDLE,
}
WORKER_STEPS: Final[Mapping[tuple[Enum, str], Enum]] = {
    (WorkerState.IDLE, "propose"): WorkerState.READY,
    (WorkerState.READY, "received"): WorkerState.RECEIVED,
    (WorkerState.RECEIVED, "voted"): WorkerState.VOTED,
    (WorkerState.READY, "decision"): WorkerState.IDLE,
    (WorkerState.RECEIVED, "decision"): WorkerState.IDLE,
    (WorkerState.VOTED, "decision"): WorkerState.IDLE,
}


class Machine:
    """A state and the table of its legal steps."""

    __slots__ = ("_steps", "state")

    def __init__(self, steps: Mapping[tuple[Enum, str], Enum], start: Enum) -> None:
        self._steps = steps
        self.state = start

    def step(self, event: str) -> None:
        """Move on an event.

        Raises:
            ProtocolError: the event has no place in this state; the state stays.
        """
        after = self._steps.get((self.state, event))
        if after is None:
            raise ProtocolError(f"{event!r} has no place in state {self.state.value!r}")
        self.state = after


@dataclass(frozen=True, slots=True, order=True)
class RoundKey:
    """What a decision is recorded under: no two rounds of a run share one."""

    epoch: int
    generation: int
    round: int


@dataclass(frozen=True, slots=True)
class Message:
    """What every message carries: which run and which round it belongs to."""

    kind: ClassVar[str] = ""
    run_id: str
    key: RoundKey


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Worker: who I am and what I hold, by a fresh audit; my parameter table rides beside it.

    Attributes:
        name: host and process, for messages.
        version: the version I serve; -1 if none.
        digest: state digest of the bits that are there.
        damaged: parameters whose bits are not what I last agreed to.
        wires: what I can receive.
        newest: the highest version of this run that I was ever told of, whether I hold it or not; -1 if none.
        server: a name that I share with the other ranks of my server, with whom I hold one model together: what I
            receive, only all of us can prove. Another at each handshake; empty if I hold my weights alone.
        server_rank, num_ranks: which of how many I am there.
    """

    kind: ClassVar[str] = "hello"
    name: str
    version: int
    digest: str
    damaged: list[str] = field(default_factory=list)
    wires: list[str] = field(default_factory=list)
    newest: int = -1
    server: str = ""
    server_rank: int = 0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Trainer: how you will catch up with it (`leave`, `replay`, `repair` or `seed`), and why; or `refuse`.

    Attributes:
        version: my number for the bits that you hold: mine if you are left or repaired, the one that a replay starts
            from; -1 if I know none, or you are refused.
    """

    kind: ClassVar[str] = "welcome"
    action: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Form(Message):
    """Trainer: join the payload group of this generation."""

    kind: ClassVar[str] = "form"
    host: str
    port: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Formed(Message):
    """Worker: I am in the group, or `error` says why not."""

    kind: ClassVar[str] = "formed"
    error: str = ""


@dataclass(frozen=True, slots=True)
class Propose(Message):
    """Trainer: what is coming, before any payload; the wire's own header rides beside it.

    Attributes:
        wire: how the payload is written: `container`, `raw`, `coded` or `dense`.
        base_version: -1 for a seed.
        receivers: ranks that apply it; the others drain the payload and vote with what they hold.
        payload_bytes: what a receiver must have room for.
        overlaps: receivers write while they receive, so that they serve nothing from the first chunk on.
        target_digest: what a COMMIT needs from everybody; empty if only End says it.
        optimizer_step: that the target version is published with; -1 if it was not said.
    """

    kind: ClassVar[str] = "propose"
    wire: str
    base_version: int
    target_version: int
    target_digest: str
    payload_bytes: int
    overlaps: bool
    receivers: list[int]
    optimizer_step: int = -1


@dataclass(frozen=True, slots=True)
class Chunk(Message):
    """Trainer: chunk `number` of a streamed payload comes next.

    Attributes:
        num_changes: how many changes it holds.
        num_bytes: how many bytes it takes on a wire that codes it.
    """

    kind: ClassVar[str] = "chunk"
    number: int
    num_changes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class End(Message):
    """Trainer: that was the payload; the changed parameters' sums ride beside this.

    Attributes:
        target_digest: what a COMMIT needs from everybody.
    """

    kind: ClassVar[str] = "end"
    target_digest: str


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Worker: to Form: I am about to join. To Propose: base, table, buffer and undo budget are in order.

    Attributes:
        error: what is not.
    """

    kind: ClassVar[str] = "ready"
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """Worker: the digest I hold after applying; or what went wrong, with everything rolled back at the decision."""

    kind: ClassVar[str] = "verdict"
    digest: str
    error: str = ""
    damaged: list[str] = field(default_factory=list)
    receive_s: float = 0.0
    apply_s: float = 0.0
    audit_s: float = 0.0
    buffer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decision(Message):
    """Trainer: the record."""

    kind: ClassVar[str] = "decision"
    commit: bool


@dataclass(frozen=True, slots=True)
class Ack(Message):
    """Worker: I acted on the decision, and this is what I hold now, audited if it was ABORT.

    Attributes:
        damaged: parameters whose bits are not what they should be.
    """

    kind: ClassVar[str] = "ack"
    version: int
    digest: str
    audited_through: int
    error: str = ""
    damaged: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finish(Message):
    """Trainer: this call of `send_weights` is over; `error` is empty if it published `version`.

    Attributes:
        call: its number, from 1 (0: the one at init): a worker that was not reached in an earlier call finds that
            call's Finish, and must not take it for its own.
    """

    kind: ClassVar[str] = "finish"
    version: int
    call: int
    error: str = ""


_KINDS: Final[dict[str, type[Message]]] = {
    cls.kind: cls for cls in (Hello, Welcome, Form, Formed, Propose, Ready, Chunk, End, Verdict, Decision, Ack, Finish)
}
_FIELDS: Final = {cls: {item.name: str(item.type) for item in fields(cls)} for cls in _KINDS.values()}
"""Kind of message -> its fields' names and annotations."""
_PARSERS: Final[dict[str, type | tuple[type, type]]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": float,
    "list[str]": (list, str),
    "list[int]": (list, int),
}
AnyMessage = TypeVar("AnyMessage", bound=Message)


def encode_message(message: Message) -> bytes:
    """Write a message as JSON, with the protocol's version."""
    body = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    key = message.key
    body["key"] = {"epoch": key.epoch, "generation": key.generation, "round": key.round}
    return json.dumps({"protocol": PROTOCOL_VERSION, "kind": message.kind, **body}, separators=(",", ":")).encode()


def decode_message(raw: bytes) -> Message:
    """Read a message from a peer, checking version, kind, and every field's type.

    Raises:
        ProtocolError: another protocol version, an unknown kind, or a field of the wrong type.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise ProtocolError("a message is not JSON") from err
    if not isinstance(body, dict) or body.get("protocol") != PROTOCOL_VERSION:
        found = body.get("protocol") if isinstance(body, dict) else type(body).__name__
        raise ProtocolError(
            "another protocol version", expected=PROTOCOL_VERSION, found=found, hint="Install one deltacast everywhere."
        )
    cls = _KINDS.get(str(body.get("kind")))
    if cls is None:
        raise ProtocolError("unknown message kind", found=repr(body.get("kind")))
    values: dict[str, Any] = {"key": _round_key(body.get("key"))}
    for name, annotation in _FIELDS[cls].items():
        if name != "key":
            values[name] = _checked(cls, name, annotation, body.get(name))
    return cls(**values)


def check_step(optimizer_step: SupportsIndex) -> int:
    """Return an optimizer step that came from a user as the number that a message holds.

    Raises:
        InputError: no whole number, a negative one, or one too large.
    """
    try:
        step = operator.index(optimizer_step)
    except TypeError as err:
        raise InputError("optimizer_step is no whole number", found=repr(optimizer_step)) from err
    if not _is_count(step):
        raise InputError("optimizer_step out of range", expected=f"0 to {_MAX_INT - 1}", found=step)
    return step


def expect(message: Message, cls: type[AnyMessage]) -> AnyMessage:
    """Return the message as `cls`.

    Raises:
        ProtocolError: it is of another kind.
    """
    if not isinstance(message, cls):
        raise ProtocolError("a message out of turn", expected=cls.kind, found=message.kind)
    return message


def _round_key(value: object) -> RoundKey:
    if not isinstance(value, dict) or not all(_is_count(value.get(k)) for k in ("epoch", "generation", "round")):
        raise ProtocolError("a message without its round", found=repr(value))
    return RoundKey(value["epoch"], value["generation"], value["round"])


def _checked(cls: type[Message], name: str, annotation: str, value: object) -> object:
    wanted = _PARSERS[annotation]
    if isinstance(wanted, tuple):
        good = type(value) is list and all(type(item) is wanted[1] for item in value)
    else:
        good = type(value) is wanted or (wanted is float and type(value) is int)
    if not good or (wanted is int and not (value == -1 or _is_count(value))):
        raise ProtocolError(f"bad field {name!r} of {cls.kind}", expected=annotation, found=repr(value)[:80])
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


class DecisionLog:
    """The trainer's write-once record of decisions.

    The first write wins and every later one returns it: a deadline that passes while the last verdict arrives
    cannot make two different decisions.
    """

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: dict[RoundKey, bool] = {}

    def decide(self, key: RoundKey, *, commit: bool) -> bool:
        """Record a decision unless there is one; return the one on record."""
        return self._records.setdefault(key, commit)

    def lookup(self, key: RoundKey) -> bool | None:
        """Return the decision on record, or None."""
        return self._records.get(key)
