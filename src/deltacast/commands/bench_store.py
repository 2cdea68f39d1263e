"""`deltacast bench store`: what publishing and catching up cost as the chain of versions grows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from deltacast.commands.console import human_bytes, print_json, print_table, progress
from deltacast.commands.options import Json

if TYPE_CHECKING:
    from deltacast.bench.store import StoreRow

__all__ = ["store"]


def store(
    *,
    chain: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Updates; may be given again and again.  [default: 1, 10, 100, 1000]"),
    ] = None,
    elements: Annotated[int, typer.Option(min=1 << 14, help="Elements of the generated model.")] = 1 << 22,
    percent: Annotated[float, typer.Option(min=0, max=100, help="Of the words, changed per update.")] = 1.0,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="On the disk to measure.", show_default="temporary")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Catching up is the median of so many runs.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="For encoding and decoding.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure a store in a folder: one more version, and from the first to the newest, folded and replayed.

    Each publish is durable, and stands next to a plain file of the same bytes that is written and synced. Catching up
    is proven by digest. What is written is removed at the end.
    """
    from deltacast.bench.store import CHAINS, bench_store

    chains = sorted(set(chain or CHAINS))
    with (
        TemporaryDirectory(prefix="deltacast-bench-", dir=folder) as scratch,
        progress("bench store", 2 * elements * chains[-1]) as done,
    ):
        measured = bench_store(
            Path(scratch), chains=chains, num_elements=elements, percent=percent, repeats=repeats, threads=threads,
            progress=done,
        )  # fmt: skip
        rows = list(measured)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _print(rows, f"{human_bytes(rows[0].weights_bytes)} of weights, {percent:g} % changed per update, times in ms")


def _print(rows: list[StoreRow], title: str) -> None:
    columns = (
        "updates", "update", "publish", "+ folds", "plain write", "folded: objects", "bytes", "catch up",
        "replayed: bytes", "catch up", "smaller than dense",
    )  # fmt: skip
    print_table(columns, [_cells(row) for row in rows], title=title)


def _cells(row: StoreRow) -> tuple[object, ...]:
    return (
        f"{row.num_updates:,}", human_bytes(row.update_bytes), _ms(row.publish_s), _ms(row.fold_s), _ms(row.write_s),
        row.folded_objects, human_bytes(row.folded_bytes), _ms(row.folded_s), human_bytes(row.replayed_bytes),
        _ms(row.replayed_s), f"{row.weights_bytes / row.folded_bytes:.1f}x" if row.folded_bytes else "",
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
