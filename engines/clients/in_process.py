"""A client of workers in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltacast.delta.errors import InputError
from deltacast.engines.base import WorkerEngine

__all__ = ["InProcessClient"]


class InProcessClient:
    """Call worker engines that live in this process, each on a thread of its own, and wait for all.

    Args:
        workers: the engines; the caller still owns and shuts them down.
    """

    def __init__(self, workers: Sequence[WorkerEngine]) -> None:
        self._workers = tuple(workers)

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`; raises the first worker's error after all have ended."""
        self._all(lambda worker: worker.init_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        """See `Client`."""
        self._all(lambda worker: worker.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `Client`; raises the first worker's error after all have ended."""
        self._all(lambda worker: worker.receive_weights(update_info))

    def finish_weight_update(self) -> None:
        """See `Client`."""
        self._all(lambda worker: worker.finish_weight_update())

    def call(self, verb: str, **arguments: Any) -> None:
        """Call something else that the engines' class has, such as `pause`; raises the first worker's error.

        Raises:
            InputError: an engine has no such method. None was called.
        """
        for worker in self._workers:
            if not hasattr(worker, verb):
                raise InputError(f"{type(worker).__name__} has no method {verb!r}")
        self._all(lambda worker: getattr(worker, verb)(**arguments))

    def _all(self, call: Callable[[WorkerEngine], object]) -> None:
        with ThreadPoolExecutor(max(1, len(self._workers)), "deltacast-client") as pool:
            for future in [pool.submit(call, worker) for worker in self._workers]:
                future.result()
