"""Numbered contributions: those held here, those that others are known to hold, and those that may be
applied."""

from __future__ import annotations

import math
from collections.abc import Iterator

from atoll.wire.peers import Key, Stream
from atoll.wire.peerviews import Life, View, ViewMember

MOST_MISSING = 1024  # numbers of a contributor that are requested at a time


class Ledger:
    """One stream of numbered contributions, iterations or meetings, of one node.

    Every count means "all numbers below". `done` counts those applied (or met) here, `ordered` those handed
    out for that. `prefix` is, per contributor, what is held whole or is settled; `acks` is, per other member
    of the view, what it has reported to hold in this view, and `floors` what it has done.
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
        """Begin a view, forget what others reported to hold, and return the keys that no longer count.

        `base`: this node is new, and everything below is settled; None: it is not new.
        """
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

    def _start(self, entry: ViewMember) -> int:
        """Return where the view begins with a contributor; for a removed one this is its cut."""
        return entry.held if self.stream == "iterations" else entry.meetings

    def _beginning(self, entry: ViewMember, base: int | None) -> int:
        """Return what counts as held of a contributor that was not known before."""
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
        """Note that another member holds a contributor's numbers below `below`; True if that is more than
        before.

        Contributors that no view here has are ignored.
        """
        acks = self.acks[member]
        if life in self.cuts and below > acks.get(life, 0):
            acks[life] = below
            if below > self._known.get(life, below):
                self._known[life] = below
            return True
        return False

    # -- what is held -------------------------------------------------------------------------------------

    def has(self, key: Key) -> bool:
        """True if the payload of `key` is kept."""
        return key.number in self.here.get(key.life, ())

    def is_settled(self, key: Key) -> bool:
        """True if the payload of `key` is held, was held, or need not be."""
        return key.number < self.prefix.get(key.life, 0) or self.has(key)

    def hold(self, key: Key) -> None:
        """Record that the payload of `key` is kept."""
        self.here.setdefault(key.life, set()).add(key.number)
        self.extend(key.life)

    def settle(self, life: Life, below: int) -> None:
        """Record that this node needs no number of a contributor below `below`."""
        self.prefix[life] = max(self.prefix[life], int(min(below, self.cuts[life])))
        self.extend(life)

    def extend(self, life: Life) -> None:
        here = self.here.get(life, ())
        while self.prefix[life] in here:
            self.prefix[life] += 1

    def missing(self, life: Life, limit: float) -> list[int]:
        """Return the numbers of a contributor below `limit` that somebody holds and this node lacks.

        Only the MOST_MISSING numbers from the first missing one on are looked at; later calls reach the rest.
        """
        stop = int(min(self._known[life], limit, self.cuts[life], self.prefix[life] + MOST_MISSING))
        if stop <= self.prefix[life]:
            return []
        here = self.here.get(life, ())
        return [number for number in range(self.prefix[life], stop) if number not in here]

    def holders(self, key: Key) -> list[Life]:
        """Return the members that have reported to hold `key`, its own node first."""
        holding = [life for life, acks in self.acks.items() if acks.get(key.life, 0) > key.number]
        return sorted(holding, key=lambda life: (life != key.life, life))

    # -- what may be done ---------------------------------------------------------------------------------

    def contributors(self, number: int) -> list[Life]:
        """Return the nodes whose contributions to an iteration count, in order of node."""
        lives = (life for life, cut in self.cuts.items() if self.firsts[life] <= number < cut)
        return sorted(lives)

    def parties(self, number: int, at: int) -> list[Life]:
        """Return the nodes whose parts in a meeting count, for a script that was last at the beginning of
        iteration `at`."""
        return sorted(life for life, cut in self.cuts.items() if self.firsts[life] <= at and number < cut)

    def shared(self, life: Life, own: int) -> int:
        """Return the number below which a majority of the view is known to hold a contributor's. `own` is
        what counts of this node's holding."""
        counts = sorted([own, *(acks.get(life, 0) for acks in self.acks.values())], reverse=True)
        return counts[self._majority - 1]

    def unneeded(self, floor: float) -> list[Key]:
        """Remove and return all keys below `floor`, which every member has done."""
        keys = []
        for life, numbers in self.here.items():
            for number in [number for number in numbers if number < floor]:
                numbers.discard(number)
                keys.append(Key(self.stream, number, life))
        return sorted(keys)

    def held(self) -> list[Key]:
        """Return the keys of all payloads that are kept."""
        return sorted(Key(self.stream, number, life) for life, here in self.here.items() for number in here)
