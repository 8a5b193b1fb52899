"""The parts of a worker in a group: its pace, bytes and values over the ring, its share of what is leased."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

from atoll.core.config import LinkOptions
from atoll.core.errors import CheckpointError
from atoll.exchange.feedback import Feedback
from atoll.store.blocks import BLOCKS_A_REWIND, MOST_EPOCHS
from atoll.train.api.pace import Pace
from atoll.train.api.place import Place
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.train.group.channel import Channel
from atoll.train.group.ringbytes import broadcast_bytes, gather_bytes
from atoll.train.group.solo import SoloChannel
from atoll.train.members.attendance import Attendance
from atoll.train.members.groupmeeting import GroupMeeting, OwnCall
from atoll.train.members.logmeeting import LogMeeting
from atoll.train.members.regrouping import GroupState, Leases
from atoll.train.members.workers import Workers
from atoll.train.sync.servedmodels import ServedModels
from atoll.train.sync.uplink import Uplink, UplinkChoice, Wanted
from atoll.wire.messages import Cut, Leased, run_of

SECONDS = 30.0


def over_gloo(world: int, act: Callable[[Channel], Any]) -> list[Any]:
    """What `act` gives on each member of a real process group, between threads."""
    store = HashStore()

    def member(rank: int) -> Any:
        channel = Channel(Place(rank, world, store=store), "test", SECONDS, torch.device("cpu"))
        return act(channel)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(member, range(world), timeout=SECONDS))


# -- pace ------------------------------------------------------------------------------------------------


def test_a_pace_is_known_when_the_probe_is_made() -> None:
    pace = Pace(3)
    for seconds in (9.0, 1.0, 2.0):  # the first is not counted: all is cold
        pace.stepped(seconds, 10)
        assert pace.seconds == 0
    pace.stepped(3.0, 10)
    assert pace.seconds == pytest.approx(0.2)


def test_an_iteration_that_was_more_is_left_out_of_the_pace() -> None:
    pace = Pace(1)
    pace.stepped(5.0, 1)
    pace.stepped(1.0, 1)
    pace.leave_out()
    pace.stepped(100.0, 1)
    pace.stepped(1.0, 0)  # no samples, no pace
    assert pace.seconds == 1.0


# -- bytes over a ring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 248, 249, 5000])
def test_bytes_of_any_length_are_gathered_and_broadcast(world: int, size: int) -> None:
    payloads = [bytes([rank + 1]) * (size * (rank == world - 1)) for rank in range(world)]

    def act(channel: Channel) -> tuple[list[bytes], bytes]:
        own = payloads[channel.place.rank]
        root = world - 1
        word = own if channel.place.rank == root else None
        return gather_bytes(channel, own, "it"), broadcast_bytes(channel, word, "it", root)

    for gathered, told in over_gloo(world, act):
        assert gathered == payloads
        assert told == payloads[-1]


def test_alone_a_channel_gives_back_what_it_is_given() -> None:
    channel = SoloChannel(Place(names=(7,)), SECONDS)
    assert gather_bytes(channel, b"x" * 1000, "it") == [b"x" * 1000]
    assert broadcast_bytes(channel, b"y", "it") == b"y"
    tensor = torch.arange(3.0)
    channel.wait(channel.sum(tensor), "it")
    assert tensor.tolist() == [0, 1, 2]


# -- the uplink ------------------------------------------------------------------------------------------

EXTENTS = ((0, 10, torch.float32), (1, 1, torch.float64), (2, 7, torch.float64), (3, 2, torch.bfloat16))


def chunks() -> list[Any]:
    return [
        SimpleNamespace(
            chunk=SimpleNamespace(id=number, extent=extent), flat=torch.empty(0, dtype=dtype), dtype=dtype
        )
        for number, extent, dtype in EXTENTS
    ]


def made(kind: Wanted, ring: Any) -> Uplink:
    """An uplink that spreads answers: it sends nothing."""
    return Uplink(UplinkChoice(kind, ring), ring, chunks(), Feedback((), {}, LinkOptions()))


@pytest.mark.parametrize("kind", ["leader", "members"])
@pytest.mark.parametrize("able", [(), (1, 3)])
def test_a_chunk_at_a_time_all_have_whole_what_some_are_answered(kind: Any, able: tuple[int, ...]) -> None:
    values = {number: torch.arange(extent).to(dtype) + 100 * number for number, extent, dtype in EXTENTS}

    def act(channel: Channel) -> list[torch.Tensor]:
        uplink = made(kind, SimpleNamespace(place=channel.place, world=4, agreement=channel))
        role = uplink.role(5, able)
        assert role.talks == (channel.place.rank in ([role.leader] if kind == "leader" else able or range(4)))
        whole = []
        for bound in chunks():
            flat = values[bound.chunk.id]
            run = flat[slice(*run_of(flat.numel(), *role.share))].clone() if role.talks else None
            whole.append(uplink.whole(role, bound, run, "it"))
            assert kind == "members" or run is None or whole[-1] is run  # there is no second one
        return whole

    for whole in over_gloo(4, act):
        for got, flat in zip(whole, values.values(), strict=True):
            assert got.dtype == flat.dtype
            assert torch.equal(got, flat)


@pytest.mark.parametrize("kind", ["leader", "members"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_some_are_answered_all_have_whole(kind: Any, world: int) -> None:
    values = {number: torch.arange(extent).to(dtype) + 100 * number for number, extent, dtype in EXTENTS}

    def act(channel: Channel) -> dict[int, torch.Tensor]:
        ring: Any = SimpleNamespace(place=channel.place, world=world, agreement=channel)
        uplink = made(kind, ring)
        role = uplink.role(5)
        runs = None
        if role.talks:
            runs = {
                number: flat[slice(*run_of(flat.numel(), *role.share))] for number, flat in values.items()
            }
        return uplink.spread(role, runs, "it")

    for whole in over_gloo(world, act):
        assert whole.keys() == values.keys()
        for number, flat in values.items():
            assert whole[number].dtype == flat.dtype
            assert torch.equal(whole[number], flat)


def test_one_member_leads_and_the_lot_changes() -> None:
    members = [made("leader", SimpleNamespace(place=Place(rank, 3))) for rank in range(3)]
    leaders = []
    for iteration in range(30):
        roles = [member.role(iteration) for member in members]
        (leader,) = [rank for rank, role in enumerate(roles) if role.leads]
        assert all(role.leader == leader for role in roles)
        assert [role.talks for role in roles] == [role.leads for role in roles]
        leaders.append(leader)
    assert set(leaders) == {0, 1, 2}


# -- data ------------------------------------------------------------------------------------------------


class Blocks:
    """A hub that leases 10 samples to a group of two, block by block; the second member has less."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.blocks = {1: (6, 9, 3, 4), 2: (9, 10, 1, 3)}  # start, stop, of which member 1's; length

    def lease(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float | None = None,
        contributor: int = 0,
        block: int = 0,
        cut: Cut | None = None,
    ) -> Leased:
        assert cut is None
        self.asked.append((contributor, block))
        if block not in self.blocks:
            return Leased(sampler=sampler, epoch=epoch, start=0, stop=0, over=True, block=block)
        start, stop, _, longest = self.blocks[block]
        return Leased(sampler=sampler, epoch=epoch, start=start, stop=stop, length=longest, block=block)


