"""Checkpoints, an update between them, and a way to run the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from command_line import Run, RunJson
from deltacast.cli import app
from golden_checkpoint import GOLDEN, NEXT, write_raw


@pytest.fixture
def run() -> Run:
    """Run a command in this process; `code` is the exit code that it must have."""

    def invoke(*args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        assert result.exit_code == code, (result.exit_code, result.output)
        return result

    return invoke


@pytest.fixture
def run_json(run: Run) -> RunJson:
    """Run a command with --json: all of stdout is one document, and stderr is empty."""

    def invoke(*args: object, code: int = 0) -> dict[str, Any]:
        result = run(*args, "--json", code=code)
        assert result.stderr == ""
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    return invoke


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_raw(tmp_path / "base.safetensors", GOLDEN, {"format": "pt"})


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_raw(tmp_path / "new.safetensors", NEXT, {"format": "pt"})


@pytest.fixture
def update(base: Path, new: Path, tmp_path: Path, run: Run) -> Path:
    path = tmp_path / "u.dcu"
    run("diff", base, new, "-o", path)
    return path
