"""Connections between processes of one host that know a key, for `shared_group.py`.

::

    worker  -> trainer  rank (u32, little-endian), what it has to say, HMAC-SHA256(key, "worker" + all of that)
    trainer -> worker   its answer, HMAC-SHA256(key, "trainer" + the worker's message + its answer); a descriptor

Abstract unix sockets: their names are in no folder, and end with their holder. SOCK_SEQPACKET: a message is there whole
or not at all. The kernel tells each side the other's user, which must be its own; the key tells runs of one user apart.
Of a stranger's message nothing is looked at but its length and its code.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from deltacast.delta.errors import AuthenticationError, ProtocolError, TransportError
from deltacast.engines.control import Deadline

__all__ = ["Door", "Peer", "Visitor", "readable"]

_RANK: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_NAME_BYTES: Final = 16
_KEY_BYTES: Final = 32
_MAC_BYTES: Final = 32
_MOST_BYTES: Final = 4096  # more than any message
_MOST_SILENT: Final = 64  # the oldest makes room: an honest worker speaks as soon as it is connected

Result = TypeVar("Result")
Waited = TypeVar("Waited", bound="Peer | Door")


class Peer:
    """One end of a connection. Not thread-safe, but for `shut`.

    Args:
        sock: ours from here on.
        name: what messages call the other side.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.settimeout(0)
        self._sock, self.name = sock, name

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once closed."""
        return self._sock.fileno()

    def send(self, message: bytes, deadline: Deadline, descriptor: int | None = None) -> None:
        """Send one message, and a copy of a descriptor with it.

        Raises:
            DeadlineError: there was no room for it in time.
            TransportError: the other side is gone, or `shut` was called.
        """
        descriptors = [] if descriptor is None else [descriptor]
        self._done(select.POLLOUT, deadline, lambda: socket.send_fds(self._sock, [message], descriptors))

    def receive(self, deadline: Deadline) -> bytes:
        """Return the next message; errors as `send`. Descriptors that come with it are closed."""
        return self._heard(self._done(select.POLLIN, deadline, lambda: self._sock.recv(_MOST_BYTES)))

    def receive_descriptor(self, deadline: Deadline) -> tuple[bytes, int | None]:
        """Return the next message and the descriptor that came with it, which is the caller's; errors as `send`."""
        flags = socket.MSG_CMSG_CLOEXEC
        message, descriptors, _, _ = self._done(
            select.POLLIN, deadline, lambda: socket.recv_fds(self._sock, _MOST_BYTES, 1, flags)
        )
        if not message:
            for descriptor in descriptors:
                os.close(descriptor)
        return self._heard(message), descriptors[0] if descriptors else None

    def require_same_user(self) -> None:
        """Raise AuthenticationError unless the process that connected, or listened, is of this one's user."""
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(credentials)[1]
        if user != os.geteuid():
            raise AuthenticationError(f"{self.name} is another user's", expected=os.geteuid(), found=user)

    def shut(self) -> None:
        """Wake both sides, from any thread; nothing travels any more."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut and close; may be called twice. A forked child that still has the descriptor keeps nobody waiting."""
        self.shut()
        self._sock.close()

    def _done(self, event: int, deadline: Deadline, action: Callable[[], Result]) -> Result:
        while True:
            _await([self], event, deadline)
            try:
                return action()
            except BlockingIOError:
                continue
            except OSError as err:
                raise TransportError(f"{self.name} is gone: {err.strerror}") from err

    def _heard(self, message: bytes) -> bytes:
        if not message:
            raise TransportError(f"{self.name} is gone")
        return message


