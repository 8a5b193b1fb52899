"""The contributions of a view's members, as one node knows them: those that it holds and those that others
hold."""

from __future__ import annotations

import math

from atoll.peers.ledger import Ledger
from atoll.peers.outbox import Outbox
from atoll.peers.outputs import Drop
from atoll.peers.settings import NodeSettings
from atoll.peers.standing import Due, NodeStanding, name_of
from atoll.peers.views import Fetch
from atoll.wire.base import MOST_AHEAD
from atoll.wire.peers import Key
from atoll.wire.peerviews import Held, Life, Report, View

MOST_MEETINGS = 256  # meetings ahead of this node whose parts are taken; scripts wait in the next one


class Contributions:
    """The iterations and meeting parts of all contributors.

    `wanted` is what the change of the view waits for. `frozen` is what this node acknowledges since it
    promised a change; None: all that it holds. `has_met`: this node has been in a meeting of its own.
    """

    def __init__(self, standing: NodeStanding, settings: NodeSettings, out: Outbox, due: Due) -> None:
        self.iterations = Ledger("iterations", standing.iteration)
        self.meetings = Ledger("meetings")
        self.wanted: tuple[Fetch, ...] = ()
        self.frozen: dict[Life, Held] | None = None
        self.has_met = False
        self._standing, self._settings, self._out, self._due = standing, settings, out, due
        self._impossible: set[Life] = set()  # members whose reports cannot be true

    def install(self, view: View, base: int | None) -> None:
        """Begin a view; `base` as in Ledger.install."""
        me = self._standing.life
        dropped = self.iterations.install(view, me, base) + self.meetings.install(view, me, base)
        if dropped:
            self._out.add(Drop(tuple(dropped)))
        self.frozen, self.wanted = None, ()
        self._impossible.clear()

    @property
    def applied(self) -> int:
        """W_i: iterations whose Apply is done."""
        return self.iterations.done

    @property
    def met(self) -> int:
        """Number of meetings that have taken place at this node."""
        return self.meetings.done

    def ledger(self, key: Key) -> Ledger:
        return self.iterations if key.stream == "iterations" else self.meetings

    def others(self) -> list[Life]:
        """The other members of the view."""
        return [life for life in self.iterations.members if life != self._standing.life]

    def applied_by(self, life: Life) -> int:
        """Lower bound of the iterations that another member has applied: its own report, or what it needed
        to make its newest iteration."""
        made, told = self.iterations.prefix[life], self.iterations.floors[life]
        has_made = made > self.iterations.firsts[life]
        return max(told, made - 1 - self._settings.stale_max) if has_made else told

    # -- what is taken ------------------------------------------------------------------------------------

    def refusal(self, key: Key) -> str:
        """Return why the payload of `key` is not taken now, in one line; empty if it is taken.

        Ask before any allocation. A payload refused for want of room is requested again later; iteration W_i
        is never refused for want of room.
        """
        if (useless := self.useless(key)) or key.number < self.room(key.life, self.ledger(key)):
            return useless
        return (
            f"no room for iteration {key.number} of {name_of(key.life)} while {self.applied} is not applied"
        )

    def useless(self, key: Key) -> str:
        """Return why the payload of `key` will never be taken; empty if it may be."""
        ledger = self.ledger(key)
        if key.life not in ledger.cuts or not self._standing.is_member:
            return f"{name_of(key.life)} is in no view that is known here"
        if key.number >= ledger.cuts[key.life]:
            return f"of {name_of(key.life)} only what is below {ledger.cuts[key.life]} counts"
        if ledger.is_settled(key) or (key.stream == "iterations" and key.number < ledger.firsts[key.life]):
            return f"{key.stream} {key.number} of {name_of(key.life)} is not needed"
        return ""

    def room(self, life: Life, ledger: Ledger) -> float:
        """Return the number below which a contributor's iterations or meetings are taken."""
        if ledger is self.meetings:
            return MOST_MEETINGS + (self.met if self.has_met else ledger.prefix[life])
        asked = max((each.held.iterations for each in self.wanted if each.held.life == life), default=0)
        return max(self.applied + self._settings.slots, asked)

    def hold(self, key: Key) -> None:
        """Record that the payload of `key` is here."""
        self.ledger(key).hold(key)
        self._due.change = True

    def settle(self, iteration: int) -> None:
        """Record that this node has the state of global iteration `iteration` and needs nothing below."""
        ledger = self.iterations
        ledger.done = ledger.ordered = iteration
        for life in ledger.prefix:
            ledger.settle(life, iteration)

    def meet_first(self, number: int) -> None:
        """Set this node's first meeting to `number`. Other contributors' earlier parts stay held: votes
        depend on them."""
        self.meetings.done = self.meetings.ordered = number
        self.meetings.settle(self._standing.life, number)
        self.has_met = True

    def pass_meetings(self, below: int) -> None:
        """Settle all meetings below `below`, which somebody reports of a newcomer whose script has come to no
        meeting yet.

        Those meetings are over for all who were in them (`Dropping`), so nobody keeps their parts, but the
        next view may still begin with them.
        """
        if self.has_met or below <= self.meetings.prefix[self._standing.life]:
            return
        for life in self.meetings.prefix:
            self.meetings.settle(life, below)
        self._due.change = self._due.missing = True

    # -- reports ------------------------------------------------------------------------------------------

    def freeze(self, report: Report) -> None:
        """Acknowledge no more than `report` until the next view."""
        if self.frozen is None:
            self.frozen = {held.life: held for held in report.held}

    def report(self, live: bool = False) -> Report:
        """Return this node's report; unless `live`, without what it has promised not to acknowledge."""
        if self.frozen is not None and not live:
            held = tuple(self.frozen.values())
        else:
            meetings = self.meetings.prefix
            held = tuple(
                Held(life, prefix, meetings[life]) for life, prefix in self.iterations.prefix.items()
            )
        met, at = self.met if self.has_met else 0, self._standing
        return Report(at.life, at.view.number, at.iteration, self.applied, met, held)

    def shared(self, ledger: Ledger, life: Life) -> int:
        """Return the number below which a majority is known to hold all; of this node's holding, only what
        it may acknowledge counts."""
        own = ledger.prefix[life]
        if self.frozen is not None:
            held = self.frozen[life]
            own = held.iterations if ledger is self.iterations else held.meetings
        return ledger.shared(life, own)

    def is_possible(self, report: Report) -> bool:
        """True if a member of this view can have the counts of `report`.

        Nothing is applied without this node's contribution, so nobody is far ahead of it; MOST_AHEAD leaves
        room for every honest report. An impossible report would move what this node waits for out of reach:
        it is not taken, and noted once per member.
        """
        own = self._standing.iteration
        counts = [report.iteration, report.applied, *(held.iterations for held in report.held)]
        met = [report.met, *(held.meetings for held in report.held)] if self.has_met else [0]
        if max(counts) <= own + MOST_AHEAD and max(met) <= self.met + MOST_AHEAD:
            return True
        if report.life not in self._impossible:
            self._impossible.add(report.life)
            self._out.note(
                "refused",
                name_of(report.life),
                f"it reports iteration {max(counts)} and meeting {max(met)}, where this node is at iteration "
                f"{own} and meeting {self.met}: that cannot be, and is not taken",
            )
        return False

    def absorb(self, report: Report) -> bool:
        """Note what a member holds and has done; False if `report` is of none of the other members."""
        life = report.life
        if life not in self.iterations.acks:
            return False
        for held in report.held:
            more = self.iterations.acknowledge(life, held.life, held.iterations)
            more |= self.meetings.acknowledge(life, held.life, held.meetings)
            self._due.missing |= more
            if held.life == self._standing.life:
                self.pass_meetings(held.meetings)
        for ledger, done in ((self.iterations, report.applied), (self.meetings, report.met)):
            ledger.floors[life] = max(ledger.floors[life], done)
        return True

    # -- what may be done ---------------------------------------------------------------------------------

    def next_iteration(self) -> tuple[Key, ...] | None:
        """Return the contributions to the next iteration to apply, once a majority is known to hold each
        and this node holds all; else None."""
        ledger = self.iterations
        number = ledger.ordered
        lives = ledger.contributors(number)
        if not lives and all(ledger.firsts[life] <= number for life in ledger.members):
            return None  # nobody: only before the first iteration of all
        return self._whole(ledger, number, lives)

    def meeting(self, number: int, at: int) -> tuple[Key, ...] | None:
        """Return the parts of a meeting once it may take place, else None. The script was last at
        iteration `at`."""
        return self._whole(self.meetings, number, self.meetings.parties(number, at))

    def _whole(self, ledger: Ledger, number: int, lives: list[Life]) -> tuple[Key, ...] | None:
        keys = tuple(Key(ledger.stream, number, life) for life in lives)
        is_whole = all(ledger.has(key) and self.shared(ledger, key.life) > number for key in keys)
        return keys if is_whole else None

    def floors(self, ledger: Ledger) -> list[float]:
        """Return what each other member has done. For a newcomer that has reported no meeting: the number
        of its first part that is here, or infinity."""
        floors: list[float] = []
        for member in self._standing.view.members:
            if member.life == self._standing.life:
                continue
            told = ledger.floors[member.life]
            if ledger is self.iterations:
                floors.append(self.applied_by(member.life))
            else:
                is_new = told == 0 and bool(member.token)
                floors.append(self._begun(member.life) if is_new else told)
        return floors

    def _begun(self, life: Life) -> float:
        """Return the number of the first part of a newcomer that is here; infinity if there is none."""
        here = self.meetings.here.get(life)
        return min(here) if here else math.inf
