"""A cluster from a run's measurements: speeds, and the link of each pair of workers.

Pairs were measured one at a time, so shared links are not known. Sites are taken from the workers' settings,
or else are clusters of near workers. All traffic between two sites shares one link, with the median of the
figures measured across it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from atoll.groups.grouping import Grouping
from atoll.groups.links import Links, sites_grouping
from atoll.plan.cluster import Cluster, Pipe, Site, Worker


def cluster_of(
    speeds: Mapping[int, float],
    links: Links,
    sites: Mapping[int, str],
    *,
    size: int,
    batch: int,
    beside_server: int | None = None,
    by_speed: bool = False,
) -> Cluster:
    """Return the cluster of the measured workers, by number, each named by its number.

    Args:
        links: links of exactly these workers.
        size: bytes of a contribution.
        batch: samples of a worker's iteration.
        beside_server: a worker at the server's site, by default the first. The server's link is as good
            as its site's.
        by_speed: True if members of a group have parts of its batches by their speeds.
    """
    workers = sorted(speeds)
    places = [links.workers.index(worker) for worker in workers]
    bandwidth = np.minimum(links.bandwidth, links.bandwidth.T)[np.ix_(places, places)]
    latency = np.maximum(links.latency, links.latency.T)[np.ix_(places, places)]
    groups = [[workers.index(worker) for worker in group] for group in _sites(workers, links, sites)]
    site_of = {place: number for number, group in enumerate(groups) for place in group}

    def pipe(pairs: Sequence[tuple[int, int]]) -> Pipe:
        return Pipe(
            float(np.median([bandwidth[pair] for pair in pairs])),
            float(np.median([latency[pair] for pair in pairs])),
        )

    own = [
        max((float(bandwidth[place, other]) for other in range(len(workers)) if other != place), default=1.0)
        for place in range(len(workers))
    ]
    inside = [
        pipe(list(combinations(group, 2))) if len(group) > 1 else Pipe(own[group[0]], 0.0) for group in groups
    ]
    server_site = site_of[workers.index(beside_server)] if beside_server is not None else site_of[0]
    return Cluster(
        workers=tuple(
            Worker(str(worker), speeds[worker], site_of[place], own[place])
            for place, worker in enumerate(workers)
        ),
        sites=tuple(
            Site(_name(sites, [workers[place] for place in group]), each)
            for group, each in zip(groups, inside, strict=True)
        ),
        between_sites={
            (one, other): pipe([(a, b) for a in groups[one] for b in groups[other]])
            for one, other in combinations(range(len(groups)), 2)
        },
        between_workers={},
        bytes=size,
        batch=batch,
        compute=0.0,
        uplink="leader",
        pipeline=0,
        work="speed" if by_speed else "equal",
        server=inside[server_site],
        server_site=server_site,
    )


def _sites(workers: Sequence[int], links: Links, sites: Mapping[int, str]) -> Grouping:
    if any(sites.values()):
        return sites_grouping(sites, workers)
    clusters = links.clusterings()
    return clusters[0] if clusters else Grouping([workers])


def _name(sites: Mapping[int, str], workers: Sequence[int]) -> str:
    """Return the site's name, or else one by its first worker."""
    return sites.get(workers[0], "") or f"workers {workers[0]}, ..."
