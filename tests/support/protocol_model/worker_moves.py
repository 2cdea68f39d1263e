"""What a worker can do next: engines/worker.py, with a user who has it come again whenever it loses the trainer."""

from __future__ import annotations

from deltacast.engines.protocol import TrainerState, WorkerState
from protocol_model.states import EMPTY, ERROR, NO_VERSION, NOTHING, SERVING, STALE, Hello, Label, Pace, Slip, World
from protocol_model.world_changes import (
    BrokenPromiseError,
    Moves,
    Rules,
    answer,
    break_group,
    publish,
    with_lane,
    with_trainer,
)

__all__ = ["worker_moves"]


def worker_moves(world: World, place: int, rules: Rules) -> Moves:
    lane = world.lanes[place]
    if lane.pace is Pace.FROZEN:
        yield f"worker {place} thaws", with_lane(world, place, pace=Pace.OVERSLEPT)
        return
    expires = _worker_may_expire(world, place)
    if lane.mode == "apart":
        if lane.hello is None:
            yield f"worker {place} says hello: {lane.holds}", _say_hello(world, place, rules)
    elif lane.mode == "joining":
        yield from _join(world, place, expires=expires)
    elif lane.state is WorkerState.IDLE:
        yield from _idle(world, place, rules, expires=expires)
    else:
        yield from _in_round(world, place, rules, expires=expires)


def _worker_may_expire(world: World, place: int) -> bool:
    """Likewise a worker's; only of the payload does it wait for the other worker as well."""
    lane, other = world.lanes[place], world.lanes[1 - place]
    receives = lane.state is WorkerState.READY and not lane.against
    return (
        lane.pace is Pace.OVERSLEPT
        or world.trainer.pace is Pace.FROZEN
        or (receives and bool(other.member) and other.pace is Pace.FROZEN)
    )


def _say_hello(world: World, place: int, rules: Rules) -> World:
    """Connect anew, unless the trainer has still to find out that the connection before has gone."""
    lane = world.lanes[place]
    if lane.hello is not None:
        return world
    hello = Hello(lane.holds, lane.holds.version if rules.slip is Slip.FORGETS_NUMBERS else lane.newest)
    return with_lane(world, place, mode="joining", hello=hello, hello_gone=False)


def _worker_steps(world: World, place: int, rules: Rules, event: str, **changes: object) -> World:
    state = rules.step(rules.worker_steps, world.lanes[place].state, event)
    return with_lane(world, place, state=state, pace=Pace.AWAKE, **changes)


def _join(world: World, place: int, *, expires: bool) -> Moves:
    lane = world.lanes[place]
    waits = lane.hello is not None  # the trainer has not looked yet
    if lane.down and not waits:
        kind, action, label = lane.down[0]
        assert kind == "welcome"
        assert isinstance(label, Label)
        stays = action != "seed"
        serves = SERVING if action == "leave" else lane.serves if stays else EMPTY
        holds = Label(label.version if stays else NO_VERSION, lane.holds.bits)
        yield f"worker {place} is welcomed: {action}", with_lane(
            publish(world, holds) if stays else world, place, mode="member", down=lane.down[1:], pace=Pace.AWAKE,
            serves=serves, holds=holds, floor=holds.version, newest=max(lane.newest, label.version),
        )  # fmt: skip
    if expires or lane.hello_gone or (not waits and lane.worker_sees_end):
        gone = {"hello_gone": True} if waits else {"worker_end": False}
        yield (
            f"worker {place} is not welcomed",
            with_lane(world, place, mode="apart", down=(), pace=Pace.AWAKE, **gone),
        )


def _idle(world: World, place: int, rules: Rules, *, expires: bool) -> Moves:
    lane = world.lanes[place]
    if lane.down:
        kind, role, target = lane.down[0]
        if kind != "propose":
            raise BrokenPromiseError(f"worker {place} waits for a round and hears {kind}")
        assert isinstance(target, Label)
        begun = _worker_steps(
            world, place, rules, "propose",
            down=lane.down[1:], role=role, target=target, before=(lane.holds, lane.serves), payload="none",
            newest=max(lane.newest, target.version),
        )  # fmt: skip
        yield f"worker {place} is ready", with_lane(begun, place, up=answer(lane, "ready", True))
        if world.left.refusals:
            refused = with_lane(begun, place, up=answer(lane, "ready", False), against=True)
            fewer = world.left._replace(refusals=world.left.refusals - 1)
            yield f"worker {place} refuses", refused._replace(left=fewer)
    if lane.worker_sees_end or expires:
        if rules.slip is Slip.GOES_BACK and lane.before is not None:
            world = with_lane(world, place, holds=lane.before[0])
        yield f"worker {place} loses the trainer", _lose(world, place, rules)


