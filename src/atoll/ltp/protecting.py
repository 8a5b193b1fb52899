"""Which blocks of a transfer get parity, and how much: those that are sent within its last round trip, for a
repair of those would come after the end.

High blocks are to be restored all, of low ones as many as make the transfer usable; so they have groups of
their own. Source: docs/ltp.md, "Forward error correction".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.ltp import fec

Items = npt.NDArray[np.int64]

CHEAP = 1 / 12  # of a round trip: parity of a short transfer that takes no longer restores all of it
TAIL_SHARE = 0.5  # of the low blocks that may be missing: what the last round trip may lose at least


@dataclass(frozen=True)
class Part:
    """Blocks, by index and rising, (n,), and their groups: the k-th is in group `first_group` + k mod count,
    at place k div count. Item j of the parity, `first_item` + j, belongs to group j mod count."""

    blocks: Items
    groups: fec.Groups
    first_group: int
    first_item: int

    @property
    def parities(self) -> int:
        return self.groups.count * self.groups.parity

    @property
    def turns(self) -> Items:
        return np.arange(len(self.blocks), dtype=np.int64)


class Protection:
    """Of one transfer of so many `blocks`. `high_at`: which of them are high, by index; `tail`: how many are
    sent within the last round trip; `borne`: low blocks that may be missing in the end. `loss` and `burst`
    are the path's."""

    def __init__(
        self, high_at: npt.NDArray[np.bool_], tail: int, borne: int, loss: float, burst: float
    ) -> None:
        blocks = len(high_at)
        self.begin = max(blocks - tail, 0)  # the first block that may have parity
        last = np.arange(self.begin, blocks)
        high, low = last[high_at[last]], last[~high_at[last]]
        lows = blocks - int(np.count_nonzero(high_at))
        highs = fec.plan_groups(len(high), loss, burst, apart=blocks / (blocks - lows))
        bearable = borne * max(len(low) / max(lows, 1), TAIL_SHARE)
        chance = fec.SURE * math.sqrt(len(low) * loss * (1.0 - loss) * max(2.0 * burst - 1.0, 1.0))
        self.lost = len(low) * loss + chance  # low blocks that the last round trip may lose for good
        self.parts: list[Part] = []
        self._item = blocks
        self._add(high, highs)
        self.reason = f"high blocks: {highs.reason}"
        apart = blocks / max(lows, 1)
        groups = fec.plan_groups(len(low), loss, burst, apart=apart)
        if self.begin or groups.count * groups.parity > CHEAP * tail:
            groups = fec.plan_borne(len(low), loss, burst, bearable, apart=apart)
        if not self.begin or self.lost > bearable:
            self._add(low, groups)
            self.lost = min(self.lost, bearable)
            self.reason += f"; low blocks: {groups.reason}"
        self.data = np.zeros(self.groups, dtype=np.int64)  # datagrams of data, by group
        for part in self.parts:
            count = part.groups.count
            self.data[part.first_group : part.first_group + count] = part.groups.data_of(np.arange(count))

    def _add(self, blocks: Items, groups: fec.Groups) -> None:
        if groups.parity and self.groups + groups.count <= fec.MOST_GROUPS:
            part = Part(blocks, groups, self.groups, self._item)
            self.parts.append(part)
            self._item += part.parities

    @property
    def groups(self) -> int:
        """How many there are."""
        return sum(part.groups.count for part in self.parts)

    @property
    def parities(self) -> int:
        return sum(part.parities for part in self.parts)

    def part_of(self, item: int) -> Part:
        """Whose this item of parity is."""
        return next(part for part in reversed(self.parts) if item >= part.first_item)

    def group_of_items(self) -> Items:
        """Of blocks by index, then of parity; -1 where there is none."""
        group: Items = np.full(self._item, -1, dtype=np.int64)
        for part in self.parts:
            group[part.blocks] = part.first_group + part.turns % part.groups.count
            items = np.arange(part.parities)
            group[part.first_item + items] = part.first_group + items % part.groups.count
        return group

    def could_restore(self, group: Items, there: Items) -> npt.NDArray[np.bool_]:
        """Of blocks in these groups (-1: in none), which could be restored if just the members `there` came,
        each named by its group."""
        if not self.parts:
            return np.zeros(len(group), dtype=np.bool_)
        enough = np.bincount(there, minlength=self.groups) >= self.data
        return np.asarray((group >= 0) & enough[group])
