"""Opening control connections: the trainer's listener, and a worker's way in.

::

    trainer -> worker   magic (8 bytes), 32 random bytes
    worker -> trainer   magic (8 bytes), 32 random bytes, HMAC-SHA256(secret, "worker" + both nonces)
    trainer -> worker   HMAC-SHA256(secret, "trainer" + both nonces)
    worker -> trainer   its hello, as a frame

Fixed lengths up to the proof, so nothing of a stranger's is parsed. Openings run side by side, so that a stranger
that says nothing holds up nobody.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
from collections.abc import Sequence
from typing import Final

from deltacast.delta.errors import AuthenticationError, DeadlineError, ProtocolError, TransportError
from deltacast.engines.control import Channel, Deadline, Task

__all__ = ["ANY_PORT", "Listener", "connect", "listening_socket"]

ANY_PORT: Final = (0,)
"""The system's choice."""

_LOG: Final = logging.getLogger(__name__)
_MAGIC: Final = b"\x8ddccast1"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_OPENING_S: Final = 5.0  # for a connection to prove itself, and again to say hello
_MAX_OPENINGS: Final = 64  # the oldest makes room: an honest one is done in milliseconds


class _Opening:
    """A connection on its way: first it must prove that it knows the secret, then say hello.

    Attributes:
        deadline: for the present step.
    """

    def __init__(self, channel: Channel, secret: bytes) -> None:
        self.channel, self.deadline = channel, Deadline(_OPENING_S)
        self._secret, self._mine, self._proven = secret, secrets.token_bytes(_NONCE_BYTES), False
        channel.send_raw(_MAGIC + self._mine, self.deadline)

    def fileno(self) -> int:
        return self.channel.fileno()

    def advance(self) -> bool:
        """Read what has come; True once the first frame is there.

        Raises:
            TransportError: it is a stranger, or gone.
        """
        if not self._proven:
            answer = self.channel.poll_raw(len(_MAGIC) + _NONCE_BYTES + _MAC_BYTES)
            if answer is None:
                return False
            self._check(answer)
            self._proven, self.deadline = True, Deadline(_OPENING_S)
        return self.channel.peek()

    def _check(self, answer: bytes) -> None:
        theirs, mac = answer[len(_MAGIC) : -_MAC_BYTES], answer[-_MAC_BYTES:]
        expected = _mac(self._secret, b"worker", self._mine, theirs)
        if not answer.startswith(_MAGIC) or not hmac.compare_digest(mac, expected):
            raise AuthenticationError(f"{self.channel.peer} does not know the run's secret")
        self.channel.send_raw(_mac(self._secret, b"trainer", self._mine, theirs), self.deadline)


