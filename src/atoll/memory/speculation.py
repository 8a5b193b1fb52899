"""Steps that are made ahead of `optimizer.step()`, while backward still goes on.

Once as many of a chunk's gradients have come as in the step before, the chunk may be stepped **aside**: in
spare payloads that begin as copies, while values, gradients and state stay what they are for everybody else.
`optimizer.step()` checks whether everything that the step was made of is unchanged. If so, the spares take
the payloads' places without a copy. If not, they are dropped, and the chunk is stepped as usual. So no step
that counts is ever undone, and nobody sees a step that does not count yet.

Stepping ahead costs copies. It is done if the steps of all chunks take longer than the forward beside which
they would otherwise be made. Source: docs/memory.md, "Steps during backward".
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

from atoll.memory.gradients import ModelGradients
from atoll.memory.payloads import Key
from atoll.memory.segments import Made, RunSegment, Segments, noted
from atoll.memory.stepqueue import Settings
from atoll.moves.timeline import EARLY_COST

TRUST = 3  # a chunk is stepped ahead after so many steps in a row at which it could have been
_ALWAYS = False  # True steps ahead even if it is not worth its copies, for tests


@dataclass
class AheadFigures:
    """Counts of chunks that were stepped ahead.

    Attributes:
        taken: steps that counted.
        dropped: steps that were made in vain.
    """

    taken: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Spares:
    """The means of stepping chunks aside.

    Attributes:
        chunks: chunks that have room for spares.
        swap: exchanges a payload and its spare.
        waited: returns the seconds that uses have waited for chunks so far.
        figures: counts the steps that were made ahead.
    """

    chunks: tuple[int, ...]
    swap: Callable[[Key, Key], None]
    waited: Callable[[], float]
    figures: AheadFigures


@dataclass(eq=False)
class Ahead:
    """A step that may be made ahead, with everything that it depends on.

    Attributes:
        present: for each slot, whether it has a gradient.
        settings: the chunk's param group.
        own: the optimizer's attributes.
        gradient: the count of changes of the chunk's gradients.
        state: the count of changes of the chunk's states.
        begun: True once the stepping thread has taken it.
        made: the result, once it is made.
    """

    chunk: int
    present: tuple[bool, ...]
    settings: Settings
    own: Settings
    gradient: int
    state: int
    begun: bool = False
    made: Made | None = None


class Speculation:
    """The choice of chunks to step ahead, and those steps, for a `ChunkStepper` and on its thread.

    Args:
        segments: the chunks that the `ChunkStepper` steps.
        condition: the condition of the queue of steps.
        run: makes the optimizer's own code for given attributes of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segments: Mapping[int, Segments],
        gradients: ModelGradients,
        spares: Spares,
        condition: threading.Condition,
        run: Callable[[Settings], RunSegment],
    ) -> None:
        self._optimizer, self._gradients, self._spares = optimizer, gradients, spares
        self._segments = {chunk: segments[chunk] for chunk in spares.chunks if chunk in segments}
        self._condition, self._run = condition, run
        self.figures = spares.figures
        self._came: dict[int, list[int]] = self._none_came()  # gradients, by slot, since the last step
        self._expected: dict[int, list[int]] = {}  # gradients that came before the last step
        self._could: dict[int, Ahead] = {}  # chunks whose gradients have come as expected
        self._held = dict.fromkeys(self._segments, 0)  # steps in a row at which `_could` still held
        self._queue: deque[Ahead] = deque()
        self._failed: set[int] = set()  # chunks that could not be stepped aside
        self._seconds: dict[int, float] = {}  # how long each chunk's latest usual step took
        self._aside: dict[int, float] = {}  # how long each chunk's latest step aside took
        self._first = self._backward = 0.0  # when the first gradient came; seconds from it to `step()`
        self._began = self._waited = 0.0  # when the last step ended, and `Spares.waited` then
        self._is_worth_it: bool | None = None  # steps take longer than forward did; None during forward

    def _none_came(self) -> dict[int, list[int]]:
        return {chunk: [0] * len(each.states.trained.parameters) for chunk, each in self._segments.items()}

    # During backward, on its thread.

    def came(self, chunk: int, slot: int) -> None:
        """Note that a gradient has come, or is on its way."""
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
        """Return the step that the chunk could make now; None if it cannot be made aside."""
        segments, present = self._segments[chunk], self._gradients.present(chunk)
        states = segments.states
        settings = noted(self._optimizer.param_groups[states.group], without="params")
        gradient = self._gradients.changes(chunk)
        if gradient is None or not segments.is_cut_for(present, settings):
            return None
        if settings.get("foreach"):  # foreach kernels may write into gradients (SGD's nesterov)
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
        """Return the next step to make, if there `has_next`; `make` follows. The caller holds the
        condition."""
        ahead = self._queue.popleft()
        ahead.begun = True
        return ahead

    @property
    def has_next(self) -> bool:
        """True if a chunk is to be stepped aside now.

        Chunks whose gradients have changed are left out. So are steps that would not end before `step()`,
        when the chunks that forward waits for come first.
        """
        while self._queue and not (self._is_current(self._queue[0]) and self._is_in_time(self._queue[0])):
            self._queue.popleft()
        return bool(self._queue)

    def _is_current(self, ahead: Ahead) -> bool:
        return ahead.gradient == self._gradients.changes(ahead.chunk)

    def _is_in_time(self, ahead: Ahead) -> bool:
        seconds = self._aside.get(ahead.chunk, EARLY_COST * self._seconds.get(ahead.chunk, 0.0))
        return _ALWAYS or time.monotonic() + seconds <= self._first + self._backward

    def make(self, ahead: Ahead) -> None:
        """Step a chunk aside. After an error the chunk is stepped as usual, which raises it where it
        belongs."""
        segments, began = self._segments[ahead.chunk], time.monotonic()
        try:
            with self._gradients.read_ahead(ahead.chunk, ahead.gradient) as gradients:
                if gradients is not None:
                    run = self._run(ahead.own)
                    ahead.made = segments.step_aside(ahead.settings, gradients, run)
        except BaseException:  # of any kind: the thread must go on, or its waiters wait for ever
            self._failed.add(ahead.chunk)
        with self._condition:
            if ahead.made is not None:
                self._aside[ahead.chunk] = time.monotonic() - began
            self._condition.notify_all()

    def confirm(self, ahead: Ahead | None) -> bool:
        """Let a step that was made aside count. False if there is none."""
        if ahead is None or ahead.made is None:
            return False
        self._segments[ahead.chunk].take_made(ahead.made, self._spares.swap)
        self.figures.taken += 1
        return True

    def took(self, chunk: int, seconds: float) -> None:
        """Note how long a chunk's usual step took."""
        with self._condition:
            self._seconds[chunk] = seconds

    # `optimizer.step()`, on the script's thread.

    def accepted(
        self, own: Settings, groups: list[Settings], present: Mapping[int, tuple[bool, ...]]
    ) -> dict[int, Ahead]:
        """Return the steps, by chunk, that were begun aside and are those that `optimizer.step()` is to
        make."""
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
        """Note that `optimizer.step()` is about to return: the next forward begins."""
        self._began, self._waited, self._is_worth_it = time.monotonic(), self._spares.waited(), None


