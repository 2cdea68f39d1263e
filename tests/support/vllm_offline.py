"""vLLM engines in this process, with deltacast as their weight transfer backend, and a client that calls them."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import nn

from deltacast.delta.module_source import StateDictSource
from deltacast.delta.state import WeightState
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from engine_setups import info
from vllm_models import ON_GPU

Weights: TypeAlias = dict[str, torch.Tensor]

STRATEGIES: Final = ("direct",) if ON_GPU else ("reload", "direct")
"""Of servers of one rank that do not quantise: on CPUs the first is vLLM's as it is, the other with `plain_layouts`."""

packs_weights: Final = pytest.mark.skipif(ON_GPU, reason="vLLM packs weights, and so reloads them, on CPUs only")

_PROMPTS: Final = [[1, 2, 3], list(range(7, 47)), [5, 9] * 70]  # the last one fills a block of the prefix cache


class Offline:
    """A vLLM `LLM`; a `Client` as well."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(folder),
            **{
                "max_model_len": 256,
                "dtype": "bfloat16",
                "enforce_eager": True,
                "max_num_seqs": 4,
                "kv_cache_memory_bytes": 64 << 20,
                "skip_tokenizer_init": True,
                "disable_log_stats": True,
                **options,
            },
        )

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()

    def status(self, nonce: str = "") -> dict[str, Any]:
        """What the only rank says that it holds."""
        status: dict[str, Any] = self.llm.collective_rpc("deltacast_status", args=(nonce,))[0]
        return status

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        return model

    @property
    def worker(self) -> Any:
        """The engine in the only worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine

    @property
    def held(self) -> dict[str, int]:
        """What the rank's rows say: each parameter's fingerprint, of one whole box."""
        rows = self.worker.parts()
        assert all(box == tuple((0, extent) for extent in shape) for _, shape, box, _ in rows)
        return {name: found for name, _, _, found in rows}

    def answers(self) -> list[Any]:
        """Greedy tokens and every log-probability, of prompts too; one prompt at a time."""
        from vllm import SamplingParams

        answers: list[Any] = []
        for prompt in _PROMPTS:
            for wanted in ({"logprobs": 1}, {"prompt_logprobs": 1}):  # apart: the latter do without the prefix cache
                sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, **wanted)
                [done] = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
                numbers = [*(done.prompt_logprobs or []), *(done.outputs[0].logprobs or [])]
                answers.append([list(done.outputs[0].token_ids), [_plain(number) for number in numbers]])
        return answers


def _plain(logprobs: Any) -> dict[int, float]:
    return {token: logprob.logprob for token, logprob in (logprobs or {}).items()}


@contextmanager
def offline(folder: Path, **options: Any) -> Iterator[Offline]:
    """Start an engine; only one can run at a time."""
    from vllm import envs
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    envs.disable_envs_cache()  # the engine before this one had the environment kept as it was then
    options.setdefault("weight_transfer_config", {"backend": "deltacast"})
    options.setdefault("worker_extension_cls", "deltacast.engines.vllm.extension.DeltacastExtension")
    try:
        engine = Offline(folder, options)
        try:
            yield engine
        finally:
            engine.llm.llm_engine.engine_core.shutdown()
            del engine.llm
    finally:
        cleanup_dist_env_and_memory()


def needs_gpus(number: int) -> pytest.MarkDecorator:
    """Skip a test of that many ranks where vLLM runs on GPUs and has fewer: each rank takes one."""
    return pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < number, reason=f"needs {number} GPUs")


def digest_of(weights: Weights) -> str:
    return WeightState(weights).digest


def change(weights: Weights, names: Iterable[str], seed: int) -> None:
    """Replace 1 % of the elements of each."""
    random = torch.Generator().manual_seed(seed)
    for name in names:
        flat = weights[name].view(-1)
        places = torch.randperm(len(flat), generator=random)[: max(1, len(flat) // 100)]
        flat[places] = (torch.randn(len(places), generator=random) * 0.1).to(flat.dtype)


def fresh_answers(folder: Path, **options: Any) -> list[Any]:
    """What an engine says that has nothing to do with deltacast."""
    with offline(folder, **{"weight_transfer_config": None, "worker_extension_cls": "", **options}) as engine:
        return engine.answers()


@contextmanager
def training(
    weights: Weights,
    engine: Offline,
    kind: type[SparseNcclTrainer] = SparseNcclTrainer,
    num_workers: int = 1,
    **options: Any,
) -> Iterator[SparseNcclTrainer]:
    """A trainer of these weights that has brought the engine to them."""
    trainer = kind.trainer_init(info(num_workers, **options), StateDictSource(weights), engine)
    try:
        yield trainer
    finally:
        trainer.shutdown()
