"""Compose: the one place that decides which objects a session is built from.

The way in which a worker has joined its run decides with whom it trains: the shards of a server, peers, a
ring, or nobody. `compose` makes the objects for that way and returns them as a `Runtime`. The session uses
them through their common interfaces, and never asks for their kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from atoll.axes.cells import Cell, GroupKind, Others, cell_of, choices_in
from atoll.axes.choices import Choices
from atoll.axes.needs import check, refusal
from atoll.core.config import STRATEGIES, Config
from atoll.core.events import SharesChosen
from atoll.core.heap import keep_freed_memory
from atoll.core.memory import Memory
from atoll.exchange.codecs import codec_named
from atoll.groups.shares import ShareChange
from atoll.tensors.steptrials import why_not_dense
from atoll.tensors.stepunit import Unit, unit_of
from atoll.train.api.device import device_of
from atoll.train.api.meter import Meter
from atoll.train.api.news import GroupNews, NodeNews, RingNews
from atoll.train.api.owngroup import among_all, at_shards, in_hierarchy, of_node, of_replica
from atoll.train.api.pace import Pace
from atoll.train.api.place import Group, Place, Seat, is_first
from atoll.train.api.records import Records
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.data.groupshares import GroupShares
from atoll.train.data.sharereports import ShareReports, workers_in_words
from atoll.train.data.sources import (
    DealtData,
    LeasedData,
    NodesData,
    SamplerSource,
    UnevenShares,
    least_for,
)
from atoll.train.gradients.memory import Around, ServedTiers, Tiers, by_itself
from atoll.train.group.hierarchy import Hierarchy
from atoll.train.group.inner import AnyRing, InnerRing, Replicas
from atoll.train.group.members import WorkerMembers
from atoll.train.group.ordering import order_for
from atoll.train.group.rendezvous import HubRing
from atoll.train.group.rounds import Ring
from atoll.train.members.attendance import Attendance
from atoll.train.members.entering import Entrance, RingEntrance, ServedEntrance
from atoll.train.members.groupmeeting import GroupJudge, GroupMeeting, OwnCall
from atoll.train.members.hub_client import HubClient
from atoll.train.members.logmeeting import LogMeeting
from atoll.train.members.meetings import WorkerMeeting
from atoll.train.members.nodesmeeting import NodesMeeting, NodesRoster
from atoll.train.members.regrouping import GroupState, Leases, MoveParts, Regrouping
from atoll.train.members.ringmeeting import RingMeeting
from atoll.train.members.ringstate import RingState
from atoll.train.members.workers import Workers
from atoll.train.sync.outside import Coded, synchronizer_named
from atoll.train.sync.peers import Peers
from atoll.train.sync.peersintiers import LentTiers
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.replicas import Replicated
from atoll.train.sync.servedmodels import ServedModels
from atoll.train.sync.service import Service
from atoll.train.sync.strategies import Alone, OverRing, Served, Strategy, exchange_alone, exchange_in_group
from atoll.train.sync.together import Together
from atoll.train.sync.uplink import UplinkChoice

# A worker's membership in its run: with shards, in a ring at a hub, as a node's device; None: by torchrun, or
# alone.
RunMembership: TypeAlias = Service | HubRing | NodeWorker | None


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The objects of one session.

    Args:
        others: the kind of others with which this worker's group exchanges.
        group: "ring" if the worker first sums gradients on a ring, else "solo".
        device: the device on which the worker trains.
        workers: the calls that all workers make.
        state: the state of training.
        records: the worker's journals and warnings.
        meter: measures iterations.
        strategy: reduces a model's gradients and steps the model.
        source: makes samplers.
        make_tiers: makes the place of a model in budgets, given the budgets.
        tell_of_start: records the choices with which the worker begins.
        own_group: returns the group to which this worker belongs now.
        contributor: returns the names of the workers that contribute as one with this one now.
        members: returns the number of workers that share a batch now.
        together: True if all workers make each step together, so that samples count as they are trained.
        keeps_heap: True if freed memory stays with the process.
        pace: this worker's computing time per sample; None if it is not needed.
        groups: the number of groups with which the run begins.
        entrance: lets workers in that come late; None if none can.
        ring: the ring of all workers; None without one.
        group_ring: the ring of this worker's group, under a parameter server; None without one.
        regrouping: moves this worker between groups; None without groups at shards.
        member: this worker's membership in its run.
        hub: the connection to the hub; None without a hub.
        figures: returns further fields for a step's record.
        staleness: returns the staleness of the latest step, in steps; None if it is not measured.
        drain: waits, as the session ends, until all contributions are applied; its argument names the moment.
        site: the name of this worker's site, if sites have shards of their own; else empty.
        shares: this worker's reports on its speed, by which batches are dealt; None without them.
    """

    others: Others
    group: GroupKind
    device: torch.device
    workers: Workers
    state: TrainingState
    records: Records
    meter: Meter
    strategy: Strategy
    source: SamplerSource
    make_tiers: Callable[[Memory], Tiers]
    tell_of_start: Callable[[], None]
    own_group: Callable[[], Group]
    contributor: Callable[[], Sequence[int]]
    members: Callable[[], int]
    together: bool
    keeps_heap: bool
    pace: Pace | None = None
    groups: int = 1
    entrance: Entrance | None = None
    ring: Ring | None = None
    group_ring: Ring | None = None
    regrouping: Regrouping | None = None
    member: RunMembership = None
    hub: HubClient | None = None
    figures: Callable[[], dict[str, Any]] = dict
    staleness: Callable[[], float | None] = lambda: None
    drain: Callable[[str], None] = lambda _where: None
    site: str = ""
    shares: ShareReports | None = None

    @property
    def late(self) -> bool:
        """True on a worker that came when the run was under way and has not entered."""
        return self.entrance is not None and self.entrance.late

    def counted_samples(self) -> float | None:
        """Return the samples of all workers in the first model's iterations that count, as far as this worker
        knows; None: this worker cannot know that number."""
        prepared = self.state.prepared
        if not prepared or not prepared[0].counts_all:
            return None
        reducer = prepared[0].reducer
        return max(reducer.consumed, reducer.counted_at_shards)

    def cell(self, config: Config, memory: Memory | None = None) -> Cell:
        """Return the choices by which a model is trained here, under the budgets `memory`."""
        return cell_of(config, self.others, self.group, memory)

    def choices(self, config: Config, given: Memory | None, **facts: Any) -> Choices:
        """Return the choices by which the next model is trained, under the budgets `given` or those of
        `[memory]`, with further `facts` of it."""
        memory = config.memory if given is None and config.memory.is_given else given
        known = {"late": self.late, "site": self.site, "models": len(self.state.prepared), **facts}
        return choices_in(self.cell(config, memory), config, known, given)

    def unit(
        self,
        config: Config,
        given: Memory | None,
        optimizer: torch.optim.Optimizer,
        asked: str | None,
        *,
        again: bool,
        bf16: str | None = None,
    ) -> Unit:
        """Return the unit in which `optimizer` steps, under the budgets `given`.

        `asked` is the script's own word. `again`: its model was prepared before. `bf16`: how bfloat16
        parameters are stepped in float32. Raises UserError where the table of needs refuses the optimizer.
        """
        unit = unit_of(optimizer, asked, self.device)
        check("prepare", self.choices(config, given, again=again, bf16=bf16, **unit.facts))
        if unit.by_tensor:
            self.check_sparse(config, given, optimizer, again=again, sparse=False)
        return unit

    def check_sparse(
        self,
        config: Config,
        given: Memory | None,
        optimizer: torch.optim.Optimizer,
        *,
        again: bool,
        sparse: bool = True,
    ) -> None:
        """Raise PrepareError if the steps are made elsewhere, and dense gradients cannot take the place of
        sparse ones there.

        `again`: its model was prepared before. `sparse`: the model has sparse gradients. Else the question is
        only whether the optimizer takes dense ones.
        Raises the optimizer's own error if it takes no sparse gradient.
        """
        known = {"optimizer": type(optimizer).__name__, "again": again}
        if refusal("prepare", self.choices(config, given, sparse="untried", **known)) is not None:
            why = why_not_dense(optimizer, sparse=sparse)
            if why:
                check("prepare", self.choices(config, given, sparse=why, **known))

    def tiers(self, config: Config, given: Memory | None, **facts: Any) -> Tiers | None:
        """Return the place of the next model in budgets: those `given`, else those of `[memory]`. None: no
        budgets. `facts` are those of the table of needs.

        Raises UserError, on all workers alike, for a model that cannot be trained by the run's choices, and
        for budgets that cannot be read.
        """
        memory = config.memory if given is None and config.memory.is_given else given
        check("prepare", self.choices(config, given, **facts))
        return None if memory is None else self.make_tiers(memory)


