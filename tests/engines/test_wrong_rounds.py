"""Rounds that are not the worker's next one: refused by name before anything is written, and the next round works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from deltacast.delta.errors import DeltacastError, RoundAbortedError
from deltacast.engines.base import ServingStatus
from deltacast.engines.protocol import Message, Propose
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import EVERY_WIRE, TolerantClient, in_process, trainer_of

Told: TypeAlias = tuple[Message, bytes]
Lie: TypeAlias = Callable[[Propose, bytes], Told]


def changed(**fields: Any) -> Lie:
    return lambda propose, header: (replace(propose, **fields), header)


def other_key(**fields: int) -> Lie:
    return lambda propose, header: (replace(propose, key=replace(propose.key, **fields)), header)


def tell_through(trainer: SparseNcclTrainer, lie: Lie) -> list[Told]:
    """Have the next proposal told otherwise; returns what is told from then on, as it was meant."""
    truthful, meant, lies = trainer._workers.tell, list[Told](), [lie]

    def tell(members: Any, message: Message, deadline: Any, bulk: bytes = b"") -> None:
        meant.append((message, bulk))
        if isinstance(message, Propose) and lies:
            message, bulk = lies.pop()(message, bulk)
        truthful(members, message, deadline, bulk)

    trainer._workers.tell = tell  # type: ignore[method-assign]
    return meant


def require_untouched(worker: SparseNcclWorker, served: Policy, before: dict[str, bytes], version: int) -> None:
    assert weights_of(served) == before
    assert (worker.state.version, worker.state.audit()) == (version, [])
    assert worker.status.status in (ServingStatus.SERVING, ServingStatus.STALE)


def require_refused(
    trainer: SparseNcclTrainer, worker: SparseNcclWorker, served: Policy, policy: Policy, *, version: int, match: str
) -> None:
    """The next round is aborted with these words, and the one after it is as any other."""
    before = weights_of(served)
    policy.step(9)
    with pytest.raises(RoundAbortedError, match=match):
        trainer.send_weights()
    require_untouched(worker, served, before, version)
    assert trainer.send_weights().num_verified == 1
    assert weights_of(served) == weights_of(policy)


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_committed_round_told_again_is_refused(wire: str) -> None:
    """With its own header, base and target; the worker is past that base."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], _), trainer_of(policy, TolerantClient([worker]), 1, wire=wire) as trainer:
        meant = tell_through(trainer, lambda propose, header: (propose, header))
        policy.step(0)
        trainer.send_weights()
        old, header = next(told for told in meant if isinstance(told[0], Propose))
        tell_through(trainer, lambda propose, _: (replace(old, key=propose.key), header))
        require_refused(trainer, worker, served, policy, version=1, match=r"wrong base|other bits")


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_round_that_the_worker_missed_the_one_before_is_refused(wire: str) -> None:
    """The trainer is two versions ahead, by a worker that was told nothing of the first."""
    policy, served, other = Policy(0), Policy(0), Policy(0)
    with in_process(other) as ([second], _), trainer_of(policy, TolerantClient([second]), 1, wire=wire) as elsewhere:
        meant = tell_through(elsewhere, lambda propose, header: (propose, header))
        for step in range(2):
            policy.step(step)
            elsewhere.send_weights()
        ahead, header = [told for told in meant if isinstance(told[0], Propose)][1]
    policy = Policy(0)
    with in_process(served) as ([worker], _), trainer_of(policy, TolerantClient([worker]), 1, wire=wire) as trainer:
        tell_through(trainer, lambda propose, _: (replace(ahead, key=propose.key), header))
        require_refused(trainer, worker, served, policy, version=0, match=r"wrong base.*version 0")


@pytest.mark.parametrize("wire", EVERY_WIRE)
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (changed(base_version=7), "wrong base.*expected version 0, found 7"),
        (changed(base_version=-1), "wrong base|rows of another round"),
        (changed(target_version=0), "rows of another round|does not follow its base"),
        (lambda propose, header: (propose, header[:-1]), "ChecksumError"),
        (lambda propose, header: (propose, header[:40] + bytes([header[40] ^ 1]) + header[41:]), "ChecksumError"),
        (lambda propose, _: (propose, b""), "Error"),
    ],
    ids=["another base", "no base", "no new version", "a header cut short", "a damaged header", "no header"],
)
def test_a_proposal_that_contradicts_its_header_is_refused(wire: str, lie: Lie, message: str) -> None:
    """Whichever of the two is right."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], _), trainer_of(policy, TolerantClient([worker]), 1, wire=wire) as trainer:
        tell_through(trainer, lie)
        require_refused(trainer, worker, served, policy, version=0, match=message)


@pytest.mark.parametrize("wire", EVERY_WIRE)
@pytest.mark.parametrize("lie", [changed(run_id="other"), changed(wire="carrier pigeon")], ids=["run", "wire"])
def test_a_proposal_of_another_run_or_wire_is_refused(wire: str, lie: Lie) -> None:
    """The worker leaves a trainer that speaks of another run, at its version, and a handshake brings it back."""
    policy, served = Policy(0), Policy(0)
    with in_process(served) as ([worker], _), trainer_of(policy, TolerantClient([worker]), 1, wire=wire) as trainer:
        tell_through(trainer, lie)
        before = weights_of(served)
        policy.step(0)
        with pytest.raises(DeltacastError):
            trainer.send_weights()
        require_untouched(worker, served, before, 0)


def test_a_round_of_an_older_writer_is_refused() -> None:
    """By its epoch; what a trainer of the run before had left in the connection, say."""
    policy, served = Policy(0), Policy(0)
    with (
        in_process(served) as ([worker], _),
        trainer_of(policy, TolerantClient([worker]), 1, epoch=3, timeout_s=2.0) as trainer,
    ):
        tell_through(trainer, other_key(epoch=2))
        before = weights_of(served)
        policy.step(0)
        with pytest.raises(DeltacastError):
            trainer.send_weights()
        require_untouched(worker, served, before, 0)
