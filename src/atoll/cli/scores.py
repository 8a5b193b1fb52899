"""The hub's scores of groupings: the planner's prediction from measurements."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.groups.chooser import ScoreFunction, computing
from atoll.groups.grouping import Grouping
from atoll.hub.planner import WorkerMeasurements
from atoll.plan.measured import cluster_of
from atoll.plan.throughput import Throughput


def score_for(known: WorkerMeasurements) -> ScoreFunction:
    """Return a score by `Throughput`, or by computing alone if links, model size or batch are unknown."""
    if known.links is None or not known.size or not known.batch:
        return computing(known.speeds, by_speed=known.by_speed)
    throughput = Throughput(
        cluster_of(
            known.speeds,
            known.links,
            known.sites,
            size=known.size,
            batch=known.batch,
            beside_server=known.beside_server,
            by_speed=known.by_speed,
        )
    )
    places = {worker: place for place, worker in enumerate(sorted(known.speeds))}
    return lambda grouping: throughput.score(_renumbered(grouping, places))


def _renumbered(grouping: Grouping, places: Mapping[int, int]) -> Grouping:
    """Return the grouping with places in the cluster instead of ranks, which may have gaps."""
    return Grouping([places[worker] for worker in group] for group in grouping)
