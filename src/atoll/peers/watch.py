"""Liveness and progress of the other members: which ones a node would remove."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.liveness import AGAIN_SECONDS, Judgement
from atoll.core.units import format_seconds
from atoll.peers.pace import Limit
from atoll.peers.settings import NodeSettings
from atoll.wire.peerviews import Life

SILENT, IDLE = "silent", "no iteration"  # what a member lacks: messages, or iterations
# Judges the processes of a member that lacks something for so many seconds; the last number is the longest
# that is tolerated of a member that computes.
Judge: TypeAlias = Callable[[Life, str, float, float], Judgement]


def unseen(_life: Life, _lack: str, _seconds: float, _most: float) -> Judgement:
    """Judge a member about whose process nothing is known."""
    return Judgement(False)


@dataclass
class _Seen:
    """The state of another member, as far as known."""

    heard: float  # when
    silence: Limit
    progress: Limit
    iteration: int = 0  # its k, as last reported
    advanced: float = 0.0  # when that rose
    applied: int = 0  # its W, as last reported
    moved: float = 0.0  # when k or W rose
    finished: bool = False
    whole: bool = False  # the member has a state, as far as is known
    spared: float = -math.inf  # until when its silence is tolerated, since its process lives
    starved: float = -math.inf  # until when it may make no iteration, since its processes get no CPU

    @property
    def silent_at(self) -> float:
        """Time at which the member counts as gone, if it stays silent until then."""
        return max(self.heard + self.silence.seconds, self.spared)


class Watch:
    """Watches the other members of the view, by life.

    Two limits follow each member's measurements: how long it may be silent, and how long it may make no
    iteration while this node waits for one. `judge` looks at the processes of members that exceed a limit.
    """

    def __init__(self, settings: NodeSettings, judge: Judge = unseen) -> None:
        self._settings, self._judge = settings, judge
        self._seen: dict[Life, _Seen] = {}
        self._checked = -math.inf  # when it was last asked for suspects

    def install(self, now: float, others: Iterable[Life]) -> None:
        """Set the other members; new ones get all the time that is allowed."""
        silence, progress = self._settings.silence, self._settings.progress
        new = {
            life: _Seen(now, Limit("silence", *silence), Limit("progress", *progress), 0, now, 0, now)
            for life in others
        }
        self._seen = {life: self._seen.get(life, each) for life, each in new.items()}

    def handle_heard(self, now: float, node: int) -> None:
        """Record that something came from a member."""
        for life, seen in self._seen.items():
            if life.node == node:
                seen.silence.note(now - seen.heard, node)
                seen.heard = now

    def handle_absence(self, now: float, seconds: float) -> None:
        """Extend all members' time: this node itself has stood still for so many seconds."""
        for seen in self._seen.values():
            seen.heard = min(now, seen.heard + seconds)

    def handle_iteration(self, now: float, life: Life, iteration: int, applied: int = 0) -> None:
        """Record a member's k, as reported by itself or others, and its W if known."""
        seen = self._seen.get(life)
        if seen is not None and iteration > seen.iteration:
            seen.progress.note((now - seen.advanced) / (iteration - seen.iteration), life.node)
            seen.iteration, seen.advanced, seen.moved = iteration, now, now
        if seen is not None and applied > seen.applied:
            seen.applied, seen.moved = applied, now

    def handle_finished(self, life: Life) -> None:
        if life in self._seen:
            self._seen[life].finished = True

    def handle_whole(self, life: Life) -> None:
        if life in self._seen:
            self._seen[life].whole = True

    def without_state(self) -> set[int]:
        """Return the nodes of members that have no state yet, as far as is known."""
        return {life.node for life, seen in self._seen.items() if not seen.whole}

    def iteration(self, life: Life) -> int:
        """Return another member's k."""
        return self._seen[life].iteration

    def is_gone(self, now: float, life: Life) -> bool:
        """True if a member has finished and is silent."""
        seen = self._seen[life]
        return seen.finished and now >= seen.silent_at

    def suspects(
        self,
        now: float,
        awaited: Mapping[Life, float],
        absent: Mapping[Life, float],
        meeting: Collection[Life] = (),
    ) -> dict[int, str]:
        """Return the nodes to remove, with reasons.

        Args:
            now: the present time, in seconds.
            awaited: members whose next iteration this node awaits, with the time since when.
            absent: members that a meeting awaits, with the time since when.
            meeting: members that wait in a meeting themselves. They are not suspected of delay while messages
                arrive.
        """
        found: dict[int, str] = {}
        self._checked = now
        for life, seen in self._seen.items():
            if now >= seen.silent_at and (why := self._silence_of(now, life, seen)):
                found[life.node] = why
        for life, since in awaited.items():
            seen = self._seen[life]
            idle = now - max(seen.moved, since)
            if seen.finished:
                found.setdefault(life.node, "its script has ended")
            elif life not in meeting and idle >= self._allowed(seen) and not self._spares(now, life, idle):
                why = f"no iteration for {format_seconds(idle)}; {seen.progress.reason()}"
                found.setdefault(life.node, why)
        for life, since in absent.items():
            seen = self._seen[life]
            idle, allowed = now - max(seen.moved, since), self._allowed(seen, self._settings.progress[1])
            if seen.finished:
                found.setdefault(life.node, "its script has ended")
            elif life not in meeting and idle >= allowed and not self._spares(now, life, idle):
                found.setdefault(life.node, f"for {format_seconds(idle)} it has come to no meeting")
        return found

    def _silence_of(self, now: float, life: Life, seen: _Seen) -> str:
        """Return why a silent member is to be removed; empty while its process lives."""
        judgement = self._judge(life, SILENT, now - seen.heard, seen.silence.high)
        if judgement.alive:
            seen.spared = now + AGAIN_SECONDS
            return ""
        saw = f"{judgement.why}; " if judgement.why else ""
        return f"silent for {format_seconds(now - seen.heard)}; {saw}{seen.silence.reason()}"

    def _spares(self, now: float, life: Life, idle: float) -> bool:
        """True if a member that is heard but makes no iteration is spared, since its processes get no CPU."""
        seen = self._seen[life]
        if now >= seen.starved and self._judge(life, IDLE, idle, 0.0).alive:
            seen.starved = now + AGAIN_SECONDS
        return now < seen.starved

    def _allowed(self, seen: _Seen, usual: float = 0.0) -> float:
        """Return how long a member may stand still while others wait for it: its own limit, or `usual`.

        A member that waits itself gets more time than any limit, since the members that it waits for are to
        go first.
        """
        waits = seen.iteration - seen.applied > self._settings.stale_max
        return sum(self._settings.progress) if waits else usual or seen.progress.seconds

    def deadline(self, awaited: Mapping[Life, float], absent: Mapping[Life, float]) -> float:
        """Return the time at which the next member not suspected yet would be."""
        due = [seen.silent_at for seen in self._seen.values()]
        for life, since in awaited.items():
            seen = self._seen[life]
            due.append(max(max(seen.moved, since) + self._allowed(seen), seen.starved))
        for life, since in absent.items():
            seen = self._seen[life]
            allowed = self._allowed(seen, self._settings.progress[1])
            due.append(max(max(seen.moved, since) + allowed, seen.starved))
        return min((when for when in due if when > self._checked), default=math.inf)
