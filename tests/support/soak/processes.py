"""What runs in the processes of the soak: a worker and a trainer that can be told where to die, freeze or break off."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from deltacast.delta.errors import RoundAbortedError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import Durability, TrainerInitInfo
from deltacast.store.version_store import VersionStore
from engine_processes import DyingTrainer, DyingWorker, NoClient, weights_of
from soak.model import SoakModel, Weights, load

Arm = tuple[str, signal.Signals | None]
"""A step of `DIE_AT` or `TRAINER_DIES_AT` and what happens there, once; None: the payload group is aborted."""


class ArmedWorker(DyingWorker):
    """A worker that dies, freezes or breaks its group at the next step that it was armed for."""

    def __init__(self, module: SoakModel) -> None:
        super().__init__(module, "cpu", "", 0, signal.SIGKILL)
        self.arm: Arm = ("", None)

    def _maybe_die(self, step: str, number: int) -> None:
        armed, how = self.arm
        if step == armed:
            self.arm = ("", None)
            _happen(how, self._group)


class ArmedTrainer(DyingTrainer):
    """Likewise a trainer."""

    arm: Arm = ("", None)

    def _maybe_die(self, step: str) -> None:
        armed, how = self.arm
        if step == armed:
            self.arm = ("", None)
            _happen(how, self._workers.group)


class DriverClient(NoClient):
    """A client that has the driver tell the workers."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._pipe.send(("init", init_info))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._pipe.send(("update", update_info))


def _happen(how: signal.Signals | None, group: Any) -> None:
    if how is not None:
        os.kill(os.getpid(), how)
    elif group is not None:
        group.abort()


def serve(pipe: Connection, weights: Weights) -> None:
    """Run a worker that starts with these weights, answering commands until the pipe closes or it leaves."""
    faulthandler.enable()
    torch.set_num_threads(1)
    module = SoakModel()
    load(module, weights)
    worker = ArmedWorker(module)
    command = ""
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the driver has ended
        while command != "leave":
            command, *arguments = pipe.recv()
            try:
                answer: tuple[Any, ...] = "ok", _answer(worker, module, command, arguments)
            except Exception as err:  # noqa: BLE001 - a process's boundary: the driver sees it
                answer = "error", type(err).__name__, str(err), traceback.format_exc()
            pipe.send(answer)
    worker.shutdown()


def _answer(worker: ArmedWorker, module: SoakModel, command: str, arguments: list[Any]) -> object:
    if command == "receive":
        return worker.receive_weights(arguments[0])
    if command == "init":
        worker.init_transfer_engine(arguments[0])
    elif command == "arm":
        worker.arm = arguments[0]
    elif command == "flip":
        name, place, bit = arguments
        module.state_dict()[name].view(-1).view(torch.uint8)[place] ^= 1 << bit
    elif command == "leave":
        worker.shutdown()
    return worker.status, weights_of(module)


def train(pipe: Connection, info: TrainerInitInfo, weights: Weights, store: str, durability: Durability) -> None:
    """Run a trainer that starts with these weights; each command is a round with the weights that it brings.

    It says `("init", info)` and `("update", info)` when workers must be told, `("admitted", run, epoch, version)` once,
    and then answers: a report, an error with the report if there is one, or None to `shutdown`, after which it ends.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    if store:
        info = replace(info, store=VersionStore.open(store), durability=durability)
    module = SoakModel()
    load(module, weights)
    trainer = ArmedTrainer.trainer_init(info, ModuleSource(module), DriverClient(pipe))
    pipe.send(("admitted", trainer._info.run_id, trainer._info.epoch, trainer.baseline.version))
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while _train_on(pipe, trainer, module):
            pass
    trainer.shutdown()
    if info.store is not None:
        info.store.close()
    with suppress(BrokenPipeError):
        pipe.send(("ok", None))


def _train_on(pipe: Connection, trainer: ArmedTrainer, module: SoakModel) -> bool:
    """Publish what the next command brings; False if it is to end."""
    command, *arguments = pipe.recv()
    if command == "shutdown":
        return False
    weights, step, trainer.arm = arguments
    load(module, weights)
    try:
        answer: tuple[Any, ...] = "ok", trainer.send_weights(optimizer_step=step)
    except Exception as err:  # noqa: BLE001 - likewise
        report = err.report if isinstance(err, RoundAbortedError) else None
        answer = "error", type(err).__name__, str(err), traceback.format_exc(), report
    pipe.send(answer)
    return True
