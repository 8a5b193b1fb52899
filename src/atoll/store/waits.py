"""Detection of workers that wait for each other in vain, at different places of their scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.stands import describe_mismatch
from atoll.wire.messages import WorkerStand


@dataclass(frozen=True)
class Waits:
    """The contributors (workers or groups) that a meeting or an iteration needs, and the places of those that
    wait for it.

    Attributes:
        needed: contributors without which it cannot take place.
        stands: the place of each contributor that has done its part.
    """

    needed: frozenset[int]
    stands: Mapping[int, WorkerStand]


def deadlock(meeting: Waits, iteration: Waits) -> str:
    """Return the line of a deadlock between a meeting and an iteration; empty for none.

    In a deadlock every needed contributor waits, some for the meeting and some for the iteration. While one
    still computes there is none, as it may come to either.
    """
    both = meeting, iteration
    waiting = meeting.stands.keys() | iteration.stands.keys()
    if not meeting.needed | iteration.needed <= waiting:
        return ""
    if any(not each.stands or each.needed <= each.stands.keys() for each in both):
        return ""
    return line_of([*meeting.stands.values(), *iteration.stands.values()])


def line_of(stands: list[WorkerStand]) -> str:
    """Return the line that names each worker's place, in order of worker."""
    return describe_mismatch({each.worker: each.stand for each in sorted(stands, key=lambda s: s.worker)})
