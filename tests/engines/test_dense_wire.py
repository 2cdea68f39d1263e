"""Seeds and repairs as whole tensors: straight into live weights, proven by audit, and by nothing less."""

from __future__ import annotations

import signal
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from deltacast.delta.errors import (
    BaseError,
    ChecksumError,
    CorruptionError,
    DeltacastError,
    FormatError,
    InputError,
    ProtocolError,
    TableError,
    TransportError,
    VerificationError,
)
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.delta.state import WeightState
from deltacast.engines.base import SeedWire, ServingStatus, TrainerInitInfo
from deltacast.engines.control import Deadline
from deltacast.engines.dense_wire import DenseDrain, DenseHeader, DenseIncoming, DenseOutgoing
from deltacast.engines.group import PayloadGroup
from deltacast.engines.payload import Inbox
from deltacast.engines.protocol import Propose, RoundKey
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.engines.wires import choose_seed_wire
from deltacast.store.baseline import Baseline
from dense_processes import group_of
from engine_processes import (
    EngineProcess,
    Policy,
    TrainerProcess,
    WorkerError,
    WorkerProcess,
    weights_of,
    worker_processes,
)
from engine_setups import SEED_WIRES, TolerantClient, in_process, info, trainer_of, wait_for_connection
from fingerprint_twin import bytes_fingerprint
from tensor_bytes import WORDS, flipped, random_raw, raw_bytes, tensor_of

pytestmark = pytest.mark.timeout(60)
DENSE: dict[str, Any] = {"seed_wire": "dense", "slab_bytes": 1024}
"""Slabs smaller than most of the policy's parameters."""
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
OTHER_DIGEST = "xxh3_128:" + "0" * 32


def heard(worker: SparseNcclWorker) -> list[tuple[str, int, bool]]:
    """Note of every round what a worker hears: wire, base version, whether it is a receiver."""
    rounds, incoming = list[tuple[str, int, bool]](), worker._incoming

    def note(propose: Propose, header: bytes) -> Any:
        rounds.append((propose.wire, propose.base_version, worker._rank in propose.receivers))
        return incoming(propose, header)

    worker._incoming = note  # type: ignore[method-assign]
    return rounds


def note_status(worker: SparseNcclWorker, step: str, seen: list[tuple[ServingStatus, int | None]]) -> None:
    """Note what a worker says of itself whenever it begins a step."""
    real = getattr(worker, step)

    def look(*arguments: Any) -> Any:
        seen.append((worker.status.status, worker.status.version))
        return real(*arguments)

    setattr(worker, step, look)


def bits(state_dict: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in state_dict.items()}


@contextmanager
def joining(worker: SparseNcclWorker, trainer: SparseNcclTrainer) -> Iterator[list[BaseException]]:
    """Have a worker knock; after the block it has been let in, or what it raised is in the list."""
    errors = list[BaseException]()

    def join() -> None:
        try:
            worker.init_transfer_engine(trainer.worker_init_info)
        except BaseException as err:  # noqa: BLE001 - handed to the test's thread
            errors.append(err)

    thread = threading.Thread(target=join)
    thread.start()
    wait_for_connection(trainer)
    yield errors
    thread.join(20)


@DEVICES
def test_workers_are_seeded_between_processes(device: str) -> None:
    """One holds the trainer's bits already and only takes part in the broadcasts; compared as bytes."""
    num_workers = 3 if device == "cpu" else min(3, torch.cuda.device_count() - 1)
    if num_workers < 1:
        pytest.skip("needs 2 GPUs")
    place = {} if device == "cpu" else {"device": "cuda:0", "placement": "cuda"}
    policy = Policy(0).to("cpu" if device == "cpu" else "cuda:0")
    seeds = [7, 0, 8][:num_workers]
    with (
        worker_processes(*seeds, device=device) as client,
        trainer_of(policy, client, num_workers, **DENSE, **place) as trainer,
    ):
        statuses = [worker.reply() for worker in client.workers]
        assert [(status.status, status.version) for status in statuses] == [(ServingStatus.SERVING, 0)] * num_workers
        for step in range(2):
            policy.step(step)
            assert trainer.send_weights().num_verified == num_workers
            client.reports()
            for worker in client.workers:
                assert worker.ask("weights") == weights_of(policy)


