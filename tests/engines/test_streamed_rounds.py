"""Rounds in chunks, raw and coded: the same promises as any other round, over Gloo and the kernels' twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from deltacast.delta.errors import DeltacastError, InputError, RoundAbortedError, TableError
from deltacast.delta.module_source import StateDictSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.control import Deadline
from deltacast.engines.protocol import Message
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import WIRES, TolerantClient, in_process, info, trainer_of

pytestmark = pytest.mark.timeout(120)
Lie: TypeAlias = Callable[[Any, bytes], tuple[Message, bytes]]
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wire", WIRES)
def test_nothing_is_served_from_the_first_write_to_the_decision(wire: str, overlap: bool) -> None:
    """Chunks are written as they arrive, or between the payload's end and the vote: until then the base is served."""
    policy, served = Large(0), Large(0)
    before, seen = weights_of(policy), []
    options = {"wire": wire, "overlap_apply": overlap, **SMALL}
    with in_process(served) as (workers, client), trainer_of(policy, client, 1, **options) as trainer:
        worker = workers[0]

        def look(step: str) -> None:
            real = getattr(worker, step)

            def looked(*arguments: Any) -> Any:
                seen.append((worker.status.status, worker.status.version, weights_of(served) == before))
                return real(*arguments)

            setattr(worker, step, looked)

        look("_receive_payload")
        look("_vote")
        look("_await_decision")
        policy.step(0)
        trainer.send_weights()
        base, written = (ServingStatus.SERVING, 0, True), (ServingStatus.EMPTY, None, False)
        assert seen == [base, written if overlap else base, written]
        assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 1)


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


class Cut(StateDictSource):
    """A source that may leave out its last tensors, or swap the first two, though it lists them all."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.cut: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]] = list

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.cut(list(super().tensors()))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda pairs: pairs[:1], "ended before.*'b'"),
        (lambda pairs: pairs[:0], "ended before.*'a'"),
        (lambda pairs: pairs[::-1], "own order"),
        (lambda pairs: [*pairs, ("more", torch.zeros(1))], "does not list.*'more'"),
    ],
)
def test_a_source_that_does_not_keep_its_word_moves_nobody(wire: str, cut: Any, message: str) -> None:
    """Chunks may have been written by then: they are taken back, and the next round works."""
    weights = {"a": torch.ones(300_000), "b": torch.ones(9)}
    served = {name: tensor.clone() for name, tensor in weights.items()}
    worker, source = SparseNcclWorker(StateDictSource(served)), Cut(weights)
    trainer = SparseNcclTrainer.trainer_init(info(1, wire=wire, **SMALL), source, TolerantClient([worker]))
    weights["a"] += 1
    source.cut = cut
    with pytest.raises(TableError, match=message):
        trainer.send_weights()
    assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 0)
    assert (served["a"] == 1).all()
    source.cut = list
    assert trainer.send_weights().num_verified == 1
    assert torch.equal(served["a"], weights["a"])
    trainer.shutdown()
    worker.shutdown()


def changed(kind: str, **fields: Any) -> Lie:
    return lambda message, bulk: (replace(message, **fields), bulk) if message.kind == kind else (message, bulk)


LIES: dict[str, Lie] = {
    "a chunk out of turn": changed("chunk", number=1),
    "more changes than the blocks have words": changed("chunk", num_changes=1 << 40),
    "fewer than none": changed("chunk", num_changes=-1),
    "another digest": changed("end", target_digest="xxh3_128:" + "0" * 32),
    "damaged sums": lambda message, bulk: (message, bulk[:-1] + bytes([bulk[-1] ^ 1]) if bulk else bulk),
    "no sums": lambda message, _: (message, b""),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("lie", LIES)
def test_what_a_trainer_tells_beside_the_chunks_is_checked(wire: str, lie: str) -> None:
    """The worker votes against it, or leaves; it is at the base either way, and the next round works."""
    policy, served = Large(0), Large(0)
    before = weights_of(policy)
    options = {"wire": wire, "timeout_s": 3.0, **SMALL}
    with in_process(served) as (workers, _), trainer_of(policy, TolerantClient(workers), 1, **options) as trainer:
        truthful = trainer._workers.tell_all

        def lying(message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
            message, bulk = LIES[lie](message, bulk)
            truthful(message, deadline, bulk)

        trainer._workers.tell_all = lying  # type: ignore[method-assign]
        policy.step(0)
        with pytest.raises(RoundAbortedError):
            trainer.send_weights()
        trainer._workers.tell_all = truthful  # type: ignore[method-assign]
        assert weights_of(served) == before
        assert workers[0].status.version == 0
        assert workers[0].state.audit() == trainer.baseline.state.audit() == []
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served) == weights_of(policy)


@pytest.mark.parametrize("wire", WIRES)
def test_a_verdict_says_why_the_payload_did_not_arrive(wire: str) -> None:
    """Sums damaged on the way: once, the verdict hid the checksum that found it."""
    policy, served = Large(0), Large(0)
    with in_process(served) as (workers, _), trainer_of(policy, TolerantClient(workers), 1, wire=wire) as trainer:
        truthful = trainer._workers.tell_all

        def damaging(message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
            truthful(message, deadline, LIES["damaged sums"](message, bulk)[1])

        trainer._workers.tell_all = damaging  # type: ignore[method-assign]
        with pytest.raises(RoundAbortedError, match="did not arrive: ChecksumError"):
            trainer.send_weights()


@pytest.mark.parametrize("wire", WIRES)
def test_a_client_that_was_not_told_to_start_is_not_told_to_finish(wire: str) -> None:
    """The source is read before the client is called; a source that fails then pauses nobody and resumes nobody."""
    weights, served = {"a": torch.ones(4, 4)}, {"a": torch.ones(4, 4)}
    worker, calls = SparseNcclWorker(StateDictSource(served)), list[str]()

    class Client(TolerantClient):
        def start_weight_update(self) -> None:
            calls.append("start")

        def finish_weight_update(self) -> None:
            calls.append("finish")

    trainer = SparseNcclTrainer.trainer_init(info(1, wire=wire), StateDictSource(weights), Client([worker]))
    weights["a"] = torch.ones(5, 5)
    with pytest.raises(DeltacastError):
        trainer.send_weights()
    assert calls == []
    weights["a"] = torch.ones(4, 4) * 3
    assert trainer.send_weights().num_verified == 1
    assert calls == ["start", "finish"]
    trainer.shutdown()
    worker.shutdown()


@pytest.mark.parametrize("wire", [*WIRES, "container"])
def test_a_rate_too_low_for_the_timeout_is_named_at_once(wire: str) -> None:
    """It once slept past its own deadline, and the trainer called itself stuck."""
    policy, served = Large(0), Large(0)
    options = {"wire": wire, "timeout_s": 5.0, "max_send_bytes_per_s": 100.0}
    with in_process(served) as (workers, _), trainer_of(policy, TolerantClient(workers), 1, **options) as trainer:
        before = weights_of(policy)
        policy.step(0)
        with pytest.raises(RoundAbortedError, match="rate is too low for its deadline"):
            trainer.send_weights()
        assert weights_of(served) == before
