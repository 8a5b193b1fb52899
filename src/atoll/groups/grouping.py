"""Groupings: each worker in exactly one group, in canonical form, so that equal groupings compare equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from atoll.core.errors import UserError

_LONGEST_SHOWN = 120  # characters of a grouping in a sentence


@dataclass(frozen=True)
class Grouping:
    """Workers, by number, in groups. Members are sorted, and groups go by their first member.

    Raises UserError for a worker that appears twice, and for a group without members.
    """

    groups: tuple[tuple[int, ...], ...]

    def __init__(self, groups: Iterable[Iterable[int]]) -> None:
        canonical = tuple(sorted(tuple(sorted(group)) for group in groups))
        if canonical and not canonical[0]:  # the empty tuple sorts first
            raise UserError("a group has no members")
        workers = [worker for group in canonical for worker in group]
        if len(set(workers)) < len(workers):
            twice = next(worker for worker in sorted(workers) if workers.count(worker) > 1)
            raise UserError(f"worker {twice} is in more than one group, or twice in one")
        object.__setattr__(self, "groups", canonical)

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.groups)

    @property
    def workers(self) -> tuple[int, ...]:
        """All workers, ascending."""
        return tuple(sorted(worker for group in self.groups for worker in group))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of workers of each group."""
        return tuple(len(group) for group in self.groups)

    def group_of(self, worker: int) -> tuple[int, ...]:
        """Return the group of `worker`. Raises UserError if it is in none."""
        for group in self.groups:
            if worker in group:
                return group
        raise UserError(f"worker {worker} is in no group")

    def without(self, worker: int) -> Grouping:
        """Return the grouping without `worker`; a group of this worker alone disappears."""
        return Grouping(rest for group in self.groups if (rest := tuple(w for w in group if w != worker)))

    def check(self, workers: Iterable[int]) -> None:
        """Raise UserError unless exactly these workers are grouped."""
        wanted, there = set(workers), set(self.workers)
        if missing := sorted(wanted - there):
            raise UserError(f"worker {missing[0]} is in no group")
        if strange := sorted(there - wanted):
            raise UserError(f"worker {strange[0]} is in a group but not in this run")


def sizes_of(workers: int, groups: int) -> list[int]:
    """Return the sizes of `groups` groups of `workers`: the first workers mod groups have one member more.

    Raises UserError for no group, and for more groups than workers.
    """
    if groups < 1:
        raise UserError(f"{groups} groups: there must be at least 1")
    if groups > workers:
        raise UserError(
            f"{groups} groups of {workers} workers: a group has at least one, so at most {workers}"
        )
    size, more = divmod(workers, groups)
    return [size + 1] * more + [size] * (groups - more)


def show(grouping: Grouping, name: Callable[[int], str] = str) -> str:
    """Return `a b | c d`, or numbers of groups by size if that is too long for a sentence."""
    text = " | ".join(" ".join(name(worker) for worker in group) for group in grouping)
    if len(text) <= _LONGEST_SHOWN:
        return text
    counts: dict[int, int] = {}
    for size in sorted(grouping.sizes, reverse=True):
        counts[size] = counts.get(size, 0) + 1
    if len(counts) == 1:
        return f"one group of {size}" if len(grouping) == 1 else f"{len(grouping)} groups of {size}"
    parts = [f"{count} of {size}" for size, count in counts.items()]
    shown = ", ".join(parts[:6]) + (", ..." if len(parts) > 6 else "")
    return f"{len(grouping)} groups: {shown}"
