"""A model's payloads over the members of a group: a member's own parts lie in its store, and the others' are
fetched.

Each act that changes payloads of several members at once is a **sync point**: the sum of gradients, clipping,
a step, a load, `sync`. Members count sync points alike. A fetch names the count at which its member stands; a
holder that has not reached that count answers when it has. So between two sync points members may use chunks
in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from atoll.chunks import Chunk
from atoll.core.errors import DeadlineError
from atoll.memory import copies
from atoll.memory.gradients import TrainedChunk
from atoll.memory.grouping import ChunkGroups
from atoll.memory.members import Members
from atoll.memory.moved import Moved
from atoll.memory.payloads import GRADIENT, VALUES, Key
from atoll.memory.stages import Stages
from atoll.memory.store import PayloadStore
from atoll.memory.sums import Over, Sum, Summing
from atoll.memory.syncpoints import SyncPoints
from atoll.moves.owners import Holding, Part, Share
from atoll.moves.search import STAGES

FETCHING = 16  # threads that fetch, besides those that use a chunk
_DEADLINE = 600.0  # seconds, for all holders of a chunk


class Sharing:
    """One member's view of the group: the `Payloads` of whole chunks.

    The store holds this member's own parts, and all gradients until they are summed. Of a chunk of which
    others hold a part, only values can be pinned. They arrive in staging memory. Of values written there only
    this member's part is kept, since the other members' scripts write the same.

    Args:
        chunks: all chunks, in the order of their ids.
        names: each chunk's parameters, for people.
        holding: which member holds which elements.
        store: this member's payloads.
        staging_bytes: host memory in which others' parts arrive.
        moved: counts the bytes that are fetched.
        grouping: the groups that share chunks; None if all members share all.

    Attributes:
        own: the `Payloads` of the parts that this member holds.
        keeps_stepped: True once a script has read a gradient after its step.
    """

    def __init__(
        self,
        members: Members,
        chunks: Sequence[Chunk],
        names: Sequence[str],
        holding: Holding,
        store: PayloadStore,
        staging_bytes: int,
        moved: Moved,
        grouping: ChunkGroups | None = None,
    ) -> None:
        self._moved = moved
        self.members, self.store, self.rank = members, store, members.rank
        self.holding, self._names = holding, list(names)
        everybody = Share(members.rank, members.count)
        self.grouping = ChunkGroups(everybody, [""] * len(chunks)) if grouping is None else grouping
        self._extents = [chunk.extent for chunk in chunks]
        self._parts = [holding.part(chunk.id, self.rank) for chunk in chunks]
        self._others = [
            [part for part in holding.parts[chunk.id] if part.member != self.rank] for chunk in chunks
        ]
        self.own = OwnParts(self)
        self._sizes: dict[Key, tuple[int, torch.dtype]] = {}  # of payloads of which others hold a part
        self.points = SyncPoints(members, len(chunks))
        self._writes = [0] * len(chunks)  # how often this member's part of the values was written
        # Chunks that the script has written to since the last sync point for writes.
        self._written: set[int] = set()
        # This member's part of their values before that, which other members still read; how many of these
        # read each chunk now; and the guard of both.
        self._originals: dict[int, Tensor] = {}
        self._readers = [0] * len(chunks)
        self._reading = threading.Condition()
        self.keeps_originals = True
        self.keeps_stepped = False
        self.stages = Stages(staging_bytes)
        most = max(map(len, self._others))
        self._fetching: ThreadPoolExecutor | None = None
        if most > 1:
            self._fetching = ThreadPoolExecutor(min(STAGES * (most - 1), FETCHING), "atoll-fetching")
        self.cache = FetchCache(self, self._others)

    @property
    def count(self) -> int:
        """The number of sync points that are past."""
        return self.points.count

    def part(self, chunk: int) -> tuple[int, int]:
        """Return the (begin, end) of this member's elements of a chunk; (0, 0) for none."""
        return self._parts[chunk]

    def others(self, chunk: int) -> Sequence[Part]:
        """Return the parts of a chunk that other members hold."""
        return self._others[chunk]

    def holds_all(self, chunk: int) -> bool:
        """True if no other member holds any part of a chunk."""
        return not self._others[chunk]

    def holds_any(self, chunk: int) -> bool:
        """True if this member holds a part of a chunk; one member holds a chunk without elements."""
        return any(part.member == self.rank for part in self.holding.parts[chunk])

    def may_be_asked(self, chunk: int) -> bool:
        """True if others may ask this member for a chunk; without elements, for the chunk's state."""
        known = 0 <= chunk < len(self._parts)
        return known and (not self._extents[chunk] or self.holds_any(chunk))

    def words(self, chunk: int) -> str:
        """Return a chunk's parameters, for people: `'h.3.mlp.weight'`."""
        return self._names[chunk]

    def held_by_others(self, chunk: int) -> str:
        """Return the other workers that hold a part of a chunk: `worker 1`, or `workers 0 and 2`."""
        members = [str(part.member) for part in self._others[chunk]]
        if len(members) == 1:
            return f"worker {members[0]}"
        return f"workers {', '.join(members[:-1])} and {members[-1]}"

    # Payloads

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        if self._is_here(key):
            self.store.add(key, numel, dtype)
            return
        self._sizes[key] = numel, dtype
        if self.holds_any(key[0]):
            self.own.add(key, numel, dtype)

    def pin(
        self, key: Key, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        if self._is_here(key):
            return self.store.pin(key, writes=writes, overwrites=overwrites)
        if writes or overwrites:
            return self._staged_to_write(key, overwrites=overwrites)
        return self._staged(key)

    def drop(self, key: Key) -> None:
        if self._is_here(key):
            self.store.drop(key)

    def _is_here(self, key: Key) -> bool:
        return key[1] == GRADIENT or self.holds_all(key[0])

    def fill(self, chunk: int, memory: Tensor) -> bool:
        """Gather a chunk's values into `memory`, (extent,), on a device whose memory is the host's.

        False, with nothing done, if the device has memory of its own, or no other member holds any of the
        chunk.
        """
        if self.holds_all(chunk) or not copies.is_needless(memory.device):
            return False
        self._gather((chunk, VALUES), memory)
        return True

    @contextmanager
    def _staged(self, key: Key) -> Iterator[Tensor]:
        """Lend the values of a chunk of which others hold a part, in staging memory."""
        chunk, kind = key
        assert kind == VALUES
        numel, dtype = self._sizes[key]
        wanted = chunk, self.count, self._writes[chunk]
        with self.stages.one(self.words(chunk), wanted) as stage:
            memory = stage.block.view(numel, dtype)
            if stage.holds != wanted:
                stage.holds = None
                self._gather(key, memory)
                stage.holds = wanted
            yield memory

    @contextmanager
    def _staged_to_write(self, key: Key, *, overwrites: bool) -> Iterator[Tensor]:
        """Lend staging memory to write such a chunk's values to; then keep this member's part of them."""
        chunk, _ = key
        numel, dtype = self._sizes[key]
        with self.stages.one(self.words(chunk)) as stage:
            stage.holds = None
            memory = stage.block.view(numel, dtype)
            if not overwrites:
                self._copy_own(key, memory)
            yield memory
            self._keep_own(key, memory)

    def _copy_own(self, key: Key, into: Tensor) -> None:
        begin, end = self._parts[key[0]]
        if end > begin:
            with torch.inference_mode(False), torch.no_grad(), self.store.pin(key) as own:
                into[begin:end].copy_(own)

    def _keep_own(self, key: Key, memory: Tensor) -> None:
        begin, end = self._parts[key[0]]
        if end > begin:
            self._writes[key[0]] += 1  # first: other stages are out of date from here on
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                self.store.pin(key, overwrites=True) as own,
            ):
                own.copy_(memory[begin:end])

    # What others hold

    def _gather(self, key: Key, memory: Tensor) -> None:
        """Fetch all parts of a chunk's values, side by side, and copy this member's own."""
        parts = [part for part in self._others[key[0]] if part.numel]
        self.fetch_parts(key, memory, parts, beside=lambda: self._copy_own(key, memory))

    def fetch_parts(
        self, key: Key, memory: Tensor, parts: Sequence[Part], beside: Callable[[], None] = lambda: None
    ) -> None:
        """Fetch these parts into their places in `memory`, and run `beside` meanwhile. This thread fetches
        one of them.

        Raises DeadlineError, naming the holders, if one does not answer.
        """
        under_way = []
        if self._fetching is not None:
            fetching = self._fetching
            under_way = [fetching.submit(self._fetch_part, key, memory, part) for part in parts[1:]]
        try:
            beside()
            if parts:
                self._fetch_part(key, memory, parts[0])
        finally:  # wait until no fetch writes into the memory
            if wait(under_way, timeout=_DEADLINE).not_done:
                raise DeadlineError(
                    f"waited {_DEADLINE:.0f} s for the values of {self.words(key[0])} from "
                    f"{self.held_by_others(key[0])}: one of them stands still"
                )
        for each in under_way:
            each.result(timeout=0)

    def _fetch_part(self, key: Key, memory: Tensor, part: Part) -> None:
        with torch.inference_mode(False):  # a mode of the thread
            self.fetch(part.member, key, memory[part.begin : part.end])

    def fetch(self, holder: int, key: Key, into: Tensor) -> None:
        """Fill `into` with the first bytes of a member's part of a payload."""
        chunk, kind = key
        kind = "optimizer state" if kind.startswith("described") else kind
        self.members.fetch(
            holder, key, self.count, into, f"{kind} of {self.words(chunk)} at step {self.points.steps}"
        )
        self._moved.fetched(into.nbytes)

    def description(self, chunk: int, holder: int) -> bytes:
        """Return the holder's description of its states (`foreign.described`); empty if it keeps none."""
        size = torch.empty(1, dtype=torch.int64)
        self.fetch(holder, (chunk, "described.size"), size)
        if not int(size):
            return b""
        word = torch.empty(int(size), dtype=torch.uint8)
        self.fetch(holder, (chunk, "described"), word)
        return word.numpy().tobytes()

    def sum(self, chunk: int, flat: Tensor, what: str) -> Summing:
        """Begin to sum `flat`, the chunk's (extent,), over the members. At its end this member's part of
        `flat` is the sum (memory/sums.py); the rest is undefined."""
        if not flat.numel() or (not self._others[chunk] and self.members.count == 1):
            return Over()
        stage = self.stages.take(self.words(chunk))
        stage.holds = None
        ended = partial(self.stages.give, stage)
        return Sum(self.members, self.holding, chunk, flat, what, stage.block, ended)

    # Sync points

    def written(self, chunk: int) -> None:
        """Note that the script writes to a chunk's values, before they are written here. Writes to others'
        parts are dropped.

        Until the next sync point for writes the others read this member's part as it is now: their scripts
        may be at an earlier line. Raises DeadlineError if one that reads the part now does not end.
        """
        if self.members.count == 1:
            return
        self._written.add(chunk)
        if not self.keeps_originals or chunk in self._originals or not self.holds_any(chunk):
            return
        with self._reading:
            if not self._reading.wait_for(lambda: not self._readers[chunk], _DEADLINE):
                raise DeadlineError(
                    f"waited {_DEADLINE:.0f} s for another worker to read {self.words(chunk)}, before this "
                    "worker's script may write to it"
                )
            with self.store.pin((chunk, VALUES)) as own:
                self._originals[chunk] = own.clone()

    @contextmanager
    def original(self, chunk: int) -> Iterator[Tensor | None]:
        """Lend this member's part of a chunk's values as the others read it; None if it lies in its payload,
        to which nobody writes within the block."""
        with self._reading:
            original = self._originals.get(chunk)
            self._readers[chunk] += original is None
        try:
            yield original
        finally:
            with self._reading:
                self._readers[chunk] -= original is None
                self._reading.notify_all()

    @property
    def is_written(self) -> bool:
        """True if the script has written to values and the members have not met since: the next use could
        find the old values of others' parts."""
        return bool(self._written)

    def passed(self, changed: Sequence[int] = (), *, stepped: bool = False, published: bool = False) -> None:
        """Pass a sync point.

        Args:
            changed: chunks whose values were stepped at it.
            stepped: True if it was a step.
            published: True if members show what their scripts have written (`sync`).
        """
        if stepped or published:
            self._written.clear()
            with self._reading:
                self._originals.clear()
        self.cache.forget()
        self.points.passed(changed, stepped=stepped)

    def close(self) -> None:
        """Stop answering the other members."""
        self.points.close()
        if self._fetching is not None:
            self._fetching.shutdown(wait=False, cancel_futures=True)
        self.members.close()


