"""What the client tells vLLM servers by what they say they hold. The servers here say what a test has them say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import pytest

from deltacast.delta.errors import TransportError
from deltacast.engines.vllm.client import VllmClient


class Server:
    """Answers `/collective_rpc` with its `ranks`, or as `says`; notes all other calls with their bodies."""

    def __init__(self, *ranks: dict[str, Any]) -> None:
        self.ranks = [{"serves": True, "version": None, "error": ""} | rank for rank in ranks]
        self.says: tuple[int, Any] | None = None
        self.calls: list[tuple[str, Any]] = []
        self.url = ""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/collective_rpc":
            self.calls.append((path, body))
            return 200, {}
        assert body["method"] == "deltacast_status"
        return self.says or (200, {"results": [{"nonce": body["args"][0]} | rank for rank in self.ranks]})


@contextmanager
def serving(*servers: Server) -> Iterator[VllmClient]:
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(_listening(server))
        yield VllmClient([server.url for server in servers])


@contextmanager
def _listening(server: Server) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = server.answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield
        finally:
            http.shutdown()
            thread.join()


FINISH: Final = "/finish_weight_update"
RESET: Final[tuple[str, Any]] = ("/reset_prefix_cache?reset_running_requests=true", {})


def test_each_server_is_labelled_with_the_version_that_it_serves() -> None:
    """Also where one is a version behind; who serves none keeps its label. All caches are reset."""
    ahead, behind, none = Server({"version": 8}, {"version": 8}), Server({"version": 7}), Server({"serves": False})
    with serving(ahead, behind, none) as client:
        client.finish_weight_update()
    assert ahead.calls == [(FINISH, {"weight_version": "8"}), RESET]
    assert behind.calls == [(FINISH, {"weight_version": "7"}), RESET]
    assert none.calls == [(FINISH, {}), RESET]


@pytest.mark.parametrize(
    ("second", "serves"),
    [({"version": 3}, True), ({"version": 4}, False), ({"version": 3, "serves": False}, False)],
)
def test_a_server_serves_what_all_of_its_ranks_serve(second: dict[str, Any], serves: bool) -> None:
    """Ranks that hold different versions, or one that holds none, are a server that holds none."""
    server = Server({"version": 3}, second)
    with serving(server) as client:
        [status] = client.status()
    assert (status.serves, status.version) == (serves, 3 if serves else None)


def test_a_server_that_serves_nothing_whole_is_not_resumed() -> None:
    """It stays paused and is named with its ranks' errors; the others go on."""
    good, bad = Server({"version": 3}), Server({"serves": False, "error": "RuntimeError: out of memory"})
    with (
        serving(good, bad) as client,
        pytest.raises(TransportError, match=r"stays paused.*rank 0.*memory") as err,
    ):
        client.call("resume")
    assert bad.url in str(err.value)
    assert (good.calls, bad.calls) == ([("/resume", {})], [])


def test_a_server_that_still_has_its_own_checkpoint_is_resumed_without_a_label() -> None:
    """What vLLM loaded itself is whole, though it is no version."""
    server = Server({})
    with serving(server) as client:
        client.finish_weight_update()
        client.call("resume")
    assert server.calls == [(FINISH, {}), RESET, ("/resume", {})]


def test_a_handshake_that_a_worker_refused_is_an_error() -> None:
    """The server said 200: an exception there would have put its ranks out of step."""
    server = Server({"error": "AuthenticationError: wrong secret"})
    with serving(server) as client, pytest.raises(TransportError, match=r"handshake failed.*wrong secret"):
        client.init_transfer_engine({})
    assert server.calls == [("/init_weight_transfer_engine", {"init_info": {}})]


def test_a_handshake_labels_what_it_brought() -> None:
    """The version of the seed is the server's label before the first update."""
    server = Server({"version": 0})
    with serving(server) as client:
        client.init_transfer_engine({})
    assert server.calls[1:] == [("/start_weight_update", {}), (FINISH, {"weight_version": "0"}), RESET]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ((200, {"results": [{"nonce": "of another call", "serves": True, "version": 1, "error": ""}]}), "restart"),
        ((200, {"results": [None]}), "no status.*worker-extension-cls"),
        ((200, {"results": []}), "restart"),
        ((200, "not a dict"), "no status.*worker-extension-cls"),
        ((500, {"error": "no such method"}), "status 500.*no such method.*worker-extension-cls"),
    ],
)
def test_a_server_that_does_not_answer_the_question_serves_nothing(says: tuple[int, Any], error: str) -> None:
    """Ranks out of step, another backend, no extension: each has an error that says what to do."""
    server = Server({"version": 1})
    server.says = says
    with serving(server) as client:
        [status] = client.status()
        assert not status.serves
        with pytest.raises(TransportError, match=error):
            client.call("resume")
