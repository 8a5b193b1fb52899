"""Leases of samples: every position of an epoch is used exactly once, whoever dies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from atoll.core.errors import UserError
from atoll.store.ranges import Ranges
from atoll.wire.messages import Lease, Leased, Used

Key: TypeAlias = tuple[int, int]  # worker, incarnation


@dataclass(frozen=True)
class Progress:
    """Number of positions of an epoch that are used, leased and not used, and free."""

    used: int
    leased: int
    free: int


class Epoch(msgspec.Struct, forbid_unknown_fields=True):
    """The positions of an epoch's order. `waiting` are those who asked last in vain."""

    length: int
    free: Ranges = msgspec.field(default_factory=Ranges)
    used: Ranges = msgspec.field(default_factory=Ranges)
    leased: dict[Key, Ranges] = {}
    waiting: set[Key] = set()


class LeasesState(msgspec.Struct, forbid_unknown_fields=True):
    """What `Leases` knows: epochs by sampler and number, and fenced incarnations and the latest answers to
    numbered requests by worker and by incarnation."""

    epochs: dict[tuple[int, int], Epoch] = {}
    fenced: dict[int, int] = {}
    answered: dict[int, Leased] = {}


class Leases:
    """Positions of the epochs' orders, by sampler and epoch.

    A position is free, leased to one incarnation of a worker, or used. A lease ends with the commit that used
    it; a fenced worker's unused ones are free again, and go first, for the lowest free positions always do.
    """

    def __init__(self) -> None:
        self.state = LeasesState()
        self.changes = 0  # grows with each epoch, lease or wait that is new: what a journal has to know

    def handle_lease(self, worker: int, incarnation: int, lease: Lease, patient: bool = True) -> Leased:
        """Up to `lease.count` free positions in one run, or none.

        None and `over`: all are used, or leased to this worker itself. None and not `over`: others hold some
        and may fail; ask again. But where every other holder waits too, this one does not: each may keep a
        part of a batch back until it knows whether more comes. Not `patient`: never wait for others; what
        comes back later stays free, for those who still ask. A request whose `number` is that of the worker's
        latest one is answered as that was. Raises UserError for another length than an earlier worker's, and
        for a fenced worker.
        """
        if incarnation <= self.state.fenced.get(worker, 0):
            raise UserError(f"worker {worker} of incarnation {incarnation} is fenced, and gets no samples")
        epoch = self.state.epochs.get((lease.sampler, lease.epoch))
        if epoch is None:
            epoch = self.state.epochs[lease.sampler, lease.epoch] = Epoch(lease.length)
            epoch.free.add(0, lease.length)
            self.changes += 1
        if epoch.length != lease.length:
            raise UserError(
                f"worker {worker} has {lease.length} samples in epoch {lease.epoch}, others have "
                f"{epoch.length}: all workers need the same data set"
            )
        latest = self.state.answered.get(incarnation)
        if lease.number and latest is not None and latest.number == lease.number:
            return latest
        waited = (worker, incarnation) in epoch.waiting
        leased = self._lease(epoch, (worker, incarnation), lease, patient)
        if leased.start < leased.stop or waited != ((worker, incarnation) in epoch.waiting):
            self.changes += 1
        if lease.number and leased.start < leased.stop:  # what gave nothing may be asked again as well
            self.state.answered[incarnation] = leased
        return leased

    def _lease(self, epoch: Epoch, key: Key, lease: Lease, patient: bool) -> Leased:
        epoch.waiting.discard(key)
        if epoch.free:
            start, stop = epoch.free.take_first(lease.count)
            epoch.leased.setdefault(key, Ranges()).add(start, stop)
            return _leased(lease, start, stop)
        others = {holder for holder, held in epoch.leased.items() if held and holder != key}
        deadlocked = bool(epoch.leased.get(key)) and others <= epoch.waiting
        over = not others or not patient or deadlocked
        if not over:
            epoch.waiting.add(key)
        return _leased(lease, 0, 0, over)

    def handle_used(self, worker: int, incarnation: int, used: Iterable[Used]) -> None:
        """The log counts commits that used these. May be said again, in parts or in all."""
        for part in used:
            epoch = self.state.epochs.get((part.sampler, part.epoch))
            held = epoch.leased.get((worker, incarnation)) if epoch is not None else None
            if epoch is None or held is None:
                continue
            for start, stop in held.overlap(part.start, part.stop):
                held.remove(start, stop)
                epoch.used.add(start, stop)

    def handle_moved(self, old: Key, new: Key, held: Iterable[Used]) -> None:
        """What `old` has leased of these is `new`'s from now on: its worker has been given it, and has not
        used it. What is not leased to `old` is left aside."""
        for part in held:
            epoch = self.state.epochs.get((part.sampler, part.epoch))
            there = epoch.leased.get(old) if epoch is not None else None
            if epoch is None or there is None:
                continue
            for start, stop in there.overlap(part.start, part.stop):
                there.remove(start, stop)
                epoch.leased.setdefault(new, Ranges()).add(start, stop)

    def handle_fenced(self, worker: int, incarnation: int, used: Iterable[Used], final: bool = True) -> int:
        """The incarnation commits nothing any more, and `used` is all that it ever used: the rest of its
        leases is free again. Gives how many positions came back. May be said again.

        Not `final`: what it used is in its site's log and may not be in the global one; that stays leased
        until `handle_used` or a final word.
        """
        used = list(used)
        if final:
            self.handle_used(worker, incarnation, used)
        self.state.fenced[worker] = max(incarnation, self.state.fenced.get(worker, 0))
        self.state.answered.pop(incarnation, None)
        returned = 0
        for (sampler, number), epoch in self.state.epochs.items():
            epoch.waiting.discard((worker, incarnation))
            held = epoch.leased.pop((worker, incarnation), Ranges())
            kept = Ranges()
            for part in used if not final else ():
                if (part.sampler, part.epoch) == (sampler, number):
                    for start, stop in held.overlap(part.start, part.stop):
                        held.remove(start, stop)
                        kept.add(start, stop)
            if kept:
                epoch.leased[worker, incarnation] = kept
            returned += len(held)
            for start, stop in held:
                epoch.free.add(start, stop)
        return returned

    handle_goodbye = handle_fenced  # one who leaves in good order is fenced as well

    def progress(self, sampler: int, epoch: int) -> Progress:
        """Return an epoch's progress; all zero where no worker has asked for it."""
        state = self.state.epochs.get((sampler, epoch))
        if state is None:
            return Progress(0, 0, 0)
        leased = sum(len(held) for held in state.leased.values())
        return Progress(len(state.used), leased, len(state.free))


def _leased(lease: Lease, start: int, stop: int, over: bool = False) -> Leased:
    return Leased(
        sampler=lease.sampler, epoch=lease.epoch, start=start, stop=stop, over=over, number=lease.number
    )