def can_be_stepped_ahead(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer's step changes only values and state, as those of PyTorch's own classes do.

    Another class's step may count or print, which cannot be undone.
    """
    return type(optimizer).__module__.startswith("torch.optim.")


def _are_same_settings(then: Settings, now: Settings) -> bool:
    keys = then.keys() - {"param_names"}  # names are for people: no step depends on them
    return keys == now.keys() - {"param_names"} and all(_is_same(then[key], now[key]) for key in keys)


def _are_same_attributes(then: Settings, now: Settings) -> bool:
    """True if the optimizer's attributes are unchanged, for PyTorch's own classes.

    Their step reads no attribute that can change while it stays one object.
    """
    keys = then.keys()
    return keys == now.keys() and all(then[k] is now[k] or _is_same(then[k], now[k]) for k in keys)


def _is_same(then: Any, now: Any) -> bool:
    """True if both are certainly equal, and not one object that has changed since."""
    if isinstance(then, Tensor) and isinstance(now, Tensor):  # `noted` has copied the earlier one
        return (then.dtype, then.device) == (now.dtype, now.device) and torch.equal(then, now)
    return _cannot_change(then) and type(then) is type(now) and bool(then == now)


def _cannot_change(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_cannot_change, value))
    return value is None or isinstance(value, (int, float, str))
