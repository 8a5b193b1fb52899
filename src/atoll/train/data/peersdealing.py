"""The deal of batches to nodes in proportion to their speeds, without a coordinator; pure.

Each node computes the deal for itself, with equal results. All nodes make the same **ticks**: in tick q they
take the next `batch` samples of the **pool** together, each a part. The parts of a **block** of ticks follow
only from facts that every node has by then: the nodes and speeds in the applied contributions of iterations
up to a fixed distance before. So no two nodes deal differently, however far each has come, and however far
its loader fetches ahead. Samples dealt to a node whose contribution of that iteration was not applied are
dealt again. Source: docs/peers.md, "Data".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from atoll.core.decoding import converted
from atoll.core.errors import UserError
from atoll.groups.shares import scaled
from atoll.train.data.runs import Item, SampleRange, cut, items_of, merged, positions, singles, ticks_of

BLOCK = 16  # ticks that are dealt by one set of weights
AHEAD = 31  # ticks that a loader may fetch ahead by default
_WINDOW = 64  # iterations over which a node's speed is the median
_NEWEST = 16  # newest iterations, whose median counts alone if it differs by more than a factor of _CHANGED
_CHANGED = 1.5
_UNITS = 2**20  # by which the fastest node's speed is counted, in whole numbers


class Fact(msgspec.Struct, frozen=True):
    """An applied iteration: the nodes that contributed, each with its seconds per sample (0: not known)."""

    iteration: int
    paces: dict[int, float]


class Dealt(msgspec.Struct, frozen=True):
    """A tick.

    Attributes:
        tick: its number.
        runs: the samples that all nodes take together.
        parts: the number of samples that each node takes, in order of nodes.
    """

    tick: int
    runs: list[SampleRange]
    parts: dict[int, int]

    def part_of(self, node: int) -> list[Item]:
        """Return the samples that a node takes; empty: a fill, a sample of weight 0."""
        begin = sum(size for other, size in self.parts.items() if other < node)
        return items_of(self.runs)[begin : begin + self.parts.get(node, 0)]


class DealState(msgspec.Struct):
    """A deal between two iterations, with which a late node deals as the others do.

    Attributes:
        pool: the samples that are not dealt yet.
        next: the next tick to deal.
        used: the number of ticks that whole backwards have used.
        made: for each iteration, the number of ticks used after it.
        facts: the applied iterations.
        dealt: the ticks that were dealt.
        blocks: the nodes' weights in each block.
        judged: the last iteration whose missed samples are back in the pool.
        nodes: the nodes with which the deal began.
    """

    pool: list[SampleRange]
    next: int
    used: int
    made: list[tuple[int, int]]
    facts: list[Fact]
    dealt: list[Dealt]
    blocks: dict[int, dict[int, float]]
    judged: int
    nodes: list[int]


class PeerDeal:
    """The deal of the pool `runs` among `nodes`, tick by tick. Ticks go on over epochs: `again` gives the
    next pool.

    `ahead` is the most ticks beyond the next one for which a loader asks; equal on all nodes. `stale_max` is
    the most iterations that a node may be ahead. `least` is the least samples of a node that gets any, if a
    batch has that many for each.
    """

    def __init__(
        self,
        runs: Iterable[SampleRange],
        batch: int,
        nodes: Sequence[int],
        stale_max: int,
        *,
        drop_last: bool = False,
        ahead: int = AHEAD,
        least: int = 1,
    ) -> None:
        self.batch, self._stale_max, self._drop_last, self._ahead = batch, stale_max, drop_last, ahead
        self._least = least
        self._nodes = sorted(nodes)
        self.begin(runs)

    def begin(self, runs: Iterable[SampleRange]) -> None:
        """Deal `runs` as at the beginning, and forget reported iterations.

        After a load of an earlier checkpoint, their numbers belong to other iterations.
        """
        self._state = DealState(list(runs), 0, 0, [], [], [], {}, -1, self._nodes)

    # Reports

    def applied(self, iteration: int, paces: Mapping[int, float]) -> None:
        """Report that the contributions of the nodes in `paces`, and no others, are in the global parameters.

        `paces` has each node's seconds per sample (0: not known). This is called once for each iteration, in
        order.
        """
        facts = self._state.facts
        if not facts or facts[-1].iteration < iteration:
            facts.append(Fact(iteration, dict(paces)))

    def made(self, iteration: int, ticks: int) -> None:
        """Report that this node's backward of `iteration` is whole, after `ticks` ticks in all."""
        state = self._state
        if state.made and state.made[-1][0] == iteration:  # another backward of the iteration
            state.made.pop()
        state.made.append((iteration, ticks))
        state.used = max(state.used, ticks)
        self._forget()

    # Queries

    def tick(self, number: int) -> Dealt | None:
        """Return the tick of this number; None if nothing is left. Raises UserError for a tick that is too
        far ahead."""
        state = self._state
        if number > state.used + self._ahead:
            raise UserError(
                f"a DataLoader fetches more than {self._ahead} batches ahead (num_workers times "
                "prefetch_factor; and those of an iteration that has several): under strategy 'peers' they "
                "are not dealt yet; fetch fewer, or give session.batches a larger ahead= on every node"
            )
        while state.next <= number:
            if not self._deal():
                return None
        return next((each for each in state.dealt if each.tick == number), None)

    @property
    def ticks_left(self) -> int:
        """The number of ticks that the present pool still gives."""
        return ticks_of(positions(self._state.pool), self.batch, drop_last=self._drop_last)

    def left(self) -> list[SampleRange]:
        """Return the samples on which no contribution has trained once all iterations are applied.

        These are the pool, samples dealt and not used, and samples dealt to absent nodes.
        """
        state = self._state
        missed = self._missed(state.facts[-1].iteration) if state.facts else []
        unused = [run for each in state.dealt if each.tick >= state.used for run in each.runs]
        return merged([*state.pool, *missed, *unused])

    def again(self, runs: Iterable[SampleRange], *, carry: bool = True) -> list[SampleRange]:
        """Deal `runs` next, and with `carry` the rest of the pool before them; return the new pool.

        Samples dealt and not used are forgotten.
        """
        state = self._state
        state.pool = merged([*(state.pool if carry else ()), *runs])
        state.dealt = [each for each in state.dealt if each.tick < state.used]
        # A returned node may have made more ticks than the former pool had: these belong to the new pool.
        state.next = min(state.next, state.used)
        return list(state.pool)

    @property
    def used(self) -> int:
        """The number of ticks that whole backwards have used."""
        return self._state.used

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        plain: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return plain

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from another node's `state`. Raises msgspec.ValidationError for anything else."""
        self._state = converted(state, DealState, strict=False)

    # Inside

    def _deal(self) -> bool:
        """Deal the next tick; return False if the pool gives none."""
        state = self._state
        weights = self._weights(state.next // BLOCK)
        size = min(self.batch, positions(state.pool))
        if not size or (self._drop_last and size < self.batch):
            return False
        runs, state.pool = cut(state.pool, size)
        state.dealt.append(Dealt(state.next, runs, self._parts(size, weights)))
        state.next += 1
        return True

    def _parts(self, size: int, weights: Mapping[int, float]) -> dict[int, int]:
        nodes, most = sorted(weights), max(weights.values())
        units = np.array([max(1, round(_UNITS * weights[node] / most)) for node in nodes], dtype=np.int64)
        least = self._least if self.batch >= self._least * len(nodes) else 1
        return dict(zip(nodes, scaled(units, size, least).tolist(), strict=True))

    def _weights(self, block: int) -> dict[int, float]:
        """Return the nodes' weights in a block. They are decided once, when the block's first tick is
        dealt."""
        state = self._state
        if block not in state.blocks:
            until = self._known_at(block * BLOCK)
            self._judge(until)
            facts = [fact for fact in state.facts if until - _WINDOW < fact.iteration <= until]
            state.blocks[block] = weights_by(facts) if facts else dict.fromkeys(state.nodes, 1.0)
        return state.blocks[block]

    def _known_at(self, tick: int) -> int:
        """Return the last iteration that every node has applied when it deals `tick`; below 0: none."""
        used = tick - 1 - self._ahead
        iteration = next((made for made, ticks in reversed(self._state.made) if ticks <= used), None)
        return -1 if iteration is None else iteration - self._stale_max - 1

    def _judge(self, until: int) -> None:
        """Put samples dealt to absent nodes, in iterations up to `until`, back into the pool."""
        state = self._state
        if missed := self._missed(until):
            state.pool = merged([*state.pool, *missed])
        state.judged = max(state.judged, until)

    def _missed(self, until: int) -> list[SampleRange]:
        """Return the samples dealt to absent nodes, in iterations up to `until` that were not judged yet."""
        state = self._state
        present = {fact.iteration: fact.paces.keys() for fact in state.facts}
        begin = 0
        back: list[SampleRange] = []
        for iteration, ticks in state.made:
            if state.judged < iteration <= until and iteration in present:
                for each in state.dealt:
                    if begin <= each.tick < ticks:
                        missing = [node for node in each.parts if node not in present[iteration]]
                        back += [run for node in missing for run in singles(each.part_of(node))]
            begin = ticks
        return merged(back)

    def _forget(self) -> None:
        """Drop the facts, iterations, ticks and blocks that no later call needs."""
        state = self._state
        oldest = self._known_at(state.used) - _WINDOW
        state.facts = [fact for fact in state.facts if fact.iteration > oldest]
        kept = [index for index, (made, _) in enumerate(state.made) if made > min(oldest, state.judged)]
        first = max(0, kept[0] - 1) if kept else 0
        state.made = state.made[first:]
        state.dealt = [each for each in state.dealt if each.tick >= state.made[0][1] or first == 0]
        needed = (state.used - 1 - self._ahead) // BLOCK
        state.blocks = {block: weights for block, weights in state.blocks.items() if block >= needed}


def weights_by(facts: Sequence[Fact]) -> dict[int, float]:
    """Return the nodes of the last of these iterations, each with its speed in samples a second.

    All are 1.0 if a speed is not known yet.
    """
    weights = {}
    for node in sorted(facts[-1].paces):
        paces = [fact.paces[node] for fact in facts if fact.paces.get(node, 0.0) > 0]
        if not paces:
            return dict.fromkeys(sorted(facts[-1].paces), 1.0)
        weights[node] = 1.0 / _pace_by(paces)
    return weights


def _pace_by(paces: Sequence[float]) -> float:
    """Return a prediction of a node's seconds per sample: the median of many iterations, since steps are
    uneven.

    If the newest iterations are much slower or faster, it is their median alone.
    """
    whole, newest = median(paces), median(paces[-_NEWEST:])
    return whole if whole / _CHANGED <= newest <= whole * _CHANGED else newest
