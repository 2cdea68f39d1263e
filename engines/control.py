"""Control connections: one TCP connection per worker, with a deadline on every read and write.

After its opening (`opening.py`) a connection carries frames: u32 length of the message, u32 length of the bulk that
rides beside it, both little-endian, then the two. Sockets never block: waiting is done in `wait_any`, on several
connections and one `Task` at once, so there are no reader threads to leak.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from deltacast.delta.errors import DeadlineError, ProtocolError, TransportError
from deltacast.engines.protocol import Message, decode_message, encode_message

__all__ = ["Channel", "Deadline", "Frame", "Task", "send_all", "wait_any"]

_HEAD: Final = struct.Struct("<II")
_MAX_MESSAGE_BYTES: Final = 64 << 20
_MAX_BULK_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 20

# One is made for each wait: epoll would take a descriptor and five more system calls.
_Selector: Final = selectors.PollSelector
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
        left = self.remaining_s
        if left <= 0:
            raise DeadlineError(f"{who} did not answer in time", expected=f"within {self.seconds:g} s", found="nothing")
        return left

    @property
    def remaining_s(self) -> float:
        """The seconds left; negative once the point has passed."""
        return self._end - time.monotonic()

    @property
    def expired(self) -> bool:
        """Whether the point has passed."""
        return self.remaining_s <= 0


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
        for err in send_all([self], message, deadline, bulk).values():
            raise err

    def send_raw(self, data: bytes, deadline: Deadline) -> None:
        """Write bytes; errors as `send`."""
        for err in _write_all([self], data, deadline).values():
            raise err

    def send_some(self, data: memoryview) -> int:
        """Write what fits now and return how much that was; errors as `send`, but for the deadline."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as err:
            raise TransportError(f"lost the connection to {self.peer}") from err

    def interrupt(self) -> None:
        """Wake whoever waits for the peer, as if that were gone. Any thread may."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

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
        while (data := self.poll_raw(num_bytes)) is None:
            self._wait(selectors.EVENT_READ, deadline)
        return data

    def poll_raw(self, num_bytes: int) -> bytes | None:
        """Read up to `num_bytes`, without waiting; None until they are all there. Errors as `receive`."""
        if len(self._buffer) < num_bytes:
            self._read_some(num_bytes - len(self._buffer))
        if len(self._buffer) < num_bytes:
            return None
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
        """Whether a whole frame lies in the buffer already, or one that `poll` will refuse."""
        if len(self._buffer) < _HEAD.size:
            return False
        message_bytes, bulk_bytes = _HEAD.unpack_from(self._buffer)
        return _too_long(message_bytes, bulk_bytes) or len(self._buffer) >= _HEAD.size + message_bytes + bulk_bytes

    def peek(self) -> bool:
        """Read what has arrived, without waiting, and say whether `poll` has something; errors as `receive`."""
        if not self.has_frame():
            self._read_some()
        return self.has_frame()

    def gone(self) -> str:
        """Say why the peer can no longer be heard, or return an empty string. Does not wait."""
        try:
            data = self._sock.recv(_READ_BYTES)
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
        """Close the connection; may be called twice.

        Shut down first: the peer must hear of it even while a forked child of this process still has the descriptor.
        """
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _lengths(self) -> tuple[int, int]:
        message_bytes, bulk_bytes = _HEAD.unpack_from(self._buffer)
        if _too_long(message_bytes, bulk_bytes):
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

    def _read_some(self, num_bytes: int = _READ_BYTES) -> None:
        try:
            data = self._sock.recv(num_bytes)
        except BlockingIOError:
            return
        except OSError as err:
            raise TransportError(f"lost the connection to {self.peer}") from err
        if not data:
            raise TransportError(f"{self.peer} closed the connection")
        self._buffer += data

    def _wait(self, event: int, deadline: Deadline) -> None:
        with _Selector() as selector:
            selector.register(self._sock, event)
            selector.select(deadline.left_s(self.peer))


class Task:
    """A function on a thread of its own whose end wakes `wait_any`.

    Used for the payload's collectives, which block inside torch. The owner must `join`; a task that does not end in
    time is left behind, and releases its descriptors when it does end.

    Attributes:
        done: whether the function has ended.
        error: what it raised, if it did.
    """

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        self._function = function
        self.error: BaseException | None = None
        self.done = False
        self._left_behind = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"deltacast-{name}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable at the end."""
        return self._wake_read.fileno()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end and release the descriptors; False, and the task is left behind, if it did not come."""
        self._thread.join(timeout_s)
        with self._lock:
            self._left_behind = not self.done
            if self.done:
                self._release()
            return self.done

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as err:  # noqa: BLE001 - a thread's boundary; the owner looks at `error`
            self.error = err
        finally:
            del self._function  # what it holds may hold this task
            with self._lock:
                self.done = True
                if self._left_behind:
                    self._release()
                else:
                    self._wake_write.send(b"\0")

    def _release(self) -> None:
        self._wake_read.close()
        self._wake_write.close()


def send_all(
    channels: Sequence[Channel], message: Message, deadline: Deadline, bulk: bytes = b""
) -> dict[Channel, TransportError]:
    """Write one frame to several peers side by side: one that does not read holds up nobody else.

    Returns:
        The peers that did not get it whole, and why; their connections are of no more use.
    """
    body = encode_message(message)
    return _write_all(channels, _HEAD.pack(len(body), len(bulk)) + body + bulk, deadline)


def wait_any(channels: Sequence[Channel], deadline: Deadline, task: Task | None = None) -> Channel | Task:
    """Wait until a channel can be read (or has a frame, or is gone), or the task has ended, and return it.

    Raises:
        DeadlineError: nothing happened in time.
    """
    who = ", ".join(channel.peer for channel in channels) or "the payload"
    deadline.left_s(who)  # also for a peer that never stops talking
    for channel in channels:
        if channel.has_frame():
            return channel
    with _Selector() as selector:
        for item in (*channels, *((task,) if task else ())):
            selector.register(item, selectors.EVENT_READ, item)
        ready: list[Channel | Task] = []
        while not ready:
            ready = [key.data for key, _ in selector.select(deadline.left_s(who))]
            deadline.left_s(who)  # this process may have been stopped: then what is there came too late
    return next((item for item in ready if isinstance(item, Channel)), ready[0])


def _too_long(message_bytes: int, bulk_bytes: int) -> bool:
    return message_bytes > _MAX_MESSAGE_BYTES or bulk_bytes > _MAX_BULK_BYTES


def _write_all(channels: Sequence[Channel], data: bytes, deadline: Deadline) -> dict[Channel, TransportError]:
    left, failed = dict.fromkeys(channels, memoryview(data)), dict[Channel, TransportError]()
    while left:
        for channel in tuple(left):
            try:
                left[channel] = left[channel][channel.send_some(left[channel]) :]
            except TransportError as err:
                failed[channel] = err
            if channel in failed or not left[channel]:
                del left[channel]
        try:
            _wait_writable(tuple(left), deadline)
        except DeadlineError as err:
            return failed | dict.fromkeys(left, err)
    return failed


def _wait_writable(channels: Sequence[Channel], deadline: Deadline) -> None:
    if channels:
        with _Selector() as selector:
            for channel in channels:
                selector.register(channel, selectors.EVENT_WRITE)
            selector.select(deadline.left_s(", ".join(channel.peer for channel in channels)))
