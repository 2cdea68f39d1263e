"""Updates that travel while the trainer goes on. Right values: the bytes that the weights had when they were read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deltacast.delta.errors import DeadlineError, RoundAbortedError, StateError, TableError
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import EVERY_WIRE, in_process, info, trainer_of

WAIT_S = 30.0


@contextmanager
def held_back(worker: SparseNcclWorker, method: str = "_vote") -> Iterator[threading.Event]:
    """Hold a worker up before it votes, until the event that is yielded is set."""
    gate, real = threading.Event(), getattr(worker, method)

    def wait(*arguments: Any) -> Any:
        assert gate.wait(WAIT_S)
        return real(*arguments)

    setattr(worker, method, wait)
    try:
        yield gate
    finally:
        gate.set()
        delattr(worker, method)


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_weights_may_change_once_they_are_read_and_what_was_read_is_what_arrives(wire: str) -> None:
    """The next step runs while the worker has not even voted; the baseline moves by what was sent."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], client), trainer_of(policy, client, 1, wire=wire) as trainer:
        for step in range(3):
            policy.step(step)
            sent = weights_of(policy)
            with held_back(worker) as gate:
                pending = trainer.send_weights_async(optimizer_step=step)
                pending.wait_until_read(WAIT_S)
                policy.step(100 + step)
                assert not pending.done
                gate.set()
                report = pending.result(WAIT_S)
            assert (report.num_verified, report.optimizer_step, report.target_version) == (1, step, step + 1)
            assert weights_of(served) == sent
        assert trainer.send_weights().num_verified == 1
        assert weights_of(served) == weights_of(policy)


def test_another_call_before_the_first_has_ended_is_refused() -> None:
    """By both ways to make one; the first is not disturbed, and may be asked again and again."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], client), trainer_of(policy, client, 1) as trainer:
        policy.step(0)
        with held_back(worker) as gate:
            pending = trainer.send_weights_async()
            pending.wait_until_read(WAIT_S)
            for call in (trainer.send_weights, trainer.send_weights_async):
                with pytest.raises(StateError, match="already running"):
                    call()
            with pytest.raises(DeadlineError, match="still under way"):
                pending.result(0.0)
            gate.set()
            assert pending.result(WAIT_S) is pending.result(WAIT_S)
        assert weights_of(served) == weights_of(policy)
        assert trainer.send_weights_async().result(WAIT_S).target_version == 2


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_weights_that_were_released_are_not_read_again_for_a_repair(wire: str) -> None:
    """A damaged worker ends the call where a blocking one would have sent twice: the weights may have moved since."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], client), trainer_of(policy, client, 1, wire=wire, audit="full") as trainer:
        policy.step(0)
        with held_back(worker) as gate:
            pending = trainer.send_weights_async()
            pending.wait_until_read(WAIT_S)
            served.get_buffer("bias").view(torch.int32)[0] ^= 1
            policy.step(1)
            gate.set()
            with pytest.raises(RoundAbortedError, match="bias"):
                pending.result(WAIT_S)
        report = trainer.send_weights()
        assert (report.num_verified, report.target_version) == (1, 1)
        assert weights_of(served) == weights_of(policy)


def test_a_source_that_fails_is_not_read_any_more() -> None:
    """Nobody waits for weights that will not be read; the error comes with the result."""
    policy = Policy(0)
    tensors = {name: tensor for name, tensor in policy.state_dict().items() if name != "head"}
    with in_process(Policy(0)) as (_, client):
        trainer = SparseNcclTrainer.trainer_init(info(1), StateDictSource(tensors), client)
        tensors["up"] = tensors["up"].float()
        pending = trainer.send_weights_async()
        pending.wait_until_read(WAIT_S)
        with pytest.raises(TableError, match="'up'"):
            pending.result(WAIT_S)
        trainer.shutdown()


def test_a_shutdown_lets_an_update_end() -> None:
    """It is committed, and nothing of the trainer's is left running."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], client):
        trainer = SparseNcclTrainer.trainer_init(info(1), ModuleSource(policy), client)
        policy.step(0)
        with held_back(worker) as gate:
            pending = trainer.send_weights_async()
            pending.wait_until_read(WAIT_S)
            threading.Timer(0.05, gate.set).start()
            trainer.shutdown()
        assert pending.result(0.0).num_verified == 1
        assert weights_of(served) == weights_of(policy)
        with pytest.raises(StateError, match="shut down"):
            trainer.send_weights_async()
