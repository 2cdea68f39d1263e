"""`durability="before_commit"`: the store's version file is the decision, whatever becomes of the publish."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deltacast.delta.errors import FencedError, RoundAbortedError, StateError, StoreError
from deltacast.engines.base import ServingStatus
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.store import VersionStore
from deltacast.store.objects import Buffer
from engine_processes import Policy
from engine_setups import EVERY_WIRE, TolerantClient, in_process, trainer_of
from failing_backend import FullDisk, Gate, cut_off_from, nothing
from stored_runs import covered, failing_store, reopened, stored

pytestmark = pytest.mark.timeout(120)


class Fleet:
    """A trainer that publishes first, its worker, and their store.

    Args:
        options: of the trainer.
    """

    def __init__(self, **options: Any) -> None:
        self.store, self.backend = failing_store()
        self.policy, self.served = Policy(0), Policy(0)
        self._options = {"store": self.store, "durability": "before_commit", **options}

    @contextmanager
    def running(self) -> Iterator[tuple[SparseNcclTrainer, SparseNcclWorker]]:
        with (
            in_process(self.served) as ([worker], _),
            trainer_of(self.policy, TolerantClient([worker]), 1, **self._options) as trainer,
        ):
            yield trainer, worker


@contextmanager
def heir_of(store: VersionStore, worker: SparseNcclWorker) -> Iterator[tuple[SparseNcclTrainer, Policy]]:
    """A trainer that starts from the store, with weights of its own, and the worker."""
    policy = Policy(7)
    with trainer_of(policy, TolerantClient([worker]), 1, store=store, durability="before_commit") as trainer:
        yield trainer, policy


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_no_worker_serves_a_version_before_it_is_in_the_store(wire: str) -> None:
    """While the version file is held up the worker serves nothing; once it exists the worker commits."""
    fleet, seen = Fleet(wire=wire), list[Any]()
    with fleet.running() as (trainer, worker):

        def look(call: str, name: str) -> None:
            if call == "create" and name.startswith("versions/"):
                seen.append((worker.status.status, trainer.decisions.lookup(trainer._key())))

        fleet.backend.before = look
        fleet.policy.step(0)
        assert trainer.send_weights().published_through == 1
        assert seen == [(ServingStatus.EMPTY, None)]
        assert stored(fleet.store, 1) == covered(fleet.served) == covered(fleet.policy)


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_publish_that_failed_aborts_the_round(wire: str) -> None:
    """Everybody is at the base, the store as well; with room again the same weights go through, in the same number."""
    fleet = Fleet(wire=wire)
    with fleet.running() as (trainer, worker):
        before = covered(fleet.served)
        fleet.policy.step(0)
        fleet.backend.before = FullDisk()
        for _ in range(2):
            with pytest.raises(RoundAbortedError, match="version 1 could not be published: no room for updates/"):
                trainer.send_weights()
            assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 0)
            assert covered(fleet.served) == before
            assert worker.state.audit() == trainer.baseline.state.audit() == []
        assert fleet.store.versions() == range(1)
        fleet.backend.before = nothing
        report = trainer.send_weights()
        assert (report.target_version, report.published_through, report.num_verified) == (1, 1, 1)
        assert stored(fleet.store, 1) == covered(fleet.served) == covered(fleet.policy)


def test_an_answer_that_was_lost_is_looked_up() -> None:
    """The version file exists, though its creation seemed to fail: once a later attempt confirms it, that is COMMIT."""
    fleet, created = Fleet(), list[str]()
    with fleet.running() as (trainer, worker):
        fleet.policy.step(0)

        def lose(call: str, name: str) -> None:
            """Lose the answers to both attempts of the first publish."""
            if call == "create" and name.startswith("versions/"):
                created.append(name)
                if len(created) <= 2:
                    raise StoreError(f"no answer to {call} {name}")

        fleet.backend.after = lose
        assert trainer.send_weights().published_through == 1
        assert (worker.status.status, worker.status.version) == (ServingStatus.SERVING, 1)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_publish_of_which_nobody_knows_ends_the_trainer_and_a_new_one_goes_by_the_store(
    wire: str, exists: bool
) -> None:
    """No decision is made and none told; the worker goes back and is stale. The store's newest version counts."""
    fleet = Fleet(wire=wire)
    with fleet.running() as (trainer, worker):
        before = covered(fleet.served)
        fleet.policy.step(0)
        silent = cut_off_from("create", "versions/", fleet.backend)
        fleet.backend.before, fleet.backend.after = (nothing, silent) if exists else (silent, nothing)
        with pytest.raises(StoreError, match="nobody knows whether version 1 was published"):
            trainer.send_weights()
        assert trainer.decisions.lookup(trainer._key()) is None
        assert (worker.status.status, worker.status.version) == (ServingStatus.STALE, 0)
        assert covered(fleet.served) == before
        with pytest.raises(StateError, match="shut down"):
            trainer.send_weights()
        fleet.backend.before = fleet.backend.after = nothing
        newest = fleet.store.head()
        assert newest is not None
        assert newest.version == int(exists)
        expected = covered(fleet.policy) if exists else before
        with heir_of(reopened(fleet.store), worker) as (heir, policy):
            assert (worker.status.version, heir.baseline.epoch) == (newest.version + 1, 2)
            assert covered(fleet.served) == stored(fleet.store, newest.version + 1) == expected
            heir.send_weights()
            assert covered(fleet.served) == stored(fleet.store, newest.version + 2) == covered(policy)


