"""What many workers answered to one call: everybody did it, or an error that says who did not, why, and who did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from deltacast.delta.errors import InputError, TransportError

__all__ = ["LEFT", "MAX_TEXT_BYTES", "Answer", "check_timeouts", "require_all", "shortened"]

MAX_TEXT_BYTES: Final = 2048
"""How much of one worker's own words goes into a message."""
LEFT: Final = "still at it when another failed"
"""The error of a worker that was not waited for. Those that take part in an update end together, or not at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One worker's answer to one call.

    Attributes:
        worker: who it is: a server's URL, an actor.
        error: why the call does not count as done there, in the worker's own words if it had any; empty if it was done.
        said: what a server that did it said, as much of it as was read; empty for other workers.
        reached: whether there was a connection to it; else it has seen nothing of the call.
    """

    worker: str
    error: str = ""
    said: bytes = field(default=b"", repr=False, compare=False)
    reached: bool = field(default=True, repr=False, compare=False)


def require_all(what: str, answers: Sequence[Answer]) -> None:
    """Pass if every worker did it.

    Args:
        what: the call, for the message.
        answers: one of each worker that was called.

    Raises:
        TransportError: some did not. The message names each of them with its error, and those that did. What those did
            is not undone.
    """
    failed = [f"{answer.worker}: {answer.error}" for answer in answers if answer.error]
    if failed:
        done = ", ".join(answer.worker for answer in answers if not answer.error) or "none"
        raise TransportError(f"{what} failed at {len(failed)} of {len(answers)}: {'; '.join(failed)} | done at: {done}")


def shortened(text: str) -> str:
    """Return what a worker said in at most `MAX_TEXT_BYTES` of UTF-8, marked if it was cut."""
    data = text.strip().encode("utf-8", "replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return data[: MAX_TEXT_BYTES - 3].decode("utf-8", "ignore") + "..."


def check_timeouts(**timeouts_s: float) -> None:
    """Check seconds, given by their names.

    Raises:
        InputError: one is not positive.
    """
    for name, seconds in timeouts_s.items():
        if not seconds > 0:
            raise InputError(f"{name} must be positive", found=seconds)
