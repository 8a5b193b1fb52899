"""Shares: each member's number of a tick's samples; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from atoll.core.errors import CheckpointError
from atoll.groups.shares import Whole, are_held, scaled

# (tick, samples, members) -> each member's number of samples, which add up to `samples`. The answer must be
# equal on all members, and equal again for a tick that was dealt before.
Shares: TypeAlias = Callable[[int, int, Sequence[int]], Sequence[int]]


class ShareSchedule:
    """The parts of a deal's ticks, which change at ticks on which all members have agreed.

    Args:
        first: returns the members' parts before anything is agreed, given the number of members.
        world: the number of members.
        least: the least samples of a member that gets any.
        forgotten: called when what was agreed is forgotten.
        most: returns the most samples of each member, (members,), given their number; 0: no limit.

    Attributes:
        least: the least samples of a member that gets any.
        caps: what `most` has returned for the present members.
    """

    def __init__(
        self,
        first: Callable[[int], Whole],
        world: int,
        least: int,
        forgotten: Callable[[], None] = lambda: None,
        most: Callable[[int], Whole] = lambda members: np.zeros(members, dtype=np.int64),
    ) -> None:
        self._first, self.least, self._forgotten, self._most = first, least, forgotten, most
        self._begin_with(world)

    def __call__(self, tick: int, samples: int, members: Sequence[int]) -> Sequence[int]:
        number = bisect_right(self._ticks, tick) - 1
        parts = self._parts[number]
        if len(members) < len(parts):
            parts = parts[np.asarray(members)]
            if not parts.any():  # those with samples have this tick in hand already
                parts = np.ones_like(parts)
            return self._scaled(parts, samples, np.asarray(members))
        # Nearly all ticks are whole batches, and a checkpoint asks for each tick of the epoch.
        found = self._found.get((number, samples))
        if found is None:
            found = self._found[number, samples] = self._scaled(parts, samples, np.arange(len(parts)))
        return found

    def _scaled(self, parts: Whole, samples: int, members: Whole) -> list[int]:
        """Return the parts of `members` in a tick of `samples`. Caps that do not hold the tick give way."""
        most = self.caps[members]
        kept = most if are_held(samples, parts, most) else 0
        found: list[int] = scaled(parts, samples, self.least, kept).tolist()
        return found

    @property
    def latest(self) -> Whole:
        """The parts that were agreed on last, (members,)."""
        return self._parts[-1]

    def reset(self, world: int) -> None:
        """Forget what was agreed: a deal begins, with other members."""
        self._begin_with(world)
        self._forgotten()

    def _begin_with(self, world: int) -> None:
        self.caps = self._most(world)
        self._set([0], [self._first(world)])

    def begin(self) -> None:
        """Let the latest parts hold from the first tick: a deal begins, with the same members."""
        self._set([0], self._parts[-1:])

    def change(self, tick: int, parts: Whole) -> None:
        """Let `parts` hold from `tick` on, which no member's loader was given yet."""
        self._ticks.append(max(tick, self._ticks[-1]))
        self._parts.append(parts)

    def state(self) -> list[Any]:
        """Return the parts and the ticks from which they hold, as JSON values."""
        return [[tick, parts.tolist()] for tick, parts in zip(self._ticks, self._parts, strict=True)]

    @staticmethod
    def check(state: Any, world: int) -> None:
        """Raise CheckpointError if `state` is no schedule of `world` members."""
        right = isinstance(state, list) and bool(state)
        right = right and all(isinstance(each, list) and len(each) == 2 for each in state)
        ticks = [tick for tick, _ in state] if right else []
        right = (
            right and all(type(tick) is int for tick in ticks) and ticks[0] == 0 and ticks == sorted(ticks)
        )
        for parts in [parts for _, parts in state] if right else ():
            whole = isinstance(parts, list) and all(type(part) is int and part >= 0 for part in parts)
            right = right and whole and len(parts) == world and any(parts)
        if not right:
            raise CheckpointError("the sampler's shares are parts of no batch")

    def load(self, state: Sequence[Any]) -> None:
        """Take another member's `state`, which `check` has passed."""
        parts = [np.array(each, dtype=np.int64) for _, each in state]
        if len(parts[0]) != len(self.caps):  # before this worker is a member: `reset` follows
            self.caps = np.zeros_like(parts[0])
        self._set([tick for tick, _ in state], parts)

    def _set(self, ticks: list[int], parts: list[Whole]) -> None:
        self._ticks, self._parts = ticks, parts
        self._found: dict[tuple[int, int], list[int]] = {}  # by the number of the parts, and the samples
