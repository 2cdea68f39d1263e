"""What vLLM calls at start, in each of its processes, through the entry point group `vllm.general_plugins`."""

# pyright: reportMissingImports=false

from __future__ import annotations

from contextlib import suppress
from typing import Final

__all__ = ["BACKEND", "register"]

BACKEND: Final = "deltacast"
"""The backend's name in `--weight-transfer-config`."""


def register() -> None:
    """Make the backend known to vLLM, on both sides; does nothing where vLLM is absent, or where it is known already.

    Imports neither torch nor the engines: vLLM does, in the workers of a server, or a trainer, that asks for one.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Workers
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory as Trainers
    except ModuleNotFoundError as err:
        if err.name is None or err.name.partition(".")[0] != "vllm":
            raise
        return
    with suppress(ValueError):  # vLLM has no other way to ask; it calls plugins once in each process, tests more often
        Workers.register_engine(BACKEND, "deltacast.engines.vllm.engine", "DeltacastEngine")
    with suppress(ValueError):
        Trainers.register_engine(BACKEND, "deltacast.engines.vllm.trainer", "DeltacastTrainerEngine")