def test_a_member_with_fewer_samples_makes_as_many_batches_and_weighs_less() -> None:
    hub = Blocks()
    leases = Leases(hub)  # type: ignore[arg-type]
    leases.move(5)
    sampler = LeasedSampler(10, lease=leases.lease, shuffle=False)
    weights, used = [], []
    for batch in DataLoader(range(10), batch_size=2, sampler=sampler):  # type: ignore[arg-type]
        weights.append((len(batch), sampler.count(float(len(batch)))))
        used += [(part.start, part.stop) for part in sampler.used()]
    # 3 and one to fill up; then 1, and two to fill up, the last of which is a batch of its own.
    assert weights == [(2, 2), (2, 1), (2, 1), (1, 0)]
    assert used == [(6, 8), (8, 9), (9, 10)]
    assert hub.asked == [(5, 1), (5, 2), (5, 3)]


def test_blocks_are_numbered_by_epoch_and_anew_after_a_rewind_or_a_move() -> None:
    """The numbers of few epochs are kept, of those that were asked for last."""
    hub = Blocks()
    leases = Leases(hub)  # type: ignore[arg-type]
    leases.move(5)
    asked = []
    for epoch, rewinds in ((0, 0), (0, 0), (1, 0), (0, 1), (0, 1), (2, 1), (1, 3)):
        leases.lease(0, epoch, 10, 2, 0.0, None, rewinds)
        asked.append(divmod(hub.asked[-1][1], BLOCKS_A_REWIND))
    assert asked == [(0, 1), (0, 2), (0, 1), (1, 1), (1, 2), (1, 1), (3, 1)]
    for epoch in range(3, 2 * MOST_EPOCHS):
        leases.lease(0, epoch, 10, 2, 0.0)
    assert list(leases._blocks[0]) == list(range(MOST_EPOCHS, 2 * MOST_EPOCHS))
    leases.move(6)
    leases.lease(0, 0, 10, 2, 0.0)
    assert hub.asked[-1] == (6, 1)


def test_what_was_given_and_not_used_is_held_when_the_worker_moves() -> None:
    hub = Blocks()
    leases = Leases(hub)  # type: ignore[arg-type]
    leases.move(5)
    sampler = LeasedSampler(10, lease=leases.lease, shuffle=False)
    given = iter(sampler)
    assert [next(given) for _ in range(2)] == [6, 7]
    sampler.count(1.0)
    sampler.used()
    assert [(held.start, held.stop) for held in sampler.held()] == [(7, 8)]
    sampler.leave_leased()
    leases.move(6)
    hub.blocks = {1: (0, 2, 2, 2)}
    assert list(given) == [0, 1]
    sampler.count(3.0)
    assert [(used.start, used.stop) for used in sampler.used()] == [(7, 8), (0, 2)]


# -- who is the first ------------------------------------------------------------------------------------


def test_numbers_of_groups_are_no_workers() -> None:
    shards: Any = SimpleNamespace(on=lambda *_: None)
    ring: Any = SimpleNamespace()
    attendance, models = Attendance(Place(0, 4), late=False, grouped=True), ServedModels()
    at_log = LogMeeting(attendance, shards, models)
    workers = Workers(GroupMeeting(attendance, at_log, models, ring, None, OwnCall()))
    attendance.saw([4, 5])
    assert workers.is_first
    assert workers.ranks == [0, 1, 2, 3]


# -- what members take from the first --------------------------------------------------------------------


class Unsayable:
    """A session whose state no checkpoint can hold."""

    iteration = 3
    restored: bytes | None = None

    def capture_shared(self) -> bytes:
        raise CheckpointError("two schedulers of class StepLR drive the optimizer")

    def restore_shared(self, raw: bytes) -> None:
        self.restored = raw


def test_a_state_that_cannot_be_given_ends_nobody() -> None:
    state, warnings = Unsayable(), list[str]()
    group = GroupState(state, [], warnings.append)
    group.restore(group.capture(), 1)
    assert state.restored is None
    assert warnings == [
        "the members of this worker's group go on with schedules of their own: two schedulers of class "
        "StepLR drive the optimizer"
    ]
