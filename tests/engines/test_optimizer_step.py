"""The optimizer step that a version is published with: metadata that every wire tells and every report says."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from deltacast.delta.errors import InputError, RoundAbortedError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.sparse_nccl import SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import EVERY_WIRE, SEED_WIRES, TolerantClient, in_process, trainer_of, wait_for_connection

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_the_step_goes_with_the_version(wire: str) -> None:
    """It may be left out, and go back; before the first version that was published with one there is none."""
    policy = Policy(0)
    with in_process(Policy(0)) as (workers, client), trainer_of(policy, client, 1, wire=wire) as trainer:
        assert workers[0].status.optimizer_step is None
        steps: list[Any] = [7, None, 3, 0, np.int64(4)]
        for step in steps:
            policy.step(0)
            report = trainer.send_weights(optimizer_step=step)
            assert (report.wire, report.optimizer_step) == (wire, step)
            assert report.as_dict()["optimizer_step"] == step
            assert workers[0].status.optimizer_step == workers[0]._last_report.optimizer_step == step


@pytest.mark.parametrize("seed_wire", SEED_WIRES)
def test_a_worker_that_is_seeded_or_repaired_hears_the_step_of_what_it_gets(seed_wire: str) -> None:
    """Though the round after it brings another version: the damaged one takes no part in that."""
    policy, served = Policy(0), Policy(3)
    joiner = SparseNcclWorker(ModuleSource(served))
    steps = list[int | None]()
    options: dict[str, Any] = {"seed_wire": seed_wire, "audit": "full"}
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, **options) as trainer:
        trainer.send_weights(optimizer_step=10)
        keep = joiner._keep

        def note(*arguments: Any) -> None:
            keep(*arguments)
            steps.append(joiner.status.optimizer_step)

        joiner._keep = note  # type: ignore[assignment, method-assign]
        thread = threading.Thread(target=lambda: joiner.init_transfer_engine(trainer.worker_init_info))
        thread.start()
        wait_for_connection(trainer)
        trainer.send_weights(optimizer_step=20)
        thread.join(20)
        assert steps == [10, 20]
        assert weights_of(served) == weights_of(policy)
    joiner.shutdown()


def test_a_round_that_is_aborted_leaves_the_step_that_was() -> None:
    """As it leaves the version."""
    policy = Policy(0)
    with in_process(Policy(0)) as (workers, _), trainer_of(policy, TolerantClient(workers), 1) as trainer:
        trainer.send_weights(optimizer_step=1)
        workers[0]._undo_budget_bytes = 0
        policy.step(0)
        with pytest.raises(RoundAbortedError) as caught:
            trainer.send_weights(optimizer_step=2)
        assert caught.value.report.optimizer_step == 2
        assert (workers[0].status.version, workers[0].status.optimizer_step) == (1, 1)


def test_a_number_that_comes_without_a_step_has_none() -> None:
    """A worker keeps its step with its version; a trainer's other number for the same bits drops it."""
    policy = Policy(0)
    with in_process(Policy(0)) as (workers, client):
        with trainer_of(policy, client, 1) as trainer:
            trainer.send_weights(optimizer_step=8)
        with trainer_of(policy, client, 1, epoch=1, version=1):
            assert (workers[0].status.version, workers[0].status.optimizer_step) == (1, 8)
        with trainer_of(policy, client, 1, run_id="other", version=5):
            assert (workers[0].status.version, workers[0].status.optimizer_step) == (5, None)


@pytest.mark.parametrize("step", [-1, 1 << 62, 1.5, "7"])
def test_a_step_that_no_message_holds_is_refused_before_anything_is_sent(step: Any) -> None:
    """By name; the next call works."""
    policy = Policy(0)
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1) as trainer:
        with pytest.raises(InputError, match="optimizer_step"):
            trainer.send_weights(optimizer_step=step)
        assert trainer.send_weights(optimizer_step=0).num_verified == 1
