"""The places where the kernels' tests run.

The torch twin (CPU and GPU), the Triton kernels (`-m gpu`), and these in Triton's interpreter where TRITON_INTERPRET=1
is set.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from deltacast.delta.kernels import Backend

_INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(
    params=[
        pytest.param(("cpu", "torch"), id="twin"),
        pytest.param(("cpu", "triton"), id="interpreted", marks=pytest.mark.skipif(not _INTERPRETED, reason="not set")),
        pytest.param(("cuda", "torch"), id="gpu-twin", marks=pytest.mark.gpu),
        pytest.param(("cuda", "triton"), id="gpu", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, Backend]:
    """Device and backend."""
    found: tuple[str, Backend] = request.param
    return found
