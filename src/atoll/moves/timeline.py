"""Event model of a step: compute, copies each way, and the optimizer's steps.

Three results follow in turn: which chunks come to the device at which use (Belady's rule over the cyclic
order of uses); which host payloads then come from disk, and which leave for them (by the same rule); and when
each move begins and ends. Compute, each direction of each link, and the CPU's steps run in parallel. A move
begins once its link and room are free and its content is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec

_STEPS = 3  # steps run; the last one's time and moves count
DIRECTIONS = ("to_device", "to_host", "to_disk", "from_disk")
EARLY_COST = 2.0  # time of a step made in a copy, in usual steps: bytes are the cost
# Further directions of `nbytes`:
MEMBERS = "from_members"  # from other members of the group
GROUPS = "from_groups"  # from the other groups, if each holds a replica


class ChunkCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one chunk.

    Args:
        blocks: of the device's arena.
        nbytes: bytes of a move.
        elements: stepped here; 0: none.
        payloads: bytes that the host keeps, by kind.
        stepped_elsewhere: another member steps the chunk, or a shard.
        arrives: bytes of values fetched from other members whenever the chunk comes to the device.
        summed: bytes that a member sends or receives for the sum of gradients, the largest of any member.
        summed_over_groups: those for the sum over groups that each hold a replica.
    """

    blocks: int
    nbytes: int
    elements: int
    payloads: dict[str, int]  # "values", "master", "gradient", "state"
    stepped_elsewhere: bool = False
    arrives: int = 0
    summed: int = 0
    summed_over_groups: int = 0


class Call(msgspec.Struct, frozen=True):
    """Chunks needed at once, the seconds of compute, and the chunks whose gradient is then complete."""

    chunks: tuple[int, ...]
    seconds: float
    gradients: tuple[int, ...] = ()


class Bandwidths(msgspec.Struct, frozen=True, kw_only=True):
    """Measured speeds: bytes/s each way, elements/s of an optimizer's step.

    Args:
        latency: seconds of a move, whatever its size.
        members: bytes/s between members of a group, each way; 0: not known, and taken as no time.
        groups: bytes/s between groups; 0: not known, and taken as no time.
        shared: the device is the CPU: compute and the host's steps share its cores.
    """

    to_device: float
    to_host: float
    to_disk: float = 0.0
    from_disk: float = 0.0
    host_steps: float
    device_steps: float
    latency: float = 0.0
    members: float = 0.0
    groups: float = 0.0
    shared: bool = False


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The last step's time, its moves and bytes by direction, and the peak bytes of host and disk."""

    seconds: float
    host_peak: int
    disk_peak: int
    moves: dict[str, int]
    nbytes: dict[str, int]


Payload: TypeAlias = tuple[int, str]  # chunk, kind
KeyT = TypeVar("KeyT", bound=Hashable)


class _Access(msgspec.Struct, frozen=True):
    """Access to a host payload. `ends`: the payload is dropped after it."""

    key: Payload
    nbytes: int
    writes: bool
    fresh: bool = False  # the former content is not needed
    ends: bool = False


class _Load(msgspec.Struct, frozen=True):
    """Requirements of an access: bytes to read, and victims as (key, bytes to write back)."""

    read: int
    victims: tuple[tuple[Payload, int], ...] = ()


def next_uses(order: Sequence[Sequence[KeyT]]) -> list[tuple[int, ...]]:
    """Return the distance to each key's next use, 1 or more, for each position of a cyclic order."""
    count = len(order)
    first: dict[KeyT, int] = {}
    for position in reversed(range(count)):
        for key in order[position]:
            first[key] = position
    coming = {key: position + count for key, position in first.items()}
    distances: list[tuple[int, ...]] = [()] * count
    for position in reversed(range(count)):
        distances[position] = tuple(coming[key] - position for key in order[position])
        for key in order[position]:
            coming[key] = position
    return distances


