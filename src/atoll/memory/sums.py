"""The sum of a chunk's gradients to their holders: over the members of each group, and, if several groups
each hold a replica of the model, over the groups. Source: docs/memory.md, "Groups of workers".

Inside a group each member sends the holders their parts; each holder adds up what came, in order of rank.
Then each holder sends its sum to the holders of the same elements in the other groups, and adds up theirs and
its own, in order of groups. So all groups have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from atoll.memory.arena import Block
from atoll.memory.members import Members, Waitable
from atoll.moves.owners import Holding


class Summing(Waitable, Protocol):
    """A sum that is under way."""

    def advance(self) -> None:
        """Begin the sum over the groups, if there are several, when this group's sum has ended.

        Members call it in one order, like the calls that begin a sum.
        """


class Over(Summing):
    """A sum with nothing to wait for."""

    def advance(self) -> None:
        """Do nothing: the sum has ended."""

    def wait(self) -> None:
        """Do nothing: the sum has ended."""


class Sum(Summing):
    """A sum of a chunk's gradients, as one member takes part in it.

    Args:
        flat: the chunk's gradients, (extent,); this member's part of it becomes the sum.
        what: what the sum is, for people.
        room: memory for what comes from others; if it is too small for all at once, the sum goes in rounds.
        ended: called when the sum has ended. After a failure it is not called, as data may still arrive in
            `room`.
    """

    def __init__(
        self,
        members: Members,
        holding: Holding,
        chunk: int,
        flat: Tensor,
        what: str,
        room: Block,
        ended: Callable[[], None],
    ) -> None:
        self._members, self._flat, self._what, self._room, self._ended = members, flat, what, room, ended
        self._groups = [held.parts[chunk] for held in holding.of_replicas]
        self._senders = holding.members_of(chunk)
        self._number = next(
            i for i, held in enumerate(holding.of_replicas) if members.rank in held.members_of(chunk)
        )
        step = holding.summed_in_rounds_of(chunk, room.memory.nbytes // flat.itemsize)
        self._rounds = iter([(i, min(i + step, flat.numel())) for i in range(0, flat.numel(), step)])
        self._begin(*next(self._rounds))

    def _begin(self, begin: int, end: int) -> None:
        """Begin a round inside the group, for the elements from `begin` to `end`."""
        self._between: list[Waitable] | None = None
        sends, offset = self._overlaps(self._number, begin, end), 0
        self._bounds = begin, begin
        for part in self._groups[self._number]:
            if part.member == self._members.rank:
                offset = max(part.begin, begin)
                self._bounds = offset, offset + sends[part.member]
        self._own = self._flat[slice(*self._bounds)]
        takes = [0] * self._members.count
        for member in self._senders:
            takes[member] = self._own.numel()
        self._come = self._room.view(sum(takes), self._flat.dtype)
        self._inside = self._members.exchange(self._flat[begin:end], sends, self._come, takes, self._what)

    def _overlaps(self, group: int, begin: int, end: int) -> list[int]:
        """Return how many of the elements from `begin` to `end` each member of a group holds."""
        held = [0] * self._members.count
        for part in self._groups[group]:
            first, last = part.overlap(begin, end)
            held[part.member] = max(0, last - first)
        return held

    def advance(self) -> None:
        if len(self._groups) > 1 and self._between is None:
            self._end_inside()

    def wait(self) -> None:
        while True:
            if self._between is None:
                self._end_inside()
            self._end_between()
            following = next(self._rounds, None)
            if following is None:
                break
            self._begin(*following)
        self._ended()

    def _end_inside(self) -> None:
        """End the sum inside the group; begin to exchange it with the holders in the other groups."""
        self._inside.wait()
        _add(self._come.view(len(self._senders), -1 if self._own.numel() else 0).unbind(), self._own)
        count, numel = len(self._groups), self._own.numel()
        self._come = self._room.view((count - 1) * numel, self._flat.dtype)
        self._between = []
        for shift in range(1, count):  # all at once, as the links between groups are slow
            self._between.append(
                self._members.exchange(
                    self._own,
                    self._overlaps((self._number + shift) % count, *self._bounds),
                    self._come[(shift - 1) * numel : shift * numel],
                    self._overlaps((self._number - shift) % count, *self._bounds),
                    self._what,
                )
            )

    def _end_between(self) -> None:
        assert self._between is not None
        for each in self._between:  # all of them, since additions change what is being sent
            each.wait()
        count, numel = len(self._groups), self._own.numel()
        of_groups = [self._own] * count
        for shift in range(1, count):
            of_groups[(self._number - shift) % count] = self._come[(shift - 1) * numel : shift * numel]
        _add(of_groups, self._own)


def _add(pieces: Sequence[Tensor], into: Tensor) -> None:
    """Add up `pieces`, in this order, into `into`. The first piece's content is lost."""
    total, *others = pieces
    for each in others:
        total.add_(each)
    if total is not into:
        into.copy_(total)
