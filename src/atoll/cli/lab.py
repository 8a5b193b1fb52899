"""`atoll lab run`, `atoll lab show`: sites and long links on this machine."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.lab.topology import load_topology

_TopologyArgument = Annotated[
    Path, typer.Argument(metavar="TOPOLOGY", help="The file of sites and links; docs/lab.md explains it.")
]


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    lab = typer.Typer(help="Sites on this machine, with long links between them.", rich_markup_mode=None)
    lab.command("run")(run)
    lab.command("show")(show)
    app.add_typer(lab, name="lab")


def run(
    topology: _TopologyArgument,
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND ...", help="What each worker runs, such as: torchrun train.py."),
    ],
    directory: Annotated[
        Path | None, typer.Option(metavar="D", help="Where the report and the workers' output are kept.")
    ] = None,
) -> None:
    """Make the sites and links of TOPOLOGY, run COMMAND in them, and take everything down again.

    COMMAND starts once for each worker. Its words may hold {site}, {index}, {worker}, {workers}, {sites},
    {address} (its own site's) and {first} (the first site's address).
    """
    chosen = load_topology(topology)
    from atoll.lab.runner import run_lab
    from atoll.launch import labpicture

    raise typer.Exit(run_lab(chosen, command, folder=directory, kept=labpicture.keep))


def show(
    topology: _TopologyArgument,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it here too: a .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Draw TOPOLOGY in the terminal, and as a picture."""
    from rich.console import Console

    from atoll.lab import drawing
    from atoll.lab import picture as pictures

    chosen = load_topology(topology)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without these letters shows ? for them
        sys.stdout.reconfigure(errors="replace")
    if picture is not None:
        pictures.draw(chosen, topology.stem, picture)
    drawing.show(chosen, topology.stem, Console(highlight=False))
    if picture is not None:
        print(f"\n{picture}: the picture")
