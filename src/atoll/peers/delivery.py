"""Sending a node's own contributions, and dropping payloads that nobody needs."""

from __future__ import annotations

import math

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Drop, SendPart
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import NodeStanding
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life


class Delivery:
    """Sends the node's own contributions to every member that has room for them."""

    def __init__(
        self, standing: NodeStanding, contributions: Contributions, settings: NodeSettings, out: Outbox
    ) -> None:
        self._standing, self._contributions, self._settings = standing, contributions, settings
        self._out = out
        self._withheld: dict[Life, list[Key]] = {}  # by a member that has no room for them yet

    def install(self, _now: float, /) -> None:
        """Begin a view."""
        others = self._contributions.others()
        self._withheld = {life: keys for life, keys in self._withheld.items() if life in others}

    def give(self, key: Key) -> None:
        """Hold a contribution of this node, and send it to every other member that has room."""
        self._contributions.hold(key)
        for life in self._contributions.others():
            if key.stream == "iterations" and key.number >= self._room(life):
                self._withheld.setdefault(life, []).append(key)
            else:
                self._out.add(SendPart(life.node, key))

    def release(self) -> None:
        """Send the withheld contributions for which the receiver has room now."""
        acks = self._contributions.iterations.acks
        for life, keys in list(self._withheld.items()):
            room = self._room(life)
            while keys and keys[0].number < room:
                key = keys.pop(0)
                if acks[life].get(self._standing.life, 0) <= key.number:
                    self._out.add(SendPart(life.node, key))
            if not keys:
                del self._withheld[life]

    def _room(self, life: Life) -> int:
        return self._contributions.applied_by(life) + self._settings.slots


class Dropping:
    """Drops what every member has applied, and partly received payloads that will never be taken."""

    def __init__(self, contributions: Contributions, out: Outbox) -> None:
        self._contributions, self._out = contributions, out
        self._dropped: tuple[float, float] = (-1, -1)  # iterations and meetings below these
        self._arriving: set[Key] = set()  # keys with part of their payload here

    def install(self, _now: float, /) -> None:
        """Begin a view."""
        self._dropped = (-1, -1)

    def handle_arriving(self, key: Key) -> None:
        self._arriving.add(key)

    def handle_arrived(self, key: Key) -> None:
        self._arriving.discard(key)

    def drop(self) -> None:
        """Drop the payloads that are of no use by now."""
        contributions = self._contributions
        if useless := sorted(key for key in self._arriving if contributions.useless(key)):
            self._arriving.difference_update(useless)
            self._out.add(Drop(tuple(useless)))
        iterations, meetings = contributions.iterations, contributions.meetings
        applied = min([contributions.applied, *contributions.floors(iterations)])
        own = contributions.met if contributions.has_met else math.inf
        met = min([own, *contributions.floors(meetings)])
        if (applied, met) == self._dropped:
            return
        self._dropped = (applied, met)
        if met < math.inf:  # what all have met needs no other holder
            for life in meetings.prefix:
                meetings.settle(life, int(met))
        keys = iterations.unneeded(applied) + meetings.unneeded(met)
        if keys:
            self._out.add(Drop(tuple(keys)))
