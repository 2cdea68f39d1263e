"""Code written for vLLM's trainer engines, with our init info: built by vLLM's factory, driven by its calls."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from deltacast.delta.errors import InputError, RoundAbortedError, StateError
from deltacast.engines.vllm.trainer import DeltacastTrainerInitInfo
from vllm_models import make_checkpoint, weights_of, with_weights
from vllm_offline import Offline, change, digest_of, fresh_answers, offline

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


class InProcess:
    """A client as vLLM's are, of an engine in this process; it notes the labels."""

    def __init__(self, engine: Offline) -> None:
        self.engine, self.labels = engine, list[str | None]()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.labels.append(weight_version)
        self.engine.llm.finish_weight_update(weight_version)
        self.engine.llm.reset_prefix_cache()


class Policy(nn.Module):
    """A module whose parameters have a checkpoint's names and bits."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(tensor.clone()))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}


def init_info(rank: int = 0, **options: Any) -> DeltacastTrainerInitInfo:
    return DeltacastTrainerInitInfo(
        master_address="127.0.0.1", master_port=0, world_size=2, packed=True, rank=rank, options=options
    )


def test_code_for_vllms_engines_works_with_another_init_info(tmp_path: Path) -> None:
    """Factory, `ModuleSource`, a client of four methods: seeded, updated, labelled; answers are a fresh engine's."""
    base = make_checkpoint(tmp_path / "base", "qwen3", 0)
    policy = Policy(weights_of(base))
    with offline(base, load_format="dummy") as served:
        client = InProcess(served)
        assert isinstance(client, VLLMWeightSyncClient)
        engine = WeightTransferTrainerFactory.trainer_init(init_info(), client=client, source=ModuleSource(policy))
        assert served.status()["digest"] == digest_of(policy.weights())
        for step in range(2):
            change(policy.weights(), policy.weights(), step)
            engine.send_weights()
        assert served.status()["digest"] == digest_of(policy.weights())
        assert client.labels == ["0", "1", "2"]
        assert served.llm.get_weight_version() == "2"
        answers = served.answers()
        served.worker._worker._undo_budget_bytes = 0  # so that it refuses
        change(policy.weights(), policy.weights(), 3)
        with pytest.raises(RoundAbortedError):
            engine.send_weights()
        assert client.labels[3:] == [None]
        engine.shutdown()
        engine.shutdown()
    change_back = weights_of(base)
    for step in range(2):
        change(change_back, change_back, step)
    assert answers == fresh_answers(with_weights(tmp_path / "new", base, change_back))


class Counting(ModuleSource):  # type: ignore[misc] # vLLM is not there for the type checker
    """Counts the passes over it that came to their end."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().__iter__()
        self.passes += 1


@pytest.fixture
def two_trainer_ranks() -> Iterator[None]:
    """Be the second of two ranks, in a group that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_trainer_ranks")
def test_a_rank_that_does_not_send_reads_along() -> None:
    """Once at init and once in each call, since reading is collective; it calls no client."""
    source, nobody = Counting(nn.Linear(2, 2)), object()
    engine = WeightTransferTrainerFactory.trainer_init(init_info(rank=1), client=nobody, source=source)
    assert source.passes == 1
    assert engine.send_weights() is None
    assert source.passes == 2
    weights = engine._weights
    first = weights.tensors()
    next(first)
    first.close()  # as by a round that ends early
    assert source.passes == 3
    with pytest.raises(StateError, match="Call send_weights again"):
        next(weights.tensors())
    weights.end_call()
    assert source.passes == 3
    engine.shutdown()


def test_what_cannot_be_a_trainer_is_refused() -> None:
    """Before any call goes out."""
    with pytest.raises(InputError, match="no source"):
        WeightTransferTrainerFactory.trainer_init(init_info(), client=object())
    with pytest.raises(InputError, match=r"bad options.*tiemout_s"):
        WeightTransferTrainerFactory.trainer_init(
            init_info(tiemout_s=1), client=object(), source=ModuleSource(nn.Linear(2, 2))
        )
