"""Leases of groups in blocks (store/blocks.py): each member its part, whoever asks first."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest

from atoll.core.errors import UserError
from atoll.groups.shares import cut_run
from atoll.hub.book import _samples_of
from atoll.store.blocks import (
    BLOCKS_A_REWIND,
    MOST_BATCHES,
    MOST_BLOCKS,
    MOST_EPOCHS,
    Blocks,
    BlockState,
    EpochBlocks,
)
from atoll.store.leases import Leases
from atoll.wire.messages import MOST_CUT, Cut, Lease, Leased, Used

KEY, MEMBERS = (7, 20), (0, 2, 5)


def ask(blocks: Blocks, worker: int, block: int, members: tuple[int, ...] = MEMBERS, **more: Any) -> Leased:
    request = Lease(
        incarnation=1, sampler=0, epoch=0, length=100, count=4, contributor=7, block=block, patient=True
    )
    return blocks.handle_lease(KEY, worker, members, msgspec.structs.replace(request, **more))


def parts(blocks: Blocks, block: int, **more: int) -> list[tuple[int, int]]:
    return [(found.start, found.stop) for w in MEMBERS for found in [ask(blocks, w, block, **more)]]


def test_a_block_is_as_many_times_the_count_as_there_are_members_and_is_cut_in_order_of_rank() -> None:
    blocks = Blocks(Leases())
    assert (ask(blocks, 5, 1).start, ask(blocks, 5, 1).stop) == (8, 12)  # asked for twice, it is the same
    assert parts(blocks, 1) == [(0, 4), (4, 8), (8, 12)]
    assert parts(blocks, 2) == [(12, 16), (16, 20), (20, 24)]


def test_the_last_block_is_cut_evenly_and_says_how_long_the_longest_part_is() -> None:
    blocks = Blocks(Leases())
    for block in range(1, 9):
        parts(blocks, block)
    found = [ask(blocks, worker, 9) for worker in MEMBERS]  # positions 96 to 100
    assert [(each.start, each.stop, each.length) for each in found] == [
        (96, 98, 2),
        (98, 99, 2),
        (99, 100, 2),
    ]
    assert all(ask(blocks, worker, 10).over for worker in MEMBERS)


def test_who_has_gone_keeps_its_part_and_who_comes_is_not_in_the_block() -> None:
    blocks = Blocks(Leases())
    ask(blocks, 0, 1)
    assert ask(blocks, 5, 1, (0, 5)).start == 8  # worker 2 has died since
    with pytest.raises(UserError, match="worker 3 asks for block 1 .* leased for workers 0, 2, 5"):
        ask(blocks, 3, 1, (0, 3, 5))
    assert [(ask(blocks, w, 2, (0, 5)).start, ask(blocks, w, 2, (0, 5)).stop) for w in (0, 5)] == [
        (12, 16),
        (16, 20),
    ]


def test_nothing_now_is_not_remembered() -> None:
    leases = Leases()
    other = Lease(incarnation=9, sampler=0, epoch=0, length=100, count=100)
    leases.handle_lease(1, 9, other)
    blocks = Blocks(leases)
    assert (ask(blocks, 0, 1).over, ask(blocks, 0, 1).stop) == (False, 0)
    leases.handle_fenced(1, 9, [Used(sampler=0, epoch=0, start=0, stop=90)])
    assert parts(blocks, 1) == [(90, 94), (94, 97), (97, 100)]


def test_nothing_for_one_that_does_not_wait_is_nothing_for_all() -> None:
    """Else one would make a batch that the others do not, who asked when nothing was free."""
    leases = Leases()
    other = Lease(incarnation=9, sampler=0, epoch=0, length=100, count=100)
    leases.handle_lease(1, 9, other)
    blocks = Blocks(leases)
    assert ask(blocks, 0, 1).block == 0  # ask again
    assert ask(blocks, 2, 1, patient=False).block == 1
    leases.handle_fenced(1, 9, [Used(sampler=0, epoch=0, start=0, stop=90)])
    for worker in MEMBERS:
        found = ask(blocks, worker, 1)
        assert (found.block, found.stop, found.over, found.length) == (1, 0, False, 0)
    assert parts(blocks, 2) == [(90, 94), (94, 97), (97, 100)]


def test_an_epoch_that_was_over_may_have_more_for_the_next_block() -> None:
    leases = Leases()
    blocks = Blocks(leases)
    parts(blocks, 1, count=20)  # 60 of 100
    other = Lease(incarnation=9, sampler=0, epoch=0, length=100, count=40)
    leases.handle_lease(1, 9, other)
    leases.handle_lease(1, 9, other)  # it waits, and so does the group: both are told that it is over
    assert all((found := ask(blocks, worker, 2)).over and found.block == 2 for worker in MEMBERS)
    leases.handle_fenced(1, 9, [Used(sampler=0, epoch=0, start=60, stop=90)])
    assert parts(blocks, 3) == [(90, 94), (94, 97), (97, 100)]


def test_what_all_have_left_behind_is_forgotten_and_bounded() -> None:
    blocks = Blocks(Leases())
    for block in range(1, 5):
        parts(blocks, block)
    (epoch,) = blocks.epochs[KEY].values()
    assert list(epoch.blocks) == [4]
    with pytest.raises(UserError, match="block 2 of epoch 0, and has asked for 4 since"):
        ask(blocks, 0, 2)
    parts(blocks, 1, epoch=1)
    assert list(blocks.epochs[KEY]) == [(0, 1)]
    for block in range(2, MOST_BLOCKS + 1):
        ask(blocks, 0, block, epoch=2, length=2**40)
    ask(blocks, 0, MOST_BLOCKS + 1, epoch=2, length=2**40)
    with pytest.raises(UserError, match="while worker 2 of its group has asked for 0: at most"):
        ask(blocks, 0, MOST_BLOCKS + 2, epoch=2, length=2**40)


def test_few_epochs_are_kept_of_a_script_that_gives_each_up() -> None:
    """One member has fetched ahead of the others, who are some epochs behind it too. Each still gets its
    part; and another sampler's epochs stay."""
    blocks, behind = Blocks(Leases()), 20
    ask(blocks, 0, 1, sampler=1)
    for epoch in range(2 * MOST_EPOCHS):
        for block in (1, 2):
            ask(blocks, 0, block, epoch=epoch)
        for worker in MEMBERS[1:] if epoch >= behind else ():
            found = ask(blocks, worker, 1, epoch=epoch - behind)
            assert found.start == 4 * MEMBERS.index(worker)
    kept = blocks.epochs[KEY]
    assert len(kept) == MOST_EPOCHS + 1
    assert ask(blocks, 5, 1, sampler=1).start == 8
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=dict[tuple[int, int], EpochBlocks])
    assert list(again) == list(kept)  # in this order a hub that is started again drops them


