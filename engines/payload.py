"""What a round carries: one class per wire and side, behind which the protocol does not look.

`Outgoing` is the trainer's side, `Incoming` a worker's. `container_wire.py` sends an update's groups whole,
`chunk_wire.py` streams chunks while they are made and applied, `dense_wire.py` sends whole parameters. What is told
beside the payload (lengths, sums) goes over the control connections, as messages of `protocol.py`.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from deltacast.delta.apply import Transaction, TransactionState
from deltacast.delta.errors import DeadlineError, TransportError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.shard_apply import ShardTransaction
from deltacast.engines.control import Deadline, Frame
from deltacast.engines.group import PayloadGroup
from deltacast.engines.protocol import Message, RoundKey

__all__ = ["Handoff", "Inbox", "Incoming", "Limits", "Outgoing", "Route", "StagedIncoming", "Tell"]

Item = TypeVar("Item")

Tell: TypeAlias = Callable[[Message, bytes], None]
"""Sends a message, and bulk beside it, to every worker; raises TransportError if one cannot be told."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one round's payload gets to the workers.

    Attributes:
        run_id, key: what its messages carry.
        group: for the payload itself.
        tell: for what goes beside it.
        deadline: for all of it.
    """

    run_id: str
    key: RoundKey
    group: PayloadGroup
    tell: Tell
    deadline: Deadline


class Outgoing(ABC):
    """One round's payload on the trainer's side.

    The trainer calls `begin`; `run_ahead` once everybody was asked; once everybody is READY `produce` on its own
    thread and `send` on the payload's, side by side; then `stage` while the workers vote; then `advance` at COMMIT or
    `discard` at ABORT. Every call but `advance` leaves the baseline as it is. `discard` comes after whatever failed,
    and may come twice.

    Attributes:
        wire: what `Propose.wire` says.
        base_version: None for a seed.
        target_version: of the round.
        optimizer_step: that the target version is published with; None if the caller gave none.
        target_digest: what every worker must hold; may be empty until `send` has returned.
        header: rides beside PROPOSE.
        payload_bytes: what a worker must have room for.
        reads_source: whether `produce` reads the trainer's weights; else they were read before, or are not.
        overlaps: whether workers write while they receive.
        num_changed, num_parameters, sent_bytes: for the report; final once `send` has returned.
        buffer_bytes: extra memory on the trainer's device and host, by its bound.
        begun_at: when `begin` started the diff, by `time.perf_counter`; 0 if the diff came before.
        diff_s, encode_s: for the report.
        update: makes the update that was sent, for a store or a history: from `stage` on, on any thread, and also once
            the baseline has moved. None for a seed, repair or replay, and if nobody has room for it.
    """

    wire: str
    base_version: int | None
    target_version: int
    optimizer_step: int | None = None
    target_digest: str = ""
    header: bytes = b""
    payload_bytes: int = 0
    reads_source: bool = False
    overlaps: bool = False
    num_changed: int = 0
    num_parameters: int = 0
    sent_bytes: int = 0
    buffer_bytes: int = 0
    begun_at: float = 0.0
    diff_s: float = 0.0
    encode_s: float = 0.0
    update: Callable[[], WeightUpdate] | None = None

    def begin(self) -> None:  # noqa: B027 - only streamed payloads have work that needs nobody's READY
        """Start what can be done before the workers are READY."""

    def run_ahead(self) -> None:  # noqa: B027 - likewise
        """Start more of it while the workers get ready; blocks for nothing."""

    def produce(self, route: Route) -> None:  # noqa: B027 - likewise
        """Make what `send` sends, if that is not done yet. On the trainer's thread: it reads the source.

        It may send too, where that does not block; what fails there fails in `send`.
        """

    @abstractmethod
    def send(self, route: Route) -> None:
        """Send everything that is not sent; returns once it has left. On the payload's thread, collective.

        Raises:
            DeadlineError, TransportError: it did not leave; the group is of no more use.
        """

    def stage(self) -> None:  # noqa: B027 - only some have anything to prepare
        """Prepare the baseline's own step, and the update for a store."""

    @abstractmethod
    def advance(self) -> None:
        """Move the baseline to the target version by applying what was sent. The decision is COMMIT."""

    def discard(self) -> None:  # noqa: B027 - only streamed payloads hold on to anything
        """Let go of whatever the round holds."""


