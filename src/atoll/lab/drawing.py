"""A topology in the terminal: sites, links with their numbers, and changes over time."""

from __future__ import annotations

from bisect import bisect_right

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.lab import words
from atoll.lab.topology import Phase, Topology
from atoll.lab.words import Way

_CELLS = 48  # of a timeline's bar
_FIRST, _CHANGED, _DOWN = ("━", "green"), ("▒", "yellow"), ("╳", "bold red")


def show(topology: Topology, name: str, console: Console) -> None:
    """Print a topology under the heading `name`."""
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), f": {words.title(topology)}"),
        Padding(_sites(topology), (1, 0, 0, 2), expand=False),
    ]
    ways = words.ways(topology)
    if ways:
        parts.append(Padding(_links(ways), (1, 0, 0, 2), expand=False))
    changing = [way for way in ways if len(way.phases) > 1]
    if changing:
        parts.append(Padding(_timeline(changing, words.horizon(topology)), (1, 0, 0, 2), expand=False))
    parts += [Text(f"  {text}", style="yellow") for text in _remarks(topology)]
    console.print(Group(*parts), soft_wrap=False)


def _plain() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _sites(topology: Topology) -> Table:
    table = _plain()
    for site in topology.sites:
        table.add_row(
            Text(site.name, style="bold cyan"),
            site.address,
            " · ".join(filter(None, [words.workers(site), words.services(topology, site)])),
        )
    return table


def _links(ways: list[Way]) -> Table:
    """Return a table with a row for each link, and below it a row for each of its changes."""
    table = _plain()
    for way in ways:
        table.add_row(
            Text(way.source.name, style="bold cyan"),
            "◀──▶" if way.both else "───▶",
            Text(way.target.name, style="bold cyan"),
            words.describe(way.phases[0]),
        )
        for at, text in words.changes(way):
            table.add_row(
                "", "", Text(words.span(at), style="yellow", justify="right"), Text(text, style="yellow")
            )
    return table


def _timeline(ways: list[Way], end: float) -> Group:
    """Return a bar for each link that changes, all over one span of time."""
    table = _plain()
    for way in ways:
        table.add_row(Text(way.name), _bar(way.phases, end))
    ruler = Text(f"0 s{words.span(end):>{_CELLS - 3}}", style="dim")
    table.add_row("", ruler)
    legend = Text.assemble(
        _FIRST, " as at the start   ", _CHANGED, " changed   ", _DOWN, " nothing gets through"
    )
    return Group(table, legend)


def _bar(phases: tuple[Phase, ...], end: float) -> Text:
    """Return cells of equal time. Each shows the worst state within it, so a short outage stays visible."""
    bar, starts = Text(), [phase.at for phase in phases]
    for cell in range(_CELLS):
        first = bisect_right(starts, cell * end / _CELLS) - 1
        last = bisect_right(starts, (cell + 1) * end / _CELLS * (1 - 1e-12)) - 1
        bar.append(*max((_mark(phases, i) for i in range(first, last + 1)), key=_badness))
    return bar


def _mark(phases: tuple[Phase, ...], index: int) -> tuple[str, str]:
    if phases[index].down:
        return _DOWN
    return _FIRST if words.qualities(phases[index]) == words.qualities(phases[0]) else _CHANGED


def _badness(mark: tuple[str, str]) -> int:
    return (_FIRST, _CHANGED, _DOWN).index(mark)


def _remarks(topology: Topology) -> list[str]:
    """Return warnings about settings that are allowed but often mistakes."""
    directions = {(link.source, link.target) for link in topology.links}
    ends = {end for way in directions for end in way}
    remarks = []
    for index, site in enumerate(topology.sites):
        if index not in ends and len(topology.sites) > 1:
            remarks.append(f"{site.name} has no link; nothing reaches it")
    for source, target in sorted(directions):
        if (target, source) not in directions:
            names = topology.sites[source].name, topology.sites[target].name
            remarks.append(
                f"{names[0]} -> {names[1]} has no way back; TCP cannot use it, ping gets no answer"
            )
    return remarks
