"""The examples that come after the first, which test_server.py runs; each asserts its own result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


def output_of(example: str, folder: Path) -> str:
    """Run an example to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_policy_learns_on_what_the_server_samples(tmp_path: Path) -> None:
    """Every step is sent, verified and labelled; the reward rises."""
    said = output_of("vllm_rl_loop.py", tmp_path)
    assert said.count("verified by 1 of 1 workers") == 16


def test_a_killed_server_comes_back_and_catches_up(tmp_path: Path) -> None:
    """It is replayed what it missed beside the other; both then hold the trainer's digest."""
    said = output_of("vllm_multi_replica.py", tmp_path)
    assert said.count("came in: ") == 1
    assert "replay (it holds version 0" in said
    assert said.count("2 servers hold version") == 2


def test_a_server_that_quantises_follows_a_trainer_in_bf16(tmp_path: Path) -> None:
    """Each update is verified; tokens and log-probabilities are those of a fresh server that quantises."""
    said = output_of("vllm_fp8.py", tmp_path)
    assert said.count("verified by 1 of 1 workers") == 3
    assert "by strategy reload" in said
