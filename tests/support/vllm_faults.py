"""Faults inside the workers of a vLLM server, asked for over `/collective_rpc`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import torch

from deltacast.engines.pulling import PullSettings
from deltacast.engines.vllm.extension import DeltacastExtension

__all__ = ["FAULTY", "FaultyExtension"]

FAULTY: Final = "vllm_faults.FaultyExtension"
"""What to give to `--worker-extension-cls`; the server must find this folder in its `PYTHONPATH`."""


class FaultyExtension(DeltacastExtension):
    """Deltacast's, in which a reload can be made to fail half way, and a pull before it writes."""

    rank: int
    get_model: Any

    def forget_stores(self, rank: int) -> None:
        """Have one rank not allow any store."""
        if self.rank == rank:
            self.weight_transfer_engine._worker.pulls = PullSettings()

    def fail_next_load(self, rank: int, how: str) -> None:
        """Have one rank's next load `raise`, or end its process (`exit`), after it was given some tensors."""
        if self.rank != rank:
            return
        model = self.get_model()
        load = model.load_weights

        def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            model.load_weights = load
            load(islice(weights, 3))
            if how == "exit":
                os._exit(1)
            raise RuntimeError("out of memory, say")

        model.load_weights = failing