def compose(config: Config, place: Place, member: RunMembership) -> Runtime:
    """Make the objects of a session.

    Raises ConfigError for more groups than the run has workers, and the errors of the meeting of a ring.

    Args:
        config: the run's configuration.
        place: this worker's place.
        member: this worker's membership in the run.
    """
    device = device_of(place)
    if isinstance(member, Service):
        return _with_shards(config, place, device, member)
    if isinstance(member, NodeWorker):
        return _with_peers(config, device, member)
    return _with_ring(config, place, device, member)


def _with_ring(config: Config, place: Place, device: torch.device, member: HubRing | None) -> Runtime:
    """Return the objects of a worker in a ring, or of one that is alone.

    Under a strategy from another package each worker, or each group of workers, trains a replica. Then
    gradients are summed within the group, and values are exchanged over the ring of all workers.
    """
    timeout, name = config.timeout_seconds, config.run.strategy
    make = hierarchy = order = replicas = ring = None
    if name not in STRATEGIES:
        make = synchronizer_named(name)
        replicas = Replicas(config.groups.count, place.world if member is None else member.welcome.workers)
    elif name == "hierarchical":
        late = member is not None and member.late
        hierarchy = Hierarchy(config.groups.count, None if late else place.world)
    else:
        order = order_for(config, device)
    seat = Seat(place, late=member is not None and member.late)
    state = TrainingState(place, device, config.sync.buffers)
    records = Records(config, seat, state, notices=None if member is None else member.hub.notices)
    if member is not None or place.store:
        ring = Ring(
            seat,
            device,
            timeout,
            member,
            hierarchy,
            order=order,
            compares=True,
            inside=replicas,
            state=RingState(state),
            told=RingNews(seat, state, records, hierarchy, order).ring_changed,
        )
        state.rank, state.world = ring.rank, ring.world  # members may have been lost meanwhile
    workers = Workers(RingMeeting(seat, ring))
    around: Around = by_itself
    own_group: Callable[[], Group] = partial(among_all, state)
    summing: AnyRing | None = ring  # the ring over which gradients are summed
    if replicas is not None:
        summing = InnerRing(ring, replicas) if ring is not None and replicas.grouped else None
    strategy: Strategy = Alone() if summing is None else OverRing(summing)
    if hierarchy is not None:
        own_group = partial(in_hierarchy, hierarchy, workers, state)
    if ring is not None and make is not None and replicas is not None:
        coder = Coded(codec_named(config.sync.codec))
        strategy = replicated = Replicated(strategy, make, ring, replicas, workers, coder)
        own_group, around = partial(of_replica, replicas), replicated.around

    meter = Meter(device, workers, state)
    dealing: UnevenShares | None = None
    reports: ShareReports | None = None
    if ring is not None and replicas is None:
        dealing, reports = _shares(
            config, partial(_name_in, ring), device, meter, records, fixed=member is None
        )

    def tell_of_start() -> None:
        if member is not None:
            records.decided("place", f"of {place.world}, by the hub", member.describe())
        alone = "none: one worker"
        if replicas is not None:
            said = alone
            if ring is not None and not seat.late:
                said = f"{len(replicas)} train replicas: {replicas.describe()}"
            records.decided("contributors", said, f"strategy {name!r}, groups.count")
        else:
            backend = "gloo" if device.type == "cpu" else "nccl"
            kind = alone if ring is None else f"{backend} over {state.world} workers"
            records.decided("ring", kind, "the backend that c10d has for this device")
        records.tell_of_groups(hierarchy)
        if is_first(seat):
            records.tell_of_order(order)
        records.tell_of_confirmations(ring)

    meetings = itertools.count()  # of members, for a model or for one that has changed

    def make_tiers(memory: Memory) -> Tiers:
        if ring is None or summing is None:
            return Tiers(memory, None, around=around)
        groups = () if hierarchy is None else hierarchy.ranks
        return Tiers(
            memory,
            lambda: WorkerMembers(summing.place, timeout, next(meetings), groups, summing),
            of_group="" if summing is ring and hierarchy is None else " in its group",
            ring=summing,
            around=around,
        )

    return Runtime(
        others="local" if ring is None or replicas is None else "replicas",
        group="solo" if summing is None else "ring",
        device=device,
        workers=workers,
        state=state,
        records=records,
        meter=meter,
        strategy=strategy,
        source=DealtData(state, partial(least_for, config.sync, state), dealing),
        make_tiers=make_tiers,
        tell_of_start=tell_of_start,
        own_group=own_group,
        contributor=partial(_contributor, workers, None),
        members=lambda: state.world,
        together=True,
        keeps_heap=device.type == "cpu" and keep_freed_memory(),
        groups=1 if hierarchy is None else hierarchy.groups,
        entrance=None if ring is None else RingEntrance(ring),
        ring=ring,
        member=member,
        hub=None if member is None else member.hub,
        shares=reports,
    )


