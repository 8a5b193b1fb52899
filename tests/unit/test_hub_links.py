"""Whom the hub asks to measure which link, and what it knows of them then."""

from __future__ import annotations

import math

import pytest

from atoll.hub.links import NEAR_SECONDS, PLACE_SECONDS, Ask, LinkDesk, LinksFound
from atoll.hub.records import Linked, decode_record, encode_record
from atoll.wire.messages import LinkMeasured, LinkPlace

TOKEN = b"t" * 16
FAST, SLOW = (1e9, 1e-5), (1e7, 0.04)  # bytes per second, seconds one way


class Desk:
    """A desk, and workers on machines that answer what they are asked at once."""

    def __init__(self, hosts: dict[int, str], seconds: float = 5.0) -> None:
        self.now, self.hosts = 0.0, dict(hosts)
        self.records: list[Linked] = []
        self.desk = LinkDesk(seconds, self.records.append)
        self.asked: list[tuple[str, str]] = []
        self.broken: set[tuple[str, str]] = set()  # ways over which nobody comes
        self.quiet: set[int] = set()  # who does not say where its links are measured
        self.founds: list[LinksFound] = []

    def says(self, *workers: int) -> None:
        for worker in workers or self.hosts:
            place = LinkPlace(incarnation=worker, host=self.hosts[worker], port=1000 + worker, token=TOKEN)
            self.desk.handle_place(self.now, worker, place)

    def poll(self) -> None:
        asks, found = self.desk.poll(self.now, self.hosts.keys())
        for ask in asks:
            self.answer(ask)
        if found is not None:
            self.founds.append(found)

    def answer(self, ask: Ask) -> None:
        message = ask.message
        way = (self.hosts[ask.worker], self.hosts[message.worker])
        assert (message.host, message.port) == (way[1], 1000 + message.worker)
        assert message.token == TOKEN
        assert message.seconds <= (NEAR_SECONDS if way[0] == way[1] else 2.0)
        self.asked.append(way)
        bandwidth, latency = FAST if way[0] == way[1] else SLOW
        word = LinkMeasured(incarnation=0, worker=message.worker, bandwidth=bandwidth, latency=latency)
        if way in self.broken:
            word = LinkMeasured(incarnation=0, worker=message.worker, reason="no route to host")
        self.now += 0.1
        self.desk.handle_measured(self.now, ask.worker, word)

    def finish(self) -> LinksFound:
        for _ in range(20):
            self.desk.handle_live(self.hosts)
            if wanted := {worker for worker in self.hosts if self.desk.wants(worker)} - self.quiet:
                self.says(*wanted)  # as each of its heartbeats does
            self.poll()
        assert self.desk.over
        return self.founds[-1]


