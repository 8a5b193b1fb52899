"""The picture of a run: what was logged, and where the time went."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.config import load_config
from atoll.core.errors import AtollError, UserError
from atoll.core.units import format_bytes, format_seconds
from atoll.observe.metrics import Line, read_lines
from atoll.observe.recorder import Recorder
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import Summary, read_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKING, WAITING, LOGGED, SMOOTH = "#2a9d8f", "#e9b44c", "#9fb8c8", "#14506b"
_MOST_PANELS = 3  # logged values that get a panel each: the first logged
_BINS = 120  # of the time axis, at most


def draw(run: RunDirectory) -> Path:
    """Draw report.png from summary.json and metrics.jsonl; returns its path.

    Raises ModuleNotFoundError where matplotlib is missing, and UserError for a directory without a summary.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    summary, lines = read_summary(run.summary), read_lines(run.metrics)
    names = _names(lines)[:_MOST_PANELS]
    workers = len(summary.each_worker)
    heights = [2.6] * len(names) + [1.9, 0.7 + 0.32 * workers]
    figure = Figure(
        figsize=(9, sum(heights) + 0.8), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    )
    FigureCanvasAgg(figure)
    figure.suptitle(_title(run, summary), x=0.015, ha="left", fontsize=11, parse_math=False)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=False):
        _draw_values(panel, name, lines)
        panel.sharex(panels[-2])
        panel.tick_params(labelbottom=False)
    _draw_steps(panels[-2], lines)
    _draw_workers(panels[-1], summary)
    figure.savefig(run.picture)
    return run.picture


def redraw(run: RunDirectory) -> Path:
    """Draw the picture of a finished run again. A run that was killed gets its metrics and summary first.

    Raises UserError when the directory holds no run, or where matplotlib is missing.
    """
    if not run.summary.exists():
        journals = run.journals()
        if not journals:
            raise UserError(f"{run.path}: holds no run: neither summary.json nor workers/*.jsonl is there")
        Recorder(run, max(journals) + 1, _strategy(run)).close()
    try:
        return draw(run)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: the picture needs the extra: pip install 'atoll[report]'") from None


def _strategy(run: RunDirectory) -> str:
    try:
        return load_config(run.config, environment={}).run.strategy
    except AtollError:  # no configuration there, or one of another version: the journals say it too
        return ""


def _names(lines: list[Line]) -> list[str]:
    """The logged names: those logged most often first, each kind in the order of its first coming."""
    counts: dict[str, int] = {}
    for line in lines:
        for name in line.values:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])


def _title(run: RunDirectory, summary: Summary) -> str:
    workers = "1 worker" if summary.workers == 1 else f"{summary.workers} workers"
    facts = [
        f"{run.path.name}: {workers} ({summary.strategy})",
        f"{summary.steps:,} steps in {format_seconds(summary.seconds)}",
        f"{summary.samples_per_second:,.4g} samples/s",
    ]
    if summary.workers > 1:
        facts.append(f"{format_bytes(summary.bytes_sent)} sent")
    return "   ·   ".join(facts)


def plain(panel: Axes) -> None:
    """Only what is needed round the data."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)


def _draw_values(panel: Axes, name: str, lines: list[Line]) -> None:
    """A logged value over the iterations: each one, and their running mean."""
    points = [(line.iteration, value) for line in lines if (value := line.values.get(name)) is not None]
    steps, values = [step for step, _ in points], [value for _, value in points]
    few = len(points) <= 30
    if few:
        panel.plot(steps, values, color=SMOOTH, linewidth=1.5, marker="o", markersize=4)
    else:
        panel.plot(steps, values, color=LOGGED, linewidth=0.9)
        panel.plot(steps, running_mean(values), color=SMOOTH, linewidth=1.8)
    plain(panel)
    panel.set_ylabel(name, parse_math=False)
    if values:
        panel.annotate(
            f"{values[-1]:.4g}",
            (steps[-1], values[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=SMOOTH,
        )


def running_mean(values: list[float]) -> list[float]:
    """The mean over about a thirtieth of the run round each point; the window shrinks towards the ends, so
    that the mean lags nowhere."""
    sums = [0.0, *itertools.accumulate(values)]
    last, half = len(values) - 1, max(2, len(values) // 60)
    smooth = []
    for place in range(len(values)):
        reach = min(half, place, last - place)
        smooth.append((sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1))
    return smooth


def _draw_steps(panel: Axes, lines: list[Line]) -> None:
    """Milliseconds a step, stacked: own work and waiting, in bins of iterations."""
    timed = [line for line in lines if line.seconds > 0]
    size = max(1, -(-len(timed) // _BINS))
    bins = [timed[start : start + size] for start in range(0, len(timed), size)]
    steps = [part[len(part) // 2].iteration for part in bins]
    waiting = [1000 * sum(line.waiting for line in part) / len(part) for part in bins]
    whole = [1000 * sum(line.seconds for line in part) / len(part) for part in bins]
    working = [max(0.0, total - wait) for total, wait in zip(whole, waiting, strict=True)]
    panel.stackplot(
        steps, working, waiting, colors=[WORKING, WAITING], labels=["working", "waiting for others"]
    )
    plain(panel)
    panel.set_ylabel("ms a step")
    panel.set_xlabel("iteration")
    if whole:
        panel.set_ylim(
            0, 1.15 * sorted(whole)[int(0.98 * (len(whole) - 1))]
        )  # one long first step hides no other
        panel.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, fontsize=9, frameon=False)


def _draw_workers(panel: Axes, summary: Summary) -> None:
    """Each worker's time, as one bar."""
    names = [f"worker {totals.worker}" for totals in summary.each_worker]
    working = [max(0.0, totals.seconds - totals.waiting) for totals in summary.each_worker]
    waiting = [totals.waiting for totals in summary.each_worker]
    panel.barh(names, working, color=WORKING, height=0.6)
    panel.barh(names, waiting, left=working, color=WAITING, height=0.6)
    for row, totals in enumerate(summary.each_worker):
        share = totals.waiting / totals.seconds if totals.seconds > 0 else 0.0
        panel.annotate(
            f"{share:.0%} waiting",
            (totals.seconds, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    panel.invert_yaxis()
    panel.margins(x=0.14)
    plain(panel)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("seconds in steps")