class Listener:
    """The trainer's end: accepts workers that know the secret.

    Args:
        host: the interface to bind; never all interfaces unless the caller says so.
        ports: to be tried in this order; 0 is any free one.
        secret: the run's.

    Raises:
        TransportError: the address cannot be bound.
    """

    def __init__(self, host: str, ports: Sequence[int], secret: bytes) -> None:
        self._secret = secret
        self._openings: list[_Opening] = []
        self._ready: list[Channel] = []
        try:
            self._sock = listening_socket(host, ports)
        except OSError as err:
            raise TransportError(
                f"cannot listen on {host}:{ports[0]}: {err.strerror}", hint="Choose another port."
            ) from err
        self._sock.settimeout(0)
        self.host, self.port = host, int(self._sock.getsockname()[1])

    def accept(self, deadline: Deadline, task: Task | None = None) -> Channel | None:
        """Wait for the next worker that has proven itself and said hello; strangers are dropped.

        Returns:
            Its channel, with the hello at hand for `poll`; None if `task` failed first.

        Raises:
            DeadlineError: none came in time.
            TransportError: this process cannot accept connections.
        """
        while not self._ready:
            if task is not None and task.error is not None:
                return None
            self._advance(deadline.left_s("a worker"), None if task is None or task.done else task)
        return self._ready.pop(0)

    def accept_waiting(self) -> list[Channel]:
        """Accept the workers that have come, as `accept` does; strangers hold this up for 5 s at most, together."""
        deadline = Deadline(_OPENING_S)
        try:
            while (self._openings or self._has_waiting()) and not deadline.expired:
                self._advance(max(0.0, deadline.remaining_s), None)
        except TransportError as err:
            _LOG.warning("deltacast: %s", err)
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Stop listening; may be called twice."""
        for channel in (*self._ready, *(opening.channel for opening in self._openings)):
            channel.close()
        self._ready, self._openings = [], []
        self._sock.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._sock.fileno() < 0

    def _has_waiting(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _advance(self, wait_s: float, task: Task | None) -> None:
        """Wait for anything to happen, once, and let every opening that can go on do so."""
        now_left = [max(0.0, opening.deadline.remaining_s) for opening in self._openings]
        with selectors.DefaultSelector() as selector:
            for item in (self._sock, *self._openings, *((task,) if task else ())):
                selector.register(item, selectors.EVENT_READ, item)
            happened = [key.data for key, _ in selector.select(min([wait_s, *now_left]))]
        for opening in [item for item in happened if isinstance(item, _Opening)]:
            self._go_on(opening)
        for opening in [opening for opening in self._openings if opening.deadline.expired]:
            self._drop(opening)
        if self._sock in happened:
            self._open()

    def _go_on(self, opening: _Opening) -> None:
        try:
            if opening.advance():
                self._openings.remove(opening)
                self._ready.append(opening.channel)
        except TransportError:
            self._drop(opening)

    def _open(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as err:
            raise TransportError(f"cannot accept connections on {self.host}:{self.port}: {err.strerror}") from err
        if len(self._openings) >= _MAX_OPENINGS:
            self._drop(self._openings[0])
        channel = Channel(sock, f"{address[0]}:{address[1]}")
        try:
            self._openings.append(_Opening(channel, self._secret))
        except TransportError:
            channel.close()

    def _drop(self, opening: _Opening) -> None:
        self._openings.remove(opening)
        opening.channel.close()


def listening_socket(host: str, ports: Sequence[int] = ANY_PORT) -> socket.socket:
    """Listen on one interface, and on no other, at the first of these ports that is free.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM)[0][0]
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"{os.strerror(errno.EADDRINUSE)}, at each of {len(ports)} ports")


def connect(host: str, port: int, secret: bytes, deadline: Deadline, admission: Deadline) -> Channel:
    """Open a worker's control connection to the trainer; both sides prove that they know the secret.

    Args:
        host: where the trainer listens.
        port: likewise.
        secret: the run's.
        deadline: for reaching it.
        admission: for its opening: a trainer lets workers in between its own steps only.

    Raises:
        DeadlineError: no answer in time.
        AuthenticationError: the other side does not know the secret, or says that we do not.
        TransportError: nobody listens there.
    """
    try:
        sock = socket.create_connection((host, port), timeout=deadline.left_s(f"{host}:{port}"))
    except TimeoutError as err:
        raise DeadlineError(f"no answer from {host}:{port}") from err
    except OSError as err:
        raise TransportError(f"cannot reach the trainer at {host}:{port}: {err.strerror}") from err
    channel = Channel(sock, f"trainer {host}:{port}")
    try:
        _prove(channel, secret, admission)
    except BaseException:
        channel.close()
        raise
    channel.peer = "the trainer"
    return channel


def _prove(channel: Channel, secret: bytes, deadline: Deadline) -> None:
    opening = channel.receive_raw(len(_MAGIC) + _NONCE_BYTES, deadline)
    if not opening.startswith(_MAGIC):
        raise ProtocolError(f"{channel.peer} is no deltacast trainer", found=opening[: len(_MAGIC)].hex())
    theirs, mine = opening[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    channel.send_raw(_MAGIC + mine + _mac(secret, b"worker", theirs, mine), deadline)
    try:
        proof = channel.receive_raw(_MAC_BYTES, deadline)
    except DeadlineError:
        raise
    except TransportError as err:
        raise AuthenticationError(f"{channel.peer} refused the secret") from err
    if not hmac.compare_digest(proof, _mac(secret, b"trainer", theirs, mine)):
        raise AuthenticationError(f"{channel.peer} does not know the run's secret")


def _mac(secret: bytes, role: bytes, trainer_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + trainer_nonce + worker_nonce, "sha256")
