"""Rounds in chunks, raw and coded: the same promises as any other round, over Gloo and the kernels' twin."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

from deltacast.delta.errors import DeltacastError, InputError, RoundAbortedError
from deltacast.delta.module_source import StateDictSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.engines.wires import LastRound, choose_wire
from engine_processes import DIE_AT, Policy, weights_of, worker_processes
from engine_setups import TolerantClient, in_process, info, trainer_of

pytestmark = pytest.mark.timeout(120)
WIRES = ["raw", "coded"]
SMALL = {"chunk_bytes": 1 << 19}


class Large(Policy):
    """The policy, and a parameter of several chunks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        generator = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(1_000_003, generator=generator).to(torch.bfloat16))

    def step(self, seed: int, share: float = 0.02) -> None:
        super().step(seed, share)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(self.wide.shape, generator=generator) < share
        with torch.no_grad():
            self.wide.add_(chosen * 0.05)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wire", WIRES)
def test_every_worker_holds_the_trainers_bytes_after_every_round(wire: str, overlap: bool) -> None:
    """Several chunks and word widths; one of the workers starts with other weights."""
    policy, served = Large(0), [Large(0), Large(1)]
    options = {"wire": wire, "overlap_apply": overlap, **SMALL}
    with in_process(*served) as (_, client), trainer_of(policy, client, 2, **options) as trainer:
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights()
            assert (report.wire, report.num_verified) == (wire, 2)
            assert [weights_of(module) for module in served] == [weights_of(policy)] * 2
        assert trainer.baseline.state.audit() == []
        assert trainer.send_weights().num_changed == 0


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("step", DIE_AT)
def test_a_worker_killed_at_any_step_leaves_the_others_whole(wire: str, step: str) -> None:
    """Before its verdict the round aborts and the survivor is at the base, bit for bit; after it, it commits."""
    policy = Policy(0)
    die = {1: (step, 2, signal.SIGKILL)}
    with worker_processes(0, 0, die=die) as client, trainer_of(policy, client, 2, wire=wire) as trainer:
        client.reports()
        survivor, victim = client.workers
        policy.step(0)
        trainer.send_weights()
        before = weights_of(policy)
        policy.step(1)
        committed = step in {"voted", "decided", "acked"}
        if committed:
            trainer.send_weights()
        else:
            with pytest.raises(RoundAbortedError, match=f":{victim.pid}"):
                trainer.send_weights()
        survivor.reply()
        survivor.reply()
        assert survivor.ask("weights") == (weights_of(policy) if committed else before)
        assert survivor.ask("audit") == []
        assert trainer.baseline.state.audit() == []
        client.workers.remove(victim)
        victim.stop()
        policy.step(2)
        assert trainer.send_weights().num_verified == 1
        survivor.reply()
        assert survivor.ask("weights") == weights_of(policy)


@pytest.mark.parametrize("wire", WIRES)
def test_damage_is_named_and_repaired(wire: str) -> None:
    """By the audit where nothing was written, and by the old sums where it was."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as (workers, client), trainer_of(policy, client, 1, wire=wire, audit="full") as trainer:
        for name in ("up", "router"):
            tensor = workers[0].state.memory(name).tensor.view(-1)
            tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)[:] ^= 1
        policy.step(0, share=0.5)
        report = trainer.send_weights()
        assert sorted(name for _, name in report.repaired) == ["router", "up"]
        assert weights_of(served) == weights_of(policy)


@pytest.mark.parametrize("wire", WIRES)
def test_a_round_denser_than_its_buffers_goes_as_a_container(wire: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the same call; the log says which argument to raise. Small models have room for a million changes anyway."""
    policy, served = Large(0), Large(0)
    policy.register_buffer("more", torch.zeros(1 << 21, dtype=torch.bfloat16))
    served.register_buffer("more", torch.zeros(1 << 21, dtype=torch.bfloat16))
    options = {"wire": wire, "max_density": 1e-6, **SMALL}
    with in_process(served) as (_, client), trainer_of(policy, client, 1, **options) as trainer:
        policy.get_buffer("more").add_(1.0)
        report = trainer.send_weights()
        assert (report.wire, report.num_verified) == ("container", 1)
        assert "Raise max_density" in caplog.text
        assert weights_of(served) == weights_of(policy)
        policy.step(1)
        assert trainer.send_weights().wire == wire
        assert weights_of(served) == weights_of(policy)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 3), torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, device="meta")]
)
def test_a_tensor_that_changed_is_named_and_nobody_moves(wire: str, wrong: torch.Tensor) -> None:
    """Another shape, another dtype, or no data."""
    weights, served = {"a": torch.ones(4, 4), "b": torch.ones(9)}, {"a": torch.ones(4, 4), "b": torch.ones(9)}
    worker = SparseNcclWorker(StateDictSource(served))
    client = TolerantClient([worker])
    with SparseNcclTrainerOf(weights, client, wire=wire) as trainer:
        good = weights["a"]
        weights["a"] = wrong
        with pytest.raises(DeltacastError, match=r"a tensor|a parameter"):
            trainer.send_weights()
        weights["a"] = good.add_(1)
        report = trainer.send_weights()
        assert report.num_verified == 1
        assert (worker.status.status, torch.equal(served["a"], good)) == (ServingStatus.SERVING, True)
    worker.shutdown()


class SparseNcclTrainerOf:
    """A trainer of a plain state dict."""

    def __init__(self, weights: dict[str, torch.Tensor], client: TolerantClient, **options: object) -> None:
        self._trainer = SparseNcclTrainer.trainer_init(info(1, **options), StateDictSource(weights), client)

    def __enter__(self) -> SparseNcclTrainer:
        return self._trainer

    def __exit__(self, *_: object) -> None:
        self._trainer.shutdown()


def test_a_wire_that_a_worker_cannot_receive_is_refused_by_name_and_auto_takes_a_container() -> None:
    """Its weights are transposed views: the kernels could not write them."""
    weights, served = {"a": torch.ones(4, 8)}, {"a": torch.ones(8, 4).t()}
    worker = SparseNcclWorker(StateDictSource(served))
    with (
        SparseNcclTrainerOf(weights, TolerantClient([worker]), wire="raw") as trainer,
        pytest.raises(InputError, match="cannot receive wire 'raw'"),
    ):
        trainer.send_weights()
    worker.shutdown()
    with SparseNcclTrainerOf(weights, TolerantClient([worker]), wire="auto") as trainer:
        weights["a"].mul_(2)
        assert trainer.send_weights().wire == "container"
        assert torch.equal(served["a"], weights["a"])
    worker.shutdown()


@pytest.mark.gpu
def test_auto_takes_raw_on_a_fast_link_and_coded_on_a_slow_one() -> None:
    """76 million changes: 1 ms raw at 300 GB/s, 2.4 s at 1 Gbit/s."""
    for link, wire in ((300e9, "raw"), (0.125e9, "coded")):
        choice = choose_wire(
            "auto", workers=[("w", ["container", *WIRES])], device=torch.device("cuda"), num_words=7_600_000_000,
            max_density=0.05, threads=8, last=LastRound(0.01, link),
        )  # fmt: skip
        assert choice.wire == wire
