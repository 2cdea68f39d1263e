"""Control connections: one TCP connection per worker, with a deadline on every read and write.

Opening::

    trainer -> worker   magic (8 bytes), 32 random bytes
    worker -> trainer   magic (8 bytes), 32 random bytes, HMAC-SHA256(secret, "worker" + both nonces)
    trainer -> worker   HMAC-SHA256(secret, "trainer" + both nonces)

Fixed lengths, so nothing of a stranger's is parsed. Then frames: u32 length of the message, u32 length of the bulk
that rides beside it, both little-endian, then the two. Sockets never block: waiting is done in `wait_any`, on
several connections and one `Task` at once, so there are no reader threads to leak.
"""

from __future__ import annotations

import hmac
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from deltacast.delta.errors import AuthenticationError, DeadlineError, ProtocolError, TransportError
from deltacast.engines.protocol import Message, decode_message, encode_message

__all__ = ["Channel", "Deadline", "Frame", "Listener", "Task", "connect", "wait_any"]

_MAGIC: Final = b"\x8ddccast1"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_HEAD: Final = struct.Struct("<II")
_MAX_MESSAGE_BYTES: Final = 64 << 20
_MAX_BULK_BYTES: Final = 1 << 30
_OPENING_S: Final = 5.0

Frame = tuple[Message, bytes]


class Deadline:
    """A point on the monotonic clock that a whole operation must not pass."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left_s(self, who: str) -> float:
        """Return the seconds left.

        Raises:
            DeadlineError: there are none; `who` is what was waited for.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"{who} did not answer in time", expected=f"within {self.seconds:g} s", found="nothing")
        return left

    @property
    def expired(self) -> bool:
        """Whether the point has passed."""
        return time.monotonic() >= self._end


