"""Pairwise averaging: a strategy of your own, in one file.

The rule. Each worker (or each group of workers, with `groups.count`) trains a replica of the model with an
optimizer of its own. After every H steps the replicas are put into pairs at random: the seed and the step
shuffle the names of those that live, and neighbours in that order are a pair. Each of the two takes the mean
of both values. With an odd number one is left out, and goes on as it is.

No replica waits for more than one other's values, and nothing is summed over all of them; their distance
stays bounded, since pairs change each time. The idea is NoLoCo's (Kolehmainen et al., "NoLoCo: No-all-reduce
Low Communication Training Method for Large Models", 2025), without its outer momentum.

Atoll finds the strategy by an entry point. In the pyproject.toml beside this file:

    [project.entry-points."atoll.synchronizers"]
    pairs = "own_strategy:EachStep"
    pairs-of-8 = "own_strategy:EachEightSteps"

    pip install ./examples
    atoll run --workers 4 --strategy pairs examples/gpt.py --minutes 1

docs/own-strategy.md explains it line by line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from torch import Tensor

from atoll.axes.values import ElementRange
from atoll.exchange.synchronizer import Contributors, Exchange, Parts


def partner_of(contributors: Contributors, seed: int, step: int) -> int | None:
    """The contributor with which this one averages after a step; None: it is left out.

    All contributors have the same names, seed and step, so all find the same pairs.
    """
    names = list(contributors.names)
    random.Random(f"{seed} {step}").shuffle(names)
    place = names.index(contributors.own) ^ 1  # 0 with 1, 2 with 3, ...
    return names[place] if place < len(names) else None


class PairAverage:
    """The exchange of one run of values between the two of each pair."""

    def __init__(self, parts: Parts, run: ElementRange, step: int) -> None:
        self._parts, self._run, self._step = parts, run, step
        self._new: Tensor | None = None  # the values after the exchange

    def launch(self, contributors: Contributors) -> None:
        """Find the partner, and write this replica's values for the way."""
        self._partner = partner_of(contributors, self._parts.seed, self._step)
        self._own = self._parts.replica.read(self._run)
        self._payload = self._parts.coder.encode(self._own, self._step)

    def collect(self) -> None:
        """Swap with the partner. Who is left out makes the call too, for all contributors do."""
        payloads = {} if self._partner is None else {self._partner: self._payload}
        came = self._parts.link.swap(payloads)
        self._new = None
        if self._partner is None:
            return
        theirs = self._parts.coder.decode(came[self._partner], self._own)
        sent = self._parts.coder.decode(self._payload, self._own)
        mean = (sent + theirs) / 2
        # A codec rounds what it sends. What it rounds off stays here: the sum over the pair stays as it was.
        self._new = mean if bool((sent == self._own).all()) else self._own + (mean - sent)

    def commit(self) -> None:
        """Take the mean."""
        if self._new is not None:
            with self._parts.replica.update() as update:
                update.write(self._run, self._new)


class EachStep:
    """Averages in pairs after every step."""

    period = 1

    def open(self, parts: Parts) -> None:
        self._parts = parts

    def after_step(self, step: int) -> Iterator[Exchange]:
        """One exchange for each run, so that there is memory for one at a time."""
        if step % self.period == 0:
            for run in self._parts.replica.runs:
                yield PairAverage(self._parts, run, step)

    def change(self, before: Contributors, now: Contributors) -> None:
        """Pairs are drawn anew each time: nothing is kept of who is there."""

    def capture(self) -> bytes:
        """Nothing is kept between two steps."""
        return b""

    def restore(self, captured: bytes) -> None:
        """Nothing was kept."""
        if captured:
            raise ValueError(f"{len(captured)} bytes, and pairwise averaging keeps none")

    def close(self) -> None:
        """Nothing is open."""


class EachEightSteps(EachStep):
    """Averages in pairs after every eighth step: an eighth of the bytes."""

    period = 8