@pytest.mark.parametrize(
    ("placement", "served_on"),
    [
        ("cpu", "cpu"),
        ("mmap", "cpu"),
        pytest.param("pinned", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
    ],
)
def test_a_baseline_is_sent_from_where_it_lies_and_stays_as_it_is(
    placement: str, served_on: str, tmp_path: Path
) -> None:
    """A joiner gets the second version; no weight moves in memory."""
    policy, served = Policy(0), Policy(3).to(served_on)
    pointers = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    folder = {"baseline_folder": str(tmp_path)} if placement == "mmap" else {}
    joiner = SparseNcclWorker(ModuleSource(served))
    rounds = heard(joiner)
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, placement=placement, **folder, **DENSE) as trainer,
    ):
        policy.step(0)
        trainer.send_weights()
        with joining(joiner, trainer) as errors:
            trainer.send_weights()
        assert errors == []
        assert rounds == [("dense", -1, True), ("container", 1, True)]
        assert weights_of(served) == weights_of(policy)
        assert (joiner.status.version, joiner.status.audited_through) == (2, 1)
        assert trainer.baseline.state.audit() == joiner.state.audit() == []
    assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == pointers
    joiner.shutdown()


def test_every_dtype_is_seeded_into_strided_weights_bit_by_bit() -> None:
    """Random bits, NaNs and all; 0-d, empty, transposed and gapped targets, and one tied under two names."""
    rng = np.random.default_rng(0)
    weights = {f"{name}.{shape}": (name, shape) for name in WORDS for shape in [(), (0, 3), (5, 7), (40, 33)]}
    new = {key: tensor_of(name, random_raw(rng, name, int(np.prod(shape))), shape)
           for key, (name, shape) in weights.items()}  # fmt: skip
    served = {key: strided(tensor, number % 3) for number, (key, tensor) in enumerate(new.items())}
    for tensors in (new, served):
        tensors["tied"] = tensors["float32.(40, 33)"]
    worker = SparseNcclWorker(StateDictSource(served))
    trainer = SparseNcclTrainer.trainer_init(info(1, **DENSE), StateDictSource(new), TolerantClient([worker]))
    assert bits(served) == bits(new)
    assert worker.status.digest == trainer.baseline.digest
    trainer.shutdown()
    worker.shutdown()


def strided(tensor: torch.Tensor, how: int) -> torch.Tensor:
    """Make an untouched tensor of the same dtype and shape: in rows, in columns, or with gaps between columns."""
    storage = torch.zeros(2 * tensor.numel() * tensor.itemsize + 16, dtype=torch.uint8).view(tensor.dtype)
    if how == 0 or tensor.dim() < 2:
        return storage[: tensor.numel()].view(tensor.shape)
    rows, columns = tensor.shape
    return storage.as_strided((rows, columns), (1, rows) if how == 1 else (2 * columns, 2))


def test_a_bystander_goes_on_serving_and_is_not_written() -> None:
    """It takes the joiner's payload off the wire, and its label stays what it was."""
    policy, modules = Policy(0), [Policy(0), Policy(3)]
    seen = list[tuple[ServingStatus, int | None]]()
    joiner = SparseNcclWorker(ModuleSource(modules[1]))
    with in_process(modules[0]) as (workers, client), trainer_of(policy, client, 1, **DENSE) as trainer:
        rounds = heard(workers[0])
        note_status(workers[0], "_vote", seen)
        trainer.send_weights()
        with joining(joiner, trainer):
            policy.step(0)
            trainer.send_weights()
        assert rounds == [("container", 0, True), ("dense", -1, False), ("container", 1, True)]
        assert seen[1] == (ServingStatus.SERVING, 1)
        assert [weights_of(module) for module in modules] == [weights_of(policy)] * 2
    joiner.shutdown()


