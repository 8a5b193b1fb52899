"""Groupings of a cluster side by side, and the chosen one, for `atoll plan groups`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import UserError
from atoll.core.texts import nearest
from atoll.groups.chooser import Choice, choose
from atoll.groups.grouping import Grouping, show, sizes_of
from atoll.groups.links import sites_grouping
from atoll.plan.cluster import Cluster
from atoll.plan.throughput import Prediction, Throughput

WAYS = ("joint", "speed", "site")


@dataclass(frozen=True)
class Row:
    """One grouping. `by` is `joint`, `speed` or `site`, `one ring` or `each alone`."""

    by: str
    grouping: Grouping
    prediction: Prediction


@dataclass(frozen=True)
class Comparison:
    """Groupings of a cluster; the first row is the synchronous one. `ceiling` is the sum of speeds."""

    cluster: Cluster
    rows: tuple[Row, ...]
    chosen: Row
    reason: str
    ceiling: float

    @property
    def synchronous(self) -> Prediction:
        return self.rows[0].prediction

    def groups_of(self, row: Row) -> list[list[str]]:
        """Return the row's groups, by the workers' names."""
        return [[self.cluster.names(member) for member in group] for group in row.grouping]


def compare(cluster: Cluster, by: str = "joint", groups: int | None = None) -> Comparison:
    """Score the groupings by speed, by site and by both, and choose the one of `by`.

    `groups` fixes their number. Raises UserError for an impossible number of groups.
    """
    if by not in WAYS:
        raise UserError(f"no such way {by!r} to group{nearest(by, WAYS)} (one of: {', '.join(WAYS)})")
    workers = range(len(cluster.workers))
    if groups is not None:
        sizes_of(len(workers), groups)
    throughput, measured = Throughput(cluster), cluster.measured()
    sites = sites_grouping(measured.sites, workers)
    if by == "site" and groups not in (None, len(sites)):
        raise UserError(
            f"{groups} groups by site cannot be had: there are workers at {len(sites)} sites; leave the "
            "number out, or group by joint"
        )
    choice = choose(measured, throughput.score, groups=groups)
    groupings = {"one ring": Grouping([workers]), "each alone": Grouping([worker] for worker in workers)}
    if choice.by_speed is not None:
        groupings["speed"] = choice.by_speed.grouping
    groupings |= {"site": sites, "joint": choice.grouping}
    rows = {name: Row(name, each, throughput.predict(each)) for name, each in groupings.items()}
    reason = _reason(cluster, by, groups, rows, choice)
    return Comparison(cluster, tuple(rows.values()), rows[by], reason, throughput.ceiling)


def _reason(cluster: Cluster, by: str, groups: int | None, rows: dict[str, Row], choice: Choice) -> str:
    if by == "joint":
        return choice.reason
    row = rows[by]
    rate = f"{row.prediction.samples_per_second:.4g} samples/s"
    if by == "site":
        why = f"one group for each of the {len(row.grouping)} sites"
        why = why if len(row.grouping) > 1 else "all workers are at one site"
    else:
        sizes = "as the probe's queue makes them, neighbours in speed together"
        asked = "as asked for" if groups is not None else "the best number by the prediction"
        why = f"{len(row.grouping)} groups, {asked}, {sizes}"
    first = f"{show(row.grouping, cluster.names)} is predicted to give {rate}: {why}."
    if row.grouping == choice.grouping:
        return f"{first} Speed and links together give the same grouping."
    joint = f"{choice.score.samples_per_second:.4g} ({show(choice.grouping, cluster.names)})"
    return f"{first} Beside it: by speed and links together {joint}."


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data, in samples per second and seconds."""
    return {
        "workers": len(comparison.cluster.workers),
        "server": comparison.cluster.sites[comparison.cluster.server_site].name,
        "ceiling": comparison.ceiling,
        "synchronous": _figures(comparison.synchronous),
        "groupings": [_row(comparison, row) for row in comparison.rows],
        "chosen": {**_row(comparison, comparison.chosen), "reason": comparison.reason},
    }


def _row(comparison: Comparison, row: Row) -> dict[str, Any]:
    groups: Sequence[list[str]] = comparison.groups_of(row)
    return {
        "by": row.by,
        "groups": groups,
        **_figures(row.prediction),
        "limit": row.prediction.limit,
        "iterations": [
            {
                "compute": group.compute,
                "ring": group.ring,
                "exchange": group.exchange,
                "period": group.period,
            }
            for group in row.prediction.groups
        ],
    }


def _figures(prediction: Prediction) -> dict[str, float]:
    return {"compute_only": prediction.compute_only, "samples_per_second": prediction.samples_per_second}
