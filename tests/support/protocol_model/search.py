"""The promise (docs/protocol.md, "Promise"), and the search through every reachable world for one that breaks it.

Breadth first, so that a counterexample is as short as there is one. Worlds that differ in the names of the two workers
only are one.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np

from deltacast.engines.protocol import TrainerState, WorkerState
from protocol_model.faults import moves, strikes
from protocol_model.states import EMPTY, SERVING, Faults, Label, Lane, Pace, Trainer, World
from protocol_model.world_changes import BrokenPromiseError, Rules

__all__ = ["Exploration", "explore"]


@dataclass(frozen=True)
class Exploration:
    """What a search found.

    Attributes:
        num_states: how many different ones it reached.
        num_moves: between them.
        num_ends: states in which all is done.
        violation: what promise is broken, at the end of `trace`; empty if none is.
        trace: what happened, from the start on.
    """

    num_states: int
    num_moves: int
    num_ends: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Print the counterexample."""
        lines = [f"{number:3}. {move}" for number, move in enumerate(self.trace, start=1)]
        return "\n".join([self.violation or f"no violation in {self.num_states} states", *lines])


def start(faults: Faults, updates: int) -> World:
    """Return the world after a first handshake: version 1 everywhere, `updates` rounds to come."""
    first = Label(1, "A")
    lane = Lane("member", WorkerState.IDLE, SERVING, first, "leave", floor=1, newest=1)
    return World(Trainer(first, 1, updates, (first,)), (lane, lane), faults)


def explore(rules: Rules, faults: Faults, *, updates: int = 1) -> Exploration:
    """Visit every reachable world and check the promise in each; stop at the first that breaks it.

    Args:
        rules: tables and rules; `rules.reached` collects the entries used.
        faults: how many of each may strike, in every combination and at every point.
        updates: rounds that publish something, before the last handshake.
    """
    return _Search(rules).run(start(faults, updates))


def broken_promise(world: World) -> str:
    """Say which part of the promise a world breaks; an empty string if none."""
    trainer = world.trainer
    if trainer.kind == "update" and trainer.baseline not in trainer.published:
        return f"the baseline is {trainer.baseline}, of which there is no record"
    for place, lane in enumerate(world.lanes):
        if lane.serves == EMPTY:
            continue
        if lane.written:
            return f"worker {place} serves between its first write and the decision"
        if lane.holds not in trainer.published:
            return f"worker {place} serves {lane.holds}, which nobody published"
        if lane.holds.version < lane.floor:
            return f"worker {place} went back behind version {lane.floor}, which it had committed"
    first, second = (lane.holds for lane in world.lanes)
    if EMPTY not in {lane.serves for lane in world.lanes} and _distance(first, second, trainer.published) > 1:
        return f"the workers serve {first} and {second}"
    return ""


def _distance(first: Label, second: Label, published: tuple[Label, ...]) -> int:
    """Return how many publishings of other weights lie between two versions."""
    if first.bits == second.bits:
        return 0
    weights = [bits for bits, _ in groupby(label.bits for label in published)]
    ones, others = ([place for place, bits in enumerate(weights) if bits == held.bits] for held in (first, second))
    return min(abs(one - other) for one, other in product(ones, others))


def is_end(world: World) -> bool:
    """Whether all is done: nothing to publish, both workers are members in need of nothing, nothing is on its way."""
    trainer = world.trainer
    return (
        trainer.state is TrainerState.IDLE
        and trainer.pace is not Pace.FROZEN
        and not trainer.updates
        and all(_is_settled(lane) for lane in world.lanes)
    )


def _is_settled(lane: Lane) -> bool:
    connected = lane.worker_end and lane.trainer_end and not lane.cut
    idle = lane.state is WorkerState.IDLE and lane.pace is not Pace.FROZEN and not lane.up and not lane.down
    return lane.mode == "member" and lane.member == "leave" and connected and idle


def _wrong_end(world: World) -> str:
    for place, lane in enumerate(world.lanes):
        if (lane.holds, lane.serves) != (world.trainer.baseline, SERVING):
            return f"all is done, and worker {place} is {lane.serves} with {lane.holds}, not {world.trainer.baseline}"
    return ""


class _Search:
    """One search. Worlds are known by 64-bit hashes, so that millions fit; a number stands for each one after that."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._numbers: dict[int, int] = {}
        self._parents = array("q")
        self._labels: list[str] = []
        self._sources, self._targets = array("q"), array("q")  # of moves that are no faults
        self._num_moves = 0

    def run(self, world: World) -> Exploration:
        """Search from `world`."""
        queue, ends, number = deque([world]), list[int](), -1
        untouched = world.left
        self._enter(hash(_key(world)), -1, "")
        while queue:
            world, number = queue.popleft(), number + 1
            violation = broken_promise(world)
            if world.left == untouched and world.trainer.record is False:
                violation = "a round in which nothing went wrong is aborted"
            if not violation and is_end(world):
                ends.append(number)
                violation = _wrong_end(world)
            if violation:
                return self._found(violation, number)
            try:
                queue.extend(self._expand(world, number))
            except BrokenPromiseError as err:
                return self._found(str(err), number)
        stuck = self._stuck(ends)
        if stuck is not None:
            return self._found("stuck: from here no end can be reached without another fault", stuck)
        return Exploration(len(self._numbers), self._num_moves, len(ends))

    def _expand(self, world: World, number: int) -> Iterator[World]:
        """Yield the worlds that follow and were not seen before."""
        for is_fault, following in ((False, moves(world, self._rules)), (True, strikes(world, self._rules))):
            for label, after in following:
                self._num_moves += 1
                key = hash(_key(after))
                known = self._numbers.get(key)
                if known is None:
                    known = self._enter(key, number, label)
                    yield after
                if not is_fault:
                    self._sources.append(number)
                    self._targets.append(known)

    def _enter(self, key: int, parent: int, label: str) -> int:
        number = self._numbers[key] = len(self._parents)
        self._parents.append(parent)
        self._labels.append(sys.intern(label))
        return number

    def _stuck(self, ends: list[int]) -> int | None:
        """Return the first world from which no end can be reached without another fault."""
        order = np.argsort(self._targets, kind="stable")
        sources = np.asarray(self._sources)[order]
        first = np.searchsorted(np.asarray(self._targets)[order], np.arange(len(self._parents) + 1))
        reaches = np.zeros(len(self._parents), bool)
        todo = np.array(ends, np.int64)
        while todo.size:
            reaches[todo] = True
            before = np.concatenate([sources[first[number] : first[number + 1]] for number in todo])
            todo = np.unique(before[~reaches[before]])
        return None if reaches.all() else int(np.argmin(reaches))

    def _found(self, violation: str, number: int) -> Exploration:
        trace: list[str] = []
        while number > 0:
            trace.append(self._labels[number])
            number = self._parents[number]
        return Exploration(len(self._numbers), self._num_moves, 0, violation, tuple(reversed(trace)))


def _key(world: World) -> object:
    return world.trainer, frozenset(world.lanes), world.left
