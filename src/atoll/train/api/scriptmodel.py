"""One of a session's models as the script knows it: what one call of `session.prepare` has named.

A `Prepared` trains one of them. Under a parameter server, whose shards hold one model, it trains all of the
session's models together, as parts of one module. What the script, or a checkpoint, asks of one model stands
here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.memory import Memory
from atoll.core.stands import Epoch
from atoll.core.weighing import KNOWN
from atoll.tensors.gradienthooks import after_gradient
from atoll.tensors.torch_compat import uncompiled
from atoll.train.api.origin import Origin
from atoll.train.api.stepset import StepSet
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.reducer import Shares
from atoll.train.gradients.samples import CountedBatch, SampleCount, SeenSamples
from atoll.train.gradients.sums import gradient_nodes, will_accumulate

_REMEMBERED = 32  # passes of a loop over several models, of which the longest counts


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
        has_new: True if gradients of it have come that no reduction has seen, if it trains with others.
        reached_in: the latest backward that reached one of its forwards.
    """

    def __init__(self, given: Given, more: MoreData) -> None:
        self.given, self.module = given, given.module
        self.parameters = dict(self.module.named_parameters())
        self.samples = SampleCount(more)
        self.sets: list[StepSet] = []
        self.steps_made = 0
        self.has_new = False
        self.unstepped = False
        # The latest backward that reached a forward, and the latest that left gradients:
        self.reached_in = self._came_in = -1
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
        self.has_new, self.unstepped = False, True

    # Among others that train as one model with it

    def watch(self, trained: Collection[nn.Parameter], backward: Callable[[], int]) -> None:
        """Watch which backwards leave gradients in this model's `trained` parameters. `backward()` returns
        the number of the one that is under way."""
        self._nodes = gradient_nodes(p for p in self.parameters.values() if p in trained)

        def came(*_: object) -> None:
            self.has_new = True
            if self._came_in != backward():
                self._came_in = backward()
                if self.reached_in != self._came_in:
                    self.samples.missed()

        self._hooks = [after_gradient(node, came) for node in self._nodes]

    def close(self) -> None:
        """Let go of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def accumulates(self) -> bool:
        """True within a backward that will leave gradients in this model's parameters."""
        return will_accumulate(self._nodes)

    def contribution(self, otherwise: float) -> tuple[float, float, str]:
        """Return this worker's part in the mean of this model's gradients: its weight, its samples, and how
        certain the weight is. Gradients that were reduced before, and are left, weigh `otherwise`."""
        if self.has_new:
            own = self.samples.contribution(has_gradient=True)
            return own.weight, own.samples, own.basis
        has_values = any(each.has_values for each in self.sets)
        return (otherwise if has_values else 0.0), 0.0, KNOWN

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip this model's gradients alone, as the script might; return the norm before."""
        parameters = self.parameters.values()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


class ScriptLoop:
    """The passes of a script's loop: the reductions that belong together. A newcomer may enter between two
    passes.

    A pass begins with gradients of the models with which the first one began, once the first model has
    stepped. With a single model, a pass has the reductions whose gradients add up: several backwards before a
    step, or those until the last of several optimizers has stepped.

    Where a pass ends can only be foreseen: after as many reductions as the longest of the latest passes had,
    as a pass may be longer now and then (a step of regularisation in every fourth one). Shorter ones have no
    end that is foreseen. A worker that had no batch as its first pass began knows no beginning, and foresees
    nothing.
    """

    def __init__(self) -> None:
        self._begins_with: frozenset[int] | None = None  # None: before the first reduction
        self._has_stepped = False  # the first model, or all optimizers of a single one, in this pass
        self._at = 0  # reductions in this pass so far
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED)  # of the passes before

    def reduced(self, new: frozenset[int]) -> bool:
        """Note a reduction to which this worker has brought gradients of the models `new`, by their numbers;
        return True if it is foreseen to be the last one of its pass."""
        if self._begins_with is None:
            self._begins_with = new
        elif self._begins_with and self.begins(new):
            self._lengths.append(self._at)
            self._at, self._has_stepped = 0, False
        self._at += 1
        return self._at == max(self._lengths, default=0)

    def begins(self, new: frozenset[int]) -> bool:
        """True if a reduction to which this worker brings gradients of the models `new` begins a pass, or if
        this worker cannot know."""
        if not self._begins_with:
            return True
        may = new == self._begins_with if new else self._at == max(self._lengths, default=0)
        return self._has_stepped and may

    def stepped(self) -> None:
        """Note a step of the first model; with a single one, that no reduced gradients are left to step."""
        self._has_stepped = True


class Several(nn.Module):
    """Several models as one module. A model lies under its name if a module can be held so, else under its
    number."""

    def __init__(self, models: Sequence[Given]) -> None:
        super().__init__()
        for number, each in enumerate(models):
            name = each.origin.name
            is_usable = bool(name) and "." not in name and not name.isdigit() and not hasattr(self, name)
            self.add_module(name if is_usable else str(number), each.module)


def one_module(models: Sequence[Given]) -> nn.Module:
    """Return the module that these models make together: one model itself."""
    return models[0].module if len(models) == 1 else Several(models)
