"""What a hub scores groupings with, from what a run has measured."""

from __future__ import annotations

import numpy as np

from atoll.cli.scores import score_for
from atoll.groups.chooser import ProbeMeasurements, choose
from atoll.groups.grouping import Grouping
from atoll.groups.links import Links
from atoll.hub.planner import WorkerMeasurements
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
