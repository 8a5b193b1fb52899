"""What a hub scores groupings with, from what a run has measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.cli.scores import score_for
from atoll.groups.chooser import ProbeMeasurements, choose
from atoll.groups.grouping import Grouping
from atoll.groups.links import Links
from atoll.hub.main import grouping_of
from atoll.hub.options import HubOptions
from atoll.hub.planner import GroupingSettings, Planner, WorkerMeasurements
from atoll.plan.measured import cluster_of

SPEEDS = dict(zip((2, 3, 5, 7, 8, 9), (160.0, 80.0, 40.0) * 2, strict=True))  # ranks have gaps
PLACES = np.array([0, 0, 0, 1, 1, 1])
FAR = PLACES[:, None] != PLACES[None, :]
LINKS = Links(tuple(SPEEDS), np.where(FAR, 12.5e6, 2e9), np.where(FAR, 0.04, 1e-5))
KNOWN = WorkerMeasurements(SPEEDS, LINKS, {}, size=2_000_000, batch=8, beside_server=2)


def test_near_workers_are_a_site_and_what_crosses_shares_a_link() -> None:
    cluster = cluster_of(SPEEDS, LINKS, {}, size=2_000_000, batch=8, beside_server=7)
    assert [worker.name for worker in cluster.workers] == ["2", "3", "5", "7", "8", "9"]
    assert [worker.site for worker in cluster.workers] == [0, 0, 0, 1, 1, 1]
    assert cluster.server_site == 1
    assert (cluster.between_sites[0, 1].bandwidth, cluster.between_sites[0, 1].latency) == (12.5e6, 0.04)
    assert cluster.sites[0].inside.bandwidth == 2e9
    assert cluster.names(3) == "7"


def test_told_sites_count_and_one_worker_has_its_best_link() -> None:
    sites = dict.fromkeys(SPEEDS, "paris") | {9: "berlin"}
    cluster = cluster_of(SPEEDS, LINKS, sites, size=2_000_000, batch=8)
    assert [site.name for site in cluster.sites] == ["paris", "berlin"]
    assert cluster.sites[1].inside.bandwidth == cluster.workers[5].bandwidth == 2e9
    assert cluster_of({4: 1.0}, Links((4,), np.ones((1, 1)), np.zeros((1, 1))), {}, size=1, batch=1).workers


def test_the_joint_choice_beats_speed_and_site_by_the_cost_model() -> None:
    score = score_for(KNOWN)
    choice = choose(ProbeMeasurements(SPEEDS, {}, LINKS), score)
    by_site = score(Grouping([[2, 3, 5], [7, 8, 9]])).samples_per_second
    by_speed = score(Grouping([[2, 7], [3, 8], [5, 9]])).samples_per_second
    assert choice.score.samples_per_second > 1.5 * max(by_site, by_speed)
    assert all(set(group) <= {2, 3, 5} or set(group) <= {7, 8, 9} for group in choice.grouping)


def test_without_links_a_size_or_a_batch_only_computing_counts() -> None:
    together, alone = Grouping([SPEEDS]), Grouping([worker] for worker in SPEEDS)
    for known in (
        WorkerMeasurements(SPEEDS),
        WorkerMeasurements(SPEEDS, LINKS, batch=8),
        WorkerMeasurements(SPEEDS, LINKS, size=10),
    ):
        assert score_for(known)(together).samples_per_second == 6 * 40.0
        assert score_for(known)(alone).samples_per_second == sum(SPEEDS.values())


@pytest.mark.parametrize("links", [None, LINKS])
def test_where_parts_follow_speeds_a_ring_computes_at_the_sum_of_its_members_speeds(
    links: Links | None,
) -> None:
    """And there is nothing to gain by groups of like speeds."""
    known = replace(KNOWN, links=links)
    like, unlike = Grouping([[2, 7], [3, 8], [5, 9]]), Grouping([[2, 9], [3, 8], [5, 7]])
    even, by_speed = score_for(known), score_for(replace(known, by_speed=True))
    if links is None:
        assert even(like).samples_per_second > 1.02 * even(unlike).samples_per_second
        for grouping in (like, unlike, Grouping([SPEEDS])):
            assert by_speed(grouping).samples_per_second == sum(SPEEDS.values())
    near = Grouping([[2, 3, 5], [7, 8, 9]])
    assert by_speed(near).samples_per_second > 1.5 * even(near).samples_per_second
    assert choose(ProbeMeasurements(SPEEDS, {}, links), by_speed).grouping in (near, Grouping([SPEEDS]))


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_hub_that_is_told_of_parts_by_speed_does_not_regroup_for_speeds(consistency: str) -> None:
    for shares, grouped in (("auto", [(2, 3, 5, 7, 8, 9)]), ("even", [(2, 7), (3, 8), (5, 9)])):
        options = HubOptions(workers=6, groups=0, shares=shares, consistency=consistency)  # type: ignore[arg-type]
        settings = grouping_of(options, score_for)
        assert settings is not None
        assert str(settings) == f"auto by auto, {consistency}" + ", shares auto" * (shares == "auto")
        planner = Planner(settings)
        assert list(planner._choose(SPEEDS).grouping) == grouped
        before = dict.fromkeys(SPEEDS, 160.0)
        regrouper = planner._make_regrouper(0.0, Grouping([SPEEDS]), before)
        for _ in range(16):
            for worker, speed in SPEEDS.items():
                regrouper.handle_measured(1.0, worker, 1 / speed)
        found = [regrouper.poll(now) for now in (1.0, 40.0, 400.0)]
        assert any(found) == (shares == "even")


def test_a_workers_batch_is_the_mean_where_parts_follow_speeds() -> None:
    for by_speed, batch in ((False, 3), (True, 10)):
        planner = Planner(GroupingSettings(by_speed=by_speed))
        planner.batches.update({2: 24.0, 3: 3.0, 5: 3.0, 7: 50.0})
        assert planner._known({2: 1.0, 3: 1.0, 5: 1.0}).batch == batch
