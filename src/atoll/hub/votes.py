"""The hub as witness of a run without a server: votes on views of two nodes. Source: docs/peers.md."""

from __future__ import annotations

from atoll.hub.book import Book
from atoll.hub.decisions import Decisions
from atoll.hub.records import Voted
from atoll.hub.turn import Turn
from atoll.peers.views import describe
from atoll.wire.messages import Accept, Accepted, Prepare

_NODES = 4096  # the most connections for votes; the oldest are dropped


class Votes:
    """Answers vote requests as the witness in `book` decides. Without a journal (`may_vote` False) the hub
    has no vote: after a restart it would not know its earlier votes."""

    def __init__(self, book: Book, decisions: Decisions, turn: Turn, *, may_vote: bool) -> None:
        self._book, self._decisions, self._turn, self._may_vote = book, decisions, turn, may_vote
        turn.handlers |= dict.fromkeys((Prepare, Accept), self.handle)
        self._nodes: dict[bytes, int] = {}  # connection -> node

    def enter(self, peer: bytes, node: int) -> None:
        """Register a node's connection for votes."""
        self._nodes.pop(peer, None)
        self._nodes[peer] = node
        if len(self._nodes) > _NODES:
            del self._nodes[next(iter(self._nodes))]

    def handle(self, peer: bytes, message: Prepare | Accept) -> None:
        """Handle a node's request to the witness."""
        turn, name = self._turn, type(message).__name__
        if not self._may_vote:
            turn.refuse(peer, "this hub has no directory to keep votes in; give it --directory", name)
        elif peer not in self._nodes:
            turn.refuse(peer, "say Hello first", name)
        else:
            voted = Voted(at=turn.now(), node=self._nodes[peer], message=message)
            before = self._book.witness.state
            answer = self._book.vote(voted)
            if answer is None:
                reason = "the hub votes on what follows views of two nodes, for these two"
                turn.refuse(peer, reason, name)
                return
            turn.votes.append((peer, answer))
            if self._book.witness.state != before:
                turn.keep(voted)
                if isinstance(message, Accept) and isinstance(answer, Accepted):
                    reason = f"node {voted.node} asked for the hub's vote: of two nodes and it two decide"
                    self._decisions.add("view", describe(message.view, message.next), reason)
