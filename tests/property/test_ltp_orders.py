"""Two sessions whose datagrams Hypothesis holds in its hand: it lets them go in any order, loses, repeats and
damages them, and lets time pass; what was sent comes all the same, and the books are right."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atoll.ltp.events import Lost
from atoll.ltp.settings import Fill, LtpSettings
from atoll.wire.datagrams import Bytes, payload_bytes
from support.ltp import End, Ledger, Pair, Passing, held_bytes, whole_numbers
from support.sim import LinkModel

SMALL = LtpSettings(datagram_bytes=256, idle_seconds=30.0)
BLOCK = payload_bytes(256) // 4
LINK = LinkModel(rate=12.5e6, delay=0.02)
ELEMENTS = (40 * BLOCK - 5, 7 * BLOCK, 3)  # by chunk
LONG = 60.0

# What happens, and to what: the number chooses a burst that is held, an end, a size, or how long.
ACTIONS = (
    "release", "release", "release", "release all", "drop", "repeat", "half", "damage", "wait", "send",
    "send back", "send reliably", "keys", "move",
)  # fmt: skip
Schedule: TypeAlias = list[tuple[str, int]]
SCHEDULES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 255)), max_size=60)
WAITS = (0.0005, 0.005, 0.02, 0.1, 0.4, 1.5)


class Hand:
    """A pair whose datagrams are all held back, burst by burst, until the schedule lets them go."""

    def __init__(self, fill: Fill, seed: int, stripes: int) -> None:
        self.pair = Pair(replace(SMALL, fill=fill), LINK, seed, stripes=stripes)
        self.held: list[Passing] = []
        self.ledgers = Ledger(self.pair), Ledger(self.pair, "down")
        self.pair.sealed_taps.append(self._hold)
        self.count = 0

    def _hold(self, passing: Passing) -> Bytes:
        self.held.append(passing)
        return passing.frames[:0]

    def do(self, action: str, number: int) -> None:
        pair, many = self.pair, len(self.held)
        if action in ("release", "drop", "repeat", "half", "damage"):
            if many:
                self._one(action, number % many, number)
        elif action == "release all":
            for _ in range(many):
                self._one("release", 0, 0)
        elif action == "wait":
            pair.run(WAITS[number % len(WAITS)])
        elif action == "keys":
            session = (pair.client, pair.server)[number % 2].session
            assert session
            session.change_keys()
        elif action == "move":
            pair.move(pair.client, number % len(pair.client.addresses))
        else:
            self._send(self.ledgers[action == "send back"], number, action == "send reliably")
        pair.run(0.0005)

    def _one(self, action: str, index: int, number: int) -> None:
        passing = self.held[index]
        frames = passing.frames
        if action != "repeat":
            del self.held[index]
        if action == "half":
            frames = frames[number % 2 :: 2]
        elif action == "damage":
            frames = frames.copy()
            frames[number % len(frames), number % frames.shape[1]] ^= 1 << number % 8
        if action != "drop":
            end = self.pair.ends[passing.way]
            self.pair.transmit(passing.way, end.addresses[passing.stripe], passing.path, frames)

    def _send(self, ledger: Ledger, number: int, reliable: bool) -> None:
        self.count += 1
        chunk = number % len(ELEMENTS)
        gradient = whole_numbers(np.random.default_rng(self.count), ELEMENTS[chunk])
        ledger.send(chunk, gradient, reliable=reliable)

    def let_go(self) -> None:
        self.pair.sealed_taps.clear()
        for passing in self.held:
            source = self.pair.ends[passing.way].addresses[passing.stripe]
            self.pair.transmit(passing.way, source, passing.path, passing.frames)


def play(schedule: Schedule, fill: Fill, seed: int, stripes: int) -> Hand:
    hand = Hand(fill, seed, stripes)
    for action, number in schedule:
        hand.do(action, number)
    hand.let_go()
    return hand


def check(schedule: Schedule, fill: Fill, seed: int, stripes: int) -> None:
    hand = play(schedule, fill, seed, stripes)
    pair = hand.pair
    pair.run_until(lambda: all(ledger.done for ledger in hand.ledgers), LONG)
    for ledger in hand.ledgers:
        ledger.check()
    for end in (pair.client, pair.server):
        assert not any(isinstance(event, Lost) for event in end.events)
    final = Ledger(pair)
    final.send(5, whole_numbers(np.random.default_rng(9), 20 * BLOCK))
    pair.run_until(lambda: final.done, LONG)
    final.check()
    assert not final.missing


def check_death(schedule: Schedule, seed: int, who: int) -> None:
    hand = play(schedule, "zero", seed, 1)
    pair = hand.pair
    dead, left = ((pair.client, pair.server), (pair.server, pair.client))[who]
    pair.kill(dead)
    pair.run_until(
        lambda: lost(left), SMALL.idle_seconds + 2
    )  # which the ledgers see, and look at their books
    assert left.session
    pair.run(3.0)  # what is still on its way comes to nobody
    assert not pair.step(pair.now + 1000), "an end whose session is lost still wants something"
    fresh = Hand("zero", seed, 1).pair.client.session
    assert held_bytes(left.session) < held_bytes(fresh) + 100_000


def lost(end: End) -> bool:
    return any(isinstance(event, Lost) for event in end.events)


# A transfer whose sender has died was to be given up by one sum of floats, and not yet by another: for ever.
GIVEN_UP: Schedule = [
    *[("release", 0)] * 6, ("wait", 149), ("send", 0), *[("release", 0)] * 9, ("wait", 5), ("send", 0),
    ("half", 0),
]  # fmt: skip

# The word on a transfer waited for that on an earlier one, and was swallowed when it was said again.
SAID_AGAIN: Schedule = [
    *[("release", 0)] * 7, ("send", 1), ("send", 1), ("send back", 242), ("move", 0), ("release", 1),
    ("move", 0),
]  # fmt: skip

quick = settings(max_examples=60, suppress_health_check=list(HealthCheck))
long = settings(max_examples=3000, suppress_health_check=list(HealthCheck))
FILLS = st.sampled_from(["zero", "last"])


@pytest.mark.check
@given(SCHEDULES, FILLS, st.integers(0, 99), st.integers(1, 2))
@example([], "zero", 0, 1)
@example(SAID_AGAIN, "zero", 0, 1)
@quick
def test_whatever_the_order_all_comes_and_the_books_are_right(
    schedule: Schedule, fill: Fill, seed: int, stripes: int
) -> None:
    check(schedule, fill, seed, stripes)


@given(SCHEDULES, st.integers(0, 99), st.integers(0, 1))
@example(GIVEN_UP, 0, 0)
@settings(quick, max_examples=20)
def test_whenever_an_end_dies_the_other_says_so(schedule: Schedule, seed: int, who: int) -> None:
    check_death(schedule, seed, who)


@pytest.mark.soak
@given(SCHEDULES, FILLS, st.integers(0, 99), st.integers(1, 2))
@long
def test_many_more_orders(schedule: Schedule, fill: Fill, seed: int, stripes: int) -> None:
    check(schedule, fill, seed, stripes)


@pytest.mark.soak
@given(SCHEDULES, st.integers(0, 99), st.integers(0, 1))
@long
def test_many_more_deaths(schedule: Schedule, seed: int, who: int) -> None:
    check_death(schedule, seed, who)
