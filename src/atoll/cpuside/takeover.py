"""The state that a node takes over from another when it joins: asked for, given in pieces, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from atoll.cpuside.network import Network
from atoll.wire.device import Applied
from atoll.wire.nodes import Lacks, Takeover
from atoll.wire.peerviews import Life

_PIECE = 2**24  # bytes of a message
_ASK_SECONDS = 5.0  # without an answer, after which it is asked again: the asked may not know us yet
_STALL_SECONDS = 15.0  # without a piece, after which another node is asked


@dataclass
class Giver:
    """Who asks this node for its state, and has not got it yet."""

    asked: dict[int, Lacks] = field(default_factory=dict)  # the latest wish of each node

    def handle(self, sender: int, message: Lacks) -> None:
        """Note what node `sender` wants for itself."""
        if message.life.node == sender:
            self.asked[sender] = message

    def due(self, applied: int, is_member: Callable[[Life], bool]) -> list[Life]:
        """Those to whom the state can be given now; each is handed out once."""
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
    """Send a state, with the composition of its latest iterations, to a node.

    Nothing may change the state while it is sent. `consumed` is the number of samples behind the state.
    """
    for start, piece in pieces_of(raw):
        made_of = list(applied) if start == 0 else []
        told = Takeover(
            iteration=iteration,
            start=start,
            total=raw.nbytes,
            shift=shift,
            applied=made_of,
            consumed=consumed,
        )
        network.send_chunk(to, told, piece)


class Pieces:
    """Bytes that come in pieces one after the other, `most` of them, put together. A piece that comes out of
    order begins nothing: it is of an answer whose beginning was lost, or of another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: object = None
        self._raw, self.got = bytearray(), 0

    def add(self, of: object, start: int, total: int, payload: memoryview | None) -> bool:
        """Take a piece of `of`, from byte `start` of `total`; False for one that does not go on with what is
        here. What it says is looked at before memory is taken."""
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
        """All of it, once it is here."""
        return memoryview(self._raw) if self._of is not None and self.got == len(self._raw) else None


def pieces_of(raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """What goes into a message each, and where it begins; one of nothing, if there is nothing."""
    for start in range(0, max(raw.nbytes, 1), _PIECE):
        yield start, raw[start : start + _PIECE]


class Taker:
    """Asks `source` for its state at global iteration `base` or later, for this node in the life `life`.
    `most` bytes is what it may have."""

    def __init__(self, network: Network, life: Life, source: int, base: int, most: int) -> None:
        self.source, self._network, self._life, self._base = source, network, life, base
        self._pieces = Pieces(most)
        self.shift = 0
        self.applied: list[Applied] = []  # what the state's latest iterations were made of
        self.consumed = 0.0  # the samples of all of its iterations
        self._began = self._asked_at = time.monotonic()
        self._heard_at = self._began
        self._ask()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._network.send(self.source, Lacks(life=self._life, base=self._base))

    def handle(self, sender: int, message: Takeover, payload: memoryview | None) -> memoryview | None:
        """Take a piece; the whole once it is there."""
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
        """Why another node is to be asked; empty while this one may yet answer. Asks again now and then."""
        now = time.monotonic()
        if now > self._heard_at + _STALL_SECONDS:
            return f"nothing of its state came for {now - self._heard_at:.1f} s"
        if not self._pieces.got and now > self._asked_at + _ASK_SECONDS:
            self._ask()
        return ""
