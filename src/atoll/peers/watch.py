"""Who is heard, who goes on, and whom a node would have removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.liveness import AGAIN_SECONDS, Judgement
from atoll.core.units import format_seconds
from atoll.peers.pace import Limit
from atoll.peers.settings import Settings
from atoll.wire.peerviews import Life

SILENT, IDLE = "silent", "no iteration"  # what a member lacks: words of it, or iterations
# Judges the processes of a member that lacks something for so many seconds; the last number is the longest
# that is borne of one that computes.
Judge: TypeAlias = Callable[[Life, str, float, float], Judgement]


def unseen(_life: Life, _lack: str, _seconds: float, _most: float) -> Judgement:
    """Judge a member of whose process nothing is known."""
    return Judgement(False)


@dataclass
class _Seen:
    """What is known of another member."""

    heard: float  # when
    silence: Limit
    progress: Limit
    iteration: int = 0  # its k, as it last said
    advanced: float = 0.0  # when that rose
    applied: int = 0  # its W, as it last said
    moved: float = 0.0  # when k or W rose
    finished: bool = False
    whole: bool = False  # it has a state, as far as is known
    spared: float = -math.inf  # until when its silence is borne, for its process lives
    starved: float = -math.inf  # until when it may make no iteration, for its processes get no CPU

    @property
    def silent_at(self) -> float:
        """When it counts as gone, if nothing is heard of it until then."""
        return max(self.heard + self.silence.seconds, self.spared)


class Watch:
    """The other members of the view, by life. Two limits follow what was measured of each: how long it may be
    silent, and how long it may make no iteration while this node waits for one of it. `judge` looks at the
    process of one that is silent for too long."""

    def __init__(self, settings: Settings, judge: Judge = unseen) -> None:
        self._settings, self._judge = settings, judge
        self._seen: dict[Life, _Seen] = {}
        self._checked = -math.inf  # when it was last asked for suspects

    def install(self, now: float, others: Iterable[Life]) -> None:
        """These are the others now; one that is new has all the time that is allowed."""
        silence, progress = self._settings.silence, self._settings.progress
        new = {
            life: _Seen(now, Limit("silence", *silence), Limit("progress", *progress), 0, now, 0, now)
            for life in others
        }
        self._seen = {life: self._seen.get(life, each) for life, each in new.items()}

    def handle_heard(self, now: float, node: int) -> None:
        """Something came from a member."""
        for life, seen in self._seen.items():
            if life.node == node:
                seen.silence.note(now - seen.heard, node)
                seen.heard = now

    def handle_absence(self, now: float, seconds: float) -> None:
        """This node itself has stood still for so long: meanwhile nobody was silent."""
        for seen in self._seen.values():
            seen.heard = min(now, seen.heard + seconds)

    def handle_iteration(self, now: float, life: Life, iteration: int, applied: int = 0) -> None:
        """Its k, as itself or others have it, and its W, where that is known."""
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
        """The nodes of newcomers that have no state yet, as far as is known."""
        return {life.node for life, seen in self._seen.items() if not seen.whole}

    def iteration(self, life: Life) -> int:
        """The k of another."""
        return self._seen[life].iteration

    def is_gone(self, now: float, life: Life) -> bool:
        """Whether a member has finished and is silent."""
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
        """Return why a silent member is to be removed; empty where its process lives, and is waited for."""
        judgement = self._judge(life, SILENT, now - seen.heard, seen.silence.high)
        if judgement.alive:
            seen.spared = now + AGAIN_SECONDS
            return ""
        saw = f"{judgement.why}; " if judgement.why else ""
        return f"silent for {format_seconds(now - seen.heard)}; {saw}{seen.silence.reason()}"

    def _spares(self, now: float, life: Life, idle: float) -> bool:
        """Whether a member that is heard, and makes no iteration, is waited for since it gets no CPU."""
        seen = self._seen[life]
        if now >= seen.starved and self._judge(life, IDLE, idle, 0.0).alive:
            seen.starved = now + AGAIN_SECONDS
        return now < seen.starved

    def _allowed(self, seen: _Seen, usual: float = 0.0) -> float:
        """How long a member may stand still that others wait for: its own limit, or `usual`. One that waits
        itself has longer than any limit, for those whom it waits for are to go first."""
        waits = seen.iteration - seen.applied > self._settings.stale_max
        return sum(self._settings.progress) if waits else usual or seen.progress.seconds

    def deadline(self, awaited: Mapping[Life, float], absent: Mapping[Life, float]) -> float:
        """When the next of them would be suspected, who is not yet."""
        due = [seen.silent_at for seen in self._seen.values()]
        for life, since in awaited.items():
            seen = self._seen[life]
            due.append(max(max(seen.moved, since) + self._allowed(seen), seen.starved))
        for life, since in absent.items():
            seen = self._seen[life]
            allowed = self._allowed(seen, self._settings.progress[1])
            due.append(max(max(seen.moved, since) + allowed, seen.starved))
        return min((when for when in due if when > self._checked), default=math.inf)
