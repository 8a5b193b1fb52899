"""The present members, by incarnation, and the time that each has been silent."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from atoll.store.silence import FLOOR_SECONDS, Patience
from atoll.wire.messages import Count

SUSPECT_BEATS, SUSPECT_SECONDS = 2.0, 1.0  # heartbeats that a suspect may miss, and silence that it may keep

Kind: TypeAlias = Literal["worker", "shard", "half", "site"]
_IN_ORDER: dict[Kind, int] = {"worker": 0, "shard": 1, "half": 2, "site": 3}  # as deaths are told


def suspect_seconds(heartbeat: float, least: float = FLOOR_SECONDS) -> float:
    """For how many seconds a suspect may be silent, where heartbeats come every `heartbeat`: on a loaded
    machine a thread may not run for half a second. Where more than usual is always borne (`least`), so it is
    of a suspect."""
    return max(SUSPECT_BEATS * heartbeat, SUSPECT_SECONDS * max(1.0, least / FLOOR_SECONDS))


def broken_seconds(heartbeat: float, least: float = FLOOR_SECONDS) -> float:
    """For how many seconds a member may be silent whose connections have broken: a second for them to come
    back, a heartbeat that was due as they broke, and one for the way; more where `least` is."""
    return suspect_seconds(heartbeat, least) + 2 * heartbeat


class Member(msgspec.Struct, forbid_unknown_fields=True):
    """A worker, a shard, one of a shard's two processes, or a site's shard. `place` is its rank, the index of
    its shard, or that of its site; `launcher` may pass its heartbeats on."""

    kind: Kind
    place: int
    incarnation: Count
    address: str = ""
    token: str = ""
    launcher: str = ""
    iteration: Count = 0
    origin: str = ""  # where its process is (core/liveness.py)

    def dead(self, silence: str) -> str:
        """Say, in a line, that this member is dead."""
        if self.kind == "worker":
            return f"worker {self.place} {silence}; it had committed {self.iteration} iterations"
        which = "its shard" if self.kind == "site" else f"shard {self.place}"
        return f"{which} at {self.address} {silence}"


@dataclass
class _Signs:
    """Of a member's life: when it was `heard` last, and for how long its silence is borne."""

    heard: float
    patience: Patience
    suspected: bool = False
    broken: bool = False  # its connections are
    due: float = 0.0  # when its silence is to be looked at next
    spared: float = -math.inf  # until when it does not count as dead, however silent it is

    def hear(self, now: float) -> None:
        """A sign of life; one from before the latest changes nothing."""
        if now < self.heard:
            return
        if now > self.heard:
            self.patience.note(now - self.heard)
            self.heard = now
        self.suspected = self.broken = False


