"""Addresses of the other end of one stripe: validation, limits before it, and moves.

An address is validated once it has returned the token of a Challenge that was sent there. Before, at most
three times its own bytes are sent to it. Source: docs/ltp.md, "Addresses"; RFC 9000, sections 8 and 9.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from atoll.wire.linkcontrol import TOKEN_BYTES

AMPLIFICATION = 3  # QUIC's factor: bounds a flood towards a forged address
MOST_PATHS = 4  # of a stripe: the one in use, the next one, and two that flap
CHALLENGE_BYTES = 128  # largest datagram of a Challenge, seal included
MOST_CHALLENGES = 24  # unanswered ones before an address is given up
MOST_RESEND_SECONDS = 0.5  # unless a round trip takes longer: a session waits for the first to get through
LEAST_RESEND_SECONDS = 0.05  # a shorter timer would resend for a scheduler's pause
HOLD_SECONDS = 1.0  # between two moves: each one restarts the measurements of rate and round trip
FORGET_SECONDS = 30.0  # of silence, after which an unused address may belong to somebody else
UNLIMITED = 2**62


@dataclass(frozen=True)
class Moved:
    """Data goes to `path` from now on; `before` is None for the first address."""

    path: Hashable
    before: Hashable | None
    reason: str


@dataclass
class _Path:
    heard: float  # time of the last datagram from it
    received: int = 0  # bytes
    sent: int = 0
    validated: bool = False
    token: bytes = b""  # of its open challenge, or empty
    tries: int = 0
    due: float = math.inf  # when to send the challenge (again)

    @property
    def allowance(self) -> int:
        return UNLIMITED if self.validated else max(AMPLIFICATION * self.received - self.sent, 0)


class Paths:
    """The addresses of one stripe. `known`: an address from the authenticated channel, trusted at once."""

    def __init__(self, now: float, rng: np.random.Generator, known: Hashable | None = None) -> None:
        self.active: Hashable | None = known  # where data goes, validated or not, see `allowance`
        self.round_trip = 0.1  # seconds; the session sets the measured value
        self._rng = rng
        self._paths: dict[Hashable, _Path] = {}
        self._highest = -1  # highest number received
        self._wanted: Hashable | None = known  # address that sent it
        self._hold_until = -math.inf
        self._first = known is None
        if known is not None:
            self._paths[known] = _Path(heard=now, validated=True)

    def __len__(self) -> int:
        return len(self._paths)

    def allowance(self, path: Hashable) -> int:
        """Return the bytes that may be sent to this address now."""
        known = self._paths.get(path)
        return known.allowance if known else 0

    def validated(self, path: Hashable) -> bool:
        known = self._paths.get(path)
        return known is not None and known.validated

    def handle_received(self, now: float, path: Hashable, size: int, highest: int) -> None:
        """Record `size` bytes of sealed, fresh datagrams from this address; `highest` is their highest
        number."""
        known = self._paths.get(path)
        ahead = highest > self._highest
        if known is None:
            if not ahead and self.active is not None:
                return  # a late datagram from an abandoned address
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
        """Take an Answer from this address; return True if its token is that of the open challenge."""
        known = self._paths.get(path)
        if known is None or not known.token or known.token != token:
            return False
        known.validated, known.token, known.due, known.heard = True, b"", math.inf, now
        return True

    def handle_sent(self, path: Hashable, size: int) -> None:
        """Record `size` bytes sent to this address, challenges included."""
        known = self._paths.get(path)
        if known is not None:
            known.sent += size

    def poll_challenges(self, now: float) -> list[tuple[Hashable, bytes]]:
        """Return the addresses to challenge now, with their tokens.

        An address that left the last challenge unanswered is given up until a datagram with a new highest
        number comes from it.
        """
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
        """Return a move of the data to the address that sent the highest number, once it is validated."""
        if self._first and self.active is not None:
            self._first = False
            return Moved(self.active, None, "the first address that a sealed datagram came from")
        if not self._moves or now < self._hold_until:
            return None
        before, self.active = self.active, self._wanted
        self._hold_until = now + HOLD_SECONDS
        return Moved(self.active, before, "the latest datagrams come from there, and it has answered")

    def poll_deadline(self) -> float:
        """Return the time at which a poll may have something; inf: only after input."""
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
        """Forget an address that is not in use: unvalidated ones first, then the one silent for longest."""
        if len(self._paths) < MOST_PATHS:
            return
        others = [
            (known.validated, known.heard, path) for path, known in self._paths.items() if path != self.active
        ]
        del self._paths[min(others, key=lambda other: other[:2])[2]]
