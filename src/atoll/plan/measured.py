"""A cluster as a run has measured it: speeds, and the link of each pair of workers.

Pairs were measured one at a time, which does not tell what they share. So sites are taken to be where workers
say that they are, else clusters of near workers; what crosses between two shares one link, as fast as the
median of those that were measured.
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
) -> Cluster:
    """Workers in order of their numbers, each named by it. `links` are of exactly these.

    `size` is a contribution's in bytes, `batch` samples of a worker's iteration. The server is where the
    worker `beside_server` is, else where the first worker is, and has as good a link as that site's workers.
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
        work="equal",
        server=inside[server_site],
        server_site=server_site,
    )


def _sites(workers: Sequence[int], links: Links, sites: Mapping[int, str]) -> Grouping:
    if any(sites.values()):
        return sites_grouping(sites, workers)
    clusters = links.clusterings()
    return clusters[0] if clusters else Grouping([workers])


def _name(sites: Mapping[int, str], workers: Sequence[int]) -> str:
    """As the site's workers call it, else by the first of them."""
    return sites.get(workers[0], "") or f"workers {workers[0]}, ..."
