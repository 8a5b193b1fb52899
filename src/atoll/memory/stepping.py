"""The user's optimizer, stepping chunk by chunk where their state lies.

The optimizer object stays the user's own. Its `step` runs on no parameter; its hyperparameters and its own
attributes are noted, and on a thread of this module's the same code then steps a copy of it on flat segments
of one chunk after another, in host memory. `step` returns at once; whoever needs a chunk's values calls
`wait_stepped` first. Source: S2, part 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.payloads import Payloads


@dataclass(frozen=True)
class StepCalls:
    """What a `Stepper` asks and tells.

    `before(chunks)`: `optimizer.step()` was called on the script's thread, and these chunks are about to be
    stepped: their payloads "values" must be up to date, and any copy elsewhere will be old. It gives the
    order to step them in, that of their next use. `stepped(chunk)`: its payloads are new; on the stepping
    thread, and it must not wait for the script's. `after()`: `optimizer.step()` is about to return.
    """

    before: Callable[[Sequence[int]], Sequence[int]]
    stepped: Callable[[int], None]
    after: Callable[[], None]


class Stepper:
    """Makes `optimizer` step those of `chunks` that it trains.

    `payloads(chunk)` says where a chunk's values, gradient and state lie. `at_once` are chunks that are
    stepped before `step` returns, by the thread that calls it: those on an accelerator. With `master`, chunks
    in half precision have a payload "master" in single precision, which is what is stepped, and the values
    are rounded from it. Raises PrepareError for an optimizer that is not element-wise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[TrainedChunk],
        gradients: Gradients,
        payloads: Callable[[int], Payloads],
        calls: StepCalls,
        *,
        at_once: Collection[int] = (),
        master: bool = False,
    ) -> None: ...

    def wait_stepped(self, chunk: int, seconds: float = 600.0) -> None:
        """Wait until no step of this chunk is under way or still to come; the next to be stepped is it.

        Raises DeadlineError after `seconds`, and whatever a step has raised.
        """

    def wait_all(self, seconds: float = 600.0) -> None:
        """The same for all chunks."""

    def values_edited(self, chunk: int) -> None:
        """The script has changed the payload "values": take over into "master" what it changed."""

    def close(self) -> None:
        """Make what is under way, and leave the optimizer to the user as a plain one with its state."""


def state_dtypes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """What the optimizer keeps for each element of a parameter of `dtype`: by key, for sizes in a plan."""
