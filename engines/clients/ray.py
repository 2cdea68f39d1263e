"""A client of Ray actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from deltacast.delta.errors import InputError
from deltacast.engines.clients.answers import LEFT, Answer, check_timeouts, require_all, shortened
from deltacast.engines.control import Deadline

__all__ = ["RayClient"]

_METHODS: Final = {"update_weights": "receive_weights"}
_LIFECYCLE: Final = ("init_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class RayClient:
    """Call actors that hold worker engines, all at the same time, and wait for all.

    An actor has the four methods of a worker engine, with their arguments. A call that did not end in time goes on
    at its actor, and whatever is called next waits behind it there. Nothing is called twice.

    Args:
        actors: handles; the caller still owns them.
        methods: the actors' names for calls that they name otherwise. A call has the name of the method below, but
            `update_weights` is an actor's `receive_weights`, as it is a worker engine's.
        timeout_s: for a call that a worker answers at once.
        update_timeout_s: for `init_transfer_engine` and `update_weights`, which end when a whole update has.

    Attributes:
        answers: of the call that ended last, one per actor.

    Raises:
        InputError: no actors, one without the four methods, or a timeout that is not positive.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        methods: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        check_timeouts(timeout_s=timeout_s, update_timeout_s=update_timeout_s)
        self._methods = _METHODS | dict(methods or {})
        self._timeout_s, self._update_timeout_s = timeout_s, update_timeout_s
        self.answers: tuple[Answer, ...] = ()
        self.actors = actors

    @property
    def actors(self) -> Sequence[Any]:
        """Who is called; set it between rounds when one joined, or is gone."""
        return self._actors

    @actors.setter
    def actors(self, actors: Sequence[Any]) -> None:
        """Take others, or refuse them with an InputError and keep those."""
        actors = tuple(actors)
        if not actors:
            raise InputError("no actors to call")
        for verb in _LIFECYCLE:
            for actor in actors:
                self._method(actor, verb)
        self._actors = actors

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `Client`; blocks until every worker is admitted, or one actor has failed. Errors as `call`."""
        self._call("init_transfer_engine", init_info, whole_update=True, fail_fast=True)

    def start_weight_update(self) -> None:
        """See `Client`. Errors as `call`."""
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `Client`; blocks until the update is over everywhere, or one actor has failed. Errors as `call`.

        Actors that pull do so each by itself: the others are waited for.
        """
        self._call("update_weights", update_info, whole_update=True, fail_fast="pull" not in update_info)

    def finish_weight_update(self) -> None:
        """See `Client`. Errors as `call`."""
        self._call("finish_weight_update")

    def call(self, verb: str, **arguments: Any) -> None:
        """Have every actor do something else that it can, such as `pause`; blocks for up to `timeout_s`.

        Raises:
            TransportError: an actor raised, is dead, or did not end in time; it is named, and what it raised. What the
                others did, which are named too, is not undone.
            InputError: an actor has no such method. None was called.
        """
        self._call(verb, **arguments)

    def _call(
        self, verb: str, *values: Any, whole_update: bool = False, fail_fast: bool = False, **arguments: Any
    ) -> None:
        import ray

        methods = [self._method(actor, verb) for actor in self._actors]
        results = [method.remote(*values, **arguments) for method in methods]
        deadline = Deadline(self._update_timeout_s if whole_update else self._timeout_s)
        waiting, errors = results, dict[Any, str]()
        # The others would wait for the one that failed, and the trainer for them. Any other call must end at all.
        while waiting and not (fail_fast and any(errors.values())):
            ended, waiting = ray.wait(waiting, timeout=max(0.0, deadline.remaining_s))
            if not ended:
                errors |= dict.fromkeys(waiting, f"did not end within {deadline.seconds:g} s")
                break
            errors |= {result: _error_of(result) for result in ended}
        self.answers = tuple(
            Answer(str(actor), errors.get(result, LEFT)) for actor, result in zip(self._actors, results, strict=True)
        )
        require_all(self._methods.get(verb, verb), self.answers)

    def _method(self, actor: Any, verb: str) -> Any:
        name = self._methods.get(verb, verb)
        try:
            return getattr(actor, name)
        except AttributeError as err:
            raise InputError(f"{actor} has no method {name!r}", hint="Say what it calls it with `methods`.") from err


def _error_of(result: Any) -> str:
    """Return what went wrong in a call that has ended; an empty string if nothing did."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        ray.get(result)
    except RayTaskError as err:
        return shortened(f"{type(err.cause).__name__}: {err.cause}")  # its own text is the actor's whole traceback
    except RayError as err:
        return shortened(f"{type(err).__name__}: {err}")
    return ""
