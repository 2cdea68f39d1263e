"""What the ranks of one server tell one another: a small message of each to all the others, now and then.

Messages go from rank to rank, not by a collective, and carry a topic. A rank that has nothing to say for a topic says
so at once and waits for nobody (`excuse`); a rank that no longer waits for a topic drops what comes of it later. So
ranks may leave a round at different points and still meet in the next. Nothing waits for longer than the timeout; a
peer that is gone by then is named, and the group is of no more use.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any, Final

import torch

from deltacast.delta.errors import DeadlineError, ProtocolError, StateError, TransportError
from deltacast.engines.control import Deadline

__all__ = ["Exchange", "Turn"]

_HEAD: Final = struct.Struct("<II")
_MAX_BYTES: Final = 1 << 30
_CLOCK_S: Final = 0.01  # Gloo counts whole milliseconds, and may give up a little early


class Exchange:
    """One rank's end. One thread at a time.

    Args:
        group: a Gloo group of the server's ranks, used by nobody else: a `torch.distributed` ProcessGroup or Gloo's
            own. Kept, not closed.
        timeout_s: how long to wait for the others in a round; below the trainer's own `timeout_s`, so that it hears a
            verdict.
        patience_s: how long to wait for what each does at its own speed: loading, and the audit before a handshake.

    Attributes:
        rank: within the server.
        num_ranks: of the server.
        patience_s: as given.
    """

    def __init__(self, group: Any, *, timeout_s: float = 30.0, patience_s: float = 600.0) -> None:
        self._group, self._timeout_s, self.patience_s = group, timeout_s, patience_s
        self.rank, self.num_ranks = int(group.rank()), int(group.size())
        self._posted: list[list[tuple[Any, torch.Tensor]]] = []  # that a peer may still have to read
        self._num_read = 0
        self._broken = ""

    def turn(self, topic: str) -> Turn:
        """Begin a topic: a string that every rank derives alike, and that is not used again if it may be given up."""
        return Turn(self, topic)

    def gather(self, topic: str, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Tell the others, hear them all, and return what each said, by rank. Blocks.

        Args:
            topic: what it is about.
            payload: what this rank says; at most 1 GiB, topic included.
            timeout_s: other than the usual.

        Raises:
            StateError: a rank has nothing to say for the topic; it says why.
            DeadlineError: a rank did not answer in time.
            TransportError: a rank is gone, or was earlier.
        """
        self.post(topic, payload)
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        said = [(payload, "") if peer == self.rank else self._hear(peer, topic, deadline)
                for peer in range(self.num_ranks)]  # fmt: skip
        excuse = next(((peer, why) for peer, (_, why) in enumerate(said) if why), None)
        if excuse is not None:
            raise StateError(f"rank {excuse[0]} of this server takes no part: {excuse[1]}")
        del self._posted[: self._num_read]  # whoever speaks again has read all up to when everybody last spoke
        self._num_read = len(self._posted)
        return [payload for payload, _ in said]

    def post(self, topic: str, payload: bytes, excuse: str = "") -> None:
        """Tell the others, and wait for nobody.

        Raises:
            TransportError: a rank is gone, or was earlier.
        """
        head = topic.encode(), excuse.encode()
        frame = torch.frombuffer(bytearray(_HEAD.pack(*map(len, head)) + b"".join(head) + payload), dtype=torch.uint8)
        size = torch.tensor([frame.numel()])
        sends = [(peer, tensor) for peer in range(self.num_ranks) if peer != self.rank for tensor in (size, frame)]
        # Gloo reads the memory when the peer asks for it, so it must stay.
        self._posted.append([(self._started("send", tensor, peer), tensor) for peer, tensor in sends])

    def _hear(self, peer: int, topic: str, deadline: Deadline) -> tuple[bytes, str]:
        """Return a peer's message of a topic, and its excuse; what is of topics that were given up is dropped."""
        while True:
            size = torch.zeros(1, dtype=torch.int64)
            self._receive(size, peer, deadline)
            if not _HEAD.size <= int(size) <= _MAX_BYTES:
                raise ProtocolError(f"rank {peer} of this server sent a bad message", found=f"{int(size)} bytes")
            frame = torch.zeros(int(size), dtype=torch.uint8)
            self._receive(frame, peer, deadline)
            raw = frame.numpy().tobytes()
            num_topic, num_excuse = _HEAD.unpack_from(raw)
            end = _HEAD.size + num_topic
            if raw[_HEAD.size : end].decode() == topic:
                return raw[end + num_excuse :], raw[end : end + num_excuse].decode()

    def _receive(self, tensor: torch.Tensor, peer: int, deadline: Deadline) -> None:
        work = self._started("recv", tensor, peer)
        try:
            work.wait(timedelta(seconds=max(deadline.remaining_s, 0.001)))
        except RuntimeError as err:
            raise self._gone(peer, err, late=deadline.remaining_s < _CLOCK_S) from err

    def _started(self, what: str, tensor: torch.Tensor, peer: int) -> Any:
        if self._broken:
            raise TransportError(f"the ranks of this server cannot reach one another: {self._broken}",
                                 hint="Restart the server.")  # fmt: skip
        try:
            return getattr(self._group, what)([tensor], peer, 0)
        except RuntimeError as err:
            raise self._gone(peer, err, late=False) from err

    def _gone(self, peer: int, err: RuntimeError, *, late: bool) -> TransportError:
        self._broken = f"rank {peer} {'did not answer in time' if late else 'is gone'}"
        said = str(err).splitlines()[0]
        return (DeadlineError if late else TransportError)(f"{self._broken}, of this server's {self.num_ranks}: {said}")


class Turn:
    """One topic, in which a rank speaks once: what it has to say, or why it has nothing."""

    def __init__(self, exchange: Exchange, topic: str) -> None:
        self._exchange, self._topic, self._spoken = exchange, topic, False

    def gather(self, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """See `Exchange.gather`."""
        self._spoken = True
        return self._exchange.gather(self._topic, payload, timeout_s)

    def excuse(self, reason: object) -> None:
        """Tell the others not to wait, unless this rank has spoken; does not raise: they find out by themselves."""
        if self._spoken:
            return
        self._spoken = True
        try:
            self._exchange.post(self._topic, b"", excuse=str(reason) or type(reason).__name__)
        except TransportError:
            return
