"""The way of a worker's heartbeats: through its launcher, or to the hub directly.

A launcher sends one message for all its workers, so that the hub reads fewer. The hub's answer goes back to
the workers through the launcher. A worker that gets no answer in time sends its heartbeat to the hub
directly. So a launcher that is slow, stopped or dead costs a worker `confirm_seconds` of silence, once. A
launcher passes on what it has heard, with its age; it never speaks for a worker that it has not heard.

`Route` decides at the worker, `Batches` at the launcher. Both are given the time, in seconds of a monotonic
clock that all processes of a machine share.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from atoll.wire.messages import MOST_BEATS, Beat, Heartbeats, ToLauncher

CONFIRM_SECONDS = 0.25  # until the hub's answer must be back through the launcher; at most one heartbeat
GATHER_SECONDS = 0.03  # from the first heartbeat that a launcher hears until it sends a message
_OPEN_BATCHES = 64  # messages to the hub that wait for an answer; older ones are forgotten


@dataclass(frozen=True)
class Ways:
    """The ways of the next heartbeat.

    Attributes:
        number: its number on the way through the launcher; 0 if it does not go there.
        direct: True if it goes to the hub directly.
    """

    number: int
    direct: bool


class Route:
    """The times of a worker's heartbeats, every `heartbeat` seconds, and their ways.

    The first heartbeat goes directly, as does the first over each new connection to the hub: the hub learns
    which connection is the worker's. While the last heartbeat through the launcher has no answer, all go both
    ways. If there is a launcher, its workers' heartbeats are due at common times, the multiples of
    `heartbeat`, so that one message holds them all.
    """

    def __init__(self, heartbeat: float, confirm_seconds: float = CONFIRM_SECONDS) -> None:
        self._heartbeat, self._confirm_seconds = heartbeat, min(confirm_seconds, heartbeat)
        self._number = self._confirmed = 0  # heartbeats to the launcher, and the last that the hub has heard
        self._due = -math.inf  # when the next heartbeat is due
        self._owed = math.inf  # when the last one goes to the hub directly, unless it is confirmed
        self._is_new = True  # no heartbeat has gone over the present connection to the hub

    def look(self, now: float, *, launcher: bool, at_once: bool = False) -> Ways | None:
        """Return where to send a heartbeat now; None for nowhere yet.

        Args:
            launcher: True if there is a launcher.
            at_once: True if the hub is to hear news at once.
        """
        if now < self._due and not at_once:
            if now < self._owed:
                return None
            self._owed = math.inf
            return Ways(0, direct=True)
        direct = not launcher or at_once or self._is_new or self._confirmed < self._number
        number = 0
        if launcher:
            self._number += 1
            number = self._number
        self._owed = math.inf if direct else now + self._confirm_seconds
        self._is_new = False
        self._due = self._next_due(now, launcher=launcher)
        return Ways(number, direct)

    def _next_due(self, now: float, *, launcher: bool) -> float:
        if not launcher:
            return now + self._heartbeat
        due = (math.floor(now / self._heartbeat) + 1) * self._heartbeat
        return due if due > now else now + self._heartbeat

    def confirm(self, number: int) -> None:
        """Note that the hub has heard the heartbeat of this number, through the launcher."""
        if self._confirmed < number <= self._number:
            self._confirmed = number
            if number == self._number:
                self._owed = math.inf

    def refuse(self) -> None:
        """Send the last heartbeat directly, as the launcher did not take it."""
        self._owed = math.inf

    def renew(self) -> None:
        """Note that the connection to the hub is a new one."""
        self._is_new, self._due = True, -math.inf

    def next_look(self) -> float:
        """Return the time at which `look` may next return something."""
        return min(self._due, self._owed)


_Source = TypeVar("_Source")


@dataclass(frozen=True)
class _Heard(Generic[_Source]):
    source: _Source  # where the worker's answer goes
    said: ToLauncher


class Batches(Generic[_Source]):
    """The heartbeats that a launcher has heard of its workers, in few messages to the hub.

    It holds at most `MOST_BEATS` workers and 64 messages without an answer.

    Args:
        run: the run's name; heartbeats of other runs are ignored.
        launcher: the name that its workers have given to the hub.
    """

    def __init__(self, run: str, launcher: str) -> None:
        self._run, self._launcher = run, launcher
        self._new: OrderedDict[int, _Heard[_Source]] = OrderedDict()  # by incarnation; not passed on yet
        self._due = math.inf  # when they are to be passed on
        self._number = 0  # messages to the hub so far
        self._open: OrderedDict[int, list[_Heard[_Source]]] = OrderedDict()  # messages without an answer

    def take(self, now: float, source: _Source, said: ToLauncher) -> None:
        """Take a worker's heartbeat. Of several heartbeats of one worker the latest is kept."""
        if said.run != self._run:
            return  # another run has its own incarnation of this number
        incarnation = said.beat.incarnation
        before = self._new.get(incarnation)
        if before is not None and before.said.at > said.at:
            return
        if before is None and len(self._new) >= MOST_BEATS:
            return
        self._new[incarnation] = _Heard(source, said)
        self._due = min(self._due, now + GATHER_SECONDS)

    def poll(self, now: float) -> Heartbeats | None:
        """Return the message to send to the hub now; None for none."""
        if now < self._due:
            return None
        heard, self._due = list(self._new.values()), math.inf
        self._new.clear()
        self._number += 1
        self._open[self._number] = heard
        if len(self._open) > _OPEN_BATCHES:
            self._open.popitem(last=False)
        return Heartbeats(
            run=self._run,
            launcher=self._launcher,
            number=self._number,
            beats=[_aged(now, each.said) for each in heard],
        )

    def confirm(self, number: int, unknown: Iterable[int]) -> list[tuple[_Source, int]]:
        """Take the hub's answer to a message.

        Args:
            number: the message's number.
            unknown: the incarnations in it that the hub does not know.

        Returns the workers to tell, each with the number of its heartbeat.
        """
        left_out = set(unknown)
        heard = self._open.pop(number, [])
        return [
            (each.source, each.said.number) for each in heard if each.said.beat.incarnation not in left_out
        ]

    def forget(self) -> None:
        """Forget unanswered messages, as the connection to the hub is lost; their workers get no answer."""
        self._open.clear()

    def next_deadline(self) -> float:
        """Return the time at which `poll` next returns a message."""
        return self._due


def _aged(now: float, said: ToLauncher) -> Beat:
    beat = said.beat
    return Beat(beat.incarnation, beat.iteration, beat.pace, beat.size, beat.batch, max(0.0, now - said.at))
