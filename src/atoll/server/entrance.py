"""Transfer of state through shard 0 from a live worker to a newcomer.

The newcomer asks, the live worker with the lowest rank is asked, and its state is forwarded without being
kept. If the giver dies first, the next worker is asked. A newcomer whose connection was lost asks again and
is served again.

If nobody lives at a site, another site's worker gives its state. The site's shard asks the global log, to
which the site is one worker. The global log asks another site, whose shard asks one of its own workers and
passes the state up.

Pending requests are part of the log's state: the answer decides from which meeting on a newcomer is waited
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from atoll.server.peers import Peers
from atoll.wire import messages
from atoll.wire.messages import Count

Life = tuple[int, int]  # a worker, and its incarnation


class Want(msgspec.Struct, forbid_unknown_fields=True):
    """A newcomer's request for the state before `iteration`. `asked` is the worker that was asked to give it;
    `above` is True if another site was asked. `outside` is True if the newcomer is another site, as the
    global log numbers it."""

    iteration: Count
    asked: Life | None = None
    above: bool = False
    outside: bool = False


class Above(Protocol):
    """The global log, as a site uses it."""

    def ask(self, iteration: int) -> None:
        """Request the state of another site's worker."""

    def give(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Send up the state that a worker of this site gives to another site."""


class Entrance:
    """Pending requests of newcomers, and the workers asked to serve them. `wants` is the persistent state;
    givers are sought in its order. A live giver that says Hello again, after a restart say, is asked
    again."""

    def __init__(self, peers: Peers, wants: dict[Life, Want], above: Above | None = None) -> None:
        self._peers, self.wants, self._up = peers, wants, above

    def want(self, worker: int, incarnation: int, iteration: int, *, outside: bool = False) -> None:
        """Register a newcomer's request for the state before `iteration`; `look` then finds a giver."""
        self.wants[worker, incarnation] = Want(iteration, outside=outside)

    def give(self, give: messages.GiveState, payload: memoryview | None) -> bool:
        """Forward the state that a live worker gives; False if no request is pending, as for a duplicate."""
        want = self.wants.pop((give.worker, give.life), None)
        if want is None:
            return False
        self._hand(want, give, payload)
        return True

    def given_from_above(
        self, give: messages.GiveState, payload: memoryview | None, meeting: int
    ) -> list[messages.GiveState]:
        """Forward another site's state to all newcomers that wait for one. `meeting` is the number of the
        site's next meeting. Returns the messages sent."""
        given = []
        for life in sorted(life for life, want in self.wants.items() if want.above):
            own = messages.GiveState(
                worker=life[0],
                life=life[1],
                meeting=give.meeting if give.members else meeting,
                members=[*give.members[:1], life[0]] if give.members else [],
                refused=give.refused,
            )
            self._hand(self.wants.pop(life), own, payload)
            given.append(own)
        return given

    def ask_again(self, worker: int, incarnation: int) -> None:
        """Forget that this worker was asked: requests to its earlier connection may be lost."""
        for want in self.wants.values():
            if want.asked == (worker, incarnation):
                want.asked = None

    def remind(self, worker: int, incarnation: int) -> None:
        """Repeat requests to this group, because another member speaks for it now."""
        for life, want in self.wants.items():
            if want.asked == (worker, incarnation):
                self._ask_for(life, want.iteration, (worker, incarnation))

    def _ask_for(self, life: Life, iteration: int, giver: Life) -> None:
        asked = messages.WantState(iteration=iteration, worker=life[0], life=life[1])
        self._peers.send(self._peers.worker(*giver), asked)

    def _hand(self, want: Want, give: messages.GiveState, payload: memoryview | None) -> None:
        """Send the state to the newcomer."""
        if want.outside and self._up is not None:
            self._up.give(give, payload)
        else:
            self._peers.send(self._peers.worker(give.worker, give.life), give, payload)

    def look(self, live: Mapping[int, int], meeting: int) -> None:
        """Ask a live worker for each request that has no live giver. Newcomers learn if no giver is left.
        `live` maps each live worker to its incarnation; `meeting` is the number of the next meeting."""
        for life, want in list(self.wants.items()):
            if not want.outside and live.get(life[0]) != life[1]:
                del self.wants[life]  # the newcomer has died
            elif want.asked is None or live.get(want.asked[0]) != want.asked[1]:
                self._ask(life, want, live, meeting)

    def _ask(self, life: Life, want: Want, live: Mapping[int, int], meeting: int) -> None:
        givers = [each for each in sorted(live.items()) if each not in self.wants]
        if givers:
            want.asked = givers[0]
            self._ask_for(life, want.iteration, givers[0])
        elif self._up is None or want.outside:
            del self.wants[life]
            self._hand(want, messages.GiveState(worker=life[0], life=life[1], meeting=meeting), None)
        elif not want.above:
            want.above = True
            self._up.ask(want.iteration)
