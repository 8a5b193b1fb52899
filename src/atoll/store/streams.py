"""SSP and ASP: each worker's contributions go into the log by themselves, in its own order, and as many as
there are live workers make one step of the optimizer."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.core.hyperparameters import difference_line, unscheduled_difference
from atoll.core.weighing import KNOWN, Usual, are_certain, excess_line, told_unlike, weight_of
from atoll.store.entries import Apply, Joined
from atoll.store.outcomes import Draft
from atoll.store.roster import Roster
from atoll.store.stages import Stages
from atoll.wire import messages
from atoll.wire.messages import Count

SCALED = ("weight", "rate", "none")


class Stream(msgspec.Struct, forbid_unknown_fields=True):
    """One live worker."""

    incarnation: Count
    clock: Count  # iterations in the log
    seen: Count  # contributions of all workers that were in the log at its last own one
    pending: dict[int, messages.Commit] = {}
    told: messages.Committed | None = None  # the latest: who has lost it is told the same
    seen_before: Count = 0  # as `seen`, at the own one before that
    weight: float = 0.0  # of its latest contribution in the log, and the next two: as wire's Commit
    basis: str = KNOWN
    alike: float = 1.0


class StreamsState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="streams"):
    """All that Streams remember, beside roster and stages."""

    limit: Count
    streams: dict[int, Stream]
    applied: Count
    in_step: Count
    step_weight: float
    step_settings: messages.Hyperparameters
    start: Count
    scaled: str = "weight"
    settings: dict[int, messages.Hyperparameters] = {}
    step_alike: float = 0.0


class Streams:
    """Apply each contribution as soon as it is committed and staged on all shards.

    A step is made at once, with the mean of the contributions so far, and made again with each later
    contribution to it. So a complete step equals BSP's. Whoever asks gets the latest known parameters after a
    step; its own next contribution belongs to the step after.

    Contributions weigh by samples while the latest contribution of every live worker is certain
    (core/weighing.py). From the first uncertain one on all workers count alike.
    """

    def __init__(
        self,
        roster: Roster,
        stages: Stages,
        steps: int,
        limit: int,
        scaled: str = "weight",
        usual: Usual | None = None,
    ) -> None:
        """`scaled` is what of a stale contribution is divided by its staleness: one of SCALED. `usual` is
        told by the log what counts."""
        self._usual = Usual() if usual is None else usual
        self._roster = roster
        self._stages = stages
        self._limit = limit
        self._scaled = scaled
        self._streams: dict[int, Stream] = {}
        self._applied = 0
        self._in_step = 0  # contributions to the open step; 0 where none is open
        self._step_weight = 0.0  # theirs, damped
        self._step_alike = 0.0  # the same of the workers that they are of
        self._step_settings: messages.Hyperparameters = []  # the mean of theirs
        self._settings: dict[int, messages.Hyperparameters] = {}  # of each live worker's latest contribution
        self._start = steps  # where one begins who joins while nobody lives

    def state(self) -> StreamsState:
        """For a journal; `restored` makes the same of it."""
        return StreamsState(
            limit=self._limit,
            streams=_copies(self._streams),
            applied=self._applied,
            in_step=self._in_step,
            step_weight=self._step_weight,
            step_alike=self._step_alike,
            step_settings=self._step_settings,
            start=self._start,
            scaled=self._scaled,
            settings=dict(self._settings),
        )

    @classmethod
    def restored(cls, state: StreamsState, roster: Roster, stages: Stages, usual: Usual) -> Streams:
        streams = cls(roster, stages, state.start, state.limit, state.scaled, usual)
        streams._streams, streams._applied = _copies(state.streams), state.applied
        streams._in_step, streams._step_weight = state.in_step, state.step_weight
        streams._step_settings, streams._step_alike = state.step_settings, state.step_alike
        streams._settings = dict(state.settings)
        return streams

    def committed(self, worker: int) -> int:
        """How many iterations are in the log, for a live worker."""
        return self._streams[worker].clock

    def commit(self, worker: int, commit: messages.Commit, draft: Draft) -> None:
        """A live worker commits its contribution; `draft.refused` says if it may not."""
        stream = self._streams[worker]
        if commit.iteration < stream.clock:
            told = stream.told
            if told is None or told.iteration != commit.iteration:
                told = messages.Committed(iteration=commit.iteration)
            draft.reply(worker, commit.incarnation, told)
        elif commit.iteration in stream.pending:
            return  # answered when it goes into the log
        elif commit.iteration != stream.clock + len(stream.pending):
            draft.refused = (
                f"worker {worker} commits iteration {commit.iteration}, "
                f"while its next is {stream.clock + len(stream.pending)}"
            )
        elif len(stream.pending) >= self._limit:
            draft.refused = f"worker {worker} has {self._limit} iterations in flight, which is the most"
        elif excess := self._usual.excess(commit):
            draft.refused = excess_line(worker, commit.iteration, excess)
        else:
            stream.pending[commit.iteration] = commit

    def step(self, worker: int, _step: messages.Step, draft: Draft) -> None:
        """Only synchronous workers step by the log."""
        draft.refused = f"worker {worker} says Step, which asynchronous training has not"

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker is fenced."""
        stream = self._streams.get(worker)
        if stream is not None and stream.incarnation <= incarnation:
            self._start = min(each.clock for each in self._streams.values())
            del self._streams[worker]
            self._settings.pop(worker, None)

    def advance(self, draft: Draft) -> None:
        """Write all that can be written now."""
        if self._roster.is_quorate():
            start = min((stream.clock for stream in self._streams.values()), default=self._start)
            for worker, incarnation in self._roster.enter():
                self._streams[worker] = Stream(incarnation, start, self._applied, seen_before=self._applied)
                draft.write(
                    Joined(worker=worker, incarnation=incarnation, clock=start),
                    f"worker {worker} joins at iteration {start}, where the slowest live worker is",
                )
        for worker in sorted(self._streams):
            while self._try_apply(worker, draft):
                pass

    def _try_apply(self, worker: int, draft: Draft) -> bool:
        stream = self._streams[worker]
        commit = stream.pending.get(stream.clock)
        if commit is None or self._stages.missing(worker, stream.incarnation, stream.clock):
            return False
        staleness = self._staleness(stream, commit.behind)
        stream.weight, stream.basis, stream.alike = commit.weight, commit.basis, commit.alike
        certain = are_certain(self._streams.values())
        number, part, enough = self._add(commit, staleness, certain)
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
                hyperparameters=self._step_settings,
                behind=commit.behind,
            ),
            f"iteration {stream.clock} of worker {worker} is whole, and contribution {number} of "
            f"{len(self._streams)} to a step; its part so far is {part:.3g}, its staleness {staleness:.3g}",
        )
        draft.counted.append((worker, commit))
        stream.told = messages.Committed(
            iteration=stream.clock,
            workers=sorted(self._streams),
            grouping=commit.grouping,
            unlike=self._unlike(worker, commit),
            alike=not certain,
            counts=told_unlike(f"iteration {stream.clock} of worker {worker}", self._streams),
        )
        draft.reply(worker, stream.incarnation, stream.told)
        self._stages.forget_through(worker, stream.incarnation, stream.clock)
        del stream.pending[stream.clock]
        self._applied += 1
        stream.clock += 1
        stream.seen_before, stream.seen = stream.seen, self._applied
        return True

    def _unlike(self, worker: int, commit: messages.Commit) -> str:
        """Name another worker with a different hyperparameter that no schedule explains, in one line; empty:
        none.
        """
        before, own = self._settings.get(worker), commit.hyperparameters
        self._settings[worker] = own
        if own == before:
            return ""  # the other one hears it, or has
        for other, theirs in sorted(self._settings.items()):
            found = unscheduled_difference(theirs, own) if other != worker else None
            if found is not None:
                return difference_line(f"worker {other}", f"worker {worker}", commit.iteration, found)
        return ""

    def _staleness(self, stream: Stream, behind: int) -> float:
        """By how many global iterations more than usual the parameters have moved on since those that its
        next contribution was computed at, which lacked `behind` of its own."""
        others = self._applied - (stream.seen_before if behind else stream.seen) - behind
        if len(self._streams) == 1:
            return max(float(behind), others - 1.0)
        return max(0.0, others / (len(self._streams) - 1) - 1.0)

    def _add(self, commit: messages.Commit, staleness: float, certain: bool) -> tuple[int, float, bool]:
        """Add a contribution to the open step, or to a new one.

        Returns the contribution's number in the step, its share of the weight so far, and whether the step is
        complete. The share is by samples where all contributions are `certain`.
        """
        if self._in_step >= len(self._streams):  # those whom it waited for are gone
            self._in_step = 0
        # Up to 1 it is chance, and what is in flight all have: all would count for less.
        divisor = max(1.0, staleness - commit.behind)
        damped = divisor if self._scaled == "weight" else 1.0
        weight, alike = commit.weight / damped, weight_of(commit, certain=False) / damped
        settings = commit.hyperparameters
        if self._scaled == "rate":
            settings = [_slower(group, divisor) for group in settings]
        if self._in_step == 0:
            self._step_weight, self._step_alike, self._step_settings = 0.0, 0.0, settings
        self._step_weight += weight
        self._step_alike += alike
        own, total = (weight, self._step_weight) if certain else (alike, self._step_alike)
        part = own / total if total > 0 else 0.0
        self._step_settings = _moved(self._step_settings, settings, part)
        number = self._in_step + 1
        enough = number >= len(self._streams)
        self._in_step = 0 if enough else number
        return number, part, enough

    def waiting_for(self) -> list[str]:
        """Who is waited for and on what, in words: the slowest, whom SSP waits for, come first."""
        missing = self._roster.missing()
        if missing:
            return [missing]
        lines = []
        for worker, stream in sorted(self._streams.items(), key=lambda item: (item[1].clock, item[0])):
            if not stream.pending:
                lines.append(f"worker {worker}, to commit iteration {stream.clock}")
                continue
            shards = self._stages.missing(worker, stream.incarnation, stream.clock)
            on = ", ".join(map(str, shards))
            lines.append(f"worker {worker}'s chunks of iteration {stream.clock}, on shard {on}")
        return lines


def _copies(streams: dict[int, Stream]) -> dict[int, Stream]:
    return {
        worker: Stream(
            stream.incarnation,
            stream.clock,
            stream.seen,
            dict(stream.pending),
            stream.told,
            stream.seen_before,
            stream.weight,
            stream.basis,
            stream.alike,
        )
        for worker, stream in streams.items()
    }


def _slower(group: dict[str, Any], divisor: float) -> dict[str, Any]:
    """A param group with its learning rate divided, if it has one."""
    rate = group.get("lr")
    return {**group, "lr": rate / divisor} if divisor > 1 and isinstance(rate, (int, float)) else group


def _moved(before: Any, now: Any, part: float) -> Any:
    """`before`, moved by `part` of the way to `now` where a number is a fraction; all else is as it is now.

    A schedule goes by each worker's own iterations, so a slow one's learning rate is of another time. A step
    that used the latest as it is would be as large as early in training, whenever a slow worker made it.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: _moved(before.get(key, value), value, part) for key, value in now.items()}
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and len(before) == len(now):
        return [_moved(one, other, part) for one, other in zip(before, now, strict=True)]
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (before, now))
    if numbers and before != now and (isinstance(before, float) or isinstance(now, float)):
        return before + part * (now - before)
    return now
