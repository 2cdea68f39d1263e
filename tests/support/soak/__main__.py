"""`python -m soak --rounds N --seed S`: a line per event, a summary as JSON last; exit code 1 if anything is wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from soak.driver import Soak


def main() -> int:
    """Run one soak as the command line says."""
    parser = argparse.ArgumentParser(
        prog="soak", description="Rounds under random kills, stops, joins and corruptions."
    )
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deltacast-soak-") as folder:
        summary = Soak(chosen.rounds, chosen.seed, Path(folder), _write).run()
    _write(summary.line())
    return 0 if summary.equal else 1


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