class FetchCache:
    """The latest payload that was fetched of a group's chunks.

    Args:
        sharing: fetches.
        parts: for each chunk, the parts to fetch, of this member's group or of another one.
    """

    def __init__(self, sharing: Sharing, parts: Sequence[Sequence[Part]]) -> None:
        self._sharing, self.parts = sharing, parts
        self.forget()

    def forget(self) -> None:
        """Drop what was fetched."""
        self._of: tuple[Key, int] | None = None  # the payload, and the count of sync points it was fetched at
        self._memory = torch.empty(0)
        self._there: set[int] = set()  # members whose part was fetched

    def fetched(self, each: TrainedChunk, slot: int, kind: str, dtype: torch.dtype) -> Tensor:
        """Return a chunk's payload, (extent,), with the members' parts of a slot; other elements are
        undefined.

        The latest payload is kept, for callers that go through a chunk's slots.
        """
        key, place = (each.chunk.id, kind), each.chunk.slots[slot]
        now = key, self._sharing.count
        if self._of != now:
            self.forget()
            with torch.inference_mode(False):
                self._memory = torch.empty(each.extent, dtype=dtype)
        wanted = []
        for part in self.parts[key[0]]:
            first, last = part.overlap(place.offset, place.offset + place.numel)
            if first < last and part.member not in self._there:
                wanted.append(part)
        self._of = None  # until all parts have come
        self._sharing.fetch_parts(key, self._memory, wanted)
        self._there.update(part.member for part in wanted)
        self._of = now
        return self._memory


class OwnParts:
    """The `Payloads` of this member's part of each chunk: (end - begin,)."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Add a payload for this member's part. `numel` is the whole chunk's."""
        sharing, (begin, end) = self._sharing, self._sharing.part(key[0])
        sharing.store.add(key, numel if sharing.holds_all(key[0]) else end - begin, dtype)

    def pin(
        self, key: Key, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        return self._sharing.store.pin(key, writes=writes, overwrites=overwrites)

    def drop(self, key: Key) -> None:
        self._sharing.store.drop(key)
