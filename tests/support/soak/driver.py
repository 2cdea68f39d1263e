"""The soak's driver: it starts, kills, stops and corrupts, and after each round compares bytes.

One round: events, then the trainer publishes weights that the driver made, then everybody that is not stopped is asked
what it serves and what it holds. The driver knows what each version is because it made it.
"""

from __future__ import annotations

import json
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from deltacast.engines.base import ServingStatus, WorkerStatus
from deltacast.engines.report import RoundReport
from soak.events import MAX_WORKERS, MIN_WORKERS, a_bit, an_arm, some_events
from soak.fleet import Fleet, Worker
from soak.lead import Lead, Outcome
from soak.ledger import Ledger, SoakError
from soak.model import Bit, Weights, flipped, moved, new_weights
from soak.processes import Arm

__all__ = ["Soak", "Summary"]

_NOTHING: Final[Arm] = ("", None)
_MOST_ABORTS: Final = 4
"""In a row: whoever breaks a round is gone from the next one."""
_MOST_FAILURES: Final = 4
"""Times in a row that a worker may be turned away."""
_ADMISSION_S: Final = 15.0


@dataclass(slots=True)
class Summary:
    """The last line of a soak.

    Attributes:
        rounds: calls of `send_weights`.
        committed, aborted: how they ended; those in which the trainer was lost are neither.
        seed: of everything random.
        kills, stops: processes that were sent SIGKILL or SIGSTOP, trainers too.
        joins, leaves: workers.
        flips: bits that were flipped in workers' weights.
        breaks: payload groups that were broken.
        trainer_restarts: trainers after the first.
        repaired, seeded, replayed, evicted: what the rounds' reports tell.
        seconds: all of it.
        equal: whether nothing was wrong, and at the end every live worker's bytes were the trainer's.
        fault: what was wrong, and where.
    """

    rounds: int = 0
    committed: int = 0
    aborted: int = 0
    seed: int = 0
    kills: int = 0
    stops: int = 0
    joins: int = 0
    leaves: int = 0
    flips: int = 0
    breaks: int = 0
    trainer_restarts: int = 0
    repaired: int = 0
    seeded: int = 0
    replayed: int = 0
    evicted: int = 0
    seconds: float = 0.0
    equal: bool = False
    fault: str = ""

    def line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))


