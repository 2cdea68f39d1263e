"""Rounds in chunks, raw and coded: the same promises as any other round.

Over Gloo and the kernels' twin, and (`-m gpu`) over NCCL and the kernels: the trainer on GPU 0, each worker on one of
the GPUs after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from deltacast.delta.errors import DeltacastError, InputError, RoundAbortedError, StateError, TableError
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.clients import InProcessClient
from deltacast.engines.control import Deadline
from deltacast.engines.protocol import Message
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import WIRES, TolerantClient, info, trainer_of

pytestmark = pytest.mark.timeout(120)
Lie: TypeAlias = Callable[[Any, bytes], tuple[Message, bytes]]
Options: TypeAlias = dict[str, Any]
SMALL: Options = {"chunk_bytes": 1 << 19}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def places(device: str, num_workers: int) -> tuple[Options, list[str]]:
    """Options of a trainer, and the devices of its workers; skips where there are too few GPUs: NCCL needs one each."""
    if device == "cpu":
        return {}, ["cpu"] * num_workers
    if torch.cuda.device_count() <= num_workers:
        pytest.skip(f"needs {num_workers + 1} GPUs")
    return {"device": "cuda:0", "placement": "cuda"}, [f"cuda:{number}" for number in range(1, num_workers + 1)]


@contextmanager
def fleet(
    device: str, policy: Policy, *served: Policy, client: type[InProcessClient] = InProcessClient, **options: Any
) -> Iterator[tuple[list[SparseNcclWorker], SparseNcclTrainer]]:
    """Make workers in this process and a trainer that has admitted them; the modules are moved to their devices."""
    trainers, workers_at = places(device, len(served))
    policy.to(trainers.get("device", "cpu"))
    workers = [
        SparseNcclWorker(ModuleSource(module.to(place)), device=place)
        for module, place in zip(served, workers_at, strict=True)
    ]
    try:
        with trainer_of(policy, client(workers), len(served), **trainers, **options) as trainer:
            yield workers, trainer
    finally:
        for worker in workers:
            worker.shutdown()


class Pair:
    """A trainer and a worker of plain state dicts.

    Args:
        device: `cpu` or `cuda`.
        weights: the trainer's, moved to its device in place.
        served: the worker's, likewise.
        source: what the trainer reads; makes a source of the weights.
        client: makes a client of the worker.
        options: of the trainer.
    """

    def __init__(
        self,
        device: str,
        weights: dict[str, torch.Tensor],
        served: dict[str, torch.Tensor],
        *,
        source: Callable[[dict[str, torch.Tensor]], StateDictSource] = StateDictSource,
        client: Callable[[list[SparseNcclWorker]], InProcessClient] = TolerantClient,
        **options: Any,
    ) -> None:
        trainers, [place] = places(device, 1)
        for tensors, at in ((weights, trainers.get("device", "cpu")), (served, place)):
            tensors.update({name: tensor.to(at) for name, tensor in tensors.items()})
        self.worker, self.source = SparseNcclWorker(StateDictSource(served), device=place), source(weights)
        self.trainer = SparseNcclTrainer.trainer_init(
            info(1, **trainers, **options), self.source, client([self.worker])
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.shutdown()
        self.worker.shutdown()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu(), b.cpu())


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
            self.wide.add_(chosen.to(self.wide.device) * 0.05)


@DEVICES
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wire", WIRES)
def test_every_worker_holds_the_trainers_bytes_after_every_round(wire: str, overlap: bool, device: str) -> None:
    """Several chunks and word widths; one of the workers starts with other weights."""
    policy, served = Large(0), [Large(0), Large(1)]
    with fleet(device, policy, *served, wire=wire, overlap_apply=overlap, **SMALL) as (_, trainer):
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights()
            assert (report.wire, report.num_verified) == (wire, 2)
            assert [weights_of(module) for module in served] == [weights_of(policy)] * 2
        assert trainer.baseline.state.audit() == []
        assert trainer.send_weights().num_changed == 0


@DEVICES
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wire", WIRES)
def test_nothing_is_served_from_the_first_write_to_the_decision(wire: str, overlap: bool, device: str) -> None:
    """Chunks are written as they arrive, or between the payload's end and the vote: until then the base is served."""
    policy, served = Large(0), Large(0)
    before, seen = weights_of(policy), []
    with fleet(device, policy, served, wire=wire, overlap_apply=overlap, **SMALL) as ([worker], trainer):

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


