"""Mapping between workers and contributors, in a run with groups, for logs and rings."""

from __future__ import annotations

from atoll.groups.formation import Formation
from atoll.hub.links import LinkDesk
from atoll.store.leases import Key
from atoll.store.members import Membership


class Contributors:
    """A view of the groups in `formation`, of a run's `members`; `desk` measures links."""

    def __init__(self, members: Membership, formation: Formation, desk: LinkDesk) -> None:
        self._members, self._workers = members, members.workers
        self._formation, self._desk = formation, desk

    def grouping_of(self, incarnation: int) -> int:
        """The number of the latest grouping for a worker; 0 if there is none."""
        rank = self._workers.rank_of(incarnation)
        return self._formation.grouping_of(rank) if rank is not None else 0

    def wants_links(self, incarnation: int) -> bool:
        """True if a worker's links are to be measured. All are, until the run has begun."""
        rank = self._workers.rank_of(incarnation)
        if not self._desk.measures or rank is None:
            return False
        return not self._members.begun or self._desk.wants(rank)

    def name(self, contributor: int, life: int) -> str:
        """Name of a contributor for people."""
        if contributor in self._formation.numbers:
            return f"group {contributor}"
        return f"worker {contributor}, incarnation {life}"

    def looked_for(self, rank: int) -> Key | None:
        """The log's key for a worker's connection; None unless the worker is its contributor's only
        member."""
        keys = self._formation.contributors_of(rank)
        alone = len(keys) == 1 and self._formation.members(keys[0][0]) == (rank,)
        return keys[0] if alone else None

    def worker_of(self, contributor: int) -> int | None:
        """The incarnation of a contributor's only member; None if there are several."""
        members = self._formation.members(contributor)
        return self._workers.live().get(members[0]) if len(members) == 1 else None
