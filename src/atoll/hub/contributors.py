"""Who speaks for whom, in a run whose workers are in groups: what logs and rings are told of a worker."""

from __future__ import annotations

from atoll.groups.formation import Formation
from atoll.hub.book import Book
from atoll.hub.links import LinkDesk
from atoll.store.leases import Key


class Contributors:
    """A view of the groups of the run in `book`, as they are in `formation`; `desk` has links measured."""

    def __init__(self, book: Book, formation: Formation, desk: LinkDesk) -> None:
        self._book, self._workers = book, book.members.workers
        self._formation, self._desk = formation, desk

    def grouping_of(self, incarnation: int) -> int:
        """The latest grouping that is meant for a worker; 0 where there is none."""
        rank = self._workers.rank_of(incarnation)
        return self._formation.grouping_of(rank) if rank is not None else 0

    def wants_links(self, incarnation: int) -> bool:
        """Whether a worker's links are to be measured: at first, once all are there."""
        rank = self._workers.rank_of(incarnation)
        if not self._desk.measures or rank is None:
            return False
        return not self._book.begun or self._desk.wants(rank)

    def name(self, contributor: int, life: int) -> str:
        """A contributor, as a person reads it."""
        if contributor in self._formation.numbers:
            return f"group {contributor}"
        return f"worker {contributor}, incarnation {life}"

    def looked_for(self, rank: int) -> Key | None:
        """As whom the log knows a worker's connection, where that is nobody else's too."""
        keys = self._formation.contributors_of(rank)
        alone = len(keys) == 1 and self._formation.members(keys[0][0]) == (rank,)
        return keys[0] if alone else None

    def worker_of(self, contributor: int) -> int | None:
        """The incarnation of the only member of a contributor."""
        members = self._formation.members(contributor)
        return self._workers.live().get(members[0]) if len(members) == 1 else None
