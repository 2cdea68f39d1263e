"""The promise of docs/protocol.md, checked in every state that a trainer and two workers can get into.

The checker is `tests/support/protocol_model`; it steps through the tables that the engines run, so that a wrong
table, like a wrong rule, is found as a trace that ends in a broken promise.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import pytest

from deltacast.engines.protocol import TRAINER_STEPS, WORKER_STEPS, DecisionLog, RoundKey
from protocol_model import Exploration, Faults, Rules, Slip, Steps, explore

NO_FAULT, REFUSAL = Faults(0, 0, 0), Faults(0, 0, 0, refusals=1)
CRASH, CUT, FREEZE = Faults(1, 0, 0), Faults(0, 1, 0), Faults(0, 0, 1)
SINGLE = (NO_FAULT, REFUSAL, CRASH, CUT, FREEZE)
SLIPS = {
    Slip.COMMITS_WITHOUT_A_VERDICT: (NO_FAULT, "serves Label(version=1, bits='?')"),
    Slip.COMMITS_LATE: (FREEZE, "COMMIT is written after a worker's patience was over"),
    Slip.CLOCK_STARTS_LATE: (FREEZE, "COMMIT is written after a worker's patience was over"),
    Slip.ADVANCES_FIRST: (NO_FAULT, "the baseline is Label(version=2, bits='B'), of which there is no record"),
    Slip.REPORTS_FIRST: (NO_FAULT, "is reported as verified and has not acted on COMMIT"),
    Slip.KEEPS_THE_SILENT: (FREEZE, "waits for a decision and hears propose"),
    Slip.GUESSES: (CRASH, "serving with Label(version=2, bits='A')"),
    Slip.REUSES_NUMBERS: (CRASH, "version 1 was A and is B now"),
    Slip.FORGETS_NUMBERS: (Faults(2, 0, 0), "version 1 was A and is B now"),
    Slip.COMMITS_ALONE: (FREEZE, "serves Label(version=2, bits='B'), which nobody published"),
    Slip.GOES_BACK: (CRASH, "went back behind version 2"),
    Slip.SERVES_ITS_VOTE: (NO_FAULT, "serves between its first write and the decision"),
    Slip.SERVES_WHILE_WRITING: (NO_FAULT, "serves between its first write and the decision"),
    Slip.FORGETS_TO_UNDO: (CRASH, "serves Label(version=1, bits='?')"),
}


class ErasableLog(DecisionLog):
    """A record that the last writer wins."""

    def decide(self, key: RoundKey, *, commit: bool) -> bool:
        self._records[key] = commit
        return commit


def wrong_tables() -> Iterator[tuple[str, Rules]]:
    """Yield rules with one entry of one table left out, or leading anywhere else."""
    for entry, right in {**TRAINER_STEPS, **WORKER_STEPS}.items():
        for wrong in [None, *list(type(right))]:
            if wrong is not right:
                trainer, worker = _changed(TRAINER_STEPS, entry, wrong), _changed(WORKER_STEPS, entry, wrong)
                where = "nowhere" if wrong is None else wrong.value
                yield f"{entry[0].value}-{entry[1]}-{where}", Rules(trainer_steps=trainer, worker_steps=worker)


def _changed(steps: Steps, entry: tuple[Enum, str], after: Enum | None) -> Steps:
    if entry not in steps:
        return steps
    rest = {key: state for key, state in steps.items() if key != entry}
    return rest if after is None else rest | {entry: after}


def first_violation(rules: Rules, *faults: Faults) -> Exploration:
    """Explore with one budget of faults after the other until a promise is broken."""
    found = [explore(rules, budget) for budget in faults[:1]]
    while not found[-1].violation and len(found) < len(faults):
        found.append(explore(rules, faults[len(found)]))
    return found[-1]


@pytest.mark.parametrize(
    "faults", [*SINGLE, Faults(1, 0, 0, 1), Faults(0, 1, 0, 1), Faults(1, 1, 0)], ids=lambda faults: repr(tuple(faults))
)
def test_the_promise_holds_in_every_reachable_state(faults: Faults) -> None:
    """Every interleaving, with these faults at any point; and from each state an end is reached without another one."""
    found = explore(Rules(), faults)
    assert not found.violation, found
    assert found.num_ends


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "faults",
    [Faults(0, 1, 1), Faults(1, 0, 1), Faults(0, 0, 1, 1), Faults(2, 0, 0), Faults(1, 1, 1)],
    ids=lambda faults: repr(tuple(faults)),
)
def test_the_promise_holds_where_recoveries_meet(faults: Faults) -> None:
    """The same, where one recovery runs into another; all three at once take 6 million states, minutes and 2 GB."""
    found = explore(Rules(), faults)
    assert not found.violation, found


@pytest.mark.parametrize("faults", SINGLE, ids=lambda faults: repr(tuple(faults)))
def test_the_promise_holds_if_the_record_is_in_a_store(faults: Faults) -> None:
    """`before_commit`: COMMIT may be written after workers have given up; they are at the base, and come again."""
    found = explore(Rules(stored=True), faults)
    assert not found.violation, found


def test_a_run_without_faults_commits_once_and_ends_in_one_state() -> None:
    """However its messages interleave: a round in which nothing went wrong and that is aborted would be a violation."""
    found = explore(Rules(), NO_FAULT)
    assert (found.violation, found.num_ends) == ("", 1)


def test_every_entry_of_the_tables_is_reached_and_nothing_else() -> None:
    """No dead entry, and none is missing."""
    rules = Rules()
    for faults in SINGLE:
        explore(rules, faults)
    assert rules.reached == TRAINER_STEPS.keys() | WORKER_STEPS.keys()


@pytest.mark.parametrize("slip", Slip, ids=lambda slip: slip.name.lower())
def test_a_rule_that_is_got_wrong_is_found(slip: Slip) -> None:
    """With the trace that shows it."""
    faults, violation = SLIPS[slip]
    found = explore(Rules(slip=slip), faults)
    assert violation in found.violation
    assert len(found.trace) > 3
    print(f"{slip.value}:\n{found}\n")  # noqa: T201 - `pytest -s` shows the counterexamples


def test_a_record_that_can_be_written_twice_is_found() -> None:
    """A deadline that passes between two workers' COMMIT would make one decision two."""
    found = explore(Rules(decision_log=ErasableLog), FREEZE)
    assert found.violation == "the record said True and says False now"


@pytest.mark.parametrize("rules", [pytest.param(rules, id=name) for name, rules in wrong_tables()])
def test_a_wrong_table_is_found(rules: Rules) -> None:
    """Whichever entry is left out, or leads to another state than it should."""
    assert first_violation(rules, *SINGLE).violation


def test_a_counterexample_reads_as_what_happened() -> None:
    """The shortest there is, one move a line."""
    lines = str(explore(Rules(slip=Slip.SERVES_WHILE_WRITING), NO_FAULT)).splitlines()
    assert lines == [
        "worker 0 serves between its first write and the decision",
        "  1. the trainer begins a round: update",
        "  2. the trainer proposes to worker 0",
        "  3. the trainer proposes to worker 1",
        "  4. worker 0 is ready",
        "  5. the trainer hears worker 0: ready, yes",
        "  6. worker 1 is ready",
        "  7. the trainer hears worker 1: ready, yes",
        "  8. the trainer starts to send",
        "  9. worker 0 writes",
    ]
