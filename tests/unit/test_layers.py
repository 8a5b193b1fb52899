"""Who imports whom: the table of layers, checked against every import in src/atoll.

Every import counts, wherever it stands: in a function, under TYPE_CHECKING, in a `try`, or through
`importlib.import_module("...")` with a text.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "atoll"

PURE = {"ltp", "groups", "rings", "store", "peers", "moves"}
BASE = {"msgspec", "numpy"}
DATA = {"core", "chunks", "wire"}
BELOW_TRAIN = DATA | PURE | {"net", "axes", "tensors", "memory", "exchange", "observe"}
# What no decision may touch: a decision is given the time, its random numbers and its input.
IMPURE = {
    "asyncio",
    "multiprocessing",
    "random",
    "secrets",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
}


@dataclass(frozen=True)
class Layer:
    """What a layer may import: other layers, and packages beside the standard library."""

    layers: set[str]
    packages: set[str]
    forbidden: frozenset[str] = frozenset()  # of the standard library
    lazy: frozenset[str] = frozenset()  # packages that only functions may import: the command must start fast


TABLE = {
    "core": Layer(set(), BASE | {"tomli"}),
    "chunks": Layer({"core"}, BASE, frozenset(IMPURE)),
    "wire": Layer({"core"}, BASE, frozenset(IMPURE)),
    **{name: Layer({"core", "chunks", "wire"}, BASE, frozenset(IMPURE)) for name in PURE},
    "plan": Layer(DATA | PURE, BASE | {"matplotlib"}, lazy=frozenset({"matplotlib"})),
    "net": Layer({"core", "wire", "ltp"}, BASE | {"zmq", "cryptography"}),
    "axes": Layer({"core", "chunks"}, BASE | {"torch"}, frozenset(IMPURE), lazy=frozenset({"torch"})),
    "tensors": Layer({"core", "chunks", "axes"}, BASE | {"torch", "safetensors"}),
    "memory": Layer({"core", "chunks", "moves", "axes", "tensors"}, BASE | {"torch"}),
    "exchange": Layer(
        {"core", "chunks", "wire", "ltp", "net", "axes", "tensors", "memory"}, BASE | {"torch"}
    ),
    "observe": Layer(
        {"core"},
        BASE | {"rich", "matplotlib", "tensorboard", "prometheus_client"},
        lazy=frozenset({"matplotlib", "tensorboard", "prometheus_client"}),
    ),
    "train": Layer(BELOW_TRAIN | {"plan"}, BASE | {"torch"}),
    "logs": Layer({"core"}, BASE, frozenset(IMPURE)),
    "hub": Layer({"core", "wire", "net", "axes", "observe", "logs"} | PURE, BASE),
    "server": Layer(
        {"core", "chunks", "wire", "net", "axes", "exchange", "observe", "tensors", "logs"} | PURE,
        BASE | {"torch"},
    ),
    "cpuside": Layer(
        {"core", "chunks", "wire", "net", "axes", "exchange", "observe", "tensors", "memory"} | PURE,
        BASE | {"torch"},
    ),
    "lab": Layer({"core"}, BASE | {"rich", "matplotlib"}, lazy=frozenset({"matplotlib"})),
    "launch": Layer(
        {"core", "net", "axes", "train", "hub", "server", "cpuside", "lab", "observe"},
        BASE | {"torch", "rich", "matplotlib"},
        lazy=frozenset({"torch", "matplotlib"}),
    ),
    "cli": Layer(
        BELOW_TRAIN | {"plan", "train", "hub", "server", "cpuside", "lab", "launch"},
        BASE | {"typer", "rich"},
    ),
    "testing": Layer({"core"}, BASE),
}
# `import atoll` itself gives the session and the memory, and imports them only when they are asked for.
ROOT = Layer({"core", "memory", "train"}, set(), lazy=frozenset({"atoll.memory", "atoll.train"}))


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and where."""

    module: str
    line: int
    eager: bool  # runs when the module is imported


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import in a module that lies in `package` ("atoll.chunks"), nested ones included."""
    for node, eager in _walk(tree, eager=True):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            # `from atoll import chunks` imports atoll.chunks; `from atoll.chunks import Slot` a name of it.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "atoll" else [module]
            yield from (Import(name, node.lineno, eager) for name in names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, node.lineno, eager)


def _walk(node: ast.AST, eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = eager and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _both(statement, eager=False)
            for statement in child.orelse:
                yield from _both(statement, inside)
            continue
        yield child, inside
        yield from _walk(child, inside)


def _both(node: ast.AST, eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, eager
    yield from _walk(node, eager)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rsplit(".", 1)[-1]


def violations(source: str, file: str) -> list[str]:
    """What the module `file` ("chunks/layout.py") imports against the table, one line each."""
    parts = Path(file).parts
    layer = parts[0] if len(parts) > 1 else ""
    if layer and layer not in TABLE:
        return [f"{file}: the table knows no layer {layer!r}"]
    rules = TABLE[layer] if layer else ROOT
    found = []
    for item in imports_of(ast.parse(source), ".".join(["atoll", *parts[:-1]])):
        reason = _against(rules, layer, item)
        if reason:
            found.append(f"{file}:{item.line}: {reason}")
    return found


def _against(rules: Layer, layer: str, item: Import) -> str:
    top, _, rest = item.module.partition(".")
    if top == "atoll":
        return _against_layers(rules, layer, rest.split(".")[0], item)
    if top in rules.forbidden or item.module == "numpy.random":
        return f"{layer} decides by what it is given; it may not import {item.module}"
    if top in sys.stdlib_module_names or top == "tomllib":  # which is newer than Python 3.10
        return "" if top != "pickle" else "nothing is pickled"
    if top not in rules.packages:
        return f"{layer or 'atoll'} may not import the package {top}"
    if item.eager and top in rules.lazy:
        return f"{layer} may import {top} only inside a function: the command must start fast"
    return ""


def _against_layers(rules: Layer, layer: str, target: str, item: Import) -> str:
    """`target` is empty for `import atoll`, whose session the layers below train must not know."""
    if target in ("", "join", "Session", "__version__"):
        return "" if layer in ("cli", "launch") else f"{layer} may not import the package's root"
    if target == layer:
        return ""
    if target not in TABLE or target not in rules.layers:
        return f"{layer or 'atoll'} may not import {target}"
    if item.eager and f"atoll.{target}" in rules.lazy:
        return f"atoll may import {target} only when it is asked for"
    return ""


# Private names that Python documents.
DOCUMENTED = {"os._exit", "sys._current_frames"}


def foreign_private_names(source: str, file: str) -> list[str]:
    """The private names in a module that it does not define itself, one line each.

    A private name of `self`, or of a superclass, is the module's own.
    """
    tree = ast.parse(source)
    own, used = set(), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner in ("self", "cls", "super()"):
                own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            else:
                used.append((node.lineno, node.attr, f"{owner}.{node.attr}"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "atoll":
            used += [
                (node.lineno, name.name, f"{node.module}.{name.name}")
                for name in node.names
                if _is_private(name.name)
            ]
    return [
        f"{file}:{line}: {what}" for line, name, what in used if name not in own and what not in DOCUMENTED
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


MODULES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.check
def test_a_module_leaves_the_private_names_of_others_alone() -> None:
    """But for the places for those of torch, which test_torch_compat.py checks."""
    found, torchs = [], [f"tensors/torch_{name}.py" for name in ("compat", "scaling", "patches")]
    for path in MODULES:
        file = path.relative_to(SOURCE).as_posix()
        if file not in torchs:
            found += foreign_private_names(path.read_text(encoding="utf-8"), file)
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from atoll.memory.disk import _open", ["a.py:1: atoll.memory.disk._open"]),
        ("def f(session):\n    return session._ring", ["a.py:2: session._ring"]),
        ("def f(self):\n    return self.other._ring", ["a.py:2: self.other._ring"]),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("class A(B):\n    def f(self):\n        return self._x + super()._x", []),
        ("import os\nos._exit(1)", []),
    ],
)
def test_a_use_of_another_module_s_private_name_is_found(source: str, found: list[str]) -> None:
    assert foreign_private_names(source, "a.py") == found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    found = violations(path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix())
    assert not found, "\n".join(found)


@pytest.mark.check
def test_what_stands_outside_imports_only_modules_that_there_are() -> None:
    """A moved module is found here, and not by the first run of a soak test or of a benchmark."""
    there = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
    }
    root = SOURCE.parents[1]
    for folder in ("tests", "benchmarks", "docs", "examples"):
        for path in (root / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            missing = {each.module for each in imports_of(tree, folder) if each.module.startswith("atoll.")}
            missing -= there
            for node in ast.walk(tree):
                inits = SOURCE.parent.joinpath(
                    *(getattr(node, "module", None) or "-").split("."), "__init__.py"
                )
                if isinstance(node, ast.ImportFrom) and inits.is_file():
                    known = inits.read_text(encoding="utf-8")
                    names = {f"{node.module}.{each.name}" for each in node.names if each.name not in known}
                    missing |= names - there
            assert not missing, f"{path.relative_to(root)}: {', '.join(missing)}"


def test_the_table_is_a_stack() -> None:
    """Each layer imports layers that come before it; no circle, and no sibling among the pure ones."""
    order = list(TABLE)
    for name, layer in TABLE.items():
        assert layer.layers <= set(order[: order.index(name)]), name
    for name in PURE:
        assert not TABLE[name].layers & PURE, name
    assert not any("cli" in layer.layers or "testing" in layer.layers for layer in TABLE.values())


def test_the_command_starts_without_torch() -> None:
    """What the command line imports, with all that it imports in turn, in a fresh interpreter."""
    modules = [
        ".".join(["atoll", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        for path in MODULES
        if path.relative_to(SOURCE).parts[0]
        in ("core", "chunks", "axes", "rings", "plan", "observe", "lab", "launch", "cli")
    ]
    code = (
        f"import sys, {', '.join(modules)}\nprint([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_there_are_modules_to_check() -> None:
    assert {"core", "chunks"} <= {path.relative_to(SOURCE).parts[0] for path in MODULES}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/units.py", "import torch"),
        ("core/units.py", "from atoll.chunks import lay_out"),
        ("core/units.py", "from atoll import chunks"),
        ("core/units.py", "import atoll.chunks.layout"),
        ("core/units.py", "import atoll"),
        ("core/units.py", "import pickle"),
        ("core/units.py", "from .. import chunks"),
        ("core/units.py", "from ..chunks import lay_out"),
        ("chunks/layout.py", "import torch"),
        (
            "chunks/layout.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        ),
        ("chunks/layout.py", "def f():\n    import torch.nn"),
        ("chunks/layout.py", "class A:\n    def f(self):\n        from atoll.tensors import binding"),
        ("chunks/layout.py", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ("chunks/layout.py", "import importlib\nimportlib.import_module('torch')"),
        ("chunks/layout.py", "__import__('torch')"),
        ("chunks/layout.py", "x = lambda: __import__('torch')"),
        ("chunks/layout.py", "import time"),
        ("ltp/sender.py", "from atoll.moves import plan"),
        ("ltp/sender.py", "import socket"),
        ("ltp/sender.py", "import numpy.random"),
        ("ltp/sender.py", "from numpy.random import default_rng"),
        ("groups/maker.py", "import random"),
        ("groups/maker.py", "from threading import Lock"),
        ("groups/maker.py", "from atoll.net import channel"),
        ("axes/codec.py", "import torch"),
        ("axes/needs.py", "from atoll.tensors import binding"),
        ("observe/report.py", "import torch"),
        ("observe/report.py", "def f():\n    import torch"),
        ("observe/report.py", "import matplotlib.pyplot"),
        ("observe/report.py", "from atoll.train.api import session"),
        ("rings/order.py", "from atoll.plan import cost"),
        ("rings/order.py", "from atoll.groups import queue"),
        ("plan/cost.py", "import torch"),
        ("plan/figures.py", "from matplotlib.figure import Figure"),
        ("launch/run.py", "import torch"),
        ("launch/run.py", "from atoll.tensors import binding"),
        ("launch/run.py", "from atoll.cli import app"),
        ("cli/app.py", "from atoll.testing import faults"),
        ("cli/app.py", "import torch"),
        ("train/api/session.py", "from atoll.launch import run"),
        ("train/api/session.py", "import scipy"),
        ("hub/hub.py", "import torch"),
        ("tensors/binding.py", "from atoll.observe import journal"),
        ("exchange/link.py", "from atoll.train.api.session import Session"),
        ("exchange/link.py", "from atoll.server.shard import Shard"),
        ("cpuside/process.py", "from atoll.train.sync.peersworker import NodeWorker"),
        ("train/sync/peers.py", "from atoll.cpuside.process import CpuSideProcess"),
        ("__init__.py", "from atoll.train.api.session import join"),
        ("__init__.py", "from atoll.memory import fit"),
        ("__init__.py", "from atoll.tensors import binding"),
        ("garage/car.py", "import os"),
    ],
)
def test_the_checker_finds_a_planted_violation(file: str, source: str) -> None:
    found = violations(source, file)
    assert len(found) == 1, found
    assert found[0].startswith(file)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/units.py", "import os, msgspec\nfrom numpy import array\nfrom atoll.core import errors"),
        (
            "chunks/layout.py",
            "from atoll.core.errors import ConfigError\nfrom . import maps\nfrom .maps import Slot",
        ),
        ("observe/report.py", "import rich\ndef f():\n    from matplotlib.figure import Figure"),
        ("observe/report.py", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("axes/codec.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("launch/worker.py", "def main():\n    import torch"),
        ("train/api/session.py", "import torch\nfrom atoll.observe.journal import Journal"),
        ("__init__.py", "if TYPE_CHECKING:\n    from atoll.train.api.session import join"),
        ("__init__.py", "def __getattr__(name):\n    from atoll.train.api import session"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(file: str, source: str) -> None:
    assert violations(source, file) == []
