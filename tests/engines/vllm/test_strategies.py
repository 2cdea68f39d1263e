"""The worker over a running model's memory, and the choice of it; without vLLM, with a plan made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltacast.delta.errors import InputError
from deltacast.delta.fingerprint import fingerprint
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.pieces import Piece
from deltacast.delta.table import ParamMeta
from deltacast.engines.clients import InProcessClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.planner import Placement, Plan
from deltacast.engines.vllm.strategies import DirectWorker, choose, require_covered
from engine_setups import DEVICES, EVERY_WIRE, info, placed

ROWS = {"q": 7, "k": 3, "v": 3}
WIDTH = 131


def fused(tensor: torch.Tensor) -> Plan:
    """Return the plan of a module that keeps query, key and value one after the other, at odd addresses."""
    placements, offset = {}, 0
    for name, rows in ROWS.items():
        size = rows * WIDTH
        pieces = (Piece("qkv", (size,), ((0, size),), offset, (1,)),)
        meta = ParamMeta(name, "bfloat16", (rows, WIDTH))
        placements[name] = Placement(meta, "direct", "", pieces, {"qkv": size}, ("",))
        offset += size
    return Plan(placements, {"qkv": tensor}, {"qkv": tuple(tensor.shape)}, {}, {}, {})


@DEVICES
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_updates_are_written_into_fused_memory(device: str, wire: str) -> None:
    """After a seed and a round the running tensor is the trainer's three, one after the other, where it was."""
    options = placed(device, 1)
    running = torch.zeros(sum(ROWS.values()), WIDTH, dtype=torch.bfloat16, device="cuda:1" if options else "cpu")
    home, address = "cuda:0" if options else "cpu", running.data_ptr()
    weights = {name: torch.randn(rows, WIDTH).to(home, torch.bfloat16) for name, rows in ROWS.items()}
    worker = DirectWorker(fused(running))
    assert not worker.serves
    client = InProcessClient([worker])
    trainer = SparseNcclTrainer.trainer_init(
        info(1, wire=wire, max_density=0.5, **options), StateDictSource(weights), client
    )
    for weight in weights.values():
        weight.view(-1)[::9] *= -1
    report = trainer.send_weights()
    trainer.shutdown()
    worker.shutdown()
    assert report.num_verified == 1
    assert worker.serves
    assert torch.equal(running.cpu().view(torch.int16), torch.cat(list(weights.values())).cpu().view(torch.int16))
    assert running.data_ptr() == address
    assert {name: found for name, _, _, found in worker.parts()} == {n: fingerprint(w) for n, w in weights.items()}


def test_the_choice_names_what_stands_against_direct_writes() -> None:
    """All direct and whole: direct, and on several ranks shards. One that is not, or in pieces: reload, and why."""
    plan = fused(torch.zeros(13, WIDTH, dtype=torch.bfloat16))
    assert choose(plan, tensor_parallel=1).strategy == "direct"
    assert choose(plan, tensor_parallel=2).strategy == "shards"
    assert choose(plan, tensor_parallel=2, pulls=True).strategy == "reload"
    packed = replace(plan.placements["k"], strategy="reload", reason="it is packed")
    assert choose(replace(plan, placements={**plan.placements, "k": packed}), tensor_parallel=1) == (
        "reload",
        "k: it is packed",
    )
    half = Piece("qkv", (ROWS["v"] * WIDTH,), ((0, WIDTH),), 0, (1,))
    halved = replace(plan.placements["v"], pieces=(half,))
    assert choose(replace(plan, placements={**plan.placements, "v": halved}), tensor_parallel=1) == (
        "reload",
        "v lies in several pieces",
    )


def test_a_parameter_without_a_place_is_refused_by_name() -> None:
    """However good the others are."""
    plan = fused(torch.zeros(13, WIDTH, dtype=torch.bfloat16))
    absent = replace(plan.placements["k"], strategy="absent", reason="the loader leaves it alone", pieces=())
    assert require_covered(plan) is plan
    with pytest.raises(InputError, match="no place for k"):
        require_covered(replace(plan, placements={**plan.placements, "k": absent}))


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_updated_by_a_trainer_on_the_host_too() -> None:
    """Nobody chose the device of its payload: it receives where the trainer sends."""
    running = torch.zeros(sum(ROWS.values()), WIDTH, dtype=torch.bfloat16, device="cuda:0")
    weights = {name: torch.randn(rows, WIDTH).to(torch.bfloat16) for name, rows in ROWS.items()}
    worker = DirectWorker(fused(running))
    trainer = SparseNcclTrainer.trainer_init(info(1), StateDictSource(weights), InProcessClient([worker]))
    weights["k"] *= -1
    assert trainer.send_weights().num_verified == 1
    trainer.shutdown()
    worker.shutdown()
    assert torch.equal(running.cpu().view(torch.int16), torch.cat(list(weights.values())).view(torch.int16))
