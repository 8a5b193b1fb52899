"""The stripe and address for each datagram: one in use that may take its bytes.

Source: docs/ltp.md, "Addresses" and "Bursts, stripes, and a link's thread".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from atoll.ltp.flights import Flights
from atoll.ltp.outbox import ControlMessage
from atoll.ltp.paths import Paths
from atoll.wire.datagrams import control_datagram


class Ways:
    """The addresses of each stripe of a session, used in turn.

    Args:
        known: first address of each stripe; None: wherever the other end is heard from.
        flights: knows which stripes are in use.
    """

    def __init__(
        self, known: Sequence[Hashable | None], flights: Flights, rng: np.random.Generator, now: float
    ) -> None:
        self.paths = [Paths(now, rng, path) for path in known]
        self._flights = flights
        self._turn = 0  # stripe

    def __len__(self) -> int:
        return len(self.paths)

    def active(self, stripe: int, size: int) -> Hashable | None:
        """Return the stripe's address if it may take `size` bytes."""
        paths = self.paths[stripe]
        return None if paths.active is None or paths.allowance(paths.active) < size else paths.active

    def of_control(self, message: ControlMessage) -> tuple[int, Hashable] | None:
        """Return stripe and address for a control message; None if no address may take it now."""
        size = len(control_datagram(message.body)[0])
        used = [stripe for stripe in range(len(self)) if self._flights.used(stripe)]
        for stripe in used if message.stripe is None else (message.stripe,):
            paths = self.paths[stripe]
            path = paths.active if message.path is None else message.path
            if path is not None and paths.allowance(path) >= size:
                return stripe, path
        return None

    def takes(self, message: ControlMessage) -> bool:
        """Return True if some address may take the control message now."""
        return self.of_control(message) is not None

    def poll_challenges(self, now: float) -> Iterator[tuple[int, Hashable, bytes]]:
        """Yield the stripe, address and token of each address that is to be challenged now."""
        for stripe, paths in enumerate(self.paths):
            if now >= paths.poll_deadline():
                for path, token in paths.poll_challenges(now):
                    yield stripe, path, token

    def of_data(self, size: int) -> tuple[int, Hashable, int] | None:
        """Return the next stripe that may take datagrams of `size` bytes, its address, and their number."""
        for each in range(len(self)):
            stripe = (self._turn + each) % len(self)
            path = self.paths[stripe].active
            if path is not None and self._flights.used(stripe):
                count = self.paths[stripe].allowance(path) // size
                if count:
                    return stripe, path, count
        return None

    def had_turn(self, stripe: int) -> None:
        """Note that data went over this stripe."""
        self._turn = stripe + 1
