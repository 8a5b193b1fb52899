"""`atoll memory layout`: which chunks a model's parameters would lie in; `atoll memory plan` is in `cli/memory_plan.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Give `app` these commands."""
    memory = typer.Typer(help="Chunked memory: what does not fit.", rich_markup_mode=None)
    memory.command("layout")(show_layout)
    app.add_typer(memory, name="memory")


def show_layout(
    shapes: Annotated[
        Path, typer.Argument(metavar="SHAPES.json", help="A list of name, shape, dtype, and maybe feature.")
    ],
    members: Annotated[str, typer.Option(metavar="N", help="Members that share each chunk.")] = "1",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one object, in bytes.")] = False,
) -> None:
    """Print the chunk size, the chunks by group and the waste for the shapes of a model."""
    raise NotImplementedError
