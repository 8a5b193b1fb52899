"""The search for a plan of memory: within its budgets, by the bounds of arithmetic, the same each time."""

from __future__ import annotations

import re
import time
from itertools import accumulate
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.chunks import ParameterSpec, lay_out_memory
from atoll.core.errors import UserError
from atoll.core.memory import Budgets, Pins
from atoll.moves.owners import UNIT, Share, deal_whole, owners_of, split_evenly
from atoll.moves.search import Bandwidths, MemoryPlan, Profile, Use, search_plan
from atoll.moves.timeline import Call, ChunkCosts, Timeline, next_uses

RATES = Bandwidths(
    to_device=10e9, to_host=8e9, to_disk=1.5e9, from_disk=1e9, host_steps=1e9, device_steps=20e9, latency=1e-5
)


def profile_of(sizes: list[int], seconds: float = 1e-3, frozen: frozenset[int] = frozenset()) -> Profile:
    """Forward through all parameters, and back."""
    specs = tuple(
        ParameterSpec(f"p{i}", (n,), "float32", trainable=i not in frozen) for i, n in enumerate(sizes)
    )
    forward = [Use((i,), seconds) for i in range(len(sizes))]
    back = [Use((i,), 2 * seconds, True) for i in reversed(range(len(sizes)))]
    return Profile(specs=specs, uses=(*forward, *back), state_bytes={"": (4, 4)})


def need_of(profile: Profile) -> int:
    """Bytes of parameters, gradients and state, without alignment."""
    per = 1 + (1 + len(profile.state_bytes[""]))
    return sum(spec.nbytes * (per if spec.trainable else 1) for spec in profile.specs)


profiles = st.builds(
    profile_of,
    st.lists(st.integers(1, 300_000), min_size=1, max_size=24),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.frozensets(st.integers(0, 23), max_size=8),
)
STEPS = (None, "host", 0.1, 0.3, 0.6, 1.0)
rates = st.builds(
    Bandwidths,
    to_device=st.floats(1e8, 1e11),
    to_host=st.floats(1e8, 1e11),
    to_disk=st.floats(1e8, 1e10),
    from_disk=st.floats(1e8, 1e10),
    host_steps=st.floats(1e7, 1e10),
    device_steps=st.floats(1e8, 1e11),
    latency=st.floats(0, 1e-4),
    shared=st.booleans(),
)


@example(  # what is brought to the device begins while the device makes the steps of the iteration before
    profile=profile_of([1] * 10 + [15038, 49152, 54272, 31744, 43008, 60933], 0.0, frozenset([15])),
    bandwidths=Bandwidths(
        to_device=1e8,
        to_host=183668203.0,
        to_disk=1e8,
        from_disk=1e8,
        host_steps=48948265.0,
        device_steps=1021243474.0,
        latency=0.0,
        shared=True,
    ),
    device=0.25,
    host=0.7,
    steps_on=None,
)
@settings(max_examples=60, deadline=None)
@given(profiles, rates, st.floats(0.02, 1.5), st.sampled_from([None, 0.3, 0.7, 1.5]), st.sampled_from(STEPS))
def test_a_plan_keeps_within_its_budgets_and_the_bounds_of_arithmetic(
    profile: Profile, bandwidths: Bandwidths, device: float, host: float | None, steps_on: Any
) -> None:
    need = need_of(profile)
    budgets = Budgets(
        device=max(1, int(need * device)),
        host=None if host is None else max(1, int(need * host)),
        disk=20 * need + 2**22 if host is not None and host < 1 else 0,
        folder="/scratch",
        pins=Pins(steps_on=steps_on),
    )
    try:
        plan = search_plan(profile, bandwidths, budgets)
    except UserError as error:
        said = str(error)
    else:
        check_plan(plan, profile, bandwidths, budgets)
        assert search_plan(profile, bandwidths, budgets) == plan
        check_steps(plan, profile, steps_on)
        return
    too_small = r"^the budget of the (device|host) is too small: .*; \d+ bytes \(.*\) would do"
    assert re.search(too_small, said) or (isinstance(steps_on, float) and said.startswith("step: no chunk"))


