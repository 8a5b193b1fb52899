"""The present members, by incarnation, and their silence."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from atoll.store.silence import FLOOR_SECONDS, Patience
from atoll.wire.messages import Count

SUSPECT_BEATS, SUSPECT_SECONDS = 2.0, 1.0  # a suspect may be silent for 2 heartbeats, or for 1 s

Kind: TypeAlias = Literal["worker", "shard", "half", "site"]
_IN_ORDER: dict[Kind, int] = {"worker": 0, "shard": 1, "half": 2, "site": 3}  # deaths are reported so


def suspect_seconds(heartbeat: float, least: float = FLOOR_SECONDS) -> float:
    """Return the seconds for which a suspect may be silent, with a heartbeat every `heartbeat` seconds.

    On a loaded machine a thread may not run for half a second. If more silence than usual is always borne
    (`least`), a suspect's is borne longer in proportion.
    """
    return max(SUSPECT_BEATS * heartbeat, SUSPECT_SECONDS * max(1.0, least / FLOOR_SECONDS))


def broken_seconds(heartbeat: float, least: float = FLOOR_SECONDS) -> float:
    """Return the seconds for which a member whose connections have broken may be silent.

    That is a suspect's silence, a heartbeat that was due when they broke, and one for the way.
    """
    return suspect_seconds(heartbeat, least) + 2 * heartbeat


class Member(msgspec.Struct, forbid_unknown_fields=True):
    """A worker, a shard, one of a shard's two processes, or a site's shard.

    Attributes:
        place: its rank, its shard's index, or its site's index.
        launcher: the launcher that may pass its heartbeats on.
        iteration: iterations that it has committed, as it said.
        origin: where its process is (core/liveness.py).
    """

    kind: Kind
    place: int
    incarnation: Count
    address: str = ""
    token: str = ""
    launcher: str = ""
    iteration: Count = 0
    origin: str = ""

    def dead(self, silence: str) -> str:
        """Return the line that says that this member is dead."""
        if self.kind == "worker":
            return f"worker {self.place} {silence}; it had committed {self.iteration} iterations"
        which = "its shard" if self.kind == "site" else f"shard {self.place}"
        return f"{which} at {self.address} {silence}"


@dataclass
class _Signs:
    """The signs of life of a member.

    Attributes:
        heard: when it was heard last.
        patience: how long its silence is borne.
        suspected: True if another member has lost touch with it.
        broken: True if its connections are broken.
        due: when its silence is to be looked at next.
        spared: until then it does not count as dead, however silent it is.
    """

    heard: float
    patience: Patience
    suspected: bool = False
    broken: bool = False
    due: float = 0.0
    spared: float = -math.inf

    def hear(self, now: float) -> None:
        """Note a sign of life. One from before the latest changes nothing."""
        if now < self.heard:
            return
        if now > self.heard:
            self.patience.note(now - self.heard)
            self.heard = now
        self.suspected = self.broken = False


class Roll:
    """The members by incarnation. Incarnations come from one counter, from 1.

    A sign of life costs the same however many members there are, and `poll_deaths` costs as much as has
    become due: no call that is made for each member looks at all of them.

    Args:
        patience: the longest silence, in seconds, before a member counts as dead. A member that was heard
            regularly is given less, as measured.
        heartbeat: the seconds between heartbeats.
        least: seconds of silence that are always borne; so are 3 heartbeats.

    Attributes:
        newest: the highest incarnation.
        known: the members, by incarnation.
    """

    def __init__(self, patience: float, heartbeat: float, least: float) -> None:
        self.patience, self.heartbeat, self._least = patience, heartbeat, least
        self.newest = 0
        self.known: dict[int, Member] = {}
        self._signs: dict[int, _Signs] = {}
        self._due: list[tuple[float, int]] = []  # a heap of times to look at a silence; some are outdated

    def new_incarnation(self) -> int:
        """Return a new incarnation. Groups of workers have incarnations too."""
        self.newest += 1
        return self.newest

    def new(
        self, now: float, kind: Kind, place: int, address: str = "", token: str = "", launcher: str = ""
    ) -> Member:
        """Enter a new member with the next incarnation."""
        return self.enter(now, Member(kind, place, self.new_incarnation(), address, token, launcher))

    def enter(self, now: float, member: Member, patience: float | None = None) -> Member:
        """Enter a member.

        Args:
            patience: the seconds of silence to bear, however regular its signs of life; None to measure it.
        """
        least = max(self._least, 3 * self.heartbeat)
        borne = Patience(least, self.patience) if patience is None else Patience(patience, patience)
        signs = self._signs[member.incarnation] = _Signs(now, borne)
        self.known[member.incarnation] = member
        self._look_at(member.incarnation, signs, now + borne.floor)
        return member

    def remove(self, member: Member) -> None:
        """Remove a member, if present."""
        self.known.pop(member.incarnation, None)
        self._signs.pop(member.incarnation, None)

    def restart(self, now: float, newest: int, members: Iterable[tuple[Member, float | None]]) -> None:
        """Replace all members by these, each with its patience and heard now."""
        self.newest, self.known, self._signs, self._due = newest, {}, {}, []
        for member, patience in members:
            self.enter(now, member, patience)

    def get(self, incarnation: int, *kinds: Kind) -> Member | None:
        """Return the member of this incarnation, if it is of one of these kinds."""
        member = self.known.get(incarnation)
        return member if member is not None and member.kind in kinds else None

    def is_there(self, incarnation: int) -> bool:
        """True if a member of this incarnation is present."""
        return incarnation in self.known

    # -- signs of life ------------------------------------------------------------------------------------

    def hear(self, now: float, incarnation: int, iteration: int = 0, age: float = 0.0) -> bool:
        """Note a sign of life, given `age` seconds ago. False if the member is not there."""
        signs = self._signs.get(incarnation)
        if signs is None:
            return False
        signs.hear(now - age)
        member = self.known[incarnation]
        member.iteration = max(iteration, member.iteration)
        return True

    def hear_all(self, now: float) -> None:
        """Count everybody's silence from now on, as the caller was away and heard nobody."""
        for signs in self._signs.values():
            signs.heard, signs.suspected, signs.broken = now, False, False

    def suspect(self, now: float, incarnation: int) -> bool:
        """Note that another member has lost touch with this one.

        After `suspect_seconds` of silence it then counts as dead, without more patience. A sign of life
        clears the mark. True if it counts as dead by now.
        """
        signs = self._signs.get(incarnation)
        if signs is None:
            return False
        if not signs.suspected:
            signs.suspected = True
            self._hasten(incarnation, signs)
        return now >= self._end(signs)

    def note_broken(self, incarnation: int, broken: bool) -> None:
        """Note whether all known connections of a member have broken.

        It then counts as dead after `broken_seconds` of silence, without more patience. Its next sign of life
        clears the mark.
        """
        signs = self._signs.get(incarnation)
        if signs is not None and signs.broken != broken:
            signs.broken = broken
            self._hasten(incarnation, signs)

    def _hasten(self, incarnation: int, signs: _Signs) -> None:
        """Look at a member's silence earlier, if less of it is borne from now on."""
        end = self._end(signs)
        if end < signs.due:
            self._look_at(incarnation, signs, end)

    def spare(self, incarnation: int, until: float) -> None:
        """Do not count a member as dead before `until`, however silent it is: its process is known to
        live."""
        signs = self._signs.get(incarnation)
        if signs is not None:
            signs.spared = until
            self._look_at(incarnation, signs, self._end(signs))

    def _look_at(self, incarnation: int, signs: _Signs, when: float) -> None:
        """Look at a member's silence at `when`, in place of the time set before."""
        signs.due = when
        heapq.heappush(self._due, (when, incarnation))

    def silence_of(self, now: float, incarnation: int) -> float | None:
        """Return the seconds since a member was heard; None if it is not there."""
        signs = self._signs.get(incarnation)
        return now - signs.heard if signs is not None else None

    def poll_deaths(self, now: float) -> list[tuple[int, str]]:
        """Return (incarnation, reason) of the members that were silent for too long; each again until it is
        removed.

        `now` may be earlier than in a call before: a member that was dead then and is not by `now` is left
        out. A member that is heard now lives for at least its patience's floor, so it is next looked at after
        that. It is not looked at later, as its patience may become less with what is heard.
        """
        dead: list[tuple[Member, str]] = []
        while self._due and self._due[0][0] <= now:
            due, incarnation = heapq.heappop(self._due)
            signs = self._signs.get(incarnation)
            if signs is None or signs.due != due:
                continue  # removed, or to be looked at at another time
            floor = signs.heard + signs.patience.floor
            if now < floor and not (signs.suspected or signs.broken):  # most members
                self._look_at(incarnation, signs, floor)
            elif silence := self._fatal_silence(now, signs):
                dead.append((self.known[incarnation], silence))
            else:
                again = min(self._end(signs), now + signs.patience.floor)
                self._look_at(incarnation, signs, again)
        dead.sort(key=lambda each: (_IN_ORDER[each[0].kind], each[0].place))
        for member, _ in dead:
            signs = self._signs[member.incarnation]
            self._look_at(member.incarnation, signs, self._end(signs))
        return [(member.incarnation, member.dead(silence)) for member, silence in dead]

    def _fatal_silence(self, now: float, signs: _Signs) -> str:
        """Return, in words, the silence for which a member counts as dead; empty if it is shorter."""
        silence, most = now - signs.heard, self._borne(signs)
        if now < self._end(signs):  # `silence` is rounded: comparing it could loop for ever
            return ""
        if signs.suspected and most < signs.patience.seconds:
            return f"was silent for {silence:.1f} s, and another member has lost touch with it"
        if signs.broken and most < signs.patience.seconds:
            return f"was silent for {silence:.1f} s, and its connections are broken"
        return f"was silent for {silence:.1f} s, and {most:.3g} s are borne"

    def _end(self, signs: _Signs) -> float:
        """Return the time at which a member counts as dead, if it is not heard until then."""
        return max(signs.heard + self._borne(signs), signs.spared)

    def _borne(self, signs: _Signs) -> float:
        """Return the seconds for which a member's silence is borne."""
        if signs.suspected:
            return min(self.suspect_seconds, signs.patience.seconds)
        if signs.broken:
            return min(broken_seconds(self.heartbeat, self._least), signs.patience.seconds)
        return signs.patience.seconds

    @property
    def suspect_seconds(self) -> float:
        """The seconds for which a member may be silent with which another one has lost touch."""
        return suspect_seconds(self.heartbeat, self._least)

    def next_deadline(self) -> float | None:
        """Return the time at which `poll_deaths` may next find a death, if nobody is heard until then."""
        return min(map(self._end, self._signs.values()), default=None)
