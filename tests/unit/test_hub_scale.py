"""What the hub decides costs each member about the same, however many there are.

Times are compared at two sizes, as a ratio with room: a cost that grows with the square of the number would
be eight times too large.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from atoll.hub.book import Book
from atoll.hub.broken import BrokenLinks
from atoll.hub.decisions import Decisions
from atoll.hub.records import Came, Died
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.store.members import Membership
from atoll.wire.messages import AnyMessage, Gather, Gathered, Reform, Reformed, Refused, RingNews

FEW, MANY = 1_000, 8_000
ROOM = 4.0  # times the cost of each; the square would cost 8


class Server:
    """Sends nothing; connections of the `gone` are no more."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.offered = 0

    def offer(self, peer: bytes, *_: object) -> str:
        self.offered += 1
        return "gone" if peer in self.gone else "sent"


class Said(Turn):
    """Counts what is said, and keeps the last of it alone."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.sent: Counter[type[AnyMessage]] = Counter()

    def send(self, peer: bytes, message: AnyMessage) -> None:
        assert not isinstance(message, Refused), message
        self.sent[type(message)] += 1
        self.answers = [(peer, message)]


class Run:
    """A hub's book and rings, of `count` workers of incarnations 1, 2, ..., without connections."""

    def __init__(self, count: int, shards: int = 0) -> None:
        self.count, self.now = count, 0.0
        members = Membership(count, 10.0, shards, heartbeat=0.25)
        self.server = Server()
        self.looked: list[int] = []
        self.broken = BrokenLinks(members, self.server)  # type: ignore[arg-type]
        self.decided: list[str] = []
        decisions = Decisions()
        decisions.add = lambda what, choice, reason: self.decided.append(f"{what}: {choice} ({reason})")  # type: ignore[method-assign]
        said = Said(lambda: self.now)
        self.said, self.sent = said, said.sent
        self.rings = Rings(members, decisions, said)
        self.book = Book(members, self.rings)

    def join(self) -> None:
        for each in range(self.count):
            came = Came(at=self.now, role="worker", wish=-1, shard=-1, address="", site="", token=f"t{each}")
            assert self.book.come(came).worker == each

    def gather(self) -> None:
        for each in range(1, self.count + 1):
            self.rings.handle(b"%d" % each, Gather(incarnation=each, number=1, seconds=60.0))
            self.rings.poll()

    def beat(self, last: int) -> int:
        """The first so many are heard; gives how many of the others were buried meanwhile."""
        buried = 0
        for each in range(1, last + 1):
            assert self.book.members.roll.hear(self.now, each, 1)
            self.broken.beat(b"%d" % each, each)
            self.rings.beat(b"%d" % each, each)
            if not each % 16:
                buried += self.bury()
        return buried

    def turn(self) -> list[tuple[int, str]]:
        self.looked += [incarnation for _, incarnation in self.broken.poll(self.now)]
        self.rings.poll()
        return self.book.members.roll.poll_deaths(self.now)

    def bury(self) -> int:
        dead = self.turn()
        for incarnation, _ in dead:
            gone = self.book.die(Died(at=self.now, incarnation=incarnation))
            assert gone is not None
            assert gone.worker == incarnation - 1
            self.broken.left(incarnation)
        return len(dead)

    def reform(self, last: int) -> None:
        for each in range(1, last + 1):
            wish = Reform(incarnation=each, number=2, group=1, rank=each - 1, round=3)
            self.rings.handle(b"%d" % each, wish)
            self.now += 1e-6
            self.rings.poll()