def check_steps(plan: MemoryPlan, profile: Profile, steps_on: Any) -> None:
    """What steps on the device is what was asked for."""
    layout = lay_out_memory(profile.specs, chunk_bytes=plan.chunk_bytes)
    every = [chunk.id for chunk in layout.trainable]
    if plan.fits:
        assert steps_on != "host"
        assert sorted(plan.steps_on_device) == every
        return
    assert set(plan.steps_on_device) <= set(every)
    there, total = (sum(4 * layout.chunks[c].extent for c in some) for some in (plan.steps_on_device, every))
    assert bool(plan.steps_on_device) == bool(plan.steps_share)
    assert there <= plan.steps_share * total * (1 + 1e-9)
    if isinstance(steps_on, float):
        assert plan.steps_share == steps_on
    assert steps_on != "host" or not plan.steps_on_device


def check_plan(plan: MemoryPlan, profile: Profile, bandwidths: Bandwidths, budgets: Budgets) -> None:
    predicted = plan.predicted
    assert predicted.device_peak <= plan.blocks * plan.chunk_bytes <= budgets.device
    assert budgets.host is None or predicted.host_peak <= plan.host_bytes <= budgets.host
    assert predicted.disk_peak <= plan.disk_bytes <= budgets.disk
    assert set(plan.steps_on_device) <= set(plan.resident)
    compute = sum(use.seconds for use in profile.uses)
    assert predicted.computing == pytest.approx(compute)
    stepped = sum(spec.numel for spec in profile.specs if spec.trainable)
    moving = {
        way: predicted.nbytes[way] / getattr(bandwidths, way) + predicted.moves[way] * bandwidths.latency
        for way in ("to_device", "to_host", "to_disk", "from_disk")
        if predicted.moves[way]
    }
    # Steps may take turns at the disk: what one reads or writes for its neighbour has room in the host.
    least = {
        way: seconds - plan.host_bytes / getattr(bandwidths, way) * ("disk" in way)
        for way, seconds in moving.items()
    }
    slowest = stepped / min(bandwidths.host_steps, bandwidths.device_steps)
    # Not faster than the longest part, nor slower than all of it, one after the other. What is moved for a
    # step may begin while the device makes the steps of the one before.
    ahead = stepped / bandwidths.device_steps
    assert predicted.seconds >= max([compute, *(each - ahead for each in least.values())]) * (1 - 1e-9)
    most = (compute + sum(moving.values()) + slowest) * 1.5
    assert compute * (1 - 1e-9) <= predicted.seconds <= most + 1e-9
    if plan.fits:
        assert not any(predicted.moves.values())
        assert plan.host_bytes == plan.disk_bytes == 0


@settings(max_examples=30, deadline=None)
@given(
    profiles, rates, st.integers(1, 5), st.sampled_from([None, 0.7]), st.sampled_from([None, "asymmetric"])
)
def test_members_of_a_group_store_what_they_hold_and_gradients(
    profile: Profile,
    bandwidths: Bandwidths,
    count: int,
    host: float | None,
    sharding: Literal["asymmetric"] | None,
) -> None:
    need = need_of(profile)
    budgets = Budgets(
        device=need // 2 + 2**20,
        host=None if host is None else int(need * host),
        disk=20 * need + 2**22 if host is not None else 0,
        folder="/scratch",
        pins=Pins(steps_on="host", chunk_bytes=2**18, sharding=sharding),
    )
    plans = []
    for rank in range(count):
        try:
            plans.append(search_plan(profile, bandwidths, budgets, share=Share(rank, count)))
        except UserError as error:
            said = str(error)
            break
    else:
        check_shares(plans, profile, bandwidths, budgets)
        return
    assert re.search(r"^the budget of the (device|host) is too small: .*; \d+ bytes \(.*\) would do", said)


def check_shares(plans: list[MemoryPlan], profile: Profile, bandwidths: Bandwidths, budgets: Budgets) -> None:
    count = len(plans)
    assert len({plan.holding for plan in plans}) == 1
    holding, sharding = plans[0].holding, budgets.pins.sharding or "symmetric"
    assert holding is not None
    for plan in plans:
        assert plan.sharding == sharding
        assert budgets.host is None or plan.host_bytes + plan.staging_bytes <= budgets.host
        assert bool(plan.staging_bytes) == (count > 1)
    if budgets.host is None:
        # With no spare payloads for steps during backward, which members have not:
        alone = search_plan(profile, msgspec.structs.replace(bandwidths, shared=True), budgets)
        layout = lay_out_memory(profile.specs, chunk_bytes=alone.chunk_bytes)
        gradients = sum(chunk.nbytes for chunk in layout.trainable)
        kinds = 2 + len(profile.state_bytes[""])  # and a master; each part in whole pages
        pages = 0 if sharding == "asymmetric" else kinds * count * len(layout.chunks) * 4096
        stored = sum(plan.host_bytes for plan in plans) - (alone.host_bytes + (count - 1) * gradients)
        assert -pages <= stored <= pages


