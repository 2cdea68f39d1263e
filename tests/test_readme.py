"""The README's examples run as they stand, and what it refers to exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

README = Path(__file__).parents[1] / "README.md"


def ran(example: str, folder: Path, max_lines: int) -> str:
    """Run an example of the README in a process of its own, from another folder, with warnings as errors."""
    match = re.search(rf"<!-- {example}:begin -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    assert len([line for line in match[1].splitlines() if line.strip()]) <= max_lines
    (folder / "example.py").write_text(match[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_and_prints_a_verified_round(tmp_path: Path) -> None:
    """The fifteen lines."""
    output = ran("example", tmp_path, 16)
    assert "committed version 1 (from 0)" in output
    assert "verified by 1 of 1 workers" in output


def test_the_example_with_a_store_leaves_its_versions(tmp_path: Path) -> None:
    """Two versions, and the newest as a checkpoint that the stock library reads."""
    assert ran("store-example", tmp_path, 17).startswith("[1, 0] xxh3_128:")
    (weights,) = (tmp_path / "version-1").glob("*.safetensors")
    assert set(load_file(weights)) == {"bias", "weight"}


def test_links_lead_somewhere() -> None:
    """Every relative link of README and docs names a file that is there."""
    for page in [README, *(README.parent / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
