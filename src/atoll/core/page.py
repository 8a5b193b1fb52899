"""Write docs/reference/configuration.md from the configuration's structs: `python -m atoll.core.page`.

With a path the page is written there; without one it is printed.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from atoll.core.config import Config, keys_of_sections
from atoll.core.options import Option, summary_of

_WIDTH = 100
_HEADING = """
This page is generated from the structs of `src/atoll/core/config.py` and `src/atoll/core/memory.py`. After a
change of a key run `python -m atoll.core.page docs/reference/configuration.md`.
[configuration.md](../configuration.md) says where values come from.
"""
_KINDS = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}


def page() -> str:
    """The page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Keys of the configuration"
    yield ""
    yield from textwrap.wrap(" ".join(_HEADING.split()), _WIDTH, break_on_hyphens=False)
    kinds = get_type_hints(Config)
    for section, keys in keys_of_sections().items():
        yield ""
        yield f"## {section}"
        yield ""
        said = summary_of(kinds[section]).partition("\n\n")[0]
        yield from textwrap.wrap(" ".join(said.split()), _WIDTH, break_on_hyphens=False)
        yield ""
        yield "| key | value | default | meaning |"
        yield "| --- | --- | --- | --- |"
        for key, option in keys.items():
            default = msgspec.json.encode(option.default).decode()
            meaning = re.sub(r"\]\((?=[\w-]+\.md)", "](../", option.meaning).replace("|", "\\|")
            yield f"| `{section}.{key}` | {_value(option)} | `{default}` | {meaning} |"


def _value(option: Option) -> str:
    """What a key's value is: its unit, its choices or its type."""
    if option.unit is not None:
        return {"SPAN": "span of time", "SIZE": "size", "RATE": "rate"}[option.unit.word]
    if option.choices:
        return ", ".join(f"`{each}`" for each in option.choices)
    kind: Any = option.kind
    return _KINDS[kind]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
