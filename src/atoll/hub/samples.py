"""The run's samples at the hub: leases to workers, and logs' reports of used samples."""

from __future__ import annotations

import msgspec

from atoll.core.errors import UserError
from atoll.hub.book import GLOBAL, Book
from atoll.hub.connections import Connections, given_up
from atoll.hub.contributors import Contributors
from atoll.hub.decisions import Decisions
from atoll.hub.records import LeaseRequest, UsageReport
from atoll.hub.turn import Turn
from atoll.wire.messages import Fenced, Lease


class Samples:
    """Leases samples to workers, and handles logs' reports."""

    def __init__(
        self,
        book: Book,
        connections: Connections,
        contributors: Contributors | None,
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._book, self._connections, self._contributors = book, connections, contributors
        self._decisions, self._turn = decisions, turn
        turn.handlers[Lease] = self.handle

    def handle(self, peer: bytes, lease: Lease) -> None:
        """Handle a worker's request for samples."""
        turn, book = self._turn, self._book
        rank = book.members.workers.rank_of(lease.incarnation)
        if rank is None or not self._connections.owns(peer, lease.incarnation):
            turn.refuse(peer, given_up(lease.incarnation), "Lease", lease.number)
            return
        asked, before = LeaseRequest(at=turn.now(), rank=rank, lease=lease), book.lease_changes()
        try:
            leased, first = book.lease(asked)
        except UserError as error:
            turn.refuse(peer, str(error), "Lease", lease.number)
            return
        if recorded := book.recorded(asked, before):
            turn.keep(recorded)
        members = book.members
        living = len(members.workers.members) if members.begun else members.workers.count
        turn.send(peer, msgspec.structs.replace(leased, workers=living))
        if first:
            reason = f"worker {rank} asks first for some of {lease.length} samples"
            self._decisions.add(_epoch((lease.sampler, lease.epoch)), "begun", reason)

    def told(self, log: str, fenced: Fenced) -> None:
        """Handle a log's report of the samples that an incarnation's commits used: all of them if the hub
        asked."""
        told = UsageReport(at=self._turn.now(), log=log, fenced=fenced)
        word = self._book.told(told)
        self._turn.keep(told)
        for key, dealt in word.epochs:
            shares = ", ".join(f"worker {rank} {count}" for rank, count in dealt.items())
            self._decisions.add(_epoch(key), "over", f"every sample was used; leased by rank: {shares}")
        if word.returned is not None:
            free = f"{word.returned} samples of its leases are free again"
            reason = f"{fenced.iteration} iterations of it count; {free}"
            self._decisions.add("fenced", self._name(log, fenced), reason)

    def _name(self, log: str, fenced: Fenced) -> str:
        sites = list(self._book.members.sites.workers)
        if log == GLOBAL and sites:
            return f"site {sites[fenced.worker]!r}"
        if self._contributors is not None:
            return self._contributors.name(fenced.worker, fenced.incarnation)
        return f"worker {fenced.worker}, incarnation {fenced.incarnation}"


def _epoch(key: tuple[int, int]) -> str:
    sampler, epoch = key
    return f"epoch {epoch} of sampler {sampler}"
