"""A server of two tensor parallel ranks that write where vLLM runs: strategy `shards`, over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from deltacast.cli import app
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.clients import PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.client import VllmClient
from engine_setups import info
from vllm_offline import needs_gpus

ROOT = Path(__file__).resolve().parents[3]
TWO_RANKS = ("--tensor-parallel-size", "2", "--worker-extension-cls", "vllm_plain.PlainExtension")
DELTACAST = ("--weight-transfer-config", '{"backend": "deltacast"}')

pytestmark = [pytest.mark.timeout(300), needs_gpus(2), pytest.mark.filterwarnings("ignore")]


@contextmanager
def two_ranks(example: ModuleType, model: Path, *options: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"), prepend=os.pathsep)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default wants a NUMA node for each rank
        with example.serving(model, *TWO_RANKS, *options) as url:
            yield url


def test_two_ranks_prove_together_what_each_wrote(example: ModuleType, tmp_path: Path) -> None:
    """A seed over dummy weights and two rounds: tokens and bits are a fresh server's."""
    model = tmp_path / "model"
    policy = example.make_model(model)
    with two_ranks(example, model, "--load-format", "dummy", *DELTACAST) as url:
        client = VllmClient([url])
        trainer = SparseNcclTrainer.trainer_init(info(2), ModuleSource(policy), PausingClient(client))
        [status] = client.status()
        assert [rank["strategy"] for rank in status.ranks] == ["shards", "shards"]
        example.train(policy, 1)
        assert trainer.send_weights().num_verified == 2
        example.train(policy, 2)
        report = trainer.send_weights()
        assert (report.num_verified, report.wire, example.label(url)) == (2, "container", "2")
        [status] = client.status()
        assert {rank["digest"] for rank in status.ranks} == {trainer.baseline.digest}
        policy.save_pretrained(model)
        found = CliRunner().invoke(app, ["verify", str(model), url])
        assert found.exit_code == 0, found.output
        served = example.complete(url, model)
        trainer.shutdown()
    with two_ranks(example, model) as url:
        assert example.complete(url, model) == served
