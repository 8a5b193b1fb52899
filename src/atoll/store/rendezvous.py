"""The rendezvous of a ring's workers: its members, and the keys by which they find one another.

The keys are those of c10d's Store (torch.distributed.Store), operation by operation. Each ring has its own
keys, so that a ring which is formed again meets no key of an earlier one. They are dropped when the last
member has left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.core.errors import UserError
from atoll.wire.messages import Gather, Gathered, StoreAnswer, StoreCall

Peer: TypeAlias = Hashable  # identifies an asker to the caller
Answer: TypeAlias = tuple[Peer, "Gathered | StoreAnswer"]

KEYS = 2**18  # most keys, of all rings together
TOTAL_BYTES = 2**28  # most bytes of all keys and values together
VALUE_BYTES = 2**20  # most bytes of one value, however it grew
WAITERS = 2**14  # most calls that wait at a time
MISSING = 16  # most absent ranks that an answer names
_LARGEST = 2**63  # an int64 is below it
_REMEMBERED = 64  # answers kept for each worker, in case a call is repeated

# The number of keys and values that each operation takes; None: any number of keys.
_SHAPES: dict[str, tuple[int | None, int]] = {
    "set": (1, 1),
    "get": (1, 0),
    "wait": (None, 0),
    "check": (None, 0),
    "add": (1, 0),
    "append": (1, 1),
    "compare_set": (1, 2),  # values: expected, desired
    "delete": (1, 0),
    "num_keys": (0, 0),
}


@dataclass
class RingState:
    """A ring as plain data.

    Attributes:
        members: incarnation -> the number of its request; -1 if it was in the ring before.
        broken: True if a member is gone: nobody waits for keys any more.
    """

    members: dict[int, int]
    broken: bool = False
    keys: dict[str, bytes] = field(default_factory=dict)


@dataclass
class RendezvousState:
    """The state of `Rendezvous`, as plain data: all that a restart must not lose.

    Calls that wait for keys are asked again, and are no part of it.

    Attributes:
        formed: the number of the latest ring.
        comers: the requests of workers that wait for the others, with their deadlines, by rank.
        rings: the rings, by number.
        ring_of: incarnation -> the number of its latest ring.
        counted: incarnation -> call -> its result, of the latest calls.
    """

    formed: int = 0
    comers: dict[int, tuple[Gather, float]] = field(default_factory=dict)
    rings: dict[int, RingState] = field(default_factory=dict)
    ring_of: dict[int, int] = field(default_factory=dict)
    counted: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass
class _Calls:
    """The calls of a ring's members that wait for keys."""

    there: int = 0  # members of the ring that have not left
    by_key: dict[str, dict[_Waiter, None]] = field(default_factory=dict)  # by missing key
    by_member: dict[int, dict[_Waiter, None]] = field(default_factory=dict)  # by incarnation


@dataclass(eq=False)
class _Waiter:
    peer: Peer
    call: StoreCall
    missing: set[str]
    done: bool = False


