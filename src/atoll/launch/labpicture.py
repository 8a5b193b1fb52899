"""The picture of a lab's run: logged values, each link's traffic, and the workers' time."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, UserError
from atoll.core.events import Logged, StepDone
from atoll.core.units import format_bytes, format_seconds
from atoll.lab import report, traffic, words
from atoll.lab.picture import fitting
from atoll.lab.report import LabRecord, WorkerJournal
from atoll.lab.spec import workers_of
from atoll.lab.topology import Phase
from atoll.lab.traffic import Moment
from atoll.observe.metrics import Merger
from atoll.observe.report import LOGGED, SMOOTH, WAITING, WORKING, plain, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "lab.png"  # in the folder of records
_SLOWER, _LINK, _LOST, _ASKED, _DOWN = "#f3dfa2", "#2f6f9f", "#d1495b", "#6b6b6b", "#5c1a1b"
_MOST_VALUES, _MOST_LINKS, _MOST_WORKERS = 2, 12, 16  # drawn at most
_CHARACTERS = 160  # of the small type, in a panel's width
_TOOK = "s / iteration"
_CELLS = 240  # of a worker's strip
_BARS = 110  # of a link's traffic: iterations that are shorter than a bar do not show as a comb


def draw(folder: Path) -> Path:
    """Draw lab.png from the files that a lab left in `folder`; return its path.

    Raises ModuleNotFoundError if matplotlib is missing, and UserError for a folder without lab.json.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    record = report.read(folder)
    told = report.read_journals(folder / "journals", len(workers_of(record.topology)))
    values = over_time(told, record.began)
    moments = traffic.read(folder / traffic.TRAFFIC)
    links = _busiest(record)
    end = max([record.seconds, *(moment.at for moment in moments[-1:])])
    heights = [1.9, 1.0, 1.0][: len(values)] + [0.95] * len(links)
    heights += [0.35 + 0.34 * min(len(told), _MOST_WORKERS)] if told else []
    figure = Figure(
        figsize=(10, sum(heights) + 1.3),
        dpi=110,
        layout=ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.08, hspace=0.0),
    )
    FigureCanvasAgg(figure)
    figure.suptitle(_title(folder, record), x=0.012, ha="left", fontsize=10.5, parse_math=False)
    panels = iter(figure.subplots(max(1, len(heights)), 1, height_ratios=heights or [1], squeeze=False)[:, 0])
    used: list[Axes] = []
    for value in values:
        used.append(next(panels))
        _draw_value(used[-1], value)
    for link in links:
        used.append(next(panels))
        _draw_link(used[-1], record, moments, link)
    if told:
        used.append(next(panels))
        _draw_workers(used[-1], record, told, end)
    for panel in used:
        panel.set_xlim(0, max(end, 1e-3))
        panel.tick_params(labelbottom=panel is used[-1])
    if used:
        used[-1].set_xlabel("seconds since the start", fontsize=9)
    path = folder / PICTURE
    figure.savefig(path)
    return path


def redraw(folder: Path) -> Path:
    """Draw lab.png for a user's command; raise a UserError that says how to get matplotlib if it is
    missing."""
    try:
        return draw(folder)
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: the picture needs the extra: pip install 'atoll[report]'") from None


def keep(folder: Path) -> str:
    """Draw lab.png at a lab's end; return the closing line's words on the picture. A failure costs the
    picture alone."""
    try:
        return f", the picture is {draw(folder).name} there"
    except ModuleNotFoundError as error:
        return f"\nno picture ({error}): pip install 'atoll[report]', then atoll report {folder}"
    except (OSError, AtollError) as error:  # a full disk, for example: the run itself is complete
        return f"\nno picture: {error}"


# -- what was logged ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """One number of each iteration, over the seconds since the start."""

    name: str
    points: list[tuple[float, float]]


