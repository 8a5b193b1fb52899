"""One of a session's models as the script knows it: what one call of `session.prepare` has named.

A `Prepared` trains one of them. Under a parameter server, whose shards hold one model, it trains all of the
session's models together, as parts of one module. What the script, or a checkpoint, asks of one model stands
here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.memory import Memory
from atoll.core.stands import Epoch
from atoll.tensors.gradienthooks import after_gradient
from atoll.tensors.torch_compat import is_within_backward, uncompiled
from atoll.train.api.origin import Origin
from atoll.train.api.stepset import StepSet
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.backward import BackwardEnd
from atoll.train.gradients.forwards import SeenForward
from atoll.train.gradients.reducer import Shares
from atoll.train.gradients.samples import ContributionWeight, CountedBatch, SampleCount, SeenSamples
from atoll.train.gradients.sums import gradient_nodes, will_accumulate


class Batches(Protocol):
    """The batches on which one model trains (`train/data/batches.py`).

    Attributes:
        shares: this worker's reports on its share of a batch; None: none.
    """

    @property
    def shares(self) -> Shares | None: ...

    def forward(self) -> None:
        """Note that the model is given a batch."""

    def count(self, seen: SeenSamples) -> CountedBatch:
        """Count a batch that backward has reached."""

    def epoch(self) -> Epoch:
        """Return the epoch of the present batch."""

    def whole(self) -> None:
        """Note that an iteration's gradients are reduced."""


@dataclass(frozen=True)
class Given:
    """The arguments of one call of `session.prepare`.

    Attributes:
        model: the model, perhaps compiled.
        optimizers: its optimizers.
        origin: the signs by which the model is recognized after a restart.
        batches: the batches on which it trains.
        memory: the budgets of the call; None: it has none.
        step: the unit in which its optimizers step, as the script asks for it.
        bf16: how bfloat16 parameters are stepped in float32.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    origin: Origin
    batches: Batches
    memory: Memory | None = None
    step: str | None = None
    bf16: str | None = None

    @property
    def module(self) -> nn.Module:
        """The model itself, inside of torch.compile's wrapper."""
        return uncompiled(self.model)