@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(1, 9))
def test_owners_are_dealt_evenly(nbytes: list[int], members: int) -> None:
    owners = owners_of(nbytes, [range(members)] * len(nbytes))
    loads = [sum(n for n, owner in zip(nbytes, owners, strict=True) if owner == m) for m in range(members)]
    assert sum(loads) == sum(nbytes)
    assert max(loads) - min(loads) <= max(nbytes, default=0)


@given(
    st.lists(st.integers(1, 2**40), min_size=1, max_size=60),
    st.floats(0.1, 10),
    st.integers(1, 9),
)
def test_steps_that_take_as_long_as_their_bytes_are_dealt_as_by_bytes(
    nbytes: list[int], pace: float, members: int
) -> None:
    seconds = [size * pace for size in nbytes]
    owners = owners_of(nbytes, [range(members)] * len(nbytes), seconds)
    loads = [sum(n for n, owner in zip(nbytes, owners, strict=True) if owner == m) for m in range(members)]
    assert max(loads) - min(loads) <= max(nbytes) * (1 + 1e-9)


def test_owners_are_balanced_by_the_time_of_their_steps() -> None:
    """Eight matrices of 1,024 x 1,024, whose steps take long, and eight vectors of as many bytes."""
    nbytes, seconds = [2**22] * 16, [1.0] * 8 + [0.01] * 8
    owners = owners_of(nbytes, [range(4)] * 16, seconds)
    took = [sum(s for s, owner in zip(seconds, owners, strict=True) if owner == m) for m in range(4)]
    held = [owners.count(member) for member in range(4)]
    assert max(took) <= 1.1 * sum(took) / 4
    assert held == [4, 4, 4, 4]