class Soak:
    """One soak.

    Args:
        rounds: how many, beside those that end it.
        seed: of everything random.
        folder: for stores.
        write: prints one line.
    """

    def __init__(self, rounds: int, seed: int, folder: Path, write: Callable[[str], None]) -> None:
        self._rng, self._write, self._num_rounds = random.Random(seed), write, rounds
        self._ledger = Ledger()
        self._fleet = Fleet(self._ledger, self._say)
        self._lead = Lead(self._rng, self._fleet, self._ledger, folder, self._say)
        self._weights = self._committed = new_weights(0)  # the trainer's, and what was last agreed on
        self._arm: Arm = _NOTHING
        self._aborts = 0  # in a row
        self.summary = Summary(seed=seed)

    def run(self) -> Summary:
        """Run all of it. No process is left afterwards, whatever happened."""
        started = time.monotonic()
        try:
            self._begin()
            while self.summary.rounds < self._num_rounds:
                self._round(some_events(self._rng))
            self._end()
            self.summary.equal = True
        except Exception as err:  # noqa: BLE001 - whatever it is, the summary says when it was
            self.summary.fault = f"seed {self.summary.seed}, round {self.summary.rounds}: {type(err).__name__}: {err}"
            self._say(f"FAULT {traceback.format_exc()}")
        finally:
            self._lead.stop()
            self._fleet.stop()
        self._count(time.monotonic() - started)
        return self.summary

    def _say(self, line: str) -> None:
        self._write(f"round {self.summary.rounds:4d}  {line}")

    def _count(self, seconds: float) -> None:
        summary = self.summary
        summary.seconds = round(seconds, 1)
        summary.kills = self._fleet.kills + self._lead.kills
        summary.stops = self._fleet.stops + self._lead.stops
        summary.trainer_restarts = max(0, self._lead.restarts)

    def _begin(self) -> None:
        for _ in range(3):
            self._fleet.start(self._weights)
        self._lead.start(self._weights)
        self._look(None)

    def _round(self, events: list[str]) -> None:
        self.summary.rounds += 1
        share = self._rng.choice((0, 0.002, 0.02, 0.3))  # the last one is more than a streamed round has room for
        self._weights = moved(self._weights, self._rng, share)
        for event in events:
            self._befall(event)
        arm, self._arm = self._arm, _NOTHING
        outcome = self._lead.publish(self._weights, self.summary.rounds, arm)
        self._fleet.settle(joiners=False)
        self._note(outcome)
        self._look(outcome.report)
        if outcome.end == "lost":
            self._lead.end(clean=False)
            self._successor()
        elif outcome.end == "committed":
            self._committed = self._weights
        self._mend()

    # What happens.

    def _befall(self, event: str) -> None:
        """Do something to somebody, or see to it that it happens in this round."""
        if event.startswith("trainer"):
            self._befall_trainer(event)
        elif event == "join":
            if len(self._fleet.workers) < MAX_WORKERS:
                self._join()
        elif victims := [worker for worker in self._fleet if worker.idle and worker.connected]:
            victim = self._rng.choice(victims)
            if event == "flip":
                self._flip(victim)
            elif event != "leave" or len(victims) > MIN_WORKERS:
                self._strike(victim, event)

    def _strike(self, victim: Worker, event: str) -> None:
        victim.thaw_at = self.summary.rounds + self._rng.randrange(4)
        if event.endswith(" at"):
            arm = an_arm(self._rng, event)
            self._say(f"{event} {arm[0]!r}: {victim}")
            victim.process.ask("arm", arm)
            self.summary.breaks += arm[1] is None
            return
        self._say(f"{event}: {victim}")
        if event == "kill":
            self._fleet.kill(victim)
        elif event == "stop":
            self._fleet.freeze(victim)
        else:
            self._fleet.leave(victim)
            self.summary.leaves += 1

    def _flip(self, victim: Worker) -> None:
        bit = a_bit(self._rng, self._committed, self._weights)
        will_change = self._will_change(bit)
        self._say(f"flip: {victim}: {bit[0]} byte {bit[1]} bit {bit[2]}{', which changes' if will_change else ''}")
        victim.process.ask("flip", *bit)
        victim.flips ^= {bit}
        victim.verified = set()
        self.summary.flips += 1

    def _will_change(self, bit: Bit) -> bool:
        return self._committed[bit[0]][bit[1]] != self._weights[bit[0]][bit[1]]

    def _join(self) -> None:
        kind = self._rng.choice(("right", "old", "garbage"))
        old = self._rng.choice(self._ledger.recent() or [self._committed])
        garbage = new_weights(self._rng.randrange(1, 1 << 30))
        worker = self._fleet.start({"right": self._committed, "old": old, "garbage": garbage}[kind])
        self._say(f"join: {worker} with {kind} weights")
        self._lead.invite()
        self.summary.joins += 1

    def _befall_trainer(self, event: str) -> None:
        if event.endswith(" at"):
            self._arm = an_arm(self._rng, event)
            self._say(f"{event} {self._arm[0]!r}")
            self.summary.breaks += self._arm[1] is None
            return
        self._say(event)
        self._lead.end(clean=event == "trainer restart")
        self._successor()

    def _successor(self) -> None:
        """Start the next trainer, from its own weights: those that it was about to publish, or the last ones."""
        self._fleet.settle(joiners=True)  # they hear that theirs is gone
        self._look(None)
        for worker in self._fleet:
            worker.connected = False
            if worker.idle:
                worker.process.ask("arm", _NOTHING)
        if not any(worker.idle for worker in self._fleet):
            self._join()
        self._lead.start(self._rng.choice((self._weights, self._committed)))
        for worker in self._fleet:
            worker.verified = self._lead.every_slice  # a handshake rescans everything
        self._look(None)
        self._committed = next(self._fleet.look(worker)[1] for worker in self._fleet if worker.connected)

    def _mend(self) -> None:
        """Continue those whose time has come, have everybody join who is out, and start some if too few are left."""
        for worker in self._fleet:
            if worker.frozen and worker.thaw_at <= self.summary.rounds:
                self._say(f"continue: {worker}")
                self._fleet.thaw(worker)
                self._fleet.settle(joiners=False)
                self._look(None)
            elif worker.owes == ["init"] and time.monotonic() - worker.invited_at > _ADMISSION_S:
                raise SoakError(f"{worker} waits to be admitted")
            elif worker.failures > _MOST_FAILURES:
                raise SoakError(f"{worker} cannot join")
        while len(self._fleet.workers) < MIN_WORKERS:
            self._join()
        self._lead.invite()

    # What must hold.

    def _note(self, outcome: Outcome) -> None:
        """Count a round, and print what its report tells.

        Raises:
            SoakError: too many were aborted, one after the other.
        """
        summary, report = self.summary, outcome.report
        summary.committed += outcome.end == "committed"
        summary.aborted += outcome.end == "aborted"
        self._aborts = self._aborts + 1 if outcome.end == "aborted" else 0
        if outcome.error:
            self._say(f"{outcome.end}: {outcome.error}")
        if self._aborts > _MOST_ABORTS:
            raise SoakError(f"{self._aborts} rounds were aborted, one after the other: {outcome.error}")
        if report is not None:
            for rank, name in report.repaired:
                self._say(f"repaired rank {rank}: {name}")
            for line in report.seeded:
                self._say(f"caught up {line}")
            for name in report.evicted:
                self._say(f"evicted {name}")
            summary.evicted += len(report.evicted)
            self._count_caught_up(report)

    def _count_caught_up(self, report: RoundReport) -> None:
        how = [line.partition(": ")[2].partition(" ")[0] for line in report.seeded]
        self.summary.repaired += len(report.repaired) + how.count("repair")
        self.summary.seeded += how.count("seed")
        self.summary.replayed += how.count("replay")

    def _look(self, report: RoundReport | None) -> None:
        """Compare what everybody holds, who can be asked, with what they say it is.

        Raises:
            SoakError: it is something else, or a corruption was not found when it had to be.
        """
        names = [worker.name for worker in report.workers if worker.verified] if report and report.committed else []
        for worker in self._fleet:
            if not worker.idle:
                continue
            status, weights = self._fleet.look(worker)
            if status.status is ServingStatus.LOST:  # it says so, and must be restarted
                self._say(f"lost: {worker}: {status.last_error}")
                self._fleet.kill(worker)
            elif report is not None and any(name.endswith(f":{worker.process.pid}") for name in names):
                self._require_verified(worker, status, weights, report)
            if worker.connected and worker.flips and self._lead.all_audited(worker.verified):
                raise SoakError(f"nobody found {sorted(worker.flips)} in {worker}")

    def _require_verified(self, worker: Worker, status: WorkerStatus, weights: Weights, report: RoundReport) -> None:
        worker.verified.add(report.target_version)
        serving = ServingStatus.SERVING if worker.connected else ServingStatus.STALE
        if (status.status, status.version) != (serving, report.target_version):
            raise SoakError(f"{worker} was verified at {report.target_version} and is {status}")
        differs = flipped(self._weights, weights)
        if differs is None or not differs <= worker.flips:
            raise SoakError(f"{worker} was verified at {report.target_version} and holds something else")
        if any(self._will_change(bit) for bit in worker.flips):
            raise SoakError(f"{worker} was verified, and what was flipped is in what changed: {sorted(worker.flips)}")

    def _end(self) -> None:
        """Let everybody come back, and require that all of them hold the trainer's bytes.

        Raises:
            SoakError: they do not, or a process does not end.
        """
        for worker in self._fleet:
            if worker.frozen:
                self._fleet.thaw(worker)
        self._lead.end(clean=True)
        self._successor()
        for _ in range(2):
            self._round([])
        if self._aborts:
            raise SoakError("a round with nothing wrong was aborted")
        for worker in self._fleet:
            if not worker.connected or self._fleet.look(worker)[1] != self._weights:
                raise SoakError(f"{worker} does not hold the trainer's weights at the end")
        self._lead.end(clean=True)
        for worker in self._fleet:
            self._fleet.leave(worker)
