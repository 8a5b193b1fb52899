"""Properties of groups: of the probe's queue, and of the joint chooser."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import DeadlineError, UserError
from atoll.groups.candidates import equal_runs
from atoll.groups.chooser import Choice, ProbeMeasurements, Score, choose
from atoll.groups.grouping import Grouping, show, sizes_of
from atoll.groups.links import Links
from atoll.groups.probe import TOLERANCE, Formed, GivenUp, Late, ProbeEvent, ProbeQueue
from atoll.plan.cluster import Cluster, Pipe, Site, Worker
from atoll.plan.throughput import Throughput

PATIENCE = 100.0


# -- groupings ----------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), max_size=6), st.randoms())
def test_a_grouping_has_each_worker_once_and_one_form(groups: list[list[int]], random) -> None:
    workers = [worker for group in groups for worker in group]
    if len(set(workers)) < len(workers):
        with pytest.raises(UserError, match="is in more than one group, or twice in one"):
            Grouping(groups)
        return
    grouping = Grouping(groups)
    grouping.check(workers)
    assert grouping.workers == tuple(sorted(workers))
    shuffled = [random.sample(group, len(group)) for group in random.sample(groups, len(groups))]
    assert Grouping(shuffled) == grouping
    assert hash(Grouping(shuffled)) == hash(grouping)
    for worker in workers:
        assert worker in grouping.group_of(worker)
        grouping.without(worker).check(set(workers) - {worker})


@given(st.integers(1, 300), st.integers(-3, 310))
def test_sizes_are_those_of_the_paper(workers: int, groups: int) -> None:
    if not 1 <= groups <= workers:
        with pytest.raises(UserError):
            sizes_of(workers, groups)
        return
    sizes = sizes_of(workers, groups)
    assert len(sizes) == groups
    assert sum(sizes) == workers
    assert sizes == [workers // groups + 1] * (workers % groups) + [workers // groups] * (
        groups - workers % groups
    )


@given(st.integers(1, 256), st.integers(1, 256))
def test_a_grouping_is_shown_in_one_short_line(workers: int, groups: int) -> None:
    text = show(equal_runs(range(workers), min(groups, workers)))
    assert len(text) <= 150
    assert "\n" not in text


# -- the queue ----------------------------------------------------------------------------------------------


def run_queue(
    queue: ProbeQueue, happens: list[tuple[float, str, int, float]]
) -> list[tuple[float, ProbeEvent]]:
    """Let everything happen at its time, and poll then and at the queue's own deadlines, and only then."""
    told: list[tuple[float, ProbeEvent]] = []
    happens, now = sorted(happens), 0.0
    while True:
        told += [(now, outcome) for outcome in queue.poll(now)]
        deadline = queue.next_deadline()
        assert deadline is None or deadline > now, "a deadline that polling does not take away"
        if not happens and deadline is None:
            return told
        if happens and (deadline is None or happens[0][0] <= deadline):
            now, what, worker, value = happens.pop(0)
            if what == "probed":
                queue.handle_probed(now, worker, value)
            elif what == "begun":
                queue.handle_begun(now, worker)
            else:
                queue.handle_left(now, worker)
        else:
            assert deadline is not None
            now = deadline


def formed(told: list[tuple[float, ProbeEvent]]) -> list[tuple[int, ...]]:
    return [outcome.group for _, outcome in told if isinstance(outcome, Formed)]


counts = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(counts, st.data())
def test_equal_speeds_give_stable_groups(count: tuple[int, int], data: st.DataObject) -> None:
    """However the jitter has them arrive, and whatever it does to what they measure."""
    workers, groups = count
    jitter = st.floats(1.0, 1.0 + 0.999 * TOLERANCE)
    happens = [(10 * data.draw(jitter), "probed", each, 0.1 * data.draw(jitter)) for each in range(workers)]
    queue = ProbeQueue(0.0, range(workers), groups, patience=PATIENCE)
    told = run_queue(queue, happens)
    assert formed(told) == list(equal_runs(range(workers), groups))
    assert queue.over
    assert Grouping(queue.formed) == equal_runs(range(workers), groups)


@given(counts, st.randoms(use_true_random=False))
def test_neighbours_in_speed_share_a_group_and_the_fast_do_not_wait(count: tuple[int, int], random) -> None:
    workers, groups = count
    order = list(range(workers))
    random.shuffle(order)  # the fastest first, each slower than the one before by far more than the tolerance
    times = {worker: 1.25**place for place, worker in enumerate(order)}
    queue = ProbeQueue(0.0, range(workers), groups, patience=PATIENCE)
    told = run_queue(queue, [(times[each], "probed", each, times[each]) for each in order])
    assert [set(group) for group in formed(told)] == [
        set(order[start:stop])
        for start, stop in itertools.pairwise(itertools.accumulate(sizes_of(workers, groups), initial=0))
    ]
    for moment, outcome in told:
        assert isinstance(outcome, Formed)
        slowest = max(times[worker] for worker in outcome.group)
        assert moment <= slowest * (1 + TOLERANCE) + 1e-9


