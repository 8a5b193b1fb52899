"""The times of a ring's sums on its slowest member. All members time the same sums, and have equal
figures."""

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
MESSAGE = 2**20  # bytes for which a ring is chosen: about one message of gradients
_SECONDS = 0.3  # the least duration of a timed sum, unless it has the most bytes
_BYTES = (2**16, 2**24)  # sizes of timed sums: the least, and the most
_SHORT = 2**10  # bytes of a sum whose time is all latency
_TURNS = 2  # for each ring; the best turn counts
_CLEAR = 1.25  # one turn is enough for a ring that passes or misses its mark by this factor


class _Took(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    seconds: list[Annotated[float, Meta(ge=0)]]


class SumTimer:
    """The timing of sums over rings of the same members. Its calls are collectives of these members.

    Args:
        session: carries the members' figures.
        now: the clock, in seconds.

    Attributes:
        size: the bytes of a timed sum; 0 until `fit` was called.
    """

    def __init__(self, session: Channel, now: Callable[[], float] = time.perf_counter) -> None:
        self._session, self._now = session, now
        self._latency = 0.0  # seconds of a short sum
        self._best: dict[Sums, float] = {}  # seconds of a sum of `size` over each ring
        self.size = 0

    def fit(self, ring: Sums) -> None:
        """Choose the size of timed sums, large enough to show the bandwidth of a ring, by sums over `ring`.

        Over a link of high latency a larger sum costs little more time, and shows the bandwidth too.
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
        """Return how many times as fast sums over `ring` can become at most, if bytes pass `times` as fast.

        The latency stays. If the result is less than `margin`, no trial can show more.
        """
        found = self._bound(ring, times)
        if margin <= found < margin * _CLEAR:
            self._time([ring])  # a connection begins slowly, so a second turn may be faster
            found = self._bound(ring, times)
        return found

    def _bound(self, ring: Sums, times: float) -> float:
        if ring not in self._best:
            self._time([ring])
        whole = self._best[ring]
        latency = min(self._latency, whole)
        return whole / max(1e-9, latency + (whole - latency) / times)

    def compare(self, one: Sums, other: Sums, margin: float) -> tuple[float, float]:
        """Return the seconds of a sum over each ring: the best of some turns.

        There are only as many turns as it takes to tell whether `other` is `margin` times as fast as `one`.
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
