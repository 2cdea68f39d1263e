"""Workers that come at an earlier version of the run are sent what changed since; those that cannot be are seeded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deltacast.delta.errors import InputError, RoundAbortedError, StoreError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus, TrainerInitInfo
from deltacast.engines.control import Deadline
from deltacast.engines.report import RoundReport
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, WorkerError, WorkerProcess, weights_of, worker_processes
from engine_setups import (
    DEVICES,
    EVERY_WIRE,
    SEED_WIRES,
    TolerantClient,
    in_process,
    info,
    placed,
    policy_on,
    trainer_of,
)
from failing_backend import FullDisk, Gate, nothing
from stored_runs import failing_store, reopened

pytestmark = pytest.mark.timeout(120)


@contextmanager
def joiners(*policies: Policy) -> Iterator[list[SparseNcclWorker]]:
    """Make workers in this process that no client knows."""
    workers = [SparseNcclWorker(ModuleSource(policy)) for policy in policies]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.shutdown()


def publish(trainer: SparseNcclTrainer, policy: Policy, *steps: int) -> RoundReport:
    """Publish a version for each step, and return the last one's report."""
    reports = list[RoundReport]()
    for step in steps:
        policy.step(step)
        reports.append(trainer.send_weights(optimizer_step=step))
    return reports[-1]


def joined(trainer: SparseNcclTrainer, *workers: WorkerProcess | SparseNcclWorker) -> RoundReport:
    """Have workers join, all in one and the same call, and return its report."""
    told = trainer.worker_init_info
    threads = [threading.Thread(target=worker.init_transfer_engine, args=(told,)) for worker in workers
               if isinstance(worker, SparseNcclWorker)]  # fmt: skip
    for thread in threads:
        thread.start()
    for worker in workers:
        if isinstance(worker, WorkerProcess):
            worker.tell("init", told)
        trainer._workers.admit_next(Deadline(20.0))
    try:
        return trainer.send_weights(optimizer_step=99)
    finally:
        for thread in threads:
            thread.join(20)


def hows(report: RoundReport) -> list[str]:
    """How each worker was caught up, without its name."""
    return sorted(line.partition(": ")[2] for line in report.seeded)


def policy_at(*steps: int) -> Policy:
    policy = Policy(0)
    for step in steps:
        policy.step(step)
    return policy


