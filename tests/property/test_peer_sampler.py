"""Properties of `session.sampler` under strategy `peers`.

Whoever is lost or comes back, all nodes deal alike, and each epoch that begins after a loss is whole.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.train.data.peerssampler import PeerSampler
from atoll.train.sync.peers import Peers
from atoll.wire.device import Applied, AppliedContribution

BATCH = 2


@dataclass
class Node:
    """One node's script: a loop over batches of its sampler, for all of its devices at once."""

    number: int
    devices: list[int]
    stale_max: int
    length: int
    heard: int = -1  # the last iteration of which it knows whose contributions were applied
    peers: list[Peers] = field(default_factory=list)
    samplers: list[PeerSampler] = field(default_factory=list)
    loops: list[Iterator[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        firsts = [sum(self.devices[:node]) for node in range(len(self.devices))]
        workers_of = [range(f, f + n) for f, n in zip(firsts, self.devices, strict=True)]
        introduction = SimpleNamespace(devices=self.devices, workers_of=lambda node: workers_of[node])
        self.worker: Any = SimpleNamespace(
            introduction=introduction, late=False, on=lambda _kind, _handler: None
        )
        for rank in workers_of[self.number]:
            workers: Any = SimpleNamespace(
                place=SimpleNamespace(rank=rank), ranks=list(range(sum(self.devices)))
            )
            peers = Peers(self.worker, workers, None, lambda: 0.0, self.stale_max, print)  # type: ignore[arg-type]
            peers._model = SimpleNamespace(exchange=SimpleNamespace(steps=0, consumed=0.0))  # type: ignore[assignment]
            self.samplers.append(peers.sampler(range(self.length), seed=3))
            self.peers.append(peers)

    def hear(self, facts: list[list[int]], until: int) -> None:
        """Learn of the applied iterations up to `until`."""
        for iteration in range(self.heard + 1, until + 1):
            parts = [AppliedContribution(node, 0, 1.0, 1.0) for node in facts[iteration]]
            for peers in self.peers:
                peers._applied(Applied(iteration=iteration, parts=parts))
            self.heard = iteration

    def draw(self, steps: int) -> list[tuple[int, float]] | None:
        """The samples of the next iteration, and the share of each batch that counts; None where the loop has
        ended."""
        for peers in self.peers:
            peers._model.exchange.steps = steps  # type: ignore[union-attr]
        if not self.loops:
            self.loops = [iter(sampler) for sampler in self.samplers]
        found = [_take(loop) for loop in self.loops]
        assert len({len(batch) for batch in found}) == 1, "a node's devices make unlike batches"
        if not found[0]:
            self.loops = []
            return None
        taken = []
        for sampler, batch in zip(self.samplers, found, strict=True):
            share = sampler.count(len(batch)) / len(batch)
            taken += [(index, share) for index in batch]
        return taken

    def draw_on(self, steps: int) -> list[tuple[int, float]]:
        """The same, of the next loop where this one has ended."""
        drawn = self.draw(steps)
        drawn = self.draw(steps) if drawn is None else drawn
        assert drawn is not None
        return drawn


def _take(loop: Iterator[int]) -> list[int]:
    return [index for _, index in zip(range(BATCH), loop)]  # noqa: B905


@pytest.mark.check
@given(
    devices=st.lists(st.integers(1, 2), min_size=2, max_size=4),
    length=st.integers(1, 40),
    stale_max=st.integers(0, 3),
    dies=st.dictionaries(st.integers(1, 3), st.integers(1, 12), max_size=2),
    away=st.dictionaries(st.integers(1, 3), st.integers(1, 25), max_size=2),
    seed=st.integers(0, 99),
)
def test_what_a_lost_node_leaves_is_dealt_to_the_others(
    devices: list[int],
    length: int,
    stale_max: int,
    dies: dict[int, int],
    away: dict[int, int],
    seed: int,
) -> None:
    """Node `n` dies before iteration `dies[n]`, for good or for `away[n]` iterations. Each node knows of an
    iteration at the latest when it must, and at the earliest when it is applied."""
    world, hears = len(devices), random.Random(seed)
    nodes = {number: Node(number, devices, stale_max, length) for number in range(world)}
    facts: list[list[int]] = []
    counted: dict[int, Counter[int]] = {}
    whole: dict[int, bool] = {}  # whether all to whom an epoch is dealt have stayed
    members: dict[int, list[int]] = {}
    begun: dict[int, int] = {}  # the iteration with which each epoch begins
    for iteration in range(30):
        for number in [n for n, at in dies.items() if at == iteration and n in nodes]:
            del nodes[number]
        drawn: dict[int, list[tuple[int, float]]] = {}
        for number, node in sorted(nodes.items()):
            least = max(node.heard, iteration - stale_max - 1)
            node.hear(facts, hears.randint(least, max(least, iteration - 1)))
            drawn[number] = node.draw_on(iteration)
        for number in [n for n, at in dies.items() if n in away and at + away[n] == iteration and n < world]:
            node, giver = Node(number, devices, stale_max, length), nodes[min(nodes)]
            for sampler in node.samplers:  # the giver is at the end of this iteration's backward
                sampler.return_to(giver.samplers[0].lockstep_state())
            node.hear(facts, iteration - 1)
            drawn[number] = node.draw_on(iteration)
            nodes[number] = node
        for node in nodes.values():
            for sampler in node.samplers:
                sampler.committed()
        epochs = {(s.epoch, tuple(s.members)) for node in nodes.values() for s in node.samplers}
        assert len(epochs) == 1, "nodes are in unlike places"
        epoch, dealt_to = epochs.pop()
        gone = [rank for rank in dealt_to if rank not in _ranks(devices, nodes)]
        whole[epoch] = whole.get(epoch, True) and not gone
        members[epoch] = list(dealt_to)
        begun.setdefault(epoch, iteration)
        counts = counted.setdefault(epoch, Counter())
        for batch in drawn.values():
            for index, share in batch:
                assert share in (0.0, 1.0)
                counts[index] += int(share)
        facts.append(sorted(nodes))
    last = max(counted)
    for epoch, counts in counted.items():
        if whole[epoch] and epoch < last:
            fills = -length % len(members[epoch])
            assert set(counts) >= set(range(length))
            assert sum(counts.values()) == length + fills
    lost_at = max((at for node, at in dies.items() if node < world), default=-1)
    if not away:
        noticed = [epoch for epoch, at in begun.items() if at > lost_at + stale_max]
        assert all(whole[epoch] for epoch in noticed)
        assert all(members[epoch] == sorted(_ranks(devices, nodes)) for epoch in noticed)


def _ranks(devices: list[int], nodes: dict[int, Node]) -> set[int]:
    return {rank for node in nodes for rank in range(sum(devices[:node]), sum(devices[: node + 1]))}
