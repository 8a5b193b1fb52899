"""The session: the part of Atoll that a training script uses.

with atoll.join() as session:
    model, optimizer = session.prepare(model, optimizer)
    ...
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atoll.axes.needs import check, refusal
from atoll.core import events, points
from atoll.core.childsignals import child_deaths_ignored
from atoll.core.config import SPEED_VARIABLE, Config
from atoll.core.effects import without_effect
from atoll.core.errors import AtollError, UserError
from atoll.core.memory import Memory
from atoll.observe.failing import say_leaving
from atoll.train.api.average import Average, Averages
from atoll.train.api.checkpoints import Checkpoints
from atoll.train.api.collectives import Collectives
from atoll.train.api.compose import RunMembership, compose
from atoll.train.api.leaving import Leaving
from atoll.train.api.loads import StateLoads
from atoll.train.api.maskcheck import MaskCheck
from atoll.train.api.models import Models
from atoll.train.api.origin import origin_of
from atoll.train.api.pieces import Pieces
from atoll.train.api.place import Group, Place
from atoll.train.api.prepared import Prepared
from atoll.train.api.schedules import Schedules
from atoll.train.api.scriptmodel import Given
from atoll.train.api.speed import Stretch, speed_from
from atoll.train.api.steps import Steps
from atoll.train.checkpoint.resume import Stateful
from atoll.train.data.batches import SampledBatches
from atoll.train.data.costs import UNLIKE_COSTS, Costs, batch_of
from atoll.train.data.epochs import epoch_of
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.moredata import MoreData
from atoll.train.data.owndata import OwnData
from atoll.train.data.passes import Passes
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler, ShardedSampler
from atoll.train.data.sources import cap_of
from atoll.train.gradients.backward import BackwardEnd
from atoll.train.members.meetings import Reduction
from atoll.train.members.workers import Value

# What a script gives `Session.prepare` to step a model: an optimizer, or a list or tuple of several.
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])


class Session:
    """One worker's part in a run; made by `join`, closed by `with` or `close`."""

    def __init__(
        self,
        config: Config,
        place: Place,
        member: RunMembership = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        """Take part in a run. `given` maps configuration keys to their sources, for a warning about keys
        without effect."""
        self.config = config
        self._runtime = runtime = compose(config, place, member)
        self.device, self._workers = runtime.device, runtime.workers
        self._state, self._records, self._meter = runtime.state, runtime.records, runtime.meter
        speed, stretch = speed_from(), None
        if speed != 1:
            stretch = Stretch(speed, runtime.meter.computing_clock)
        self._averages = Averages()
        self._models = Models(runtime.state.prepared, as_one=runtime.strategy.trains_as_one)
        self._schedules = Schedules(
            runtime.state,
            runtime.records,
            runtime.workers,
            together=runtime.together,
            counted=runtime.members,
        )
        self._collectives = Collectives(
            runtime.workers, runtime.state, runtime.strategy, self._schedules.follow
        )
        masks = MaskCheck(runtime.state, runtime.workers, runtime.device, runtime.records.warn_once)
        self._backward = BackwardEnd(runtime.ring, stretch)
        self._steps = Steps(
            runtime,
            self._collectives,
            self._schedules,
            masks,
            self._backward,
            config.run.strategy,
        )
        aside = nullcontext if stretch is None else stretch.paused
        self._loads = StateLoads(runtime, self._collectives, config)
        self._checkpoints = Checkpoints(runtime, self._collectives, masks, aside)
        self._passes = Passes()
        self._batches = SampledBatches(runtime.state, self._passes, runtime.shares)
        self._pieces = Pieces(
            runtime.state.prepared,
            self._backward,
            self._batches,
            runtime.device,
            cap=cap_of(config.sync, runtime.workers.place.name),
            finds=config.sync.memory_cap == "auto",
            lowered=self._lowered,
        )
        self._more = MoreData(heard=runtime.others in ("local", "shards"))
        self._own_data = OwnData(
            self._more,
            ask=partial(self._collectives.any_of, "session.epoch_of"),
            unsent=lambda: any(each.reducer.phase.unsent for each in runtime.state.prepared),
            check=lambda: check("call", runtime.choices(config, None, call="session.epoch_of", data="own")),
            together=not runtime.workers.alone and runtime.together,
        )
        self._leaving = Leaving(runtime, self._collectives, masks, [self._passes.close, self._backward.close])
        self._begin(place.world, speed, given or {})
        self._leaving.begin()

    def _begin(self, world: int, speed: float, given: Mapping[str, str]) -> None:
        """Meet the other workers, and record the choices with which this one begins.

        From now on the worker's service or node reports through its records.
        """
        runtime, records = self._runtime, self._records
        records.open(self._workers)
        if runtime.entrance is not None:
            runtime.entrance.begin()
        records.emit(
            events.Started,
            workers=world,
            strategy=self.config.run.strategy,
            device=str(self.device),
            pid=os.getpid(),
            groups=runtime.groups,
        )
        if runtime.keeps_heap:
            records.decided(
                "heap", "keeps up to 1 GiB of freed memory", "giving it back cost a tenth of a step"
            )
        if speed != 1:
            reason = f"{SPEED_VARIABLE}: what it computes is stretched by sleeping"
            records.decided_here(events.Decided, "speed", f"{speed:g} of this device's", reason)
        runtime.tell_of_start()
        for line in without_effect(self.config, given) if self._workers.is_first else []:
            records.warn(line)

    # This worker's place

    @property
    def rank(self) -> int:
        """The number of this worker, from 0. It may change with the members."""
        return self._state.rank

    @property
    def world(self) -> int:
        """The number of workers, which changes with the members."""
        return self._state.world

    @property
    def is_main(self) -> bool:
        """True on worker 0, which prints and writes for all workers.

        If workers may die alone, it is True on the first living worker. It is never True on a worker that has
        not yet entered.
        """
        return self._workers.is_first

    @property
    def group(self) -> Group:
        """This worker's group; it changes with the members, like the rank.

        Under `ring` all workers are one group. Under `peers` each node is a group if nodes have several
        devices.
        """
        return self._runtime.own_group()

    @property
    def iteration(self) -> int:
        """The number of steps of the first prepared optimizer."""
        return self._state.iteration

    # Training

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        memory: Memory | None = None,
        *,
        name: str = "",
        step: str | None = None,
        bf16: str | None = None,
    ) -> tuple[nn.Module, Optimizers]:
        """Prepare `model` and `optimizer` to train with the other workers; return these two objects, changed.

        `optimizer` may be a list of several optimizers. Then each trainable parameter is in exactly one of
        them, and each optimizer steps when the script calls it.

        Call it again for a model that has changed since: parameters were frozen or unfrozen, a module was
        replaced or added, a param group was added. Every worker does so between two iterations, and training
        goes on with all state that the optimizers have.

        The model moves to `session.device`. Its parameters become views into chunks and take worker 0's
        values, as do its buffers. Every worker calls this method, with equal models. It may be called again
        for another pair; at a parameter server all pairs train as one, so prepare them before the first step
        (docs/server.md). Raises PrepareError, naming the parameter and the remedy, for a model that cannot be
        trained.

        With `name`, a checkpoint's values go to the model of that name, in whatever order a script prepares
        several models. Without names the order decides.

        With `memory`, or `[memory]` in the configuration, the pair trains within memory budgets, as by
        `atoll.memory.fit`. A worker that trains alone keeps the whole model. Under `ring` all workers shard
        the model, and under `hierarchical` the workers of each group do. Under `peers` each node's CPU side
        lends memory. The budgets may differ between workers.

        `step` is the unit in which the optimizer steps: "element" for flat runs of elements, "tensor" for
        whole tensors of the parameters' own shapes. Without it a trial decides (docs/how-to/optimizers.md).

        `bf16` has bfloat16 parameters stepped in float32: "masters" keeps a float32 copy of each, and
        "stochastic" rounds each result up or down at random, with the same result on any number of workers.
        """
        self._workers.check_open()
        several = isinstance(optimizer, (list, tuple))
        optimizers: list[Any] = list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
        known = self._models.check_new(model, optimizers, name)
        former, runtime, before = self._models.place(known), self._runtime, self._state.prepared
        number = len(before) if former is None else before.index(former)
        batches = self._batches.another() if before and known is None else self._batches
        new = Given(
            model,
            optimizers,
            origin=origin_of(model, name) if known is None else known.origin,
            batches=batches if known is None else known.given.batches,
            memory=memory,
            step=step,
            bf16=bf16,
        )
        given = self._models.together_with(new, known)
        stepping = [optimizer for each in given for optimizer in each.optimizers]
        budgets = [each.memory for each in given if each.memory is not None]
        memory = budgets[0] if budgets else None
        average = self._averages.of(model)
        again = known is not None or (former is not None and former.reducer.steps > 0)
        facts = {
            "several optimizers": len(stepping) > 1,
            "several budgets": any(each != memory for each in budgets),
            "several models": len(given) > 1,
            "scheduled": bool(self._state.schedules),
            "average": average is not None,
            "bf16": bf16,
        }
        may_change = refusal("prepare", runtime.choices(self.config, memory, again=True)) is None
        with self._collectives.call("session.prepare"):
            tiers = runtime.tiers(self.config, memory, again=again, **facts)
            if former is not None:
                self._collectives.refresh("session.prepare")
                former.leave(stepping)
                points.reach("change.left", self._state.iteration)
            if average is not None:
                average.begin(optimizers)
            prepared = Prepared(
                given,
                number=number,
                config=self.config,
                device=self.device,
                workers=self._workers,
                strategy=runtime.strategy,
                tiers=tiers,
                backward=self._backward,
                steps=self._steps,
                loads=self._loads,
                tells=self._records,
                unit_of=partial(runtime.unit, self.config, memory, again=again, bf16=bf16),
                check_sparse=partial(runtime.check_sparse, self.config, memory, again=again),
                more=self._more,
                joint_norms=runtime.others == "local" and runtime.member is None,
                may_change=may_change,
                former=former,
            )
            if former is not None:
                former.left(stepping)
        self._models.put(prepared, former)
        self._schedules.watch(prepared)
        if runtime.member is not None:
            runtime.member.prepared(prepared.trained_bytes)
        for decided in tiers.describe() if tiers is not None else []:
            self._records.decided(*decided)
        if tiers is None or tiers.fitted is None:
            self._records.decided(
                "chunks", prepared.chunk_map.describe(), "least waste among the sizes searched"
            )
        self._meter.begin()
        return model, optimizer

    def average(self, model: nn.Module, decay: float) -> Average:
        """Return the exponential average of the parameters of `model`, which each step moves: `decay` times
        itself, and 1 - `decay` times the new value.

        Call this before `session.prepare(model, ...)`. The average is a state of the optimizer: under budgets
        it lies in tiers, members share it like the model, and the session's checkpoints have it. Strategies
        whose optimizer steps elsewhere refuse it in `prepare` (docs/how-to/ema.md).
        """
        return self._averages.add(model, decay, [each.module for each in self._models])

    def pieces(self, batch: Any) -> Iterator[AbstractContextManager[Any]]:
        """Return the pieces of a batch, each a context that gives the piece: the batch itself, or several
        parts of it if it does not fit into memory.

            for x, y in loader:
                for piece in session.pieces((x, y)):
                    with piece as (x, y):
                        loss = loss_of(model(x), y)
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        With `sync.memory_cap = "auto"`, an error that memory has run out, in a piece's forward or backward,
        ends there. What the piece has left is dropped, and its samples come again in smaller pieces. Their
        gradients add up to the gradient of the mean over the batch. From then on this worker gets at most as
        many samples as fit, in batches of `session.batches`. A batch above a cap that is given is cut at
        once.

        A batch is a tensor, or a structure of tensors and of lists with an entry for each sample
        (docs/shares.md, "Memory"). Leave what follows the backward, such as `optimizer.step()`, outside of
        this loop.
        """
        return self._pieces.of(batch)

    def _lowered(self, cap: int, line: str) -> None:
        """Tell people, and the other workers, that this worker's cap is lower."""
        self._records.warn(f"worker {self._workers.place.name} {line}")
        if self._runtime.shares is not None:
            self._runtime.shares.lower(cap)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which `backward()` only accumulates this worker's gradients.

        The next backward outside the context sends the sum.
        """
        return self._models.no_sync()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        model: nn.Module | None = None,
    ) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; return the norm before.

        This is torch.nn.utils.clip_grad_norm_ on the global mean: per-parameter norms, combined in the order
        of registration. If several models are prepared, `model` names the one to clip.
        """
        found = self._models.find(model)
        return self._models.of(found).clip(found, max_norm, norm_type, error_if_nonfinite)

    def weight(self, samples: float, model: nn.Module | None = None) -> None:
        """Set the weight of this iteration's batch in the global mean, in place of its number of samples.

        By default a batch weighs the first dimension of the first tensor given to the model's forward. For
        this, the session's sampler or the model's output must agree with that number on every worker that has
        gradients. Otherwise all workers count alike, and one line reports the counts if they differ
        (docs/from-ddp.md, "How batches are weighted"). Call this on every worker, before the batch's
        backward. Under accumulation the weights of an iteration's batches add up.
        """
        if not 0 <= samples < math.inf:
            raise UserError(f"session.weight({samples}): a weight is a number of at least 0")
        found = self._models.find(model)
        self._backward.gives_weight(found)
        found.samples.give(float(samples), found.forwards)

    def sampler(
        self, dataset: Sized, seed: int = 0, *, shuffle: bool = True, drop_last: bool = False
    ) -> ShardedSampler | LeasedSampler:
        """Return this worker's share of `dataset`'s indices, in an order drawn anew each epoch from `seed`.

        Give it to a DataLoader. The session's checkpoints save and load its place in the epoch. Every worker
        calls this with equal arguments; under strategy `peers` unequal ones raise UserError.
        """
        order = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        return self._runtime.source.sampler(dataset, order, self._batches)

    def batches(
        self,
        dataset: Sized,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: int | None = None,
        cost: Any = None,
    ) -> BatchesSampler | LeasedBatches | PeerBatches:
        """Return this worker's part of batches of `sync.global_batch` samples over all workers, however many
        there are.

        Use it as `DataLoader(dataset, batch_sampler=...)`. A worker's own batches have that size divided by
        the number of workers; the first workers take the remainder. Or `sync.shares` deals by the workers'
        speeds, or in the parts that it gives (where all workers make each step together). With `cost`, each
        sample's cost in whole numbers, such as its tokens, parts are by cost in place of numbers of samples,
        and `sync.global_tokens` may say how large a batch is on the average. The size follows when
        workers are lost or enter. Under strategy `peers` sizes are in proportion to the nodes' speeds, and a
        node's devices take even parts. They follow the sooner, the fewer batches are fetched `ahead` of their
        use. Give 0 if a DataLoader has no workers, and the same number on every worker (None: up to 31).

        With the mean weighted by samples, any number of workers trains as one does. Order, place and callers
        are as with `sampler`. Raises UserError if `sync.global_batch` is not set.
        """
        costs = None if cost is None else Costs(cost, dataset)
        whole = batch_of(self.config.sync, costs)
        order = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        was_left = self._passes.was_left
        made = self._runtime.source.batches(dataset, whole, ahead, order, self._batches, was_left, costs)
        if costs is not None and not self._collectives.are_alike("session.batches", costs.digest):
            raise UserError(UNLIKE_COSTS)
        return made

    def epoch_of(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return one epoch's batches, like `for batch in loader`. The epoch ends where the others' epoch
        ends.

        With a sampler of this session's in the DataLoader this also holds for a node that the others went on
        without (strategy `peers`) and that came back meanwhile; a plain loop over the loader may end with
        batches of the old epoch that the loader had fetched. Use this method if all workers meet at each
        epoch's end. Under `peers` the end waits until this node's contributions are applied.

        Any other iterable has this worker's own data, and the workers' numbers of batches may differ. A
        worker without a further batch gets its last one again, with weight 0, while others have more
        (docs/how-to/uneven-data.md). Workers at their own pace (`ssp`, `asp`) each end by themselves.
        """
        return epoch_of(loader, self._state.samplers, self._runtime.source.catch_up, self._own_data)

    def schedule(self, scheduler: Any, total: float, steps: int | None = None) -> None:
        """Drive a torch scheduler by the samples that all workers consume; leave out `scheduler.step()` in
        the script.

        Call this once, after `prepare` and before `resume` or `load`. After each `optimizer.step()` Atoll
        steps the scheduler so that it has made floor(steps * consumed / total) steps. With `steps` = `total`
        / (samples of an iteration) the scheduler makes one step an iteration, as in plain PyTorch. Workers of
        unequal speeds, and workers that remain after a loss, still end at the schedule's end. A worker at its
        own pace knows only the samples of others that came with its latest parameters. Checkpoints of the
        session save and load the count.

        Raises UserError for a scheduler without a length if `steps` is not given, for ReduceLROnPlateau, and
        for a scheduler of an unprepared optimizer.

        Args:
            scheduler: a scheduler of a prepared optimizer.
            total: the samples that all workers consume in the whole run, such as `epochs * len(dataset)`.
            steps: the steps that the scheduler makes in the whole run; by default its own length (`T_max`,
                `total_steps`, ...).
        """
        several = any(len(each.models) > 1 for each in self._state.prepared)
        facts = {"call": "session.schedule", "scheduled": True, "several models": several}
        check("call", self._runtime.choices(self.config, None, **facts))
        self._schedules.add(scheduler, total, steps)

    # Values and meetings

    def log(self, **values: float | Tensor) -> None:
        """Record values of this iteration (numbers or tensors of one element): their mean over workers.

        The mean is weighted like the mean of gradients. Tensors on a GPU are copied at once but read later,
        so that no call waits for the GPU.
        """
        self._records.log(values)

    def expect(self, steps: int) -> None:
        """Give the number of steps of the whole run, for the display's estimate of the time left.

        The estimate is no longer shown once a worker has made more steps, which a worker that leases its data
        may.
        """
        self._records.emit(events.Expected, steps=int(steps))

    def barrier(self) -> None:
        """Return when every worker has called this method.

        Call this before an evaluation. All workers then have worker 0's buffers, and workers at their own
        pace (`ssp`, `asp`) have the newest parameters. If a model is sharded over the workers, each worker
        then sees the values that the others' scripts have written.
        """
        self._collectives.barrier()

    def reduce(self, value: Value, op: Reduction = "mean", weight: float | None = None) -> Value:
        """Return `value` (a number or a tensor) combined over the workers by mean, sum, min or max. Every
        worker calls this.

        With `mean`, each worker's value counts by `weight` (1 each unless given).
        """
        return self._collectives.reduce(value, op, weight)

    def gather(self, value: Any) -> list[Any]:
        """Return each worker's `value`, in the order of ranks: tensors of any shapes, or values that JSON can
        hold.

        Every worker calls this.
        """
        return self._collectives.gather(value)

    # Saving and loading

    def register(self, **objects: Stateful) -> None:
        """Save and load these objects too, under these names: a GradScaler, or an average of the weights, for
        example.

        Raises UserError, with the name and the key, if no checkpoint can hold an object's state_dict.
        """
        self._checkpoints.register(objects)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to the folder `path`: model, optimizer, schedulers, samplers, random state,
        iteration.

        Every worker calls this; worker 0 writes. Before, all workers take worker 0's buffers and registered
        modules. The checkpoint loads at any number of workers, and its model loads in plain torch
        (safetensors). It replaces an older checkpoint in the folder at once or not at all. Raises
        CheckpointError on every worker if the write fails.
        """
        self._models.require("session.save")
        self._checkpoints.save(path)

    def resume(self, folder: str | os.PathLike[str] | None = None) -> int:
        """Go on from the present point of the run; return the number of iterations made so far.

        Call this after `prepare` and before the loop, when all objects exist whose state it puts back
        (schedulers, samplers, registered objects). If the run is under way, it takes the state of a living
        worker; else it loads the checkpoint in `folder`, if there is one; else it changes nothing. Every
        worker calls it; a worker that comes late enters between two iterations of the others. Raises
        CheckpointError as `load` does.
        """
        self._models.require("session.resume")
        return self._checkpoints.resume(folder)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint. Call this after `prepare`, and after schedulers and samplers are made.

        Every worker calls this and reads `path`. Raises CheckpointError on every worker if the checkpoint is
        missing, damaged or of another model; then nothing of it is taken over.
        """
        self._models.require("session.load")
        self._checkpoints.load(path)

    # The end

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        if error is not None and not self._leaving.has_left:
            say_leaving(self.rank, error)
        if self._runtime.hub is not None:
            why = str(error) if isinstance(error, AtollError) else f"its script raised {kind.__name__}"
            self._runtime.hub.leaves_because(why)
        with child_deaths_ignored():
            self._leaving.leave()

    def close(self) -> None:
        """Write the last records, wait for the other workers to finish too, and let the model go."""
        self._leaving.finish()
