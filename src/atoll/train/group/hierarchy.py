"""The channel of strategy `hierarchical`: a sum inside each group, a sum over the groups' leaders, a
broadcast.

The result is a channel, so a ring's reducer, agreement and confirmation work unchanged. Source:
docs/hierarchical.md; docs/planning.md, "Costs in closed form".
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from atoll.axes.needs import check_groups
from atoll.core import points
from atoll.core.config import LAB_SITE_VARIABLE, SITE_VARIABLE
from atoll.groups.grouping import Grouping
from atoll.groups.hierarchy import Arranged, arrange
from atoll.train.api.ending import see_off
from atoll.train.api.place import Place
from atoll.train.group.channel import BrokenRingError, Channel, Pending

# On a CPU: the number of collectives that Gloo has under way. On one GPU, NCCL's could wait for one another.
_LANES = 2
_END_SECONDS = 1.0  # for a thread to end: it asks ten times a second whether it must


class Hierarchy:
    """The groups of a ring's workers.

    Whenever the ring is formed, each worker reports its site, and the first worker the number of groups
    wanted.

    Attributes:
        arranged: the groups in the ring as it was formed last; None before.
    """

    def __init__(self, count: int, workers: int | None) -> None:
        """Ask for `count` groups. Raises ConfigError if there are more groups than `workers`.

        `workers` is the number of workers with which the run begins; None: it is under way already.
        """
        if workers is not None:
            check_groups(count, workers)
        site = os.environ.get(SITE_VARIABLE) or os.environ.get(LAB_SITE_VARIABLE, "")
        self._count, self._site = count, site
        self.arranged: Arranged | None = None

    @property
    def groups(self) -> int:
        """The number of groups; before this worker is in a ring, the number that it asks for."""
        return max(1, self._count) if self.arranged is None else len(self.arranged.grouping)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group if there are several groups; else empty."""
        several = self.arranged is not None and len(self.arranged.grouping) > 1
        return self.arranged.grouping.groups if self.arranged is not None and several else ()

    def open(self, session: Channel, device: torch.device) -> Channel:
        """Return a channel over the workers of `session`. A collective of all of them."""
        word = json.dumps([self._count, self._site]).encode()
        words = [json.loads(each) for each in session.gather(word, "the workers' sites")]
        self.arranged = arrange([site for _, site in words], words[0][0])
        return HierarchicalChannel(session.place, "ring", session.timeout, device, self.arranged.grouping)


class HierarchicalChannel(Channel):
    """A channel over all workers of `place`, whose sums go through the groups of `grouping` (of ranks).

    Sums are made in lanes, each on a thread of its own. Each new sum goes to the next lane, so one sum passes
    between the groups while another is inside them. All other collectives use the one process group of all
    workers. In that group the workers also find out which of them is missing when a wait passes its deadline.
    """

    def __init__(
        self, place: Place, purpose: str, timeout: float, device: torch.device, grouping: Grouping
    ) -> None:
        self._lanes: list[_Lane] = []
        self._begun = 0  # number of sums so far
        self._given_up = threading.Event()
        super().__init__(place, purpose, timeout, device)
        self._device = device
        group, leaders = grouping.group_of(place.rank), sorted(each[0] for each in grouping)
        broadcasts = len(group) > 1 and len(leaders) > 1
        # The number of members to which this worker passes on a sum from its leader:
        self._children = _children(group.index(place.rank), len(group)) if broadcasts else 0
        try:
            for number in range(_LANES if device.type == "cpu" else 1):
                inside = self._level(group, f"{grouping.groups.index(group)}/{number}")
                between = self._level(leaders, f"leaders/{number}")
                self._lanes.append(_Lane(device, inside, between, broadcasts))
        except BrokenRingError:
            self.abandon()
            raise
        for lane in self._lanes:
            lane.thread.start()

    def _level(self, ranks: Sequence[int], name: str) -> _Level | None:
        """Return the process group of these `ranks`; None if this worker is not among them, or is the only
        one."""
        if self.place.rank not in ranks or len(ranks) == 1:
            return None
        return _Level(self, ranks, name, self._device, self._given_up.is_set)

    def sum(self, tensor: Tensor) -> Pending:
        ready = None
        if self._on_cuda:  # the lane's stream waits for the present one
            ready = torch.accelerator.current_stream(self._device).record_event()
        asked = _Sum(tensor, self.timeout, ready)
        self._lanes[self._begun % len(self._lanes)].sums.put(asked)
        self._begun += 1
        return asked

    def sends(self, size: int) -> int:
        return sum(level.sends(size) for level in self._lanes[0].levels) + self._children * size

    def close(self) -> None:
        if self.is_stuck:
            self.abandon()
            return
        self._end(_END_SECONDS)
        for lane in self._lanes:
            for level in lane.levels:
                level.close()
        super().close()

    def abandon(self) -> None:
        self._end(0.0)
        for lane in self._lanes:
            for level in lane.levels:
                level.abandon()
        super().abandon()

    def _end(self, seconds: float) -> None:
        self._given_up.set()
        for lane in self._lanes:
            lane.sums.put(None)
        for lane in self._lanes:
            if lane.thread.ident is not None:  # it was started
                see_off(lane.thread, seconds)


