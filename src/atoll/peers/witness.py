"""The third voter where a view has two members: it votes, holds nothing, and belongs to the hub.

It remembers what it has promised and accepted for what follows the newest view that it was asked about. Who
asks of an older view is told that one: it would be no view if what is asked had not been decided.

Source: docs/peers.md, "When an iteration may be applied"; `change.py` says why two halves never both decide.
"""

from __future__ import annotations

from typing import TypeAlias, Union

from atoll.peers.views import Acceptor, voters
from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import (
    Accept,
    Accepted,
    Ballot,
    Outbid,
    Part,
    Prepare,
    Promised,
    View,
    ViewDecided,
    does_follow,
)

Answer: TypeAlias = Union[Promised, Accepted, Outbid, ViewDecided]


class WitnessState(Part, frozen=True):
    """All that a witness knows: the newest view, and its vote on what follows it."""

    view: View
    promised: Ballot
    accepted: tuple[Ballot, View] | None = None


class Witness:
    """A run's witness. Its votes must outlive it: `state` is to be kept before an answer is given, and a
    witness that is made again is made of what was kept, or must not vote."""

    def __init__(self, state: WitnessState | None = None) -> None:
        self._view = state.view if state is not None else None
        self._acceptor = Acceptor() if state is None else Acceptor(state.promised, state.accepted)

    @property
    def state(self) -> WitnessState | None:
        """What to keep; None where nobody has asked yet."""
        if self._view is None:
            return None
        return WitnessState(self._view, self._acceptor.promised, self._acceptor.accepted)

    def handle(self, sender: int, message: Prepare | Accept) -> Answer | None:
        """The answer to a member's question; None to who has no business here: a view that does not have two
        members, a node that is not in it, or an older founding of the run."""
        view, ballot = message.view, message.ballot
        if WITNESS not in voters(view) or sender not in voters(view) or sender != ballot.node:
            return None
        if isinstance(message, Accept) and not does_follow(view, message.next):
            return None
        if self._view is None or _age(view) > _age(self._view):
            self._view, self._acceptor = view, Acceptor()
        elif _age(view) < _age(self._view):
            return ViewDecided(view=self._view) if view.founding == self._view.founding else None
        if isinstance(message, Prepare) and self._acceptor.promise(ballot):
            return Promised(
                founding=view.founding, view=view.number, ballot=ballot, accepted=self._acceptor.accepted
            )
        if isinstance(message, Accept) and self._acceptor.vote(ballot, message.next):
            return Accepted(founding=view.founding, view=view.number, ballot=ballot)
        return Outbid(founding=view.founding, view=view.number, ballot=self._acceptor.promised)


def _age(view: View) -> tuple[int, int]:
    return (view.founding, view.number)
