"""The store: where the payloads of all chunks lie, in host memory or on disk.

A payload is what is known by a chunk's id and a kind: its values, its gradient, a key of its optimizer's
state. Without a disk tier all of them lie in the host's arena. With one, the arena is a cache of the file:
`moves.Cache` says who leaves for whom and what may be read ahead, the threads of `DiskFile` make the moves,
and who pins a payload waits for its own alone. What leaves is written only if it has changed since it was
read. Nothing but the arena ever holds a payload, so the host's peak is at most its budget.
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
from atoll.moves.cache import Cache, Decision, Full, Policy

Key: TypeAlias = tuple[int, str]  # (chunk id, kind)


@dataclass(eq=False)
class _Payload:
    """The place of one payload: in the host while it has a block, and on disk while its slots are up to
    date."""

    key: Key
    numel: int
    dtype: torch.dtype
    is_set: bool = False  # it holds something; else it is zeros
    block: Block | None = None
    slots: list[int] = field(default_factory=list)  # its blocks on disk, which need not be in a row
    is_stored: bool = False  # they hold what it holds
    # Under way, or failed: into its block; or, when it has left, out of it. Who failed stays, for each user.
    transfers: list[Transfer] = field(default_factory=list)
    pinned_by: list[int] = field(default_factory=list)  # threads, once for each pin

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_moving(self) -> bool:
        return not all(transfer.done for transfer in self.transfers)


@dataclass(frozen=True)
class StoreStatistics:
    """Moves between host and disk, in payloads and bytes, and the time that users waited for them."""

    uses: int = 0  # pins
    misses: int = 0  # of them, what was not in the host and had to be read; prefetched is not missed
    from_disk: int = 0
    to_disk: int = 0
    bytes_from_disk: int = 0
    bytes_to_disk: int = 0
    seconds_waited: float = 0.0

    def __sub__(self, other: StoreStatistics) -> StoreStatistics:
        mine, theirs = vars(self), vars(other)
        return StoreStatistics(**{name: mine[name] - theirs[name] for name in mine})


class Store:
    """Payloads in `host`, whose memory it alone gives out; with `disk`, what is not used soon lies there.

    It page-locks the arena where that can be done, and keeps it from forked processes (see Arena). Methods
    may be called from several threads at once. With a disk, the arena's blocks must be whole pages
    (`alignment=PAGE`) of the size of the file's. Raises UserError, with the least budget that would do, where
    what is pinned at once does not fit into the host, and where all payloads do not fit into both; a
    transfer's error (see DiskFile) at each pin of what it concerns; DeadlineError after `seconds`.
    """

    def __init__(
        self,
        host: Arena,
        disk: DiskFile | None = None,
        policy: Policy = "belady",
        seconds: float = DISK_SECONDS,
        named: Callable[[int], str] = "chunk {}".format,
    ) -> None:
        """`named(chunk)` is what errors call a chunk."""
        if disk is not None and (host.block_bytes % PAGE or host.block_bytes != disk.block_bytes):
            raise ValueError(f"blocks of {host.block_bytes} bytes in the host and {disk.block_bytes} on disk")
        self.host, self.disk, self._seconds, self._named = host, disk, seconds, named
        self._payloads: dict[Key, _Payload] = {}
        self._counts: dict[Key, int] = {}  # blocks in the host
        self._cache = None if disk is None else Cache[Key](host.blocks, self._counts, policy=policy)
        self._leaving: list[tuple[Block, list[Transfer]]] = []  # given back, while its old content moves
        self._lock = threading.RLock()
        self._unpinned = threading.Condition(self._lock)
        self._pins: Counter[int] = Counter()  # by thread
        self._broken: AtollError | None = None
        self._blocked: set[int] = set()  # threads that wait for others to unpin
        self.statistics = self._at_step = StoreStatistics()
        host.keep_from_children()
        locked, why = host.lock_pages()
        # What was chosen here, and why: (what, choice, reason), as core.events.Decided has them.
        self.choices = [("memory.host", "page-locked" if locked else "pageable", why)]
        if disk is not None:
            self.choices.append(("memory.disk", "direct" if disk.direct else "page cache", disk.reason))

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """A new payload of `numel` elements. It takes no memory before its first pin, which gives zeros."""
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
        """Bytes in whole blocks that all payloads take together: what host and disk must hold."""
        with self._lock:
            return sum(self._counts.values()) * self.host.block_bytes

    def nbytes_without(self, kind: str) -> int:
        """Bytes of all payloads that are not of this kind, nor spare."""
        with self._lock:
            payloads = self._payloads.items()
            return sum(each.nbytes for key, each in payloads if key[1] != kind and not is_spare(key[1]))

    @contextmanager
    def pin(self, key: Key, *, writes: bool = False, overwrites: bool = False) -> Iterator[Tensor]:
        """The payload in host memory, (numel,) in its dtype, which lies still until the end of the block.

        `writes`: the caller changes it. `overwrites`: it sets all of it, so nothing is read before, and what
        is there is anything. Pins nest, and those of several threads count.
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
        """End one pin of it."""
        with self._lock:
            payload = self._payloads[key]
            if not payload.pinned_by:
                raise ValueError(f"payload {key} is not pinned")
            mine = threading.get_ident()
            thread = mine if mine in payload.pinned_by else payload.pinned_by[0]
            payload.pinned_by.remove(thread)
            self._pins[thread] -= 1
            self._blocked.clear()  # they may have room now: until they have looked, they are not stuck
            self._unpinned.notify_all()
            self._prefetch()

    def get(self, key: Key) -> Tensor:
        """A copy of it, (numel,)."""
        with self.pin(key) as memory:
            return memory.clone()

    def put(self, key: Key, source: Tensor) -> None:
        """Copy `source` in: of any shape, device and dtype, with as many elements. Adds the payload, in the
        dtype of `source`, where it is new."""
        with self._lock:
            if key not in self._payloads:
                self.add(key, source.numel(), source.dtype)
        with self.pin(key, overwrites=True) as memory, torch.no_grad():
            memory.copy_(source.reshape(-1))

    def swap(self, key: Key, other: Key) -> None:
        """Exchange what two payloads of one size hold, without a copy; not with a disk. Who has one pinned
        keeps the memory that it was in."""
        with self._lock:
            these, those = self._payloads[key], self._payloads[other]
            if self.disk is not None or (these.numel, these.dtype) != (those.numel, those.dtype):
                raise ValueError(f"payloads {key} and {other} cannot be swapped")
            these.block, those.block = those.block, these.block
            these.is_set, those.is_set = those.is_set, these.is_set

    def drop(self, key: Key) -> None:
        """What it holds is of no use any more: its memory is free, nothing is written. It stays known, as
        zeros. Without a disk it keeps its place: all payloads have one, and in an arena that they just fill
        one that comes back would find no run of blocks as long as it needs."""
        with self._lock:
            payload = self._payloads[key]
            if payload.pinned_by:
                raise ValueError(f"payload {key} is dropped while it is pinned")
            payload.is_set = payload.is_stored = False
            if self.disk is None:
                return
            if not payload.is_moving:  # else it leaves, with no write, when others need the room
                self._give_slots(payload)
                payload.transfers.clear()
                if payload.block is not None:
                    self.host.give(payload.block)
                    payload.block = None
            if self._cache is not None and payload.block is None:
                self._cache.forget(key)

    def prefetch(self) -> None:
        """Begin to read what is used next, as far as that makes no more moves. Each pin and unpin does it."""
        with self._lock:
            self._prefetch()

    def step_ended(self) -> StoreStatistics:
        """A step is over: its order of uses is what is expected from now on. Says what the step came to."""
        with self._lock:
            if self._cache is not None:
                self._cache.handle_step_ended()
                self._prefetch()
            step = self.statistics - self._at_step
            self._at_step = self.statistics
            return step

    def close(self) -> None:
        """End the disk tier. The host's arena stays with whoever has views of it."""
        if self.disk is not None:
            self.disk.close(self._seconds)

    def _make_resident(self, payload: _Payload, *, writes: bool, overwrites: bool) -> None:
        """Have `payload` in the host, or on its way there (`payload.transfers`). Holds the lock."""
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
        """Without a disk."""
        try:
            return self.host.take(self._counts[payload.key])
        except UserError:
            if self.least_nbytes <= self.host.nbytes:
                raise  # in pieces
            raise UserError(
                f"memory.host of {format_bytes(self.host.nbytes)} does not hold {self._words(payload)} "
                f"beside the rest: raise it to at least {exactly(self.least_nbytes)}, or give memory.disk"
            ) from None

    def _decide(self, cache: Cache[Key], payload: _Payload, *, writes: bool, fresh: bool) -> Decision[Key]:
        """What must leave for a use. Where that is pinned by other threads, waits for one that lets go."""
        until = time.monotonic() + self._seconds
        mine = threading.get_ident()
        while True:
            try:
                return cache.handle_use(payload.key, writes=writes, fresh=fresh, held=self._is_held)
            except Full as full:
                others = {thread for thread, pins in self._pins.items() if pins} - self._blocked - {mine}
                if not others:  # nobody will let go
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

    def _bring(self, payload: _Payload, decision: Decision[Key]) -> None:
        """Let those leave that must, and begin to fill the place that they leave."""
        assert self.disk is not None
        try:
            for eviction in decision.evict:
                self._evict(self._payloads[eviction.chunk])
        except AtollError as error:
            self._broken = error  # the cache takes for done what is not: nobody is served any more
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
        """What must be over before `place` may be filled: it may be a part of what one left for another, long
        ago, and is still being written from there."""
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
        """`payload` leaves the host; its place may be filled when `_transfers_in` it are over."""
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
        if self.host.poison:  # which overwrites the place at once
            for transfer in payload.transfers:
                transfer.wait_over(self._seconds)
        self.host.give(payload.block)
        self._leaving.append((payload.block, payload.transfers))
        payload.block = None

    def _parts(self, payload: _Payload) -> Sequence[Tensor]:
        """What of its memory goes to each of its blocks on disk, in whole pages."""
        assert payload.block is not None
        nbytes = -(-payload.nbytes // PAGE) * PAGE
        return torch.split(payload.block.memory[: max(nbytes, PAGE)], self.host.block_bytes)

    def _take_slots(self, payload: _Payload) -> None:
        """Let it have blocks on disk: free ones, or those of payloads that lie in the host and can be written
        once more; of such that are on their way there, if need be."""
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
    """Do nothing, where only the room is wanted."""
