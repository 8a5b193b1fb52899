"""Strategy `hierarchical`: a sum inside each group, a sum over the groups' leaders, and a broadcast.

It is a channel, so a ring's reducer, agreement and confirmation are what they are over one group. Source:
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

_LANES = (
    2  # on a CPU, as many collectives as Gloo has under way; NCCL's of one device could wait for one another
)
_END_SECONDS = 1.0  # for a thread to end: it looks ten times a second whether it is to


class Hierarchy:
    """How a ring's workers are grouped. Whenever it is formed, each says at which site it is, and the first
    one how many groups are wanted."""

    def __init__(self, count: int, workers: int | None) -> None:
        """`workers` that the run begins with; None: it is under way. Raises ConfigError for more groups."""
        if workers is not None:
            check_groups(count, workers)
        site = os.environ.get(SITE_VARIABLE) or os.environ.get(LAB_SITE_VARIABLE, "")
        self._count, self._site = count, site
        self.arranged: Arranged | None = None  # in the ring as it was formed last

    @property
    def groups(self) -> int:
        """How many groups there are; of a ring that this worker is not in yet, as many as it asks for."""
        return max(1, self._count) if self.arranged is None else len(self.arranged.grouping)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each of several groups; empty where all workers are one."""
        several = self.arranged is not None and len(self.arranged.grouping) > 1
        return self.arranged.grouping.groups if self.arranged is not None and several else ()

    def open(self, session: Channel, device: torch.device) -> Channel:
        """A channel over the workers of `session`, all of which call this."""
        word = json.dumps([self._count, self._site]).encode()
        words = [json.loads(each) for each in session.gather(word, "the workers' sites")]
        self.arranged = arrange([site for _, site in words], words[0][0])
        return HierarchicalChannel(session.place, "ring", session.timeout, device, self.arranged.grouping)


class HierarchicalChannel(Channel):
    """A channel over all workers of `place`, whose sums go through `grouping` (of ranks).

    They are made in lanes, each on a thread of its own, and are given to these in turn: so one is between the
    groups while another is inside. What is no sum goes through the one group of all workers, and there they
    find out who is missing when a wait passes its deadline.
    """

    def __init__(
        self, place: Place, purpose: str, timeout: float, device: torch.device, grouping: Grouping
    ) -> None:
        self._lanes: list[_Lane] = []
        self._begun = 0  # sums
        self._given_up = threading.Event()
        super().__init__(place, purpose, timeout, device)
        self._device = device
        group, leaders = grouping.group_of(place.rank), sorted(each[0] for each in grouping)
        broadcasts = len(group) > 1 and len(leaders) > 1
        # Members to which this worker passes a sum on that it has from its leader:
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
        """The group of these `ranks`, where this worker is one of several."""
        if self.place.rank not in ranks or len(ranks) == 1:
            return None
        return _Level(self, ranks, name, self._device, self._given_up.is_set)

    def sum(self, tensor: Tensor) -> Pending:
        ready = None
        if self._on_cuda:  # the lane's stream begins where this one is
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
    """Makes sums one after another, on its thread, in the order in which they come. `inside` is this worker's
    group, `between` the leaders'; None where it would be alone, or is not one of them."""

    def __init__(
        self, device: torch.device, inside: _Level | None, between: _Level | None, broadcasts: bool
    ) -> None:
        self.sums: SimpleQueue[_Sum | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="atoll-hierarchy", daemon=True)
        self.levels = [level for level in (inside, between) if level is not None]
        self._device, self._inside, self._between, self._broadcasts = device, inside, between, broadcasts

    def _serve(self) -> None:
        """What comes after a sum that failed fails too: the others are at another one."""
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
    """A group of a lane, which its thread alone uses. Workers are named as in the whole."""

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
        # As bytes: not every dtype that can be summed can be broadcast.
        self._finish(self.broadcast(tensor.reshape(-1).view(torch.uint8)), until)

    def _finish(self, work: Pending, until: float) -> None:
        """Wait in slices, also where nobody watches the ring: a process must not end within Gloo's wait."""
        if self._on_cuda:
            self._poll(work)
        self._watch(work, until)

    def look(self) -> None:
        if self._given_up():
            raise RuntimeError("the ring was let go")
        super().look()


@dataclass
class _Sum:
    """A sum under way; to who waits it is what a c10d Work is."""

    tensor: Tensor
    timeout: float  # seconds
    ready: Any = None  # an event of the stream that fills the tensor

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._failure: Exception | None = None

    def end(self, failure: Exception | None) -> None:
        self._failure = failure
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError when it has failed, or is not made in time (`timeout`, else the channel's)."""
        if not self._over.wait(self.timeout if timeout is None else timeout.total_seconds()):
            raise RuntimeError("timed out")
        if self._failure is not None:
            raise self._failure
        return True


def _children(rank: int, world: int) -> int:
    """To how many members this one passes on a broadcast of rank 0's: in each round of Gloo's tree, all who
    have it pass it to one more."""
    return sum(rank < 2**i and rank + 2**i < world for i in range(world.bit_length()))
