"""Control connections against raw sockets: what a stranger, a slow or a hostile peer can do."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from deltacast.delta.errors import AuthenticationError, DeadlineError, ProtocolError, TransportError
from deltacast.engines.control import Channel, Deadline, Task, send_all, wait_any
from deltacast.engines.opening import ANY_PORT, Listener, connect
from deltacast.engines.protocol import Ready, RoundKey, encode_message
from engine_setups import num_descriptors

SECRET = b"s" * 32
MESSAGE = Ready("run", RoundKey(0, 1, 2), "e")


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener("127.0.0.1", ANY_PORT, SECRET)
    yield opened
    opened.close()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    tcp = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(tcp.getsockname())
    server, _ = tcp.accept()
    channel = Channel(server, "peer")
    yield channel, client
    for item in (ours, theirs, tcp, client, channel):
        item.close()


def frame(message: bytes, bulk: bytes = b"") -> bytes:
    return struct.pack("<II", len(message), len(bulk)) + message + bulk


def test_both_sides_prove_the_secret_and_frames_arrive_whole(listener: Listener) -> None:
    """Message and bulk of several frames in a row, in both directions."""
    accepted: list[Channel | None] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(Deadline(10))))
    thread.start()
    worker = connect(listener.host, listener.port, SECRET, Deadline(10), Deadline(10))
    worker.send(MESSAGE, Deadline(10), b"xy")  # a worker is accepted once it has said something
    thread.join(10)
    trainer = accepted[0]
    assert trainer is not None
    bulk = bytes(range(256)) * 5000
    for _ in range(2):
        worker.send(MESSAGE, Deadline(10), b"xy")
    assert [trainer.receive(Deadline(10)) for _ in range(3)] == [(MESSAGE, b"xy")] * 3
    sender = threading.Thread(target=lambda: trainer.send(MESSAGE, Deadline(10), bulk))
    sender.start()
    assert worker.receive(Deadline(10)) == (MESSAGE, bulk)
    sender.join(10)
    worker.close()
    trainer.close()


def test_a_worker_with_another_secret_is_dropped_and_told(listener: Listener) -> None:
    """The listener goes on waiting; the worker learns that it is the secret."""
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            connect(listener.host, listener.port, b"t" * 32, Deadline(10), Deadline(10))
        except TransportError as err:
            errors.append(err)

    thread = threading.Thread(target=intrude)
    thread.start()
    with pytest.raises(DeadlineError, match="a worker did not answer in time"):
        listener.accept(Deadline(0.5))
    thread.join(10)
    assert isinstance(errors[0], AuthenticationError)


def test_a_trainer_with_another_secret_is_not_followed() -> None:
    """A fake trainer that accepts any answer cannot prove itself."""
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def pretend() -> None:
            peer, _ = fake.accept()
            with peer:
                nonce = b"n" * 32
                peer.sendall(b"\x8ddccast1" + nonce)
                answer = b""
                while len(answer) < 72:
                    answer += peer.recv(100)
                peer.sendall(hmac.digest(b"wrong", b"trainer" + nonce + answer[8:40], "sha256"))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AuthenticationError, match="does not know the run's secret"):
            connect("127.0.0.1", fake.getsockname()[1], SECRET, Deadline(10), Deadline(10))
        thread.join(10)


def test_a_server_that_is_no_trainer_is_recognised() -> None:
    """An SSH or HTTP server on the port gives a protocol error, with what it said."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            peer, _ = other.accept()
            with peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.9 and enough bytes to fill an opening")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ProtocolError, match="is no deltacast trainer"):
            connect("127.0.0.1", other.getsockname()[1], SECRET, Deadline(10), Deadline(10))
        thread.join(10)