def seconds_of_all(count: int) -> float:
    """From the first Hello to the ring of those that are left: what it takes, in seconds of the processor."""
    run, start = Run(count), time.process_time()
    run.join()
    run.gather()
    assert run.sent == {Gathered: count}
    for beat in range(20):
        run.now = 0.25 * beat
        run.beat(count)
    buried = 0
    for beat in range(20, 40):
        run.now = 0.25 * beat
        buried += run.beat(count // 2)
    assert buried + run.bury() == count - count // 2
    run.sent.clear()
    run.reform(count // 2)
    spent = time.process_time() - start
    ((_, last),) = run.said.answers
    assert isinstance(last, Reformed)
    assert last.workers == list(range(count // 2))
    return spent


@pytest.mark.check
def test_a_run_of_many_costs_each_worker_as_much_as_one_of_few() -> None:
    few = min(seconds_of_all(FEW) for _ in range(2))
    many = seconds_of_all(MANY)
    assert many * FEW / MANY <= ROOM * few


@pytest.mark.soak
def test_a_run_of_a_hundred_thousand() -> None:
    assert seconds_of_all(100_000) / 10 <= ROOM * seconds_of_all(10_000)


def test_a_death_is_told_once_to_each_member_of_a_ring_and_not_once_for_each_dead() -> None:
    run = Run(400)
    run.join()
    run.gather()
    run.beat(400)
    run.sent.clear()
    run.now = 8.0
    run.beat(200)
    run.now = 11.0
    assert run.bury() == 200
    run.turn()
    assert run.sent[RingNews] == 200
    run.turn()
    assert run.sent[RingNews] == 200  # it is as it was
    run.beat(1)  # and who asks again is told again
    assert run.sent[RingNews] == 201


def test_a_line_of_the_record_names_a_few_of_many() -> None:
    run = Run(5000)
    run.join()
    run.gather()
    (formed,) = run.decided
    assert formed.startswith("ring: ring 1 of 5000 workers (all are there: worker 0, incarnation 1, worker 1")
    assert formed.endswith(", and 4984 others)")
    run.beat(5000)
    run.now = 8.0
    run.beat(10)
    run.now = 11.0
    run.bury()
    run.reform(10)
    assert run.decided[-1].startswith("ring: ring 2 of 10 workers (worker 10 died, worker 11 died")
    assert "worker 25 died, 4974 others died; it goes on" in run.decided[-1]


def test_only_the_silent_are_looked_at_for_broken_connections() -> None:
    run = Run(1000, shards=1)
    run.join()
    run.beat(1000)
    for beat in range(1, 9):
        run.now = 0.25 * beat
        run.beat(990)
    assert run.server.offered <= 10 * 2 * 9  # ten are silent, and each is looked at each 0.2 s
    run.looked.clear()
    run.server.gone = {b"995"}
    run.now += 0.2
    run.turn()
    assert run.looked == [995]
    run.beat(995)  # it is heard again, over another connection, and so are others
    run.looked.clear()
    run.now += 0.2
    run.turn()
    assert run.looked == []


def test_the_lowest_free_rank_is_given_whatever_was_given_back() -> None:
    members = Membership(6, 10.0)
    taken = {}
    for rank in (0, 1, 2, 5, 3):
        taken[rank] = members.handle_hello(0.0, "worker", rank).incarnation
    assert members.handle_hello(0.0, "worker").worker == 4
    assert members.handle_hello(0.0, "worker").worker == 6
    for rank in (5, 1):
        members.workers.leave(taken[rank])
    assert members.handle_hello(0.0, "worker", 1).worker == 1
    members.workers.not_ranks = [5]
    assert members.handle_hello(0.0, "worker").worker == 7
    members.workers.not_ranks = []
    assert members.handle_hello(0.0, "worker").worker == 5


def test_a_silence_is_judged_as_of_an_earlier_moment_too() -> None:
    members = Membership(2, 10.0, least=1.0)
    for _ in range(2):
        members.handle_hello(0.0, "worker")
    assert len(members.roll.poll_deaths(10.5)) == 2
    assert members.roll.poll_deaths(9.9) == []
    members.roll.hear(9.95, 1)  # it was unread when the others were looked at
    ((incarnation, reason),) = members.roll.poll_deaths(10.5)
    assert incarnation == 2
    assert reason.startswith("worker 1 was silent for 10.5 s")
