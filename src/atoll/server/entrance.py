"""Shard 0 as a mailbox: a worker that comes late gets from a living one what is not at the shards.

The newcomer asks, the lowest living worker is asked, and what it gives is passed on, not kept. If it dies
before, the next one is asked; a newcomer that asks again (its connection was lost) is served again.

Who wants something decides from which meeting on a newcomer is waited for, so it belongs to the log's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from atoll.server.peers import Peers
from atoll.wire import messages
from atoll.wire.messages import Count

Life = tuple[int, int]  # a worker, and its incarnation


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a newcomer wants, as plain data: the state before `iteration`. `asked` is who is to give it, and
    `above` tells that another site is."""

    newcomer: Life
    iteration: Count
    asked: Life | None = None
    above: bool = False


@dataclass
class _Want:
    iteration: int
    asked: Life | None = None  # who is to give


class Entrance:
    """What newcomers want, and who was asked for it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._wants: dict[Life, _Want] = {}

    def state(self) -> list[Wanted]:
        """All that it remembers, in the order in which givers are looked for."""
        return [Wanted(life, want.iteration, want.asked) for life, want in self._wants.items()]

    def restore(self, state: list[Wanted]) -> None:
        """Be what `state` gave. Who was asked then, and lives, is asked again when it says Hello."""
        self._wants = {wanted.newcomer: _Want(wanted.iteration, wanted.asked) for wanted in state}

    def want(self, worker: int, incarnation: int, iteration: int) -> None:
        """A newcomer asks for the state before `iteration`; `look` sees to it."""
        self._wants[worker, incarnation] = _Want(iteration)

    def give(self, give: messages.GiveState, payload: memoryview | None) -> bool:
        """Pass on what a living worker gives; False where nobody wants it. Given twice: the first counts."""
        if self._wants.pop((give.worker, give.life), None) is None:
            return False
        self._hand(give, payload)
        return True

    def ask_again(self, worker: int, incarnation: int) -> None:
        """This one is on a new connection: what it was asked for may not have reached it."""
        for want in self._wants.values():
            if want.asked == (worker, incarnation):
                want.asked = None

    def remind(self, worker: int, incarnation: int) -> None:
        """Another member speaks for this one now: who was asked may be gone."""
        for life, want in self._wants.items():
            if want.asked == (worker, incarnation):
                self._ask_for(life, want.iteration, (worker, incarnation))

    def _ask_for(self, life: Life, iteration: int, giver: Life) -> None:
        asked = messages.WantState(iteration=iteration, worker=life[0], life=life[1])
        self._peers.send(self._peers.worker(*giver), asked)

    def _hand(self, give: messages.GiveState, payload: memoryview | None) -> None:
        """To the newcomer."""
        self._peers.send(self._peers.worker(give.worker, give.life), give, payload)

    def _has_gone(self, life: Life, live: Mapping[int, int]) -> bool:
        """Whether a newcomer has died itself."""
        return live.get(life[0]) != life[1]

    def look(self, live: Mapping[int, int], meeting: int) -> None:
        """Ask somebody who lives for what nobody living was asked for; tell newcomers where nobody is left.
        `meeting` is the next one's number."""
        for life, want in list(self._wants.items()):
            if self._has_gone(life, live):
                del self._wants[life]
            elif want.asked is None or live.get(want.asked[0]) != want.asked[1]:
                self._ask(life, want, live, meeting)

    def _ask(self, life: Life, want: _Want, live: Mapping[int, int], meeting: int) -> None:
        givers = [each for each in sorted(live.items()) if each not in self._wants]
        if givers:
            want.asked = givers[0]
            self._ask_for(life, want.iteration, givers[0])
        else:
            self._nobody(life, want.iteration, meeting)

    def _nobody(self, life: Life, _iteration: int, meeting: int) -> None:
        """Nobody is left who could give it."""
        del self._wants[life]
        self._hand(messages.GiveState(worker=life[0], life=life[1], meeting=meeting), None)
