"""The choice of the order in which a ring's sums pass its members, from links that the members measure.

Gloo sums along the ranks of its process group: each member sends to the next rank. So the ranks of that
process group give the order, and the session's ranks stay unchanged. NCCL lays rings of its own.

Whenever a ring is formed, each member reports its machine. On one machine nothing else happens. Over several
machines, one member of each measures the links to the others, in rounds of pairs, and `rings/order.py` finds
the best order by these figures. A trial then decides two things: whether the best order replaces the order of
ranks, and whether a second ring, the other way round, is worth its connections.

All members decide alike, by figures that all have gathered. Source: docs/planning.md, "The order of a ring".
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from atoll.core.config import LAB_SITE_VARIABLE, SITE_VARIABLE, Config
from atoll.core.errors import AtollError
from atoll.core.units import format_rate, format_seconds
from atoll.net.linkprobe import LinkServer, measure
from atoll.rings.order import MARGIN, LinkSpeed, Order, Topology, Way, rounds
from atoll.train.group.channel import Channel, Sums
from atoll.train.group.ordertrial import OrderTrial, TrialResult, named
from atoll.train.group.ringbytes import gather_words
from atoll.train.group.sumtimer import WHAT, SumTimer
from atoll.train.members.reach import machine

LEAST_MEMBERS = 4  # fewer members can form only one ring
LINKS_SECONDS = 8.0  # for all rounds of measurements together
_PAIR_SECONDS = (0.25, 1.0)  # for one link: the shortest measurement of use, and the longest

_Short = Annotated[str, Meta(max_length=256)]
_Number = Annotated[float, Meta(ge=0)]


class _Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A measured link between two machines, given by their ids: bytes/s and seconds."""

    one: _Short
    other: _Short
    bandwidth: Annotated[float, Meta(gt=0)]
    latency: _Number


