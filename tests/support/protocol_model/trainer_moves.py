"""What the trainer can do next: the rounds of engines/trainer.py and the handshake of engines/membership.py.

A payload group is formed with PROPOSE here, and a call of `send_weights` ends with its round: neither touches weights.
"""

from __future__ import annotations

from deltacast.engines.protocol import RoundKey, TrainerState
from protocol_model.states import ERROR, NO_VERSION, NOBODY, NOTHING, Label, Lane, Pace, Slip, Trainer, World
from protocol_model.world_changes import (
    BrokenPromiseError,
    Moves,
    Rules,
    break_group,
    publish,
    tell,
    with_lane,
    with_lanes,
    with_trainer,
)

__all__ = ["trainer_moves"]

_LETTERS = "ABCD"  # the weights of one published version after the other


def trainer_moves(world: World, rules: Rules) -> Moves:
    trainer = world.trainer
    if trainer.pace is Pace.FROZEN:
        yield "the trainer thaws", with_trainer(world, pace=Pace.OVERSLEPT)
    elif trainer.state is TrainerState.IDLE:
        yield from _between_rounds(world, rules)
    elif any(lane.member and not lane.told and not lane.lost for lane in world.lanes) and trainer.state in {
        TrainerState.PROPOSED,
        TrainerState.DECIDED,
    }:
        yield from _tell_everybody(world, rules)
    elif trainer.state is TrainerState.DECIDED:
        yield from _settle(world, rules)
    else:
        yield from _collect(world, rules)


def _trainer_may_expire(world: World, answered: str) -> bool:
    """Whether the trainer's deadline may pass: it overslept, or somebody whom it waits for stands still."""
    return world.trainer.pace is Pace.OVERSLEPT or any(
        lane.member and not lane.lost and not getattr(lane, answered) and lane.pace is Pace.FROZEN
        for lane in world.lanes
    )


def _trainer_steps(world: World, rules: Rules, event: str, **changes: object) -> World:
    """Move the trainer's machine; what it waits for next has a deadline of its own."""
    state = rules.step(rules.trainer_steps, world.trainer.state, event)
    return with_trainer(world, state=state, pace=Pace.AWAKE, **changes)


def _between_rounds(world: World, rules: Rules) -> Moves:
    members = [lane for lane in world.lanes if lane.member]
    for place, lane in enumerate(world.lanes):
        if lane.member not in {"", "new"} and (lane.trainer_sees_end or lane.pace is Pace.FROZEN):
            yield f"the trainer evicts worker {place}", _evict(world, place)
        if lane.hello is not None and lane.hello_gone and lane.mode == "apart":
            yield (
                f"the trainer drops worker {place}'s dead connection",
                with_lane(world, place, hello=None, hello_gone=False),
            )
        if lane.hello is not None and not lane.member and not world.trainer.starting:
            yield from _welcome(_admit(world, place), place, rules)
        elif lane.member == "new":
            yield from _welcome(world, place, rules)
    if world.trainer.starting and all(lane.hello is not None for lane in world.lanes):
        yield "the trainer admits both workers", _number_baseline(_admit(_admit(world, 0), 1), rules)
    if members and all(lane.member != "new" for lane in members):
        if world.trainer.pace is Pace.OVERSLEPT:
            yield from _evict_late(world)
        behind = {lane.member for lane in members} - {"leave"}
        kind = min(behind, default="update")  # replays come before seeds
        if behind or world.trainer.updates:
            yield f"the trainer begins a round: {kind}", _begin(world, kind, rules)


def _evict(world: World, place: int) -> World:
    lane = world.lanes[place]
    return with_lane(
        world, place, member="", trainer_end=False, up=(), lost=False, told=False, answer="", blamed=False,
        cut=lane.cut and lane.worker_end,
    )  # fmt: skip


def _admit(world: World, place: int) -> World:
    lane = world.lanes[place]
    waits = lane.mode == "joining"
    return with_lane(
        world, place, member="new", said=lane.hello, hello=None, hello_gone=False,
        trainer_end=True, worker_end=waits, cut=waits and lane.hello_gone, up=(), down=(),
    )  # fmt: skip


