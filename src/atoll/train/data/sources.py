"""The sources of a session's samplers: a deal that all workers know, nodes' contributions, or the hub's
leases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core.config import Sync
from atoll.core.errors import UserError
from atoll.groups.shares import Whole, are_held, even, scaled
from atoll.train.checkpoint.resume import AnySampler, TrainingState
from atoll.train.data.costs import Costs
from atoll.train.data.groupshares import GroupShares, MemberRing
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler, ShardedSampler
from atoll.train.data.sharereports import ShareReports
from atoll.train.data.shares import ShareSchedule
from atoll.train.members.regrouping import Leases
from atoll.train.sync.peers import Peers
from atoll.wire.messages import MOST_CUT

WasLeft = Callable[[object], bool]
Fill = Callable[[], int]  # returns the samples of a fill
Arguments = Mapping[str, Any]  # seed, shuffle and drop_last


class SamplerWatch(Protocol):
    """The session's watch on its samplers (`train/data/batches.py`: SampledBatches)."""

    def given_by(self, sampler: AnySampler) -> None:
        """Note that `sampler` is about to give an index."""

    def taken(self, sampler: LeasedSampler, /) -> tuple[object | None, int]:
        """Return the latest loop over a DataLoader that has this sampler, and the batches that it gave."""


class SamplerSource(Protocol):
    """The maker of this worker's samplers, which it adds to the session's state.

    `watch` hears of each index that a sampler gives.
    """

    def sampler(
        self, dataset: Sized, order: Arguments, watch: SamplerWatch
    ) -> ShardedSampler | LeasedSampler: ...

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        watch: SamplerWatch,
        was_left: WasLeft,
        costs: Costs | None = None,
    ) -> BatchesSampler | LeasedBatches | PeerBatches:
        """Return this worker's part of batches of `whole` samples, by the samples' `costs` if there are any.
        A loader fetches up to `ahead` batches before their use. `was_left` says of what is returned whether
        the latest loop over it was left before its end."""

    def catch_up(self) -> None:
        """Bring this worker to the place of the others, between two loops over a loader."""


class UnevenShares:
    """The maker of the schedules by which batches are dealt in uneven parts.

    Parts are even, or those that the configuration gives each worker, or for the first batches alone follow
    the workers' `reports` on their speed. No part is above the worker's cap.

    Args:
        sync: the configuration.
        names: returns the members' names, by rank, given their number.
        reports: the workers' reports; None: parts do not follow them.
        warn: prints a line for people.
        fixed: True if the members are those with which the run began.
    """

    def __init__(
        self,
        sync: Sync,
        names: Callable[[int], list[int]],
        reports: ShareReports | None,
        warn: Callable[[str], None],
        *,
        fixed: bool,
    ) -> None:
        self._sync, self._names, self._reports, self._warn, self._fixed = sync, names, reports, warn, fixed
        given = sync.shares if isinstance(sync.shares, dict) else {}
        self._given = {int(name): part for name, part in given.items()}
        self._is_followed = False  # True once the reports are on the session's first batches

    def schedule(self, whole: int, world: int, least: int) -> ShareSchedule | None:
        """Return the schedule of batches of `whole` samples among `world` workers; None: even parts.

        A worker of uneven parts gets `least` samples or more, or none. Raises UserError for a batch that
        cannot be dealt as the configuration says.
        """
        if self._sync.shares == "even" and not self._sync.memory_cap:
            return None
        if self._sync.shares == "even":
            least = 0
        _check_least(whole, world, least)
        self._check_named(world)
        most = self._most(world)
        if line := self._is_beyond(whole, most, self._weights(world)):
            raise UserError(f"{line}: raise the one, or lower the other")
        reports = None if self._is_followed else self._reports
        if reports is None and not self._given and self._sync.memory_cap in (0, "auto"):
            return None
        forgotten = _nothing if reports is None else reports.forget
        first, caps = partial(self._first, whole, least), partial(self._caps, whole)
        return ShareSchedule(first, world, least, forgotten, caps)

    def in_group(
        self, ring: MemberRing, members: Callable[[], int], least: Callable[[], int], whole: int, fill: Fill
    ) -> GroupShares:
        """Return the parts in which the members of a group take their part of batches of `whole` samples,
        where each group leases data at its own pace.

        Args:
            ring: the group's ring.
            members: returns the number of workers that share a batch, in all groups.
            least: returns the least samples of a member that gets any, in uneven parts.
            whole: the samples of a batch.
            fill: returns the samples of a fill.

        Raises UserError for a batch that cannot be cut.
        """
        if whole >= MOST_CUT:
            raise UserError(f"sync.global_batch = {whole} is too large: groups cut batches below {MOST_CUT}")
        reports = None if self._is_followed else self._reports
        if reports is not None:
            _check_least(whole, members(), least())
            self._is_followed = True
        return GroupShares(
            ring,
            reports,
            whole=lambda: max(whole, members()),  # at least 1 for each
            part_of=lambda name: _part_of(whole, name, members()),
            workers=members,
            cap_of=(lambda _name: 0) if reports is None else partial(cap_of, self._sync),
            least=fill if reports is None else least,
            fill=fill,
        )

    def follow(self, sampler: BatchesSampler, schedule: ShareSchedule, whole: int) -> None:
        """Note the sampler that deals by `schedule`."""
        if self._reports is not None and not self._is_followed:
            self._is_followed = True
            self._reports.follow(sampler, schedule, whole)

    def _check_named(self, world: int) -> None:
        """Raise UserError if shares or caps are of other workers than there are."""
        names, caps = self._names(world), self._sync.memory_cap
        capped = set(map(int, caps)) if isinstance(caps, dict) else set()
        if self._given and (lacking := [name for name in names if name not in self._given]):
            raise UserError(
                f"sync.shares has no part for worker {lacking[0]}; give each worker's, 0 for none"
            )
        for key, what, named in (("shares", "part", set(self._given)), ("memory_cap", "cap", capped)):
            if self._fixed and (none := sorted(named - set(names))):
                raise UserError(
                    f"sync.{key} has a {what} for worker {none[0]}, and the run has {world} workers"
                )

    def _weights(self, world: int) -> Whole:
        """Return the proportion of the workers' parts, (world,)."""
        weights = [round(2**20 * self._given.get(name, 0)) for name in self._names(world)]
        return np.array(weights if any(weights) else [1] * world, dtype=np.int64)

    def _most(self, world: int) -> Whole:
        """Return the most samples of each worker; 0: no limit."""
        return np.array([cap_of(self._sync, name) for name in self._names(world)], dtype=np.int64)

    def _is_beyond(self, whole: int, most: Whole, weights: Whole) -> str:
        """Return the line for caps that do not hold a batch of `whole` samples; empty if they do."""
        if are_held(whole, weights, most):
            return ""
        held, takers, cap = int(most[weights > 0].sum()), int((weights > 0).sum()), self._sync.memory_cap
        of = f" = {cap}" if isinstance(cap, int) else ""
        return (
            f"sync.memory_cap{of} leaves {held} samples to {takers} worker{'s' * (takers != 1)}, and "
            f"sync.global_batch is {whole}"
        )

    def _caps(self, whole: int, world: int) -> Whole:
        """Return the caps of a deal's workers; 0: no limit. None, with a line, if they do not hold a batch:
        workers were lost, and may come back."""
        most = self._most(world)
        if line := self._is_beyond(whole, most, self._weights(world)):
            self._warn(f"{line}: until more workers enter, parts are larger than the caps")
            return np.zeros_like(most)
        return most

    def _first(self, whole: int, least: int, world: int) -> Whole:
        weights, most = self._weights(world), self._most(world)
        return scaled(weights, whole, least, most if are_held(whole, weights, most) else 0)


