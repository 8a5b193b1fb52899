"""How a node that is not among the members comes in, and gets its state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import FetchState
from atoll.peers.settings import Settings
from atoll.peers.standing import Standing
from atoll.wire.peers import AskJoin, JoinOver, NodeReport, PeerMessage
from atoll.wire.peerviews import Accept, Life, Member, Prepare, View, ViewDecided


@dataclass(frozen=True)
class Asking:
    """What a joiner says of itself, and to whom."""

    token: str
    address: str
    contacts: tuple[int, ...]


class Entrance:
    """Of a founding member, which has nothing to ask for (`asking` is None), or of a joiner.

    `known` is the newest view that a joiner's process knows: others may have not heard of it. `has_state`:
    this node may vote. With the witness alone, a joiner without a state could decide that the run has none.
    """

    def __init__(
        self,
        standing: Standing,
        contributions: Contributions,
        settings: Settings,
        out: Outbox,
        now: float,
        asking: Asking | None,
        known: View | None,
    ) -> None:
        self._standing, self._contributions, self._settings = standing, contributions, settings
        self._out, self._asking, self._known = out, asking, known
        self._ask_at = now
        self._refused: set[Life] = set()  # who did not give its state
        self.has_state = True

    def install(self, _now: float, /) -> None:
        """A view holds from now on."""
        self._refused.clear()
        self.has_state = self._standing.source is None

    @property
    def asks(self) -> bool:
        """True for a joiner that is in no view yet."""
        return self._asking is not None and not self._standing.is_member

    @property
    def is_new(self) -> bool:
        """True for a joiner that has made nothing yet."""
        here = self._contributions.iterations.here
        return self._asking is not None and not here.get(self._standing.life)

    @property
    def deadline(self) -> float:
        """When it asks again to be let in; infinity: never."""
        return self._ask_at if self._asking is not None else math.inf

    def poll(self, now: float) -> None:
        """Ask to be in the next view."""
        if self._asking is None or now < self._ask_at:
            return
        self._ask_at = now + self._settings.heartbeat
        node, asking = self._standing.life.node, self._asking
        ask = AskJoin(node=node, token=asking.token, address=asking.address)
        self._out.send_all(asking.contacts, ask)

    def is_over(self, message: JoinOver) -> bool:
        """Whether this joiner was let in and removed again before it knew."""
        return self._asking is not None and self.asks and message.token == self._asking.token

    def tell_known(self, sender: int, message: PeerMessage) -> None:
        """To a joiner somebody speaks of a view, which may be older than one that it knows."""
        number = math.inf
        if isinstance(message, (Prepare, Accept)):
            number = message.view.number
        elif isinstance(message, NodeReport):
            number = message.report.view
        if self._known is not None and number < self._known.number:
            self._out.send(sender, ViewDecided(view=self._known))

    def entry(self, view: View) -> Member | None:
        """This joiner's entry in a view, where it has one."""
        if self._asking is None:
            return None
        mine = (self._standing.life.node, self._asking.token)
        return next((each for each in view.members if (each.life.node, each.token) == mine), None)

    def ask_for_state(self) -> None:
        """The state comes from any member; newcomers may not have one either, and are asked last."""
        self.has_state = False
        view, refused = self._standing.view, self._refused
        members = sorted(view.members, key=lambda each: (each.life in refused, bool(each.token)))
        others = [member.life for member in members if member.life != self._standing.life]
        if others:
            self._standing.source = others[0]
            base = self._contributions.applied
            reason = f"it joins with view {view.number}, in which {base} iterations are settled"
            self._out.add(FetchState(others[0].node, base, reason))

    def take_state(self, iteration: int) -> None:
        """The state is here. Raises ValueError for one that is older than was asked for."""
        if iteration < self._contributions.applied:
            settled = self._contributions.applied
            raise ValueError(f"a state at {iteration}, where {settled} is settled")
        self._standing.source, self.has_state = None, True
        self._contributions.settle(iteration)

    def ask_another(self, source: int) -> None:
        """`source` does not give its state: ask the next member."""
        lives = {member.life for member in self._standing.view.members if member.life.node == source}
        self._refused |= lives
        if self._refused >= set(self._contributions.others()):
            self._refused = lives
        self.ask_for_state()