def _evict_late(world: World) -> Moves:
    """A deadline passes while a group forms: whoever has not come by then is let go, one or all."""
    awake = with_trainer(world, pace=Pace.AWAKE)
    for place, lane in enumerate(world.lanes):
        if lane.member:
            yield f"the trainer evicts worker {place}", _evict(awake, place)
    if all(lane.member for lane in world.lanes):
        yield "the trainer evicts both workers", _evict(_evict(awake, 0), 1)


def _welcome(world: World, place: int, rules: Rules) -> Moves:
    """Judge by what a worker holds, and tell it."""
    trainer, said = world.trainer, world.lanes[place].said
    world = with_trainer(world, newest=max(trainer.newest, said.newest))
    same = said.holds.bits == trainer.baseline.bits or (rules.slip is Slip.GUESSES and said.holds.version != NO_VERSION)
    earlier = next((label for label in trainer.earlier if label.bits == said.holds.bits), None)
    action, label = ("leave", trainer.baseline) if same else ("replay", earlier) if earlier else ("seed", NOTHING)
    yield (
        f"the trainer welcomes worker {place}: {action}",
        tell(world, place, "welcome", action, label, member=action, said=NOBODY),
    )


def _number_baseline(world: World, rules: Rules) -> World:
    """Find a number that means these weights and nothing else, whatever a trainer before this one has used."""
    baseline, hellos = world.trainer.baseline, [lane.said for lane in world.lanes]
    known = [hello for hello in hellos if hello.newest >= baseline.version]
    if known and rules.slip is not Slip.REUSES_NUMBERS:
        held = max(hello.holds.version for hello in known)
        same = held >= baseline.version and all(hello.holds.bits == baseline.bits for hello in known)
        baseline = Label(held if same else 1 + max(hello.newest for hello in known), baseline.bits)
    return with_trainer(world, baseline=baseline, starting=False)


def _begin(world: World, kind: str, rules: Rules) -> World:
    trainer = world.trainer
    if any(lane.member and lane.up for lane in world.lanes):
        raise BrokenPromiseError("an answer of a round before was never heard")
    target = trainer.baseline
    if kind == "update":
        bits = _LETTERS[_LETTERS.index(trainer.baseline.bits) + 1]
        target = Label(max(trainer.baseline.version, trainer.newest) + 1, bits)
    world = with_lanes(world, lost=False, told=False, answer="", blamed=False, committed=False)
    changes = {"failed": False, "late": False, "record": None, "gave_up": False}
    return _trainer_steps(world, rules, "propose", kind=kind, target=target, **changes)


def _tell_everybody(world: World, rules: Rules) -> Moves:
    """Tell one member after the other, in any order."""
    trainer = world.trainer
    for place, lane in enumerate(world.lanes):
        if not lane.member or lane.told or lane.lost:
            continue
        if trainer.state is TrainerState.DECIDED:
            word = "COMMIT" if trainer.record else "ABORT"
            yield f"the trainer tells worker {place} {word}", tell(world, place, "decision", trainer.record, told=True)
        else:
            role = trainer.kind if trainer.kind in {"update", lane.member} else "drain"
            yield (
                f"the trainer proposes to worker {place}",
                tell(world, place, "propose", role, trainer.target, told=True),
            )
    if _trainer_may_expire(world, "told"):
        yield "the trainer's deadline passes while it tells", _give_up_waiting(world, rules, "told")


