"""The strategy `direct`: updates are written into the memory that vLLM runs with, and nothing else is kept."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.skeleton import runtime_tensors
from engine_setups import EVERY_WIRE
from vllm_models import ON_GPU, bits_of, changed_bits, make_checkpoint, plain_layouts, weights_of, with_weights
from vllm_offline import Offline, change, digest_of, offline, training

WIRES = EVERY_WIRE[:1] if ON_GPU else EVERY_WIRE  # this trainer is on the CPU: chunks do not go from there to a GPU

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "base", "qwen3", 0)


@pytest.fixture
def engine(base: Path) -> Iterator[Offline]:
    with plain_layouts(), offline(base) as engine:
        assert engine.status()["strategy"] == "direct"
        yield engine


@pytest.mark.parametrize("wire", WIRES)
def test_bits_are_written_where_they_lie(base: Path, tmp_path: Path, wire: str) -> None:
    """Any bits in every parameter: the running tensors are those of a fresh engine, at the addresses that they had."""
    weights = weights_of(base)
    with plain_layouts():
        with offline(base) as engine, training(weights, engine, wire=wire) as trainer:
            addresses = {name: tensor.data_ptr() for name, tensor in runtime_tensors(engine.model).items()}
            for name, changed in changed_bits(weights, seed=1).items():
                weights[name].copy_(changed)
            trainer.send_weights()
            assert engine.status()["digest"] == digest_of(weights)
            assert {name: tensor.data_ptr() for name, tensor in runtime_tensors(engine.model).items()} == addresses
            held = bits_of(engine.model)
        with offline(with_weights(tmp_path / "new", base, weights)) as fresh:
            assert bits_of(fresh.model) == held


def test_a_trainer_that_dies_after_the_first_write_leaves_the_old_bits(base: Path, engine: Offline) -> None:
    """The worker hears nothing of a decision: it restores what it overwrote, and serves the old version."""
    weights, model = weights_of(base), engine.model
    before, answers, voted = bits_of(model), engine.answers(), list[dict[str, bytes]]()

    class Vanishing(SparseNcclTrainer):
        """A trainer that is gone once its worker has voted."""

        def _settle(self, payload: Any, outcome: Any) -> None:
            voted.append(bits_of(model))
            self._workers.close()
            raise ConnectionError("gone")

    with training(weights, engine, Vanishing) as trainer:
        change(weights, weights, 1)
        with pytest.raises(ConnectionError):
            trainer.send_weights()
    status = engine.status()
    assert (status["serves"], status["version"]) == (True, 0)
    assert status["error"]
    assert bits_of(model) == before != voted[0]
    assert engine.answers() == answers


def test_a_bit_that_flips_in_the_running_memory_is_found_and_mended(base: Path, engine: Offline) -> None:
    """The digest is of what runs: the next handshake names the parameter, and sends it again."""
    weights, answers = weights_of(base), engine.answers()
    with training(weights, engine):
        pass
    damaged = engine.model.get_parameter("model.layers.0.mlp.gate_up_proj.weight").data
    damaged.view(torch.int16)[200, 3] ^= 1
    with training(weights, engine):
        assert engine.status()["serves"]
    assert engine.answers() == answers
