"""Tensor parallel ranks of vLLM's own models, whose pieces are where its loader put them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacast.delta.module_source import StateDictSource
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from engine_processes import EngineProcess
from engine_setups import info
from shard_processes import Servers
from shard_vllm import serve_in_vllm
from vllm_models import changed_bits, make_checkpoint, weights_of, with_weights
from vllm_offline import needs_gpus

pytestmark = [pytest.mark.timeout(180), needs_gpus(2)]


def test_two_ranks_follow_a_trainer_in_their_running_tensors(tmp_path: Path) -> None:
    """Fused, split by rows and columns, padded, one KV head on both: as if loaded anew from the trainer's weights."""
    base = make_checkpoint(tmp_path / "base", "qwen3", 0, num_key_value_heads=1)
    weights = weights_of(base)
    ranks = [EngineProcess(serve_in_vllm, tmp_path / "meeting", rank, 2, base) for rank in range(2)]
    client = Servers(ranks)  # type: ignore[arg-type]
    try:
        for rank in ranks:
            rank.tell("make")
        digests = [rank.reply(120.0) for rank in ranks]
        trainer = SparseNcclTrainer.trainer_init(info(2), StateDictSource(weights), client)
        client.reports()
        assert digests == [trainer.baseline.digest] * 2
        for number in range(2):
            for name, tensor in changed_bits(weights, number).items():
                weights[name].copy_(tensor)
            assert trainer.send_weights().num_verified == 2
            client.reports()
        after = with_weights(tmp_path / "after", base, weights)
        for rank in ranks:
            rank.tell("differing", after)
        assert [rank.reply(120.0) for rank in ranks] == [[], []]
        trainer.shutdown()
    finally:
        for rank in ranks:
            rank.stop()