def over_time(told: Sequence[WorkerJournal], began: float) -> list[Value]:
    """Return the logged values, as the workers' means, most often logged first, and then the time of an
    iteration. `began` is in seconds since the epoch."""
    events = [event for each in told for event in each.events if isinstance(event, (StepDone, Logged))]
    merger = Merger(0)
    again = [merger.add(event) for event in sorted(events, key=lambda event: event.time)]
    lines = sorted([*itertools.chain.from_iterable(again), *merger.rest()], key=lambda line: line.time)
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.values.items():
            if value is not None:
                found.setdefault(name, []).append((line.time - began, value))
    values = [Value(name, points) for name, points in found.items() if len(points) > 1]
    values = sorted(values, key=lambda value: -len(value.points))[:_MOST_VALUES]
    took = [(line.time - began, line.seconds) for line in lines if line.seconds > 0]
    return [*values, *([Value(_TOOK, took)] if took else [])]


def _draw_value(panel: Axes, value: Value) -> None:
    seconds, values = [at for at, _ in value.points], [each for _, each in value.points]
    if len(values) <= 30:
        panel.plot(seconds, values, color=SMOOTH, linewidth=1.5, marker="o", markersize=3.5)
    else:
        panel.plot(seconds, values, color=LOGGED, linewidth=0.9)
        panel.plot(seconds, running_mean(values), color=SMOOTH, linewidth=1.8)
    plain(panel)
    if value.name == _TOOK:
        panel.set_ylim(bottom=0)
    panel.set_ylabel(value.name, fontsize=8.5, parse_math=False)
    panel.annotate(
        f"{values[-1]:.4g}", (seconds[-1], values[-1]), (5, 0), textcoords="offset points", va="center",
        fontsize=8.5, color=SMOOTH, annotation_clip=False,
    )  # fmt: skip


# -- links -------------------------------------------------------------------------------------------------


def _busiest(record: LabRecord) -> list[int]:
    """Return the numbers of the links to draw, the most used ones, in the topology's order."""
    used = [number for number, link in enumerate(record.links) if link.offered.packets]
    return sorted(sorted(used, key=lambda number: -record.links[number].delivered.bytes)[:_MOST_LINKS])


def _draw_link(panel: Axes, record: LabRecord, moments: Sequence[Moment], number: int) -> None:
    """Draw a link's traffic with its asked rate, and its changes, outages and losses."""
    spans = _fewer(list(traffic.spans(moments, number)))
    edges = [spans[0].start, *(span.end for span in spans)] if spans else [0.0, 1.0]
    rates = [span.rate / 1e6 for span in spans] or [0.0]
    panel.stairs(rates, edges, fill=True, color=_LINK, alpha=0.35)
    panel.stairs(rates, edges, color=_LINK, linewidth=1.0)
    phases = record.topology.links[number].phases
    top = _top(rates, phases)
    for phase, until in _phases(phases, edges[-1]):
        panel.plot([phase.at, until], [phase.rate * 8 / 1e6] * 2, "--", color=_ASKED, linewidth=1.0)
        if phase.down:
            panel.axvspan(phase.at, until, color=_DOWN, alpha=0.25, linewidth=0)
        if phase.at > 0:
            panel.axvline(phase.at, color=_ASKED, linewidth=0.9, linestyle=":")
    plain(panel)
    panel.set_ylim(0, top)
    panel.set_ylabel("Mbit/s", fontsize=8)
    panel.set_title(_link_title(record, number), loc="left", fontsize=8.5, pad=3)
    _draw_changes(panel, record, number, edges[-1])
    _draw_losses(panel, spans)


