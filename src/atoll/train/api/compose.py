"""Compose: the one place that decides which objects a session is built from.

How a worker has joined its run says what it trains with: the shards of a server, peers, a ring, or nobody.
`compose` makes the objects for that and gives them as a `Runtime`. The session uses them through what they
have in common, and asks nobody what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from atoll.axes.cells import Cell, GroupKind, Others, cell_of, choices_in
from atoll.axes.needs import check
from atoll.core.config import STRATEGIES, Config
from atoll.core.heap import keep_freed_memory
from atoll.core.memory import Memory
from atoll.exchange.codecs import codec_named
from atoll.train.api.device import device_of
from atoll.train.api.meter import Meter
from atoll.train.api.news import GroupNews, NodeNews, RingNews
from atoll.train.api.pace import Pace
from atoll.train.api.place import Place
from atoll.train.api.records import Records
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.gradients.memory import Around, ServedTiers, Tiers, by_itself
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.inner import InnerRing, Replicas
from atoll.train.group.members import WorkerMembers
from atoll.train.group.ordering import order_for
from atoll.train.group.rendezvous import HubRing
from atoll.train.group.rounds import Ring
from atoll.train.members.entering import Entrance, RingEntrance, ServedEntrance
from atoll.train.members.groupworkers import GroupWorkers
from atoll.train.members.hub_client import HubClient
from atoll.train.members.peersmeetings import NodeWorkers
from atoll.train.members.regrouping import GroupState, Leases, Parts, Regrouping
from atoll.train.members.served_workers import ServedWorkers
from atoll.train.members.workers import Workers
from atoll.train.sync.outside import Coded, synchronizer_named
from atoll.train.sync.peersintiers import PeersInTiers
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.replicas import Replicated
from atoll.train.sync.service import Service
from atoll.train.sync.strategies import Alone, Grouped, OverRing, Served, Strategy

# How a worker has joined its run: with shards, with a ring at a hub, as a node's device; None: by torchrun,
# or alone.
Member: TypeAlias = Service | HubRing | NodeWorker | None


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The objects of one session.

    Args:
        others: through what this worker's group meets others.
        group: whether the worker sums gradients on a ring first.
        strategy: who reduces a model's gradients, and who steps it.
        make_tiers: gives a model's budgets a place, for the session's model of that number.
        tell_of_start: tells the records what the worker trains with, and has the run tell through them.
        together: True where all workers make each step together, so that samples count as they are trained.
        keeps_heap: True where memory that is freed stays with the process.
        leases: what this worker leases of its data; None where data is dealt.
        entrance: how workers come late; None where nobody can.
        hub: of a run with shards, or of a ring whose workers may die alone.
    """

    others: Others
    group: GroupKind
    device: torch.device
    workers: Workers
    state: TrainingState
    records: Records
    meter: Meter
    pace: Pace
    strategy: Strategy
    make_tiers: Callable[[Memory, int], Tiers]
    tell_of_start: Callable[[], None]
    together: bool
    keeps_heap: bool
    entrance: Entrance | None = None
    leases: Leases | None = None
    ring: Ring | None = None
    hierarchy: Hierarchy | None = None
    group_ring: Ring | None = None
    regrouping: Regrouping | None = None
    replicas: Replicas | None = None
    hub: HubClient | None = None
    service: Service | None = None
    node: NodeWorker | None = None
    peers: PeersInTiers | None = None

    @property
    def late(self) -> bool:
        """True on a worker that came when the run was under way, and has not entered."""
        return self.entrance is not None and self.entrance.late

    def cell(self, config: Config, *, budgets: bool = False) -> Cell:
        """The choices by which a model is trained here."""
        return cell_of(config, self.others, self.group, budgets=budgets)

    def tiers(self, config: Config, given: Memory | None) -> Tiers | None:
        """The place of the next model's budgets: as `given`, else as `[memory]` says. None: no budgets.

        Raises UserError, on all workers alike, for a model that cannot be trained by the run's choices, and
        for budgets that cannot be read.
        """
        cell = self.cell(config, budgets=given is not None or config.memory.is_given)
        number = len(self.state.prepared)
        site = "" if self.service is None else self.service.site
        facts = {"late": self.late, "site": site, "models": number}
        check("prepare", choices_in(cell, config, facts, given))
        if not cell.budgets:
            return None
        return self.make_tiers(config.memory if given is None else given, number)


