"""A worker's gradients as autograd delivers them, and their sum over the worker's group.

`Reducer` has one `GroupSum`. A worker that sums with nobody has `Own`, or `OwnAtEnd` if it acts at the end
of each backward. A worker whose gradients are kept elsewhere as they come has `AtEnd`.
`train/gradients/ring.py` has the sum over a ring. Source: docs/architecture.md, "The gradient".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from atoll.core.stands import Stand
from atoll.tensors.binding import BoundChunk
from atoll.tensors.finite import is_finite
from atoll.tensors.gradienthooks import after_gradient
from atoll.tensors.sparse import check_summable
from atoll.tensors.torch_compat import will_run
from atoll.train.gradients.phase import IterationPhase
from atoll.train.gradients.samples import ContributionWeight


class SummedReducer(Protocol):
    """The reducer whose gradients are summed: its iteration, and its figures (see the attributes of
    `Reducer`)."""

    phase: IterationPhase
    steps: int
    synchronous: bool
    sends_early: bool
    count_alike: bool
    bytes_sent: int

    def contribute(self) -> ContributionWeight:
        """Return this iteration's contribution, which the first call fixes."""


class OwnGradients:
    """A worker's own gradients of an iteration. In this class they stay where autograd leaves them."""

    def begin(self) -> None:
        """Make ready for the next backward."""

    def drop_kept(self) -> None:
        """Drop the last iteration's own gradients: a new backward begins."""

    def abandon(self) -> None:
        """Forget a backward that raised. Raises RunError if messages had left for the other workers."""

    def repeat(self) -> None:
        """Forget a backward that raised, whose gradients come again. Messages that had left are reduced once
        more."""
        self.abandon()

    def drop_graphs(self) -> None:
        """Drop the graphs of gradients that show the mean, since the workers are about to step: each worker
        has the graph of its own part alone."""

    def own(self, bound: BoundChunk) -> list[Tensor | None]:
        """Return this worker's own gradients of a chunk; None for an absent one."""
        return [parameter.grad for parameter in bound.parameters]

    def have_sparse(self, chunks: Sequence[BoundChunk]) -> bool:
        """True if a gradient of these chunks is sparse."""
        return any(each is not None and each.is_sparse for bound in chunks for each in self.own(bound))

    def own_nonfinite(self, chunks: Sequence[BoundChunk]) -> list[str]:
        """Return the names of parameters whose own gradient holds NaN or infinity."""
        return [
            name
            for bound in chunks
            for name, gradient in zip(bound.names, self.own(bound), strict=True)
            if gradient is not None and not is_finite(gradient)
        ]

    def close(self) -> None:
        """Let go of the model."""


def gradient_nodes(parameters: Iterable[nn.Parameter]) -> list[Any]:
    """Return the node of each parameter that accumulates its gradient."""
    return [get_gradient_edge(parameter).node for parameter in parameters]


def will_accumulate(nodes: Iterable[Any]) -> bool:
    """True within a backward in which one of these nodes accumulates a gradient."""
    try:
        for node in nodes:  # nearly always the first
            if will_run(node):
                return True
    except RuntimeError:  # torch raises it for a parameter that was given to torch.autograd.grad
        pass
    return False


class GroupSum:
    """The gradients of one model's trainable chunks, on their way to the sum over a group.

    Attributes:
        shows_mean: True if every worker's `p.grad` becomes the mean over all.
        has_sent: True if `reduce` has sent all of this worker's gradients to the shards.
        sends_again: True if gradients may come again that have left while backward goes on.
        gradients: this worker's own gradients.
        accumulates: returns True within a backward that will leave gradients in these parameters;
            torch.autograd.grad leaves none.
    """

    shows_mean = False
    has_sent = False
    sends_again = True

    def __init__(self, owner: SummedReducer, chunks: Sequence[BoundChunk]) -> None:
        self._owner, self._chunks = owner, list(chunks)
        self._parameters = [parameter for bound in chunks for parameter in bound.parameters]
        self._accumulators = gradient_nodes(self._parameters)
        self.accumulates: Callable[[], bool] = partial(will_accumulate, self._accumulators)
        self.gradients = OwnGradients()

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
        """Let newcomers in if a new iteration begins with this model; return True if any may have entered."""
        return False

    def opens(self) -> None:
        """Prepare for a new contribution, before it is fixed and before anything of the iteration leaves."""

    def weighs(self, own: ContributionWeight) -> None:
        """Take the contribution, which is fixed now."""

    @abstractmethod
    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        """Let `p.grad` show the group's mean, after the last backward; return the group's contribution."""

    def own_nonfinite(self) -> list[str]:
        """Return the names of parameters for which this worker's own gradient holds NaN or infinity."""
        return self.gradients.own_nonfinite(self._chunks)

    def begin_in_group(self) -> None:
        """Forget what belongs to the former group: this worker has entered another one."""

    def where(self) -> Stand | None:
        """Return this worker's place in its script while it waits for its group; None if that is not known
        here."""
        return None

    # -- the script's treatment of the sum -----------------------------------------------------------------

    def before_step(self, follows: bool = False) -> None:
        """Look at the gradients once more: the script is about to step.

        `follows`: it steps or clips gradients that another of the model's optimizers has stepped already.
        """

    def steps_by(self, place: int, follows: bool) -> None:
        """Note which of the model's several optimizers is about to step, by its place. `follows`: another
        one has stepped these gradients already."""

    def clipped(self, max_norm: float, norm_type: float) -> None:
        """Note that the script has clipped this iteration's gradients."""

    def stepped(self, step: int) -> None:
        """Note that step number `step` is made."""

    def all_stepped(self) -> None:
        """Note that no optimizer is left to step the latest reduction's gradients, and that the script's loop
        may begin anew."""

    def confirm(self, what: str) -> None:
        """Raise UserError if members treated the mean of an iteration differently so far. A collective of the
        group.

        `what` names the moment, for messages.
        """

    # -- state for checkpoints and for newcomers -----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run sums as this one would, to the bit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `state_dict` has returned."""

    def member_state(self) -> dict[str, Any]:
        """Return the state that a newcomer needs besides `state_dict` to make the next iteration as the
        others do."""
        return {}

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError or KeyError if `load_member_state` could not take `state`."""

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Take another member's `member_state`."""


MakeSum: TypeAlias = Callable[[SummedReducer, Sequence[BoundChunk]], GroupSum]


class Own(GroupSum):
    """The sum of a worker that sums with nobody: gradients stay where autograd leaves them."""

    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        _check_layouts(self._chunks)
        return own


def _check_layouts(chunks: Iterable[BoundChunk]) -> None:
    """Raise UserError if a gradient is sparse in a form that cannot be summed."""
    for bound in chunks:
        for name, parameter in zip(bound.names, bound.parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.layout != torch.strided:
                check_summable(name, gradient)


class AtEnd(GroupSum):
    """The sum of gradients that are kept elsewhere as they come: nothing leaves before backward has ended."""

    def __init__(self, owner: SummedReducer, chunks: Sequence[BoundChunk]) -> None:
        super().__init__(owner, chunks)
        self._hooks = [after_gradient(node, owner.phase.came) for node in self._accumulators]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()

    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        return own


class OwnAtEnd(AtEnd):
    """The sum of a worker that sums with nobody, which uses the gradients at the end of a backward, also of
    one whose forward was not a call of the model."""

    def reduce(self, own: ContributionWeight) -> ContributionWeight:
        _check_layouts(self._chunks)
        return own
