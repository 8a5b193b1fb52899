"""One model and its optimizers, prepared: laid out in chunks, with hooks for gradients, stepped chunk by
chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from atoll.core.config import Config
from atoll.core.errors import NonFiniteGradientError, PrepareError, UserError
from atoll.core.scriptline import at_script_line, script_line
from atoll.exchange.sentgroups import sent_groups
from atoll.memory.agreeing import BatchEpochs
from atoll.memory.over import refuse_apart
from atoll.memory.sharded import Sharded
from atoll.tensors.bf16 import Float32Steps, Precision, check_precision
from atoll.tensors.binding import BoundChunk, check_bindable, specs_of
from atoll.tensors.chunkstate import State
from atoll.tensors.clipping import check_max_norm
from atoll.tensors.lazy import read_whole
from atoll.tensors.optimizer import CHANGE_BEFORE, PREPARE_AGAIN
from atoll.tensors.shardoptimizer import own_path
from atoll.tensors.stepunit import Unit
from atoll.tensors.torch_compat import own_parameters
from atoll.tensors.torch_patches import clipped_at, watch_clipping, watch_zeroing
from atoll.tensors.torch_scaling import (
    before_unscaling,
    count_unscaling,
    forget_scale,
    infinity_left_to,
    scale_of,
)
from atoll.train.api.agreement import check_same, describe
from atoll.train.api.forwardwatch import ForwardWatch
from atoll.train.api.jointmodels import JointContribution, ScriptLoop, one_module
from atoll.train.api.parametercheck import ParameterCheck
from atoll.train.api.scriptmodel import Given, ScriptModel
from atoll.train.api.stepset import StepSet
from atoll.train.checkpoint.buffers import ModelBuffers
from atoll.train.data.moredata import MoreData
from atoll.train.gradients.backward import BackwardEnd
from atoll.train.gradients.clipping import GradientNorm
from atoll.train.gradients.latesteps import LateSteps
from atoll.train.gradients.meanloss import MeanLoss
from atoll.train.gradients.memory import Tiers
from atoll.train.gradients.othersteps import OtherSteps
from atoll.train.gradients.reducer import Calls, Clipping, Reducer, continue_from
from atoll.train.gradients.samples import ContributionWeight
from atoll.train.gradients.syncnorm import SyncNorms
from atoll.train.gradients.watch import GradientWatch, SharedGradientWatch
from atoll.train.gradients.whole import Whole
from atoll.train.members.workers import Workers
from atoll.train.sync.strategies import Strategy, Training

_DROPPED = (
    "the script's hooks have set every gradient of a backward to None, so it adds nothing to the mean; where "
    "such a hook updates parameters by itself, the workers' models part: let the prepared optimizer step, "
    "after backward"
)
_GRAPHS = (
    "gradients carry a graph (backward with create_graph=True): under budgets of memory such gradients and "
    "their graph stay on the device, outside the budgets, until optimizer.step() or zero_grad()"
)
_ONLY, _NONE = frozenset({0}), frozenset[int]()  # the models with new gradients, where there is only one
_EDITED = (
    "all gradients were changed between a backward under no_sync and {}, {}; they are this worker's own, and "
    "the mean of clipped gradients is not the clipped mean: to clip, call session.clip_grad_norm_ after the "
    "last backward, which is outside no_sync"
)


class Steps(Protocol):
    """The session's acts around each optimizer step (`train/api/steps.py`)."""

    def begins(self, of: StepSet, consumed: float) -> None:
        """Act before an optimizer steps; `consumed` are the samples of all workers in the run so far."""

    def skipped(self, reason: str) -> None:
        """Note that the policy on NaN and infinities has skipped a step."""

    def stepped(self, prepared: Prepared, model: ScriptModel, of: StepSet) -> None:
        """Act after one of a model's optimizers has stepped."""


class Loads(Protocol):
    """The session's acts around a load, or a change, of an optimizer's state by the script, where the state
    lies elsewhere (`train/api/loads.py`)."""

    def begin(self, prepared: Prepared, of: StepSet, give: Callable[[], State], call: str) -> State:
        """Act before an optimizer loads what `give` returns; return what it is to load."""

    def end(self, prepared: Prepared, of: StepSet, call: str) -> None:
        """Act after an optimizer has loaded a state."""


