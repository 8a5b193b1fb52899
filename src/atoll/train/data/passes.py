"""The epoch of the batch on which a script trains, if no sampler of the session deals the data.

The epoch is the value of the script's own variable `epoch`, if a function or module on the stack of the
training step has one. Otherwise it is the number of the pass over the DataLoader that gave the model its last
batch. A pass is one loop over a DataLoader. It counts from the first batch on which the model trains, so
evaluations and a look at one batch do not count. A loop that was left after one batch, as
`next(iter(loader))` does, does not count either.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from atoll.core.scriptline import script_line, script_number
from atoll.core.stands import LOOP, UNKNOWN, Epoch
from atoll.tensors.torch_compat import watch_loaders

_VARIABLES = ("epoch", "epoch_idx", "epoch_index")


@dataclass
class _Pass:
    """One loop over a DataLoader.

    Attributes:
        line: the script's line at which it began.
        given: the number of batches that it gave.
        is_over: True if the loop has ended.
        number: the number of the pass; 0 until the model trains on one of its batches.
    """

    line: str
    given: int = 0
    is_over: bool = False
    number: int = 0


class Passes:
    """This worker's passes over its data. All DataLoaders of the process are watched until `close`."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[object, _Pass] = WeakKeyDictionary()  # by the loader's iterator
        self._last: dict[str, _Pass] = {}  # the last pass on which the model trained, by line
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

    # From the DataLoaders

    def began(self, iterator: object) -> None:
        self._passes[iterator] = _Pass(script_line())

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
