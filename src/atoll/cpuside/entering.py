"""Entry of a node into a running group, for the first time or again, and the members' part in it.

The newcomer asks to be in the next view, takes over the state from a member, and receives the state that a
member's script had at the newcomer's first iteration. Source: docs/peers.md, "When an iteration may be
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

_BESIDES = 2**25  # bytes of a script's state in addition to the size of model and optimizer state


def most_script(state: int) -> int:
    """Return the most bytes of a script's own state, for a model and optimizer of `state` bytes.

    They suffice for an average of the weights and for small things.
    """
    return state + _BESIDES


class Scripted(NamedTuple):
    """A script's state before `iteration`; `meeting` and `number` as in wire/nodes.py: Script."""

    iteration: int
    meeting: int
    number: int
    state: bytes | memoryview


class Entering:
    """The progress of a node that comes in.

    Attributes:
        returned: the worker has trained in this run before, and must first say that it is awake.
        reason: why the node was removed, if it was.
        awake: the worker wants to go on.
        token: a name that no process has used before.
        timeout: seconds that the entry may take.
        first: the node's first iteration; None until a view has the node.
        taker: the transfer of a member's state, while it runs.
        unpacking: the state has come and is being unpacked.
        has_state: the state is in place.
    """

    def __init__(self, timeout: float, *, returned: bool, reason: str = "") -> None:
        self.returned, self.reason = returned, reason
        self.awake = not returned
        self.token = secrets.token_hex(8)
        self.timeout = timeout
        self._since = time.monotonic()
        self.first: int | None = None
        self.taker: Taker | None = None
        self.unpacking = False
        self.has_state = False
        self._pieces: dict[int, Pieces] = {}  # parts of scripts' states, by member: each sends its own
        self._scripts: dict[int, Scripted] = {}  # by member

    def wake(self) -> None:
        """Note that the worker wants to go on; the timeout begins."""
        if not self.awake:
            self.awake, self._since = True, time.monotonic()

    def take_script(self, sender: int, message: Script, payload: memoryview | None, most: int) -> str:
        """Add a piece of the state of a member's script, of at most `most` bytes in all.

        Returns the reason to refuse the piece; empty if it is taken or no longer needed.
        """
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
        """The state with which the script begins, or None until it has come."""
        return next((each for each in self._scripts.values() if each.iteration == self.first), None)

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since

    def lacks(self) -> str:
        """Return what the node waits for, in words; empty when it may begin."""
        if self.first is None:
            return "a view that has it"
        if not self.has_state:
            source = f"node {self.taker.source}" if self.taker is not None else "a member"
            return f"the state, from {source}"
        return "" if self.script is not None else f"a member's script to come to iteration {self.first}"


class Newcomers:
    """The newcomers that get the state of this member's script.

    The state is captured at the newcomer's first iteration, and sent. It is kept until the newcomer has
    contributed or has left the view, and sent again on each new connection: a broken one may have lost it.
    """

    def __init__(self) -> None:
        self._first: dict[Life, int] = {}
        self._scripts: dict[int, Scripted] = {}

    @property
    def kept(self) -> int:
        """Number of scripts' states kept."""
        return len(self._scripts)

    def view(self, old: View | None, new: View, own: Life) -> list[int]:
        """Adopt a view; returns the iterations before which the script's state must be captured."""
        before = {each.life for each in old.members} if old is not None else set()
        here = {each.life for each in new.members}
        self._first = {life: first for life, first in self._first.items() if life in here}
        self._keep_needed()
        if own not in before:
            return []  # this node is a newcomer itself
        come = [each for each in new.members if each.life not in before]
        self._first.update({each.life: each.first for each in come})
        return sorted({each.first for each in come})

    def captured(self, script: Scripted, network: Network) -> None:
        """Keep a captured state of the script, and send it to the newcomers that begin there."""
        self._scripts[script.iteration] = script
        for life, first in self._first.items():
            if first == script.iteration:
                _send(script, life.node, network)
        self._keep_needed()

    def up(self, node: int, network: Network) -> None:
        """Send kept states again to a node that has a new connection."""
        for life, first in self._first.items():
            if life.node == node and first in self._scripts:
                _send(self._scripts[first], node, network)

    def contributed(self, life: Life) -> None:
        """Forget a newcomer that has contributed."""
        if self._first.pop(life, None) is not None:
            self._keep_needed()

    def _keep_needed(self) -> None:
        """Drop scripts' states that no newcomer needs any more."""
        kept = set(self._first.values())
        self._scripts = {first: script for first, script in self._scripts.items() if first in kept}


def _send(script: Scripted, to: int, network: Network) -> None:
    raw = memoryview(script.state)
    digest = digest_of(raw)
    for start, piece in pieces_of(raw):
        message = Script(
            iteration=script.iteration,
            meeting=script.meeting,
            number=script.number,
            start=start,
            total=raw.nbytes,
            digest=digest,
        )
        network.send_chunk(to, message, piece)


def digest_of(raw: memoryview) -> bytes:
    """Return a 16-byte digest of a script's state."""
    return hashlib.blake2b(raw, digest_size=16).digest()
