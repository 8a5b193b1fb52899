"""The addresses of the other end of one stripe: where data goes, what is not believed yet, and who moved.

An address is believed once it has sent back the token of a Challenge that went there; before, it gets at most
three times the bytes that came from it. Source: docs/ltp.md, "Addresses"; RFC 9000,
sections 8 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from atoll.wire.linkcontrol import TOKEN_BYTES

AMPLIFICATION = 3  # as QUIC's: who is flooded at a forged address gets no more than that
MOST_PATHS = 4  # of a stripe: the one in use, the one that it moves to, and two that flap
CHALLENGE_BYTES = 128  # the most that a Challenge's datagram has, seal included
MOST_CHALLENGES = 24  # without an answer, before an address is given up
MOST_RESEND_SECONDS = 0.5  # where a round trip is shorter: a session begins only once one has come through
LEAST_RESEND_SECONDS = 0.05  # a timer below that would resend for a scheduler's pause
HOLD_SECONDS = 1.0  # from one move to the next: rate and round trip are measured anew each time
FORGET_SECONDS = 30.0  # of silence, after which an address that is not in use may be somebody else's
UNLIMITED = 2**62


@dataclass(frozen=True)
class Moved:
    """Data goes to `path` from now on; `before` is None for the first."""

    path: Hashable
    before: Hashable | None
    reason: str


@dataclass
class _Path:
    heard: float  # when a datagram last came from it
    received: int = 0  # bytes
    sent: int = 0
    validated: bool = False
    token: bytes = b""  # of its challenge; empty: none is open
    tries: int = 0
    due: float = math.inf  # when the challenge is to go (again)

    @property
    def allowance(self) -> int:
        return UNLIMITED if self.validated else max(AMPLIFICATION * self.received - self.sent, 0)


class Paths:
    """Of one stripe. `known`: an address that the authenticated channel gave, which is believed."""

    def __init__(self, now: float, rng: np.random.Generator, known: Hashable | None = None) -> None:
        self.active: Hashable | None = known  # where data goes; it may not be validated, see `allowance`
        self.round_trip = 0.1  # seconds; the session tells it anew when it has measured one
        self._rng = rng
        self._paths: dict[Hashable, _Path] = {}
        self._highest = -1  # number that came
        self._wanted: Hashable | None = known  # whence it came
        self._hold_until = -math.inf
        self._first = known is None
        if known is not None:
            self._paths[known] = _Path(heard=now, validated=True)

    def __len__(self) -> int:
        return len(self._paths)

    def allowance(self, path: Hashable) -> int:
        """Bytes that may be sent there now."""
        known = self._paths.get(path)
        return known.allowance if known else 0

    def validated(self, path: Hashable) -> bool:
        known = self._paths.get(path)
        return known is not None and known.validated

    def handle_received(self, now: float, path: Hashable, size: int, highest: int) -> None:
        """Datagrams of `size` bytes in all came from there, whose seals were good and whose numbers fresh;
        the highest of these is `highest`."""
        known = self._paths.get(path)
        ahead = highest > self._highest
        if known is None:
            if not ahead and self.active is not None:
                return  # something late from an address that is left: it starts nothing
            self._make_room()
            known = self._paths[path] = _Path(heard=now)
        elif path != self.active and now - known.heard > FORGET_SECONDS:
            known.validated, known.received, known.sent, known.token = False, 0, 0, b""
        known.heard = now
        known.received += size
        if ahead:
            self._highest, self._wanted = highest, path
            if not known.validated and not known.token:
                known.token, known.tries, known.due = self._rng.bytes(TOKEN_BYTES), 0, now
        if self.active is None:
            self.active = path

    def handle_answer(self, now: float, path: Hashable, token: bytes) -> bool:
        """An Answer came from there; whether it is the one that was waited for."""
        known = self._paths.get(path)
        if known is None or not known.token or known.token != token:
            return False
        known.validated, known.token, known.due, known.heard = True, b"", math.inf, now
        return True

    def handle_sent(self, path: Hashable, size: int) -> None:
        """Datagrams of `size` bytes in all went there, challenges too."""
        known = self._paths.get(path)
        if known is not None:
            known.sent += size

    def poll_challenges(self, now: float) -> list[tuple[Hashable, bytes]]:
        """Addresses to which a Challenge with this token is to go now. One that has not answered the last of
        them is given up; a datagram from there with a new highest number begins anew."""
        challenges: list[tuple[Hashable, bytes]] = []
        for path, known in list(self._paths.items()):
            if known.due > now or known.allowance < CHALLENGE_BYTES:
                continue
            if known.tries == MOST_CHALLENGES:
                known.token, known.due = b"", math.inf
                if path != self.active:
                    del self._paths[path]
                continue
            first = max(3 * self.round_trip, LEAST_RESEND_SECONDS)
            known.due = now + min(first * 2**known.tries, max(first, MOST_RESEND_SECONDS))
            known.tries += 1
            challenges.append((path, known.token))
        return challenges

    def poll_moves(self, now: float) -> Moved | None:
        """Whether data goes elsewhere from now on: to where the highest number came from, once validated."""
        if self._first and self.active is not None:
            self._first = False
            return Moved(self.active, None, "the first address that a sealed datagram came from")
        if not self._moves or now < self._hold_until:
            return None
        before, self.active = self.active, self._wanted
        self._hold_until = now + HOLD_SECONDS
        return Moved(self.active, before, "the latest datagrams come from there, and it has answered")

    def poll_deadline(self) -> float:
        """When one of the polls may have something; math.inf: only after input."""
        dues = [known.due for known in self._paths.values() if known.allowance >= CHALLENGE_BYTES]
        if self._first and self.active is not None:
            dues.append(-math.inf)
        elif self._moves:
            dues.append(self._hold_until)
        return min(dues, default=math.inf)

    @property
    def _moves(self) -> bool:
        return self._wanted is not None and self._wanted != self.active and self.validated(self._wanted)

    def _make_room(self) -> None:
        """Forgets the address that is least missed: not the one in use, first of those not validated the one
        that was silent longest."""
        if len(self._paths) < MOST_PATHS:
            return
        others = [
            (known.validated, known.heard, path) for path, known in self._paths.items() if path != self.active
        ]
        del self._paths[min(others, key=lambda other: other[:2])[2]]
