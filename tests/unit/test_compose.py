"""Only `compose` asks what kind of strategy, reducer, store or membership an object is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.axes.cells import CELLS, Cell, config_of
from atoll.core.config import Config
from atoll.core.errors import UserError
from atoll.core.memory import Memory
from atoll.train.api.compose import compose
from atoll.train.api.place import Place
from support.pool import ring_of_one

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
COMPOSE = "train/api/compose.py"
# What every class of a kind comes from: a class below one of these is of the kind too.
ASKING = ("isinstance", "issubclass")
ROOTS = {
    "Alone", "OverRing", "Served", "ServedInTiers", "Peers",  # strategies
    "Reducer", "Tiers", "Fitted", "Workers", "WorkerMeeting", "ParameterOptimizer", "ChunkOptimizer",
    "ServedEntrance", "Service", "HubRing", "NodeWorker",
}  # fmt: skip


def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def kinds(sources: dict[str, ast.Module]) -> set[str]:
    """The roots, and every class of `memory` and `train` below one."""
    bases = {
        node.name: {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        for name, tree in sources.items()
        if name.startswith(("memory/", "train/", "tensors/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = set(ROOTS)
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def asked(tree: ast.AST, of: set[str]) -> Iterator[str]:
    """Each `isinstance(x, Kind)` and `match` of one of these kinds, by line."""
    for node in ast.walk(tree):
        names: set[str] = set()
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(called, ast.Name) and called.id in ASKING:
            names = {
                part.id for each in node.args[1:] for part in ast.walk(each) if isinstance(part, ast.Name)
            }
        elif isinstance(node, ast.MatchClass):
            names = {ast.unparse(node.cls)}
        if names & of:
            yield f"line {getattr(node, 'lineno', 0)}: {', '.join(sorted(names & of))}"


@pytest.mark.check
def test_nobody_but_compose_asks_what_kind_an_object_is() -> None:
    sources = trees()
    of = kinds(sources)
    assert {"RingReducer", "MeanExchange", "Sharded", "GroupMeeting", "LentTiers"} <= of
    found = {name: [*asked(tree, of)] for name, tree in sources.items() if name != COMPOSE}
    assert {name: places for name, places in found.items() if places} == {}
    assert len([*asked(sources[COMPOSE], of)]) == 2  # the way in which the worker has joined


def test_the_checker_finds_what_is_planted() -> None:
    planted = "if isinstance(reducer, (Other, Reducer)):\n    pass\nassert isinstance(a, Sharded)\n"
    planted += "match a:\n    case Served():\n        pass\n"
    assert len([*asked(ast.parse(planted), ROOTS | {"Sharded"})]) == 3


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if cell.sync == "local" and cell.link == "tcp"], ids=str
)
def test_a_worker_without_others_is_composed_by_its_place(cell: Cell) -> None:
    place = ring_of_one() if cell.group == "ring" else Place()
    runtime = compose(config_of(cell), place, None)
    memory = config_of(cell).memory
    assert runtime.cell(config_of(cell), memory if cell.budgets else None) == cell
    assert (runtime.ring is not None) == (cell.group == "ring")
    tiers = runtime.tiers(config_of(cell), None)
    assert (tiers is not None) == cell.budgets
    if tiers is not None:
        assert tiers.has_members == (cell.store == "sharded")
    runtime.workers.close()
    if runtime.ring is not None:
        runtime.ring.close()


def test_a_model_is_refused_before_anything_of_it_is_touched() -> None:
    config = Config().having(run={"elastic": True})
    runtime = compose(config, ring_of_one(), None)
    with pytest.raises(UserError, match=r"^run\.elastic lets a run go on without a worker that has died"):
        runtime.tiers(config, Memory(device="1GiB"))
    assert runtime.tiers(config, None) is None
    assert runtime.ring is not None
    runtime.workers.close()
    runtime.ring.close()
