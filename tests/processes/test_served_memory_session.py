"""Sessions with a parameter server whose models lie in tiers: what scripts edit, save, load and write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import test_served_session as served_session
import torch
from safetensors.torch import load_file
from test_served_session import (
    adam,
    assert_alike,
    assert_same_state,
    clips,
    clips_and_edits,
    clips_by_session_then_edits,
    edits_one_chunk,
    gives_one_to_the_unused,
    joined,
    loss_of,
    make,
    plain,
    plain_steps,
    replaces_and_removes,
    share,
    train,
    values,
)
from torch import Tensor

from atoll.core.config import Config
from atoll.core.errors import AtollError, UserError
from atoll.core.memory import Memory
from atoll.memory import planning
from atoll.memory.exchanged import Exchanged
from atoll.moves.timeline import Bandwidths
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import ServedRun

RATES = Bandwidths(to_device=10e9, to_host=8e9, host_steps=1e9, device_steps=1e9, shared=True)
EDITS = [clips, edits_one_chunk, replaces_and_removes, gives_one_to_the_unused]
without_tiers = served_session.config


def in_tiers(*arguments: Any, **sync: Any) -> Config:
    """As the other module's, with half of the parameters on the device."""
    memory = Memory(device="20KiB", chunk="4KiB", step="host")
    return msgspec.structs.replace(without_tiers(*arguments, **sync), memory=memory)


@contextmanager
def configured(config: Callable[..., Config]) -> Iterator[None]:
    """The other module's sessions have this configuration, and bandwidths are not measured."""
    with (
        mock.patch.object(served_session, "config", config),
        mock.patch.object(planning, "measure", return_value=RATES),
    ):
        yield


def edits_in_tiers(place: Place, addresses: Sequence[str]) -> list[list[Tensor]]:
    with configured(in_tiers):
        found = [train(place, at, range(4), edit) for at, edit in zip(addresses, EDITS, strict=False)]
        return [*found, clips_by_session_then_edits(place, addresses[-1])]


def test_bsp_steps_with_gradients_as_the_script_leaves_them(pool: WorkerPool) -> None:
    runs = [ServedRun(2, shards=2) for _ in range(len(EDITS) + 1)]
    try:
        pool.submit(edits_in_tiers, [run.__enter__().address for run in runs], world=2)
        expected = [plain(2, 4, edit) for edit in [*EDITS, clips_and_edits]]
        for worker in pool.collect():
            for ours, theirs in zip(worker, expected, strict=True):
                assert_alike([ours], theirs)
    finally:
        for run in runs:
            run.stop()
    assert not any(run.failures for run in runs)


class Keeper:
    """A script's own object that has its optimizer's state in its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def goes_on(place: Place, address: str, tiers: bool, load: str, save: str, steps: range) -> dict[str, Any]:
    """Load unless there is nothing to, train, save; the optimizer's state."""
    model, optimizer = make("adam")
    for parameter in model.parameters() if place.rank or load else ():
        parameter.data.add_(0.1)  # worker 0's count, or the checkpoint's
    config = in_tiers if tiers else without_tiers
    with configured(config), joined(address, place.rank) as session:
        session.prepare(model, optimizer)
        session.register(keeper=Keeper(optimizer))
        if load:
            session.load(load)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, share(session.rank, step)).backward()
            optimizer.step()
        session.save(save)
        return copy.deepcopy(optimizer.state_dict())


def test_a_checkpoint_goes_on_with_tiers_and_without_them(pool: WorkerPool, tmp_path: Path) -> None:
    """At other counts of workers and shards, and in plain torch; an object of the script's loads too."""
    model, stepper = make("adam")
    load, done = "", 0
    for number, (tiers, workers, shards) in enumerate([(True, 2, 2), (False, 1, 1), (True, 3, 1)]):
        save, steps = str(tmp_path / str(number)), range(done, done + 2)
        with ServedRun(workers, shards=shards) as served:
            pool.submit(goes_on, served.address, tiers, load, save, steps, world=workers)
            plain_steps(model, stepper, list(range(workers)), steps)
            for state in pool.collect():
                assert_same_state(state, stepper.state_dict())
        other = make()[0]
        other.load_state_dict(load_file(tmp_path / str(number) / "model.safetensors"))
        assert_alike([values(other)], values(model), 1e-9)
        load, done = save, steps.stop


