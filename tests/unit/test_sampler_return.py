"""A node that the others went on without, and that comes back within an iteration over its data: from then on
its epochs end with theirs."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from atoll.train.data.epochs import epoch_of
from atoll.train.data.moredata import MoreData
from atoll.train.data.owndata import OwnData
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler, ShardedSampler

pytestmark = pytest.mark.sampled

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
        data = Numbers(sampler._order.length)
        if isinstance(sampler, ShardedSampler):
            self.loader = DataLoader(data, BATCH, sampler=sampler, num_workers=workers)  # type: ignore[arg-type, var-annotated]
        else:
            self.loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        self.per, self._batches = per, self._loop()
        self.drawn = next(self._batches)

    def _loop(self) -> Generator[int, None, None]:
        while True:
            for batch in self._one_loop():
                yield len(batch)
            self.ends[self.made] = self.sampler.epoch

    def _one_loop(self) -> Iterator[Any]:
        return iter(self.loader)

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

    def close(self) -> None:
        """End the loop. A loader's iterator that is found in a cycle waits 5 s for each of its workers."""
        self._batches.close()


class Ahead(Script):
    """The same, with a loader that asks as torch's does that has workers, which are left out here: `ahead` at
    first, and then once for each that it hands out, before it does."""

    def __init__(self, sampler: Any, ahead: int) -> None:
        self.ahead = ahead
        super().__init__(sampler, 0, 1)

    def _one_loop(self) -> Iterator[list[int]]:
        asked = iter(self.sampler)
        fetched = deque[list[int]]()
        for _ in range(self.ahead):
            fetched.extend([batch] if (batch := next(asked, None)) is not None else [])
        while fetched:
            batch = fetched.popleft()
            fetched.extend([more] if (more := next(asked, None)) is not None else [])
            yield batch


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


@pytest.mark.parametrize(("stood", "at"), [(1, 12), (7, 12), (1, 16), (6, 25), (7, 17)])
@pytest.mark.parametrize("make", [peer_batches, sharded, batches])
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
        script.close()
    both = {made: epoch for made, epoch in member.ends.items() if made > at + 9}
    assert {made: epoch for made, epoch in node.ends.items() if made > at + 9} == both
    assert len(both) > 1
    if stood + 5 < 9 and at % 9 + 5 < 9:  # nothing is near an epoch's end
        assert node.ends == member.ends


def ahead_of(rank: int, ahead: int) -> Ahead:
    scripts: list[Script] = []
    scripts.append(script := Ahead(peer_batches(rank, scripts), ahead))
    return script


@pytest.mark.parametrize(("ahead", "at_member"), [(1, 6), (4, 6), (8, 1)])
def test_a_loop_that_was_told_of_its_end_goes_on_where_the_others_are(ahead: int, at_member: int) -> None:
    """Wherever it stood and wherever they are by then: unless the loader has given the last that it had
    fetched, or has more than the others' epoch has left."""
    for stood in range(9):
        for at in range(stood + 1, 22):
            node, member = ahead_of(2, ahead), ahead_of(0, at_member)
            node.until(stood)
            member.until(at)
            come_back(node, member)
            member.ends.clear()
            for script in (node, member):
                script.until(45)
            fetched, left = min(9 - stood, 1 + ahead), 9 - at % 9
            if 1 < fetched <= left:
                assert node.ends == member.ends, (stood, at)
            later = [{m: e for m, e in each.ends.items() if m > at + 9} for each in (node, member)]
            assert later[0] == later[1], (stood, at)
            assert len(later[0]) > 1


