"""What the model checker of the round protocol sees of a trainer and two workers: small immutable records.

Weights are one letter: `A` at first, `B` after one round, `?` half written, `-` a process that has just started.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from deltacast.engines.protocol import TrainerState, WorkerState

__all__ = [
    "EMPTY",
    "ERROR",
    "NOBODY",
    "NOTHING",
    "NO_VERSION",
    "SERVING",
    "STALE",
    "Faults",
    "Hello",
    "Label",
    "Lane",
    "Pace",
    "Slip",
    "Trainer",
    "World",
]

EMPTY, SERVING, STALE = "empty", "serving", "stale"
NO_VERSION: Final = -1


class Label(NamedTuple):
    """A version's number and its weights."""

    version: int
    bits: str


NOTHING: Final = Label(NO_VERSION, "-")
ERROR: Final = "error"  # in place of a digest, in a verdict


class Hello(NamedTuple):
    """What a worker says of itself: what it holds, and the highest number that any trainer has named to it."""

    holds: Label
    newest: int


NOBODY: Final = Hello(NOTHING, NO_VERSION)


class Pace(Enum):
    """Whether a process runs. One that was frozen and thawed may find that any deadline of its present wait is over."""

    AWAKE = "awake"
    FROZEN = "stands still"
    OVERSLEPT = "has overslept"


class Faults(NamedTuple):
    """How many of each may still happen.

    Attributes:
        crashes: a process dies and is started again.
        cuts: a connection is gone, with what is sent from now on; each end finds out whenever it does.
        freezes: a process stands still for as long as it likes; meanwhile any deadline of the others may pass.
        refusals: a worker is not READY, or votes against.
    """

    crashes: int = 1
    cuts: int = 1
    freezes: int = 1
    refusals: int = 0


class Lane(NamedTuple):
    """One worker, its connection, and what the trainer knows of it.

    Attributes:
        mode: `apart` (no connection), `joining` (has said hello), `member` (was welcomed).
        state: of its round, as `WORKER_STEPS` has it.
        serves: its status.
        holds: the label it goes by and the weights in its memory.
        before: label and status when the round began, which undo brings back.
        role: what the round is for it: `update`, `replay`, `seed` or `drain`; empty between rounds.
        target: what the round leads to.
        against: it was not READY, or its payload failed.
        written: something was written that is not decided.
        payload: `none`, `coming`, `all`, `cut` (what has come may be all) or `never`.
        pace: of the worker.
        floor: the version that it last committed, in this life.
        newest: the highest version that a trainer has named to it, in this life.
        up, down: messages to and from the trainer that nobody has read.
        worker_end, trainer_end: whether that end of the connection is open.
        cut: the connection is gone; what is sent is lost.
        hello: what it says of itself on a new connection that the trainer has not looked at.
        hello_gone: that connection is closed again.
        said: what the hello said that the trainer has let in and not answered.
        member: what the trainer takes it for: empty, `new`, `leave`, `replay` or `seed`.
        lost: the trainer has given it up in this round.
        told: in this phase.
        answer: in this phase: empty, `yes` or `no`.
        blamed: it voted against.
        committed: it has acted on this round's COMMIT (nobody but the checker looks at this).
    """

    mode: str
    state: WorkerState
    serves: str
    holds: Label
    member: str
    before: tuple[Label, str] | None = None
    role: str = ""
    target: Label = NOTHING
    against: bool = False
    written: bool = False
    payload: str = "none"
    pace: Pace = Pace.AWAKE
    floor: int = NO_VERSION
    newest: int = NO_VERSION
    up: tuple[tuple[str, object], ...] = ()
    down: tuple[tuple[str, object, object], ...] = ()
    worker_end: bool = True
    trainer_end: bool = True
    cut: bool = False
    hello: Hello | None = None
    hello_gone: bool = False
    said: Hello = NOBODY
    lost: bool = False
    told: bool = False
    answer: str = ""
    blamed: bool = False
    committed: bool = False

    @property
    def worker_sees_end(self) -> bool:
        """Whether the worker may find its connection closed; what came before it may still be read."""
        return self.worker_end and (self.cut or not self.trainer_end)

    @property
    def trainer_sees_end(self) -> bool:
        """Whether the trainer may find this connection closed."""
        return self.trainer_end and (self.cut or not self.worker_end)


class Trainer(NamedTuple):
    """The trainer, its record of this round, and what the checker remembers of the run.

    Attributes:
        state: of its round, as `TRAINER_STEPS` has it.
        baseline: what it takes the workers to hold.
        starting: it has not welcomed anybody yet, and waits for both.
        newest: the highest version that it knows of.
        epoch: which trainer of the run it is.
        updates: rounds that are still to publish something.
        kind: `update`, `replay` or `seed`.
        target: what the round leads to.
        failed: something went wrong in this round.
        late: its workers may have given up by its own clock.
        earlier: versions before the baseline that it can replay from, newest first.
        record: this round's decision: None, True for COMMIT, False for ABORT.
        pace: of the trainer.
        gave_up: a worker gave up waiting in this round (nobody but the checker looks at this).
        published: every version that there has been, in order (likewise).
    """

    baseline: Label
    newest: int
    updates: int
    published: tuple[Label, ...]
    state: TrainerState = TrainerState.IDLE
    starting: bool = False
    epoch: int = 1
    kind: str = ""
    target: Label = NOTHING
    failed: bool = False
    late: bool = False
    earlier: tuple[Label, ...] = ()
    record: bool | None = None
    pace: Pace = Pace.AWAKE
    gave_up: bool = False


class World(NamedTuple):
    """Everything at one moment."""

    trainer: Trainer
    lanes: tuple[Lane, Lane]
    left: Faults


class Slip(Enum):
    """Rules that an implementation might get wrong; the checker must find each."""

    COMMITS_WITHOUT_A_VERDICT = "the trainer commits before the last verdict is in"
    COMMITS_LATE = "the trainer commits although its workers may have given up"
    CLOCK_STARTS_LATE = "the trainer's clock starts once the payload has left, when a worker may have voted already"
    ADVANCES_FIRST = "the baseline moves before there is a record"
    REPORTS_FIRST = "the trainer reports success before it has heard every ACK"
    KEEPS_THE_SILENT = "a worker that acknowledged nothing stays a member"
    GUESSES = "the handshake leaves a worker that holds some version as it is"
    REUSES_NUMBERS = "a trainer that was restarted goes by its own number"
    FORGETS_NUMBERS = "a worker that is being seeded no longer knows which numbers have been used"
    COMMITS_ALONE = "a worker that waited too long for the decision commits"
    GOES_BACK = "a worker whose connection is lost goes back behind a COMMIT that it has acted on"
    SERVES_ITS_VOTE = "a worker serves the target once it has voted"
    SERVES_WHILE_WRITING = "a worker goes on serving while it writes"
    FORGETS_TO_UNDO = "a worker that loses the trainer serves on without undoing what it has written"