def loads_its_own(place: Place, addresses: Sequence[str], saved: dict[str, Any]) -> list[Any]:
    """Load into the optimizer before the session has it, and something else and the same again after; for
    budgets and without, the state after each load, and state and parameters after two steps."""
    found = []
    for config, address in zip((in_tiers, without_tiers), addresses, strict=True):
        model, optimizer = make("adam")
        optimizer.load_state_dict(saved)
        with configured(config), joined(address, place.rank) as session:
            session.prepare(model, optimizer)
            taken_over = copy.deepcopy(optimizer.state_dict())
            other = {**saved, "param_groups": [{**g, "lr": 9.0} for g in saved["param_groups"]]}
            optimizer.load_state_dict(other)
            loaded = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, share(session.rank, step)).backward()
                optimizer.step()
            found.append([loaded, taken_over, copy.deepcopy(optimizer.state_dict())])
        found[-1].append(values(model))
        optimizer.load_state_dict(other)  # it is the script's again
        assert all(group["lr"] == 9.0 for group in optimizer.param_groups)
    return found


def test_a_script_loads_its_optimizer_before_prepare_and_after(pool: WorkerPool) -> None:
    model, stepper = make("adam")
    plain_steps(model, stepper, [0], range(5, 8))
    stepper.param_groups[0]["lr"] = 0.02
    saved = copy.deepcopy(stepper.state_dict())
    model, stepper = make("adam")
    stepper.load_state_dict(copy.deepcopy(saved))
    plain_steps(model, stepper, [0, 1], range(2))
    with ServedRun(2, shards=2) as tiered, ServedRun(2, shards=1) as plainly:
        pool.submit(loads_its_own, [tiered.address, plainly.address], saved, world=2)
        for worker in pool.collect():
            for loaded, taken_over, after, ours in worker:
                assert all(group["lr"] == 9.0 for group in loaded["param_groups"])
                assert_same_state({**loaded, "param_groups": saved["param_groups"]}, saved)
                assert_same_state(taken_over, saved)
                assert_same_state(after, stepper.state_dict())
                assert_alike([ours], values(model), 1e-9)


def writes(place: Place, address: str) -> str:
    """Swap an average in and out again, which is no change, and then write: what is said."""
    model, _ = make()
    optimizer = adam(model)
    with configured(in_tiers), joined(address, place.rank, "asp") as session:
        session.prepare(model, optimizer)
        (tiers,) = session._state.tiers
        assert isinstance(tiers.fitted, Exchanged)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, share(0, step)).backward()
            optimizer.step()
            before = values(model)
            if step == 4:
                break  # which has written nothing
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.mul_(0.5)
                    parameter.copy_(value)
        state = optimizer.state_dict()["state"][0]["exp_avg"]
        assert bool(state.any())
        for past_autograd in (True, False):
            with torch.no_grad():
                (model.last.weight.data if past_autograd else model.last.weight)[0, 0] += 1.0
            optimizer.zero_grad()
            loss_of(model, share(0, 4)).backward()
            with pytest.raises(UserError, match=r"parameter 'last\.weight' was changed by the script"):
                optimizer.step()
        with torch.no_grad():
            model.last.weight.copy_(before[[n for n, _ in model.named_parameters()].index("last.weight")])
        optimizer.step()
    with pytest.raises(UserError, match="lies at the shards, and the session has ended") as said:
        state.sum()
    return str(said.value)


def test_what_a_script_writes_is_told_and_what_it_puts_back_is_not(pool: WorkerPool) -> None:
    with ServedRun(1, shards=2) as served:
        (said,) = pool.run(writes, served.address, world=1)
    assert "\n" not in said
    assert not served.failures


def late(place: Place, address: str) -> str:
    """A run some of whose workers have budgets."""
    config = in_tiers if place.rank else without_tiers
    with configured(config), joined(address, place.rank) as session:
        with pytest.raises(AtollError) as said:
            session.prepare(*make())
        return str(said.value)


def test_workers_with_and_without_budgets_are_told_so(pool: WorkerPool) -> None:
    with ServedRun(2) as served:
        for said in pool.run(late, served.address, world=2):
            assert "'memory' is not given on worker 0 and given on worker 1" in said
            assert "\n" not in said
