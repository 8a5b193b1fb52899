"""A cluster in a TOML file: workers, sites, links, the model, and how to synchronise it.

docs/grouping.md explains the file. Every error is one line: file, place, what is wrong, and what would be
right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.core.errors import ConfigError
from atoll.core.tables import Table, shown
from atoll.core.texts import nearest
from atoll.core.toml import parse_toml, read_toml
from atoll.core.units import parse_bytes, parse_rate
from atoll.groups.chooser import MOST_WORKERS, ProbeMeasurements
from atoll.groups.links import Links

UPLINKS = ("leader", "members")
WORK = ("equal", "speed")

_MOST_SITES = 64
_LONGEST_LATENCY = 60.0  # seconds
_LONGEST_NAME = 40
_MOST_BYTES = 2**50
_MOST_BATCH = 2**31

_TOP = ("model", "sync", "server", "inside", "site", "worker", "link")
_MODEL = ("bytes", "batch", "compute")
_SYNC = ("uplink", "pipeline", "work")
_SERVER = ("site", "bandwidth")
_INSIDE = ("bandwidth", "latency")
_SITE = ("name", "bandwidth", "latency")
_WORKER = ("name", "speed", "site", "count", "bandwidth")
_LINK = ("between", "bandwidth", "latency")


@dataclass(frozen=True)
class Pipe:
    """A link, equal in both directions."""

    bandwidth: float  # bytes per second
    latency: float  # seconds, one way


@dataclass(frozen=True)
class Worker:
    """A worker. `bandwidth` limits each direction, in bytes per second."""

    name: str
    speed: float  # samples per second, computing alone
    site: int  # index among the sites
    bandwidth: float


@dataclass(frozen=True)
class Site:
    """A place; `inside` is the link between any two of its workers."""

    name: str
    inside: Pipe


@dataclass(frozen=True)
class Cluster:
    """Contents of the file, in bytes, seconds and samples."""

    workers: tuple[Worker, ...]
    sites: tuple[Site, ...]
    between_sites: Mapping[tuple[int, int], Pipe]  # by indices, the lower first; all traffic across shares it
    between_workers: Mapping[tuple[int, int], Pipe]  # a link that only these two use
    bytes: int  # of a contribution: the gradients of the whole model
    batch: int  # samples of a worker's batch
    compute: float  # seconds to add up or apply a byte
    uplink: str  # one of UPLINKS
    pipeline: int  # 1: an exchange is in flight while the next step computes
    work: str  # one of WORK: members of a group take equal batches, or batches by speed
    server: Pipe  # the server's own link, in and out
    server_site: int

    def names(self, worker: int) -> str:
        """Return a worker's name."""
        return self.workers[worker].name

    def pipe(self, one: int, other: int) -> Pipe:
        """Return the link between two workers: its latency, and its bandwidth without other traffic."""
        pair = (min(one, other), max(one, other))
        if pair in self.between_workers:
            return self.between_workers[pair]
        first, second = self.workers[one], self.workers[other]
        path = self.path(first.site, second.site)
        return Pipe(min(path.bandwidth, first.bandwidth, second.bandwidth), path.latency)

    def path(self, one: int, other: int) -> Pipe:
        """Return the link between two sites, or inside one."""
        return (
            self.sites[one].inside if one == other else self.between_sites[min(one, other), max(one, other)]
        )

    def measured(self) -> ProbeMeasurements:
        """Return the chooser's input; workers are numbered in the file's order, from 0."""
        numbers = range(len(self.workers))
        pipes = [[self.pipe(one, other) for other in numbers] for one in numbers]
        return ProbeMeasurements(
            speeds={number: self.workers[number].speed for number in numbers},
            sites={number: self.sites[self.workers[number].site].name for number in numbers},
            links=Links(
                tuple(numbers),
                np.array([[pipe.bandwidth for pipe in row] for row in pipes]),
                np.array([[pipe.latency for pipe in row] for row in pipes]),
            ),
            name=self.names,
        )


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read the cluster from the file at `path`. Raises ConfigError, one line, for the first mistake."""
    values = read_toml(path, "the cluster")
    try:
        return _cluster(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_cluster(text: str) -> Cluster:
    """Read a cluster from a file's text. Raises ConfigError, without a path, for the first mistake."""
    return _cluster(parse_toml(text))


