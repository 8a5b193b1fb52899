"""A lab's topology: sites, links between them, and changes over time; read from a TOML file.

docs/lab.md explains the file. Every error is one line: file, place, what is wrong, and what would be right.
Only `load_topology` touches the machine: it reads the file.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

from atoll.core.config import GroupBy
from atoll.core.errors import ConfigError
from atoll.core.tables import Table, shown
from atoll.core.texts import nearest
from atoll.core.toml import parse_toml, read_toml
from atoll.core.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate, parse_seconds

PACKET = 1500  # bytes: the MTU of every link, and the slot of the burst model
DISTRIBUTIONS = ("normal", "uniform", "pareto")

_MOST_SITES = 64
_MOST_WORKERS = 256  # of one site
_MOST_SHARDS = 64
_SLOWEST_SPEED = 0.001
_RATES = (1e3, 100e9)  # bit/s
_LONGEST_DELAY = 60.0  # seconds
_LONGEST_PATIENCE = 3600.0  # seconds
_LATEST = 7 * 86400.0  # seconds: of a change, or of an outage's end
_LONGEST_BURST = 1e6  # packets
_LEAST_QUEUE = 2**16  # bytes, least default
_LONGEST_WAIT = 86400.0  # seconds in a full queue
_MOST_HELD = 2**30  # bytes queued, or in flight: they lie in this machine's memory
_LEAST_OVERTAKEN = 1e-3  # seconds, least default

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")

_TOP = ("seed", "congestion_control", "site", "link", "hub")
_SITE = ("name", "workers", "speed")
_HUB = ("site", "shards", "groups", "group_by", "group_links", "patience")
_QUALITIES = (
    "rate", "delay", "jitter", "distribution", "queue", "loss", "burst", "reorder", "reorder_by",
    "duplicate", "corrupt",
)  # fmt: skip
_LINK = ("between", "from", "to", *_QUALITIES, "change", "outage")
_CHANGE = ("at", *_QUALITIES)
_OUTAGE = ("at", "for")


@dataclass(frozen=True)
class Site:
    """A place with its own workers, reached only over links."""

    name: str
    index: int  # from 1, in the file's order
    workers: int  # how many times the command starts here; may be 0
    speeds: tuple[float, ...]  # of each worker, in (0, 1]
    address: str  # its IPv4 address, the same in every lab


@dataclass(frozen=True)
class Phase:
    """Behaviour of one direction of a link from `at` to its next phase."""

    at: float  # seconds since the lab's start
    rate: float  # bytes of IP packets per second
    delay: float  # seconds, one way
    jitter: float  # seconds: the standard deviation of the delay
    distribution: str  # of the delay: one of DISTRIBUTIONS
    queue: int  # bytes that may wait; packets beyond them are dropped
    loss: float  # share of packets lost on the wire
    burst: float  # mean length of a run of lost packets, in slots; 1: each packet by itself
    reorder: float  # share of packets that overtake
    reorder_by: float  # seconds by which these arrive earlier
    duplicate: float  # share of packets that arrive twice
    corrupt: float  # share of packets with a flipped bit
    down: bool  # an outage: nothing gets through


@dataclass(frozen=True)
class LabLink:
    """One direction of a link."""

    source: int  # a site, from 0
    target: int
    phases: tuple[Phase, ...]  # sorted by time, each different from the one before; the first is at 0


@dataclass(frozen=True)
class HubPlace:
    """The site of the lab's hub, with its shards.

    Args:
        groups: "auto" or a number of groups of workers; empty: no groups.
        group_by: how groups are formed.
        group_links: most seconds to measure the workers' links.
            patience: seconds of silence after which a worker or shard counts as lost, however regular it was
            before; None: the hub's default.
    """

    site: int  # from 0
    shards: int
    groups: str = ""  # empty: workers are not grouped
    group_by: str = "auto"
    group_links: float = 5.0
    patience: float | None = None


@dataclass(frozen=True)
class Topology:
    """A whole lab, as a file describes it."""

    seed: int  # of every random number, 0 to 2^63 - 1
    sites: tuple[Site, ...]
    links: tuple[LabLink, ...]  # in the file's order; `between` gives first -> second, then second -> first
    hub: HubPlace | None = None
    congestion_control: str = ""  # of all sites' TCP; empty: this machine's


def load_topology(path: str | os.PathLike[str]) -> Topology:
    """Read the topology from the file at `path`. Raises ConfigError, one line, for the first mistake."""
    values = read_toml(path, "the topology")
    try:
        return _topology(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_topology(text: str) -> Topology:
    """Read a topology from a file's text. Raises ConfigError, without a path, for the first mistake."""
    return _topology(parse_toml(text))


