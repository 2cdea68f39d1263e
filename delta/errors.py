"""Every error that deltacast raises, one tree.

::

    DeltacastError
    +-- InputError (ValueError)              what the caller passed cannot be used; nothing was touched
    |   +-- DTypeError (TypeError)           a dtype that has no bits we can address, by name
    |   +-- TableError                       two sides disagree about names, dtypes or shapes
    |   +-- PatchError                       a patch breaks the policy (order, range, dtype, size)
    |   +-- CapacityError                    more than the buffers that were made for it hold
    +-- FormatError (ValueError)             bytes from outside are not a format 1 container
    |   +-- ChecksumError                    they were, and something changed them
    +-- StateError (RuntimeError)            well-formed, but not for the weights at hand
    |   +-- BaseError                        made for another base: wrong run, skipped version, replay
    |   +-- CorruptionError                  weights do not have the bits that were agreed on
    |   +-- VerificationError                the result does not have the digest it should have
    |   +-- FencedError                      another writer has taken over the run: this one must stop
    +-- TransportError (ConnectionError)     something between the processes failed
    |   +-- DeadlineError (TimeoutError)     a peer did not answer in time
    |   +-- AuthenticationError (PermissionError)  a peer does not know the run's secret
    |   +-- ProtocolError                    a peer said something that has no place here
    +-- StoreError (OSError)                 the store could not do it; what was committed there is as it was
    |   +-- MissingObjectError (FileNotFoundError)  no object of that name
    |   +-- ObjectExistsError (FileExistsError)     there is one already, and objects are written once
    +-- RoundAbortedError (RuntimeError)     a round ended in ABORT: everybody is at the base version

Messages say which parameter, version or rank, what was expected, what was found and what to do; the same
facts are attributes. `InputError` and `FormatError` always mean that no weight was written.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AuthenticationError",
    "BaseError",
    "CapacityError",
    "ChecksumError",
    "CorruptionError",
    "DTypeError",
    "DeadlineError",
    "DeltacastError",
    "FencedError",
    "FormatError",
    "InputError",
    "MissingObjectError",
    "ObjectExistsError",
    "PatchError",
    "ProtocolError",
    "RoundAbortedError",
    "StateError",
    "StoreError",
    "TableError",
    "TransportError",
    "VerificationError",
]


class DeltacastError(Exception):
    """Carry one failure: what happened, where, expected against found, and what to do next.

    Args:
        message: what happened, without the facts below.
        parameter: the parameter's name, if one is to blame.
        version: the version that the operation was about.
        rank: the rank (0 is the trainer) that is to blame.
        expected: what should have been there.
        found: what was there.
        hint: what the reader of the message can do.
    """

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        version: int | None = None,
        rank: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.version = version
        self.rank = rank
        self.expected = expected
        self.found = found
        self.hint = hint

    def __str__(self) -> str:
        where = [
            f"{label} {value!r}" if label == "parameter" else f"{label} {value}"
            for label, value in (("parameter", self.parameter), ("version", self.version), ("rank", self.rank))
            if value is not None
        ]
        text = self.message + (f" ({', '.join(where)})" if where else "")
        facts = [
            f"{label} {value}"
            for label, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        text += f": {', '.join(facts)}" if facts else ""
        return f"{text}. {self.hint}" if self.hint else text


class InputError(DeltacastError, ValueError):
    """The caller passed something that cannot be used; nothing was touched."""


class DTypeError(InputError, TypeError):
    """A dtype whose bits deltacast cannot address, by name."""


class TableError(InputError):
    """Two sides disagree about the parameters' names, dtypes or shapes."""


class CapacityError(InputError):
    """More than the buffers that were made for it hold; the argument that sizes them is in the hint."""


class PatchError(InputError):
    """A patch breaks the policy: order, range, dtype or size."""


class FormatError(DeltacastError, ValueError):
    """Bytes from outside do not follow format 1; no weight was touched."""


class ChecksumError(FormatError):
    """Bytes do not have the checksum that was stored with them."""


class StateError(DeltacastError, RuntimeError):
    """Something well-formed does not fit the weights at hand."""


class BaseError(StateError):
    """An update was made for another base: another run, a skipped version, a replay."""


class CorruptionError(StateError):
    """Weights do not have the bits that both sides agreed on."""


class VerificationError(StateError):
    """The result of an operation does not have the digest it should have."""


class FencedError(StateError):
    """Another writer has taken over the run; this one has published its last version."""


class StoreError(DeltacastError, OSError):
    """The store could not do what was asked: a full disk, a refused connection. What was committed is as it was."""


class MissingObjectError(StoreError, FileNotFoundError):
    """The store holds no object of that name."""


class ObjectExistsError(StoreError, FileExistsError):
    """The store holds an object of that name already, and objects are written once."""


class TransportError(DeltacastError, ConnectionError):
    """Something between the processes failed."""


class DeadlineError(TransportError, TimeoutError):
    """A peer did not answer in time."""


class AuthenticationError(TransportError, PermissionError):
    """A peer does not know the run's secret."""


class ProtocolError(TransportError):
    """A peer said something that has no place at this point of the protocol."""


class RoundAbortedError(DeltacastError, RuntimeError):
    """A round ended in ABORT; the trainer and every live worker are at the base version.

    Attributes:
        report: the round's report, where there was one (`deltacast.engines.report.RoundReport`).
    """

    report: Any = None
