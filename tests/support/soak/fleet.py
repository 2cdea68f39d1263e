"""The workers as the driver knows them: their processes, what they were told, and what they owe an answer to."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from deltacast.engines.base import ServingStatus, WorkerStatus
from engine_processes import EngineProcess, WorkerError
from soak.ledger import Ledger, SoakError
from soak.model import Bit, Weights
from soak.processes import serve

__all__ = ["Fleet", "Worker"]

_ANSWER_S = 20.0
_LOOK_S = 0.02


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process.

    Attributes:
        number: its name in what the soak prints.
        connected: whether a trainer has admitted it and it has not said since that it lost that.
        frozen: whether it was stopped, as far as the driver has seen.
        owes: the commands that it has not answered, in order.
        flips: bits that were flipped in it and that nobody has found yet.
        verified: versions that it was verified at since the last flip.
        failures: times that it could not join, one after the other.
        invited_at: when it was last told to join.
        thaw_at: the round after which it is continued.
    """

    number: int
    process: EngineProcess
    connected: bool = False
    frozen: bool = False
    owes: list[str] = field(default_factory=list)
    flips: set[Bit] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    failures: int = 0
    invited_at: float = 0.0
    thaw_at: int = 0

    def __str__(self) -> str:
        return f"worker {self.number} ({self.process.pid})"

    @property
    def idle(self) -> bool:
        """Whether it can be asked something now."""
        return not self.frozen and not self.owes

    def tell(self, *command: Any) -> None:
        """Have it do something; it owes an answer."""
        self.owes.append(command[0])
        self.process.tell(*command)


class Fleet:
    """All workers that live.

    Args:
        ledger: what versions are.
        say: prints one line.

    Attributes:
        kills, stops: processes that were sent SIGKILL or SIGSTOP, as far as was seen.
    """

    def __init__(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.workers: list[Worker] = []
        self._ledger, self._say, self._num_started = ledger, say, 0
        self.kills = self.stops = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self.workers))

    def start(self, weights: Weights) -> Worker:
        """Start a worker that holds these weights, and has joined nothing."""
        self._num_started += 1
        worker = Worker(self._num_started, EngineProcess(serve, weights))
        self.workers.append(worker)
        self.look(worker)  # so that it is there
        return worker

    def kill(self, worker: Worker) -> None:
        """SIGKILL a worker."""
        worker.process.signal(signal.SIGKILL)
        self.bury(worker, -signal.SIGKILL)

    def freeze(self, worker: Worker) -> None:
        """SIGSTOP a worker."""
        worker.process.signal(signal.SIGSTOP)
        worker.frozen = True
        self.stops += 1

    def leave(self, worker: Worker) -> None:
        """Have an idle worker shut down and end."""
        worker.process.ask("leave")
        self.bury(worker, 0)

    def stop(self) -> None:
        """End every process."""
        for worker in self:
            worker.process.stop()

    def bury(self, worker: Worker, expected: int) -> None:
        """Let a process go that has ended.

        Raises:
            SoakError: by itself, or not at all.
        """
        self.workers.remove(worker)
        self.kills += expected == -signal.SIGKILL
        code = worker.process.exit_code()
        worker.process.stop()
        if code != expected:
            raise SoakError(f"worker {worker.number} ended with {code} instead of {expected}")

    def thaw(self, worker: Worker) -> None:
        """Continue a worker that was stopped."""
        worker.process.signal(signal.SIGCONT)
        worker.frozen = False

    def settle(self, *, joiners: bool) -> None:
        """Hear every answer that is owed; of those who wait to be admitted only if they are to fail or to be let in.

        Raises:
            SoakError: a worker says nothing.
        """
        for worker in self:
            while worker in self.workers and worker.owes and not worker.frozen:
                if worker.owes[0] == "init" and not joiners and not worker.process.speaks(_LOOK_S):
                    break
                self._hear(worker)

    def _hear(self, worker: Worker) -> None:
        """Take one answer, or see that there will be none: the worker is dead or stopped."""
        deadline = time.monotonic() + _ANSWER_S
        while not worker.process.speaks(_LOOK_S):
            if worker.process.frozen:
                worker.frozen = True
                self.stops += 1
                self._say(f"{worker} is stopped")
                return
            if time.monotonic() > deadline:
                raise SoakError(f"{worker} does not answer to {worker.owes[0]!r}")
        try:
            worker.process.reply()
        except WorkerError as err:
            self._failed(worker, worker.owes.pop(0), err)
        except (EOFError, ConnectionResetError):
            self._say(f"{worker} is dead")
            self.bury(worker, -signal.SIGKILL)
        else:
            if worker.owes.pop(0) == "init":
                worker.connected, worker.failures = True, 0

    def _failed(self, worker: Worker, command: str, err: WorkerError) -> None:
        """Note that a worker is out; what it raised must be one of the errors that are documented."""
        if err.kind not in ("TransportError", "DeadlineError", "AuthenticationError", "ProtocolError", "StateError"):
            raise SoakError(f"{worker} raised at {command!r}: {err}")
        worker.connected = False
        worker.failures += command == "init"
        self._say(f"{worker} is out: {err.kind}: {err.message}")

    def look(self, worker: Worker) -> tuple[WorkerStatus, Weights]:
        """Return what a worker that is idle says it serves, and what it holds.

        Raises:
            SoakError: these are not the same.
        """
        status, weights = worker.process.ask("look")
        found = self._ledger.check(str(worker), status, weights, worker.flips)
        if status.status in (ServingStatus.SERVING, ServingStatus.STALE):
            worker.flips &= found
        return status, weights
