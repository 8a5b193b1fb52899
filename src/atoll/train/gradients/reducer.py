"""The way of a model's gradients from backward to `p.grad`.

`Reducer` has a `GroupSum` (`train/gradients/sums.py`): the sum over the worker's group, which is the worker
alone or a ring (`train/gradients/ring.py`). Subclasses send the group's sum on: to the shards of a parameter
server (`train/sync/server.py`), or to a node's CPU side (`train/sync/peersexchange.py`). Source:
docs/architecture.md, "The gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from atoll.core.stands import UNKNOWN, Epoch
from atoll.exchange.feedback import Feedback
from atoll.tensors.binding import BoundChunk
from atoll.train.checkpoint.buffers import ModelBuffers
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.phase import IterationPhase
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.sincestep import SinceStep
from atoll.train.gradients.sums import MakeSum, Own
from atoll.train.gradients.watch import GradientWatch


class Beside(Protocol):
    """An object whose state is saved in checkpoints, and given to a worker that enters, along with a
    reducer's."""

    def ready(self, reducer: Reducer) -> None:
        """Begin: the `reducer`'s model lies where it trains, and all other hooks on the optimizer are
        registered."""

    def state(self) -> dict[str, Any]:
        """Return the state, in a form that a checkpoint can hold."""

    def load(self, state: Mapping[str, Any], consumed: float) -> None:
        """Take a state. Raises CheckpointError if it is not usable.

        Args:
            state: holds all keys that `state()` returns, or none of them.
            consumed: the samples of all workers in the run by then.
        """

    def close(self) -> None:
        """End: the session is over."""


class Shares(Protocol):
    """The reports on workers' shares of a batch that travel with an iteration
    (`train/data/sharereports.py`)."""

    def said(self, rank: int, world: int) -> Sequence[float]:
        """Return this worker's report; an iteration's last gradients are about to leave."""

    def heard(self, reports: Sequence[float], rank: int) -> None:
        """Take the sum of all workers' reports on an iteration that is whole."""

    def report(self) -> list[float]:
        """Return this worker's report as shards pass it on; see `said`."""

    def heard_each(self, reports: Mapping[int, Sequence[float]], worker: int) -> None:
        """Take each worker's report, by its number, as `worker`; see `heard`."""


@dataclass(frozen=True)
class Calls:
    """The services that a reducer asks for, and the events that it reports.

    Attributes:
        arm: called as gradients come, so that `reduce` runs when their backward ends.
        contribution: returns this worker's contribution, given whether it has gradients; called once for each
            reduction.
        whole: returns that contribution, of the same weight, once all gradients of the iteration have come.
        committed: called with this worker's contribution and the group's number of samples when the iteration
            is whole; returns the number to count, 0 for samples that the same step has counted before.
        leaving: called before gradients leave.
        begins: returns True if the reduction under way begins a pass of the script's loop: its gradients are
            added to none that was reduced before.
        left_out: called if the script has dropped reduced gradients without a step.
        dropped: called if hooks of the script have left no gradient of a backward.
        edited: called if the script has changed all gradients between two backwards that come before one
            reduction.
        left: returns for each of the model's optimizers True if gradients are left that were reduced, and
            that it has not stepped.
        reduce: called with the reducer before a step whose gradients no backward has reduced.
        counts_unlike: called with a warning if workers count alike in a mean that their counts would change.
        copies_differ: called with a warning if workers hold different values of parameters that each of them
            steps.
        epoch: returns the epoch of the batch on which this worker trains.
        epochs_mixed: called with a warning if workers train batches of different epochs together.
        unscaled: returns the factor by which a GradScaler divides the gradients of the step under way; 1
            without one.
        buffers: the model's buffers; None if no worker takes any.
        shares: this worker's reports on its share of a batch; None: none.
        beside: an object whose state goes along with the reducer's.
        more: whether the workers' own data goes on, which each iteration tells.
    """

    arm: Callable[[], None]
    contribution: Callable[[bool], ContributionWeight]
    committed: Callable[[ContributionWeight, float], float]
    leaving: Callable[[], None]
    whole: Callable[[ContributionWeight], ContributionWeight] = lambda own: own
    begins: Callable[[], bool] = lambda: True
    left_out: Callable[[], None] = lambda: None
    dropped: Callable[[], None] = lambda: None
    edited: Callable[[], None] = lambda: None
    left: Callable[[], Sequence[bool]] = lambda: (True,)
    reduce: Callable[[Reducer], None] = lambda reducer: reducer.reduce()
    counts_unlike: Callable[[str], None] = lambda _line: None
    copies_differ: Callable[[str], None] = lambda _line: None
    epoch: Callable[[], Epoch] = lambda: UNKNOWN
    epochs_mixed: Callable[[str], None] = lambda _line: None
    unscaled: Callable[[], float] = lambda: 1.0
    buffers: ModelBuffers | None = None
    shares: Shares | None = None
    beside: Beside | None = None
    more: MoreData = field(default_factory=MoreData)


