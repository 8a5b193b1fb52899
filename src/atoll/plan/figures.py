"""PS-HRA's two figures, drawn from given values, with the crossings of the schemes.

A strip below each panel shows the lowest scheme. matplotlib is the extra `report`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.core.errors import UserError
from atoll.plan.claims import (
    SCHEMES,
    AgainstLatency,
    CheapestRange,
    Crossing,
    Findings,
    Values,
    as_text,
    find,
    span,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Values", "write"]

_NAMES = {
    "parameter_server": "parameter server",
    "ring": "ring",
    "hierarchical": "hierarchical ring",
    "ps_hra": "PS-HRA",
}
_COLOURS = {
    "parameter_server": "#e9b44c",
    "ring": "#e76f51",
    "hierarchical": "#2a9d8f",
    "ps_hra": "#14506b",
}
_BUSY = "#5c1a1b"
_POINTS = 200  # points of a line


def write(values: Values, folder: Path) -> list[Path]:
    """Write latency.png, nodes.png, claims.txt and claims.json into `folder`; return their paths.

    Raises UserError for values from which nothing can be drawn, a folder that cannot be written, or missing
    matplotlib.
    """
    findings = find(values)
    try:
        latency, nodes = _latency_figure(values, findings), _nodes_figure(values, findings)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: the figures need the extra: pip install 'atoll[report]'") from None
    paths = [folder / name for name in ("latency.png", "nodes.png", "claims.txt", "claims.json")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        latency.savefig(paths[0])
        nodes.savefig(paths[1])
        paths[2].write_text(as_text(values, findings.claims), encoding="utf-8")
        paths[3].write_text(json.dumps(_as_json(values, findings), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the figures: {error.strerror}") from None
    return paths


def _as_json(values: Values, findings: Findings) -> dict[str, object]:
    """Return the values, the claims, and each panel's lowest schemes and crossings."""
    panels = [
        {
            "figure": "latency" if isinstance(panel, AgainstLatency) else "nodes",
            "setting": panel.setting,
            "lowest": [
                {**asdict(part), "end": part.end if math.isfinite(part.end) else None}
                for part in panel.lowest()
            ],
            "crossings": [asdict(crossing) for crossing in panel.crossings()],
        }
        for panel in findings.panels
    ]
    return {
        "values": msgspec.structs.asdict(values),
        "claims": [asdict(each) for each in findings.claims],
        "panels": panels,
    }


def _latency_figure(values: Values, findings: Findings) -> Figure:
    crossings = [each.at for panel in findings.latency for each in panel.crossings()]
    low, high = min([1e-3, *crossings]) / 5, max([1.0, *crossings]) * 3
    title = f"One synchronisation against the latency between two workers, {values.said()}"
    figure, panels, strips = _panels(title, 1, len(findings.latency))
    axis = [low * (high / low) ** (at / (_POINTS - 1)) for at in range(_POINTS)]
    for panel, strip, lines in zip(panels, strips, findings.latency, strict=True):
        for scheme in SCHEMES:
            _line(panel, scheme, axis, [lines.seconds(scheme, at) for at in axis])
        groups = f"{lines.groups} group{'s' if lines.groups > 1 else ''} of {lines.nodes // lines.groups}"
        panel.set_title(f"N = {lines.nodes}, k = {lines.groups}: {groups}", fontsize=10)
        _crossings(panel, lines.crossings())
        parts = [
            CheapestRange(part.scheme, max(part.start, low), min(part.end, high)) for part in lines.lowest()
        ]
        _changes(panel, [part.start for part in parts[1:]])
        _strip(strip, parts, [span(part.start) for part in parts[1:]])
        ticks = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
        _axis(panel, strip, (low, high), ticks, [span(tick) for tick in ticks])
        strip.set_xlabel("latency a, with the wait for slow members", fontsize=9)
    panels[0].set_ylabel("time (s)", fontsize=9)
    _legend(figure, panels[0])
    return figure


