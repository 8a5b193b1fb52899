"""`atoll plan cost`, `atoll plan figures`: what ways of synchronising cost, before anything is started;
`atoll plan groups` is in `cli/plan_groups.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from atoll.cli import plan_groups
from atoll.core.errors import ConfigError
from atoll.core.units import parse_bytes, parse_rate, parse_seconds
from atoll.plan import cost

# Texts, so that a wrong one is told of in the same way as everywhere else, and units may be written.
_Nodes = Annotated[str, typer.Option(metavar="N", help="Workers.")]
_Groups = Annotated[str, typer.Option(metavar="K", help="Groups, of N/K workers.")]
_Size = Annotated[str, typer.Option("--bytes", metavar="S", help="Gradients of a worker: 160e6, 160MB.")]
_Bandwidth = Annotated[
    str, typer.Option(metavar="B", help="Of a link: 1.25e9 (bytes/s), or in bits: 10Gbit/s.")
]
_Compute = Annotated[str, typer.Option(metavar="C", help="Seconds to add up a byte, such as 1e-10.")]
_Number = TypeVar("_Number", int, float)
_WORDS = {
    "parameter_server": "parameter server",
    "ring": "ring",
    "hierarchical": "hierarchical ring",
    "ps_hra": "ps-hra",
}
_LATENCY = "From one worker to another: 1e-3 (seconds), 1ms."


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    plan = typer.Typer(help="What to expect, before anything is started.", rich_markup_mode=None)
    plan.command("cost")(show_costs)
    plan.command("figures")(draw_figures)
    plan_groups.register(plan)
    app.add_typer(plan, name="plan")


def show_costs(
    nodes: _Nodes,
    groups: _Groups,
    size: _Size,
    bandwidth: _Bandwidth,
    latency: Annotated[str, typer.Option(metavar="A", help=_LATENCY)],
    compute: _Compute,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one object, in seconds.")] = False,
) -> None:
    """Print what one synchronisation takes: parameter server, ring, hierarchical ring, PS-HRA.

    By the closed forms in docs/planning.md: all workers alike, nobody waits for a slower one.
    """
    costs = cost.compare(
        nodes=_read("--nodes", nodes, float),
        groups=_read("--groups", groups, float),
        size=_read("--bytes", size, parse_bytes),
        bandwidth=_read("--bandwidth", bandwidth, _bytes_per_second),
        latency=_read("--latency", latency, parse_seconds),
        compute=_read("--compute", compute, float),
    )
    if as_json:
        print(json.dumps({**asdict(costs), "best": costs.best}))
        return
    for name, seconds in asdict(costs).items():
        mark = "   best" if name == costs.best else ""
        print(f"{_WORDS[name]:<18}{_precise(seconds):>12}{mark}")


def draw_figures(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the pictures are written.")],
    nodes: _Nodes = "16",
    groups: _Groups = "4",
    size: _Size = "160MB",
    bandwidth: _Bandwidth = "10Gbit/s",
    latency: Annotated[
        list[str] | None, typer.Option(metavar="A", help=f"{_LATENCY} May be given several times.")
    ] = None,
    compute: _Compute = "1e-10",
) -> None:
    """Draw time against latency and against the number of workers, and say which claims hold where.

    Writes latency.png, nodes.png, claims.txt and claims.json. Against the number of workers time is drawn
    with K groups kept and with N/K workers to a group kept, at each latency (1ms and 50ms).
    """
    from atoll.plan import figures

    values = figures.Values(
        nodes=_read("--nodes", nodes, int),
        groups=_read("--groups", groups, int),
        size=_read("--bytes", size, parse_bytes),
        bandwidth=_read("--bandwidth", bandwidth, _bytes_per_second),
        latencies=tuple(_read("--latency", each, parse_seconds) for each in latency or ("1ms", "50ms")),
        compute=_read("--compute", compute, float),
    )
    for path in figures.write(values, out):
        print(path)


def _read(option: str, text: str, parse: Callable[[str], _Number]) -> _Number:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    except ValueError:
        what = "a whole number" if parse is int else "a number"
        raise ConfigError(f"{option}: {text!r} is not {what}") from None


def _bytes_per_second(text: str) -> float:
    """A bare number is bytes/s, as in the formulas; with a unit it is bits/s, as links are sold."""
    try:
        return float(text)
    except ValueError:
        return parse_rate(text) / 8


def _precise(seconds: float) -> str:
    """With four digits, so that near ones can be told apart."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1000:.4g} ms"