class _Cache(Generic[KeyT]):
    """Belady's rule over items of several sizes: the item used again last leaves first.

    Contiguous runs of blocks are ignored; `moves/cache.py` handles them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.peak = capacity, 0, 0
        self.sizes: dict[KeyT, int] = {}
        self._next: dict[KeyT, int] = {}
        self._heap: list[tuple[int, int, KeyT]] = []  # (-next use, number, key); stale entries are skipped
        self._number = 0

    def use(
        self, keys: Sequence[KeyT], sizes: Sequence[int], nexts: Sequence[int]
    ) -> list[list[KeyT] | None]:
        """Return the victims of each key that comes in, and None for a cached one. All keys are needed at
        once."""
        victims: list[list[KeyT] | None] = []
        pinned = set(keys)
        for key, size, next_use in zip(keys, sizes, nexts, strict=True):
            left: list[KeyT] | None = None
            if key not in self.sizes:
                left = self._make_room(size, pinned)
                self.sizes[key] = size
                self.used += size
                self.peak = max(self.peak, self.used)
            self._next[key] = next_use
            self._number += 1
            heapq.heappush(self._heap, (-next_use, self._number, key))
            victims.append(left)
        return victims

    def drop(self, key: KeyT) -> None:
        if key in self.sizes:
            self.used -= self.sizes.pop(key)
            del self._next[key]

    def _make_room(self, size: int, pinned: set[KeyT]) -> list[KeyT]:
        left, kept = [], []
        while self.used + size > self.capacity and self._heap:
            entry = heapq.heappop(self._heap)
            key = entry[2]
            if self._next.get(key) != -entry[0]:
                continue
            if key in pinned:
                kept.append(entry)
                continue
            self.drop(key)
            left.append(key)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return left


class Timeline:
    """One candidate: chunks, the calls of a step in order, and the chunks that step on the device."""

    def __init__(
        self,
        chunks: Sequence[ChunkCosts],
        calls: Sequence[Call],
        rates: Bandwidths,
        *,
        blocks: int,
        host: int | None,
        pinned: frozenset[int] = frozenset(),
        on_device: frozenset[int] = frozenset(),
        early: frozenset[int] = frozenset(),
    ) -> None:
        """Build a candidate.

        Args:
            blocks: of the device's cache.
            host: bytes of the host's arena if it is a cache over the disk; else None.
            pinned: chunks that stay on the device, outside the cache.
            on_device: chunks that step on the device, and stay there.
            early: chunks that may be stepped during backward.
        """
        self.early = early
        self._chunks, self._calls, self._rates = chunks, calls, rates
        self._always, self._on_device = pinned | on_device, on_device
        self._host = host
        self.host_peak, self.disk_peak = self.host_need, 0
        self._cache: _Cache[int] = _Cache(blocks)
        first = {c: position for position, call in reversed(list(enumerate(calls))) for c in call.chunks}
        trained = [c for c in first if chunks[c].elements]
        # The optimizer steps chunks in the order of their next use.
        self._stepped = sorted((c for c in trained if c not in on_device), key=lambda c: (first[c], c))
        self._stepped_there = [c for c in trained if c in on_device]
        self._void = [*self._stepped, *(c for c in first if chunks[c].stepped_elsewhere)]

    def run(self) -> SimulatedStep:
        return _Clock(self._rates, self._chunks, self).run()

    @property
    def stepped(self) -> list[int]:
        return self._stepped

    @property
    def device_elements(self) -> int:
        return sum(self._chunks[c].elements for c in self._stepped_there)

    @property
    def calls(self) -> Sequence[Call]:
        return self._calls

    @property
    def device_peak(self) -> int:
        """Most blocks of the cache in use, once `loads` has run."""
        return self._cache.peak

    def loads(self) -> list[list[list[tuple[int, tuple[int, ...]]]]]:
        """Return by step and call the chunks that come to the device, and the victims of each.

        A chunk that was stepped on the host or elsewhere is void on the device, and comes again.
        """
        order = [[c for c in call.chunks if c not in self._always] for call in self._calls]
        distances = next_uses(order)
        sizes = [[self._chunks[c].blocks for c in chunks] for chunks in order]
        always: set[int] = set()  # staying chunks that came in this step
        steps = []
        for step in range(_STEPS):
            always -= set(self._void)
            for chunk in self._void:
                self._cache.drop(chunk)
            found = []
            for position, call in enumerate(self._calls):
                now = step * len(order) + position
                nexts = [now + distance for distance in distances[position]]
                left = self._cache.use(order[position], sizes[position], nexts)
                come: list[tuple[int, tuple[int, ...]]] = [
                    (chunk, tuple(victims))
                    for chunk, victims in zip(order[position], left, strict=True)
                    if victims is not None
                ]
                staying = [c for c in call.chunks if c in self._always - self._on_device - always]
                always.update(staying)
                found.append(come + [(chunk, ()) for chunk in staying])
            steps.append(found)
        return steps

    def accesses(self, loads: list[list[tuple[int, tuple[int, ...]]]]) -> list[list[_Access]]:
        """Return one step's accesses to host payloads in program order.

        First those of each call (the chunks it loads, then the gradients it completes), then those of each
        chunk's step.
        """
        found = []
        for call, come in zip(self._calls, loads, strict=True):
            these = [self._access(c, "values") for c, _ in come]
            these += [
                self._access(c, "gradient", writes=True, fresh=True)
                for c in call.gradients
                if c not in self._on_device
            ]
            found.append(these)
        for c in self._stepped:
            kinds = self._chunks[c].payloads
            found.append(
                [self._access(c, kind, writes=kind != "gradient", ends=kind == "gradient") for kind in kinds]
            )
        return found

    def _access(
        self, chunk: int, kind: str, *, writes: bool = False, fresh: bool = False, ends: bool = False
    ) -> _Access:
        return _Access((chunk, kind), self._chunks[chunk].payloads[kind], writes, fresh, ends)

    def disk(self, steps: list[list[list[_Access]]]) -> list[list[list[_Load]]] | None:
        """Return by step and access the reads from disk and their victims; None if all lies in host
        memory."""
        if self._host is None or self._host >= self.host_need:
            return None
        cache: _Cache[Payload] = _Cache(self._host)
        dirty: set[Payload] = set()
        on_disk: set[Payload] = set()
        order = [[access.key for access in these] for these in steps[-1]]
        distances = next_uses(order)
        found = []
        for number, step in enumerate(steps):
            # Only the first step's order can differ from the last's.
            repeated = [[access.key for access in these] for these in step] == order
            ahead = distances if repeated else next_uses([[a.key for a in these] for these in step])
            loads = []
            for position, these in enumerate(step):
                now = number * len(order) + position
                left = cache.use(
                    [a.key for a in these],
                    [a.nbytes for a in these],
                    [now + distance for distance in ahead[position]],
                )
                loads.append(
                    [
                        self._disk_load(a, victims, dirty, on_disk)
                        for a, victims in zip(these, left, strict=True)
                    ]
                )
                for access in these:
                    if access.writes:
                        dirty.add(access.key)
                    if access.ends:
                        dirty.discard(access.key)
                        on_disk.discard(access.key)
                        cache.drop(access.key)
            self.disk_peak = max(self.disk_peak, sum(self._payload(key) for key in on_disk))
            found.append(loads)
        self.host_peak = cache.peak
        return found

    def _payload(self, key: Payload) -> int:
        return self._chunks[key[0]].payloads[key[1]]

    def _disk_load(
        self, access: _Access, victims: list[Payload] | None, dirty: set[Payload], on_disk: set[Payload]
    ) -> _Load:
        if victims is None:
            return _Load(0)
        leaving = []
        for key in victims:
            goes = key in dirty or key not in on_disk
            leaving.append((key, self._payload(key) if goes else 0))
            dirty.discard(key)
            on_disk.add(key)
        # An unseen payload is taken to lie on disk from the start; the first step's time does not count.
        return _Load(0 if access.fresh else access.nbytes, tuple(leaving))

    @property
    def host_need(self) -> int:
        """Bytes of host memory for all payloads at once, without chunks that step on the device."""
        return sum(sum(c.payloads.values()) for i, c in enumerate(self._chunks) if i not in self._on_device)


class _Clock:
    """Start and end times of all moves, steps and compute."""

    def __init__(self, rates: Bandwidths, chunks: Sequence[ChunkCosts], timeline: Timeline) -> None:
        self._rates, self._chunks, self._timeline = rates, chunks, timeline
        self._free = dict.fromkeys((*DIRECTIONS, "compute", "steps"), 0.0)
        self._used: dict[Hashable, float] = {}  # end of the latest use of a chunk or payload
        self._stepped: dict[int, float] = {}
        self._moves, self._nbytes = dict.fromkeys(DIRECTIONS, 0), dict.fromkeys(DIRECTIONS, 0)

    def run(self) -> SimulatedStep:
        timeline = self._timeline
        loads = timeline.loads()
        accesses = [timeline.accesses(step) for step in loads]
        disk = timeline.disk(accesses)
        began = 0.0
        for step in range(_STEPS):
            began = self._free["compute"]
            self._moves, self._nbytes = dict.fromkeys(DIRECTIONS, 0), dict.fromkeys(DIRECTIONS, 0)
            self._step(loads[step], accesses[step], None if disk is None else disk[step])
        return SimulatedStep(
            seconds=self._free["compute"] - began,
            host_peak=timeline.host_peak,
            disk_peak=timeline.disk_peak,
            moves=self._moves,
            nbytes=self._nbytes,
        )

    def _step(
        self,
        loads: list[list[tuple[int, tuple[int, ...]]]],
        accesses: list[list[_Access]],
        disk: list[list[_Load]] | None,
    ) -> None:
        rates, free = self._rates, self._free
        calls = self._timeline.calls
        for position, call in enumerate(calls):
            there = self._from_disk(accesses[position], disk, position)
            begin = free["compute"]
            for index, (chunk, victims) in enumerate(loads[position]):
                room = max((self._used.get(c, 0.0) for c in victims), default=0.0)
                # A chunk that comes again must have been stepped before.
                after = max(room, there[index], self._stepped.get(chunk, 0.0))
                end = self._arrive(chunk, after)
                self._used[(chunk, "values")] = end
                begin = max(begin, end)
            free["compute"] = begin + call.seconds
            for chunk in call.chunks:
                self._used[chunk] = free["compute"]
            self._gradients(accesses[position], there, len(loads[position]))
        self._sum()
        free["compute"] += (
            self._timeline.device_elements / rates.device_steps if self._timeline.device_elements else 0.0
        )
        self._steps(accesses, disk, len(calls))

    def _arrive(self, chunk: int, after: float) -> float:
        """Bring a chunk to the device. The copying thread first fetches the parts that other members hold."""
        costs = self._chunks[chunk]
        if costs.arrives and self._rates.members:
            self._nbytes[MEMBERS] = self._nbytes.get(MEMBERS, 0) + costs.arrives
            begin = max(self._free["to_device"], after)
            self._free["to_device"] = begin + costs.arrives / self._rates.members
        return self._move("to_device", costs.nbytes, after)

    def _sum(self) -> None:
        """Sum the gradients over the members, chunk by chunk, after backward and the last copy; the script
        waits."""
        chunks = [self._chunks[c] for call in self._timeline.calls for c in call.gradients]
        for way, rate, summed in (
            (MEMBERS, self._rates.members, sum(costs.summed for costs in chunks)),
            (GROUPS, self._rates.groups, sum(costs.summed_over_groups for costs in chunks)),
        ):
            if summed and rate:
                self._nbytes[way] = self._nbytes.get(way, 0) + summed
                begin = max(self._free["compute"], self._free["to_host"])
                self._free["compute"] = begin + summed / rate

    def _gradients(self, accesses: list[_Access], there: list[float], first: int) -> None:
        for access, room in zip(accesses[first:], there[first:], strict=True):
            if self._rates.shared:  # the computing thread copies
                self._free["to_host"] = max(self._free["to_host"], self._free["compute"])
                end = self._move("to_host", access.nbytes, room)
                self._free["compute"] = end
            else:
                end = self._move("to_host", access.nbytes, max(room, self._free["compute"]))
            self._used[access.key] = end

    def _steps(self, accesses: list[list[_Access]], disk: list[list[_Load]] | None, first: int) -> None:
        """Run the optimizer's step chunk by chunk on the CPU, in parallel with the next forward."""
        rates, free = self._rates, self._free
        done = self._early(free["compute"])
        free["steps"] = max(free["steps"], free["compute"])
        for number, chunk in enumerate(self._timeline.stepped):
            if chunk in done:
                self._stepped[chunk] = free["steps"]
                continue
            these = accesses[first + number]
            there = self._from_disk(these, disk, first + number)
            ready = max((self._used.get(a.key, 0.0) for a in these), default=0.0)
            begin = max(free["steps"], ready, *there)
            end = begin + self._chunks[chunk].elements / rates.host_steps
            free["steps"] = self._stepped[chunk] = end
            for access in these:
                self._used[access.key] = end
        if rates.shared:  # one set of cores: the next forward waits for the step
            free["compute"] = max(free["compute"], free["steps"])

    def _early(self, ended: float) -> set[int]:
        """Step early chunks before backward has `ended`, in the order of their gradients; return them."""
        ready = sorted((self._used.get((c, "gradient"), 0.0), c) for c in self._timeline.early)
        done = set()
        for there, chunk in ready:
            begin = max(self._free["steps"], there)
            if begin < ended:
                taken = EARLY_COST * self._chunks[chunk].elements / self._rates.host_steps
                self._free["steps"] = begin + taken
                done.add(chunk)
        return done

    def _from_disk(
        self, accesses: list[_Access], disk: list[list[_Load]] | None, position: int
    ) -> list[float]:
        """Return when each payload, or the room for it, is in host memory."""
        if disk is None:
            return [0.0] * len(accesses)
        times = []
        for access, load in zip(accesses, disk[position], strict=True):
            room = 0.0
            for key, nbytes in load.victims:
                left = self._used.get(key, 0.0)
                if nbytes:
                    left = self._move("to_disk", nbytes, left)
                    self._used[key] = left
                room = max(room, left)
            # A read follows the payload's last write to disk; a payload in memory needs none.
            after = max(room, self._used.get(access.key, 0.0)) if load.read else room
            times.append(self._move("from_disk", load.read, after) if load.read else room)
        return times

    def _move(self, direction: str, nbytes: int, after: float) -> float:
        rate: float = getattr(self._rates, direction)
        end = max(self._free[direction], after) + self._rates.latency + nbytes / rate
        self._free[direction] = end
        self._moves[direction] += 1
        self._nbytes[direction] += nbytes
        return end