def _collect(world: World, rules: Rules) -> Moves:
    """READY or verdicts: hear members in any order, until all have answered or something went wrong."""
    trainer, state = world.trainer, world.trainer.state
    if not trainer.failed:
        yield from _hear(world, rules)
        if _trainer_may_expire(world, "answer") or trainer.late:
            yield "the trainer's deadline passes", _give_up_waiting(world, rules, "answer")
    answers = [lane.answer for lane in world.lanes if lane.member]
    if trainer.failed or (state is TrainerState.PROPOSED and "" not in answers and "no" in answers):
        yield "the trainer decides", _decide(world, rules)
    elif state is TrainerState.PROPOSED and "" not in answers:
        yield "the trainer starts to send", _start_to_send(world, rules)
    elif state is TrainerState.SENDING:
        if "no" in answers or any(lane.member and lane.payload in {"cut", "never"} for lane in world.lanes):
            yield "the payload breaks on the trainer's side", with_trainer(world, failed=True)
        moved = {"baseline": trainer.target} if rules.slip is Slip.ADVANCES_FIRST else {}
        yield "the payload has left", _trainer_steps(world, rules, "sent", **moved)
    elif state is TrainerState.VOTING and (
        "" not in answers or ("yes" in answers and rules.slip is Slip.COMMITS_WITHOUT_A_VERDICT)
    ):
        yield "the trainer decides", _decide(world, rules)


def _start_to_send(world: World, rules: Rules) -> World:
    world = _trainer_steps(with_lanes(world, told=False, answer=""), rules, "all ready")
    for place, lane in enumerate(world.lanes):
        if lane.member and lane.role and lane.payload == "none" and world.trainer.state is TrainerState.SENDING:
            world = with_lane(world, place, payload="coming")
    return world


def _hear(world: World, rules: Rules) -> Moves:
    """Take one member's next message, or find its connection closed; a deadline that has passed comes first."""
    trainer = world.trainer
    too_late = trainer.late and trainer.state is TrainerState.VOTING and rules.slip is not Slip.COMMITS_LATE
    for place, lane in enumerate(world.lanes):
        if not lane.member or lane.lost or lane.answer:
            continue
        if lane.up and not too_late:
            (kind, what), rest = lane.up[0], lane.up[1:]
            wanted = "ready" if trainer.state is TrainerState.PROPOSED else "verdict"
            if kind != wanted:
                raise BrokenPromiseError(f"the trainer waits for a {wanted} and hears {kind}")
            stands_by = lane.member not in {"leave", trainer.kind}  # neither holds the baseline nor will by this round
            good = what is True or what == trainer.target.bits or (stands_by and what not in {False, ERROR})
            answer = "yes" if good else "no"
            after = with_lane(world, place, up=rest, answer=answer, blamed=answer == "no")
            yield f"the trainer hears worker {place}: {kind}, {answer}", after
        if lane.trainer_sees_end:
            after = with_trainer(with_lane(world, place, lost=True), failed=True)
            yield f"the trainer finds worker {place}'s connection closed", after


def _give_up_waiting(world: World, rules: Rules, missing: str) -> World:
    """A deadline of the trainer's: whoever has not been told, or has not answered, is lost; in a payload nobody is."""
    trainer = world.trainer
    if trainer.state is not TrainerState.SENDING:
        for place, lane in enumerate(world.lanes):
            if lane.member and not lane.lost and not (lane.told if missing == "told" else lane.answer):
                world = with_lane(world, place, lost=True)
    if trainer.state is TrainerState.DECIDED:
        return _ask_the_record(world, rules, commit=False)
    return with_trainer(world, failed=True, late=trainer.late or trainer.state is TrainerState.VOTING)


def _ask_the_record(world: World, rules: Rules, *, commit: bool) -> World:
    """Have the log decide, which knows this round's record if there is one."""
    trainer = world.trainer
    log, key = rules.decision_log(), RoundKey(trainer.epoch, 1, 1)
    if trainer.record is not None:
        log.decide(key, commit=trainer.record)
    record = log.decide(key, commit=commit)
    if trainer.record not in {None, record}:
        raise BrokenPromiseError(f"the record said {trainer.record} and says {record} now")
    return with_trainer(world, record=record)