def test_nobody_listening_is_named() -> None:
    """Address and reason."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransportError, match=rf"cannot reach the trainer at 127.0.0.1:{port}: Connection refused"):
        connect("127.0.0.1", port, SECRET, Deadline(10), Deadline(10))


def test_a_taken_port_is_named(listener: Listener) -> None:
    """The second listener says which address."""
    with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{listener.port}"):
        Listener("127.0.0.1", (listener.port,), SECRET)


@pytest.mark.parametrize("sizes", [(0xFFFFFFFF, 0), (10, 0xFFFFFFFF), ((64 << 20) + 1, 0)])
def test_a_frame_that_claims_too_much_is_refused_before_it_is_read(
    pair: tuple[Channel, socket.socket], sizes: tuple[int, int]
) -> None:
    """Eight bytes do not make us wait for, or hold, gigabytes."""
    channel, peer = pair
    peer.sendall(struct.pack("<II", *sizes))
    with pytest.raises(ProtocolError, match="too long"):
        channel.receive(Deadline(10))


def test_half_a_frame_is_waited_for_and_then_is_a_deadline(pair: tuple[Channel, socket.socket]) -> None:
    """`poll` says None meanwhile."""
    channel, peer = pair
    peer.sendall(frame(b"{}")[:-1])
    assert channel.poll() is None
    with pytest.raises(DeadlineError, match="peer did not answer in time"):
        channel.receive(Deadline(0.2))


def test_a_closed_connection_is_noticed_by_every_read(pair: tuple[Channel, socket.socket]) -> None:
    """`gone` says why without waiting; `receive` and `poll` raise."""
    channel, peer = pair
    assert channel.gone() == ""
    peer.close()
    while not channel.gone():
        pass
    assert channel.gone() == "peer closed the connection"
    with pytest.raises(TransportError, match="peer closed the connection"):
        channel.receive(Deadline(10))


def test_gone_keeps_what_it_read(pair: tuple[Channel, socket.socket]) -> None:
    """A message that arrives just then is not lost."""
    channel, peer = pair
    peer.sendall(
        frame(b'{"protocol":1,"kind":"ready","run_id":"r","key":{"epoch":0,"generation":0,"round":0},"error":""}')
    )
    assert wait_any([channel], Deadline(10)) is channel
    assert channel.gone() == ""
    assert wait_any([channel], Deadline(10)) is channel
    assert isinstance(channel.receive(Deadline(10))[0], Ready)


def test_a_peer_that_does_not_read_is_a_deadline(pair: tuple[Channel, socket.socket]) -> None:
    """Writes have deadlines too; buffers of the kernel fill up first."""
    channel, _ = pair
    with pytest.raises(DeadlineError):
        channel.send(MESSAGE, Deadline(0.3), bytes(64 << 20))


def test_waiting_ends_with_the_task_and_keeps_its_error(pair: tuple[Channel, socket.socket]) -> None:
    """A thread's failure wakes the owner, who finds it on the task."""

    def fail() -> None:
        raise OSError("broken")

    task = Task("test", fail)
    assert wait_any([pair[0]], Deadline(10), task) is task
    assert task.done
    assert isinstance(task.error, OSError)
    assert task.join(10)


def test_waiting_longer_than_the_deadline_names_the_peers(pair: tuple[Channel, socket.socket]) -> None:
    """And takes about as long as it says."""
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"peer did not answer in time: expected within 0\.2 s"):
        wait_any([pair[0]], Deadline(0.2))
    assert 0.15 < time.monotonic() - started < 5


def test_a_peer_that_does_not_read_delays_no_other_peer(listener: Listener) -> None:
    """Both are written to side by side; only the deaf one is late."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = [socket.create_connection(server.getsockname()) for _ in range(2)]
        channels = [Channel(server.accept()[0], f"peer {number}") for number in range(2)]
    received = bytearray()

    def read() -> None:
        while data := peers[1].recv(1 << 20):
            received.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    bulk = bytes(32 << 20)
    failed = send_all(channels, MESSAGE, Deadline(1.0), bulk)
    channels[1].close()
    reader.join(10)
    assert list(failed) == [channels[0]]
    assert isinstance(failed[channels[0]], DeadlineError)
    assert len(received) == 8 + len(encode_message(MESSAGE)) + len(bulk)
    channels[0].close()
    for peer in peers:
        peer.close()


def test_a_peer_that_never_stops_talking_meets_the_deadline(pair: tuple[Channel, socket.socket]) -> None:
    """A frame at hand is no reason to go on for ever."""
    channel, peer = pair
    peer.sendall(frame(encode_message(MESSAGE)) * 3)
    deadline = Deadline(0.1)

    def listen() -> None:
        while wait_any([channel], deadline) is channel:
            peer.sendall(frame(encode_message(MESSAGE)))
            channel.poll()

    with pytest.raises(DeadlineError):
        listen()


def test_closing_is_heard_although_a_child_still_has_the_descriptor(pair: tuple[Channel, socket.socket]) -> None:
    """A forked data loader holds copies of all sockets."""
    channel, peer = pair
    copy = os.dup(channel.fileno())
    channel.close()
    peer.settimeout(10)
    assert peer.recv(1) == b""
    os.close(copy)


def test_a_task_left_behind_releases_its_descriptors_when_it_ends() -> None:
    """Nobody joins it any more."""
    leave, before = threading.Event(), num_descriptors()

    def wait() -> None:
        assert leave.wait(20)

    task = Task("slow", wait)
    assert not task.join(0.01)
    assert num_descriptors() == before + 2
    leave.set()
    task._thread.join(20)
    assert num_descriptors() == before