def _shares(
    config: Config,
    name_of: Callable[[int], int],
    device: torch.device,
    meter: Meter,
    records: Records,
    *,
    fixed: bool,
    site: str = "",
    of_group: bool = False,
) -> tuple[UnevenShares, ShareReports | None]:
    """Return the maker of uneven shares, and the reports that it follows; None: it follows none.

    `name_of` returns a worker's name, given its rank. `fixed`: no member comes or goes. At a `site` workers
    hear of their own site's alone. `of_group`: parts are those of one group among several.
    """

    def names(world: int) -> list[int]:
        return [name_of(rank) for rank in range(world)]

    by_speed = config.sync.shares == "auto"
    if not by_speed and (config.sync.memory_cap != "auto" or site or of_group):
        return UnevenShares(config.sync, names, None, records.warn, fixed=fixed), None

    def chosen(choice: str, reason: str, change: ShareChange) -> None:
        parts = dict(zip(names(len(change.parts)), change.parts.tolist(), strict=True))
        speeds = dict(zip(parts, change.speeds.tolist(), strict=True))
        if of_group:
            choice += f", for {workers_in_words(list(parts))}"
        records.emit(SharesChosen, what="shares", choice=choice, reason=reason, parts=parts, speeds=speeds)

    settle = None if device.type == "cpu" else lambda: torch.accelerator.current_stream(device).synchronize()
    reports = ShareReports(
        by_speed=by_speed,
        waited=lambda: meter.seconds_waited,
        chosen=chosen,
        name_of=name_of,
        settle=settle,
    )
    return UnevenShares(config.sync, names, reports, records.warn, fixed=fixed), reports


