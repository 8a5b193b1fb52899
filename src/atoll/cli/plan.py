"""`atoll plan cost`, `atoll plan figures`: the predicted cost of ways to synchronise.

`atoll plan groups` is in `cli/plan_groups.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from atoll.cli import plan_groups
from atoll.cli.commands import command
from atoll.core.options import Mark
from atoll.plan import cost
from atoll.plan.claims import Values
from atoll.plan.options import CostOptions

_WORDS = {
    "parameter_server": "parameter server",
    "ring": "ring",
    "hierarchical": "hierarchical ring",
    "ps_hra": "ps-hra",
}


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    plan = typer.Typer(help="What to expect, before anything is started.", rich_markup_mode=None)
    plan.command("cost")(command(show_costs, CostOptions, _Shown))
    plan.command("figures")(command(draw_figures, _Where, Values))
    plan_groups.register(plan)
    app.add_typer(plan, name="plan")


class _Shown(msgspec.Struct, frozen=True):
    """Options of the output of costs.

    Args:
        as_json: Print it as one object, in seconds.
    """

    as_json: Annotated[bool, Mark(flag="--json")] = False


class _Where(msgspec.Struct, frozen=True):
    """The folder for figures.

    Args:
        out: Folder for the pictures.
    """

    out: Annotated[str, Mark("DIR")]


def show_costs(options: CostOptions, shown: _Shown) -> None:
    """Print the time of one synchronisation: parameter server, ring, hierarchical ring, PS-HRA.

    The closed forms are in docs/planning.md: all workers are equal, and none waits for a slower one.
    """
    costs = cost.compare(**msgspec.structs.asdict(options))
    if shown.as_json:
        print(json.dumps({**asdict(costs), "best": costs.best}))
        return
    for name, seconds in asdict(costs).items():
        mark = "   best" if name == costs.best else ""
        print(f"{_WORDS[name]:<18}{_precise(seconds):>12}{mark}")


def draw_figures(where: _Where, values: Values) -> None:
    """Draw time against latency and against the number of workers, and say which claims hold where.

    Writes latency.png, nodes.png, claims.txt and claims.json. Against the number of workers time is drawn
    with K groups kept and with N/K workers to a group kept, at each latency (1ms and 50ms).
    """
    from atoll.plan import figures

    for path in figures.write(values, Path(where.out)):
        print(path)


def _precise(seconds: float) -> str:
    """Format seconds with four digits, so that close values differ."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1000:.4g} ms"