@dataclass(frozen=True)
class Clipping:
    """A clipping of this iteration's gradients by the script.

    Attributes:
        max_norm: the largest norm that is left.
        norm_type: the type of norm, as in torch.nn.utils.clip_grad_norm_.
        clip: multiplies the gradients that are here; returns their norm before, and the factor.
        measure: returns the norm and leaves the gradients unchanged.
    """

    max_norm: float
    norm_type: float
    clip: Callable[[], tuple[Tensor, float]]
    measure: Callable[[], Tensor]


class Reducer:
    """The gradients of one model's trainable chunks: summed over the worker's group, and stepped here.

    Attributes:
        exchange_seconds: seconds waited for a group's exchange with the shards; part of all waits so far.
        acts_before_forward: True if `before_use` is to be called before each forward.
        acts_before_state_dict: True if `before_use` is to be called before the model's state_dict.
        acts_after_backward: True if `reduce` is to run when a backward ends.
        leaves_at_step: True if gradients leave at the step, with the contributions of all backwards before.
        sums_samples: True if an iteration's samples are those of all workers; otherwise `consumed` is set in
            another way.
        losses: the gradients that a link to shards has lost, to be sent later; None without such a link.
        count_alike: True if all workers counted alike in the latest iteration.
        synchronous: False within no_sync.
        sends_early: True if messages may leave while backward goes on.
        phase: the phase of the iteration under way.
        steps: the number of steps made, which is the number of the iteration under way.
        bytes_sent: the bytes of gradients that this worker has sent.
        consumed: the samples of all workers in the run so far, as far as this worker knows.
        counted_at_shards: the same number as the shards gave it last with the optimizer's state, for records
            alone; 0: they have not given it.
        since_step: the contribution to the coming step, where gradients leave at the step.
        passes: the optimizers, by their places, that the script passes over: it has zeroed gradients that
            waited for them, as a GAN's loop does.
    """

    exchange_seconds = 0.0
    acts_before_forward = False
    acts_before_state_dict = False
    acts_after_backward = True
    leaves_at_step = False
    sums_samples = True
    losses: Feedback | None = None

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
        self.phase = IterationPhase(self.watch, calls.arm)
        self._own: ContributionWeight | None = None  # fixed when the first message leaves
        self.count_alike = False
        self.synchronous = True
        self.sends_early = True
        self.steps = 0
        self.bytes_sent = 0
        self.consumed = self.counted_at_shards = 0.0
        self.since_step = SinceStep(calls.left)
        self.passes: set[int] = set()
        self.sum = make_sum(self, chunks)

    def ready(self) -> None:
        """Begin: the model lies where it trains, and all other hooks on the optimizer are registered."""
        if self._calls.beside is not None:
            self._calls.beside.ready(self)

    def close(self) -> None:
        """Let go of the model: its parameters stay where they are, but nothing is reduced any more."""
        self.sum.close()
        self.watch.close()
        self._chunks.clear()
        if self._calls.beside is not None:
            self._calls.beside.close()

    def reached(self, backward: int) -> None:
        """Note that backward number `backward` is about to count a batch. -1: a forward counts it, outside of
        any backward."""

    def raised(self) -> None:
        """Note that a backward has raised. `begin` follows, before more gradients come or are reduced."""

    def begins_backward(self) -> None:
        """Note that the first gradient of a backward has come."""
        if self.leaves_at_step:
            self.since_step.look()
        self.drop_kept()

    def drop_kept(self) -> None:
        """Drop the last iteration's own gradients."""
        self.sum.gradients.drop_kept()

    def count_before(self) -> None:
        """Count the samples of earlier backwards, if that was left to the next one; forget the weight of
        gradients that the script has dropped."""
        if self.leaves_at_step:
            self.since_step.look()

    def reduce(self) -> None:
        """Make the iteration whole: its last backward has ended."""
        self.sum.admit()
        own = self._calls.whole(self.contribute())
        self._is_whole(own, self.sum.reduce(own))

    def _is_whole(self, own: ContributionWeight, of_group: ContributionWeight) -> None:
        """Finish the iteration: `p.grad` shows the group's mean."""
        self._done(own, of_group.samples)

    def contribute(self) -> ContributionWeight:
        """Return this iteration's contribution, which the first call fixes."""
        if self._own is None:
            if self.leaves_at_step and not self.phase.unsent:  # no backward has begun since the one before
                self.since_step.look()
            self.sum.opens()
            # If the script's hooks have dropped all gradients, zeros take part in the mean.
            # A worker without a batch may have zeros left, from zero_grad(set_to_none=False).
            has_gradient = self.phase.unsent or self.watch.has_values()
            self._own = self._calls.contribution(has_gradient)
            self.sum.weighs(self._own)
        return self._own

    def _done(self, own: ContributionWeight, samples: float) -> None:
        self.phase.end_reduction()
        self.begin()
        new = self._calls.committed(own, samples)
        if self.sums_samples:
            self.consumed += new

    def begin(self) -> None:
        """Make ready for the next backward."""
        self._own = None
        self.sum.begin()

    def settle(self) -> None:
        """Wait until the gradients that this worker has sent by itself count."""

    def before_step(self, follows: bool = False) -> None:
        """Reduce gradients that no backward has reduced: all came under no_sync, or this worker has none.

        `follows`: the script steps or clips gradients that another of the model's optimizers has stepped.
        """
        phase = self.phase
        if phase.is_left_out():
            self.drop_kept()
            phase.reduced = False
        if not follows and (phase.unsent or not phase.reduced):
            self.watch.look_for_edits()
            self._calls.reduce(self)
        self.sum.before_step(follows)

    def begins_step(self) -> None:
        """Note that from here on to the end of a step Atoll's own code reads `p.grad`."""

    def note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note a `zero_grad` of `parameters` by the script."""
        if self.phase.awaits_step:  # at other times nobody asks for the zeros
            self.watch.note_zeros(parameters)
        if self.leaves_at_step:
            self.since_step.look()

    def after_step(self) -> None:
        """Begin the next iteration: the step is made."""
        self.phase.end_step()
        self.steps += 1
        self.drop_kept()
        self.sum.stepped(self.steps - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run goes on as this one would, to the bit."""
        beside = {} if self._calls.beside is None else self._calls.beside.state()
        return {"steps": self.steps, **self.sum.state_dict(), **beside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.counted_at_shards = 0.0  # a checkpoint may be of an earlier time
        self.sum.load_state_dict(state)
        if self._calls.beside is not None:
            self._calls.beside.load(state, self.consumed)

    def member_state(self) -> dict[str, Any]:
        """Return the state with which a worker that enters between two iterations does the next one as the
        others do."""
        return {**self.state_dict(), **self.sum.member_state(), "passes": sorted(self.passes)}

    def check_member_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError or KeyError if `load_member_state` could not take `state`."""
        check_steps(state)
        if not all(type(each) is int for each in state["passes"]):
            raise ValueError(f"optimizers that are passed over: {state['passes']!r}")
        self.sum.check_member_state(state)

    def load_member_state(self, state: Mapping[str, Any]) -> None:
        """Take another member's `member_state`."""
        self.load_state_dict(state)
        self.passes = set(state["passes"])
        self.sum.load_member_state(state)

    def own_nonfinite(self) -> list[str]:
        """Return the names of parameters for which this worker's own gradient holds NaN or infinity."""
        return self.sum.own_nonfinite()

    def blamed(self, rank: int, culprit: str) -> list[str]:
        """Return, in words, the first parameter whose gradient is not finite, and this worker, `rank`; empty
        if there is none.

        `culprit` is the parameter that clipping found before it changed the gradients; an empty string if it
        found none.
        """
        names = [culprit] if culprit else self.own_nonfinite()
        return [f"{name!r} on worker {rank}" for name in names[:1]]

    def refuse(self) -> None:
        """Leave this iteration out, by the policy on NaN and infinities."""

    def before_use(self, of: Collection[int] | None = None, *_: object) -> None:
        """Prepare for a use of the model's parameters in the chunks `of`; None: in all."""

    def clip(self, by: Clipping) -> Tensor:
        """Clip this iteration's gradients, wherever the mean is; return the norm before."""
        return by.clip()[0]

    def confirm(self, what: str) -> None:
        """Raise UserError if members treated the mean of an iteration differently so far. A collective of the
        group.

        `what` names the moment, for messages.
        """
        self.sum.confirm(what)


def continue_from(former: Reducer, reducer: Reducer) -> None:
    """Let a model's reducer go on at the iteration of the model as it was prepared before."""
    reducer.load_state_dict(former.state_dict())
    reducer.consumed = former.consumed


def check_steps(state: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError if a reducer's state has no valid number of steps."""
    if type(state["steps"]) is not int or state["steps"] < 0:
        raise ValueError(f"a reducer's steps are {state['steps']!r}")
