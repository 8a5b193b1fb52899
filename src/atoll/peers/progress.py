"""Handing out iterations to apply, meetings that take place, and grants to compute."""

from __future__ import annotations

import math

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Apply, Grant, Meet
from atoll.peers.ownscript import OwnScript
from atoll.peers.standing import Due, NodeStanding


class Progress:
    """Hands out what may be done now. `risen`: time at which W last rose; `ordered_at`: time at which the
    latest iteration was handed out."""

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        script: OwnScript,
        out: Outbox,
        due: Due,
        now: float,
    ) -> None:
        self._standing, self._contributions, self._script = standing, contributions, script
        self._out, self._due = out, due
        self.risen = self.ordered_at = now

    def handle_applied(self, now: float, iteration: int) -> float:
        """Record that an Apply is done; return the seconds since the one before."""
        self._contributions.iterations.done = iteration + 1
        since, self.risen = now - self.risen, now
        self._due.suspects_at, self._due.missing = -math.inf, True
        return since

    def poll(self, now: float) -> None:
        """Hand out the iterations to apply, and the meeting that takes place."""
        self._apply(now)
        self._meet()

    def _apply(self, now: float) -> None:
        """Hand out the iterations of which this node holds every contribution and a majority is known to
        hold each."""
        ledger = self._contributions.iterations
        while self._standing.is_whole and (keys := self._contributions.next_iteration()) is not None:
            number = ledger.ordered
            ledger.ordered, self.ordered_at = number + 1, now
            majority = len(ledger.members) // 2 + 1
            members = f"{len(ledger.members)} members of view {self._standing.view.number}"
            reason = f"at least {majority} of the {members} hold each of {len(keys)}"
            self._out.add(Apply(number, keys, reason))

    def _meet(self) -> None:
        if self._script.meeting is None:
            return
        number, ledger = self._script.meeting[0], self._contributions.meetings
        keys = self._contributions.meeting(*self._script.meeting)
        if keys is None:
            return
        ledger.done = ledger.ordered = number + 1
        self._script.met()
        self._due.report = True
        reason = f"a majority of view {self._standing.view.number} holds each of {len(keys)}"
        self._out.add(Meet(number, keys, reason))

    def grant(self) -> None:
        """Let the devices compute, once the global iteration that they need is applied."""
        wanted, applied = self._script.wanted, self._contributions.applied
        if wanted is not None and applied >= wanted[1] and self._standing.is_whole:
            iteration, least = wanted
            self._script.granted()
            reason = f"M_i is at {applied}, and iteration {iteration} needs {least}"
            self._out.add(Grant(iteration, applied, reason))
