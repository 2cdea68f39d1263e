"""A vLLM server over HTTP: the example, and a trainer that comes with what the server does not have."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from deltacast.delta.errors import InputError, TransportError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import WorkerInitInfo
from deltacast.engines.clients import PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.client import VllmClient
from engine_setups import info

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
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_http_sync", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def served(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server that loaded its checkpoint itself."""
    model = tmp_path_factory.mktemp("served")
    example.make_model(model)
    with example.serving(model, *example.TRANSFER) as url:
        yield url, model


def test_a_trainer_of_another_model_is_refused_and_the_server_goes_on(
    example: ModuleType, served: tuple[str, Path]
) -> None:
    """The trainer hears which parameter; label and tokens stay, and the server is running again."""
    url, model = served
    before = example.complete(url, model)
    other = example.make_model(model.parent / "other")
    del other.model.norm
    with pytest.raises(InputError, match=r"model\.norm\.weight"):
        SparseNcclTrainer.trainer_init(info(1), ModuleSource(other), PausingClient(VllmClient([url])))
    assert example.label(url) == "default"
    assert example.complete(url, model) == before


def test_a_handshake_that_fails_is_an_error_of_the_client(example: ModuleType, served: tuple[str, Path]) -> None:
    """Nobody listens where the worker is sent; the server says 200, and the client what its worker said."""
    url, model = served
    nowhere = WorkerInitInfo(host="127.0.0.1", port=1, secret="00" * 16, run_id="run", timeout_s=1.0)
    client = PausingClient(VllmClient([url]))
    with pytest.raises(TransportError, match=r"the handshake failed.*rank 0"):
        client.init_transfer_engine(nowhere.as_dict())
    assert example.label(url) == "default"
    assert example.complete(url, model)


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
