"""What others hold and this node lacks: when it is asked for, and whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.peers.pace import Limit
from atoll.wire.peers import Key

_DOUBLINGS = 5  # of the wait for what was asked for and has not come
BATCH = 256  # keys in one message


@dataclass
class _Missing:
    noticed: float
    due: float  # when to ask (again)
    tries: int = 0


class Fetching:
    """The keys that are missing. Most are on their way when they are noticed, so each has `limit` to come;
    where nothing is, in a `hurry`, none."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._missing: dict[Key, _Missing] = {}
        self.deadline = math.inf
        self.asked = 0  # keys, since the beginning

    def update(self, now: float, keys: Iterable[Key], hurry: bool = False) -> None:
        """These are missing now, and no others."""
        due = now if hurry else now + self._limit.seconds
        self._missing = {key: self._missing.get(key) or _Missing(now, due) for key in keys}
        self._set_deadline()

    def handle_arriving(self, now: float, key: Key) -> None:
        """Some of it has come: no need to ask yet."""
        self._put_off(now, key)

    def handle_arrived(self, now: float, key: Key) -> None:
        """All of it has come."""
        missing = self._missing.pop(key, None)
        if missing is not None:
            self._limit.note(now - missing.noticed, key.life.node)
        self._put_off(now, key)

    def _put_off(self, now: float, key: Key) -> None:
        """A node's parts come in order: what it made later is on its way as long as those before it come, be
        the link ever so slow. Asked for, it would come twice, and make the link slower."""
        due = now + self._limit.seconds
        for other, missing in self._missing.items():
            if (other.stream, other.life) == (key.stream, key.life) and other.number >= key.number:
                missing.due = max(missing.due, due)
        self._set_deadline()

    def poll(self, now: float, sources: Callable[[Key], list[int]]) -> dict[int, list[Key]]:
        """Whom to ask for which keys. `sources`: the nodes that have one, the best first; each is asked in
        its turn."""
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
