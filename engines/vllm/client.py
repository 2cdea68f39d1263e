"""The trainer's way to vLLM servers: `HttpClient`, and what vLLM needs besides: labels, caches, no false resume.

vLLM answers 2xx to a call that came to nothing, since its workers must not raise; so every server is asked what it
holds by the worker extension (extension.py), and that counts.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from deltacast.delta.errors import CorruptionError, FormatError, TransportError
from deltacast.engines.clients.answers import Answer, check_timeouts, require_all, shortened
from deltacast.engines.clients.http import HttpClient
from deltacast.engines.control import Deadline
from deltacast.engines.vllm.extension import EXTENSION
from deltacast.engines.vllm.server_digest import HeldPart

if TYPE_CHECKING:
    from deltacast.engines.clients.posting import Request

__all__ = ["ServerParts", "ServerStatus", "VllmClient"]

_PARTS_BYTES: Final = 1 << 30  # a row is about 150 bytes; a server of 8 ranks with 40,000 parameters says 50 MB
_HEALTH_S: Final = 5.0
_POLL_S: Final = 0.2
_STAGING_POLL_S: Final = (0.002, 0.05)  # at first, and at most; each costs generation about a millisecond
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
        held = {(rank.get("run_id"), rank["version"], rank.get("digest")) for rank in self.ranks}
        return len(held) == 1 and all(rank["serves"] for rank in self.ranks)

    @property
    def staging(self) -> set[str]:
        """How far its ranks are that stage an update (`StagingState`); `over` if it could not be asked."""
        return {rank.get("staging", "") or "over" for rank in self.ranks} or {"over"}

    @property
    def version(self) -> int | None:
        """The version that it `serves`; None if it does not, or if that came from no trainer."""
        version: int | None = self.ranks[0]["version"] if self.serves else None
        return version


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What a server's ranks hold, by the fingerprints of their parts.

    Attributes:
        server: its URL.
        num_ranks: workers that were asked.
        version: that all of them are at; None if they are not, or came from no trainer.
        parts: of all ranks; see `compare_parts`.
    """

    server: str
    num_ranks: int
    version: int | None
    parts: tuple[HeldPart, ...]