def _topology(values: dict[str, Any]) -> Topology:
    table = Table(values, "", _TOP)
    seed = table.integer("seed", 0, 0, 2**63 - 1)
    control = values.get("congestion_control", "")
    if not isinstance(control, str) or not re.fullmatch("[a-z0-9_-]{0,15}", control):
        raise table.error(
            "congestion_control", f'{shown(control)} is not TCP\'s congestion control, such as "cubic"'
        )
    sites = _sites(table)
    names = [site.name for site in sites]
    links: list[LabLink] = []
    owners: dict[tuple[int, int], int] = {}
    for number, link in enumerate(table.tables("link"), start=1):
        links += _link(link, number, names, owners)
    hub = _hub(table, names, sum(site.workers for site in sites))
    return Topology(seed, sites, tuple(links), hub, control)


def _sites(table: Table) -> tuple[Site, ...]:
    entries = table.tables("site")
    if not entries:
        raise table.error("", 'names no site; write [[site]] and below it name = "paris", once for each')
    if len(entries) > _MOST_SITES:
        raise table.error("site", f"{len(entries)} sites are too many; a lab has at most {_MOST_SITES}")
    sites: list[Site] = []
    for index, values in enumerate(entries, start=1):
        site = _site(values, index)
        for other in sites:
            if other.name == site.name:
                raise ConfigError(
                    f"site {index}: name: {site.name!r} is taken by site {other.index}; "
                    "each site needs a name of its own"
                )
        sites.append(site)
    if not any(site.workers for site in sites):
        raise table.error("site", "no site has workers; one of them needs workers = 1 or more")
    return tuple(sites)


def _site(values: dict[str, Any], index: int) -> Site:
    table = Table(values, f"site {index}", _SITE)
    name = table.need("name", 'has no name; write name = "paris"')
    if name == "localhost":  # sites are found by their names, and this one is every site's own
        raise table.error("name", "'localhost' means each site to itself; choose another name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise table.error(
            "name",
            f"{shown(name)} is not a site's name; write lower-case letters, digits and hyphens, a letter "
            "first and no hyphen last, at most 63",
        )
    table.place = f"site {index} ({name})"
    workers = table.integer("workers", 1, 0, _MOST_WORKERS)
    return Site(name, index, workers, _speeds(table, workers), f"10.77.{index}.1")


def _speeds(table: Table, workers: int) -> tuple[float, ...]:
    given = table.values.get("speed", 1.0)
    many = given if isinstance(given, list) else [given] * workers
    if len(many) != workers:
        raise table.error(
            "speed",
            f"{len(many)} speeds for workers = {workers}; write one number for all, or one for each worker",
        )
    for speed in many if isinstance(given, list) else [given]:
        if type(speed) not in (int, float) or not _SLOWEST_SPEED <= speed <= 1:
            raise table.error(
                "speed",
                f"{shown(speed)} is not a speed; write a number from {_SLOWEST_SPEED} to 1 (0.25: a step "
                "takes four times as long; no worker can be made faster than it is)",
            )
    return tuple(float(speed) for speed in many)