@DEVICES
@pytest.mark.parametrize("wire", WIRES)
def test_damage_is_named_and_repaired(wire: str, device: str) -> None:
    """By the audit where nothing was written, and by the old sums where it was."""
    policy, served = Policy(0), Policy(0)
    with fleet(device, policy, served, wire=wire, audit="full") as ([worker], trainer):
        for name in ("up", "router"):
            tensor = worker.state.memory(name).tensor.view(-1)
            tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)[:] ^= 1
        policy.step(0, share=0.5)
        report = trainer.send_weights()
        assert sorted(name for _, name in report.repaired) == ["router", "up"]
        assert weights_of(served) == weights_of(policy)


@DEVICES
@pytest.mark.parametrize("wire", WIRES)
def test_a_round_denser_than_its_buffers_goes_as_a_container(
    wire: str, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    """In the same call; the log says which argument to raise. Small models have room for a million changes anyway."""
    policy, served = Large(0), Large(0)
    policy.register_buffer("more", torch.zeros(1 << 21, dtype=torch.bfloat16))
    served.register_buffer("more", torch.zeros(1 << 21, dtype=torch.bfloat16))
    with fleet(device, policy, served, wire=wire, max_density=1e-6, **SMALL) as (_, trainer):
        policy.get_buffer("more").add_(1.0)
        report = trainer.send_weights()
        assert (report.wire, report.num_verified) == ("container", 1)
        assert "Raise max_density" in caplog.text
        assert weights_of(served) == weights_of(policy)
        policy.step(1)
        assert trainer.send_weights().wire == wire
        assert weights_of(served) == weights_of(policy)


class ReadOnce(StateDictSource):
    """A source that others read along with: once in a call, and each pass to its end."""

    num_open, may_read = 0, True

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.may_read:
            raise StateError("read already in this call")
        self.may_read = False
        self.num_open += 1
        try:
            yield from super().tensors()
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("wire", WIRES)
def test_a_dense_round_of_a_source_that_is_read_once_goes_with_the_next_call(wire: str) -> None:
    """Nobody waits for the rest of the first pass meanwhile; then the wire is a container from the start."""
    weights = {"w": torch.zeros(1 << 21, dtype=torch.bfloat16), "x": torch.zeros(1 << 21, dtype=torch.bfloat16)}
    served = {name: tensor.clone() for name, tensor in weights.items()}
    with Pair("cpu", weights, served, source=ReadOnce, wire=wire, max_density=1e-6, **SMALL) as pair:
        assert isinstance(pair.source, ReadOnce)
        weights["w"].add_(1.0)
        pair.source.may_read = True
        with pytest.raises(StateError, match="read already"):
            pair.trainer.send_weights()
        assert pair.source.num_open == 0
        pair.source.may_read = True
        report = pair.trainer.send_weights()
        assert (report.wire, report.num_verified) == ("container", 1)
        assert same(served["w"], weights["w"])


@DEVICES
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 3), torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, device="meta")]
)
def test_a_tensor_that_changed_is_named_and_nobody_moves(wire: str, wrong: torch.Tensor, device: str) -> None:
    """Another shape, another dtype, or no data."""
    weights, served = {"a": torch.ones(4, 4), "b": torch.ones(9)}, {"a": torch.ones(4, 4), "b": torch.ones(9)}
    with Pair(device, weights, served, wire=wire) as pair:
        good = weights["a"]
        weights["a"] = wrong
        with pytest.raises(DeltacastError, match=r"a tensor|a parameter"):
            pair.trainer.send_weights()
        weights["a"] = good.add_(1)
        report = pair.trainer.send_weights()
        assert report.num_verified == 1
        assert (pair.worker.status.status, same(served["a"], good)) == (ServingStatus.SERVING, True)


@DEVICES
def test_a_wire_that_a_worker_cannot_receive_is_refused_by_name_and_auto_takes_a_container(device: str) -> None:
    """Its weights are transposed views: the kernels could not write them."""
    weights, served = {"a": torch.ones(4, 8)}, {"a": torch.ones(8, 4).t()}
    with (
        Pair(device, weights, served, wire="raw") as pair,
        pytest.raises(InputError, match="cannot receive wire 'raw'"),
    ):
        pair.trainer.send_weights()
    with Pair(device, weights, served, wire="auto") as pair:
        weights["a"].mul_(2)
        assert pair.trainer.send_weights().wire == "container"
        assert same(served["a"], weights["a"])