def compose(config: Config, place: Place, member: Member) -> Runtime:
    """Make what a session is built from.

    Args:
        config: of the run.
        place: this worker's.
        member: how the worker has joined the run.

    Raises ConfigError for more groups than the run has workers, and what the meeting of a ring raises.
    """
    device = device_of(place)
    if isinstance(member, Service):
        return _with_shards(config, place, device, member)
    if isinstance(member, NodeWorker):
        return _with_peers(config, device, member)
    if config.run.strategy not in STRATEGIES:
        return _with_replicas(config, place, device, member)
    return _with_ring(config, place, device, member)


def _with_ring(config: Config, place: Place, device: torch.device, member: HubRing | None) -> Runtime:
    """A ring's worker, or one that is alone."""
    timeout, hierarchy = config.timeout_seconds, None
    if config.run.strategy == "hierarchical":
        late = member is not None and member.late
        hierarchy = Hierarchy(config.groups.count, None if late else place.world)
    ring = None
    order = order_for(config, device) if hierarchy is None else None
    if member is not None or place.store:
        ring = Ring(place, device, timeout, member, hierarchy, order=order, compares=True)
    workers = Workers(place, ring)
    state = TrainingState(workers, device)
    records = Records(config, workers, state)
    strategy: Strategy = Alone()
    if ring is not None:
        news = RingNews(workers, state, records, ring, hierarchy, order)
        ring.trains(state, news.ring_changed)
        strategy = OverRing(ring)

    def tell_of_start() -> None:
        if member is not None:
            records.decided("place", f"of {place.world}, by the hub", member.describe())
        kind = "none: one worker"
        if ring is not None:
            kind = f"{'gloo' if device.type == 'cpu' else 'nccl'} over {state.world} workers"
        records.decided("ring", kind, "the backend that c10d has for this device")
        records.tell_of_groups(hierarchy)
        if workers.is_first:
            records.tell_of_order(order)
        records.tell_of_confirmations(ring)

    def make_tiers(memory: Memory, number: int) -> Tiers:
        if ring is None:
            return Tiers(memory, None)
        groups = () if hierarchy is None else hierarchy.ranks
        return Tiers(
            memory,
            lambda: WorkerMembers(ring.place, timeout, number, groups, ring),
            of_group=" in its group" if config.run.strategy == "hierarchical" else "",
            ring=ring,
        )

    return Runtime(
        others="local",
        group="solo" if ring is None else "ring",
        device=device,
        workers=workers,
        state=state,
        records=records,
        meter=Meter(device, workers, state),
        pace=Pace(config.groups.probe),
        strategy=strategy,
        make_tiers=make_tiers,
        tell_of_start=tell_of_start,
        together=True,
        keeps_heap=device.type == "cpu" and keep_freed_memory(),
        entrance=None if ring is None else RingEntrance(ring),
        hub=None if member is None else member.hub,
        ring=ring,
        hierarchy=hierarchy,
    )


def _with_replicas(config: Config, place: Place, device: torch.device, member: HubRing | None) -> Runtime:
    """A worker whose contributor trains a replica, under a strategy from outside."""
    make = synchronizer_named(config.run.strategy)
    ring, timeout = None, config.timeout_seconds
    replicas = Replicas(config.groups.count, place.world if member is None else member.welcome.workers)
    if member is not None or place.store:
        ring = Ring(place, device, timeout, member, compares=True, inside=replicas)
    workers = Workers(place, ring)
    state = TrainingState(workers, device)
    records = Records(config, workers, state)
    strategy: Strategy = Alone()
    grouped = bool(config.groups.count) and ring is not None
    around: Around = by_itself
    inner: InnerRing | None = None
    if ring is not None:
        news = RingNews(workers, state, records, ring, None, None)
        ring.trains(state, news.ring_changed)
        inner = InnerRing(ring, replicas) if grouped else None
        alone = Alone() if inner is None else OverRing(inner)
        coder = Coded(codec_named(config.sync.codec))
        strategy = replicated = Replicated(alone, make, ring, replicas, workers, coder)
        around = replicated.around

    def tell_of_start() -> None:
        if member is not None:
            records.decided("place", f"of {place.world}, by the hub", member.describe())
        said = "none: one worker"
        if ring is not None and not ring.outside:
            said = f"{len(replicas)} train replicas: {replicas.describe()}"
        records.decided("contributors", said, f"strategy {config.run.strategy!r}, groups.count")
        records.tell_of_confirmations(ring)

    def make_tiers(memory: Memory, number: int) -> Tiers:
        if inner is None:
            return Tiers(memory, None, around=around)
        return Tiers(
            memory,
            lambda: WorkerMembers(inner.place, timeout, number, ring=inner),
            of_group=" in its group",
            ring=inner,
            around=around,
        )

    return Runtime(
        others="replicas" if ring is not None else "local",
        group="ring" if grouped else "solo",
        device=device,
        workers=workers,
        state=state,
        records=records,
        meter=Meter(device, workers, state),
        pace=Pace(config.groups.probe),
        strategy=strategy,
        make_tiers=make_tiers,
        tell_of_start=tell_of_start,
        together=True,
        keeps_heap=device.type == "cpu" and keep_freed_memory(),
        entrance=None if ring is None else RingEntrance(ring),
        hub=None if member is None else member.hub,
        ring=ring,
        replicas=replicas if ring is not None else None,
    )


