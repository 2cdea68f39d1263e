"""Ranks over which vLLM cuts, pads and repeats the weights of a model: each writes what it holds of an update."""

# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import digest_checkpoint
from deltacast.engines.vllm.extension import EXTENSION
from deltacast.engines.vllm.server_digest import HeldPart, compare_parts
from vllm_models import ON_GPU, make_checkpoint, weights_of, with_weights
from vllm_offline import change, digest_of, fresh_answers, needs_gpus, offline, training

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

EXTENSIONS = {"reload": EXTENSION, "shards": "vllm_plain.PlainExtension"}
"""By the strategy that comes of it: weights packed as on CPUs, or plain as on GPUs."""


@pytest.fixture(scope="module", autouse=True)
def quick_ranks() -> Iterator[None]:
    """Fork ranks from a process that has imported vLLM: two start in 3 s instead of 15, four in 4 instead of 40.

    What vLLM leaves behind of them is removed: sockets, rendezvous files, and shared memory that has their names.
    """
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker"])
    with (
        tempfile.TemporaryDirectory(prefix="vllm-") as folder,  # pytest's have names too long for sockets
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default wants a NUMA node for each rank
        patch.setenv("VLLM_RPC_BASE_PATH", folder)
        server: Any = forkserver._forkserver
        server._stop()  # whoever is forked has the environment that it was started in
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        patch.setattr(multiproc_executor, "get_file_store_init_method", lambda: f"file://{folder}/{uuid4().hex}")
        yield
        for meeting in Path(folder).iterdir():
            for left in Path("/dev/shm").glob(f"{meeting.name}*"):
                left.unlink()
        server._stop()


@pytest.mark.parametrize("strategy", ["shards"] if ON_GPU else EXTENSIONS)
@pytest.mark.parametrize(
    ("num_ranks", "tied"),
    [pytest.param(2, True, marks=needs_gpus(2)), pytest.param(4, False, marks=needs_gpus(4))],
)
def test_ranks_give_what_a_fresh_engine_gives(tmp_path: Path, num_ranks: int, tied: bool, strategy: str) -> None:
    """Experts, a vocabulary that does not divide, tied embeddings, and KV heads that two of four ranks share."""
    changes = {"tie_word_embeddings": tied, "vocab_size": 499, "moe_intermediate_size": 128}
    base = make_checkpoint(tmp_path / "base", "qwen3_moe", 0, **changes)
    weights = weights_of(base)
    options = {"tensor_parallel_size": num_ranks, "worker_extension_cls": EXTENSIONS[strategy]}
    loaded = {"load_format": "dummy" if tied else "auto"}  # each once
    with offline(base, **loaded, **options) as engine, training(weights, engine, num_workers=num_ranks) as trainer:
        served = [engine.answers()]
        for seed, touched in enumerate((weights, ["model.embed_tokens.weight"])):
            change(weights, touched, seed)
            assert trainer.send_weights().num_verified == num_ranks
            served.append(engine.answers())
        statuses = engine.llm.collective_rpc("deltacast_status", args=("",))
        parts = [
            HeldPart.of(rank, row)
            for rank, said in enumerate(engine.llm.collective_rpc("deltacast_parts", args=("",)))
            for row in said["parts"]
        ]
    assert [(status["rank"], status["strategy"]) for status in statuses] == [(n, strategy) for n in range(num_ranks)]
    assert {status["digest"] for status in statuses} == {digest_of(weights)}
    new = with_weights(tmp_path / "new", base, weights)
    assert compare_parts(digest_checkpoint(CheckpointSource(new)), parts) == []
    assert served[0] != served[1] != served[2] == fresh_answers(new, **options)
