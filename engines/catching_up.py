"""Bringing every worker to the baseline's bits: by a replay, a repair or a seed, in rounds like any other.

What each needs was judged at its handshake, or by what it found damaged since::

    leave  <--committed-- repair, replay, seed
    replay --it failed--> seed
    leave  --damaged----> repair
    repair, seed --failed or damaged--> lost

A worker that fails at this is dropped in the end, and the rest start over: a bad joiner stops nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from deltacast.delta.errors import CapacityError, DeltacastError, RoundAbortedError
from deltacast.delta.patch import WeightUpdate
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.container_wire import ContainerOutgoing
from deltacast.engines.dense_wire import DenseOutgoing
from deltacast.engines.history import History
from deltacast.engines.membership import Member, Membership
from deltacast.engines.outcome import Outcome
from deltacast.engines.payload import Outgoing
from deltacast.engines.wires import choose_seed_wire
from deltacast.store.baseline import Baseline

__all__ = ["CatchingUp", "RunRound"]

_LOG: Final = logging.getLogger(__name__)
_ORDER: Final = ("repair", "replay", "seed")  # repairs first: until then a damaged worker's audit fails every round

RunRound: TypeAlias = Callable[[Outgoing, Sequence[Member]], Outcome]
"""Runs one round of a payload that is for some of the members."""


class CatchingUp:
    """Gives the workers of one trainer what they lack. Used by the trainer's thread.

    Args:
        info: the trainer's.
        baseline: what every worker is to hold; it stays as it is.
        workers: who takes part.
        history: what replays are made of.
    """

    def __init__(self, info: TrainerInitInfo, baseline: Baseline, workers: Membership, history: History) -> None:
        self._info, self._baseline, self._workers, self._history = info, baseline, workers, history

    def run(self, optimizer_step: int | None, run_round: RunRound) -> list[str]:
        """Welcome who is new, and bring every member to the baseline's bits.

        Args:
            optimizer_step: the baseline's.
            run_round: the trainer's. Not kept: nothing of a trainer may hold on to it, or its memory outlives it.

        Returns:
            Who was welcomed or caught up, how and why.

        Raises:
            TransportError: no worker is left.
            RoundAbortedError: a seed or repair failed on the trainer's own side.
            CorruptionError: the baseline is damaged.
        """
        done = [_said(member) for member in self._workers.welcome() if member.action == "leave"]
        while True:
            self._workers.ensure_group()
            receivers = self._next()
            if not receivers:
                return done
            payload = self._payload(receivers)
            if payload is None:
                continue
            payload.optimizer_step = optimizer_step
            if self._settle(run_round(payload, receivers), receivers):
                done += [_said(member) for member in receivers]
                for member in receivers:
                    member.repaired = member.repaired or member.action != "replay"
                    member.action, member.damaged, member.replay = "leave", [], None

    def note_damage(self, outcome: Outcome) -> dict[int, list[str]]:
        """Plan the repair of what workers found damaged, or let go of those that no repair helps.

        Returns:
            Names by rank.

        Raises:
            CorruptionError: the damage is in the baseline; no worker is to blame.
        """
        if outcome.refusals:
            self._baseline.require_sound()
        damaged: dict[int, list[str]] = {}
        for member in self._workers.members:
            verdict, ack = outcome.verdicts.get(member.rank), outcome.acks.get(member.rank)
            names = set(verdict.damaged if verdict else [])
            if member.action == "leave" and ack:  # else what the audit after a rollback finds is known already
                names |= set(ack.damaged)
            if names:
                damaged[member.rank] = sorted(names)
                self._note_damage_of(member, names)
        return damaged

    def _note_damage_of(self, member: Member, names: set[str]) -> None:
        member.lost = member.lost or self._beyond_repair(member, names)
        if member.action == "replay":  # the parameters of its version are nowhere whole
            _seed_instead([member], f"damaged: {', '.join(sorted(names)[:3])}")
            return
        member.action, member.damaged = "repair", sorted(names | set(member.damaged))
        member.reason = f"damaged: {', '.join(member.damaged[:3])}"

    def _beyond_repair(self, member: Member, names: set[str]) -> str:
        """Say why damage cannot be repaired; an empty string if it can."""
        unknown = sorted(name for name in names if name not in self._baseline.state.table)
        if unknown:
            return f"says that a parameter is damaged that there is not: {unknown[0]!r}"
        if member.repaired or member.action == "seed" or names <= set(member.damaged):
            self._baseline.require_sound(names)
            return f"damaged again after it was sent whole: {', '.join(sorted(names)[:3])}"
        return ""

    def _next(self) -> list[Member]:
        """Return members that one and the same payload helps; none if nobody needs any."""
        behind = [member for member in self._workers.members if member.action != "leave"]
        first = min(behind, key=lambda member: _ORDER.index(member.action), default=None)
        return [member for member in behind if first is not None and _needs(member) == _needs(first)]

    def _payload(self, receivers: Sequence[Member]) -> Outgoing | None:
        """Make what the receivers need; None if they turned out to need something else."""
        action = receivers[0].action
        if action == "replay":
            return self._replay(receivers)
        return self._whole_parameters(
            {name for member in receivers for name in member.damaged} if action == "repair" else None
        )

    def _replay(self, receivers: Sequence[Member]) -> Outgoing | None:
        replay, dense_bytes = receivers[0].replay, self._baseline.state.table.nbytes
        assert replay is not None
        try:
            payload = self._container(self._history.make(replay))
            if payload.sent_bytes > dense_bytes:
                raise CapacityError("larger than a seed", expected=f"at most {dense_bytes} bytes",
                                    found=payload.sent_bytes)  # fmt: skip
        except DeltacastError as err:
            _seed_instead(receivers, f"its replay could not be made: {err}")
            return None
        _LOG.info("deltacast replays from version %d: %d bytes", replay.version, payload.sent_bytes)
        return payload

    def _whole_parameters(self, names: set[str] | None) -> Outgoing:
        group = self._workers.group
        assert group is not None
        known = [(member.name, member.hello.wires) for member in self._workers.members]
        choice = choose_seed_wire(self._info.seed_wire, workers=known, device=group.device)
        _LOG.info("deltacast wire to catch up: %s (%s)", choice.wire, choice.reason)
        if choice.wire == "dense":
            return DenseOutgoing(self._baseline, group, names, slab_bytes=self._info.slab_bytes)
        return self._container(self._baseline.seed(names))

    def _container(self, update: WeightUpdate) -> ContainerOutgoing:
        return ContainerOutgoing.of(update, self._baseline, values=self._info.values, threads=self._info.threads)

    def _settle(self, outcome: Outcome, receivers: Sequence[Member]) -> bool:
        """Say whether the round committed; if not, those at fault are lost, found damaged, or seeded next."""
        members = self._workers.members
        replayed = {member.rank for member in receivers if member.action == "replay"}
        somebody_lost = any(member.lost for member in members)  # whoever froze and broke the payload, say
        own_fault = not outcome.committed and 0 in outcome.errors and not somebody_lost
        if own_fault and not replayed:
            raise RoundAbortedError(f"catching up failed: {outcome.errors[0]}", version=self._baseline.version)
        damaged = self.note_damage(outcome)
        for member in members:
            error = outcome.errors.get(member.rank, "")
            if error and member.rank in replayed - damaged.keys():
                _seed_instead([member], f"its replay failed: {error}")
            elif error and member.rank not in damaged:
                member.lost = member.lost or error
        if own_fault:
            _seed_instead(receivers, f"its replay failed: {outcome.errors[0]}")
        return outcome.committed


def _needs(member: Member) -> tuple[str, int]:
    return member.action, -1 if member.replay is None else member.replay.version


def _seed_instead(members: Iterable[Member], reason: str) -> None:
    for member in members:
        member.action, member.reason, member.replay = "seed", reason, None
        _LOG.warning("deltacast seeds worker %s: %s", member.name, reason)


def _said(member: Member) -> str:
    return f"{member.name}: {member.action} ({member.reason})"
