"""The rules that are checked, and ways to make the next world from the present one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from deltacast.delta.errors import ProtocolError
from deltacast.engines.protocol import TRAINER_STEPS, WORKER_STEPS, DecisionLog, Machine
from protocol_model.states import Label, Lane, Slip, World

__all__ = [
    "BrokenPromiseError", "Moves", "Rules", "Steps",
    "answer", "break_group", "publish", "tell", "with_lane", "with_lanes", "with_trainer",
]  # fmt: skip

Moves = Iterator[tuple[str, World]]
Steps = Mapping[tuple[Enum, str], Enum]


class BrokenPromiseError(Exception):
    """A move that no implementation of the protocol may make."""


@dataclass(frozen=True)
class Rules:
    """What is checked: the code's own tables and record, or changed ones.

    Attributes:
        trainer_steps, worker_steps: transition tables.
        decision_log: the record.
        stored: the record is a store's version file (`before_commit`), which is written however late it is.
        slip: a rule that is got wrong on purpose.
        reached: the entries of both tables that were used.
    """

    trainer_steps: Steps = field(default_factory=lambda: TRAINER_STEPS)
    worker_steps: Steps = field(default_factory=lambda: WORKER_STEPS)
    decision_log: type[DecisionLog] = DecisionLog
    stored: bool = False
    slip: Slip | None = None
    reached: set[tuple[Enum, str]] = field(default_factory=set)

    def step(self, steps: Steps, state: Enum, event: str) -> Enum:
        """Return the state after an event, by the machine that the engines run."""
        machine = Machine(steps, state)
        try:
            machine.step(event)
        except ProtocolError as err:
            raise BrokenPromiseError(f"a step that is not in the table: {err}") from err
        self.reached.add((state, event))
        return machine.state


def with_lane(world: World, place: int, **changes: object) -> World:
    """Change one lane."""
    lane = world.lanes[place]._replace(**changes)  # type: ignore[arg-type]
    return world._replace(lanes=(lane, world.lanes[1]) if place == 0 else (world.lanes[0], lane))


def with_lanes(world: World, **changes: object) -> World:
    """Change the lane of every member."""
    for place, lane in enumerate(world.lanes):
        if lane.member:
            world = with_lane(world, place, **changes)
    return world


def with_trainer(world: World, **changes: object) -> World:
    """Change the trainer."""
    return world._replace(trainer=world.trainer._replace(**changes))  # type: ignore[arg-type]


def tell(world: World, place: int, kind: str, what: object = None, label: object = None, **changes: object) -> World:
    """Send a message to a worker, which is lost if the connection is gone, and change its lane."""
    lane = world.lanes[place]
    lost = lane.cut or not lane.worker_end
    down = lane.down if lost else (*lane.down, (kind, what, label))
    return with_lane(world, place, down=down, **changes)


def answer(lane: Lane, kind: str, what: object) -> tuple[tuple[str, object], ...]:
    """Return a worker's unread messages with one more, unless its connection is gone."""
    lost = lane.cut or not lane.trainer_end
    if len(lane.up) > 3:
        raise BrokenPromiseError("answers pile up that nobody hears")
    return lane.up if lost else (*lane.up, (kind, what))


def break_group(world: World, except_for: int | None = None) -> World:
    """Let a member leave the payload group: what has not come may come no more."""
    for place, lane in enumerate(world.lanes):
        if place != except_for and lane.payload in {"none", "coming"} and lane.role:
            world = with_lane(world, place, payload="cut" if lane.payload == "coming" else "never")
    return world


def publish(world: World, label: Label) -> World:
    """Note that a version is on record, or that a worker goes by it; no number may mean two things."""
    published = world.trainer.published
    for other in published:
        if other.version == label.version and other.bits != label.bits:
            raise BrokenPromiseError(f"version {label.version} was {other.bits} and is {label.bits} now")
    return world if label in published else with_trainer(world, published=(*published, label))
