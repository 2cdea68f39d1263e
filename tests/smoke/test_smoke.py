"""Whether an installed deltacast works at all: needs pytest and nothing else of this checkout.

`.ci/run` copies this folder away and runs it against the built wheel, with DELTACAST_SMOKE_OUTSIDE=1.
"""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import deltacast

BITS = [0x3F80, 0x8000, 0x7FC1, 0x0001]  # one, minus zero, a NaN with a payload, the least subnormal
DIGEST = "xxh3_128:587acbd55770b0cda405a97bd9d61c95"  # of the naive twin, for layer.weight, bfloat16, [2, 2]


def bf16(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(2, 2)


def bits_of(tensor: torch.Tensor) -> list[int]:
    return [word & 0xFFFF for word in tensor.flatten().view(torch.int16).tolist()]


@pytest.mark.skipif(os.environ.get("DELTACAST_SMOKE_OUTSIDE") != "1", reason="this may be the checkout's own run")
def test_it_is_the_installed_package_that_is_tested() -> None:
    """A run against a wheel must not import the checkout by accident."""
    assert Path(deltacast.__file__).is_relative_to(sysconfig.get_path("purelib"))


def test_the_version_is_the_distributions() -> None:
    """`deltacast.__version__` and the installed metadata agree."""
    assert deltacast.__version__ == importlib.metadata.version("deltacast")


@pytest.mark.parametrize("package", ["delta", "delta.codec", "store", "engines", "commands", "bench", "demo"])
def test_each_package_can_be_imported(package: str) -> None:
    """All folders made it into the distribution."""
    importlib.import_module(f"deltacast.{package}")


def test_every_public_name_can_be_had() -> None:
    """The lazy names of the facade lead somewhere."""
    for name in deltacast.__all__:
        assert getattr(deltacast, name) is not None


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]], ids=" ".join)
@pytest.mark.parametrize("start", ["script", "module"])
def test_the_command_answers(start: str, arguments: list[str]) -> None:
    """`deltacast` and `python -m deltacast` print their help."""
    script = [str(Path(sysconfig.get_path("scripts")) / "deltacast")]
    command = script if start == "script" else [sys.executable, "-P", "-m", "deltacast"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_the_digest_is_the_published_one() -> None:
    """Bits, names and shapes hash to the value that every release must give."""
    assert deltacast.WeightState({"layer.weight": bf16(BITS)}, version=1).digest == DIGEST


def test_an_update_carries_a_worker_to_the_trainers_bits() -> None:
    """Diff, encode, decode, apply: the worker ends with the trainer's bits and digest, in the memory it had."""
    trained = bf16([0x3F81, 0x0000, 0x7FC1, 0x0001])
    served = bf16(BITS)
    address = served.data_ptr()
    worker = deltacast.WeightState({"layer.weight": served}, version=1)
    baseline = deltacast.WeightState({"layer.weight": bf16(BITS)}, version=1)
    new = zip(baseline.table, [trained], strict=True)

    sent = deltacast.encode_update(deltacast.diff_state(baseline, new, run_id="smoke"))
    deltacast.apply_update(worker, deltacast.decode_update(sent))

    assert bits_of(served) == [0x3F81, 0x0000, 0x7FC1, 0x0001]
    assert served.data_ptr() == address
    assert worker.version == 2
    assert worker.digest == deltacast.WeightState({"layer.weight": trained}, version=2).digest
    assert worker.audit() == []
