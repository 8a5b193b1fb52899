"""Write docs/reference/commands.md from the commands: `python -m atoll.cli.page`.

With a path the page is written there; without one it is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from atoll.cli.app import app

_INTRODUCTION = """# Commands

This page is generated from the commands' options. After a change of one run `python -m
atoll.cli.page docs/reference/commands.md`. Spans of time are written like `90s`, sizes like `2GiB`
and rates like `1Gbit/s`. Every command has `--help`. A command ends with status 0, with 1 if what
it did failed, and with 2 and one line if what it was given is wrong."""


def page() -> str:
    """The page as Markdown."""
    return "\n".join([_INTRODUCTION, *_lines(typer.main.get_command(app), "atoll")]) + "\n"


def _lines(command: Any, name: str) -> Iterator[str]:
    """A command's section, then those of the commands below it."""
    below = getattr(command, "commands", {})
    if not below:
        arguments = [_name(each) for each in command.params if each.param_type_name == "argument"]
        yield ""
        yield f"## {name}"
        yield ""
        yield f"`{' '.join([name, '[OPTIONS]', *arguments])}`"
        yield ""
        yield re.sub(r"\s*\n\s*\n\s*", "\n\n", command.help or "").strip()
        yield ""
        yield "| option | default | meaning |"
        yield "| --- | --- | --- |"
        yield from map(_row, command.params)
    for each in sorted(below):
        yield from _lines(below[each], f"{name} {each}")


def _row(option: Any) -> str:
    default = "" if option.default in (None, "", [], False) or option.required else f"`{_shown(option)}`"
    meaning = option.help or ""
    if option.envvar:
        meaning += f" Also from the variable `{option.envvar}`."
    if option.required:
        meaning += " Required."
    return f"| `{_name(option)}` | {default} | {meaning.strip()} |"


def _shown(option: Any) -> str:
    return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)


def _name(option: Any) -> str:
    """`--workers N`, `--seal / --no-seal`, or an argument's word."""
    word = option.metavar or ("" if getattr(option, "is_flag", False) else option.name.upper())
    if option.param_type_name == "argument":
        return str(word)
    names = [*option.opts, *option.secondary_opts]
    return " ".join(filter(None, [" / ".join(names), "" if option.is_flag else word]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
