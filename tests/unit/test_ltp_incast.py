"""Eight answers at once over a link with a shallow queue: grants keep them from overflowing it. In the lab:
benchmarks/incast.py."""

from __future__ import annotations

import pytest
from ltp_incast import DELAY, RATE, Incast

SIZE = 500_000
LEAST = 8 * SIZE / RATE + 2 * DELAY


def slowest(incast: Incast, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        found.append(max(incast.ask()) / LEAST)
        incast.pause(0.3)
    return found


@pytest.mark.check
def test_eight_answers_share_the_link_without_loss_once_they_know_their_share():
    incast = Incast(SIZE)
    incast.pause(0.2)
    slowest(incast, 3)  # start-up
    lost = sum(session.status().lost for session in incast.sessions.values())
    assert max(slowest(incast, 3)) <= 1.2
    assert sum(session.status().lost for session in incast.sessions.values()) == lost
