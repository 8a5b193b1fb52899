"""The picture of a run: logged values, and the use of time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.config import load_config
from atoll.core.errors import AtollError, UserError
from atoll.core.units import format_bytes, format_rate, format_seconds
from atoll.observe.curves import Curve, StepCurve, read_curves
from atoll.observe.groups import STALENESS
from atoll.observe.links import most_lossy
from atoll.observe.nodes import views_of
from atoll.observe.recorder import Recorder
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import GroupTotals, Summary, read_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKING, WAITING, LOGGED, SMOOTH = "#2a9d8f", "#e9b44c", "#9fb8c8", "#14506b"
PHASES = {"ring": "#e07a5f", "exchange": "#7d6b9e"}  # parts of the waiting, if a run has them
_GROUPS = ("#2b6ca3", "#b5651d", "#5a8f4a", "#8a5a9e", "#a33b4f", "#3f8f8f")
_MOST_PANELS = 3  # logged values with a panel
_MOST_GROUPS = 8  # groups with a bar: those with the most time
_MOST_LINKS = 12  # links with a row: those with the most losses
_LINK_COLUMNS = (
    "link", "rate", "delay", "loss", "target", "lost", "repaired", "borne", "filled", "held back",
)  # fmt: skip
_MOST_NODES = 16  # nodes with a row
_NODE_COLUMNS = (
    "node", "stale by", "95 %", "most", "exchange", "waiting", "applied", "rounds", "joined", "refused",
    "fetched", "sent",
)  # fmt: skip


def draw(run: RunDirectory) -> Path:
    """Draw report.png from summary.json and metrics.jsonl; returns its path.

    Raises ModuleNotFoundError if matplotlib is missing, and UserError if the directory has no summary or the
    picture cannot be written; an older picture is then unchanged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    summary = read_summary(run.summary)
    curves = read_curves(run.metrics, _MOST_PANELS, STALENESS if summary.each_group else "")
    names = list(curves.values)
    workers = len(summary.each_worker)
    heights = [2.6] * len(names) + [1.9, 0.7 + 0.32 * workers]
    if summary.each_group:
        heights += [0.7 + 0.32 * workers, 0.7 + 0.32 * len(_largest(summary))]
    if summary.links:
        heights.append(0.4 + 0.22 * len(most_lossy(summary, _MOST_LINKS)))
    if summary.nodes:
        heights.append(0.4 + 0.22 * len(summary.nodes[:_MOST_NODES]))
    figure = Figure(
        figsize=(9, sum(heights) + 0.8), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    )
    FigureCanvasAgg(figure)
    figure.suptitle(_title(run, summary), x=0.015, ha="left", fontsize=11, parse_math=False)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    steps, each_worker, *more = panels[len(names) :]
    for panel, name in zip(panels, names, strict=False):
        _draw_values(panel, name, curves.values[name])
        panel.sharex(steps)
        panel.tick_params(labelbottom=False)
    _draw_steps(steps, curves.steps)
    _draw_workers(each_worker, summary)
    if summary.each_group:
        _draw_membership(more[0], summary)
        _draw_groups(more[1], summary)
    if summary.links:
        _draw_links(more[-2] if summary.nodes else more[-1], summary)
    if summary.nodes:
        _draw_nodes(more[-1], summary)
    beside = run.picture.with_name(f".{run.picture.name}")
    try:
        figure.savefig(beside)
        beside.replace(run.picture)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UserError(f"{run.picture}: cannot be written: {error.strerror}") from None
    return run.picture


def redraw(run: RunDirectory) -> Path:
    """Draw the picture of a finished run again; a run that was killed gets its metrics and summary first.

    Raises UserError if the directory holds no run, if its run is still at work, or if matplotlib is missing.
    """
    if not run.summary.exists():
        journals = run.journals()
        if not journals:
            raise UserError(f"{run.path}: holds no run: neither summary.json nor workers/*.jsonl is there")
        claim = run.hold()
        try:
            Recorder(run, max(journals) + 1, _strategy(run)).close()
        finally:
            claim.release()
    try:
        return draw(run)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: the picture needs the extra: pip install 'atoll[report]'") from None


def _strategy(run: RunDirectory) -> str:
    try:
        return load_config(run.config, environment={}).run.strategy
    except AtollError:  # no configuration, or another version's; the journals have the strategy too
        return ""


