"""The state of a session in a checkpoint. It is put back as a whole, or not at all if something does not
fit."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from atoll.core.config import Buffers
from atoll.core.errors import AtollError, CheckpointError, UserError
from atoll.core.runclock import record_time
from atoll.tensors.checkpoint import pack, read_checkpoint, unpack, write_checkpoint
from atoll.tensors.torch_compat import is_persistent, own_buffers
from atoll.tensors.trees import check_encodable
from atoll.train.api.place import Place
from atoll.train.api.prepared import Prepared
from atoll.train.api.schedule import SampleSchedule
from atoll.train.api.schedulers import check_states, put_back_states, states_of
from atoll.train.api.scriptmodel import ScriptModel
from atoll.train.checkpoint import reducerstates, savedgroups, savedmodels
from atoll.train.checkpoint.random_state import (
    check_random_state,
    derive_random_state,
    random_state,
    set_random_state,
)
from atoll.train.checkpoint.workercopies import WorkerCopies, lies_elsewhere
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import DealtSampler
from atoll.train.gradients.memory import Tiers
from atoll.train.members.workers import Workers

AnySampler: TypeAlias = "DealtSampler[Any] | LeasedSampler | PeerBatches"


class Stateful(Protocol):
    """An object that can be given to `session.register`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def state_of(name: str, stateful: Stateful) -> Any:
    """Return the state of the object registered under `name`.

    Raises CheckpointError, with the name and the key, if a checkpoint cannot hold the state, or if the
    object's own `state_dict` raises.
    """
    try:
        state = stateful.state_dict()
    except AtollError:
        raise
    except Exception as error:
        raise CheckpointError(f"registered {name!r}: its state_dict() raised {error!r}") from error
    check_encodable(state, f"registered {name!r}: state")
    return state


def check_state(name: str, stateful: Stateful) -> None:
    """Raise UserError if no checkpoint can hold the state of the object registered under `name`.

    An object whose `state_dict` raises passes, because it may have a state later.
    """
    try:
        state = stateful.state_dict()
    except Exception:  # the object's own code: `state_of` reports this error when a checkpoint is written
        return
    try:
        check_encodable(state, f"registered {name!r}: state")
    except CheckpointError as error:
        raise UserError(str(error)) from None


