"""Requests of a node for the contributions that it lacks."""

from __future__ import annotations

from atoll.peers.contributions import Contributions
from atoll.peers.entrance import Entrance
from atoll.peers.fetching import Fetching
from atoll.peers.ledger import MOST_MISSING
from atoll.peers.outbox import Outbox
from atoll.peers.standing import Due, NodeStanding, name_of
from atoll.wire.peers import FetchParts, Key


class Requests:
    """Requests the contributions that others hold and this node lacks."""

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        entrance: Entrance,
        fetching: Fetching,
        out: Outbox,
        due: Due,
    ) -> None:
        self._standing, self._contributions, self._entrance = standing, contributions, entrance
        self._fetching, self._out, self._due = fetching, out, due

    def poll(self, now: float) -> None:
        if not self._due.missing and now < self._fetching.deadline:
            return
        self._due.missing = False
        contributions, keys = self._contributions, []
        for ledger in (contributions.iterations, contributions.meetings):
            for life in ledger.prefix:
                if life != self._standing.life:
                    numbers = ledger.missing(life, contributions.room(life, ledger))
                    keys += [Key(ledger.stream, number, life) for number in numbers]
        keys += [key for key in self._wanted() if key not in keys]
        # Contributions made before the others knew a newcomer were never sent to it.
        self._fetching.update(now, keys, hurry=self._entrance.is_new)
        if now < self._fetching.deadline:
            return
        for node, asked in self._fetching.poll(now, self._sources).items():
            what = f"{len(asked)} contributions from node {node} did not come"
            self._out.note("fetched", name_of(asked[0].life), what)
            self._out.send(node, FetchParts(report=contributions.report(), keys=asked))

    def _wanted(self) -> list[Key]:
        """Return the keys that the change of the view waits for."""
        keys, contributions = [], self._contributions
        for each in contributions.wanted:
            for ledger, stop in (
                (contributions.iterations, each.held.iterations),
                (contributions.meetings, each.held.meetings),
            ):
                start = ledger.prefix.get(each.held.life, stop)
                stop = min(stop, start + MOST_MISSING)  # later calls request the rest
                numbers = (Key(ledger.stream, number, each.held.life) for number in range(start, stop))
                keys += [key for key in numbers if not ledger.has(key)]
        return keys

    def _sources(self, key: Key) -> list[int]:
        """Return the nodes to request `key` from: those that report to hold it, then all others."""
        contributions = self._contributions
        holding = [life.node for life in contributions.ledger(key).holders(key)]
        return holding + [life.node for life in contributions.others() if life.node not in holding]
