"""A node that the others went on without, and that comes back within an iteration over its data: from then on
its epochs end with theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from atoll.train.node.sampler import PeerBatches
from atoll.train.sampler import BatchesSampler, ShardedSampler

WORLD, BATCH = 3, 5


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Script:
    """A node's loop over epochs: it stands in the forward of the batch that it has `drawn` last, before
    iteration `made`."""

    def __init__(self, sampler: Any, workers: int, per: int) -> None:
        self.sampler, self.made, self.ends = sampler, 0, dict[int, int]()
        self.epochs: list[int] = []
        data = Numbers(sampler._length)
        if isinstance(sampler, ShardedSampler):
            self.loader = DataLoader(data, BATCH, sampler=sampler, num_workers=workers)  # type: ignore[arg-type, var-annotated]
        else:
            self.loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        self.per, self._batches = per, self._loop()
        self.drawn = next(self._batches)

    def _loop(self) -> Iterator[int]:
        while True:
            for batch in self.loader:
                yield len(batch)
            self.ends[self.made] = self.sampler.epoch

    def iterate(self) -> None:
        """Train on the batch in hand and `per` - 1 more, and draw the next."""
        for _ in range(self.per):
            self.sampler.count(self.drawn)
            if _ == self.per - 1:
                self.sampler.committed()
                self.made += 1
            self.drawn = next(self._batches)

    def until(self, made: int) -> None:
        while self.made < made:
            self.iterate()


def sharded(rank: int, _script: list[Script]) -> ShardedSampler:
    return ShardedSampler(
        WORLD * (BATCH * 8 + 2), rank=rank, world=WORLD
    )  # 9 iterations, the last a short one


def batches(rank: int, _script: list[Script]) -> BatchesSampler:
    return BatchesSampler(WORLD * (BATCH * 8 + 2), batch=WORLD * BATCH, rank=rank, world=WORLD)


def peer_batches(rank: int, script: list[Script]) -> PeerBatches:
    return PeerBatches(
        WORLD * (BATCH * 8 + 2),
        batch=WORLD * BATCH,
        node=rank,
        nodes=range(WORLD),
        stale_max=0,
        iteration=lambda: script[0].made if script else 0,
    )


def script_of(make: Any, rank: int, workers: int, per: int = 1) -> Script:
    scripts: list[Script] = []
    scripts.append(Script(make(rank, scripts), workers, per))
    return scripts[0]


def come_back(node: Script, member: Script) -> None:
    """As TrainingState.capture and restore do between two iterations."""
    sampler = member.sampler
    fixed = not isinstance(sampler, PeerBatches)
    node.sampler.return_to(sampler.lockstep_state() if fixed else sampler.deal_state())
    node.made = member.made
    node.ends.clear()


@pytest.mark.parametrize("make", [sharded, batches, peer_batches])
@pytest.mark.parametrize(("stood", "at"), [(2, 5), (3, 12), (8, 22), (7, 17), (0, 8), (4, 9)])
def test_its_epochs_end_with_the_others(make: Any, stood: int, at: int) -> None:
    """It stood before its iteration `stood` while they came to `at`; 9 are an epoch."""
    node, member = script_of(make, 2, 0), script_of(make, 0, 0)
    node.until(stood)
    member.until(at)
    come_back(node, member)
    member.ends.clear()
    for script in (node, member):
        script.until(40)
    if make is sharded and stood == 8:  # who takes a short batch has been told that it is the last
        assert node.ends.pop(at + 1) == at // 9
    assert node.ends == member.ends
    assert len(node.ends) > 1


@pytest.mark.parametrize("make", [sharded, batches, peer_batches])
@pytest.mark.parametrize(("stood", "at"), [(1, 12), (7, 12), (1, 16), (6, 25), (7, 17)])
def test_with_loader_workers_they_do_after_an_epoch_at_most(make: Any, stood: int, at: int) -> None:
    """What its loader has fetched it gives in any case: where that ends the loop over it at another
    iteration, as at an epoch's end, the loops after it are in step again."""
    node, member = script_of(make, 2, 2), script_of(make, 0, 0)
    node.until(stood)
    member.until(at)
    come_back(node, member)
    member.ends.clear()
    for script in (node, member):
        script.until(48)
    both = {made: epoch for made, epoch in member.ends.items() if made > at + 9}
    assert {made: epoch for made, epoch in node.ends.items() if made > at + 9} == both
    assert len(both) > 1
    if stood + 5 < 9 and at % 9 + 5 < 9:  # nothing is near an epoch's end
        assert node.ends == member.ends


@pytest.mark.parametrize("make", [sharded, batches, peer_batches])
def test_where_iterations_have_several_batches_half_of_one_may_be_trained(make: Any) -> None:
    node, member = script_of(make, 2, 0, per=2), script_of(make, 0, 0, per=2)
    node.until(1)
    member.until(2)
    node.sampler.count(node.drawn)  # and not whole
    node.drawn = next(node._batches)
    come_back(node, member)
    node.sampler.count(node.drawn)
    node.sampler.committed()
    node.made, node.drawn = node.made + 1, next(node._batches)
    for script in (node, member):
        script.until(4)
    assert node.sampler.epoch == member.sampler.epoch == 0
    assert not node.ends
    member.iterate()  # the ninth batch, and the first of the next epoch
    node.iterate()
    assert (node.ends, node.sampler.epoch) == (member.ends, member.sampler.epoch)


def test_set_epoch_after_it_keeps_what_was_made_too_much() -> None:
    node, member = script_of(sharded, 2, 2), script_of(sharded, 0, 0)
    node.until(1)
    member.until(7)  # two are left, and its loader has more than that
    come_back(node, member)
    for _ in range(4):
        node.sampler.count(BATCH)
        node.sampler.committed()
    node.sampler.set_epoch(1)
    assert len(list(node.sampler)) == 8 * BATCH + 2 - 2 * BATCH
