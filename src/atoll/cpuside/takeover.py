"""Transfer of a member's state to a node that joins: request, pieces, and assembly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from atoll.cpuside.network import Network
from atoll.wire.device import Applied
from atoll.wire.nodes import Lacks, Takeover
from atoll.wire.peerviews import Life

_PIECE = 2**24  # bytes of a message
_ASK_SECONDS = 5.0  # wait for an answer before asking again: the source may not know this node yet
_STALL_SECONDS = 15.0  # wait for a piece before another node is asked


@dataclass
class Giver:
    """Open requests of other nodes for this node's state."""

    asked: dict[int, Lacks] = field(default_factory=dict)  # latest request of each node

    def handle(self, sender: int, message: Lacks) -> None:
        """Note a request of node `sender` for itself; requests in another node's name are ignored."""
        if message.life.node == sender:
            self.asked[sender] = message

    def due(self, applied: int, is_member: Callable[[Life], bool]) -> list[Life]:
        """Remove requests that can be met (of members whose `base` is applied), and return their lives."""
        due = [each.life for each in self.asked.values() if applied >= each.base and is_member(each.life)]
        for life in due:
            del self.asked[life.node]
        return due


def give(
    network: Network,
    to: int,
    raw: memoryview,
    iteration: int,
    shift: int,
    applied: Sequence[Applied],
    consumed: float,
) -> None:
    """Send a packed state to a node.

    Args:
        network: the connections to nodes.
        to: number of the receiving node.
        raw: the packed state, which must not change while it is sent.
        iteration: the state's global iteration.
        shift: the scripts' count of iterations minus `iteration`'s.
        applied: contributions of the latest iterations.
        consumed: samples of all iterations so far.
    """
    for start, piece in pieces_of(raw):
        message = Takeover(
            iteration=iteration,
            start=start,
            total=raw.nbytes,
            shift=shift,
            applied=list(applied) if start == 0 else [],
            consumed=consumed,
        )
        network.send_chunk(to, message, piece)


class Pieces:
    """Assembles up to `most` bytes from consecutive pieces.

    A piece out of order is ignored: the beginning of its answer was lost, or it belongs to another answer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: object = None  # identity of the answer
        self._raw, self.got = bytearray(), 0

    def add(self, of: object, start: int, total: int, payload: memoryview | None) -> bool:
        """Add a piece; returns False if it does not continue the pieces so far.

        Sizes are checked before memory is allocated.

        Args:
            of: identity of the answer that the piece belongs to.
            start: offset of the piece, in bytes.
            total: bytes of the whole answer.
            payload: the piece's bytes.
        """
        size = payload.nbytes if payload is not None else 0
        if of is None or total > self._most or start + size > total:
            return False
        if start == 0:
            self._of, self._raw, self.got = of, bytearray(total), 0
        if (start, of, total) != (self.got, self._of, len(self._raw)):
            return False
        if payload is not None:
            self._raw[self.got : self.got + size] = payload
        self.got += size
        return True

    @property
    def whole(self) -> memoryview | None:
        """The whole answer once it is complete, else None."""
        return memoryview(self._raw) if self._of is not None and self.got == len(self._raw) else None


def pieces_of(raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Split bytes into pieces for messages; yields each with its offset, and one empty piece for no bytes."""
    for start in range(0, max(raw.nbytes, 1), _PIECE):
        yield start, raw[start : start + _PIECE]


class Taker:
    """Takes over the state of another node.

    Args:
        network: the connections to nodes.
        life: the life of this node.
        source: number of the node that gives its state.
        base: the least global iteration of the state.
        most: largest accepted size of the state in bytes.

    Attributes:
        shift: the scripts' count of iterations minus the state's.
        applied: contributions of the state's latest iterations.
        consumed: samples of all of the state's iterations.
    """

    def __init__(self, network: Network, life: Life, source: int, base: int, most: int) -> None:
        self.source, self._network, self._life, self._base = source, network, life, base
        self._pieces = Pieces(most)
        self.shift = 0
        self.applied: list[Applied] = []
        self.consumed = 0.0
        self._began = self._asked_at = time.monotonic()
        self._heard_at = self._began
        self._ask()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._network.send(self.source, Lacks(life=self._life, base=self._base))

    def handle(self, sender: int, message: Takeover, payload: memoryview | None) -> memoryview | None:
        """Add a piece; returns the whole state once it is complete."""
        if sender != self.source or message.iteration < self._base:
            return None
        of = message.iteration, message.shift
        if not self._pieces.add(of, message.start, message.total, payload):
            return None
        self._heard_at, self.shift = time.monotonic(), message.shift
        if message.start == 0:
            self.applied, self.consumed = message.applied, message.consumed
        return self._pieces.whole

    def stalled(self) -> str:
        """Return the reason to ask another node, or "" while the source may still answer.

        Repeats the request until the first piece comes.
        """
        now = time.monotonic()
        if now > self._heard_at + _STALL_SECONDS:
            return f"nothing of its state came for {now - self._heard_at:.1f} s"
        if not self._pieces.got and now > self._asked_at + _ASK_SECONDS:
            self._ask()
        return ""
