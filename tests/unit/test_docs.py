"""The documentation names files, functions and keys: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec

from atoll.core.config import Config

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"`(\w+/\w+\.py)`:\s+`([\w.]+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def names_in(path: Path) -> set[str]:
    """Every function, class and method that a file defines, methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_function_that_the_architecture_names_exists() -> None:
    places = PLACE.findall((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert len(places) > 25
    missing = [
        f"{file}: {name}" for file, name in places if name not in names_in(ROOT / "src" / "atoll" / file)
    ]
    assert missing == []


def test_every_configuration_key_is_documented() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    keys = [f"{section}.{key}" for section, values in msgspec.to_builtins(Config()).items() for key in values]
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name} -> {target}"
        for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
