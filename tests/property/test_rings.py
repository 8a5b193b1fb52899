"""Rings and trees over uneven links: against all there are, for few members; for many, by what must hold."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.core.errors import UserError
from atoll.rings import NoRingError, Ring, Rings, Shape, Tree, bounds, choose, disjoint, order, search, tree
from atoll.rings import order as order_of
from atoll.rings.disjoint import WORK
from atoll.rings.search import Search

Matrix = NDArray[np.float64]
FEW = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0])


@st.composite
def matrices(
    draw: st.DrawFn, least: int = 2, most: int = 7, symmetric: bool | None = None, no_zero: bool = False
) -> Matrix:
    """Bandwidths of few kinds, so that ties are common."""
    n = draw(st.integers(least, most))
    kinds = FEW.filter(bool) if no_zero else FEW
    cells = draw(st.lists(kinds, min_size=n * n, max_size=n * n))
    matrix = np.array(cells).reshape(n, n)
    if symmetric if symmetric is not None else draw(st.booleans()):
        matrix = np.maximum(matrix, matrix.T)
    np.fill_diagonal(matrix, 0)
    return matrix


def walked(members: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(members, (*members[1:], members[0]), strict=True))


def every_ring(members: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in itertools.permutations(range(1, members))]


def best_by_trying(matrix: Matrix, delays: Matrix | None, tolerance: float = 0.0) -> tuple[float, float]:
    """The fastest slowest link of all rings, and then the best sum."""
    rings = every_ring(len(matrix))
    slowest = max(min(matrix[link] for link in walked(ring)) for ring in rings)
    admitted = [
        ring for ring in rings if min(matrix[link] for link in walked(ring)) >= slowest * (1 - tolerance)
    ]
    if delays is None:
        return slowest, max(sum(matrix[link] for link in walked(ring)) for ring in admitted)
    return slowest, min(sum(delays[link] for link in walked(ring)) for ring in admitted)


ONE_WAY = [[0, 2, 3, 0, 0], [3, 0, 0, 2, 0], [3, 0, 0, 0, 3], [0, 3, 0, 0, 2], [0, 0, 2, 3, 0]]


@given(matrices(), st.booleans(), st.sampled_from([0.0, 0.4]))
@example(np.array(ONE_WAY, float), True, 0.4)  # its other way round has faster links, and is later
def test_the_ring_of_few_members_is_the_best_of_all(matrix: Matrix, late: bool, tolerance: float) -> None:
    delays = np.round(7.3 * matrix.T[::-1] % 4, 2) if late else None
    slowest, rest = best_by_trying(matrix, delays, tolerance)
    if slowest == 0:
        with pytest.raises(UserError):
            order(matrix, latencies=delays)
        return
    ring = order(matrix, latencies=delays, tolerance=tolerance)
    assert sorted(ring.members) == list(range(len(matrix)))
    assert ring.bound == slowest
    assert slowest * (1 - tolerance) <= ring.slowest <= slowest
    assert ring.slowest == min(matrix[link] for link in ring.links)
    assert ring.proved == (ring.slowest == slowest)
    assert ring.total == pytest.approx(sum(matrix[link] for link in ring.links))
    assert (ring.total if delays is None else ring.latency) == pytest.approx(rest)


@given(matrices(symmetric=False))
def test_both_ways_round_counts_the_slower_direction(matrix: Matrix) -> None:
    slower = np.minimum(matrix, matrix.T)
    slowest, _ = best_by_trying(slower, None)
    assume(slowest > 0)
    ring = order(matrix, both_ways=True)
    assert ring.slowest == slowest
    assert ring.members[0] == 0
    assert len(ring.members) == 2 or ring.members[1] < ring.members[-1]


@given(matrices(most=9, no_zero=True), st.randoms(use_true_random=False))
def test_other_numbers_for_the_members_change_nothing_else(matrix: Matrix, random: Any) -> None:
    names = list(range(len(matrix)))
    random.shuffle(names)
    one, other = order(matrix), order(matrix[np.ix_(names, names)])
    assert (one.slowest, one.total) == (other.slowest, other.total)


def uneven(members: int, symmetric: bool, seed: int) -> Matrix:
    """Bandwidths no two of which are alike."""
    matrix = np.random.default_rng(seed).random((members, members))
    matrix = np.minimum(matrix, matrix.T) if symmetric else matrix
    np.fill_diagonal(matrix, 0)
    return matrix


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("members", [20, 40])
def test_other_numbers_change_nothing_where_the_ring_is_searched_for(members: int, symmetric: bool) -> None:
    matrix = uneven(members, symmetric, members)
    names = np.random.default_rng(1).permutation(members)
    one, other = order(matrix), order(matrix[np.ix_(names, names)])
    assert one.slowest == other.slowest
    assert {frozenset(int(names[each]) for each in link) for link in other.links} == {
        frozenset(link) for link in one.links
    }


@given(st.integers(4, 8), st.booleans(), st.integers(0, 10_000))
@settings(max_examples=60)
def test_the_search_finds_the_best_where_all_can_be_tried(members: int, symmetric: bool, seed: int) -> None:
    matrix = uneven(members, symmetric, seed)
    looked = Search(matrix, symmetric)
    found, most = looked.fastest()
    assert sorted(found.tolist()) == list(range(members))
    assert looked.slowest(found) == best_by_trying(matrix, None)[0] <= most


@given(matrices(least=3))
def test_no_ring_is_above_the_bound(matrix: Matrix) -> None:
    symmetric = bool((matrix == matrix.T).all())
    assert best_by_trying(matrix, None)[0] <= bounds.bound(matrix, symmetric)


@given(matrices(least=3, symmetric=True))
def test_cuts_are_those_whose_loss_parts_the_others(matrix: Matrix) -> None:
    links = matrix >= 5
    n = len(links)

    def parted(without: int | None) -> bool:
        left = [member for member in range(n) if member != without]
        seen = {left[0]}
        for _ in left:
            seen |= {other for member in seen for other in left if links[member, other]}
        return len(seen) < len(left)

    expected = list(range(n)) if parted(None) else [member for member in range(n) if parted(member)]
    assert bounds.cuts(links) == expected


def many(kind: str, members: int, seed: int = 0) -> Matrix:
    """Uneven at random, in sites (links between them a hundredth as fast), alike, or sparse."""
    draws = np.random.default_rng(seed)
    if kind.startswith("uneven"):
        return uneven(members, kind == "uneven", seed)
    if kind == "alike":
        return np.ones((members, members))
    if kind.startswith("sparse"):  # a ring that is hidden among some times as many other links
        around = draws.permutation(members)
        links = draws.random((members, members)) < 4 / members
        links[around, np.roll(around, -1)] = True
        return (np.maximum(links, links.T) if kind == "sparse" else links).astype(float)
    site = draws.integers(0, 5, members)
    matrix = np.where(site[:, None] == site[None, :], 1e9, 1e7)
    return matrix * draws.uniform(0.95, 1.05, matrix.shape)


@pytest.mark.parametrize("kind", ["uneven", "uneven, by direction", "alike", "sparse", "sites"])
@pytest.mark.parametrize("members", [64, 256])
def test_many_members_take_bounded_work(kind: str, members: int) -> None:
    """Work is counted in links looked at: 80 million are about half a second."""
    matrix = many(kind, members)
    ring = order(matrix)
    assert ring.work <= search.WORK + 2 * members**2 + 10_000
    assert sorted(ring.members) == list(range(members))
    # Hardly a link lies between it and the bound; where directions differ the bound itself is not near.
    links = matrix[~np.eye(members, dtype=bool)]
    between = ((links > ring.slowest) & (links <= ring.bound)).mean()
    assert between <= {"alike": 0, "sparse": 0, "uneven, by direction": 0.04}.get(kind, 0.005)
    assert order(matrix) == ring


def test_the_work_bound_stops_a_search() -> None:
    matrix = uneven(256, False, 3)
    short = Search(matrix, False, work=2_000_000)
    found, _ = short.fastest()
    assert short.worked <= 2_000_000 + 2 * 256**2 + 10_000
    assert sorted(found.tolist()) == list(range(256))


def test_latencies_that_differ_by_direction_change_the_ring_and_not_its_slowest_link() -> None:
    bandwidths, latencies = uneven(40, True, 4), uneven(40, False, 5)
    ring, without = order(bandwidths, latencies=latencies, tolerance=0.5), order(bandwidths, tolerance=0.5)
    assert without.bound == ring.bound
    assert min(ring.slowest, without.slowest) >= 0.5 * ring.bound
    assert ring.latency < 0.5 * sum(latencies[link] for link in without.links)
    assert ring.latency <= sum(latencies[target, source] for source, target in ring.links)


@pytest.mark.parametrize("members", [20, 64, 128])
def test_a_ring_is_found_where_links_are_few_and_go_one_way(members: int) -> None:
    ring = order(many("sparse, one way", members))
    assert (ring.slowest, ring.proved) == (1, True)


def crossings(ring: Ring, site: list[int]) -> int:
    return sum(site[one] != site[other] for one, other in ring.links)


@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=40)
def test_long_links_are_crossed_as_few_times_as_can_be(sizes: list[int], random: Any, late: bool) -> None:
    """Sites with fast links inside and slow ones between: in and out of each site once, by itself."""
    site = [index for index, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(site)
    alike = np.equal.outer(site, site)
    bandwidths = np.where(alike, 1.25e9, 12.5e6)
    ring = order(bandwidths, latencies=np.where(alike, 1e-4, 40e-3) if late else None)
    assert crossings(ring, site) == len(sizes)


def test_measured_bandwidths_of_sites_scatter_and_the_tolerance_evens_them() -> None:
    """Four sites of sixteen: the best bottleneck is a matter of scatter, and would cost more crossings."""
    draws = np.random.default_rng(5)
    site = [int(each) for each in draws.permutation(np.repeat(range(4), 16))]
    bandwidths = np.where(np.equal.outer(site, site), 1e9, 1e7) * draws.uniform(0.9, 1.1, (64, 64))
    assert crossings(order(bandwidths, tolerance=0.25), site) == 4
    assert crossings(order(bandwidths), site) >= 4


V100 = [
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 3, 5, 2, 4, 7, 1, 6),
]  # the second's links are single, the first's double


def linked(members: int, rings: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    links = [[0] * members for _ in range(members)]
    for ring, wide in rings:
        for one, other in walked(ring):
            links[one][other] += wide
            links[other][one] += wide
    return links


def used(rings: Rings, members: int) -> list[list[int]]:
    return linked(members, [(each.members, each.links) for each in rings.rings])


def test_the_eight_v100s_make_two_rings_as_in_the_worked_example() -> None:
    links = linked(8, [(V100[0], 2), (V100[1], 1)])
    assert all(sum(row) == 6 for row in links)
    rings = disjoint(links, bandwidth=18e9)
    assert [(each.members, each.links) for each in rings.rings] == [(V100[0], 2), (V100[1], 1)]
    assert [each.share for each in rings.rings] == pytest.approx([2 / 3, 1 / 3])
    assert (rings.links, rings.bandwidth, rings.proved) == (3, 54e9, True)


counts = st.integers(3, 7).flatmap(
    lambda n: st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n).map(
        lambda cells: np.triu(np.array(cells).reshape(n, n), 1) + np.triu(np.array(cells).reshape(n, n), 1).T
    )
)


@given(counts)
def test_rings_share_no_link_and_all_the_data(matrix: Matrix) -> None:
    members = len(matrix)
    support = (matrix > 0).astype(float)
    try:
        rings = disjoint(matrix.tolist(), bandwidth=2.0)
    except UserError:
        assert best_by_trying(support, None)[0] == 0
        return
    assert (np.array(used(rings, members)) <= matrix).all()
    for each in rings.rings:
        assert sorted(each.members) == list(range(members))
        assert each.share == pytest.approx(each.links / rings.links)
    assert sum(each.share for each in rings.rings) == pytest.approx(1)
    assert rings.links == sum(each.links for each in rings.rings) <= rings.bound
    assert rings.bandwidth == 2.0 * rings.links


def most_links(left: Matrix, rings: list[tuple[int, ...]]) -> int:
    """The most links that any set of rings uses: one ring of one link after another is taken or left."""
    if not rings:
        return 0
    best = most_links(left, rings[1:])
    if all(left[link] > 0 for link in walked(rings[0])):
        taken = left - np.array(linked(len(left), [(rings[0], 1)]))
        best = max(best, 1 + most_links(taken, rings))
    return best


@given(counts)
@settings(max_examples=60)
def test_no_set_of_rings_is_wider(matrix: Matrix) -> None:
    assume(len(matrix) <= 5)
    every = [ring for ring in every_ring(len(matrix)) if ring[1] < ring[-1]]
    most = most_links(matrix, every)
    assume(most > 0)
    rings = disjoint(matrix.tolist(), bandwidth=1.0)
    assert rings.links == most
    assert rings.proved


@pytest.mark.parametrize(("members", "wide"), [(8, 1), (9, 2), (16, 1), (32, 1), (33, 1)])
def test_machines_linked_each_to_each_use_all_they_can(members: int, wide: int) -> None:
    rings = disjoint([[wide] * members for _ in range(members)], bandwidth=1.0)
    assert rings.links == (members - 1) * wide // 2
    assert rings.proved


def test_the_search_for_rings_is_bounded() -> None:
    rings = disjoint([[2] * 32 for _ in range(32)], bandwidth=1.0)
    assert rings.work <= WORK + 1000
    assert rings.links >= 29
    assert not rings.proved


@given(matrices(most=6, no_zero=True), st.booleans())
def test_the_tree_has_the_greatest_sum_and_the_fastest_slowest_link(matrix: Matrix, late: bool) -> None:
    both = np.minimum(matrix, matrix.T)
    n = len(both)
    every = [pair for pair in itertools.combinations(range(n), 2) if both[pair] > 0]
    spanning = [links for links in itertools.combinations(every, n - 1) if joined(n, links)]
    found = tree(matrix, latencies=matrix if late else None, score=lambda tree: tree.steps)
    assert joined(n, found.links)
    assert found.slowest == min(both[link] for link in found.links)
    assert found.total == sum(both[link] for link in found.links)
    assert found.total == max(sum(both[link] for link in links) for links in spanning)
    assert found.slowest == max(min(both[link] for link in links) for links in spanning)
    assert found.parents[found.root] == -1
    assert sorted(found.downwards) == list(range(n))


def joined(members: int, links: Any) -> bool:
    groups = list(range(members))
    for one, other in links:
        groups = [groups[one] if each == groups[other] else each for each in groups]
    return len(set(groups)) == 1


def test_equal_links_make_a_binomial_tree() -> None:
    assert [tree(np.ones((n, n))).steps for n in (1, 2, 3, 4, 8, 9, 256)] == [0, 1, 2, 2, 3, 4, 8]


def test_a_chain_hangs_from_its_middle() -> None:
    chain = np.zeros((7, 7))
    for member in range(6):
        chain[member, member + 1] = chain[member + 1, member] = 10 - member
    found = tree(chain)
    assert (found.root, found.steps) == (3, 4)


def small(shape: Shape) -> float:
    """A score for which the number of steps is all."""
    if isinstance(shape, Tree):
        return 2.0 * shape.steps
    return 2.0 * (len(shape.members if isinstance(shape, Ring) else shape.rings[0].members) - 1)


def large(shape: Shape) -> float:
    """A score for which bandwidth is all; a tree sends everything at each step."""
    if isinstance(shape, Tree):
        return 2.0 * shape.steps / shape.slowest
    return 2.0 / (shape.slowest if isinstance(shape, Ring) else shape.bandwidth)


def test_the_choice_is_the_cheapest_and_says_why() -> None:
    alike = np.full((8, 8), 1e9)
    few = choose(alike, score=small)
    assert isinstance(few.shape, Tree)
    assert (
        few.reason == "a tree from member 0 in 3 steps, slowest link 8 Gbit/s: 6.0 s, against a ring's 14.0 s"
    )
    much = choose(alike, score=lambda shape: 1e9 * large(shape))
    assert isinstance(much.shape, Ring)
    assert much.reason == "a ring of 8, slowest link 8 Gbit/s: 2.0 s, against a tree's 6.0 s"
    assert much.scores == {"ring": 2.0, "tree": 6.0}
    links = linked(8, [(V100[0], 2), (V100[1], 1)])
    rings = disjoint(links, bandwidth=1e9)
    several = choose(1e9 * np.array(links), score=lambda shape: 1e9 * large(shape), rings=rings)
    assert several.shape == rings
    assert several.reason.startswith(
        "2 rings at once, 3 links wide: 666.7 ms, against a ring's 1.0 s, a tree's "
    )


def test_where_there_is_no_ring_the_choice_is_the_tree_and_says_why() -> None:
    star = np.zeros((4, 4))
    star[0, 1:] = star[1:, 0] = 1e9
    choice = choose(star, score=small, names=["hub", "a", "b", "c"])
    assert isinstance(choice.shape, Tree)
    assert choice.reason == (
        "a tree from hub in 3 steps, slowest link 8 Gbit/s: 6.0 s; no ring goes through all members: a has a"
        " link with hub alone"
    )


def test_where_links_go_one_way_only_the_choice_is_the_ring() -> None:
    around = np.zeros((5, 5))
    around[range(5), [1, 2, 3, 4, 0]] = 1e9
    assert choose(around, score=small).scores == {"ring": 8.0}
    with pytest.raises(UserError, match="no links join"):
        order_of(around, both_ways=True)


def test_one_member_and_two() -> None:
    assert order([[0.0]]).members == (0,)
    assert order([[0.0]]).links == []
    pair = order([[0, 3], [2, 0]])
    assert (pair.members, pair.links, pair.slowest, pair.proved) == ((0, 1), [(0, 1), (1, 0)], 2, True)
    assert tree([[0.0]]).steps == 0


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "bandwidths: an empty matrix; there is no member"),
        ([[0, 1, 1], [1, 0, 1]], "bandwidths: row 0 has 3 numbers, and there are 2 rows: must be square"),
        ([[0, 1], [1]], "bandwidths: row 1 has 1 numbers, and there are 2 rows: must be square"),
        ([[0, 1], 7], "bandwidths: row 1 is 7: must be a row of 2 numbers"),
        (
            [[0, 1], [-2, 0]],
            "bandwidths: from member 1 to member 0: -2: must not be negative; 0 is no link",
        ),
        (
            [[0, NAN], [1, 0]],
            "bandwidths: from member 0 to member 1: nan: must be a finite number; 0 is no link",
        ),
        (
            [[0, None], [1, 0]],
            "bandwidths: from member 0 to member 1: None: must be a finite number; 0 is no link",
        ),
        (
            [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]],
            "no links join member 2, member 3 to member 0: every member must be reached, each way",
        ),
    ],
)
def test_a_wrong_matrix_is_told_in_one_line(rows: Any, said: str) -> None:
    for make in (order, tree, lambda matrix: choose(matrix, score=small)):
        with pytest.raises(UserError) as error:
            make(rows)
        assert str(error.value) == said


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ([0, 1, 2], "links: from member 0 to member 2: 2: must be the same number the other way"),
        ([0, 0.5, 1], "links: from member 0 to member 1: 0.5: must be a whole number of links"),
        ([0, 1e9, 1], "links: from member 0 to member 1: 1e+09: must be a number of links, not a bandwidth"),
        ([0, 1, 0], "no ring through all 3 members was found; member 0 has the fewest neighbours, 1"),
    ],
)
def test_wrong_links_are_told_in_one_line(first: list[float], said: str) -> None:
    rows: Any = [first, [first[1], 0, 1], [1 if first[2] else 0, 1, 0]]
    with pytest.raises(UserError) as error:
        disjoint(rows, bandwidth=1.0)
    assert str(error.value) == said


def test_two_members_make_no_set_of_rings() -> None:
    with pytest.raises(UserError, match="^2 members make no set of rings: there must be three or more$"):
        disjoint([[0, 1], [1, 0]], bandwidth=1.0)


def test_what_stands_in_the_way_of_a_ring_is_named() -> None:
    bow = np.zeros((5, 5))  # two triangles that share member 2
    for one, other in ((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 2)):
        bow[one, other] = bow[other, one] = 1
    with pytest.raises(NoRingError, match="without member 2 the others would be apart$"):
        order(bow)
    with pytest.raises(UserError, match="^latencies of 2 members, and bandwidths of 5$"):
        order(bow, latencies=[[0, 1], [1, 0]])
    with pytest.raises(UserError, match="^2 names for 5 members"):
        order(bow, names=["a", "b"])
    with pytest.raises(UserError, match="^tolerance = 1: must be a share"):
        order(bow, tolerance=1)
    with pytest.raises(UserError, match="^bandwidth = 0: must be bytes/s of one link, above 0$"):
        disjoint(bow.tolist(), bandwidth=0)
