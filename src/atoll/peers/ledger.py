"""What was contributed: what is held here, what others are known to hold, and what may be applied."""

from __future__ import annotations

import math
from collections.abc import Iterator

from atoll.wire.peers import Key, Stream
from atoll.wire.peerviews import Life, Member, View

MOST_MISSING = 1024  # numbers of a contributor that are asked for at a time


class Ledger:
    """One stream of numbered contributions, iterations or meetings, at node `me`.

    All counts are "all below". `done` is how many are applied (or have met) here, `ordered` how many were
    handed out for that. `prefix` is, for each contributor, what is held whole or is settled; `acks`, for each
    other member of the view, what it has said of that in this view, and `floors` what it has done.
    """

    def __init__(self, stream: Stream, done: int = 0) -> None:
        self.stream = stream
        self.done = self.ordered = done
        self.prefix: dict[Life, int] = {}
        self.cuts: dict[Life, float] = {}  # infinity: a member's
        self.firsts: dict[Life, int] = {}  # the first iteration of each contributor
        self.here: dict[Life, set[int]] = {}  # payloads that are kept
        self.acks: dict[Life, dict[Life, int]] = {}
        self.floors: dict[Life, int] = {}
        self._known: dict[Life, int] = {}  # the most that any other holds
        self.members: tuple[Life, ...] = ()
        self._majority = 1

    # -- views --------------------------------------------------------------------------------------------

    def install(self, view: View, me: Life, base: int | None) -> list[Key]:
        """A view holds from now on; what is held and does not count is given back. `base`: this node comes
        new, and everything below is settled; None: it does not. What others have said is forgotten."""
        old = self.cuts
        self.members = tuple(member.life for member in view.members)
        self._majority = len(self.members) // 2 + 1
        self.cuts = dict.fromkeys(self.members, math.inf)
        self.cuts |= {each.life: self._start(each) for each in view.removed}
        self.firsts = {each.life: each.first for each in (*view.members, *view.removed)}
        for each in (*view.members, *view.removed):
            if each.life not in old:
                self.prefix[each.life] = self._beginning(each, base)
        for life in [life for life in self.prefix if life not in self.cuts]:
            del self.prefix[life]
        self.acks = {life: {} for life in self.members if life != me}
        self._known = dict.fromkeys(self.cuts, 0)
        bases = {each.life: each.base if self.stream == "iterations" else 0 for each in view.members}
        self.floors = {life: max(self.floors.get(life, 0), bases[life]) for life in self.members}
        return list(self._beyond_cuts())

    def _start(self, entry: Member) -> int:
        """Where the view begins with a contributor; a removed one's is its cut."""
        return entry.held if self.stream == "iterations" else entry.meetings

    def _beginning(self, entry: Member, base: int | None) -> int:
        """What counts as held of a contributor that was not known."""
        if self.stream == "meetings":
            return entry.meetings if base is not None or entry.token else 0
        return max(entry.first, base or 0)

    def _beyond_cuts(self) -> Iterator[Key]:
        for life, numbers in self.here.items():
            cut = self.cuts.get(life, 0)
            for number in sorted(number for number in numbers if number >= cut):
                numbers.discard(number)
                yield Key(self.stream, number, life)
            if life in self.prefix:
                self.prefix[life] = int(min(self.prefix[life], cut))

    def acknowledge(self, member: Life, life: Life, below: int) -> bool:
        """What another member holds of a contributor, which never becomes less; whether it became more.
        Of one that no view here has, nothing is noted."""
        acks = self.acks[member]
        if life in self.cuts and below > acks.get(life, 0):
            acks[life] = below
            if below > self._known.get(life, below):
                self._known[life] = below
            return True
        return False

    # -- what is held -------------------------------------------------------------------------------------

    def has(self, key: Key) -> bool:
        """Whether its payload is kept."""
        return key.number in self.here.get(key.life, ())

    def is_settled(self, key: Key) -> bool:
        """Whether it is held, or was, or need not be."""
        return key.number < self.prefix.get(key.life, 0) or self.has(key)

    def hold(self, key: Key) -> None:
        """Its payload is kept from now on."""
        self.here.setdefault(key.life, set()).add(key.number)
        self.extend(key.life)

    def settle(self, life: Life, below: int) -> None:
        """Nothing of a contributor below this is needed here."""
        self.prefix[life] = max(self.prefix[life], int(min(below, self.cuts[life])))
        self.extend(life)

    def extend(self, life: Life) -> None:
        here = self.here.get(life, ())
        while self.prefix[life] in here:
            self.prefix[life] += 1

    def missing(self, life: Life, limit: float) -> list[int]:
        """What somebody holds of a contributor, below `limit`, and this node does not: the first MOST_MISSING
        numbers from the first that is missing on are looked at, the rest in their turn."""
        stop = int(min(self._known[life], limit, self.cuts[life], self.prefix[life] + MOST_MISSING))
        if stop <= self.prefix[life]:
            return []
        here = self.here.get(life, ())
        return [number for number in range(self.prefix[life], stop) if number not in here]

    def holders(self, key: Key) -> list[Life]:
        """Who has said to hold it, its own node first."""
        holding = [life for life, acks in self.acks.items() if acks.get(key.life, 0) > key.number]
        return sorted(holding, key=lambda life: (life != key.life, life))

    # -- what may be done ---------------------------------------------------------------------------------

    def contributors(self, number: int) -> list[Life]:
        """Whose contributions of an iteration count, in order of node."""
        lives = (life for life, cut in self.cuts.items() if self.firsts[life] <= number < cut)
        return sorted(lives)

    def parties(self, number: int, at: int) -> list[Life]:
        """Whose parts in a meeting count, for a script that was last at the beginning of iteration `at`."""
        return sorted(life for life, cut in self.cuts.items() if self.firsts[life] <= at and number < cut)

    def shared(self, life: Life, own: int) -> int:
        """What a majority of the view is known to hold of a contributor; `own` is what counts of this node's
        holding."""
        counts = sorted([own, *(acks.get(life, 0) for acks in self.acks.values())], reverse=True)
        return counts[self._majority - 1]

    def unneeded(self, floor: float) -> list[Key]:
        """What every member has done: it is kept no longer."""
        keys = []
        for life, numbers in self.here.items():
            for number in [number for number in numbers if number < floor]:
                numbers.discard(number)
                keys.append(Key(self.stream, number, life))
        return sorted(keys)

    def held(self) -> list[Key]:
        """The keys of all payloads that are kept."""
        return sorted(Key(self.stream, number, life) for life, here in self.here.items() for number in here)
