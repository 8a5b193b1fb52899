"""The store: the payloads of all chunks, in host memory or on disk.

A payload is known by a chunk's id and a kind (memory/payloads.py). Without a disk tier all payloads lie in
the host's arena. With one, the arena is a cache of the file. `moves.Cache` decides which payload leaves for
which and what is read ahead. The threads of `DiskFile` make the moves, and a pin waits only for its own
payload. A payload that leaves is written only if it has changed since it was read. Only the arena holds
payloads, so the host's peak is at most its budget.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from atoll.core.errors import AtollError, DeadlineError, UserError
from atoll.core.units import format_bytes, format_seconds
from atoll.memory.arena import Arena, Block, exactly
from atoll.memory.disk import DISK_SECONDS, PAGE, DiskFile, Transfer
from atoll.memory.payloads import is_spare
from atoll.moves.cache import Cache, CachePlacement, Full, Policy

Key: TypeAlias = tuple[int, str]  # (chunk id, kind)


@dataclass(eq=False)
class _Payload:
    """The place of one payload: in the host if it has a block, on disk if it is stored.

    Attributes:
        is_set: True if it has content; otherwise it is zeros.
        block: its memory in the host.
        slots: its blocks on disk, which need not be in a row.
        is_stored: True if the blocks on disk have its present content.
        transfers: transfers under way, or failed, into its block, or out of it after it has left. A failed
            one stays, and raises at each use.
        pinned_by: the pinning threads, once for each pin.
    """

    key: Key
    numel: int
    dtype: torch.dtype
    is_set: bool = False
    block: Block | None = None
    slots: list[int] = field(default_factory=list)
    is_stored: bool = False
    transfers: list[Transfer] = field(default_factory=list)
    pinned_by: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_moving(self) -> bool:
        return not all(transfer.done for transfer in self.transfers)


@dataclass(frozen=True)
class StoreStatistics:
    """Moves between host and disk, in payloads and bytes, and the seconds that users waited for them.

    Attributes:
        uses: pins.
        misses: pins of payloads that had to be read; one that was read ahead is no miss.
    """

    uses: int = 0
    misses: int = 0
    from_disk: int = 0
    to_disk: int = 0
    bytes_from_disk: int = 0
    bytes_to_disk: int = 0
    seconds_waited: float = 0.0

    def __sub__(self, other: StoreStatistics) -> StoreStatistics:
        mine, theirs = vars(self), vars(other)
        return StoreStatistics(**{name: mine[name] - theirs[name] for name in mine})


class PayloadStore:
    """Payloads in `host`, and, with `disk`, on disk while they are not used soon.

    No one else may take memory from `host`. The store page-locks the arena if it can, and keeps it from
    forked processes (see Arena). With a disk, the arena's blocks must be whole pages (`alignment=PAGE`) and
    as large as the file's. Methods may be called from several threads at once.

    A pin raises UserError, with the least budget that would do, if what is pinned at once does not fit into
    the host or all payloads do not fit into both tiers; a transfer's error (see DiskFile), at each pin of the
    payload; and DeadlineError after `seconds`.
    """

    def __init__(
        self,
        host: Arena,
        disk: DiskFile | None = None,
        policy: Policy = "belady",
        seconds: float = DISK_SECONDS,
        named: Callable[[int], str] = "chunk {}".format,
    ) -> None:
        """Take `host` and `disk` into use.

        Args:
            policy: how the cache evicts.
            seconds: the longest wait for a transfer, or for room.
            named: returns what errors call a chunk.

        Raises ValueError for blocks of `host` that do not match those of `disk`.
        """
        if disk is not None and (host.block_bytes % PAGE or host.block_bytes != disk.block_bytes):
            raise ValueError(f"blocks of {host.block_bytes} bytes in the host and {disk.block_bytes} on disk")
        self.host, self.disk, self._seconds, self._named = host, disk, seconds, named
        self._payloads: dict[Key, _Payload] = {}
        self._counts: dict[Key, int] = {}  # blocks in the host
        self._cache = None if disk is None else Cache[Key](host.blocks, self._counts, policy=policy)
        self._leaving: list[tuple[Block, list[Transfer]]] = []  # given back, and still being written from
        self._lock = threading.RLock()
        self._unpinned = threading.Condition(self._lock)
        self._pins: Counter[int] = Counter()  # by thread
        self._broken: AtollError | None = None
        self._blocked: set[int] = set()  # threads that wait for others to unpin
        self.statistics = self._at_step = StoreStatistics()
        host.keep_from_children()
        locked, why = host.lock_pages()
        # Choices made here: (subject, choice, reason), as in core.events.Decided.
        self.choices = [("memory.host", "page-locked" if locked else "pageable", why)]
        if disk is not None:
            self.choices.append(("memory.disk", "direct" if disk.direct else "page cache", disk.reason))

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Add a payload of `numel` elements. It takes no memory before its first pin, which gives zeros."""
        with self._lock:
            if key in self._payloads:
                raise ValueError(f"payload {key} is added twice")
            payload = _Payload(key, numel, dtype)
            self._payloads[key], self._counts[key] = payload, self.host.blocks_for(payload.nbytes)

    def has(self, key: Key) -> bool:
        """True if a payload of this key was added."""
        return key in self._payloads

    @property
    def least_nbytes(self) -> int:
        """Bytes, in whole blocks, of all payloads together: what host and disk must hold."""
        with self._lock:
            return sum(self._counts.values()) * self.host.block_bytes

    def nbytes_without(self, kind: str) -> int:
        """Return the bytes of all payloads that are neither of this kind nor spare."""
        with self._lock:
            payloads = self._payloads.items()
            return sum(each.nbytes for key, each in payloads if key[1] != kind and not is_spare(key[1]))

    @contextmanager
    def pin(self, key: Key, *, writes: bool = False, overwrites: bool = False) -> Iterator[Tensor]:
        """Lend the payload in host memory, (numel,) in its dtype. It does not move until the end of the
        block.

        Pins nest, and those of several threads count.

        Args:
            writes: True if the caller changes it.
            overwrites: True if the caller sets all of it: nothing is read first, and the content is
                undefined.
        """
        memory = self.pin_now(key, writes=writes, overwrites=overwrites)
        try:
            yield memory
        finally:
            self.unpin(key)

    def pin_now(self, key: Key, *, writes: bool = False, overwrites: bool = False) -> Tensor:
        """Pin a payload until `unpin(key)`, from any thread, with the arguments of `pin`."""
        with self._lock:
            payload = self._payloads[key]
            self._make_resident(payload, writes=writes, overwrites=overwrites)
            assert payload.block is not None
            memory = payload.block.view(payload.numel, payload.dtype)
            payload.pinned_by.append(threading.get_ident())
            self._pins[threading.get_ident()] += 1
            transfers = list(payload.transfers)
            self._prefetch()
        try:
            self._wait(transfers)
        except BaseException:
            self.unpin(key)
            raise
        with self._lock:
            payload.transfers = [each for each in payload.transfers if each not in transfers]
        return memory

    def unpin(self, key: Key) -> None:
        """End one pin of a payload. Raises ValueError if it has none."""
        with self._lock:
            payload = self._payloads[key]
            if not payload.pinned_by:
                raise ValueError(f"payload {key} is not pinned")
            mine = threading.get_ident()
            thread = mine if mine in payload.pinned_by else payload.pinned_by[0]
            payload.pinned_by.remove(thread)
            self._pins[thread] -= 1
            self._blocked.clear()  # waiting threads may have room now; none is stuck until it has looked
            self._unpinned.notify_all()
            self._prefetch()

    def get(self, key: Key) -> Tensor:
        """Return a copy of a payload, (numel,)."""
        with self.pin(key) as memory:
            return memory.clone()

    def put(self, key: Key, source: Tensor) -> None:
        """Copy `source` into a payload; add the payload, in the dtype of `source`, if it is new.

        Args:
            source: of any shape, device and dtype, with as many elements as the payload.
        """
        with self._lock:
            if key not in self._payloads:
                self.add(key, source.numel(), source.dtype)
        with self.pin(key, overwrites=True) as memory, torch.no_grad():
            memory.copy_(source.reshape(-1))

    def swap(self, key: Key, other: Key) -> None:
        """Exchange the content of two payloads without a copy. A pin of either keeps the memory that it was
        given.

        Raises ValueError with a disk, or if sizes or dtypes differ.
        """
        with self._lock:
            these, those = self._payloads[key], self._payloads[other]
            if self.disk is not None or (these.numel, these.dtype) != (those.numel, those.dtype):
                raise ValueError(f"payloads {key} and {other} cannot be swapped")
            these.block, those.block = those.block, these.block
            these.is_set, those.is_set = those.is_set, these.is_set

    def drop(self, key: Key) -> None:
        """Discard a payload's content: its memory is free, and nothing is written. The payload stays known,
        as zeros.

        Without a disk it keeps its memory. All payloads have memory then, and in an arena that they just
        fill, one that came back would find no run of blocks that is long enough.
        """
        with self._lock:
            payload = self._payloads[key]
            if payload.pinned_by:
                raise ValueError(f"payload {key} is dropped while it is pinned")
            payload.is_set = payload.is_stored = False
            if self.disk is None:
                return
            if not payload.is_moving:  # else it leaves later, unwritten, when others need the room
                self._give_slots(payload)
                payload.transfers.clear()
                if payload.block is not None:
                    self.host.give(payload.block)
                    payload.block = None
            if self._cache is not None and payload.block is None:
                self._cache.forget(key)

    def step_ended(self) -> StoreStatistics:
        """End a step: its order of uses is expected of the next. Return the step's statistics."""
        with self._lock:
            if self._cache is not None:
                self._cache.handle_step_ended()
                self._prefetch()
            step = self.statistics - self._at_step
            self._at_step = self.statistics
            return step

    def close(self) -> None:
        """End the disk tier. The arena stays for whoever has views of it."""
        if self.disk is not None:
            self.disk.close(self._seconds)

    def discard(self) -> None:
        """End both tiers: the payloads are gone."""
        self.close()
        with self._lock:
            self._payloads.clear()
            self._leaving.clear()
            self.host.release()

    def _make_resident(self, payload: _Payload, *, writes: bool, overwrites: bool) -> None:
        """Bring a payload into the host, or start it on its way (`payload.transfers`). The caller holds the
        lock."""
        if self._broken is not None:
            raise self._broken
        self._count(uses=1)
        fresh = overwrites or not payload.is_set
        if self._cache is None:
            if payload.block is None:
                payload.block = self._take(payload)
        else:
            decision = self._decide(self._cache, payload, writes=writes or fresh, fresh=fresh)
            if not decision.hit:
                self._bring(payload, decision)
                self._count(misses=decision.bring)
        if not payload.is_set and not overwrites:
            self._fill_with_zeros(payload)
        if writes or fresh:
            payload.is_set, payload.is_stored = True, False

    def _fill_with_zeros(self, payload: _Payload) -> None:
        assert payload.block is not None
        if self.disk is None or not payload.is_moving:
            payload.block.memory.zero_()
        else:
            name, job = f"zeros for {self._words(payload)}", payload.block.memory.zero_
            payload.transfers = [self.disk.begin(name, job, behind=payload.transfers)]

    def _take(self, payload: _Payload) -> Block:
        """Take a block for a payload, without a disk. Raises UserError with the budget that would do."""
        try:
            return self.host.take(self._counts[payload.key])
        except UserError:
            if self.least_nbytes <= self.host.nbytes:
                raise  # there is room, but in pieces
            raise UserError(
                f"memory.host of {format_bytes(self.host.nbytes)} does not hold {self._words(payload)} "
                f"beside the rest: raise it to at least {exactly(self.least_nbytes)}, or give memory.disk"
            ) from None

    def _decide(
        self, cache: Cache[Key], payload: _Payload, *, writes: bool, fresh: bool
    ) -> CachePlacement[Key]:
        """Return what must leave the host for a use. If other threads have too much pinned, wait until one
        lets go.

        Raises UserError if no thread can let go, and DeadlineError if none does in time.
        """
        until = time.monotonic() + self._seconds
        mine = threading.get_ident()
        while True:
            try:
                return cache.handle_use(payload.key, writes=writes, fresh=fresh, held=self._is_held)
            except Full as full:
                others = {thread for thread, pins in self._pins.items() if pins} - self._blocked - {mine}
                if not others:  # no other thread can let go
                    least = full.least_blocks * self.host.block_bytes
                    raise UserError(
                        f"memory.host of {format_bytes(self.host.nbytes)} does not hold "
                        f"{self._words(payload)} beside what is in use with it: raise it to at least "
                        f"{exactly(least)}"
                    ) from None
            self._blocked.add(mine)
            try:
                if not self._unpinned.wait(until - time.monotonic()):
                    raise DeadlineError(
                        f"memory.host of {format_bytes(self.host.nbytes)} had no room for "
                        f"{self._words(payload)} in {format_seconds(self._seconds)}: other threads use all "
                        "of it; raise it"
                    )
            finally:
                self._blocked.discard(mine)

    def _is_held(self, key: Key) -> bool:
        return bool(self._payloads[key].pinned_by)

    def _bring(self, payload: _Payload, decision: CachePlacement[Key]) -> None:
        """Evict what must leave, and begin to fill the place that it leaves."""
        assert self.disk is not None
        try:
            for eviction in decision.evict:
                self._evict(self._payloads[eviction.chunk])
        except AtollError as error:
            self._broken = error  # the cache counts the eviction as done: no pin can be served any more
            raise
        payload.block = self.host.take(self._counts[payload.key], at=decision.place)
        left = self._transfers_in(payload.block)
        if decision.bring and payload.is_set:
            payload.transfers = [
                self.disk.read(slot, part, after=payload.transfers, behind=left)
                for slot, part in zip(payload.slots, self._parts(payload), strict=True)
            ]
            self._count(from_disk=1, bytes_from_disk=payload.nbytes)
        elif left:
            room = self.disk.begin(f"room for {self._words(payload)}", _nothing, behind=left)
            payload.transfers = [*payload.transfers, room]

    def _transfers_in(self, place: Block) -> list[Transfer]:
        """Return the transfers that must end before `place` may be filled.

        The place may overlap one that was left long ago, and is still being written from.
        """
        self._leaving = [
            (block, moving)
            for block, transfers in self._leaving
            if (moving := [transfer for transfer in transfers if not transfer.done])
        ]
        end = place.first + place.count
        return [
            transfer
            for block, transfers in self._leaving
            if block.first < end and place.first < block.first + block.count
            for transfer in transfers
        ]

    def _evict(self, payload: _Payload) -> None:
        """Let a payload leave the host. Its place may be filled once `_transfers_in` of it have ended."""
        assert self.disk is not None
        assert payload.block is not None
        if payload.is_set and not payload.is_stored:
            self._take_slots(payload)
            payload.transfers = [
                self.disk.write(slot, part, after=payload.transfers)
                for slot, part in zip(payload.slots, self._parts(payload), strict=True)
            ]
            payload.is_stored = True
            self._count(to_disk=1, bytes_to_disk=payload.nbytes)
        if self.host.poison:  # poisoning overwrites the place at once
            for transfer in payload.transfers:
                transfer.wait_over(self._seconds)
        self.host.give(payload.block)
        self._leaving.append((payload.block, payload.transfers))
        payload.block = None

    def _parts(self, payload: _Payload) -> Sequence[Tensor]:
        """Return the pieces of a payload's memory that go to its blocks on disk, in whole pages."""
        assert payload.block is not None
        nbytes = -(-payload.nbytes // PAGE) * PAGE
        return torch.split(payload.block.memory[: max(nbytes, PAGE)], self.host.block_bytes)

    def _take_slots(self, payload: _Payload) -> None:
        """Give a payload blocks on disk: free ones, or those of payloads in the host, which can be written
        again.

        Blocks that are being read from are taken last, after a wait. Raises UserError if the disk has no
        room.
        """
        assert self.disk is not None
        count = self._counts[payload.key]
        if payload.slots:
            return
        in_host = [other for other in self._payloads.values() if other.block is not None and other.slots]
        for other in sorted(in_host, key=lambda other: other.is_moving):
            if self.disk.free_blocks >= count:
                break
            for transfer in other.transfers:
                transfer.wait_over(self._seconds)
            self._give_slots(other)
        if self.disk.free_blocks < count:
            raise UserError(
                f"memory.disk of {format_bytes(self.disk.nbytes)} in {self.disk.folder} has no room for "
                f"{self._words(payload)}: raise it to at least {exactly(self.least_nbytes)}, which holds all"
            )
        payload.slots = [self.disk.take() for _ in range(count)]

    def _give_slots(self, payload: _Payload) -> None:
        if self.disk is not None:
            for slot in payload.slots:
                self.disk.give(slot)
        payload.slots, payload.is_stored = [], False

    def _prefetch(self) -> None:
        while self._cache is not None and self._broken is None:
            decision = self._cache.poll_prefetch(self._is_held)
            if decision is None:
                return
            self._bring(self._payloads[decision.chunk], decision)

    def _words(self, payload: _Payload) -> str:
        chunk, kind = payload.key
        return f"the {kind} of {self._named(chunk)} ({format_bytes(payload.nbytes)})"

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        began = time.perf_counter()
        at_once = all(transfer.done for transfer in transfers)
        for transfer in transfers:
            transfer.wait(self._seconds)
        if not at_once:
            with self._lock:
                self._count(seconds_waited=time.perf_counter() - began)

    def _count(self, **more: float) -> None:
        now = vars(self.statistics)
        self.statistics = replace(self.statistics, **{name: now[name] + more[name] for name in more})


def _nothing() -> None:
    """Do nothing: the job of a transfer that only waits for room."""
