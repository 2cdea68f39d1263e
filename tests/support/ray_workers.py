"""Ray actors with worker engines, and a Ray of the test's own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.report import WorkerReport
from deltacast.engines.sparse_nccl import SparseNcclWorker
from engine_processes import Policy, weights_of


class RayWorker:
    """What an actor is made of: a model and its engine, with an engine's four methods and a few of the test's."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._module = Policy(seed)
        self._worker = SparseNcclWorker(ModuleSource(self._module))
        self._calls: list[str] = []

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._calls.append("init")
        self._worker.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._calls.append("start")

    def receive_weights(self, update_info: dict[str, Any]) -> WorkerReport:
        self._calls.append("update")
        return self._worker.receive_weights(update_info)

    def finish_weight_update(self) -> None:
        self._calls.append("finish")

    def pause_generation(self, mode: str) -> None:
        self._calls.append(f"pause {mode}")

    def resume(self) -> None:
        self._calls.append("resume")

    def calls(self) -> list[str]:
        """Return what was called since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def weights(self) -> dict[str, bytes]:
        return weights_of(self._module)


@contextmanager
def local_ray() -> Iterator[None]:
    """Start a Ray of two CPUs that leaves nothing outside its own folder, and end it."""
    variables = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    # Not pytest's folder: its name is too long for the sockets in it.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a default to come
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables},
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
