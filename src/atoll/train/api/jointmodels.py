"""Several models of a script that train as one: their module, the loop over them, and what each weighs.

A parameter server's shards hold one model, so a session's models train there as parts of one module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import nn

from atoll.core.weighing import worst
from atoll.train.api.scriptmodel import Given, ScriptModel
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.samples import ContributionWeight

_NOTHING = ContributionWeight(0.0, 0.0)
_REMEMBERED = 32  # passes of a script's loop, of which the longest counts


class JointContribution:
    """A worker's contribution to an iteration of several models that train as one."""

    def __init__(self, models: Sequence[ScriptModel], more: MoreData) -> None:
        """Weigh `models`. Batches that `more` says are repeated weigh nothing."""
        self._models, self._more = models, more

    def contribution(self, has_gradient: bool) -> ContributionWeight:
        """Return a contribution by the largest weight that a backward has shown so far; see `whole`."""
        if self._more.repeats or not has_gradient:
            return ContributionWeight(0.0, 0.0)
        fresh = [each.samples.known or 0.0 for each in self._models if not each.samples.is_used]
        weight = max(fresh, default=0.0)
        if not weight:  # that of gradients that came before, or still come; 0 only if that was given for all
            coming = [each for each in self._models if each.has_new or each.accumulates()]
            known = [each.samples.known for each in coming] or [
                each.samples.known for each in self._models if each.samples.known is not None
            ]
            weight = max((1.0 if each is None else each for each in known), default=1.0)
        return ContributionWeight(weight, 0.0)

    def whole(self, own: ContributionWeight, ends: bool) -> ContributionWeight:
        """Return a contribution with the weight of each model, once all gradients have come. `ends`: it is
        foreseen to end a pass of the script's loop."""
        models = self._models
        found = [each.contribution(own.weight) if own.weight else _NOTHING for each in models]
        bases = [part.basis for each, part in zip(models, found, strict=True) if each.has_new]
        return ContributionWeight(
            own.weight,
            sum(part.samples for part in found),
            worst(bases),
            by_optimizer=tuple(
                (part.weight, part.samples, part.again)
                for each, part in zip(models, found, strict=True)
                for _ in each.sets
            ),
            ends=ends,
        )


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
