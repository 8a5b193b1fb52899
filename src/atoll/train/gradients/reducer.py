"""From backward to `p.grad`: what becomes of gradients as autograd hands them over.

`Reducer` has a `GroupSum` (`train/gradients/sums.py`) over the worker's group: over nobody, or over a ring
(`train/gradients/ring.py`). What goes on to others from there is a reducer of its own: an exchange with the
shards of a parameter server (`train/sync`), or with a node's CPU side (`train/node`). Source:
docs/architecture.md, "The gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from atoll.core.stands import UNKNOWN, Epoch
from atoll.exchange.feedback import Feedback
from atoll.tensors.binding import BoundChunk
from atoll.tensors.torch_compat import backward_under_way
from atoll.train.checkpoint.buffers import ModelBuffers
from atoll.train.gradients.samples import Contribution
from atoll.train.gradients.sums import MakeSum, Own
from atoll.train.gradients.watch import GradientWatch


class Beside(Protocol):
    """An object whose state goes along with a reducer's into checkpoints, and to a worker that enters."""

    def ready(self, reducer: Reducer) -> None:
        """The `reducer`'s model lies where it trains, and all others' hooks on the optimizer are made."""

    def state(self) -> dict[str, Any]:
        """The state, as a checkpoint can hold it."""

    def load(self, state: Mapping[str, Any], consumed: float) -> None:
        """Take a state that holds the keys of `state`, or none of them; `consumed` are the samples by then.
        Raises CheckpointError."""

    def close(self) -> None:
        """The session is over."""


@dataclass(frozen=True)
class Calls:
    """The services that a reducer asks for and the events that it reports.

    `arm()` is called as gradients come, so that `reduce` runs when their backward ends.
    `contribution(has_gradient)` is called once for each reduction. `committed(own, samples)` reports this
    worker's contribution and the group's samples when the iteration is whole. `leaving()` is called before
    gradients leave. `dropped()` reports that hooks of the script have left no gradient of a backward.
    `edited()` reports that the script has changed all gradients between two backwards that come before one
    reduction. `reduce(reducer)` is called before a step whose gradients no backward has reduced.

    `counts_unlike(line)` is called with a warning where workers count alike in a mean that their counts would
    change. `epoch()` is the epoch of the batch on which this worker trains. `epochs_mixed(line)` is called
    with a warning where workers train batches of different epochs together. `unscaled()` is the factor by
    which a GradScaler divides the gradients of the step under way; 1 without one. `buffers` are the model's;
    None: no worker takes any. `beside` has a state that goes along with the reducer's.
    """

    arm: Callable[[], None]
    contribution: Callable[[bool], Contribution]
    committed: Callable[[Contribution, float], None]
    leaving: Callable[[], None]
    dropped: Callable[[], None] = lambda: None
    edited: Callable[[], None] = lambda: None
    reduce: Callable[[Reducer], None] = lambda reducer: reducer.reduce()
    counts_unlike: Callable[[str], None] = lambda _line: None
    epoch: Callable[[], Epoch] = lambda: UNKNOWN
    epochs_mixed: Callable[[str], None] = lambda _line: None
    unscaled: Callable[[], float] = lambda: 1.0
    buffers: ModelBuffers | None = None
    beside: Beside | None = None


@dataclass(frozen=True)
class Clipping:
    """How the script clips this iteration's gradients, to a norm of at most `max_norm`.

    `clip()` multiplies the gradients that are here, and returns their norm before and the factor.
    `measure()` returns the norm and leaves the gradients as they are.
    """

    max_norm: float
    norm_type: float
    clip: Callable[[], tuple[Tensor, float]]
    measure: Callable[[], Tensor]