def test_one_pair_measures_for_all_of_two_machines() -> None:
    lab = Desk({0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"})
    lab.poll()
    assert not lab.asked  # nobody has said where
    assert all(lab.desk.wants(worker) for worker in lab.hosts)
    lab.says()
    found = lab.finish()
    assert sorted(lab.asked) == [("a", "a"), ("a", "b"), ("b", "b")]
    assert found.links.workers == (0, 1, 2, 3, 4, 5)
    assert (found.links.bandwidth[0, 4], found.links.latency[0, 4]) == SLOW
    assert (found.links.bandwidth[1, 2], found.links.latency[4, 5]) == FAST
    assert found.summary == "3 of 3 links measured (6 workers on 2 machines)"
    assert found.reason == "between machines 80 Mbit/s and 40.0 ms; inside a machine 8 Gbit/s and 0.0 ms"
    assert not any(lab.desk.wants(worker) for worker in lab.hosts)
    assert len(lab.founds) == 1


def test_who_does_not_say_where_is_left_out_after_a_while() -> None:
    lab = Desk({0: "a", 1: "b", 2: "c"})
    lab.quiet = {2}
    lab.says(0, 1)
    lab.poll()
    assert not lab.asked
    lab.now += PLACE_SECONDS
    found = lab.finish()
    assert lab.asked == [("a", "b")]
    assert found.links.workers == (0, 1)
    assert "nothing is known of the links to worker 2" in found.reason


def test_a_link_that_cannot_be_measured_is_said_and_not_tried_again() -> None:
    lab = Desk({0: "a", 1: "b", 2: "c"})
    lab.broken = {("a", "c")}
    lab.says()
    found = lab.finish()
    assert sorted(lab.asked) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found.summary.startswith("2 of 3 links measured")
    assert "a - c: no route to host" in found.reason
    assert (found.links.bandwidth[0, 2], found.links.latency[0, 2]) == (SLOW[0], 2 * SLOW[1])  # by way of b


def test_what_nobody_answers_ends_in_time() -> None:
    lab = Desk({0: "a", 1: "b", 2: "c"}, seconds=5.0)
    lab.says()
    lab.desk.handle_live(lab.hosts)
    asks = 0
    while not lab.desk.over:
        begun, found = lab.desk.poll(lab.now, lab.hosts.keys())
        asks += len(begun)
        if found is None:
            deadline = lab.desk.next_deadline()
            assert deadline is not None
            assert math.isfinite(deadline)
            lab.now = deadline
    assert found is not None
    assert found.summary.startswith("0 of 3 links measured")
    assert lab.now <= 5.0
    assert 1 <= asks <= 3


def test_who_comes_late_is_measured_only_where_nothing_is_known() -> None:
    lab = Desk({0: "a", 1: "b"})
    lab.says()
    lab.finish()
    lab.hosts[2] = "c"
    lab.desk.handle_live(lab.hosts)
    assert lab.desk.wants(2)
    lab.asked.clear()
    assert lab.finish().links.workers == (0, 1, 2)
    assert sorted(lab.asked) == [("a", "c"), ("b", "c")]
    lab.hosts[3] = "c"
    lab.asked.clear()
    lab.finish()
    assert lab.asked == [("c", "c")]


def test_a_place_from_before_counts_no_more() -> None:
    """Workers close it when the measuring is over; for who comes late they have another one."""
    lab = Desk({0: "a", 1: "b"})
    lab.says()
    lab.finish()
    lab.says()  # went out before they heard that it is over
    lab.hosts[2] = "c"
    lab.desk.handle_live(lab.hosts)
    lab.asked.clear()
    lab.says(2)
    lab.poll()
    assert not lab.asked
    lab.says(0, 1)
    lab.finish()
    assert sorted(lab.asked) == [("a", "c"), ("b", "c")]


def test_a_rank_that_comes_again_may_be_elsewhere() -> None:
    lab = Desk({0: "a", 1: "b"})
    lab.says()
    lab.finish()
    lab.desk.handle_left(lab.now, 1)
    lab.hosts[1] = "c"
    lab.desk.handle_live(lab.hosts)
    assert lab.desk.wants(1)
    lab.asked.clear()
    lab.finish()
    assert lab.asked == [("a", "c")]


def test_a_restarted_hub_knows_what_was_measured() -> None:
    lab = Desk({0: "a", 1: "a", 2: "b"})
    lab.says()
    before = lab.finish()
    other = Desk(lab.hosts)
    for record in lab.records:
        read = decode_record(encode_record(record))
        assert isinstance(read, Linked)
        other.desk.take(read)
    after = other.finish()
    assert not other.asked
    assert (after.links.bandwidth == before.links.bandwidth).all()


def test_a_word_that_nobody_asked_for_is_left_aside() -> None:
    lab = Desk({0: "a", 1: "b"})
    lab.says()
    lab.desk.handle_measured(0.0, 0, LinkMeasured(incarnation=0, worker=1, bandwidth=1.0))
    lab.desk.handle_measured(0.0, 0, LinkMeasured(incarnation=0, worker=7, bandwidth=1.0))
    assert not lab.desk.known
    assert not [each for each in lab.records if each.worker < 0]


@pytest.mark.parametrize("workers", [[], [3]])
def test_who_is_alone_has_no_links(workers: list[int]) -> None:
    lab = Desk(dict.fromkeys(workers, "a"))
    lab.poll()
    assert lab.desk.over
    assert not lab.founds
