"""A worker's call that stages while its weights are still read: for engines whose one loop generates and updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from deltacast.delta.errors import DeadlineError, StateError

__all__ = ["StagedCall", "StagingState"]

StagingState: TypeAlias = Literal["receiving", "staged", "over"]


class StagedCall:
    """One call of `receive_weights` on a thread of its own, whose first write waits until `finish`.

    Args:
        update_info: of the call.
        receive: makes it, with the given `before_write`; keeps its own errors.
        patience_s: how long to wait for `finish` or `cancel` once all is staged, before giving up.

    Attributes:
        update_info: as given.
    """

    def __init__(
        self,
        update_info: Mapping[str, Any],
        receive: Callable[[Callable[[], None]], object],
        *,
        patience_s: float = 60.0,
    ) -> None:
        self.update_info = update_info
        self._receive, self._patience_s = receive, patience_s
        self._staged, self._answered, self._refusal = threading.Event(), threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="deltacast-staging", daemon=True)
        self._thread.start()

    @property
    def state(self) -> StagingState:
        """`staged`: nothing is left but to write, and so on; `over`: the call has ended, whatever came of it."""
        if not self._thread.is_alive():
            return "over"
        return "staged" if self._staged.is_set() else "receiving"

    def finish(self) -> None:
        """Give leave to write, and wait for the call's end. Nobody else may read the weights meanwhile."""
        self._answered.set()
        self._thread.join()

    def cancel(self, reason: str) -> None:
        """Have it write nothing, and wait for its end; if it has leave already, for its usual one."""
        if not self._answered.is_set():
            self._refusal = reason
        self.finish()

    def _run(self) -> None:
        try:
            self._receive(self._ask)
        finally:
            self._answered.set()  # for whoever asks on a thread that the call has left behind

    def _ask(self) -> None:
        self._staged.set()
        if not self._answered.wait(self._patience_s):
            raise DeadlineError(
                "nobody let this worker write what it has staged", expected=f"within {self._patience_s} s"
            )
        if self._refusal:
            raise StateError(f"the update was called off: {self._refusal}")
