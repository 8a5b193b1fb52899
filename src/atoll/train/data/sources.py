"""The sources of a session's samplers: a deal that all workers know, nodes' contributions, or the hub's
leases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial
from typing import Any, Protocol

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.train.checkpoint.resume import AnySampler, TrainingState
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler, ShardedSampler
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
        self, dataset: Sized, whole: int, ahead: int | None, order: Arguments, on_index: OnIndex
    ) -> BatchesSampler | LeasedBatches | PeerBatches:
        """Return this worker's part of batches of `whole` samples. A loader fetches up to `ahead` batches
        before their use."""

    def catch_up(self) -> None:
        """Bring this worker to the place of the others, between two loops over a loader."""


class DealtData:
    """Samplers over a deal that all workers know; each takes its part by its rank."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def sampler(self, dataset: Sized, order: Arguments, on_index: OnIndex) -> ShardedSampler:
        state = self._state
        made = ShardedSampler(dataset, rank=state.rank, world=state.world, on_index=on_index, **order)
        state.samplers.append(made)
        return made

    def batches(
        self, dataset: Sized, whole: int, ahead: int | None, order: Arguments, on_index: OnIndex
    ) -> BatchesSampler:
        del ahead  # the deal does not depend on batches fetched before their use
        state = self._state
        made = BatchesSampler(
            dataset, batch=whole, rank=state.rank, world=state.world, on_index=on_index, **order
        )
        state.samplers.append(made)
        return made

    def catch_up(self) -> None:
        """Do nothing: all workers make the same iterations."""


class NodesData:
    """Samplers over nodes, dealt by the contributions of each (strategy `peers`)."""

    def __init__(self, state: TrainingState, peers: Peers) -> None:
        self._state, self._peers = state, peers

    def sampler(self, dataset: Sized, order: Arguments, on_index: OnIndex) -> ShardedSampler:
        self._peers.check_alike("session.sampler", dataset, **order)
        made = self._peers.sampler(dataset, **order, on_index=on_index)
        self._state.samplers.append(made)
        return made

    def batches(
        self, dataset: Sized, whole: int, ahead: int | None, order: Arguments, on_index: OnIndex
    ) -> PeerBatches:
        self._peers.check_alike("session.batches", dataset, **order, ahead=ahead)
        made = self._peers.batches(dataset, batch=whole, **order, ahead=ahead, on_index=on_index)
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
        self, dataset: Sized, whole: int, ahead: int | None, order: Arguments, on_index: OnIndex
    ) -> LeasedBatches:
        del ahead  # the hub leases as data is needed
        leased = self.sampler(dataset, order, on_index)
        return LeasedBatches(leased, lambda: _part_of(whole, self._state.rank, self._members()))

    def catch_up(self) -> None:
        """Do nothing: no worker waits for the others at the end of a loop."""


def _part_of(whole: int, rank: int, members: int) -> int:
    """Return one member's part of `whole` samples; the first members take the remainder. At least 1."""
    return max(1, whole // members + (rank % members < whole % members))