def _check_least(whole: int, world: int, least: int) -> None:
    """Raise UserError if a batch of `whole` samples has too few for `world` workers."""
    if whole < world * least:
        raise UserError(
            f"sync.global_batch = {whole} is too small to give each of {world} workers {least} "
            f"sample{'s' * (least != 1)}, the least of uneven parts (sync.least): set sync.global_batch "
            f"to {world * least} or more, or sync.shares to even"
        )


def cap_of(sync: Sync, name: int) -> int:
    """Return the most samples of the worker of this name, as the configuration gives it; 0: no limit."""
    cap = sync.memory_cap
    return cap if isinstance(cap, int) else cap.get(str(name), 0) if isinstance(cap, dict) else 0


def _nothing() -> None: ...


_NEED_TWO = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _fill_for(state: TrainingState) -> int:
    """Return the samples of a fill: two if a model has BatchNorm layers, which raise an error for one."""
    parts = (part for each in state.models for part in each.module.modules())
    return 2 if any(isinstance(part, _NEED_TWO) for part in parts) else 1


def least_for(sync: Sync, state: TrainingState) -> int:
    """Return the least samples of a worker that gets any of a batch, by the configuration or by the models
    prepared so far; 2 if there is none."""
    return sync.least or (_fill_for(state) if state.prepared else 2)


class DealtData:
    """Samplers over a deal that all workers know; each takes its part by its rank.

    `least` returns the least samples of a worker that gets any in uneven batches; `shares` makes the
    schedules of such batches; None: all are even.
    """

    def __init__(
        self, state: TrainingState, least: Callable[[], int], shares: UnevenShares | None = None
    ) -> None:
        self._state, self._least, self._shares = state, least, shares

    def sampler(self, dataset: Sized, order: Arguments, watch: SamplerWatch) -> ShardedSampler:
        state = self._state
        made = ShardedSampler(dataset, rank=state.rank, world=state.world, on_index=watch.given_by, **order)
        state.samplers.append(made)
        return made

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        watch: SamplerWatch,
        was_left: WasLeft,
        costs: Costs | None = None,
    ) -> BatchesSampler:
        del ahead, was_left  # workers report what their loaders have fetched
        state, shares, least = self._state, self._shares, self._least()
        schedule = None if shares is None else shares.schedule(whole, state.world, least)
        by_cost = None if costs is None else ShareSchedule(partial(even, whole), state.world, least)
        made = BatchesSampler(
            dataset,
            batch=whole,
            schedule=schedule or by_cost,
            costs=costs,
            least=least,
            fill=partial(_fill_for, state),
            rank=state.rank,
            world=state.world,
            on_index=watch.given_by,
            **order,
        )
        if shares is not None and schedule is not None:
            shares.follow(made, schedule, whole)
        state.samplers.append(made)
        return made

    def catch_up(self) -> None:
        """Do nothing: all workers make the same iterations."""


