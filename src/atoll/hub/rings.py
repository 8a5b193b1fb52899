"""The hub's part in rings: who asks, what is answered to whom, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from atoll.core.errors import UserError
from atoll.hub.decisions import Decisions
from atoll.store.members import Membership
from atoll.store.rendezvous import Answer, Rendezvous, RendezvousState
from atoll.wire.messages import AnyMessage, Gather, Silences, StoreCall, WhoIsSilent

_NOBODY = b""  # a peer to whom nothing is sent
_CHANGES = ("set", "add", "append", "compare_set", "delete")  # operations on keys that are journalled


class Rings:
    """Takes what workers say about rings; `now` gives the hub's seconds, `send` and `refuse` its answers.
    `keep` is told of each word that changes something, for the hub's journal.

    A call says by its incarnation whose it is, since it comes over another connection than the worker's
    Hello: whoever was let in, by the run's keys, is trusted with that.
    """

    def __init__(
        self,
        members: Membership,
        decisions: Decisions,
        now: Callable[[], float],
        send: Callable[[bytes, AnyMessage], None],
        refuse: Callable[[bytes, str, str], None],
        keep: Callable[[AnyMessage], None] = lambda _message: None,
    ) -> None:
        self._members, self._decisions = members, decisions
        self._now, self._send, self._refuse = now, send, refuse
        self._keep = keep
        self._rendezvous = Rendezvous(members.workers)

    def handle(self, peer: bytes, message: Gather | StoreCall | WhoIsSilent) -> None:
        """A worker's wish to form a ring, its call of the ring's store, or its question after the others."""
        rank = self._members.rank_of(message.incarnation)
        try:
            if rank is None:
                raise UserError(f"the hub knows no incarnation {message.incarnation}, or has given it up")
            if isinstance(message, StoreCall):
                self._answer(self._rendezvous.handle_call(self._now(), peer, message))
                if message.operation in _CHANGES:
                    self._keep(message)
            elif isinstance(message, Gather):
                self._gather(peer, rank, message)
                self._keep(message)
            else:
                self._send(peer, Silences(seconds=self._members.silences(self._now())))
        except UserError as error:
            self._refuse(peer, str(error), type(message).__name__)

    def _gather(self, peer: bytes, rank: int, gather: Gather) -> None:
        before = self._rendezvous.formed
        self._answer(self._rendezvous.handle_gather(self._now(), peer, rank, gather))
        if self._rendezvous.formed != before:
            members = self._members.live()
            self._decisions.add(
                "ring",
                f"ring {self._rendezvous.formed} of {len(members)} workers",
                "all are there: "
                + ", ".join(f"worker {rank}, incarnation {member}" for rank, member in members.items()),
            )

    def replay(self, now: float, message: AnyMessage) -> None:
        """Take a word that `keep` was told of before a restart, and answer nobody."""
        assert isinstance(message, (Gather, StoreCall))
        rank = self._members.rank_of(message.incarnation)
        if isinstance(message, StoreCall):
            self._rendezvous.handle_call(now, _NOBODY, message)
        elif rank is not None:
            self._rendezvous.handle_gather(now, _NOBODY, rank, message)

    def state(self) -> bytes:
        """All that is known of rings, as MessagePack."""
        return msgspec.msgpack.encode(self._rendezvous.state())

    def restore(self, now: float, state: bytes) -> None:
        """Know what `state` says."""
        del now  # deadlines are the clock's, which goes on
        self._rendezvous.restore(msgspec.msgpack.decode(state, type=RendezvousState), _NOBODY)

    def left(self, incarnation: int) -> None:
        """A worker said goodbye or died."""
        self._rendezvous.handle_left(incarnation)

    def poll(self) -> None:
        """Answer those whose time is over."""
        self._answer(self._rendezvous.poll(self._now()))

    def soon(self, seconds: float) -> float:
        """How long the hub may wait for messages, of up to `seconds`, before `poll` has something to do."""
        deadline = self._rendezvous.next_deadline()
        return seconds if deadline is None else max(0.0, min(seconds, deadline - self._now()))

    def _answer(self, answers: Sequence[Answer]) -> None:
        for peer, message in answers:
            assert isinstance(peer, bytes)
            self._send(peer, message)
