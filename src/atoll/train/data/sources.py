"""The sources of a session's samplers: a deal that all workers know, nodes' contributions, or the hub's
leases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, Protocol

import numpy as np

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core.config import Sync
from atoll.core.errors import UserError
from atoll.groups.shares import Whole, even, scaled
from atoll.train.checkpoint.resume import AnySampler, TrainingState
from atoll.train.data.costs import Costs
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler, ShardedSampler
from atoll.train.data.sharereports import ShareReports
from atoll.train.data.shares import ShareSchedule
from atoll.train.members.regrouping import Leases
from atoll.train.sync.peers import Peers

OnIndex = Callable[[AnySampler], None]
Arguments = Mapping[str, Any]  # seed, shuffle and drop_last


class SamplerSource(Protocol):
    """The maker of this worker's samplers, which it adds to the session's state.

    `on_index` is called with a sampler before each index that it gives.
    """

    def sampler(
        self, dataset: Sized, order: Arguments, on_index: OnIndex
    ) -> ShardedSampler | LeasedSampler: ...

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        on_index: OnIndex,
        costs: Costs | None = None,
    ) -> BatchesSampler | LeasedBatches | PeerBatches:
        """Return this worker's part of batches of `whole` samples, by the samples' `costs` if there are any.
        A loader fetches up to `ahead` batches before their use."""

    def catch_up(self) -> None:
        """Bring this worker to the place of the others, between two loops over a loader."""


class MakesSchedules(Protocol):
    """The maker of the schedules by which batches are dealt in uneven parts."""

    def schedule(self, whole: int, world: int) -> ShareSchedule | None:
        """Return the schedule of batches of `whole` samples among `world` workers; None: even parts.

        Raises UserError for a batch that cannot be dealt as the configuration says.
        """

    def follow(self, sampler: BatchesSampler, schedule: ShareSchedule, whole: int) -> None:
        """Note the sampler that deals by `schedule`."""


class GivenShares:
    """Parts of a batch that the configuration gives each worker.

    `names` returns the members' names, by rank. `fixed`: they are those with which the run began.
    """

    def __init__(self, sync: Sync, names: Callable[[int], list[int]], *, fixed: bool) -> None:
        assert isinstance(sync.shares, dict)
        self._least, self._names, self._fixed = sync.least, names, fixed
        self._parts = {int(name): part for name, part in sync.shares.items()}

    def schedule(self, whole: int, world: int) -> ShareSchedule | None:
        _check_least(whole, world, self._least)
        names = self._names(world)
        if lacking := [name for name in names if name not in self._parts]:
            raise UserError(
                f"sync.shares has no part for worker {lacking[0]}; give each worker's, 0 for none"
            )
        if self._fixed and (none := sorted(self._parts.keys() - set(names))):
            raise UserError(f"sync.shares has a part for worker {none[0]}, and the run has {world} workers")
        return ShareSchedule(partial(self._first, whole), world, self._least)

    def _first(self, whole: int, world: int) -> Whole:
        weights = np.array([round(2**20 * self._parts.get(name, 0)) for name in self._names(world)])
        return scaled(weights, whole, self._least) if weights.any() else even(whole, world)

    def follow(self, sampler: BatchesSampler, schedule: ShareSchedule, whole: int) -> None:
        """Do nothing: parts do not change."""


class MeasuredShares:
    """Parts of a batch by the workers' speeds, as their `reports` show them, for the first batches alone."""

    def __init__(self, sync: Sync, reports: ShareReports) -> None:
        self._sync, self._reports, self._is_used = sync, reports, False

    def schedule(self, whole: int, world: int) -> ShareSchedule | None:
        if self._is_used:
            return None
        cap = self._sync.memory_cap
        _check_least(whole, world, self._sync.least)
        if cap and cap * world < whole:
            raise UserError(
                f"sync.memory_cap = {cap} leaves {cap * world} samples to {world} workers, and "
                f"sync.global_batch is {whole}: raise the one, or lower the other"
            )
        return ShareSchedule(partial(even, whole), world, self._sync.least, self._reports.forget)

    def follow(self, sampler: BatchesSampler, schedule: ShareSchedule, whole: int) -> None:
        self._is_used = True
        self._reports.follow(sampler, schedule, whole)


