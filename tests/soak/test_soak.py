"""The soak in short, and that it would notice."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest

from deltacast.engines.base import ServingStatus, WorkerStatus
from soak.driver import Soak
from soak.ledger import Ledger, SoakError
from soak.model import flipped, moved, new_weights


def status(version: int, serving: ServingStatus = ServingStatus.SERVING, run_id: str = "run") -> WorkerStatus:
    return WorkerStatus(serving, run_id, version, digest="", audited_through=None)


@pytest.mark.timeout(120)
def test_a_short_soak_ends_with_every_workers_bytes_equal_to_the_trainers(tmp_path: Path) -> None:
    """25 rounds with processes that die and freeze, trainers too, and bits that flip; no process is left."""
    lines = list[str]()
    summary = Soak(25, 1, tmp_path, lines.append).run()
    assert summary.equal, "\n".join([summary.fault, *lines])
    assert summary.kills + summary.stops + summary.flips + summary.trainer_restarts >= 5
    assert summary.repaired + summary.seeded + summary.replayed > 0
    assert multiprocessing.active_children() == []


def test_the_ledger_takes_what_was_published_and_nothing_else() -> None:
    """Right bytes under their own number; the flipped bit that it knows of is returned, any other is an error."""
    rng, ledger = random.Random(0), Ledger()
    first = new_weights(0)
    second = moved(first, rng, 0.5)
    ledger.note("run", 1, first)
    ledger.note("run", 2, second)
    assert ledger.check("w", status(2), second, ()) == set()
    assert ledger.check("w", status(0, ServingStatus.EMPTY), second, ()) == set()
    damaged = second | {"up": bytes([second["up"][0] ^ 4]) + second["up"][1:]}
    assert ledger.check("w", status(2), damaged, [("up", 0, 2)]) == {("up", 0, 2)}
    for found, label in ((damaged, status(2)), (first, status(2)), (first, status(3)), (first, status(1, run_id="x"))):
        with pytest.raises(SoakError):
            ledger.check("w", label, found, [("up", 0, 3)])


def test_a_number_that_is_open_is_settled_by_the_first_worker_that_tells() -> None:
    """One of the last versions, or what a lost trainer may have published; from then on it means that."""
    ledger, last = Ledger(), [new_weights(seed) for seed in range(3)]
    ledger.note("run", 1, last[0])
    ledger.note("run", 2, last[1])
    ledger.note_one_of("run", 3)
    assert ledger.check("w", status(3), last[0], ()) == set()
    with pytest.raises(SoakError):
        ledger.check("w", status(3), last[1], ())
    with pytest.raises(SoakError):
        ledger.check("w", status(4), last[2], ())
    ledger.doubt(last[2])
    assert ledger.check("w", status(4, ServingStatus.STALE), last[2], ()) == set()


@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_a_step_moves_the_share_that_it_was_told_and_keeps_the_tie(share: float) -> None:
    """By elements of every dtype; bools stay bools."""
    before = new_weights(0)
    after = moved(before, random.Random(0), share)
    changed = sum(a != b for a, b in zip(before["experts"], after["experts"], strict=True))
    assert changed == pytest.approx(share * len(before["experts"]), rel=0.2)
    assert after["head"] == after["embed"]
    assert set(after["mask"]) <= {0, 1}
    assert (flipped(before, after) == set()) == (share == 0)
