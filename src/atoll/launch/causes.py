"""Find the first cause of a run's end from its workers' reports and the ends of their processes.

One worker's end makes the others fail. Their errors are consequences, and often come first. So the cause is
the earliest end that no other one explains: an error of the worker's own, a signal, an exit, or an end before
time.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.core.events import NO_WORKER, AnyEvent, ChildEnded, Ended, Failed, Finished, Gone, Joining, Started

LAUNCHER = NO_WORKER  # in place of a worker, if the launcher itself reports what ended the run
_TOLD = (Joining, Started, Finished, Failed, Ended, Gone, ChildEnded)


@dataclass
class Life:
    """One process of a worker: its reports, and its end."""

    worker: int
    joining: Joining | None = None
    started: Started | None = None
    finished: Finished | None = None
    failed: Failed | None = None  # the first that is the worker's own, else the first echo
    ended: Ended | None = None
    gone: Gone | None = None
    leaving: Failed | None = None  # its error on leaving the session; counts if it was killed meanwhile
    survived: bool = False  # the others went on without it, or it was started again

    @property
    def time(self) -> float:
        """The earliest reported time of its end; infinity if none is known."""
        told = (self.failed, self.ended, self.gone)
        return min((each.time for each in told if each is not None), default=math.inf)

    @property
    def status(self) -> int | None:
        """The exit status, or minus the signal; None while it runs."""
        if self.gone is not None:
            return self.gone.exit_code
        if self.failed is not None:
            return self.failed.exit_status
        return self.ended.status if self.ended is not None else None

    @property
    def is_early(self) -> bool:
        """True for an end with status 0 before the worker's part in the run was over."""
        return self.status == 0 and self.failed is None and self.finished is None


