"""The ranks of `bench sync`: processes, the pipes between them, and what happens when one of them fails.

The calling process takes part in nothing: it starts the ranks, passes on what rank 0 says, and ends them all, so that
a rank which hangs in a collective can hang nobody else.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from deltacast.bench.sync_rows import SyncOptions
from deltacast.delta.errors import DeadlineError, DeltacastError, TransportError

__all__ = ["Say", "Workers", "device_of", "run_ranks"]

Say = Callable[[object], None]
"""Passes something on to the process that started the ranks."""

TrainerMain = Callable[[SyncOptions, "Workers", Say], None]
WorkerMain = Callable[[SyncOptions, int, Connection], None]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended a rank; `at` is on the clock that all processes of a machine share."""

    error: DeltacastError
    at: float


class Workers:
    """Rank 0's pipes to the workers; also the trainer engine's `Client`.

    A command is a name of what to do, and arguments. Every command has one answer.

    Args:
        pipes: by rank, from 1.
        timeout_s: for any answer.
    """

    def __init__(self, pipes: Sequence[Connection], timeout_s: float) -> None:
        self._pipes, self.timeout_s = tuple(pipes), timeout_s

    def tell(self, *command: Any) -> None:
        """Send a command to every worker.

        Raises:
            TransportError: one has died.
        """
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.send(command)
            except ConnectionError as err:
                raise TransportError("a worker died", rank=rank) from err

    def hear(self) -> list[Any]:
        """Return every worker's answer, by rank.

        Raises:
            DeadlineError: one is late.
            TransportError: one has died.
        """
        return [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes, start=1)]

    def ask(self, *command: Any) -> list[Any]:
        """`tell` and `hear`."""
        self.tell(*command)
        return self.hear()

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`."""
        self.ask("init", init_info)

    def start_weight_update(self) -> None:
        """See `Client`: nothing runs on the workers between their answers."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `Client`."""
        self.ask("receive", update_info)

    def finish_weight_update(self) -> None:
        """See `Client`."""

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            if not pipe.poll(self.timeout_s):
                raise DeadlineError(f"no answer within {self.timeout_s:g} s", rank=rank)
            return pipe.recv()
        except (EOFError, ConnectionError) as err:
            raise TransportError("a worker died", rank=rank) from err


def device_of(rank: int, world: int) -> torch.device:
    """Return a rank's device: a GPU of its own if there is one for everybody, else the CPU."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= world
    return torch.device("cuda", rank) if enough else torch.device("cpu")


def run_ranks(options: SyncOptions, timeout_s: float, trainer: TrainerMain, worker: WorkerMain) -> Iterator[object]:
    """Start the ranks, yield what rank 0 says until it is done, and end them, however this ends.

    Args:
        options: passed on; `world` says how many ranks.
        timeout_s: for anything to happen.
        trainer: what rank 0 runs; importable by a child.
        worker: likewise the others.

    Raises:
        DeltacastError: what the first rank to fail raised, with its traceback as a note (`__notes__`).
        TransportError: a rank died without a word, or nothing happened in time.
    """
    context = multiprocessing.get_context("spawn")
    ups: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    pairs = [context.Pipe() for _ in range(1, options.world)]
    try:
        for rank in range(options.world):
            up, theirs = context.Pipe(duplex=False)
            ends = [ours for ours, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
            main: Callable[[], None] = (
                partial(worker, options, rank, *ends)
                if rank
                else partial(trainer, options, Workers(ends, timeout_s), theirs.send)
            )
            process = context.Process(target=_run, args=(rank, options.threads, theirs, main), daemon=True)
            process.start()
            processes.append(process)
            ups[up] = rank
            for end in (theirs, *ends):  # the child has its own; ours would hide that it is gone
                end.close()
        yield from _listen(ups, processes, timeout_s)
    finally:
        _end(processes, [*ups])


def _listen(ups: dict[Connection, int], processes: Sequence[BaseProcess], timeout_s: float) -> Iterator[object]:
    open_ups = dict(ups)
    while True:
        running = [process.sentinel for process in processes if process.is_alive()]
        ready = wait([*open_ups, *running], timeout_s)
        if not ready:
            raise DeadlineError("the ranks went silent", expected=f"a word within {timeout_s:g} s")
        failures: list[_Failure] = []
        for up in [up for up in open_ups if up in ready]:
            try:
                message = up.recv()
            except (EOFError, ConnectionError):
                del open_ups[up]
                continue
            if isinstance(message, _Failure):
                failures.append(message)
            elif message is not None:
                yield message
            elif ups[up] == 0:
                return
        _raise_for_the_dead(processes)  # first: what the others said may come of it
        if failures:
            raise min(failures, key=lambda failure: failure.at).error


def _raise_for_the_dead(processes: Sequence[BaseProcess]) -> None:
    """Raise for a process that ended without a word: one that can still speak exits with 0."""
    for rank, process in enumerate(processes):
        if code := process.exitcode:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise TransportError(f"a rank died with {how}", rank=rank)


def _end(processes: Sequence[BaseProcess], ups: Sequence[Connection]) -> None:
    """Leave no process: they have nothing to save."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()
    for up in ups:
        up.close()


def _run(rank: int, threads: int, up: Connection, main: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    torch.set_num_threads(threads)
    try:
        main()
        up.send(None)
    except BaseException as err:  # noqa: BLE001 - a process's boundary: the parent must hear
        failed = f"a rank failed: {type(err).__name__}: {err}"
        error = err if isinstance(err, DeltacastError) else TransportError(failed, rank=rank)
        error.add_note(f"rank {rank}:\n{traceback.format_exc()}")
        up.send(_Failure(error, time.monotonic()))
