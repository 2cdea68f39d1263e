"""One request to many servers at the same time, each with its own answer. The only module that needs httpx.

Every request gets a connection of its own. One that was kept open may have been closed by the server meanwhile, and
then nobody can say whether the request took effect; a connection that could not be made leaves no such doubt.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import httpx

from deltacast.engines.clients.answers import LEFT, Answer, shortened
from deltacast.engines.control import Deadline

__all__ = ["Poster", "Query", "Request"]

Query = Mapping[str, str | int | bool | Sequence[str]]

_RETRY_S: Final = 0.1
_AWAY_S: Final = 1.0
_NOT_CONNECTED: Final = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent to every server.

    Attributes:
        path: appended to the server's URL; a slash first.
        query: parameters; a sequence is one that comes several times.
        body: JSON.
        timeout_s: from the first try to connect to the end of the answer.
        hidden: words that no error may show, though a server may say them.
        fail_fast: leave the other servers alone, whatever they are at, as soon as one has failed.
        method: POST, or GET.
        read_bytes: how much of an answer is read.
        judge: says what went wrong by what a server says that answered 2xx; nothing if it is empty.
        then: sent next to each server that did this; its answer is the one that counts.
    """

    path: str
    query: Query
    body: bytes = field(repr=False)
    timeout_s: float
    hidden: tuple[str, ...] = field(repr=False)
    fail_fast: bool = False
    method: Literal["POST", "GET"] = "POST"
    read_bytes: int = 64 << 10
    judge: Callable[[bytes], str] | None = field(default=None, repr=False)
    then: Request | None = None


@dataclass(frozen=True, slots=True)
class Poster:
    """How it is sent.

    Attributes:
        headers: of every request.
        tls: decides which certificates are good.
        connect_timeout_s: how long to try to connect; not that long to a server that was away before.
    """

    headers: Mapping[str, str] = field(repr=False)
    tls: ssl.SSLContext
    connect_timeout_s: float

    async def post(self, servers: Sequence[str], request: Request, *, away: Collection[str] = ()) -> tuple[Answer, ...]:
        """Send a request to all servers at the same time and wait for each, but not longer than the request's time.

        Args:
            servers: their URLs.
            request: what to send.
            away: those of them that took no connection the last time: the others, which may be paused, do not wait for
                them again.

        Returns:
            In the order of `servers`. Only a 2xx is an answer without an error.
        """
        client = httpx.AsyncClient(
            headers=dict(self.headers),
            verify=self.tls,
            timeout=httpx.Timeout(None, connect=self.connect_timeout_s),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # a proxy or .netrc of the environment must get neither the token nor the run's secret
        )
        async with client:
            connect_s = {server: min(_AWAY_S, self.connect_timeout_s) for server in away}
            asking = [
                asyncio.create_task(_ask(client, server, request, connect_s.get(server, self.connect_timeout_s)))
                for server in servers
            ]
            waiting = set(asking)
            while waiting and not (request.fail_fast and any(task.done() and task.result().error for task in asking)):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            answers = [
                Answer(server, LEFT) if task in waiting else task.result()
                for server, task in zip(servers, asking, strict=True)
            ]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return tuple(answers)


async def _ask(client: httpx.AsyncClient, server: str, request: Request, connect_s: float) -> Answer:
    url = httpx.URL(server + request.path, params=dict(request.query) or None)
    said, reached = b"", True
    try:
        async with asyncio.timeout(request.timeout_s):
            error, said = await _try(client, url, request, connect_s)
    except TimeoutError:
        error = f"no answer within {request.timeout_s:g} s"
    except httpx.HTTPError as err:
        error, reached = f"{type(err).__name__}: {err}", not isinstance(err, _NOT_CONNECTED)
    if not error and request.judge is not None:
        error = request.judge(said)
    if not error and request.then is not None:
        return await _ask(client, server, request.then, connect_s)
    for word in request.hidden:
        error = error.replace(word, "[hidden]")
    return Answer(server, shortened(error), said, reached)


async def _try(client: httpx.AsyncClient, url: httpx.URL, request: Request, connect_s: float) -> tuple[str, bytes]:
    """Send it once, however often it takes to connect: until then the server has seen nothing of it."""
    deadline = Deadline(connect_s)
    while True:
        try:
            return await _exchange(client, url, request, connect_s)
        except _NOT_CONNECTED:
            if deadline.remaining_s < _RETRY_S:
                raise
        await asyncio.sleep(_RETRY_S)


async def _exchange(client: httpx.AsyncClient, url: httpx.URL, request: Request, connect_s: float) -> tuple[str, bytes]:
    """Return the error that the answer is, empty for a 2xx, and what that said. Reads no more of it than it needs."""
    said, timeout = bytearray(), httpx.Timeout(None, connect=connect_s)
    async with client.stream(request.method, url, content=request.body, timeout=timeout) as response:
        async for piece in response.aiter_raw():  # raw: nothing is decompressed
            said += piece
            if len(said) >= request.read_bytes:
                break
    if response.is_success:
        return "", bytes(said)
    return f"status {response.status_code}: {said.decode('utf-8', 'replace')}", b""