@pytest.mark.parametrize("seed_wire", SEED_WIRES)
def test_nothing_is_served_while_a_seed_is_written(seed_wire: str) -> None:
    """Neither before its payload, nor after it, nor while the decision is out."""
    policy, seen = Policy(0), list[tuple[ServingStatus, int | None]]()
    with in_process(Policy(3)) as (workers, client):
        for step in ("_receive_payload", "_vote", "_await_decision"):
            note_status(workers[0], step, seen)
        with trainer_of(policy, client, 1, seed_wire=seed_wire):
            assert seen == [(ServingStatus.EMPTY, None)] * 3
            assert workers[0].status.version == 0


def test_damaged_parameters_are_sent_whole_and_no_others() -> None:
    """Of two workers, in one repair; an undo budget of nothing does not matter, since there is no undo."""
    policy, served = Policy(0), [Policy(0), Policy(0), Policy(0)]
    with in_process(*served) as (workers, client), trainer_of(policy, client, 3, audit="full", **DENSE) as trainer:
        rounds = [heard(worker) for worker in workers]
        served[0].get_parameter("up").data.view(torch.int16)[3, 5] ^= 1
        served[1].get_buffer("bias").view(torch.int32)[7] ^= 1 << 30
        served[1].get_parameter("scale").data.view(torch.int16).bitwise_xor_(-1)
        trainer.send_weights(optimizer_step=5)
        policy.step(0)
        report = trainer.send_weights()
        assert report.num_verified == 3
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 3
        assert [wires[1] for wires in rounds] == [("dense", 0, True), ("dense", 0, True), ("dense", 0, False)]
        assert {worker.state.audited_through for worker in workers} == {2}


@pytest.mark.parametrize("step", ["payload", "voted"])
@pytest.mark.parametrize("seed_wire", SEED_WIRES)
def test_a_joiner_that_freezes_while_it_is_seeded_is_dropped_by_deadline(seed_wire: str, step: str) -> None:
    """The others are published to in the same call. Thawed, it serves nothing but what it voted for; it comes again."""
    policy = Policy(0)
    with worker_processes(0) as client, trainer_of(policy, client, 1, timeout_s=1.5, seed_wire=seed_wire) as trainer:
        client.reports()
        joiner = WorkerProcess(3, (step, 1, signal.SIGSTOP))
        try:
            joiner.tell("init", trainer.worker_init_info)
            wait_for_connection(trainer)
            policy.step(0)
            report = trainer.send_weights()
            assert (report.num_verified, len(report.evicted)) == (1, 1)
            assert client.workers[0].reply().version == 1
            joiner.signal(signal.SIGCONT)
            with pytest.raises(WorkerError):
                joiner.reply()
            status = joiner.ask("status")
            committed = (ServingStatus.STALE, 0) if step == "voted" else (ServingStatus.EMPTY, None)
            assert (status.status, status.version) == committed
            joiner.tell("init", trainer.worker_init_info)
            wait_for_connection(trainer)
            assert trainer.send_weights().num_verified == 2
            assert joiner.reply().version == 2
            assert joiner.ask("weights") == weights_of(policy)
        finally:
            joiner.stop()


