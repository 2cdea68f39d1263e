"""Messages, state machines and the decision record, without any process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum

import pytest

from deltacast.delta.errors import ProtocolError
from deltacast.engines.protocol import (
    TRAINER_STEPS,
    WORKER_STEPS,
    Ack,
    Chunk,
    Decision,
    DecisionLog,
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
    TrainerState,
    Verdict,
    Welcome,
    WorkerState,
    decode_message,
    encode_message,
    expect,
)

KEY = RoundKey(1, 2, 3)
MESSAGES = [
    Hello("run", KEY, "host:1", -1, "xxh3_128:00", ["a"]),
    Welcome("run", KEY, "seed", 4, "why"),
    Form("run", KEY, "::1", 5, 1, 2),
    Formed("run", KEY, "no"),
    Propose("run", KEY, "container", -1, 1, "xxh3_128:11", 7, False, [1, 2]),
    Ready("run", KEY),
    Verdict("run", KEY, "xxh3_128:22", "bad", ["p", "q"], 0.5, 1.5, 2.0),
    Decision("run", KEY, commit=True),
    Ack("run", KEY, 4, "xxh3_128:33", 3),
    Finish("run", KEY, 4, 9, "mödel"),
    Chunk("run", KEY, 3, 70_000, 9),
    End("run", KEY, "xxh3_128:11"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    """Every kind, with every field set."""
    assert decode_message(encode_message(message)) == message


def test_a_message_is_plain_json() -> None:
    """The bytes of one are spelled out: peers of other versions must be able to see the version."""
    assert encode_message(Decision("r", KEY, commit=False)) == (
        b'{"protocol":1,"kind":"decision","run_id":"r","key":{"epoch":1,"generation":2,"round":3},"commit":false}'
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"protocol": 2}, "another protocol version: expected 1, found 2"),
        ({"kind": "coup"}, "unknown message kind"),
        ({"kind": ["ready"]}, "unknown message kind"),
        ({"commit": 1}, "bad field 'commit' of decision: expected bool"),
        ({"commit": None}, "bad field 'commit'"),
        ({"run_id": 5}, "bad field 'run_id'"),
        ({"key": None}, "without its round"),
        ({"key": {"epoch": True, "generation": 0, "round": 0}}, "without its round"),
        ({"key": {"epoch": 1, "generation": 0}}, "without its round"),
    ],
)
def test_a_wrong_field_is_named(change: Mapping[str, object], error: str) -> None:
    """Types are exact: a bool is no int, an int no bool."""
    body = json.loads(encode_message(Decision("r", KEY, commit=False))) | change
    with pytest.raises(ProtocolError, match=error):
        decode_message(json.dumps(body).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"protocol":NaN}'])
def test_noise_is_a_protocol_error(raw: bytes) -> None:
    """Whatever the bytes are, nothing but ProtocolError comes out."""
    with pytest.raises(ProtocolError):
        decode_message(raw)


def test_lists_are_checked_element_by_element() -> None:
    """One number among names is found."""
    body = json.loads(encode_message(MESSAGES[6])) | {"damaged": ["p", 7]}
    with pytest.raises(ProtocolError, match="damaged"):
        decode_message(json.dumps(body).encode())


def test_a_message_out_of_turn_is_named() -> None:
    """Expected and found kinds are in the error."""
    with pytest.raises(ProtocolError, match="expected ready, found ack"):
        expect(MESSAGES[8], Ready)


@pytest.mark.parametrize(
    ("steps", "start"),
    [(TRAINER_STEPS, TrainerState.IDLE), (WORKER_STEPS, WorkerState.IDLE)],
    ids=["trainer", "worker"],
)
def test_every_state_is_reachable_and_leads_back_to_idle(steps: Mapping[tuple[Enum, str], Enum], start: Enum) -> None:
    """No round can end in a state that no event leaves."""

    def reachable(origin: Enum) -> set[Enum]:
        seen, frontier = {origin}, [origin]
        while frontier:
            state = frontier.pop()
            for (before, _), after in steps.items():
                if before is state and after not in seen:
                    seen.add(after)
                    frontier.append(after)
        return seen

    assert reachable(start) == set(type(start))
    assert all(start in reachable(state) for state in type(start))


def test_a_step_that_has_no_place_changes_nothing() -> None:
    """A worker that has not received the payload cannot vote."""
    machine = Machine(WORKER_STEPS, WorkerState.IDLE)
    machine.step("propose")
    with pytest.raises(ProtocolError, match="'voted' has no place in state 'ready'"):
        machine.step("voted")
    assert machine.state is WorkerState.READY


def test_the_first_decision_stands() -> None:
    """A verdict that comes after a deadline wrote ABORT cannot turn it into COMMIT, nor the other way round."""
    log = DecisionLog()
    assert log.lookup(KEY) is None
    assert log.decide(KEY, commit=False) is False
    assert log.decide(KEY, commit=True) is False
    other = RoundKey(1, 2, 4)
    assert log.decide(other, commit=True) is True
    assert log.decide(other, commit=False) is True
    assert log.lookup(KEY) is False
