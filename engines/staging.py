"""A worker that stages an update while its weights are still read: for engines whose one loop generates and updates.

::

    stage(update_info)      begins the call on a thread of its own, up to its first write; does not block
    state                   `receiving`, then `staged`
    receive(update_info)    the call itself: what was staged is written; returns at the call's end
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from deltacast.delta.errors import DeadlineError, StateError

__all__ = ["ReceiveCall", "Staging", "StagingState"]

StagingState: TypeAlias = Literal["", "receiving", "staged", "over"]
ReceiveCall: TypeAlias = Callable[[Mapping[str, Any], Callable[[], object] | None], object]
"""A worker's `receive_weights(update_info, before_write)`, its errors kept by itself."""


class Staging:
    """A worker's calls, some of which are staged first. One thread uses it.

    Args:
        receive: does a call; on another thread if it is staged, one call at a time.
    """

    def __init__(self, receive: ReceiveCall) -> None:
        self._receive = receive
        self._call: _StagedCall | None = None

    @property
    def state(self) -> StagingState:
        """`staged`: nothing is left but what writes; `over`: the call has ended without that; empty: there is none."""
        return "" if self._call is None else self._call.state

    def stage(self, update_info: Mapping[str, Any], patience_s: float) -> None:
        """Begin a call, and leave it before its first write. Does not block, but for another one that it calls off.

        Args:
            update_info: as of the call itself.
            patience_s: how long what is staged waits for `receive`, before it is given up.
        """
        self.forget("another update is staged")
        self._call = _StagedCall(self._receive, update_info, patience_s)

    def wait(self, timeout_s: float) -> StagingState:
        """Wait while the state is `receiving`, but no longer than that; return it. Any thread may."""
        if self._call is not None:
            self._call.settled.wait(timeout_s)
        return self.state

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Do a call; if it is the one that is staged, what is left of it. Blocks; nobody may read the weights."""
        call, self._call = self._call, None
        if call is not None and call.update_info == update_info and (call.state != "over" or call.called_off):
            call.end()
            return
        if call is not None:
            call.end("another update is received")
        self._receive(update_info, None)

    def call_off(self, reason: str) -> None:
        """Have what is staged not be written, and wait until the worker is out of it; the call itself does no more."""
        if self._call is not None:
            self._call.called_off = True
            self._call.end(reason)

    def forget(self, reason: str) -> None:
        """Call off what is staged, if anything; should the call itself still come, it is done from its beginning."""
        self.call_off(reason)
        self._call = None


class _StagedCall:
    def __init__(self, receive: ReceiveCall, update_info: Mapping[str, Any], patience_s: float) -> None:
        self.update_info = update_info
        self._receive, self._patience_s = receive, patience_s
        self.state: StagingState = "receiving"
        self.called_off = False
        self._lock = threading.Lock()
        self.settled, self._answered, self._refusal = threading.Event(), threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="deltacast-staging", daemon=True)
        self._thread.start()

    def end(self, refusal: str = "") -> None:
        """Let it write, or not, and wait for its end."""
        self._refusal = refusal
        self._answered.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._receive(self.update_info, self._ask)
        finally:
            self._settle("over")
            self._answered.set()  # for a thread that still asks, and was left behind by the call

    def _settle(self, state: StagingState) -> None:
        with self._lock:
            self.state = "over" if self.state == "over" else state  # it may be asked for on a thread left behind
            self.settled.set()

    def _ask(self) -> None:
        self._settle("staged")
        if not self._answered.wait(self._patience_s):
            raise DeadlineError("no leave to write came in time", expected=f"within {self._patience_s:g} s")
        if self._refusal:
            raise StateError(f"the update was called off: {self._refusal}")
