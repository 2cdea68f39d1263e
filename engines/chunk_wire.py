"""The `raw` and `coded` wires: chunks go out while later ones are diffed, and are written as they arrive.

Raw chunks are counts, offsets and values as the kernels found them; coded ones are packed on the host's cores.

BEGIN rides beside PROPOSE, a Chunk message says the size of what is broadcast next, End brings the sums that the
whole must add up to (docs/protocol.md, "Streamed rounds"). Diff, broadcast and apply each have a stream of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import torch

from deltacast.delta.chunk_codec import PackingChunk, UnpackingChunk
from deltacast.delta.chunks import ChunkCoder, ChunkReceiver, ChunkSender, SentChunk, Sums
from deltacast.delta.chunks.device import Lane
from deltacast.delta.chunks.kept import on_host
from deltacast.delta.errors import ProtocolError, TransportError
from deltacast.delta.kernels import RawChunk
from deltacast.delta.sources import WeightSource, named
from deltacast.delta.state import WeightState
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup
from deltacast.engines.history import KeptUpdate
from deltacast.engines.payload import Handoff, Inbox, Incoming, Outgoing, Route
from deltacast.engines.protocol import Chunk, End, Propose, expect
from deltacast.store.baseline import Baseline

__all__ = ["ChunkIncoming", "ChunkOutgoing"]

_RUNS_AHEAD: Final = 2  # chunks, beside those that were begun; workers wait while the host launches more
_UNPACKING: Final = 3  # chunks in the hands of the codec's threads
_MOST_PACKED: Final = 4  # 1-byte words: a byte of position, one of a quad, one of high, a nibble and an exception
_MOST_HEADER: Final = 1 << 20


class ChunkOutgoing(Outgoing):
    """A streamed round.

    Args:
        sender: made for the baseline; kept from round to round.
        source: the new weights, in the order of the sender's plan.
        baseline: what `advance` moves.
        target_version: of the round.
        overlaps: have workers write while they receive.
        coder: for the `coded` wire; None for `raw`.
        keep_bytes: host memory that the update may take to be made again, for a store or a replay; more, and it cannot.
    """

    reads_source = True

    def __init__(
        self,
        sender: ChunkSender,
        source: WeightSource,
        baseline: Baseline,
        *,
        target_version: int,
        overlaps: bool,
        coder: ChunkCoder | None = None,
        keep_bytes: float = 0,
    ) -> None:
        self._keep_bytes = keep_bytes
        self.wire = "raw" if coder is None else "coded"
        self._sender, self._source, self._baseline, self._coder = sender, source, baseline, coder
        self.base_version, self.target_version, self.overlaps = baseline.version, target_version, overlaps
        self._sending = Lane(sender.device, priority=-1)
        self._ready: Handoff[_Ready | Sums | _Posted] = Handoff("the diff")
        self._chunks: Iterator[SentChunk] = iter(())

    def begin(self) -> None:
        """See `Outgoing`. The first chunks are diffed while the workers get ready; the second call finds it begun."""
        if self.begun_at:
            return
        self.begun_at = time.perf_counter()
        self._sender.begin()
        metas = self._baseline.state.table.metas
        names = (metas[place].name for place in self._sender.plan.order)
        self._chunks = self._sender.chunks(named(self._source, names))
        self._announce()  # now that the device is at work

    def run_ahead(self) -> None:
        """See `Outgoing`. So that the device has work until the first chunks are sent."""
        self._sender.run_ahead(_RUNS_AHEAD)

    def produce(self, route: Route) -> None:
        """See `Outgoing`. Chunks are sent from here where nothing can block: each hand-over would cost 0.1 ms."""
        if self._coder is None and route.group.posts_at_once and self._sender.in_place:
            error = None
            try:
                for item in self._items():
                    self._pass_on(item, route)
            except TransportError as err:
                error = err
            self._ready.put(_Posted(error))
        else:
            for item in self._items():
                self._ready.put(item)

    def send(self, route: Route) -> None:
        """See `Outgoing`."""
        item = self._ready.get(route.deadline)
        while isinstance(item, _Ready):
            self._pass_on(item, route)
            item = self._ready.get(route.deadline)
        if isinstance(item, Sums):
            self._pass_on(item, route)
        elif item.error is not None:
            raise item.error
        with self._sending.active():
            route.group.wait(route.deadline)

    def _announce(self) -> None:
        sender, coder = self._sender, self._coder
        begin = sender.header()
        self.header = begin.to_bytes()
        self.sent_bytes = len(self.header)
        widths = zip(begin.capacities, sender.plan.word_bytes, strict=True)
        self.payload_bytes = sum(capacity * (2 + width) for capacity, width in widths)
        self.buffer_bytes = sender.nbytes + (coder.nbytes if coder is not None else 0)

    def _items(self) -> Iterator[_Ready | Sums]:
        """Diff, and yield what is to be sent as it comes: chunks, and the sums of them all."""
        for chunk in self._chunks:
            yield _Ready(chunk, None if self._coder is None else self._coder.pack(chunk))
        sums, self.target_digest = self._sender.sums()
        self.diff_s = time.perf_counter() - self.begun_at
        self.num_changed, self.num_parameters = self._sender.num_changed, len(sums.places)
        yield sums

    def _pass_on(self, item: _Ready | Sums, route: Route) -> None:
        if isinstance(item, Sums):
            bulk = item.to_bytes()
            route.tell(End(route.run_id, route.key, self.target_digest), bulk)
            self.sent_bytes += len(bulk)
            return
        chunk = item.chunk
        with self._sending.active():
            self._sending.follow(chunk.ready)
            tensors = item.tensors(route.group.device)
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            num_changes = chunk.changes.num_changes or 0
            route.tell(Chunk(route.run_id, route.key, chunk.number, num_changes, num_bytes), b"")
            route.group.post(tensors, route.deadline)
        self.sent_bytes += num_bytes

    def stage(self) -> None:
        """See `Outgoing`."""
        fingerprints_bytes = 24 * len(self._baseline.state.table)  # before, after, and of what is overwritten
        if (nbytes := self._sender.kept_bytes + fingerprints_bytes) <= self._keep_bytes:
            make = partial(
                self._sender.keep().update,
                run_id=self._baseline.run_id,
                epoch=self._baseline.epoch,
                target_version=self.target_version,
                optimizer_step=self.optimizer_step,
            )
            self.update = KeptUpdate(make, nbytes)

    def advance(self) -> None:
        """See `Outgoing`."""
        self._sender.advance(self.target_version)

    def discard(self) -> None:
        """See `Outgoing`. The source, too, is let go now: it may be a collective that others wait in."""
        self._ready.close()
        self._sender.stop()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A chunk, and its packing under way if the wire codes it."""

    chunk: SentChunk
    packing: PackingChunk | None

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return what travels, on the payload's device in the order of the current stream; waits for the packing."""
        if self.packing is None:
            return self.chunk.tensors
        return (self.packing.result().to(device, non_blocking=True),)