def test_a_store_that_does_not_answer_in_time_is_one_of_which_nobody_knows() -> None:
    """Even if it does what it was asked for afterwards."""
    fleet, gate = Fleet(timeout_s=1.0), Gate()
    with fleet.running() as (trainer, worker):
        fleet.policy.step(0)
        fleet.backend.before = gate
        with pytest.raises(StoreError, match="did not answer in time"):
            trainer.send_weights()
        gate.open()
        assert (worker.status.status, worker.status.version) == (ServingStatus.STALE, 0)


def test_a_trainer_whose_run_was_taken_over_commits_nothing_more() -> None:
    """The round is aborted, and then there are no more rounds."""
    fleet = Fleet()
    with fleet.running() as (trainer, worker):
        reopened(fleet.store).claim()
        before = covered(fleet.served)
        fleet.policy.step(0)
        with pytest.raises(RoundAbortedError, match="another writer has taken over"):
            trainer.send_weights()
        assert (worker.status.version, covered(fleet.served)) == (0, before)
        for _ in range(2):
            with pytest.raises(FencedError, match="gone on without this trainer"):
                trainer.send_weights()
        assert fleet.store.versions() == range(2)


def test_a_request_that_comes_through_after_its_abort_ends_the_trainer() -> None:
    """The version exists, and no worker ever serves it under its number: the trainer finds it at its next publish."""
    fleet, late = Fleet(), list[tuple[str, bytes]]()
    create = fleet.backend.create
    with fleet.running() as (trainer, worker):

        def stay_behind(name: str, data: Buffer) -> None:
            late.append((name, bytes(data)))
            raise StoreError("the answer did not come")

        fleet.policy.step(0)
        fleet.backend.create = stay_behind  # type: ignore[method-assign]
        with pytest.raises(RoundAbortedError, match="the answer did not come"):
            trainer.send_weights()
        create(*late[0])
        fleet.backend.create = create  # type: ignore[method-assign]
        before = covered(fleet.served)
        fleet.policy.step(1)
        with pytest.raises(RoundAbortedError, match="not based on the newest version"):
            trainer.send_weights()
        with pytest.raises(FencedError, match="gone on without this trainer"):
            trainer.send_weights()
        assert (worker.status.version, covered(fleet.served)) == (0, before)
        with heir_of(reopened(fleet.store), worker) as (heir, policy):
            assert heir.send_weights().target_version == 3
            assert covered(fleet.served) == covered(policy) == stored(fleet.store, 3)


def test_an_interrupt_while_the_store_is_waited_for_decides_nothing() -> None:
    """Ctrl-C: what the store makes of the version is not known then."""
    fleet, gate = Fleet(), Gate()
    with fleet.running() as (trainer, worker):
        fleet.policy.step(0)

        def interrupt(call: str, name: str) -> None:
            if call == "create":
                os.kill(os.getpid(), signal.SIGINT)
                gate(call, name)

        fleet.backend.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            trainer.send_weights()
        gate.open()
        assert (worker.status.status, worker.status.version) == (ServingStatus.STALE, 0)
        with pytest.raises(StateError, match="shut down"):
            trainer.send_weights()
