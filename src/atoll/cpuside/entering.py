"""A node that comes into a run that goes on, or comes back to it; and what members do for one.

It asks to be in the next view, takes over the state from a member, and gets what a member's script was at
when that came to the newcomer's first iteration. Source: docs/peers.md, "When an iteration may be
applied".
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import NamedTuple

from atoll.cpuside.network import Network
from atoll.cpuside.takeover import Pieces, Taker, pieces_of
from atoll.wire.nodes import Script
from atoll.wire.peerviews import Life, View

_BESIDES = 2**25  # bytes of a script's state beyond those of the model and its optimizer's state


def most_script(state: int) -> int:
    """Bytes that a script's own state may take where what is trained takes `state`: averages of the weights,
    and whatever is small."""
    return state + _BESIDES


class Scripted(NamedTuple):
    """A script's state before `iteration`; `meeting` and `number` as in wire/nodes.py: Script."""

    iteration: int
    meeting: int
    number: int
    state: bytes | memoryview


class Entering:
    """What a node that comes in has got so far; `returned`: its worker has trained here before, and is to say
    first that it is `awake`. `token` is a name that no other process has, nor this one before."""

    def __init__(self, timeout: float, *, returned: bool, reason: str = "") -> None:
        self.returned, self.reason = returned, reason
        self.awake = not returned
        self.token = secrets.token_hex(8)
        self.timeout = timeout
        self._since = time.monotonic()
        self.first: int | None = None  # its first iteration, once a view has it
        self.taker: Taker | None = None
        self.unpacking = False
        self.has_state = False
        self._pieces: dict[int, Pieces] = {}  # of scripts' states, by member: each sends its own
        self._scripts: dict[int, Scripted] = {}  # by member

    def wake(self) -> None:
        """The worker would go on: the time that this may take begins."""
        if not self.awake:
            self.awake, self._since = True, time.monotonic()

    def take_script(self, sender: int, message: Script, payload: memoryview | None, most: int) -> str:
        """Take a piece of a member's script's state, which may have `most` bytes. Why it is not taken; empty
        where it is, or is of no use any more."""
        if self.script is not None:
            return ""
        if message.total > most:
            return f"{message.total} bytes of a script's state, where {most} is the most"
        pieces = self._pieces.setdefault(sender, Pieces(most))
        of = message.iteration, message.meeting, message.number, message.digest
        pieces.add(of, message.start, message.total, payload)
        if (whole := pieces.whole) is None:
            return ""
        del self._pieces[sender]
        if digest_of(whole) != message.digest:
            return "a script's state that is not as it was sent"
        self._scripts[sender] = Scripted(message.iteration, message.meeting, message.number, whole)
        if self.script is not None:
            self._pieces.clear()
        return ""

    @property
    def script(self) -> Scripted | None:
        """What the script begins with, once it is here."""
        return next((each for each in self._scripts.values() if each.iteration == self.first), None)

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since

    def lacks(self) -> str:
        """What it waits for, in words; empty when it may begin."""
        if self.first is None:
            return "a view that has it"
        if not self.has_state:
            source = f"node {self.taker.source}" if self.taker is not None else "a member"
            return f"the state, from {source}"
        return "" if self.script is not None else f"a member's script to come to iteration {self.first}"


class Newcomers:
    """Those who come in while this node is a member: each gets what this node's script is at when it comes to
    the newcomer's first iteration. Kept until the newcomer has contributed, or is left out: it is sent again
    on each new connection, since one that breaks loses what is on its way."""

    def __init__(self) -> None:
        self._first: dict[Life, int] = {}
        self._scripts: dict[int, Scripted] = {}

    @property
    def kept(self) -> int:
        """How many scripts' states are kept."""
        return len(self._scripts)

    def view(self, old: View | None, new: View, own: Life) -> list[int]:
        """A view is there: the iterations at whose beginning the script is to be captured."""
        before = {each.life for each in old.members} if old is not None else set()
        here = {each.life for each in new.members}
        self._first = {life: first for life, first in self._first.items() if life in here}
        self._keep_needed()
        if own not in before:
            return []  # a newcomer itself
        come = [each for each in new.members if each.life not in before]
        self._first.update({each.life: each.first for each in come})
        return sorted({each.first for each in come})

    def captured(self, script: Scripted, network: Network) -> None:
        """The script has come to an iteration that somebody begins with."""
        self._scripts[script.iteration] = script
        for life, first in self._first.items():
            if first == script.iteration:
                _send(script, life.node, network)
        self._keep_needed()

    def up(self, node: int, network: Network) -> None:
        """A node can be reached anew."""
        for life, first in self._first.items():
            if life.node == node and first in self._scripts:
                _send(self._scripts[first], node, network)

    def contributed(self, life: Life) -> None:
        """A newcomer is at work."""
        if self._first.pop(life, None) is not None:
            self._keep_needed()

    def _keep_needed(self) -> None:
        """Keep the scripts' states of those alone who have yet to contribute, and have not been left out."""
        kept = set(self._first.values())
        self._scripts = {first: script for first, script in self._scripts.items() if first in kept}


def _send(script: Scripted, to: int, network: Network) -> None:
    raw = memoryview(script.state)
    digest = digest_of(raw)
    for start, piece in pieces_of(raw):
        told = Script(
            iteration=script.iteration,
            meeting=script.meeting,
            number=script.number,
            start=start,
            total=raw.nbytes,
            digest=digest,
        )
        network.send_chunk(to, told, piece)


def digest_of(raw: memoryview) -> bytes:
    """What a script's state is told by: 16 bytes."""
    return hashlib.blake2b(raw, digest_size=16).digest()