class Rendezvous:
    """The rings of a run, each of which has all of its `workers`. Times are in the caller's seconds.

    Methods return answers, each with the peer that it is for: a `set` may also answer other members' waits.

    Attributes:
        state: the rings' state, for `restore`. It is not a copy: encode it at once.
        bytes_held: bytes of all keys and values.
        keys_held: keys of all rings.
        waiting: calls that wait for keys.
    """

    def __init__(
        self, workers: int, *, keys: int = KEYS, total_bytes: int = TOTAL_BYTES, waiters: int = WAITERS
    ) -> None:
        self.state = RendezvousState()
        self.bytes_held = 0
        self.keys_held = 0
        self.waiting = 0
        self._workers = workers
        self._most_keys, self._most_bytes, self._most_waiters = keys, total_bytes, waiters
        self._peers: dict[int, Peer] = {}  # of the comers, by rank
        self._coming: dict[int, int] = {}  # incarnation -> rank, of the comers
        # Heaps; some entries are not waited for any more. The number only breaks ties.
        self._until: list[tuple[float, int, int]] = []  # the comers' deadlines, with their ranks
        self._deadlines: list[tuple[float, int, _Waiter]] = []
        self._calls: dict[int, _Calls] = {}  # by ring
        self._ties = itertools.count()

    # -- members of the ring ---------------------------------------------------------------------------

    def handle_gather(self, now: float, peer: Peer, rank: int, gather: Gather) -> list[Answer]:
        """Take a present worker's request to form the ring. The ring is formed when all ranks have asked.

        Raises UserError for a rank that is in no ring of this run.
        """
        if rank >= self._workers:
            raise UserError(f"worker {rank} is in no ring: the run's are of {self._workers} workers, from 0")
        state = self.state
        ring = state.ring_of.get(gather.incarnation)
        if ring is not None and state.rings[ring].members[gather.incarnation] == gather.number:
            return [(peer, Gathered(group=ring))]  # a repeated request: the answer was lost
        self._wait_for_others(peer, rank, gather, now + gather.seconds)
        return self._form() if len(state.comers) == self._workers else []

    def _wait_for_others(self, peer: Peer, rank: int, gather: Gather, until: float) -> None:
        self._go(rank)
        self.state.comers[rank], self._peers[rank] = (gather, until), peer
        self._coming[gather.incarnation] = rank
        heapq.heappush(self._until, (until, next(self._ties), rank))

    def _go(self, rank: int) -> None:
        """Drop the request of a rank that waits for the others, if there is one."""
        before = self.state.comers.pop(rank, None)
        if before is not None:
            del self._coming[before[0].incarnation], self._peers[rank]

    def _form(self) -> list[Answer]:
        comers, peers = self.state.comers, self._peers
        self.state.comers, self._peers, self._coming, self._until = {}, {}, {}, []
        ranks = sorted(comers)
        self._make({comers[rank][0].incarnation: comers[rank][0].number for rank in ranks})
        return [(peers[rank], Gathered(group=self.state.formed)) for rank in ranks]

    def form(self, members: Sequence[int], after: int = 0) -> int:
        """Form a ring of these incarnations, without keys; return its number, which is above `after`."""
        self.state.formed = max(self.state.formed, after)
        self._make(dict.fromkeys(members, -1))
        return self.state.formed

    def _make(self, members: dict[int, int]) -> None:
        state = self.state
        state.formed += 1
        for member in members:
            self._leave_ring(member)
            state.ring_of[member] = state.formed
        state.rings[state.formed], self._calls[state.formed] = RingState(members), _Calls(len(members))

    def members(self) -> list[int]:
        """Return the incarnations in the latest ring, in order of rank."""
        latest = self.state.rings.get(self.state.formed)
        return list(latest.members) if latest is not None else []

    def handle_broken(self, group: int) -> list[Answer]:
        """Mark a ring as broken, as a member is gone.

        Calls that wait for keys are answered with the missing keys, as are later calls that would wait.
        """
        ring = self.state.rings.get(group)
        if ring is None or ring.broken:
            return []
        ring.broken = True
        answers: list[Answer] = []
        for waiter in [waiter for waiters in self._calls[group].by_member.values() for waiter in waiters]:
            self._end(waiter)
            answers.append((waiter.peer, StoreAnswer(missing=sorted(waiter.missing))))
        return answers

    def handle_left(self, incarnation: int) -> None:
        """Remove a worker that said goodbye or died. With a ring's last member the ring's keys are
        dropped."""
        if incarnation in self._coming:
            self._go(self._coming[incarnation])
        self.state.counted.pop(incarnation, None)
        self._leave_ring(incarnation)

    def _leave_ring(self, incarnation: int) -> None:
        number = self.state.ring_of.pop(incarnation, None)
        if number is None:
            return
        calls = self._calls[number]
        for waiter in list(calls.by_member.get(incarnation, ())):
            self._end(waiter)
        calls.there -= 1
        if not calls.there:
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Drop a ring with its keys."""
        ring = self.state.rings.pop(number)
        del self._calls[number]
        self.keys_held -= len(ring.keys)
        self.bytes_held -= _bytes_of(ring)

    def restore(self, state: RendezvousState, peer: Peer) -> None:
        """Take over `state`. `peer` stands for the comers until they ask again."""
        self.state, comers = state, state.comers
        state.comers, self._peers, self._coming, self._until = {}, {}, {}, []
        for rank, (gather, until) in comers.items():
            self._wait_for_others(peer, rank, gather, until)
        self._calls = {number: _Calls() for number in state.rings}
        for number in state.ring_of.values():
            self._calls[number].there += 1
        self.keys_held = sum(len(ring.keys) for ring in state.rings.values())
        self.bytes_held = sum(map(_bytes_of, state.rings.values()))

    # -- a ring's keys ---------------------------------------------------------------------------------

    def handle_call(self, now: float, peer: Peer, call: StoreCall) -> list[Answer]:
        """Answer a member's operation on its ring's keys.

        Raises UserError, and changes nothing, for a ring that is not the member's, for keys or values that
        the operation does not take, and beyond a limit.
        """
        ring = self.state.rings.get(call.group)
        if ring is None or call.incarnation not in ring.members:
            raise UserError(f"ring {call.group} is not incarnation {call.incarnation}'s, or is no more")
        keys, values = _SHAPES[call.operation]
        if len(call.values) != values or (len(call.keys) != keys if keys is not None else not call.keys):
            raise UserError(
                f"{call.operation} of {len(call.keys)} keys and {len(call.values)} values: it takes "
                f"{'some' if keys is None else keys} keys and {values} values"
            )
        if call.operation in ("get", "wait"):
            return self._wait(now, peer, ring, call)
        if call.operation == "check":
            return [(peer, StoreAnswer(count=int(all(key in ring.keys for key in call.keys))))]
        if call.operation == "num_keys":
            return [(peer, StoreAnswer(count=len(ring.keys)))]
        return self._change(peer, ring, call)

    def _change(self, peer: Peer, ring: RingState, call: StoreCall) -> list[Answer]:
        key = call.keys[0]
        if call.operation == "set":
            return [(peer, StoreAnswer()), *self._put(call.group, key, call.values[0])]
        if call.operation == "compare_set":
            return self._compare_set(peer, ring, call)
        remembered = self.state.counted.setdefault(call.incarnation, {})
        if call.number in remembered:  # a repeated call counts once
            return [(peer, StoreAnswer(count=remembered[call.number]))]
        count, others = self._change_once(ring, call)
        remembered[call.number] = count
        if len(remembered) > _REMEMBERED:
            del remembered[next(iter(remembered))]
        return [(peer, StoreAnswer(count=count)), *others]

    def _change_once(self, ring: RingState, call: StoreCall) -> tuple[int, list[Answer]]:
        """Make a change whose repetition would give another result; return the result, and answers to
        others."""
        key, there = call.keys[0], ring.keys.get(call.keys[0])
        if call.operation == "delete":
            if there is not None:
                del ring.keys[key]
                self.keys_held -= 1
                self.bytes_held -= _size(key, there)
            return int(there is not None), []
        if call.operation == "append":
            value = (there or b"") + call.values[0]
            return len(value), self._put(call.group, key, value)
        total = _number(key, there) + call.amount
        if abs(total) >= _LARGEST:
            raise UserError(f"key {key!r}: a sum of {total} does not fit into 64 bits")
        return total, self._put(call.group, key, b"%d" % total)

    def _compare_set(self, peer: Peer, ring: RingState, call: StoreCall) -> list[Answer]:
        """Compare and set as TCPStore does: a missing key is set if "" was expected.

        On a mismatch the answer is the current value, or the expected one for a missing key.
        """
        key, (expected, desired) = call.keys[0], call.values
        there = ring.keys.get(key)
        if there == expected or (there is None and not expected):
            return [(peer, StoreAnswer(value=desired)), *self._put(call.group, key, desired)]
        return [(peer, StoreAnswer(value=expected if there is None else there))]

    def _put(self, group: int, key: str, value: bytes) -> list[Answer]:
        ring = self.state.rings[group]
        there = ring.keys.get(key)
        more_keys = there is None
        more_bytes = _size(key, value) - (0 if there is None else _size(key, there))
        if len(value) > VALUE_BYTES:
            raise UserError(f"key {key!r}: {len(value)} bytes, where {VALUE_BYTES} are the most")
        if self.keys_held + more_keys > self._most_keys:
            raise UserError(f"key {key!r}: the hub keeps {self._most_keys} keys for rings, and no more")
        if self.bytes_held + more_bytes > self._most_bytes:
            raise UserError(
                f"key {key!r}: with its {len(value)} bytes the hub would keep more than the "
                f"{self._most_bytes} bytes that it has for rings"
            )
        ring.keys[key] = value
        self.keys_held += more_keys
        self.bytes_held += more_bytes
        return self._wake(ring, self._calls[group], key)

    # -- waits -----------------------------------------------------------------------------------------

    def _wait(self, now: float, peer: Peer, ring: RingState, call: StoreCall) -> list[Answer]:
        missing = {key for key in call.keys if key not in ring.keys}
        if not missing:
            return [(peer, _found(ring, call))]
        if ring.broken:
            return [(peer, StoreAnswer(missing=sorted(missing)))]
        if self.waiting >= self._most_waiters:
            raise UserError(f"{self.waiting} calls wait for keys already, and no more may")
        waiter, calls = _Waiter(peer, call, missing), self._calls[call.group]
        for key in missing:
            calls.by_key.setdefault(key, {})[waiter] = None
        calls.by_member.setdefault(call.incarnation, {})[waiter] = None
        self.waiting += 1
        heapq.heappush(self._deadlines, (now + call.seconds, next(self._ties), waiter))
        return []

    def _wake(self, ring: RingState, calls: _Calls, key: str) -> list[Answer]:
        """Return the answers to calls that waited for this key last."""
        answers: list[Answer] = []
        for waiter in calls.by_key.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                self._end(waiter)
                answers.append((waiter.peer, _found(ring, waiter.call)))
        return answers

    def _end(self, waiter: _Waiter) -> None:
        calls, member = self._calls[waiter.call.group], waiter.call.incarnation
        for key in waiter.missing:
            del calls.by_key[key][waiter]
            if not calls.by_key[key]:
                del calls.by_key[key]
        del calls.by_member[member][waiter]
        if not calls.by_member[member]:
            del calls.by_member[member]
        waiter.done = True
        self.waiting -= 1

    def poll(self, now: float) -> list[Answer]:
        """Return the answers to calls and comers whose time is over: they name what is missing."""
        answers: list[Answer] = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].done):
            waiter = heapq.heappop(self._deadlines)[2]
            if not waiter.done:
                self._end(waiter)
                answers.append((waiter.peer, StoreAnswer(missing=sorted(waiter.missing))))
        late: set[int] = set()
        while self._until and (self._until[0][0] <= now or self._waits_no_more(self._until[0])):
            entry = heapq.heappop(self._until)
            if not self._waits_no_more(entry):
                late.add(entry[2])
        if late:
            answer = Gathered(group=0, missing=self._missing(), there=len(self.state.comers))
        for rank in sorted(late):
            answers.append((self._peers[rank], answer))
            self._go(rank)
        return answers

    def _waits_no_more(self, entry: tuple[float, int, int]) -> bool:
        until, _, rank = entry
        return rank not in self.state.comers or self.state.comers[rank][1] != until

    def _missing(self) -> list[int]:
        """Return the first absent ranks. Each comer is told, and there may be very many."""
        absent = (rank for rank in range(self._workers) if rank not in self.state.comers)
        return list(itertools.islice(absent, MISSING))

    def next_deadline(self) -> float | None:
        """Return the time at which `poll` may next have answers; None for never."""
        while self._until and self._waits_no_more(self._until[0]):
            heapq.heappop(self._until)
        while self._deadlines and self._deadlines[0][2].done:
            heapq.heappop(self._deadlines)
        return min((each[0][0] for each in (self._until, self._deadlines) if each), default=None)


def _found(ring: RingState, call: StoreCall) -> StoreAnswer:
    return StoreAnswer(value=ring.keys[call.keys[0]] if call.operation == "get" else b"")


def _number(key: str, value: bytes | None) -> int:
    try:
        return int(value or b"0")
    except ValueError:
        raise UserError(f"key {key!r} holds no whole number, so nothing can be added to it") from None


def _bytes_of(ring: RingState) -> int:
    return sum(_size(key, value) for key, value in ring.keys.items())


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value)
