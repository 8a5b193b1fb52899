"""The protocols of the axes: a page names whoever implements one, and none is there for nobody."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.axes import IMPLEMENTATIONS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "atoll"


def named_in(tree: ast.AST) -> set[str]:
    """The names that a module takes from others, or uses."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {alias.name for node in imports for alias in node.names}
    return found | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.check  # all modules are parsed
def test_each_class_of_the_axes_is_used() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    used = set().union(*(named_in(tree) for tree in trees.values()))
    defined = [
        node.name
        for path, tree in trees.items()
        if path.parent.name == "axes"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    assert set(defined) <= used


def test_a_class_that_nobody_names_is_found() -> None:
    planted = ast.parse("class Unused:\n    pass\n\nclass Used:\n    pass\n\nx: Used")
    assert "Used" in named_in(planted)
    assert "Unused" not in named_in(planted)


def test_the_page_on_the_architecture_names_each_implementation() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [each.__name__ for each in IMPLEMENTATIONS if f"`{each.__name__}`" not in page] == []
