"""Experts, whose memory keeps its shape when vLLM on CPUs repacks it: only the bits tell."""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltacast.delta.errors import StateError
from vllm_models import make_checkpoint, plain_layouts, weights_of, with_weights
from vllm_offline import change, digest_of, fresh_answers, offline, packs_weights, training

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


@packs_weights
def test_packed_experts_that_are_not_those_of_the_copy_are_found_and_mended(tmp_path: Path) -> None:
    """One bit of one packed expert: named by module, no longer served, then reloaded."""
    base = make_checkpoint(tmp_path / "base", "qwen3_moe", 0)
    weights = weights_of(base)
    module = "model.layers.1.mlp.experts.routed_experts"
    with offline(base) as engine:
        before = engine.answers()
        assert engine.worker.audit_runtime() == []
        engine.model.get_parameter(f"{module}.w2_weight").data.view(torch.int16)[3, 5, 7] ^= 1
        assert engine.worker.audit_runtime() == [module]
        assert not engine.status()["serves"]
        with training(weights, engine):
            assert engine.status()["serves"]
        assert engine.worker.audit_runtime() == []
        assert engine.answers() == before


def test_stacked_and_transposed_experts_are_written_where_they_lie(tmp_path: Path) -> None:
    """Views that are not contiguous are the running memory too."""
    base = make_checkpoint(tmp_path / "base", "gpt_oss", 0)
    weights = weights_of(base)
    with plain_layouts():
        with offline(base) as engine, training(weights, engine) as trainer:
            assert engine.status()["strategy"] == "direct"
            change(weights, weights, 1)
            trainer.send_weights()
            assert engine.status()["digest"] == digest_of(weights)
            served = engine.answers()
        assert served == fresh_answers(with_weights(tmp_path / "new", base, weights))


@packs_weights
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_that_can_be_neither_written_nor_reloaded_are_refused(tmp_path: Path, load_format: str) -> None:
    """GPT-OSS fills its experts without vLLM's loaders, which a reload hangs on: the server does not start."""
    base = make_checkpoint(tmp_path / "base", "gpt_oss", 0)
    with pytest.raises(StateError, match=r"leaves out .*experts.*parameter"), offline(base, load_format=load_format):
        pass


@packs_weights
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_that_alone_are_repacked_are_reloaded(tmp_path: Path, load_format: str) -> None:
    """All layouts look plain; the weights, or with dummy weights a pattern, prove that the experts' are not."""
    base = make_checkpoint(tmp_path / "base", "qwen3_moe", 0)
    weights = weights_of(base)
    with plain_layouts(experts=False):
        with offline(base, load_format=load_format) as engine, training(weights, engine) as trainer:
            assert engine.status()["strategy"] == "reload"
            change(weights, [name for name in weights if ".1.mlp.experts.3." in name], 1)
            trainer.send_weights()
            served = engine.answers()
        assert served == fresh_answers(with_weights(tmp_path / "new", base, weights))
