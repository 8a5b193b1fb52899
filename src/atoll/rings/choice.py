"""A ring, several, or a tree: the one that costs least, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.errors import UserError
from atoll.core.units import format_rate, format_seconds
from atoll.rings.disjoint import Rings
from atoll.rings.matrices import Matrix, Names, checked
from atoll.rings.order import NoRingError, Ring, order
from atoll.rings.trees import Tree, tree

Shape: TypeAlias = Ring | Rings | Tree
Score: TypeAlias = Callable[[Shape], float]


@dataclass(frozen=True)
class Choice:
    """The shape that was taken, what its score is in seconds, the reason in words, and the score of each
    shape that there was, by name: `ring`, `rings`, `tree`.
    """

    shape: Shape
    seconds: float
    reason: str
    scores: dict[str, float]


def choose(
    bandwidths: Sequence[Sequence[float]] | Matrix,
    *,
    score: Score,
    latencies: Sequence[Sequence[float]] | Matrix | None = None,
    both_ways: bool = False,
    rings: Rings | None = None,
    names: Sequence[str] | None = None,
) -> Choice:
    """Of the best ring, the set of rings that is given, and the best tree, the one with the lowest score.

    `score` gives a shape's cost in seconds. The matrices, `both_ways` and `names` are those of `order`;
    `rings` come from `disjoint`. Where no ring was found the tree is taken, and the reason says so. Raises
    UserError for wrong matrices, and where neither a ring nor a tree joins all members.
    """
    matrix = checked("bandwidths", bandwidths, names)
    called = Names(names, len(matrix))
    shapes: dict[str, Shape] = {}
    missing = ""
    try:
        shapes["ring"] = order(matrix, latencies=latencies, both_ways=both_ways, names=names)
    except NoRingError as error:
        missing = str(error)
    if rings is not None:
        shapes["rings"] = rings
    try:
        shapes["tree"] = tree(matrix, latencies=latencies, score=score, names=names)
    except UserError:  # links that go one way only: a ring may go over them
        if not shapes:
            raise
    scores = {name: score(shape) for name, shape in shapes.items()}
    best = min(scores, key=lambda name: scores[name])
    others = [f"{_named(name)} {format_seconds(scores[name])}" for name in scores if name != best]
    reason = f"{_described(shapes[best], called)}: {format_seconds(scores[best])}"
    if others:
        reason += f", against {', '.join(others)}"
    if missing:
        reason += f"; {missing}"
    return Choice(shapes[best], scores[best], reason, scores)


def _named(name: str) -> str:
    return {"ring": "a ring's", "rings": "the set of rings'", "tree": "a tree's"}[name]


def _described(shape: Shape, called: Names) -> str:
    if isinstance(shape, Rings):
        return f"{len(shape.rings)} rings at once, {shape.links} links wide"
    slowest = f"slowest link {format_rate(8 * shape.slowest)}"
    if isinstance(shape, Ring):
        return f"a ring of {len(shape.members)}, {slowest}"
    return f"a tree from {called.of(shape.root)} in {shape.steps} steps, {slowest}"
