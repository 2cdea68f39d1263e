"""The `raw` wire: chunks of counts, offsets and values go out while later ones are diffed, and are written on arrival.

BEGIN rides beside PROPOSE, a Chunk message says the size of what is broadcast next, End brings the sums that the
whole must add up to (docs/protocol.md, "Streamed rounds"). Diff, broadcast and apply each have a stream of their own.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.chunks import ChunkReceiver, ChunkSender, SentChunk, Sums
from deltacast.delta.chunks.device import Lane
from deltacast.delta.errors import DeadlineError, ProtocolError, TransportError
from deltacast.delta.sources import WeightSource, checked
from deltacast.delta.state import WeightState
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup
from deltacast.engines.payload import Inbox, Incoming, Outgoing, Tell
from deltacast.engines.protocol import Chunk, End, Propose, RoundKey, expect
from deltacast.store.baseline import Baseline

__all__ = ["ChunkIncoming", "ChunkOutgoing"]


class ChunkOutgoing(Outgoing):
    """A streamed round.

    Args:
        sender: made for the baseline; kept from round to round.
        source: the new weights, in the order of the sender's plan.
        baseline: what `advance` moves.
        target_version: of the round.
        overlaps: have workers write while they receive.
    """

    wire = "raw"

    def __init__(
        self, sender: ChunkSender, source: WeightSource, baseline: Baseline, *, target_version: int, overlaps: bool
    ) -> None:
        self._sender, self._source, self._baseline = sender, source, baseline
        self.base_version, self.target_version, self.overlaps = baseline.version, target_version, overlaps
        begin = sender.header()
        self.header = begin.to_bytes()
        widths = zip(begin.capacities, sender.plan.word_bytes, strict=True)
        self.payload_bytes = sum(capacity * (2 + width) for capacity, width in widths)
        self.buffer_bytes = sender.nbytes
        self._ready: queue.SimpleQueue[SentChunk | Sums | None] = queue.SimpleQueue()
        self._chunks: Iterator[SentChunk] = iter(())
        self._started = 0.0

    def begin(self) -> None:
        """See `Outgoing`. The first chunks are diffed while the workers get ready."""
        self._started = time.perf_counter()
        self._sender.begin()
        self._chunks = self._sender.chunks(tensor for _, tensor in checked(self._source))

    def produce(self) -> None:
        """See `Outgoing`."""
        for chunk in self._chunks:
            self._ready.put(chunk)
        sums, self.target_digest = self._sender.sums()
        self.diff_s = time.perf_counter() - self._started
        self.num_changed, self.num_parameters = self._sender.num_changed, len(sums.places)
        self._ready.put(sums)

    def send(self, key: RoundKey, group: PayloadGroup, tell: Tell, deadline: Deadline) -> None:
        """See `Outgoing`."""
        lane, run_id = Lane(group.device, priority=-1), self._baseline.run_id
        self.sent_bytes = len(self.header)
        while isinstance(item := self._next(deadline), SentChunk):
            tell(Chunk(run_id, key, item.number, item.changes.num_changes or 0, 0), b"")
            lane.follow(item.ready)
            with lane.active():
                group.post(item.tensors, deadline)
            self.sent_bytes += sum(tensor.nbytes for tensor in item.tensors)
        sums = item.to_bytes()
        tell(End(run_id, key, self.target_digest), sums)
        self.sent_bytes += len(sums)
        with lane.active():
            group.wait(deadline)

    def advance(self) -> None:
        """See `Outgoing`."""
        self._sender.advance(self.target_version)

    def discard(self) -> None:
        """See `Outgoing`."""
        self._ready.put(None)

    def _next(self, deadline: Deadline) -> SentChunk | Sums:
        try:
            item = self._ready.get(timeout=deadline.left_s("the diff"))
        except queue.Empty:
            raise DeadlineError("the diff did not end in time") from None
        if item is None:
            raise TransportError("the round was given up")
        return item


class ChunkIncoming(Incoming):
    """A streamed round, on its way into live weights.

    Args:
        propose: what the trainer said.
        receiver: has begun the round; kept for the next.
        state: the weights.
        on_write: called right before the first write.
    """

    def __init__(
        self, propose: Propose, receiver: ChunkReceiver, state: WeightState, on_write: Callable[[], None]
    ) -> None:
        self._propose, self._receiver, self._state, self._on_write = propose, receiver, state, on_write
        self._before = _Snapshot(state)
        self._sums: Sums | None = None
        self._digest = ""
        self.buffer_bytes = receiver.nbytes

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:
        """See `Incoming`."""
        lane, number = Lane(group.device, priority=-1), 0
        lane.follow_caller()
        message, bulk = inbox.get(deadline)
        while isinstance(message, Chunk):
            if message.number != number:
                raise ProtocolError("a chunk out of turn", expected=number, found=message.number)
            changes = self._receiver.take(message.num_changes)
            with lane.active():
                group.post((changes.counts, changes.offsets, changes.values), deadline)
                if self._propose.overlaps:
                    self._write(number)
            number += 1
            message, bulk = inbox.get(deadline)
        self._digest = expect(message, End).target_digest
        self._sums = Sums.from_bytes(bulk, self._state.table)
        with lane.active():
            group.wait(deadline)

    def apply(self) -> None:
        """See `Incoming`. If anything is not as promised, what was overwritten is back when this raises."""
        if self._sums is None:
            raise TransportError("the payload did not arrive")
        try:
            if not self._propose.overlaps:
                for number in range(self._receiver.num_taken):
                    self._write(number)
            self._receiver.finish(self._propose.target_version, self._sums, self._digest)
        except BaseException:
            self.rollback()
            raise

    def commit(self) -> None:
        """See `Incoming`. The log is forgotten when the next round begins."""

    def rollback(self) -> None:
        """See `Incoming`."""
        try:
            self._receiver.rollback()
        except BaseException:
            self._state.version = None
            raise
        self._before.restore(self._state)

    def _write(self, number: int) -> None:
        if number == 0:
            self._on_write()
        self._receiver.apply(number)


class _Snapshot:
    """What an aborted round puts back beside the words."""

    __slots__ = ("_audited", "_fingerprints", "_version")

    def __init__(self, state: WeightState) -> None:
        self._version = state.version
        self._fingerprints: NDArray[np.uint64] = state.fingerprints.copy()
        self._audited: NDArray[np.int64] = state.audited_versions.copy()

    def restore(self, state: WeightState) -> None:
        state.version = self._version
        state.fingerprints[:] = self._fingerprints
        state.audited_versions[:] = self._audited
