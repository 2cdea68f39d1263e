"""`deltacast bench`: measurements that anybody can repeat."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from deltacast.commands.bench_store import store
from deltacast.commands.bench_sync import sync
from deltacast.commands.console import print_json, print_table
from deltacast.commands.options import Json

__all__ = ["app"]

Row = TypeVar("Row")

Presets = Annotated[
    list[float] | None,
    typer.Option("--preset", min=0, max=100, help="Percent of words that change; may be given again and again."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Times are the median of so many runs.")]

app: Final = typer.Typer(
    help="Measure codec, diff, store and whole rounds on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
app.command()(sync)
app.command()(store)


@app.command()
def codec(
    *,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A recorded trace; then nothing is generated unless asked for.")
    ] = None,
    preset: Presets = None,
    chain: Annotated[
        list[int] | None, typer.Option(min=1, help="Updates to fold into one; may be given again and again.")
    ] = None,
    elements: Annotated[int, typer.Option(min=1 << 14, help="Elements of the generated model.")] = 1 << 24,
    repeats: Repeats = 5,
    threads: Annotated[int, typer.Option(min=1, help="For encoding and decoding.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure the codec against entropy floors, dense XOR + zstd, and copying memory in the same run.

    Bits are per changed word, GB/s are bytes of all weights.
    """
    from deltacast.bench.codec import CHAINS, PRESETS, bench_codec

    generate = trace is None and preset is None and chain is None
    rows = _reported(
        bench_codec(
            trace, presets=PRESETS if generate else preset or (), chains=CHAINS if generate else chain or (),
            num_elements=elements, repeats=repeats, threads=threads,
        )
    )  # fmt: skip
    if as_json:
        print_json(rows)
        return
    columns = (
        "source", "changes ", "encoding ", "changed", "bits", "floor", "floor|exp", "XOR+zstd", "smaller",
        "encode GB/s", "apply GB/s", "verified GB/s", "memcpy GB/s",
    )  # fmt: skip
    print_table(columns, [_codec_row(row) for row in rows], title=f"codec, threads: {threads}, median of {repeats}")


def _codec_row(row: dict[str, Any]) -> tuple[object, ...]:
    case = f"version {row['version']}" if "version" in row else row["preset"]
    return (
        row["source"], case, row["encoding"], f"{row['density']:.3%}", f"{row['bits_per_change']:.2f}",
        f"{row['floor_bits']:.2f}", f"{row['floor_bits_given_exponent']:.2f}", f"{row['xor_zstd_bits']:.2f}",
        f"{row['times_smaller']:.1f}x", f"{row['encode_gbps']:.2f}", f"{row['decode_apply_gbps']:.2f}",
        f"{row['verified_apply_gbps']:.2f}", f"{row['memcpy_gbps']:.2f}",
    )  # fmt: skip


@app.command()
def diff(
    *,
    preset: Presets = None,
    elements: Annotated[int, typer.Option(min=1, help="bf16 elements of each side.")] = 1 << 26,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Measure how fast two states are compared, against copying memory in the same run.

    GB/s are bytes of one side, on one thread.
    """
    from deltacast.bench.diff import DENSITIES, bench_diff

    densities = DENSITIES if preset is None else [percent / 100 for percent in preset]
    measured = _reported(bench_diff(num_elements=elements, densities=densities, repeats=repeats))
    rows = [asdict(row) for row in measured]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("density", "changed", "compare GB/s", "diff GB/s", "memcpy GB/s", "diff / memcpy"),
        [
            (
                f"{row['density']:.2%}", f"{row['num_changed']:,}", f"{row['compare_gbps']:.2f}",
                f"{row['diff_gbps']:.2f}", f"{row['memcpy_gbps']:.2f}", f"{row['diff_gbps'] / row['memcpy_gbps']:.2f}",
            )
            for row in rows
        ],
        title=f"diff of {elements:,} bf16 elements, one thread, median of {repeats}",
    )  # fmt: skip


def _reported(rows: Iterable[Row]) -> list[Row]:
    """Collect rows, counting them on stderr as they come if that is a terminal."""

    def counted() -> Iterator[Row]:
        for number, row in enumerate(rows, start=1):
            sys.stderr.write(f"\r{number} measured ")
            sys.stderr.flush()
            yield row
        sys.stderr.write("\r\x1b[K")

    return list(counted() if sys.stderr.isatty() else rows)
