"""What the fixtures `run` and `run_json` of tests/cli are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from typer.testing import Result

Run: TypeAlias = Callable[..., Result]
RunJson: TypeAlias = Callable[..., Any]