@pytest.mark.parametrize("step", ["proposed", "all ready", "sending", "sent", "all voted"])
def test_a_trainer_that_dies_while_it_seeds_leaves_workers_that_serve_nothing(step: str) -> None:
    """Their bits are nobody's version; an heir of the run seeds them."""
    trainer: EngineProcess = TrainerProcess(info(2, **DENSE), step, 1, signal.SIGKILL)
    with worker_processes(7, 8) as client:
        try:
            client.init_transfer_engine(trainer.hear())
            assert trainer.exit_code() == -signal.SIGKILL
        finally:
            trainer.stop()
        for worker in client.workers:
            with pytest.raises(WorkerError, match="the connection"):
                worker.reply()
            status = worker.ask("status")
            assert (status.status, status.version) == (ServingStatus.EMPTY, None)
        policy = Policy(0)
        with trainer_of(policy, client, 2, epoch=1, **DENSE):
            assert [worker.reply().status for worker in client.workers] == [ServingStatus.SERVING] * 2
            assert [worker.ask("weights") for worker in client.workers] == [weights_of(policy)] * 2


@pytest.mark.parametrize("step", ["_prepare", "_receive_payload", "_apply", "_audit", "_await_decision"])
def test_an_interrupted_joiner_serves_nothing_and_can_come_again(step: str) -> None:
    """Ctrl-C anywhere in its seed: what is there is nobody's version."""
    policy, served = Policy(0), Policy(3)
    joiner = SparseNcclWorker(ModuleSource(served))

    def interrupt(*args: Any, **options: Any) -> None:
        getattr(SparseNcclWorker, step)(joiner, *args, **options)
        raise KeyboardInterrupt

    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, **DENSE) as trainer:
        setattr(joiner, step, interrupt)
        with joining(joiner, trainer) as errors:
            assert trainer.send_weights().num_verified == 1
        assert [type(error) for error in errors] == [KeyboardInterrupt]
        assert (joiner.status.status, joiner.state.version) == (ServingStatus.EMPTY, None)
        delattr(joiner, step)
        with joining(joiner, trainer) as errors:
            policy.step(0)
            assert trainer.send_weights().num_verified == 2
        assert errors == []
        assert weights_of(served) == weights_of(policy)
    joiner.shutdown()


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While the list is not empty, rank 0 flips a bit in every slab that it sends."""
    armed, post = list[bool](), PayloadGroup.post

    def flip(group: PayloadGroup, tensors: Sequence[torch.Tensor], deadline: Any) -> None:
        if armed and group.rank == 0:
            tensors[0].view(-1)[0] ^= 1
        post(group, tensors, deadline)

    monkeypatch.setattr(PayloadGroup, "post", flip)
    return armed


def test_bits_that_change_on_the_way_are_named_and_nobody_serves_them(damage: list[bool]) -> None:
    """The joiner's audit finds them before its vote: it is let go, and the others are published to."""
    policy, served = Policy(0), Policy(3)
    joiner = SparseNcclWorker(ModuleSource(served))
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, seed_wire="dense") as trainer:
        real = joiner._audit

        def stop_damage(*arguments: Any) -> Any:
            damage.clear()
            return real(*arguments)

        joiner._audit = stop_damage  # type: ignore[assignment, method-assign]
        damage.append(True)
        with joining(joiner, trainer) as errors:
            policy.step(0)
            report = trainer.send_weights()
        assert (report.num_verified, len(report.workers), len(report.evicted)) == (1, 1, 1)
        assert isinstance(errors[0], TransportError)
        assert (joiner.status.status, joiner.status.version) == (ServingStatus.EMPTY, None)
        with joining(joiner, trainer) as errors:
            assert trainer.send_weights().num_verified == 2
        assert weights_of(served) == weights_of(policy)
    joiner.shutdown()


def test_a_repair_that_arrives_damaged_is_no_repair(damage: list[bool]) -> None:
    """The worker says so and serves nothing; nothing else was written."""
    policy, served = Policy(0), Policy(0)
    with (
        in_process(served) as (workers, _),
        trainer_of(policy, TolerantClient(workers), 1, audit="full", seed_wire="dense") as trainer,
    ):
        incoming = workers[0]._incoming

        def damage_repairs(propose: Propose, header: bytes) -> Any:
            if propose.wire == "dense":
                damage.append(True)
            return incoming(propose, header)

        workers[0]._incoming = damage_repairs  # type: ignore[method-assign]
        served.get_parameter("up").data.view(torch.int16)[3, 5] ^= 1
        policy.step(0)
        with pytest.raises(TransportError, match="damaged again after it was sent whole: up"):
            trainer.send_weights()
        assert (workers[0].status.status, workers[0].status.version) == (ServingStatus.EMPTY, None)
        assert [item.parameter for item in workers[0].state.audit()] == ["up"]