class VllmClient(HttpClient):
    """Call vLLM servers that run the backend `deltacast`; arguments as for `HttpClient`.

    A server answers 2xx to a call that came to nothing, so each is asked what it holds: at the end of every update its
    `weight_version` is set to the version that all of its ranks serve, and left alone if there is none. Its prefix
    cache is reset, and requests in flight are computed anew, so that nothing comes from older weights. A server that
    serves no whole version is not resumed. Put it into a `PausingClient`: between the decision and the new label, a
    server that is not paused generates with new weights under the old label.

    Args:
        servers: their URLs.
        start_timeout_s: how long to wait, before the first call, for servers that are still starting; by default they
            have to be there. Each is asked for its `/health` until it is well.
        options: of `HttpClient`.
    """

    def __init__(self, servers: Sequence[str], *, start_timeout_s: float | None = None, **options: Any) -> None:
        super().__init__(servers, **options)
        if start_timeout_s is not None:
            check_timeouts(start_timeout_s=start_timeout_s)
        self._start_timeout_s = start_timeout_s

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`; labels what was sent. Errors as `call`; also, at once, a worker that was not admitted."""
        nonce = secrets.token_hex(8)
        asked = self._to_ranks("deltacast_status", nonce)
        asked = replace(asked, judge=lambda said: _status_of(Answer("", "", said), nonce).error)
        self._send(replace(self._to_init(init_info), then=asked))
        self.start_weight_update()
        self.finish_weight_update()

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Have every rank stage an update while it generates; blocks until none can go on without writing.

        `update_weights` with the same `update_info` must follow within `update_timeout_s`, or what is staged is given
        up. Servers that pull do so each by itself; one with a rank that cannot is left at its version as a whole.

        Raises:
            TransportError: as `call`; nothing was written. Of servers that pull, only one that could not be told to
                leave its version alone; what else went wrong `update_weights` finds.
        """
        nonce, pulls = secrets.token_hex(8), "pull" in update_info
        try:
            self._send(self._to_ranks("deltacast_stage", nonce, update_info, self._update_timeout_s))
        except TransportError:
            if not pulls:
                raise
        deadline, (pause_s, most_s) = Deadline(self._update_timeout_s), _STAGING_POLL_S
        statuses = [_status_of(answer, nonce) for answer in self.answers]
        while any("receiving" in status.staging for status in statuses) and deadline.remaining_s > 0:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
            statuses = list(self.status())
        left_out = [status.server for status in statuses if pulls and _has_failed(status)]
        if left_out:
            self._send(self._to_ranks("deltacast_call_off", nonce, "another rank of this server cannot"), left_out)

    def finish_weight_update(self) -> None:
        """See `Client`; labels what is held and resets caches. Errors as `call`."""
        answers: list[Answer] = []
        for version, servers in _by_version(self.status()).items():
            body = {} if version is None else {"weight_version": str(version)}
            with suppress(TransportError):  # the others must finish too
                self._send(self._request("finish_weight_update", body=body), servers)
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
                self._send(self._request(verb, query=arguments), whole)
            answers += self.answers
        require_all("POST /resume", answers)

    def status(self) -> tuple[ServerStatus, ...]:
        """Ask every server what it holds; one that cannot be asked has that as its `error`."""
        nonce = secrets.token_hex(8)
        with suppress(TransportError):  # each answer says what went wrong with it
            self._send(self._to_ranks("deltacast_status", nonce))
        return tuple(_status_of(answer, nonce) for answer in self.answers)

    def parts(self) -> tuple[ServerParts, ...]:
        """Have every rank of every server scan what it holds. Blocks; nothing is generated there meanwhile.

        Raises:
            TransportError: as `call`; also a server whose ranks could not say it.
            CorruptionError: a rank found that its running model holds other bits than it should.
        """
        nonce = secrets.token_hex(8)
        asked = replace(self._to_ranks("deltacast_parts", nonce), timeout_s=self._update_timeout_s)
        self._send(replace(asked, read_bytes=_PARTS_BYTES))
        return tuple(_parts_of(answer, nonce) for answer in self.answers)

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Wait until every server answers its `/health` with 2xx.

        Raises:
            TransportError: some did not in time; they are named, with what they said last.
        """
        health = replace(self._request("health"), method="GET", body=b"", timeout_s=_HEALTH_S)
        deadline = Deadline(timeout_s)
        while True:
            try:
                super()._send(health)
            except TransportError:
                if deadline.remaining_s < _POLL_S:
                    raise
            else:
                return
            time.sleep(_POLL_S)

    def _send(self, request: Request, servers: Sequence[str] | None = None) -> None:
        if self._start_timeout_s is not None:
            self.wait_until_healthy(self._start_timeout_s)
            self._start_timeout_s = None
        super()._send(request, servers)

    def _to_ranks(self, method: str, *arguments: object) -> Request:
        """Make the request that has every rank answer a method of the worker extension."""
        return self._request("collective_rpc", body={"method": method, "args": arguments})


def _by_version(statuses: Iterable[ServerStatus]) -> dict[int | None, list[str]]:
    servers: dict[int | None, list[str]] = {}
    for status in statuses:
        servers.setdefault(status.version, []).append(status.server)
    return servers


def _has_failed(status: ServerStatus) -> bool:
    """Whether a rank is out of what the server stages, by an error."""
    return any(rank.get("staging") == "over" and rank["error"] for rank in status.ranks)


def _status_of(answer: Answer, nonce: str) -> ServerStatus:
    try:
        ranks = _ranks_of(answer, nonce)
    except TransportError as err:
        return ServerStatus(answer.worker, (), str(err))
    return ServerStatus(answer.worker, ranks, _errors_of(ranks))


def _parts_of(answer: Answer, nonce: str) -> ServerParts:
    ranks = _ranks_of(answer, nonce)
    if error := _errors_of(ranks):
        raise TransportError(f"{answer.worker}: {error}")
    if damaged := _errors_of(ranks, "damaged"):
        raise CorruptionError(f"{answer.worker}: {damaged}")
    try:
        parts = tuple(HeldPart.of(number, row) for number, rank in enumerate(ranks) for row in rank["parts"])
    except (FormatError, KeyError, TypeError) as err:
        raise TransportError(f"{answer.worker}: {err}", hint="Is deltacast there as new as here?") from err
    runs = {(rank.get("run_id"), rank.get("version")) for rank in ranks}
    return ServerParts(answer.worker, len(ranks), ranks[0].get("version") if len(runs) == 1 else None, parts)


def _ranks_of(answer: Answer, nonce: str) -> tuple[dict[str, Any], ...]:
    """Return what each rank said.

    Raises:
        TransportError: the call failed, the server has no such extension, or its ranks are out of step.
    """
    if answer.error:
        raise TransportError(f"{answer.error}. {_HINT}")
    try:
        ranks = tuple(json.loads(answer.said)["results"])
        in_step = bool(ranks) and all(rank["nonce"] == nonce for rank in ranks)
    except (ValueError, KeyError, TypeError) as err:
        said = shortened(answer.said[:4096].decode("utf-8", "replace"))
        raise TransportError(f"this is no status: {said}. {_HINT}") from err
    if not in_step:
        raise TransportError("its ranks answer other questions than were asked: restart this server")
    return ranks


def _errors_of(ranks: Iterable[dict[str, Any]], key: str = "error") -> str:
    return "; ".join(f"rank {place}: {rank[key]}" for place, rank in enumerate(ranks) if rank.get(key))
