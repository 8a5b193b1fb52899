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
    """The numbers of positions of an epoch that are used, leased but not used, and free."""

    used: int
    leased: int
    free: int


class Epoch(msgspec.Struct, forbid_unknown_fields=True):
    """The positions of an epoch's order.

    Attributes:
        waiting: the incarnations whose latest request found nothing, and which wait for more.
        idle: the incarnations that make no step with what they hold, as their latest request says.
    """

    length: int
    free: Ranges = msgspec.field(default_factory=Ranges)
    used: Ranges = msgspec.field(default_factory=Ranges)
    leased: dict[Key, Ranges] = {}
    waiting: set[Key] = set()
    idle: set[Key] = set()


class LeasesState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of `Leases`.

    Attributes:
        epochs: epochs by sampler and number, of which positions are not used.
        finished: the numbers of the epochs of which all positions are used, by sampler and length. As ranges
            they stay few, however many epochs there are.
        fenced: the highest fenced incarnation of each worker.
        answered: the latest answer to a numbered request, by incarnation.
    """

    epochs: dict[tuple[int, int], Epoch] = {}
    finished: dict[int, dict[int, Ranges]] = {}
    fenced: dict[int, int] = {}
    answered: dict[int, Leased] = {}


class Leases:
    """The positions of epochs' orders, by sampler and epoch.

    A position is free, leased to one incarnation of a worker, or used. A lease ends with the commit that used
    it. A fenced worker's unused leases are free again. The lowest free positions are leased first, so those
    are leased again soon.

    Attributes:
        changes: grows with each new epoch, lease, return or wait, which a journal has to know.
    """

    def __init__(self) -> None:
        self.state = LeasesState()
        self.changes = 0

    def handle_lease(self, worker: int, incarnation: int, lease: Lease, patient: bool = True) -> Leased:
        """Lease up to `lease.count` free positions in one run, or none.

        If there are none and the answer is `over`, all are used, or leased to this incarnation itself. If
        there are none and it is not `over`, other incarnations hold some and may fail: ask again. If every
        other holder waits too, the answer is `over` nevertheless: otherwise each could hold back a part of a
        batch until it knows whether more comes. Nobody waits for an idle holder: in an evaluation nobody
        commits.

        A request with the number of the incarnation's latest one gets the same answer again. Positions that
        the worker gives back are free first.

        Args:
            patient: False never waits for others; positions that come back later stay free for those who
                still ask.

        Raises UserError for another length than earlier workers', and for a fenced worker.
        """
        if incarnation <= self.state.fenced.get(worker, 0):
            raise UserError(f"worker {worker} of incarnation {incarnation} is fenced, and gets no samples")
        finished = self._length_of_finished(lease.sampler, lease.epoch)
        epoch = self.state.epochs.get((lease.sampler, lease.epoch))
        if epoch is None:
            epoch = Epoch(lease.length if finished is None else finished)
            if finished is None:
                self.state.epochs[lease.sampler, lease.epoch] = epoch
                epoch.free.add(0, lease.length)
                self.changes += 1
                self._finish((lease.sampler, lease.epoch))  # one of no samples
        if epoch.length != lease.length:
            raise UserError(
                f"worker {worker} has {lease.length} samples in epoch {lease.epoch}, others have "
                f"{epoch.length}: all workers need the same data set"
            )
        latest = self.state.answered.get(incarnation)
        if lease.number and latest is not None and latest.number == lease.number:
            return latest
        for part in lease.returned:
            self._return((worker, incarnation), part)
        if lease.idle != ((worker, incarnation) in epoch.idle):
            (epoch.idle.add if lease.idle else epoch.idle.discard)((worker, incarnation))
            self.changes += finished is None
        waited = (worker, incarnation) in epoch.waiting
        leased = self._lease(epoch, (worker, incarnation), lease, patient)
        if leased.start < leased.stop or waited != ((worker, incarnation) in epoch.waiting):
            self.changes += 1
        if lease.number and leased.start < leased.stop:  # an empty answer need not be repeated
            self.state.answered[incarnation] = leased
        return leased

    def _lease(self, epoch: Epoch, key: Key, lease: Lease, patient: bool) -> Leased:
        epoch.waiting.discard(key)
        if epoch.free:
            start, stop = epoch.free.take_first(lease.count)
            epoch.leased.setdefault(key, Ranges()).add(start, stop)
            return _leased(lease, start, stop)
        others = {holder for holder, held in epoch.leased.items() if held and holder != key}
        awaited = others - epoch.idle
        deadlocked = bool(epoch.leased.get(key)) and awaited <= epoch.waiting
        over = not awaited or not patient or deadlocked
        if not over:
            epoch.waiting.add(key)
        return msgspec.structs.replace(_leased(lease, 0, 0, over), held=over and bool(others))

    def handle_used(self, worker: int, incarnation: int, used: Iterable[Used]) -> None:
        """Note positions that commits in the log have used. They may be reported again, in parts or in
        all."""
        for part in used:
            epoch = self.state.epochs.get((part.sampler, part.epoch))
            held = epoch.leased.get((worker, incarnation)) if epoch is not None else None
            if epoch is None or held is None:
                continue
            for start, stop in held.overlap(part.start, part.stop):
                held.remove(start, stop)
                epoch.used.add(start, stop)
            self._finish((part.sampler, part.epoch))

    def handle_moved(self, old: Key, new: Key, held: Iterable[Used]) -> None:
        """Move leases from `old` to `new`, for positions that the worker of `new` was given and has not used.

        Positions in `held` that are not leased to `old` are ignored.
        """
        for part in held:
            epoch = self.state.epochs.get((part.sampler, part.epoch))
            there = epoch.leased.get(old) if epoch is not None else None
            if epoch is None or there is None:
                continue
            for start, stop in there.overlap(part.start, part.stop):
                there.remove(start, stop)
                epoch.leased.setdefault(new, Ranges()).add(start, stop)

    def handle_fenced(self, worker: int, incarnation: int, used: Iterable[Used], final: bool = True) -> int:
        """Free the leases of an incarnation that commits nothing any more. It may be reported again.

        Args:
            used: all positions that its commits have used.
            final: False if `used` is known from a site's log only, and may not be in the global log. Those
                positions then stay leased until `handle_used`, or a final report.

        Returns the number of positions that came back.
        """
        used = list(used)
        if final:
            self.handle_used(worker, incarnation, used)
        self.state.fenced[worker] = max(incarnation, self.state.fenced.get(worker, 0))
        self.state.answered.pop(incarnation, None)
        returned = 0
        for (sampler, number), epoch in self.state.epochs.items():
            epoch.waiting.discard((worker, incarnation))
            epoch.idle.discard((worker, incarnation))
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

    handle_goodbye = handle_fenced  # a worker that leaves in good order is fenced too

    def progress(self, sampler: int, epoch: int) -> Progress:
        """Return an epoch's progress; all zero if no worker has asked for it."""
        state = self.state.epochs.get((sampler, epoch))
        if state is None:
            return Progress(self._length_of_finished(sampler, epoch) or 0, 0, 0)
        leased = sum(len(held) for held in state.leased.values())
        return Progress(len(state.used), leased, len(state.free))

    def _return(self, key: Key, part: Used) -> None:
        """Free positions that `key` gives back, as far as they are leased to it."""
        epoch = self.state.epochs.get((part.sampler, part.epoch))
        held = epoch.leased.get(key) if epoch is not None else None
        if epoch is None or held is None:
            return
        for start, stop in held.overlap(part.start, part.stop):
            held.remove(start, stop)
            epoch.free.add(start, stop)
            self.changes += 1

    def _finish(self, key: tuple[int, int]) -> None:
        """Keep nothing but the length of an epoch of which all positions are used. Every request for it has
        one answer: it is over."""
        epoch = self.state.epochs[key]
        if epoch.free or any(epoch.leased.values()):
            return
        sampler, number = key
        of_length = self.state.finished.setdefault(sampler, {})
        of_length.setdefault(epoch.length, Ranges()).add(number, number + 1)
        del self.state.epochs[key]

    def _length_of_finished(self, sampler: int, epoch: int) -> int | None:
        """Return the length of an epoch of which all positions are used; None: it is not one."""
        for length, numbers in self.state.finished.get(sampler, {}).items():
            if numbers.overlap(epoch, epoch + 1):
                return length
        return None


def _leased(lease: Lease, start: int, stop: int, over: bool = False) -> Leased:
    return Leased(
        sampler=lease.sampler, epoch=lease.epoch, start=start, stop=stop, over=over, number=lease.number
    )