def _cluster(values: dict[str, Any]) -> Cluster:
    table = Table(values, "", _TOP)
    sites = _sites(table)
    workers = _workers(table, sites)
    between_sites, between_workers = _links(table, sites, workers)
    model, sync = (
        Table(values.get("model", {}), "model", _MODEL),
        Table(values.get("sync", {}), "sync", _SYNC),
    )
    server, server_site = _server(table, sites)
    return Cluster(
        workers=workers,
        sites=sites,
        between_sites=between_sites,
        between_workers=between_workers,
        bytes=_bytes(model),
        batch=model.integer("batch", 1, 1, _MOST_BATCH),
        compute=model.number(
            "compute", 0.0, 0.0, 1.0, "is not a time; write seconds for each byte, as 1e-10"
        ),
        uplink=_choice(sync, "uplink", UPLINKS),
        pipeline=sync.integer("pipeline", 0, 0, 1),
        work=_choice(sync, "work", WORK),
        server=server,
        server_site=server_site,
    )


def _bytes(model: Table) -> int:
    model.need("bytes", 'has no bytes; write bytes = "160MB", the size of all gradients')
    size: int = model.quantity("bytes", parse_bytes)
    if not 1 <= size <= _MOST_BYTES:
        raise model.error("bytes", f"{model.given('bytes')} is not a model's size; write it like 160MB")
    return size


def _choice(table: Table, key: str, choices: Sequence[str]) -> str:
    value = table.values.get(key, choices[0])
    if value not in choices:
        hint = nearest(str(value), choices)
        raise table.error(key, f"no such choice {shown(value)}{hint} (one of: {', '.join(choices)})")
    return str(value)


def _sites(table: Table) -> tuple[Site, ...]:
    inside = Table(table.values.get("inside", {}), "inside", _INSIDE)
    entries = table.tables("site")
    if not entries:
        raise table.error("", 'names no site; write [[site]] and below it name = "paris", once for each')
    if len(entries) > _MOST_SITES:
        raise table.error("site", f"{len(entries)} sites are too many; at most {_MOST_SITES}")
    sites: list[Site] = []
    for index, values in enumerate(entries, start=1):
        site = Table(values, f"site {index}", _SITE)
        name = _name(site, "paris", [other.name for other in sites])
        site.place = f"site {index} ({name})"
        owner = site if "bandwidth" in site.values or "bandwidth" not in inside.values else inside
        bandwidth = _bandwidth(owner, "10Gbit/s", "; [inside] may say it for all sites")
        owner = site if "latency" in site.values or "latency" not in inside.values else inside
        sites.append(
            Site(name, Pipe(bandwidth, _latency(owner, "50us", "; [inside] may say it for all sites")))
        )
    return tuple(sites)


def _workers(table: Table, sites: Sequence[Site]) -> tuple[Worker, ...]:
    entries = table.tables("worker")
    if not entries:
        raise table.error(
            "", 'names no worker; write [[worker]] and below it name = "a", speed = 100 and its site'
        )
    workers: list[Worker] = []
    for index, values in enumerate(entries, start=1):
        worker = Table(values, f"worker {index}", _WORKER)
        names = [other.name for other in workers]
        name = _name(worker, "a", [*names, *(site.name for site in sites)])
        worker.place = f"worker {index} ({name})"
        count = worker.integer("count", 1, 1, MOST_WORKERS)
        worker.need("speed", "has no speed; write speed = 100, the samples per second that it computes alone")
        hint = "is not a speed; write samples per second, a number above 0"
        speed = worker.number("speed", 0.0, 1e-9, 1e12, hint)
        site = _worker_site(worker, sites)
        bandwidth = sites[site].inside.bandwidth
        if "bandwidth" in worker.values:
            bandwidth = _bandwidth(worker, "1Gbit/s")
        for number in range(1, count + 1):
            own = name if count == 1 else f"{name}-{number}"
            if own in names:
                raise worker.error("count", f"{shown(own)} is another worker's name; each needs its own")
            workers.append(Worker(own, speed, site, bandwidth))
        if len(workers) > MOST_WORKERS:
            raise table.error("worker", f"more than {MOST_WORKERS} workers, which are the most")
    return tuple(workers)


def _worker_site(worker: Table, sites: Sequence[Site]) -> int:
    if "site" not in worker.values and len(sites) == 1:
        return 0
    name = worker.need("site", f'does not say where it is; write site = "{sites[0].name}"')
    return _site_of(worker, "site", name, sites)


