"""What bad luck can do next."""

from __future__ import annotations

from deltacast.engines.protocol import WorkerState
from protocol_model.states import EMPTY, NOBODY, NOTHING, Label, Lane, Pace, Trainer, World
from protocol_model.trainer_moves import trainer_moves
from protocol_model.worker_moves import worker_moves
from protocol_model.world_changes import Moves, Rules, break_group, with_lane, with_trainer

__all__ = ["moves", "strikes"]


def moves(world: World, rules: Rules) -> Moves:
    """Yield everything that can happen next without a fault, deadlines that may pass by now included."""
    yield from trainer_moves(world, rules)
    for place in (0, 1):
        yield from worker_moves(world, place, rules)


def strikes(world: World, rules: Rules) -> Moves:
    """Yield every fault that may strike here, while there are some left."""
    left = world.left
    if left.freezes:
        yield from _deadlines_pass(world._replace(left=left._replace(freezes=left.freezes - 1)), rules)
    if left.crashes:
        yield from _trainer_crashes(world._replace(left=left._replace(crashes=left.crashes - 1)))
    for place, lane in enumerate(world.lanes):
        if left.crashes:
            crashed = _worker_crashes(world, place)
            yield (
                f"worker {place} dies and starts again",
                crashed._replace(left=left._replace(crashes=left.crashes - 1)),
            )
        if left.cuts and (lane.worker_end and lane.trainer_end and not lane.cut):
            cut = with_lane(world, place, cut=True)
            yield f"worker {place}'s connection is cut", cut._replace(left=left._replace(cuts=left.cuts - 1))
        if left.cuts and lane.mode == "joining" and lane.hello is not None and not lane.hello_gone:
            cut = with_lane(world, place, hello_gone=True)
            yield f"worker {place}'s new connection is cut", cut._replace(left=left._replace(cuts=left.cuts - 1))


def _deadlines_pass(world: World, rules: Rules) -> Moves:
    """Yield what happens only because a process has stood still: a deadline of somebody else passes, or one of its own.

    Until the first deadline passes, a process that stands still is one whose turn does not come.
    """
    usual = {label for label, _ in moves(world, rules)}
    for place, who in enumerate(("worker 0", "worker 1", "the trainer")):
        for pace in (Pace.FROZEN, Pace.OVERSLEPT):
            slow = with_trainer(world, pace=pace) if place == 2 else with_lane(world, place, pace=pace)
            for label, after in moves(slow, rules):
                if label not in usual and not label.endswith("thaws"):
                    yield f"{who} {pace.value}: {label}", after


def _trainer_crashes(world: World) -> Moves:
    """Its connections close, its record is gone; another starts, from this checkpoint or that, and knows no version."""
    world = break_group(world)
    for place, lane in enumerate(world.lanes):
        world = with_lane(
            world, place, trainer_end=False, member="", said=NOBODY, hello=None, hello_gone=False, up=(),
            lost=False, told=False, answer="", blamed=False, committed=False,
        )  # fmt: skip
        if lane.mode == "joining":
            world = with_lane(world, place, worker_end=True)  # of the connection that was closed on it
    old = world.trainer
    stepped = len(old.published) > 1 or old.target.bits == "B"
    for baseline in (Label(1, "A"), Label(1, "B"), Label(2, "B")) if stepped else (Label(1, "A"),):
        earlier = (Label(1, "A"),) if baseline.version == 2 else ()  # it starts from a store, which has them
        trainer = Trainer(
            baseline, baseline.version, 0, old.published, starting=True, epoch=old.epoch + 1, earlier=earlier
        )
        yield f"the trainer dies; another starts with {baseline}", world._replace(trainer=trainer)


def _worker_crashes(world: World, place: int) -> World:
    """Its memory is gone; what the trainer knows of it, and has not read, is not."""
    lane = world.lanes[place]
    world = break_group(world, except_for=place)
    kept = ("up", "trainer_end", "hello", "said", "member", "lost", "told", "answer", "blamed", "committed")
    changes = Lane("apart", WorkerState.IDLE, EMPTY, NOTHING, "")._asdict() | {key: getattr(lane, key) for key in kept}
    changes |= {"worker_end": False, "cut": lane.cut and lane.trainer_end, "hello_gone": lane.hello is not None}
    return with_lane(world, place, **changes)