@given(
    counts,
    st.lists(
        st.tuples(
            st.floats(0, 2.5 * PATIENCE),
            st.sampled_from(["probed"] * 4 + ["left", "begun"]),
            st.integers(0, 14),
            st.floats(0.01, 10),
        ),
        max_size=30,
    ),
)
def test_whatever_happens_each_that_lives_and_reported_is_in_one_group_or_late(
    count: tuple[int, int], happens: list[tuple[float, str, int, float]]
) -> None:
    workers, groups = count
    queue = ProbeQueue(0.0, range(workers), groups, patience=PATIENCE)
    living, reported = set(range(workers)), set()
    possible = []
    for moment, what, worker, value in sorted(happens):
        if what == "begun":
            living.add(worker)
        elif worker not in living:
            continue
        elif what == "left":
            living.discard(worker)
            reported.discard(worker)
        else:
            reported.add(worker)
        possible.append((moment, what, worker, value))
    try:
        told = run_queue(queue, possible)
    except DeadlineError:
        assert not queue.formed
        return
    assert queue.over
    grouped = Grouping(queue.formed).workers
    assert set(grouped) <= reported
    late = {outcome.worker for _, outcome in told if isinstance(outcome, Late)}
    assert reported <= set(grouped) | late
    given_up = {outcome.worker for _, outcome in told if isinstance(outcome, GivenUp)}
    assert living - set(grouped) <= given_up | late | {
        worker for moment, what, worker, _ in possible if what == "begun"
    }
    everybody = living == reported == set(range(workers))
    if everybody and not late and len(possible) == workers and not given_up:
        assert [len(group) for group in formed(told)] == sizes_of(workers, groups)


# -- the chooser --------------------------------------------------------------------------------------------


def compute_only(speeds: Mapping[int, float]):
    """A ring waits for its slowest member; groups go on independently."""
    return lambda grouping: Score(sum(len(group) * min(speeds[w] for w in group) for group in grouping))


def every_grouping(workers: list[int]) -> Iterator[list[list[int]]]:
    """All set partitions: the first worker with each subset of the others, and the partitions of the rest."""
    if not workers:
        yield []
        return
    first, *rest = workers
    for size in range(len(rest) + 1):
        for mates in itertools.combinations(rest, size):
            for others in every_grouping([worker for worker in rest if worker not in mates]):
                yield [[first, *mates], *others]


few_speeds = st.lists(
    st.sampled_from([1.0, 1.01, 2.0, 3.5, 10.0]) | st.floats(0.1, 100), min_size=1, max_size=6
)


@given(few_speeds, st.sampled_from([0, 8]), st.data())
def test_the_choice_is_the_best_of_all_groupings_where_only_computing_counts(
    speeds: list[float], exhaustive: int, data: st.DataObject
) -> None:
    """`exhaustive` 0: by its candidates and the search, as for many workers."""
    numbered = dict(enumerate(speeds))
    score = compute_only(numbered)
    groups = data.draw(st.none() | st.integers(1, len(speeds)))
    choice = choose(ProbeMeasurements(numbered), score, groups=groups, tolerance=0.0, exhaustive=exhaustive)
    all_ = [Grouping(each) for each in every_grouping(list(numbered))]
    allowed = [each for each in all_ if groups in (None, len(each))]
    best = max(score(each).samples_per_second for each in allowed)
    assert choice.score.samples_per_second == pytest.approx(best)
    fewest = min(
        len(each) for each in allowed if score(each).samples_per_second == pytest.approx(best, rel=1e-12)
    )
    assert len(choice.grouping) <= fewest
    choice.grouping.check(numbered)


@given(st.integers(1, 6), st.integers(0, 2**32), st.data())
def test_few_workers_get_the_best_of_all_whatever_the_score(
    workers: int, seed: int, data: st.DataObject
) -> None:
    def score(grouping: Grouping) -> Score:
        return Score(zlib.crc32(repr((seed, grouping.groups)).encode()) + 1.0)

    groups = data.draw(st.none() | st.integers(1, workers))
    choice = choose(
        ProbeMeasurements(dict.fromkeys(range(workers), 1.0)), score, groups=groups, tolerance=0.0
    )
    all_ = [Grouping(each) for each in every_grouping(list(range(workers)))]
    best = max(
        (each for each in all_ if groups in (None, len(each))),
        key=lambda each: score(each).samples_per_second,
    )
    assert choice.grouping == best


