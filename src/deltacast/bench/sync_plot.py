"""The picture of a `bench sync` run: bars by link, on a log scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from deltacast.bench.sync import dense_of
from deltacast.bench.sync_rows import Facts, SyncOptions, SyncRow

__all__ = ["plot_sync"]

_NAMES: Final = {
    "dense": "dense broadcast + copy",
    "peer": "index + value per parameter, not verified",
    "raw": "deltacast raw, verified",
    "coded": "deltacast coded, verified",
}
_COLOURS: Final = {"dense": "#9aa0a6", "peer": "#e8a33d", "raw": "#2f6fde", "coded": "#1b9e77"}
_TEXT: Final = "#202124"
_BAR: Final = 0.8  # of the distance between bars
_GAP: Final = 0.9  # between links, in bars


def plot_sync(path: Path, options: SyncOptions, facts: Facts, rows: Sequence[SyncRow]) -> None:
    """Draw wall times of whole rounds and write a PNG.

    One panel per density; per link, from the machine's own to the slowest, one bar per way. Full audits are left out
    where rolling ones are shown.

    Args:
        path: written, and replaced if it is there.
        options: the run's.
        facts: likewise.
        rows: likewise.

    Raises:
        OSError: it cannot be written.
    """
    shown = [row for row in rows if row.audit in (None, options.audit)]
    panels = [[row for row in shown if row.percent == percent] for percent in options.percents]
    num_links = 1 + len(options.links_gbits)
    inches = sum(0.28 * (len(panel) + _GAP * num_links) + 0.9 for panel in panels)
    figure = Figure(figsize=(11, inches + 1.1), layout="constrained", facecolor="white")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    figure.suptitle(_title(options, facts), x=0.01, ha="left", fontsize=12, color=_TEXT, linespacing=1.5)
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel, facts)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, format="png", dpi=150)


def _title(options: SyncOptions, facts: Facts) -> str:
    workers = f"{options.world - 1} worker" + ("s" if options.world > 2 else "")
    what = f"{options.model}" + (f" at scale {options.scale:g}" if options.scale != 1 else "")
    ranks = f"{options.world} x {facts.device_name}" if facts.device == "cuda" else f"CPU ranks on {facts.device_name}"
    return (
        f"Bringing {workers} to the trainer's weights: {what}, {facts.model_bytes / 1e9:.3g} GB in "
        f"{facts.num_tensors:,} tensors\nmilliseconds of a whole round, median of {options.repeats}, next to dense on "
        f"the same link; {ranks}"
    )


def _draw(axis: Axes, rows: Sequence[SyncRow], facts: Facts) -> None:
    """Draw one panel, from the top down."""
    ticks: dict[str, list[float]] = {}
    place, link = 0.0, rows[0].link_gbits
    for row in rows:
        if row.link_gbits != link:
            place, link = place + _GAP, row.link_gbits
        ticks.setdefault(facts.link_name(link).replace(", ", ",\n", 1), []).append(place)
        ms, computed = row.median_s * 1e3, row.timing == "computed"
        axis.barh(place, ms, _BAR, color=_COLOURS[row.method], hatch="////" if computed else None, edgecolor="white",
                  linewidth=0, label=_NAMES[row.method] if row.link_gbits is None else None)  # fmt: skip
        axis.annotate(_remark(row, rows), (ms, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5,
                      color=_TEXT)  # fmt: skip
        place += 1
    axis.set_yticks([sum(places) / len(places) for places in ticks.values()], list(ticks), fontsize=9)
    axis.invert_yaxis()
    _scale(axis, [row.median_s * 1e3 for row in rows])
    axis.set_title(f"{rows[0].percent:g} % of the bf16 words changed", loc="left", fontsize=10, color=_TEXT)


def _scale(axis: Axes, values: Sequence[float]) -> None:
    axis.set_xscale("log")
    low, high = min(values), max(values)
    axis.set_xlim(low / 2, high * (high / low) ** 0.45)  # room for what stands beside the longest bar
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.margins(y=0.02)
    axis.tick_params(axis="y", length=0, colors=_TEXT)
    axis.tick_params(axis="x", labelsize=8, colors=_TEXT)
    axis.grid(axis="x", color="#e8eaed", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _remark(row: SyncRow, rows: Sequence[SyncRow]) -> str:
    said = f"{_figures(row.median_s * 1e3)} ms"
    if row.method == "dense":
        return f"{said} (computed)" if row.timing == "computed" else said
    times = dense_of(row, rows).median_s / row.median_s
    return f"{said}, {_figures(times)} times faster" if times >= 1 else f"{said}, {_figures(1 / times)} times slower"


def _figures(value: float) -> str:
    """Write three significant digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
