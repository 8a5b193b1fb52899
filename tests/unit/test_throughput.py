"""Predicted samples per second: on equal nodes the table of docs/planning.md, written again; uneven ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from atoll.core.units import parse_rate
from atoll.groups.candidates import equal_runs
from atoll.groups.chooser import choose
from atoll.groups.grouping import Grouping
from atoll.plan.cluster import Cluster, Pipe, Site, Worker
from atoll.plan.contention import Contention
from atoll.plan.throughput import Throughput


def cluster(
    speeds: list[float],
    *,
    sites: list[int] | None = None,
    bandwidth: float = 1.25e9,
    latency: float = 5e-5,
    long: Pipe | None = None,
    **others: object,
) -> Cluster:
    homes = sites or [0] * len(speeds)
    inside = Pipe(bandwidth, latency)
    defaults: dict[str, object] = {
        "bytes": 40_000_000, "batch": 1, "compute": 0.0, "uplink": "leader", "pipeline": 0, "work": "equal",
        "server": inside, "server_site": 0,
    }  # fmt: skip
    return Cluster(
        workers=tuple(
            Worker(f"w{number}", speed, home, bandwidth)
            for number, (speed, home) in enumerate(zip(speeds, homes, strict=True))
        ),
        sites=tuple(Site(f"s{site}", inside) for site in range(max(homes) + 1)),
        between_sites={(0, 1): long} if long else {},
        between_workers={},
        **(defaults | others),  # type: ignore[arg-type]
    )


# -- the table, term by term --------------------------------------------------------------------------------


def ring(n: int, s: float, b: float, a: float, c: float) -> float:
    return 2 * (n - 1) * (a + s / (n * b)) + (n - 1) * (s / n) * c


def ps_hra(n: int, k: int, s: float, b: float, a: float, c: float) -> float:
    reduce_scatter = (n / k - 1) * (a + k * s / (n * b) + (k * s / n) * c)
    all_gather = (n / k - 1) * (a + k * s / (n * b))
    server = 2 * (a + s / b) + s * c
    broadcast = a + s / b
    return reduce_scatter + all_gather + server + broadcast


@pytest.mark.parametrize("seed", range(30))
def test_on_equal_nodes_a_period_is_the_time_of_the_table_and_its_computing(seed: int) -> None:
    chance = random.Random(seed)
    members, groups = chance.randint(2, 6), chance.randint(1, 5)
    size, b = chance.randint(10**5, 10**9), 10 ** chance.uniform(6, 10)
    a, c = 10 ** chance.uniform(-6, -1), 10 ** chance.uniform(-12, -9)
    # Computing so long that the groups do not fill the server: of that the table's formula knows nothing.
    speed = 1 / (100 * groups * (size / b + size * c))
    made = cluster(
        [speed] * (members * groups), bytes=size, compute=c, bandwidth=b, latency=a, server=Pipe(b, a)
    )
    prediction = Throughput(made).predict(equal_runs(range(members * groups), groups))
    n = members * groups
    expected = ring(n, size, b, a, c) if groups == 1 else ps_hra(n, groups, size, b, a, c)
    for group in prediction.groups:
        assert group.compute == pytest.approx(1 / speed)
        assert group.ring + group.exchange == pytest.approx(expected)
        assert group.period == pytest.approx(1 / speed + expected)
    assert prediction.samples_per_second == pytest.approx(n / (1 / speed + expected))
    assert prediction.limit == ""


def test_by_members_the_broadcast_and_the_second_way_round_are_one() -> None:
    """Reduce-scatter, a share of each to the server and back, all-gather of the parameters."""
    members, s, b, a = 4, 4e7, 1e8, 1e-3
    made = cluster([0.001] * 8, bytes=int(s), bandwidth=b, latency=a, uplink="members", server=Pipe(4 * b, a))
    group = Throughput(made).predict(equal_runs(range(8), 2)).groups[0]
    assert group.ring == pytest.approx((members - 1) * (a + s / members / b))
    assert group.exchange == pytest.approx(2 * (a + s / members / b) + (members - 1) * (a + s / members / b))
    narrow = replace(made, server=Pipe(b, a))  # the server's own link is then what limits
    group = Throughput(narrow).predict(equal_runs(range(8), 2)).groups[0]
    assert group.exchange == pytest.approx(2 * (a + s / b) + (members - 1) * (a + s / members / b))


# -- uneven workers -----------------------------------------------------------------------------------------


def test_four_workers_of_which_one_takes_four_times_as_long() -> None:
    """100, 100, 100 and 400 ms a step: the figures that the issue of PS-HRA asks for."""
    throughput = Throughput(cluster([10, 10, 10, 2.5]))
    measured = throughput.cluster.measured()
    synchronous = throughput.compute_only(Grouping([range(4)])).samples_per_second
    assert synchronous == pytest.approx(10.0)
    queue = choose(measured, throughput.compute_only, groups=2).by_speed
    assert queue is not None
    assert queue.grouping == Grouping([[0, 1], [2, 3]])
    assert queue.score.samples_per_second / synchronous == pytest.approx(2.5)
    joint = choose(measured, throughput.compute_only)
    assert joint.grouping == Grouping([[0, 1, 2], [3]])
    assert joint.score.samples_per_second / synchronous == pytest.approx(3.25)
    assert throughput.ceiling / synchronous == pytest.approx(3.25)


@pytest.mark.parametrize("uplink", ["leader", "members"])
@pytest.mark.parametrize("pipeline", [0, 1])
@pytest.mark.parametrize("size", [10**6, 4 * 10**7, 28 * 10**7])
@pytest.mark.parametrize("batch", [1, 32])
def test_two_sites_with_a_long_link(uplink: str, pipeline: int, size: int, batch: int) -> None:
    """Three workers at each, one fast and one slow: joint is at least as good as speed or site alone."""
    long = Pipe(parse_rate("100Mbit/s") / 8, 0.04)
    throughput = Throughput(
        cluster(
            [40, 20, 5, 40, 20, 5], sites=[0, 0, 0, 1, 1, 1], long=long, uplink=uplink, pipeline=pipeline,
            bytes=size, batch=batch,
        )
    )  # fmt: skip
    choice = choose(throughput.cluster.measured(), throughput.score)
    assert choice.by_speed is not None
    assert choice.by_site is not None
    figures = [each.score.samples_per_second for each in (choice.by_speed, choice.by_site)]
    assert choice.score.samples_per_second >= max(figures)
    assert choice.by_site.grouping == Grouping([[0, 1, 2], [3, 4, 5]])
    if size == 28 * 10**7:  # a ring of equals across the long link takes 22 s and more for a step
        across = throughput.predict(Grouping([[0, 3], [1, 4], [2, 5]]))
        assert min(group.ring for group in across.groups) > (11 if uplink == "members" else 22)


def test_work_in_proportion_to_speed_takes_the_wait_out_of_a_ring() -> None:
    made = cluster([10, 10, 10, 2.5], work="speed", bytes=1)
    assert Throughput(made).synchronous().compute_only == pytest.approx(32.5)


def test_with_a_pipeline_the_exchange_costs_only_what_computing_does_not_cover() -> None:
    made = cluster([1.0] * 4, bytes=10**8, bandwidth=1e9)
    two = equal_runs(range(4), 2)
    before, after = Throughput(made).predict(two), Throughput(replace(made, pipeline=1)).predict(two)
    assert before.groups[0].period == pytest.approx(
        before.groups[0].compute + before.groups[0].ring + before.groups[0].exchange
    )
    assert after.groups[0].period == pytest.approx(after.groups[0].compute + after.groups[0].ring)


# -- what groups share --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [0, 1])
@pytest.mark.parametrize("groups", [2, 4, 16, 64])
def test_groups_together_send_the_server_no_more_than_its_link_carries(groups: int, pipeline: int) -> None:
    made = cluster([100.0] * 64, bytes=10**8, server=Pipe(1e8, 5e-5), pipeline=pipeline)
    prediction = Throughput(made).predict(equal_runs(range(64), groups))
    sent = sum(1e8 / group.period for group in prediction.groups)
    assert sent <= 1e8 * 1.002
    if groups >= 4:  # in and out one after the other: two groups alone do not fill it
        assert sent >= 0.98 * 1e8
        assert prediction.limit.startswith("the server's link")
        # Each second one contribution of one group gets through, whoever it is of.
        assert prediction.samples_per_second == pytest.approx(64 / groups, rel=0.02)


def test_a_full_link_slows_down_those_who_hurry_and_hardly_those_who_compute() -> None:
    made = cluster([0.01, *[1000.0] * 8], bytes=10**8, server=Pipe(1e8, 5e-5))
    alone = Throughput(made).predict(Grouping([[0], range(1, 9)]))
    crowded = Throughput(made).predict(Grouping([worker] for worker in range(9)))
    assert crowded.groups[0].period < 1.2 * alone.groups[0].period
    assert crowded.groups[1].period > 7.5


def test_groups_on_both_sides_share_the_long_link() -> None:
    long = Pipe(1.25e7, 0.04)
    made = cluster([100.0] * 8, sites=[0] * 4 + [1] * 4, long=long, bytes=10**7)
    far = Throughput(made).predict(Grouping([[0, 1, 2, 3], [4], [5], [6], [7]]))
    assert sum(1e7 / group.period for group in far.groups[1:]) <= 1.25e7 * 1.002
    assert far.limit in ("the link s0 -> s1", "the link s1 -> s0")
    together = Throughput(made).predict(Grouping([[0, 1, 2, 3], [4, 5, 6, 7]]))
    assert together.samples_per_second > far.samples_per_second


def test_a_link_between_two_workers_counts_for_these_alone() -> None:
    long, own = Pipe(1.25e7, 0.04), Pipe(1.25e9, 1e-4)
    made = cluster([0.01] * 4, sites=[0, 0, 1, 1], long=long, bytes=10**7)
    made = replace(made, between_workers={(0, 2): own})
    assert made.pipe(2, 0) == own
    assert made.pipe(2, 1) == Pipe(1.25e7, 0.04)
    of_two = Throughput(made).predict(Grouping([[0, 2], [1, 3]]))
    assert of_two.groups[0].ring == pytest.approx(2 * (1e-4 + 5e6 / 1.25e9))
    assert of_two.groups[1].ring == pytest.approx(2 * (0.04 + 5e6 / 1.25e7))


def test_a_ring_of_many_sites_goes_the_way_whose_slowest_link_is_fastest() -> None:
    """Four sites in a square of fast links; the diagonals are slow."""
    fast, slow = Pipe(1e8, 1e-3), Pipe(1e6, 1e-1)
    square = {(0, 2), (1, 2), (1, 3), (0, 3)}
    made = cluster([10.0] * 4, sites=[0, 1, 2, 3], bytes=4 * 10**6)
    pairs = {
        (one, other): fast if (one, other) in square else slow
        for one in range(4)
        for other in range(one + 1, 4)
    }
    prediction = Throughput(replace(made, between_sites=pairs)).synchronous()
    assert prediction.groups[0].ring == pytest.approx(6 * (1e-3 + 1e6 / 1e8))


def test_a_leader_drawn_anew_is_as_often_far_as_members_are() -> None:
    """One member in three is across the long link; the broadcast goes over it once."""
    long = Pipe(1.25e7, 0.04)
    made = cluster([0.001] * 4, sites=[0, 0, 1, 0], long=long, bytes=10**7)
    group = Throughput(made).predict(Grouping([[0, 1, 2], [3]])).groups[0]
    near, far = 5e-5 + 1e7 / 1.25e9, 0.04 + 1e7 / 1.25e7
    assert group.exchange == pytest.approx(2 * (2 / 3 * near + 1 / 3 * far) + far)


def test_shares_that_cross_a_long_link_together_take_as_long_as_all_of_them() -> None:
    long = Pipe(1.25e7, 0.04)
    made = cluster([0.001] * 4, sites=[0, 1, 1, 0], long=long, bytes=9 * 10**6, uplink="members")
    group = Throughput(made).predict(Grouping([[0, 1, 2], [3]])).groups[0]
    step = 0.04 + 3e6 / 1.25e7
    assert group.exchange == pytest.approx(2 * (0.04 + 2 * 3e6 / 1.25e7) + 2 * step)


def test_what_is_shared_is_never_asked_for_more_than_it_can_do() -> None:
    """Three hundred clusters drawn by chance; what is stretched is full, or nearly: several things may be."""
    chance = random.Random(1)

    def pipe() -> Pipe:
        return Pipe(10 ** chance.uniform(5, 9.5), 10 ** chance.uniform(-5, -1.3))

    full = 0
    for _ in range(300):
        sites, count = chance.randint(1, 4), chance.randint(2, 16)
        homes = [*range(sites), *(chance.randrange(sites) for _ in range(count))]
        made = cluster(
            [10 ** chance.uniform(-1, 2.5) for _ in homes], sites=homes,
            bytes=int(10 ** chance.uniform(4, 8.5)),
            uplink=chance.choice(["leader", "members"]), pipeline=chance.randint(0, 1), server=pipe(),
            bandwidth=10 ** chance.uniform(5, 9.5), compute=chance.choice([0, 1e-10]),
        )  # fmt: skip
        links = {pair: pipe() for pair in itertools.combinations(range(sites), 2)}
        throughput = Throughput(replace(made, between_sites=links))
        dealt: dict[int, list[int]] = {0: [0]}
        for worker in range(1, len(homes)):
            dealt.setdefault(chance.randint(1, len(homes)), []).append(worker)
        groups = list(Grouping(dealt.values()))
        costs = [throughput._cost(group, served=True) for group in groups]
        together = Contention(costs, len(throughput._things), bool(made.pipeline))
        stretch = together.stretch()
        loads = together._loads(stretch)
        assert loads.max() <= 1.0011
        assert all(loads[stretch > 1.01] >= 0.85)
        full += bool((stretch > 1.01).any())
    assert full > 50
