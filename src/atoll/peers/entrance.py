"""Entry of a node that is not a member: requests to join, and the transfer of its state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import FetchState
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import NodeStanding
from atoll.wire.peers import AskJoin, JoinOver, NodeReport, PeerMessage
from atoll.wire.peerviews import Accept, Life, Prepare, View, ViewDecided, ViewMember


@dataclass(frozen=True)
class Asking:
    """A joiner's name, its address, and the nodes that it asks."""

    token: str
    address: str
    contacts: tuple[int, ...]


class Entrance:
    """Entry of a joiner; a founding member's has nothing to ask for (`asking` is None).

    `known` is the newest view that a joiner's process knows; others may not know it. `has_state`: this node
    may vote. Otherwise a joiner without state could decide, with the witness alone, that the run has none.
    """

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        settings: NodeSettings,
        out: Outbox,
        now: float,
        asking: Asking | None,
        known: View | None,
    ) -> None:
        self._standing, self._contributions, self._settings = standing, contributions, settings
        self._out, self._asking, self._known = out, asking, known
        self._ask_at = now
        self._refused: set[Life] = set()  # members that did not give their state
        self.has_state = True

    def install(self, _now: float, /) -> None:
        """Begin a view."""
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
        """Time of the next request to join; infinity: never."""
        return self._ask_at if self._asking is not None else math.inf

    def poll(self, now: float) -> None:
        """Ask to be in the next view, if a request is due."""
        if self._asking is None or now < self._ask_at:
            return
        self._ask_at = now + self._settings.heartbeat
        node, asking = self._standing.life.node, self._asking
        ask = AskJoin(node=node, token=asking.token, address=asking.address)
        self._out.send_all(asking.contacts, ask)

    def is_over(self, message: JoinOver) -> bool:
        """True if this joiner was let in and removed again before it knew."""
        return self._asking is not None and self.asks and message.token == self._asking.token

    def tell_known(self, sender: int, message: PeerMessage) -> None:
        """Send a joiner's known view to a node whose message is about an older one."""
        number = math.inf
        if isinstance(message, (Prepare, Accept)):
            number = message.view.number
        elif isinstance(message, NodeReport):
            number = message.report.view
        if self._known is not None and number < self._known.number:
            self._out.send(sender, ViewDecided(view=self._known))

    def entry(self, view: View) -> ViewMember | None:
        """Return this joiner's entry in `view`, or None."""
        if self._asking is None:
            return None
        mine = (self._standing.life.node, self._asking.token)
        return next((each for each in view.members if (each.life.node, each.token) == mine), None)

    def ask_for_state(self) -> None:
        """Ask a member for its state. Newcomers, which may have none either, and members that refused come
        last."""
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
        """Record that the state has arrived. Raises ValueError if it is older than was asked for."""
        if iteration < self._contributions.applied:
            settled = self._contributions.applied
            raise ValueError(f"a state at {iteration}, where {settled} is settled")
        self._standing.source, self.has_state = None, True
        self._contributions.settle(iteration)

    def ask_another(self, source: int) -> None:
        """Ask the next member for its state, since `source` does not give its own."""
        lives = {member.life for member in self._standing.view.members if member.life.node == source}
        self._refused |= lives
        if self._refused >= set(self._contributions.others()):
            self._refused = lives
        self.ask_for_state()