@st.composite
def clusters(draw: st.DrawFn, most: int = 10) -> Cluster:
    """Uneven workers at up to three sites, on links of any kind."""
    pipes = st.builds(
        Pipe, bandwidth=st.sampled_from([1e5, 1e7, 1.25e9]), latency=st.sampled_from([1e-5, 1e-3, 0.04])
    )
    sites = draw(st.integers(1, 3))
    insides = [draw(pipes) for _ in range(sites)]
    workers = draw(
        st.lists(st.tuples(st.floats(0.5, 500), st.integers(0, sites - 1)), min_size=1, max_size=most)
    )
    return Cluster(
        workers=tuple(
            Worker(f"w{number}", speed, site, insides[site].bandwidth)
            for number, (speed, site) in enumerate(workers)
        ),
        sites=tuple(Site(f"s{number}", inside) for number, inside in enumerate(insides)),
        between_sites={pair: draw(pipes) for pair in itertools.combinations(range(sites), 2)},
        between_workers={},
        bytes=draw(st.sampled_from([1000, 10**6, 160 * 10**6])),
        batch=draw(st.sampled_from([1, 32])),
        compute=draw(st.sampled_from([0.0, 1e-10])),
        uplink=draw(st.sampled_from(["leader", "members"])),
        pipeline=draw(st.integers(0, 1)),
        work=draw(st.sampled_from(["equal", "speed"])),
        server=draw(pipes),
        server_site=draw(st.integers(0, sites - 1)),
    )


def named(choice: Choice) -> list[float]:
    """The figures of the groupings that the reason names."""
    return [
        each.score.samples_per_second
        for each in (choice.runner_up, choice.by_speed, choice.by_site)
        if each is not None
    ]


@settings(max_examples=15)  # each is two searches
@given(clusters(), st.sampled_from([0.0, 0.02]), st.sampled_from([0, 8]), st.data())
def test_the_choice_is_never_worse_than_what_its_reason_names(
    cluster: Cluster, tolerance: float, exhaustive: int, data: st.DataObject
) -> None:
    throughput, measured = Throughput(cluster), cluster.measured()
    groups = data.draw(st.none() | st.integers(1, len(cluster.workers)))
    choice = choose(measured, throughput.score, groups=groups, tolerance=tolerance, exhaustive=exhaustive)
    choice.grouping.check(measured.speeds)
    assert groups in (None, len(choice.grouping))
    assert choice.score == throughput.score(choice.grouping)
    assert all(choice.score.samples_per_second >= figure * (1 - tolerance - 1e-9) for figure in named(choice))
    for figure in [choice.score.samples_per_second, *named(choice)]:
        assert f"{figure:.4g}" in choice.reason or "the same" in choice.reason
    alone = choose(measured, throughput.score, groups=groups, tolerance=tolerance, exhaustive=exhaustive)
    assert alone == choice  # no chance is in it


@pytest.mark.check
@settings(max_examples=50)
@given(clusters(), st.randoms(use_true_random=False))
def test_other_numbers_for_the_workers_change_only_the_numbers(cluster: Cluster, random) -> None:
    count = len(cluster.workers)
    new = random.sample(range(count), count)  # worker -> its new number
    moved = [cluster.workers[0]] * count
    for old, number in enumerate(new):
        moved[number] = cluster.workers[old]
    other = replace(cluster, workers=tuple(moved))
    one = choose(cluster.measured(), Throughput(cluster).score, exhaustive=0)
    two = choose(other.measured(), Throughput(other).score, exhaustive=0)

    def kinds(of: Cluster, grouping: Grouping) -> list[list[tuple[float, int]]]:
        return sorted(
            sorted((of.workers[member].speed, of.workers[member].site) for member in group)
            for group in grouping
        )

    assert kinds(cluster, one.grouping) == kinds(other, two.grouping)
    assert one.score.samples_per_second == pytest.approx(two.score.samples_per_second)
    if len({(worker.speed, worker.site) for worker in cluster.workers}) == count:
        assert two.grouping == Grouping([new[member] for member in group] for group in one.grouping)


@pytest.mark.check
@given(st.integers(2, 16), st.data())
def test_speeds_that_differ_by_less_than_the_noise_make_one_ring(count: int, data: st.DataObject) -> None:
    noise = st.floats(1.0, 1.019)
    speeds = {worker: 10 * data.draw(noise) for worker in range(count)}
    choice = choose(ProbeMeasurements(speeds), compute_only(speeds))
    assert choice.grouping == Grouping([range(count)])


@pytest.mark.parametrize("groups", [None, 5])
def test_the_search_finds_what_is_no_candidate(groups: int | None) -> None:
    """Ten like workers, of whom each is best with the one five numbers on: no order of speed says so."""
    speeds = dict.fromkeys(range(10), 1.0)

    def score(grouping: Grouping) -> Score:
        paired = [len(group) == 2 and group[1] - group[0] == 5 for group in grouping]
        return Score(
            sum(
                3.0 if pair else float(len(group) == 1) + 0.1
                for group, pair in zip(grouping, paired, strict=True)
            )
        )

    choice = choose(ProbeMeasurements(speeds), score, groups=groups, tolerance=0.0)
    assert choice.grouping == Grouping([each, each + 5] for each in range(5))


