"""When a node's own contributions go to the others, and when it drops what is kept."""

from __future__ import annotations

import math

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Drop, SendPart
from atoll.peers.settings import Settings
from atoll.peers.standing import Standing
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life


class Delivery:
    """The node's own contributions, which go to everybody that has room for them."""

    def __init__(
        self, standing: Standing, contributions: Contributions, settings: Settings, out: Outbox
    ) -> None:
        self._standing, self._contributions, self._settings = standing, contributions, settings
        self._out = out
        self._withheld: dict[Life, list[Key]] = {}  # for which a member has no room yet

    def install(self, _now: float, /) -> None:
        """A view holds from now on."""
        others = self._contributions.others()
        self._withheld = {life: keys for life, keys in self._withheld.items() if life in others}

    def give(self, key: Key) -> None:
        """A contribution of its own goes to everybody."""
        self._contributions.hold(key)
        for life in self._contributions.others():
            if key.stream == "iterations" and key.number >= self._room(life):
                self._withheld.setdefault(life, []).append(key)
            else:
                self._out.add(SendPart(life.node, key))

    def release(self) -> None:
        """Send what there was no room for at the receiver, where there is now."""
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
    """What every member has applied is kept no longer, nor what has come in part and is of no use."""

    def __init__(self, contributions: Contributions, out: Outbox) -> None:
        self._contributions, self._out = contributions, out
        self._dropped: tuple[float, float] = (-1, -1)  # below which iterations and meetings
        self._arriving: set[Key] = set()  # some of whose payload is here

    def install(self, _now: float, /) -> None:
        """A view holds from now on."""
        self._dropped = (-1, -1)

    def handle_arriving(self, key: Key) -> None:
        self._arriving.add(key)

    def handle_arrived(self, key: Key) -> None:
        self._arriving.discard(key)

    def drop(self) -> None:
        """Drop what is of no use by now."""
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