def _hub(table: Table, names: Sequence[str], workers: int) -> HubPlace | None:
    if "hub" not in table.values:
        return None
    hub = Table(table.values["hub"], "hub", _HUB)
    name = hub.need("site", f'names no site; write site = "{names[0]}"')
    site, shards = _find(hub, "site", name, names), hub.integer("shards", 1, 0, _MOST_SHARDS)
    group_links = hub.span("group_links", _LONGEST_DELAY, 5.0)
    patience = hub.span("patience", _LONGEST_PATIENCE) if "patience" in hub.values else None
    if patience == 0:
        raise hub.error("patience", f"{hub.given('patience')}: must be more than 0")
    return HubPlace(site, shards, _groups(hub, shards, workers), _group_by(hub), group_links, patience)


def _groups(hub: Table, shards: int, workers: int) -> str:
    given = hub.values.get("groups", "")
    if "groups" not in hub.values:
        for key in ("group_by", "group_links"):
            if key in hub.values:
                raise hub.error(key, 'says how workers are grouped; write groups = "auto" too, or a number')
        return ""
    if given != "auto" and not (type(given) is int and 1 <= given <= workers):
        hint = f'write one from 1 to {workers}, the workers that there are, or "auto"'
        raise hub.error("groups", f"{shown(given)} is not a number of groups; {hint}")
    if not shards:
        raise hub.error("groups", "groups meet at shards; write shards = 1 or more")
    return str(given)


def _group_by(hub: Table) -> str:
    given, choices = hub.values.get("group_by", "auto"), get_args(GroupBy)
    if given not in choices:
        hint = f"{nearest(str(given), choices)} (one of: {', '.join(choices)})"
        raise hub.error("group_by", f"no such choice {shown(given)}{hint}")
    return str(given)


def _find(table: Table, key: str, name: Any, names: Sequence[str]) -> int:
    """Return the index of the site `name` in `names`."""
    if name not in names:
        hint = nearest(str(name), names) or f"; the sites are {_shown_names(names)}"
        raise table.error(key, f"no site is named {shown(name)}{hint}")
    return names.index(name)


def _shown_names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _link(
    values: dict[str, Any], number: int, names: Sequence[str], owners: dict[tuple[int, int], int]
) -> list[LabLink]:
    """Return the directions of one `[[link]]`. `owners` maps earlier directions to their link's number."""
    table = Table(values, f"link {number}", _LINK)
    ways = _ways(table, names)
    first, second = (names[end] for end in ways[0])
    table.place = f"link {number} ({first} {'-' if len(ways) == 2 else '->'} {second})"
    for way in ways:
        if way in owners:
            source, target = (names[end] for end in way)
            raise table.error(
                "", f"the direction {source} -> {target} is in link {owners[way]} already; give each one once"
            )
        owners[way] = number
    phases = _phases(table)
    return [LabLink(source, target, phases) for source, target in ways]


