"""`deltacast bench sync`: how fast workers get the trainer's weights, next to the other ways, in one run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from deltacast.commands.console import print_json, print_table
from deltacast.commands.options import DEFAULT_THREADS, Force, Json, refuse_existing
from deltacast.delta.errors import DeltacastError, InputError

if TYPE_CHECKING:
    from deltacast.bench.sync_rows import Facts, SyncOptions, SyncRow, Wire
    from deltacast.engines.base import AuditPolicy

__all__ = ["sync"]

_STAGES: Final = ("diff", "encode", "send", "apply", "audit", "commit")
_COLUMNS: Final = (
    "times in ms", "wall", "min .. max", *_STAGES, "sent", "x dense", "bound", "of bound", "trainer +", "worker +"
)  # fmt: skip


World = Annotated[int, typer.Option(min=2, max=64, help="Ranks: one trainer, the others workers.")]
Model = Annotated[
    str, typer.Option(metavar="MODEL", help="qwen2.5-7b, qwen3-30b-a3b, or a safetensors file or folder.")
]
Densities = Annotated[
    list[float] | None, typer.Option(help="Percent of words that change; may be given again and again.  [default: 1]")
]
Wires = Annotated[
    list[str] | None, typer.Option(metavar="raw|coded", help="Of ours; may be given twice.  [default: both]")
]
Audit = Annotated[str, typer.Option(metavar="N|full", help="Workers rescan 1/N of their weights in each round.")]
Placed = Annotated[
    str, typer.Option(metavar="device|cpu|pinned|mmap", help="Where the trainer's baseline lies, for our wires.")
]
Links = Annotated[
    list[float] | None,
    typer.Option(
        help="Gbit/s of a link to simulate after the machine's own; may be given again and again.  "
        "[default: 100, 25, 10, 1]"
    ),
]
Scale = Annotated[float, typer.Option(help="Share of the model's elements to keep, for CPUs.")]
Repeats = Annotated[int, typer.Option(min=1, help="Times are the median of so many rounds.")]
HostThreads = Annotated[
    int | None, typer.Option(min=1, help="Of each rank, on the host.  [default: the cores, shared]")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a PNG; needs matplotlib.")]


def sync(
    *,
    world: World = 2,
    model_shapes: Model = "qwen2.5-7b",
    density: Densities = None,
    wire: Wires = None,
    audit: Audit = "16",
    placement: Placed = "device",
    link: Links = None,
    scale: Scale = 1.0,
    repeats: Repeats = 3,
    threads: HostThreads = None,
    plot: Plot = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure whole rounds against dense broadcasts, the common sparse wire, and what the hardware allows.

    Starts its own ranks: over NCCL where there are as many GPUs, else over Gloo on this CPU. All ways work on the
    same weights in the same run, and after each the workers' bits are compared with the trainer's. Slower links are
    simulated by pacing the sender.
    """
    from deltacast.bench.sync import document
    from deltacast.bench.sync_rows import LINKS_GBITS, SyncOptions

    if plot is not None:
        refuse_existing(plot, force=force)
        if find_spec("matplotlib") is None:
            raise InputError("a plot needs matplotlib", hint="pip install 'deltacast[plot]'")
    options = SyncOptions(
        world=world,
        model=model_shapes,
        scale=scale,
        percents=tuple(density or (1.0,)),
        wires=cast("tuple[Wire, ...]", tuple(wire or ("raw", "coded"))),  # checked there, as is the audit
        audit=cast("AuditPolicy", int(audit) if audit.isdecimal() else audit),
        placement=placement,
        links_gbits=tuple(link or LINKS_GBITS),
        repeats=repeats,
        threads=threads or max(1, DEFAULT_THREADS // world),
    )
    facts, rows = _measured(options)
    if plot is not None:
        from deltacast.bench.sync_plot import plot_sync

        plot_sync(plot, options, facts, rows)
    if as_json:
        print_json(document(options, facts, rows, ["deltacast", *sys.argv[1:]]))
    else:
        _print(options, facts, rows)


def _measured(options: SyncOptions) -> tuple[Facts, list[SyncRow]]:
    """Run it, saying on stderr what is going on if that is a terminal, and a failed rank's traceback in any case."""
    from deltacast.bench.sync import bench_sync

    shown = sys.stderr.isatty()
    said: list[Any] = []
    try:
        for item in bench_sync(options):
            if not isinstance(item, str):
                said.append(item)
            elif shown:
                sys.stderr.write(f"\r\x1b[K{item}")
                sys.stderr.flush()
    except DeltacastError as err:
        sys.stderr.writelines(f"{note}\n" for note in getattr(err, "__notes__", ()))
        raise
    finally:
        sys.stderr.write("\r\x1b[K" if shown else "")
    facts, *rows = said
    return facts, rows


def _print(options: SyncOptions, facts: Facts, rows: Sequence[SyncRow]) -> None:
    from deltacast.bench.sync import dense_of, notes

    for line in notes(options, facts):
        typer.echo(line)
    for percent in options.percents:
        for link in (None, *options.links_gbits):
            mine = [row for row in rows if (row.link_gbits, row.percent) == (link, percent)]
            cells = [_cells(row, dense_of(row, rows)) for row in mine]
            print_table(_COLUMNS, cells, title=f"{percent:g} % changed, {facts.link_name(link)}")


def _cells(row: SyncRow, dense: SyncRow) -> tuple[object, ...]:
    stages = (f"{row.stages_s[name] * 1e3:.2f}" if name in row.stages_s else "" for name in _STAGES)
    return (
        row.label, _ms(row.median_s), row.timing if row.timing == "computed" else
        f"{_ms(min(row.wall_s))} .. {_ms(max(row.wall_s))}", *stages, _short(row.sent_bytes),
        f"{dense.median_s / row.median_s:.2f}", _ms(row.bound_s), f"{row.bound_s / row.median_s:.0%}",
        _memory(row.trainer_extra_bytes, row.trainer_buffer_bytes),
        _memory(row.worker_extra_bytes, row.worker_buffer_bytes),
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _memory(extra: int | None, bound: int | None) -> str:
    return ("?" if extra is None else _short(extra)) + (f" of {_short(bound)}" if bound else "")


def _short(num_bytes: int) -> str:
    """Write a number of bytes in few characters, so that the table keeps to its lines."""
    size, unit = next((s, u) for s, u in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")) if num_bytes >= s or u == "K")
    return f"{num_bytes / size:.1f}{unit}"
