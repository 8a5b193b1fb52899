"""A ring whose order is chosen: what its members measure and try. Sums, ranks and words stay the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from atoll.core.config import load_config
from atoll.core.errors import PeerLostError
from atoll.train.api.place import Place
from atoll.train.group.channel import Channel, Sums
from atoll.train.group.ordering import RingOrder, order_for
from atoll.train.group.ringpair import RingPair

T = TypeVar("T")
CPU = torch.device("cpu")
SECONDS = 30.0
ALWAYS, NEVER = 1e-9, 1e9  # margins


class Members:
    """Members of a ring, each on a thread; their machines, and the links between these, are given."""

    def __init__(
        self,
        machines: str,
        link: Callable[[str, str], tuple[float, float]] | None = None,
        margin: float = ALWAYS,
    ) -> None:
        self.machines, self._link = machines, link
        self.measured: list[tuple[str, str]] = []
        self.opened: list[int] = []  # channels of each member, beside the session's, by rank
        self._locked = threading.Lock()
        self.orders = [
            RingOrder(lambda own=own: own, self._measuring(own), margin)  # type: ignore[misc]
            for own in machines
        ]

    def _measuring(self, own: str) -> Any:
        def measure(name: str, address: Any, token: bytes, seconds: float) -> tuple[float, float]:
            assert 0 < seconds <= 1
            assert address[1] > 0
            assert len(token) == 16
            other = self.machines[int(name.removeprefix("worker "))]
            with self._locked:
                self.measured.append((own, other))
            assert self._link is not None, "nothing was to be measured"
            return self._link(own, other)

        return measure

    def run(self, act: Callable[[Channel, Sums, RingOrder], T], ranks: list[int] | None = None) -> list[T]:
        """Form the ring of these members, by default of all, and call `act` on each."""
        store, members = dist.HashStore(), ranks or list(range(len(self.machines)))
        store.set_timeout(timedelta(seconds=SECONDS))

        def member(rank: int) -> T:
            place = Place(rank, len(members), store=store, host="127.0.0.1", names=tuple(members))
            session = Channel(place, "session", SECONDS, CPU)
            opened = [session, Channel(place, "ring", SECONDS, CPU)]
            order = self.orders[members[rank]]
            sums = order.open(session, opened[1], opened)
            assert opened[0] is session
            result = act(opened[1], sums, order)
            session.gather(b"", "the others")
            for channel in opened[1:]:
                channel.close()
            session.close()
            return result

        with ThreadPoolExecutor(len(members)) as threads:
            return list(threads.map(member, range(len(members)), timeout=2 * SECONDS))


def use(ring: Channel, sums: Sums, order: RingOrder) -> tuple[Any, ...]:
    """Everything that members do on a ring, and what was decided."""
    rank, world = ring.place.rank, ring.place.world
    found = []
    for size in (1, 5, 2**15):  # below and above what two rings share
        tensor = torch.arange(size, dtype=torch.float32) + rank
        sums.wait(sums.sum(tensor), "a sum")
        found.append(bool(torch.equal(tensor, world * torch.arange(size) + sum(range(world)))))
    parts, work = ring.all_gather(torch.tensor([rank]))
    ring.wait(work, "a gathering")
    found.append([int(part) for part in parts] == list(range(world)))
    for root in range(world):
        word = torch.tensor([rank])
        ring.wait(ring.broadcast(word, root), "a broadcast")
        found.append(int(word) == root)
    found.append(ring.gather(bytes([rank]), "bytes") == [bytes([each]) for each in range(world)])
    assert all(found), found
    return order.decision, type(sums).__name__


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
def test_ranks_and_results_are_the_same_in_every_order(order: tuple[int, ...]) -> None:
    store = dist.HashStore()

    def member(rank: int) -> None:
        channel = Channel(Place(rank, 4, store=store, host="127.0.0.1"), "ring", SECONDS, CPU, order)
        use(channel, channel, RingOrder())
        channel.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(member, range(4), timeout=SECONDS))


@pytest.mark.parametrize("machines", ["aaaa", "ab", "aba"])
def test_where_there_is_one_ring_only_nothing_is_measured_or_decided(machines: str) -> None:
    assert set(Members(machines).run(use)) == {(None, "Channel")}


def test_ranks_that_alternate_between_two_machines_are_ordered_by_machine() -> None:
    ((decision, kind),) = set(Members("abab").run(use))
    assert (decision.choice, kind) == ("0-2-1-3", "Channel")
    assert decision.reason.startswith("goes from one machine to another 2 times instead of 4; ")
    assert " times as fast in a trial (a sum of " in decision.reason


def test_an_order_that_is_not_faster_by_the_margin_is_not_taken() -> None:
    ((decision, _),) = set(Members("aabbab", margin=NEVER).run(use))
    assert decision.choice == "natural: 0-1-2-3-4-5"
    assert decision.reason == "no order of the 2 machines is better, by their links"
    # By the machines 2.0 at best, which a loopback does not give. Whatever it gives, all decide alike.
    ((decision, _),) = set(Members("abab", margin=1.99).run(use))
    assert "at least 1.99 is asked for" in decision.reason or decision.choice == "0-2-1-3"


def test_links_between_four_machines_are_measured_once_each() -> None:
    """a and c are near, and b and d; each pair is measured from one side, and never again."""
    near = {frozenset("ac"), frozenset("bd")}
    members = Members("abcd", lambda one, other: (1e9, 1e-4) if {one, other} in near else (1e6, 0.04))
    ((decision, kind),) = set(members.run(use))
    assert decision.choice.startswith("0-2-1-3, and ") or decision.choice.startswith("0-2-3-1, and ")
    assert decision.choice.endswith(" % of the bytes the other way round")
    assert kind == "RingPair"
    assert " once round instead of " in decision.reason
    assert "two rings at once are " in decision.reason
    assert decision.reason.endswith("links measured: 8 Mbit/s to 8 Gbit/s and 0.1 ms to 40.0 ms")
    assert len(members.measured) == 6
    assert {frozenset(pair) for pair in members.measured} == {
        frozenset(one + other) for one in "abcd" for other in "abcd" if one < other
    }
    members.run(use)
    assert len(members.measured) == 6


def test_after_a_loss_what_has_won_is_not_tried_again_and_newcomers_take_the_first_member_s_word() -> None:
    members = Members("ababab")
    ((first, _),) = set(members.run(use))
    assert "in a trial (" in first.reason
    members.orders[4] = RingOrder(lambda: "a", margin=ALWAYS)  # a newcomer in the place of a worker
    ((then, _),) = set(members.run(use, [1, 2, 3, 5, 4]))
    assert then.choice == "1-3-5-2-4"
    assert "in the trial before" in then.reason


def test_where_latency_leaves_nothing_to_win_no_link_is_measured_and_none_after_a_loss() -> None:
    members = Members("abcdef", margin=NEVER)
    ((decision, kind),) = set(members.run(use))
    assert (decision.choice, kind) == ("natural: 0-1-2-3-4-5", "Channel")
    assert "times as fast at most, since latency stays: at least 1e+09 is asked for" in decision.reason
    ((again, _),) = set(members.run(use, [0, 1, 3, 5]))
    assert again.choice == "natural: 0-1-3-5"
    assert again.reason == decision.reason, "what was found before is not tried again"
    assert members.measured == []


def test_links_that_cannot_be_measured_are_said_and_the_rest_is_used() -> None:
    def link(one: str, other: str) -> tuple[float, float]:
        if "a" in (one, other):
            raise PeerLostError("worker 0 at 10.0.0.1:1 ended the measuring of its link: refused")
        return 1e8, 1e-3

    ((decision, _),) = set(Members("abcd", link).run(use))
    assert "a link could not be measured: worker 0 at 10.0.0.1:1 ended" in decision.reason


@pytest.mark.parametrize("size", [1, 2**13 - 1, 2**13, 100_001])
def test_two_rings_share_the_bytes_of_each_sum(size: int) -> None:
    store = dist.HashStore()

    def member(rank: int) -> bool:
        place = Place(rank, 3, store=store, host="127.0.0.1")
        rings = [Channel(place, f"ring {order}", SECONDS, CPU, order) for order in ((0, 1, 2), (2, 1, 0))]
        pair = RingPair(*rings, share=0.7)
        tensor = torch.arange(size, dtype=torch.float64) * (rank + 1)
        work = pair.sum(tensor)
        pair.wait(work, "a sum")
        assert work.is_completed()
        assert pair.sends(9) == 12
        for ring in rings:
            ring.close()
        return bool(torch.equal(tensor, 6 * torch.arange(size, dtype=torch.float64)))

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(member, range(3), timeout=SECONDS))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_sum_over_two_rings_has_failed_when_one_half_has(failing: int) -> None:
    """The other half may wait for ever: who waits is not to wait for it."""

    class Half:
        def __init__(self, fails: bool) -> None:
            self.fails = fails

        def is_completed(self) -> bool:
            return self.fails

        def wait(self, timeout: timedelta) -> bool:
            assert self.fails or timeout > timedelta(0), "it would wait for ever"
            raise RuntimeError("Connection closed by peer" if self.fails else "timed out")

    halves = [Half(number == failing) for number in range(2)]
    rings: Any = [SimpleNamespace(sum=lambda _part, half=half: half) for half in halves]
    work = RingPair(*rings, share=0.5).sum(torch.zeros(2**14))
    assert not work.is_completed()
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=0.1))
    assert work.is_completed()
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()


def test_the_order_is_chosen_unless_the_configuration_says_otherwise_and_for_gloo_alone() -> None:
    measured, natural = load_config(), load_config(settings=["run.ring_order=natural"])
    assert isinstance(order_for(measured, CPU), RingOrder)
    assert order_for(natural, CPU) is None
    assert order_for(measured, torch.device("cuda")) is None, "NCCL lays rings of its own"
