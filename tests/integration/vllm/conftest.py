"""These tests need vLLM, which has a venv of its own: `make test-vllm`. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

if importlib.util.find_spec("vllm"):
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines run in the test's process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def example() -> ModuleType:
    """The example that is a script: its ways to make, serve, train and ask a tiny model."""
    path = Path(__file__).resolve().parents[3] / "examples" / "vllm_http_sync.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
