"""What vLLM finds of us, where vLLM is absent."""

from __future__ import annotations

import importlib.util
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from deltacast.engines.vllm import plugin
from deltacast.engines.vllm.extension import EXTENSION, DeltacastExtension

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_registering_without_vllm_does_nothing() -> None:
    """Whoever loads all entry points of a machine without vLLM gets no error."""
    plugin.register()


def test_the_entry_point_is_the_plugin() -> None:
    """The group is vLLM's, and what it names exists."""
    groups = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]
    module, _, name = groups["vllm.general_plugins"]["deltacast"].partition(":")
    assert getattr(import_module(module), name) is plugin.register


def test_the_extensions_path_is_its_own() -> None:
    """What is typed after --worker-extension-cls leads to the class."""
    module, _, name = EXTENSION.rpartition(".")
    assert getattr(import_module(module), name) is DeltacastExtension


def test_a_worker_with_another_backend_says_so() -> None:
    """An exception in a worker would put its ranks out of step."""

    class Worker(DeltacastExtension):
        weight_transfer_engine = None

    status = Worker().deltacast_status("asked")
    assert status["nonce"] == "asked"
    assert not status["serves"]
    assert "not deltacast" in status["error"]
