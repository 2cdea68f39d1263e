"""A client of HTTP servers, which speak as vLLM's development mode does unless told otherwise."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from deltacast.delta.errors import InputError
from deltacast.engines.clients.answers import Answer, check_timeouts, require_all

if TYPE_CHECKING:
    from deltacast.engines.clients.posting import Poster, Query, Request

__all__ = ["HttpClient"]

_PATHS: Final = {"init_transfer_engine": "/init_weight_transfer_engine"}


class HttpClient:
    """POST each call to many servers at the same time and wait for all. Bodies are JSON; nothing is pickled.

    A call is done at a server that answers 2xx. Nothing is sent twice: only a connection that could not be made is
    tried again. Redirects are not followed and proxies of the environment not used. Of an answer 64 KiB are read.
    Host names are looked up by the system, whose own timeout may come on top of those here.

    `init_transfer_engine` carries the run's secret: use https, or a network that nobody else is on.

    Args:
        servers: their URLs: http or https, with a prefix of the path if they have one.
        token: sent to every server as a bearer token.
        verify: whether certificates must be good, or an `ssl.SSLContext` that says which are.
        paths: where the servers have calls that are elsewhere. A call is at a slash and the name of the method below,
            but `init_transfer_engine` at `/init_weight_transfer_engine`.
        timeout_s: for a call that a worker answers at once.
        update_timeout_s: for `init_transfer_engine` and `update_weights`, which end when a whole update has.
        connect_timeout_s: how long a server is tried that takes no connections; part of the others. At most 1 s if it
            took none the last time either: others may be paused meanwhile.

    Attributes:
        answers: of the call that ended last, one per server.

    Raises:
        InputError: no servers, a bad URL, path, token or timeout, or httpx is not installed.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        token: str | None = None,
        verify: bool | ssl.SSLContext = True,
        paths: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        update_timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
    ) -> None:
        check_timeouts(timeout_s=timeout_s, update_timeout_s=update_timeout_s, connect_timeout_s=connect_timeout_s)
        self._paths = _PATHS | dict(paths or {})
        for path in self._paths.values():
            if not path.startswith("/") or not path.isprintable() or set(path) & set("?# "):
                raise InputError("bad path", expected="a slash and no query", found=repr(path))
        self._token = token
        self._poster = _poster(token, verify, connect_timeout_s)
        self._timeout_s, self._update_timeout_s = timeout_s, update_timeout_s
        self.answers: tuple[Answer, ...] = ()
        self._away: set[str] = set()  # took no connection the last time
        self.servers = servers

    @property
    def servers(self) -> Sequence[str]:
        """Who is called; set it between rounds when one joined, or is gone."""
        return self._servers

    @servers.setter
    def servers(self, servers: Sequence[str]) -> None:
        """Take others, or refuse them with an InputError and keep those."""
        urls = [] if isinstance(servers, str) else [_checked_url(server) for server in servers]
        if not urls or len(set(urls)) < len(urls):
            raise InputError("bad servers", expected="a sequence of different URLs")
        self._servers = tuple(urls)

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`; blocks until every worker is admitted, or one server has failed. Errors as `call`."""
        self._send(self._to_init(init_info))

    def start_weight_update(self) -> None:
        """See `Client`. Errors as `call`."""
        self._send(self._request("start_weight_update"))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `Client`; blocks until the update is over everywhere, or one server has failed. Errors as `call`.

        Servers that pull do so each by itself: the others are waited for.
        """
        request = self._request("update_weights", body={"update_info": update_info}, whole_update=True)
        self._send(replace(request, fail_fast="pull" not in update_info))

    def finish_weight_update(self) -> None:
        """See `Client`. Errors as `call`."""
        self._send(self._request("finish_weight_update"))

    def call(self, verb: str, **arguments: str | int | bool | Sequence[str]) -> None:
        """Have every server do something else that it can, such as `pause`; blocks for up to `timeout_s`.

        Args:
            verb: names the path.
            arguments: query parameters; a sequence is one that comes several times.

        Raises:
            TransportError: a server could not be reached, did not answer in time, or did not answer 2xx; it is named,
                with the status and up to 2 KiB of its own text. What others did, which are named too, is not undone.
            InputError: something that is not JSON. Nothing was sent.
        """
        self._send(self._request(verb, query=arguments))

    def _request(
        self,
        verb: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
        whole_update: bool = False,
    ) -> Request:
        """Make a call's request. `whole_update`: it ends when an update has, or one server has failed at it."""
        from deltacast.engines.clients.posting import Request

        body = body or {}
        # FastAPI, for one, answers a body that it does not like with that very body.
        secrets = (self._token, body.get("init_info", {}).get("secret"))
        return Request(
            path=self._paths.get(verb, f"/{verb}"),
            query=query or {},
            body=_json(body),
            timeout_s=self._update_timeout_s if whole_update else self._timeout_s,
            hidden=tuple(word for word in secrets if isinstance(word, str)),
            # The others would wait for the one that failed, and the trainer for them. Any other call must reach all.
            fail_fast=whole_update,
        )

    def _to_init(self, init_info: dict[str, Any]) -> Request:
        return self._request("init_transfer_engine", body={"init_info": init_info}, whole_update=True)

    def _send(self, request: Request, servers: Sequence[str] | None = None) -> None:
        """Send it to some servers (all by default); their answers are left in `answers`. Errors as `call`."""
        # On a thread, since the caller's may run an event loop of its own, as notebooks do. An interrupt (Ctrl-C) is
        # raised once the requests have ended, so that none is cut off half way.
        with ThreadPoolExecutor(1, "deltacast-http") as pool:
            posting = self._poster.post(servers or self._servers, request, away=self._away)
            self.answers = pool.submit(asyncio.run, posting).result()
        for answer in self.answers:
            (self._away.discard if answer.reached else self._away.add)(answer.worker)
        require_all(f"{request.method} {request.path}", self.answers)


def _poster(token: str | None, verify: bool | ssl.SSLContext, connect_timeout_s: float) -> Poster:  # noqa: FBT001
    try:
        import httpx

        from deltacast.engines.clients.posting import Poster
    except ModuleNotFoundError as err:
        if err.name != "httpx":
            raise
        raise InputError("HttpClient needs httpx", hint="pip install 'deltacast[http]'") from err
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if token is not None:
        if not token or not all("!" <= character <= "~" for character in token):
            raise InputError("bad token", expected="printable ASCII without spaces")
        headers["Authorization"] = f"Bearer {token}"
    return Poster(headers, httpx.create_ssl_context(verify=verify, trust_env=False), connect_timeout_s)


def _checked_url(url: str) -> str:
    if "@" in url:
        raise InputError("credentials in a server's URL", hint="They would be in every message; use `token`.")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or set(url) & set("?# ") or not url.isprintable():
        raise InputError("not a server's URL", expected="http(s)://host:port, without query", found=repr(url))
    return url.rstrip("/")


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as err:
        raise InputError(f"what a client sends must be JSON: {err}") from err
