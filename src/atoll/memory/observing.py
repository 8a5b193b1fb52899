"""Observes a script's first steps under its budgets, for `atoll memory plan`.

The script's first `fit` is observed. Its first step records the order of uses, the second makes the moves of
a plan that knows this order, and the third is recorded and timed. Then the best plan for the recorded uses is
searched, and the script is ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from atoll.core.memory import Budgets, MemoryFigures
from atoll.memory.bandwidth import settle
from atoll.memory.fitted import Fitted
from atoll.memory.planning import choose, measured, profile_of
from atoll.memory.profile import Recorder
from atoll.moves.owners import Groups, Share
from atoll.moves.search import MemoryPlan
from atoll.moves.timeline import Bandwidths
from atoll.tensors.stephooks import AroundStep

_RECORDED = 3  # the number of the step that is recorded


@dataclass(frozen=True)
class ObservedScript:
    """The result of observing a script.

    Attributes:
        first: the plan that the script ran with.
        plan: the plan found for the third step's uses; None if the script ended before that step's end.
        as_run: the prediction for the script's own plan, for the same uses.
        seconds: how long the third step took.
        figures: the moves and peaks until the third step's end.
    """

    first: MemoryPlan
    budgets: Budgets
    bandwidths: Bandwidths | None = None
    plan: MemoryPlan | None = None
    as_run: MemoryPlan | None = None
    seconds: float = 0.0
    figures: MemoryFigures | None = None


class EnoughSeen(BaseException):
    """Ends the script, at the third step and each later one.

    A BaseException, as it is no error, and a script's `except Exception` should not catch it.
    """


class Observation:
    """A context in which the script's first `fit` is observed.

    Attributes:
        seen: the result; None if the script called no `fit`.
    """

    def __init__(
        self, workers: int = 1, replicas: Groups = (), network: float = 0.0, between: float = 0.0
    ) -> None:
        """Search the plan for the first of several workers.

        Args:
            workers: the number of workers that share the model.
            replicas: groups of workers that each hold a replica of the model between them.
            network: bytes/s each way between the workers of a group; 0 for not known.
            between: bytes/s each way between groups; 0 for not known.
        """
        self._share = Share(0, workers, replicas=replicas) if workers > 1 else None
        self._network, self._between = network, between if replicas else 0.0
        self.seen: ObservedScript | None = None
        self._fitted: Fitted | None = None
        self._steps, self._began = 0, 0.0
        self._recorder: Recorder | None = None
        self._uses: Any = ()
        self._handles: list[Any] = []
        self._optimizers: Sequence[torch.optim.Optimizer] = ()

    def __enter__(self) -> Observation:
        global _observation
        _observation = self
        return self

    def __exit__(self, *_error: object) -> None:
        global _observation
        _observation = None
        if self._recorder is not None:  # the script ended within the recorded step
            self._recorder.stop()
        for handle in self._handles:
            handle.remove()

    def take(self, fitted: Fitted, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Observe a fitted model, unless another was fitted before.

        Of several optimizers, the last one's steps are counted.
        """
        if self._fitted is not None:
            return
        self._fitted, self.seen = fitted, ObservedScript(fitted.plan, fitted.budgets)
        self._optimizers = optimizers
        if optimizers:
            self._handles = [AroundStep(optimizers[-1], self._before_step, self._after_step)]

    def _before_step(self, *_call: Any) -> None:
        if self._recorder is not None:
            self._uses, self._recorder = self._recorder.stop(), None

    def _after_step(self, *_call: Any) -> None:
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
                self._search(fitted, now - self._began)
            raise EnoughSeen  # at each later step too, as a bare `except:` may have caught the first

    def _search(self, fitted: Fitted, seconds: float) -> None:
        model, budgets, optimizers = fitted.model, fitted.budgets, self._optimizers
        bandwidths = measured(model, optimizers, budgets)
        profile = profile_of(model, optimizers, self._uses, master=budgets.master)
        plan = choose(
            model,
            optimizers,
            budgets,
            profile=profile,
            bandwidths=bandwidths,
            share=self._share,
            network=self._network,
            between=self._between,
        )
        as_run = choose(
            model, optimizers, as_in(budgets, fitted.plan), profile=profile, bandwidths=bandwidths
        )
        self.seen = ObservedScript(fitted.plan, budgets, bandwidths, plan, as_run, seconds, fitted.stats())


def as_in(budgets: Budgets, plan: MemoryPlan) -> Budgets:
    """Return these budgets, pinned to the chunk size of `plan` and to where its optimizer steps."""
    steps_on = budgets.pins.steps_on if plan.fits else plan.steps_share or "host"
    pins = msgspec.structs.replace(budgets.pins, chunk_bytes=plan.chunk_bytes, steps_on=steps_on)
    return msgspec.structs.replace(budgets, pins=pins)


_observation: Observation | None = None


def tell_fitted(fitted: Fitted, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Tell the observation, if there is one, that `fit` has fitted a model."""
    if _observation is not None:
        _observation.take(fitted, optimizers)
