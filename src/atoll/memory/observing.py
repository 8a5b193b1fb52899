"""Looks on at a script's first steps under its budgets: what `atoll memory plan` prints.

The first `fit` of the script is observed. Its first step records the order of uses, the second makes the
moves that a plan knows of, and the third is recorded and timed; then the plan is searched by what was
recorded, and the script is ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory.bandwidth import measure, settle
from atoll.memory.fitted import Fitted
from atoll.memory.planning import choose, measurable, profile_of
from atoll.memory.profile import Recorder
from atoll.moves.owners import Groups, Share
from atoll.moves.search import MemoryPlan
from atoll.moves.timeline import Bandwidths
from atoll.tensors.stephooks import AroundStep

_RECORDED = 3  # which step is


@dataclass(frozen=True)
class Seen:
    """What the steps have shown. `plan` is searched by the third step's profile, and None where the script
    ended before; `as_run` is the prediction for the plan that the script ran with, by the same profile, and
    `seconds` what that step took. `first` is the plan that it ran with."""

    first: MemoryPlan
    budgets: Budgets
    bandwidths: Bandwidths | None = None
    plan: MemoryPlan | None = None
    as_run: MemoryPlan | None = None
    seconds: float = 0.0
    figures: MemoryFigures | None = None


class EnoughSeen(BaseException):
    """Ends the script: no error, and nothing that a script's `except Exception` should take for one. It is
    raised by the third step and each later one."""


class Observation:
    """A context: within it the first `fit` is observed. Afterwards `seen` is what was found; None: no fit."""

    def __init__(
        self, workers: int = 1, replicas: Groups = (), network: float = 0.0, between: float = 0.0
    ) -> None:
        """The plan is searched for the first of so many `workers`, of whom the groups of `replicas` hold one
        each; `network` bytes/s go each way between those of a group, and `between` groups."""
        self._share = Share(0, workers, replicas=replicas) if workers > 1 else None
        self._network, self._between = network, between if replicas else 0.0
        self.seen: Seen | None = None
        self._fitted: Fitted | None = None
        self._steps, self._began = 0, 0.0
        self._recorder: Recorder | None = None
        self._uses: Any = ()
        self._handles: list[Any] = []

    def __enter__(self) -> Observation:
        global _observation
        _observation = self
        return self

    def __exit__(self, *_error: object) -> None:
        global _observation
        _observation = None
        if self._recorder is not None:  # the script ended within the step that is recorded
            self._recorder.stop()
        for handle in self._handles:
            handle.remove()

    def take(self, fitted: Fitted, optimizer: torch.optim.Optimizer | None) -> None:
        """Observe this one, unless another one was first."""
        if self._fitted is not None:
            return
        self._fitted, self.seen = fitted, Seen(fitted.plan, fitted.budgets)
        if optimizer is not None:
            self._handles = [AroundStep(optimizer, self._before_step, self._after_step)]

    def _before_step(self, *_call: Any) -> None:
        if self._recorder is not None:
            self._uses, self._recorder = self._recorder.stop(), None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_call: Any) -> None:
        fitted = self._fitted
        assert fitted is not None
        self._steps += 1
        settle(next(fitted.model.parameters()).device)
        now = time.perf_counter()
        if self._steps == _RECORDED - 1:
            self._recorder = Recorder(fitted.model, fitted.mover)
            self._began = now
            self._recorder.start()
        elif self._steps >= _RECORDED:
            if self._steps == _RECORDED:
                self._search(fitted, optimizer, now - self._began)
            raise EnoughSeen  # at each later step too: a bare `except:` takes the first for an error

    def _search(self, fitted: Fitted, optimizer: torch.optim.Optimizer, seconds: float) -> None:
        model, budgets = fitted.model, fitted.budgets
        device = next(model.parameters()).device
        bandwidths = measure(device, optimizer, budgets.folder, measurable(budgets))
        profile = profile_of(model, optimizer, self._uses, master=budgets.master)
        plan = choose(
            model,
            optimizer,
            budgets,
            profile=profile,
            bandwidths=bandwidths,
            share=self._share,
            network=self._network,
            between=self._between,
        )
        as_run = choose(model, optimizer, as_in(budgets, fitted.plan), profile=profile, bandwidths=bandwidths)
        self.seen = Seen(fitted.plan, budgets, bandwidths, plan, as_run, seconds, fitted.stats())


def as_in(budgets: Budgets, plan: MemoryPlan) -> Budgets:
    """These budgets, with the chunk size of `plan` pinned, and where its optimizer steps."""
    steps_on = budgets.pins.steps_on if plan.fits else plan.steps_share or "host"
    pins = msgspec.structs.replace(budgets.pins, chunk_bytes=plan.chunk_bytes, steps_on=steps_on)
    return msgspec.structs.replace(budgets, pins=pins)


_observation: Observation | None = None


def tell_fitted(fitted: Fitted, optimizer: torch.optim.Optimizer | None) -> None:
    """`fit` has fitted a model."""
    if _observation is not None:
        _observation.take(fitted, optimizer)
