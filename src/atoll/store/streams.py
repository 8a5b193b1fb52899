"""SSP and ASP: each worker's contributions enter the log by themselves, in the worker's order. As many
contributions as there are live workers make one step of the optimizer."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.core.hyperparameters import difference_line, unscheduled_difference
from atoll.core.weighing import KNOWN, are_certain, excess_line, told_unlike, weight_of
from atoll.store.contributors import Contributors
from atoll.store.entries import Apply, Joined
from atoll.store.outcomes import Draft
from atoll.wire import messages
from atoll.wire.messages import Count

SCALED = ("weight", "rate", "none")


class Stream(msgspec.Struct, forbid_unknown_fields=True):
    """One live worker.

    Attributes:
        clock: its iterations in the log.
        seen: contributions of all workers that were in the log right after its own latest one.
        pending: its commits that are not in the log yet, by iteration.
        told: the latest answer, which a worker that lost it is given again.
        seen_before: `seen` after its own contribution before the latest.
        weight: the weight of its latest contribution in the log, as in wire's Commit; so are `basis` and
            `alike`.
    """

    incarnation: Count
    clock: Count
    seen: Count
    pending: dict[int, messages.Commit] = {}
    told: messages.Committed | None = None
    seen_before: Count = 0
    weight: float = 0.0
    basis: str = KNOWN
    alike: float = 1.0


class OpenStep(msgspec.Struct, forbid_unknown_fields=True):
    """The open step of one optimizer.

    Attributes:
        contributions: the number of contributions in it; 0 if none is open.
        weight: their weight, by samples.
        alike: their weight, by workers.
        settings: their mean hyperparameters.
    """

    contributions: Count = 0
    weight: float = 0.0
    alike: float = 0.0
    settings: messages.Hyperparameters = []


class Streams(msgspec.Struct, forbid_unknown_fields=True, tag="streams"):
    """The rule of SSP and ASP: apply each contribution as soon as it is committed and staged on all shards.

    A step is made at once, with the mean of the contributions so far, and made again with each later
    contribution to it. So a complete step equals BSP's. A worker that asks gets the latest parameters after a
    step; its own next contribution belongs to the step after.

    Contributions weigh by samples while the latest contribution of every live worker is certain
    (core/weighing.py). From the first uncertain one on all workers count alike.

    Attributes:
        start: the iteration at which a worker begins that joins while no worker lives.
        limit: commits that a worker may have in flight.
        scaled: what of a stale contribution is divided by its staleness: one of SCALED.
        applied: contributions in the log.
        open: the open step of each optimizer.
        settings: the hyperparameters of each live worker's latest contribution.
    """

    start: Count
    limit: Count
    scaled: str = "weight"
    streams: dict[int, Stream] = {}
    applied: Count = 0
    open: dict[Count, OpenStep] = {}
    settings: dict[int, messages.Hyperparameters] = {}

    def committed(self, worker: int) -> int:
        """Return the number of a live worker's iterations in the log."""
        return self.streams[worker].clock

    def commit(self, worker: int, commit: messages.Commit, draft: Draft, these: Contributors) -> None:
        """Take a live worker's commit. `draft.refused` says why it may not commit."""
        stream = self.streams[worker]
        if commit.iteration < stream.clock:
            told = stream.told
            if told is None or told.iteration != commit.iteration:
                told = messages.Committed(iteration=commit.iteration)
            draft.reply(worker, commit.incarnation, told, ("Commit", commit.iteration))
        elif commit.iteration in stream.pending:
            return  # answered when it enters the log
        elif commit.iteration != stream.clock + len(stream.pending):
            draft.refused = (
                f"worker {worker} commits iteration {commit.iteration}, "
                f"while its next is {stream.clock + len(stream.pending)}"
            )
        elif len(stream.pending) >= self.limit:
            draft.refused = f"worker {worker} has {self.limit} iterations in flight, which is the most"
        elif excess := these.usual.excess(commit):
            draft.refused = excess_line(worker, commit.iteration, excess)
        else:
            stream.pending[commit.iteration] = commit

    def step(self, worker: int, _step: messages.Step, draft: Draft) -> None:
        """Refuse a Step: only synchronous workers step by the log."""
        draft.refused = f"worker {worker} says Step, which asynchronous training has not"

    def leave(self, worker: int, incarnation: int, _these: Contributors) -> None:
        """Remove a worker that is fenced."""
        stream = self.streams.get(worker)
        if stream is not None and stream.incarnation <= incarnation:
            self.start = min(each.clock for each in self.streams.values())
            del self.streams[worker]
            self.settings.pop(worker, None)

    def advance(self, draft: Draft, these: Contributors) -> None:
        """Write everything that can be written now."""
        if these.roster.is_quorate():
            start = min((stream.clock for stream in self.streams.values()), default=self.start)
            for worker, incarnation in these.roster.enter():
                self.streams[worker] = Stream(incarnation, start, self.applied, seen_before=self.applied)
                draft.write(Joined(worker=worker, incarnation=incarnation, clock=start))
        for worker in sorted(self.streams):
            while self._try_apply(worker, draft, these):
                pass

    def _try_apply(self, worker: int, draft: Draft, these: Contributors) -> bool:
        stream = self.streams[worker]
        commit = stream.pending.get(stream.clock)
        if commit is None or these.stages.missing(worker, stream.incarnation, stream.clock):
            return False
        staleness = self._staleness(stream, commit.behind)
        stream.weight, stream.basis, stream.alike = commit.weight, commit.basis, commit.alike
        certain = are_certain(self.streams.values())
        step = self.open.setdefault(commit.optimizer, OpenStep())
        number, part, enough = self._add(step, commit, staleness, certain)
        draft.write(
            Apply(
                worker=worker,
                incarnation=stream.incarnation,
                iteration=stream.clock,
                weight=commit.weight,
                samples=commit.samples,
                part=part,
                opens=number == 1,
                closes=enough,
                staleness=staleness,
                hyperparameters=step.settings,
                behind=commit.behind,
                optimizer=commit.optimizer,
            )
        )
        draft.counted.append((worker, commit))
        stream.told = messages.Committed(
            iteration=stream.clock,
            workers=sorted(self.streams),
            grouping=commit.grouping,
            unlike=self._unlike(worker, commit),
            alike=not certain,
            counts=told_unlike(f"iteration {stream.clock} of worker {worker}", self.streams),
        )
        draft.reply(worker, stream.incarnation, stream.told, ("Commit", stream.clock))
        these.stages.forget_through(worker, stream.incarnation, stream.clock)
        del stream.pending[stream.clock]
        self.applied += 1
        stream.clock += 1
        stream.seen_before, stream.seen = stream.seen, self.applied
        return True

    def _unlike(self, worker: int, commit: messages.Commit) -> str:
        """Return a line that names another worker whose hyperparameters differ in a way that no schedule
        explains; empty for none."""
        before, own = self.settings.get(worker), commit.hyperparameters
        self.settings[worker] = own
        if own == before:
            return ""  # unchanged: a difference is reported to the worker that changed
        for other, theirs in sorted(self.settings.items()):
            found = unscheduled_difference(theirs, own) if other != worker else None
            if found is not None:
                return difference_line(f"worker {other}", f"worker {worker}", commit.iteration, found)
        return ""

    def _staleness(self, stream: Stream, behind: int) -> float:
        """Return by how many global iterations more than usual the parameters have moved on since a
        contribution was computed.

        Args:
            behind: the worker's own iterations in flight, which the parameters that it computed with lacked.
        """
        others = self.applied - (stream.seen_before if behind else stream.seen) - behind
        if len(self.streams) == 1:
            return max(float(behind), others - 1.0)
        return max(0.0, others / (len(self.streams) - 1) - 1.0)

    def _add(
        self, step: OpenStep, commit: messages.Commit, staleness: float, certain: bool
    ) -> tuple[int, float, bool]:
        """Add a contribution to the open step, or to a new one.

        Returns the contribution's number in the step, its share of the weight so far, and whether the step is
        complete. The share is by samples if all contributions are `certain`.
        """
        if step.contributions >= len(self.streams):  # the workers that the step waited for are gone
            step.contributions = 0
        # A staleness up to 1 is chance, and all workers have contributions in flight: neither scales down.
        divisor = max(1.0, staleness - commit.behind)
        damped = divisor if self.scaled == "weight" else 1.0
        weight, alike = commit.weight / damped, weight_of(commit, certain=False) / damped
        settings = commit.hyperparameters
        if self.scaled == "rate":
            settings = [_slower(group, divisor) for group in settings]
        if step.contributions == 0:
            step.weight, step.alike, step.settings = 0.0, 0.0, settings
        step.weight += weight
        step.alike += alike
        own, total = (weight, step.weight) if certain else (alike, step.alike)
        part = own / total if total > 0 else 0.0
        step.settings = _moved(step.settings, settings, part)
        number = step.contributions + 1
        enough = number >= len(self.streams)
        step.contributions = 0 if enough else number
        return number, part, enough

    def waiting_for(self, these: Contributors) -> list[str]:
        """Return, in words, the workers waited for and on what; the slowest, for which SSP waits, first."""
        missing = these.roster.missing()
        if missing:
            return [missing]
        in_order = sorted(self.streams.items(), key=lambda item: (item[1].clock, item[0]))
        return [
            these.staged_line(worker, stream.incarnation, stream.clock)
            if stream.pending
            else f"worker {worker}, to commit iteration {stream.clock}"
            for worker, stream in in_order
        ]


def _slower(group: dict[str, Any], divisor: float) -> dict[str, Any]:
    """Return a param group with its learning rate divided, if it has one."""
    rate = group.get("lr")
    return {**group, "lr": rate / divisor} if divisor > 1 and isinstance(rate, (int, float)) else group


def _moved(before: Any, now: Any, part: float) -> Any:
    """Return `before`, moved by `part` of the way to `now` if it is a fractional number; everything else is
    as in `now`.

    A schedule goes by each worker's own iterations, so a slow worker's learning rate is that of an earlier
    time. A step with the latest rate alone would be as large as early in training whenever a slow worker made
    it.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _moved(before.get(key, value), value, part) for key, value in now.items()}
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and len(before) == len(now):
        return [_moved(one, other, part) for one, other in zip(before, now, strict=True)]
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (before, now))
    if numbers and before != now and (isinstance(before, float) or isinstance(now, float)):
        return before + part * (now - before)
    return now
