"""A worker whose weights lie in larger tensors, as inference engines fuse and pad them: written where they are."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from deltacast.delta.module_source import StateDictSource
from deltacast.engines.clients import InProcessClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_setups import DEVICES, EVERY_WIRE, info, placed

HIDDEN: Final = 24
SHAPES: Final = {
    "embed.weight": (37, HIDDEN),
    "q.weight": (32, HIDDEN),
    "k.weight": (8, HIDDEN),
    "v.weight": (8, HIDDEN),
    "gate.weight": (29, HIDDEN),
    "up.weight": (29, HIDDEN),
    "experts.0.down.weight": (HIDDEN, 7),
    "experts.1.down.weight": (HIDDEN, 7),
    "norm.weight": (HIDDEN,),
}
FUSED: Final = {  # runtime tensor -> the parameters that lie in it one after the other
    "embed": ["embed.weight"],
    "qkv": ["q.weight", "k.weight", "v.weight"],
    "gate_up": ["gate.weight", "up.weight"],
    "w2": ["experts.0.down.weight", "experts.1.down.weight"],
    "norm": ["norm.weight"],
}
PADDED_ROWS: Final = {"embed": 48}


def random_weights(seed: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = {name: torch.randint(-(1 << 15), 1 << 15, shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: word.to(torch.int16).view(torch.bfloat16).to(device) for name, word in words.items()}


def fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate, and pad with the bits of 0x5A5A; by torch, not by the code under test."""
    runtime = {}
    for name, members in FUSED.items():
        tensor = torch.cat([weights[member].view(torch.int16) for member in members])
        padding = PADDED_ROWS.get(name, tensor.shape[0]) - tensor.shape[0]
        pad = torch.full((padding, *tensor.shape[1:]), 0x5A5A, dtype=torch.int16, device=tensor.device)
        runtime[name] = torch.cat([tensor, pad]).view(torch.bfloat16)
    return runtime


def views(runtime: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the runtime tensors into the parameters; nothing is copied."""
    cut = {}
    for name, members in FUSED.items():
        start = 0
        for member in members:
            cut[member] = runtime[name][start : start + SHAPES[member][0]]
            start += SHAPES[member][0]
    return cut


def flip(weights: dict[str, torch.Tensor], seed: int) -> None:
    """Flip some bits of about a tenth of the elements."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        masks = torch.randint(1, 1 << 15, tensor.shape, generator=generator).to(torch.int16)
        masks *= torch.rand(tensor.shape, generator=generator) < 0.1
        tensor.view(torch.int16).bitwise_xor_(masks.to(tensor.device))


@DEVICES
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_fused_and_padded_tensors_are_updated_in_place(wire: str, device: str) -> None:
    """After a seed and three rounds: the bits of the trainer's weights, concatenated; padding and addresses stay."""
    options = placed(device, 1)
    worker_at = "cpu" if device == "cpu" else "cuda:1"
    weights = random_weights(0, str(options.get("device", "cpu")))
    runtime = fused(random_weights(1, worker_at))
    addresses = {name: tensor.data_ptr() for name, tensor in runtime.items()}
    worker = SparseNcclWorker(StateDictSource(views(runtime)), device=worker_at)
    client = InProcessClient([worker])
    trainer = SparseNcclTrainer.trainer_init(
        info(1, wire=wire, audit="full", **options), StateDictSource(weights), client
    )
    try:
        for seed in range(2, 5):
            flip(weights, seed)
            report = trainer.send_weights()
            assert (report.num_verified, report.wire) == (1, wire)
            assert worker.status.digest == trainer.baseline.digest
            for name, expected in fused(weights).items():
                assert torch.equal(runtime[name].view(torch.int16).cpu(), expected.view(torch.int16).cpu()), name
        assert {name: tensor.data_ptr() for name, tensor in runtime.items()} == addresses
    finally:
        trainer.shutdown()
        worker.shutdown()
