"""Stop the engines' generation around an update, whatever becomes of it: a policy around any client that can call.

    start_weight_update     pause, [sleep, wake the weights,] then the client's own
    update_weights          the client's own: the weights are written
    finish_weight_update    the client's own, then [wake the KV cache,] resume

Where the workers can stage an update while they generate (`StagingClient`), the pause comes later::

    start_weight_update     the client's own
    update_weights          stage, pause, then the client's own

The trainer calls `finish_weight_update` after every start, a failed or interrupted one too, so resuming hangs on that
alone; and of the steps of a finish each is taken, whatever became of the others. Around the handshake it is `paused`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from deltacast.delta.errors import InputError, StateError, TransportError
from deltacast.engines.base import Client

__all__ = ["CallingClient", "PausingClient", "StagingClient"]


class CallingClient(Client, Protocol):
    """A client that can have its workers do more than the four calls: every one in this package."""

    def call(self, verb: str, **arguments: Any) -> None:
        """Have every worker do `verb`, and wait until it is done."""


@runtime_checkable
class StagingClient(CallingClient, Protocol):
    """One whose workers can take an update while their weights are still read."""

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """Have every worker do all of `update_weights` that comes before the first write; blocks until they have."""


class PausingClient:
    """Call `pause` before an update and `resume` after it; with `sleep_level`, `sleep` and `wake_up` too.

    Verbs and arguments are vLLM's; `HttpClient.paths` and `RayClient.methods` say what other engines call them. The
    initial handshake, which may write all weights, is between a `pause` and a `resume` too.

    Sleeping frees the GPU for somebody else: call `sleep` before a training step that runs on the workers' GPUs. The
    update then wakes the weights first, and the KV cache only once it is over. If nobody has called `sleep`,
    `start_weight_update` does, so that the update has the KV cache's memory for its buffers. Requests that were kept
    do not survive it.

    Args:
        client: does the calls; the caller still owns it.
        mode: what becomes of requests in flight: `keep` freezes them, `wait` lets them end, `abort` ends them. None
            to leave it to the engine.
        sleep_level: 1 keeps the weights in host memory; None not to sleep. Level 2 would throw away the base that an
            update is made for, and is refused.
        stage: have a `StagingClient` that does not sleep stage first, so that the pause is for writing and the decision
            only. What is staged takes memory on the workers while they generate.

    Attributes:
        paused_s: how long the last pause was, from the call of `pause` to the end of `resume`; None before the first.
            Servers that are called side by side were paused for less.

    Raises:
        InputError: another level.
    """

    def __init__(
        self, client: CallingClient, *, mode: str | None = "keep", sleep_level: int | None = None, stage: bool = True
    ) -> None:
        if sleep_level not in (None, 1):
            raise InputError(
                "sleep_level out of range", expected="1 or None", found=sleep_level, hint="An update needs its base."
            )
        self._client = client
        self._pause_arguments = {} if mode is None else {"mode": mode}
        self._sleep_level = sleep_level
        self._stage = None
        if stage and sleep_level is None and isinstance(client, StagingClient):
            self._stage = client.stage_weights
        self._asleep = False
        self._within = False
        self._started, self._lock = False, threading.Lock()
        self._paused_at: float | None = None
        self.paused_s: float | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the workers paused within, and run again afterwards, whatever failed; one in another does nothing.

        Raises:
            TransportError: pausing or what was done within failed, and resuming too; the message has both.
            Exception: the only one that failed.
        """
        if self._within:
            yield
            return
        self._within, error = True, None
        try:
            self._pause()
            yield
        except BaseException as err:  # noqa: BLE001 - it is raised below
            error = err
        self._within = False
        _take_all(self._resume, first=error)

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`. Workers are `paused` while the client's own call lasts."""
        with self.paused():
            self._client.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """See `Client`. On any error, also of some workers only, `finish_weight_update` makes all of them run again."""
        self._started = True
        if self._sleep_level is None:
            if self._stage is None:
                self._pause()
        else:
            if not self._asleep:
                self.sleep()
            self._wake_weights()
        self._client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `Client`. With staging, what comes before the pause blocks too, and its errors are raised likewise."""
        if self._stage is not None:
            self._stage(update_info)
            with self._lock:  # the trainer may have given this call up, and finished the update, meanwhile
                if not self._started:
                    raise StateError("the update is over; nobody was paused for it")
                self._pause()
        self._client.update_weights(update_info)

    def finish_weight_update(self) -> None:
        """See `Client`. Resumes whatever else fails, an interrupt (Ctrl-C) included.

        Raises:
            TransportError: more than one step failed; the message has each error, the first one first.
            Exception: the only one that failed.
        """
        with self._lock:
            self._started = False
        _take_all(*self._to_wake_weights(), self._client.finish_weight_update, *self._to_run())

    def sleep(self) -> None:
        """Pause the workers and have them free their GPUs until the next update, or `wake`. Blocks until they have.

        Raises:
            StateError: this client does not sleep. Nothing was called.
            Exception: the client's own. Some workers may be asleep; the next update, or `wake`, wakes them all.
        """
        if self._sleep_level is None:
            raise StateError("this client does not sleep", hint="Give it a sleep_level.")
        self._pause()
        self._asleep = True  # before it is true: if it fails half way, some are
        self._client.call("sleep", level=self._sleep_level)

    def wake(self) -> None:
        """Have the workers run again with the weights that they had; errors as `finish_weight_update`."""
        _take_all(*self._to_wake_weights(), *self._to_run())

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        self._client.call("pause", **self._pause_arguments)

    def _wake_weights(self) -> None:
        self._client.call("wake_up", tags=["weights"])
        self._asleep = False

    def _to_wake_weights(self) -> list[Callable[[], None]]:
        return [self._wake_weights] if self._asleep else []

    def _to_run(self) -> list[Callable[[], None]]:
        return [self._resume] if self._sleep_level is None else [self._wake_kv_cache, self._resume]

    def _wake_kv_cache(self) -> None:
        self._client.call("wake_up", tags=["kv_cache"])

    def _resume(self) -> None:
        self._client.call("resume")
        if self._paused_at is not None:
            self.paused_s, self._paused_at = time.monotonic() - self._paused_at, None


def _take_all(*steps: Callable[[], None], first: BaseException | None = None) -> None:
    """Take every step, whatever became of those before it; then raise what went wrong, an interrupt first of all."""
    errors = [] if first is None else [first]
    for step in steps:
        try:
            step()
        except BaseException as err:  # noqa: BLE001 - it is raised below
            errors.append(err)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        told = "; then: ".join(str(error) or type(error).__name__ for error in errors)
        for error in errors:
            if not isinstance(error, Exception):
                error.add_note(told)
                raise error
        raise TransportError(told) from errors[0]
