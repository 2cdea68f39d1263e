"""What commands print: tables and facts for people, one JSON document for programs, progress on stderr.

Names come from files, so everything that is printed for people goes through `printable` first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

__all__ = ["human_bytes", "print_facts", "print_json", "print_table", "printable", "progress"]

_WIDTH_OF_FILES: Final = 180


def printable(text: object) -> str:
    """Return a text on one line, with everything escaped that could steer a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text))


def human_bytes(size: float) -> str:
    """Write a number of bytes with a binary unit: `1.50 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def print_json(document: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Print the one JSON document of a command; ASCII, so that no locale can spoil it."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def print_facts(facts: Mapping[str, object]) -> None:
    """Print labels and values in two columns; None is left out."""
    shown = {label: value for label, value in facts.items() if value is not None}
    width = max(map(len, shown), default=0)
    for label, value in shown.items():
        typer.echo(f"{label:<{width}}  {printable(value)}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """Print a table; the first column is flush left, and so is every column whose name ends in a space."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES, highlight=False, soft_wrap=False)
    table = Table(box=box.SIMPLE, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        left = number == 0 or column.endswith(" ")
        table.add_column(Text(column.rstrip()), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    with console.capture() as captured:  # rich itself would answer a closed stdout with exit code 1
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def progress(label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr while a long command runs, if stderr is a terminal.

    Yields:
        What to call with the number of bytes that were done since the last call.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total_bytes)
        yield lambda num_bytes: bars.advance(task, num_bytes)
