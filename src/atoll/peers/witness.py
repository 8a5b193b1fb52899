"""The third voter of a view of two members: it votes, holds nothing, and belongs to the hub.

The witness remembers what it promised and accepted for the newest view that it was asked about. A question
about an older view is answered with the newest one: this one exists only because what is asked was decided.

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
    Prepare,
    Promised,
    View,
    ViewDecided,
    ViewStruct,
    does_follow,
)

Answer: TypeAlias = Union[Promised, Accepted, Outbid, ViewDecided]


class WitnessState(ViewStruct, frozen=True):
    """A witness's whole knowledge: the newest view, and its vote on what follows."""

    view: View
    promised: Ballot
    accepted: tuple[Ballot, View] | None = None


class Witness:
    """A run's witness. Its votes must outlive it: keep `state` before giving an answer. A restarted
    witness starts from the kept state, or must not vote."""

    def __init__(self, state: WitnessState | None = None) -> None:
        self._view = state.view if state is not None else None
        self._acceptor = Acceptor() if state is None else Acceptor(state.promised, state.accepted)

    @property
    def state(self) -> WitnessState | None:
        """The state to keep; None if nobody has asked yet."""
        if self._view is None:
            return None
        return WitnessState(self._view, self._acceptor.promised, self._acceptor.accepted)

    def handle(self, sender: int, message: Prepare | Accept) -> Answer | None:
        """Return the answer to a member's question, or None if the sender may not ask: its view does not
        have two members, it is not in the view, or it asks for an older founding of the run."""
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