@pytest.mark.parametrize("more", [0, 1])
def test_the_search_moves_and_swaps(more: int) -> None:
    """Ten or eleven like workers in two groups, the better the more the even are apart from the odd."""
    workers = range(10 + more)

    def score(grouping: Grouping) -> Score:
        apart = [sum(worker % 2 == 0 for worker in group) / len(group) for group in grouping]
        return Score(1.0 + (max(apart) - min(apart)) * (len(grouping) == 2))

    choice = choose(ProbeMeasurements(dict.fromkeys(workers, 1.0)), score, groups=2, tolerance=0.0)
    assert choice.grouping == Grouping([workers[0::2], workers[1::2]])


@pytest.mark.parametrize("groups", [None, 16])
def test_the_work_for_256_workers_is_bounded(groups: int | None) -> None:
    speeds = {worker: 1.0 + worker % 7 + worker / 1000 for worker in range(256)}
    sites = {worker: f"site {worker % 5}" for worker in speeds}
    asked = 0

    def score(grouping: Grouping) -> Score:
        nonlocal asked
        asked += 1
        return compute_only(speeds)(grouping)

    choice = choose(ProbeMeasurements(speeds, sites), score, groups=groups, most=2000)
    assert asked <= 2000 + 2 * 256
    assert choice.scored <= asked
    choice.grouping.check(speeds)


# -- links --------------------------------------------------------------------------------------------------


@pytest.mark.check
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_workers_near_one_another_are_found_from_the_links_alone(sizes: list[int], random) -> None:
    homes = [site for site, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(homes)
    near, far = (1.25e9, 5e-5), (1.25e7, 0.04)
    link = [[near if one == other else far for other in homes] for one in homes]
    measured = Links.of(
        range(len(homes)),
        [[bandwidth for bandwidth, _ in row] for row in link],
        [[latency for _, latency in row] for row in link],
    )
    found = measured.clusterings()
    if max(sizes) == 1:
        assert found == []  # all links are alike
    else:
        by_site = [[each for each, home in enumerate(homes) if home == site] for site in range(len(sizes))]
        assert found[0] == Grouping(by_site)
        speeds = dict.fromkeys(range(len(homes)), 1.0)
        choice = choose(ProbeMeasurements(speeds, links=measured), compute_only(speeds))
        assert choice.by_site is not None
        assert choice.by_site.grouping == found[0]


NAN = math.nan


@pytest.mark.parametrize(
    ("bandwidth", "latency", "said"),
    [
        ([[1, 1]], [[0, 0], [0, 0]], "bandwidth: 1 rows for 2 workers; the matrix has one for each"),
        ([[1, 1], [1]], [[0, 0], [0, 0]], "bandwidth: the row of worker 1 has 1 numbers; a matrix "),
        ([[1, 1], [-1, 1]], [[0, 0], [0, 0]], "bandwidth: the link from worker 1 to worker 0 is -1; "),
        ([[1, 0], [1, 1]], [[0, 0], [0, 0]], "bandwidth: the link from worker 0 to worker 1 is 0; "),
        ([[1, NAN], [1, 1]], [[0, 0], [0, 0]], "bandwidth: the link from worker 0 to worker 1 is missing; "),
        ([[1, 1], [1, 1]], [[0, 0], [-0.1, 0]], "latency: the link from worker 1 to worker 0 is -0.1; "),
        ([[1, 1], [1, 1]], [[0, math.inf], [0, 0]], "latency: the link from worker 0 to worker 1 is inf; "),
        ([[1, 1], [1, 1]], [[0, NAN], [0, 0]], "latency: the link from worker 0 to worker 1 is missing; "),
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_one_line(
    bandwidth: list[list[float]], latency: list[list[float]], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        Links.of([0, 1], bandwidth, latency)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_missing_diagonal_does_not_matter() -> None:
    assert Links.of([0, 1], [[NAN, 1], [1, 0]], [[NAN, 0], [0, -1]]).clusterings() == []


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ({}, "0 workers cannot be grouped; from 1 to 256 can"),
        (dict.fromkeys(range(257), 1.0), "257 workers cannot be grouped; from 1 to 256 can"),
        ({0: 1.0, 1: 0.0}, "worker 1 has a speed of 0 samples/s; it must be finite and above 0"),
        ({0: 1.0, 1: NAN}, "worker 1 has a speed of nan samples/s; it must be finite and above 0"),
    ],
)
def test_speeds_that_cannot_be_are_one_line(speeds: dict[int, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ProbeMeasurements(speeds)