@given(st.lists(st.tuples(st.integers(1, 2**40), st.sets(st.integers(0, 9), min_size=1)), max_size=60))
def test_chunks_are_split_evenly_over_their_groups(chunks: list[tuple[int, set[int]]]) -> None:
    groups = [sorted(group) for _, group in chunks]
    holding = split_evenly([extent for extent, _ in chunks], groups)
    for chunk, (extent, group) in enumerate(chunks):
        assert holding.members_of(chunk) == tuple(sorted(group))
        ends = [0, *(part.end for part in holding.parts[chunk])]
        assert ends[:-1] == [part.begin for part in holding.parts[chunk]]
        assert ends[-1] == extent
        assert all(end % UNIT == 0 for end in ends[:-1])
        sizes = [end - begin for begin, end in (holding.part(chunk, member) for member in range(10))]
        assert all(size == 0 for member, size in enumerate(sizes) if member not in group)
        within = [sizes[member] for member in group]
        assert sum(within) == extent
        assert max(within) <= min(within) + 2 * UNIT
        assert holding.arriving(chunk) >= (len(group) * max(within) if len(holding.parts[chunk]) > 1 else 1)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(64, 2000),
    st.integers(0, 5000),
    st.booleans(),
)
def test_replicas_of_unequal_groups_sum_alike_and_what_comes_has_room(
    sizes: list[int], extent: int, more: int, even: bool
) -> None:
    """`more`: room beyond the least, as where another chunk is larger."""
    ends = list(accumulate(sizes))
    groups = [tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    each = [
        split_evenly([extent], [group]) if even else deal_whole([extent], [1], [group]) for group in groups
    ]
    seen = [msgspec.structs.replace(held, replicas=tuple(each)) for held in each]
    room = seen[0].arriving(0) + more
    step = seen[0].summed_in_rounds_of(0, room)
    for own in seen:  # every member finds the same
        assert own.arriving(0) == room - more
        assert own.summed_in_rounds_of(0, room) == step
        assert 0 < step <= max(room, extent)
    for begin in range(0, extent, step):
        for held in each:
            for part in held.parts[0]:
                first, last = part.overlap(begin, min(begin + step, extent))
                come = max(len(held.members_of(0)), len(groups) - 1)
                assert come * max(0, last - first) <= room


@settings(max_examples=30, deadline=None)
@given(profiles, st.floats(0.001, 0.1), st.floats(0.01, 0.5), st.booleans())
def test_the_least_budget_that_an_error_names_would_do(
    profile: Profile, device: float, host: float, disk: bool
) -> None:
    need = need_of(profile)
    budgets = Budgets(
        device=max(1, int(need * device)), host=max(1, int(need * host)), disk=disk, folder="/scratch" * disk
    )
    for _ in range(3):  # once for each tier
        try:
            plan = search_plan(profile, RATES, budgets)
        except UserError as error:
            tier, least = re.findall(r"^the budget of the (\w+) .*; (\d+) bytes", str(error))[0]
            assert int(least) > (getattr(budgets, tier) or 0)
            budgets = msgspec.structs.replace(budgets, **{tier: int(least)})
        else:
            break
    else:
        plan = search_plan(profile, RATES, budgets)
    check_plan(plan, profile, RATES, budgets)


def test_all_that_fits_moves_nothing_and_a_byte_less_moves() -> None:
    profile = profile_of([100_000] * 20)
    plan = search_plan(profile, RATES, Budgets(device=2**30))
    assert plan.fits
    assert plan.cache_blocks == 0
    assert "nothing moves" in plan.reason
    enough = plan.blocks * plan.chunk_bytes
    assert search_plan(profile, RATES, Budgets(device=enough)).fits
    less = steps_of(profile, RATES, need_of(profile) - 1, "host")
    assert not less.fits
    assert less.predicted.nbytes["to_device"] >= 20 * 400_000
    assert less.predicted.seconds > plan.predicted.seconds
    part = steps_of(profile, RATES, need_of(profile) - 1)  # nearly all of it can step on the device
    assert not part.fits
    assert part.steps_share > 0.5
    assert part.predicted.seconds <= less.predicted.seconds


def test_a_larger_cache_of_equal_chunks_never_moves_more() -> None:
    costs = [ChunkCosts(blocks=1, nbytes=100, elements=0, payloads={"values": 100}) for _ in range(8)]
    order = [0, 1, 2, 0, 3, 1, 4, 5, 6, 7, 5, 3, 1, 0]
    moves = []
    for blocks in range(1, 9):
        timeline = Timeline(costs, [Call((c,), 1.0) for c in order], RATES, blocks=blocks, host=None)
        moves.append(timeline.run().moves["to_device"])
    assert moves == sorted(moves, reverse=True)
    assert moves[-1] == 0  # frozen chunks that are all there stay there
    assert moves[0] == len(order) - 1  # the last use of a step and the first of the next are the same chunk


def test_of_steps_about_as_short_the_one_with_the_fewest_moves_is_taken() -> None:
    profile = profile_of([100_000] * 20, seconds=1e-2)  # compute decides, whatever the chunks are
    budgets = Budgets(device=4_000_000)
    plan = search_plan(profile, RATES, budgets)
    for size in (400_000, 800_000, 1_600_000):
        other = search_plan(
            profile, RATES, msgspec.structs.replace(budgets, pins=Pins(chunk_bytes=size))
        ).predicted
        assert plan.predicted.seconds <= other.seconds * 1.021
        near = other.seconds <= plan.predicted.seconds * 1.01
        assert not near or sum(plan.predicted.moves.values()) <= sum(other.moves.values())


def test_there_is_room_to_step_during_backward_where_steps_take_longer_than_a_forward() -> None:
    """Each of 40 parameters of 400 KB computes for 50 and 100 us, and is stepped in 100 us."""
    profile = profile_of([100_000] * 40, seconds=5e-5)
    pins = Pins(steps_on="host", chunk_bytes=400_000)
    budgets = Budgets(device=8_000_000, pins=pins)

    def searched(rates: Bandwidths = RATES, host: int | None = None, disk: int = 0) -> MemoryPlan:
        given = msgspec.structs.replace(budgets, host=host, disk=disk, folder="/scratch" * bool(disk))
        return search_plan(profile, rates, given)

    tight = searched(host=40 * 4 * 401_408)
    assert tight.early == ()
    found = searched()
    kept = 3 * 401_408  # in pages: values, and two of state
    assert len(found.early) == 10  # a quarter, where there is no budget
    assert found.early == tuple(
        lay_out_memory(profile.specs, chunk_bytes=400_000).places[i][0] for i in range(39, 29, -1)
    )
    assert found.host_bytes == found.predicted.host_peak == tight.host_bytes + 10 * kept
    assert found.predicted.seconds < 0.98 * tight.predicted.seconds
    assert "10 chunks step during backward" in found.reason
    roomy = searched(host=tight.host_bytes + 25 * kept + 5)
    assert len(roomy.early) == 25
    assert roomy.predicted.host_peak <= tight.host_bytes + 25 * kept
    assert roomy.predicted.seconds < found.predicted.seconds
    assert searched(msgspec.structs.replace(RATES, shared=True)).early == ()
    assert searched(msgspec.structs.replace(RATES, host_steps=1e10)).early == ()  # forward hides them
    assert searched(host=10_000_000, disk=2**30).early == ()


def test_pins_are_kept_to() -> None:
    profile = profile_of([100_000] * 20)
    pins = Pins(chunk_bytes=800_000, cache_blocks=3, resident=0.25)
    plan = search_plan(profile, RATES, Budgets(device=16_000_000, pins=pins))
    layout = lay_out_memory(profile.specs, chunk_bytes=800_000)
    assert plan.chunk_bytes == layout.chunk_bytes
    assert plan.cache_blocks == 3
    held = sum(layout.chunks[c].nbytes for c in plan.resident)
    assert 0.1 <= held / layout.nbytes <= 0.25
    assert not plan.fits
    there = search_plan(profile, RATES, Budgets(device=2**30, pins=Pins(steps_on="host")))
    assert not there.fits
    assert there.steps_on_device == ()
    with pytest.raises(UserError, match="to step there it holds parameters, gradients and optimizer state"):
        search_plan(profile, RATES, Budgets(device=2**23, pins=Pins(steps_on="device")))


def steps_of(profile: Profile, rates: Bandwidths, device: int, steps_on: Any = None) -> MemoryPlan:
    return search_plan(profile, rates, Budgets(device=device, pins=Pins(steps_on=steps_on)))


def test_chunks_step_on_the_device_where_that_is_faster_and_there_is_room() -> None:
    """Each of 40 parameters computes for 0.1 and 0.2 ms, and is 400 KB: 0.04 ms to the device."""
    profile = profile_of([100_000] * 40, seconds=1e-4)
    values = 40 * 400_000
    slow_host = msgspec.structs.replace(RATES, host_steps=2e8)  # 20 ms for all elements, beside 12 of compute
    host = steps_of(profile, slow_host, values, "host")
    best = steps_of(profile, slow_host, values)
    assert best.steps_share > 0.1
    assert "of the trained bytes step on the device" in best.reason
    assert best.predicted.seconds < 0.9 * host.predicted.seconds
    assert best.predicted.seconds <= steps_of(profile, slow_host, values, 0.1).predicted.seconds
    # Where compute hides all, the four blocks of a chunk that steps there are better a cache.
    fast_host = msgspec.structs.replace(RATES, host_steps=1e11)
    assert not steps_of(profile, fast_host, values // 2).steps_on_device
    # Without state they are two, and save three copies in a step.
    plain, slow_link = (
        msgspec.structs.replace(profile, state_bytes={}),
        msgspec.structs.replace(fast_host, to_device=1e9, to_host=1e9),
    )
    best, host = (steps_of(plain, slow_link, values, steps_on).predicted for steps_on in (None, "host"))
    assert sum(best.nbytes.values()) < 0.9 * sum(host.nbytes.values())
    assert best.seconds < 0.8 * host.seconds


def test_adapters_step_on_the_device_and_what_is_frozen_comes_and_goes() -> None:
    sizes = [n for _ in range(20) for n in (100_000, 2_000)]
    profile = profile_of(sizes, seconds=1e-5, frozen=frozenset(range(0, 40, 2)))
    slow_host = msgspec.structs.replace(RATES, host_steps=1e6)
    for steps_on in (None, 1.0):
        plan = steps_of(profile, slow_host, 4_000_000, steps_on)
        assert plan.steps_share == 1.0
        assert plan.predicted.moves["to_host"] == 0
        assert plan.predicted.moves["to_device"] > 0
    whole = steps_of(profile_of([100_000] * 4), RATES, 2**30, 1.0)
    assert whole.fits  # nothing is left to move


def test_a_share_that_no_chunk_is_as_small_as_is_told() -> None:
    with pytest.raises(
        UserError, match=r"^step: no chunk is as small as 0\.2 of the trained bytes \(the smallest has"
    ):
        steps_of(profile_of([100_000] * 2), RATES, 2**20, 0.2)
    with pytest.raises(
        UserError, match=r"^step: no chunk is as small as 0\.2 of .* \(none is stepped here\)"
    ):
        steps_of(profile_of([100_000] * 2, frozen=frozenset((0, 1))), RATES, 500_000, 0.2)


def test_a_step_that_nothing_delays_takes_its_compute() -> None:
    """Frozen chunks that are brought one after the other, each copy half as long as a compute."""
    costs = [ChunkCosts(blocks=1, nbytes=1000, elements=0, payloads={"values": 1000}) for _ in range(10)]
    half = msgspec.structs.replace(RATES, to_device=2000.0, latency=0.0)
    calls = [Call((c,), 1.0) for c in (*range(10), *reversed(range(10)))]
    assert Timeline(costs, calls, half, blocks=2, host=None).run().seconds == pytest.approx(20.0)
    # And with copies twice as long as a compute, the copies decide: 16 of 20 calls find their chunk absent.
    # At the two turns nothing can be brought while both blocks are in use.
    slow = msgspec.structs.replace(half, to_device=500.0)
    outcome = Timeline(costs, calls, slow, blocks=2, host=None).run()
    assert outcome.seconds == pytest.approx(2.0 * 16 + 4.0)
    assert outcome.moves["to_device"] == 16


def test_the_next_use_in_a_cyclic_order() -> None:
    assert next_uses([["a"], ["b", "a"], ["c"]]) == [(1,), (3, 2), (3,)]


def test_a_disk_that_the_host_is_a_cache_of_is_read_and_written_each_step() -> None:
    profile = profile_of([100_000] * 20, seconds=1e-5)
    need = need_of(profile)
    budgets = Budgets(device=need // 8, host=need // 2, disk=4 * need, folder="/scratch")
    plan = search_plan(profile, RATES, budgets)
    # What the host cannot hold of the state, the largest part, goes out and comes back: all of it changes.
    assert plan.predicted.nbytes["from_disk"] >= need * 0.3
    assert plan.predicted.nbytes["to_disk"] >= need * 0.3
    assert "disk" in plan.reason
    whole = search_plan(profile, RATES, msgspec.structs.replace(budgets, host=2 * need))
    assert whole.disk_bytes == 0
    assert whole.predicted.seconds < plan.predicted.seconds


@pytest.mark.usefixtures("no_collections")
def test_the_search_is_under_a_second() -> None:
    """GPT-2 XL's shapes, in this process's own time."""
    width, layers = 1600, 48
    sizes = [50257 * width, 1024 * width]
    for _ in range(layers):
        sizes += [width, width, 3 * width * width, 3 * width, width * width, width, width, width]
        sizes += [4 * width * width, 4 * width, 4 * width * width, width]
    profile = profile_of([*sizes, width, width])
    began = time.process_time()
    plan = search_plan(profile, RATES, Budgets(device=2**31))
    assert time.process_time() - began < 1.0
    assert plan.predicted.moves["to_device"] > 0


@pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])
def test_what_travels_between_members_is_in_the_time(sharding: Any) -> None:
    """40 MB of values, over a link that is the slowest part by far: they come for forward and backward, but
    for what is cached, and gradients go once; of each the part that others hold."""
    profile = profile_of([100_000] * 100, seconds=1e-5)
    values, count, rate = 100 * 400_000, 4, 1e8
    budgets = Budgets(device=values // 10, pins=Pins(sharding=sharding))
    slow = msgspec.structs.replace(RATES, members=rate)
    without = search_plan(profile, RATES, budgets, share=Share(0, count))
    plan = search_plan(profile, slow, budgets, share=Share(0, count))
    assert "not counted" in without.reason
    assert "not counted" not in plan.reason
    assert "traffic from other members" in plan.reason
    came = plan.predicted.nbytes["from_members"]
    assert "from_members" not in without.predicted.nbytes
    once = values * (count - 1) / count
    if sharding == "symmetric":
        assert 2.7 * once < came < 3.1 * once
    else:  # an owner takes in what all others have of a chunk
        assert 1.7 * once < came - values * (count - 1) < 2.1 * once
    # One after the other, but for what copies overlap, and what a step fetches for the next.
    assert plan.predicted.seconds == pytest.approx(came / rate, rel=0.03)
    fast = msgspec.structs.replace(RATES, members=1e15)
    assert search_plan(profile, fast, budgets, share=Share(0, count)).predicted.seconds == pytest.approx(
        without.predicted.seconds, rel=0.03
    )
    steps = msgspec.structs.replace(budgets, pins=Pins(steps_on=0.3))
    with pytest.raises(UserError, match="step: a share is for one worker"):
        search_plan(profile, slow, steps, share=Share(0, count))
