"""The epoch of the batch on which a script trains, if no sampler of the session deals the data.

The epoch is the value of the script's own variable `epoch`, if a function or module on the stack of the
training step has one. Otherwise it is the number of the pass over the DataLoader that gave the model its last
batch. A pass is one loop over a DataLoader. It counts from the first batch on which the model trains, so
evaluations and a look at one batch do not count. A loop that was left after one batch, as
`next(iter(loader))` does, does not count either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader

from atoll.core.scriptline import script_line, script_number
from atoll.core.stands import LOOP, UNKNOWN, Epoch
from atoll.tensors.torch_patches import watch_loaders
from atoll.train.data.leased_sampler import LeasedBatches

_VARIABLES = ("epoch", "epoch_idx", "epoch_index")


@dataclass
class _Reached:
    """How far backwards have come in a pass: the batches that they have reached whole, and the samples of the
    next one that they have reached."""

    batches: int = 0
    part: float = 0.0

    def reach(self, samples: float, size: float, given: int) -> float:
        """Add samples of the next batches, of this size, of which so many are given; return the number
        added."""
        new = min(samples, (given - self.batches) * size - self.part)
        if new <= 0:
            return 0.0
        whole, self.part = divmod(self.part + new, size)
        self.batches += int(whole)
        return new


@dataclass
class _Pass:
    """One loop over a DataLoader.

    Attributes:
        line: the script's line at which it began.
        batch_size: of batches that are made of a sampler's indices; 0 if a sampler makes the batches.
        given: the number of batches that it gave.
        is_over: True if the loop has ended.
        number: the number of the pass; 0 until the model trains on one of its batches.
        size: the size of the batch that backward has reached last, or is about to reach whole.
        share: the part of its samples that counts in the mean.
        is_ahead: True if the script has fetched batches ahead of their use: then a second forward of a batch
            cannot be told from the first one of the next.
    """

    line: str
    batch_size: int = 0
    given: int = 0
    is_over: bool = False
    number: int = 0
    size: float = 0.0
    share: float = 1.0
    is_ahead: bool = False
    _any: _Reached = field(default_factory=_Reached)  # by backwards of any model
    _first: _Reached | None = None  # by those of the first model; None: no other model counts

    @property
    def is_shared(self) -> bool:
        """True if models other than the first have counted samples of this pass."""
        return self._first is not None

    def reach(self, samples: float, sizes: Collection[float]) -> float:
        """Record that a backward reaches a forward of `samples` samples; return how many of these it reaches
        for the first time. That is 0 if all batches that the loop gave were reached before: a script may call
        its model several times for one batch. Backwards are those of the first model.

        `sizes`: the possible sizes of the next batch. A forward may have a part of a batch, or several.
        """
        return self._reach(self._first or self._any, samples, sizes)

    def use(self, samples: float, sizes: Collection[float], *, by_first: bool) -> float:
        """Record the same of any model: return how many samples no backward had reached before.

        `by_first`: it is a backward of the first model. In a pass that is not shared yet it counts for both.
        """
        if self._first is None and not by_first:
            self._first = replace(self._any)
        return self._reach(self._any, samples, sizes)

    def next_sizes(self, sizes: set[float]) -> set[float]:
        """Return the possible sizes of the next batch that the first model reaches. `sizes` are those of the
        next batch that no model has reached."""
        first, most = self._first, self._any
        lags = first is not None and (first.batches, first.part) < (most.batches, most.part)
        return {self.size} if lags else sizes

    def _reach(self, reached: _Reached, samples: float, sizes: Collection[float]) -> float:
        left = self.given - reached.batches
        if left <= 0 or samples <= 0:
            return 0.0
        self.is_ahead = self.is_ahead or left > 1
        if self.batch_size and sizes:
            # The sampler gives indices, and counts those of a batch that are left.
            sizes = [float(min(self.batch_size, max(sizes) + reached.part))]
        self.size = samples if samples in sizes else min(sizes, default=samples)
        return reached.reach(samples, self.size, self.given)


class Passes:
    """This worker's passes over its data. All DataLoaders of the process are watched until `close`."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[object, _Pass] = WeakKeyDictionary()  # by the loader's iterator
        self._last: dict[str, _Pass] = {}  # the last pass on which the model trained, by line
        self._dealt: WeakKeyDictionary[object, _Pass] = WeakKeyDictionary()  # the latest pass, by its sampler
        self._given = threading.local()  # `by`: the pass that gave this thread's latest batch
        self._trains_on: _Pass | None = None
        self._any = False  # True once any DataLoader has given a batch
        self._unwatch = watch_loaders(self)

    def close(self) -> None:
        """Stop watching DataLoaders."""
        self._unwatch()

    def forward(self) -> None:
        """Record that the model is given a batch."""
        if self._any and torch.is_grad_enabled():
            self._trains_on = getattr(self._given, "by", None)

    def trains(self) -> None:
        """Record that backward has reached a forward of the model."""
        this = self._trains_on
        if this is None or this.number:
            return
        last = self._last.get(this.line)
        this.number = 1
        if last is not None:
            only_looked = last.given == 1 and not last.is_over
            this.number = last.number + (not only_looked)
        self._last[this.line] = this

    def epoch(self) -> Epoch:
        """Return the epoch of the latest batch on which the model trains, as far as the script shows it."""
        number = script_number(_VARIABLES)
        if number is not None:
            return Epoch(number, LOOP)
        if self._trains_on is None or not self._trains_on.number:
            return UNKNOWN
        return Epoch(self._trains_on.number, self._trains_on.line)

    def over(self, sampler: object) -> _Pass | None:
        """Return the latest pass over data that this sampler deals; None if no DataLoader has it."""
        return self._dealt.get(sampler)

    def is_surely(self, this: _Pass) -> bool:
        """Return True if the batch on which the model trains surely is the latest one that `this` gave."""
        return self._trains_on is this and not this.is_over and not this.is_ahead

    def is_after(self, this: _Pass) -> bool:
        """Return True if the batch on which the model trains is another loader's, and `this` has ended."""
        return this.is_over and self._trains_on is not None and self._trains_on is not this

    def was_left(self, sampler: object) -> bool:
        """Return True if a DataLoader has this sampler, and its latest loop has not come to its end."""
        latest = self.over(sampler)
        return latest is not None and not latest.is_over

    # From the DataLoaders

    def began(self, iterator: object, loader: DataLoader[Any]) -> None:
        this = self._passes[iterator] = _Pass(script_line(), loader.batch_size or 0)
        samplers = [loader.batch_sampler, loader.sampler]
        if loader.batch_size is None and type(loader.batch_sampler) is BatchSampler:  # the script's own
            this.batch_size = loader.batch_sampler.batch_size
            samplers.append(loader.batch_sampler.sampler)
        samplers += [each.sampler for each in samplers if isinstance(each, LeasedBatches)]
        for sampler in samplers:
            with contextlib.suppress(TypeError):  # a list, say, which is no key
                self._dealt[sampler] = this

    def gave(self, iterator: object) -> None:
        this = self._passes.get(iterator)
        if this is not None:
            this.given += 1
        self._any = True
        self._given.by = this

    def ended(self, iterator: object) -> None:
        this = self._passes.get(iterator)
        if this is not None:
            this.is_over = True
