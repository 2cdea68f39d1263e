"""The command line as a process: help, exit codes, errors, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import deltacast
from deltacast.cli import app
from deltacast.commands.failures import exit_code
from deltacast.delta import errors

COMMAND = [sys.executable, "-P", "-m", "deltacast"]


def _run(*args: object, **options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, args)]
    environment = os.environ | options
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_help_imports_neither_torch_nor_numpy() -> None:
    """Building the app and showing its help stays fast."""
    code = """
import sys
from deltacast.cli import app
for args in (["--help"], ["diff", "--help"], ["bench", "--help"]):
    try:
        app(args)
    except SystemExit as end:
        assert end.code == 0, end.code
print(sorted({"torch", "numpy", "rich", "safetensors", "zstandard"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    for command in ("digest", "verify", "diff", "apply", "fold", "inspect", "bench", "Exit codes:"):
        assert command in done.stdout


def test_the_process_answers_with_json_and_its_exit_code(base: Path, new: Path, tmp_path: Path) -> None:
    """1 mismatch, 2 usage, 3 bad data; stdout is one document each time, stderr empty."""
    (tmp_path / "damaged").write_bytes(base.read_bytes()[:-1])
    cases = {1: ("verify", base, new), 2: ("verify", base), 3: ("digest", tmp_path / "damaged")}
    for code, args in cases.items():
        done = _run(*args, "--json")
        assert (done.returncode, done.stderr) == (code, ""), done
        document = json.loads(done.stdout)
        assert ("error" in document) == (code > 1)


def test_an_error_is_one_line_on_stderr(base: Path, new: Path, tmp_path: Path, update: Path) -> None:
    """What, where, expected, found, and what to do; nothing on stdout."""
    done = _run("apply", update, new, "-o", tmp_path / "out.safetensors")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("deltacast: error: the checkpoint is at the update's target already (version 1): exp")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_quietly_with_130(update: Path, tmp_path: Path) -> None:
    """The process hangs in a read when the signal comes: opening a FIFO for writing waits for its reader."""
    fifo = tmp_path / "key"
    os.mkfifo(fifo)
    command = [*COMMAND, "inspect", str(update), "--signing-key", str(fifo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process, fifo.open("wb"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("args", [["--parameters"], ["--parameters", "--json"]])
def test_a_closed_stdout_ends_quietly(base: Path, args: list[str]) -> None:
    """As with `deltacast digest CKPT --parameters | head -1`: no traceback, and not the code of a mismatch."""
    command = [*COMMAND, "digest", str(base), *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, alone."""
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{deltacast.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InputError("x"), 2),
        (errors.DTypeError("x"), 2),
        (errors.PatchError("x"), 2),
        (errors.FormatError("x"), 3),
        (errors.ChecksumError("x"), 3),
        (errors.BaseError("x"), 1),
        (errors.CorruptionError("x"), 1),
        (errors.VerificationError("x"), 1),
        (errors.RoundAbortedError("x"), 1),
        (errors.ProtocolError("x"), 4),
        (errors.DeadlineError("x"), 4),
        (errors.AuthenticationError("x"), 4),
        (ConnectionRefusedError(), 4),
        (TimeoutError(), 4),
        (FileNotFoundError(), 2),
        (PermissionError(), 2),
        (typer.BadParameter("x"), 2),
        (typer.Abort(), 130),
        (ZeroDivisionError(), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_each_error_has_its_exit_code(error: Exception, code: int) -> None:
    """As `deltacast --help` says."""
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digest"], "Missing argument"),
        (["digest", "--wrong", "x"], "--wrong"),
        (["digets", "x"], "digest"),
        (["diff", "a", "b"], "-o"),
        (["diff", "a", "b", "-o", "c", "--values", "xor"], "xor"),
        (["digest", "x", "--threads", "0"], "--threads"),
    ],
)
def test_usage_errors_exit_2_in_both_forms(args: list[str], words: str) -> None:
    """Also those that the parser finds."""
    plain = CliRunner().invoke(app, args)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert words in plain.stderr
    assert plain.stderr.count("\n") == 1
    document = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert document["error"]["exit_code"] == 2
    assert words in document["error"]["message"]


def test_a_bug_is_one_line_with_a_way_to_the_traceback(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 70; the traceback only if it is asked for."""
    monkeypatch.setattr("deltacast.delta.checkpoint_digest.digest_checkpoint", lambda *_, **__: 1 / 0)
    done = CliRunner().invoke(app, ["digest", str(base)])
    assert done.exit_code == 70
    assert done.stderr == (
        "deltacast: error: internal: ZeroDivisionError: division by zero (DELTACAST_TRACEBACK=1 shows where)\n"
    )
    monkeypatch.setenv("DELTACAST_TRACEBACK", "1")
    assert "Traceback" in CliRunner().invoke(app, ["digest", str(base)]).stderr