def _check_least(whole: int, world: int, least: int) -> None:
    if whole < world * least:
        raise UserError(
            f"sync.global_batch = {whole} is too small to give each of {world} workers sync.least = {least} "
            f"samples: set sync.global_batch to {world * least} or more, or sync.shares to even"
        )


class DealtData:
    """Samplers over a deal that all workers know; each takes its part by its rank.

    `least` is the least samples of a worker that gets any in uneven batches; `shares` makes the schedules of
    such batches; None: all are even.
    """

    def __init__(self, state: TrainingState, least: int, shares: MakesSchedules | None = None) -> None:
        self._state, self._least, self._shares = state, least, shares

    def sampler(self, dataset: Sized, order: Arguments, on_index: OnIndex) -> ShardedSampler:
        state = self._state
        made = ShardedSampler(dataset, rank=state.rank, world=state.world, on_index=on_index, **order)
        state.samplers.append(made)
        return made

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        on_index: OnIndex,
        costs: Costs | None = None,
    ) -> BatchesSampler:
        del ahead  # workers report what their loaders have fetched
        state, shares = self._state, self._shares
        schedule = None if shares is None else shares.schedule(whole, state.world)
        by_cost = None if costs is None else ShareSchedule(partial(even, whole), state.world, self._least)
        made = BatchesSampler(
            dataset,
            batch=whole,
            schedule=schedule or by_cost,
            costs=costs,
            least=self._least,
            rank=state.rank,
            world=state.world,
            on_index=on_index,
            **order,
        )
        if shares is not None and schedule is not None:
            shares.follow(made, schedule, whole)
        state.samplers.append(made)
        return made

    def catch_up(self) -> None:
        """Do nothing: all workers make the same iterations."""


class NodesData:
    """Samplers over nodes, dealt by the contributions of each (strategy `peers`). `least` is the least
    samples of a device that gets any."""

    def __init__(self, state: TrainingState, peers: Peers, least: int) -> None:
        self._state, self._peers, self._least = state, peers, least

    def sampler(self, dataset: Sized, order: Arguments, on_index: OnIndex) -> ShardedSampler:
        self._peers.check_alike("session.sampler", dataset, **order)
        made = self._peers.sampler(dataset, **order, on_index=on_index)
        self._state.samplers.append(made)
        return made

    def batches(
        self,
        dataset: Sized,
        whole: int,
        ahead: int | None,
        order: Arguments,
        on_index: OnIndex,
        costs: Costs | None = None,
    ) -> PeerBatches:
        check("call", Choices({"call": "session.batches", "data": "nodes", "cost": costs is not None}))
        least = self._least
        self._peers.check_alike("session.batches", dataset, **order, ahead=ahead, least=least)
        made = self._peers.batches(dataset, least, batch=whole, **order, ahead=ahead, on_index=on_index)
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
    """

    def __init__(
        self,
        state: TrainingState,
        leases: Leases,
        samplers: list[LeasedSampler],
        members: Callable[[], int],
        wait: float,
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._state, self._leases, self._samplers = state, leases, samplers
        self._members, self._wait, self._warn_once = members, wait, warn_once

    def sampler(self, dataset: Sized, order: Arguments, on_index: OnIndex) -> LeasedSampler:
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
            on_index=on_index,
            mixes=partial(self._warn_once, "late samples"),
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
        on_index: OnIndex,
        costs: Costs | None = None,
    ) -> LeasedBatches:
        del ahead  # the hub leases as data is needed
        check("call", Choices({"call": "session.batches", "data": "leased", "cost": costs is not None}))
        leased = self.sampler(dataset, order, on_index)
        return LeasedBatches(leased, lambda: _part_of(whole, self._state.rank, self._members()))

    def catch_up(self) -> None:
        """Do nothing: no worker waits for the others at the end of a loop."""


def _part_of(whole: int, rank: int, members: int) -> int:
    """Return one member's part of `whole` samples; the first members take the remainder. At least 1."""
    return max(1, whole // members + (rank % members < whole % members))