@dataclass
class Causes:
    """Takes events in any order, from all workers; the same event may come twice."""

    _events: list[AnyEvent] = field(default_factory=list)
    _survived: dict[int, float] = field(default_factory=dict)  # worker -> until when its ends are survived

    def take(self, event: AnyEvent) -> None:
        """Note an event about a worker's beginning or end."""
        if isinstance(event, _TOLD) and event not in self._events:
            self._events.append(event)

    def events(self) -> list[AnyEvent]:
        """Return the noted events."""
        return list(self._events)

    def failures(self) -> list[Failed]:
        """Return the errors among the noted events."""
        return [event for event in self._events if isinstance(event, Failed) and not event.leaving]

    def service_word(self, line: str) -> str:
        """Return the last report of the hub or the shard that `line` names on its end; empty if there is
        none."""
        words = [each for each in self._events if isinstance(each, Ended) and each.worker == NO_WORKER]
        said = [each for each in words if line.startswith(f"{each.call} ended with")]
        if not said:
            return ""
        name, text = said[-1].call, said[-1].message
        return text if text.startswith(name) else f"{name}: {text}"

    def child_end(self, failure: Failed) -> ChildEnded | None:
        """Return the end of the DataLoader process that a worker's error is about; None if it is about
        none."""
        if "DataLoader worker" not in failure.message:
            return None
        named = set(map(int, re.findall(r"\d+", failure.message)))
        ends = (each for each in self._events if isinstance(each, ChildEnded))
        return next((each for each in ends if each.worker == failure.worker and each.pid in named), None)

    def survive(self, worker: int, now: float) -> None:
        """Note that the run survives this worker's ends up to `now`, or starts the worker again."""
        self._survived[worker] = now
        # A worker that is started again without end leaves its last lives alone.
        own = [each for each in self._events if each.worker == worker]
        if len(own) > _MOST_KEPT:
            dropped = set(map(id, own[: len(own) // 2]))
            self._events = [each for each in self._events if id(each) not in dropped]

    def lives(self) -> list[Life]:
        """Return the processes of all workers, in the order of their ends."""
        found: list[Life] = []
        current: dict[int, Life] = {}
        for event in sorted(self._events, key=lambda each: each.time):
            if isinstance(event, Failed) and event.by_launcher:
                found.append(Life(LAUNCHER, failed=event))
                continue
            if event.worker == NO_WORKER or isinstance(event, ChildEnded):  # a service's, or no worker's end
                continue
            life = current.get(event.worker)
            if life is None or _is_next(life, event):
                life = current[event.worker] = Life(event.worker)
                found.append(life)
            _note(life, event)
        for life in found:
            _settle(life)
            life.survived = life.time <= self._survived.get(life.worker, -math.inf)
        return sorted(found, key=lambda life: life.time)

    def absent(self) -> Life | None:
        """Return a worker that has ended with status 0 while others wait for it to begin; None if there is
        none.

        Nobody else ends such a run before its deadlines do.
        """
        lives = self.lives()
        if any(life.started is not None for life in lives):
            return None
        waiting = any(life.joining is not None and life.status is None for life in lives)
        gone = (life for life in lives if life.gone is not None and life.status == 0)
        return next(gone, None) if waiting else None

    def unfinished(self) -> list[str]:
        """Return the names of workers that have not ended, or were killed."""
        last = {life.worker: life for life in self.lives() if life.worker != LAUNCHER}
        going = (life for life in last.values() if life.status in (None, -signal.SIGKILL))
        return [f"worker {worker}" for worker in sorted(life.worker for life in going)]

    def has_joined(self) -> bool:
        """True if a worker has called `atoll.join`."""
        return any(life.joining is not None or life.started is not None for life in self.lives())

    def first(self, excuses: Callable[[Failed], bool]) -> Life | None:
        """Return the life whose end was the first cause of a failed run; None if no report tells.

        `excuses` is true for a worker's error that the run survived.
        """
        lives = [life for life in self.lives() if life.status is not None]
        own = [life for life in lives if _is_own(life, lives) and not _is_excused(life, excuses)]
        wrong = [life for life in own if not life.is_early]
        if own and own[0].is_early:
            # A script that never leaves its session ends so too: its error counts, if there is one.
            told = [life for life in wrong if life.failed is not None and life.failed.traceback]
            return told[0] if told else own[0]
        if own:
            return _behind(own[0], lives)
        survived = [life for life in lives if _is_own(life, lives)]
        if survived:
            return survived[0]
        echoes = [life for life in lives if life.failed is not None]
        return echoes[0] if echoes else None


_MOST_KEPT = 64  # events of one worker
_LEAVING_SECONDS = 30.0  # that leaving a session takes, at most; a longer life means a handled error


def _is_next(life: Life, event: AnyEvent) -> bool:
    """True where `event` is of a process that was started after `life` had ended."""
    return life.gone is not None and isinstance(event, (Joining, Started, Gone))


def _note(life: Life, event: AnyEvent) -> None:
    if isinstance(event, Failed) and event.leaving:
        life.leaving = event
    elif isinstance(event, Failed):
        if life.failed is None or (life.failed.echo and not event.echo):
            life.failed = event
    elif isinstance(event, Joining):
        life.joining = event
    elif isinstance(event, Started):
        life.started = event
    elif isinstance(event, Finished):
        life.finished = event
    elif isinstance(event, Ended):
        life.ended = event
    elif isinstance(event, Gone):
        life.gone = event


def _settle(life: Life) -> None:
    """Count the error with which a worker left its session, if it was killed before it reported one:
    another worker that lost touch with it may have had torchrun stop both. Count a reported exit status
    too if SIGTERM ended the process afterwards; but a script that ended well has not reported how its
    process ended."""
    leaving, gone, ended = life.leaving, life.gone, life.ended
    if ended is not None and gone is not None and ended.status != gone.exit_code:
        if not ended.status:
            life.ended = None
        elif gone.exit_code == -signal.SIGTERM:
            life.gone = msgspec.structs.replace(gone, exit_code=ended.status)
    if leaving is None or gone is None or life.failed is not None:
        return
    if gone.exit_code < 0 and gone.time <= leaving.time + _LEAVING_SECONDS:
        life.failed = leaving


def _is_own(life: Life, lives: Iterable[Life]) -> bool:
    """True if a life ended badly by itself, as far as its own end tells."""
    if life.failed is not None:
        return not life.failed.echo
    if life.is_early:
        # Where nobody joins there is no run to be a part of.
        return life.started is not None or any(each.joining is not None for each in lives)
    if not life.status:
        return False
    # The sender of SIGTERM is unknown here; no other worker's end explains the earliest one.
    return life.status != -signal.SIGTERM or all(
        each is life or each.time >= life.time or not (each.status or each.is_early) for each in lives
    )


def _behind(life: Life, lives: Iterable[Life]) -> Life:
    """Return the end that an error of Atoll's complains of: it names a worker that the run had gone on
    without.

    Of two nodes, for example, the second waits in vain for the first, since one is no majority.
    """
    if life.failed is None or life.failed.traceback or life.failed.by_launcher:
        return life
    named = {int(each) for each in re.findall(r"\b(?:worker|node) (\d+)\b", life.failed.message)}
    lost = (each for each in lives if each.survived and each.time < life.time and each.worker in named)
    return next(lost, life)


def _is_excused(life: Life, excuses: Callable[[Failed], bool]) -> bool:
    return life.survived or (life.failed is not None and excuses(life.failed))
