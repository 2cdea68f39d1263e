"""Worker engines in processes of their own, driven over pipes; and the small model that they serve.

Targets of spawned processes must be importable by a child, hence a module here and not in a test.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import torch
from torch import nn

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import Durability, TrainerInitInfo, WorkerInitInfo
from deltacast.engines.report import WorkerReport
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.store.version_store import VersionStore

REPLY_S = 30.0
TRAINER_DIES_AT = (
    "idle", "proposed", "all ready", "sending", "sent", "all voted", "one told", "all told", "settled"
)  # fmt: skip
Die: TypeAlias = tuple[str, int, signal.Signals]
"""The step, the round, and how."""
NEVER: Final[Die] = ("", 0, signal.SIGKILL)
DIE_AT = ("ready", "payload", "received", "written", "voted", "decided", "acked")


class Policy(nn.Module):
    """A few parameters of several dtypes, a tied pair, a buffer, a 0-d and an empty one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.embed = make(60, 32)
        self.head = self.embed
        self.up = make(32, 96)
        self.router = make(32, 4, dtype=torch.float32)
        self.scale = make()
        self.nothing = make(0, 8)
        self.register_buffer("bias", torch.randn(16, generator=generator))

    def step(self, seed: int, share: float = 0.02) -> None:
        """Move a share of every tensor's elements, in place."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (self.embed, self.up, self.router, self.scale, self.get_buffer("bias")):
                chosen = (torch.rand(tensor.shape, generator=generator) < share).to(tensor.device)
                tensor.add_(chosen * tensor.abs() * 0.05)


def weights_of(module: nn.Module) -> dict[str, bytes]:
    """Return every entry of the state dict as raw bytes."""
    return {
        name: tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


class DyingWorker(SparseNcclWorker):
    """Kill (or freeze) the own process at one of `DIE_AT` in round `at_round`."""

    def __init__(self, module: nn.Module, device: str, step: str, at_round: int, how: signal.Signals) -> None:
        super().__init__(ModuleSource(module), device=device)
        self._die_step, self._die_round, self._die_how = step, at_round, how

    def _maybe_die(self, step: str, number: int) -> None:
        if step == self._die_step and number == self._die_round:
            os.kill(os.getpid(), self._die_how)

    def _prepare(self, current: Any, header: bytes) -> str:
        self._maybe_die("ready", current.propose.key.round)
        return super()._prepare(current, header)

    def _receive_payload(self, current: Any) -> Any:
        self._maybe_die("payload", current.propose.key.round)
        return super()._receive_payload(current)

    def _vote(self, current: Any, info: WorkerInitInfo) -> Any:
        self._maybe_die("received", current.propose.key.round)
        verdict = super()._vote(current, info)
        self._maybe_die("written", current.propose.key.round)
        return verdict

    def _await_decision(self, key: Any, deadline: Any) -> Any:
        self._maybe_die("voted", key.round)
        decision = super()._await_decision(key, deadline)
        self._maybe_die("decided", key.round)
        return decision

    def _send(self, message: Any, info: WorkerInitInfo) -> None:
        super()._send(message, info)
        if message.kind == "ack":
            self._maybe_die("acked", message.key.round)


class DyingTrainer(SparseNcclTrainer):
    """Kill (or freeze) the own process at one of `TRAINER_DIES_AT` in round `at_round`."""

    die: Die = NEVER

    def _maybe_die(self, step: str) -> None:
        wanted, at_round, how = self.die
        if step == wanted and self._round_number == at_round:
            os.kill(os.getpid(), how)

    def _propose(self, payload: Any, receivers: Any, outcome: Any) -> None:
        self._maybe_die("idle")
        tell = self._workers.tell

        def tell_and_die(*told: Any) -> None:
            tell(*told)
            self._maybe_die("proposed")

        self._workers.tell = tell_and_die  # type: ignore[assignment, method-assign]
        super()._propose(payload, receivers, outcome)
        self._workers.tell = tell  # type: ignore[method-assign]

    def _send_payload(self, payload: Any, outcome: Any) -> None:
        self._maybe_die("all ready")
        super()._send_payload(payload, outcome)

    def _watch_payload(self, task: Any, outcome: Any) -> None:
        self._maybe_die("sending")
        super()._watch_payload(task, outcome)

    def _hear_verdicts(self, payload: Any, outcome: Any) -> None:
        self._maybe_die("sent")
        super()._hear_verdicts(payload, outcome)

    def _settle(self, payload: Any, outcome: Any) -> None:
        self._maybe_die("all voted")
        tell = self._workers.tell

        def tell_one_by_one(members: Any, *told: Any) -> None:
            for member in members:
                tell([member], *told)
                self._maybe_die("one told")
            self._maybe_die("all told")

        self._workers.tell = tell_one_by_one  # type: ignore[assignment, method-assign]
        super()._settle(payload, outcome)
        self._workers.tell = tell  # type: ignore[method-assign]
        self._maybe_die("settled")


class NoClient:
    """A client of workers that somebody else drives."""

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """They are told already."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """They are told already."""

    def finish_weight_update(self) -> None:
        """Nothing to finish."""


def train(
    pipe: Connection,
    info: TrainerInitInfo,
    die: Die,
    store: str = "",
    durability: Durability = "after_commit",
) -> None:
    """Run a trainer over the policy of seed 0; each command is one optimizer step and one round."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if store:
        info = replace(info, store=VersionStore.open(store), durability=durability)
    DyingTrainer.die = die
    policy, client = Policy(0).to(info.device), NoClient()
    client.init_transfer_engine = pipe.send  # type: ignore[assignment, method-assign]
    trainer = DyingTrainer.trainer_init(info, ModuleSource(policy), client)
    pipe.send("admitted")
    while True:
        try:
            policy.step(*pipe.recv())
            pipe.send(("ok", trainer.send_weights().target_version))
        except (EOFError, ConnectionResetError):
            break
        except Exception as err:  # noqa: BLE001 - a process's boundary: the test sees it
            pipe.send(("error", type(err).__name__, str(err), traceback.format_exc()))
    trainer.shutdown()


