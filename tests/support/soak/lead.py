"""The trainer as the driver knows it: the present process, its place in the run, and what comes after it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.report import RoundReport
from deltacast.store.version_store import VersionStore
from engine_processes import EngineProcess
from soak.events import TIMEOUT_S, options
from soak.fleet import Fleet
from soak.ledger import Ledger, SoakError
from soak.model import Weights
from soak.processes import Arm, train

__all__ = ["Lead", "Outcome"]

_ANSWER_S = 40.0
_LOOK_S = 0.02
_FROZEN_S = TIMEOUT_S * 2.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call of `send_weights` ended; `lost`: the trainer is gone, or must go."""

    end: Literal["committed", "aborted", "lost"]
    report: RoundReport | None = None
    error: str = ""


class Lead:
    """One trainer process after the other.

    Args:
        rng: chooses how each one works.
        fleet: told what trainers want told to workers.
        ledger: told what versions are.
        folder: for stores.
        say: prints one line.

    Attributes:
        restarts: trainers after the first.
        kills, stops: times that one was sent SIGKILL or SIGSTOP.
    """

    def __init__(
        self, rng: random.Random, fleet: Fleet, ledger: Ledger, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._rng, self._fleet, self._ledger, self._folder, self._say = rng, fleet, ledger, folder, say
        self._process: EngineProcess | None = None
        self._run_id, self._epoch, self._version, self._store = "run", -1, 0, ""
        self._address: dict[str, Any] = {}
        self.restarts, self.kills, self.stops, self._num_slices = -1, 0, 0, 1

    def start(self, weights: Weights) -> None:
        """Start a trainer with these weights, and have every worker that is not stopped join it.

        Raises:
            SoakError: it does not admit them.
        """
        chosen = options(self._rng)
        store, durability = self._a_store(), self._rng.choice(("after_commit", "before_commit"))
        resumes = bool(store) and store == self._store
        members = [worker for worker in self._fleet if not worker.frozen]
        info = TrainerInitInfo(
            num_workers=len(members),
            run_id="" if store else self._run_id,
            epoch=0 if store else self._epoch + 1,
            version=0 if store else self._version,
            timeout_s=TIMEOUT_S,
            decision_timeout_s=TIMEOUT_S,
            join_timeout_s=_ANSWER_S / 2,
            **chosen,
        )
        self.restarts, self._store = self.restarts + 1, store
        self._num_slices = 1 if chosen["audit"] == "full" else chosen["audit"]
        where = f"store {Path(store).name} {durability}" if store else "no store"
        self._say(f"trainer starts: {', '.join(f'{key} {value}' for key, value in chosen.items())}, {where}")
        self._process = EngineProcess(train, info, weights, store, durability)
        self._run_id, self._epoch, self._version = self._await_admission()
        if resumes:
            self._ledger.note_one_of(self._run_id, self._version)
        else:
            self._ledger.note(self._run_id, self._version, weights)

    @property
    def every_slice(self) -> set[int]:
        """Versions whose rolling audits scan everything."""
        return set(range(self._num_slices))

    def all_audited(self, versions: set[int]) -> bool:
        """Whether the audits of these versions scan everything: each takes the slice of its number."""
        return {version % self._num_slices for version in versions} == self.every_slice

    def _a_store(self) -> str:
        """Choose where versions are kept: in no store, in the one that there is, or in a new one of another run."""
        if self._rng.random() < 0.5:
            return ""
        if self._store:
            return self._store
        name = f"run-{self.restarts + 1}"
        VersionStore.create(self._folder / name, run_id=name, first_version=self._version).close()
        return str(self._folder / name)

    def _await_admission(self) -> tuple[str, int, int]:
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            if not self._speaks():
                self._fleet.settle(joiners=False)
                self.invite()  # whoever came too late for the last group
                continue
            kind, *rest = self._hear()
            if kind == "admitted":
                self._fleet.settle(joiners=True)
                run_id, epoch, version = rest
                return str(run_id), int(epoch), int(version)
            self._address = rest[0]
            self.invite()
        raise SoakError("a trainer does not admit its workers")

    def invite(self) -> None:
        """Have every worker that is out join."""
        if self._address:
            for worker in self._fleet:
                if worker.idle and not worker.connected:
                    worker.invited_at = time.monotonic()
                    worker.tell("init", self._address)

    def publish(self, weights: Weights, step: int, arm: Arm) -> Outcome:
        """Have the trainer publish weights, with this happening on its way.

        Raises:
            SoakError: it does not answer, or raised what it should not.
        """
        assert self._process is not None
        self._process.tell("publish", weights, step, arm)
        deadline, frozen_at = time.monotonic() + _ANSWER_S, 0.0
        while time.monotonic() < deadline:
            if not self._speaks():
                frozen_at = self._thaw_in_time(frozen_at)
                continue
            try:
                kind, *rest = self._hear()
            except (EOFError, ConnectionResetError):
                return self._died(weights, arm)
            if kind != "update":
                return self._outcome(kind, rest, weights)
            for worker in self._fleet:
                if worker.connected and not (worker.frozen and worker.owes):
                    worker.tell("receive", rest[0])
        raise SoakError("the trainer does not answer")

    def _thaw_in_time(self, frozen_at: float) -> float:
        """Continue a trainer that has been stopped for longer than every timeout; return since when it is."""
        assert self._process is not None
        if not self._process.frozen:
            return 0.0
        if not frozen_at:
            self._say("trainer is stopped")
            self.stops += 1
            return time.monotonic()
        if time.monotonic() - frozen_at > _FROZEN_S:
            self._process.signal(signal.SIGCONT)
        return frozen_at

    def _died(self, weights: Weights, arm: Arm) -> Outcome:
        if arm[1] is not signal.SIGKILL:
            raise SoakError("the trainer died by itself")
        self._say(f"trainer is dead, at {arm[0]!r}")
        self._ledger.doubt(weights)
        return Outcome("lost")

    def _outcome(self, kind: str, rest: list[Any], weights: Weights) -> Outcome:
        if kind == "ok":
            report: RoundReport = rest[0]
            self._version = report.target_version
            self._ledger.note(self._run_id, self._version, weights)
            return Outcome("committed", report)
        name, message, trace, aborted = rest
        if name == "StoreError" and "nobody knows" in message:
            self._ledger.doubt(weights)
            return Outcome("lost", error=message)
        if name not in ("RoundAbortedError", "TransportError", "DeadlineError", "StoreError"):
            raise SoakError(f"the trainer raised {name}: {message}\n{trace}")
        return Outcome("aborted", aborted, f"{name}: {message}")

    def end(self, *, clean: bool) -> None:
        """Shut the trainer down, or kill it. Workers that listen hear of it at once.

        Raises:
            SoakError: it did not end as it should.
        """
        assert self._process is not None
        process, self._process, self._address = self._process, None, {}
        if clean:
            process.ask("shutdown")
        else:
            self.kills += 1
            with suppress(ProcessLookupError):  # it was killed in its round
                process.signal(signal.SIGKILL)
        code, expected = process.exit_code(), 0 if clean else -signal.SIGKILL
        process.stop()
        if code != expected:
            raise SoakError(f"the trainer ended with {code} instead of {expected}")

    def stop(self) -> None:
        """End the process, if there is one, whatever it does."""
        if self._process is not None:
            self._process.stop()

    def _speaks(self) -> bool:
        assert self._process is not None
        return self._process.speaks(_LOOK_S)

    def _hear(self) -> Any:
        assert self._process is not None
        return self._process.hear()
