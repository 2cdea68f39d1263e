"""What vLLM calls at start, in each of its processes, through the entry point group `vllm.general_plugins`."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Final

__all__ = ["BACKEND", "register"]

BACKEND: Final = "deltacast"
"""The backend's name in `--weight-transfer-config`."""


def register() -> None:
    """Make the backend known to vLLM; does nothing where vLLM is absent, or where it is known already.

    Imports neither torch nor the engine: vLLM does, in the workers of a server that asks for this backend.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ModuleNotFoundError as err:
        if err.name is None or err.name.partition(".")[0] != "vllm":
            raise
        return
    try:
        Factory.register_engine(BACKEND, "deltacast.engines.vllm.engine", "DeltacastEngine")
    except ValueError:  # vLLM has no other way to ask; it calls plugins once in each process, tests more often
        return