class TrainingState:
    """The parts of a session that go into its checkpoints, and come back from them.

    Parts are added as the script makes them. `save` and `load` are collectives of the `workers` that they are
    given. `capture` and `restore` serve one worker that enters a run under way: its state comes from
    another worker's memory.

    Attributes:
        rank: this worker's rank among the members.
        world: the number of members.
        prepared: the prepared models.
        samplers: the session's samplers.
        registered: the registered objects, by name.
        copies: the tensors of which each worker has a copy of its own.
        schedules: the schedules that samples drive.
        iteration: the number of iterations made.
        resumed_random: this worker's loaded random state, from a load until its next step; else None.
        loaded: time of the latest load of a checkpoint, equal on all workers; 0: none.
        counted_from: the samples of all workers at the latest load, or when this worker entered the run.
    """

    def __init__(self, place: Place, device: torch.device, buffers: Buffers = "rank 0") -> None:
        """Begin empty. `place` is this worker's place as the session begins, and `buffers` is
        `sync.buffers`."""
        self._device = device
        self.rank, self.world = place.rank, place.world
        self.prepared: list[Prepared] = []
        self.samplers: list[AnySampler] = []
        self.registered: dict[str, Stateful] = {}
        self.copies = WorkerCopies(self.prepared, self.registered, buffers)
        self.schedules: list[SampleSchedule] = []
        self.iteration = 0
        self.resumed_random: dict[str, Any] | None = None
        self.loaded = self.counted_from = 0.0

    @property
    def tiers(self) -> list[Tiers]:
        """The tiers of the models that have memory budgets."""
        return [prepared.tiers for prepared in self.prepared if prepared.tiers is not None]

    @property
    def models(self) -> list[ScriptModel]:
        """The script's models, in the order of a checkpoint."""
        return [model for prepared in self.prepared for model in prepared.models]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The models' optimizers, one model's after another's: their order in a checkpoint."""
        return [optimizer for model in self.models for optimizer in model.optimizers]

    @property
    def _counts_each(self) -> bool:
        """True if the samples that all workers consume are counted for each model."""
        return len(self.prepared) == len(self.models)

    def save(self, workers: Workers, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint on the first worker. A collective.

        Raises CheckpointError on every worker if the write fails, and UserError if workers give different
        folders.
        """
        failure, own = "", dict[str, Any]()
        try:
            own = self._own_state()
        except CheckpointError as error:
            failure = str(error)
        state = {**own, **self._collect(workers, path)}
        if workers.is_first and not failure:
            trees = {"optimizer": [each.state_dict() for each in self.optimizers], "state": state}
            if any(held := savedgroups.held(self.prepared)):
                trees["groups"] = held
            model = dict[str, Any]()
            try:
                for index, each in enumerate(self.models):
                    model |= savedmodels.as_saved(each.module.state_dict(), index)
                write_checkpoint(path, model=model, trees=trees)
            except CheckpointError as error:
                failure = str(error)
        _raise_together(workers, failure, "session.save (worker 0 to write)")

    def load(self, workers: Workers, path: str | os.PathLike[str]) -> int:
        """Read a checkpoint on every worker; return the number of workers that saved it. A collective.

        Raises CheckpointError on every worker, and changes nothing, if one worker cannot go on from its
        checkpoint, or if workers have read different checkpoints.
        """
        failure, found, where = "", None, str(path)
        model: dict[str, Any] = {}
        trees: dict[str, Any] = {}
        try:
            checkpoint = read_checkpoint(path, lazily=any(lies_elsewhere(p.module) for p in self.prepared))
            model, trees = savedmodels.in_own_order(self.models, checkpoint.model, checkpoint.trees, where)
            self._check(model, trees, where)
            model = savedgroups.choose(self.prepared, workers.place.rank, model, trees, where)
            for sampler, saved in zip(self.samplers, trees["state"]["samplers"], strict=True):
                sampler.check_state(saved)
            found = (trees["state"]["iteration"], checkpoint.digest, where, record_time())
        except CheckpointError as error:
            failure = str(error)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            # Its checksums are right: another program has written it.
            failure = f"{where}: not the state of a session: {error!r}"
        everyone = _raise_together(workers, failure, "session.load (the other workers to read)", found)
        _check_alike(workers.ranks, everyone)
        self._put_back(model, trees)
        state = trees["state"]
        reducerstates.load(self.prepared, state["reducers"])
        for sampler, its in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(its)
        self._load_random(workers.place.rank, state["random"])
        *_, self.loaded = everyone[0]
        return len(state["random"])

    def _put_back(self, model: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Put back models, optimizers, schedulers, registered objects and the iteration."""
        state = trees["state"]
        with ExitStack() as loads:
            for prepared in self.prepared:  # a registered object may load an optimizer too
                loads.enter_context(prepared.stepper.loading())
            optimizers, schedulers = iter(trees["optimizer"]), iter(state["schedulers"])
            for index, (prepared, each) in enumerate(self._each()):
                its, beside = savedmodels.of_model(model, index), prepared.steps_elsewhere and "held" in state
                if beside:
                    _load_beside(prepared, each, its)
                else:
                    each.module.load_state_dict(its)
                for optimizer in each.optimizers:
                    if beside:
                        _load_settings(optimizer, next(optimizers))
                    else:
                        optimizer.load_state_dict(next(optimizers))
                    put_back_states(optimizer, next(schedulers))
            for name, saved in state["registered"].items():
                self.registered[name].load_state_dict(saved)
        for prepared in self.prepared:
            prepared.buffers.settle()
        self.iteration = state["iteration"]
        self._put_back_schedules(state)
        self.count_from_here()

    def count_from_here(self) -> None:
        """Note the present number of samples as that with which this worker entered the run."""
        self.counted_from = self.prepared[0].reducer.consumed if self.prepared else 0.0

    def _put_back_schedules(self, state: Mapping[str, Any]) -> None:
        """Put back the number of consumed samples, and the schedules that follow it. Their schedulers must be
        loaded before.

        A checkpoint from an older Atoll lacks that number; then it follows from the schedulers' positions. A
        schedule goes on from the saved one of its own model, by order, or in a checkpoint from an older Atoll
        from the one of the same call of `session.schedule`.
        """
        saved = savedmodels.schedules_of_models(state)
        if not saved:
            of_calls = list(state.get("schedules", ()))
            for number, schedule in enumerate(self.schedules):
                schedule.loaded(of_calls[number] if number < len(of_calls) else None)
        if not self._counts_each:  # the models train as one, which has the samples of all
            for prepared in self.prepared:
                in_all = state.get("consumed_in_all", sum(state.get("consumed", ())))
                prepared.reducer.consumed = float(in_all)
        for number, prepared in enumerate(self.prepared if self._counts_each else ()):
            own = [each for each in self.schedules if _is_of(each, prepared)]
            if saved:
                theirs = [each for each in saved if each["model"] == number]
                for schedule, before in itertools.zip_longest(own, theirs[: len(own)]):
                    schedule.loaded(before)
            if "consumed" in state:
                prepared.reducer.consumed = float(state["consumed"][number])
            else:
                prepared.reducer.consumed = max((each.samples_made for each in own), default=0.0)

    def check_givable(self) -> None:
        """Raise CheckpointError, with the name, for a state that no checkpoint can hold and no newcomer can
        be given.

        Tensors are not copied.
        """
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
            for number, group in enumerate(optimizer.param_groups):
                plain = {key: value for key, value in group.items() if key != "params"}
                check_encodable(plain, f"{name}: param_groups[{number}]")
            for kind, state in states_of(optimizer).items():
                check_encodable(state, f"{kind}: state")
        for prepared in self.prepared:
            for path, part in prepared.module.named_modules():
                if type(part).get_extra_state is not nn.Module.get_extra_state:
                    check_encodable(part.get_extra_state(), f"model: {path}.get_extra_state()")
        for name, stateful in self.registered.items():
            state_of(name, stateful)

    # From one worker's memory to another's

    def capture(self, fixed: bool = False) -> bytes:
        """Return the state that a worker needs to enter the run here, between two iterations, as bytes.

        It has the models with their buffers, optimizers, schedulers, registered objects, the samplers' deals,
        the reducers' member states and the iteration. There is no pickle: the format is that of
        `tensors.checkpoint.pack`, safetensors and JSON. Parameters that live at the shards of a parameter
        server are left out, with the optimizer's state. Not a collective. Raises CheckpointError for a state
        that a checkpoint cannot hold.

        `fixed`: the newcomer takes a lost worker's place, and data is not dealt anew.
        """
        state = {
            **self._own_state(),
            "held": "all",
            "reducers": reducerstates.member_states(self.prepared),
            "samplers": [
                sampler.lockstep_state()
                if fixed and isinstance(sampler, DealtSampler)
                else sampler.deal_state()
                for sampler in self.samplers
            ],
            "random": random_state(self._device),
            "loaded": self.loaded,
        }
        return self._pack(state)

    def _pack(self, state: dict[str, Any]) -> bytes:
        optimizers: list[Any] = []
        model: dict[str, Any] = {}
        for index, (prepared, each) in enumerate(self._each()):
            if prepared.steps_elsewhere:
                held = _beside(prepared, each)
                kept: Iterable[Any] = map(_settings_of, each.optimizers)
                state["held"] = "beside"
            else:
                held = each.module.state_dict()
                kept = (optimizer.state_dict() for optimizer in each.optimizers)
            model |= savedmodels.as_saved(held, index)
            optimizers += kept
        return pack(model=model, trees={"optimizer": optimizers, "state": state})

    def capture_shared(self) -> bytes:
        """Return the state that is equal on a group's members, in the format of `capture`.

        Samplers, reducers and random numbers are left out: each member keeps its own.
        """
        return self._pack(
            {
                **self._own_state(),
                "held": "all",
                "reducers": [None] * len(self.models),
                "samplers": [None] * len(self.samplers),
                "loaded": self.loaded,
            }
        )

    def restore_shared(self, raw: bytes | bytearray | memoryview) -> None:
        """Take over another worker's `capture_shared`. Raises CheckpointError, before anything is changed, if
        it does not fit."""
        where = "the state of a group's first member"
        model, trees = unpack(raw, where)
        try:
            self._check(model, trees, where, "session.prepare")
            loaded = _loaded_at(trees["state"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{where}: not what this Atoll sends: {error!r}") from None
        self._put_back(model, trees)
        self.loaded = loaded

    def restore(
        self, raw: bytes | bytearray | memoryview, own: int, rank: int | None = None, fixed: bool = False
    ) -> None:
        """Take over another worker's `capture`, and go on at its iteration.

        Raises CheckpointError, which names the difference, before anything is changed.

        Args:
            raw: the captured state.
            own: this worker's rank; its random-number generators are seeded from the rank and the other
                worker's state.
            rank: this worker's rank in the samplers' deals, if these include it already. None: `deal_anew`
                follows, unless the state was captured `fixed`.
            fixed: as given to `capture`.
        """
        where = "the state of a living worker"
        model, trees = unpack(raw, where)
        try:
            self._check(model, trees, where, "session.resume")
            state = trees["state"]
            if savedmodels.positions(self.models, trees, where) != list(range(len(self.models))):
                raise CheckpointError(
                    f"{where}: its models were prepared in another order than this worker's"
                )
            for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
                if fixed and isinstance(sampler, DealtSampler):
                    sampler.check_state(saved)
                else:
                    sampler.check_deal_state(saved)
            reducerstates.check_members(self.prepared, state["reducers"])
            check_random_state(state["random"])
            loaded = _loaded_at(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{where}: not what this Atoll sends: {error!r}") from None
        self._put_back(model, trees)
        reducerstates.load_members(self.prepared, state["reducers"])
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            if fixed and not isinstance(sampler, LeasedSampler):
                sampler.return_to(saved)
            else:
                sampler.load_deal_state(saved, rank)
        derive_random_state(state["random"], own)
        self.loaded = loaded

    def places(self) -> list[Any]:
        """Return this worker's place in each of its samplers' deals, as JSON values."""
        return [sampler.place() for sampler in self.samplers]

    def deal_anew(self, places: Sequence[Any], rank: int, world: int, absent: Collection[int] = ()) -> None:
        """Become number `rank` of `world` members, and deal the rest of the epoch anew.

        Every member makes this call, at the same point of the same iteration.

        Args:
            places: each member's `places()`; None for a member that enters.
            rank: this worker's new rank.
            world: the new number of members.
            absent: see `DealtSampler.deal_anew`.
        """
        for number, sampler in enumerate(self.samplers):
            if isinstance(sampler, DealtSampler):
                sampler.deal_anew([None if each is None else each[number] for each in places], rank, absent)
        self.rank, self.world = rank, world

    def _collect(self, workers: Workers, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Collect the parts of a checkpoint that differ between workers or need a collective."""
        try:
            given = [os.fsdecode(path), str(Path(os.fsdecode(path)).resolve())]
        except (OSError, ValueError, RuntimeError) as error:  # a null byte, or links in a circle
            raise CheckpointError(f"{path!r}: no path of a folder: {error}") from None
        everyone = workers.gather([given, self.places()], "session.save (the workers' samplers)")
        _check_one_folder(workers.ranks, [each for each, _ in everyone])
        places = [each for _, each in everyone]
        by_sampler = zip(*places, strict=True)
        return {
            "reducers": reducerstates.saved_states(self.prepared),
            "samplers": [s.state_dict(list(p)) for s, p in zip(self.samplers, by_sampler, strict=True)],
            "random": workers.gather(random_state(self._device), "session.save (the workers' random state)"),
        }

    def _each(self) -> list[tuple[Prepared, ScriptModel]]:
        """Return each of the script's models after the prepared one of which it is a part."""
        return [(prepared, model) for prepared in self.prepared for model in prepared.models]

    def _own_state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that are equal on every worker."""
        consumed = [prepared.reducer.consumed for prepared in self.prepared]
        return {
            "iteration": self.iteration,
            "workers": self.world,
            "models": [msgspec.to_builtins(model.origin) for model in self.models],
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "schedulers": [states_of(optimizer) for optimizer in self.optimizers],
            **({"consumed": consumed} if self._counts_each else {"consumed_in_all": sum(consumed)}),
            "schedules": [
                {**schedule.state(), "model": number}
                for schedule in self.schedules
                for number, model in enumerate(self.models)
                if _is_of(schedule, model)
            ],
            "registered": {name: state_of(name, stateful) for name, stateful in self.registered.items()},
        }

    def _check(
        self, model: Mapping[str, Any], trees: Mapping[str, Any], where: str, call: str = "session.load"
    ) -> None:
        """Raise CheckpointError for the first part that does not fit this session. `call` names the reading
        call."""
        state = trees["state"]
        if len(state["reducers"]) != len(self.models):
            raise CheckpointError(
                f"{where}: holds {len(state['reducers'])} models, and the session has prepared "
                f"{len(self.models)}"
            )
        for index, (prepared, each) in enumerate(self._each()):
            beside = prepared.steps_elsewhere and "held" in state
            present = _beside(prepared, each) if beside else each.module.state_dict()
            _check_model(present, savedmodels.of_model(model, index), where)
        saved, own = state["optimizers"], [type(optimizer).__name__ for optimizer in self.optimizers]
        if saved != own:
            raise CheckpointError(
                f"{where}: holds the state of {' and '.join(saved)}, and the session has prepared "
                f"{' and '.join(own)}; make the same optimizers, in the same order, or load "
                "model.safetensors alone"
            )
        for index, of in enumerate(of for model in self.models for of in model.sets):
            shaped = not of.unit.by_tensor
            _check_optimizer(of.optimizer, trees["optimizer"][index], where, shaped=shaped)
            check_states(of.optimizer, state["schedulers"][index], where, call)
        if len(state["samplers"]) != len(self.samplers):
            raise CheckpointError(
                f"{where}: holds the state of {len(state['samplers'])} samplers, and the session has made "
                f"{len(self.samplers)}; make them before {call}"
            )
        for name in state["registered"]:
            if name not in self.registered:
                raise CheckpointError(
                    f"{where}: holds the state of {name!r}; call session.register({name}=...) before {call}"
                )
        iteration = state["iteration"]
        if type(iteration) is not int or not 0 <= iteration < 2**63:
            raise CheckpointError(f"{where}: its iteration is {iteration!r}, which is no number of one")

    def _load_random(self, rank: int, states: list[dict[str, Any]]) -> None:
        """Put back the random state that this rank saved. A rank beyond the saved ones derives its own from
        worker 0's."""
        if rank < len(states):
            self.resumed_random = states[rank]
            set_random_state(states[rank], self._device)
        else:
            derive_random_state(states[0], rank)

    def restore_random_once(self) -> None:
        """Put the loaded random state back once more, if no step has been made since the load."""
        if self.resumed_random is not None:
            set_random_state(self.resumed_random, self._device)
            self.resumed_random = None


def _raise_together(workers: Workers, failure: str, what: str, said: Any = None) -> list[Any]:
    """Raise CheckpointError on every worker if any has a `failure`; else return each worker's `said`, in the
    order of ranks."""
    everyone = workers.gather((failure, said), what)
    for rank, (message, _) in zip(workers.ranks, everyone, strict=True):
        if message:
            raise CheckpointError(failure or f"worker {rank}: {message}")
    return [each for _, each in everyone]


def _loaded_at(state: Mapping[str, Any]) -> float:
    """Return the time of the latest load in a captured state. Raises KeyError or ValueError without one."""
    loaded = state["loaded"]
    if type(loaded) is not float or not 0.0 <= loaded < math.inf:
        raise ValueError(f"the time of the latest load: {loaded!r:.40}")
    return loaded


def _check_alike(ranks: Sequence[int], everyone: Sequence[tuple[int, str, str, float]]) -> None:
    """Raise CheckpointError unless all workers have read one checkpoint. `everyone` has each one's iteration,
    digest, path and time."""
    first, (iteration, digest, *_) = ranks[0], everyone[0]
    for rank, (its, other, where, _) in zip(ranks, everyone, strict=True):
        if other == digest:
            continue
        if its != iteration:
            has = f"a checkpoint of iteration {its} in {where}, worker {first} of {iteration}"
        else:
            has = f"another checkpoint of iteration {its} in {where} than worker {first}"
        raise CheckpointError(f"worker {rank} has {has}: give all the same")


def _check_one_folder(ranks: Sequence[int], given: Sequence[tuple[str, str]]) -> None:
    """Raise UserError unless all workers name one folder. `given` has each one's path as given, and as
    absolute path.

    A relative path counts as one folder even if the workers' working directories differ.
    """
    path, absolute = given[0]
    for rank, (other, its_absolute) in zip(ranks, given, strict=True):
        if os.path.normpath(other) != os.path.normpath(path) and its_absolute != absolute:
            raise UserError(
                f"session.save: worker {ranks[0]} gives {path!r}, and worker {rank} {other!r}; give one "
                "folder on every worker: one of them writes for all"
            )


def _is_of(schedule: SampleSchedule, model: Prepared | ScriptModel) -> bool:
    return any(schedule.optimizer is optimizer for optimizer in model.optimizers)


def _beside(prepared: Prepared, model: ScriptModel) -> dict[str, Any]:
    """Return the part of a `model` trained elsewhere, as `prepared`, that stays on this worker: the other
    parameters and the buffers."""
    brought = {prepared.parameters[name] for name in prepared.brought}
    held: dict[str, Any] = {
        name: parameter for name, parameter in model.parameters.items() if parameter not in brought
    }
    for path, part in model.module.named_modules():
        for name, buffer in own_buffers(part).items():
            if buffer is not None and is_persistent(part, name):
                held[f"{path}.{name}" if path else name] = buffer
    return held


@torch.no_grad()
def _load_beside(prepared: Prepared, model: ScriptModel, held: Mapping[str, Any]) -> None:
    """Load a state that `_beside` returned."""
    for name, value in _beside(prepared, model).items():
        value.copy_(held[name])


def _settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's settings in the form of its state_dict, without its state."""
    groups = []
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if key != "params"}
        groups.append({**plain, "params": list(range(len(group["params"])))})
    return {"state": {}, "param_groups": groups}


def _load_settings(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load settings that `_settings_of` returned."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _check_model(current: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for the first name or shape of `saved` that does not fit the module's."""
    for name, value in current.items():
        if name not in saved:
            raise CheckpointError(f"{where}: holds no {name!r}, which the model has; it is of another model")
        theirs = saved[name]
        if isinstance(value, Tensor) and isinstance(theirs, Tensor) and value.shape != theirs.shape:
            raise CheckpointError(
                f"{where}: {name!r} is {tuple(theirs.shape)} there and {tuple(value.shape)} in the model"
            )
    for name in saved:
        if name not in current:
            raise CheckpointError(f"{where}: holds {name!r}, which the model lacks; it is of another model")


def _check_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], where: str, *, shaped: bool
) -> None:
    """Raise CheckpointError unless the saved param groups are as many, and as long, as this optimizer's, and
    shapes fit.

    Args:
        shaped: True if states with as many dimensions as their parameter have its shape. An optimizer that
            steps whole tensors may keep row factors and other matrices.
    """
    saved = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise CheckpointError(
            f"{where}: its optimizer has param groups of {saved} parameters, and this one of {present}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, held in state["state"].items():
        if not 0 <= index < len(parameters):
            raise CheckpointError(f"{where}: its optimizer has a parameter {index}, and this one has not")
        shape = tuple(parameters[index].shape)
        for key, value in held.items():
            like = shaped and isinstance(value, Tensor) and value.dim() == len(shape)
            if like and value.shape != shape:
                raise CheckpointError(
                    f"{where}: {key!r} of the optimizer's parameter {index} is {tuple(value.shape)}, and "
                    f"the parameter is {shape}"
                )
