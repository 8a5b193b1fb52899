"""A trial of a ring's orders: the order of ranks, the best order by the links, and both ways round at once.

Links tell which order can be faster. Only a trial tells whether it is: several links may share one line, and
a machine may be unable to fill its links. All members of the ring make the trial together, and decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.core.units import format_bytes, format_seconds
from atoll.rings.order import Order, Topology, is_same_ring
from atoll.train.group.channel import Channel, Sums
from atoll.train.group.ringpair import RingPair
from atoll.train.group.sumtimer import MESSAGE, SumTimer

_NAMED = 16  # the most members of an order that a line names

_Number = Annotated[float, Meta(ge=0)]


class TrialResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The result of a trial.

    Attributes:
        gain: how many times as fast as the order of ranks the best order was; 0: not tried.
        promised: how many times as fast it should have been by the links' figures.
        share: the share of the bytes that the first of two rings takes; 1: one ring is better; 0: not tried.
    """

    gain: _Number = 0.0
    promised: _Number = 0.0
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0


def named(order: Sequence[int], name_of: Callable[[int], int]) -> str:
    """Return an order in words, like "0-2-1-3"; long orders are cut."""
    names = [str(name_of(rank)) for rank in order]
    more = f"-... ({len(names)} workers)" if len(names) > _NAMED else ""
    return "-".join(names[:_NAMED]) + more


