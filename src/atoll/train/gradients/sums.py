"""How a worker's gradients come from autograd, and how they become their group's sum.

`Reducer` has one `GroupSum`. A worker that sums with nobody has `Own`; one whose gradients something else
keeps as they come has `AtEnd`. `train/gradients/ring.py` has the sum over a ring. Source:
docs/architecture.md, "The gradient".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from atoll.core.stands import Stand
from atoll.tensors.binding import BoundChunk, check_usable
from atoll.tensors.finite import is_finite
from atoll.tensors.gradienthooks import after_gradient
from atoll.tensors.torch_compat import will_run
from atoll.train.gradients.samples import Contribution


class Owner(Protocol):
    """The reducer whose gradients are summed: its iteration, and its figures."""

    steps: int
    synchronous: bool
    sends_early: bool
    count_alike: bool
    bytes_sent: int

    def came(self, *_: object) -> None:
        """Autograd has delivered a gradient."""

    def contribute(self) -> Contribution:
        """This iteration's contribution, which the first call fixes."""


class Gradients:
    """A worker's own gradients of an iteration. These stay where autograd leaves them."""

    def begin(self) -> None:
        """Make ready for the next backward."""

    def drop_kept(self) -> None:
        """A new backward begins: the last iteration's own gradients are not needed any more."""

    def abandon(self) -> None:
        """A backward raised; raises RunError if chunks had left for the other workers."""

    def own(self, bound: BoundChunk) -> list[Tensor | None]:
        """Those of a chunk."""
        return [parameter.grad for parameter in bound.parameters]

    def own_nonfinite(self, chunks: Sequence[BoundChunk]) -> list[str]:
        """The parameters for which one holds NaN or infinity."""
        return [
            name
            for bound in chunks
            for name, gradient in zip(bound.names, self.own(bound), strict=True)
            if gradient is not None and not is_finite(gradient)
        ]

    def close(self) -> None:
        """Let go of the model."""


class GroupSum:
    """The gradients of one model's trainable chunks, on their way to the sum over a group."""

    shows_mean = False  # whether every worker's `p.grad` becomes the mean over all
    has_sent = False  # whether `reduce` has sent all of this worker's gradients to the shards

    def __init__(self, owner: Owner, chunks: Sequence[BoundChunk]) -> None:
        self._owner, self._chunks = owner, list(chunks)
        self._parameters = [parameter for bound in chunks for parameter in bound.parameters]
        self._accumulators = [get_gradient_edge(parameter).node for parameter in self._parameters]
        self.gradients = Gradients()

    def accumulates(self) -> bool:
        """Within a backward: whether it will leave gradients in these parameters, as torch.autograd.grad
        does not."""
        try:
            for node in self._accumulators:  # nearly always the first
                if will_run(node):
                    return True
        except RuntimeError:  # raised for a parameter that torch.autograd.grad was asked about
            pass
        return False

    def close(self) -> None:
        """Let go of the model."""
        self.gradients.close()
        self._chunks.clear()
        self._parameters.clear()
        self._accumulators.clear()

    # -- an iteration --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make ready for the next backward."""
        self.gradients.begin()

    def admit(self) -> bool:
        """Let newcomers in where a new iteration begins with this model; whether any have come in."""
        return False

    def opens(self) -> None:
        """The contribution is about to be fixed: nothing of this iteration has left."""

    def weighs(self, own: Contribution) -> None:
        """The contribution is fixed."""

    @abstractmethod
    def reduce(self, own: Contribution) -> Contribution:
        """A backward has ended: let `p.grad` show the group's mean; returns the group's contribution."""

    def own_nonfinite(self) -> list[str]:
        """The parameters for which this worker's own gradient holds NaN or infinity."""
        return self.gradients.own_nonfinite(self._chunks)

    def begin_in_group(self) -> None:
        """This worker is in another group."""

    def where(self) -> Stand | None:
        """This worker's place in its script while it waits for its group."""
        return None

    # -- what the script makes of the sum ------------------------------------------------------------------

    def before_step(self) -> None:
        """The script is about to step."""

    def clipped(self, max_norm: float, norm_type: float) -> None:
        """The script has clipped this iteration's gradients."""

    def stepped(self, step: int) -> None:
        """This step is made."""

    def confirm(self, what: str) -> None:
        """Hear of all members that they made the same of the iterations so far; UserError where they did not.
        A collective of theirs."""

    # -- what a checkpoint has of it, and what a newcomer takes ---------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to sum, to the bit, as this one would."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""

    def member_state(self) -> dict[str, Any]:
        """What a member needs beside that to make the next iteration as the others do."""
        return {}

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError or KeyError where `load_member_state` could not take it."""

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Take another member's `member_state`."""


MakeSum: TypeAlias = Callable[[Owner, Sequence[BoundChunk]], GroupSum]


class Own(GroupSum):
    """Of a worker that sums with nobody: gradients stay where autograd leaves them."""

    def reduce(self, own: Contribution) -> Contribution:
        for bound in self._chunks:
            for name, parameter in zip(bound.names, bound.parameters, strict=True):
                gradient = parameter.grad
                if gradient is not None and gradient.is_sparse:
                    check_usable(name, gradient)
        return own


class AtEnd(GroupSum):
    """Gradients that something else keeps as they come: nothing leaves before their backward has ended."""

    def __init__(self, owner: Owner, chunks: Sequence[BoundChunk]) -> None:
        super().__init__(owner, chunks)
        self._hooks = [after_gradient(node, owner.came) for node in self._accumulators]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def reduce(self, own: Contribution) -> Contribution:
        return own
