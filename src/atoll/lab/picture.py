"""A topology as a picture: sites on a line or circle, links with their numbers, a timeline of changes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import UserError
from atoll.lab import words
from atoll.lab.topology import Phase, Topology
from atoll.lab.words import Way

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".pdf")
_MOST_LABELS = 30  # links: more labels would overlap
_SITE = "#14506b"
_LOSSES = (  # largest share of packets lost, colour, meaning
    (0.0, "#2a9d8f", "no loss"),
    (0.01, "#e9c46a", "up to 1 % lost"),
    (0.05, "#f4a261", "up to 5 % lost"),
    (1.0, "#e76f51", "more lost"),
)
_DOWN = "#5c1a1b"
_CHARACTERS, _LINES = 130, 3  # small type: characters across the timeline, lines in a bar

_Point = tuple[float, float]


def draw(topology: Topology, name: str, path: Path) -> None:
    """Draw `topology` into `path`; the suffix selects the format: .png, .svg or .pdf.

    Raises UserError for another suffix, a file that cannot be written, or missing matplotlib.
    """
    if path.suffix.lower() not in KINDS:
        raise UserError(f"{path}: a picture's name ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: the picture needs the extra: pip install 'atoll[report]'") from None
    ways = words.ways(topology)
    changing = [way for way in ways if len(way.phases) > 1]
    heights = [_height(len(topology.sites))] + ([0.5 + 0.55 * len(changing)] if changing else [])
    figure = Figure(
        figsize=(10, sum(heights) + 0.5), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    )
    FigureCanvasAgg(figure)
    title = f"{name}: {words.title(topology)}"
    figure.suptitle(title, x=0.015, ha="left", fontsize=11, parse_math=False)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_map(panels[0], topology, ways)
    if changing:
        _draw_timeline(panels[1], changing, words.horizon(topology))
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the picture: {error.strerror}") from None


def _height(sites: int) -> float:
    """Return the map's height in inches: a line of sites is flat, a circle is not."""
    return 2.4 if sites <= 2 else min(12.0, 5.6 + 0.25 * max(0, sites - 6))


def _points(sites: int) -> list[_Point]:
    """Return the sites' positions: one or two on a line, more on a circle, the first at its top."""
    if sites <= 2:
        return [(-1.3, 0.0), (1.3, 0.0)][:sites]
    turns = [math.pi / 2 - 2 * math.pi * site / sites for site in range(sites)]
    return [(1.6 * math.cos(turn), math.sin(turn)) for turn in turns]


def _draw_map(panel: Axes, topology: Topology, ways: list[Way]) -> None:
    points = _points(len(topology.sites))
    panel.axis("off")
    panel.set_xlim(-2.1, 2.1)
    panel.set_ylim(*((-0.55, 0.55) if len(points) <= 2 else (-1.35, 1.35)))
    for way in ways:
        _draw_way(panel, way, points, labelled=len(ways) <= _MOST_LABELS)
    if len(ways) > _MOST_LABELS:
        panel.set_title(f"{len(ways)} links are too many to label", fontsize=9)
    for site, (x, y) in zip(topology.sites, points, strict=True):
        panel.plot([x], [y], "o", color=_SITE, markersize=16, markeredgecolor="white", zorder=3)
        above = y > 0  # texts stand outside the circle
        texts = [words.workers(site), words.services(topology, site)]
        panel.annotate(
            "\n".join([site.name, *filter(None, texts)]),
            (x, y),
            (0, 13 if above else -13),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            color=_SITE,
            zorder=5,
        )
    _draw_legend(panel, ways)


def _draw_legend(panel: Axes, ways: list[Way]) -> None:
    """Explain the colours that occur."""
    from matplotlib.patches import Patch

    phases = [phase for way in ways for phase in way.phases]
    used = {_colour(phase) for phase in phases}
    kinds = [*((colour, text) for _, colour, text in _LOSSES), (_DOWN, "nothing gets through")]
    handles = [Patch(color=colour, label=text) for colour, text in kinds if colour in used]
    if handles:
        panel.legend(handles=handles, loc="lower center", ncols=5, fontsize=8, frameon=False)


def _draw_way(panel: Axes, way: Way, points: list[_Point], labelled: bool) -> None:
    """Draw a link: straight if both directions are equal, else bent to its left, so that both are visible."""
    first = way.phases[0]
    (x1, y1), (x2, y2) = points[way.source.index - 1], points[way.target.index - 1]
    bend = 0.0 if way.both else 0.18
    panel.annotate(
        "",
        (x2, y2),
        (x1, y1),
        arrowprops={
            "arrowstyle": "<|-|>" if way.both else "-|>",
            "color": _colour(first),
            "linewidth": _width(first),
            "connectionstyle": f"arc3,rad={-bend}",
            "shrinkA": 11,
            "shrinkB": 11,
        },
        zorder=1,
    )
    if not labelled:
        return
    # The middle of the bent line; off the half where lines may cross at the circle's centre.
    along = 0.5 if way.both and len(points) <= 3 else 0.42
    x, y = x1 + along * (x2 - x1) - bend / 2 * (y2 - y1), y1 + along * (y2 - y1) + bend / 2 * (x2 - x1)
    texts = [text for text in words.qualities(first).values() if text]
    lines = [" · ".join(texts[at : at + 2]) for at in range(0, len(texts), 2)]
    more = ["and changes"] if len(way.phases) > 1 else []
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": _colour(first), "linewidth": 0.8}
    panel.text(x, y, "\n".join([*lines, *more]), ha="center", va="center", fontsize=7.5, bbox=box, zorder=4)


def _draw_timeline(panel: Axes, ways: list[Way], end: float) -> None:
    """Draw a bar for each link that changes, with the changes as text where it fits."""
    for row, way in enumerate(ways):
        ends = [*(phase.at for phase in way.phases[1:]), end]
        texts = [words.describe(way.phases[0]), *(text for _, text in words.changes(way))]
        for phase, until, text in zip(way.phases, ends, texts, strict=True):
            panel.barh(
                row, until - phase.at, left=phase.at, color=_colour(phase), edgecolor="white", height=0.8
            )
            panel.text(
                (phase.at + until) / 2,
                row,
                fitting(text, int(_CHARACTERS * (until - phase.at) / end)),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if phase.down else "black",
            )
    panel.set_yticks(range(len(ways)), [way.name for way in ways])
    panel.invert_yaxis()
    panel.set_xlim(0, end)
    panel.set_xlabel("seconds since the start", fontsize=9)
    panel.tick_params(labelsize=9)
    panel.spines[["top", "right", "left"]].set_visible(False)


def fitting(text: str, room: int) -> str:
    """Return the text's first parts, one a line, that fit lines of `room` characters."""
    parts = itertools.takewhile(lambda part: len(part) <= room, text.split(" · "))
    return "\n".join(itertools.islice(parts, _LINES))


def _colour(phase: Phase) -> str:
    if phase.down:
        return _DOWN
    return next(colour for most, colour, _ in _LOSSES if phase.loss <= most)


def _width(phase: Phase) -> float:
    """Return the line width in points: 1 at 1 Mbit/s, and 0.8 more for each factor of ten."""
    return 1.0 + 0.8 * min(5.0, max(0.0, math.log10(8 * phase.rate / 1e6)))
