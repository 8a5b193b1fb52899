"""Search for a memory plan: from a profile of the model, measured bandwidths and budgets.

An event model of compute, copies and optimizer steps (`moves/timeline.py`) runs each candidate; the shortest
step wins. Source: docs/memory.md, "The plan"; the idea is Elixir's (Huang et al., arXiv 2212.05339).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from atoll.chunks import Chunk, ChunkMap, ParameterSpec, itemsize, lay_out_memory, sizes_worth_trying
from atoll.core.errors import UserError
from atoll.core.memory import Budgets, Pins
from atoll.core.units import format_bytes, format_seconds
from atoll.moves.owners import UNIT, Holding, Share, deal_whole, split_evenly
from atoll.moves.timeline import (
    DIRECTIONS,
    GROUPS,
    MEMBERS,
    Bandwidths,
    Call,
    ChunkCosts,
    SimulatedStep,
    Timeline,
)

PAGE = 4096  # bytes: alignment of payloads in host memory
SMALLEST_PART = 1024  # the smallest chunk tried is this part of the model; each chunk costs work for each use
LARGEST = 2**30  # bytes of a chunk
SIZES = 10  # most chunk sizes tried
NEAR = 0.02  # relative difference below which steps count as equal: bandwidths are measured no better
STAGES = 2  # buffers of the largest chunk for values from other members: one read ahead, one requested
AT_ONCE = 3  # payloads in use for the group beside a step's: two gradients in flight, one being read
_WIDEST = 8  # bytes of an element of any payload
SPLIT = 2  # best chunk sizes for which steps on the device are tried
EARLY_SHARE = 0.25  # of the trained chunks' values and state: room for copies if the host has no budget
SHARES = 3  # shares of the trained bytes tried for steps on the device, up to the most with room


class Use(msgspec.Struct, frozen=True):
    """One call that needs parameters (indices of `Profile.specs`) at once.

    `seconds` is its compute time and the time until the next call; `backward`: the call is part of backward.
    """

    parameters: tuple[int, ...]
    seconds: float = 0.0
    backward: bool = False


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a model, as it computes without moves.

    Args:
        state_bytes: bytes that an optimizer keeps for each element, by kind of state, for the parameters of
            each settings (`ParameterSpec.settings`); none for other settings.
        master_bytes: bytes of an element of a wider copy of the values; 0: no copy.
        measured: False if the seconds are assumed.
        elsewhere: a parameter server's shards make the steps.
        staging_bytes: host memory beside its arena, for gradients and values on their way to or from shards.
        sums: a group's sums of gradients have payloads too.
        step_seconds: how long the step of each parameter as a whole tensor takes; empty for flat runs.
    """

    specs: tuple[ParameterSpec, ...]
    uses: tuple[Use, ...]
    state_bytes: Mapping[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    master_bytes: int = 0
    measured: bool = True
    elsewhere: bool = False
    staging_bytes: int = 0
    sums: bool = False
    step_seconds: tuple[float, ...] = ()


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step by the event model, from the second on.

    Peaks are the arenas', in bytes; `nbytes` and `moves` are by direction, as in `MemoryFigures`; `computing`
    is the part of `seconds` spent in compute.
    """

    seconds: float
    computing: float
    device_peak: int
    host_peak: int
    disk_peak: int
    nbytes: dict[str, int]
    moves: dict[str, int]


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Homes of a model's chunks, and where they step.

    The device's arena has `blocks` of `chunk_bytes`. `cache_blocks` of them are for chunks that come and go;
    the others are for the chunks in `resident`, and for gradient and state of those in `steps_on_device`: the
    first chunks used, up to `steps_share` of the trained bytes. With `fits` everything stays on the device.
    """

    chunk_bytes: int
    blocks: int
    cache_blocks: int
    resident: tuple[int, ...]  # chunk ids of the layout with `chunk_bytes`
    steps_on_device: tuple[int, ...]  # a part of `resident`
    fits: bool
    host_bytes: int  # of the host's arena
    disk_bytes: int  # of the disk's file
    sharding: str  # "none" with one member
    predicted: Prediction
    reason: str
    host_block_bytes: int = 0  # of the host's arena and the disk's file, if there is a disk
    holding: Holding | None = None  # None with one member
    steps_share: float = 0.0
    early: tuple[int, ...] = ()  # chunks that may be stepped during backward: the host has room for a copy
    staging_bytes: int = 0  # of host memory beside its arena, for other members' chunks
    share: Share | None = None  # None with one member


def search_plan(
    profile: Profile,
    bandwidths: Bandwidths,
    budgets: Budgets,
    *,
    share: Share | None = None,
    lent: int = 0,
) -> MemoryPlan:
    """Return the plan with the highest predicted throughput within `budgets` and their pins.

    Deterministic.

    Args:
            share: this member's share of a model that several members hold; they step their own parts in host
            memory. Their traffic counts if `bandwidths.members` is known.
            lent: number of devices to which a CPU side, which makes the steps, lends its values; 0: none. The
            host's budget is then ignored.

    Raises:
        UserError: no plan fits; names the tier, and the least budget that would do.
    """
    if share is not None and isinstance(budgets.pins.steps_on, float):
        raise UserError("memory.step: a share is for one worker; members step in host memory what they hold")
    shapes = [_Shape(profile, size, share, budgets.pins.sharding, lent) for size in _sizes(profile, budgets)]
    plans: list[tuple[MemoryPlan, _Shape]] = []
    refused: list[_LeastError] = []
    for shape in shapes:
        try:
            plans.append((_plan(shape, bandwidths, budgets), shape))
        except _LeastError as least:
            refused.append(least)
    if not plans:
        raise UserError(_least_of(refused))
    plans.sort(key=lambda pair: pair[0].predicted.seconds)
    by_size = {plan.chunk_bytes: plan.predicted.seconds for plan, _ in plans}
    found = [plan for plan, _ in plans]
    for _, shape in plans[:SPLIT] if _may_split(found[0], shapes[0], budgets.pins) else ():
        found += _splits(shape, bandwidths, budgets)
    best = _best(found)
    shape = next(each for each in shapes if each.chunk_bytes == best.chunk_bytes)
    best = _with_early(best, shape, bandwidths, budgets)
    reason = _reason(
        best, by_size, profile, bandwidths, budgets.pins, elsewhere=lent > 0 or profile.elsewhere
    )
    return msgspec.structs.replace(best, reason=reason)


def _with_early(plan: MemoryPlan, shape: _Shape, bandwidths: Bandwidths, budgets: Budgets) -> MemoryPlan:
    """Return the plan with room to step some chunks during backward, if that is predicted to be shorter.

    These are the chunks whose gradients come first. There are none with a disk, from which they would have to
    be read, nor if the host's steps share the cores of backward.
    """
    alone = shape.share is None and not shape.lent and not shape.profile.elsewhere
    if plan.fits or plan.disk_bytes or bandwidths.shared or not alone:
        return plan
    stepping = frozenset(plan.steps_on_device)
    sizes = {c: shape.kept(c) for c, cost in enumerate(shape.costs) if cost.elements and c not in stepping}
    room = EARLY_SHARE * sum(sizes.values())
    if budgets.host is not None:
        room = budgets.host - plan.host_bytes
    early = []
    for chunk in (c for call in shape.calls for c in call.gradients if c in sizes):
        if sizes[chunk] <= room:
            room -= sizes[chunk]
            early.append(chunk)
    staying = frozenset(plan.resident) - stepping
    found = _predict(shape, bandwidths, budgets, plan.cache_blocks, staying, stepping, tuple(early))
    if found.predicted.seconds * (1 + NEAR) > plan.predicted.seconds:
        return plan
    return msgspec.structs.replace(found, steps_share=plan.steps_share)


def _may_split(best: MemoryPlan, shape: _Shape, pins: Pins) -> bool:
    """Return True if some chunks may step on the device.

    Not for members and masters, which step in host memory, for steps made elsewhere, nor with a pin on steps
    or residents.
    """
    free = pins.steps_on is None and pins.resident is None
    alone = shape.share is None and not shape.lent and not shape.profile.elsewhere
    return free and alone and not (best.fits or shape.profile.master_bytes)


def _splits(shape: _Shape, bandwidths: Bandwidths, budgets: Budgets) -> list[MemoryPlan]:
    """Return plans in which some chunks step on the device, up to the most that has room there."""
    room = budgets.device // shape.chunk_bytes - max(shape.most_at_once(), budgets.pins.cache_blocks or 0)
    trained = [c for c, cost in enumerate(shape.costs) if cost.elements]
    every = sum(map(shape.on_device, trained))
    # Not all of them, unless untrained chunks are left to move.
    most = min(room / every, 1.0 if len(trained) < len(shape.costs) else 0.99) if trained else 0.0
    found = []
    for share in sorted({math.floor(100 * most * part / SHARES) / 100 for part in range(1, SHARES + 1)}):
        with contextlib.suppress(_LeastError):  # no room beside a pin, or no chunk is small enough
            found += [_moving(shape, bandwidths, budgets, share)] if share else []
    return found


def _best(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """Return the plan with the shortest step.

    Of nearly equal ones the plan with the fewest moves, each of which costs work that the event model leaves
    out; then the one that takes least of the device.
    """
    near = min(plan.predicted.seconds for plan in plans) * (1 + NEAR)
    return min(
        (plan for plan in plans if plan.predicted.seconds <= near),
        key=lambda plan: (
            sum(plan.predicted.moves.values()),
            plan.blocks * plan.chunk_bytes,
            plan.predicted.seconds,
            plan.chunk_bytes,
        ),
    )


def blocks_at_once(counts: Sequence[int]) -> int:
    """Return the blocks of a host in which payloads of these sizes can be pinned one after another.

    A pinned payload does not move, so earlier ones may be scattered: one of `n` blocks keeps a run of `m`
    from beginning at `n + m - 1` places.
    """
    return sum(counts) + (len(counts) - 1) * (max(counts) - 1)


class _LeastError(Exception):
    """No plan fits a candidate, because a memory tier is too small.

    `tier` and `nbytes` say which tier, and the size that would do; for "cache" it is in blocks. For "step" no
    chunk is as small as the requested share, and the size is the smallest chunk's bytes. `way_out` names a
    remedy other than more bytes, after "would do".
    """

    def __init__(self, tier: str, nbytes: int, why: str, way_out: str = "") -> None:
        super().__init__(why)
        self.tier, self.nbytes, self.why, self.way_out = tier, nbytes, why, way_out


class _Shape:
    """A profile in chunks of one size.

    `share`: held by several members; `lent`: lent to a device.
    """

    def __init__(
        self,
        profile: Profile,
        chunk_bytes: int,
        share: Share | None = None,
        sharding: str | None = None,
        lent: int = 0,
    ) -> None:
        self.profile, self.share, self.lent = profile, share, lent
        self.map: ChunkMap = lay_out_memory(profile.specs, chunk_bytes=chunk_bytes)
        self.host_block = self.chunk_bytes = self.map.chunk_bytes
        self.costs = self.every = [self._costs(chunk) for chunk in self.map.chunks]
        self.sharding = "none" if share is None else sharding or "symmetric"
        self.holding: Holding | None = None
        self.staging_bytes = profile.staging_bytes
        if share is not None:
            holding = self.holding = self._held_by(share)
            self.costs = [self._held(chunk, holding, share.rank) for chunk in self.map.chunks]
            if share.count > 1:
                self.staging_bytes = STAGES * max(self._arriving(chunk, holding) for chunk in self.map.chunks)
                if self.sharding == "symmetric":
                    between = len(share.holders_of("")) if share.replicas else share.count
                    self.host_block = _paged(-(-self.chunk_bytes // between) + UNIT * _WIDEST)
        elif lent:
            self.costs = [
                msgspec.structs.replace(
                    cost,
                    elements=0,
                    payloads=dict.fromkeys(cost.payloads, 0),
                    stepped_elsewhere=bool(cost.elements),
                )
                for cost in self.every
            ]
        self.calls = _calls(profile, self.map)

    def _held_by(self, share: Share) -> Holding:
        features = [self.map.groups[chunk.group].feature for chunk in self.map.chunks]
        own = self._dealt([share.holders_of(each) for each in features])
        replicas = tuple(self._dealt([group] * len(features)) for group in share.replicas)
        return msgspec.structs.replace(own, replicas=replicas)

    def _dealt(self, groups: Sequence[tuple[int, ...]]) -> Holding:
        """Return the split of each chunk over the members of its group."""
        extents = [chunk.extent for chunk in self.map.chunks]
        if self.sharding == "symmetric":
            return split_evenly(extents, groups)
        took = self.profile.step_seconds
        seconds = [sum(took[slot.parameter] for slot in chunk.slots) for chunk in self.map.chunks if took]
        return deal_whole(extents, [sum(cost.payloads.values()) for cost in self.every], groups, seconds)

    def _held(self, chunk: Chunk, holding: Holding, rank: int) -> ChunkCosts:
        """Return a chunk's costs for one of several members: its own part, and the traffic."""
        costs, (begin, end) = self._part(chunk, holding.part(chunk.id, rank)), holding.part(chunk.id, rank)
        size, others = itemsize(chunk.dtype), len(holding.members_of(chunk.id)) - 1
        largest = max(part.numel for part in holding.parts[chunk.id])
        # Each member sends gradients of others' parts, and receives gradients of its own part.
        summed = max(chunk.extent - (largest if len(holding.parts[chunk.id]) > 1 else 0), others * largest)
        trained, replicas = "gradient" in costs.payloads, holding.of_replicas
        most = max(part.numel for held in replicas for part in held.parts[chunk.id])
        return msgspec.structs.replace(
            costs,
            arrives=(chunk.extent - (end - begin)) * size,
            summed=summed * size if others and trained else 0,
            summed_over_groups=(len(replicas) - 1) * most * size if trained else 0,
        )

    @staticmethod
    def _arriving(chunk: Chunk, holding: Holding) -> int:
        return _paged(max(chunk.nbytes, holding.arriving(chunk.id) * itemsize(chunk.dtype)))

    def _costs(self, chunk: Chunk) -> ChunkCosts:
        trained = self.map.groups[chunk.group].trainable
        sizes = {"values": itemsize(chunk.dtype)} | (self._trained_sizes(chunk) if trained else {})
        return ChunkCosts(
            blocks=self.blocks_of(chunk.nbytes),
            nbytes=chunk.extent * sizes["values"],
            elements=chunk.used if trained and not self.profile.elsewhere else 0,
            stepped_elsewhere=trained and self.profile.elsewhere,
            payloads={kind: _paged(chunk.numel * size) for kind, size in sizes.items()},
        )

    def _trained_sizes(self, chunk: Chunk) -> dict[str, int]:
        """Return the bytes of an element for each payload that a trained chunk has beside its values."""
        size, profile = itemsize(chunk.dtype), self.profile
        master = {"master": profile.master_bytes} if profile.master_bytes > size else {}
        kinds = profile.state_bytes.get(self.map.groups[chunk.group].settings, ())
        states = {f"state {number}": nbytes for number, nbytes in enumerate(kinds)}
        return {"gradient": size, **({"sum": size} if profile.sums else {}), **master, **states}

    def _part(self, chunk: Chunk, bounds: tuple[int, int]) -> ChunkCosts:
        """Return the costs of a chunk of which a member holds these elements.

        The gradients of the whole chunk lie here until they are summed.
        """
        cost, (begin, end) = self.every[chunk.id], bounds
        if end - begin == chunk.extent:
            return cost
        sizes = {"values": itemsize(chunk.dtype)} | (self._trained_sizes(chunk) if cost.elements else {})
        payloads = {kind: _paged((end - begin) * size) for kind, size in sizes.items()}
        payloads = {kind: nbytes for kind, nbytes in payloads.items() if nbytes or kind == "values"}
        if "gradient" in cost.payloads:
            payloads["gradient"] = cost.payloads["gradient"]
        used = [min(slot.offset + slot.numel, end) - max(slot.offset, begin) for slot in chunk.slots]
        elements = sum(max(count, 0) for count in used) if cost.elements else 0
        return msgspec.structs.replace(
            cost, elements=elements, payloads=payloads, stepped_elsewhere=bool(cost.elements) and not elements
        )

    @property
    def whole_blocks(self) -> int:
        """Blocks of all payloads if everything stays on the device.

        Several members then hold whole copies each. A ring has the gradients once more, in its messages, and
        so has a worker that sends them to shards.
        """
        kinds = [nbytes for cost in self.every for nbytes in cost.payloads.values()]
        if self.share is not None or self.lent > 1 or self.profile.elsewhere:
            kinds += [cost.payloads["gradient"] for cost in self.every if "gradient" in cost.payloads]
        return sum(map(self.blocks_of, kinds))

    def blocks_of(self, nbytes: int) -> int:
        return -(-nbytes // self.chunk_bytes)

    def on_device(self, chunk: int) -> int:
        """Return the blocks of a chunk that steps on the device."""
        return sum(self.blocks_of(nbytes) for nbytes in self.costs[chunk].payloads.values())

    def rounded(self) -> list[ChunkCosts]:
        """Return the costs in whole blocks of the host's arena, for a host that is a cache over the disk.

        Its blocks have the chunks' size, or the size of a member's part.
        """
        size = self.host_block
        return [
            msgspec.structs.replace(
                cost, payloads={kind: -(-nbytes // size) * size for kind, nbytes in cost.payloads.items()}
            )
            for cost in self.costs
        ]

    def kept(self, chunk: int) -> int:
        """Return the bytes that a chunk keeps from step to step: values, master and state."""
        transient = ("gradient", "sum")
        return sum(nbytes for kind, nbytes in self.costs[chunk].payloads.items() if kind not in transient)

    def most_at_once(self, without: frozenset[int] = frozenset()) -> int:
        """Return the most blocks that a call needs, without the chunks in `without`."""
        needs = (sum(self.costs[c].blocks for c in set(call.chunks) - without) for call in self.calls)
        return max(needs, default=1)

    def stepping(self, share: float) -> frozenset[int]:
        """Return the chunks that step on the device, for this share of the trained bytes."""
        if not share:
            return frozenset()
        trained = [cost.nbytes for cost in self.costs if cost.elements]
        chosen = _chosen(self, share * sum(trained), lambda c: self.costs[c].nbytes, trained=True)
        if not chosen:
            raise _LeastError("step", min(trained, default=0), f"{share:g}")
        return chosen

    def largest(self) -> str:
        """Describe the largest parameter."""
        spec = max(self.profile.specs, key=lambda spec: spec.nbytes)
        return f"{spec.name!r} of {format_bytes(spec.nbytes)}"


def _calls(profile: Profile, layout: ChunkMap) -> list[Call]:
    """Return the uses as calls on chunks, consecutive ones with the same chunks merged.

    A chunk's gradient is complete after its last use in backward, or after its last use if none is in
    backward.
    """
    calls: list[tuple[tuple[int, ...], float, bool]] = []
    for use in profile.uses:
        chunks = tuple(dict.fromkeys(layout.places[index][0] for index in use.parameters))
        if calls and calls[-1][0] == chunks and calls[-1][2] == use.backward:
            calls[-1] = (chunks, calls[-1][1] + use.seconds, use.backward)
        else:
            calls.append((chunks, use.seconds, use.backward))
    trained = {chunk.id for chunk in layout.trainable}
    last: dict[int, int] = {}
    for backward in (False, True):
        last |= {
            chunk: position
            for position, (chunks, _, back) in enumerate(calls)
            if back == backward
            for chunk in chunks
        }
    ended: dict[int, list[int]] = {}
    for chunk, position in last.items():
        if chunk in trained:
            ended.setdefault(position, []).append(chunk)
    return [
        Call(chunks, seconds, tuple(sorted(ended.get(position, ()))))
        for position, (chunks, seconds, _) in enumerate(calls)
    ]


def _sizes(profile: Profile, budgets: Budgets) -> Sequence[int]:
    if budgets.pins.chunk_bytes is not None:
        return (budgets.pins.chunk_bytes,)
    # Independent of the budget: the least budget that an error names then finds its size.
    total = sum(spec.nbytes for spec in profile.specs)
    smallest = _paged(max(1, total // SMALLEST_PART))
    largest = max(smallest, min(LARGEST, _paged(total)))
    sizes = sizes_worth_trying(profile.specs, smallest=smallest, largest=largest)
    every = -(-len(sizes) // SIZES)
    return sizes[::-every][::-1]


def _plan(shape: _Shape, bandwidths: Bandwidths, budgets: Budgets) -> MemoryPlan:
    """Return the plan with one chunk size, in which all chunks step on the device or none.

    Raises _LeastError if a budget is too small.
    """
    pins = budgets.pins
    every = shape.whole_blocks
    there = pins.steps_on == "device" or (pins.steps_on == 1.0 and all(cost.elements for cost in shape.every))
    searched = there or (pins.steps_on is None and pins.cache_blocks is None and pins.resident is None)
    searched = searched and not shape.profile.master_bytes  # the optimizer alone knows no master copies
    if every * shape.chunk_bytes <= budgets.device and searched:
        return _whole(shape, bandwidths, every)
    if there:
        why = "to step there it holds parameters, gradients and optimizer state"
        raise _LeastError("device", every * shape.chunk_bytes, why)
    return _moving(shape, bandwidths, budgets, pins.steps_on if isinstance(pins.steps_on, float) else 0.0)


def _whole(shape: _Shape, bandwidths: Bandwidths, blocks: int) -> MemoryPlan:
    """Return the plan in which everything stays on the device."""
    seconds = sum(call.seconds for call in shape.calls)
    elements = sum(cost.elements for cost in shape.every)
    ids = tuple(range(len(shape.every)))
    return MemoryPlan(
        chunk_bytes=shape.chunk_bytes,
        blocks=blocks,
        cache_blocks=0,
        resident=ids,
        steps_on_device=tuple(c for c in ids if shape.every[c].elements),
        fits=True,
        host_bytes=0,
        disk_bytes=0,
        sharding="none" if shape.share is None else "whole",
        predicted=Prediction(
            seconds=seconds + elements / bandwidths.device_steps,
            computing=seconds,
            device_peak=blocks * shape.chunk_bytes,
            host_peak=0,
            disk_peak=0,
            nbytes=dict.fromkeys(DIRECTIONS, 0),
            moves=dict.fromkeys(DIRECTIONS, 0),
        ),
        reason="",
    )


def _moving(shape: _Shape, bandwidths: Bandwidths, budgets: Budgets, steps_share: float) -> MemoryPlan:
    """Return the plan in which chunks come and go, but for `steps_share` of them that step on the device."""
    blocks, pins = budgets.device // shape.chunk_bytes, budgets.pins
    stepping = shape.stepping(steps_share)
    least = shape.most_at_once(stepping)
    _check_device(shape, pins, blocks, stepping, steps_share)
    blocks -= sum(shape.on_device(c) for c in stepping)
    staying: frozenset[int] = frozenset()
    if pins.resident is not None:
        staying = _resident(shape, pins)
        resident_blocks = sum(shape.costs[c].blocks for c in staying)
        if blocks - resident_blocks < least:
            raise _LeastError(
                "device",
                (resident_blocks + least) * shape.chunk_bytes,
                f"{pins.resident:g} of the parameters stay on it",
            )
        blocks -= resident_blocks
    others = sum(cost.blocks for c, cost in enumerate(shape.costs) if c not in staying | stepping)
    cache = min(blocks, max(others, least))
    if pins.cache_blocks is not None:
        if pins.cache_blocks > blocks:  # beside what steps on the device
            why = f"a cache of {pins.cache_blocks} blocks"
            raise _LeastError("device", pins.cache_blocks * shape.chunk_bytes, why)
        cache = pins.cache_blocks
    plan = _predict(shape, bandwidths, budgets, cache, staying, stepping)
    return msgspec.structs.replace(plan, steps_share=steps_share)


def _check_device(
    shape: _Shape, pins: Pins, blocks: int, stepping: frozenset[int], steps_share: float
) -> None:
    """Raise _LeastError if `blocks` are too few for a call, the pins and the steps on the device together.

    The bytes that the error names do for all of these.
    """
    least = shape.most_at_once(stepping)
    if pins.cache_blocks is not None and pins.cache_blocks < least:
        raise _LeastError("cache", least, f"{pins.cache_blocks}")
    needed = pins.cache_blocks or least
    why = f"a call needs all its parameters at once, and the largest is {shape.largest()}"
    if pins.cache_blocks is not None:
        why = f"a cache of {pins.cache_blocks} blocks is set"
    if pins.resident is not None:
        needed += sum(shape.costs[c].blocks for c in _resident(shape, pins))
        why = f"{pins.resident:g} of the parameters stay on it, and {why}"
    if stepping:
        needed += sum(shape.on_device(c) for c in stepping)
        why = f"{steps_share:g} of the trained parameters step there with gradient and state, and {why}"
    if blocks < needed:
        raise _LeastError("device", needed * shape.chunk_bytes, why)


def _resident(shape: _Shape, pins: Pins) -> frozenset[int]:
    """Return the chunks that `pins.resident` keeps on the device."""
    assert pins.resident is not None
    total = sum(cost.blocks for cost in shape.costs)
    return _chosen(shape, math.floor(pins.resident * total), lambda c: shape.costs[c].blocks)


def _predict(
    shape: _Shape,
    bandwidths: Bandwidths,
    budgets: Budgets,
    cache: int,
    staying: frozenset[int],
    stepping: frozenset[int],
    early: tuple[int, ...] = (),
) -> MemoryPlan:
    """Return the plan with this cache, these chunks resident, these stepping there, and these stepped
    early."""
    costs, host, disk = _homes(shape, budgets, stepping)
    timeline = Timeline(
        costs,
        shape.calls,
        bandwidths,
        blocks=cache,
        host=host,
        pinned=staying,
        on_device=stepping,
        early=frozenset(early),
    )
    outcome = timeline.run()
    spare = sum(map(shape.kept, early))
    there = sum(shape.costs[c].blocks for c in staying) + sum(shape.on_device(c) for c in stepping)
    return MemoryPlan(
        chunk_bytes=shape.chunk_bytes,
        blocks=cache + there,
        cache_blocks=cache,
        resident=tuple(sorted(staying | stepping)),
        steps_on_device=tuple(sorted(stepping)),
        fits=False,
        host_bytes=timeline.host_need + spare if host is None else host,
        disk_bytes=disk,
        sharding=shape.sharding,
        host_block_bytes=shape.host_block,
        holding=shape.holding,
        staging_bytes=shape.staging_bytes,
        early=early,
        predicted=_prediction(shape, outcome, timeline, there, spare),
        reason="",
    )


def _homes(
    shape: _Shape, budgets: Budgets, stepping: frozenset[int]
) -> tuple[list[ChunkCosts], int | None, int]:
    """Return the chunks' costs in host memory, the bytes of its arena, and the bytes of the disk's file.

    The arena is None if the host holds everything, and else a cache over the disk.
    """
    need = sum(sum(cost.payloads.values()) for c, cost in enumerate(shape.costs) if c not in stepping)
    if shape.lent or budgets.host is None or need + shape.staging_bytes <= budgets.host:
        return shape.costs, None, 0
    costs = shape.rounded()
    need = sum(sum(cost.payloads.values()) for c, cost in enumerate(costs) if c not in stepping)
    if not budgets.disk:
        raise _LeastError(
            "host",
            sum(sum(cost.payloads.values()) for cost in shape.costs) + shape.staging_bytes,
            "parameters, gradients and optimizer state lie there, and there is no disk",
            ", or a disk",
        )
    block = shape.host_block
    largest = max(-(-chunk.nbytes // block) for chunk in shape.map.chunks)
    beside = [] if shape.share is None else [largest] * AT_ONCE
    at_once = block * max(
        blocks_at_once([*(nbytes // block for nbytes in cost.payloads.values()), *beside])
        for c, cost in enumerate(costs)
        if c not in stepping
    )
    host = (budgets.host - shape.staging_bytes) // block * block
    if host < at_once:
        raise _LeastError(
            "host",
            at_once + shape.staging_bytes,
            "a chunk steps with its parameters, gradient and state there at once",
        )
    if need > budgets.disk:
        raise _LeastError(
            "disk", need, "parameters, gradients and optimizer state of all chunks need room there"
        )
    return costs, host, need


def _prediction(
    shape: _Shape, outcome: SimulatedStep, timeline: Timeline, there: int, spare: int
) -> Prediction:
    return Prediction(
        seconds=outcome.seconds,
        computing=sum(call.seconds for call in shape.calls),
        device_peak=(timeline.device_peak + there) * shape.chunk_bytes,
        host_peak=outcome.host_peak + shape.staging_bytes + spare,
        disk_peak=outcome.disk_peak,
        nbytes=outcome.nbytes,
        moves=outcome.moves,
    )


def _chosen(
    shape: _Shape, room: float, taken_by: Callable[[int], int], *, trained: bool = False
) -> frozenset[int]:
    """Return chunks that take at most `room`, the first used first: the next step needs these soonest."""
    chosen: set[int] = set()
    for chunk in dict.fromkeys(c for call in shape.calls for c in call.chunks):
        taken = taken_by(chunk)
        if taken <= room and (shape.costs[chunk].elements or not trained):
            chosen.add(chunk)
            room -= taken
    return frozenset(chosen)


def _least_of(refused: Sequence[_LeastError]) -> str:
    """Return the error for the user: the tier that is too small, by the chunk size that needs least."""
    # A size that only host or disk is too small for has passed the device's budget. No budget helps a cache
    # that is too small for a call, or a share below the smallest chunk.
    tiers = ("disk", "host", "device", "cache", "step")
    tier = next(tier for tier in tiers if any(r.tier == tier for r in refused))
    least = min((r for r in refused if r.tier == tier), key=lambda r: r.nbytes)
    if tier == "cache":
        needs, given = f"{least.nbytes} blocks", least.why
        return f"cache: a call needs {needs}, and {given} was given; give {least.nbytes} or more, or auto"
    if tier == "step":
        smallest = (
            f"the smallest has {format_bytes(least.nbytes)}" if least.nbytes else "none is stepped here"
        )
        return f"step: no chunk is as small as {least.why} of the trained bytes ({smallest}); give more"
    more = f"; {least.nbytes} bytes ({format_bytes(least.nbytes)}) would do"
    return f"the budget of the {tier} is too small: {least.why}{more}{least.way_out}"


def _reason(
    plan: MemoryPlan,
    by_size: Mapping[int, float],
    profile: Profile,
    rates: Bandwidths,
    pins: Pins,
    *,
    elsewhere: bool,
) -> str:
    """Return one line that explains the plan. `elsewhere`: others make the optimizer's steps."""
    if plan.fits and elsewhere:
        return "parameters and gradients fit on the device: nothing moves"
    if plan.fits and plan.sharding == "whole":
        return "all fits on each member's device: each holds the whole model, as without budgets"
    if plan.fits:
        return "parameters, gradients and optimizer state fit on the device: nothing moves"
    sizes = f"the shortest step of {len(by_size)} chunk sizes"
    if pins.chunk_bytes is not None:
        sizes = "the chunk size was given"
    elif len(by_size) > 1:
        worst = max(by_size, key=lambda size: by_size[size])
        sizes += f" ({format_bytes(worst)} would take {format_seconds(by_size[worst])})"
    bound, seconds = _longest(plan, profile, rates, elsewhere=elsewhere)
    notes = "" if profile.measured else "; compute is not measured yet, and taken to be as long as copies"
    if plan.holding is not None:
        split = "chunks are split evenly over the members"
        notes += f"; {split if plan.sharding == 'symmetric' else 'each chunk belongs to one member'}"
        notes += f" of each of {len(plan.holding.replicas)} groups" if plan.holding.replicas else ""
        notes += "" if rates.members or rates.groups else "; traffic from other members is not counted"
    notes += "; traffic with the shards is not counted" if profile.elsewhere else ""
    notes += f"; {plan.steps_share:g} of the trained bytes step on the device" if plan.steps_on_device else ""
    notes += f"; {len(plan.early)} chunks step during backward" if plan.early else ""
    return f"{sizes}; the longest part of a step is {bound}: {format_seconds(seconds)}{notes}"


def _longest(plan: MemoryPlan, profile: Profile, rates: Bandwidths, *, elsewhere: bool) -> tuple[str, float]:
    """Return the part of a step that alone would take longest, and its seconds."""
    predicted = plan.predicted
    stepped = 0 if elsewhere else sum(spec.numel for spec in profile.specs if spec.trainable)
    if plan.steps_on_device:
        layout = lay_out_memory(profile.specs, chunk_bytes=plan.chunk_bytes)
        stepped -= sum(layout.chunks[c].used for c in plan.steps_on_device)
    parts = {
        "compute": predicted.computing,
        "the optimizer's steps": stepped / rates.host_steps,
        "copies to the device": predicted.nbytes["to_device"] / rates.to_device,
        "copies to the host": predicted.nbytes["to_host"] / rates.to_host,
    }
    if MEMBERS in predicted.nbytes:
        parts["traffic from other members"] = predicted.nbytes[MEMBERS] / rates.members
    if GROUPS in predicted.nbytes:
        parts["traffic from other groups"] = predicted.nbytes[GROUPS] / rates.groups
    if plan.disk_bytes:
        parts["reads from disk"] = predicted.nbytes["from_disk"] / rates.from_disk
        parts["writes to disk"] = predicted.nbytes["to_disk"] / rates.to_disk
    longest = max(parts, key=lambda part: parts[part])
    return longest, parts[longest]


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
