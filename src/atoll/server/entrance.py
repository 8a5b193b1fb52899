"""Shard 0 as a mailbox: a worker that comes late gets from a living one what is not at the shards.

The newcomer asks, the lowest living worker is asked, and what it gives is passed on, not kept. If it dies
before, the next one is asked; a newcomer that asks again (its connection was lost) is served again.

At a site where nobody lives, another site's worker gives its state: the site's shard asks the global log,
which knows it as one worker, and asks another site; that site's shard has one of its own workers give, and
passes it up.

Who wants something decides from which meeting on a newcomer is waited for, so it belongs to the log's state.
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
    """What a newcomer wants: the state before `iteration`. `asked` is who is to give it; `above`: another
    site is. `outside`: the newcomer is another site, as the global log names it."""

    iteration: Count
    asked: Life | None = None
    above: bool = False
    outside: bool = False


class Above(Protocol):
    """The global log, to a site."""

    def ask(self, iteration: int) -> None:
        """Ask for the state of another site's worker."""

    def give(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """Pass up what this site's worker gives to another site."""


class Entrance:
    """What newcomers want, and who was asked for it. `wants` is its state, in the order in which givers are
    looked for. After a restart, who was asked and lives is asked again when it says Hello."""

    def __init__(self, peers: Peers, wants: dict[Life, Want], above: Above | None = None) -> None:
        self._peers, self.wants, self._up = peers, wants, above

    def want(self, worker: int, incarnation: int, iteration: int, *, outside: bool = False) -> None:
        """A newcomer asks for the state before `iteration`; `look` sees to it."""
        self.wants[worker, incarnation] = Want(iteration, outside=outside)

    def give(self, give: messages.GiveState, payload: memoryview | None) -> bool:
        """Pass on what a living worker gives; False where nobody wants it. Given twice: the first counts."""
        want = self.wants.pop((give.worker, give.life), None)
        if want is None:
            return False
        self._hand(want, give, payload)
        return True

    def given_from_above(
        self, give: messages.GiveState, payload: memoryview | None, meeting: int
    ) -> list[messages.GiveState]:
        """Another site gives: hand it to all who wait for that; `meeting` is the site's next. Returns what
        they were given."""
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
        """This one is on a new connection: what it was asked for may not have reached it."""
        for want in self.wants.values():
            if want.asked == (worker, incarnation):
                want.asked = None

    def remind(self, worker: int, incarnation: int) -> None:
        """Another member speaks for this one now: who was asked may be gone."""
        for life, want in self.wants.items():
            if want.asked == (worker, incarnation):
                self._ask_for(life, want.iteration, (worker, incarnation))

    def _ask_for(self, life: Life, iteration: int, giver: Life) -> None:
        asked = messages.WantState(iteration=iteration, worker=life[0], life=life[1])
        self._peers.send(self._peers.worker(*giver), asked)

    def _hand(self, want: Want, give: messages.GiveState, payload: memoryview | None) -> None:
        """To the newcomer."""
        if want.outside and self._up is not None:
            self._up.give(give, payload)
        else:
            self._peers.send(self._peers.worker(give.worker, give.life), give, payload)

    def look(self, live: Mapping[int, int], meeting: int) -> None:
        """Ask somebody who lives for what nobody living was asked for; tell newcomers where nobody is left.
        `meeting` is the next one's number."""
        for life, want in list(self.wants.items()):
            if not want.outside and live.get(life[0]) != life[1]:
                del self.wants[life]  # it has died itself
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
