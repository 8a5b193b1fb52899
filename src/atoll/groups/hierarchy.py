"""Groups of strategy `hierarchical`, from sites and ranks, whenever a ring is formed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.groups.candidates import equal_runs
from atoll.groups.grouping import Grouping


@dataclass(frozen=True)
class Arranged:
    """Ranks in groups, and why. The first rank of each group leads it."""

    grouping: Grouping
    reason: str

    def place_of(self, rank: int) -> tuple[int, int, int, int]:
        """Return the rank's group, the number of groups, its number within the group, and the group's
        size."""
        groups, own = self.grouping.groups, self.grouping.group_of(rank)
        return groups.index(own), len(groups), own.index(rank), len(own)


def arrange(sites: Sequence[str], count: int) -> Arranged:
    """Group the workers at `sites`, which has a name for each rank ("": unknown).

    One group for each site if there are several and `count` is their number or 0. Otherwise `count` runs in
    order of site and rank, with sizes as equal as possible; one for each worker if `count` is more (a ring
    may have lost some). `count` 0: ceil(sqrt(N)) runs. With k groups of m workers a sum takes 2(m - 1) + 2(k
    - 1) steps in sequence, and a broadcast; no number of groups takes fewer.
    """
    workers, names = len(sites), list(dict.fromkeys(sites))
    if len(names) > 1 and count in (0, len(names)):
        groups = [[rank for rank, site in enumerate(sites) if site == name] for name in names]
        counts = ", ".join(f"{len(group)} at {sites[group[0]] or 'no site'}" for group in groups)
        return Arranged(Grouping(groups), f"one for each site: {counts}")
    if count == 0:
        number = math.ceil(math.sqrt(workers))
        reason = f"groups.count is 0, and there is one site: the fewest steps for {workers} workers"
    else:
        number = min(count, workers)
        left = f", and {workers} worker{'s are' if workers > 1 else ' is'} left" if number < count else ""
        reason = f"groups.count is {count}{left}"
    if len(names) > 1:
        reason += f"; in order of the {len(names)} sites"
    ordered = sorted(range(workers), key=lambda rank: (names.index(sites[rank]), rank))
    return Arranged(equal_runs(ordered, number), reason)
