"""Regrouping while a run goes on: speeds drift, members leave and come.

Each worker's speed is the median over a window of its own iterations (of what it computed, without its waits
for others), so that single slow steps move nothing. A new grouping is proposed when it is predicted to give
more, by a threshold and for long enough, and not soon after the one before; regroupings that follow one
another closely are let happen ever more rarely. So a worker that becomes slower for good is regrouped once,
and one whose speed goes up and down causes no storm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from atoll.core.errors import UserError
from atoll.core.units import format_seconds
from atoll.groups.chooser import Choice, Score
from atoll.groups.grouping import Grouping, show

Speeds: TypeAlias = Mapping[int, float]  # samples per second, by worker
Choose: TypeAlias = Callable[[Speeds], Choice]
ScoreAt: TypeAlias = Callable[[Grouping, Speeds], Score]

_CLOSE = 16.0  # pauses: regroupings that lie nearer together than this make the next pause longer
_LONGEST_PAUSE = 64.0  # intervals


@dataclass(frozen=True)
class Rules:
    """When a new grouping is worth its cost. Spans in seconds, shares of samples per second."""

    threshold: float = 0.1  # the predicted gain, as a share
    hold: float = 30.0  # for how long the gain must have been there
    interval: float = 300.0  # between two regroupings, at least; longer while they are frequent
    window: int = 16  # iterations over which a speed is the median
    tolerance: float = 0.1  # the share by which a speed may move before anybody looks

    def __post_init__(self) -> None:
        if not (self.threshold > 0 and self.hold >= 0 and self.interval > 0 and self.tolerance > 0):
            raise UserError(f"rules that cannot be: {self}")
        if self.window < 2:
            raise UserError(f"a window of {self.window} iterations has no median to speak of; 2 or more")


@dataclass(frozen=True)
class Proposal:
    """From the next iteration boundary on, these groups."""

    grouping: Grouping
    reason: str


class Regrouper:
    """The grouping of a run, while it goes. Times are in the caller's seconds.

    `choose(speeds)` is the chooser with what it needs beside speeds, for any members that there may be left,
    and `score(grouping, speeds)` what it scores with. A proposal counts as carried out; where it was not,
    `handle_grouping` says what holds. A hub that is started again needs the grouping and the speeds that it
    knew, nothing else: windows fill again.
    """

    def __init__(
        self,
        now: float,
        grouping: Grouping,
        speeds: Speeds,
        choose: Choose,
        score: ScoreAt,
        *,
        rules: Rules | None = None,
        name: Callable[[int], str] = str,
    ) -> None:
        grouping.check(speeds)
        self.grouping = grouping
        self._rules, self._choose, self._score, self._name = rules or Rules(), choose, score, name
        self._known = dict(speeds)  # by the probe, until a window is half full
        self._windows: dict[int, deque[float]] = {}  # seconds per sample
        self._grouped = dict(speeds)  # the speeds when the groups were made
        self._looked = dict(speeds)  # the speeds when groupings were last looked at
        self._next_look = -math.inf
        self._wish: Grouping | None = None  # a better grouping, and since when it would be
        self._since = now
        self._moved_on = False  # whether anything was measured since the last poll
        self._not_before = -math.inf  # the next regrouping
        self._last = -math.inf  # the last one
        self._pause = self._rules.interval

    @property
    def speeds(self) -> dict[int, float]:
        """What each member computes now, in samples per second."""
        return dict(self._known)

    # -- what happens -------------------------------------------------------------------------------------

    def handle_measured(self, now: float, worker: int, seconds_per_sample: float) -> None:  # noqa: ARG002
        """A member has made an iteration, computing for so long. What comes from one that is no member is
        left aside. Raises UserError for a time that is none."""
        if not (math.isfinite(seconds_per_sample) and seconds_per_sample > 0):
            raise UserError(f"worker {self._name(worker)} says {seconds_per_sample:g} s a sample: not a time")
        if worker not in self._known:
            return
        window = self._windows.setdefault(worker, deque(maxlen=self._rules.window))
        window.append(seconds_per_sample)
        if 2 * len(window) >= self._rules.window:
            self._known[worker] = 1 / median(window)
            self._moved_on = True

    def handle_left(self, now: float, worker: int) -> None:  # noqa: ARG002
        """A member died or said goodbye; the others of its group go on without it."""
        if worker not in self._known:
            return
        del self._known[worker]
        self._windows.pop(worker, None)
        self.grouping = self.grouping.without(worker)
        self._wish, self._moved_on = None, True

    def handle_joined(self, now: float, worker: int, seconds_per_sample: float) -> Proposal:  # noqa: ARG002
        """One comes, with what its probe measured, and is placed at once: in the group in which it is
        predicted to help most, or alone. Nobody else changes groups. Raises UserError for a member, and for a
        time that is none."""
        if worker in self._known:
            raise UserError(f"worker {self._name(worker)} is in a group already")
        if not (math.isfinite(seconds_per_sample) and seconds_per_sample > 0):
            raise UserError(f"worker {self._name(worker)} says {seconds_per_sample:g} s a sample: not a time")
        self._known[worker] = self._grouped[worker] = 1 / seconds_per_sample
        options = [Grouping([*self.grouping, [worker]])]
        for group in self.grouping:
            others = [other for other in self.grouping if other != group]
            options.append(Grouping([*others, [*group, worker]]))
        scores = [self._score(option, self._known).samples_per_second for option in options]
        best = min(range(len(options)), key=lambda place: (-scores[place], len(options[place])))
        self.grouping = options[best]
        self._wish, self._moved_on = None, True
        mates = [mate for mate in self.grouping.group_of(worker) if mate != worker]
        beside = f"with {show(Grouping([mates]), self._name)}" if mates else "in a group of its own"
        reason = (
            f"worker {self._name(worker)} comes with {1 / seconds_per_sample:.4g} samples/s and is best "
            f"{beside}: {scores[best]:.4g} samples/s predicted of all"
        )
        return Proposal(self.grouping, reason)

    def handle_grouping(self, now: float, grouping: Grouping) -> None:  # noqa: ARG002
        """These groups are what the members are in, whatever was proposed."""
        grouping.check(self._known)
        self.grouping, self._wish, self._moved_on = grouping, None, True
        self._looked = {}

    # -- what follows -------------------------------------------------------------------------------------

    def poll(self, now: float) -> Proposal | None:
        """A new grouping, if it is time for one. To be asked after measurements, and at `next_deadline`."""
        if not self._known:
            return None
        if self._wish is not None and self._moved_on and self._gain(self._wish) < self._rules.threshold:
            self._wish = None
        if self._wish is None and self._moved_on and now >= self._next_look and self._drifted():
            self._look(now)
        self._moved_on = self._moved_on and self._wish is None and now < self._next_look
        return self._propose(now) if self._wish is not None and now >= self._due() else None

    def next_deadline(self) -> float | None:
        """When `poll` may next have a proposal, if nothing is measured before."""
        if self._wish is not None:
            return self._due()
        return self._next_look if self._moved_on and self._next_look > -math.inf else None

    def _due(self) -> float:
        return max(self._since + self._rules.hold, self._not_before)

    def _drifted(self) -> bool:
        """Whether a speed is another one than when groupings were last looked at, or members are."""
        if self._known.keys() != self._looked.keys():
            return True
        least = 1 + self._rules.tolerance
        return any(
            max(speed / self._looked[worker], self._looked[worker] / speed) >= least
            for worker, speed in self._known.items()
        )

    def _look(self, now: float) -> None:
        self._looked, self._next_look = dict(self._known), now + self._rules.hold
        found = self._choose(dict(self._known)).grouping
        if self._gain(found) >= self._rules.threshold:
            self._wish, self._since = found, now

    def _gain(self, grouping: Grouping) -> float:
        """By what share it is predicted to give more than the groups that there are."""
        here = self._score(self.grouping, self._known).samples_per_second
        return self._score(grouping, self._known).samples_per_second / here - 1 if here > 0 else math.inf

    def _propose(self, now: float) -> Proposal | None:
        choice = self._choose(dict(self._known))  # speeds have moved on since the wish
        gain = self._gain(choice.grouping)
        changed = self._changed()
        self._looked, self._next_look, self._wish = dict(self._known), now + self._rules.hold, None
        if gain < self._rules.threshold:
            return None
        here = self._score(self.grouping, self._known).samples_per_second
        there = self._score(choice.grouping, self._known).samples_per_second
        close = now - self._last < _CLOSE * self._pause
        longest = _LONGEST_PAUSE * self._rules.interval
        self._pause = min(2 * self._pause, longest) if close else max(self._pause / 2, self._rules.interval)
        self._last, self._not_before = now, now + self._pause
        before, self.grouping = self.grouping, choice.grouping
        self._grouped = dict(self._known)
        reason = (
            f"{changed}{show(choice.grouping, self._name)} is predicted to give {there:.4g} samples/s, "
            f"{show(before, self._name)} gives {here:.4g} ({gain:+.0%}, for "
            f"{format_seconds(now - self._since)}). The next change comes in {format_seconds(self._pause)} "
            "at the soonest."
        )
        return Proposal(self.grouping, reason)

    def _changed(self) -> str:
        """Whose speed is another one than when the groups were made, for the reason."""
        least = 1 + self._rules.tolerance
        parts = []
        for worker, speed in sorted(self._known.items()):
            before = self._grouped.get(worker, speed)
            if max(speed / before, before / speed) >= least:
                parts.append(
                    f"worker {self._name(worker)} computes {speed:.4g} samples/s, where it was {before:.4g}"
                )
        if not parts:
            return ""
        more = f", and so {len(parts) - 3} more" if len(parts) > 3 else ""
        return ", ".join(parts[:3]) + more + "; "
