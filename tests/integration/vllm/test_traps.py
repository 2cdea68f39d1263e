"""What goes wrong silently, or for good, in a vLLM whose weights are changed: real engines, real servers.

The other files here have: tied weights, one member of a fused module, single kinds of layers, NaN and infinities
(test_engine.py, test_direct.py), experts (test_moe.py), calls that fail on every rank (test_server.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from deltacast.delta.bits import numpy_words
from deltacast.delta.errors import RoundAbortedError, TransportError
from deltacast.delta.module_source import StateDictSource
from deltacast.engines.base import Client
from deltacast.engines.clients import PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.client import VllmClient
from engine_setups import info
from vllm_faults import FAULTY
from vllm_models import bits_of, weights_of, with_weights
from vllm_offline import Offline, Weights, change, digest_of, fresh_answers, offline, packs_weights, training

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[1, 2, 3], list(range(7, 47)), [5, 9] * 70]  # those of vllm_offline.py

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


class Served(NamedTuple):
    """A server, and the checkpoint that it was started with."""

    url: str
    model: Path

    def tokens(self) -> list[list[int]]:
        """Greedy tokens, one prompt at a time."""
        greedy = {"model": str(self.model), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        bodies = [greedy | {"prompt": prompt, "return_token_ids": True} for prompt in PROMPTS]
        answers = [httpx.post(f"{self.url}/v1/completions", json=body, timeout=120) for body in bodies]
        return [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in answers]

    def fail_next_load(self, rank: int, how: str) -> None:
        body = {"method": "fail_next_load", "args": [rank, how]}
        httpx.post(f"{self.url}/collective_rpc", json=body, timeout=60).raise_for_status()

    def label(self) -> str:
        return str(httpx.get(f"{self.url}/weight_info", timeout=30).raise_for_status().json()["weight_version"])


@contextmanager
def serving(example: ModuleType, model: Path, *options: str) -> Iterator[Served]:
    """Serve a checkpoint with workers that can be made to fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"), prepend=os.pathsep)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default wants a NUMA node for each rank
        backend = ("--weight-transfer-config", '{"backend": "deltacast"}', "--worker-extension-cls", FAULTY)
        with example.serving(model, *backend, *options) as url:
            yield Served(url, model)


@contextmanager
def training_over_http(weights: Weights, client: Client, num_ranks: int) -> Iterator[SparseNcclTrainer]:
    trainer = SparseNcclTrainer.trainer_init(info(num_ranks), StateDictSource(weights), client)
    try:
        yield trainer
    finally:
        trainer.shutdown()


def fresh_tokens(folder: Path) -> list[list[int]]:
    """What an engine says that has nothing to do with deltacast."""
    return [tokens for tokens, _ in fresh_answers(folder)][::2]  # each prompt is there twice


