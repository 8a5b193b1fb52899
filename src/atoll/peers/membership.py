"""The views of a node, and the node's part in changing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from atoll.peers.change import Change
from atoll.peers.contributions import Contributions
from atoll.peers.entrance import Entrance
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Removed, ViewChanged
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import Due, NodeStanding, name_of
from atoll.peers.suspicion import Suspicion
from atoll.peers.synchronise import Synchronisation
from atoll.peers.views import Transition, ViewChangeSettings
from atoll.wire.peers import WITNESS
from atoll.wire.peerviews import Accept, Prepare, Promised, Report, View, ViewMessage


class OfView(Protocol):
    """A part of a node that is reset with each view."""

    def install(self, now: float, /) -> None: ...


class Membership:
    """The changes of views, one after the other. `parts` are reset with each view, in their order."""

    def __init__(
        self,
        standing: NodeStanding,
        contributions: Contributions,
        entrance: Entrance,
        suspicion: Suspicion,
        sync: Synchronisation,
        parts: Sequence[OfView],
        settings: NodeSettings,
        rng: np.random.Generator,
        out: Outbox,
        due: Due,
    ) -> None:
        self._standing, self._contributions, self._entrance = standing, contributions, entrance
        self._suspicion, self._sync, self._parts = suspicion, sync, parts
        self._settings, self._rng, self._out, self._due = settings, rng, out, due
        self._change: Change | None = None

    @property
    def is_ready(self) -> bool:
        """True if this node holds all that its view began with, and so votes on the next."""
        return self._standing.is_whole and self._change is not None and self._change.ready

    @property
    def deadline(self) -> float:
        """Time at which to poll the change of the view; infinity: never."""
        return self._change.deadline if self._change is not None else math.inf

    # -- what others say of views -------------------------------------------------------------------------

    def may_say(self, sender: int, message: ViewMessage) -> bool:
        """True if a voter can send this message: only the members of a later view can ask about that view."""
        if isinstance(message, Promised):
            return message.report is None or self._contributions.is_possible(message.report)
        if isinstance(message, (Prepare, Accept)) and message.view.number > self._standing.view.number:
            is_voter = any(each.life.node == sender for each in message.view.members)
            return is_voter and self._descends(message.view)
        return True

    def may_tell(self, sender: int, view: View) -> bool:
        """True if `sender` can know of a decided view: the hub can, a node that was a member up to it,
        and, for another founding of the run, its members."""
        if sender == WITNESS or view.founding == self._standing.view.founding:
            return sender == WITNESS or sender in view.last
        return any(each.life.node == sender for each in view.members)

    def handle_message(self, now: float, sender: int, message: ViewMessage) -> None:
        """Handle a message of another voter that passed `may_say`."""
        if self._change is not None:
            report = self._contributions.report(live=True)
            self._change.has_state = self._entrance.has_state
            self._after(now, report, self._change.handle_message(now, sender, message, report))

    def _descends(self, view: View) -> bool:
        """True if a view can come after this node's own: a view remembers all incarnations before it."""
        own = self._standing.view
        if view.founding != own.founding:
            return view.founding > own.founding
        return all(view.last.get(node, -1) >= incarnation for node, incarnation in own.last.items())

    # -- what this node does for the next -----------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Go on with the change of the view."""
        change = self._change
        if change is not None and (
            now >= change.deadline or (self._due.change and (change.promised or not change.ready))
        ):
            self._due.change = False
            change.settings.answer = self._sync.answer.seconds
            change.settings.backoff = self._sync.backoff.seconds
            change.has_state = self._entrance.has_state
            report = self._contributions.report(live=True)
            self._after(now, report, change.poll(now, report))

    def wish(self, now: float) -> None:
        """Update whom this node would remove, and who wants to join."""
        if not self._suspicion.is_due(now):
            return
        old, wish = self._suspicion.wish, self._suspicion.look(now)
        if (wish.remove.keys(), wish.join) == (old.remove.keys(), old.join) or self._change is None:
            return
        for node in wish.remove.keys() - old.remove.keys():
            self._out.note("suspected", f"node {node}", wish.remove[node])
        self._suspicion.wish = wish
        report = self._contributions.report(live=True)
        self._change.has_state = self._entrance.has_state
        self._after(now, report, self._change.handle_wish(now, wish, report))

    def _after(self, now: float, report: Report, step: Transition) -> None:
        change, contributions = self._change, self._contributions
        assert change is not None
        if change.promised:
            contributions.freeze(report)
        contributions.wanted = change.wanted
        self._due.missing |= bool(change.wanted)
        for each in change.wanted:
            if each.held.life == self._standing.life:
                contributions.pass_meetings(each.held.meetings)
        for to, message in step.sends:
            self._out.send(to, message)
        for reason in step.reasons:
            self._out.note("view", f"after {self._standing.view.number}", reason)
        if step.decided is not None:
            self.learn(step.decided, now)

    # -- a view that is decided ---------------------------------------------------------------------------

    def learn(self, view: View, now: float) -> None:
        """Handle a decided view: install it, or leave if this node is not in it."""
        at = self._standing
        if at.is_over or (view.founding, view.number) <= (at.view.founding, at.view.number):
            return
        if not self._descends(view):
            return
        if self._entrance.asks:
            entry = self._entrance.entry(view)
            if entry is not None:
                at.life, at.iteration = entry.life, entry.first
                ledger = self._contributions.iterations
                ledger.done = ledger.ordered = entry.base
                self.install(now, view, entry.base)
                self._entrance.ask_for_state()
        elif any(member.life == at.life for member in view.members):
            self.install(now, view, None)
            if at.source is not None and at.source not in self._contributions.others():
                self._entrance.ask_for_state()
        else:
            at.view = view
            self.leave(f"view {view.number} was decided without it")

    def leave(self, reason: str) -> None:
        """Stop being a member."""
        at = self._standing
        at.is_member, at.is_over = False, True
        self._out.add(Removed(at.view, f"{name_of(at.life)}: {reason}"))

    def install(self, now: float, view: View, base: int | None) -> None:
        """Be in `view` from now on; `base` as in Ledger.install."""
        at = self._standing
        at.view, at.is_member = view, True
        self._contributions.install(view, base)
        waits = ViewChangeSettings(
            self._sync.answer.seconds, self._sync.backoff.seconds, self._settings.stale_max + 1
        )
        self._change = Change(at.life.node, view, waits, self._rng)
        for part in self._parts:
            part.install(now)
        self._due.report = self._due.missing = self._due.change = True
        self._due.suspects_at = -math.inf
        self._out.add(ViewChanged(view, f"view {view.number} is decided"))