def test_members_that_go_back_ask_for_equally_many_blocks_of_an_epoch_that_was_given_up() -> None:
    blocks = Blocks(Leases())
    for block in range(1, 4):
        ask(blocks, 0, block)
    ask(blocks, 2, 1)
    first = BLOCKS_A_REWIND + 1
    assert parts(blocks, first) == [(36, 40), (40, 44), (44, 48)]
    assert list(blocks.epochs[KEY][0, 0].blocks) == [first]


def test_a_fence_ends_it_and_all_of_it_is_plain_data() -> None:
    blocks = Blocks(Leases())
    ask(blocks, 0, 1)
    assert blocks.epochs == {KEY: {(0, 0): EpochBlocks({1: BlockState(0, 12, [0, 2, 5])}, {0: 1})}}
    again = Blocks(Leases())
    again.epochs = blocks.epochs
    assert ask(again, 2, 1).start == 4
    blocks.handle_fenced(KEY)
    assert not blocks.epochs


def test_an_earlier_epochs_block_is_kept_until_all_have_it() -> None:
    """What comes back of an epoch is asked for when all are in the next one."""
    blocks = Blocks(Leases())
    parts(blocks, 1)
    parts(blocks, 1, epoch=1)
    first = ask(blocks, 0, 2)  # of the epoch before
    parts(blocks, 2, epoch=1)
    assert parts(blocks, 2)[0] == (first.start, first.stop)
    parts(blocks, 3, epoch=1)
    assert list(blocks.epochs[KEY]) == [(0, 1)]


def test_the_first_asker_s_parts_hold_for_all_who_live() -> None:
    blocks = Blocks(Leases())
    cut = Cut({0: 5, 2: 3, 5: 1, 9: 7}, 1)  # worker 9 is no member any more
    held = Cut({0: 5, 2: 3, 5: 1}, 1)
    first = ask(blocks, 2, 1, count=2, cut=cut)
    assert (first.start, first.stop, first.cut, first.block) == (0, 18, held, 1)
    for worker in MEMBERS:  # whatever parts they know
        assert ask(blocks, worker, 1, count=2, cut=Cut({0: 1, 2: 1, 5: 1})) == first
    (epoch,) = blocks.epochs[KEY].values()
    assert epoch.blocks == {1: BlockState(0, 18, [0, 2, 5], cut=held)}
    assert [ask(blocks, worker, 2, (0, 5), count=2, cut=cut).stop for worker in (0, 5)] == [30, 30]
    blocks = Blocks(Leases())
    assert ask(blocks, 0, 1, count=2**50, length=2**50, cut=Cut({0: 1})).stop == MOST_BATCHES
    blocks = Blocks(Leases())  # those who live have no part: each takes a sample
    assert ask(blocks, 0, 1, count=2, cut=Cut({0: 0, 2: 0, 5: 0, 9: 7})).stop == 6