def _ways(table: Table, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return a link's directions as pairs of sites: two for `between`, one for `from` and `to`."""
    values = table.values
    both, one = "between" in values, [key for key in ("from", "to") if key in values]
    hint = f'write between = ["{names[0]}", "{names[-1]}"], or from and to for one direction alone'
    if both and one:
        raise table.error("", f"has both between and {one[0]}; {hint}")
    if not both and len(one) < 2:
        raise table.error("", f"does not name its two sites; {hint}")
    if both and (not isinstance(values["between"], list) or len(values["between"]) != 2):
        raise table.error("between", f"{shown(values['between'])} is not two sites; {hint}")
    keys = ("between", "between") if both else ("from", "to")
    ends = values["between"] if both else [values["from"], values["to"]]
    source, target = (_find(table, key, name, names) for key, name in zip(keys, ends, strict=True))
    if source == target:
        raise table.error("", f"leads from {names[source]} to itself; a link joins two different sites")
    return [(source, target), (target, source)] if both else [(source, target)]


@dataclass(frozen=True)
class _Outage:
    start: float  # seconds
    end: float


def _phases(table: Table) -> tuple[Phase, ...]:
    """Return a link's phases, from its own keys, its changes and its outages."""
    own = {key: table.values[key] for key in _QUALITIES if key in table.values}
    table.need("rate", 'has no rate; write rate = "1Gbit/s"')
    outages = _outages(table)
    qualities = {0.0: _phase(Table(own, table.place, _QUALITIES))}
    last = 0.0
    for number, values in enumerate(table.tables("change", "link."), start=1):
        change = Table(values, f"{table.place}: change {number}", _CHANGE)
        at = _at(change)
        if at <= last:
            before = "the start; what holds from there on stands in the link itself"
            raise change.error(
                "at",
                f"{format_seconds(at)} is not after "
                + (f"the change before it, {format_seconds(last)}; write them in order" if last else before),
            )
        if len(values) == 1:
            raise change.error("", f"changes nothing; name what does, one of {', '.join(_QUALITIES)}")
        own = own | {key: value for key, value in values.items() if key != "at"}
        qualities[at] = _phase(Table(own, change.place, _QUALITIES))
        last = at
    return _flatten(qualities, outages)


def _at(table: Table) -> float:
    table.need("at", 'does not say when; write at = "10s", counted from the start')
    # Rounded to the nanosecond, so that an outage that ends at a change ends exactly there.
    return round(table.span("at", _LATEST), 9)


def _outages(table: Table) -> list[_Outage]:
    found: list[_Outage] = []
    for number, values in enumerate(table.tables("outage", "link."), start=1):
        outage = Table(values, f"{table.place}: outage {number}", _OUTAGE)
        start = _at(outage)
        outage.need("for", 'does not say how long; write for = "2s"')
        length = outage.span("for", _LATEST)
        end = round(start + length, 9)
        if not start < end <= _LATEST:
            raise outage.error(
                "for",
                f"{shown(values['for'])} is not a length; an outage has more than 0 s and ends within "
                f"{format_seconds(_LATEST)}",
            )
        if found and start < found[-1].start:
            raise outage.error("at", "begins before the outage above it; write them in order")
        if found and start < found[-1].end:
            before = format_seconds(found[-1].end)
            raise outage.error("at", f"begins before the one above it ends, at {before}; make them one")
        found.append(_Outage(start, end))
    return found


def _flatten(qualities: dict[float, Phase], outages: list[_Outage]) -> tuple[Phase, ...]:
    """Return the phases over time; a moment without a difference begins none."""
    changes, starts = list(qualities), [outage.start for outage in outages]
    moments = {*changes, *starts, *(outage.end for outage in outages)}
    phases: list[Phase] = []
    for moment in sorted(moments):
        current = qualities[changes[bisect_right(changes, moment) - 1]]
        begun = bisect_right(starts, moment)
        down = begun > 0 and moment < outages[begun - 1].end
        phases.append(replace(current, at=moment, down=down))
    changed = [after for before, after in pairwise(phases) if replace(before, at=after.at) != after]
    return (phases[0], *changed)


def _phase(table: Table) -> Phase:
    """Return a link's qualities at one time, with defaults, each checked alone and against the others."""
    rate = _rate(table)
    delay = table.span("delay", _LONGEST_DELAY)
    if rate * delay > _MOST_HELD:
        raise table.error(
            "delay",
            f"{table.given('delay')} at {format_rate(8 * rate)} would keep {format_bytes(rate * delay)} on "
            f"the way, in this machine's memory; at most {format_bytes(_MOST_HELD)} can be had",
        )
    jitter = table.span("jitter", _LONGEST_DELAY)
    if jitter > delay:
        raise table.error(
            "jitter",
            f"{table.given('jitter')} is more than the delay, {table.given('delay')}; no packet arrives "
            "before it left",
        )
    distribution = table.values.get("distribution", DISTRIBUTIONS[0])
    if distribution not in DISTRIBUTIONS:
        hint = f"{nearest(str(distribution), DISTRIBUTIONS)} (one of: {', '.join(DISTRIBUTIONS)})"
        raise table.error("distribution", f"no such choice {shown(distribution)}{hint}")
    loss, burst = _loss(table)
    reorder, reorder_by = _reorder(table, delay)
    return Phase(
        at=0.0,
        rate=rate,
        delay=delay,
        jitter=jitter,
        distribution=distribution,
        queue=_queue(table, rate, delay),
        loss=loss,
        burst=burst,
        reorder=reorder,
        reorder_by=reorder_by,
        duplicate=table.probability("duplicate"),
        corrupt=table.probability("corrupt"),
        down=False,
    )


def _rate(table: Table) -> float:
    """Return bytes per second."""
    bits: float = table.quantity("rate", parse_rate)
    low, high = _RATES
    if not low <= bits <= high:
        raise table.error(
            "rate",
            f"{format_rate(bits)} cannot be had; a rate is from {format_rate(low)} to {format_rate(high)}"
            + ("" if bits else ", and where nothing gets through, write an outage"),
        )
    return bits / 8


def _queue(table: Table, rate: float, delay: float) -> int:
    """Return the queue in bytes: as given, or a given time at the rate, or one bandwidth-delay product."""
    given = table.values.get("queue")
    if given is None:
        return max(round(rate * delay), _LEAST_QUEUE)
    size: int = table.quantity("queue", lambda value: _size_or_span(value, rate))
    if not PACKET <= size <= _MOST_HELD:
        raise table.error(
            "queue",
            f"{table.given('queue')} at {format_rate(8 * rate)} is {size:.4g} bytes; a queue holds from one "
            f"packet, {PACKET} bytes, to {format_bytes(_MOST_HELD)}",
        )
    if size / rate > _LONGEST_WAIT:
        raise table.error(
            "queue",
            f"{table.given('queue')} at {format_rate(8 * rate)} is a wait of {format_seconds(size / rate)}; "
            f"at most {format_seconds(_LONGEST_WAIT)} can be had",
        )
    return size


def _size_or_span(given: str | float, rate: float) -> int:
    if not str(given).strip().upper().endswith("M"):  # 5M is ambiguous: minutes, or megabytes
        for parse, scale in ((parse_bytes, 1.0), (parse_seconds, rate)):
            try:
                return round(parse(given) * scale)
            except ConfigError:
                continue
    raise ConfigError(f"{given!r} is neither a size nor a time; write it like 5MB, or like 50ms")


def _loss(table: Table) -> tuple[float, float]:
    """Return the lost share and the mean burst.

    A chain that leaves its bad state with probability 1 / burst enters it with loss / (1 - loss) / burst,
    which must be a probability too.
    """
    hint = f"is not a mean length of bursts; write a number of packets from 1 to {_LONGEST_BURST:g}"
    loss, burst = table.probability("loss"), table.number("burst", 1.0, 1.0, _LONGEST_BURST, hint)
    most = burst / (burst + 1)
    if burst > 1 and loss > most:
        raise table.error(
            "loss",
            f"{loss:g} cannot be had in bursts of {burst:g}; between two bursts at least one packet gets "
            f"through, so at most {most:.4g} is lost",
        )
    return loss, burst


def _reorder(table: Table, delay: float) -> tuple[float, float]:
    """Return the share that overtakes, and the seconds: by default a tenth of the delay, at least 1 ms."""
    share = table.probability("reorder")
    by = table.span("reorder_by", _LONGEST_DELAY, min(delay, max(delay / 10, _LEAST_OVERTAKEN)))
    if share and not delay:
        raise table.error("reorder", "a packet overtakes by skipping a part of the delay; give a delay")
    if by > delay or (share and not by):
        raise table.error(
            "reorder_by",
            f"{table.given('reorder_by')} cannot be skipped; it is more than 0 and at most the delay, "
            f"{table.given('delay')}",
        )
    return share, by
