"""HTTP servers that say of their ranks what a test has them say, as vLLM's development mode would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from deltacast.engines.vllm.client import VllmClient

_RANK: Final = {"serves": True, "run_id": "run", "version": None, "digest": "xxh3_128:0", "error": "", "parts": []}


class RankServer:
    """Answers `/collective_rpc` with its `ranks`, or as `says`; notes all other POSTs with their bodies.

    Attributes:
        ranks: what each answers, whatever it is asked; the nonce is put in.
        says: status and body that it answers instead.
        calls: paths, and what was posted there.
        health: the status of `/health`; each of a list once, and the last for ever.
        tokens: what came as `Authorization`, each once.
    """

    def __init__(self, *ranks: dict[str, Any]) -> None:
        self.ranks = [_RANK | rank for rank in ranks]
        self.says: tuple[int, Any] | None = None
        self.calls: list[tuple[str, Any]] = []
        self.health = [200]
        self.tokens: set[str | None] = set()
        self.url = ""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the body of a POST's answer."""
        if path != "/collective_rpc":
            self.calls.append((path, body))
            return 200, {}
        assert body["method"] in ("deltacast_status", "deltacast_parts")
        return self.says or (200, {"results": [{"nonce": body["args"][0]} | rank for rank in self.ranks]})


@contextmanager
def rank_servers(*servers: RankServer, **options: Any) -> Iterator[VllmClient]:
    """Have servers listen, and make a client of theirs."""
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(_listening(server))
        yield VllmClient([server.url for server in servers], **options)


@contextmanager
def _listening(server: RankServer) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self._say(server.health.pop(0) if len(server.health) > 1 else server.health[0], "starting")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._say(*server.answer(self.path, body))

        def _say(self, status: int, body: Any) -> None:
            server.tokens.add(self.headers["Authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            http.shutdown()
            thread.join()
