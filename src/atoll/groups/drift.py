"""Regrouping during a run, as speeds drift and members leave or join.

A worker's speed is the median over a window of its iterations (computing without waiting), so single slow
steps do not matter. A new grouping is proposed if its predicted gain exceeds a threshold for long enough, and
not soon after the last one; the pause grows while regroupings are frequent. A worker that becomes slower for
good is so regrouped once, and one whose speed goes up and down causes no storm.
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

_CLOSE = 16.0  # in pauses: regroupings nearer together than this double the next pause
_LONGEST_PAUSE = 64.0  # in intervals


@dataclass(frozen=True)
class Rules:
    """Conditions for a new grouping. Spans in seconds, shares of samples per second."""

    threshold: float = 0.1  # least predicted gain, as a share
    hold: float = 30.0  # for which the gain must have lasted
    interval: float = 300.0  # least time between two regroupings; longer while they are frequent
    window: int = 16  # iterations over which a speed is the median
    tolerance: float = 0.1  # share by which a speed may change before groupings are scored again

    def __post_init__(self) -> None:
        if not (self.threshold > 0 and self.hold >= 0 and self.interval > 0 and self.tolerance > 0):
            raise UserError(f"threshold, interval and tolerance must be above 0, and hold 0 or more: {self}")
        if self.window < 2:
            raise UserError(f"a window of {self.window} iterations is too short for a median; give 2 or more")


@dataclass(frozen=True)
class Proposal:
    """Groups to use from the next iteration boundary on."""

    grouping: Grouping
    reason: str


class Regrouper:
    """The grouping of a run. Times are in the caller's seconds.

    A proposal counts as carried out: a group that does not come together is opened again
    (`groups/formation.py`). A restarted hub needs only the grouping and the known speeds: windows fill again.

    Args:
        choose: the chooser, given speeds, for any remaining members.
        score: the chooser's score of a grouping, given speeds.
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
        self._known = dict(speeds)  # from the probe, until a window is half full
        self._windows: dict[int, deque[float]] = {}  # seconds per sample
        self._grouped = dict(speeds)  # speeds when the groups were formed
        self._looked = dict(speeds)  # speeds when groupings were last scored
        self._next_look = -math.inf
        self._wish: Grouping | None = None  # a better grouping; `_since`: when it was found
        self._since = now
        self._moved_on = False  # speeds or members changed since the last poll
        self._not_before = -math.inf  # earliest time of the next regrouping
        self._last = -math.inf  # time of the last regrouping
        self._pause = self._rules.interval

    @property
    def speeds(self) -> dict[int, float]:
        """Present speed of each member, in samples per second."""
        return dict(self._known)

    # -- events -------------------------------------------------------------------------------------------

    def handle_measured(self, now: float, worker: int, seconds_per_sample: float) -> None:  # noqa: ARG002
        """Record the computing time of a member's iteration. Non-members are ignored.

        Raises UserError for an impossible time.
        """
        self._check_seconds(worker, seconds_per_sample)
        if worker not in self._known:
            return
        window = self._windows.setdefault(worker, deque(maxlen=self._rules.window))
        window.append(seconds_per_sample)
        if 2 * len(window) >= self._rules.window:
            self._known[worker] = 1 / median(window)
            self._moved_on = True

    def handle_left(self, now: float, worker: int) -> None:  # noqa: ARG002
        """Remove a member that died or left; its group continues without it."""
        if worker not in self._known:
            return
        del self._known[worker]
        self._windows.pop(worker, None)
        self.grouping = self.grouping.without(worker)
        self._wish, self._moved_on = None, True

    def handle_joined(self, now: float, worker: int, seconds_per_sample: float) -> Proposal:  # noqa: ARG002
        """Place a new worker, with its probe's measurement: in the group where it is predicted to help most,
        or alone.

        The other workers stay in their groups. Raises UserError for a member, or an impossible time.
        """
        if worker in self._known:
            raise UserError(f"worker {self._name(worker)} is in a group already")
        self._check_seconds(worker, seconds_per_sample)
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
            f"worker {self._name(worker)} joins with {1 / seconds_per_sample:.4g} samples/s and is best "
            f"{beside}: {scores[best]:.4g} samples/s predicted in all"
        )
        return Proposal(self.grouping, reason)

    def _check_seconds(self, worker: int, seconds_per_sample: float) -> None:
        if not (math.isfinite(seconds_per_sample) and seconds_per_sample > 0):
            raise UserError(
                f"worker {self._name(worker)} reports {seconds_per_sample:g} s a sample; "
                "it must be finite and above 0"
            )

    # -- decisions ----------------------------------------------------------------------------------------

    def poll(self, now: float) -> Proposal | None:
        """Return a new grouping if it is time for one. Call it after measurements, and at `next_deadline`."""
        if not self._known:
            return None
        if self._wish is not None and self._moved_on and self._gain(self._wish) < self._rules.threshold:
            self._wish = None
        if self._wish is None and self._moved_on and now >= self._next_look and self._drifted():
            self._look(now)
        self._moved_on = self._moved_on and self._wish is None and now < self._next_look
        return self._propose(now) if self._wish is not None and now >= self._due() else None

    def next_deadline(self) -> float | None:
        """Return when `poll` may next have a proposal without new measurements; None for never."""
        if self._wish is not None:
            return self._due()
        return self._next_look if self._moved_on and self._next_look > -math.inf else None

    def _due(self) -> float:
        return max(self._since + self._rules.hold, self._not_before)

    def _drifted(self) -> bool:
        """Return True if a speed or the members changed since groupings were last scored."""
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
        """Return the predicted gain over the present groups, as a share."""
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
        """Describe the workers whose speeds changed since the groups were formed, for the reason."""
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