def serve(pipe: Connection, seed: int, die: Die, device: str, engine: type[DyingWorker]) -> None:
    """Run one worker, answering commands until the pipe closes."""
    faulthandler.enable()
    torch.set_num_threads(1)
    module = Policy(seed).to(device)
    worker = engine(module, device, *die)
    answer_commands(pipe, lambda command, *arguments: _answer(worker, module, command, arguments))
    worker.shutdown()


def answer_commands(pipe: Connection, answer: Callable[..., object]) -> None:
    """Answer commands until the pipe closes; what is raised is the answer too."""
    while True:
        try:
            command = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            pipe.send(("ok", answer(*command)))
        except Exception as err:  # noqa: BLE001 - a process's boundary: the test sees it
            pipe.send(("error", type(err).__name__, str(err), traceback.format_exc()))


def _answer(worker: SparseNcclWorker, module: Policy, command: str, arguments: Sequence[Any]) -> object:
    if command == "init":
        worker.init_transfer_engine(arguments[0])
        return worker.status
    if command == "receive":
        return worker.receive_weights(*arguments)
    if command == "flip":
        name, place, bit = arguments
        tensor = module.state_dict()[name].view(-1)
        tensor.view(torch.uint8)[place] ^= 1 << bit
        return None
    if command == "audit":
        return [damage.parameter for damage in worker.state.audit()]
    return weights_of(module) if command == "weights" else worker.status


class EngineProcess:
    """One process with an engine, and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["deltacast.engines.sparse_nccl"])  # so that workers start at once
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, *command: Any) -> None:
        """Send a command; its reply must be taken later. A dead worker hears nothing."""
        try:
            self._pipe.send(command)
        except (BrokenPipeError, ConnectionResetError):
            return

    def hear(self, timeout_s: float = REPLY_S) -> Any:
        """Return what the process has to say."""
        assert self._pipe.poll(timeout_s), f"process {self.pid} did not answer"
        return self._pipe.recv()

    def speaks(self, timeout_s: float) -> bool:
        """Wait until there is something to hear, or until it is certain that there never will be."""
        return self._pipe.poll(timeout_s)

    @property
    def frozen(self) -> bool:
        """Whether the process is stopped by a signal, as the kernel says."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except FileNotFoundError:  # it has ended
            return False

    def reply(self, timeout_s: float = REPLY_S) -> Any:
        """Return the answer to a command; raises what the engine raised, as an AssertionError with its traceback."""
        kind, *rest = self.hear(timeout_s)
        if kind == "error":
            raise WorkerError(*rest)
        return rest[0]

    def ask(self, *command: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(*command)
        return self.reply()

    def exit_code(self) -> int | None:
        """Wait for the process to end and return its exit code."""
        self._process.join(REPLY_S)
        return self._process.exitcode

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have just ended
            os.kill(self.pid, number)

    def stop(self) -> None:
        self._pipe.close()
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._process.close()


class WorkerProcess(EngineProcess):
    """A worker."""

    engine: ClassVar[type[DyingWorker]] = DyingWorker

    def __init__(self, seed: int, die: Die | None = None, device: str = "cpu") -> None:
        super().__init__(serve, seed, die or NEVER, device, self.engine)

    @staticmethod
    def gpu(number: int) -> int:
        """Return the GPU of the worker of this number; the trainer's is 0."""
        return number + 1


class TrainerProcess(EngineProcess):
    """A trainer of `info` that dies, or freezes, at one of `TRAINER_DIES_AT` of a round.

    It says its worker init info first; then `step` makes it publish. With a store (where it is, and when a version is
    in it) it opens that.
    """

    def __init__(self, info: TrainerInitInfo, step: str, at_round: int, how: signal.Signals, *store: str) -> None:
        super().__init__(train, info, (step, at_round, how), *store)


class WorkerError(AssertionError):
    """What an engine raised."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class PipeClient:
    """A `Client` over the pipes: every call returns at once, replies are taken by the test."""

    def __init__(self, workers: list[WorkerProcess]) -> None:
        self.workers = workers

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.tell("init", init_info)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.tell("receive", update_info)

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def reports(self) -> list[WorkerReport]:
        return [worker.reply() for worker in self.workers]


@contextmanager
def worker_processes(
    *seeds: int, die: dict[int, Die] | None = None, device: str = "cpu", process: type[WorkerProcess] = WorkerProcess
) -> Iterator[PipeClient]:
    """Start workers with these model seeds; `die` tells which of them dies where. None is left afterwards.

    With device `cuda` each takes the GPU that its process says.
    """
    workers: list[WorkerProcess] = []
    try:
        for number, seed in enumerate(seeds):
            place = device if device == "cpu" else f"{device}:{process.gpu(number)}"
            workers.append(process(seed, (die or {}).get(number), place))
        yield PipeClient(workers)
    finally:
        for worker in workers:
            worker.stop()