class Channel:
    """One authenticated connection. Not thread-safe: one thread reads and writes it.

    Attributes:
        peer: what messages call the other side; set by the owner once it is known.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.settimeout(0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._buffer = bytearray()
        self.peer = peer

    def fileno(self) -> int:
        """Return the socket's descriptor, for `selectors`; -1 once closed."""
        return self._sock.fileno()

    def send(self, message: Message, deadline: Deadline, bulk: bytes = b"") -> None:
        """Write one frame.

        Raises:
            DeadlineError: the peer does not read.
            TransportError: the connection is gone.
        """
        body = encode_message(message)
        self.send_raw(_HEAD.pack(len(body), len(bulk)) + body + bulk, deadline)

    def send_raw(self, data: bytes, deadline: Deadline) -> None:
        """Write bytes; errors as `send`."""
        view = memoryview(data)
        while view:
            self._wait(selectors.EVENT_WRITE, deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                continue
            except OSError as err:
                raise TransportError(f"lost the connection to {self.peer}") from err

    def receive(self, deadline: Deadline) -> Frame:
        """Read one frame.

        Raises:
            DeadlineError: the peer does not write.
            TransportError: the connection is gone.
            ProtocolError: a frame that is too long or not a message.
        """
        while (frame := self._pop()) is None:
            self._wait(selectors.EVENT_READ, deadline)
            self._read_some()
        return frame

    def receive_raw(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Read exactly `num_bytes`; errors as `receive`."""
        while len(self._buffer) < num_bytes:
            self._wait(selectors.EVENT_READ, deadline)
            self._read_some()
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    def poll(self) -> Frame | None:
        """Read what has arrived, without waiting; None if that is not a whole frame yet. Errors as `receive`."""
        if (frame := self._pop()) is not None:
            return frame
        self._read_some()
        return self._pop()

    def has_frame(self) -> bool:
        """Whether a whole frame lies in the buffer already."""
        return len(self._buffer) >= _HEAD.size and len(self._buffer) >= _HEAD.size + sum(self._lengths())

    def gone(self) -> str:
        """Say why the peer can no longer be heard, or return an empty string. Does not wait."""
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return ""
        except OSError as err:
            return f"lost the connection to {self.peer}: {err.strerror}"
        self._buffer += data
        return "" if data else f"{self.peer} closed the connection"

    @property
    def local_host(self) -> str:
        """This host's address on the connection: the interface that reaches the peer."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._sock.close()

    def _lengths(self) -> tuple[int, int]:
        message_bytes, bulk_bytes = _HEAD.unpack_from(self._buffer)
        if message_bytes > _MAX_MESSAGE_BYTES or bulk_bytes > _MAX_BULK_BYTES:
            raise ProtocolError(f"a frame from {self.peer} is too long", found=f"{message_bytes} + {bulk_bytes} bytes")
        return message_bytes, bulk_bytes

    def _pop(self) -> Frame | None:
        if not self.has_frame():
            return None
        message_bytes, bulk_bytes = self._lengths()
        middle, end = _HEAD.size + message_bytes, _HEAD.size + message_bytes + bulk_bytes
        message = decode_message(bytes(self._buffer[_HEAD.size : middle]))
        bulk = bytes(self._buffer[middle:end])
        del self._buffer[:end]
        return message, bulk

    def _read_some(self) -> None:
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as err:
            raise TransportError(f"lost the connection to {self.peer}") from err
        if not data:
            raise TransportError(f"{self.peer} closed the connection")
        self._buffer += data

    def _wait(self, event: int, deadline: Deadline) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, event)
            selector.select(deadline.left_s(self.peer))


class Task:
    """A function on a thread of its own whose end wakes `wait_any`.

    Used for the payload's collectives, which block inside torch. The owner must `join`.

    Attributes:
        done: whether the function has ended.
        error: what it raised, if it did.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        self._function = function
        self.error: BaseException | None = None
        self.done = False
        self._thread = threading.Thread(target=self._run, name=f"deltacast-{name}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable at the end."""
        return self._wake_read.fileno()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end and release the descriptors; False if it did not come in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._wake_read.close()
        self._wake_write.close()
        return True

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as err:  # noqa: BLE001 - a thread's boundary; the owner looks at `error`
            self.error = err
        finally:
            self.done = True
            self._wake_write.send(b"\0")


def wait_any(channels: Sequence[Channel], deadline: Deadline, task: Task | None = None) -> Channel | Task:
    """Wait until a channel can be read (or has a frame, or is gone), or the task has ended, and return it.

    Raises:
        DeadlineError: nothing happened in time.
    """
    for channel in channels:
        if channel.has_frame():
            return channel
    with selectors.DefaultSelector() as selector:
        for item in (*channels, *((task,) if task else ())):
            selector.register(item, selectors.EVENT_READ, item)
        who = ", ".join(channel.peer for channel in channels) or "the payload"
        ready: list[Channel | Task] = [key.data for key, _ in selector.select(deadline.left_s(who))]
    if not ready:
        deadline.left_s(who)
        return wait_any(channels, deadline, task)
    return next((item for item in ready if isinstance(item, Channel)), ready[0])


class Listener:
    """The trainer's end: accepts workers that know the secret.

    Args:
        host: the interface to bind; never all interfaces unless the caller says so.
        port: 0 for any free port.
        secret: the run's.

    Raises:
        TransportError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        try:
            self._sock = socket.create_server((host, port), backlog=128)
        except OSError as err:
            raise TransportError(
                f"cannot listen on {host}:{port}: {err.strerror}", hint="Choose another port."
            ) from err
        self._sock.settimeout(0)
        self.host, self.port = host, int(self._sock.getsockname()[1])

    def accept(self, deadline: Deadline, task: Task | None = None) -> Channel | None:
        """Wait for the next worker that proves it knows the secret; strangers are dropped.

        Returns:
            Its channel; None if `task` failed first.

        Raises:
            DeadlineError: none came in time.
        """
        while True:
            if task is not None and task.error is not None:
                return None
            watched = [self._sock, *((task,) if task is not None and not task.done else ())]
            readable, _, _ = select.select(watched, [], [], deadline.left_s("a worker"))
            if self._sock in readable and (channel := self.accept_waiting()) is not None:
                return channel

    def accept_waiting(self) -> Channel | None:
        """Accept one connection that is already there; None if there is none, or it is a stranger's."""
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        channel = Channel(sock, f"{address[0]}:{address[1]}")
        try:
            self._authenticate(channel)
        except TransportError:
            channel.close()
            return None
        return channel

    def has_waiting(self) -> bool:
        """Whether a connection waits to be accepted."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        """Stop listening; may be called twice."""
        self._sock.close()

    def _authenticate(self, channel: Channel) -> None:
        deadline = Deadline(_OPENING_S)
        mine = secrets.token_bytes(_NONCE_BYTES)
        channel.send_raw(_MAGIC + mine, deadline)
        answer = channel.receive_raw(len(_MAGIC) + _NONCE_BYTES + _MAC_BYTES, deadline)
        theirs, mac = answer[len(_MAGIC) : -_MAC_BYTES], answer[-_MAC_BYTES:]
        if not answer.startswith(_MAGIC) or not hmac.compare_digest(mac, _mac(self._secret, b"worker", mine, theirs)):
            raise AuthenticationError(f"{channel.peer} does not know the run's secret")
        channel.send_raw(_mac(self._secret, b"trainer", mine, theirs), deadline)


def connect(host: str, port: int, secret: bytes, deadline: Deadline) -> Channel:
    """Open a worker's control connection to the trainer; both sides prove that they know the secret.

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
        _prove(channel, secret, deadline)
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
