"""Workers that say what is not so, or what is not a message at all: nobody follows them and nobody waits for them."""

from __future__ import annotations

import copy
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from torch import nn

from deltacast.delta.errors import RoundAbortedError, TransportError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus, WorkerInitInfo
from deltacast.engines.control import Channel
from deltacast.engines.protocol import Message, RoundKey, encode_message
from deltacast.engines.sparse_nccl import SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import EVERY_WIRE, TolerantClient, raised, trainer_of, wait_for_connection

pytestmark = pytest.mark.timeout(60)
Lie: TypeAlias = Callable[[Channel, Any], Message | None]
OTHER_DIGEST = "xxh3_128:" + "0" * 32


class Liar(SparseNcclWorker):
    """A worker that changes, once, the first message of a kind that it sends after it was armed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(ModuleSource(module))
        self.kind, self.lie = "", NOISE["half a frame"]

    def arm(self, kind: str, lie: Lie) -> None:
        self.kind, self.lie = kind, lie

    def _send(self, message: Message, info: WorkerInitInfo) -> None:
        if message.kind == self.kind:
            self.kind = ""
            told = self.lie(self._connected(), message)
            if told is None:
                return
            message = told
        super()._send(message, info)


def raw(data: bytes) -> Lie:
    def send(channel: Channel, _: Message) -> None:
        channel._sock.sendall(data)

    return send


def changed(**fields: Any) -> Lie:
    return lambda _, message: replace(message, **fields)


def of_next_round(_: Channel, message: Message) -> Message:
    return replace(message, key=replace(message.key, round=message.key.round + 1))


def hang_up(channel: Channel, _: Message) -> None:
    channel._sock.sendall(struct.pack("<II", 100, 0) + b"{")
    channel.close()


def framed(data: bytes) -> bytes:
    return struct.pack("<II", len(data), 0) + data


NOISE: Mapping[str, Lie] = {
    "of another round": of_next_round,
    "of another run": changed(run_id="other"),
    "of a round with a negative number": changed(key=RoundKey(0, 1, -7)),
    "no JSON": raw(framed(b"\xff\x00{")),
    "deep JSON": raw(framed(b"[" * 100_000)),
    "a frame of 4 GiB": raw(struct.pack("<II", 0xFFFFFFFF, 0)),
    "half a frame": hang_up,
}


@pytest.mark.parametrize("lie", NOISE)
@pytest.mark.parametrize("kind", ["ready", "verdict", "ack"])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_worker_that_sends_noise_is_dropped_and_the_others_go_on(wire: str, kind: str, lie: str) -> None:
    """Before the decision the round aborts; after it the version stands. Nobody waits for a deadline."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    liar, truthful = Liar(served[0]), SparseNcclWorker(ModuleSource(served[1]))
    before = weights_of(policy)
    with trainer_of(policy, TolerantClient([liar, truthful]), 2, wire=wire) as trainer:
        policy.step(0)
        liar.arm(kind, NOISE[lie])
        if kind == "ack":
            assert len(trainer.send_weights().evicted) == 1
        else:
            with pytest.raises(RoundAbortedError) as caught:
                trainer.send_weights()
            assert len(caught.value.report.evicted) == 1
            assert weights_of(served[1]) == before
        assert truthful.status.status is ServingStatus.SERVING
        assert truthful.status.version == (1 if kind == "ack" else 0)
        policy.step(1)
        report = trainer.send_weights()
        assert [worker.verified for worker in report.workers] == [True]
        assert weights_of(served[1]) == weights_of(policy)
        assert liar.status.status is ServingStatus.STALE
    truthful.shutdown()


def test_a_frame_too_long_behind_a_good_one_is_that_workers_fault() -> None:
    """It lies in the buffer when the next answer is waited for: once, that made the trainer unusable for ever."""

    def add_noise(channel: Channel, message: Message) -> None:
        body = encode_message(message)
        channel._sock.sendall(framed(body) + struct.pack("<II", 0xFFFFFFFF, 0))

    policy, served = Policy(0), [Policy(0), Policy(0)]
    liar, truthful = Liar(served[0]), SparseNcclWorker(ModuleSource(served[1]))
    with trainer_of(policy, TolerantClient([liar, truthful]), 2) as trainer:
        liar.arm("verdict", add_noise)
        assert len(trainer.send_weights().evicted) == 1
        policy.step(1)
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served[1]) == weights_of(policy)
    truthful.shutdown()