class Door:
    """The trainer's end: a socket of a random name that lets in who knows its key. Closed with its last reference.

    Attributes:
        place: name and key in hex, what a `Visitor` takes: for those who are to come, and for no log.

    Raises:
        TransportError: this system has no such sockets.
    """

    def __init__(self) -> None:
        name, self._key = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(_KEY_BYTES)
        self.place = (name + self._key).hex()
        try:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sock.bind(_address(name))
            self._sock.listen(socket.SOMAXCONN)  # who finds it full is refused
        except (AttributeError, OSError) as err:
            raise TransportError(f"cannot listen on an abstract unix socket: {err}") from err
        self._sock.settimeout(0)
        weakref.finalize(self, self._sock.close)

    def close(self) -> None:
        """Let nobody in any more; may be called twice."""
        self._sock.close()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    @property
    def name(self) -> str:
        """Whom it waits for, in messages."""
        return "a worker of the payload group"

    def admit(self, num_workers: int, deadline: Deadline) -> list[tuple[Peer, bytes]]:
        """Wait for ranks 1 to `num_workers`, with strangers among them.

        Returns:
            By rank: its connection, and its message, to be answered by `answer`.

        Raises:
            DeadlineError: not all came in time.
            TransportError: `shut` was called, or this process cannot accept connections.
        """
        admitted: dict[int, tuple[Peer, bytes]] = {}
        silent: list[Peer] = []
        try:
            while len(admitted) < num_workers:
                items: list[Peer | Door] = [self, *silent]
                for item in _await(items, select.POLLIN, deadline):
                    if isinstance(item, Peer):
                        silent.remove(item)
                        self._let_in(item, num_workers, admitted, deadline)
                    else:
                        silent.append(self._accept())
                while len(silent) > _MOST_SILENT:
                    silent.pop(0).close()
        except BaseException:
            for peer, _ in admitted.values():
                peer.close()
            raise
        finally:
            for peer in silent:
                peer.close()
        return [admitted[rank] for rank in sorted(admitted)]

    def answer(self, peer: Peer, message: bytes, answer: bytes, descriptor: int, deadline: Deadline) -> None:
        """Prove to a worker that we know the key, and answer it; errors as `Peer.send`."""
        peer.send(answer + _mac(self._key, b"trainer", message + answer), deadline, descriptor)

    def shut(self) -> None:
        """Wake `admit`, from another thread; nobody is let in any more."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> Peer:
        try:
            return Peer(self._sock.accept()[0], "a process of this host")
        except OSError as err:
            raise TransportError(f"cannot accept connections on a unix socket: {err.strerror}") from err

    def _let_in(
        self, peer: Peer, num_workers: int, admitted: dict[int, tuple[Peer, bytes]], deadline: Deadline
    ) -> None:
        """Let in who has spoken, if it is one of those that are to come; else close the connection."""
        with suppress(TransportError):
            peer.require_same_user()
            raw = peer.receive(deadline)
            message, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
            proven = hmac.compare_digest(mac, _mac(self._key, b"worker", message))
            if proven and len(message) >= _RANK.size:
                (rank,) = _RANK.unpack_from(message)
                if 1 <= rank <= num_workers and rank not in admitted:
                    peer.name = f"rank {rank} of the payload group"
                    admitted[rank] = peer, message
                    return
        peer.close()


class Visitor(Peer):
    """A worker's end: connects, says its message, and waits for the answer in `answered`.

    Args:
        place: a `Door`'s.
        rank: 1 and up.
        saying: what it has to say.
        deadline: for connecting.

    Raises:
        ProtocolError: that is no place.
        AuthenticationError: another user's process listens there.
        DeadlineError, TransportError: nobody does, or nobody answers.
    """

    def __init__(self, place: str, rank: int, saying: bytes, deadline: Deadline) -> None:
        name, self._key = _read_place(place)
        self._message = _RANK.pack(rank) + saying
        super().__init__(_connected(name, deadline), "rank 0 of the payload group")
        try:
            self.require_same_user()
            self.send(self._message + _mac(self._key, b"worker", self._message), deadline)
        except BaseException:
            self.close()
            raise

    def answered(self, deadline: Deadline) -> tuple[bytes, int]:
        """Return the trainer's answer, and a descriptor that is the caller's.

        Raises:
            AuthenticationError: it does not know the key.
            DeadlineError, TransportError: as `Peer.send`; also if it did not let us in.
        """
        raw, descriptor = self.receive_descriptor(deadline)
        answer, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        proven = hmac.compare_digest(mac, _mac(self._key, b"trainer", self._message + answer))
        if proven and descriptor is not None:
            return answer, descriptor
        if descriptor is not None:
            os.close(descriptor)
        raise AuthenticationError(f"{self.name} does not know the group's key")


def readable(peers: Sequence[Peer], deadline: Deadline) -> list[Peer]:
    """Wait until one can be received from, or is gone, and return those.

    Raises:
        DeadlineError: none in time.
    """
    return _await(peers, select.POLLIN, deadline)


def _await(items: Sequence[Waited], event: int, deadline: Deadline) -> list[Waited]:
    # `poll`: no descriptor of its own, and none of ours is too high for it.
    poll, by_number, who = select.poll(), {item.fileno(): item for item in items}, items[0].name
    for number in by_number:
        poll.register(number, event)
    happened: list[tuple[int, int]] = []
    while not happened:
        happened = poll.poll(math.ceil(deadline.left_s(who) * 1e3))
    deadline.left_s(who)  # this process may have been stopped: then what is there came too late
    return [by_number[number] for number, _ in happened]


def _connected(name: bytes, deadline: Deadline) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as err:
        raise TransportError(f"this system has no unix sockets of messages: {err}") from err
    try:
        sock.settimeout(deadline.left_s("the payload group"))
        sock.connect(_address(name))
    except OSError as err:
        sock.close()
        deadline.left_s("the payload group")
        hint = "Workers of engine ipc run on the trainer's host, in its network namespace."
        raise TransportError(f"nobody listens for this payload group: {err.strerror}", hint=hint) from err
    return sock


def _read_place(place: str) -> tuple[bytes, bytes]:
    """Return a door's name and key."""
    try:
        raw = bytes.fromhex(place)
    except ValueError:
        raw = b""
    if len(raw) != _NAME_BYTES + _KEY_BYTES:
        raise ProtocolError("no place of a payload group on this host", hint="Use one engine on both sides.")
    return raw[:_NAME_BYTES], raw[_NAME_BYTES:]


def _address(name: bytes) -> str:
    """Return an abstract name that tools can print."""
    return f"\0deltacast-{name.hex()}"


def _mac(key: bytes, role: bytes, message: bytes) -> bytes:
    return hmac.digest(key, role + message, "sha256")
