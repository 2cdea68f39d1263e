"""A vLLM server that generates while an update arrives, and is paused only once it is staged."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.clients import PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.client import ServerStatus, VllmClient
from engine_setups import info

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SLOWLY = {"max_send_bytes_per_s": 4000.0}
"""A payload of 12 KB takes seconds."""


class Asking(VllmClient):
    """Has a server complete prompts while it receives, and once it has staged; keeps label and answers by its state."""

    def __init__(self, url: str, model: Path, example: ModuleType) -> None:
        super().__init__([url])
        self._url, self._model, self._example = url, model, example
        self.seen: dict[str, Any] = {}

    def status(self) -> tuple[ServerStatus, ...]:
        statuses = super().status()
        for state in statuses[0].staging - {"over", *self.seen}:
            self.seen[state] = self._example.label(self._url), self._example.complete(self._url, self._model)
        return statuses


def test_a_server_generates_while_an_update_arrives(example: ModuleType, tmp_path: Path) -> None:
    """With the old weights under the old label; the pause is short; then it holds the new ones."""
    model = tmp_path / "model"
    policy = example.make_model(model)
    with example.serving(model, *example.TRANSFER) as url:
        client = Asking(url, model, example)
        trainer = SparseNcclTrainer.trainer_init(info(1, **SLOWLY), ModuleSource(policy), PausingClient(client))
        before = example.label(url), example.complete(url, model)
        example.train(policy, 1)
        report = trainer.send_weights()
        assert client.seen["receiving"] == before
        assert client.seen["staged"] == before
        assert report.times.paused_s is not None
        assert report.times.paused_s < report.times.total_s / 3
        assert example.label(url) == "1"
        [status] = client.status()
        assert status.ranks[0]["digest"] == trainer.baseline.digest == report.workers[0].digest
        after = example.complete(url, model)
        trainer.shutdown()
    policy.save_pretrained(model)
    with example.serving(model) as url:
        assert example.complete(url, model) == after != before[1]
