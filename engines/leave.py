"""Leave to write: how the first write of a call waits for whoever still reads the weights."""

from __future__ import annotations

from collections.abc import Callable

from deltacast.delta.errors import DeadlineError
from deltacast.engines.control import Channel, Deadline, Task, wait_any

__all__ = ["WriteLeave"]


class WriteLeave:
    """What one call asks before it writes, once; close it at the call's end.

    Args:
        ask: returns once nobody reads the weights any more; None if nobody has to be asked.
    """

    def __init__(self, ask: Callable[[], object] | None) -> None:
        self._ask = ask
        self._asked: Task | None = None  # until it was answered
        self._refusal: BaseException | None = None

    def wait(self, channel: Channel, timeout_s: float) -> bool:
        """Ask, unless that was done before, and return whether leave was given. Blocks.

        Returns:
            False if the channel can be read, or is gone, before there is an answer, which the next call waits for.

        Raises:
            DeadlineError: neither came in time.
            Exception: what `ask` raises, now and at every later call.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._ask is not None:
            self._asked, self._ask = Task("leave", self._ask), None
        if self._asked is None:
            return True
        try:
            wait_any([channel], Deadline(timeout_s), self._asked)
        except DeadlineError as err:
            raise DeadlineError("no leave to write came in time", expected=f"within {timeout_s} s") from err
        if not self._asked.done:
            return False
        self._refusal = self._asked.error
        self.close()
        if self._refusal is not None:
            raise self._refusal
        return True

    def close(self) -> None:
        """Wait for no answer any more; whoever was asked may go on."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.join(0.0)