@DEVICES
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_worker_killed_and_restarted_from_an_old_checkpoint_is_sent_what_changed_since(
    wire: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows neither run nor version: its bits say which they are. Far fewer bytes than the weights are sent."""
    policy, options = policy_on(device), placed(device, 2)
    with (
        worker_processes(0, 0, device=device) as client,
        trainer_of(policy, client, 2, wire=wire, **options) as trainer,
    ):
        client.reports()
        survivor, killed = client.workers
        publish(trainer, policy, 1)
        client.reports()
        publish(trainer, policy, 2)
        client.reports()
        killed.signal(signal.SIGKILL)
        assert killed.exit_code() == -signal.SIGKILL
        client.workers.remove(killed)
        publish(trainer, policy, 3, 4, 5)
        for _ in range(3):
            survivor.reply()
        with caplog.at_level("INFO"):
            restarted = WorkerProcess(0, device=device if device == "cpu" else "cuda:2")
            try:
                report = joined(trainer, restarted)
                assert hows(report) == ["replay (it holds version 0; updates: 5 from memory)"]
                assert (report.num_verified, report.target_version, restarted.reply().version) == (2, 6, 6)
                survivor.reply()
                policies = [worker.ask("weights") for worker in (survivor, restarted)]
                assert policies == [weights_of(policy)] * 2
            finally:
                restarted.stop()
                killed.stop()
        (sent,) = [record.args for record in caplog.records if "replays from version" in record.msg]
        assert isinstance(sent, tuple)
        assert sent[0] == 0
        assert int(str(sent[1])) < sum(map(len, weights_of(policy).values())) / 3


@pytest.mark.parametrize("seed_wire", SEED_WIRES)
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_joiners_at_different_versions_a_damaged_one_and_a_stranger_are_all_caught_up_in_one_call(
    wire: str, seed_wire: str
) -> None:
    """Each round is for those whom it helps; the others drain it, whatever they hold, and nothing of theirs moves."""
    policy, back = Policy(0), [policy_at(), policy_at(1), policy_at(1), policy_at(1, 2, 3), Policy(9)]
    options = {"wire": wire, "seed_wire": seed_wire, "slab_bytes": 1024, "audit": "full"}
    with (
        worker_processes(0, 0) as client,
        trainer_of(policy, client, 2, **options) as trainer,
        joiners(*back) as workers,
    ):
        client.reports()
        publish(trainer, policy, 1, 2, 3)
        for _ in range(3):
            client.reports()
        damaged = client.workers[1]
        for member in trainer._workers.members:
            member.lost = "it has to come again" if f":{damaged.pid}" in member.name else ""
        trainer._workers.evict()
        damaged.tell("receive")
        with pytest.raises(WorkerError, match="the trainer closed"):
            damaged.reply()
        damaged.ask("flip", "up", 3, 1)
        client.workers.remove(damaged)
        report = joined(trainer, damaged, *workers)
        memory = "from memory)"
        assert hows(report) == [
            "leave (it holds the trainer's bits)",
            "repair (damaged: up)",
            f"replay (it holds version 0; updates: 3 {memory}",
            f"replay (it holds version 1; updates: 2 {memory}",
            f"replay (it holds version 1; updates: 2 {memory}",
            next(how for how in hows(report) if how.startswith("seed (it holds xxh3_128:")),
        ]
        assert (report.num_verified, len(report.evicted)) == (7, 0)
        assert [weights_of(module) for module in back] == [weights_of(policy)] * 5
        assert damaged.reply().version == client.workers[0].reply().version == 4
        assert damaged.ask("weights") == client.workers[0].ask("weights") == weights_of(policy)
        assert [worker.status.optimizer_step for worker in workers] == [99] * 5
        damaged.stop()


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_updates_come_from_the_store_where_none_are_kept_in_memory(wire: str) -> None:
    """Its folds count as one; workers that are up to date see nothing of it."""
    store, _ = failing_store()
    policy, back = Policy(0), [policy_at(), policy_at(*range(1, 9))]
    options: dict[str, Any] = {"wire": wire, "store": store, "durability": "before_commit", "history_bytes": 0}
    with in_process(Policy(0)) as ([worker], client), trainer_of(policy, client, 1, **options) as trainer:
        publish(trainer, policy, *range(1, 11))
        with joiners(*back) as workers:
            report = joined(trainer, *workers)
        assert len(hows(report)) == 2
        for how, version in zip(hows(report), (0, 8), strict=True):
            assert how.startswith(f"replay (it holds version {version}; updates: ")
            assert how.endswith(" from the store)")
        assert [weights_of(module) for module in back] == [weights_of(policy)] * 2
        assert worker.status.version == 11


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_restarted_trainer_replays_from_the_store_up_to_where_its_memory_begins(wire: str) -> None:
    """Versions of the writer before it, its own claim, and its own rounds, folded into one update."""
    store, backend = failing_store()
    policy = Policy(0)
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, store=store, wire=wire) as trainer:
        publish(trainer, policy, 1, 2)
    late, latest, held, gate = policy_at(1), policy_at(1, 2, 4), policy_at(1, 2), Gate()
    with (
        in_process(held) as (_, client),
        trainer_of(policy, client, 1, store=reopened(store), wire=wire) as heir,
        joiners(late, latest) as workers,
    ):
        backend.before = gate  # from here on nothing more is published
        publish(heir, policy, 4, 5)
        report = joined(heir, *workers)
        gate.open()
        assert hows(report) == [
            "replay (it holds version 1; updates: 2 from the store and 2 from memory)",
            "replay (it holds version 4; updates: 1 from memory)",
        ]
        assert [weights_of(module) for module in (late, latest, held)] == [weights_of(policy)] * 3


def test_versions_whose_numbers_were_skipped_fold_by_their_digests() -> None:
    """Versions 1 to 3 were lost with the trainer: 4 has the bits of 0, and whoever holds them is taken to be there."""
    store, backend = failing_store()
    policy, served, fresh, late, gate = Policy(0), Policy(0), Policy(6), Policy(0), Gate()
    with in_process(served) as (_, client):
        trainer = SparseNcclTrainer.trainer_init(info(1, store=store), ModuleSource(policy), client)
        backend.before = gate
        publish(trainer, policy, 1, 2, 3)
        backend.before = FullDisk()
        gate.open()
        with pytest.raises(StoreError, match="are not published"):
            trainer.shutdown()
        backend.before = nothing
        with (
            trainer_of(fresh, client, 1, store=reopened(store), history_bytes=0, durability="before_commit") as heir,
            joiners(late) as workers,
        ):
            assert weights_of(served) == weights_of(late)
            publish(heir, fresh, 5)
            report = joined(heir, *workers)
            assert hows(report) == ["replay (it holds version 4; updates: 1 from the store)"]
            assert weights_of(late) == weights_of(served) == weights_of(fresh)


def test_what_does_not_fit_in_the_history_is_dropped_oldest_first() -> None:
    """Room for two versions of 4096 bytes, the least that one counts for: two back is replayed, three back seeded."""
    policy, back = Policy(0), [policy_at(1, 2, 3), policy_at(1, 2)]
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, history_bytes=8192) as trainer,
        joiners(*back) as workers,
    ):
        publish(trainer, policy, 1, 2, 3, 4, 5)
        assert trainer._history.nbytes == 8192
        report = joined(trainer, *workers)
        assert hows(report)[0] == "replay (it holds version 3; updates: 2 from memory)"
        assert hows(report)[1].startswith("seed (it holds xxh3_128:")
        assert hows(report)[1].endswith("no version in memory has these bits, and there is no store)")
        assert [weights_of(module) for module in back] == [weights_of(policy)] * 2


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_an_update_too_large_for_the_history_ends_it(wire: str) -> None:
    """What came before it leads nowhere; what comes after it is kept again."""
    policy, late = Policy(0), policy_at(1)
    options = {"wire": wire, "history_bytes": 10_000, "max_density": 1.0}
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, **options) as trainer,
        joiners(late) as workers,
    ):
        publish(trainer, policy, 1)
        assert trainer._history.nbytes == 4096
        policy.step(2, share=1.0)
        trainer.send_weights()
        assert trainer._history.nbytes == 0
        publish(trainer, policy, 3)
        assert trainer._history.nbytes == 4096
        report = joined(trainer, *workers)
        assert hows(report)[0].startswith("seed")
        assert weights_of(late) == weights_of(policy)


def test_a_negative_history_is_refused() -> None:
    """Before anything is made."""
    with pytest.raises(InputError, match="history_bytes"):
        TrainerInitInfo(num_workers=1, history_bytes=-1)


def test_an_object_that_has_vanished_from_the_store_makes_it_a_seed() -> None:
    """The plan counted on it; the report says what is missing."""
    store, backend = failing_store()
    policy, late = Policy(0), Policy(0)
    options: dict[str, Any] = {"store": store, "durability": "before_commit", "history_bytes": 0}
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, **options) as trainer,
        joiners(late) as workers,
    ):
        publish(trainer, policy, 1, 2, 3)
        gone = next(found.name for found in backend.list("updates/"))
        backend.delete(gone)
        report = joined(trainer, *workers)
        assert hows(report)[0].startswith("seed (its replay could not be made: ")
        assert gone in hows(report)[0]
        assert weights_of(late) == weights_of(policy)


@pytest.mark.parametrize("prefix", ["versions/", "updates/"])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_fails_or_hangs_makes_it_a_seed(prefix: str, hangs: bool) -> None:
    """No round waits for it beyond the timeout, and no worker is lost over it."""
    store, backend = failing_store()
    policy, late, answer = Policy(0), Policy(0), threading.Event()
    timeout_s = 4.0 if hangs else 20.0
    options: dict[str, Any] = {
        "store": store, "durability": "before_commit", "history_bytes": 0, "timeout_s": timeout_s
    }  # fmt: skip

    def fail(call: str, name: str) -> None:
        if name.startswith(prefix) and threading.current_thread().name.endswith("replay"):
            assert answer.wait(20)
            raise StoreError(f"no answer to {call} {name}")

    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, **options) as trainer,
        joiners(late) as workers,
    ):
        publish(trainer, policy, 1, 2)
        if not hangs:
            answer.set()
        backend.before = fail
        report = joined(trainer, *workers)
        backend.before = nothing
        answer.set()
        assert (report.num_verified, report.evicted) == (2, ())
        assert hows(report)[0].startswith("seed")
        assert ("in time" if hangs else "no answer to ") in hows(report)[0]
        assert weights_of(late) == weights_of(policy)


def test_a_replay_larger_than_the_weights_is_a_seed() -> None:
    """Random bits everywhere do not compress, and rows come on top."""
    policy, late = Policy(0), Policy(0)
    generator = torch.Generator().manual_seed(0)
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1) as trainer,
        joiners(late) as workers,
    ):
        for tensor in (policy.embed.data, policy.up.data, policy.router.data, policy.get_buffer("bias")):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        trainer.send_weights()
        report = joined(trainer, *workers)
        assert "larger than a seed" in hows(report)[0]
        assert hows(report)[0].startswith("seed")
        assert weights_of(late) == weights_of(policy)


@pytest.mark.parametrize("seed_wire", SEED_WIRES)
def test_a_worker_that_fails_in_a_replay_is_seeded_next_and_stays(seed_wire: str) -> None:
    """It refuses the replay before anything is sent (no room for undo), which a seed needs none of."""
    policy, late, other = Policy(0), policy_at(1), policy_at()
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1, seed_wire=seed_wire) as trainer,
        joiners(late, other) as workers,
    ):
        publish(trainer, policy, 1, 2)
        workers[0]._undo_budget_bytes = 0
        prepare = workers[0]._prepare

        def with_room_for_new_versions(*args: Any) -> str:
            if args[0].propose.target_version == 3:
                workers[0]._undo_budget_bytes = None
            return prepare(*args)

        workers[0]._prepare = with_room_for_new_versions  # type: ignore[assignment, method-assign]
        report = joined(trainer, *workers)
        assert hows(report)[0] == "replay (it holds version 0; updates: 2 from memory)"
        assert hows(report)[1].startswith("seed (its replay failed: ")
        assert "undo would exceed its budget" in hows(report)[1]
        assert (report.num_verified, report.evicted) == (3, ())
        assert [weights_of(module) for module in (late, other)] == [weights_of(policy)] * 2


def test_a_worker_damaged_after_its_hello_is_seeded_and_not_repaired() -> None:
    """Whole parameters of an earlier version are nowhere to be had."""
    policy, late = Policy(0), Policy(0)
    with (
        in_process(Policy(0)) as (_, client),
        trainer_of(policy, client, 1) as trainer,
        joiners(late) as [worker],
    ):
        publish(trainer, policy, 1, 2)
        prepare, rounds = worker._prepare, list[int]()

        def flip_first(*args: Any) -> str:
            rounds.append(args[0].propose.base_version)
            if len(rounds) == 1:
                late.up.data.view(torch.uint8)[5, 5] ^= 1
            return prepare(*args)

        worker._prepare = flip_first  # type: ignore[assignment, method-assign]
        report = joined(trainer, worker)
        assert (rounds, hows(report)) == ([0, -1, 2], ["seed (damaged: up)"])
        assert weights_of(late) == weights_of(policy)


@pytest.mark.parametrize("step", ["ready", "payload", "received", "written", "voted", "decided"])
def test_a_joiner_that_dies_while_it_is_replayed_stops_nobody(step: str) -> None:
    """Another one at the same version is caught up, and the round published, in the same call."""
    policy, late = Policy(0), Policy(0)
    with worker_processes(0) as client, trainer_of(policy, client, 1) as trainer, joiners(late) as [worker]:
        client.reports()
        publish(trainer, policy, 1)
        client.reports()
        dying = WorkerProcess(0, (step, 2, signal.SIGKILL))
        try:
            report = joined(trainer, dying, worker)
            assert dying.exit_code() == -signal.SIGKILL
            assert (report.committed, report.num_verified, len(report.evicted)) == (True, 2, 1)
            client.reports()
            assert client.workers[0].ask("weights") == weights_of(late) == weights_of(policy)
        finally:
            dying.stop()


@pytest.mark.parametrize("step", ["voted", "decided"])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_worker_in_doubt_is_settled_by_its_digest(wire: str, step: str) -> None:
    """Frozen between its verdict and the decision it is one behind, after it it is not: a replay, or nothing."""
    policy = Policy(0)
    options = {"wire": wire, "timeout_s": 2.0, "decision_timeout_s": 2.0}
    with (
        worker_processes(0, 0, die={1: (step, 2, signal.SIGSTOP)}) as client,
        trainer_of(policy, client, 2, **options) as trainer,
    ):
        client.reports()
        publish(trainer, policy, 1)
        client.reports()
        survivor, doubting = client.workers
        assert publish(trainer, policy, 2).evicted != ()
        survivor.reply()
        doubting.signal(signal.SIGCONT)
        with pytest.raises(WorkerError):
            doubting.reply()
        version = 1 if step == "voted" else 2
        status = doubting.ask("status")
        assert (status.status, status.version) == (ServingStatus.STALE, version)
        assert doubting.ask("weights") == weights_of(policy_at(*range(1, version + 1)))
        client.workers.remove(doubting)
        report = joined(trainer, doubting)
        assert hows(report) == [
            "replay (it holds version 1; updates: 1 from memory)"
            if step == "voted"
            else "leave (it holds the trainer's bits)"
        ]
        assert survivor.reply().version == doubting.reply().version == 3
        assert [worker.ask("weights") for worker in (survivor, doubting)] == [weights_of(policy)] * 2
        doubting.stop()


def test_a_round_that_was_aborted_is_in_no_history() -> None:
    """Its bits are nobody's version: whoever holds them is seeded."""
    policy, late = Policy(0), policy_at(1)
    with (
        in_process(Policy(0)) as ([worker], client),
        trainer_of(policy, client, 1) as trainer,
        joiners(late) as workers,
    ):
        worker._undo_budget_bytes = 0
        with pytest.raises(RoundAbortedError):
            publish(trainer, policy, 1)
        worker._undo_budget_bytes = None
        publish(trainer, policy, 2)
        assert len(trainer._history._steps) == 1
        report = joined(trainer, *workers)
        assert hows(report)[0].startswith("seed (it holds")
        assert weights_of(late) == weights_of(policy)


def test_a_worker_ahead_is_seeded_and_one_behind_is_replayed_to_the_new_number() -> None:
    """Nobody else is left: the baseline goes by a number above all that were reported, in the middle of a history."""
    policy, ahead, late = Policy(0), Policy(4), policy_at(1)
    with joiners(ahead, late) as workers, in_process(Policy(0)) as ([gone], _):
        with trainer_of(Policy(4), TolerantClient(workers[:1]), 1, version=8) as stranger:
            stranger.send_weights()  # version 9 of this run, of which the next trainer knows nothing
        with trainer_of(policy, TolerantClient([gone]), 1) as trainer:
            publish(trainer, policy, 1, 2)
            gone.shutdown()
            trainer._workers.notice_closed()
            trainer._workers.evict()
            report = joined(trainer, *workers)
            assert (report.base_version, report.target_version, report.num_verified) == (10, 11, 2)
            assert hows(report)[0] == "replay (it holds version 1; updates: 1 from memory)"
            assert hows(report)[1].startswith("seed (it holds xxh3_128:")
            assert [weights_of(module) for module in (ahead, late)] == [weights_of(policy)] * 2
