"""Exit codes, and how errors and warnings are said: one line on stderr, or in the JSON document on stdout."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Final

import typer

from deltacast.commands.console import print_json, printable
from deltacast.delta.errors import (
    DeltacastError,
    FormatError,
    InputError,
    RoundAbortedError,
    StateError,
    TransportError,
)

__all__ = [
    "BAD_DATA",
    "BROKEN_PIPE",
    "BUG",
    "INTERRUPTED",
    "IO_FAILED",
    "MISMATCH",
    "USAGE",
    "exit_code",
    "message",
    "report_failure",
    "warn",
]

MISMATCH: Final = 1
USAGE: Final = 2
BAD_DATA: Final = 3
IO_FAILED: Final = 4
BUG: Final = 70
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_UsageError: Final[type[Exception]] = typer.BadParameter.__bases__[0]  # click's, or the copy that newer typers bring

_PATHS: Final = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""A path or an object that is missing, taken, or somebody else's; other failures of disks and stores are no usage."""

_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (InputError, USAGE),
    (FormatError, BAD_DATA),
    (StateError, MISMATCH),
    (RoundAbortedError, MISMATCH),
    (TransportError, IO_FAILED),
    *((kind, USAGE) for kind in _PATHS),
    (OSError, IO_FAILED),
    (_UsageError, USAGE),
    (typer.Abort, INTERRUPTED),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error; what nobody foresaw is a bug."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


def report_failure(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong and return the exit code.

    Args:
        error: whatever a command raised.
        as_json: print `{"error": {...}}` on stdout instead of a line on stderr.
    """
    code = exit_code(error)
    if code == BUG and os.environ.get("DELTACAST_TRACEBACK"):
        traceback.print_exception(error)
    if as_json:
        print_json({"error": _facts(error) | {"exit_code": code}})
    elif code != INTERRUPTED:
        sys.stderr.write(printable(f"deltacast: error: {_sentence(error, code)}") + "\n")
    return code


def _sentence(error: Exception, code: int) -> str:
    if code == BUG:
        return f"internal: {type(error).__name__}: {error} (DELTACAST_TRACEBACK=1 shows where)"
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return message(error) + hint
    return str(error) if isinstance(error, DeltacastError) else message(error)


def warn(text: str) -> None:
    """Say on stderr that a part of a command failed which the rest does not depend on."""
    sys.stderr.write(printable(f"deltacast: warning: {text}") + "\n")


def message(error: Exception) -> str:
    """Say what an error is about, without the facts that stand beside it."""
    if isinstance(error, DeltacastError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, _UsageError):
        return str(error.format_message())  # type: ignore[attr-defined]
    return str(error)


def _facts(error: Exception) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": type(error).__name__, "message": message(error)}
    if isinstance(error, DeltacastError):
        for key in ("parameter", "version", "rank", "expected", "found", "hint"):
            value = getattr(error, key)
            if value is not None:
                facts[key] = value if isinstance(value, int | str) else str(value)
    return facts
