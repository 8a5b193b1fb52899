"""What a checkpoint holds of a session, and how it is put back: all of it, or, when something does not fit,
nothing."""

from __future__ import annotations

import gc
import io
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.errors import CheckpointError
from atoll.tensors.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from atoll.train.leased_sampler import LeasedSampler
from atoll.train.prepared import Prepared
from atoll.train.random_state import derive_random_state, random_state, set_random_state
from atoll.train.sampler import ShardedSampler
from atoll.train.workers import Workers


class Stateful(Protocol):
    """What `session.register` takes."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class TrainingState:
    """The parts of a session that go into its checkpoints, and come back from them.

    Parts are added as the script makes them. `save` and `load` are collectives: every worker calls them.
    """

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self._workers, self._device = workers, device
        self.prepared: list[Prepared] = []
        self.samplers: list[ShardedSampler | LeasedSampler] = []
        self.registered: dict[str, Stateful] = {}
        self.iteration = 0
        self.resumed_random: dict[str, Any] | None = None  # this worker's, from a load until its next step

    def save(self, path: str | os.PathLike[str]) -> None:
        """The first worker writes; raises CheckpointError on every worker if it cannot."""
        state = self._collect()
        failure = ""
        if self._workers.is_first:
            trees = {"optimizer": [p.optimizer.state_dict() for p in self.prepared], "state": state}
            try:
                write_checkpoint(path, model=self._models(), trees=trees)
            except CheckpointError as error:
                failure = str(error)
        self._raise_together(failure, "session.save (worker 0 to write)")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Every worker reads; raises CheckpointError on every worker, and changes nothing, if one cannot go
        on from it."""
        failure, checkpoint = "", None
        try:
            checkpoint = read_checkpoint(path)
            self._check(checkpoint, str(path))
        except CheckpointError as error:
            failure = str(error)
        self._raise_together(failure, "session.load (the other workers to read)")
        assert checkpoint is not None
        self._take(checkpoint)

    def _take(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.trees["state"]
        for index, prepared in enumerate(self.prepared):
            prepared.module.load_state_dict(_of_model(checkpoint.model, index))
            prepared.optimizer.load_state_dict(checkpoint.trees["optimizer"][index])
            for name, scheduler in _by_class(schedulers_of(prepared.optimizer)).items():
                if name in state["schedulers"][index]:
                    scheduler.load_state_dict(state["schedulers"][index][name])
            prepared.reducer.load_state_dict(state["reducers"][index])
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(saved)
        for name, saved in state["registered"].items():
            self.registered[name].load_state_dict(saved)
        self.iteration = state["iteration"]
        self._load_random(state["random"])

    def capture(self) -> bytes:
        """All that a worker needs to go on beside this one."""
        with tempfile.TemporaryDirectory() as folder:
            state = self._collect(lambda value, _what: [value])
            trees = {"optimizer": [p.optimizer.state_dict() for p in self.prepared], "state": state}
            write_checkpoint(Path(folder, "state"), model=self._models(), trees=trees)
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as archive:
                for file in Path(folder, "state").iterdir():
                    archive.write(file, file.name)
        return packed.getvalue()

    def restore(self, raw: bytes) -> None:
        """Be as the worker that captured `raw`."""
        with tempfile.TemporaryDirectory() as folder:
            zipfile.ZipFile(io.BytesIO(raw)).extractall(folder)
            checkpoint = read_checkpoint(folder)
        self._check(checkpoint, "the run")
        self._take(checkpoint)

    def regrouped(self, rank: int, world: int) -> None:
        """The ring has other members."""
        for sampler in self.samplers:
            if isinstance(sampler, ShardedSampler):
                sampler.rank, sampler.world = rank, world

    def _collect(self, gather: Callable[[Any, str], list[Any]] | None = None) -> dict[str, Any]:
        gather = gather or self._workers.gather
        places = gather(
            [_place_of(sampler) for sampler in self.samplers], "session.save (the workers' samplers)"
        )
        by_sampler = zip(*places, strict=True)
        return {
            "iteration": self.iteration,
            "workers": self._workers.place.world,
            "optimizers": [type(prepared.optimizer).__name__ for prepared in self.prepared],
            "reducers": [prepared.reducer.state_dict() for prepared in self.prepared],
            "schedulers": [
                {name: s.state_dict() for name, s in _by_class(schedulers_of(prepared.optimizer)).items()}
                for prepared in self.prepared
            ],
            "samplers": [_state_of(s, p) for s, p in zip(self.samplers, by_sampler, strict=True)],
            "registered": {name: stateful.state_dict() for name, stateful in self.registered.items()},
            "random": gather(random_state(self._device), "session.save (the workers' random state)"),
        }

    def _models(self) -> dict[str, Any]:
        return {
            _prefix(index) + name: value
            for index, prepared in enumerate(self.prepared)
            for name, value in prepared.module.state_dict().items()
        }

    def _check(self, checkpoint: Checkpoint, where: str) -> None:
        """Raise CheckpointError for the first thing that does not fit this session."""
        state = checkpoint.trees["state"]
        if len(state["reducers"]) != len(self.prepared):
            raise CheckpointError(
                f"{where}: holds {len(state['reducers'])} models, and the session has prepared "
                f"{len(self.prepared)}"
            )
        for index, prepared in enumerate(self.prepared):
            _check_model(prepared.module, _of_model(checkpoint.model, index), where)
            saved_class = state["optimizers"][index]
            if saved_class != type(prepared.optimizer).__name__:
                raise CheckpointError(
                    f"{where}: holds the state of {saved_class}, and the session has prepared "
                    f"{type(prepared.optimizer).__name__}; make the same optimizer, or load "
                    "model.safetensors alone"
                )
            _check_optimizer(prepared.optimizer, checkpoint.trees["optimizer"][index], where)
            present = _by_class(schedulers_of(prepared.optimizer))
            for name in state["schedulers"][index]:
                if name not in present:
                    raise CheckpointError(
                        f"{where}: holds the state of a {name}, and no {name} drives the optimizer; "
                        "make it before session.load"
                    )
        if len(state["samplers"]) != len(self.samplers):
            raise CheckpointError(
                f"{where}: holds the state of {len(state['samplers'])} samplers, and the session has made "
                f"{len(self.samplers)}; make them before session.load"
            )
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.check_state(saved)
        for name in state["registered"]:
            if name not in self.registered:
                raise CheckpointError(
                    f"{where}: holds the state of {name!r}; call session.register({name}=...) before "
                    "session.load"
                )

    def _load_random(self, states: list[dict[str, Any]]) -> None:
        rank = self._workers.place.rank
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

    def _raise_together(self, failure: str, what: str) -> None:
        everyone = self._workers.gather(failure, what)
        for rank, message in zip(self._workers.ranks, everyone, strict=True):
            if message:
                raise CheckpointError(failure or f"worker {rank}: {message}")


def _place_of(sampler: ShardedSampler | LeasedSampler) -> Any:
    """What this worker has to say of where the sampler is."""
    return sampler.place() if isinstance(sampler, LeasedSampler) else min(sampler.consumed, sampler.given)


def _state_of(sampler: ShardedSampler | LeasedSampler, places: Sequence[Any]) -> dict[str, Any]:
    """A sampler's state, of all workers' places."""
    if isinstance(sampler, LeasedSampler):
        return sampler.state_dict(list(places))
    return sampler.state_dict(sum(places))


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The learning-rate schedulers that drive `optimizer`, leaving out those that another one holds.

    torch keeps no list of them on the optimizer, so the garbage collector is asked who refers to it; that
    takes some ten milliseconds, at a save or a load.
    """
    found = _drivers_of(optimizer)
    if len(found) > 1:  # one that the script has let go of, in a cycle of its own making, must not count
        del found
        gc.collect()
        found = _drivers_of(optimizer)
    held = {id(child) for scheduler in found for child in getattr(scheduler, "_schedulers", ())}
    return [scheduler for scheduler in found if id(scheduler) not in held]


def _drivers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All schedulers whose `optimizer` this is, those among them that nobody holds any more."""
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    referrers = gc.get_referrers(optimizer)
    attributes = [each for each in referrers if type(each) is dict]  # a scheduler's, perhaps
    # By type(each): isinstance would ask proxies and deprecated aliases for their __class__.
    found = {
        id(each): each
        for each in (*referrers, *(gc.get_referrers(*attributes) if attributes else ()))
        if issubclass(type(each), kinds) and each.optimizer is optimizer
    }
    return list(found.values())


def _by_class(schedulers: list[Any]) -> dict[str, Any]:
    """Each scheduler under its class's name; raises CheckpointError when two share one."""
    named: dict[str, Any] = {}
    for scheduler in schedulers:
        name = type(scheduler).__name__
        if name in named:
            raise CheckpointError(
                f"two schedulers of class {name} drive the optimizer, so a checkpoint cannot tell them "
                "apart; join them in torch.optim.lr_scheduler.ChainedScheduler"
            )
        named[name] = scheduler
    return named


def _check_model(module: nn.Module, saved: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for the first name or shape of `saved` that does not fit the module."""
    current = module.state_dict()
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


def _check_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless the saved param groups are as many, and as long, as this optimizer's."""
    saved = [len(group["params"]) for group in state["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise CheckpointError(
            f"{where}: its optimizer has param groups of {saved} parameters, and this one of {present}"
        )


def _prefix(index: int) -> str:
    """The first model's names are its own; a second one's are told apart."""
    return "" if index == 0 else f"model{index}:"


def _of_model(saved: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The entries of one of a checkpoint's models, under the model's own names."""
    if index:
        prefix = _prefix(index)
        return {name.removeprefix(prefix): v for name, v in saved.items() if name.startswith(prefix)}
    return {name: v for name, v in saved.items() if not (name.startswith("model") and ":" in name)}
