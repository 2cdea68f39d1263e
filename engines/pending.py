"""An update that travels while its caller goes on: what `send_weights_async` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from deltacast.delta.errors import DeadlineError
from deltacast.engines.report import RoundReport

__all__ = ["PendingUpdate"]


class PendingUpdate:
    """One `send_weights` on a thread of its own. Any thread may ask how far it is.

    Args:
        send: does it; called once with what to call when the source's weights have been read.
        device: if a GPU, the thread works on the stream there that is current where this is made: after all that the
            caller has put on it, such as an optimizer step.
    """

    def __init__(self, send: Callable[[Callable[[], None]], RoundReport], device: torch.device) -> None:
        self._read, self._report = threading.Event(), Future[RoundReport]()
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        threading.Thread(target=self._run, args=(send, stream), name="deltacast-update", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._report.done()

    def wait_until_read(self, timeout_s: float | None = None) -> None:
        """Block until the source is not read any more, be it that the update failed: then its weights may change.

        Raises:
            DeadlineError: it is still read after `timeout_s` seconds; None waits on.
        """
        if not self._read.wait(timeout_s):
            raise DeadlineError("the weights are still being read", expected=f"within {timeout_s} s")

    def result(self, timeout_s: float | None = None) -> RoundReport:
        """Block until the update has ended, and return its report.

        Raises:
            DeadlineError: it has not after `timeout_s` seconds; it goes on, and may be asked again.
            DeltacastError: what `send_weights` raises, with the same state left.
        """
        try:
            return self._report.result(timeout_s)
        except TimeoutError:
            if self._report.done():  # it raised one itself
                raise
            raise DeadlineError("the update is still under way", expected=f"within {timeout_s} s") from None

    def wait(self) -> None:
        """Block until the update has ended, well or not."""
        wait([self._report])

    def _run(self, send: Callable[[Callable[[], None]], RoundReport], stream: Any) -> None:
        try:
            with torch.cuda.stream(stream):  # None: stays as it is
                report = send(self._read.set)
            self._report.set_result(report)
        except BaseException as err:  # noqa: BLE001 - a thread's boundary; whoever asks for the result gets it
            self._report.set_exception(err)
        finally:
            self._read.set()