@pytest.fixture(scope="module")
def base(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    example.make_model(folder)
    return folder


@packs_weights
def test_a_module_whose_members_come_in_different_chunks_is_loaded_whole(base: Path, tmp_path: Path) -> None:
    """In vLLM a module can be loaded once per update; here k and v, four parameters apart, are one update."""
    weights, served, checkpoints = weights_of(base), [], []
    with offline(base) as engine, training(weights, engine, wire="raw", chunk_bytes=1 << 19) as trainer:
        for step, part in enumerate(("self_attn", "lm_head", "1.mlp.up_proj")):
            change(weights, (name for name in weights if part in name), step)
            trainer.send_weights()
            served.append(engine.answers())
            checkpoints.append(with_weights(tmp_path / part, base, weights))
    assert served == [fresh_answers(checkpoint) for checkpoint in checkpoints]


def running_bits(engine: Offline) -> dict[str, bytes]:
    """All tensors of the running model, and what its packed weights, which are no tensors, make of ones and zeros."""
    packed: dict[str, bytes] = {}
    modules: dict[str, Any] = dict(engine.model.named_modules())
    for name, module in modules.items():
        if hasattr(module, "cpu_linear"):
            ones = torch.eye(module.input_size_per_partition, dtype=torch.bfloat16)
            packed[f"{name} packed"] = numpy_words(module.cpu_linear(ones, module.weight, None)).tobytes()
    return bits_of(engine.model) | packed


def test_special_values_get_into_packed_weights(base: Path, tmp_path: Path) -> None:
    """VLLM's own sparse loader takes a NaN for "unchanged"; here every kind of weight gets some, -0.0 and infinity."""
    weights = weights_of(base)
    words = torch.tensor([0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001], dtype=torch.int32).to(torch.int16)
    with offline(base) as engine, training(weights, engine) as trainer:
        before = running_bits(engine)
        for tensor in weights.values():
            tensor.view(torch.int16).view(-1)[3:9] = words
        trainer.send_weights()
        held = running_bits(engine)
    with offline(with_weights(tmp_path / "special", base, weights), weight_transfer_config=None) as fresh:
        assert held == running_bits(fresh)
    assert all(held[name] != bits for name, bits in before.items() if name.endswith(("packed", "norm.weight")))


def test_what_was_computed_before_an_update_is_not_used_after_it(
    example: ModuleType, base: Path, tmp_path: Path
) -> None:
    """Without a pause vLLM would answer a long prompt from the prefix cache, with keys and values of old weights."""
    weights = weights_of(base)
    with serving(example, base) as server:
        client = VllmClient([server.url])
        before = server.tokens()
        with training_over_http(weights, client, 1) as trainer:
            change(weights, weights, 1)
            trainer.send_weights()
            after = server.tokens()
            client.start_weight_update()  # vLLM's own session: it may last, and requests come meanwhile
            assert server.tokens() == after
            client.finish_weight_update()
            assert server.label() == "1"
    assert after == fresh_tokens(with_weights(tmp_path / "new", base, weights))
    assert all(old != new for old, new in zip(before, after, strict=True))


@pytest.fixture(scope="module")
def pair(example: ModuleType, base: Path) -> Iterator[Served]:
    """Two ranks; nothing that is theirs is left where shared memory lies."""
    with serving(example, base, "--tensor-parallel-size", "2") as server:
        yield server
    [log] = base.glob(f"server-{server.url.rpartition(':')[2]}.log")
    names = set(re.findall(r"vllm_dist_[0-9a-f]{32}", log.read_text()))
    assert names
    assert not [left for name in names for left in Path("/dev/shm").glob(f"{name}*")]


@packs_weights
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_alone_leaves_both_in_step_at_the_old_version(pair: Served, base: Path, rank: int) -> None:
    """Raised into vLLM, its error would pair later answers with wrong questions, or leave two versions served."""
    weights = weights_of(base)
    before = pair.tokens()
    client = VllmClient([pair.url])
    with training_over_http(weights, PausingClient(client), 2) as trainer:
        label = pair.label()
        pair.fail_next_load(rank, "raise")
        change(weights, weights, rank)
        with pytest.raises(RoundAbortedError, match="out of memory, say"):
            trainer.send_weights()
        [status] = client.status()  # it would be an error of the status if a rank answered another question
        assert status.serves
        assert {one["digest"] for one in status.ranks} == {digest_of(weights_of(base))}
        assert all("out of memory, say" in one["error"] for one in status.ranks)  # the other one was told
        assert pair.label() == label
        assert pair.tokens() == before
        trainer.send_weights()
        [status] = client.status()
        assert {one["digest"] for one in status.ranks} == {digest_of(weights)}
        assert pair.tokens() != before
        with torch.no_grad():  # back, so that the next trainer comes to what it knows
            for name, tensor in weights_of(base).items():
                weights[name].copy_(tensor)
        trainer.send_weights()
        assert pair.tokens() == before


@packs_weights
def test_a_rank_that_dies_in_an_update_ends_its_server_and_not_the_trainer(pair: Served, base: Path) -> None:
    """The trainer hears of it in time, and knows nobody any more; the server answers no request."""
    weights = weights_of(base)
    with training_over_http(weights, PausingClient(VllmClient([pair.url], connect_timeout_s=1.0)), 2) as trainer:
        pair.fail_next_load(1, "exit")
        change(weights, weights, 1)
        with pytest.raises((RoundAbortedError, TransportError)):
            trainer.send_weights()
        with pytest.raises(httpx.HTTPError):
            pair.tokens()
