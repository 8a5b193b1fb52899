"""A node's requests for contributions that it lacks and others hold: when to send one, and to whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.peers.pace import Limit
from atoll.wire.peers import Key

_DOUBLINGS = 5  # of the wait after each request without an answer
BATCH = 256  # keys in one message


@dataclass
class _Missing:
    noticed: float
    due: float  # when to ask (again)
    tries: int = 0


class Fetching:
    """The missing keys. Most are on their way when they are noticed, so each has `limit` to arrive; in a
    `hurry` none is, and all are requested at once."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._missing: dict[Key, _Missing] = {}
        self.deadline = math.inf
        self.asked = 0  # keys, since the beginning

    def update(self, now: float, keys: Iterable[Key], hurry: bool = False) -> None:
        """Replace the missing keys."""
        due = now if hurry else now + self._limit.seconds
        self._missing = {key: self._missing.get(key) or _Missing(now, due) for key in keys}
        self._set_deadline()

    def handle_arriving(self, now: float, key: Key) -> None:
        """Put the request for `key` off: part of its payload has arrived."""
        self._put_off(now, key)

    def handle_arrived(self, now: float, key: Key) -> None:
        """Remove `key`, whose whole payload has arrived."""
        missing = self._missing.pop(key, None)
        if missing is not None:
            self._limit.note(now - missing.noticed, key.life.node)
        self._put_off(now, key)

    def _put_off(self, now: float, key: Key) -> None:
        """Put the requests for a node's later parts off.

        A node's parts come in order, so later ones are on their way while earlier ones arrive, however slow
        the link is. A requested part would come twice and slow the link further.
        """
        due = now + self._limit.seconds
        for other, missing in self._missing.items():
            if (other.stream, other.life) == (key.stream, key.life) and other.number >= key.number:
                missing.due = max(missing.due, due)
        self._set_deadline()

    def poll(self, now: float, sources: Callable[[Key], list[int]]) -> dict[int, list[Key]]:
        """Return the keys to request now, by node. `sources` gives the nodes that have a key, best first;
        each is asked in turn."""
        asks: dict[int, list[Key]] = {}
        for key, missing in self._missing.items():
            if now < missing.due:
                continue
            nodes = sources(key)
            wait = self._limit.seconds * 2.0 ** min(missing.tries, _DOUBLINGS)
            missing.due = now + wait
            if nodes:
                asks.setdefault(nodes[missing.tries % len(nodes)], []).append(key)
                missing.tries += 1
        self.asked += sum(len(keys) for keys in asks.values())
        self._set_deadline()
        return {node: keys[:BATCH] for node, keys in asks.items()}

    def _set_deadline(self) -> None:
        self.deadline = min((missing.due for missing in self._missing.values()), default=math.inf)
