"""Steps that are made ahead of `optimizer.step()`, while backward still goes on.

Once as many of a chunk's gradients have come as in the step before, it may be stepped **aside**: in spare
payloads that begin as copies, while values, gradients and state stay what they are for everybody.
`optimizer.step()` finds whether all that the step was made of is still so. Then what was made takes the place
of what counted, and nothing is copied; else it is dropped, and the chunk is stepped as usual. So nothing that
counted is ever taken back, and nobody sees what does not count yet.

This is done where it is worth its copies: where the steps of all chunks take longer than the forward beside
which they would else be made. Source: docs/memory.md, "Steps during backward".
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.memory.gradients import Gradients
from atoll.memory.payloads import Key
from atoll.memory.segments import Made, Run, Segments, noted
from atoll.memory.stepqueue import Settings
from atoll.moves.timeline import EARLY_COST

TRUST = 3  # steps in a row in which a chunk could have been stepped ahead, before it is
_ALWAYS = False  # whether or not it is worth it: for tests


@dataclass
class AheadFigures:
    """Chunks that were stepped ahead of their time so far, and those that were in vain."""

    taken: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Spares:
    """For which chunks there is room to be stepped aside; who exchanges a spare payload for the other, how
    many seconds uses have waited for chunks so far, and where it is counted what became of it."""

    chunks: tuple[int, ...]
    swap: Callable[[Key, Key], None]
    waited: Callable[[], float]
    figures: AheadFigures


@dataclass(eq=False)
class Ahead:
    """A step that may be made ahead, and all that it is made of."""

    chunk: int
    present: tuple[bool, ...]
    settings: Settings
    own: Settings
    gradient: int  # the changes of each by then
    state: int
    begun: bool = False
    made: Made | None = None


class Speculation:
    """Which chunks a `Stepper` steps ahead: those of `segments`, on its thread.

    `condition` is that of the queue of steps; `run(own)` is the optimizer's own code.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segments: Mapping[int, Segments],
        gradients: Gradients,
        spares: Spares,
        condition: threading.Condition,
        run: Callable[[Settings], Run],
    ) -> None:
        self._optimizer, self._gradients, self._spares = optimizer, gradients, spares
        self._segments = {chunk: segments[chunk] for chunk in spares.chunks if chunk in segments}
        self._condition, self._run = condition, run
        self.figures = spares.figures
        self._came: dict[int, list[int]] = self._none_came()  # gradients, by slot, since the last step
        self._expected: dict[int, list[int]] = {}  # as many as came before the last
        self._could: dict[int, Ahead] = {}  # chunks whose gradients have come as expected
        self._held = dict.fromkeys(self._segments, 0)  # steps in a row in which that held up to the step
        self._queue: deque[Ahead] = deque()
        self._failed: set[int] = set()  # chunks that could not be stepped aside
        self._seconds: dict[int, float] = {}  # by chunk, of its latest usual step
        self._aside: dict[int, float] = {}  # and of the latest that was made aside
        self._first = self._backward = 0.0  # when the first gradient came; seconds from it to `step()`, last
        self._began = self._waited = 0.0  # when the last step ended, and what `Spares.waited` said then
        self._is_worth_it: bool | None = None  # steps take longer than this forward did; None: it goes on

    def _none_came(self) -> dict[int, list[int]]:
        return {chunk: [0] * len(each.states.trained.parameters) for chunk, each in self._segments.items()}

    # During backward, on its thread.

    def came(self, chunk: int, slot: int) -> None:
        """A gradient has come, or is on its way."""
        with self._condition:
            if self._is_worth_it is None:
                self._first = time.monotonic()
                waited = self._spares.waited() - self._waited
                forward = self._first - self._began - waited
                self._is_worth_it = _ALWAYS or sum(self._seconds.values()) > forward
            if chunk not in self._segments:
                return
            self._came[chunk][slot] += 1
            if self._came[chunk] != self._expected.get(chunk):
                return
            ahead = self._note(chunk)
            if ahead is None:
                return
            self._could[chunk] = ahead
            if not self._is_worth_it or chunk in self._failed or self._held[chunk] < TRUST:
                return
        self._gradients.once_here(chunk, lambda: self._ready(ahead))

    def _note(self, chunk: int) -> Ahead | None:
        """What a step of the chunk would be made of now; None where it cannot be made aside."""
        segments, present = self._segments[chunk], self._gradients.present(chunk)
        states = segments.states
        settings = noted(self._optimizer.param_groups[states.group], without="params")
        gradient = self._gradients.changes(chunk)
        if gradient is None or not segments.is_cut_for(present, settings):
            return None
        if settings.get("foreach"):  # whose kernels may write into gradients (SGD's nesterov)
            return None
        return Ahead(chunk, present, settings, noted(self._optimizer.__dict__), gradient, states.changes)

    def _ready(self, ahead: Ahead) -> None:
        with self._condition:
            if self._could.get(ahead.chunk) is ahead:
                self._queue.append(ahead)
                self._condition.notify_all()

    def _drop(self, ahead: Ahead) -> None:
        if ahead in self._queue:
            self._queue.remove(ahead)
        self.figures.dropped += ahead.begun

    # On the stepping thread.

    def begin(self) -> Ahead:
        """What is to be made now, where it `has_next`. Holds the condition; `make` follows."""
        ahead = self._queue.popleft()
        ahead.begun = True
        return ahead

    @property
    def has_next(self) -> bool:
        """Whether a chunk is to be stepped aside now. One whose gradients have changed is left out, and what
        would not be over before `step()`: what forward waits for comes first then."""
        while self._queue and not (self._is_current(self._queue[0]) and self._is_in_time(self._queue[0])):
            self._queue.popleft()
        return bool(self._queue)

    def _is_current(self, ahead: Ahead) -> bool:
        return ahead.gradient == self._gradients.changes(ahead.chunk)

    def _is_in_time(self, ahead: Ahead) -> bool:
        seconds = self._aside.get(ahead.chunk, EARLY_COST * self._seconds.get(ahead.chunk, 0.0))
        return _ALWAYS or time.monotonic() + seconds <= self._first + self._backward

    def make(self, ahead: Ahead) -> None:
        """Step a chunk aside. What that raises is left to its usual step, to be raised where it belongs."""
        segments, began = self._segments[ahead.chunk], time.monotonic()
        try:
            with self._gradients.read_ahead(ahead.chunk, ahead.gradient) as gradients:
                if gradients is not None:
                    run = self._run(ahead.own)
                    ahead.made = segments.step_aside(ahead.settings, gradients, run)
        except BaseException:  # whatever it is: nobody may wait for ever
            self._failed.add(ahead.chunk)
        with self._condition:
            if ahead.made is not None:
                self._aside[ahead.chunk] = time.monotonic() - began
            self._condition.notify_all()

    def confirm(self, ahead: Ahead | None) -> bool:
        """Let what was made count, if it was."""
        if ahead is None or ahead.made is None:
            return False
        self._segments[ahead.chunk].take_made(ahead.made, self._spares.swap)
        self.figures.taken += 1
        return True

    def took(self, chunk: int, seconds: float) -> None:
        """A chunk's usual step has taken so long."""
        with self._condition:
            self._seconds[chunk] = seconds

    # `optimizer.step()`, on the script's thread.

    def accepted(
        self, own: Settings, groups: list[Settings], present: Mapping[int, tuple[bool, ...]]
    ) -> dict[int, Ahead]:
        """What was begun, by chunk, of those steps that are the ones that are to be made."""
        with self._condition:
            found = {}
            self._backward = time.monotonic() - self._first
            for chunk, segments in self._segments.items():
                ahead = self._could.get(chunk)
                settings, here = groups[segments.states.group], present.get(chunk)
                holds = ahead is not None and self._holds(ahead, own, settings, here)
                self._held[chunk] = self._held[chunk] + 1 if holds else 0
                if ahead is not None and holds and ahead.begun:
                    found[chunk] = ahead
                elif ahead is not None:
                    self._drop(ahead)
            self._could, self._expected, self._came = {}, self._came, self._none_came()
            return found

    def _holds(
        self, ahead: Ahead, own: Settings, settings: Settings, present: tuple[bool, ...] | None
    ) -> bool:
        return (
            ahead.present == present
            and self._is_current(ahead)
            and ahead.state == self._segments[ahead.chunk].states.changes
            and _are_same_settings(ahead.settings, settings)
            and _are_same_attributes(ahead.own, own)
        )

    def step_ended(self) -> None:
        """`optimizer.step()` is about to return: the next forward begins."""
        self._began, self._waited, self._is_worth_it = time.monotonic(), self._spares.waited(), None


def can_be_stepped_ahead(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step changes only values and state: PyTorch's own classes. Another class's step may count
    or print, which cannot be undone."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _are_same_settings(then: Settings, now: Settings) -> bool:
    keys = then.keys() - {"param_names"}  # for people
    return keys == now.keys() - {"param_names"} and all(_is_same(then[key], now[key]) for key in keys)


def _are_same_attributes(then: Settings, now: Settings) -> bool:
    """Of PyTorch's own classes, whose step reads no attribute that may change while it stays one object."""
    keys = then.keys()
    return keys == now.keys() and all(then[k] is now[k] or _is_same(then[k], now[k]) for k in keys)


def _is_same(then: Any, now: Any) -> bool:
    """True if both are surely equal, and were not one object that has changed meanwhile."""
    if isinstance(then, Tensor) and isinstance(now, Tensor):  # of which `noted` has made copies
        return (then.dtype, then.device) == (now.dtype, now.device) and torch.equal(then, now)
    return _cannot_change(then) and type(then) is type(now) and bool(then == now)


def _cannot_change(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_cannot_change, value))
    return value is None or isinstance(value, (int, float, str))
