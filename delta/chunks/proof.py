"""Comparing sums with what they should be, and naming the first parameter that is not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.errors import CorruptionError, VerificationError
from deltacast.delta.fingerprint import format_sum
from deltacast.delta.table import ParameterTable

__all__ = ["require_sums"]


def require_sums(
    table: ParameterTable,
    found: NDArray[np.uint64],
    expected: NDArray[np.uint64],
    error: type[CorruptionError | VerificationError],
    message: str,
    *,
    hint: str | None = None,
) -> None:
    """Raise unless two arrays of sums, uint64 [parameters] in table order, are equal.

    Raises:
        CorruptionError, VerificationError: as `error`, for the first parameter that differs.
    """
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        place = int(wrong[0])
        raise error(
            message,
            parameter=table.metas[place].name,
            expected=format_sum(int(expected[place])),
            found=format_sum(int(found[place])),
            hint=hint,
        )