def _title(run: RunDirectory, summary: Summary) -> str:
    workers = "1 worker" if summary.workers == 1 else f"{summary.workers} workers"
    facts = [
        f"{run.name}: {workers} ({summary.strategy})",
        f"{summary.steps:,} steps in {format_seconds(summary.seconds)}",
        f"{summary.samples_per_second:,.4g} samples/s",
    ]
    if summary.workers > 1:
        facts.append(f"{format_bytes(summary.bytes_sent)} sent")
    return "   ·   ".join(facts)


def plain(panel: Axes) -> None:
    """Remove decoration that is not needed around the data."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=9)


def _draw_values(panel: Axes, name: str, curve: Curve) -> None:
    """Draw a logged value over the iterations, with a running mean if there are many."""
    steps, values = [step for step, _ in curve.extremes], [value for _, value in curve.extremes]
    if len(values) <= 30:
        panel.plot(steps, values, color=SMOOTH, linewidth=1.5, marker="o", markersize=4)
    else:
        panel.plot(steps, values, color=LOGGED, linewidth=0.9)
        middles = [min(one[0], other[0]) for one, other in zip(curve.least, curve.greatest, strict=True)]
        panel.plot(middles, running_mean(curve.means), color=SMOOTH, linewidth=1.8)
    plain(panel)
    panel.set_ylabel(name, parse_math=False)
    if values:
        panel.annotate(
            f"{curve.last[1]:.4g}",
            curve.last,
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=SMOOTH,
        )


def running_mean(values: list[float]) -> list[float]:
    """Return the mean over about a thirtieth of the run around each point.

    The window shrinks towards the ends, so that the mean lags nowhere.
    """
    base = values[0] if values else 0.0  # the mean of a constant is then exact
    sums = [0.0, *itertools.accumulate(value - base for value in values)]
    last, half = len(values) - 1, max(2, len(values) // 60)
    smooth = []
    for place in range(len(values)):
        reach = min(half, place, last - place)
        smooth.append(base + (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1))
    return smooth


def _draw_steps(panel: Axes, curve: StepCurve) -> None:
    """Draw milliseconds per step, stacked by own work and waiting, in bins of iterations."""
    bins = curve.bins
    steps = [part.iteration for part in bins]
    whole = [1000 * part.seconds / part.count for part in bins]
    waiting = [1000 * part.waiting / part.count for part in bins]
    working = [max(0.0, total - wait) for total, wait in zip(whole, waiting, strict=True)]
    phases = {
        name: [1000 * part.phases[name] / part.count for part in bins]
        for name in PHASES
        if any(name in part.phases for part in bins)
    }
    rest = [max(0.0, wait - sum(parts)) for wait, *parts in zip(waiting, *phases.values(), strict=True)]
    layers = {"working": working, **phases, "waiting for others": rest}
    colours = {"working": WORKING, **PHASES, "waiting for others": WAITING}
    panel.stackplot(steps, *layers.values(), colors=[colours[name] for name in layers], labels=list(layers))
    plain(panel)
    panel.set_ylabel("ms a step")
    panel.set_xlabel("iteration")
    if whole:
        # Cut off a few long steps, such as the first, which would flatten all others.
        panel.set_ylim(0, 1.15 * sorted(whole)[int(0.98 * (len(whole) - 1))])
        panel.legend(
            loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(layers), fontsize=9, frameon=False
        )


def _draw_workers(panel: Axes, summary: Summary) -> None:
    """Draw each worker's time as one bar."""
    names = [f"worker {totals.worker}" for totals in summary.each_worker]
    working = [max(0.0, totals.seconds - totals.waiting) for totals in summary.each_worker]
    waiting = [totals.waiting for totals in summary.each_worker]
    panel.barh(names, working, color=WORKING, height=0.6)
    panel.barh(names, waiting, left=working, color=WAITING, height=0.6)
    for row, totals in enumerate(summary.each_worker):
        share = totals.waiting / totals.seconds if totals.seconds > 0 else 0.0
        part = f", {totals.part:,} of a batch at {totals.speed:,.4g} samples/s" if totals.part else ""
        panel.annotate(
            f"{share:.0%} waiting{part}",
            (totals.seconds, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    panel.invert_yaxis()
    panel.margins(x=0.5 if any(totals.part for totals in summary.each_worker) else 0.14)
    plain(panel)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("seconds in steps")


def _draw_links(panel: Axes, summary: Summary) -> None:
    """Draw a table of loss-tolerant links, those with the most losses."""
    rows = [
        [
            link.name,
            format_rate(8 * link.rate),
            format_seconds(link.rtt) if link.rtt > 0 else "",
            f"{link.loss:.2%}",
            f"{link.target:.2%}",
            f"{link.lost:,}",
            f"{link.repaired:,}",
            f"{link.borne:,}",
            f"{link.filled:,}",
            f"{link.held:.2%}",
        ]
        for link in most_lossy(summary, _MOST_LINKS)
    ]
    _draw_table(panel, _LINK_COLUMNS, rows)


def _draw_nodes(panel: Axes, summary: Summary) -> None:
    """Draw a table of the nodes of a run without a server, under a title on views."""
    rows = [
        [
            str(node.node),
            f"{node.staleness_mean:.1f}",
            f"{node.staleness_p95:,}",
            f"{node.staleness_most:,}",
            f"{node.exchange_share:.1%}",
            f"{node.waiting_share:.1%}",
            f"{node.applied:,}",
            f"{node.rounds:,}",
            f"{node.joined:,}",
            f"{node.refusals:,}",
            f"{node.fetched:,}",
            format_bytes(node.bytes_out),
        ]
        for node in summary.nodes[:_MOST_NODES]
    ]
    _draw_table(panel, _NODE_COLUMNS, rows)
    views = views_of(summary)
    title = (
        f"{views[-1]}, after {len(views)} changes" if len(views) > 1 else "".join(views) or "all in one view"
    )
    panel.set_title(title, loc="left", fontsize=9, parse_math=False)


def _draw_table(panel: Axes, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Draw a table that fills the panel."""
    from matplotlib.transforms import Bbox

    panel.set_axis_off()
    widths = [max(len(row[place]) for row in [columns, *rows]) for place in range(len(columns))]
    table = panel.table(
        rows,
        colLabels=columns,
        colWidths=[width / sum(widths) for width in widths],
        bbox=Bbox.unit(),
        edges="horizontal",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)


def _largest(summary: Summary) -> list[GroupTotals]:
    """Return the groups with the most time, in order of their beginnings."""
    most = sorted(summary.each_group, key=lambda group: -group.seconds)[:_MOST_GROUPS]
    return sorted(most, key=lambda group: (group.since, group.workers))


def _draw_membership(panel: Axes, summary: Summary) -> None:
    """Draw the groups over time: a row for each worker, a colour for each group of several."""
    rows = {totals.worker: row for row, totals in enumerate(summary.each_worker)}
    several = [group for group in summary.each_group if len(group.workers) > 1]
    colours = {id(group): _GROUPS[place % len(_GROUPS)] for place, group in enumerate(several)}
    for group in summary.each_group:
        for worker in (worker for worker in group.workers if worker in rows):
            panel.barh(
                rows[worker], group.until - group.since, left=group.since, height=0.6,
                color=colours.get(id(group), LOGGED),
            )  # fmt: skip
    for grouping in summary.groupings[1:]:
        panel.axvline(grouping.since, color="black", linewidth=0.7, linestyle=":")
    panel.set_yticks(list(rows.values()), [f"worker {worker}" for worker in rows])
    panel.invert_yaxis()
    plain(panel)
    panel.grid(visible=False, axis="y")
    panel.set_xlim(left=0)
    panel.set_xlabel("seconds; a colour for each group, pale: alone, dotted: groups were made")


def _draw_groups(panel: Axes, summary: Summary) -> None:
    """Draw each group's use of time, with the staleness of its contributions."""
    groups = _largest(summary)
    for row, group in enumerate(groups):
        whole, left = max(group.seconds, 1e-9), 0.0
        parts = {
            WORKING: group.computing,
            PHASES["ring"]: group.ring,
            PHASES["exchange"]: group.exchange,
            WAITING: group.other,
        }
        for colour, seconds in parts.items():
            panel.barh(row, 100 * seconds / whole, left=left, color=colour, height=0.6)
            left += 100 * seconds / whole
        if (stale := group.staleness) is not None:
            panel.annotate(
                f"staleness {stale.median:g}, 95% at most {stale.p95:g}",
                (left, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
    panel.set_yticks(range(len(groups)), [" ".join(map(str, group.workers)) for group in groups])
    panel.invert_yaxis()
    panel.set_xlim(0, 135)  # room for the words
    panel.set_xticks(range(0, 101, 20))
    plain(panel)
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("% of the steps' time of each group")
