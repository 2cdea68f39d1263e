"""Servers whose ranks hold pieces: every rank a process, a trainer that sends whole-checkpoint updates to all."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltacast.delta.errors import InputError, RoundAbortedError, StateError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.clients import InProcessClient
from deltacast.engines.control import Task
from deltacast.engines.protocol import Hello
from deltacast.engines.report import RoundReport
from deltacast.engines.shard_exchange import Exchange
from deltacast.engines.shards import ShardWorker
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from engine_processes import Policy, WorkerError, weights_of
from engine_setups import in_process, info, trainer_of, wait_for_connection
from shard_models import Checkpoint, Runtime, cut_by_hand
from shard_processes import Fault, Servers, gloo, server_processes, together

pytestmark = pytest.mark.timeout(120)
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def trainer_over(
    checkpoint: Checkpoint, client: Servers, num_workers: int, **options: Any
) -> Iterator[SparseNcclTrainer]:
    """Make a trainer that has admitted every rank."""
    trainer = SparseNcclTrainer.trainer_init(info(num_workers, **options), ModuleSource(checkpoint), client)
    try:
        for rank in client.workers:
            rank.reply()
        yield trainer
    finally:
        trainer.shutdown()


def held(client: Servers, first: int = 0) -> list[dict[str, bytes]]:
    return [rank.ask("weights") for rank in client.workers[first:]]


def action(seeded: str) -> str:
    """Return how a worker was caught up, of what a report says of it."""
    return seeded.split(": ")[1].split(" ", maxsplit=1)[0]


def cuts(checkpoint: Checkpoint, num_ranks: int, num_servers: int = 1) -> list[dict[str, bytes]]:
    """Return the bytes of every rank's tensors, as numpy cuts them."""
    weights = checkpoint.weights()
    each = [cut_by_hand(weights, rank, num_ranks) for rank in range(num_ranks)]
    return [{name: array.tobytes() for name, array in cut.items()} for cut in each] * num_servers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_ranks", "num_servers"), [(2, 2), (4, 1)])
def test_ranks_follow_the_trainer_in_layouts_of_their_own(num_ranks: int, num_servers: int, device: str) -> None:
    """One server was loaded like the trainer, another is seeded; then changes, no change, and most of it dense."""
    checkpoint, num = Checkpoint(0), num_ranks * num_servers
    with server_processes(*range(num_servers), num_ranks=num_ranks, device=device) as client:
        claimed = client.made()
        with trainer_over(checkpoint, client, num) as trainer:
            assert claimed[0] == trainer.baseline.digest
            assert held(client) == cuts(checkpoint, num_ranks, num_servers)
            for number, share in enumerate([0.05, 0.0, 0.9], start=1):
                checkpoint.step(number, share)
                report = trainer.send_weights()
                assert [worker.digest for worker in report.workers] == [trainer.baseline.digest] * num
                assert report.num_verified == num
                assert [answer.version for answer in client.reports()] == [number] * num
                assert held(client) == cuts(checkpoint, num_ranks, num_servers)


@pytest.mark.parametrize("device", DEVICES)
def test_a_flipped_bit_on_one_rank_is_named_and_repaired(device: str) -> None:
    """Found by that rank's own audit; the whole parameter goes to it alone, and the same call commits."""
    checkpoint = Checkpoint(0)
    with server_processes(0, num_ranks=2, device=device) as client:
        client.made()
        with trainer_over(checkpoint, client, 2, audit="full") as trainer:
            client.workers[1].ask("flip", "gate_up", 200, 3)
            checkpoint.step(1, 0.01)
            report = trainer.send_weights()
            client.reports()
            assert [name for _, name in report.repaired] == ["gate"]
            assert report.num_verified == 2
            assert held(client) == cuts(checkpoint, 2)


def test_a_replica_that_differs_is_named_when_the_ranks_meet() -> None:
    """By every rank: which two, and of which parameter."""
    with server_processes(0, num_ranks=2, flips={1: [("norm", 4, 0)]}) as client:
        for rank in client.workers:
            rank.tell("make")
        for rank in client.workers:
            with pytest.raises(WorkerError, match=r"CorruptionError: ranks 0 and 1 .* \(parameter 'norm'\)"):
                rank.reply()


def test_ranks_of_dummy_weights_claim_nothing_and_are_seeded() -> None:
    """Also where what they hold would not even agree."""
    checkpoint = Checkpoint(0)
    with server_processes(0, num_ranks=2, flips={1: [("norm", 4, 0)]}, loaded=False) as client:
        assert client.made() == ["", ""]
        with trainer_over(checkpoint, client, 2):
            assert held(client) == cuts(checkpoint, 2)


