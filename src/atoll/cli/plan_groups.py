"""`atoll plan groups`: which workers of a cluster should share a ring."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import UserError

if TYPE_CHECKING:
    from atoll.plan.groupings import Comparison

_WIDTH = 100  # of the reason, in characters


def register(plan: typer.Typer) -> None:
    """Give `plan`, the commands under `atoll plan`, this one."""
    plan.command("groups")(groups)


def groups(
    cluster: Annotated[
        Path,
        typer.Argument(metavar="CLUSTER", help="A file of workers and links; docs/grouping.md explains it."),
    ],
    number: Annotated[
        str | None, typer.Option("--groups", metavar="K", help="Number of groups; by default the best.")
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="HOW", help="Form groups by joint (speed and links), speed, or site.")
    ] = "joint",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in samples/s and seconds.")] = False,
) -> None:
    """Show the predicted speed of groupings of a cluster's workers, and choose one."""
    from atoll.plan.cluster import load_cluster
    from atoll.plan.groupings import as_data, compare

    comparison = compare(load_cluster(cluster), by, _number(number))
    if as_json:
        print(json.dumps(as_data(comparison), indent=2))
    else:
        _show(comparison)


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--groups {text}: not a number of groups; write a whole number from 1 on") from None


def _show(comparison: Comparison) -> None:
    """Print a table of samples per second, absolute and relative to one ring, and the reason below."""
    from atoll.groups.grouping import show

    synchronous = comparison.synchronous
    lines = [("", "groups", "compute only", "", "with links", "", "")]
    for row in comparison.rows:
        lines.append(
            (
                f"{'*' if row == comparison.chosen else ' '} {_title(row.by)}",
                str(len(row.grouping)),
                *_beside(row.prediction.compute_only, synchronous.compute_only),
                *_beside(row.prediction.samples_per_second, synchronous.samples_per_second),
                show(row.grouping, comparison.cluster.names),
            )
        )
    ceiling = _beside(comparison.ceiling, synchronous.compute_only)
    lines.append(("  the ceiling", "", *ceiling, "", "", "the sum of speeds"))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    server = comparison.cluster.sites[comparison.cluster.server_site].name
    workers = len(comparison.cluster.workers)
    print(f"Predicted samples per second of {workers} workers, the server at {server}\n")
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(line[place].rjust(widths[place]) for place in range(1, 6))]
        print("  ".join([*cells, line[6]]).rstrip())
    print()
    print(textwrap.fill(f"* {comparison.reason}", _WIDTH, break_long_words=False, break_on_hyphens=False))


def _beside(rate: float, synchronous: float) -> tuple[str, str]:
    return f"{rate:.4g}", f"{rate / synchronous:.2f}x"


def _title(by: str) -> str:
    return {"one ring": "one ring (synchronous)", "joint": "speed and links (joint)"}.get(by, by)