def test_a_wrong_digest_aborts_and_names_what_was_found() -> None:
    """The worker stays: it holds the base, and the next round may go well."""
    policy, served = Policy(0), Policy(0)
    liar = Liar(served)
    before = weights_of(policy)
    with trainer_of(policy, TolerantClient([liar]), 1) as trainer:
        policy.step(0)
        liar.arm("verdict", changed(digest=OTHER_DIGEST))
        with pytest.raises(RoundAbortedError, match=f"digest {OTHER_DIGEST}, expected xxh3_128:"):
            trainer.send_weights()
        assert weights_of(served) == before
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served) == weights_of(policy)
    liar.shutdown()


@pytest.mark.parametrize("fields", [{"digest": OTHER_DIGEST}, {"version": 7}])
def test_an_acknowledgement_of_something_else_evicts(fields: dict[str, object]) -> None:
    """Digest and version must both be the committed ones, or the worker has to come again."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    liar, truthful = Liar(served[0]), SparseNcclWorker(ModuleSource(served[1]))
    with trainer_of(policy, TolerantClient([liar, truthful]), 2) as trainer:
        liar.arm("ack", changed(**fields))
        report = trainer.send_weights()
        assert (report.committed, report.num_verified, len(report.evicted)) == (True, 1, 1)
        assert "acknowledged" in next(worker.error for worker in report.workers if worker.error)
    truthful.shutdown()


@pytest.mark.parametrize("kind", ["verdict", "ack"])
def test_an_unknown_parameter_reported_as_damaged_is_that_workers_fault(kind: str) -> None:
    """Once, the trainer failed with it at every later call."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    liar, truthful = Liar(served[0]), SparseNcclWorker(ModuleSource(served[1]))
    with trainer_of(policy, TolerantClient([liar, truthful]), 2) as trainer:
        liar.arm(kind, changed(damaged=["no.such"], error="damaged"))
        if kind == "verdict":
            with pytest.raises(RoundAbortedError, match="damaged"):
                trainer.send_weights()
        else:
            assert trainer.send_weights().committed
        policy.step(1)
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served[1]) == weights_of(policy)
    truthful.shutdown()


@pytest.mark.parametrize("version", [-2, 1 << 62, (1 << 63) - 1, 1 << 70])
def test_a_version_that_no_next_one_fits_above_is_refused(version: int) -> None:
    """It never reaches the counter that all versions come from."""
    policy, served = Policy(0), Policy(0)
    joiner = SparseNcclWorker(ModuleSource(copy.deepcopy(policy)))
    joiner._run_id, joiner._state.version = "run", 0
    joiner._hello = lambda: replace(SparseNcclWorker._hello(joiner), version=version)  # type: ignore[method-assign]
    errors: list[BaseException] = []
    worker = SparseNcclWorker(ModuleSource(served))
    with trainer_of(policy, TolerantClient([worker]), 1) as trainer:
        thread = threading.Thread(target=lambda: errors.append(raised(joiner, trainer.worker_init_info)))
        thread.start()
        wait_for_connection(trainer)
        assert trainer.send_weights().target_version == 1
        thread.join(20)
        assert isinstance(errors[0], TransportError)
    worker.shutdown()


def test_damage_to_unknown_parameters_at_a_handshake_leads_to_a_seed() -> None:
    """What cannot be repaired by name is sent whole."""
    policy, served = Policy(0), Policy(0)
    worker = SparseNcclWorker(ModuleSource(served))
    with trainer_of(policy, TolerantClient([worker]), 1):
        pass
    worker._hello = lambda: replace(SparseNcclWorker._hello(worker), damaged=["no.such"])  # type: ignore[method-assign]
    with trainer_of(policy, TolerantClient([worker]), 1, epoch=1) as trainer:
        assert trainer.send_weights().num_verified == 1
    worker.shutdown()
