"""How batches are dealt to nodes in proportion to their speeds, by nobody: each works out the same; pure.

All nodes make the same **ticks**: in tick q they take the next `batch` samples of the **pool** together, each
a part of it. The parts of a **block** of ticks are by facts alone that every node has by then: what the
applied contributions of iterations up to a fixed distance before said, whose speeds, and who was there at
all. So no two nodes ever deal differently, however far each has come, or has a loader that fetches ahead.
What was dealt to a node whose contribution of that iteration was not applied is dealt again. Source:
docs/peers.md, "Data".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from atoll.core.errors import UserError
from atoll.train.data.runs import Item, Run, cut, items_of, merged, positions, singles, ticks_of
from atoll.train.data.shares import split

BLOCK = 16  # ticks that are dealt alike
AHEAD = 31  # ticks that a loader may fetch ahead, where nothing else is said
_WINDOW = 64  # iterations over which a node's speed is the median
_NEWEST = 16  # and where it has changed: where theirs is beyond _CHANGED times that, or below its part
_CHANGED = 1.5


class Fact(msgspec.Struct, frozen=True):
    """An applied iteration: whose contributions it was made of, and the seconds that a sample took each (0:
    not known)."""

    iteration: int
    paces: dict[int, float]


class Dealt(msgspec.Struct, frozen=True):
    """A tick: the samples that all nodes take together, and how many each takes, in order of node."""

    tick: int
    runs: list[Run]
    parts: dict[int, int]

    def part_of(self, node: int) -> list[Item]:
        """What a node takes; nothing: a fill."""
        begin = sum(size for other, size in self.parts.items() if other < node)
        return items_of(self.runs)[begin : begin + self.parts.get(node, 0)]


class DealState(msgspec.Struct):
    """A deal between two iterations: with it, a node that comes late deals as the others do."""

    pool: list[Run]
    next: int
    used: int
    made: list[tuple[int, int]]
    facts: list[Fact]
    dealt: list[Dealt]
    blocks: dict[int, dict[int, float]]
    judged: int
    nodes: list[int]


class PeerDeal:
    """The pool `runs` among `nodes`, from `tick` on. Ticks go on over epochs: `again` gives the next pool.

    `ahead` is how many ticks beyond the next one are asked for at most; the same on all nodes.
    """

    def __init__(
        self,
        runs: Iterable[Run],
        batch: int,
        nodes: Sequence[int],
        stale_max: int,
        *,
        drop_last: bool = False,
        ahead: int = AHEAD,
    ) -> None:
        self.batch, self._stale_max, self._drop_last, self._ahead = batch, stale_max, drop_last, ahead
        self._nodes = sorted(nodes)
        self.begin(runs)

    def begin(self, runs: Iterable[Run]) -> None:
        """Deal these as at the beginning. What was told of iterations is forgotten: after a checkpoint, which
        may be an earlier one, others have their numbers."""
        self._state = DealState(list(runs), 0, 0, [], [], [], {}, -1, self._nodes)

    # What is told

    def applied(self, iteration: int, paces: Mapping[int, float]) -> None:
        """The contributions of these nodes, and no others, are in the global parameters; in order of
        iterations, each once."""
        facts = self._state.facts
        if not facts or facts[-1].iteration < iteration:
            facts.append(Fact(iteration, dict(paces)))

    def made(self, iteration: int, ticks: int) -> None:
        """This node's backward of `iteration` is whole, and so many ticks were used by then, of all."""
        state = self._state
        if state.made and state.made[-1][0] == iteration:  # one more backward of it
            state.made.pop()
        state.made.append((iteration, ticks))
        state.used = max(state.used, ticks)
        self._forget()

    # What is asked

    def tick(self, number: int) -> Dealt | None:
        """What all take in a tick; None: nothing is left. Raises UserError for one that is too far ahead."""
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
        """How many more ticks the pool gives, as it is."""
        return ticks_of(positions(self._state.pool), self.batch, drop_last=self._drop_last)

    def left(self) -> list[Run]:
        """What no applied contribution has trained on, once all iterations are applied: what is in the pool,
        what was dealt and not used, and what was dealt to nodes that were not there."""
        state = self._state
        missed = self._missed(state.facts[-1].iteration) if state.facts else []
        unused = [run for each in state.dealt if each.tick >= state.used for run in each.runs]
        return merged([*state.pool, *missed, *unused])

    def again(self, runs: Iterable[Run], *, carry: bool = True) -> list[Run]:
        """Deal `runs` next, and with `carry` what is left of the pool before them; what was dealt and not
        used is forgotten. Returns the pool."""
        state = self._state
        state.pool = merged([*(state.pool if carry else ()), *runs])
        state.dealt = [each for each in state.dealt if each.tick < state.used]
        # A node that came back may have made more ticks than the pool before had: those are of this one.
        state.next = min(state.next, state.used)
        return list(state.pool)

    @property
    def used(self) -> int:
        """Ticks of iterations that are made."""
        return self._state.used

    def state(self) -> dict[str, Any]:
        """As JSON can hold it."""
        plain: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return plain

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on as another node's `state` says. Raises msgspec.ValidationError for anything else."""
        self._state = msgspec.convert(state, DealState, strict=False)

    # Inside

    def _deal(self) -> bool:
        """Deal the next tick; False: the pool is empty."""
        state = self._state
        weights = self._weights(state.next // BLOCK)
        size = min(self.batch, positions(state.pool))
        if not size or (self._drop_last and size < self.batch):
            return False
        runs, state.pool = cut(state.pool, size)
        state.dealt.append(Dealt(state.next, runs, split(size, weights)))
        state.next += 1
        return True

    def _weights(self, block: int) -> dict[int, float]:
        """How a block is shared out; decided once, when its first tick is dealt."""
        state = self._state
        if block not in state.blocks:
            until = self._known_at(block * BLOCK)
            self._judge(until)
            facts = [fact for fact in state.facts if until - _WINDOW < fact.iteration <= until]
            state.blocks[block] = weights_by(facts) if facts else dict.fromkeys(state.nodes, 1.0)
        return state.blocks[block]

    def _known_at(self, tick: int) -> int:
        """The last iteration that every node has applied, whenever it deals this tick."""
        used = tick - 1 - self._ahead
        iteration = next((made for made, ticks in reversed(self._state.made) if ticks <= used), None)
        return -1 if iteration is None else iteration - self._stale_max - 1

    def _judge(self, until: int) -> None:
        """Put back what was dealt to nodes that were not there, in iterations up to `until`."""
        state = self._state
        if missed := self._missed(until):
            state.pool = merged([*state.pool, *missed])
        state.judged = max(state.judged, until)

    def _missed(self, until: int) -> list[Run]:
        """What was dealt to nodes that were not there, in iterations up to `until` that were not judged."""
        state = self._state
        present = {fact.iteration: fact.paces.keys() for fact in state.facts}
        begin = 0
        back: list[Run] = []
        for iteration, ticks in state.made:
            if state.judged < iteration <= until and iteration in present:
                for each in state.dealt:
                    if begin <= each.tick < ticks:
                        missing = [node for node in each.parts if node not in present[iteration]]
                        back += [run for node in missing for run in singles(each.part_of(node))]
            begin = ticks
        return merged(back)

    def _forget(self) -> None:
        """Let go of what nothing asks for any more."""
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
    """The nodes of the last of these iterations, each with its speed in samples a second; where one's is not
    known yet, all alike."""
    weights = {}
    for node in sorted(facts[-1].paces):
        paces = [fact.paces[node] for fact in facts if fact.paces.get(node, 0.0) > 0]
        if not paces:
            return dict.fromkeys(sorted(facts[-1].paces), 1.0)
        weights[node] = 1.0 / _pace_by(paces)
    return weights


def _pace_by(paces: Sequence[float]) -> float:
    """What a node's iterations say of its next ones: many of them, since few tell little of uneven steps; the
    newest alone, where those are much slower or faster."""
    whole, newest = median(paces), median(paces[-_NEWEST:])
    return whole if whole / _CHANGED <= newest <= whole * _CHANGED else newest