class NodesData:
    """Samplers over nodes, dealt by the contributions of each (strategy `peers`). `least` returns the least
    samples of a device that gets any."""

    def __init__(self, state: TrainingState, peers: Peers, least: Callable[[], int]) -> None:
        self._state, self._peers, self._least = state, peers, least

    def sampler(self, dataset: Sized, order: Arguments, watch: SamplerWatch) -> ShardedSampler:
        self._peers.check_alike("session.sampler", dataset, **order)
        made = self._peers.sampler(dataset, **order, on_index=watch.given_by)
        self._state.samplers.append(made)
        return made

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        watch: SamplerWatch,
        was_left: WasLeft,
        costs: Costs | None = None,
    ) -> PeerBatches:
        del was_left  # nodes agree on what was used
        check("call", Choices({"call": "session.batches", "data": "nodes", "cost": costs is not None}))
        least = self._least()
        self._peers.check_alike("session.batches", dataset, **order, ahead=ahead, least=least)
        made = self._peers.batches(
            dataset,
            least,
            batch=whole,
            **order,
            ahead=ahead,
            fill=partial(_fill_for, self._state),
            on_index=watch.given_by,
        )
        self._state.samplers.append(made)
        return made

    def catch_up(self) -> None:
        self._peers.catch_up()


class LeasedData:
    """Samplers for workers that go at their own pace: each leases its data from the hub as needed.

    Args:
        state: the session's state.
        leases: this worker's leases.
        samplers: the samplers whose used positions go along with this worker's commits; new ones are added.
        members: returns the number of workers that share a batch.
        wait: seconds for which the hub may hold up a lease.
        warn_once: prints a line once for a subject.
        in_group: returns the parts in which a group's members take batches, given the samples of a batch in
            all groups, and what returns those of a fill; None: workers are in no groups.
    """

    def __init__(
        self,
        state: TrainingState,
        leases: Leases,
        samplers: list[LeasedSampler],
        members: Callable[[], int],
        wait: float,
        warn_once: Callable[[str, str], None],
        in_group: Callable[[int, Fill], GroupShares] | None = None,
    ) -> None:
        self._state, self._leases, self._samplers = state, leases, samplers
        self._members, self._wait, self._warn_once = members, wait, warn_once
        self._in_group = in_group

    def sampler(self, dataset: Sized, order: Arguments, watch: SamplerWatch) -> LeasedSampler:
        return self._sampler(dataset, order, watch, None, in_batches=False)

    def _sampler(
        self,
        dataset: Sized,
        order: Arguments,
        watch: SamplerWatch,
        shares: GroupShares | None,
        *,
        in_batches: bool,
    ) -> LeasedSampler:
        facts = {"call": "session.sampler", "data": "leased", "drop_last": order["drop_last"]}
        check("call", Choices(facts))
        made = LeasedSampler(
            dataset,
            lease=self._leases.lease,
            number=len(self._state.samplers),
            workers=self._state.world,
            seed=order["seed"],
            shuffle=order["shuffle"],
            wait=self._wait,
            on_index=watch.given_by,
            mixes=partial(self._warn_once, "late samples"),
            empty=partial(self._warn_once, "no samples"),
            waited=partial(self._warn_once, "waited in vain"),
            taken=watch.taken if self._in_group is None else None,
            rank=self._state.rank,
            shares=shares,
            in_batches=in_batches,
        )
        self._state.samplers.append(made)
        self._samplers.append(made)
        return made

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        watch: SamplerWatch,
        was_left: WasLeft,
        costs: Costs | None = None,
    ) -> LeasedBatches:
        del ahead  # the hub leases as data is needed
        check("call", Choices({"call": "session.batches", "data": "leased", "cost": costs is not None}))
        fill = partial(_fill_for, self._state)
        shares = None if self._in_group is None else self._in_group(whole, fill)
        leased = self._sampler(dataset, order, watch, shares, in_batches=True)
        return LeasedBatches(leased, partial(self._size, whole), shares, was_left)

    def _size(self, whole: int) -> int:
        return _part_of(whole, self._state.rank, self._members())

    def catch_up(self) -> None:
        """Do nothing: no worker waits for the others at the end of a loop."""


def _part_of(whole: int, rank: int, members: int) -> int:
    """Return one member's part of `whole` samples; the first members take the remainder. At least 1."""
    return max(1, whole // members + (rank % members < whole % members))
