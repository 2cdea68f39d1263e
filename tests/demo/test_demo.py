"""`deltacast demo` as a person runs it: in processes of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(150)
DEMO = [sys.executable, "-m", "deltacast", "demo"]


def test_every_step_is_verified_and_the_files_are_the_same_bits() -> None:
    """The JSON document says it of each step, each worker and each dumped file; two runs of one seed agree."""
    command = [*DEMO, "--steps", "2", "--json"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"]
    first, second = (_document(run) for run in runs)
    assert [step["round"]["num_verified"] for step in first["steps"]] == [2, 2]
    assert [step["round"]["target_version"] for step in first["steps"]] == [1, 2]
    assert first["verify_exit_codes"] == {"worker-0": 0, "worker-1": 0}
    assert first["steps"][-1]["round"]["workers"][0]["digest"] == first["digest"]
    assert all(0 < step["round"]["density"] < 0.05 for step in first["steps"])
    assert all(step["round"]["times_smaller"] > 30 for step in first["steps"])
    assert (first["digest"], [step["reward"] for step in first["steps"]]) == (
        second["digest"],
        [step["reward"] for step in second["steps"]],
    )


def _document(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=140)
    assert process.returncode == 0, errors
    document: dict[str, Any] = json.loads(out)
    return document


def test_ctrl_c_leaves_no_process() -> None:
    """SIGINT to the whole foreground group, as a terminal sends it, once the workers are up."""
    process = subprocess.Popen(
        [*DEMO, "--steps", "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if "every worker holds" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    errors = process.stderr.read()  # ends when every process that holds the pipe has ended
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 130
    assert "Traceback" not in errors
    for member in _members(process.pid):
        assert select.select([os.pidfd_open(member)], [], [], 20)[0], f"process {member} goes on"


def _members(group: int) -> list[int]:
    """Return the processes of a process group, without the dead that nobody has reaped yet."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(entry.name))
    return found


def test_a_folder_that_is_no_model_is_one_clear_line(tmp_path: Path) -> None:
    """No traceback, no worker left waiting."""
    ran = subprocess.run([*DEMO, "--model", str(tmp_path)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert str(tmp_path) in ran.stderr
