"""How long a ring's sums take, on its slowest member: all members time the same sums, and know the same."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from atoll.core.errors import RunError
from atoll.train.group.channel import Channel, Sums
from atoll.train.group.ringbytes import gather_words

WHAT = "the choice of the ring's order"
MESSAGE = 2**20  # bytes that a ring is chosen for: about what a message of gradients has
_SECONDS = 0.3  # that a timed sum takes at least, unless it is of the most bytes
_BYTES = (2**16, 2**24)
_SHORT = 2**10  # bytes of a sum that takes what latency takes
_TURNS = 2  # of each ring, of which the best counts
_CLEAR = 1.25  # where a ring is so many times better or worse than it must be, one turn is enough


class _Took(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seconds: list[Annotated[float, Meta(ge=0)]]


class SumTimer:
    """Times sums over rings of the same members. Its calls are collectives of these members.

    `size` is how many bytes the timed sums have; 0: `fit` is still to be called.

    Args:
        session: for what the members tell one another.
        now: the clock, in seconds.
    """

    def __init__(self, session: Channel, now: Callable[[], float] = time.perf_counter) -> None:
        self._session, self._now = session, now
        self._latency = 0.0  # seconds of a short sum
        self._best: dict[Sums, float] = {}  # seconds of a sum of `size` over each ring
        self.size = 0

    def fit(self, ring: Sums) -> None:
        """Find how large a sum must be to tell how fast a ring is, by sums over `ring`.

        Over a late link a larger sum costs little more, and shows the bandwidth too.
        """
        self._latency = self._took([ring], _SHORT)[0]
        self.size, before = _BYTES[0], math.inf
        took = self._took([ring])[0]
        while self.size < _BYTES[1] and (
            took < _SECONDS or (self.size < MESSAGE and took < min(2 * _SECONDS, 1.5 * before))
        ):
            self.size *= 4
            before, took = took, self._took([ring])[0]
        self._best = {ring: took}

    def most(self, ring: Sums, margin: float, times: float = math.inf) -> float:
        """How many times as fast sums over `ring` can become at most, if bytes pass `times` as fast.

        Latency stays. Where that is less than `margin`, no trial can show more.
        """
        found = self._bound(ring, times)
        if margin <= found < margin * _CLEAR:
            self._time([ring])  # a connection begins slowly, which looks as if bytes took long
            found = self._bound(ring, times)
        return found

    def _bound(self, ring: Sums, times: float) -> float:
        if ring not in self._best:
            self._time([ring])
        whole = self._best[ring]
        latency = min(self._latency, whole)
        return whole / max(1e-9, latency + (whole - latency) / times)

    def compare(self, one: Sums, other: Sums, margin: float) -> tuple[float, float]:
        """Return the seconds of a sum over each: the best of some turns.

        There are only as many turns as tell whether `other` is `margin` times as fast as `one`.
        """
        new = [ring for ring in (one, other) if ring not in self._best]
        if new:
            self._took(new)  # a connection begins slowly
            self._time(new)
        for _ in range(_TURNS - 1):
            if 1 / _CLEAR < self._best[one] / (self._best[other] * margin) < _CLEAR:
                self._time([one, other])
        return self._best[one], self._best[other]

    def _time(self, rings: Sequence[Sums]) -> None:
        for ring, took in zip(rings, self._took(rings), strict=True):
            self._best[ring] = min(took, self._best.get(ring, math.inf))

    def _took(self, rings: Sequence[Sums], size: int = 0) -> list[float]:
        """Return the seconds of a sum over each of `rings`, one after the other, on the slowest member."""
        tensor = torch.zeros((size or self.size) // 4)
        seconds = []
        for ring in rings:
            begin = self._now()
            ring.wait(ring.sum(tensor), WHAT)
            seconds.append(self._now() - begin)
        told = gather_words(self._session, _Took(seconds), WHAT)
        if any(len(each.seconds) != len(seconds) for each in told):
            raise RunError(
                "another worker tells of another trial of the ring's order; start all with one version"
            )
        return [max(1e-9, *turn) for turn in zip(*(each.seconds for each in told), strict=True)]