@pytest.mark.parametrize("wire", SEED_WIRES)
def test_a_damaged_baseline_is_not_the_joiners_fault(wire: SeedWire) -> None:
    """Once the joiner was let go as damaged. It is named on the trainer's side, and nobody serves the bad bit."""
    policy, served = Policy(0), Policy(3)
    joiner = SparseNcclWorker(ModuleSource(served))
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, seed_wire=wire) as trainer:
        memory = trainer.baseline.state.memory("up").tensor
        memory.view(torch.int16).flatten()[7] ^= 1
        with joining(joiner, trainer) as errors, pytest.raises(CorruptionError, match=r"trainer's baseline.*up"):
            trainer.send_weights()
        assert joiner.status.status is ServingStatus.EMPTY
        memory.view(torch.int16).flatten()[7] ^= 1
        with joining(joiner, trainer) as errors:
            assert trainer.send_weights().num_verified == 2
        assert errors == []
    joiner.shutdown()


def test_slabs_beyond_a_workers_limit_are_refused_before_anything_is_sent() -> None:
    """They are no larger than what is sent: the same limit lets a repair through."""
    policy, served = Policy(0), Policy(3)
    before = weights_of(served)
    joiner = SparseNcclWorker(ModuleSource(served), max_payload_bytes=2048)
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, seed_wire="dense") as trainer:
        with joining(joiner, trainer) as errors:
            report = trainer.send_weights()
        assert len(report.evicted) == 1
        assert isinstance(errors[0], TransportError)
        assert weights_of(served) == before
    joiner.shutdown()


def test_a_worker_that_knows_no_dense_wire_gets_a_container_and_so_do_the_others() -> None:
    """Under auto; asked for by name, it is refused by name before anything is sent."""
    policy, old, new = Policy(0), Policy(3), Policy(4)
    workers = [SparseNcclWorker(ModuleSource(module)) for module in (old, new)]
    workers[0]._wires = ["container"]
    rounds = [heard(worker) for worker in workers]
    client = TolerantClient(workers)
    with pytest.raises(InputError, match="cannot receive wire 'dense'"):
        SparseNcclTrainer.trainer_init(info(2, seed_wire="dense"), ModuleSource(policy), client)
    assert rounds == [[], []]
    with trainer_of(policy, client, 2, epoch=1):
        assert rounds == [[("container", -1, True)]] * 2
        assert [weights_of(module) for module in (old, new)] == [weights_of(policy)] * 2
    for worker in workers:
        worker.shutdown()


@pytest.mark.parametrize(
    ("asked", "wires", "device", "wire"),
    [
        ("auto", [["container", "dense"], ["dense", "raw"]], "cuda:0", "dense"),
        ("auto", [["container", "dense"], ["container"]], "cuda:0", "container"),
        ("auto", [["container", "dense"]], "cpu", "container"),
        ("dense", [["dense"]], "cpu", "dense"),
        ("container", [["container", "dense"]], "cuda:0", "container"),
    ],
)
def test_auto_is_dense_between_gpus_if_everybody_knows_it(
    asked: SeedWire, wires: list[list[str]], device: str, wire: str
) -> None:
    """By name, it is what was asked for."""
    workers = [(f"w{number}", known) for number, known in enumerate(wires)]
    assert choose_seed_wire(asked, workers=workers, device=torch.device(device)).wire == wire