def _with_peers(config: Config, device: torch.device, node: NodeWorker) -> Runtime:
    """A device of a node, among other nodes."""
    workers = NodeWorkers(node)
    state = TrainingState(workers, device)
    records = Records(config, workers, state, node=node)
    pace = Pace(config.groups.probe)
    peers = PeersInTiers(
        node, workers, state, lambda: pace.latest, config.sync.stale_max, lambda line: records.warn(line)
    )

    return Runtime(
        others="peers",
        group="ring" if node.devices.count > 1 else "solo",
        device=device,
        workers=workers,
        state=state,
        records=records,
        meter=Meter(device, workers, state),
        pace=pace,
        strategy=peers,
        make_tiers=lambda memory, _number: peers.tiers(memory, config),
        tell_of_start=lambda: NodeNews(node, records).begin(config),
        together=True,
        keeps_heap=device.type == "cpu" and keep_freed_memory(),
        entrance=peers,
        node=node,
        peers=peers,
    )


def _with_shards(config: Config, place: Place, device: torch.device, service: Service) -> Runtime:
    """A worker of a parameter server, by itself or in a group."""
    ring = service.ring
    in_group = None if ring is None else GroupWorkers(place, service.shards, ring)
    workers = in_group or ServedWorkers(place, service.shards)
    state = TrainingState(workers, device)
    records = Records(config, workers, state, service)
    pace = Pace(config.groups.probe)
    together = config.sync.consistency == "bsp"
    fixed = bool(service.site) or ring is not None  # data is not dealt anew
    entrance = ServedEntrance(
        service.shards,
        workers,
        state,
        entered=lambda: served.entered(),
        told_members=service.told_members,
        told_unlike=partial(records.warn_once, "unlike hyperparameters"),
        elastic=together and not fixed,
        fixed=together and fixed,
    )
    leases = Leases(service.hub)
    regrouping = None
    served: Served
    if ring is None or in_group is None:
        served = Served(service, workers, config, entrance)
    else:
        grouped = Grouped(service, workers, config, entrance, ring, lambda: moves)
        news = GroupNews(in_group, state, records, pace, ring, service.order)
        parts = Parts(
            hub=service.hub,
            ring=ring,
            shards=service.shards,
            workers=in_group,
            state=state,
            samplers=service.samplers,
            leases=leases,
            exchange=lambda: grouped.exchange,
            arrive=grouped.arrive,
        )
        moves = regrouping = Regrouping(parts, partial(news.moved, lambda: grouped.exchange.uplink))
        ring.trains(
            GroupState(state, ring, service.samplers, records.warn),
            lambda changed: news.ring_changed(changed, moves.contributor),
        )
        in_group.gather_members = grouped.gather_members
        if not together:  # else all leave their groups at one iteration
            in_group.is_called, in_group.move = moves.is_called, moves.answer
        served = grouped

    def tell_of_start() -> None:
        service.warn = records.warn
        records.decided("server", service.describe(config), "run.strategy, run.shards and sync.consistency")
        if config.link.transport != "tcp":
            records.decided("link", service.describe_link(config), "link.transport")

    return Runtime(
        others="shards",
        group="solo" if ring is None else "ring",
        device=device,
        workers=workers,
        state=state,
        records=records,
        meter=Meter(device, workers, state, service, ring),
        pace=pace,
        strategy=served,
        make_tiers=lambda memory, _number: ServedTiers(memory, served, config),
        tell_of_start=tell_of_start,
        together=together,
        keeps_heap=service.keeps_memory,
        entrance=entrance,
        leases=None if together else leases,
        group_ring=ring,
        regrouping=regrouping,
        hub=service.hub,
        service=service,
    )