class Handoff(Generic[Item]):
    """What one thread passes on to the payload's thread.

    Args:
        who: whom that thread waits for, in messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Pass an item on."""
        self._items.put(item)

    def close(self) -> None:
        """Say that nothing more will come; may be called twice."""
        self._items.put(None)

    def get(self, deadline: Deadline) -> Item:
        """Wait for the next item.

        Raises:
            DeadlineError: it did not come.
            TransportError: nothing more will come.
        """
        try:
            item = self._items.get(timeout=deadline.left_s(self._who))
        except queue.Empty:
            raise DeadlineError(f"{self._who} went silent in the middle of a payload") from None
        if item is None:
            raise TransportError("the payload was cut off")
        return item


Inbox: TypeAlias = Handoff[Frame]
"""What the trainer tells during a payload, as a worker hears it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker lets a round use.

    Attributes:
        undo_budget_bytes: refuse rounds whose undo log needs more; None for no bound.
        max_payload_bytes: likewise for the payload's buffers.
        threads: for decoding.
    """

    undo_budget_bytes: int | None
    max_payload_bytes: int | None
    threads: int


class Incoming(ABC):
    """One round's payload on a worker's side. Making one checks all that can be checked before READY.

    The worker calls `receive` on the payload's thread, then `stage` and `apply`, then `commit` or `rollback`. If the
    round `overlaps`, `receive` writes already; else `apply` is the first to. After `rollback` the weights are the
    base's, or the state says that it has no version.

    Attributes:
        is_seed: needs no base; has no undo; all that the worker holds is audited before the vote.
        publishes: moves the worker to a new version.
        drains: only takes the payload, which is for others, so that they get it.
        repairs: parameters that it sends whole to mend them.
        buffer_bytes: extra memory that it holds, by its bound.
    """

    is_seed: bool = False
    publishes: bool = True
    drains: bool = False
    repairs: tuple[str, ...] = ()
    buffer_bytes: int = 0

    @abstractmethod
    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:
        """Take the whole payload. Collective; on the payload's thread.

        Raises:
            DeadlineError, TransportError: it did not come whole.
        """

    def stage(self) -> None:  # noqa: B027 - not all have anything to prepare
        """Check and prepare, of what is left to write, what can be without writing: the weights may still be read.

        Raises:
            DeltacastError: something is not as promised; `rollback` must follow.
        """

    @abstractmethod
    def apply(self) -> None:
        """Check everything, write what is not written yet, and move the state to the target version.

        Raises:
            DeltacastError: something is not as promised; `rollback` must follow.
        """

    @abstractmethod
    def commit(self) -> None:
        """Let go of the undo log: the version stands."""

    @abstractmethod
    def rollback(self) -> None:
        """Restore what was overwritten; may be called at any point, and again."""


class StagedIncoming(Incoming):
    """One that proves all of what it writes before the first write.

    Args:
        on_write: called right before that.
    """

    def __init__(self, on_write: Callable[[], None]) -> None:
        self._on_write = on_write
        self._transaction: Transaction | ShardTransaction | None = None

    @abstractmethod
    def _staged(self) -> Transaction | ShardTransaction:
        """Return the transaction that is to write."""

    def stage(self) -> None:
        """See `Incoming`; this checks all."""
        self._transaction = self._staged()

    def apply(self) -> None:
        """See `Incoming`."""
        assert self._transaction is not None
        self._on_write()
        self._transaction.write()

    def commit(self) -> None:
        """See `Incoming`."""
        if self._transaction is not None:
            self._transaction.commit()

    def rollback(self) -> None:
        """See `Incoming`."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None and transaction.state in {TransactionState.STAGED, TransactionState.WRITTEN}:
            transaction.rollback()
