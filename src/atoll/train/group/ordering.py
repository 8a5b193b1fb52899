"""Choose the order in which a ring's sums pass its members, from links that the members measure.

Gloo sums along the ranks of its process group: each member sends to the next rank. So the ranks of that group
are the order, and the session's ranks stay as they are. Whenever a ring is formed, the members say on which
machine they are. On one machine nothing follows. Over several, one member of each machine measures the links
to the others, in rounds of pairs; `rings/order.py` finds the best order by these figures; and a trial of both
decides whether it takes the place of the order of ranks, and whether a second ring, the other way round, is
worth its connections. NCCL lays rings of its own.

All members decide alike: by figures that all have gathered. Source: docs/planning.md, "The order of a ring".
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
from atoll.rings.order import MARGIN, Figures, Order, Topology, Way, rounds
from atoll.train.group.channel import Channel, Sums
from atoll.train.group.ordertrial import Found, OrderTrial, named
from atoll.train.group.ringbytes import gather_words
from atoll.train.group.sumtimer import WHAT, SumTimer
from atoll.train.members.reach import machine

LEAST_MEMBERS = 4  # of fewer there is only one ring
LINKS_SECONDS = 8.0  # for all rounds of measured links together
_PAIR_SECONDS = (0.25, 1.0)  # for a link: the least that tells anything, and the most

_Short = Annotated[str, Meta(max_length=256)]
_Number = Annotated[float, Meta(ge=0)]


class _Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A link that was measured, between two machines by their ids."""

    one: _Short
    other: _Short
    bandwidth: Annotated[float, Meta(gt=0)]
    latency: _Number


class _Where(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's machine by id, what people call the place, and, of the first member, what it knows: links,
    what a trial over some machines has found, and how many times as fast any order can be there at most (0:
    not known)."""

    machine: _Short
    name: _Short
    links: Annotated[list[_Link], Meta(max_length=2**16)] = []
    tried: Annotated[list[_Short], Meta(max_length=2**16)] = []
    found: Found = Found()
    most: _Number = 0.0


class _Door(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a member's links can be measured; port 0: nowhere."""

    host: _Short = ""
    port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    token: Annotated[bytes, Meta(max_length=64)] = b""


class _Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member measured in a round; no bandwidth: nothing, with the reason."""

    bandwidth: _Number = 0.0
    latency: _Number = 0.0
    reason: Annotated[str, Meta(max_length=4096)] = ""


@dataclass(frozen=True)
class Decision:
    """The order that was chosen, in words, and why."""

    choice: str
    reason: str


class RingOrder:
    """Chooses how a ring's sums pass its members, whenever the ring is formed.

    `decision` is that of the ring as it was formed last; None where there was nothing to choose.

    Args:
        machine_of: identifies this worker's machine.
        measure_link: measures a link, as `net/linkprobe.py`: measure.
        margin: how many times as fast as the order of ranks another one must be, to take its place.
    """

    def __init__(
        self,
        machine_of: Callable[[], str] = machine,
        measure_link: Callable[[str, tuple[str, int], bytes, float], tuple[float, float]] = measure,
        margin: float = MARGIN,
    ) -> None:
        self._machine, self._measure_link, self._margin = machine_of, measure_link, margin
        self._known: dict[tuple[str, str], Figures] = {}  # by the ids of two machines
        self._failures: list[str] = []
        self._tried: list[str] = []  # the ids of machines over which the latest trial was made
        self._found = Found()  # by it
        self._most = 0.0  # times as fast as the order of ranks that any order can be there; 0: not known
        self.decision: Decision | None = None

    def open(self, session: Channel, natural: Channel, opened: list[Channel]) -> Sums:
        """Return what the members of `session` sum with. A collective of all of them.

        Args:
            session: for what the members tell one another.
            natural: a channel over the same members, in the order of their ranks. It is closed if another
                one takes its place.
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
            (each.one, each.other): Figures(each.bandwidth, each.latency) for each in members[0].links
        }
        machines = [ids.index(each.machine) for each in members]
        first, timer = members[0], SumTimer(session)
        found, self._most = (first.found, first.most) if set(ids) <= set(first.tried) else (Found(), 0.0)
        self._tried, self._found = ids, found
        plan = self._plan(ids) if len(ids) >= LEAST_MEMBERS else []  # among fewer there is only one ring
        if plan and not self._most:
            timer.fit(natural)
            self._most = timer.most(natural, self._margin)
        if plan and self._most < self._margin:
            reason = (
                f"another order is {self._most:.2f} times as fast at most, since latency stays: at least "
                f"{self._margin:g} is asked for"
            )
            self.decision = Decision(f"natural: {named(range(place.world), place.name_of)}", reason)
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
        self.decision = Decision(trial.choice, "; ".join([*trial.reasons, *self._said(topology)]))
        return sums

    def _said(self, topology: Topology) -> list[str]:
        """What is to be said of links that were measured."""
        said = [_spread(list(topology.links.values()))] if topology.links else []
        return said + self._failures[:2]

    # -- the links ----------------------------------------------------------------------------------------

    def _plan(self, ids: Sequence[str]) -> list[list[Way]]:
        """Return the pairs of machines whose links are not known yet, in rounds that measure side by side."""
        plan = [
            [pair for pair in pairs if (ids[pair[0]], ids[pair[1]]) not in self._known]
            for pairs in rounds(len(ids))
        ]
        return [pairs for pairs in plan if pairs]

    def _measure(
        self, session: Channel, ids: Sequence[str], machines: Sequence[int], plan: list[list[Way]]
    ) -> None:
        """Have the links of a plan measured."""
        self._failures = []
        seconds = min(_PAIR_SECONDS[1], LINKS_SECONDS / max(1, len(plan)))
        if seconds < _PAIR_SECONDS[0]:
            self._failures = [f"{len(ids)} machines are too many to measure each link between them"]
        if not plan or self._failures:
            return
        speakers = [machines.index(machine) for machine in range(len(ids))]  # one member of each
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
                    pass  # the others say that they could not measure this one's links
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
                        self._known[way] = self._known[way[::-1]] = Figures(heard.bandwidth, heard.latency)
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
    """Return what chooses the order of a run's rings; None where it is that of the ranks."""
    return RingOrder() if config.run.ring_order == "measured" and device.type == "cpu" else None


def _spread(links: Sequence[Figures]) -> str:
    """Describe measured links: "links of 90 Mbit/s to 1 Gbit/s and 0.1 ms to 40 ms"."""
    rates = [format_rate(8 * find(each.bandwidth for each in links)) for find in (min, max)]
    spans = [format_seconds(find(each.latency for each in links)) for find in (min, max)]
    return "links measured: " + " and ".join(
        low if low == high else f"{low} to {high}" for low, high in (rates, spans)
    )