class _Lane:
    """A thread that makes sums one after another, in the order in which they come.

    `inside` is this worker's group; None if the worker is alone in it. `between` is the group of the leaders;
    None if this worker is not a leader, or the only one.
    """

    def __init__(
        self, device: torch.device, inside: _Level | None, between: _Level | None, broadcasts: bool
    ) -> None:
        self.sums: SimpleQueue[_Sum | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="atoll-hierarchy", daemon=True)
        self.levels = [level for level in (inside, between) if level is not None]
        self._device, self._inside, self._between, self._broadcasts = device, inside, between, broadcasts

    def _serve(self) -> None:
        """Make sums until None comes. Every sum after a failed one fails too: the other members are at
        another sum."""
        if self._device.type != "cpu":
            torch.accelerator.set_stream(torch.Stream(self._device))
        failure: Exception | None = None
        while (asked := self.sums.get()) is not None:
            if failure is None:
                try:
                    self._make(asked)
                except Exception as error:
                    failure = error
            asked.end(failure)

    def _make(self, asked: _Sum) -> None:
        if asked.ready is not None:
            torch.accelerator.current_stream(self._device).wait_event(asked.ready)
        until = time.monotonic() + asked.timeout
        if self._inside is not None:
            self._inside.make_sum(asked.tensor, until)
        points.reach("hierarchy.inside")
        if self._between is not None:
            self._between.make_sum(asked.tensor, until)
            points.reach("hierarchy.between")
        if self._inside is not None and self._broadcasts:
            self._inside.make_broadcast(asked.tensor, until)


class _Level(Channel):
    """One process group of a lane, used by the lane's thread alone. Workers keep the names of the whole
    channel."""

    def __init__(
        self,
        whole: Channel,
        ranks: Sequence[int],
        name: str,
        device: torch.device,
        given_up: Callable[[], bool],
    ) -> None:
        self._given_up = given_up
        place = whole.place
        part = Place(
            rank=ranks.index(place.rank),
            world=len(ranks),
            local_rank=place.local_rank,
            store=place.store,
            host=place.host,
            watch=place.watch,
            names=tuple(place.name_of(rank) for rank in ranks),
        )
        super().__init__(part, f"{whole.purpose}/{name}", whole.timeout, device)

    def make_sum(self, tensor: Tensor, until: float) -> None:
        self._finish(self.sum(tensor), until)

    def make_broadcast(self, tensor: Tensor, until: float) -> None:
        # As bytes: some dtypes can be summed but not broadcast.
        self._finish(self.broadcast(tensor.reshape(-1).view(torch.uint8)), until)

    def _finish(self, work: Pending, until: float) -> None:
        """Wait in slices, even if nobody watches the ring: a process must not end while a thread is in Gloo's
        wait."""
        if self._on_cuda:
            self._poll(work)
        self._watch(work, until)

    def look(self) -> None:
        if self._given_up():
            raise RuntimeError("the ring was let go")
        super().look()


@dataclass
class _Sum:
    """A sum under way, which serves as a c10d Work.

    Attributes:
        tensor: the tensor to replace by its sum.
        timeout: the deadline of the sum, in seconds.
        ready: an event of the stream that fills the tensor; None on a CPU.
    """

    tensor: Tensor
    timeout: float
    ready: Any = None

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._failure: Exception | None = None

    def end(self, failure: Exception | None) -> None:
        self._failure = failure
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the sum. Raises RuntimeError if it has failed or is not made within `timeout`, by default
        the channel's."""
        if not self._over.wait(self.timeout if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._failure is not None:
            raise self._failure
        return True


def _children(rank: int, world: int) -> int:
    """Return the number of members to which member `rank` passes on a broadcast of rank 0.

    In each round of Gloo's tree, every member that has the tensor passes it to one more.
    """
    return sum(rank < 2**i and rank + 2**i < world for i in range(world.bit_length()))
