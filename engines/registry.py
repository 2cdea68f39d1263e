"""The one list of engines, by name. Nothing is imported before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Final

from deltacast.delta.errors import InputError
from deltacast.engines.base import TrainerEngine, WorkerEngine

__all__ = ["engine_names", "register_engine", "trainer_engine", "worker_engine"]


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    trainer: str
    worker: str


_ENGINES: Final[dict[str, _Entry]] = {
    "ipc": _Entry("deltacast.engines.ipc", "IpcTrainer", "IpcWorker"),
    "sparse_nccl": _Entry("deltacast.engines.sparse_nccl", "SparseNcclTrainer", "SparseNcclWorker"),
}


def register_engine(name: str, module: str, trainer: str, worker: str) -> None:
    """Add an engine of your own under a new name; the module is imported on first use.

    Raises:
        InputError: the name is taken by another engine. Registering the same one twice is fine.
    """
    entry = _Entry(module, trainer, worker)
    if _ENGINES.setdefault(name, entry) != entry:
        raise InputError(f"engine name {name!r} is taken", found=_ENGINES[name].module)


def engine_names() -> list[str]:
    """Return the names there are."""
    return sorted(_ENGINES)


def trainer_engine(name: str) -> type[TrainerEngine]:
    """Return a trainer engine class by name.

    Raises:
        InputError: no such engine.
    """
    found: type[TrainerEngine] = getattr(import_module(_entry(name).module), _entry(name).trainer)
    return found


def worker_engine(name: str) -> type[WorkerEngine]:
    """Return a worker engine class by name.

    Raises:
        InputError: no such engine.
    """
    found: type[WorkerEngine] = getattr(import_module(_entry(name).module), _entry(name).worker)
    return found


def _entry(name: str) -> _Entry:
    if name not in _ENGINES:
        raise InputError("unknown engine", expected=f"one of {', '.join(engine_names())}", found=repr(name))
    return _ENGINES[name]