class Tells(Protocol):
    """The printing of lines for people (`train/api/records.py`: Records)."""

    def warn_once(self, subject: str, line: str) -> None: ...

    def warn_together(self, subject: str, line: str) -> None:
        """Print a line once, on one worker: all workers know it."""


class Prepared:
    """A model that the session trains, with the optimizers that step it: one of the script's models, or all
    of them together.

    If `tiers` gives a strategy, the model's chunks lie in tiers and that strategy replaces `strategy`.
    Otherwise the model trains as without tiers. `backward` is the session's. `number` is the model's in the
    session, and `may_change` is True if it may be prepared again after it has changed. `former` is the model
    as it was prepared before, at whose iteration this one goes on.

    Attributes:
        models: the script's models that it is made of, in the order in which they were prepared.
        counts_all: True if `reducer.consumed` is the number of samples of all workers in one model's
            iterations.
    """

    def __init__(
        self,
        given: Sequence[Given],
        *,
        number: int,
        config: Config,
        device: torch.device,
        workers: Workers,
        strategy: Strategy,
        tiers: Tiers | None,
        backward: BackwardEnd,
        steps: Steps,
        loads: Loads,
        tells: Tells,
        unit_of: Callable[[torch.optim.Optimizer, str | None], Unit],
        more: MoreData,
        joint_norms: bool,
        check_sparse: Callable[[torch.optim.Optimizer], None],
        may_change: bool = False,
        former: Prepared | None = None,
    ) -> None:
        self.config, self._workers = config, workers
        self._backward, self._batches, self._steps, self._tells = backward, given[0].batches, steps, tells
        self.module = one_module(given)
        optimizers = [optimizer for each in given for optimizer in each.optimizers]
        bf16 = given[0].bf16  # several models train where another process steps them, which takes none
        count_unscaling()
        watch_clipping()
        # Before the tiers wrap the optimizer's method:
        self._unwatch_zeroing: Callable[[], None] = lambda: None
        if not workers.alone:
            self._unwatch_zeroing = watch_zeroing(self._note_zeros)
        self._others = not workers.alone
        self.models = [ScriptModel(each, more, backward) for each in given]
        self._joint = JointContribution(self.models, more) if len(self.models) > 1 else None
        self._loop = ScriptLoop()
        self.mean_loss = MeanLoss(workers)
        self._closed = self._ready = False
        self._sync_norms: list[SyncNorms] = []
        self._stepped: set[int] = set()  # the optimizers that have stepped since all had
        for each in self.models:
            _refuse_wrapped(each.module)
        sparse = _sparse_of(self.module)
        if not workers.alone:
            world = workers.place.world
            self._sync_norms = [
                SyncNorms(each.module, device, world, more, joint=joint_norms) for each in self.models
            ]
        self.parameters = dict(self.module.named_parameters())
        precision = check_precision(bf16, self.parameters)
        check_bindable(self.parameters)
        refuse_apart(self.module, store="sharded" if tiers is not None and tiers.has_members else "resident")
        _to_device(self.module, self.parameters, device)
        settings = _settings(self.models)
        if strategy.brings_parameters:  # before workers meet, so that all raise the error
            for optimizer in optimizers:
                sent_groups(optimizer)
                own_path(type(optimizer), config.run.strategy)
        sums_rows = tiers is None and not strategy.brings_parameters
        specs = specs_of(self.parameters, settings, sparse if sums_rows else ())
        described = describe(
            specs,
            self.module,
            optimizers,
            config,
            name=_of_each([each.origin.name for each in given]) or "",
            step=_of_each([each.step for each in given]),
            bf16=bf16,
            has_budgets=tiers is not None,
            known=None if former is None else former.parameters,
        )
        check_same(workers, described)
        float32 = None if precision is None else _float32_steps(precision, self.parameters, workers)
        units = [unit_of(optimizer, each.step) for each in given for optimizer in each.optimizers]
        self._check_sparse = check_sparse
        for optimizer in optimizers if sparse else ():
            check_sparse(optimizer)
        self._looks_for_sparse = not sparse and (strategy.brings_parameters or tiers is not None)
        epochs_mixed = partial(tells.warn_together, "epochs")
        lies: Tiers | Whole = Whole()
        in_tiers = None if tiers is None else tiers.strategy(self.module, optimizers)
        if tiers is not None and in_tiers is not None:
            lies, strategy = tiers, in_tiers
        elif former is not None and former.tiers is not None:
            former.tiers.give_back(optimizers)
        self.tiers: Tiers | None = tiers
        self._strategy = strategy
        self.counts_all = strategy.counts_all and len(self.models) == 1
        self.chunk_map, self.chunks = lies.bind(specs, self.parameters, config.chunk_bytes)
        self._check = ParameterCheck(
            self.module,
            self.parameters,
            PREPARE_AGAIN if may_change else "make the change before session.prepare",
            alone=workers.alone,
        )
        trained = [chunk for chunk in self.chunks if chunk.parameters[0].requires_grad]
        brought = {chunk.chunk.id for chunk in trained} if strategy.brings_parameters else set()
        others = [chunk for chunk in self.chunks if chunk.chunk.id not in brought]
        lies.take_values(workers, self.module, others)
        workers.take_from_first(self.module.buffers(), "worker 0's buffers")
        self.buffers = ModelBuffers(self.module)
        # A batch is one piece if gradients lie in tiers, or a forward sums statistics over the workers.
        joint = any(isinstance(part, nn.SyncBatchNorm) for part in self.module.modules())
        self.is_whole = tiers is not None or (joint and not workers.alone)
        self.norm = GradientNorm(self.parameters)
        self._trained_chunks = trained
        self.trained = {name for chunk in trained for name in chunk.names}
        way_out = PREPARE_AGAIN if may_change else CHANGE_BEFORE
        self.sets = [
            StepSet(
                self,
                each,
                unit,
                way_out,
                _watch(each, trained) if len(optimizers) > 1 else None,
                float32,
                loads=partial(loads.begin, self),
                loaded=partial(loads.end, self),
            )
            for each, unit in zip(optimizers, units, strict=True)
        ]
        self._model_of = [each for each in self.models for _ in each.optimizers]  # by set
        rest = iter(self.sets)
        for each in self.models:
            each.sets = [next(rest) for _ in each.optimizers]
        self.reducer: Reducer
        self.reducer, self.stepper = strategy.build(
            Training(
                number=number,
                sets=self.sets,
                chunk_map=self.chunk_map,
                chunks=trained,
                frozen=[chunk for chunk in self.chunks if not chunk.parameters[0].requires_grad],
                calls=Calls(
                    arm=self.models[0].gradient_came if self._joint is None else backward.arm,
                    contribution=(self._joint or self.models[0].samples).contribution,
                    whole=self._whole,
                    begins=lambda: self._joint is not None or self._loop.begins(self._new),
                    left_out=self._left_out,
                    committed=self._committed,
                    leaving=backward.settle,
                    reduce=backward.reduce_before_step,
                    dropped=partial(tells.warn_once, "dropped gradients", _DROPPED),
                    edited=self._tell_of_edits,
                    left=self._left,
                    counts_unlike=partial(tells.warn_together, "weights"),
                    copies_differ=partial(tells.warn_together, "copies"),
                    epoch=self._batches.epoch,
                    epochs_mixed=epochs_mixed,
                    unscaled=lambda: scale_of(optimizers[0]),
                    buffers=self.buffers if len(self.buffers) and config.sync.buffers == "rank 0" else None,
                    shares=self._batches.shares,
                    more=more,
                ),
                config=config,
                former=None if former is None else former.reducer,
            )
        )
        if former is not None:
            known = {each.module: each for each in former.models}
            for each in self.models:
                if each.module in known:
                    each.goes_on(known[each.module])
            if not strategy.brings_parameters:  # otherwise their place says where this worker goes on
                continue_from(former.reducer, self.reducer)
        # After the step hooks were made, so that the session's policy on gradients runs first.
        lies.fit(self.module, optimizers, BatchEpochs(self._batches.epoch, epochs_mixed))
        self._ready = True
        for norms, each in zip(self._sync_norms, self.models, strict=False):
            norms.join(workers, each.samples)
        self.reducer.ready()
        # A model's only optimizer would step parameters of which gradients are still to come. Alone, the mean
        # is there as the gradient comes.
        waits = len(optimizers) > 1 and (self._others or tiers is not None)
        late = optimizers if waits else ()
        names = {parameter: name for name, parameter in self.parameters.items()}
        self._late_steps = LateSteps(late, names, backward.step_waits)
        backward.add(self.reducer, self._late_steps, self.models)
        for of in self.sets:
            before_unscaling(of.optimizer, of.before_unscaling, of.has_batch)
        self._norms = lies.norms(self.norm)
        self._forwards = [
            ForwardWatch(
                each,
                trained,
                self._check,
                self.reducer,
                self.stepper,
                backward,
                among=len(given) > 1,
                steps_elsewhere=self.steps_elsewhere,
            )
            for each in self.models
        ]
        self._other_steps = None
        if not workers.alone:
            self._other_steps = OtherSteps(
                optimizers,
                self.parameters,
                shows_mean=lambda: self.reducer.sum.shows_mean and self.reducer.phase.awaits_step,
                warn_once=tells.warn_once,
            )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that step the model, in the script's order."""
        return [each.optimizer for each in self.sets]

    @property
    def trained_bytes(self) -> int:
        """The bytes of the trained parameters, which are those of their gradients."""
        trained = (self.parameters[name] for name in self.trained)
        return sum(parameter.numel() * parameter.element_size() for parameter in trained)

    @property
    def brought(self) -> set[str]:
        """The names of parameters that a worker that enters late takes from their place elsewhere, not from a
        worker."""
        return set(self.parameters) if self._strategy.brings_frozen else self.trained

    @property
    def steps_elsewhere(self) -> bool:
        """True if the trained parameters and the optimizer's state live elsewhere, as at shards."""
        return self._strategy.brings_parameters

    def give_back(self) -> None:
        """Bring the optimizer's state that other processes hold to this worker, if it has room for it.

        If the workers share the model, its values come too. After the session, model and optimizer go on as
        plain ones. In a ring all workers make this call.
        """
        if self.shared is not None:
            self.shared.give_back()
        else:
            self.stepper.give_back(self.tiers.lacks_room if self.tiers is not None else lambda _: "")

    def leave(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make room for the model as it is now, which `optimizers` step: its optimizers keep their state, and
        step plainly.

        What lies in tiers is read there until `left`. Raises PrepareError between a backward and its step.
        """
        if self.reducer.phase.has_unstepped():
            raise PrepareError(
                "session.prepare was called again between a backward and optimizer.step(); call it after the "
                "step, on every worker"
            )
        if self.steps_elsewhere:
            read = read_whole if self.tiers is None else self.tiers.reads_states
            self.stepper.give_back(read=read, comes_later=self._workers.late)
        self._take_hooks_off()
        if self.tiers is not None:
            self.tiers.leave(optimizers)
        self._backward.remove(self.reducer)

    def left(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End what `leave` has left: the changed model, which `optimizers` step, is prepared."""
        if self.tiers is not None:
            self.tiers.left(optimizers)

    def close(self) -> None:
        """Take the hooks off the model; its parameters and gradients stay where they are.

        Parts of the model that other members hold are out of reach afterwards.
        """
        self._take_hooks_off()
        if self.tiers is not None:
            self.tiers.close()

    def _take_hooks_off(self) -> None:
        self._closed = True
        for watch in self._forwards:
            watch.close()
        for each in self.models:
            each.close()
        self._check.close()
        if self._other_steps is not None:
            self._other_steps.close()
        for norms in self._sync_norms:
            norms.close()
        self._unwatch_zeroing()
        self._late_steps.close()
        self.reducer.close()
        self.stepper.close()

    @property
    def shared(self) -> Sharded | None:
        """The model, if several members share it; else None."""
        return None if self.tiers is None else self.tiers.shared

    def clip(self, of: ScriptModel, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients of one of the models by their global norm; return the norm before.

        Under strategy `peers` it is the norm of this node's own gradients, unless the script has used their
        mean. Raises UserError if the arguments are those of torch's own function, whose first argument is the
        parameters.
        """
        check_max_norm(max_norm, norm_type)
        self.reducer.before_step(follows=any(map(self._follows, of.sets)))
        if len(self.models) > 1:  # the shards are sent what this changes, as the script's own clipping
            return of.clip(max_norm, norm_type, error_if_nonfinite)
        norm = self.reducer.clip(
            Clipping(
                max_norm,
                norm_type,
                clip=lambda: self._norms.clip(max_norm, norm_type, error_if_nonfinite),
                measure=lambda: self.norm.measure(norm_type, error_if_nonfinite),
            )
        )
        self.reducer.sum.clipped(max_norm, norm_type)
        if self.tiers is not None and self.tiers.fitted is not None:
            self.tiers.fitted.gradient_norm = norm
        return norm

    def _tell_of_edits(self) -> None:
        if not self._workers.alone:  # alone, this worker's gradient is the mean
            until, line = script_line() or "the next one", clipped_at()
            how = at_script_line("by torch.nn.utils.clip_grad_norm_", line)
            how = how if line else "as torch.nn.utils.clip_grad_norm_ does"
            self._tells.warn_once("edits under no_sync", _EDITED.format(until, how))

    def _whole(self, own: ContributionWeight) -> ContributionWeight:
        """Return a contribution, once all gradients have come: with the weight of each of several models."""
        ends = self._loop.reduced(self._new)
        if self._joint is not None:
            return self._joint.whole(own, ends)
        return own if own.ends == ends else msgspec.structs.replace(own, ends=ends)

    @property
    def _new(self) -> frozenset[int]:
        """The models, by their numbers, of which gradients have come that no reduction has seen."""
        if self._joint is None:
            return _ONLY if self.reducer.phase.unsent else _NONE
        return frozenset(number for number, each in enumerate(self.models) if each.has_new)

    def _left(self) -> list[bool]:
        """Return for each optimizer True if gradients are left that were reduced, and not stepped."""
        if len(self.sets) == 1:
            left = [not self.reducer.watch.is_left_out()]
        else:
            left = [each.has_gradients_left for each in self.sets]
        if aside := self._backward.aside:
            for place, each in enumerate(self.sets):
                left[place] = left[place] or any(parameter in aside for parameter in each.parameters)
        return left

    def _left_out(self) -> None:
        """Note that the script has dropped reduced gradients without a step."""
        if self._joint is None:
            self._loop.stepped()

    def _committed(self, own: ContributionWeight, group_samples: float) -> float:
        self.mean_loss.reduced(own, alike=self.reducer.count_alike)
        repeats = False
        for each in self.sets:
            repeats = repeats or each.repeats
        for place, each in enumerate(self.sets):
            own_samples = own.of(place).samples if own.by_optimizer else own.samples
            each.own_samples += 0.0 if repeats else own_samples
            each.reduced()
            if self._others:  # other workers compare the scale
                forget_scale(each.optimizer)
        if len(self.models) == 1 or self.models[0].has_new:  # samplers of the session give the first one's
            self._batches.whole()
        for model in self.models:
            model.reduced(alike=self.reducer.count_alike)
        fitted = None if self.tiers is None else self.tiers.fitted
        if self._looks_for_sparse and (
            self.reducer.sum.gradients.have_sparse(self._trained_chunks)
            if fitted is None
            else fitted.kinds.sparse
        ):
            self._looks_for_sparse = False  # no layer has announced them
            for optimizer in self.optimizers:
                self._check_sparse(optimizer)
        if fitted is not None and fitted.kinds.graphs:
            self._tells.warn_once("graphs", _GRAPHS)
        return 0.0 if repeats else group_samples

    def _follows(self, of: StepSet) -> bool:
        """True if an optimizer is left to step gradients that another optimizer has stepped already."""
        return of.has_gradients_left and not self.reducer.phase.has_batch

    def before_unscaling(self, of: StepSet) -> None:
        """Reduce before a GradScaler looks for infinities, also on a worker without a batch."""
        if self._others:
            self._late_steps.check_is_after_backward(f"GradScaler.unscale_ of {type(of.optimizer).__name__}")
        if self.reducer.synchronous and not self._closed and not self._follows(of):
            self.reducer.before_step()

    def has_batch_for(self, of: StepSet) -> bool:
        """False if no backward of this iteration has left gradients on this worker."""
        return self._closed or self.reducer.phase.has_batch or self._follows(of)

    def _note_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._ready:
            self.reducer.note_zeros(parameters)
            for place, each in enumerate(self.sets):
                if each.note_zeros(parameters):
                    self.reducer.passes.add(place)

    def before_step(self, of: StepSet) -> None:
        """Check the model, and have its gradients reduced, before an optimizer steps."""
        self._check.before_step()
        if self._backward.in_piece:
            raise UserError(
                f"{type(of.optimizer).__name__}.step() was called inside a piece of session.pieces, when "
                "gradients of the batch's other pieces are missing; call it after the loop over the pieces"
            )
        if self._others:
            self._late_steps.check_is_after_backward(f"{type(of.optimizer).__name__}.step()")
        for bound in self._trained_chunks:
            bound.check()
        if not self.reducer.sums_samples:
            self._steps.begins(of, self.reducer.consumed)
        of.follows = self._follows(of)
        if of.follows:
            self.reducer.passes.discard(self.sets.index(of))
        self.reducer.before_step(follows=of.follows)
        self.reducer.begins_step()
        self.reducer.sum.gradients.drop_graphs()
        if len(self.sets) > 1:
            self.reducer.sum.steps_by(self.sets.index(of), of.follows)

    def accepts(self, of: StepSet, gradients: Sequence[Tensor]) -> bool:
        """Return True if the step is to be made, by the policy `sync.nonfinite`.

        The reduced gradients are equal on all workers, so all decide alike. Raises NonFiniteGradientError
        under the policy `stop`.
        """
        if self.config.sync.nonfinite == "allow":
            return True
        finite = self._norms.are_finite(gradients, of.parameters)
        # A GradScaler has skipped the step, here by a fused optimizer. It may have looked before the
        # script wrote a NaN.
        if finite or infinity_left_to(of.optimizer):
            return True
        reason = self._blame(of)
        if self.config.sync.nonfinite == "skip":
            self._steps.skipped(reason)
            self.reducer.refuse()
            return False
        raise NonFiniteGradientError(
            f"iteration {self.reducer.steps}: {reason}; set sync.nonfinite to 'skip' to leave such "
            "iterations out, or to 'allow' to apply them"
        )

    def _blame(self, of: StepSet) -> str:
        if of.follows:  # the workers' own gradients are gone
            return _blamed([])
        if self.shared is not None:  # only a part's owner has its sum
            found = self._workers.gather(self.shared.nonfinite(), "the sums that are not finite")
            first = next((name for name in self.parameters if name in found), "")
            return _blamed([f"{first!r}, summed over the workers,"] if first else [])
        everyone = self._strategy.collective and not self._workers.alone
        if not everyone:
            return _blamed(self.reducer.blamed(self._workers.place.rank, self.norm.culprit))
        own = self.reducer.own_nonfinite()
        found = self._workers.gather(own[:1], "the workers' gradients that are not finite")
        ranked = zip(self._workers.ranks, found, strict=True)
        return _blamed([f"{names[0]!r} on worker {rank}" for rank, names in ranked if names])

    def after_step(self, of: StepSet) -> None:
        """Follow an optimizer's step. The first step of an iteration's gradients ends the iteration."""
        of.waits = False
        self.norm.forget()
        if not of.follows:
            self.reducer.after_step()
        number = self.sets.index(of)
        self._stepped.add(number)
        waiting = set[int]()
        for place, each in enumerate(self.sets):
            if each.waits:
                waiting.add(place)
        ends = len(self._stepped) == len(self.sets)
        if not waiting or ends:
            self._stepped.clear()
            if waiting <= self.reducer.passes:
                self.reducer.sum.all_stepped()
                if self._others and self._joint is None:
                    self._loop.stepped()
        model = self._model_of[number]
        self._steps.stepped(self, model, of)
        if model.unstepped:
            model.unstepped = False
            model.steps_made += 1
            model.samples.reset()
        if number == 0 and self._joint is not None:
            self._loop.stepped()
        of.own_samples, of.follows = 0.0, False


def _blamed(named: Sequence[str]) -> str:
    where = named[0] if named else "a parameter, once it was summed"
    return f"the gradient of {where} holds NaN or infinity"


def _settings(models: Sequence[ScriptModel]) -> dict[nn.Parameter, str]:
    """Return the number of the param group that steps each parameter, as the layout's settings key.

    Groups are numbered through all models and their optimizers. Raises PrepareError for a parameter of an
    optimizer that is not in its model, and, if a model has several optimizers, for one that two of them have,
    or none.
    """
    settings: dict[nn.Parameter, str] = {}
    before = 0  # the param groups of the models before
    for model in models:
        names = {parameter: name for name, parameter in model.parameters.items()}
        optimizers, owner = model.optimizers, dict[nn.Parameter, int]()
        groups = [(number, group) for number, each in enumerate(optimizers) for group in each.param_groups]
        for index, (number, group) in enumerate(groups):
            for position, parameter in enumerate(group["params"]):
                if parameter not in names:
                    raise PrepareError(
                        f"parameter {position} of the optimizer's param group {index}, of shape "
                        f"{tuple(parameter.shape)}, is not in the model; put every module that it steps into "
                        "one nn.ModuleList and prepare that, or give a parameter of no module to the model: "
                        "model.register_parameter(name, parameter)"
                    )
                if owner.setdefault(parameter, number) != number:
                    raise PrepareError(
                        f"parameter {names[parameter]!r} is in optimizers {owner[parameter]} and {number}, "
                        "and both would step it; leave it to one of them"
                    )
                settings[parameter] = str(before + index)
        for parameter, name in names.items() if len(optimizers) > 1 else ():
            if parameter.requires_grad and parameter not in owner:
                raise PrepareError(
                    f"parameter {name!r} is in none of the {len(optimizers)} optimizers; give it to one of "
                    "them, or freeze it (requires_grad_(False))"
                )
        before += len(groups)
    return settings


def _of_each(words: Sequence[str | None]) -> str | None:
    """Return what each model was given, as text; of a session's only model its own."""
    return words[0] if len(words) == 1 else " and ".join(map(repr, words))


def _float32_steps(how: Precision, parameters: Mapping[str, nn.Parameter], workers: Workers) -> Float32Steps:
    """Return how bfloat16 parameters are stepped in float32, with the seed of worker 0's script."""
    positions = {parameter: position for position, parameter in enumerate(parameters.values())}
    seed = torch.initial_seed() % 2**63
    if how == "stochastic":
        seed = workers.gather(seed, "worker 0's seed for stochastic rounding")[0]
    return Float32Steps(how, positions, seed)


def _watch(optimizer: torch.optim.Optimizer, chunks: Sequence[BoundChunk]) -> GradientWatch:
    """Return a watch on the gradients of the chunks that one optimizer steps."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    mine = [chunk for chunk in chunks if chunk.parameters[0] in own]
    return SharedGradientWatch(mine, _nothing, _nothing)


def _nothing() -> None: ...


def _to_device(module: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Move the model to the device on which its worker trains; the Parameter objects stay the same."""
    if any(tensor.device != device for tensor in (*parameters.values(), *module.buffers())):
        module.to(device)
    for name, parameter in module.named_parameters():
        if parameter is not parameters[name]:
            raise PrepareError(
                f"parameter {name!r} became another object when it moved to {device}; "
                "call model.to(session.device) before making the optimizer"
            )


def _refuse_wrapped(module: nn.Module) -> None:
    name = type(module).__name__
    if name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise PrepareError(
            f"the model is wrapped in {name}; give session.prepare the module inside (model.module)"
        )


def _sparse_of(module: nn.Module) -> set[Tensor]:
    """Return the parameters to which a layer gives sparse gradients."""
    layers = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    weights = (own_parameters(layer).get("weight") for layer in layers if layer.sparse)
    return {weight for weight in weights if weight is not None}