def _with_peers(config: Config, device: torch.device, node: NodeWorker) -> Runtime:
    """Return the objects of a node's device, among other nodes."""
    roster = NodesRoster(node)
    workers = Workers(NodesMeeting(node, roster))
    state = TrainingState(workers.place, device, config.sync.buffers)
    records = Records(config, roster, state, node=node)
    pace = Pace(config.groups.probe)
    peers = Peers(node, workers, state, lambda: pace.latest, config.sync.stale_max, records.warn)

    return Runtime(
        others="peers",
        group="ring" if node.devices.count > 1 else "solo",
        device=device,
        workers=workers,
        state=state,
        records=records,
        meter=Meter(device, workers, state),
        strategy=peers,
        source=NodesData(state, peers, partial(least_for, config.sync, state)),
        make_tiers=lambda memory: LentTiers(memory, config, peers, node, workers),
        tell_of_start=lambda: NodeNews(node, records).begin(config),
        own_group=partial(of_node, node, state),
        contributor=lambda: node.introduction.workers_of(node.node),
        members=lambda: state.world,
        together=True,
        keeps_heap=device.type == "cpu" and keep_freed_memory(),
        pace=pace,
        groups=node.world if node.has_groups else 1,
        entrance=peers,
        member=node,
        figures=peers.figures,
        drain=peers.drain,
    )