def _fewer(spans: Sequence[traffic.Span]) -> list[traffic.Span]:
    """Return at most `_BARS` spans, with neighbours merged."""
    size = max(1, -(-len(spans) // _BARS))
    return [traffic.together(spans[start : start + size]) for start in range(0, len(spans), size)]


def _phases(phases: Sequence[Phase], end: float) -> Iterable[tuple[Phase, float]]:
    """Return the phases that began before `end`, each with its own end."""
    ends = [*(phase.at for phase in phases[1:]), math.inf]
    return [(p, min(until, end)) for p, until in zip(phases, ends, strict=True) if p.at < end]


def _top(rates: Sequence[float], phases: Sequence[Phase]) -> float:
    """Return the panel's upper edge in Mbit/s. It includes the asked rate, unless the traffic would then
    be a line on the ground."""
    asked, carried = max(phase.rate for phase in phases) * 8 / 1e6, max(rates)
    return 1.15 * (asked if asked <= 3 * carried else 1.3 * carried) or 1.0


def _link_title(record: LabRecord, number: int) -> str:
    link, first = record.links[number], words.qualities(record.topology.links[number].phases[0])
    asked = ", ".join(text for key in ("rate", "delay", "loss") if (text := first[key]))
    lost = sum(link.lost.values())
    share = f" ({lost / max(1, link.offered.packets):.2%})" if lost else ""
    return (
        f"{link.source} → {link.target}: {asked}; carried {format_bytes(link.delivered.bytes)}, "
        f"lost {lost:,} of {link.offered.packets:,} packets{share}"
    )


def _draw_changes(panel: Axes, record: LabRecord, number: int, end: float) -> None:
    """Write each change of the link beside its dotted line, in small type, as far as there is room."""
    link = record.topology.links[number]
    sites = record.topology.sites[link.source], record.topology.sites[link.target]
    changes = list(words.changes(words.Way(*sites, False, link.phases)))
    ends = [*(at for at, _ in changes[1:]), end]
    for (at, text), until, before in zip(changes, ends, link.phases, strict=False):
        outage = text == "nothing gets through"
        room = _CHARACTERS if outage else int(_CHARACTERS * (until - at) / end)
        if at < end and not before.down:
            panel.annotate(
                "outage" if outage else fitting(text, room), (at, 0.97), (3, 0),
                xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=7,
                color="black", bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.8},
            )  # fmt: skip


def _draw_losses(panel: Axes, spans: Sequence[traffic.Span]) -> None:
    """Lost packets each second, as bars on an axis of their own at the right."""
    if not any(sum(span.lost.values()) for span in spans):
        return
    lost = [sum(span.lost.values()) / (span.end - span.start) for span in spans]
    axis = panel.twinx()
    axis.stairs(lost, [spans[0].start, *(span.end for span in spans)], fill=True, color=_LOST, alpha=0.85)
    axis.set_ylim(0, 3 * max(lost))
    axis.set_yticks([max(lost)], [f"{max(lost):.3g} lost/s"], fontsize=7.5, color=_LOST)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(length=0)


# -- workers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """One worker's use of each cell of the time, as shares of the cell; they sum to 1, or less if the
    worker made no step."""

    computing: list[float]
    slower: list[float]  # waiting for slower workers
    links: list[float]  # waiting otherwise


def shares(told: WorkerJournal, most: dict[int, float], began: float, end: float, cells: int) -> Shares:
    """Return one worker's shares. `most` is `report.slowest` of all workers; the cells divide the time
    from 0 to `end` seconds since `began`."""
    found = Shares([0.0] * cells, [0.0] * cells, [0.0] * cells)
    width = max(end, 1e-9) / cells
    for step in told.steps:
        stop = step.time - began
        start = stop - step.seconds
        slower = report.for_slower(step, most)
        kinds = (
            (found.computing, step.seconds - step.waiting),
            (found.slower, slower),
            (found.links, step.waiting - slower),
        )
        for cell in range(max(0, int(start / width)), min(cells, int(stop / width) + 1)):
            covered = min(stop, (cell + 1) * width) - max(start, cell * width)
            if covered > 0 and step.seconds > 0:
                for kind, seconds in kinds:
                    kind[cell] += covered / width * max(0.0, seconds) / step.seconds
    return found


def _draw_workers(panel: Axes, record: LabRecord, told: Sequence[WorkerJournal], end: float) -> None:
    """Draw a strip for each worker: over the seconds, the parts of its time that it computed or waited."""
    most = report.slowest(told)
    drawn = list(zip(told, record.workers, strict=False))[:_MOST_WORKERS]
    edges = [end * cell / _CELLS for cell in range(_CELLS + 1)]
    for row, (each, _) in enumerate(drawn):
        spent = shares(each, most, record.began, end, _CELLS)
        floor = [row + 0.42] * _CELLS  # rows grow downwards
        for kind, colour in ((spent.computing, WORKING), (spent.slower, _SLOWER), (spent.links, WAITING)):
            ceiling = [low - 0.84 * part for low, part in zip(floor, kind, strict=True)]
            panel.stairs(ceiling, edges, baseline=floor, fill=True, color=colour, linewidth=0)
            floor = ceiling
    names = [f"{worker.name}{f' (x{worker.speed:g})' * (worker.speed != 1)}" for _, worker in drawn]
    panel.set_yticks(range(len(drawn)), names)
    plain(panel)
    panel.grid(visible=False)
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0, labelsize=8.5)
    panel.set_ylim(len(drawn) - 0.45, -0.55)
    _draw_totals(panel, [worker for _, worker in drawn])
    _draw_legend(panel, split=bool(most), left_out=len(told) - len(drawn))


def _draw_totals(panel: Axes, workers: Sequence[report.WorkerRecord]) -> None:
    """Write the computing share beside each strip."""
    axis = panel.twinx()
    axis.set_ylim(panel.get_ylim())
    parts = [1 - worker.waiting / worker.seconds if worker.seconds > 0 else 0.0 for worker in workers]
    axis.set_yticks(range(len(workers)), [f"computed {part:.0%}" for part in parts], fontsize=7.5)
    axis.tick_params(length=0, colors=WORKING)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_legend(panel: Axes, split: bool, left_out: int) -> None:
    from matplotlib.patches import Patch

    kinds = [
        (WORKING, "computing"),
        (_SLOWER, "waiting for slower workers"),
        (WAITING, "waiting for the links"),
    ]
    if not split:
        kinds = [(WORKING, "computing"), (WAITING, "waiting for others and the links")]
    more = f"where the workers' time went{f' ({left_out} more are not drawn)' if left_out else ''}"
    panel.set_title(more, loc="left", fontsize=8.5, pad=3)
    panel.legend(
        handles=[Patch(color=colour, label=text) for colour, text in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
        ncols=3,
        fontsize=8,
        frameon=False,
        borderaxespad=0.1,
    )


def _title(folder: Path, record: LabRecord) -> str:
    """Return the command on one line, and a summary of the run."""
    command = "\n".join(
        textwrap.wrap(f"{folder.resolve().name}: {' '.join(record.command)}", 115, max_lines=3)
    )
    facts = [words.title(record.topology), format_seconds(record.seconds)]
    if record.workers:
        facts.append(f"{max(worker.steps for worker in record.workers):,} iterations")
    if record.status:
        facts.append(f"ended with status {record.status}")
    if not record.kept_up:
        facts.append(_behind(record))
    used = sum(link.offered.packets > 0 for link in record.links)
    if used > _MOST_LINKS:
        facts.append(f"the busiest {_MOST_LINKS} of {used} links")
    elif 0 < used < len(record.links):
        facts.append(f"{len(record.links) - used} directions unused")
    return "\n".join([command, *textwrap.wrap("  ·  ".join(facts), 115)])


def _behind(record: LabRecord) -> str:
    emulator = record.emulator
    if emulator is None:
        return "THE EMULATOR WAS KILLED"
    if emulator.dropped or any(record.dropped_before.values()):
        return "THE EMULATOR DROPPED PACKETS"
    return f"THE EMULATOR WAS BEHIND in {emulator.behind_seconds} s"