@pytest.mark.parametrize("options", [{"seed_wire": "raw"}, {"slab_bytes": 0}, {"slab_bytes": 100}])
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    """Before anything is made of them."""
    with pytest.raises(InputError, match=r"seed_wire|slab_bytes"):
        TrainerInitInfo(num_workers=1, **options)


# A payload by itself: the group is never met, so that touching it would raise.

WEIGHTS = {"a": torch.arange(40, dtype=torch.float32), "b": torch.tensor(2, dtype=torch.int16), "c": torch.zeros(3, 0)}


def baseline_of(version: int = 4) -> Baseline:
    return Baseline(StateDictSource(WEIGHTS), run_id="run", version=version)


def proposed(payload: DenseOutgoing, **changes: Any) -> Propose:
    base = -1 if payload.base_version is None else payload.base_version
    propose = Propose("run", RoundKey(0, 1, 1), "dense", base, payload.target_version, payload.target_digest,
                      payload.payload_bytes, payload.overlaps, [1])  # fmt: skip
    return replace(propose, **changes)


def incoming(propose: Propose, header: bytes, state: WeightState) -> DenseIncoming:
    def written() -> None:
        raise AssertionError("written before READY")

    return DenseIncoming(propose, header, state, group_of(1, 2, "cpu"), written)


def test_a_header_is_what_the_documentation_says() -> None:
    """Byte by byte: one parameter of three, by its place, with the fingerprint that a naive twin gives it."""
    table = baseline_of().state.table.digest.removeprefix("xxh3_128:")
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), ["b"], slab_bytes=64)
    body = b"\x89DCD\r\n\x1a\n" + struct.pack("<IIQ", 1, 0, 16) + bytes.fromhex(table)
    body += struct.pack("<QI", bytes_fingerprint(struct.pack("<h", 2), 2), 1)
    assert payload.header == body + xxhash.xxh3_128_digest(body)
    assert payload.payload_bytes == payload.buffer_bytes == 32


@pytest.mark.parametrize("names", [None, ["a", "b"], []])
def test_what_is_proposed_is_accepted(names: list[str] | None) -> None:
    """By a receiver that is ready before anything is written, and by a bystander."""
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), names, slab_bytes=48)
    state = WeightState({name: tensor.clone() for name, tensor in WEIGHTS.items()}, version=4)
    accepted = incoming(proposed(payload), payload.header, state)
    assert (accepted.is_seed, accepted.publishes, accepted.repairs) == (names is None, False, tuple(names or ()))
    assert accepted.buffer_bytes == payload.payload_bytes == (96 if names != [] else 32)
    drain = DenseDrain(proposed(payload), payload.header, state.table, group_of(1, 2, "cpu"))
    assert (drain.buffer_bytes, drain.drains, drain.publishes) == (payload.payload_bytes, True, False)


def test_a_target_that_is_not_in_rows_needs_room_to_be_gathered() -> None:
    """160 bytes of it, beside two slabs."""
    state = WeightState({**WEIGHTS, "a": torch.zeros(40, 2)[:, 0]})
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), slab_bytes=48)
    assert incoming(proposed(payload), payload.header, state).buffer_bytes == 2 * 48 + 160


@pytest.mark.parametrize(
    ("names", "changes", "error"),
    [
        (None, {"base_version": 4}, BaseError),
        (None, {"target_digest": OTHER_DIGEST}, VerificationError),
        (None, {"payload_bytes": 95}, ProtocolError),
        (["a"], {"base_version": -1}, FormatError),
        (["a"], {"base_version": 3}, BaseError),
        (["a"], {"target_version": 5}, BaseError),
        (["a"], {"target_digest": OTHER_DIGEST}, BaseError),
    ],
)
def test_a_proposal_that_does_not_fit_is_refused(
    names: list[str] | None, changes: dict[str, Any], error: type[DeltacastError]
) -> None:
    """Of a seed, and of a repair; nothing is written and no state moves."""
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), names, slab_bytes=48)
    damaged = {**WEIGHTS, "a": torch.zeros(40)} if names is None else WEIGHTS
    state = WeightState({name: tensor.clone() for name, tensor in damaged.items()}, version=4)
    with pytest.raises(error):
        incoming(proposed(payload, **changes), payload.header, state)
    assert state.audit() == []
    assert state.version == 4