@pytest.mark.parametrize("workers", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_torchs_loader_asks_again_one_that_has_ended(workers: dict[str, Any]) -> None:
    """Which it does whenever it hands out a batch, and not after the last."""
    scripts: list[Script] = []
    scripts.append(member := script_of(peer_batches, 0, 0))
    sampler = peer_batches(2, scripts)
    data: Any = Numbers(sampler._order.length)
    loader = DataLoader(data, batch_sampler=sampler, **workers)
    for stood, at in [(7, 11), (8, 13)]:
        made = 0
        member.until(at)
        for batch in loader:
            if made == stood:
                sampler.return_to(member.sampler.deal_state())
            sampler.count(len(batch))
            sampler.committed()
            made += 1
        assert made == stood + (18 - at if stood == 7 else 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_return_is_taken_up_where_the_loader_asks(workers: int) -> None:
    """Heard of in the step of an iteration, it comes in time for the loop to go on: after an epoch's last
    where the loader has no workers, and else when its last batch is handed out."""
    scripts: list[Script] = []
    scripts.append(member := script_of(peer_batches, 0, 0))
    member.until(11)
    heard: list[dict[str, Any]] = []
    sampler = peer_batches(2, scripts)
    sampler._asked = lambda: sampler.return_to(heard.pop()) if heard else None
    loader = DataLoader(Numbers(sampler._order.length), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type, var-annotated]
    last = 8 if workers == 0 else 7
    loop = 0
    for batch in loader:
        sampler.count(len(batch))
        sampler.committed()
        if loop == last:
            heard.append(member.sampler.deal_state())
        loop += 1
    assert loop == last + 1 + 18 - 11
    assert sampler.ended


def test_one_that_is_started_again_is_in_the_epoch_of_a_member_whose_loader_has_all_of_it() -> None:
    """What a loader has had, and nobody has trained on, is yet to come."""
    for at in range(1, 20):
        member = ahead_of(0, 6)
        member.until(at)
        scripts: list[Script] = []
        sampler = peer_batches(2, scripts)
        sampler.return_to(member.sampler.deal_state())
        scripts.append(node := Ahead(sampler, 4))
        node.made = at
        member.ends.clear()
        for script in (node, member):
            script.until(30)
        assert node.ends == member.ends, at


@pytest.mark.parametrize("loops", [0, 1, 3])
def test_one_that_nobody_trains_on_is_in_the_others_epoch(loops: int) -> None:
    """For evaluation, say: what a member's loader has had of it counts as used."""
    node, member = peer_batches(2, []), peer_batches(0, [])
    list(node)
    for _ in range(loops):
        list(member)
    node.return_to(member.deal_state())
    assert [len(list(each)) for each in (node, member)] == [9, 9]
    assert node.epoch == member.epoch == max(0, loops)


@pytest.mark.parametrize("make", [sharded, peer_batches])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_in_as_many_loops_as_it_takes(make: Any, workers: int) -> None:
    """Also where it comes back when all loops have ended: in `catch_up`."""
    scripts: list[Script] = []
    scripts.append(member := script_of(make, 0, 0))
    member.until(12)
    sampler = make(2, scripts)
    data: Any = Numbers(sampler._order.length)
    how = {"batch_size": BATCH, "sampler": sampler} if make is sharded else {"batch_sampler": sampler}
    loader = DataLoader(data, num_workers=workers, **how)  # type: ignore[arg-type, var-annotated]
    came_back: list[int] = []

    def catch_up() -> None:
        if not came_back:
            assert sampler.epoch == 0
            other = member.sampler
            sampler.return_to(other.deal_state() if make is peer_batches else other.lockstep_state())
        came_back.append(len(made))

    made: list[int] = []
    own_data = OwnData(MoreData(), ask=bool, unsent=lambda: False, check=lambda: None, together=False)
    for batch in epoch_of(loader, [sampler], catch_up, own_data):
        sampler.count(len(batch))
        sampler.committed()
        made.append(len(batch))
    assert came_back == [9, 9 + 6]
    assert sampler.epoch == 1
    other = DataLoader(range(4))  # type: ignore[arg-type, var-annotated]
    assert len(list(epoch_of(other, [sampler], catch_up, own_data))) == 4
    assert len(came_back) == 2


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
    for script in (node, member):
        script.close()
