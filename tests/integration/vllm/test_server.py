"""A vLLM server over HTTP: the example, trainers that say what is wrong or damaged, and what the server holds."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deltacast.cli import app
from deltacast.delta.errors import InputError, RoundAbortedError, TransportError
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.engines.base import WorkerInitInfo
from deltacast.engines.clients import PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.client import VllmClient
from engine_setups import info
from vllm_offline import needs_gpus

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "vllm_http_sync.py"

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_the_example_proves_what_it_says() -> None:
    """It asserts that tokens and log-probabilities equal a fresh server's; here, only that it came to its end."""
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLE)], capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verified by 1 of 1 workers") == 3
    assert done.stdout.count("vllm.entrypoints.openai.api_server --model") == 2


@pytest.fixture(scope="module")
def served(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server that loaded its checkpoint itself."""
    model = tmp_path_factory.mktemp("served")
    example.make_model(model)
    with example.serving(model, *example.TRANSFER) as url:
        yield url, model


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


FAULTS: dict[str, tuple[str, torch.Tensor | None]] = {
    "a missing name": ("model.norm.weight", None),
    "an unknown name": ("model.extra.weight", torch.zeros(3)),
    "another shape": ("model.norm.weight", torch.zeros(64, 2, dtype=torch.bfloat16)),
    "another dtype": ("model.norm.weight", torch.zeros(128)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trainer_of_another_model_is_refused_and_the_server_goes_on(
    example: ModuleType, served: tuple[str, Path], fault: str
) -> None:
    """The trainer hears which parameter; label and tokens stay, and the server is running again."""
    url, model = served
    before, weights = example.complete(url, model), weights_of(model)
    name, tensor = FAULTS[fault]
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        SparseNcclTrainer.trainer_init(info(1), StateDictSource(weights), PausingClient(VllmClient([url])))
    assert example.label(url) == "default"
    assert example.complete(url, model) == before


def test_a_handshake_that_fails_is_an_error_of_the_client(example: ModuleType, served: tuple[str, Path]) -> None:
    """Nobody listens where the worker is sent; the server says 200, and the client what its worker said."""
    url, model = served
    nowhere = WorkerInitInfo(host="127.0.0.1", port=1, secret="00" * 16, run_id="run", timeout_s=1.0)
    client = PausingClient(VllmClient([url]))
    with pytest.raises(TransportError, match=r"init_weight_transfer_engine failed.*rank 0.*cannot reach the trainer"):
        client.init_transfer_engine(nowhere.as_dict())
    assert example.label(url) == "default"
    assert example.complete(url, model)


class Lying(SparseNcclTrainer):
    """Does something to the payload of the next round before it is proposed."""

    lies: ClassVar[list[Callable[[Any], None]]] = []

    def _publish_payload(self, payload: Any) -> Any:
        if self.lies:
            self.lies.pop()(payload)
        return super()._publish_payload(payload)


def of_another_base(payload: Any) -> None:
    payload.base_version = 7


def with_a_flipped_bit(payload: Any) -> None:
    groups = [bytearray(group) for group in payload._encoded.groups]
    groups[-1][len(groups[-1]) // 2] ^= 1
    payload._encoded = replace(payload._encoded, groups=[bytes(group) for group in groups])


def test_an_update_that_is_wrong_or_damaged_is_refused_and_the_old_version_is_served(
    example: ModuleType, served: tuple[str, Path]
) -> None:
    """The error says what was wrong, label and tokens are those of the version before; the next update is right."""
    url, model = served
    before, weights, client = example.complete(url, model), weights_of(model), VllmClient([url])
    trainer = Lying.trainer_init(info(1), StateDictSource(weights), PausingClient(client))
    try:
        weights["model.norm.weight"][3] = -2.0
        for lie, says in ((of_another_base, "wrong base.*found 7"), (with_a_flipped_bit, "ChecksumError")):
            Lying.lies.append(lie)
            with pytest.raises(RoundAbortedError, match=says):
                trainer.send_weights()
            [status] = client.status()
            assert (status.serves, status.version, example.label(url)) == (True, 0, "0")
            assert re.search(says, status.error)
            assert example.complete(url, model) == before
        report = trainer.send_weights()
        assert report.num_verified == 1
        assert report.times.paused_s is not None
        assert example.label(url) == str(report.target_version)
        assert example.complete(url, model) != before
    finally:
        trainer.shutdown()


def test_vllms_own_client_and_factory_do_as_well(example: ModuleType, served: tuple[str, Path]) -> None:
    """A trainer engine from vLLM's factory, over vLLM's HTTP client: seeded, updated and labelled."""
    from vllm.distributed.weight_transfer.base import ModuleSource as VllmModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from deltacast.engines.vllm.trainer import DeltacastTrainerInitInfo

    url, model = served
    policy = example.make_model(model.parent / "policy")
    init_info = DeltacastTrainerInitInfo(master_address="127.0.0.1", master_port=0, world_size=2, rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info, client=HTTPVLLMWeightSyncClient(url), source=VllmModuleSource(policy)
    )
    example.train(policy, 1)
    report = engine.send_weights()
    engine.shutdown()
    assert example.label(url) == str(report.target_version)
    [status] = VllmClient([url]).status()
    assert status.ranks[0]["digest"] == report.workers[0].digest
    policy.save_pretrained(model.parent / "policy")
    assert verify(model.parent / "policy", url, code=0)["b"]["version"] == report.target_version


def verify(checkpoint: Path, url: str, *, code: int) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["verify", str(checkpoint), url, "--json"])
    assert done.exit_code == code, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_verify_says_whether_a_server_holds_a_checkpoint(served: tuple[str, Path], tmp_path: Path) -> None:
    """After an update it holds the new one, and what differs from the one on disk is named."""
    url, model = served
    weights = weights_of(model)
    weights["lm_head.weight"][5, 7] = 3.0
    trainer = SparseNcclTrainer.trainer_init(info(1), StateDictSource(weights), PausingClient(VllmClient([url])))
    trainer.shutdown()
    changed = tmp_path / "changed.safetensors"
    save_file(weights, changed)
    assert verify(changed, url, code=0)["b"]["num_parameters"] == len(weights)
    [difference] = verify(model, url, code=1)["differences"]
    assert (difference["name"], difference["kind"]) == ("lm_head.weight", "bits")


@needs_gpus(2)
def test_two_ranks_of_tensor_parallelism_follow_and_keep_their_errors(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are workers of the trainer; after both failed they are still in step, and tokens are a fresh server's."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default wants two NUMA nodes
    model, two = tmp_path / "model", ("--tensor-parallel-size", "2")
    policy = example.make_model(model)
    with example.serving(model, "--load-format", "dummy", *two, *example.TRANSFER) as url:
        client = VllmClient([url])
        trainer = SparseNcclTrainer.trainer_init(info(2), ModuleSource(policy), PausingClient(client))
        example.train(policy, 1)
        assert trainer.send_weights().num_verified == 2
        nowhere = trainer.worker_init_info | {"port": 1}
        trainer.shutdown()
        with pytest.raises(TransportError, match=r"rank 0.*rank 1"):
            PausingClient(client).init_transfer_engine(nowhere)
        [status] = client.status()
        assert [rank["rank"] for rank in status.ranks] == [0, 1]
        assert (status.serves, status.version, example.label(url)) == (True, 1, "1")
        served = example.complete(url, model)
    policy.save_pretrained(model)
    with example.serving(model, *two) as url:
        assert example.complete(url, model) == served