def test_a_repair_is_refused_by_weights_that_have_no_version() -> None:
    """Whatever they hold."""
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), ["a"], slab_bytes=48)
    state = WeightState({name: tensor.clone() for name, tensor in WEIGHTS.items()})
    with pytest.raises(BaseError, match="version None"):
        incoming(proposed(payload), payload.header, state)


def test_every_bit_of_a_header_counts() -> None:
    """Flipped, cut or lengthened, it is refused with an error of ours."""
    table = baseline_of().state.table
    header = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), slab_bytes=48).header
    cut = [header[:length] for length in range(len(header))]
    for bad in [flipped(header, bit) for bit in range(8 * len(header))] + cut + [header + b"\0"]:
        with pytest.raises((FormatError, ChecksumError)):
            DenseHeader.from_bytes(bad, table)


@pytest.mark.parametrize(
    ("slab_bytes", "places", "error"),
    [
        (0, [0], "bad slab size"),
        (40, [0], "bad slab size"),
        (48, [3], "each once and in order"),
        (48, [1, 1], "each once and in order"),
        (48, [1, 0], "each once and in order"),
        (48, [(1 << 32) - 1], "each once and in order"),
    ],
)
def test_a_sealed_header_that_breaks_a_rule_is_refused(slab_bytes: int, places: list[int], error: str) -> None:
    """The checksum is right, and proves nothing."""
    table, fingerprints = baseline_of().state.table, np.zeros(len(places), np.uint64)
    raw = DenseHeader(slab_bytes, np.array(places, np.uint32), fingerprints).to_bytes(table)
    with pytest.raises(FormatError, match=error):
        DenseHeader.from_bytes(raw, table)


def test_a_header_of_another_table_is_refused() -> None:
    """By its digest."""
    header = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), slab_bytes=48).header
    with pytest.raises(TableError, match="another parameter table"):
        DenseHeader.from_bytes(header, WeightState({"a": torch.zeros(40)}).table)


def test_a_repair_is_proven_by_the_payload_itself() -> None:
    """A bit that is still wrong when it has arrived is named, whatever the worker audits beside that."""
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), ["a"], slab_bytes=48)
    state = WeightState({name: tensor.clone() for name, tensor in WEIGHTS.items()}, version=4)
    accepted = incoming(proposed(payload), payload.header, state)
    state.memory("a").tensor.view(torch.int32)[39] ^= 1
    with pytest.raises(CorruptionError, match="did not arrive as it was sent: a"):
        accepted.apply()


@pytest.mark.parametrize("names", [None, ["a"]])
def test_a_payload_that_breaks_leaves_a_seed_without_a_version_and_a_repair_with_its_own(
    names: list[str] | None,
) -> None:
    """What was promised of damaged parameters is promised still, so that the next audit names them."""
    payload = DenseOutgoing(baseline_of(), group_of(0, 2, "cpu"), names, slab_bytes=48)
    state = WeightState({name: tensor.clone() for name, tensor in WEIGHTS.items()}, version=4)
    state.memory("a").tensor.view(torch.int32)[39] ^= 1
    written = list[bool]()
    group = group_of(1, 2, "cpu")
    accepted = DenseIncoming(proposed(payload), payload.header, state, group, lambda: written.append(True))
    accepted.rollback()
    assert state.version == 4
    with pytest.raises(TransportError):
        accepted.receive(group, Inbox("the trainer"), Deadline(1))
    for _ in range(2):
        accepted.rollback()
        assert state.version == (None if names is None else 4)
        assert [item.parameter for item in state.audit()] == ([] if names is None else ["a"])
    assert written == [True]