def test_a_rank_that_cannot_say_what_it_holds_fails_the_others_too(tmp_path: Path) -> None:
    """At once, and they say which one it was."""
    source, num_ranks = ModuleSource(Checkpoint(0)), 2

    def make(rank: int) -> ShardWorker:
        views = Runtime(Checkpoint(0), rank, num_ranks).views
        if rank:
            views["o"] = views["down"]
        return ShardWorker(source.metas(), source.aliases, views, Exchange(gloo(str(tmp_path), rank, num_ranks, 20.0)))

    other, wrong = together(partial(make, 0), partial(make, 1))
    assert isinstance(wrong, InputError)
    assert isinstance(other, StateError)
    assert "rank 1 of this server takes no part: a view that is no box" in str(other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", ["payload changed", "payload lost", "refuses"])
def test_what_one_rank_cannot_apply_is_applied_by_none(what: str, device: str) -> None:
    """The others hear it instead of waiting; nobody's bits have changed, and the next call goes through."""
    checkpoint = Checkpoint(0)
    with server_processes(0, num_ranks=2, faults={1: [Fault(what, 1)]}, device=device) as client:
        client.made()
        with trainer_over(checkpoint, client, 2) as trainer:
            before = held(client)
            checkpoint.step(1)
            with pytest.raises(RoundAbortedError):
                trainer.send_weights()
            client.reports()
            assert held(client) == before
            assert [rank.ask("status").version for rank in client.workers] == [0, 0]
            assert trainer.send_weights().num_verified == 2
            client.reports()
            assert held(client) == cuts(checkpoint, 2)


def test_ranks_that_fail_at_random_stay_in_step() -> None:
    """One, several or none of four, in round after round: each call ends at once, at one whole version everywhere."""
    rng, checkpoint, whats = np.random.default_rng(0), Checkpoint(0), ["payload changed", "payload lost", "refuses"]
    chosen = rng.random((24, 4)) < 0.15
    faults = {rank: [Fault(str(rng.choice(whats)), int(at) + 1) for at in np.flatnonzero(chosen[:, rank])]
              for rank in range(4)}  # fmt: skip
    with server_processes(0, num_ranks=4, faults=faults) as client:
        client.made()
        with trainer_over(checkpoint, client, 4) as trainer:
            wanted = cuts(checkpoint, 4)
            for number, fails in enumerate(np.asarray(chosen.any(axis=1)).tolist()):
                checkpoint.step(number)
                if fails:
                    with pytest.raises(RoundAbortedError):
                        trainer.send_weights()
                else:
                    assert trainer.send_weights().num_verified == 4
                    wanted = cuts(checkpoint, 4)
                client.reports()
                assert held(client) == wanted


@pytest.mark.parametrize("what", ["killed", "frozen"])
def test_a_rank_that_is_gone_takes_its_server_with_it(what: str) -> None:
    """The other rank does not wait for ever and holds a whole version; other servers go on."""
    checkpoint = Checkpoint(0)
    fault = {1: [Fault(what, 1)]}
    with server_processes(0, 0, num_ranks=2, faults=fault, exchange_s=4.0) as client:
        client.made()
        with trainer_over(checkpoint, client, 4, timeout_s=10.0) as trainer:
            before = held(client)
            left, gone, *others = client.workers
            checkpoint.step(1)
            with pytest.raises(RoundAbortedError, match=f":{gone.pid}"):
                trainer.send_weights()
            gone.signal(signal.SIGCONT)
            client.workers = [left, *others]
            assert [answer.version for answer in client.reports()] == [0, 0, 0]
            assert trainer.send_weights().num_verified == 2
            with pytest.raises(WorkerError):
                left.reply()
            status = left.ask("status")
            assert (status.status, status.version) == (ServingStatus.STALE, 0)
            assert left.ask("weights") == before[0]
            client.workers = others
            client.reports()
            assert held(client) == cuts(checkpoint, 2)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_server_that_comes_back_is_given_what_it_missed(damaged: bool) -> None:
    """One rank lost its connection, so that all of them are let go; they come again, and prove a replay together.

    Where one is damaged there is none for it, and so for nobody: all are seeded.
    """
    checkpoint = Checkpoint(0)
    with server_processes(0, 0, num_ranks=2) as client:
        client.made()
        with trainer_over(checkpoint, client, 4) as trainer:
            first, second, *others = every = client.workers
            second.ask("disconnect")
            client.workers = [first, *others]
            checkpoint.step(1)
            assert trainer.send_weights().num_verified == 2
            with pytest.raises(WorkerError):
                first.reply()
            client.workers = others
            client.reports()
            if damaged:
                second.ask("flip", "down", 8, 1)
            for rank in (first, second):
                rank.tell("init", trainer.worker_init_info)
            wait_for_connection(trainer)
            client.workers = others
            checkpoint.step(2)
            reports = [trainer.send_weights()]
            client.reports()
            while reports[-1].num_verified < 4:  # the second rank knocked too late for that call
                reports.append(trainer.send_weights())
                client.reports()
            assert [rank.reply().version for rank in (first, second)] == [reports[-1].target_version] * 2
            caught_up = [action(line) for report in reports for line in report.seeded]
            assert caught_up == (["seed", "seed"] if damaged else ["replay", "replay"])
            client.workers = every
            assert held(client) == cuts(checkpoint, 2, 2)


def test_a_server_that_is_initialised_again_comes_in_anew() -> None:
    """While the trainer still takes its ranks for members; what one finds damaged then is repaired on that one."""
    checkpoint = Checkpoint(0)
    with server_processes(0, 0, num_ranks=2) as client:
        client.made()
        with trainer_over(checkpoint, client, 4) as trainer:
            again, others = client.workers[:2], client.workers[2:]
            again[1].ask("flip", "o", 8, 1)
            for rank in again:
                rank.tell("init", trainer.worker_init_info)
            wait_for_connection(trainer)
            client.workers, reports = others, list[RoundReport]()
            while not reports or reports[-1].num_verified < 4:  # the second rank may knock too late for the first call
                checkpoint.step(len(reports))
                reports.append(trainer.send_weights())
                client.reports()
            assert [rank.reply().version for rank in again] == [reports[-1].target_version] * 2
            assert len(reports) > 1 or sorted(map(action, reports[0].seeded)) == ["leave", "repair"]
            client.workers = [*again, *others]
            assert held(client) == cuts(checkpoint, 2, 2)


def test_ranks_that_hold_different_things_are_all_seeded() -> None:
    """What one of them holds of a version is worth nothing without the other's."""
    checkpoint = Checkpoint(0)
    with server_processes(0, num_ranks=2) as client:
        client.made()
        client.workers[0].ask("forget")
        with trainer_over(checkpoint, client, 2) as trainer:
            assert [rank.ask("status").digest for rank in client.workers] == [trainer.baseline.digest] * 2
            checkpoint.step(1)
            assert trainer.send_weights().num_verified == 2
            client.reports()
            assert held(client) == cuts(checkpoint, 2)


def test_a_rank_that_comes_back_alone_does_not_come_in() -> None:
    """It waits for the others for a while, and says which one did not come."""
    checkpoint = Checkpoint(0)
    with server_processes(0, 0, num_ranks=2, exchange_s=3.0) as client:
        client.made()
        with trainer_over(checkpoint, client, 4) as trainer:
            with pytest.raises(WorkerError, match="DeadlineError: rank 0 did not answer in time"):
                client.workers[1].ask("init", trainer.worker_init_info)
            left, _, *client.workers = client.workers
            checkpoint.step(1)
            assert trainer.send_weights().num_verified == 2
            client.reports()
            with pytest.raises(WorkerError):
                left.ask("receive", {"call": 1})


def seated(hello: Callable[[], Hello], rank: int) -> Hello:
    return replace(hello(), server="server", server_rank=rank, num_ranks=2)


def test_a_server_comes_in_and_goes_as_a_whole() -> None:
    """Its first rank waits while rounds go on without it; once one rank is gone, all are let go."""
    policy, served = Policy(0), [Policy(0), Policy(0), Policy(0)]
    with in_process(*served) as ((alone, *ranks), _), trainer_of(policy, InProcessClient([alone]), 1) as trainer:
        came, verified = [], list[int]()
        for number, rank in enumerate(ranks):
            rank._hello = partial(seated, rank._hello, number)  # type: ignore[method-assign]
            came.append(Task("init", partial(rank.init_transfer_engine, trainer.worker_init_info)))
            wait_for_connection(trainer)
            policy.step(number)
            verified.append(trainer.send_weights().num_verified)
        while verified[-1] == 1:  # the second came when the trainer was no longer looking
            verified.append(trainer.send_weights().num_verified)
        assert [task.join(20.0) and task.error for task in came] == [None, None]
        assert (verified[0], verified[-1]) == (1, 3)
        ranks[0].shutdown()
        report = trainer.send_weights()
        assert (report.num_verified, len(report.evicted)) == (1, 2)
        assert weights_of(served[2]) == weights_of(policy)


def test_a_rank_of_no_server_is_turned_away() -> None:
    """What a worker says of itself is not trusted."""
    policy, served = Policy(0), [Policy(0), Policy(0)]
    with in_process(*served) as ((alone, third), _), trainer_of(policy, InProcessClient([alone]), 1) as trainer:
        third._hello = partial(seated, third._hello, 2)  # type: ignore[method-assign]
        came = Task("init", partial(third.init_transfer_engine, trainer.worker_init_info))
        wait_for_connection(trainer)
        assert trainer.send_weights().num_verified == 1
        assert came.join(20.0)
        assert "the connection" in str(came.error)