def _decide(world: World, rules: Rules) -> World:
    """Look at the clock, write the record and move the baseline, in one move.

    The code moves the baseline once everybody is told: nobody but the trainer can tell the difference.
    """
    trainer, members = world.trainer, [lane for lane in world.lanes if lane.member]
    if trainer.record is not None:
        raise BrokenPromiseError("a round is decided twice")
    late = trainer.late and not rules.stored and rules.slip is not Slip.COMMITS_LATE
    votes = {lane.answer for lane in members}
    unanimous = not trainer.failed and not late and trainer.state is TrainerState.VOTING and votes == {"yes"}
    if rules.slip is Slip.COMMITS_WITHOUT_A_VERDICT:
        unanimous = not trainer.failed and trainer.state is TrainerState.VOTING and "yes" in votes and "no" not in votes
    if votes != {"yes"}:
        world = break_group(world)
    world = _ask_the_record(world, rules, commit=unanimous)
    trainer = world.trainer
    if trainer.record:
        if trainer.gave_up and not rules.stored:
            raise BrokenPromiseError("COMMIT is written after a worker's patience was over")
        newest = max(trainer.newest, trainer.target.version)
        earlier = (trainer.baseline, *trainer.earlier) if trainer.kind == "update" else trainer.earlier
        world = publish(world, trainer.target)
        world = with_trainer(world, newest=newest, baseline=trainer.target, earlier=earlier)
    return _trainer_steps(with_lanes(world, told=False, answer=""), rules, "decide")


def _settle(world: World, rules: Rules) -> Moves:
    """Hear every ACK, then be done."""
    trainer, waiting = world.trainer, False
    for place, lane in enumerate(world.lanes):
        if not lane.member or lane.lost or lane.answer:
            continue
        waiting = True
        if lane.up:
            (kind, what), rest = lane.up[0], lane.up[1:]
            if kind != "ack":  # overtaken by the decision
                yield f"the trainer drops worker {place}'s {kind}", with_lane(world, place, up=rest)
            else:
                bound = lane.member == "leave" or (trainer.record and lane.member == trainer.kind)
                wrong = bound and what != trainer.baseline
                after = with_lane(world, place, up=rest, answer="no" if wrong else "yes", lost=bool(wrong))
                yield f"the trainer hears worker {place}: ack of {what}", after
        if lane.trainer_sees_end:
            yield f"the trainer finds worker {place}'s connection closed", with_lane(world, place, lost=True)
    if waiting and _trainer_may_expire(world, "answer"):
        yield "the trainer's deadline passes", _give_up_waiting(world, rules, "answer")
    if not waiting or rules.slip is Slip.REPORTS_FIRST:
        yield "the trainer settles", _settled(world, rules)


def _after_round(trainer: Trainer, lane: Lane, *, own_fault: bool) -> str:
    """Say what a member needs now; one whose replay failed by its own fault or the trainer's is seeded instead."""
    if lane.member != trainer.kind:
        return lane.member
    if trainer.record:
        return "leave"
    return "seed" if trainer.kind == "replay" and (lane.blamed or own_fault) else lane.member


def _settled(world: World, rules: Rules) -> World:
    """Report, let go of whoever is lost, and be idle."""
    trainer = world.trainer
    own_fault = not any(lane.member and (lane.lost or lane.blamed) for lane in world.lanes)
    for place, lane in enumerate(world.lanes):
        if not lane.member:
            continue
        if trainer.record and not lane.lost and not lane.committed:
            raise BrokenPromiseError(f"worker {place} is reported as verified and has not acted on COMMIT")
        lost = lane.lost or (trainer.kind != "update" and lane.blamed and lane.member != "replay")
        if lost and rules.slip is not Slip.KEEPS_THE_SILENT:
            world = _evict(world, place)
        else:
            member = _after_round(trainer, lane, own_fault=own_fault)
            world = with_lane(world, place, member=member, lost=False, told=False, answer="", blamed=False)
    world = with_lanes(world, committed=False)
    updates = trainer.updates - (trainer.kind == "update")
    return _trainer_steps(
        world, rules, "settled", updates=updates, kind="", target=NOTHING, record=None, failed=False, late=False,
        gave_up=False,
    )  # fmt: skip