class Roll:
    """The members by incarnation, which come from one counter, from 1; `newest` is the highest.

    `patience` is for how many seconds silence is borne at the most; who was heard regularly is borne for
    less, as measured, but never for less than `least` and 3 heartbeats of `heartbeat` seconds.

    A sign of life costs the same however many members there are, and `poll_deaths` costs what has become
    due: no call that is made for each member looks at all of them.
    """

    def __init__(self, patience: float, heartbeat: float, least: float) -> None:
        self.patience, self.heartbeat, self._least = patience, heartbeat, least
        self.newest = 0
        self.known: dict[int, Member] = {}
        self._signs: dict[int, _Signs] = {}
        self._due: list[tuple[float, int]] = []  # a heap: when to look at whose silence; some are outdated

    def new_incarnation(self) -> int:
        """One that nobody has: of a group of workers, that is to be told apart from others as workers are."""
        self.newest += 1
        return self.newest

    def new(
        self, now: float, kind: Kind, place: int, address: str = "", token: str = "", launcher: str = ""
    ) -> Member:
        """A member with the next incarnation, which is there from now on."""
        return self.enter(now, Member(kind, place, self.new_incarnation(), address, token, launcher))

    def enter(self, now: float, member: Member, patience: float | None = None) -> Member:
        """Enter a member. With `patience`, in seconds, its silence is borne for so long, however regular its
        signs of life were."""
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
        """Know these alone, each heard now, with its patience."""
        self.newest, self.known, self._signs, self._due = newest, {}, {}, []
        for member, patience in members:
            self.enter(now, member, patience)

    def get(self, incarnation: int, *kinds: Kind) -> Member | None:
        """The member of this incarnation, if it is of one of these kinds."""
        member = self.known.get(incarnation)
        return member if member is not None and member.kind in kinds else None

    def is_there(self, incarnation: int) -> bool:
        """True if a member of this incarnation is present: a worker, a shard or a site's shard."""
        return incarnation in self.known

    # -- signs of life ------------------------------------------------------------------------------------

    def hear(self, now: float, incarnation: int, iteration: int = 0, age: float = 0.0) -> bool:
        """A sign of life, given `age` seconds ago; False from one who is not there (any more)."""
        signs = self._signs.get(incarnation)
        if signs is None:
            return False
        signs.hear(now - age)
        member = self.known[incarnation]
        member.iteration = max(iteration, member.iteration)
        return True

    def hear_all(self, now: float) -> None:
        """The caller was gone, and heard nobody: silence is counted from now on."""
        for signs in self._signs.values():
            signs.heard, signs.suspected, signs.broken = now, False, False

    def suspect(self, now: float, incarnation: int) -> bool:
        """Another member has lost touch with this one: if it is silent for `suspect_seconds` too, it counts
        as dead, without more patience. A sign of life clears it. Gives whether it counts as dead by now."""
        signs = self._signs.get(incarnation)
        if signs is None:
            return False
        if not signs.suspected:
            signs.suspected = True
            self._hasten(incarnation, signs)
        return now >= self._end(signs)

    def note_broken(self, incarnation: int, broken: bool) -> None:
        """Note if all known connections of a member have broken: the member then counts as dead after
        `broken_seconds` of silence, without more patience. Its next sign of life clears the mark."""
        signs = self._signs.get(incarnation)
        if signs is not None and signs.broken != broken:
            signs.broken = broken
            self._hasten(incarnation, signs)

    def _hasten(self, incarnation: int, signs: _Signs) -> None:
        """Its silence is borne for less from now on, perhaps."""
        end = self._end(signs)
        if end < signs.due:
            self._look_at(incarnation, signs, end)

    def spare(self, incarnation: int, until: float) -> None:
        """Do not count it as dead before `until`, however silent it is: its process is known to live."""
        signs = self._signs.get(incarnation)
        if signs is not None:
            signs.spared = until
            self._look_at(incarnation, signs, self._end(signs))

    def _look_at(self, incarnation: int, signs: _Signs, when: float) -> None:
        """Look at its silence then, and not at the time that was meant before."""
        signs.due = when
        heapq.heappush(self._due, (when, incarnation))

    def silence_of(self, now: float, incarnation: int) -> float | None:
        """For how many seconds a member was not heard; None where it is not there."""
        signs = self._signs.get(incarnation)
        return now - signs.heard if signs is not None else None

    def poll_deaths(self, now: float) -> list[tuple[int, str]]:
        """(incarnation, reason) of those who were silent for too long; again until their goodbye is said.
        `now` may be earlier than it was in a call before: whoever was dead then and not by `now` is left out.

        A member that is heard now is alive for its patience's floor at least, so it is looked at again no
        earlier, and no later: its patience may become less with what is heard.
        """
        dead: list[tuple[Member, str]] = []
        while self._due and self._due[0][0] <= now:
            due, incarnation = heapq.heappop(self._due)
            signs = self._signs.get(incarnation)
            if signs is None or signs.due != due:
                continue  # gone, or to be looked at at another time
            floor = signs.heard + signs.patience.floor
            if now < floor and not (signs.suspected or signs.broken):  # as most are: patience is not asked
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
        """In words, a silence for which the member counts as dead; empty where it is shorter."""
        silence, most = now - signs.heard, self._borne(signs)
        if now < self._end(signs):  # not by `silence`, whose rounding could make a look that never ends
            return ""
        if signs.suspected and most < signs.patience.seconds:
            return f"was silent for {silence:.1f} s, and another member has lost touch with it"
        if signs.broken and most < signs.patience.seconds:
            return f"was silent for {silence:.1f} s, and its connections are broken"
        return f"was silent for {silence:.1f} s, and {most:.3g} s are borne"

    def _end(self, signs: _Signs) -> float:
        """When this member counts as dead, if nothing is heard of it until then."""
        return max(signs.heard + self._borne(signs), signs.spared)

    def _borne(self, signs: _Signs) -> float:
        """For how many seconds this member's silence is borne."""
        if signs.suspected:
            return min(self.suspect_seconds, signs.patience.seconds)
        if signs.broken:
            return min(broken_seconds(self.heartbeat, self._least), signs.patience.seconds)
        return signs.patience.seconds

    @property
    def suspect_seconds(self) -> float:
        """For how many seconds a member may be silent with which another one has lost touch."""
        return suspect_seconds(self.heartbeat, self._least)

    def next_deadline(self) -> float | None:
        """When `poll_deaths` may next find someone, if nobody is heard until then."""
        return min(map(self._end, self._signs.values()), default=None)
