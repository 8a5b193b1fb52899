"""Parity plan of a transfer: how much parity the blocks sent within its last round trip get.

A repair of these would arrive after the transfer's end. Parity restores all high blocks, and as many low ones
as make the transfer usable; the two have separate groups. Source: docs/ltp.md, "Forward error correction".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.ltp import fec

Items = npt.NDArray[np.int64]

CHEAP = 1 / 12  # of a round trip: full parity for a short transfer's low blocks if it takes no longer
TAIL_SHARE = 0.5  # of the bearable low blocks: least number that the last round trip may lose


@dataclass(frozen=True)
class ProtectedBlocks:
    """Blocks with their groups: the k-th block is in group `first_group` + k mod count, at place k div count.

    `blocks` are indices, ascending, (n,). Parity item `first_item` + j belongs to group j mod count.
    """

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
    """Parity of one transfer.

    Args:
        high_at: mask of high blocks by index, (blocks,).
        tail: blocks sent within the last round trip.
        borne: low blocks that may be missing in the end.
        loss, burst: the path's loss rate, and mean datagrams lost in a row.
    """

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
        self.parts: list[ProtectedBlocks] = []
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
            part = ProtectedBlocks(blocks, groups, self.groups, self._item)
            self.parts.append(part)
            self._item += part.parities

    @property
    def groups(self) -> int:
        """Number of groups."""
        return sum(part.groups.count for part in self.parts)

    @property
    def parities(self) -> int:
        return sum(part.parities for part in self.parts)

    def part_of(self, item: int) -> ProtectedBlocks:
        """Return the part that a parity item belongs to."""
        return next(part for part in reversed(self.parts) if item >= part.first_item)

    def group_of_items(self) -> Items:
        """Return the group of each block by index, then of each parity item; -1 without one."""
        group: Items = np.full(self._item, -1, dtype=np.int64)
        for part in self.parts:
            group[part.blocks] = part.first_group + part.turns % part.groups.count
            items = np.arange(part.parities)
            group[part.first_item + items] = part.first_group + items % part.groups.count
        return group

    def could_restore(self, group: Items, there: Items) -> npt.NDArray[np.bool_]:
        """Return for each of `group` (-1: none) whether its blocks could be restored if only `there` arrived.

        `there` names the group of each datagram that arrived.
        """
        if not self.parts:
            return np.zeros(len(group), dtype=np.bool_)
        enough = np.bincount(there, minlength=self.groups) >= self.data
        return np.asarray((group >= 0) & enough[group])
