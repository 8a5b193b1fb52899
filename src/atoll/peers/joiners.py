"""The nodes that ask a member to be let in."""

from __future__ import annotations

from atoll.peers.outbox import Outbox
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import NodeStanding
from atoll.peers.views import Joiner
from atoll.wire.peers import AskJoin, JoinOver
from atoll.wire.peerviews import ViewDecided


class Joiners:
    """The nodes that ask to be in the next view, each until it stops asking."""

    def __init__(self, standing: NodeStanding, settings: NodeSettings, out: Outbox) -> None:
        self._standing, self._settings, self._out = standing, settings, out
        self._joiners: dict[int, tuple[Joiner, float]] = {}  # by node, and when it last asked
        self._known: set[str] = set()  # tokens of all that were let in

    def install(self, _now: float, /) -> None:
        """Begin a view."""
        self._known |= {member.token for member in self._standing.view.members if member.token}
        self._joiners = {n: pair for n, pair in self._joiners.items() if pair[0].token not in self._known}

    def handle_ask(self, now: float, sender: int, message: AskJoin) -> None:
        view = self._standing.view
        if not self._standing.is_member or message.node != sender or not message.token:
            return
        if any(member.token == message.token for member in view.members):
            self._out.send(sender, ViewDecided(view=view))
        elif message.token in self._known:
            self._out.send(sender, JoinOver(token=message.token))
        else:
            joiner = Joiner(message.node, message.token, message.address)
            old = self._joiners.get(message.node)
            self._joiners[message.node] = (old[0] if old is not None and old[0] == joiner else joiner, now)

    @property
    def nodes(self) -> set[int]:
        return set(self._joiners)

    def latest(self, now: float) -> tuple[Joiner, ...]:
        """Return the joiners that still ask, and forget the others."""
        late = now - self._settings.silence[1]
        self._joiners = {node: pair for node, pair in self._joiners.items() if pair[1] > late}
        return tuple(joiner for joiner, _ in self._joiners.values())
