"""What vLLM finds of us, where vLLM is absent."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

    status, parts = Worker().deltacast_status("asked"), Worker().deltacast_parts("asked")
    assert status["nonce"] == parts["nonce"] == "asked"
    assert not status["serves"]
    assert "not deltacast" in status["error"]
    assert "not deltacast" in parts["error"]


def test_a_worker_says_what_its_engine_holds() -> None:
    """As JSON takes it; an error of the engine is an answer too."""

    class Engine:
        status = SimpleNamespace(run_id="run", version=4)

        def __init__(self) -> None:
            self.rows: Any = [("w", (4, 2), ((0, 4), (0, 1)), (1 << 64) - 1), ("scalar", (), (), 0)]

        def parts(self) -> Any:
            return [row[:] for row in self.rows]

    engine = Engine()

    class Worker(DeltacastExtension):
        weight_transfer_engine = engine

    answer = json.loads(json.dumps(Worker().deltacast_parts("asked")))
    rows = [["w", [4, 2], [[0, 4], [0, 1]], "f" * 16], ["scalar", [], [], "0" * 16]]
    said = {"run_id": "run", "version": 4, "parts": rows}
    assert answer == {"nonce": "asked", "damaged": "", "error": "", **said}
    engine.rows = [None]
    answer = Worker().deltacast_parts("again")
    assert (answer["nonce"], answer["parts"]) == ("again", [])
    assert answer["error"].startswith("TypeError: ")
