"""A prepared model that lies in chunks over tiers of memory (`memory/fit.py`).

A worker alone holds all of it. The members of a ring, or of each group of a hierarchy, share it among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch import nn

from atoll.chunks import ChunkMap, ParameterSpec, lay_out
from atoll.core.config import Config
from atoll.core.errors import RunError
from atoll.core.memory import Memory
from atoll.core.units import format_bytes
from atoll.memory.agreeing import BatchEpochs
from atoll.memory.exchanged import Exchanged
from atoll.memory.fit import Fitted, fit, fit_exchanged, fit_shared, plan, plan_exchanged
from atoll.memory.former import Aside, Former
from atoll.memory.initialising import is_agreed
from atoll.memory.over import features_of
from atoll.memory.planning import specs_for
from atoll.memory.sharded import Sharded
from atoll.moves.owners import Groups
from atoll.moves.search import MemoryPlan
from atoll.tensors.binding import BoundChunk
from atoll.tensors.lazy import read_whole
from atoll.tensors.optimizer import ParameterOptimizer
from atoll.train.gradients.agreement import refuse_beyond, take_beside, tell_beside
from atoll.train.gradients.apart import take_from_groups
from atoll.train.gradients.clipping import ExchangedNorms, GradientNorm, Norms, ResidentNorms, SharedNorms
from atoll.train.gradients.reducer import Calls, Reducer
from atoll.train.gradients.solo import SoloReducer
from atoll.train.gradients.sums import AtEnd
from atoll.train.gradients.watch import SharedGradientWatch
from atoll.train.group.inner import AnyRing
from atoll.train.group.members import WorkerMembers
from atoll.train.members.workers import Workers
from atoll.train.sync.servedtiers import ServedInTiers, staging_bytes
from atoll.train.sync.strategies import Alone, Served, Stepper, Strategy, Training, one_stepper

Around: TypeAlias = Callable[[Strategy, Callable[[], None]], Strategy]


def by_itself(inner: Strategy, _written: Callable[[], None]) -> Strategy:
    """Return `inner`: the strategy of a model whose values are changed only by the workers that hold them."""
    return inner


class Tiers:
    """The budgets in which one model trains, alone or with the other members of a ring."""

    _steps_here = True  # a worker that is alone makes the optimizer's steps itself

    def __init__(
        self,
        memory: Memory,
        connect: Callable[[], WorkerMembers] | None,
        *,
        of_group: str = "",
        ring: AnyRing | None = None,
        around: Around = by_itself,
    ) -> None:
        """Take the budgets.

        Args:
            memory: the budgets.
            connect: makes the members known to one another, in a collective; None for a worker that is alone.
            of_group: " in its group" if the members are a group's workers, for a message; else empty.
            ring: the members' ring, if any.
            around: `around(strategy, written)` returns the strategy that trains the model, given the
                `strategy` of a contributor by itself; `written()` is to be called after values were given to
                the model.
        """
        self._memory, self._connect, self._of_group, self.ring = memory, connect, of_group, ring
        self._around = around
        self._members: WorkerMembers | None = None
        self._plan: MemoryPlan | None = None  # known once the members are, or None
        self.fitted: Fitted | None = None
        self.shared: Sharded | None = None  # the model, where several members hold it together
        self._left: Former | None = None  # what is still to be taken of a model that has changed

    def strategy(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Strategy | None:
        """Return the strategy that trains the model in chunks; None if all of the model fits on each member's
        device.

        In the latter case each member holds a whole copy on its device, and trains as without budgets.
        """
        if self._connect is None:
            return self._around(AloneInTiers(), self._written)
        self._members = self._connect()
        self._plan = plan(model, optimizers, self._memory, self._members)
        if not self._plan.fits:
            return self._around(MembersInTiers(self), self._written)
        self.close()
        return None

    def _written(self) -> None:
        self.sync("values from other contributors")

    def bind(
        self, specs: Sequence[ParameterSpec], parameters: Mapping[str, nn.Parameter], chunk_bytes: int | None
    ) -> tuple[ChunkMap, list[BoundChunk]]:
        """Lay the parameters out in chunks, and leave their memory unchanged."""
        chunk_map, names = lay_out(specs, chunk_bytes=chunk_bytes), list(parameters)
        chunks: list[BoundChunk] = []
        for chunk in chunk_map.chunks:
            members = [names[slot.parameter] for slot in chunk.slots]
            chunks.append(HeldChunk(chunk, members, [parameters[name] for name in members]))
        return chunk_map, chunks

    def take_values(self, workers: Workers, module: nn.Module, chunks: Sequence[BoundChunk]) -> None:
        """Give the chunks the values of the first worker of each group that has them. A collective."""
        features = features_of(module)
        for chunk in chunks:
            for name, parameter in zip(chunk.names, chunk.parameters, strict=True):
                if not is_agreed(parameter):  # one by one: memory may not hold all at once
                    take_from_groups(workers, parameter, self._groups_of(features.get(name, "")))

    def fit(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], epochs: BatchEpochs) -> None:
        """Let the model train in chunks from now on; `epochs` gives the batches' epochs."""
        if self._members is None:
            self.fitted = fit(model, optimizers, memory=self._memory, plan=self._plan)
            return
        assert self._plan is not None
        self.fitted = self.shared = fit_shared(
            model, optimizers, memory=self._memory, members=self._members, plan=self._plan, epochs=epochs
        )

    def norms(self, norm: GradientNorm) -> Norms:
        """Return the gradients' norms. `norm` measures gradients that lie on the device."""
        return ResidentNorms(norm) if self.shared is None else SharedNorms(self.shared)

    @property
    def has_members(self) -> bool:
        """True if other workers may hold a part of the model."""
        return self._connect is not None

    def _groups_of(self, feature: str) -> Groups:
        """Return the groups of workers of which each has parameters of `feature` for itself (memory/over.py).
        Alone: one group."""
        share = None if self._plan is None else self._plan.share
        return ((0,),) if share is None else share.groups_of(feature)

    @property
    def seconds_waited(self) -> float:
        """The seconds that this worker has waited for other members so far."""
        return 0.0 if self._members is None else self._members.seconds_waited

    @property
    def bytes_sent(self) -> int:
        """The bytes of gradients that this worker has sent to other members so far."""
        return 0 if self._members is None else self._members.sent

    def sync(self, what: str) -> None:
        """Let each member see the values that all have written into the model. A collective of the members.

        `what` names the values, for the message of a deadline.
        """
        if self.shared is not None:
            self.shared.sync(what)

    def lacks_room(self, state: int) -> str:
        """Return why model and optimizer do not fit as plain ones; an empty string if they fit.

        Args:
            state: bytes of the optimizer's state, which lies elsewhere.
        """
        return self.fitted.lacks_room(state) if self.fitted is not None else ""

    def refuse_loss(self, lost: Sequence[int]) -> None:
        """Raise RunError if members are lost: no other memory holds their part of the model."""
        if lost and self.shared is not None:
            gone = " and ".join(f"worker {name}" for name in lost)
            raise RunError(
                f"{gone} was lost, and with it the only copy of its part of the model{self._of_group}, which "
                "the workers hold between them; start the run again from its last checkpoint"
            )

    def close(self) -> None:
        """Part from the other members: their parts of the model are out of reach afterwards.

        Without members, give the model back as a plain one if there is room. Otherwise it stays in tiers; but
        a model that is stepped elsewhere is let go of.
        """
        if self._left is not None:
            self._left.abandon()
        elif self.shared is not None:
            self.shared.abandon()
        elif self._members is not None:
            self._members.close()
        elif self.fitted is not None:
            self.fitted.end(stays=self._steps_here)

    def leave(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the model be prepared anew, with these optimizers, since it has changed. Its values and states
        can be read until `left`."""
        if self.fitted is not None:
            self._left = self.fitted.leave(optimizers)
            self.fitted = self.shared = None  # if it raised, they end as after any error

    @property
    def reads_states(self) -> Callable[[Any], Any]:
        """The function that copies each value of states that other processes hold, while the model is
        prepared anew."""
        return read_whole if self.fitted is None else Aside(self._memory.budgets()).keep

    def give_back(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the model that was left plain, with the states of these optimizers."""
        if self._left is not None:
            self._left.give_back(optimizers)

    def left(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End what `leave` has left: the changed model, which these optimizers step, is prepared."""
        left, self._left = self._left, None
        if left is not None:
            left.close(optimizers)

    def describe(self) -> list[tuple[str, str, str]]:
        """Return the decisions, each with its name, the choice and the reason.

        One is "memory", whose choice reads like `device 1.0 MiB: 16 blocks of 64.0 KiB, everything fits`.
        """
        chosen = self.fitted.plan if self.fitted is not None else self._plan
        assert chosen is not None
        how = "everything fits" if chosen.fits else f"{chosen.cache_blocks} of them a cache"
        blocks = f"{chosen.blocks} blocks of {format_bytes(chosen.chunk_bytes)}"
        choice = f"{self._memory.budgets().describe()}: {blocks}, {how}"
        beside = [] if self.fitted is None else self.fitted.choices
        return [("memory", choice, chosen.reason), *beside]


class ServedTiers(Tiers):
    """The budgets of a worker whose model is stepped at the shards of a parameter server."""

    _steps_here = False

    def __init__(self, memory: Memory, served: Served, config: Config) -> None:
        super().__init__(memory, None)
        self._served, self._chunk_bytes = served, config.chunk_bytes
        self._exchanged: Exchanged | None = None
        if served.of_group:  # every member of the ring holds the whole model, in chunks that move
            self._memory = msgspec.structs.replace(memory, step="host")

    def strategy(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Strategy | None:
        self._model = model
        layout = lay_out(specs_for(model, optimizers), chunk_bytes=self._chunk_bytes)
        of_group = self._served.of_group
        staging = staging_bytes([chunk.nbytes for chunk in layout.trainable], of_group=of_group)
        self._plan = plan_exchanged(model, self._memory, staging, sums=of_group)
        return None if self._plan.fits else ServedInTiers(self._served, self)

    def fit_now(self) -> None:
        """Move the model into tiers, before its values go to the shards."""
        assert self._plan is not None
        self.fitted = self._exchanged = fit_exchanged(self._model, self._memory, self._plan)

    def fit(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], epochs: BatchEpochs) -> None:
        """Do nothing: building the strategy has moved the model into tiers and brought its values to the
        shards."""

    def norms(self, norm: GradientNorm) -> Norms:
        del norm  # gradients lie in tiers
        return ExchangedNorms(self.held())

    def held(self) -> Exchanged:
        assert self._exchanged is not None
        return self._exchanged


class AloneInTiers(Alone):
    """The strategy of a worker that is alone, with a model in tiers: nothing is reduced, and `memory/fit.py`
    makes the steps."""

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        return SoloReducer(training.chunks, training.calls), _stepper(training)


class MembersInTiers(Alone):
    """The strategy of members of a ring that share one model: a gradient goes to the member that holds its
    part."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def build(self, training: Training) -> tuple[Reducer, Stepper]:
        return MembersReducer(training.chunks, training.calls, self._tiers), _stepper(training)


class MembersReducer(Reducer):
    """The reducer of members that share a model: it sums gradients to the members that hold them, after
    backward.

    `memory/fit.py` takes each gradient into its chunk before this reducer's hooks see the gradient.
    """

    def __init__(self, chunks: Sequence[BoundChunk], calls: Calls, tiers: Tiers) -> None:
        super().__init__(chunks, calls, AtEnd, SharedGradientWatch)
        self._tiers, self._buffers, self._counts_told = tiers, calls.buffers, False
        self._counted = 0  # bytes of gradients that `bytes_sent` includes already

    def reduce(self) -> None:
        own, shared, ring = self.contribute(), self._tiers.shared, self._tiers.ring
        assert shared is not None
        assert ring is not None
        shares = self._calls.shares
        report = [] if shares is None else shares.said(ring.rank, ring.world)
        self._calls.leaving()
        samples, certainty = shared.gradients.reduce(own.weight, own.samples, own.is_certain)
        refuse_beyond(ring, own, certainty, self.steps)
        said = [] if self._buffers is None else self._buffers.said()
        what = f"which buffers have changed, and each worker's speed, in iteration {self.steps}"
        summed = ring.sum([*said, *report], what) if said or report else []
        changed = summed[: len(said)]
        beside = tell_beside(
            ring, own, certainty, self._buffers, changed, steps=self.steps, tells=not self._counts_told
        )
        self.count_alike = not certainty.certain
        if take_beside(beside, self._buffers, self.steps, self._calls.counts_unlike):
            self._counts_told = True
        self.bytes_sent += self._tiers.bytes_sent - self._counted
        self._counted = self._tiers.bytes_sent
        if shares is not None:
            shares.heard(summed[len(said) :], ring.rank)
        self._done(own, samples)


class HeldChunk(BoundChunk):
    """Parameters that lie where `memory/fit.py` has put them; `memory/fit.py` keeps track of them."""

    def check(self) -> None:
        """Do nothing: the parameters need not lie in one place."""

    @property
    def has_moved(self) -> bool:
        return False


def _stepper(training: Training) -> Stepper:
    return one_stepper([_TieredOptimizer(each.optimizer, each.hooks) for each in training.sets])


class _TieredOptimizer(ParameterOptimizer):
    """The optimizer of a model in tiers. It steps by `p.grad`, so a step that is left out removes the
    gradients."""

    def _leave_out(self) -> None:
        for group in self._group_parameters:
            for parameter in group:
                parameter.grad = None
