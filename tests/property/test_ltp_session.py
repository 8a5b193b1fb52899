"""Whatever the network does to the datagrams of two sessions: high blocks come exactly, and what a sender is
told is missing of the low ones is what was not handed on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.ltp.session import Arrived, Burst, Delivered, Lost, Refused
from atoll.ltp.settings import LtpSettings
from ltp_wire import Wire

BLOCK = 44  # elements of float32 in a datagram of 256 B
CHUNKS = {0: 1, 1: BLOCK, 2: BLOCK * 6 + 5, 3: BLOCK * 70 - 1}

fates = st.lists(
    st.tuples(
        st.sampled_from(["go", "go", "go", "lose", "lose some", "delay", "shuffle", "silence"]),
        st.integers(0, 2**32 - 1),
    ),
    max_size=40,
)
actions = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send reliably", "send back", "wait", "keys", "move"]),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=12,
)
setups = st.builds(
    LtpSettings,
    datagram_bytes=st.just(256),
    usable=st.sampled_from([0.5, 0.97, 1.0]),
    close_high=st.sampled_from([0.5, 1.0]),
    fill_above=st.sampled_from([0.01, 0.1]),
    fill=st.sampled_from(["zero", "last"]),
    redundancy=st.booleans(),
    repair_low=st.booleans(),
    initial_rate=st.sampled_from([2e4, 1.25e6, 1e8]),
)


class Fates:
    """What becomes of each burst, one after another; when they are used up, all goes well."""

    def __init__(self, wire: Wire, given: list[tuple[str, int]]) -> None:
        self.wire, self.left = wire, given[::-1]
        self.send = wire._send
        self.silent_until = -1.0
        wire._send = self.pass_on  # type: ignore[method-assign]

    def pass_on(self, client: bool, burst: Burst) -> None:
        fate, number = self.left.pop() if self.left else ("go", 0)
        rng = np.random.default_rng(number)
        count, now = len(burst.frames), self.wire.now
        if fate == "silence":
            self.silent_until = now + number % 4000 / 1000
        lost = np.zeros(count, dtype=bool)
        if fate == "lose" or now < self.silent_until:
            lost[:] = True
        elif fate == "lose some":
            lost = rng.random(count) < 0.5
        self.wire.drop = lambda client, burst, now: lost
        self.wire.jitter = lambda: number % 300 / 1000 if fate == "delay" else 0.0
        self.send(client, burst)
        if fate == "shuffle":
            self.wire.shuffle(rng)


def act(wire: Wire, sent: dict[tuple[bool, int], np.ndarray], action: str, number: int) -> None:
    rng = np.random.default_rng(number)
    if action == "wait":
        until = wire.now + number % 300 / 1000
        wire.run(lambda: wire.now >= until, limit=200.0)
    elif action == "keys":
        wire.end(bool(number % 2)).change_keys()
    elif action == "move":
        wire.from_path = ("client", number % 3)
    else:
        client, chunk = action != "send back", number % len(CHUNKS)
        values = rng.normal(size=CHUNKS[chunk]).astype(np.float32)
        high = rng.random(-(-len(values) // BLOCK)) < rng.choice([0.0, 0.2, 1.0])
        reliable = action == "send reliably"
        transfer = wire.end(client).send(wire.now, chunk, 1, values, high=high, reliable=reliable)
        sent[client, transfer] = values


def check(wire: Wire, sent: dict[tuple[bool, int], np.ndarray]) -> None:
    for client in (True, False):
        assert not wire.got(client, Lost)
        assert not wire.got(client, Refused)
        arrived = {event.transfer: event for event in wire.got(not client, Arrived)}
        delivered = wire.got(client, Delivered)
        assert [event.transfer for event in delivered] == list(arrived)  # in the receiver's order
        assert set(arrived) == {transfer for end, transfer in sent if end == client}
        for told in delivered:
            one, values = arrived[told.transfer], sent[client, told.transfer]
            assert one.present[one.high].all()
            assert (told.missing == ~one.present).all()
            assert told.fill == one.fill
            present = np.repeat(one.present, one.block)[: len(values)]
            assert one.values[present].tobytes() == values[present].tobytes()


@pytest.mark.check
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setup=setups, fates=fates, actions=actions, stripes=st.integers(1, 3))
def test_whatever_the_network_does(
    setup: LtpSettings, fates: list[tuple[str, int]], actions: list[tuple[str, int]], stripes: int
) -> None:
    wire = Wire(setup, stripes=stripes, extents=CHUNKS)
    Fates(wire, fates)
    sent: dict[tuple[bool, int], np.ndarray] = {}
    for action, number in actions:
        act(wire, sent, action, number)
    wire.run(
        lambda: (
            sum(len(wire.got(end, kind)) for end in (True, False) for kind in (Arrived, Delivered))
            == 2 * len(sent)
        ),
        limit=wire.now + 60.0,
    )
    check(wire, sent)
