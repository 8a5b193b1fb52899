"""Whether workers wait for one another in vain, each at another place of its script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.core.stands import describe_mismatch
from atoll.wire.messages import WorkerStand


@dataclass(frozen=True)
class Waits:
    """What some wait for (a meeting, or an iteration): who is `needed` for it, and where those stand who have
    done their part and wait. Both by contributor: a worker, or a group of workers."""

    needed: frozenset[int]
    stands: Mapping[int, WorkerStand]


def deadlock(meeting: Waits, iteration: Waits) -> str:
    """The line that says who stands where, if neither the meeting nor the iteration can take place any more:
    everyone who is needed waits, some for the one and some for the other. Empty while anyone who is needed
    computes: it may come to either."""
    both = meeting, iteration
    waiting = meeting.stands.keys() | iteration.stands.keys()
    if not meeting.needed | iteration.needed <= waiting:
        return ""
    if any(not each.stands or each.needed <= each.stands.keys() for each in both):
        return ""
    return line_of([*meeting.stands.values(), *iteration.stands.values()])


def line_of(stands: list[WorkerStand]) -> str:
    """Who stands where, in order of worker."""
    return describe_mismatch({each.worker: each.stand for each in sorted(stands, key=lambda s: s.worker)})
