"""Sessions over real UDP: links with threads of their own, between threads and between processes."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import pytest

from atoll.core.errors import RunError, UserError
from atoll.ltp.events import Arrived, Asked, Delivered, Event, Lost, Migrated, Refused, StripeChanged
from atoll.ltp.grants import Grant, Grants
from atoll.ltp.settings import LtpSettings
from atoll.net import linksession, ltplink
from atoll.net.linksession import LinkSession
from atoll.net.ltplink import LtpLink
from atoll.wire.datagrams import HEADER, SESSION_AT
from support.leaks import still_open

SOON = 30.0
SECRET = bytes(range(32))
FAST = LtpSettings(initial_rate=50e6)
SIZE = 500_000  # elements: 2 MB
T = TypeVar("T")


def values(seed: int = 0, size: int = SIZE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@dataclass
class Pair:
    """Two links on this machine, and a session between them."""

    server: LtpLink
    client: LtpLink
    here: LinkSession = field(init=False)  # the server's end
    there: LinkSession = field(init=False)

    def open(self, number: int = 7, **options: Any) -> tuple[LinkSession, LinkSession]:
        options.setdefault("settings", FAST)
        secret = os.urandom(32)
        here = self.server.open(number, secret, None, False, **options)
        addresses = self.server.addresses[: options.get("stripes")]
        return here, self.client.open(number, secret, addresses, True, **options)


@contextmanager
def links(host: str = "127.0.0.1", stripes: int = 1, **options: Any) -> Iterator[Pair]:
    with (
        LtpLink(host, (0,) * stripes, name="server", **options) as server,
        LtpLink(host, (0,) * stripes, name="client", **options) as client,
    ):
        yield Pair(server, client)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with links() as made:
        made.here, made.there = made.open()
        yield made


def wait_for(session: LinkSession, kind: type[T], seen: list[Event] | None = None) -> T:
    """The next event of a kind; others are put into `seen`."""
    until = time.monotonic() + SOON
    found: list[Event] = []
    while time.monotonic() < until:
        for event in session.events(0.2):
            if isinstance(event, kind) and not found:
                found.append(event)
            elif seen is not None:
                seen.append(event)
        if found:
            return found[0]  # type: ignore[return-value]
    raise AssertionError(f"{session.name}: no {kind.__name__} came")


def wait_until(what: Callable[[], bool], why: str) -> None:
    until = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < until, why
        time.sleep(0.005)


def carries(sender: LinkSession, receiver: LinkSession, seed: int = 0) -> None:
    """A transfer goes through whole."""
    sent = values(seed)
    transfer = sender.send(3, seed, sent, reliable=True)
    arrived = wait_for(receiver, Arrived)
    assert np.array_equal(arrived.values, sent)
    assert (arrived.chunk, arrived.iteration, arrived.transfer, arrived.how) == (
        3,
        seed,
        transfer,
        "complete",
    )
    delivered = wait_for(sender, Delivered)
    assert (delivered.transfer, delivered.missing.any()) == (transfer, False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_transfers_go_both_ways(host: str) -> None:
    with links(host) as pair:
        here, there = pair.open()
        carries(there, here, 1)
        carries(here, there, 2)


def test_a_link_is_shared_out_among_those_who_send(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, granted = 20e6, []
    poll = Grants.poll_grants

    def noted(grants: Grants, now: float) -> list[Grant]:
        given = poll(grants, now)
        granted.extend((now, each.session, each.rate, each.seconds) for each in given)
        return given

    monkeypatch.setattr(Grants, "poll_grants", noted)
    sent = [values(number, 3_000_000) for number in range(2)]
    with (
        LtpLink("127.0.0.1", name="server", link_rate=rate) as server,
        LtpLink("127.0.0.1", name="one") as one,
        LtpLink("127.0.0.1", name="two") as two,
    ):
        ends = []
        for number, link in enumerate((one, two)):
            secret = bytes([number]) * 32
            here = server.open(number, secret, None, False, settings=FAST)
            there = link.open(number, secret, server.addresses, True, settings=FAST)
            wait_until(lambda number=number: number in {each[1] for each in granted}, "no first grant")
            ends.append((here, there))
        begun = time.monotonic()
        for (_, there), each in zip(ends, sent, strict=True):
            there.send(3, 0, each, reliable=True)
        for (here, there), each in zip(ends, sent, strict=True):
            others: list[Event] = []
            arrived = wait_for(here, Arrived, others)
            assert np.array_equal(arrived.values, each)
            assert not any(isinstance(event, Asked) for event in others)  # the link has answered it
            assert not wait_for(there, Delivered).missing.any()
        assert time.monotonic() - begun >= 0.9 * sum(each.nbytes for each in sent) / rate
        wait_until(lambda: server._grants.poll_deadline() == math.inf, "who has nothing to send is granted")
    for now, _, _, _ in granted:
        in_force = {
            number: max((r for at, n, r, s in granted if n == number and at <= now < at + s), default=0.0)
            for number in range(2)
        }
        assert sum(in_force.values()) <= rate
    for number in range(2):  # half of the link each, while both sent
        rates = [each[2] for each in granted if each[1] == number]
        assert max(rates) >= 0.4 * rate
        assert len(rates) >= 5


def test_an_address_of_the_other_kind_is_reached_over_a_port_of_all_addresses() -> None:
    with LtpLink("127.0.0.1", name="server") as server, LtpLink(name="client") as client:
        if client.addresses[0][0] != "::":
            pytest.skip("no IPv6 here")
        here = server.open(1, SECRET, None, False, settings=FAST)
        there = client.open(1, SECRET, server.addresses, True, settings=FAST)
        carries(there, here)
        carries(here, there)
        with pytest.raises(UserError, match=r"server has an IPv4 address, and \[::1\]:9 is of IPv6"):
            server.open(2, SECRET, [("::1", 9)], True)


def test_a_session_goes_over_all_its_stripes() -> None:
    with links(stripes=4) as pair:
        here, there = pair.open()
        carries(there, here)
        carries(here, there)
        for link in (pair.server, pair.client):
            assert len(set(link.addresses)) == 4
            assert all(port.count.received > 100 for port in link._ports)
        carries(*reversed(pair.open(8, stripes=2)))


def test_sessions_of_one_link_do_not_meddle_with_each_other() -> None:
    with links() as pair:
        ends = [pair.open(number) for number in range(8)]
        for number, (_, there) in enumerate(ends):
            there.send(3, number, values(number), reliable=True)
        for number, (here, there) in enumerate(ends):
            assert np.array_equal(wait_for(here, Arrived).values, values(number))
            wait_for(there, Delivered)
        ends[0][1].close()
        wait_for(ends[0][0], Lost)
        carries(*ends[1])


def test_without_offload_it_says_so_and_goes_through() -> None:
    with links(offload=False) as pair:
        assert pair.server.offload == (
            "one datagram in a call to send, one datagram in a call to receive (it was turned off)"
        )
        here, there = pair.open()
        carries(there, here)
        counts = pair.client.counts()
        assert counts["sent_calls"] == counts["sent"] > 1500


@pytest.mark.skipif(sys.platform != "linux", reason="segmentation offload is Linux's")
def test_with_offload_a_call_has_many_datagrams(pair: Pair) -> None:
    assert pair.server.offload == "many datagrams in a call (UDP_SEGMENT, UDP_GRO)"
    carries(pair.there, pair.here)
    counts = pair.client.counts()
    assert counts["sent_calls"] < counts["sent"] / 4


def test_several_threads_send_at_once(pair: Pair) -> None:
    def send(seed: int) -> None:
        pair.there.send(seed, 0, values(seed, 50_000), reliable=True)

    threads = [threading.Thread(target=send, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    seen: list[Event] = []
    while len([event for event in seen if isinstance(event, Arrived)]) < 8:
        seen.append(wait_for(pair.here, Arrived, seen))
    for event in seen:
        if isinstance(event, Arrived):
            assert np.array_equal(event.values, values(event.chunk, 50_000))


def test_keys_change_under_way(pair: Pair) -> None:
    ends = (pair.here, pair.there)
    carries(pair.there, pair.here)
    for phase in (1, 2, 3):
        for end in ends:
            end.change_keys()
        until = time.monotonic() + SOON
        while not all(end._sealers[0].phase == end._openers[0].phase == phase for end in ends):
            assert time.monotonic() < until
            carries(pair.there, pair.here, phase)
    for end in ends:  # but for what was sent twice: a thread was late
        assert end.status().drops.keys() <= {"of a transfer that was handed on"}


# -- safe ----------------------------------------------------------------------------------------------------


def test_another_secret_is_not_let_in() -> None:
    quick = LtpSettings(idle_seconds=0.5)
    with links() as pair:
        here = pair.server.open(7, SECRET, None, False, settings=quick)
        there = pair.client.open(7, bytes(32), pair.server.addresses, True, settings=quick)
        assert wait_for(there, Lost).reason == "no answer came from the other end for 0.5 s"
        wait_for(here, Lost)
        assert here.status().drops["seal"] > 0
        with pytest.raises(RunError, match="client, session 7 with 127.0.0.1:.* is over: no answer came"):
            there.send(1, 1, values())


def test_what_kept_datagrams_from_leaving_is_said() -> None:
    with links() as pair:
        port = pair.client._ports[0]
        real = port._socket

        class Narrow:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def sendto(self, *_: Any) -> int:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))

        port._socket = Narrow()  # type: ignore[assignment]
        there = pair.client.open(
            7, SECRET, pair.server.addresses, True, settings=LtpSettings(idle_seconds=0.5)
        )
        assert re.fullmatch(
            r"no answer came from the other end for 0.5 s \(datagrams of \d+ bytes are too large for the way "
            rf"to 127.0.0.1:{pair.server.addresses[0][1]}, which takes 65507 at most\)",
            wait_for(there, Lost).reason,
        )


def test_a_session_without_seals_goes_through_and_says_so() -> None:
    with links() as pair:
        here, there = pair.open(seal=False)
        carries(there, here)
        carries(here, there)
        assert here.status().unsealed
        assert here.status().drops == {}


@pytest.mark.parametrize("sealed", [True, False])
def test_ends_that_disagree_on_seals_hear_nothing_of_each_other(sealed: bool) -> None:
    quick = LtpSettings(idle_seconds=0.5)
    with links() as pair:
        here = pair.server.open(7, SECRET, None, False, settings=quick, seal=sealed)
        there = pair.client.open(7, SECRET, pair.server.addresses, True, settings=quick, seal=not sealed)
        wait_for(there, Lost)
        wait_for(here, Lost)
        assert here.status().drops["seal"] > 0


def test_what_is_none_of_ours_is_counted_and_harms_nothing(pair: Pair) -> None:
    random = np.random.default_rng(0)
    carries(pair.there, pair.here)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for size in (1, 15, 16, 32, 33, 1400, 9000, 65_507):
            stranger.sendto(random.bytes(size), pair.server.addresses[0])
        forged = bytearray(b"\x01\x01\x00\x00" + (7).to_bytes(4, "little") + (10**6).to_bytes(8, "little"))
        stranger.sendto(forged + bytes(1000), pair.server.addresses[0])  # of this session, its seal wrong
        forged[4] = 99
        stranger.sendto(forged + bytes(1000), pair.server.addresses[0])
        forged[4], forged[3] = 7, 5
        stranger.sendto(forged + bytes(1000), pair.server.addresses[0])
    wait_until(lambda: pair.here.status().drops.get("stripe") == 1, "the last one was not counted")
    drops = pair.server.drops
    assert drops["too short"] == 4
    assert drops["no such session"] == 1
    assert sum(drops.values()) == 9
    dropped = pair.here.status().drops
    dropped.pop("of a transfer that was handed on", None)  # its sender sends again what was acknowledged late
    assert dropped == {"seal": 1, "stripe": 1}
    carries(pair.there, pair.here)


def flood(pair: Pair, datagrams: int) -> None:
    """So many datagrams of a stranger, a few of which look like ours, beside a transfer's worth of room."""
    random = np.random.default_rng(0)
    made = [random.bytes(size) for size in (1, 16, 64, 200, 1400)]
    made.append(b"\x01\x01\x00\x00" + (99).to_bytes(4, "little") + bytes(1000))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for each in range(datagrams):
            stranger.sendto(made[each % len(made)], pair.server.addresses[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_the_kernel_drops_a_flood_and_sessions_go_on_and_begin(pair: Pair) -> None:
    assert HEADER.fields is not None
    assert HEADER.fields["session"][1] == SESSION_AT
    carries(pair.there, pair.here)

    def lets_in() -> set[int]:
        return set(pair.server._filtered or ())

    wait_until(lambda: flood(pair, 300) or lets_in() == {7}, "the flood was not noticed")
    wait_until(lambda: pair.server._ports[0].drained, "what was let in before is not read")
    before = sum(pair.server.drops.values())
    flood(pair, 3000)
    carries(pair.there, pair.here)
    assert sum(pair.server.drops.values()) <= before + 300  # what was on its way
    here = pair.server.open(8, bytes(31) + b"8", None, False)
    there = pair.client.open(8, bytes(31) + b"8", pair.server.addresses, True)
    flood(pair, 300)
    carries(there, here)
    carries(here, there)
    there.close()
    wait_for(here, Lost)
    wait_until(lambda: lets_in() == {7}, "who has left is still let in")
    carries(pair.here, pair.there)


def forge(pair: Pair, datagrams: int, sender: socket.socket) -> None:
    """So many datagrams that name session 7, and are not its client's: of many lengths, kinds and numbers."""
    random = np.random.default_rng(0)
    for each in range(datagrams):
        stripe, number = (0, 10**6 + each) if each % 3 else (3, 0)
        head = bytes([1, 1 + each % 4, 0, stripe]) + (7).to_bytes(4, "little") + number.to_bytes(8, "little")
        sender.sendto(head + random.bytes(int(random.integers(20, 1300))), pair.server.addresses[0])


class Relay:
    """Between a client and a server: what it does with each datagram is `fate`'s, given the datagram and how
    many came so far: how many copies of it go on. `move` gives it another address towards the server."""

    def __init__(self, server: tuple[str, int], fate: Callable[[bytes, int], int]) -> None:
        self._server, self._fate = server, fate
        self._front, self._back = self._socket(), self._socket()
        self._client: Any = None
        self.address = self._front.getsockname()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @staticmethod
    def _socket() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        made.bind(("127.0.0.1", 0))
        return made

    def move(self) -> None:
        self._back = self._socket()

    def _carry(self) -> None:
        count = 0
        while not self._over.is_set():
            ready, _, _ = select.select([self._front, self._back], [], [], 0.05)
            for end in ready:
                data, address = end.recvfrom(65536)
                count += 1
                if end is self._front:
                    self._client = address
                for _ in range(self._fate(data, count)):
                    if end is self._front:
                        self._back.sendto(data, self._server)
                    elif self._client is not None:
                        self._front.sendto(data, self._client)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(SOON)
        self._front.close()
        self._back.close()


@contextmanager
def relayed(fate: Callable[[bytes, int], int]) -> Iterator[tuple[LinkSession, LinkSession, Relay]]:
    slow = LtpSettings(initial_rate=5e6)  # the relay is no fast one
    with links() as pair, Relay(pair.server.addresses[0], fate) as relay:
        here = pair.server.open(7, SECRET, None, False, settings=slow)
        there = pair.client.open(7, SECRET, [relay.address], True, settings=slow)
        yield here, there, relay


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_the_kernel_drops_datagrams_that_name_a_session_falsely(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = LtpSettings(initial_rate=5e6)
    with (
        links() as pair,
        Relay(pair.server.addresses[0], lambda _datagram, _count: 1) as relay,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        here = pair.server.open(7, SECRET, None, False, settings=slow)
        there = pair.client.open(7, SECRET, [relay.address], True, settings=slow)
        carries(there, here)

        def noticed() -> bool:
            forge(pair, 300, stranger)
            return bool((pair.server._filtered or {}).get(7))

        wait_until(noticed, "the flood was not noticed")
        wait_until(lambda: pair.server._ports[0].drained, "what was let in before is not read")
        before = here.forged
        forge(pair, 3000, stranger)
        carries(there, here, 1)
        assert here.forged < before + 600  # one in 64, and what was on its way
        relay.move()  # the client has another address now: some of what it sends is let in
        forge(pair, 300, stranger)
        carries(there, here, 2)
        monkeypatch.setattr(ltplink, "FORGED_SECONDS", -1.0)
        pair.server._forged_until = 0.0
        wait_until(lambda: pair.server._filtered == {7: ()}, "its client may still not move")


def test_datagrams_that_come_twice_are_taken_once() -> None:
    with relayed(lambda _data, _count: 2) as (here, there, _):
        carries(there, here)
        assert here.status().drops["replayed"] > 1000


def test_what_is_lost_goes_again_or_is_told() -> None:
    with relayed(lambda _data, count: 0 if count % 50 == 0 else 1) as (here, there, _):
        sent = values()
        high = np.zeros(-(-SIZE // 330), np.bool_)
        high[::5] = True
        there.send(3, 1, sent, high=high)
        arrived = wait_for(here, Arrived)
        delivered = wait_for(there, Delivered)
        assert arrived.present[arrived.high].all()
        assert np.array_equal(delivered.missing, ~arrived.present)
        assert arrived.present.mean() > 0.9
        whole = np.repeat(arrived.present, arrived.block)[:SIZE]
        assert np.array_equal(arrived.values[whole], sent[whole])
        assert there.status().session.lost > 10


def test_a_stripe_whose_port_is_shut_is_not_used_until_it_is_open() -> None:
    shut = threading.Event()
    settings = LtpSettings(initial_rate=5e6, idle_seconds=2.0)
    with (
        links(stripes=2) as pair,
        Relay(pair.server.addresses[1], lambda _data, _count: int(not shut.is_set())) as relay,
    ):
        here = pair.server.open(7, SECRET, None, False, settings=settings)
        addresses = [pair.server.addresses[0], relay.address]
        there = pair.client.open(7, SECRET, addresses, True, settings=settings)
        carries(there, here)
        shut.set()
        seen: list[Event] = []
        began, sent = time.monotonic(), 0
        while not [each for each in seen if isinstance(each, StripeChanged)]:  # and nothing waits for it
            sent += 1
            there.send(3, sent, values(sent), reliable=True)
            assert np.array_equal(wait_for(here, Arrived).values, values(sent))
            wait_for(there, Delivered, seen)
            assert time.monotonic() - began < SOON
        (changed,) = [each for each in seen if isinstance(each, StripeChanged)]
        assert (changed.stripe, changed.used) == (1, False)
        until = time.monotonic() + settings.idle_seconds
        while time.monotonic() < until:  # long after a silence that ends a session
            carries(there, here)
            carries(here, there)
        shut.clear()
        changed = wait_for(there, StripeChanged)
        assert (changed.stripe, changed.used) == (1, True)
        carries(there, here)


def test_the_client_comes_from_another_address_in_mid_transfer() -> None:
    with relayed(lambda _data, _count: 1) as (here, there, relay):
        carries(there, here)
        there.send(3, 1, values(1), reliable=True)
        relay.move()
        seen: list[Event] = []
        assert np.array_equal(wait_for(here, Arrived, seen).values, values(1))
        wait_for(there, Delivered)
        carries(here, there)
        assert not any(isinstance(event, Lost) for event in seen)


# -- ends ----------------------------------------------------------------------------------------------------


def test_the_other_end_learns_why_a_session_ends(pair: Pair) -> None:
    carries(pair.there, pair.here)
    pair.there.close("enough of it")
    assert wait_for(pair.here, Lost).reason == "the other end closed the session: enough of it"
    assert wait_for(pair.there, Lost).reason == "closed here: enough of it"
    for session in (pair.here, pair.there):
        with pytest.raises(RunError, match="session 7.* is over: .*enough of it"):
            session.events(0)
        with pytest.raises(RunError, match="session 7.* is over: .*enough of it"):
            session.send(3, 1, values())
        session.close()
        assert session.status().session.sent > 0
    wait_until(lambda: not pair.server._sessions and not pair.client._sessions, "they are kept")
    carries(*pair.open())  # its id is free again


def test_what_was_sent_is_named_when_a_session_fails() -> None:
    with links() as pair:
        there = pair.client.open(7, SECRET, pair.server.addresses, True)  # whom nobody answers
        sent = tuple(there.send(3, seed, values(seed, 1000)) for seed in range(3))
        there.fail("an error of its own: a test")
        with pytest.raises(RunError, match="is over: an error of its own: a test"):
            there.send(3, 3, values())
        lost = wait_for(there, Lost)
        assert (lost.reason, lost.sent) == ("an error of its own: a test", sent)
        there.close()
        wait_until(lambda: not pair.client._sessions, "it is kept")


def test_a_session_that_is_over_takes_nothing_though_its_last_event_was_not_read(pair: Pair) -> None:
    carries(pair.there, pair.here)
    with pair.here._condition:  # the link's thread has taken in a Bye, and not told of it yet
        pair.here._session.close(time.monotonic(), "a test")
        with pytest.raises(RunError, match="is over: closed here: a test"):
            pair.here.send(3, 1, values())
    pair.here.deadline = -math.inf
    pair.here._wake()
    wait_until(lambda: pair.there.finished, "it was not told")
    for call in (
        lambda: pair.there.send(3, 1, values()),
        lambda: pair.there.change_keys(),
        lambda: pair.there.ask(1),
        lambda: pair.there.grant(1.0, 1.0),
    ):
        with pytest.raises(RunError, match="is over: the other end closed the session: a test"):
            call()
    for session in (pair.here, pair.there):
        assert [type(event) for event in session.events(SOON)] == [Lost]


def test_what_waits_for_an_event_wakes_up_when_the_session_ends(pair: Pair) -> None:
    ended: list[Event] = []
    thread = threading.Thread(target=lambda: ended.append(wait_for(pair.here, Lost)))
    thread.start()
    pair.here.close()
    thread.join(SOON)
    assert [type(event) for event in ended] == [Lost]


def test_nothing_happens_and_the_wait_ends(pair: Pair) -> None:
    carries(pair.there, pair.here)
    while pair.here.events(0.05):
        pass
    assert pair.here.events(0) == []


def test_an_idle_link_sleeps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    carries(pair.there, pair.here)
    while pair.there.events(0.3) or pair.here.events(0.3):
        pass
    turns = []
    turn = LtpLink._turn
    monkeypatch.setattr(LtpLink, "_turn", lambda self: (turns.append(1), turn(self)))
    assert pair.here.events(0.5) == []
    assert len(turns) < 20


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_nothing_is_left_of_a_link() -> None:
    before = still_open()
    for _ in range(5):
        with links(stripes=2) as pair:
            here, there = pair.open()
            names = [thread.name for thread in threading.enumerate()]
            assert {"atoll link server", "atoll link client"} <= set(names)
            there.send(3, 1, values(), reliable=True)
            wait_for(here, Arrived)
        assert not [each for each in still_open() - before if "atoll link" in each]
        for session in (here, there):
            session.close()
            assert isinstance(session.events(0)[-1], Lost)
        with pytest.raises(RunError, match="server is closed"):
            pair.server.open(9, SECRET, None, False)
        pair.server.close()
        with pytest.raises(UserError, match="no address of this machine"):
            LtpLink("192.0.2.1")
    assert not still_open() - before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_cannot_use_its_parents_link(pair: Pair) -> None:
    """Nor does it hang, though a thread of its parent had a lock when it was forked."""
    carries(pair.there, pair.here)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with pair.there._condition, pair.client._lock:
            held.set()
            assert forked.wait(SOON)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(SOON)
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(10)  # or it would hang for ever
        try:
            refused = 0
            for call in (
                lambda: pair.there.send(1, 1, values()),
                lambda: pair.there.events(SOON),
                lambda: pair.there.status(),
                lambda: pair.there.change_keys(),
                lambda: pair.there.ask(1),
                lambda: pair.there.grant(1.0, 1.0),
                lambda: pair.client.open(8, SECRET, pair.server.addresses, True),
            ):
                try:
                    call()
                except RunError as error:
                    refused += "a forked process cannot use its parent's" in str(error)
            pair.there.close()
            pair.client.close()
            status = 0 if refused == 7 else 2
        finally:
            os._exit(status)
    forked.set()
    holder.join(SOON)
    ended = [(0, 1)]

    def is_over() -> bool:
        ended[0] = os.waitpid(child, os.WNOHANG)
        return ended[0][0] == child

    wait_until(is_over, "the child does not end")
    assert ended[0] == (child, 0)
    carries(pair.there, pair.here)


def test_a_link_is_asked_for_what_it_has() -> None:
    with links(stripes=2) as pair:
        with pytest.raises(UserError, match="server: 3 stripes, on a link with 2 ports"):
            pair.server.open(1, SECRET, None, False, stripes=3)
        with pytest.raises(UserError, match="client: a client gives 2 addresses, one for each stripe"):
            pair.client.open(1, SECRET, pair.server.addresses[:1], True)
        pair.open(1)
        with pytest.raises(UserError, match="server: session 1 is open already"):
            pair.server.open(1, SECRET, None, False)
    with pytest.raises(UserError, match="link: 9 ports; a link has between 1 and 8"):
        LtpLink("127.0.0.1", (0,) * 9)


def test_a_secret_is_for_one_session_only() -> None:
    """Its keys would seal other datagrams with the same numbers."""
    with links() as pair:
        here = pair.server.open(7, SECRET, None, False)
        here.close()
        wait_until(lambda: not pair.server._sessions, "it is kept")
        for number in (7, 8):
            with pytest.raises(UserError, match=f"server: session {number} has the secret of an earlier one"):
                pair.server.open(number, SECRET, None, False)
        pair.server.open(7, SECRET, [("127.0.0.1", 9)], True)  # the other end's keys are others
        pair.server.open(8, bytes(32), None, False)


# -- what goes wrong -----------------------------------------------------------------------------------------


def test_an_error_within_a_session_ends_that_one_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    others = pair.open(8)
    carries(pair.there, pair.here)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(pair.here._session, "handle_datagrams", broken)
    pair.there.send(3, 1, values())
    assert wait_for(pair.here, Lost).reason == "an error of its own: ZeroDivisionError: by zero"
    with pytest.raises(RunError) as raised:
        pair.here.events(0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    carries(*others)


def test_an_error_of_the_thread_ends_all_and_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    others = pair.open(8)
    carries(pair.there, pair.here)

    def broken() -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(pair.server._ports[0], "receive", broken)
    pair.there.send(3, 1, values())
    for session in (pair.here, others[0]):
        assert wait_for(session, Lost).reason.startswith("server has failed: OSError: ")
    with pytest.raises(RunError, match="server has failed: OSError"):
        pair.server.open(9, SECRET, None, False)
    pair.here.close()


def test_a_port_without_room_is_tried_again(pair: Pair) -> None:
    """Every other call finds no room, as where a device's queue is full."""
    port = pair.client._ports[0]
    real, calls = port._socket, [0]

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def sendmsg(self, *arguments: Any) -> int:
            calls[0] += 1
            if calls[0] % 2:
                raise BlockingIOError(errno.EAGAIN, "")
            return real.sendmsg(*arguments)

    port._socket = Full()  # type: ignore[assignment]
    carries(pair.there, pair.here)
    assert pair.client.counts()["full"] > 10


def test_a_full_device_is_waited_for(pair: Pair) -> None:
    """Its socket is ready to write all the while, and poll does not wait."""
    carries(pair.there, pair.here)
    port, tries = pair.client._ports[0], [0]

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def sendto(self, *_: Any) -> int:
            tries[0] += 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

        sendmsg = sendto

    real = port._socket
    port._socket = Full()  # type: ignore[assignment]
    begun = time.monotonic()
    pair.there.send(3, 1, values(1), reliable=True)
    wait_until(lambda: tries[0] > 40, "it is not tried again")
    assert time.monotonic() - begun > 40 / 4 * ltplink.NO_ROOM_SECONDS  # a few tries after each wait
    port._socket = real
    assert np.array_equal(wait_for(pair.here, Arrived).values, values(1))


def test_what_is_not_taken_in_time_is_dropped_until_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that memory is bounded; to the sender it is a full link."""
    carries(pair.there, pair.here)
    monkeypatch.setattr(linksession, "MOST_WAITING_BYTES", SIZE)
    for seed in (1, 2):
        pair.there.send(3, seed, values(seed), reliable=True)
    wait_until(lambda: pair.here.status().drops.get("not taken in time", 0) > 0, "nothing was dropped")
    assert pair.here.status().waiting_bytes == SIZE * 4
    for seed in (1, 2):
        assert np.array_equal(wait_for(pair.here, Arrived).values, values(seed))
    assert pair.here.status().waiting_bytes == 0


def test_what_the_other_end_may_say_without_end_is_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    carries(pair.there, pair.here)
    while pair.here.events(0.1):
        pass
    monkeypatch.setattr(linksession, "MOST_WAITING_EVENTS", 10)
    with pair.here._condition:
        for number in range(100):
            said = [
                Asked(number, "a test"),
                Refused(number, "a test"),
                Migrated(0, ("::1", number), "a test"),
            ]
            pair.here._session._events += said
    pair.here.change_keys()  # has its thread look
    wait_until(lambda: pair.here.status().drops.get("Refused not taken in time", 0) >= 95, "they are kept")
    pair.there.send(3, 1, values())
    wait_until(lambda: pair.here.status().drops.get("not taken in time", 0) > 0, "data is kept")
    events = pair.here.events(SOON)
    assert [event.size for event in events if isinstance(event, Asked)] == [99]
    assert len(events) <= 12
    assert wait_for(pair.here, Arrived).chunk == 3


# -- between processes ---------------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    """A process: sends each chunk back that arrives."""
    with LtpLink("127.0.0.1", (0, 0), name="server") as link:
        session = link.open(7, SECRET, None, False, settings=FAST)
        pipe.send(link.addresses)
        while not pipe.poll(0):
            for event in session.events(0.2):
                if isinstance(event, Arrived):
                    session.send(event.chunk, event.iteration, event.values, reliable=True)


def test_two_processes_exchange_20_megabytes_and_one_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(SOON)
        with LtpLink("127.0.0.1", (0, 0), name="client") as link:
            quick = LtpSettings(initial_rate=50e6, idle_seconds=1.0)
            session = link.open(7, SECRET, here.recv(), True, settings=quick)
            sent = values(0, 5_000_000)
            session.send(1, 1, sent, reliable=True)
            assert np.array_equal(wait_for(session, Arrived).values, sent)
            session.send(1, 2, sent)
            process.kill()
            lost = wait_for(session, Lost)
            assert lost.reason == "nothing came from the other end for 1 s"
            assert lost.sent
    finally:
        process.kill()
        process.join(SOON)
