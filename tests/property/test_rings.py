"""The order of a ring over uneven links: for few machines against all orders there are, for many by what must
hold."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.rings.order import EXACT, MARGIN, TOLERANCE, LinkSpeed, Order, Topology, is_same_ring, rounds

MESSAGE = 2**20
NEAR, FAR = LinkSpeed(1e9, 1e-4), LinkSpeed(1e7, 0.04)
figures = st.builds(LinkSpeed, st.sampled_from([1e6, 2e6, 5e6, 1e8]), st.sampled_from([1e-4, 0.01, 0.1]))


@st.composite
def topologies(draw: st.DrawFn, least: int = 2, most: int = 7) -> Topology:
    """Members on some machines, in any order of ranks; links of few kinds, so that ties are common."""
    count = draw(st.integers(least, most))
    more = draw(st.lists(st.integers(0, count - 1), max_size=4))
    drawn = draw(st.permutations([*range(count), *more]))
    first = list(dict.fromkeys(drawn))
    pairs = list(itertools.combinations(range(count), 2))
    links = draw(st.lists(st.none() | figures, min_size=len(pairs), max_size=len(pairs)))
    known = {pair: link for pair, link in zip(pairs, links, strict=True) if link is not None}
    return Topology([first.index(machine) for machine in drawn], known)


def clusters(sites: list[int]) -> Topology:
    """A machine for each member, each at one of some sites."""
    pairs = itertools.combinations(range(len(sites)), 2)
    return Topology(
        range(len(sites)), {pair: NEAR if sites[pair[0]] == sites[pair[1]] else FAR for pair in pairs}
    )


def crossed(order: Order, sites: list[int]) -> int:
    at = [sites[member] for member in order]
    return sum(one != other for one, other in zip(at, at[1:] + at[:1], strict=True))


@pytest.mark.check
@given(topologies())
def test_the_order_is_the_best_of_all_that_go_through_each_machine_once(topology: Topology) -> None:
    order = topology.best(MESSAGE)
    assert sorted(order) == list(topology.natural)
    assert order[0] == 0
    assert sum(topology.crossings(order).values()) == (topology.count if topology.count > 1 else 0)

    def members(machines: tuple[int, ...]) -> Order:
        return tuple(
            member for machine in machines for member, at in enumerate(topology.machines) if at == machine
        )

    every = [members((0, *rest)) for rest in itertools.permutations(range(1, topology.count))]
    fastest = max(topology.slowest(each) for each in every)
    admitted = [each for each in every if topology.slowest(each) >= fastest * (1 - TOLERANCE)]
    assert topology.slowest(order) >= fastest * (1 - TOLERANCE)
    assert topology.lap(order, MESSAGE) == pytest.approx(
        min(topology.lap(each, MESSAGE) for each in admitted)
    )


@given(topologies())
def test_all_members_find_one_order(topology: Topology) -> None:
    assert topology.best(MESSAGE) == Topology(topology.machines, dict(topology.links)).best(MESSAGE)


@given(topologies())
def test_an_order_that_gains_nothing_by_the_figures_is_no_better_than_that_of_the_ranks(
    topology: Topology,
) -> None:
    order, natural = topology.best(MESSAGE), topology.natural
    gain = topology.gain(order, MESSAGE)
    if is_same_ring(order, natural):
        assert gain == pytest.approx(1.0)
    if gain < MARGIN:
        assert topology.lap(natural, MESSAGE) < MARGIN * topology.lap(order, MESSAGE)
        assert topology.slowest(order) < MARGIN * topology.slowest(natural)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=EXACT + 8))
@settings(max_examples=60, deadline=None)
def test_each_site_is_entered_once(sites: list[int]) -> None:
    """Beyond EXACT machines, where orders are searched for, too."""
    sites = [list(dict.fromkeys(sites)).index(site) for site in sites]
    order = clusters(sites).best(MESSAGE)
    assert sorted(order) == list(range(len(sites)))
    assert crossed(order, sites) == (len(set(sites)) if len(set(sites)) > 1 else 0)


@pytest.mark.parametrize("count", [EXACT + 1, 40])
def test_a_searched_order_is_shorter_than_that_of_the_ranks(count: int) -> None:
    spread = {
        (one, other): LinkSpeed(1e8, 1e-3 * ((7 * (one + 1) * (other + 1)) % 31 + 1))
        for one, other in itertools.combinations(range(count), 2)
    }
    topology = Topology(range(count), spread)
    assert topology.lap(topology.best(MESSAGE), MESSAGE) < 0.7 * topology.lap(topology.natural, MESSAGE)


def test_members_of_a_machine_share_its_links() -> None:
    """Ranks that alternate between two machines cross their link twice as often as they must, each way."""
    topology = Topology([0, 1, 0, 1], {(0, 1): FAR})
    best = topology.best(MESSAGE)
    assert best == (0, 2, 1, 3)
    assert (topology.crossings(topology.natural), topology.crossings(best)) == (
        Counter({(0, 1): 4}),
        Counter({(0, 1): 2}),
    )
    assert topology.slowest(best) == FAR.bandwidth == 2 * topology.slowest(topology.natural)
    assert topology.gain(best, MESSAGE) == pytest.approx(2.0)


def test_what_was_not_measured_counts_as_the_worst_that_was() -> None:
    """The order avoids a link that nobody could measure; without any figures it goes by machines alone."""
    known = {pair: NEAR for pair in itertools.combinations(range(4), 2) if pair != (0, 1)}
    known[(2, 3)] = FAR
    best = Topology(range(4), known).best(MESSAGE)
    assert is_same_ring(best, (0, 2, 1, 3))
    assert Topology([0, 1, 2, 3, 0]).best(MESSAGE) == (0, 4, 1, 2, 3)


@given(st.permutations(range(6)), st.integers(0, 5), st.booleans())
def test_a_ring_is_the_same_from_anywhere_and_either_way(ring: list[int], turn: int, back: bool) -> None:
    turned = tuple(ring[turn:] + ring[:turn])
    assert is_same_ring(tuple(ring), turned[::-1] if back else turned)
    assert not is_same_ring(tuple(ring), (ring[1], ring[0], *ring[2:]))


@given(st.integers(2, 20))
def test_rounds_hold_each_pair_once_and_each_machine_once_a_round(count: int) -> None:
    plan = rounds(count)
    assert len(plan) == count - 1 + count % 2
    assert sorted(pair for pairs in plan for pair in pairs) == list(itertools.combinations(range(count), 2))
    for pairs in plan:
        busy = [machine for pair in pairs for machine in pair]
        assert len(set(busy)) == len(busy)
