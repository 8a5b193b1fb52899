"""Properties of the sampler: exactly once an epoch, whatever the world, and whenever it changes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.train.data.sampler import ShardedSampler

WORLDS = st.integers(1, 6)
LENGTHS = st.integers(1, 60)


def team(length: int, world: int, seed: int, drop_last: bool = False) -> list[ShardedSampler]:
    return [
        ShardedSampler(length, rank=rank, world=world, seed=seed, drop_last=drop_last)
        for rank in range(world)
    ]


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    alone = ShardedSampler(length, rank=0, world=1, seed=seed)
    alone.set_epoch(epoch)
    return list(alone)


@given(LENGTHS, WORLDS, st.integers(0, 9), st.booleans())
def test_each_sample_comes_once_an_epoch(length: int, world: int, seed: int, drop_last: bool) -> None:
    samplers = team(length, world, seed, drop_last)
    for _ in range(2):
        expected = len(samplers[0])
        shares = [list(sampler) for sampler in samplers]
        assert {len(share) for share in shares} == {expected}
        counts = Counter(index for share in shares for index in share)
        if drop_last:
            assert set(counts.values()) <= {1}
            assert length - len(counts) < world
        else:
            assert set(counts) == set(range(length))
            assert counts.total() - length < world  # the padding


@given(LENGTHS, WORLDS, st.integers(1, 5), st.integers(0, 9))
def test_the_workers_kth_batches_are_a_contiguous_run(length: int, world: int, batch: int, seed: int) -> None:
    order = permutation(length, seed, 0)
    shares = [list(sampler) for sampler in team(length, world, seed)]
    padded = [order[i % length] for i in range(len(shares[0]) * world)]
    for start in range(0, len(shares[0]), batch):
        union = [index for share in shares for index in share[start : start + batch]]
        assert sorted(union) == sorted(padded[start * world : (start + batch) * world])


@given(
    LENGTHS,
    st.integers(0, 9),
    st.lists(st.tuples(WORLDS, st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=8),
)
def test_a_run_that_changes_its_world_sees_the_samples_in_the_order_of_one_that_does_not(
    length: int, seed: int, legs: list[tuple[int, int, int]]
) -> None:
    """Each leg is a world, a batch size, and a number of steps before it is saved and loaded elsewhere."""
    samplers = team(length, 1, seed)
    seen: dict[int, list[int]] = {}
    for world, batch, steps in legs:
        state = samplers[0].state_dict(sum(s.consumed for s in samplers))
        samplers = team(length, world, seed=0)
        for sampler in samplers:
            sampler.load_state_dict(state)
        _train(samplers, batch, steps, seen)
    for epoch, samples in seen.items():
        order = permutation(length, seed, epoch)
        assert samples[:length] == order[: len(samples)]
        assert samples[length:] == [order[i % length] for i in range(length, len(samples))]
    assert sorted(seen) == list(range(len(seen)))


def _train(samplers: list[ShardedSampler], batch: int, steps: int, seen: dict[int, list[int]]) -> None:
    """Some steps of all workers together, over as many epochs as they take."""
    while steps:
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(-(-len(samplers[0]) // batch)):
            if not steps:
                return
            steps -= 1
            for _ in range(batch):
                row = [next(iterator, None) for iterator in iterators]
                samples = [index for index in row if index is not None]
                seen.setdefault(samplers[0].epoch, []).extend(samples)
                for sampler, index in zip(samplers, row, strict=True):
                    sampler.count(index is not None)