def _site_of(table: Table, key: str, name: Any, sites: Sequence[Site]) -> int:
    names = [site.name for site in sites]
    if name not in names:
        hint = (
            nearest(str(name), names)
            or f"; the sites are {', '.join(names[:8])}{', ...' if names[8:] else ''}"
        )
        raise table.error(key, f"no site is named {shown(name)}{hint}")
    return names.index(name)


def _name(table: Table, such_as: str, taken: Sequence[str]) -> str:
    name = table.need("name", f'has no name; write name = "{such_as}"')
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _LONGEST_NAME
        or not name.isprintable()
        or " " in name
    ):
        hint = f"write letters, digits and signs without spaces, at most {_LONGEST_NAME}"
        raise table.error("name", f"{shown(name)} is not a name; {hint}")
    if name in taken:
        raise table.error("name", f"{shown(name)} is taken; each site and worker needs a name of its own")
    return name


def _links(
    table: Table, sites: Sequence[Site], workers: Sequence[Worker]
) -> tuple[dict[tuple[int, int], Pipe], dict[tuple[int, int], Pipe]]:
    """Return the links between sites, complete for sites with workers, and the links between two workers."""
    places = {site.name: index for index, site in enumerate(sites)}
    numbers = {worker.name: index for index, worker in enumerate(workers)}
    between_sites: dict[tuple[int, int], Pipe] = {}
    between_workers: dict[tuple[int, int], Pipe] = {}
    for index, values in enumerate(table.tables("link"), start=1):
        link = Table(values, f"link {index}", _LINK)
        ends = _ends(link, places, numbers)
        link.place = f"link {index} ({ends[0]} - {ends[1]})"
        of_sites = ends[0] in places
        known, found = (places, between_sites) if of_sites else (numbers, between_workers)
        one, other = sorted(known[end] for end in ends)
        if one == other:
            raise link.error("between", f"leads from {ends[0]} to itself; a link joins two different ends")
        if (one, other) in found:
            raise link.error(
                "between", f"{ends[0]} and {ends[1]} have a link above already; give each one once"
            )
        found[one, other] = Pipe(_bandwidth(link, "100Mbit/s"), _latency(link, "20ms"))
    used = sorted({worker.site for worker in workers})
    for place, one in enumerate(used):
        for other in used[place + 1 :]:
            if (one, other) not in between_sites:
                pair = f'"{sites[one].name}", "{sites[other].name}"'
                raise table.error("link", f"none between [{pair}]; write [[link]] with between = [{pair}]")
    return between_sites, between_workers


def _ends(link: Table, places: Mapping[str, int], numbers: Mapping[str, int]) -> tuple[str, str]:
    hint = 'write between = ["paris", "berlin"], two sites or two workers'
    ends = link.need("between", f"does not say what it joins; {hint}")
    if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise link.error("between", f"{shown(ends)} is not two names; {hint}")
    for end in ends:
        if end not in places and end not in numbers:
            raise link.error(
                "between", f"no site or worker is named {shown(end)}{nearest(end, [*places, *numbers])}"
            )
    if (ends[0] in places) != (ends[1] in places):
        raise link.error("between", f"{shown(ends)} is a site and a worker; {hint}")
    return ends[0], ends[1]


def _server(table: Table, sites: Sequence[Site]) -> tuple[Pipe, int]:
    """Return the server's own link and its site, by default the first site."""
    server = Table(table.values.get("server", {}), "server", _SERVER)
    place = _site_of(server, "site", server.values["site"], sites) if "site" in server.values else 0
    inside = sites[place].inside
    bandwidth = _bandwidth(server, "10Gbit/s") if "bandwidth" in server.values else inside.bandwidth
    return Pipe(bandwidth, inside.latency), place


def _bandwidth(table: Table, such_as: str, where: str = "") -> float:
    """Return bytes per second."""
    table.need("bandwidth", f'has no bandwidth; write bandwidth = "{such_as}"{where}')
    bits: float = table.quantity("bandwidth", parse_rate)
    if not 0 < bits < math.inf:
        raise table.error("bandwidth", f"{table.given('bandwidth')} lets nothing through; write more than 0")
    return bits / 8


def _latency(table: Table, such_as: str, where: str = "") -> float:
    """Return seconds, one way."""
    table.need("latency", f'has no latency; write latency = "{such_as}", one way{where}')
    return table.span("latency", _LONGEST_LATENCY)
