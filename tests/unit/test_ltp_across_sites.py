"""Transfers over long links in the virtual network: how soon they are usable, against what the link could do.

The virtual link counts the headers of IP and UDP as a real one does. benchmarks/wan.py measures the same over
real sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from atoll.ltp.events import Arrived, Delivered
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import payload_bytes
from support.ltp import Pair
from support.sim import LinkModel

pytestmark = pytest.mark.check

ROUND_TRIP = 0.04
WARM = 10


@dataclass
class Path:
    """A pair of ends that send transfers one after the other."""

    pair: Pair
    rate: float  # bytes per second
    sent: int = 0

    def transfer(self, size: int) -> tuple[float, Arrived]:
        """Seconds until one of so many bytes was handed on; waits until nothing of it is under way."""
        pair, elements = self.pair, size // 4
        blocks = -(-elements // (payload_bytes(LtpSettings().datagram_bytes) // 4))
        rng = np.random.default_rng(self.sent)
        assert pair.client.session is not None
        pair.client.session.send(
            pair.now,
            0,
            self.sent,
            rng.standard_normal(elements, dtype=np.float32),
            high=rng.permutation(blocks) < blocks // 5,
        )
        self.sent += 1
        pair.server.events.clear()
        took = pair.run_until(lambda: any(isinstance(event, Arrived) for event in pair.server.events))
        pair.run_until(lambda: sum(isinstance(event, Delivered) for event in pair.client.events) == self.sent)
        pair.run(2 * ROUND_TRIP)
        return took, next(event for event in pair.server.events if isinstance(event, Arrived))

    def least(self, size: int) -> float:
        return size / self.rate + ROUND_TRIP


def path(rate: float, outages: tuple[tuple[float, float], ...] = (), **qualities: float) -> Path:
    link = LinkModel(rate=rate, delay=ROUND_TRIP / 2, queue=round(rate * ROUND_TRIP), **qualities)
    return Path(Pair(link=link, outages=outages, seal=False), rate)


@pytest.mark.parametrize(("size", "burst"), [(100_000, 1.0), (1_000_000, 8.0)])
def test_a_short_transfer_over_a_path_that_loses_waits_for_no_repair(size: int, burst: float) -> None:
    over = path(125e6, loss=0.03, burst=burst)
    for _ in range(WARM):
        over.transfer(size)
    made = [over.transfer(size) for _ in range(30)]
    ratios = sorted(took / over.least(size) for took, _ in made)
    assert ratios[14] < 0.75  # half of the round trip, and little more than the bytes' time
    assert ratios[26] < 1.0  # a repair would take a round trip more
    # And that is not by handing on less than makes a transfer usable.
    lows = [arrived.present[~arrived.high] for _, arrived in made]
    assert sum(np.count_nonzero(there) >= 0.97 * len(there) for there in lows) >= 27


def test_an_outage_is_over_within_a_few_round_trips() -> None:
    over = path(12.5e6, outages=((20.0, 2.0),))
    for _ in range(3):
        over.transfer(10_000_000)
    over.pair.run(20.0 - 0.4 - over.pair.now)
    took, arrived = over.transfer(10_000_000)
    assert took < 2.0 + over.least(10_000_000) + 7 * ROUND_TRIP
    assert arrived.present[arrived.high].all()


def test_what_an_outage_takes_makes_no_parity() -> None:
    over = path(25e6, outages=((20.0, 2.0),))
    over.transfer(5_000_000)
    over.pair.run(20.0 - 0.1 - over.pair.now)
    over.transfer(5_000_000)
    assert over.pair.client.session is not None
    assert over.pair.client.session.status().lost > 100
    before = over.pair.client.sent
    over.transfer(5_000_000)
    blocks = 5_000_000 / payload_bytes(LtpSettings().datagram_bytes)
    assert over.pair.client.sent - before < 1.01 * blocks


def test_transfers_with_pauses_between_them_are_never_slowed_to_look_at_the_round_trip() -> None:
    """While nothing is sent the path is empty: the first that comes after it tells the least round trip."""
    over = path(6.25e6)
    over.transfer(5_000_000)
    until = over.pair.now + 12.0
    took = []
    while over.pair.now < until:
        over.pair.run(0.3)
        took.append(over.transfer(250_000)[0])
    assert max(took) < 1.1 * np.median(took)  # half of the rate for a round trip would be 1.3


def test_a_late_first_round_trip_is_no_queue() -> None:
    over = path(125e6)
    for _ in range(3):
        over.transfer(10_000_000)
    assert over.pair.client.session is not None
    control = over.pair.client.session.control
    before = control.estimate
    control.begin_window(over.pair.now)
    for rtt in (ROUND_TRIP, ROUND_TRIP + 0.012):  # an end's thread was late
        control.handle_ack(
            over.pair.now,
            rtt=rtt,
            sample=None,
            acked=21,
            lost=0,
            in_flight=5_000_000,
            round_ended=True,
        )
    assert control.estimate == before
    assert control.rate > 0.9 * before