class Reducer:
    """The gradients of one model's trainable chunks: summed over the worker's group, and stepped here.

    `consumed` counts the samples of all workers in the run so far, as far as this worker knows.
    """

    exchange_seconds = 0.0  # of the waits so far, those of a group's exchange with the shards
    acts_before_forward = False  # whether `before_use` is to be called before each forward
    acts_before_state_dict = False  # and before the model's state_dict
    acts_after_backward = True  # whether `reduce` is to run when a backward ends
    sums_samples = True  # each iteration's samples are those of all; else `consumed` is told in another way

    losses: Feedback | None = (
        None  # what a link to shards has lost of this model's gradients, where there is one
    )

    def __init__(
        self,
        chunks: Sequence[BoundChunk],
        calls: Calls,
        make_sum: MakeSum = Own,
        watch: type[GradientWatch] = GradientWatch,
    ) -> None:
        """Reduce the chunks' gradients; `make_sum` makes their sum over the worker's group."""
        self._chunks, self._calls = list(chunks), calls
        self.watch = watch(chunks, calls.dropped, calls.edited)
        self._own: Contribution | None = None  # fixed when the first message leaves
        self.count_alike = False  # all workers, in the latest iteration: whatever they have counted
        self.synchronous = True  # False within no_sync
        self.sends_early = True  # while backward goes on
        self.unsent = False  # gradients have come that no reduction has seen
        self._came_in = -1  # the backward in which the latest came
        self.reduced = False  # since the last step
        self.steps = 0
        self.bytes_sent = 0
        self.consumed = 0.0
        self.sum = make_sum(self, chunks)

    def ready(self) -> None:
        """The model lies where it trains, and all others' hooks on the optimizer are made."""
        if self._calls.beside is not None:
            self._calls.beside.ready(self)

    @property
    def has_batch(self) -> bool:
        """True where a backward has left gradients in this iteration."""
        return self.unsent or self.reduced

    def close(self) -> None:
        """Let go of the model: its parameters stay where they are, but nothing is reduced any more."""
        self.sum.close()
        self.watch.close()
        self._chunks.clear()
        if self._calls.beside is not None:
            self._calls.beside.close()

    @property
    def shows_mean(self) -> bool:
        """True where every worker's `p.grad` is the mean over all, and each worker steps its own copy with
        the mean.
        """
        return self.sum.shows_mean and self.reduced and not self.unsent

    def reached(self, backward: int) -> None:
        """Backward number `backward` is about to count a batch; -1: a forward counts it, outside of any."""

    def check_gradients(self) -> None:
        """Raise UserError, naming the parameter, for a sparse gradient."""

    def came(self, *_: object) -> None:
        """Autograd has delivered a gradient."""
        backward = backward_under_way()
        if backward == -1 or backward != self._came_in:
            self._came_in = backward
            self._calls.arm()
        self.unsent = True

    def drop_kept(self) -> None:
        """A new backward begins: the last iteration's own gradients are not needed any more."""
        self.sum.gradients.drop_kept()

    def abandon(self) -> None:
        """Forget a backward that raised; raises RunError if chunks had left for the other workers."""
        self.sum.gradients.abandon()
        self.begin()

    def reduce(self) -> None:
        """A backward has ended: do what makes its iteration whole."""
        self.sum.admit()
        own = self.contribute()
        self._is_whole(own, self.sum.reduce(own))

    def _is_whole(self, own: Contribution, of_group: Contribution) -> None:
        """`p.grad` shows the group's mean."""
        self._done(own, of_group.samples)

    def contribute(self) -> Contribution:
        """This iteration's contribution, which the first call fixes."""
        if self._own is None:
            self.sum.opens()
            # Where the script's hooks have dropped all gradients, zeros take part in the mean.
            # A worker without a batch may have zeros left, from zero_grad(set_to_none=False).
            has_gradient = self.unsent or self.watch.has_values()
            self._own = self._calls.contribution(has_gradient)
            self.sum.weighs(self._own)
        return self._own

    def _done(self, own: Contribution, samples: float) -> None:
        self.reduced, self.unsent = True, False
        self.watch.reduced()
        self.begin()
        if self.sums_samples:
            self.consumed += samples
        self._calls.committed(own, samples)

    def begin(self) -> None:
        """Make ready for the next backward."""
        self._own = None
        self.sum.begin()

    def settle(self) -> None:
        """Wait until what this worker has sent by itself counts."""

    def before_step(self) -> None:
        """Send what no backward has sent: all of it came under no_sync, or there is no gradient here."""
        if self.reduced and not self.unsent and self.watch.is_left_out():
            self.drop_kept()
            self.reduced = False
        if self.unsent or not self.reduced:
            self.watch.look_for_edits()
            self._calls.reduce(self)
        self.sum.before_step()

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hear of a `zero_grad`."""
        if self.reduced and not self.unsent:  # at other times nobody asks
            self.watch.note_zeros(parameters)

    def after_step(self) -> None:
        """The step is made: the next iteration begins."""
        self.reduced = False
        self.watch.stepped()
        self.steps += 1
        self.drop_kept()
        self.sum.stepped(self.steps - 1)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on, to the bit, as this one would."""
        beside = {} if self._calls.beside is None else self._calls.beside.state()
        return {"steps": self.steps, **self.sum.state_dict(), **beside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.sum.load_state_dict(state)
        if self._calls.beside is not None:
            self._calls.beside.load(state, self.consumed)

    def member_state(self) -> dict[str, Any]:
        """What a worker needs that enters between two iterations, to do the next as the others do."""
        return {**self.state_dict(), **self.sum.member_state()}

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError or KeyError where `load_member_state` could not take it."""
        check_steps(state)
        self.sum.check_member_state(state)

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Take another member's `member_state`."""
        self.load_state_dict(state)
        self.sum.load_member_state(state)

    def own_nonfinite(self) -> list[str]:
        """The parameters for which this worker's own gradient holds NaN or infinity."""
        return self.sum.own_nonfinite()

    def blamed(self, rank: int, culprit: str) -> list[str]:
        """Whose gradients are not finite, in words, where others make steps without this worker, which is
        number `rank`. `culprit` is what clipping found, which has changed them; empty: nothing."""
        names = [culprit] if culprit else self.own_nonfinite()
        return [f"{name!r} on worker {rank}" for name in names[:1]]

    def refuse(self) -> None:
        """Leave this iteration out, by the policy on NaN and infinities."""

    def before_use(self, *_: object) -> None:
        """The model's parameters are about to be used."""

    def clip(self, by: Clipping) -> Tensor:
        """Clip this iteration's gradients, wherever the mean is; returns the norm before."""
        return by.clip()[0]

    def confirm(self, what: str) -> None:
        """Hear of all members that they made the same of the iterations so far; UserError where they did not.
        A collective of theirs."""
        self.sum.confirm(what)


def check_steps(state: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError where a reducer's state has no number of steps."""
    if type(state["steps"]) is not int or state["steps"] < 0:
        raise ValueError(f"a reducer's steps are {state['steps']!r}")
