"""The examples of docs/clients.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files in it."""
    for name, text in re.findall(r"```python (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    return tmp_path


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start `server.py` as the page says, on a port that the system picks, and yield its URL."""
    command = [sys.executable, "-m", "uvicorn", "server:app", "--port", "0", "--no-access-log"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            yield next(found[0] for line in lines if (found := re.search(r"http://127.0.0.1:\d+", line)))
        finally:
            process.terminate()
            process.communicate(timeout=30)


def printed(folder: Path, *command: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_servers_follow_the_trainer(folder: Path) -> None:
    """One round, verified by both."""
    with ExitStack() as stack:
        urls = [stack.enter_context(served(folder)) for _ in range(2)]
        output = printed(folder, "-W", "error", "trainer.py", *urls)
    assert "committed version 1 (from 0)" in output
    assert "verified by 2 of 2 workers" in output


@pytest.mark.slow  # a Ray of its own
def test_two_actors_follow_the_trainer(folder: Path) -> None:
    """One round, verified by both."""
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": place}
        output = printed(folder, "ray_trainer.py", **quiet)
    assert "committed version 1 (from 0)" in output
    assert "verified by 2 of 2 workers" in output
