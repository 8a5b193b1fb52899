"""The session: what a training script sees of Atoll.

with atoll.join() as session:
    model, optimizer = session.prepare(model, optimizer)
    ...
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core import events
from atoll.core.childsignals import child_deaths_ignored
from atoll.core.config import SPEED_VARIABLE, Config
from atoll.core.effects import without_effect
from atoll.core.errors import AtollError, PrepareError, RunError, UserError
from atoll.core.memory import Memory
from atoll.core.scriptline import script_line
from atoll.core.stands import SAMPLER, UNKNOWN, Epoch, call, end
from atoll.core.weighing import GUESSED, KNOWN, NONE
from atoll.observe.failing import say_leaving
from atoll.tensors.checkpoint import is_checkpoint_there
from atoll.tensors.torch_compat import uncompiled
from atoll.train.api.compose import Member, compose
from atoll.train.api.origin import origin_of
from atoll.train.api.place import Place
from atoll.train.api.prepared import Prepared
from atoll.train.api.schedules import Schedules
from atoll.train.api.speed import Stretch, speed_from
from atoll.train.checkpoint.resume import AnySampler, Stateful, check_state
from atoll.train.data.epochs import epoch_of
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.passes import Passes
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler, ShardedSampler
from atoll.train.gradients.backward import BackwardEnd
from atoll.train.gradients.masks import ALIKE, digest_of_generators, has_random_layers
from atoll.train.gradients.samples import Seen
from atoll.train.members.regrouping import Leases
from atoll.train.members.workers import Reduction, Value, asked_of_gather, asked_of_reduce
from atoll.train.sync.peersworker import NodeWorker

_END = (
    "the end of the session, which it reached after {} iterations (every worker must make equally many, and "
    "leave its `with` block)"
)


@dataclass(frozen=True)
class Group:
    """The group that a worker belongs to: its index among `count`, and the worker's rank among the group's
    `size`."""

    index: int
    count: int
    rank: int
    size: int


class Session:
    """One worker's part in a run; made by `join`, closed by `with` or `close`."""

    def __init__(
        self,
        config: Config,
        place: Place,
        member: Member = None,
        given: Mapping[str, str] | None = None,
    ) -> None:
        """`given` maps configuration keys to their sources, for a warning about keys without effect."""
        self.config, self._first_place, self._member = config, place, member
        self._runtime = runtime = compose(config, place, member)
        self.device, self._service, self._node = runtime.device, runtime.service, runtime.node
        self._hierarchy, self._ring, self._group_ring = runtime.hierarchy, runtime.ring, runtime.group_ring
        self._workers, self._state, self._records = runtime.workers, runtime.state, runtime.records
        self._meter, self._pace, self._regrouping = runtime.meter, runtime.pace, runtime.regrouping
        self._strategy, self._entrance, self._peers = runtime.strategy, runtime.entrance, runtime.peers
        self._sampling: AnySampler | None = None  # the sampler that gave the latest index
        self._trains_on: AnySampler | None = None  # the first whose batches a backward has reached
        self._closed = self._told_of_buffers = self._is_checked = False
        self._process = os.getpid()
        self._is_paced = self._service is not None or self._node is not None  # others ask for its pace
        self._compares_masks_at = 1  # the iteration after which workers compare their random numbers
        self._stretch = self._make_stretch()
        self._schedules = Schedules(
            self._state,
            self._records,
            self._workers,
            together=runtime.together,
            counted=lambda: self.world if runtime.together else self._service_members(),
        )
        self._backward = BackwardEnd(self._ring, self._stretch)
        self._passes = Passes()
        self._records.open()
        if self._entrance is not None:
            self._entrance.begin()
        self._tell_of_start()
        for line in without_effect(config, given or {}) if self._workers.is_first else []:
            self._records.warn(line)

    def _tell_of_start(self) -> None:
        """What this worker begins with; from now on its service or its node tells through its records."""
        records = self._records
        records.emit(
            events.Started,
            workers=self._first_place.world,
            strategy=self.config.run.strategy,
            device=str(self.device),
            pid=os.getpid(),
            groups=self._groups,
        )
        if self._runtime.keeps_heap:
            records.decided(
                "heap", "keeps up to 1 GiB of freed memory", "giving it back cost a tenth of a step"
            )
        if self._stretch is not None:
            choice = f"{speed_from():g} of this device's"
            reason = f"{SPEED_VARIABLE}: what it computes is stretched by sleeping"
            records.decided_here(events.Decided, "speed", choice, reason)
        self._runtime.tell_of_start()

    # Who and where

    @property
    def rank(self) -> int:
        """This worker's number, from 0; it may change with the members."""
        return self._state.rank

    @property
    def world(self) -> int:
        """How many workers there are; it changes with the members."""
        return self._state.world

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, which prints and writes for all; the first of those that live, where
        workers may die alone."""
        return self._workers.is_first

    @property
    def group(self) -> Group:
        """This worker's group; under `ring` there is one, and under `peers` each node, where these have
        several devices. Like the rank, it changes with the members."""
        if self._regrouping is not None and self._group_ring is not None:
            groups = self._regrouping.contributors
            own = self._regrouping.contributor
            return Group(
                index=groups.index(own) if own in groups else 0,
                count=max(1, len(groups)),
                rank=self._group_ring.rank,
                size=self._group_ring.world,
            )
        replicas = self._runtime.replicas
        if replicas is not None:
            rank, size = (replicas.place.rank, replicas.place.world) if replicas.grouped else (0, 1)
            return Group(replicas.index, len(replicas), rank, size)
        if self._hierarchy is not None and self._hierarchy.arranged is not None:
            return Group(*self._hierarchy.arranged.place_of(self._workers.place.rank))
        if self._node is not None and self._node.has_groups:
            devices = self._node.devices
            return Group(self._node.node, self._node.world, devices.rank, devices.count)
        return Group(index=0, count=1, rank=self.rank, size=self.world)

    @property
    def _groups(self) -> int:
        if self._node is not None and self._node.has_groups:
            return self._node.world
        return 1 if self._hierarchy is None else self._hierarchy.groups

    @property
    def iteration(self) -> int:
        """How many times the (first) prepared optimizer has stepped."""
        return self._state.iteration

    # Training

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        memory: Memory | None = None,
        *,
        name: str = "",
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Prepare `model` and `optimizer` to train with the other workers; returns these two objects,
        changed.

        The model moves to `session.device`. Its parameters become views into chunks and take worker 0's
        values, as do its buffers. Every worker calls this method, with equal models. It may be called again
        for another pair. Raises PrepareError, naming the parameter and the remedy, for a model that cannot be
        trained.

        With `name`, a checkpoint's values go to the model of that name, in whatever order a script prepares
        several models. Without names the order decides.

        With `memory`, or `[memory]` in the configuration, the pair trains within memory budgets, as by
        `atoll.memory.fit`. One worker keeps the model alone. Under `ring` all workers shard the model, and
        under `hierarchical` the workers of each group do. Under `peers` each node's CPU side lends memory.
        The budgets may differ between workers.
        """
        self._workers.check_open()
        _check_pair(model, optimizer)
        self._check_new(model, name)
        origin = origin_of(model, name)
        with self._in_call("session.prepare"):
            tiers = self._runtime.tiers(self.config, memory)
            prepared = Prepared(
                model,
                optimizer,
                origin=origin,
                config=self.config,
                device=self.device,
                workers=self._workers,
                strategy=self._strategy,
                tiers=tiers,
                backward=self._backward,
                begins_step=self._begin_step,
                counted=self._count_samples,
                epoch_of=self._epoch_of,
                epochs_mixed=self._epochs_mixed,
                forward=self._passes.forward,
                counts_unlike=self._counts_unlike,
                whole=self._iteration_whole,
                stepped=self._stepped,
                skipped=self._tell_skipped,
                warn_once=self._records.warn_once,
            )
        self._state.prepared.append(prepared)
        self._schedules.watch(prepared)
        if self._service is not None:
            self._service.hub.size += prepared.trained_bytes
        for decided in tiers.describe() if tiers is not None else []:
            self._records.decided(*decided)
        if tiers is None or tiers.fitted is None:
            self._records.decided(
                "chunks", prepared.chunk_map.describe(), "least waste among the sizes searched"
            )
        self._meter.begin()
        return model, optimizer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it `backward()` only accumulates this worker's gradients; the next one outside it sends
        the sum."""
        before = [(prepared.reducer, prepared.reducer.synchronous) for prepared in self._state.prepared]
        for reducer, _ in before:
            reducer.synchronous = False
        try:
            yield
        finally:
            for reducer, synchronous in before:
                reducer.synchronous = synchronous

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        model: nn.Module | None = None,
    ) -> Tensor:
        """Scale the gradients so that their total norm is at most `max_norm`; returns the norm before.

        It is torch.nn.utils.clip_grad_norm_ on the global mean: per-parameter norms, combined in
        registration order. `model` says whose gradients where several models are prepared.
        """
        prepared = self._find(model)
        return prepared.clip(max_norm, norm_type, error_if_nonfinite)

    def weight(self, samples: float, model: nn.Module | None = None) -> None:
        """Set the weight of this iteration's batch in the global mean, in place of its number of samples.

        By default a batch weighs the first dimension of the first tensor given to the model's forward. For
        this, the session's sampler or the model's output must agree with that number on every worker that has
        gradients. Otherwise all workers count alike, and one line reports the counts where they differ
        (docs/from-ddp.md, "How batches are weighted"). Call this on every worker, before the batch's
        backward. Under accumulation the weights of an iteration's batches add up.
        """
        if not 0 <= samples < math.inf:
            raise UserError(f"session.weight({samples}): a weight is a number of at least 0")
        self._find(model).samples.give(float(samples))

    def sampler(
        self, dataset: Sized, seed: int = 0, *, shuffle: bool = True, drop_last: bool = False
    ) -> ShardedSampler | LeasedSampler:
        """This worker's share of `dataset`'s indices, in an order drawn anew each epoch from `seed`.

        Give it to a DataLoader. Its place in the epoch is saved and loaded with the session's checkpoints.
        Every worker calls it with the same arguments; under strategy `peers` others are told in a UserError.
        """
        if self._runtime.leases is not None:
            return self._leased_sampler(self._runtime.leases, dataset, seed, shuffle, drop_last)
        order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        sampler: ShardedSampler
        if self._peers is not None:
            self._peers.check_alike("session.sampler", dataset, **order)
            sampler = self._peers.sampler(dataset, **order, on_index=self._sampler_gives)
        else:
            place: dict[str, Any] = {"rank": self.rank, "world": self.world, "on_index": self._sampler_gives}
            sampler = ShardedSampler(dataset, **place, **order)
        self._state.samplers.append(sampler)
        return sampler

    def batches(
        self,
        dataset: Sized,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: int | None = None,
    ) -> BatchesSampler | LeasedBatches | PeerBatches:
        """This worker's part of batches of `sync.global_batch` samples over all workers, however many there
        are: for `DataLoader(dataset, batch_sampler=...)`.

        Its own batches are of that size divided by the number of workers, the remainder to the first, and
        follow it when workers are lost or come new; under strategy `peers` they are in proportion to the
        nodes' speeds (a node's devices take even parts), the sooner the fewer batches are fetched `ahead` of
        their use: say 0 where a DataLoader has no workers, and the same on every worker (None: up to 31).
        With the mean weighted by samples, any number of workers trains as one does.
        Order, place and callers are as with `sampler`. Raises UserError where `sync.global_batch` is not set.
        """
        whole = self.config.sync.global_batch
        if whole == 0:
            raise UserError(
                "session.batches makes batches of sync.global_batch samples over all workers, and that is "
                "not set; write --set sync.global_batch=256, say, or use session.sampler"
            )
        order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
        if self._peers is not None:
            self._peers.check_alike("session.batches", dataset, **order, ahead=ahead)
            peer_batches = self._peers.batches(
                dataset, batch=whole, **order, ahead=ahead, on_index=self._sampler_gives
            )
            self._state.samplers.append(peer_batches)
            return peer_batches
        if self._runtime.leases is not None:
            leased = self._leased_sampler(self._runtime.leases, dataset, seed, shuffle, drop_last)
            return LeasedBatches(leased, lambda: _part_of(whole, self.rank, self._service_members()))
        place: dict[str, Any] = {"rank": self.rank, "world": self.world, "on_index": self._sampler_gives}
        sampler = BatchesSampler(dataset, batch=whole, **place, **order)
        self._state.samplers.append(sampler)
        return sampler

    def epoch_of(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """One epoch's batches, as `for batch in loader` gives them; its sampler is one of this session's.

        It ends where the others' epoch does, also for a node that they went on without (strategy `peers`) and
        that came back meanwhile; a loop over the loader may end with what that had in hand. Use it where all
        meet at each epoch's end. There it waits, under `peers`, until what this node has contributed is
        applied. Raises UserError for another loader.
        """
        return epoch_of(loader, self._state.samplers, self._peers.catch_up if self._peers else lambda: None)

    def _service_members(self) -> int:
        """How many workers make a step together, where each goes at its own pace."""
        assert self._service is not None
        if self._group_ring is not None:  # the shards know groups, and not their members
            return self.world
        return self._service.members or self.world

    def _leased_sampler(
        self, leases: Leases, dataset: Sized, seed: int, shuffle: bool, drop_last: bool
    ) -> LeasedSampler:
        """Where workers go at their own pace, each takes its data from the hub as it needs it."""
        assert self._service is not None
        facts = {"call": "session.sampler", "data": "leased", "drop_last": drop_last}
        check("call", Choices(facts))
        sampler = LeasedSampler(
            dataset,
            lease=leases.lease,
            number=len(self._state.samplers),
            workers=self.world,
            seed=seed,
            shuffle=shuffle,
            # In ssp, and at a site, the others may be held up until this worker goes on.
            wait=3 * self._service.welcome.patience
            if self.config.sync.consistency == "asp" and not self._service.site
            else 0.0,
            on_index=self._sampler_gives,
            mixes=partial(self._records.warn_once, "late samples"),
        )
        self._state.samplers.append(sampler)
        self._service.samplers.append(sampler)
        return sampler

    def schedule(self, scheduler: Any, total: float, steps: int | None = None) -> None:
        """Drive a torch scheduler by the samples that all workers consume; leave out `scheduler.step()` in
        the script.

        Call this once, after `prepare` and before `resume` or `load`. After each `optimizer.step()` Atoll
        steps the scheduler so that it has made floor(steps * consumed / total) steps. With `steps` = `total`
        / (samples of an iteration) the scheduler makes one step an iteration, as in plain PyTorch. Workers of
        unequal speeds, and workers that remain after a loss, still end at the schedule's end. A worker at its
        own pace knows only the samples of others that came with its latest parameters. Checkpoints of the
        session save and load the count.

        Args:
            scheduler: a scheduler of a prepared optimizer.
            total: the samples that all workers consume in the whole run, such as `epochs * len(dataset)`.
            steps: the steps that the scheduler makes in the whole run; by default its own length (`T_max`,
                `total_steps`, ...).

        Raises UserError for a scheduler without a length where `steps` is not given, for ReduceLROnPlateau,
        and for a scheduler of an unprepared optimizer.
        """
        self._schedules.add(scheduler, total, steps)

    # Telling

    def log(self, **values: float | Tensor) -> None:
        """Record values of this iteration (numbers or tensors of one element): their mean over workers.

        The mean is weighted like the mean of gradients. Tensors on a GPU are copied at once but read later,
        so that no call waits for the GPU.
        """
        self._records.log(values)

    def expect(self, steps: int) -> None:
        """Say how many steps the run will take in all, for the display's estimate of the time left. Once a
        worker has made more, as one may who leases, it is not shown."""
        self._records.emit(events.Expected, steps=int(steps))

    def barrier(self) -> None:
        """Return when every worker has called this method.

        Call this before an evaluation. All workers then have worker 0's buffers, and workers at their own
        pace (`ssp`, `asp`) the newest parameters. Of a model that is sharded over the workers, each worker
        then sees the values that the others' scripts have written.
        """
        with self._in_call("session.barrier"):
            self._settle()
            self._workers.barrier()
            self._confirm("session.barrier")
            self._strategy.refresh()
            self._state.sync("session.barrier")
            self._state.unify("session.barrier")
            self._schedules.follow()

    def reduce(self, value: Value, op: Reduction = "mean", weight: float | None = None) -> Value:
        """`value` (a number or a tensor) combined over the workers by mean, sum, min or max; every worker
        calls it.

        With `mean`, each worker's value counts by `weight` (1 each unless given).
        """
        with self._in_call("session.reduce", asked_of_reduce(value, op)):
            reduced = self._workers.reduce(value, op, weight)
        self._schedules.follow()
        return reduced

    def gather(self, value: Any) -> list[Any]:
        """Each worker's `value`, in order of rank; tensors of any shapes, or what JSON can hold. Every
        worker calls it."""
        with self._in_call("session.gather", asked_of_gather(value)):
            gathered = self._workers.gather(value)
        self._schedules.follow()
        return gathered

    # Saving and loading

    def register(self, **objects: Stateful) -> None:
        """Save and load these objects too, under these names (a GradScaler, an average of the weights).

        Raises UserError, with the name and the key, where no checkpoint can hold an object's state_dict.
        """
        for name, stateful in objects.items():
            if not hasattr(stateful, "state_dict") or not hasattr(stateful, "load_state_dict"):
                raise UserError(
                    f"session.register({name}=...): a {type(stateful).__name__} has no state_dict and "
                    "load_state_dict"
                )
            check_state(name, stateful)
        self._state.registered.update(objects)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to the folder `path`: model, optimizer, schedulers, samplers, random state,
        iteration.

        Every worker calls this; worker 0 writes. Before, all workers take worker 0's buffers and registered
        modules. The checkpoint loads at any number of workers, and its model loads in plain torch
        (safetensors). It replaces an older checkpoint in the folder at once or not at all. Raises
        CheckpointError on every worker if the write fails.
        """
        self._require_prepared("session.save")
        with self._in_call("session.save"):
            if not self._strategy.collective:  # when all are here, nothing moves any more
                self._settle()
                self._workers.barrier("session.save")
                self._strategy.refresh()
            self._confirm("session.save")
            self._state.sync("session.save")
            self._state.unify("session.save", registered=True)
            self._schedules.follow()
            with self._not_computing():
                self._state.save(path)
        if self.is_main:  # under `ssp` and `asp` each is at an iteration of its own, and it is one checkpoint
            self._records.emit(events.Saved, iteration=self.iteration, path=str(path))

    def resume(self, folder: str | os.PathLike[str] | None = None) -> int:
        """Go on where the run is; returns how many iterations are done. Call it after `prepare` and after all
        that it puts back has been made (schedulers, samplers, what is registered), before the loop.

        Where the run is under way, with the state of a living worker; else from the checkpoint in `folder`,
        if there is one; else from nothing. Every worker calls it; one that comes late enters between two
        iterations of the others. Raises CheckpointError as `load` does.
        """
        self._require_prepared("session.resume")
        entrance = self._entrance
        if entrance is not None and entrance.late:
            with self._not_computing():
                entered = entrance.enter()
            if entered:
                at = f"at iteration {self.iteration}"
                self._records.emit(
                    events.Decided, what="entered", choice=at, reason="a living worker gave its state"
                )
                return self.iteration
        with self._in_call("session.resume"):
            there = folder is not None and is_checkpoint_there(folder)
            if folder is not None and any(
                self._workers.gather(there, "session.resume (who has a checkpoint)")
            ):
                self.load(folder)
            elif entrance is not None and self.iteration:
                self._records.warn(
                    f"nobody lives who could give its state: parameters and optimizer are those of iteration "
                    f"{self.iteration}, and schedulers, buffers and data begin anew"
                )
            elif folder is not None and self._workers.is_first:
                self._records.warn_once(
                    f"session.resume {folder}",
                    f"session.resume found no checkpoint in {folder}: starting at step {self.iteration}",
                )
            return self.iteration

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint: call it after `prepare`, and after schedulers and samplers are made.

        Every worker calls it and reads `path`. Raises CheckpointError on every worker when the checkpoint
        is missing, damaged or of another model; nothing of it has then been taken over.
        """
        self._require_prepared("session.load")
        if self._entrance is not None and self._entrance.late:
            raise UserError(
                "session.load: this worker comes late, and the run is under way; call session.resume(folder) "
                "in its place"
            )
        with self._in_call("session.load"):
            self._settle()
            if self._regrouping is not None and self._regrouping.grouping:
                raise UserError(
                    "session.load: the workers are in groups already; call it before the loop, after "
                    "session.prepare"
                )
            with self._not_computing():
                self._state.load(path)
                self._strategy.loaded()
            self._compares_masks_at = self._state.iteration + 1

    # The end

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        if error is not None and not self._closed and not self._is_forked():
            say_leaving(self.rank, error)
        if self._runtime.hub is not None:
            why = str(error) if isinstance(error, AtollError) else f"its script raised {kind.__name__}"
            self._runtime.hub.leaves_because(why)
        with child_deaths_ignored():
            self._leave()

    def close(self) -> None:
        """Write the last records, wait for the other workers to finish too, and let the model go."""
        if self._closed or self._is_forked():
            return
        self._records.finished()
        if self._node is not None:
            self._end_peers(self._node)
            return
        if not self._runtime.together:  # workers end when they have no more data, one before the other
            try:
                with self._workers.standing(end(self.iteration, script_line())):
                    with contextlib.suppress(RunError):  # the shards are gone: what was trained counts
                        self._give_back()
                    self._workers.part()
                if self._service is not None:
                    self._service.finished = True
            finally:
                self._leave()
            return
        if self._entrance is not None:
            self._entrance.ending()
        # Nobody leaves early: the store goes with the worker that holds it, and worker 0 reads all journals.
        try:
            with self._workers.standing(end(self.iteration, script_line())):
                self._compare_unstepped()
                self._state.unify(_END.format(self.iteration))
                self._give_back()
                self._workers.barrier(_END.format(self.iteration))
                self._confirm(_END.format(self.iteration))
            if self._member is not None:
                self._member.finished = True
        finally:
            self._leave()

    def _end_peers(self, node: NodeWorker) -> None:
        """All that was contributed is applied, and the nodes part; one that comes in now is let in first."""
        try:
            where = _END.format(self.iteration)
            with self._workers.standing(end(self.iteration, script_line())):
                if self._peers is not None and self._peers.exchange is not None:
                    self._peers.exchange.end(where)
                    self._give_back()
                self._compare_unstepped()
                self._state.unify(where)
                self._workers.barrier(where)
            node.leave(self.iteration)
            self._records.tell_of_node()
        finally:
            self._leave()

    def _give_back(self) -> None:
        """Bring the state of optimizers that stepped elsewhere to this worker, for the script's use."""
        if self._entrance is None or not self._entrance.late:
            for prepared in self._state.prepared:
                prepared.give_back()

    def _is_forked(self) -> bool:
        """True in a process that the script has forked: the session is its parent's to leave."""
        return os.getpid() != self._process

    def _leave(self) -> None:
        if self._closed or self._is_forked():
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # a device that has failed must not hide why
            self._records.read_logged()
        with contextlib.ExitStack() as ends:  # from the last on, and whatever one raises, the others too
            ends.callback(self._records.summarise)
            if self._member is not None:
                ends.callback(self._member.close)
            ends.callback(self._workers.close)
            for ring in (self._ring, self._group_ring):
                if ring is not None:
                    ends.callback(ring.close)
            ends.callback(self._records.close)
            for prepared in self._state.prepared:
                ends.callback(prepared.close)
            ends.callback(self._passes.close)

    # Inside

    def _in_call(self, name: str, asks: str = "") -> contextlib.AbstractContextManager[None]:
        """Mark this worker as inside a call that all workers make; see `Workers.standing`."""
        return self._workers.standing(call(name, script_line(), asks=asks, step=self.iteration))

    def _settle(self) -> None:
        """Wait until what this worker has sent by itself counts: exchanges may go on while it computes."""
        self._workers.gather_group()
        for prepared in self._state.prepared:
            prepared.reducer.settle()

    def _confirm(self, what: str) -> None:
        """Hear of all who step copies of their own that these are alike; raises UserError."""
        for prepared in self._state.prepared:
            prepared.reducer.confirm(what)

    def _check_new(self, model: nn.Module, name: str) -> None:
        """Raise if the model, one of its parameters or its `name` belongs to a model prepared before."""
        module = uncompiled(model)
        for prepared in self._state.prepared:
            if name and prepared.origin.name == name:
                raise UserError(f"session.prepare(name={name!r}): another model has that name already")
            if prepared.module is module:
                raise UserError("this model is prepared already; call session.prepare once for each model")
            taken = {id(parameter) for parameter in prepared.parameters.values()}
            for name, parameter in module.named_parameters():
                if id(parameter) in taken:
                    raise PrepareError(
                        f"parameter {name!r} belongs to another prepared model too; put both models into one "
                        "nn.ModuleList and prepare that, with one optimizer"
                    )

    def _find(self, model: nn.Module | None) -> Prepared:
        self._require_prepared("this call")
        if model is None:
            if len(self._state.prepared) > 1:
                raise UserError("several models are prepared; say which is meant with model=...")
            return self._state.prepared[0]
        for prepared in self._state.prepared:
            if prepared.module is uncompiled(model):
                return prepared
        raise UserError("this model is not prepared; call session.prepare(model, optimizer) first")

    def _require_prepared(self, what: str) -> None:
        if not self._state.prepared:
            raise UserError(f"{what} needs a model; call session.prepare(model, optimizer) first")

    def _count_samples(self, prepared: Prepared, seen: Seen) -> tuple[float | None, str]:
        """Return the number of samples of a forward's batch, and how certain that number is."""
        samples, certain = seen.samples, seen.confirms
        if prepared is self._state.prepared[0]:
            self._passes.trains()
        if samples is None:
            return None, NONE
        sampler = self._sampling if prepared is self._state.prepared[0] else None
        if sampler is not None:
            self._trains_on = self._trains_on or sampler
            sizes = sampler.next_sizes()
            if samples not in sizes:
                samples = next((each for each in seen.instead if each in sizes), samples)
            certain = certain or samples in sizes
            samples = sampler.count(samples)
        return samples, KNOWN if certain else GUESSED

    def _counts_unlike(self, line: str) -> None:
        if self.is_main or (self._service is not None and self._service.site):  # a site tells its own workers
            self._records.warn_once("weights", line)

    def _tell_skipped(self, reason: str) -> None:
        """Record that the policy on NaN and infinities has skipped this iteration, or this worker's part of
        it.
        """
        left_out = ""
        if not self._strategy.skips_together:
            left_out = self._contributor
        self._records.emit(events.Skipped, iteration=self._state.iteration, reason=reason, left_out=left_out)

    @property
    def _contributor(self) -> str:
        """Name the workers that contribute as one with this worker."""
        names = [str(self._workers.place.name)]
        if self._group_ring is not None:
            names = [str(self._group_ring.place.name_of(rank)) for rank in range(self._group_ring.world)]
        if self._node is not None:
            names = [str(rank) for rank in self._node.introduction.workers_of(self._node.node)]
        return f"worker{'s' * (len(names) > 1)} {' and '.join(names)}"

    def _epoch_of(self, prepared: Prepared) -> Epoch:
        """Return the epoch of the batch on which the first model trains.

        Without a sampler of this session the epoch is what the script shows of its loop. The epoch is unknown
        where each worker leases its own data.
        """
        sampler = self._trains_on
        if prepared is not self._state.prepared[0] or isinstance(sampler, LeasedSampler):
            return UNKNOWN
        return self._passes.epoch() if sampler is None else Epoch(sampler.epoch, SAMPLER)

    def _epochs_mixed(self, line: str) -> None:
        if self.is_main or (self._service is not None and self._service.site):  # a site tells its own workers
            self._records.warn_once("epochs", line)

    def _iteration_whole(self, prepared: Prepared) -> None:
        if self._sampling is not None and prepared is self._state.prepared[0]:
            self._sampling.committed()

    def _sampler_gives(self, sampler: AnySampler) -> None:
        """A sampler is about to give an index: the samples that a forward counts next are its."""
        self._sampling = sampler
        if sampler.resumed:
            # A DataLoader draws a number when it starts; a run that was never stopped has drawn it long ago.
            self._state.restore_random_once()

    def _stepped(self, prepared: Prepared) -> None:
        self._backward.settle()  # the optimizer's own time
        self._schedules.stepped(prepared)
        if not self._strategy.shares_buffers:
            self._look_at_buffers(prepared)
        if prepared is not self._state.prepared[0]:
            return
        self._state.iteration += 1
        if self._member is not None and not self._is_checked:  # workers may come late
            self._is_checked = True
            self._state.check_givable()
        self._state.resumed_random = None
        if self._state.iteration == self._compares_masks_at:
            with self._in_call("the first optimizer.step()"):
                self._compare_masks()
        taken = self._meter.stepped()
        if self._is_paced:
            self._pace.stepped(taken.computing, prepared.own_samples)
        if self._member is not None:
            self._member.stepped(self._state.iteration)
        if self._service is not None:
            self._service.hub.batch = prepared.own_samples
            if self.config.run.strategy == "ps-hra":  # the hub makes groups of those that tell it a pace
                self._service.hub.pace = self._pace.seconds
        if self._records.kept:
            figures = self._peers.figures() if self._peers is not None else {}
            staleness = None
            if self._service is not None and not self._strategy.collective:
                staleness = self._service.staleness
            self._records.stepped(taken, prepared.own_samples, figures, staleness)

    def _compare_unstepped(self) -> None:
        """Compare random numbers at the end of a session that made no step. All workers make this call."""
        if self._state.iteration < self._compares_masks_at:
            self._compare_masks()

    def _compare_masks(self) -> None:
        """Warn once where dropout masks are equal on all workers.

        All workers make this call in one iteration. A worker that joins later does not make it.
        """
        modules = [module for each in self._state.prepared for module in each.module.modules()]
        if self.world == 1 or not has_random_layers(modules):
            return
        own = [digest_of_generators(self.device), has_random_layers(modules, training=True)]
        everyone = self._workers.gather(own, "the workers' random numbers")
        alike = len(everyone) > 1 and all(each == [own[0], True] for each in everyone)
        if alike and self._workers.is_first:
            self._records.warn_once("masks", ALIKE)

    def _begin_step(self, prepared: Prepared) -> None:
        """Step the schedules before an optimizer step, by samples of others that have become known since the
        last step.

        Where this iteration's own samples are counted already, do nothing: this step's parameters do not
        include them yet.
        """
        self._state.follow_samples(prepared)

    def _look_at_buffers(self, prepared: Prepared) -> None:
        """Warn once that each worker keeps its own buffers, under a strategy that does not share them."""
        buffers = prepared.buffers
        if self._told_of_buffers or not self.is_main or self.world == 1:
            return
        if buffers.changed or any(buffers.said()):
            self._told_of_buffers = True
            self._records.warn_once(
                "buffers",
                f"training changes the model's buffers ({buffers.changed}, for one), and under strategy "
                f"{self.config.run.strategy!r} each worker has its own until session.barrier() or "
                "session.save(), where all take worker 0's: call session.barrier() before an evaluation",
            )

    def _make_stretch(self) -> Stretch | None:
        """What slows this worker down, where it is to be slower than it is."""
        speed = speed_from()
        return None if speed == 1 else Stretch(speed, self._meter.computing_clock)

    def _not_computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._stretch is None else self._stretch.paused()


def _part_of(whole: int, rank: int, members: int) -> int:
    """One member's part of `whole` samples, the remainder to the first; at least one."""
    return max(1, whole // members + (rank % members < whole % members))


def _check_pair(model: object, optimizer: object) -> None:
    """Raise PrepareError where `model` is no module, or `optimizer` no optimizer."""
    if not isinstance(model, nn.Module):
        raise PrepareError(
            f"session.prepare takes one nn.Module as its model, and was given a {type(model).__name__}; put "
            "several into one nn.ModuleList"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrepareError(
            "session.prepare takes one torch.optim.Optimizer, and was given a "
            f"{type(optimizer).__name__}; several become one with a param group for each"
        )