def _nodes_figure(values: Values, findings: Findings) -> Figure:
    title = f"One synchronisation against the number of workers, {values.said()}"
    figure, panels, strips = _panels(title, len(values.latencies), 2)
    first = min(lines.nodes[0] for lines in findings.nodes)
    last = max(lines.nodes[-1] for lines in findings.nodes)
    for at, (panel, strip, lines) in enumerate(zip(panels, strips, findings.nodes, strict=True)):
        for scheme in SCHEMES:
            _line(panel, scheme, lines.nodes, lines.seconds(scheme))
        panel.plot(
            lines.nodes,
            [lines.server(n) for n in lines.nodes],
            ":",
            color=_BUSY,
            linewidth=1.2,
            label="the server's work for k groups: where it is higher, PS-HRA's formula stops",
        )
        kept = f"k = {values.groups}" if lines.fixed == "k" else f"N/k = {lines.per}"
        panel.set_title(f"{kept} kept, latency {span(lines.latency)}", fontsize=10)
        _crossings(panel, lines.crossings())
        parts = lines.lowest()
        parts = [
            CheapestRange(part.scheme, part.start, _next(parts, index)) for index, part in enumerate(parts)
        ]
        _changes(panel, [part.start for part in parts[1:]])
        _strip(strip, parts, [f"N = {part.start:g}" for part in parts[1:]])
        ticks = [4.0**power for power in range(8) if first <= 4**power <= last]
        _axis(panel, strip, (first, last), ticks, [f"{tick:g}" for tick in ticks])
        if at % 2 == 0:
            panel.set_ylabel("time (s)", fontsize=9)
        strip.set_xlabel("workers N", fontsize=9)
    _legend(figure, panels[0])
    return figure


def _next(parts: list[CheapestRange], index: int) -> float:
    """Return the end of a part's strip: the start of the next part."""
    return parts[index + 1].start if index + 1 < len(parts) else parts[index].end


def _panels(title: str, rows: int, columns: int) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return the panels row by row, and the strip below each, on logarithmic axes; a row shares its times."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(4.6 * columns, 4.3 * rows + 0.9),
        dpi=120,
        layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.06),
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.015, ha="left", fontsize=11, parse_math=False)
    axes = figure.subplots(2 * rows, columns, height_ratios=[1, 0.09] * rows, squeeze=False)
    panels, strips = axes[0::2].ravel().tolist(), axes[1::2].ravel().tolist()
    for index, (panel, strip) in enumerate(zip(panels, strips, strict=True)):
        panel.set_xscale("log")
        panel.set_yscale("log")
        if index % columns:
            panel.sharey(panels[index - index % columns])
            panel.tick_params(labelleft=False)
        strip.set_xscale("log")
        panel.tick_params(labelsize=9, labelbottom=False)
        panel.grid(color="#e5e5e5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels, strips


def _axis(panel: Axes, strip: Axes, ends: tuple[float, float], ticks: list[float], labels: list[str]) -> None:
    """Give panel and strip one horizontal axis, with numbers below the strip."""
    for each in (panel, strip):
        each.set_xlim(*ends)
        each.set_xticks(ticks, labels)
        each.minorticks_off()


def _line(panel: Axes, scheme: str, axis: list[float] | list[int], seconds: list[float]) -> None:
    front = scheme == "ps_hra"
    panel.plot(
        axis,
        seconds,
        color=_COLOURS[scheme],
        linewidth=2.6 if front else 1.6,
        label=_NAMES[scheme],
        zorder=3 if front else 2,
    )


def _crossings(panel: Axes, crossings: list[Crossing]) -> None:
    panel.plot(
        [each.at for each in crossings],
        [each.seconds for each in crossings],
        "o",
        markersize=6,
        markerfacecolor="white",
        markeredgecolor="black",
        linestyle="none",
        label="the order changes",
        zorder=4,
    )


def _changes(panel: Axes, places: list[float]) -> None:
    for place in places:
        panel.axvline(place, color="#555555", linewidth=0.8, linestyle="--", zorder=1)


def _strip(strip: Axes, parts: list[CheapestRange], changes: list[str]) -> None:
    """Draw the lowest scheme of each range."""
    for part in parts:
        strip.axvspan(part.start, part.end, color=_COLOURS[part.scheme], linewidth=0)
    strip.set_yticks([])
    strip.set_ylabel("lowest", fontsize=8, rotation=0, ha="right", va="center")
    strip.tick_params(labelsize=9)
    strip.spines[["top", "right", "left"]].set_visible(False)
    if changes:
        strip.set_title(f"the lowest changes at {', '.join(changes)}", fontsize=8, loc="left", pad=2)


def _legend(figure: Figure, panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