class ScriptModel:
    """One model of the script's: its samples, and the steps of its optimizers.

    Attributes:
        given: what the script has given.
        module: the model itself.
        parameters: its parameters, by the names that the script knows.
        samples: the samples of its iteration under way.
        sets: its optimizers.
        steps_made: the number of its steps, if it trains together with others.
        unstepped: True between a reduction and this model's next step.
        has_new: True if gradients of it have come that no reduction has seen.
        reached_in: the latest backward that reached one of its forwards.
        forwards: the number of its forwards that have ended.
        counted: the forwards whose samples are counted, and not used by a reduction.
        thread: the thread of the latest forward; None before the first.
        weighed_in: the thread of the latest weight; None before the first.
    """

    def __init__(self, given: Given, more: MoreData, backward: BackwardEnd) -> None:
        self.given, self.module, self._backward = given, given.module, backward
        self.parameters = dict(self.module.named_parameters())
        self.samples = SampleCount(more)
        self.sets: list[StepSet] = []
        self.steps_made = 0
        self.has_new = False
        self.unstepped = False
        self.forwards = 0
        self.thread: int | None = None
        self.weighed_in: int | None = None
        self.counted: list[SeenForward] = []
        # The latest backward that reached a forward, and the latest that left gradients:
        self.reached_in = self._came_in = -1
        self._began_in, self._mark = -1, self.samples.mark()  # the latest backward of either, and its start
        self._counted_before = 0  # forwards that were counted by then
        self._nodes: list[Any] = []
        self._hooks: list[Any] = []

    @property
    def origin(self) -> Origin:
        return self.given.origin

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step the model, in the script's order."""
        return list(self.given.optimizers)

    @property
    def stepped_names(self) -> list[list[str]]:
        """The names of each optimizer's parameters, in the order of its state_dict."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [
            [names.get(id(p), "") for group in each.param_groups for p in group["params"]]
            for each in self.optimizers
        ]

    def goes_on(self, former: ScriptModel) -> None:
        """Go on as the model that was prepared before."""
        self.samples.unknown, self.steps_made = former.samples.unknown, former.steps_made

    def reduced(self, *, alike: bool) -> None:
        """Note that gradients are reduced. `alike`: all workers counted alike."""
        if self.has_new or not self._hooks:  # of others alone the samples are still to count
            self.samples.use(alike=alike)
            self.counted.clear()
        self.has_new, self.unstepped = False, True

    def gradient_came(self, *_: object) -> None:
        """Note that autograd has delivered a gradient of this model, and arm the reduction."""
        self.has_new, number = True, self.begins()
        if self._came_in != number:
            self._came_in = number
            if self.reached_in != number:
                self.samples.missed()
        self._backward.arm()

    @property
    def awaits_backward(self) -> bool:
        """True if a weight is given for a batch that no backward has computed (see `SampleCount`)."""
        return self.samples.awaits_backward

    @property
    def has_counted(self) -> bool:
        """True if samples are counted or given that no reduction has used."""
        return self.samples.known is not None and not self.samples.is_used

    def trains_in(self, thread: int) -> bool:
        """True if the latest forward or the latest weight was in this thread; before the first, always."""
        return thread in (self.thread, self.weighed_in) or self.thread is self.weighed_in is None

    def has_gradients(self) -> bool:
        """True if a parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters.values())

    def begins(self) -> int:
        """Return the number of the backward under way, which is about to count samples of this model, or has
        left a gradient in it."""
        number = self._backward.begins(self)
        self.begins_as(number)
        return number

    def begins_as(self, number: int) -> None:
        """Remember what is counted before the backward of this number."""
        if self._began_in != number:
            self._began_in, self._mark = number, self.samples.begins()
            self._counted_before = len(self.counted)

    def forward_raised(self) -> None:
        """Treat a forward that raised like a backward that did so before it reached the model.

        Not if a weight is given, and another forward has ended since: then the error is of another batch.
        """
        self.thread = get_ident()
        if not self.samples.awaits_backward or self.samples.forward_raised(self.forwards):
            self._backward.forward_raised(self)

    def give_up(self, *, retried: bool) -> None:
        """Forget the samples of a backward that raised. `retried`: another one follows before the step."""
        is_empty = not self.has_gradients()
        self.samples.take_back(self._mark, is_empty=is_empty, retried=retried)
        first = 0 if is_empty else self._counted_before
        for forward in self.counted[first:]:
            forward.is_counted = False
        del self.counted[first:]
        if not is_within_backward():  # else gradients of the next backward come already
            self.has_new = self.has_new and any(each.has_values for each in self.sets)

    # Among others that train as one model with it

    def watch(self, trained: Collection[nn.Parameter]) -> None:
        """Watch which backwards leave gradients in this model's `trained` parameters."""
        self._nodes = gradient_nodes(p for p in self.parameters.values() if p in trained)
        self._hooks = [after_gradient(node, self.gradient_came) for node in self._nodes]

    def close(self) -> None:
        """Let go of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def accumulates(self) -> bool:
        """True within a backward that will leave gradients in this model's parameters."""
        return will_accumulate(self._nodes)

    def contribution(self, otherwise: float) -> ContributionWeight:
        """Return this worker's part in the mean of this model's gradients. Gradients that were reduced
        before, and are left, weigh `otherwise`."""
        if self.has_new:
            return self.samples.contribution(has_gradient=True)
        has_values = any(each.has_values for each in self.sets)
        return ContributionWeight(otherwise if has_values else 0.0, 0.0, again=True)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip this model's gradients alone, as the script might; return the norm before."""
        parameters = self.parameters.values()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
