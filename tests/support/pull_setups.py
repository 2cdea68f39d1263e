"""Trainers and workers of pulls as the tests set them up, and workers in processes of their own that die on time."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import Client, TrainerInitInfo
from deltacast.engines.pull_trainer import AskWorkers, PullingTrainer
from deltacast.engines.pulling import PullingWorker, PullRequest, PullSettings
from deltacast.store.anchors import Anchors
from deltacast.store.version_store import VersionStore
from engine_processes import EngineProcess, NoClient, Policy, answer_commands, weights_of
from engine_setups import RUN

NO_ANCHORS: Final = Anchors(every=10**6, fraction=1e6)


@contextmanager
def pulling_trainer(
    policy: Policy, store: VersionStore, client: Client, ask: AskWorkers | None = None, **options: Any
) -> Iterator[PullingTrainer]:
    """Make a trainer; it is shut down afterwards."""
    info = TrainerInitInfo(**{"num_workers": 1, "store": store, "anchors": NO_ANCHORS, "timeout_s": 20.0, **options})
    trainer = PullingTrainer(info, ModuleSource(policy), client, ask)
    try:
        yield trainer
    finally:
        trainer.shutdown()


def publish(store: VersionStore, num_updates: int, **options: Any) -> list[dict[str, bytes]]:
    """Publish the policy of seed 0 and so many steps of it, to no worker; returns the weights of each version."""
    policy = Policy(0)
    weights = [weights_of(policy)]
    with pulling_trainer(policy, store, NoClient(), **options) as trainer:
        for step in range(num_updates):
            policy.step(step)
            trainer.send_weights(optimizer_step=10 * step)
            weights.append(weights_of(policy))
    return weights


class DyingPullWorker(PullingWorker):
    """Kills its own process at a step of a pull: `fetching`, `writing` or `written`."""

    die_at = ""

    def _maybe_die(self, step: str) -> None:
        if step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _held(self, store: VersionStore, request: PullRequest, before_write: Any) -> int | None:
        held = super()._held(store, request, before_write)
        self._maybe_die("fetching")
        return held

    def _stop_serving(self) -> None:
        super()._stop_serving()
        self._maybe_die("writing")

    def _weights_written(self, payload: Any) -> None:
        self._maybe_die("written")


def serve_pulls(pipe: Connection, seed: int, allowed: str, die_at: str) -> None:
    """Run one worker, answering commands until the pipe closes."""
    faulthandler.enable()
    torch.set_num_threads(1)
    module = Policy(seed)
    worker = DyingPullWorker(ModuleSource(module))
    worker.pulls, worker.die_at = PullSettings(allowed=(allowed,)), die_at
    answer_commands(pipe, lambda command, *arguments: _answer(worker, module, command, *arguments))


def _answer(worker: PullingWorker, module: Policy, command: str, call: Mapping[str, Any] | None = None) -> object:
    if command == "pull":
        return worker.receive_weights(call)
    return weights_of(module) if command == "weights" else worker.status


class PullProcess(EngineProcess):
    """A worker of the policy of some seed that may pull from one store."""

    def __init__(self, seed: int, allowed: str, die_at: str = "") -> None:
        super().__init__(serve_pulls, seed, allowed, die_at)


@contextmanager
def pull_processes(allowed: str, *seeds: int, die_at: str = "") -> Iterator[list[PullProcess]]:
    """Start workers; none is left afterwards."""
    workers = [PullProcess(seed, allowed, die_at) for seed in seeds]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


class BreakingWorker(PullingWorker):
    """What is made of its weights cannot be made, for the next `times` times."""

    times = 0

    def _weights_written(self, payload: Any) -> None:
        if self.times:
            self.times -= 1
            raise RuntimeError("out of memory, say")


def worker_of(
    policy: Policy, store: VersionStore | str, *, settings: dict[str, Any] | None = None, **options: Any
) -> BreakingWorker:
    """A worker that may pull from one store."""
    worker = BreakingWorker(ModuleSource(policy), **options)
    where = store if isinstance(store, str) else store.backend.url
    worker.pulls = PullSettings(allowed=(where,), **(settings or {}))
    return worker


def pull(store: VersionStore | str, target: int, *, base: int | None = None, run_id: str = RUN) -> dict[str, Any]:
    """The call that has a worker pull."""
    where = store if isinstance(store, str) else store.backend.url
    return PullRequest(where=where, run_id=run_id, base=base, target=target).as_dict()