class Cut(StateDictSource):
    """A source that may leave out its last tensors, or swap the first two, though it lists them all."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.cut: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]] = list

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.cut(list(super().tensors()))


@DEVICES
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
def test_a_source_that_does_not_keep_its_word_moves_nobody(wire: str, cut: Any, message: str, device: str) -> None:
    """Chunks may have been written by then: they are taken back, and the next round works."""
    weights = {"a": torch.ones(300_000), "b": torch.ones(9)}
    served = {name: tensor.clone() for name, tensor in weights.items()}
    with Pair(device, weights, served, source=Cut, wire=wire, **SMALL) as pair:
        assert isinstance(pair.source, Cut)
        weights["a"] += 1
        pair.source.cut = cut
        with pytest.raises(TableError, match=message):
            pair.trainer.send_weights()
        assert (pair.worker.status.status, pair.worker.status.version) == (ServingStatus.SERVING, 0)
        assert (served["a"] == 1).all()
        pair.source.cut = list
        assert pair.trainer.send_weights().num_verified == 1
        assert same(served["a"], weights["a"])


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


@DEVICES
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("lie", LIES)
def test_what_a_trainer_tells_beside_the_chunks_is_checked(wire: str, lie: str, device: str) -> None:
    """The worker votes against it, or leaves; it is at the base either way, and the next round works."""
    policy, served = Large(0), Large(0)
    before = weights_of(policy)
    options: Options = {"client": TolerantClient, "timeout_s": 3.0 if device == "cpu" else 10.0}  # to form a new group
    with fleet(device, policy, served, wire=wire, **options, **SMALL) as ([worker], trainer):
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
        assert worker.status.version == 0
        assert worker.state.audit() == trainer.baseline.state.audit() == []
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served) == weights_of(policy)


@DEVICES
@pytest.mark.parametrize("wire", WIRES)
def test_a_verdict_says_why_the_payload_did_not_arrive(wire: str, device: str) -> None:
    """Sums damaged on the way: once, the verdict hid the checksum that found it."""
    policy, served = Large(0), Large(0)
    with fleet(device, policy, served, client=TolerantClient, wire=wire) as (_, trainer):
        truthful = trainer._workers.tell_all

        def damaging(message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
            truthful(message, deadline, LIES["damaged sums"](message, bulk)[1])

        trainer._workers.tell_all = damaging  # type: ignore[method-assign]
        with pytest.raises(RoundAbortedError, match="did not arrive: ChecksumError"):
            trainer.send_weights()


@DEVICES
@pytest.mark.parametrize("wire", WIRES)
def test_a_client_that_was_not_told_to_start_is_not_told_to_finish(wire: str, device: str) -> None:
    """The source is read before the client is called; a source that fails then pauses nobody and resumes nobody."""
    weights, served, calls = {"a": torch.ones(4, 4)}, {"a": torch.ones(4, 4)}, list[str]()

    class Client(TolerantClient):
        def start_weight_update(self) -> None:
            calls.append("start")

        def finish_weight_update(self) -> None:
            calls.append("finish")

    with Pair(device, weights, served, client=Client, wire=wire) as pair:
        good = weights["a"]
        weights["a"] = torch.ones(5, 5)
        with pytest.raises(DeltacastError):
            pair.trainer.send_weights()
        assert calls == []
        weights["a"] = good * 3
        assert pair.trainer.send_weights().num_verified == 1
        assert calls == ["start", "finish"]


@DEVICES
@pytest.mark.parametrize("wire", [*WIRES, "container"])
def test_a_rate_too_low_for_the_timeout_is_named_at_once(wire: str, device: str) -> None:
    """It once slept past its own deadline, and the trainer called itself stuck."""
    policy, served = Large(0), Large(0)
    options: Options = {"client": TolerantClient, "timeout_s": 5.0, "max_send_bytes_per_s": 100.0}
    with fleet(device, policy, served, wire=wire, **options) as (_, trainer):
        before = weights_of(policy)
        policy.step(0)
        with pytest.raises(RoundAbortedError, match="rate is too low for its deadline"):
            trainer.send_weights()
        assert weights_of(served) == before
