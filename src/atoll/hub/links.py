"""The hub's measuring of links between workers: requests to workers, and the results.

Workers of one machine share its links. So a link is between two machines or inside one, and one pair of
workers measures it for all. Machines are told apart by the hosts at which workers say that they listen. No
worker trains before the first measuring is over; links of late workers are measured while the others train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import combinations

from atoll.core.units import format_rate, format_seconds
from atoll.groups.links import Links
from atoll.groups.probing import LinkMeasurement, LinkProbe
from atoll.hub.records import Linked
from atoll.wire.messages import LinkMeasured, LinkPlace, MeasureLink

LEAST_SECONDS = 0.5  # seconds for a link: a transfer over a long link starts slowly
MOST_SECONDS = 2.0  # seconds for a link, if there is time
NEAR_SECONDS = 0.25  # seconds for a link inside a machine
PLACE_SECONDS = 3.0  # seconds for workers to report where their links are measured
_NAMED = 3  # the most failed links that a report explains

Pair = tuple[int, int]
Way = tuple[str, str]  # two machines, sorted; one machine twice: its inside


@dataclass(frozen=True)
class Ask:
    """A request to `worker` to measure a link."""

    worker: int
    message: MeasureLink


@dataclass(frozen=True)
class LinksFound:
    """Results of a finished measuring. `links` covers the workers that could be measured; `summary` is part
    of a sentence; `reason` has the figures and what could not be measured."""

    links: Links
    summary: str
    reason: str


class LinkDesk:
    """Has the links of a run's workers measured, within `seconds` in all (0: none). Workers are ranks, times
    the hub's.

    `keep` is called with each measured link and each worker's host. A link that could not be measured is not
    tried again before the hub restarts.
    """

    def __init__(self, seconds: float, keep: Callable[[Linked], None]) -> None:
        self._seconds, self._keep = seconds, keep
        self.known: dict[Way, LinkMeasurement] = {}
        self.hosts: dict[int, str] = {}  # by worker: its host
        self._places: dict[int, LinkPlace] = {}
        self._failures: dict[Way, str] = {}  # reasons of failed measurements
        self._silent: set[int] = set()  # workers that did not report where their links are measured
        self._probe: LinkProbe | None = None
        self._asked: dict[Pair, Way] = {}  # links that the probe measures, by pair of workers
        self._since: float | None = None  # since when there is something to measure
        self._live: tuple[int, ...] = ()
        self._looked: tuple[tuple[object, ...], frozenset[Way]] = (
            (),
            frozenset(),
        )  # cache of `_open`: its inputs and its result
        self._told: frozenset[Way] | None = None  # the links in the latest report

    @property
    def measures(self) -> bool:
        """True if links are measured in this run."""
        return self._seconds > 0

    # -- events -------------------------------------------------------------------------------------------

    def handle_live(self, live: Iterable[int]) -> None:
        """Set the present workers."""
        if self.measures:
            self._live = tuple(sorted(live))

    def handle_place(self, now: float, worker: int, place: LinkPlace) -> None:
        """Handle the address at which a worker's links are measured, which is valid until the measuring
        ends."""
        if self.hosts.get(worker) == place.host and not self.wants(worker):
            return
        self._places[worker] = place
        self._silent.discard(worker)
        if self.hosts.get(worker) != place.host:
            linked = Linked(at=now, worker=worker, hosts=(place.host, place.host))
            self._keep(linked)
            self.take(linked)

    def handle_measured(self, now: float, worker: int, word: LinkMeasured) -> None:
        """Handle a measurement. One that was not requested is ignored."""
        pair = (min(worker, word.worker), max(worker, word.worker))
        way = self._asked.get(pair)
        if self._probe is None or way is None or way in self.known:
            return
        if word.reason or not word.bandwidth > 0:
            self._failures[way] = word.reason or "no byte came through"
            self._probe.handle_failed(now, *pair)
            return
        linked = Linked(at=now, worker=-1, hosts=way, bandwidth=word.bandwidth, latency=word.latency)
        self._keep(linked)
        self.take(linked)
        self._probe.handle_measured(now, *pair, self.known[way])

    def take(self, linked: Linked) -> None:
        """Store a measured link or a worker's host: now, or from before a restart."""
        if linked.worker >= 0:
            self.hosts[linked.worker] = linked.hosts[0]
        else:
            self.known[linked.hosts] = LinkMeasurement(linked.bandwidth, linked.latency)

    def handle_left(self, now: float, worker: int) -> None:
        """Forget a worker that left. Another one of its rank may be elsewhere."""
        if self._probe is not None:
            self._probe.handle_left(now, worker)
            self._asked = {pair: way for pair, way in self._asked.items() if worker not in pair}
        self._places.pop(worker, None)
        self.hosts.pop(worker, None)
        self._silent.discard(worker)
        self._live = tuple(each for each in self._live if each != worker)

    # -- requests and results -----------------------------------------------------------------------------

    def wants(self, worker: int) -> bool:
        """True if links of this worker are being measured, or still to be measured."""
        if len(self._live) < 2 or worker in self._silent:
            return False
        host, ways = self.hosts.get(worker), self._open()
        return host is None or (bool(ways) and any(host in way for way in ways))

    @property
    def over(self) -> bool:
        """True if everything that can be measured is."""
        return len(self._live) < 2 or not (self._lost() or self._open())

    def poll(self, now: float, live: Collection[int]) -> tuple[list[Ask], LinksFound | None]:
        """Return new requests to the present workers `live`, and the results once the measuring is over."""
        self.handle_live(live)
        if self._probe is None and not self.over:
            self._begin(now)
        asks = []
        if self._probe is not None:
            asks = [self._ask(*each) for each in self._begun(now)]
            if self._probe.over:
                self._end()
        if not self.over or self._told == frozenset(self.known) or len(self._live) < 2:
            return asks, None
        self._told = frozenset(self.known)
        return asks, self._found(now)

    def next_deadline(self) -> float | None:
        """Time at which `poll` has work, unless an event comes earlier."""
        return self._probe.next_deadline() if self._probe is not None else None

    def _lost(self) -> list[int]:
        """Workers whose host is unknown."""
        return [each for each in self._live if each not in self.hosts and each not in self._silent]

    def _open(self) -> frozenset[Way]:
        """Links to be measured, or being measured, between workers whose hosts are known."""
        asked = (tuple(map(self.hosts.get, self._live)), len(self.known), len(self._failures))
        if self._looked[0] != asked:  # cached: every heartbeat asks, and there may be many machines
            counts = Counter(host for host in asked[0] if host is not None)
            ways = {_way(*pair) for pair in combinations(counts, 2)}
            ways |= {(host, host) for host, count in counts.items() if count > 1}
            self._looked = (asked, frozenset(ways - self.known.keys() - self._failures.keys()))
        return self._looked[1]

    def _begin(self, now: float) -> None:
        """Start measuring once all workers have reported their addresses; slow ones are left out."""
        self._since = now if self._since is None else self._since
        wanted = {each for each in self._live if self.wants(each)}
        if wanted - self._places.keys():
            if now < self._since + PLACE_SECONDS:
                return
            self._silent |= set(self._lost())
        ways = set(self._open())
        self._asked = {}
        for pair in combinations([each for each in self._live if each in self._places], 2):
            way = _way(self.hosts[pair[0]], self.hosts[pair[1]])
            if way in ways:
                ways.discard(way)
                self._asked[pair] = way
        self._failures |= dict.fromkeys(ways, "nobody there says where links are measured")
        workers = {each for pair in self._asked for each in pair}
        least = min(LEAST_SECONDS, self._seconds / 4)
        self._probe = LinkProbe(
            now, workers, self._seconds, least=least, most=MOST_SECONDS, only=self._asked.keys()
        )

    def _begun(self, now: float) -> list[tuple[Pair, float]]:
        assert self._probe is not None
        return [((each.first, each.second), each.seconds) for each in self._probe.poll(now)]

    def _ask(self, pair: Pair, seconds: float) -> Ask:
        first, second = pair
        there = self._places[second]
        near = there.host == self.hosts.get(first)
        message = MeasureLink(
            worker=second,
            host=there.host,
            port=there.port,
            token=there.token,
            seconds=min(seconds, NEAR_SECONDS) if near else seconds,
        )
        return Ask(first, message)

    def _end(self) -> None:
        for way in self._asked.values():
            if way not in self.known:
                self._failures.setdefault(way, "there was no time for it, or no word came")
        self._probe, self._asked, self._since = None, {}, None
        self._places.clear()

    def _found(self, now: float) -> LinksFound:
        """Return the results by worker, in the chooser's format."""
        there = [worker for worker in self._live if worker in self.hosts]
        known = {}
        for pair in combinations(there, 2):
            way = _way(self.hosts[pair[0]], self.hosts[pair[1]])
            if way in self.known:
                known[pair] = self.known[way]
        found = LinkProbe(now, self._live, 1.0, known=known).found()
        machines = len({self.hosts[worker] for worker in there})
        links = len(self.known) + len(self._failures)
        summary = (
            f"{len(self.known)} of {links} links measured ({len(self._live)} workers on {machines} "
            f"machine{'s' * (machines != 1)})"
        )
        reasons = self._figures()
        if found.without:
            names = ", ".join(f"worker {worker}" for worker in found.without)
            reasons.append(f"nothing is known of the links to {names}")
        reasons += [f"{' - '.join(way)}: {why}" for way, why in list(self._failures.items())[:_NAMED]]
        return LinksFound(found.links, summary, "; ".join(reasons))

    def _figures(self) -> list[str]:
        """Rates and delays of links between machines and inside them, from lowest to highest."""
        near = [link for way, link in self.known.items() if way[0] == way[1]]
        far = [link for way, link in self.known.items() if way[0] != way[1]]
        kinds = (("between machines", far), ("inside a machine", near))
        return [f"{kind} {_spread(links)}" for kind, links in kinds if links]


def _way(one: str, other: str) -> Way:
    return (min(one, other), max(one, other))


def _spread(links: list[LinkMeasurement]) -> str:
    """Format like `90 Mbit/s to 95 Mbit/s and 40.1 ms`."""
    rates = [8 * link.bandwidth for link in links]
    spans = [link.latency for link in links]
    return f"{_range(rates, format_rate)} and {_range(spans, format_seconds)}"


def _range(values: list[float], show: Callable[[float], str]) -> str:
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"