class _Where(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's machine. The first member adds what it knows from former rings.

    Attributes:
        machine: the machine's id.
        name: the name of the place for people.
        links: the links that were measured.
        tried: the ids of the machines over which the latest trial was made.
        found: the result of that trial.
        most: how many times as fast as the order of ranks any order over these machines can be at most; 0:
            not known.
    """

    machine: _Short
    name: _Short
    links: Annotated[list[_Link], Meta(max_length=2**16)] = []
    tried: Annotated[list[_Short], Meta(max_length=2**16)] = []
    found: TrialResult = TrialResult()
    most: _Number = 0.0


class _Door(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The address at which a member's links can be measured; port 0: at none."""

    host: _Short = ""
    port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    token: Annotated[bytes, Meta(max_length=64)] = b""


class _Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's measurement in a round: bytes/s and seconds. If the bandwidth is 0 there is none; `reason`
    says why."""

    bandwidth: _Number = 0.0
    latency: _Number = 0.0
    reason: Annotated[str, Meta(max_length=4096)] = ""


@dataclass(frozen=True)
class OrderChoice:
    """The order that was chosen, in words, and the reason."""

    choice: str
    reason: str


class RingOrder:
    """The choice of how a ring's sums pass its members, made whenever the ring is formed.

    Args:
        machine_of: identifies this worker's machine.
        measure_link: measures a link, like `measure` of `net/linkprobe.py`.
        margin: how many times as fast as the order of ranks another order must be to replace it.

    Attributes:
        decision: the choice for the ring as it was formed last; None if there was nothing to choose.
    """

    def __init__(
        self,
        machine_of: Callable[[], str] = machine,
        measure_link: Callable[[str, tuple[str, int], bytes, float], tuple[float, float]] = measure,
        margin: float = MARGIN,
    ) -> None:
        self._machine, self._measure_link, self._margin = machine_of, measure_link, margin
        self._known: dict[tuple[str, str], LinkSpeed] = {}  # by the ids of two machines
        self._failures: list[str] = []
        self._tried: list[str] = []  # the ids of machines over which the latest trial was made
        self._found = TrialResult()  # the result of that trial
        self._most = 0.0  # how many times as fast any order can be there at most; 0: unknown
        self.decision: OrderChoice | None = None

    def open(self, session: Channel, natural: Channel, opened: list[Channel]) -> Sums:
        """Return the channel, or pair of rings, over which the members of `session` sum. A collective of all
        of them.

        Args:
            session: carries the members' reports.
            natural: a channel over the same members, in the order of their ranks. It is closed if another
                channel replaces it.
            opened: takes and loses channels as they are opened and closed, `natural` included.
        """
        self.decision = None
        place = session.place
        if place.world < LEAST_MEMBERS:
            return natural
        name = os.environ.get(SITE_VARIABLE) or os.environ.get(LAB_SITE_VARIABLE) or socket.gethostname()
        links = [_Link(*way, each.bandwidth, each.latency) for way, each in self._known.items()]
        own = _Where(self._machine(), name[:256])
        if place.rank == 0:
            own = _Where(self._machine(), name[:256], links, self._tried, self._found, self._most)
        members = gather_words(session, own, WHAT)
        ids = list(dict.fromkeys(each.machine for each in members))
        if len(ids) == 1:
            return natural
        self._known = {
            (each.one, each.other): LinkSpeed(each.bandwidth, each.latency) for each in members[0].links
        }
        machines = [ids.index(each.machine) for each in members]
        first, timer = members[0], SumTimer(session)
        found, self._most = (
            (first.found, first.most) if set(ids) <= set(first.tried) else (TrialResult(), 0.0)
        )
        self._tried, self._found = ids, found
        plan = self._plan(ids) if len(ids) >= LEAST_MEMBERS else []  # fewer machines form only one ring
        if plan and not self._most:
            timer.fit(natural)
            self._most = timer.most(natural, self._margin)
        if plan and self._most < self._margin:
            reason = (
                f"another order is {self._most:.2f} times as fast at most, since latency stays: at least "
                f"{self._margin:g} is asked for"
            )
            self.decision = OrderChoice(f"natural: {named(range(place.world), place.name_of)}", reason)
            return natural
        self._measure(session, ids, machines, plan)
        numbers = {name: number for number, name in enumerate(ids)}
        known = {
            (min(pair), max(pair)): figures
            for way, figures in self._known.items()
            if len(pair := [numbers[each] for each in way if each in numbers]) == 2
        }
        topology = Topology(machines, known)
        places = [each.name for each in members]

        def connect(purpose: str, order: Order) -> Channel:
            return Channel(place, purpose, natural.timeout, torch.device("cpu"), order)

        trial = OrderTrial(
            place.name_of, timer, connect, natural, opened, topology, places, self._margin, found
        )
        sums = trial.open()
        self._found = trial.found
        self.decision = OrderChoice(trial.choice, "; ".join([*trial.reasons, *self._said(topology)]))
        return sums

    def _said(self, topology: Topology) -> list[str]:
        """Return words for people on the measured links and on failures."""
        said = [_spread(list(topology.links.values()))] if topology.links else []
        return said + self._failures[:2]

    # -- the links ----------------------------------------------------------------------------------------

    def _plan(self, ids: Sequence[str]) -> list[list[Way]]:
        """Return the pairs of machines whose links are not known yet, in rounds of pairs that measure at the
        same time."""
        plan = [
            [pair for pair in pairs if (ids[pair[0]], ids[pair[1]]) not in self._known]
            for pairs in rounds(len(ids))
        ]
        return [pairs for pairs in plan if pairs]

    def _measure(
        self, session: Channel, ids: Sequence[str], machines: Sequence[int], plan: list[list[Way]]
    ) -> None:
        """Let the members measure the links of `plan`. A collective."""
        self._failures = []
        seconds = min(_PAIR_SECONDS[1], LINKS_SECONDS / max(1, len(plan)))
        if seconds < _PAIR_SECONDS[0]:
            self._failures = [f"{len(ids)} machines are too many to measure each link between them"]
        if not plan or self._failures:
            return
        speakers = [machines.index(machine) for machine in range(len(ids))]  # one member of each machine
        place = session.place
        own = machines[place.rank] if place.rank in speakers else -1
        with ExitStack() as stack:
            door = _Door()
            if own >= 0:
                try:
                    server = LinkServer(session.host)
                    stack.callback(server.close)
                    door = _Door(session.host, server.port, server.token)
                except OSError:
                    pass  # the other members report that they could not measure
            doors = gather_words(session, door, WHAT)
            for pairs in plan:
                target = next((other for one, other in pairs if one == own), -1)
                told = _Told()
                if target >= 0:
                    told = self._measure_one(
                        place.name_of(speakers[target]), doors[speakers[target]], seconds
                    )
                for pair, heard in zip(pairs, self._heard(session, pairs, speakers, told), strict=True):
                    way = (ids[pair[0]], ids[pair[1]])
                    if heard.bandwidth > 0:
                        self._known[way] = self._known[way[::-1]] = LinkSpeed(heard.bandwidth, heard.latency)
                    else:
                        self._failures.append(f"a link could not be measured: {heard.reason}")

    @staticmethod
    def _heard(session: Channel, pairs: list[Way], speakers: Sequence[int], told: _Told) -> list[_Told]:
        words = gather_words(session, told, WHAT)
        return [words[speakers[one]] for one, _ in pairs]

    def _measure_one(self, name: int, door: _Door, seconds: float) -> _Told:
        if not door.port:
            return _Told(reason=f"worker {name} could not listen")
        try:
            bandwidth, latency = self._measure_link(
                f"worker {name}", (door.host, door.port), door.token, seconds
            )
        except AtollError as error:
            return _Told(reason=str(error)[:4096])
        return _Told(bandwidth, latency) if bandwidth > 0 else _Told(reason=f"worker {name} took no byte")


def order_for(config: Config, device: torch.device) -> RingOrder | None:
    """Return the choice of the order of a run's rings; None if it is always the order of ranks."""
    return RingOrder() if config.run.ring_order == "measured" and device.type == "cpu" else None


def _spread(links: Sequence[LinkSpeed]) -> str:
    """Describe measured links: "links of 90 Mbit/s to 1 Gbit/s and 0.1 ms to 40 ms"."""
    rates = [format_rate(8 * find(each.bandwidth for each in links)) for find in (min, max)]
    spans = [format_seconds(find(each.latency for each in links)) for find in (min, max)]
    return "links measured: " + " and ".join(
        low if low == high else f"{low} to {high}" for low, high in (rates, spans)
    )
