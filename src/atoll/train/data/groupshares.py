"""The parts of a group's batches, where groups go at their own pace and lease their data from the hub.

There is no common deal: the member that first asks the hub for a block of samples says in which parts the
members take each of its batches, and the hub answers all of them so. Each member gets a part or a fill of
each batch, so all make equally many batches, whatever their sizes. Parts may change at any time, and whatever
a member's loader has fetched is trained on as it was cut. Where parts follow speeds, members report these in
the agreement of each iteration, as all workers do under bsp (`train/data/sharereports.py`). Source:
docs/shares.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from atoll.core.errors import RunError
from atoll.groups.shares import Whole, are_held, cut_run, scaled
from atoll.train.data.given import GivenBatches
from atoll.train.data.sharereports import ShareReports
from atoll.train.data.shares import ShareSchedule
from atoll.wire.messages import Cut, Leased


class GroupMember(Protocol):
    """This worker in its group (`train/api/place.py`: Place)."""

    @property
    def name(self) -> int: ...

    def name_of(self, rank: int) -> int: ...


class MemberRing(Protocol):
    """The ring of a group (`train/group/rounds.py`: Ring)."""

    @property
    def place(self) -> GroupMember: ...

    @property
    def world(self) -> int: ...

    @property
    def generation(self) -> int: ...


class MemberBatches:
    """A member's batches, made of the single indices of a LeasedSampler: a count of those given and used
    (`train/data/given.py`: Given).

    Attributes:
        ahead: the sizes of batches whose samples are leased, and not given yet.
    """

    def __init__(self) -> None:
        self._given, self._committed = GivenBatches(), 0
        self.ahead: deque[int] = deque()

    @property
    def consumed(self) -> int:
        return self._given.consumed

    def begin(self, sizes: Sequence[int] = (), used: int = 0) -> None:
        """Start anew. The arguments have no meaning here."""
        del sizes, used
        self._given.begin()
        self._committed = 0

    def sizes(self, start: int = 0) -> list[int]:
        return self._given.sizes(start)

    def used(self, given: int) -> int:
        """Return how many of the first `given` indices have been used."""
        return min(self.consumed, given)

    def count(self, samples: float, given: int) -> float:
        """Record that a backward has reached `samples` samples; all of them count. `given` has no meaning
        here."""
        del given
        return self._given.count(samples, len(self._given))

    def next_sizes(self, given: int) -> set[float]:
        """Return the size of the next batch that a backward reaches."""
        del given
        return self._given.next_sizes(len(self._given))

    def give(self, size: int) -> None:
        """Record that a batch of `size` samples, with those of a fill, is given."""
        self._given.give(size, len(self._given))

    def turn_back(self) -> None:
        """Note that the samples that were given and not used lie ahead again."""
        used = self._given.used(len(self._given))
        left = self._given.sizes(used)
        if left:
            left[0] -= self.consumed - sum(self._given.sizes()[:used])
        self.ahead.extendleft(reversed(left))

    def committed(self) -> None:
        """Record a whole iteration."""
        self._committed = self._given.used(len(self._given))

    def under_way(self) -> tuple[int, float]:
        """Return the batches that backwards have used in this iteration, and their samples."""
        used = self._given.used(len(self._given))
        return used - self._committed, float(
            sum(self._given.sizes(self._committed)[: used - self._committed])
        )


class GroupShares:
    """The parts in which a group's members take the batches of `session.batches`.

    A group's part of a batch is the sum of its members' even parts among all workers of the run. Members take
    even parts of it, or with `reports` parts that follow their speeds (`train/data/sharereports.py`:
    SharedBatches): even ones in a group that has just been formed, or has lost a member.

    Attributes:
        batches: this member's batches.
        whole: returns the samples of a batch in all groups.
        given, epoch: 0, since a choice of parts concerns what nobody has leased yet.
    """

    given = epoch = 0
    _schedule: ShareSchedule

    def __init__(
        self,
        ring: MemberRing,
        reports: ShareReports | None,
        *,
        whole: Callable[[], int],
        part_of: Callable[[int], int],
        workers: Callable[[], int],
        cap_of: Callable[[int], int],
        least: Callable[[], int],
        fill: Callable[[], int],
    ) -> None:
        """Begin with the ring's present members.

        Args:
            ring: the group's ring.
            reports: the members' reports on their speed; None: parts are even.
            whole: returns the samples of a batch in all groups.
            part_of: returns the even part of the worker of this name.
            workers: returns the number of workers on which `part_of` depends.
            cap_of: returns the most samples of the worker of this name; 0: no limit.
            least: returns the least samples of a member that gets any.
            fill: returns the samples of weight 0 on which a member without a part trains.
        """
        self._ring, self._reports, self._least, self._fill = ring, reports, least, fill
        self._part_of, self._workers, self._cap_of = part_of, workers, cap_of
        self.batches, self.whole = MemberBatches(), whole
        self._generation = self._among = -1
        self._follow()

    def _follow(self) -> None:
        """Begin anew if the group's members, or the number of workers in all groups, are others than before.

        Members of the same group hear of that number one after another. So each keeps the proportion of the
        parts that were chosen last.
        """
        generation, among = self._ring.generation, self._workers()
        if (generation, among) == (self._generation, self._among):
            return
        parts = self._schedule.latest if generation == self._generation and self._reports else None
        self._generation, self._among = generation, among
        self._names = [self._ring.place.name_of(rank) for rank in range(self._ring.world)]
        first = np.array([self._part_of(name) for name in self._names], dtype=np.int64)
        self._total, least = int(first.sum()), self._least()
        most = np.array([self._cap_of(name) for name in self._names], dtype=np.int64)
        if not are_held(self._total, first, most):  # then pieces of batches keep to the caps
            most = np.zeros_like(most)
        parts = _fitted(first if parts is None else parts, self._total, least, most)
        self._schedule = ShareSchedule(lambda _members: parts, len(parts), least, most=lambda _members: most)
        if self._reports is not None:
            self._reports.follow(self, self._schedule, self._total)

    @property
    def world(self) -> int:
        """The number of the group's members. If these are new, their parts are even again from now on."""
        self._follow()
        return len(self._names)

    def under_way(self) -> tuple[int, float]:
        """Return the batches that backwards have used in this iteration, and their samples."""
        return self.batches.under_way()

    def cut(self) -> Cut:
        """Return the parts in which members take what is leased next, also for a member that is left
        alone."""
        self._follow()
        schedule = self._schedule
        # A choice may have been made of another number of samples, before its maker heard of this one.
        parts = _fitted(schedule.latest, self._total, schedule.least, schedule.caps)
        return Cut(dict(zip(self._names, parts.tolist(), strict=True)), schedule.least)

    def own(self, leased: Leased, cut: Cut) -> Iterator[tuple[int, int]]:
        """Yield this member's positions in each batch of a block that is `cut`.

        A member that gets none of a batch has a fill in its place: positions from 0 to minus the fill's size.
        Raises RunError if the block is not for this member.
        """
        name = self._ring.place.name
        if name not in cut.parts:
            raise RunError(
                f"worker {name} was given a block of epoch {leased.epoch} that is cut for workers "
                f"{', '.join(map(str, cut.parts))}"
            )
        for batch in cut_run(leased.start, leased.stop, cut.parts, cut.least):
            start, stop = batch[name]
            size = stop - start
            self.batches.ahead.append(size or self._fill())
            yield (start, stop) if size else (0, -self.batches.ahead[-1])


def _fitted(parts: Whole, total: int, least: int, most: Whole) -> Whole:
    """Return `parts` scaled to `total` samples. Limits of `most` that do not hold them give way."""
    return scaled(parts, total, least, most if are_held(total, parts, most) else 0)
