"""Triton where it is installed, and a stand-in where it is not, so that the kernels' modules import anywhere.

Type checkers see `Any`: Triton is no dependency of the package (torch's CUDA wheels bring it).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

__all__ = ["HAS_TRITON", "constexpr", "jit", "program", "tensor", "tl"]


_SIZES = [
    *("first_block", "num_blocks", "num_params", "capacity", "num_changes", "number"),
    *("chunk_blocks", "num_sums"),
]
_BUFFERS = [
    *("counts", "count_sums", "offsets", "values", "starts", "totals"),
    *("undo", "sums", "fault", "applied", "mask_bytes"),
]


def _load() -> tuple[Any, Any]:
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None, None


_triton, tl = _load()
HAS_TRITON: Final = tl is not None

if TYPE_CHECKING:
    constexpr: TypeAlias = Any
    tensor: TypeAlias = Any
else:  # Triton looks annotations up, and takes none but its own names
    constexpr = tl.constexpr if HAS_TRITON else object
    tensor = tl.tensor if HAS_TRITON else object


def jit(function: Callable[..., Any]) -> Any:
    """Mark a Triton kernel; without Triton the function stays plain Python that nobody calls."""
    return _triton.jit(function) if HAS_TRITON else function


def program(function: Callable[..., Any]) -> Any:
    """Mark a Triton kernel that is launched from the host, so that it is compiled once per word width.

    Triton would compile again for sizes that are 1 or multiples of 16, and for each alignment of callers' buffers: a
    second or more in the middle of a round, for nothing, as accesses to these are scattered anyway.
    """
    if not HAS_TRITON:
        return function
    return _triton.jit(
        function, do_not_specialize=_SIZES, do_not_specialize_on_alignment=[f"{name}_ptr" for name in _BUFFERS]
    )
