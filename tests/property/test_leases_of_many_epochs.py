"""Leases of many epochs: each answer is that of a model which keeps each position, and the state is small."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.store.leases import Key, Leases, LeasesState, Progress
from atoll.wire.messages import Lease, Leased, Used

LENGTHS = (4, 5, 0)  # of a sampler's epochs; the second is that of epochs a worker should not have
FREE, USED = "free", "used"


@dataclass
class WholeEpoch:
    positions: list[Key | str]
    waiting: set[Key] = field(default_factory=set)
    idle: set[Key] = field(default_factory=set)

    def of(self, key: Key | str) -> list[int]:
        return [place for place, there in enumerate(self.positions) if there == key]

    def holders(self) -> set[Key]:
        return {there for there in self.positions if isinstance(there, tuple)}


class Whole:
    """What `Leases` does, with each epoch's positions one by one, for good."""

    def __init__(self) -> None:
        self.epochs: dict[tuple[int, int], WholeEpoch] = {}
        self.fenced: dict[int, int] = {}
        self.answered: dict[int, Leased] = {}

    def handle_lease(self, worker: int, incarnation: int, lease: Lease, patient: bool) -> Leased:
        key = (worker, incarnation)
        if incarnation <= self.fenced.get(worker, 0):
            raise UserError("fenced")
        epoch = self.epochs.setdefault((lease.sampler, lease.epoch), WholeEpoch([FREE] * lease.length))
        if len(epoch.positions) != lease.length:
            raise UserError("length")
        latest = self.answered.get(incarnation)
        if lease.number and latest is not None and latest.number == lease.number:
            return latest
        for part in lease.returned:
            self._change(part, key, FREE)
        epoch.waiting.discard(key)
        epoch.idle = epoch.idle - {key} | ({key} if lease.idle else set())
        leased = Leased(sampler=lease.sampler, epoch=lease.epoch, start=0, stop=0, number=lease.number)
        if free := epoch.of(FREE):
            start = stop = free[0]
            while stop in free and stop - start < lease.count:
                epoch.positions[stop] = key
                stop += 1
            leased = msgspec.structs.replace(leased, start=start, stop=stop)
            if lease.number:
                self.answered[incarnation] = leased
            return leased
        others = epoch.holders() - {key}
        awaited = others - epoch.idle
        over = not awaited or not patient or (key in epoch.holders() and awaited <= epoch.waiting)
        if not over:
            epoch.waiting.add(key)
        return msgspec.structs.replace(leased, over=over, held=over and bool(others))

    def handle_used(self, worker: int, incarnation: int, used: list[Used]) -> None:
        for part in used:
            self._change(part, (worker, incarnation), USED)

    def handle_moved(self, old: Key, new: Key, held: list[Used]) -> None:
        for part in held:
            self._change(part, old, new)

    def _change(self, part: Used, old: Key, new: Key | str) -> None:
        epoch = self.epochs.get((part.sampler, part.epoch))
        for place in range(part.start, part.stop) if epoch is not None else ():
            if place < len(epoch.positions) and epoch.positions[place] == old:
                epoch.positions[place] = new

    def handle_fenced(self, worker: int, incarnation: int, used: list[Used]) -> int:
        key, returned = (worker, incarnation), 0
        self.handle_used(worker, incarnation, used)
        self.fenced[worker] = max(incarnation, self.fenced.get(worker, 0))
        self.answered.pop(incarnation, None)
        for epoch in self.epochs.values():
            epoch.waiting.discard(key)
            epoch.idle.discard(key)
            for place in epoch.of(key):
                epoch.positions[place] = FREE
                returned += 1
        return returned

    def progress(self, sampler: int, epoch: int) -> Progress:
        count = Counter[str]()
        if (sampler, epoch) in self.epochs:
            for there in self.epochs[sampler, epoch].positions:
                count[there if isinstance(there, str) else "leased"] += 1
        return Progress(count[USED], count["leased"], count[FREE])


def restarted(leases: Leases) -> Leases:
    """The leases of a hub that has read its state again."""
    again = Leases()
    again.state = msgspec.msgpack.decode(msgspec.msgpack.encode(leases.state), type=LeasesState)
    assert again.state == leases.state
    return again


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_answer_is_that_of_a_model_that_forgets_nothing(data: st.DataObject) -> None:
    leases, whole = Leases(), Whole()
    lives, numbers = {0: 1, 1: 2, 2: 3}, Counter[int]()
    kinds = st.sampled_from(["lease"] * 6 + ["used"] * 6 + ["all used", "fence", "move", "restart"])
    for _ in range(data.draw(st.integers(1, 50))):
        kind, worker = data.draw(kinds), data.draw(st.integers(0, 2))
        life = lives[worker]
        sampler, number = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
        start, size = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
        part = Used(sampler=sampler, epoch=number, start=start, stop=start + size)
        if kind == "lease":
            length = data.draw(st.sampled_from((LENGTHS[0],) * 8 + LENGTHS))
            numbers[life] += data.draw(st.integers(0, 1))  # the latest one again, now and then
            back = Used(sampler=sampler, epoch=data.draw(st.integers(0, 3)), start=start, stop=start + size)
            lease = Lease(
                incarnation=life,
                sampler=sampler,
                epoch=number,
                length=length,
                count=size,
                number=numbers[life],
                returned=[back] * data.draw(st.integers(0, 1)),
                idle=data.draw(st.booleans()),
            )
            patient, found = data.draw(st.booleans()), []
            for each in (leases, whole):
                try:
                    found.append(each.handle_lease(worker, life, lease, patient))
                except UserError:
                    found.append(None)
            assert found[0] == found[1]
        elif kind in ("used", "all used"):
            parts = [part]
            if kind == "all used":
                parts = [Used(sampler=sampler, epoch=each, start=0, stop=5) for each in range(4)]
            leases.handle_used(worker, life, parts)
            whole.handle_used(worker, life, parts)
        elif kind == "fence":
            assert leases.handle_fenced(worker, life, [part]) == whole.handle_fenced(worker, life, [part])
            lives[worker] += 3
        elif kind == "move":
            other = data.draw(st.integers(0, 2))
            leases.handle_moved((worker, life), (other, lives[other]), [part])
            whole.handle_moved((worker, life), (other, lives[other]), [part])
        else:
            leases = restarted(leases)
        for key in ((sampler, number) for sampler in (0, 1) for number in range(4)):
            assert leases.progress(*key) == whole.progress(*key)


def test_the_state_of_many_epochs_is_small() -> None:
    """Also where one of a hundred epochs is left before its end."""
    leases, left = Leases(), 0
    for epoch in range(10_000):
        for sampler in (0, 1):
            for worker in (0, 1):
                lease = Lease(incarnation=worker + 1, sampler=sampler, epoch=epoch, length=4, count=2)
                leased = leases.handle_lease(worker, worker + 1, lease)
                assert leased.stop - leased.start == 2
            last = 1 if sampler and epoch % 100 == 0 else 2
            left += last == 1
            for worker in range(last):
                used = [Used(sampler=sampler, epoch=epoch, start=2 * worker, stop=2 * worker + 2)]
                leases.handle_used(worker, worker + 1, used)
    assert len(leases.state.epochs) == left == 100
    assert len(msgspec.msgpack.encode(leases.state)) < 8_000
    assert leases.progress(0, 77) == Progress(used=4, leased=0, free=0)
    assert (
        restarted(leases).handle_lease(2, 3, Lease(incarnation=3, sampler=0, epoch=5, length=4, count=1)).over
    )
