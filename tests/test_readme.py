"""The README's example runs as it stands, and what it refers to exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_prints_a_verified_round(tmp_path: Path) -> None:
    """In a process of its own, from another folder, with warnings as errors."""
    text = README.read_text()
    match = re.search(r"<!-- example:begin -->\n```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    example = match[1]
    assert len([line for line in example.splitlines() if line.strip()]) <= 16
    script = tmp_path / "example.py"
    script.write_text(example)
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "committed version 1 (from 0)" in ran.stdout
    assert "verified by 1 of 1 workers" in ran.stdout


def test_links_lead_somewhere() -> None:
    """Every relative link of README and docs names a file that is there."""
    for page in [README, *(README.parent / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
