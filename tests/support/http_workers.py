"""Worker engines behind HTTP, as vLLM's development mode serves them; and sockets that are no such servers."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import ServingStatus
from deltacast.engines.sparse_nccl import SparseNcclWorker
from deltacast.engines.staging import Staging
from engine_processes import EngineProcess, Policy, weights_of

TOKEN = "of-the-test"


class Service:
    """What one server process holds: a model, its worker engine, and what was asked of it.

    Like vLLM's, it does one thing at a time: a call that comes while a worker is at another waits. With `as_vllm` it
    also says 200 to a call that failed, and keeps the error for its status.
    """

    def __init__(self, seed: int, *, as_vllm: bool) -> None:
        self.module = Policy(seed)
        self.worker = SparseNcclWorker(ModuleSource(self.module))
        self.asked: list[str] = []
        self.failing: dict[str, str] = {}
        self.misdirected = False
        self._as_vllm, self._error, self._at_start = as_vllm, "", weights_of(self.module)
        self._one_at_a_time = threading.Lock()
        self.staging = Staging(self._receive)

    def run(self, call: Callable[[], object]) -> None:
        with self._one_at_a_time:
            self._keep_error(call)

    def _keep_error(self, call: Callable[[], object]) -> None:
        self._error = ""
        try:
            call()
        except Exception as err:
            if not self._as_vllm:
                raise
            self._error = f"{type(err).__name__}: {err}"

    def _receive(self, update_info: Mapping[str, Any], before_write: Callable[[], object] | None) -> None:
        self._keep_error(lambda: self.worker.receive_weights(update_info, before_write=before_write))

    def init(self, info: dict[str, Any]) -> None:
        if self.misdirected:
            info = info | {"port": 1}
        self.run(lambda: self.worker.init_transfer_engine(info))

    def status(self, nonce: str) -> dict[str, Any]:
        status = self.worker.status
        serves = status.status is not ServingStatus.EMPTY or weights_of(self.module) == self._at_start
        rank = {"nonce": nonce, "serves": serves, "version": status.version, "error": self._error}
        return rank | {"staging": self.staging.state}

    def ask_rank(self, method: str, nonce: str, *arguments: Any) -> dict[str, Any]:
        if method == "deltacast_stage":
            self.staging.stage(*arguments)
        return self.status(nonce)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def gate(request: Request, handle: Callable[[Request], Any]) -> Response:
            path = request.url.path
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                return PlainTextResponse("who are you?", 401)
            self.asked.append(f"{path}?{request.url.query}" if request.url.query else path)
            if path in self.failing:
                return PlainTextResponse(self.failing[path], 500)
            response: Response = await handle(request)
            return response

        @app.post("/init_weight_transfer_engine")
        def init(body: dict[str, dict[str, Any]]) -> dict[str, str]:
            self.init(body["init_info"])
            return {"message": "Weight transfer initialized"}

        @app.post("/update_weights")
        def update(body: dict[str, dict[str, Any]]) -> dict[str, str]:
            with self._one_at_a_time:
                self.staging.receive(body["update_info"])
            return {"message": "Weights updated"}

        @app.post("/collective_rpc")
        def ask_ranks(body: dict[str, Any]) -> dict[str, Any]:
            with self._one_at_a_time:
                return {"results": [self.ask_rank(body["method"], *body["args"])]}

        @app.post("/{call}")
        def other(call: str, body: dict[str, Any]) -> dict[str, str]:
            with self._one_at_a_time:
                return {"message": call}

        return app


def serve_http(pipe: Connection, seed: int, as_vllm: bool) -> None:
    """Serve on a port that the system picks and say which; answer commands until the pipe closes."""
    torch.set_num_threads(1)
    service = Service(seed, as_vllm=as_vllm)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(service.app(), log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        pipe.send(listener.getsockname()[1])
        with suppress(EOFError, ConnectionResetError):
            while True:
                pipe.send(("ok", _answer(service, *pipe.recv())))
        server.should_exit = True
        thread.join()
    service.worker.shutdown()


def _answer(service: Service, command: str, *arguments: Any) -> object:
    if command == "fail":
        service.failing = arguments[0]
        return None
    if command == "misdirect":
        service.misdirected = arguments[0]
        return None
    if command == "asked":
        asked, service.asked = service.asked, []
        return asked
    return weights_of(service.module) if command == "weights" else service.worker.status


class HttpWorker(EngineProcess):
    """A server with one worker engine in a process of its own.

    It is asked for its `weights`, `status` and what was `asked` of it since the last time, and told to `fail` at
    paths, with a text, or to `misdirect`: to look for the trainer where nobody listens.
    """

    def __init__(self, seed: int, *, as_vllm: bool = False) -> None:
        super().__init__(serve_http, seed, as_vllm)
        self.url = f"http://127.0.0.1:{self.hear()}"


@contextmanager
def http_workers(*seeds: int, as_vllm: bool = False) -> Iterator[list[HttpWorker]]:
    """Start servers whose models have these seeds; none is left afterwards."""
    workers: list[HttpWorker] = []
    try:
        workers.extend(HttpWorker(seed, as_vllm=as_vllm) for seed in seeds)
        yield workers
    finally:
        for worker in workers:
            worker.stop()


@contextmanager
def port_without_server() -> Iterator[str]:
    """Yield the URL of a port that is taken, so that nobody else listens there, and refuses connections."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def silent_server() -> Iterator[str]:
    """Yield the URL of a server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class RawServer:
    """Answers every request with the same bytes, then closes; with `endless`, says the last of them for ever.

    Attributes:
        requests: each as it came: its head and its body.
    """

    def __init__(self, reply: bytes, *, endless: bytes = b"", tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self._reply, self._endless, self._tls = reply, endless, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(10)
        self._listener.close()
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            with suppress(OSError), plain:
                plain.settimeout(10)
                sock = self._tls.wrap_socket(plain, server_side=True) if self._tls else plain
                with sock:
                    self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        stream = sock.makefile("rb")
        head = b"".join(iter(stream.readline, b"\r\n")).decode()
        length = next(line for line in head.splitlines() if line.lower().startswith("content-length:"))
        self.requests.append((head, stream.read(int(length.split(":")[1]))))
        sock.sendall(self._reply)
        while self._endless:
            sock.sendall(self._endless)


def http_reply(status: str, body: bytes, *headers: str) -> bytes:
    """Return an answer as bytes."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body