def _with_shards(config: Config, place: Place, device: torch.device, service: Service) -> Runtime:
    """Return the objects of a worker of a parameter server, by itself or in a group."""
    attendance = Attendance(place, late=service.shards.late, grouped=service.rings is not None)
    state = TrainingState(place, device, config.sync.buffers)
    records = Records(config, attendance, state, service, notices=service.hub.notices)
    pace, models, leases = Pace(config.groups.probe), ServedModels(), Leases(service.hub)
    together = config.sync.consistency == "bsp"
    ring: Ring | None = None
    regrouping: Regrouping | None = None
    meeting: WorkerMeeting
    meeting = at_log = LogMeeting(attendance, service.shards, models)
    if service.rings is not None:
        order, call = order_for(config, device), OwnCall()
        news = GroupNews(attendance, state, records, pace, order)
        ring = Ring(
            Seat(service.rings.place),
            device,
            config.timeout_seconds,
            service.rings,
            order=order,
            compares=True,
            state=GroupState(state, service.samplers, records.warn),
            told=news.ring_changed,
            judge=GroupJudge(attendance.place, service.shards, call),
            mark=service.mark,
        )
        parts = MoveParts(
            hub=service.hub,
            ring=ring,
            shards=service.shards,
            attendance=attendance,
            state=state,
            samplers=service.samplers,
            leases=leases,
            models=models,
        )
        regrouping = Regrouping(parts, news.moved)
        # Under bsp all workers leave their groups at one iteration, and none inside a call.
        leaves = None if together else regrouping
        meeting = GroupMeeting(attendance, at_log, models, ring, leaves, call)
    workers = Workers(meeting)
    fixed = bool(service.site)  # at a site data is not dealt anew
    entrance = ServedEntrance(
        service.shards,
        attendance,
        workers,
        state,
        compare=models.compare,
        entered=models.entered,
        told_members=service.told_members,
        told_unlike=partial(records.warn_once, "unlike hyperparameters"),
        elastic=together and not fixed,
        fixed=together and fixed,
    )

    def members() -> int:
        if together:
            return state.world
        # The shards know groups, but not the groups' members, of which the hub tells.
        return (service.members if ring is None else service.hub.workers) or state.world

    meter = Meter(device, workers, state, service, ring)
    dealing: UnevenShares | None = None
    reports: ShareReports | None = None
    if together:
        name_of, site = entrance.name_of, service.site
        dealing, reports = _shares(config, name_of, device, meter, records, fixed=fixed, site=site)
    least = partial(least_for, config.sync, state)
    source: SamplerSource = DealtData(state, least, dealing)
    if not together:
        in_group: Callable[..., GroupShares] | None = None
        if ring is not None:
            name_of = partial(_name_in, ring)
            dealing, reports = _shares(config, name_of, device, meter, records, fixed=False, of_group=True)
            in_group = partial(dealing.in_group, ring, members, least)
        # In ssp, and at a site, others may wait for this worker to go on, so it must not wait for data.
        waits = config.sync.consistency == "asp" and not service.site
        wait = 3 * service.welcome.patience if waits else 0.0
        source = LeasedData(state, leases, service.samplers, members, wait, records.warn_once, in_group)
    own_group: Callable[[], Group] = partial(among_all, state)
    make_exchange, of_group = exchange_alone(service.site), False
    if ring is not None and regrouping is not None:
        own_group = partial(at_shards, regrouping, ring)
        said = Together(ring, service.used, grouping=regrouping.known, move=regrouping.move)
        make_exchange = exchange_in_group(said, UplinkChoice(config.sync.uplink, ring))
        of_group = True
    served = Served(service, workers, config, entrance, models, make_exchange, of_group=of_group)

    def tell_of_start() -> None:
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
        meter=meter,
        strategy=served,
        source=source,
        make_tiers=lambda memory: ServedTiers(memory, served, config),
        tell_of_start=tell_of_start,
        own_group=own_group,
        contributor=partial(_contributor, workers, ring),
        members=members,
        together=together,
        keeps_heap=service.keeps_memory,
        pace=pace,
        entrance=entrance,
        group_ring=ring,
        regrouping=regrouping,
        member=service,
        hub=service.hub,
        staleness=lambda: None if together else service.staleness,
        site=service.site,
        shares=reports,
    )


def _name_in(ring: Ring, rank: int) -> int:
    """Return the name of the ring's member of this rank now."""
    return ring.place.name_of(rank)


def _contributor(workers: Workers, ring: Ring | None) -> list[int]:
    """Return the names of the workers that contribute as one with this one: those of its group's ring."""
    if ring is None:
        return [workers.place.name]
    return [_name_in(ring, rank) for rank in range(ring.world)]
