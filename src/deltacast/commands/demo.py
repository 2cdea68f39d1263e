"""`deltacast demo`: a trainer and its workers in separate processes on this machine, every step verified."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deltacast.commands.console import human_bytes, print_json
from deltacast.commands.options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from deltacast.demo.run import DemoResult, StepRow

__all__ = ["demo"]

_BAR: Final = 8


def demo(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Inference worker processes.")] = 2,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A Hugging Face causal LM to train instead; needs transformers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For weights, prompts and samples.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a small policy by GRPO while two workers follow it bit by bit, sampling from the weights they hold.

    Everything runs on this machine's CPU, in separate processes, over Gloo. Each step publishes only what changed in
    the bf16 weights; a step counts once every worker's digest equals the trainer's. At the end the workers dump what
    they hold, and `deltacast verify` compares the files.
    """
    from deltacast.demo.run import DemoOptions, DemoResult, run_demo

    result = DemoResult()
    items = run_demo(DemoOptions(steps, workers, seed, model), result)
    if as_json:
        for _ in items:
            pass
        print_json(_document(result))
    else:
        _show(items, result)
    if any(result.verified.values()):
        raise typer.Exit(1)


def _show(items: Any, result: DemoResult) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    started = False
    table = _table()
    live = Live(table, console=console, auto_refresh=False, vertical_overflow="visible")
    try:
        for item in items:
            if isinstance(item, str):
                console.print(f"[dim]{item}[/dim]")
                continue
            if not started:
                started = True
                console.print()
                live.start()
            table.add_row(*_cells(item))
            live.refresh()
    finally:
        if started:
            live.stop()
    _summary(console, result)


def _table() -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold underline", caption="times in ms")
    table.caption_justify = "left"
    table.add_column("step", justify="right")
    table.add_column("reward", justify="left", min_width=5 + _BAR)
    for column in ("changed", "dense", "sent", "smaller", "diff", "encode", "send", "apply", "verified"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(row: StepRow) -> tuple[str, ...]:
    report, times = row.report, row.report.times
    stages = (times.diff_s, times.encode_s, times.send_s, times.apply_s)
    good = report.num_verified == len(report.workers)
    colour = "green" if good else "red"
    return (
        str(row.step),
        f"{row.reward:.2f} [cyan]{'█' * round(row.reward * _BAR)}[/cyan]",
        f"{report.density:.2%}",
        _short(report.dense_bytes),
        _short(report.sent_bytes),
        f"{report.times_smaller:.0f}x",
        *(f"{seconds * 1e3:.1f}" for seconds in stages),
        f"[{colour}]{report.num_verified} of {len(report.workers)}[/{colour}]",
    )


def _short(num_bytes: int) -> str:
    """Write a number of bytes in few characters, so that the table fits 80 columns."""
    return f"{num_bytes / (1 << 20):.1f}M" if num_bytes >= 1 << 20 else f"{num_bytes / (1 << 10):.1f}K"


def _summary(console: Any, result: DemoResult) -> None:
    dense = result.dense_bytes * len(result.rows)
    console.print(
        f"\nreward {result.first_reward:.2f} -> {result.final_reward:.2f} in {len(result.rows)} steps, on "
        f"{result.num_judged} completions that the workers sampled before and after"
    )
    console.print(
        f"sent {human_bytes(result.sent_bytes)} instead of {human_bytes(dense)}, {dense / result.sent_bytes:.0f} times "
        f"smaller; the policy has {result.num_weights:,} weights in {result.num_parameters} tensors"
    )
    for name, code in result.verified.items():
        verdict = "[green]the same bits[/green]" if code == 0 else f"[red]DIFFERS (exit {code})[/red]"
        console.print(f"deltacast verify trainer.safetensors {name}.safetensors: {verdict}")
    console.print(f"state digest {result.digest}")


def _document(result: DemoResult) -> dict[str, Any]:
    return {
        "steps": [
            {"step": row.step, "reward": row.reward, "step_s": row.step_s, "round": row.report.as_dict()}
            for row in result.rows
        ],
        "first_reward": result.first_reward,
        "final_reward": result.final_reward,
        "num_parameters": result.num_parameters,
        "num_weights": result.num_weights,
        "dense_bytes": result.dense_bytes,
        "sent_bytes": result.sent_bytes,
        "verify_exit_codes": result.verified,
        "digest": result.digest,
    }