@pytest.mark.parametrize(
    ("cut", "line"),
    [
        (Cut({2: 5, 5: 3}), "cut in parts of which none is its own"),
        (Cut({}), "cut in parts of which none is its own"),
        (Cut({0: 0, 2: 0}), "cut in parts of 0 samples, where 1 to 2147483647 can be cut"),
        (
            Cut({0: 1, 2: MOST_CUT - 1}),
            "cut in parts of 2147483648 samples, where 1 to 2147483647 can be cut",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_refused_before_anything_is_leased(cut: Cut, line: str) -> None:
    leases = Leases()
    blocks = Blocks(leases)
    with pytest.raises(
        UserError, match=f"worker 0 asks for block 1 of epoch 0 of contributor 7, {re.escape(line)}"
    ):
        ask(blocks, 0, 1, count=2, cut=cut)
    assert leases.state == Leases().state
    assert not blocks.epochs
    assert (leases.changes, blocks.changes) == (0, 0)


def test_parts_of_any_size_that_is_not_refused_are_cut_at_once() -> None:
    """As the hub does, and each member; in whole numbers that do not overflow."""
    parts = dict.fromkeys(range(4095), MOST_CUT // 4096) | {4095: 1}
    found = ask(Blocks(Leases()), 0, 1, tuple(parts), length=2**52, count=2**50, cut=Cut(parts, MOST_CUT - 1))
    assert found.cut is not None
    batches = list(cut_run(found.start, found.stop - 1, found.cut.parts, found.cut.least))
    assert len(batches) == MOST_BATCHES
    assert sum(stop - start for batch in batches for start, stop in batch.values()) == found.stop - 1
    wire = msgspec.msgpack.encode(Cut({0: 1, 1: 2**31}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire, type=Cut)


def test_members_hear_of_an_epoch_that_is_over_whether_others_hold_some_of_it() -> None:
    leases = Leases()
    blocks = Blocks(leases)
    cut = Cut({0: 20, 2: 10, 5: 10})
    ask(blocks, 0, 1, count=2, cut=cut)
    other = Lease(incarnation=9, sampler=0, epoch=0, length=100, count=20)
    leases.handle_lease(1, 9, other)
    leases.handle_lease(1, 9, other)  # it waits, and so does the group
    for worker in MEMBERS:
        found = ask(blocks, worker, 2, count=2, cut=cut)
        assert (found.over, found.held) == (True, True)
    leases.handle_fenced(1, 9, [Used(sampler=0, epoch=0, start=80, stop=100)])
    for worker in MEMBERS:
        assert ask(blocks, worker, 2, count=2, cut=cut).held  # all hear the same
        found = ask(blocks, worker, 3, count=2, cut=cut)
        assert (found.over, found.held) == (True, False)


def test_a_journal_has_a_block_s_cut_once() -> None:
    blocks = Blocks(Leases())
    found = []
    for block in (1, 2, 3):
        for worker in MEMBERS:
            before = blocks.cuts
            ask(blocks, worker, block, count=2, cut=Cut({0: 20, 2: 10, 5: 10}))
            found.append(blocks.cuts > before)
    assert found == [True, False, False] * 3
    ask(blocks, 0, 1, epoch=1)
    assert blocks.cuts == 3


@pytest.mark.parametrize("seed", range(20))
def test_members_samples_of_a_block_are_counted_without_cutting_it(seed: int) -> None:
    chance = random.Random(seed)
    parts = {worker: chance.randint(0, 9) for worker in chance.sample(range(50), chance.randint(1, 6))}
    cut, start = Cut(parts, chance.randint(0, 3)), chance.randint(0, 99)
    leased = Leased(sampler=0, epoch=0, start=start, stop=start + chance.randint(0, 99), cut=cut)
    batches = list(cut_run(leased.start, leased.stop, parts, cut.least))
    for worker in parts:
        own = [batch[worker] for batch in batches]
        assert _samples_of(worker, leased)[worker] == sum(last - first for first, last in own)