class OrderTrial:
    """The trial, and the words for its result.

    Args:
        name_of: returns the name of the worker of a rank.
        timer: times sums.
        connect: opens a channel over the members, given its purpose and order.
        natural: a channel in the order of ranks.
        opened: takes and loses channels as they are opened and closed.
        topology: the members' machines and links.
        places: the names of the members' places, by rank.
        margin: how many times as fast another order, or a second ring, must be.
        before: the result of an earlier trial over these machines. That trial is not repeated, unless the
            figures promise more: after a loss the remaining members wait for the ring.

    Attributes:
        found: the result.
        choice: the chosen order, in words.
        reasons: the reasons, in words.
    """

    def __init__(
        self,
        name_of: Callable[[int], int],
        timer: SumTimer,
        connect: Callable[[str, Order], Channel],
        natural: Channel,
        opened: list[Channel],
        topology: Topology,
        places: Sequence[str],
        margin: float,
        before: TrialResult,
    ) -> None:
        self._name_of, self._timer, self._connect = name_of, timer, connect
        self._natural, self._opened = natural, opened
        self._topology, self._places, self._margin = topology, places, margin
        self.found = before
        self.choice = ""
        self.reasons: list[str] = []

    def open(self) -> Sums:
        """Return the channel, or pair of rings, over which the members sum from now on. Its channels stay in
        `opened`."""
        topology = self._topology
        order, best = topology.natural, topology.best(MESSAGE)
        self.choice = f"natural: {named(order, self._name_of)}"
        channel = self._natural
        if is_same_ring(best, order) or topology.gain(best, MESSAGE) < self._margin:
            self.reasons.append(f"no order of the {topology.count} machines is better, by their links")
        elif (other := self._tried(best)) is not None:
            channel, order, self.choice = other, best, named(best, self._name_of)
        return channel if topology.count < 3 else self._both_ways(channel, order)

    def _tried(self, best: Order) -> Channel | None:
        """Return a channel in the best order, if that order wins or has won, and close the natural one; else
        None."""
        promised = self._topology.gain(best, MESSAGE)
        gain, when = self.found.gain, "in the trial before"
        if gain < self._margin and promised > self._margin * self.found.promised:
            gain = 0.0  # the figures promise more than before
        if 0 < gain < self._margin:
            self._reject(best, f"{gain:.2f} times as fast {when}")
            return None
        if not gain and (most := self._most(self._natural, promised)) < self._margin:
            self.found = msgspec.structs.replace(self.found, gain=most, promised=promised)
            self._reject(best, f"{most:.2f} times as fast at most, since latency stays")
            return None
        other = self._channel("ring/order", best)
        if not gain:
            before, after = self._timer.compare(self._natural, other, self._margin)
            gain, when = before / after, f"in a trial ({self._took_in_words(before, after)})"
            self.found = msgspec.structs.replace(self.found, gain=gain, promised=promised)
        faster = f"{gain:.2f} times as fast {when}"
        if gain < self._margin:
            self._close(other)
            self._reject(best, faster)
            return None
        self._close(self._natural)
        self.reasons.append(f"{self._difference(best)}; {faster}")
        return other

    def _reject(self, best: Order, faster: str) -> None:
        self.reasons.append(
            f"{named(best, self._name_of)} is {faster}: at least {self._margin:g} is asked for"
        )

    def _both_ways(self, first: Channel, order: Order) -> Sums:
        """Return two rings at once if a second ring makes sums faster, else `first`.

        The second ring goes the other way round: it uses the direction of each link that the first ring
        leaves idle.
        """
        share = self.found.share
        if not share and self._most(first, 2.0) < self._margin:
            share = 1.0  # each of two rings carries half of the bytes, with the full latency
            self.found = msgspec.structs.replace(self.found, share=share)
        if share == 1:
            return first
        second = self._channel("ring/back", order[::-1])
        if not share:
            share = self._share(first, second)
            self.found = msgspec.structs.replace(self.found, share=share)
        if share == 1:
            self._close(second)
            return first
        self.choice += f", and {100 * (1 - share):.0f} % of the bytes the other way round"
        return RingPair(first, second, share)

    def _share(self, first: Channel, second: Channel) -> float:
        """Return the share of the bytes that the first ring takes; 1 if a second ring gains too little."""
        alone, back = self._timer.compare(first, second, 1.0)
        share = back / (alone + back)
        alone, both = self._timer.compare(first, RingPair(first, second, share), self._margin)
        gain = f"{alone / both:.2f} times as fast as one ({self._took_in_words(alone, both)})"
        if alone < self._margin * both:
            self.reasons.append(f"a second ring, the other way round, would be {gain}")
            return 1.0
        self.reasons.append(f"two rings at once are {gain}")
        return share

    def _channel(self, purpose: str, order: Order) -> Channel:
        channel = self._connect(purpose, order)
        self._opened.append(channel)
        return channel

    def _close(self, channel: Channel) -> None:
        self._opened.remove(channel)
        channel.close()

    def _most(self, ring: Channel, times: float) -> float:
        """Return how many times as fast sums over `ring` can become at most, if bytes pass `times` as
        fast."""
        if not self._timer.size:
            self._timer.fit(ring)
        return self._timer.most(ring, self._margin, times)

    # -- words --------------------------------------------------------------------------------------------

    def _took_in_words(self, before: float, after: float) -> str:
        size = format_bytes(self._timer.size)
        return f"a sum of {size} takes {format_seconds(after)} instead of {format_seconds(before)}"

    def _difference(self, order: Order) -> str:
        """Return, in words, which cost an order lowers against the order of ranks."""
        topology = self._topology
        now, before = self._crossed(order), self._crossed(topology.natural)
        fewer = before - now
        if fewer and len(set(self._places)) < topology.count + (not topology.links):
            most = max(fewer, key=lambda way: fewer[way])
            return f"crosses {' - '.join(most)} {now[most]} times instead of {before[most]}"
        totals = [topology.crossings(each).total() for each in (order, topology.natural)]
        if totals[0] < totals[1]:  # the places are no guide: all have one name, or each has its own
            return f"goes from one machine to another {totals[0]} times instead of {totals[1]}"
        laps = [format_seconds(topology.lap(each, MESSAGE)) for each in (order, topology.natural)]
        return f"{format_bytes(MESSAGE)} takes {laps[0]} once round instead of {laps[1]}"

    def _crossed(self, order: Order) -> Counter[tuple[str, str]]:
        """Return how often a ring in this order crosses between each two places, by the places' names."""
        at = [self._places[rank] for rank in order]
        ways = zip(at, at[1:] + at[:1], strict=True)
        return Counter((min(way), max(way)) for way in ways if way[0] != way[1])