def _in_round(world: World, place: int, rules: Rules, *, expires: bool) -> Moves:
    """READY, RECEIVED and VOTED; all but the payload's deadline end in a decision, or in giving up without one."""
    lane, state = world.lanes[place], world.lanes[place].state
    waits = state is WorkerState.VOTED or (state is WorkerState.READY and lane.against)
    if lane.down and (waits or state is WorkerState.READY):
        kind, commit, _ = lane.down[0]
        if kind != "decision":
            raise BrokenPromiseError(f"worker {place} waits for a decision and hears {kind}")
        word = "COMMIT" if commit else "ABORT"
        read = with_lane(world, place, down=lane.down[1:])
        yield f"worker {place} acts on {word}", _obey(read, place, rules, commit=bool(commit))
    if lane.worker_sees_end:
        yield f"worker {place} loses the trainer", _give_up(world, place, rules)
    if waits:
        if expires:
            yield f"worker {place} waits no longer for the decision", _lose_patience(world, place, rules)
        return
    if state is WorkerState.READY:
        yield from _receive(world, place, rules, expires=expires)
    writes = lane.role != "drain" and not lane.written and not lane.against
    if writes and lane.payload in {"coming", "cut", "all"}:
        serves = lane.serves if rules.slip is Slip.SERVES_WHILE_WRITING else EMPTY
        half = Label(lane.holds.version, "?")
        yield f"worker {place} writes", with_lane(world, place, written=True, serves=serves, holds=half)
    elif state is WorkerState.RECEIVED:
        yield from _vote(world, place, rules)


def _receive(world: World, place: int, rules: Rules, *, expires: bool) -> Moves:
    lane = world.lanes[place]
    if lane.payload == "all":
        raise BrokenPromiseError(f"worker {place} waits for a payload that it has")
    if lane.payload in {"coming", "cut"}:
        yield f"worker {place} has the payload", _worker_steps(world, place, rules, "received", payload="all")
    if expires or lane.payload in {"cut", "never"}:
        broken = break_group(_worker_steps(world, place, rules, "received", against=True), except_for=place)
        yield f"worker {place}'s payload fails", broken


def _vote(world: World, place: int, rules: Rules) -> Moves:
    lane = world.lanes[place]
    if not lane.against and lane.payload == "all":
        serves = SERVING if rules.slip is Slip.SERVES_ITS_VOTE and lane.role != "drain" else lane.serves
        holds = lane.holds if lane.role == "drain" else lane.target
        good = _worker_steps(world, place, rules, "voted", holds=holds, serves=serves)
        yield f"worker {place} votes for it", with_lane(good, place, up=answer(lane, "verdict", holds.bits))
    fails = lane.against or lane.payload != "all"
    if fails or world.left.refusals:
        bad = _worker_steps(world, place, rules, "voted", against=True, up=answer(lane, "verdict", ERROR))
        fewer = world.left if fails else world.left._replace(refusals=world.left.refusals - 1)
        yield f"worker {place} votes against it", bad._replace(left=fewer)


def _obey(world: World, place: int, rules: Rules, *, commit: bool) -> World:
    """Act on the record, and say what is held now."""
    lane = world.lanes[place]
    if commit and lane.against:  # a COMMIT that it did not vote for is a broken protocol
        return _give_up(world, place, rules)
    if commit:
        serves = lane.serves if lane.role == "drain" else SERVING
        world = with_lane(world, place, serves=serves, floor=lane.holds.version, committed=True)
    else:
        world = _undo(world, place)
    holds = world.lanes[place].holds
    return _out_of_round(world, place, rules, up=answer(lane, "ack", holds), keep=commit)


def _out_of_round(world: World, place: int, rules: Rules, *, keep: bool, **changes: object) -> World:
    before = world.lanes[place].before if keep and rules.slip is Slip.GOES_BACK else None
    return _worker_steps(
        world, place, rules, "decision",
        before=before, role="", target=NOTHING, against=False, written=False, payload="none", **changes,
    )  # fmt: skip


def _undo(world: World, place: int) -> World:
    """Restore; a seed cannot, and leaves a worker that holds no version."""
    lane = world.lanes[place]
    assert lane.before is not None
    holds, serves = lane.before
    if lane.written and lane.role == "seed":
        holds = Label(NO_VERSION, "?")
    return with_lane(world, place, holds=holds, serves=serves if holds.version != NO_VERSION else EMPTY)


def _give_up(world: World, place: int, rules: Rules) -> World:
    """Nobody will decide: what is not committed is undone."""
    before = world.lanes[place].before
    assert before is not None
    undone = _undo(world, place)
    world = with_lane(world, place, serves=before[1]) if rules.slip is Slip.FORGETS_TO_UNDO else undone
    return _lose(_out_of_round(world, place, rules, keep=False), place, rules)


def _lose_patience(world: World, place: int, rules: Rules) -> World:
    """The decision did not come in time. By then the trainer's own clock, which started earlier, is over too."""
    trainer, lane = world.trainer, world.lanes[place]
    if lane.member and not lane.against and trainer.state in {TrainerState.SENDING, TrainerState.VOTING}:
        counts = trainer.state is TrainerState.VOTING or rules.slip is not Slip.CLOCK_STARTS_LATE
        world = with_trainer(world, gave_up=True, late=trainer.late or counts)
    if rules.slip is Slip.COMMITS_ALONE and not lane.against:
        world = with_lane(world, place, serves=SERVING, floor=lane.holds.version)
        return _lose(_out_of_round(world, place, rules, keep=True), place, rules)
    return _give_up(world, place, rules)


def _lose(world: World, place: int, rules: Rules) -> World:
    """Close the connection and come again; what is served is stale from here on."""
    lane = world.lanes[place]
    serves = STALE if lane.serves == SERVING else lane.serves
    world = with_lane(
        world, place, mode="apart", serves=serves, worker_end=False, down=(), pace=Pace.AWAKE, before=None,
        cut=lane.cut and lane.trainer_end,
    )  # fmt: skip
    return _say_hello(break_group(world, except_for=place), place, rules)
