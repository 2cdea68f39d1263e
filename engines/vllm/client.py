"""The trainer's way to vLLM servers: `HttpClient`, and what vLLM needs besides: labels, caches, no false resume."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from deltacast.delta.errors import TransportError
from deltacast.engines.clients.answers import Answer, require_all, shortened
from deltacast.engines.clients.http import HttpClient
from deltacast.engines.vllm.extension import EXTENSION

__all__ = ["ServerStatus", "VllmClient"]

_HINT: Final = f"Was it started with --worker-extension-cls {EXTENSION}?"


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server says that it holds.

    Attributes:
        server: its URL.
        ranks: each worker's `EngineStatus.as_dict()`; empty if it could not be asked.
        error: why it could not, or what its ranks report; empty if all is well.
    """

    server: str
    ranks: tuple[dict[str, Any], ...]
    error: str = ""

    @property
    def serves(self) -> bool:
        """Whether every rank holds the same whole version, or the checkpoint that the server was started with."""
        versions = {rank["version"] for rank in self.ranks}
        return len(versions) == 1 and all(rank["serves"] for rank in self.ranks)

    @property
    def version(self) -> int | None:
        """The version that it `serves`; None if it does not, or if that came from no trainer."""
        version: int | None = self.ranks[0]["version"] if self.serves else None
        return version


class VllmClient(HttpClient):
    """Call vLLM servers that run the backend `deltacast`; arguments as for `HttpClient`.

    A server answers 2xx to a call that came to nothing, so each is asked what it holds: at the end of every update its
    `weight_version` is set to the version that all of its ranks serve, and left alone if there is none. Its prefix
    cache is reset, and requests in flight are computed anew, so that nothing comes from older weights. A server that
    serves no whole version is not resumed. Put it into a `PausingClient`: between the decision and the new label, a
    server that is not paused generates with new weights under the old label.
    """

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`; labels what was sent. Errors as `call`; also a worker that was not admitted."""
        super().init_transfer_engine(init_info)
        require_all("the handshake", [Answer(status.server, status.error) for status in self.status()])
        self.start_weight_update()
        self.finish_weight_update()

    def finish_weight_update(self) -> None:
        """See `Client`; labels what is held and resets caches. Errors as `call`."""
        answers: list[Answer] = []
        for version, servers in _by_version(self.status()).items():
            body = {} if version is None else {"weight_version": str(version)}
            with suppress(TransportError):  # the others must finish too
                self._post("finish_weight_update", body=body, servers=servers)
            answers += self.answers
        require_all("POST /finish_weight_update", answers)
        self.call("reset_prefix_cache", reset_running_requests=True)

    def call(self, verb: str, **arguments: Any) -> None:
        """See `HttpClient`; `resume` leaves servers paused that serve no whole version, and raises."""
        if verb != "resume":
            super().call(verb, **arguments)
            return
        statuses = self.status()
        answers = [
            Answer(status.server, f"stays paused, since it serves no whole version: {status.error}")
            for status in statuses
            if not status.serves
        ]
        whole = [status.server for status in statuses if status.serves]
        if whole:
            with suppress(TransportError):
                self._post(verb, query=arguments, servers=whole)
            answers += self.answers
        require_all("POST /resume", answers)

    def status(self) -> tuple[ServerStatus, ...]:
        """Ask every server what it holds; one that cannot be asked has that as its `error`."""
        nonce = secrets.token_hex(8)
        with suppress(TransportError):  # each answer says what went wrong with it
            self._post("collective_rpc", body={"method": "deltacast_status", "args": [nonce]})
        return tuple(_status_of(answer, nonce) for answer in self.answers)


def _by_version(statuses: Iterable[ServerStatus]) -> dict[int | None, list[str]]:
    servers: dict[int | None, list[str]] = {}
    for status in statuses:
        servers.setdefault(status.version, []).append(status.server)
    return servers


def _status_of(answer: Answer, nonce: str) -> ServerStatus:
    if answer.error:
        return ServerStatus(answer.worker, (), f"{answer.error}. {_HINT}")
    try:
        ranks = tuple(json.loads(answer.said)["results"])
        in_step = bool(ranks) and all(rank["nonce"] == nonce for rank in ranks)
    except (ValueError, KeyError, TypeError):
        said = shortened(answer.said.decode("utf-8", "replace"))
        return ServerStatus(answer.worker, (), f"this is no status: {said}. {_HINT}")
    if not in_step:
        return ServerStatus(answer.worker, (), "its ranks answer other questions than were asked: restart this server")
    errors = [f"rank {place}: {rank['error']}" for place, rank in enumerate(ranks) if rank["error"]]
    return ServerStatus(answer.worker, ranks, "; ".join(errors))
