"""What only a bucket can: uploads that end, services that hang, refuse or lie. Right values: the service's own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")

from deltacast.delta.errors import InputError, ObjectExistsError, StoreError
from deltacast.store.backends import open_backend
from deltacast.store.backends.remote import RemoteBackend
from deltacast.store.backends.upload import gather_parts, upload_parts
from s3_service import BUCKET, environment, request, s3_service


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """One S3 service for all tests of this module."""
    with s3_service() as endpoint:
        yield endpoint


def speak_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def backend(service: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RemoteBackend:
    """A prefix of its own."""
    speak_to(service, monkeypatch)
    return RemoteBackend(f"s3://{BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}", part_bytes=5 << 20)


class QuietHandler(BaseHTTPRequestHandler):
    """Part of a service that exists for one test."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name for it
        """Say nothing."""


class TestUploads:
    def test_an_upload_whose_pieces_fail_is_ended(self, backend: RemoteBackend, service: str) -> None:
        """The bucket holds no part of it that would be paid for."""

        def pieces() -> Iterator[bytes]:
            for _ in range(4):
                yield bytes(5 << 20)
            assert request(service, "GET", f"{BUCKET}?uploads").count(b"<Upload>") == 1
            raise ValueError("the caller's own")

        with pytest.raises(ValueError, match="the caller's own"):
            backend.write("large", pieces())
        assert request(service, "GET", f"{BUCKET}?uploads").count(b"<Upload>") == 0
        assert list(backend.list("")) == []

    def test_a_sender_that_fails_stops_the_pieces(self) -> None:
        """What it raised is raised; the maker of parts is not left waiting, and does not make all of them."""
        made = []

        def parts() -> Iterator[bytearray]:
            for number in range(1000):
                made.append(number)
                yield bytearray(b"x")

        def put(stream: Iterator[bytearray]) -> None:
            assert next(stream) == b"x"
            raise StoreError("the service is gone")

        with pytest.raises(StoreError, match="the service is gone"):
            upload_parts(put, parts())
        assert len(made) < 10

    def test_few_parts_wait_for_a_slow_sender(self) -> None:
        """Memory is bounded: parts are made as they are taken."""
        made, ahead = 0, []

        def parts() -> Iterator[bytearray]:
            nonlocal made
            for _ in range(50):
                made += 1
                yield bytearray(b"x")

        def put(stream: Iterator[bytearray]) -> None:
            for number, _ in enumerate(stream, 1):
                ahead.append(made - number)

        upload_parts(put, parts())
        assert len(ahead) == 50
        assert max(ahead) <= 3

    @pytest.mark.parametrize("sizes", [[], [0], [1], [4], [5], [3, 3], [4, 4, 0], [9], [1] * 9, [0, 12, 0, 1]])
    def test_parts_are_of_one_size_but_the_last(self, sizes: list[int]) -> None:
        """And hold the pieces' bytes in order."""
        whole = bytes(range(sum(sizes)))
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        pieces = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        expected = [whole[start : start + 4] for start in range(0, len(whole), 4)] or [b""]
        assert list(gather_parts(pieces, 4)) == expected


class TestServices:
    def test_a_service_with_conditional_writes_passes(self, backend: RemoteBackend) -> None:
        """As often as it is asked; nothing is listed of it."""
        backend.check_create()
        open_backend(backend.url, create=True)
        assert list(backend.list("")) == []

    def test_a_service_that_writes_over_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It says yes to every PUT, as some do that ignore If-None-Match: two writers would both have won."""

        class Careless(QuietHandler):
            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("ETag", '"0"')
                self.send_header("Content-Length", "0")
                self.end_headers()

        with _served_by(Careless) as endpoint:
            speak_to(endpoint, monkeypatch)
            with pytest.raises(StoreError, match=r"writes over.*Two writers could commit the same version"):
                open_backend(f"s3://{BUCKET}/x", create=True)

    def test_a_service_that_never_answers_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After the time that was set, also for a create that is tried again."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            speak_to(f"http://127.0.0.1:{silent.getsockname()[1]}", monkeypatch)
            backend = RemoteBackend(f"s3://{BUCKET}/x", timeout_s=0.2, max_retries=0, retry_timeout_s=1)
            began = time.monotonic()
            for call in (lambda: backend.read("a"), lambda: backend.create("a", b"1"), lambda: list(backend.list(""))):
                with pytest.raises(StoreError, match="Check the network") as caught:
                    call()
                assert not isinstance(caught.value, ObjectExistsError)
            assert time.monotonic() - began < 10

    def test_an_answer_that_is_lost_leaves_exists_or_success(
        self, service: str, backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The service wrote the object and the connection broke: who tries again finds it, and reads whose it is."""
        with _losing_answers(service, 1) as endpoint:
            speak_to(endpoint, monkeypatch)
            with pytest.raises(ObjectExistsError):
                RemoteBackend(backend.url, timeout_s=5, max_retries=0).create("a", b"mine")
        assert backend.read("a") == b"mine"

    def test_a_bucket_that_is_missing_is_named(self, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Buckets are not made; reading from none is no missing object."""
        speak_to(service, monkeypatch)
        backend = RemoteBackend("s3://no-such-bucket/x")
        for call in (
            lambda: backend.create("a", b"1"),
            lambda: backend.write("a", [b"1"]),
            lambda: backend.read("a"),
            lambda: list(backend.list("")),
        ):
            with pytest.raises(StoreError, match=r"NoSuchBucket.*Make the bucket first") as caught:
                call()
            assert type(caught.value) is StoreError

    def test_refused_credentials_are_named_and_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither by the message nor by what a traceback would add to it."""

        class Refusing(QuietHandler):
            def do_GET(self) -> None:
                self.send_error(403)

        with _served_by(Refusing) as endpoint:
            speak_to(endpoint, monkeypatch)
            backend = RemoteBackend(f"s3://{BUCKET}/x")
            with pytest.raises(StoreError, match="Check the credentials") as caught:
                backend.read("a")
        assert "not-much-of-a-secret" not in f"{caught.value} {caught.value.__dict__} {backend!r} {vars(backend)}"
        assert caught.value.__suppress_context__

    def test_parts_that_a_service_would_refuse_are_refused(self) -> None:
        """S3 takes no part below 5 MiB but the last."""
        with pytest.raises(InputError, match="part_bytes"):
            RemoteBackend(f"s3://{BUCKET}/x", part_bytes=(5 << 20) - 1)


@contextmanager
def _served_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


@contextmanager
def _losing_answers(endpoint: str, num_lost: int) -> Iterator[str]:
    """A relay to a service that breaks the first connections once the service has answered."""
    host, port = endpoint.removeprefix("http://").split(":")

    def relay(listening: socket.socket) -> None:
        for number in range(num_lost + 1):
            client, _ = listening.accept()
            with client, socket.create_connection((host, int(port)), timeout=10) as upstream:
                upstream.sendall(_one_request(client))
                answer = b"".join(iter(lambda: upstream.recv(1 << 16), b""))
                if number >= num_lost:
                    client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=relay, args=(listening,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


def _one_request(client: socket.socket) -> bytes:
    """Read a request, and ask for its answer to end with the connection."""
    client.settimeout(10)
    got = b""
    while b"\r\n\r\n" not in got:
        got += client.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += client.recv(1 << 16)
    return head + b"\r\nConnection: close\r\n\r\n" + body
