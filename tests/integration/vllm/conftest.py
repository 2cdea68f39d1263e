"""These tests need vLLM, which has a venv of its own: `make test-vllm`. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("vllm"):
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines run in the test's process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
else:
    collect_ignore_glob = ["test_*.py"]
