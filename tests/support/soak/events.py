"""What may happen before or in a round, chosen by one random number generator."""

from __future__ import annotations

import random
import signal
from typing import Any, Final

from engine_processes import DIE_AT, TRAINER_DIES_AT
from soak.model import TIED, Bit, Weights, changed_places
from soak.processes import Arm

__all__ = ["MAX_WORKERS", "MIN_WORKERS", "TIMEOUT_S", "a_bit", "an_arm", "options", "some_events"]

TIMEOUT_S: Final = 1.0
"""For each phase of a round: what is stopped is stopped for longer."""
MIN_WORKERS: Final = 2
MAX_WORKERS: Final = 4

_EVENTS: Final = {
    "kill": 3,  # SIGKILL between rounds
    "kill at": 7,  # at a step of a round
    "stop": 3,  # SIGSTOP, and SIGCONT after the timeout
    "stop at": 5,
    "break at": 4,  # a payload group
    "flip": 12,
    "join": 12,
    "leave": 3,
    "trainer kill": 1,
    "trainer kill at": 4,
    "trainer stop at": 2,
    "trainer break at": 3,
    "trainer restart": 4,
}
_HOW: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "break": None}


def some_events(rng: random.Random) -> list[str]:
    """Choose what happens in one round: mostly one event, or none, sometimes two."""
    number = rng.choices([0, 1, 2], [45, 45, 10])[0]
    return rng.choices(list(_EVENTS), list(_EVENTS.values()), k=number)


def an_arm(rng: random.Random, event: str) -> Arm:
    """Choose the step at which an event of the kind `... at` happens."""
    how, trainer = event.removeprefix("trainer ").removesuffix(" at"), event.startswith("trainer")
    if how == "break":  # where there is a group to break
        return rng.choice(("all ready", "sending") if trainer else ("ready", "payload")), None
    return rng.choice(TRAINER_DIES_AT if trainer else DIE_AT), _HOW[how]


def a_bit(rng: random.Random, before: Weights, after: Weights) -> Bit:
    """Choose a bit to flip: at a place that the next round changes, if it changes that tensor, or anywhere in it."""
    name = rng.choice([name for name, raw in before.items() if raw and name != TIED[0]])
    changed = changed_places(before, after, name) if rng.random() < 0.5 else []
    place = rng.choice(changed) if changed else rng.randrange(len(before[name]))
    return name, place, 0 if name == "mask" else rng.randrange(8)


def options(rng: random.Random) -> dict[str, Any]:
    """Choose how a trainer works until the next one."""
    return {
        "wire": rng.choice(("container", "raw", "coded")),
        "seed_wire": rng.choice(("container", "dense")),
        "slab_bytes": rng.choice((1 << 16, 256 << 20)),
        "history_bytes": rng.choice((0, 64 << 20)),
        "overlap_apply": rng.random() < 0.5,
        "audit": rng.choice(("full", 3, 16)),
    }
