"""A node's wish for the next view: members to remove, and joiners to let in."""

from __future__ import annotations

import math

from atoll.peers.contributions import Contributions
from atoll.peers.joiners import Joiners
from atoll.peers.ownscript import OwnScript
from atoll.peers.progress import Progress
from atoll.peers.scripts import Scripts
from atoll.peers.standing import Due, NodeStanding
from atoll.peers.views import Wish
from atoll.peers.watch import Watch
from atoll.wire.peerviews import Life

_OVERTAKEN = "it came in while a checkpoint was loaded"


class Suspicion:
    """Decides on the node's wish for the next view, `wish`."""

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        script: OwnScript,
        scripts: Scripts,
        progress: Progress,
        watch: Watch,
        joiners: Joiners,
        due: Due,
    ) -> None:
        self._standing, self._contributions, self._script = standing, contributions, script
        self._scripts, self._progress, self._watch, self._joiners = scripts, progress, watch, joiners
        self._due = due
        self._overtaken: set[Life] = set()  # newcomers whose state predates a loaded checkpoint
        self.wish = Wish()

    def install(self, now: float, /) -> None:
        """Begin a view."""
        others = self._contributions.others()
        self.wish = Wish()
        self._overtaken &= set(others)
        self._scripts.keep(others)
        self._watch.install(now, others)

    def handle_replaced(self) -> None:
        """Record that a checkpoint was loaded: newcomers that have not begun must join once more."""
        at = self._standing
        new = {each.life for each in at.view.members if each.token and each.first >= at.iteration}
        if at.is_member and not self._overtaken >= new:
            self._overtaken |= new
            self._due.suspects_at = -math.inf

    def is_due(self, now: float) -> bool:
        return bool(now >= self._due.suspects_at or self._joiners.nodes or self.wish.remove or self.wish.join)

    def look(self, now: float) -> Wish:
        """Return the changes that this node wishes now."""
        awaited, absent = self._awaited(), dict.fromkeys(self.absent(), self._script.met_since)
        meeting = self._scripts.in_meetings() - self._standing.newcomers
        suspects = self._watch.suspects(now, awaited, absent, meeting)
        remove = {life.node: _OVERTAKEN for life in self._overtaken} | suspects
        self._due.suspects_at = self._watch.deadline(awaited, absent)
        joiners = self._joiners.latest(now)
        if self._watch.without_state() - remove.keys() - self._joiners.nodes:
            joiners = ()  # one newcomer at a time: otherwise a majority might have no state
        return Wish(remove, joiners)

    def _awaited(self) -> dict[Life, float]:
        """Return the members whose next iteration this node's devices or script await, with the time since
        when."""
        awaited: dict[Life, float] = {}
        script, iterations = self._script, self._contributions.iterations
        if script.wanted is not None:
            # Not W's rise alone: after a removal many iterations are handed out at once, and applied later.
            since = max(script.wanted_since, self._progress.ordered_at, self._progress.risen)
            number = iterations.ordered
            for life in self._contributions.others():  # one that exists is on its way, or fetched
                has_made = self._watch.iteration(life) > number or iterations.prefix[life] > number
                if iterations.firsts[life] <= number and not has_made:
                    awaited[life] = since
        if script.meeting is not None:  # before they come to it, they have iterations to make
            for life in self.absent():
                if self._watch.iteration(life) < script.meeting[1]:
                    awaited[life] = script.met_since
        return awaited

    def absent(self) -> list[Life]:
        """Return the members that have not come to the meeting that this node is in."""
        if self._script.meeting is None:
            return []
        number, meetings = self._script.meeting[0], self._contributions.meetings
        lives = [life for life in meetings.parties(*self._script.meeting) if life in meetings.acks]
        return [life for life in lives if meetings.prefix[life] <= number]
