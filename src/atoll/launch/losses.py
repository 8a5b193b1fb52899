"""Losses and returns of a run's parts, by the hub's decisions and the launcher's own observations.

Times are seconds since the launch began: a wall clock may jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.units import format_seconds
from atoll.hub.decisions import Decision

_MOST = 4  # named in a line
_DISK_AND_LINKS = ("journal", "log", "ring broken")  # decisions that only a fault brings about


@dataclass
class _Loss:
    """One loss of `who`, and how long it lasted, if known."""

    who: str
    at: float
    stood_in: float | None = None  # until its standby went on
    away: float | None = None


class Losses:
    """Records losses and returns, in order. `twice`: two processes hold each shard, and one of them is
    lost until the other has a standby in sync again."""

    def __init__(self, twice: bool = False) -> None:
        self._twice = twice
        self._all: list[_Loss] = []
        self._open: dict[str, _Loss] = {}  # parts that are lost now

    def lost(self, who: str, now: float) -> None:
        """Record the loss of a part ("worker 1", "shard 0", "the hub"); a second report adds nothing."""
        if who not in self._open:
            is_half = self._twice and who.startswith("shard ")
            self._open[who] = _Loss(f"a process of {who}" if is_half else who, now)
            self._all.append(self._open[who])

    def back(self, who: str, now: float) -> None:
        """Record the return of a part."""
        if (loss := self._open.pop(who, None)) is not None:
            loss.away = now - loss.at

    def take(self, decision: Decision, now: float) -> bool:
        """Note a decision of the hub; return whether it is about a fault."""
        part, _, event = decision.what.rpartition(" ")
        who = who_of(decision)
        if event == "died":
            self.lost(who, now)
            return True
        if event in ("joined", "back"):  # worker, shard or site
            is_fault = who in self._open or event == "back"
            if not (self._twice and part == "shard"):
                self.back(who, now)
            return is_fault
        if part == "shard":
            return self._take_of_pair(decision, now)
        if decision.what == "fenced":
            return who in self._open
        if decision.what == "hub" and decision.choice.endswith(" again"):
            self.back("the hub", now)
            return True
        return decision.what.startswith(_DISK_AND_LINKS)

    def _take_of_pair(self, decision: Decision, now: float) -> bool:
        """Note a decision about a shard that two processes hold; return whether it is about a fault."""
        who = decision.what
        if decision.choice == "its standby is in sync":
            is_fault = who in self._open
            self.back(who, now)
            return is_fault
        self.lost(who, now)
        if decision.choice.startswith("its standby at"):
            self._open[who].stood_in = now - self._open[who].at
        return True

    def lines(self) -> list[str]:
        """Return the closing lines for people: none, one or two."""
        back = [loss for loss in self._all if loss.away is not None]
        gone = [loss for loss in self._all if loss.away is None]
        lines = [("lost, and came back: ", _named(back)), ("lost for good: ", _named(gone))]
        return [start + named for start, named in lines if named]


def who_of(decision: Decision) -> str:
    """Return the part that a decision is about: `worker 1` of "worker 1, incarnation 3"."""
    return decision.choice.partition(", incarnation ")[0]


def _named(losses: Sequence[_Loss]) -> str:
    """Return the parts, each once, in the order of their first losses."""
    names = dict.fromkeys(loss.who for loss in losses)
    each = [[loss for loss in losses if loss.who == who] for who in names]
    more = [f"{len(each) - _MOST} more"] if len(each) > _MOST else []
    return "; ".join([*map(_described, each[:_MOST]), *more])


def _described(losses: Sequence[_Loss]) -> str:
    """Return one part's losses in words: `shard 0 at 12.3 s, for 3.1 s`."""
    first = losses[0]
    times = f" {len(losses)} times from" if len(losses) > 1 else " at"
    words = [f"{first.who}{times} {format_seconds(first.at)}"]
    if standby := _span([loss.stood_in for loss in losses]):
        words.append(f"its standby went on after {standby}")
    if away := _span([loss.away for loss in losses]):
        words.append(f"{'held twice again' if standby else 'back'} after {away}")
    return ", ".join(words)


def _span(seconds: Sequence[float | None]) -> str:
    """Return a range in words: `3.1 s`, or `3.1 s to 4.5 s`; empty if no duration is known."""
    known = sorted(each for each in seconds if each is not None)
    if not known:
        return ""
    shortest, longest = format_seconds(known[0]), format_seconds(known[-1])
    return longest if shortest == longest else f"{shortest} to {longest}"
