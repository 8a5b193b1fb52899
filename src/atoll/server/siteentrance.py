"""How workers come late at a site where nobody lives: another site's worker gives its state.

What the site's shard cannot have answered by its own workers it asks the global log, which knows it as one
worker, and asks another site; that site's shard has one of its own workers give, and passes it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from atoll.server.entrance import Entrance, Life, Wanted
from atoll.server.peers import Peers
from atoll.wire import messages


class SiteEntrance(Entrance):
    """`ask_above(iteration)` asks the global log for the state of another site's worker; `give_above` passes
    up what this site's worker gives to another site."""

    def __init__(
        self,
        peers: Peers,
        ask_above: Callable[[int], None],
        give_above: Callable[[messages.GiveState, memoryview | None], None],
    ) -> None:
        super().__init__(peers)
        self._ask_above, self._give_above = ask_above, give_above
        self._outside: set[Life] = set()  # other sites, as the global log names them
        self._above: set[Life] = set()  # this site's newcomers, for whom another site was asked

    def state(self) -> list[Wanted]:
        """As Entrance's, without what other sites want: the global log asks for that again."""
        return [
            msgspec.structs.replace(wanted, above=wanted.newcomer in self._above)
            for wanted in super().state()
            if wanted.newcomer not in self._outside
        ]

    def restore(self, state: list[Wanted]) -> None:
        super().restore(state)
        self._outside = set()
        self._above = {wanted.newcomer for wanted in state if wanted.above}

    def want(self, worker: int, incarnation: int, iteration: int) -> None:
        self._above.discard((worker, incarnation))  # it asks again: so does this
        super().want(worker, incarnation, iteration)

    def want_from_above(self, want: messages.WantState) -> None:
        """Another site asks, for one who comes there; `look` sees to it."""
        self._outside.add((want.worker, want.life))
        self.want(want.worker, want.life, want.iteration)

    def given_from_above(
        self, give: messages.GiveState, payload: memoryview | None, meeting: int
    ) -> list[messages.GiveState]:
        """Another site gives: hand it to all who wait for that; `meeting` is the site's next. Returns what
        they were given."""
        given = []
        for life in sorted(self._above & self._wants.keys()):
            del self._wants[life]
            own = messages.GiveState(
                worker=life[0],
                life=life[1],
                meeting=give.meeting if give.members else meeting,
                members=[*give.members[:1], life[0]] if give.members else [],
                refused=give.refused,
            )
            self._hand(own, payload)
            given.append(own)
        self._above.clear()
        return given

    def _has_gone(self, life: Life, live: Mapping[int, int]) -> bool:
        return life not in self._outside and super()._has_gone(life, live)

    def _hand(self, give: messages.GiveState, payload: memoryview | None) -> None:
        life = give.worker, give.life
        if life in self._outside:
            self._outside.discard(life)
            self._give_above(give, payload)
        else:
            super()._hand(give, payload)

    def _nobody(self, life: Life, iteration: int, meeting: int) -> None:
        if life in self._outside:
            super()._nobody(life, iteration, meeting)
        elif life not in self._above:
            self._above.add(life)
            self._ask_above(iteration)
