"""A node's reports to the others, and its handling of theirs."""

from __future__ import annotations

import math

from atoll.peers.contributions import Contributions
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Differ, Finished
from atoll.peers.ownscript import OwnScript
from atoll.peers.scripts import Scripts
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import Due, NodeStanding, name_of
from atoll.peers.watch import Watch
from atoll.wire.peers import NodeReport, ScriptsDiffer
from atoll.wire.peerviews import Life, Report, ViewDecided


class Reporting:
    """Sends the node's reports: one when an iteration has become whole, and at least one each heartbeat
    (the next at `heartbeat_at`)."""

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        script: OwnScript,
        scripts: Scripts,
        watch: Watch,
        settings: NodeSettings,
        out: Outbox,
        due: Due,
        now: float,
    ) -> None:
        self._standing, self._contributions = standing, contributions
        self._script, self._scripts, self._watch = script, scripts, watch
        self._settings, self._out, self._due = settings, out, due
        self._whole = -1  # iterations below this were acknowledged by a report
        self.heartbeat_at = now
        self._newest_told: dict[int, float] = {}  # by node, when it was last notified of the view

    def poll(self, now: float) -> None:
        """Send a report if one is due."""
        ledger = self._contributions.iterations
        needed = [prefix for life, prefix in ledger.prefix.items() if prefix < ledger.cuts[life]]
        whole = min(needed, default=self._whole)
        if whole > self._whole and self._contributions.frozen is None:
            self._whole, self._due.report = whole, True
        if self._due.report or now >= self.heartbeat_at:
            self._due.report = False
            self.heartbeat_at = now + self._settings.heartbeat
            self._out.send_all(self._nodes, self.report())

    @property
    def _nodes(self) -> list[int]:
        return [life.node for life in self._contributions.others()]

    def report(self) -> NodeReport:
        return NodeReport(
            report=self._contributions.report(),
            finished=self._script.finished_at < math.inf,
            whole=self._standing.is_whole,
            waits=self._script.waits(),
        )

    def is_current(self, now: float, sender: int, report: Report) -> bool:
        """True if a report is of a member of this view, in this view.

        An older report is answered with this view. The sender of a newer report gets this node's report, and
        answers with its view.
        """
        at = self._standing
        if not at.is_member or report.life.node != sender:
            return False
        if report.view == at.view.number and report.life in self._contributions.iterations.acks:
            return self._contributions.is_possible(report)
        if now >= self._newest_told.get(sender, -math.inf) + self._settings.heartbeat / 2:
            self._newest_told[sender] = now
            is_newer = report.view > at.view.number
            self._out.send(sender, self.report() if is_newer else ViewDecided(view=at.view))
        return False

    # -- scripts that wait for each other -----------------------------------------------------------------

    def handle_report(self, message: NodeReport) -> None:
        """Store where a member's script waits, if it does."""
        life = message.report.life
        first = self._contributions.iterations.firsts[life]
        if self._scripts.note(life, message, first):
            self._due.suspects_at = -math.inf

    def compare_scripts(self) -> None:
        """End all scripts if the members' scripts wait for each other in vain."""
        waits, others = self._script.waits(), self._contributions.others()
        if waits is None or not others:
            return
        first = self._contributions.iterations.firsts[self._standing.life]
        own = self.report()
        if line := self._scripts.mismatch(others, own, first, self._standing.newcomers):
            self.tell_differ(line)

    def tell_differ(self, line: str) -> None:
        """End the run here and at the others: scripts stand at inconsistent places, which `line` names."""
        if not self._standing.is_over:
            differ = ScriptsDiffer(report=self._contributions.report(), line=line)
            self._out.send_all(self._nodes, differ)
            self.differ(line)

    def differ(self, line: str) -> None:
        """End the run here."""
        if not self._standing.is_over:
            self._standing.is_over = True
            self._out.add(Differ(line))

    # -- the end ------------------------------------------------------------------------------------------

    @property
    def ends_at(self) -> float:
        """Time at which a node whose script has ended goes at the latest; infinity: its script goes on."""
        return self._script.finished_at + self._settings.linger

    def end(self, now: float) -> None:
        """Finish, once all others have what this node has made, or are gone."""
        if self._script.finished_at == math.inf:
            return
        missing = [life for life in self._contributions.others() if not self._has_all(now, life)]
        if missing and now < self.ends_at:
            return
        names = ", ".join(name_of(life) for life in missing)
        # Removed nodes get the report too: those that wait to join again must learn that the run is over.
        ever = {*self._standing.view.last, *self._nodes} - {self._standing.life.node}
        self._out.send_all(sorted(ever), self.report())
        self._out.add(Finished(f"{names} did not take all in time" if missing else "all have taken all"))
        self._standing.is_over = True

    def _has_all(self, now: float, life: Life) -> bool:
        ledgers = self._contributions.iterations, self._contributions.meetings
        floors = tuple(ledger.floors[life] for ledger in ledgers)
        made = self._standing.iteration, self._contributions.met
        return floors >= made or self._watch.is_gone(now, life)
