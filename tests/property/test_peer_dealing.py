"""Batches dealt to nodes by nobody: all deal alike, each sample counts once, in proportion to speeds."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from statistics import stdev

import pytest
from dealing_worlds import Nodes
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.train.data.peersdealing import AHEAD, Fact, PeerDeal, weights_by
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.runs import Item

worlds = st.builds(
    Nodes,
    seed=st.integers(0, 2**32),
    length=st.integers(1, 400),
    batch=st.integers(1, 24),
    nodes=st.integers(1, 5),
    stale_max=st.integers(0, 5),
    per=st.integers(1, 3),
    dies=st.dictionaries(st.integers(1, 4), st.integers(0, 60), max_size=3),
    ahead=st.integers(0, AHEAD),
    uneven=st.sampled_from([0.0, 0.5]),
)


@pytest.mark.check
@given(worlds, st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_each_sample_counts_once_however_far_nodes_are(world: Nodes, epochs: int) -> None:
    world.run(epochs)
    left: set[tuple[Item, ...]] = set()
    for node, deal in world.deals.items():
        if world.alive(node, world.iteration):
            items = [(e, p) for e, start, stop in deal.left() for p in range(start, stop)]
            left.add(tuple(items))
    assert len(left) == 1, "all nodes know the same of what is left"
    (rest,) = left
    whole = Counter((epoch, position) for epoch in range(epochs) for position in range(world.length))
    assert world.trained + Counter(rest) == whole
    if not world.dies:
        assert not rest


@pytest.mark.parametrize(("ahead", "first"), [(0, 16), (AHEAD, 48)])
def test_parts_follow_speeds_the_sooner_the_less_is_fetched_ahead(ahead: int, first: int) -> None:
    world = Nodes(7, length=3_200, batch=40, nodes=3, stale_max=4, per=1, dies={}, ahead=ahead)
    world.paces = {0: 0.1, 1: 0.1, 2: 0.4}
    parts = []
    for deal in world.deals.values():
        deal.again([(0, 0, 3_200)], carry=False)
    for _ in range(60):
        dealt = world.deals[0].tick(world.deals[0].used)
        assert dealt is not None
        parts.append(dealt.parts)
        world._iterate()
    assert parts == [{0: 14, 1: 13, 2: 13}] * first + [{0: 18, 1: 18, 2: 4}] * (60 - first)


def test_parts_follow_a_speed_that_changes() -> None:
    """Of steps as uneven as can be by many iterations; where a node has become far slower, by the newest."""
    generator = random.Random(3)
    uneven = [Fact(t, {0: generator.lognormvariate(0, 0.47), 1: 1.0}) for t in range(400)]
    windows = [weights_by(uneven[t : t + 64])[0] for t in range(0, 336, 8)]
    few = [weights_by(uneven[t + 48 : t + 64])[0] for t in range(0, 336, 8)]
    assert stdev(windows) < 0.6 * stdev(few)
    slowed = [Fact(t, {0: 1.0 if t < 100 else 3.0, 1: 1.0}) for t in range(200)]
    assert weights_by(slowed[40:104]) == {0: 1.0, 1: 1.0}
    assert weights_by(slowed[46:110]) == {0: 1 / 3, 1: 1.0}
    assert weights_by(slowed[100:164]) == {0: 1 / 3, 1: 1.0}


def test_parts_follow_the_speeds() -> None:
    world = Nodes(7, length=40_000, batch=40, nodes=3, stale_max=4, per=1, dies={})
    world.paces = {0: 0.1, 1: 0.1, 2: 0.4}
    world.run(1)
    late = {node: deal.tick(deal.used - 1) for node, deal in world.deals.items()}
    assert late[0] is not None
    assert late[0].parts == {0: 18, 1: 18, 2: 4}
    assert world.sizes[0] >= world.sizes[1] > 3 * world.sizes[2]


def test_a_node_that_has_died_gets_nothing_after_a_while_and_its_part_is_dealt_again() -> None:
    world = Nodes(3, length=8_000, batch=8, nodes=4, stale_max=2, per=1, dies={3: 100})
    world.run(1)
    assert set(world.trained.values()) == {1}
    assert len(world.trained) == 8_000
    last = world.deals[0].tick(world.deals[0].used - 1)
    assert last is not None
    assert sorted(last.parts) == [0, 1, 2]


def test_after_an_earlier_checkpoint_was_loaded_who_is_lost_is_seen_and_its_part_dealt_again() -> None:
    """Iterations then have numbers that they had before: what was applied under those is no word of these."""
    now = 0
    batches = PeerBatches(
        1000, batch=8, node=0, nodes=[0, 1], stale_max=0, iteration=lambda: now, ahead=0, shuffle=False
    )
    trained: Counter[int] = Counter()

    def iterate(loop: Iterator[list[int]], nodes: list[int]) -> None:
        """Make an iteration that these nodes contribute to; node 1's part comes after node 0's."""
        nonlocal now
        batch = next(loop)
        batches.count(len(batch))
        batches.committed()
        batches.applied(now, dict.fromkeys(nodes, 1.0))
        now += 1
        trained.update(batch)
        if 1 in nodes:
            trained.update(range(batch[-1] + 1, batch[-1] + 5))

    saved, loop = batches.state_dict(), iter(batches)
    for _ in range(100):
        iterate(loop, [0, 1])
    batches.load_state_dict(saved)
    now, loop = 0, iter(batches)
    trained.clear()
    with contextlib.suppress(StopIteration):  # at the end of the epoch
        while True:
            iterate(loop, [0, 1] if now < 32 else [0])
    assert set(trained.values()) == {1}
    assert len(trained) == 1000


@pytest.mark.parametrize(("batch", "slow"), [(40, 2), (6, 2), (5, 1)])
def test_a_slow_node_gets_the_least_samples_if_a_batch_has_them_for_all(batch: int, slow: int) -> None:
    world = Nodes(7, length=80 * batch, batch=batch, nodes=3, stale_max=4, per=1, dies={}, ahead=0, least=2)
    world.paces = {0: 0.1, 1: 0.1, 2: 2.0 if batch > 5 else 0.3}  # parts of 1 or less, without a least
    world.run(1)
    dealt = world.deals[0].tick(world.deals[0].used - 1)
    assert dealt is not None
    assert dealt.parts[2] == slow
    assert sum(dealt.parts.values()) == batch


def test_speeds_count_once_all_are_known() -> None:
    facts = [Fact(0, {0: 0.5, 1: 0.0}), Fact(1, {0: 0.5, 1: 0.25})]
    assert weights_by(facts[:1]) == {0: 1.0, 1: 1.0}
    assert weights_by(facts) == {0: 2.0, 1: 4.0}


@pytest.mark.parametrize("ahead", [0, 3, AHEAD])
def test_a_loader_that_fetches_too_far_ahead_is_told(ahead: int) -> None:
    deal = PeerDeal([(0, 0, 10_000)], 1, [0, 1], 4, ahead=ahead)
    assert deal.tick(ahead) is not None
    with pytest.raises(UserError, match=f"a DataLoader fetches more than {ahead} batches ahead"):
        deal.tick(ahead + 1)