@dataclass(frozen=True, slots=True)
class _Posted:
    """All is posted, or what kept it from being."""

    error: TransportError | None


class ChunkIncoming(Incoming):
    """A streamed round, on its way into live weights.

    Args:
        propose: what the trainer said.
        receiver: has begun the round; kept for the next.
        state: the weights.
        on_write: called right before the first write.
        coder: for the `coded` wire; None for `raw`.
        rolling: slices of the rolling audit that will follow, to start it right behind the last write; 0 for none.
    """

    def __init__(
        self,
        propose: Propose,
        receiver: ChunkReceiver,
        state: WeightState,
        on_write: Callable[[], None],
        coder: ChunkCoder | None = None,
        *,
        rolling: int = 0,
    ) -> None:
        self._coder, self._rolling = coder, rolling
        self._propose, self._receiver, self._state, self._on_write = propose, receiver, state, on_write
        self._before = state.label()
        self._sums: Sums | None = None
        self._digest = ""
        self.buffer_bytes = receiver.nbytes + (coder.nbytes if coder is not None else 0)

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:
        """See `Incoming`."""
        lane, number = Lane(group.device, priority=-1), 0
        lane.follow_caller()
        with _Finishing(group.device, self._finish) as finishing:
            message, bulk = inbox.get(deadline)
            while isinstance(message, Chunk):
                if message.number != number:
                    raise ProtocolError("a chunk out of turn", expected=number, found=message.number)
                chunk = self._receiver.take(message.num_changes)
                with lane.active():
                    if self._coder is None:
                        group.post((chunk.counts, chunk.offsets, chunk.values), deadline)
                        self._arrived(number)
                    else:
                        packed = self._receive_packed(group, chunk, message.num_bytes, deadline)
                        lane.wait()
                        span = self._receiver.plan.spans[number]
                        finishing.put(number, chunk, self._coder.unpack(span.group, chunk, packed))
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
            self._state.disown()
            raise
        self._state.restore(self._before)

    def _receive_packed(self, group: PayloadGroup, chunk: RawChunk, num_bytes: int, deadline: Deadline) -> torch.Tensor:
        """Take a packed chunk; on the host once the current stream is done."""
        most = _MOST_PACKED * (chunk.values.nbytes + 4 * chunk.num_blocks) + _MOST_HEADER
        if num_bytes > most:
            raise ProtocolError("a packed chunk is too large", expected=f"at most {most} bytes", found=num_bytes)
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
        group.post([packed], deadline)
        return on_host(packed)

    def _finish(self, number: int, chunk: RawChunk, pending: UnpackingChunk) -> None:
        assert self._coder is not None
        self._coder.finish(self._receiver.plan.spans[number].group, chunk, pending)
        self._arrived(number)

    def _arrived(self, number: int) -> None:
        if self._propose.overlaps:
            self._write(number)

    def _write(self, number: int) -> None:
        if number == 0:
            self._on_write()
        self._receiver.apply(number)
        if self._rolling and number + 1 == len(self._receiver.plan.spans):
            self._receiver.audit_ahead(self._propose.target_version, self._rolling)


class _Finishing:
    """A thread, and a stream, on which chunks are finished in their order while later ones arrive; use it as a context.

    Args:
        device: the weights'.
        finish: what to do with each chunk.
    """

    def __init__(self, device: torch.device, finish: Callable[[int, RawChunk, UnpackingChunk], None]) -> None:
        self._lane, self._finish = Lane(device), finish
        self._lane.follow_caller()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltacast-unpack")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait for the thread; raises what failed in it, if the block itself did not."""
        self._thread.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            self._wait(leave=0)

    def put(self, number: int, chunk: RawChunk, pending: UnpackingChunk) -> None:
        """Pass a chunk on, and wait if there are too many; raises what failed in an earlier one."""
        self._wait(leave=_UNPACKING - 1)
        self._pending.append(self._thread.submit(self._run, number, chunk, pending))

    def _run(self, number: int, chunk: RawChunk, pending: UnpackingChunk) -> None:
        with self._lane.active():
            self._finish(number, chunk, pending)

    def _wait(self, *, leave: int) -> None:
        while len(self._pending) > leave:
            self._pending.popleft().result()
