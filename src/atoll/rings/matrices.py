"""Matrices of numbers between members, checked; and who is who in what is said about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UserError

Matrix = NDArray[np.float64]


class Names:
    """How members are called in messages: by the caller's names, else by their numbers."""

    def __init__(self, names: Sequence[str] | None, members: int) -> None:
        if names is not None and len(names) != members:
            raise UserError(f"{len(names)} names for {members} members: each member has one")
        self._names = names

    def of(self, member: int) -> str:
        return self._names[member] if self._names is not None else f"member {member}"

    def listed(self, members: Sequence[int], most: int = 5) -> str:
        """The first of them, and how many more."""
        said = ", ".join(self.of(member) for member in members[:most])
        more = len(members) - most
        return f"{said} and {more} more" if more > 0 else said


def checked(
    what: str, rows: Sequence[Sequence[float]] | Matrix, names: Sequence[str] | None = None
) -> Matrix:
    """The rows as a matrix whose diagonal is 0, whatever it was: nobody has a link to himself.

    Raises UserError, of one line that names row or members, where there is no member, the matrix is not
    square, or a number is missing, not finite or negative.
    """
    members = len(rows)
    if not members:
        raise UserError(f"{what}: an empty matrix; there is no member")
    called = Names(names, members)
    for index, row in enumerate(rows):
        if not hasattr(row, "__len__") or isinstance(row, str):
            raise UserError(f"{what}: row {index} is {row!r}: must be a row of {members} numbers")
        if len(row) != members:
            raise UserError(
                f"{what}: row {index} has {len(row)} numbers, and there are {members} rows: must be square"
            )
    matrix = np.array([[_number(cell) for cell in row] for row in rows], dtype=np.float64)
    np.fill_diagonal(matrix, 0.0)
    for wrong, why in (
        (~np.isfinite(matrix), "must be a finite number"),
        (matrix < 0, "must not be negative"),
    ):
        if wrong.any():
            source, target = (int(index) for index in np.argwhere(wrong)[0])
            given: Any = rows[source][target]
            raise UserError(
                f"{what}: from {called.of(source)} to {called.of(target)}: {given}: {why}; 0 is no link"
            )
    return matrix


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return float("nan")


def check_connected(both: Matrix, names: Names) -> None:
    """Raises UserError where links that are not 0 do not join all members; names those on their own side.

    `both` is symmetric: the links that carry something each way.
    """
    apart = np.flatnonzero(~reached(both > 0, 0))
    if len(apart):
        alone = [int(member) for member in apart]
        raise UserError(
            f"no links join {names.listed(alone)} to {names.of(0)}: every member must be reached, each way"
        )


def reached(links: NDArray[np.bool_], start: int) -> NDArray[np.bool_]:
    """Which members can be reached from `start` over `links` (from row to column)."""
    seen: NDArray[np.bool_] = np.zeros(len(links), dtype=np.bool_)
    seen[start] = True
    edge: NDArray[np.bool_] = seen
    while edge.any():
        edge = links[edge].any(axis=0) & ~seen
        seen = seen | edge
    return seen
