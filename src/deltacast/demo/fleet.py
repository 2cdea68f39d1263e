"""The demo's inference workers: one process each, driven over a pipe.

A worker holds a bf16 copy of the policy that starts with weights of its own, joins the trainer's run, samples with
whatever was last committed, and can dump what it holds. It ends when its pipe closes, so none outlives the demo.
"""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from deltacast.delta.checkpoint import write_checkpoint
from deltacast.delta.errors import DeltacastError, TransportError
from deltacast.delta.module_source import ModuleSource
from deltacast.demo.grpo import Rollout, collect_rollout
from deltacast.demo.setting import Setting
from deltacast.engines.sparse_nccl import SparseNcclWorker

__all__ = ["Fleet"]

_STOP_S = 5.0


class Fleet:
    """Worker processes; also the trainer engine's `Client`, whose calls fail as soon as a worker does.

    Use as a context manager: every process has ended when it exits, however it exits.

    Args:
        setting: the policy and task that the workers build for themselves.
        num_workers: processes to start.
        timeout_s: for any answer.
    """

    def __init__(self, setting: Setting, num_workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for number in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, setting, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_STOP_S if error is None else 0)
            if process.is_alive():
                process.kill()
            process.join()

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`; returns when every worker is admitted."""
        self._tell_all("init", init_info)
        self._collect()

    def start_weight_update(self) -> None:
        """See `Client`: workers are idle between their answers, so there is nothing to pause."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `Client`; returns when every worker has heard that the call is over."""
        self._tell_all("receive", update_info)
        self._collect()

    def finish_weight_update(self) -> None:
        """See `Client`: nothing was paused."""

    def sample(self, prompts: torch.Tensor) -> list[Rollout]:
        """Have the workers sample completions of prompts, divided among them, with the weights that they hold.

        Raises:
            TransportError: a worker died, failed or did not answer in time.
        """
        for number, pipe in enumerate(self._pipes):
            pipe.send(("sample", prompts[number :: len(self._pipes)]))
        return self._collect()

    def dump(self, folder: Path) -> list[Path]:
        """Have every worker write the weights that it holds; return the files."""
        paths = [folder / f"worker-{number}.safetensors" for number in range(len(self._pipes))]
        for pipe, path in zip(self._pipes, paths, strict=True):
            pipe.send(("dump", path))
        self._collect()
        return paths

    def _collect(self) -> list[Any]:
        """Return one answer from every worker.

        Raises:
            TransportError: a worker died, failed or did not answer in time.
        """
        return [self._answer(number, pipe) for number, pipe in enumerate(self._pipes)]

    def _answer(self, number: int, pipe: Connection) -> Any:
        try:
            if not pipe.poll(self._timeout_s):
                raise TransportError(f"worker {number} did not answer within {self._timeout_s:g} s")
            good, value = pipe.recv()
        except (EOFError, ConnectionError) as err:
            raise TransportError(f"worker {number} died", hint="See its messages above.") from err
        if not good:
            raise TransportError(f"worker {number} failed: {value}")
        return value

    def _tell_all(self, *command: Any) -> None:
        for number, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except ConnectionError as err:
                raise TransportError(f"worker {number} died") from err


def _serve(pipe: Connection, setting: Setting, number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer ends us
    torch.set_num_threads(1)
    model, task = setting.make_worker(number)
    generator = torch.Generator().manual_seed(setting.seed * 1000 + number)
    source = ModuleSource(model.module)
    engine = SparseNcclWorker(source)
    with suppress(EOFError, ConnectionError):  # the trainer is gone
        while True:
            command, *arguments = pipe.recv()
            try:
                answer: object = None
                if command == "init":
                    engine.init_transfer_engine(*arguments)
                elif command == "sample":
                    answer = collect_rollout(model, task, arguments[0], setting.num_samples, generator)
                elif command == "receive":
                    answer = engine.receive_weights(*arguments)
                else:
                    write_checkpoint(arguments[0], source.metas(), source.tensors())
                pipe.send((True, answer))
            except DeltacastError as err:
                pipe.send((False, str(err)))
    engine.shutdown()
