"""What the workers of a parameter server do together: meetings, saving, steps that are left out, and going on
without the first of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_command import wait_for
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.hub.decisions import read_decisions
from atoll.server import shard as shard_module
from atoll.server.model import Model
from atoll.train.api.place import Place
from atoll.train.members.hub_client import HubClient
from atoll.train.sync.service import Service, enter
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

SAMPLES = 60


def config(consistency: str, **sync: Any) -> Config:
    return Config(
        run=Run(strategy="server"),
        chunks=Chunks(size="1KiB"),
        sync=Sync(consistency=consistency, timeout="60s", **sync),  # type: ignore[arg-type]
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    inputs, targets = data()
    return (model(inputs[rows]) - targets[rows]).square().mean()


def uneven_steps(place: Place, address: str, consistency: str, path: str) -> tuple[float, float, float]:
    """Worker 1 makes many more steps than worker 0; the loss before and after they meet, and as saved."""
    with served_worker(address, place.rank), atoll.join(config(consistency, slack=50)) as session:
        model, optimizer = session.prepare(*make())
        for step in range(3 if place.rank == 0 else 20):
            loss_of(model, slice(step, step + 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = loss_of(model).item()
        session.barrier()
        after = loss_of(model).item()
        session.save(path)
        session.load(path)
        return before, after, loss_of(model).item()


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_after_meeting_all_have_the_newest_parameters_and_save_them(
    pool: WorkerPool, tmp_path: Path, consistency: str
) -> None:
    with ServedRun(2, shards=2) as served:
        seen = pool.run(uneven_steps, served.address, consistency, str(tmp_path / "saved"), world=2)
    assert not served.failures
    assert seen[0][0] != seen[1][0]
    assert seen[0][1:] == seen[1][1:]
    for _, met, loaded in seen:
        assert met == loaded


def epochs_of_leases(place: Place, address: str, slack: int) -> list[int]:
    """Two epochs with a meeting after each; worker 1 is slow. How many samples all consumed in each."""
    counts = []
    with served_worker(address, place.rank), atoll.join(config("ssp", slack=slack)) as session:
        model, optimizer = session.prepare(*make())
        dataset = TensorDataset(*data())
        sampler = session.sampler(dataset, seed=1)
        loader = DataLoader(dataset, batch_size=5, sampler=sampler)
        for _ in range(2):
            count = 0
            for inputs, targets in loader:
                (model(inputs) - targets).square().mean().backward()
                time.sleep(0.02 * place.rank)  # a slow device
                optimizer.step()
                optimizer.zero_grad()
                count += len(inputs)
            counts.append(int(session.reduce(float(count), "sum")))
    return counts


@pytest.mark.parametrize("slack", [0, 1, 4])
def test_ssp_does_not_wait_for_who_waits_in_a_meeting(pool: WorkerPool, slack: int) -> None:
    with ServedRun(2) as served:
        seen = pool.run(epochs_of_leases, served.address, slack, world=2)
    assert not served.failures
    assert seen[0] == seen[1]
    assert sum(seen[0]) == 2 * SAMPLES


def skipping(place: Place | None, address: str, world: int, to_none: bool) -> list[Tensor]:
    """Every third mean is looked at and left out, as a GradScaler does; `place` None: in plain PyTorch."""
    rows = [slice(rank * 10, rank * 10 + 10) for rank in range(world)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, own: list[slice]) -> list[Tensor]:
        for step in range(9):
            (sum(loss_of(model, r) for r in own) / len(own)).backward()  # type: ignore[union-attr]
            if step % 3 != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return [parameter.detach().clone() for parameter in model.parameters()]

    if place is None:
        return train(*make(), rows)
    with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
        return train(*session.prepare(*make()), [rows[place.rank]])


@pytest.mark.parametrize("to_none", [True, False])
def test_bsp_leaves_out_a_step_that_the_script_skips(pool: WorkerPool, to_none: bool) -> None:
    with ServedRun(2, shards=2) as served:
        seen = pool.run(skipping, served.address, 2, to_none, world=2)
    assert not served.failures
    for plain, *own in zip(skipping(None, "", 2, to_none), *seen, strict=True):
        for each in own:
            assert torch.allclose(each, plain, rtol=0, atol=1e-12)


def evaluates_with_an_average(place: Place, address: str) -> float:
    """Other weights are swapped in for an evaluation, and back."""
    with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
        model, optimizer = session.prepare(*make())
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                loss_of(model)
                for parameter, values in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(values)
        return loss_of(model).item()


def test_weights_may_be_swapped_for_an_evaluation(pool: WorkerPool) -> None:
    with ServedRun(1) as served:
        assert pool.run(evaluates_with_an_average, served.address, world=1)[0] < 0.5
    assert not served.failures


def edits_its_own(place: Place, address: str) -> None:
    with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
        model, optimizer = session.prepare(*make())
        loss_of(model).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(place.rank)
        optimizer.step()


def test_bsp_refuses_edits_that_differ(pool: WorkerPool) -> None:
    with ServedRun(2) as served, pytest.raises(JobFailedError, match="different gradients of the same mean"):
        pool.run(edits_its_own, served.address, world=2)


class LeavesError(Exception):
    """Worker 0 ends before the others."""


def goes_on_without_the_first(place: Place, address: str, path: str) -> tuple[bool, list[int]]:
    try:
        with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
            model, optimizer = session.prepare(*make())
            for step in range(6):
                if step == 3 and place.rank == 0:
                    raise LeavesError
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            everyone = session.gather(place.rank)
            session.save(path)
            return session.is_main, everyone
    except LeavesError:
        return False, []


def test_the_others_go_on_and_save_without_worker_0(pool: WorkerPool, tmp_path: Path) -> None:
    with ServedRun(3) as served:
        seen = pool.run(goes_on_without_the_first, served.address, str(tmp_path / "saved"), world=3)
    assert not served.failures
    assert seen == [(False, []), (True, [1, 2]), (False, [1, 2])]
    assert (tmp_path / "saved" / "model.safetensors").exists()


def trains_a_little(place: Place, address: str) -> tuple[int, list[int]]:
    with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
        model, optimizer = session.prepare(*make())
        loss_of(model).backward()
        optimizer.step()
        return session.world, session.gather(session.rank)


def decided(folder: Path, what: str) -> bool:
    """Whether the hub has decided it."""
    return any(decision.what == what for decision in read_decisions(folder))


def test_a_worker_that_dies_before_the_run_begins_may_be_started_again(
    pool: WorkerPool, tmp_path: Path
) -> None:
    with ServedRun(2, patience=3.0, folder=tmp_path) as served:
        with served_worker(served.address, 1):
            dies = enter(config("bsp"))  # it is known at the shards, and alone there
        assert isinstance(dies, Service)
        dies.hub.close()  # without a goodbye
        dies.shards.close()
        wait_for(lambda: decided(tmp_path, "fenced"), "its death")
        assert pool.run(trains_a_little, served.address, world=2) == [(2, [0, 1]), (2, [0, 1])]
    assert not served.failures


def test_a_shard_that_is_busy_for_long_is_not_given_up(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes in a large model, say: for longer than a silent worker is borne."""

    def takes_long(*args: Any, **kwargs: Any) -> Model:
        silent = HubClient(served.address, None)
        silent.join(7)
        silent.close()
        wait_for(lambda: decided(tmp_path, "worker died"), "the silent one's death")
        return Model(*args, **kwargs)

    monkeypatch.setattr(shard_module, "Model", takes_long)
    with ServedRun(1, patience=3.0, folder=tmp_path) as served:
        assert pool.run(trains_a_little, served.address, world=1) == [(1, [0])]
    assert not served.failures
    assert not decided(tmp_path, "shard died")


def test_a_hub_until_done_ends_with_its_shards(pool: WorkerPool) -> None:
    with ServedRun(2, shards=2, until_done=True) as served:
        assert len(pool.run(trains_a_little, served.address, world=2)) == 2
        assert served.ended()
    assert not served.failures


def comes_alone(place: Place, address: str) -> None:
    with served_worker(address, place.rank):
        atoll.join(
            Config(run=Run(strategy="server"), sync=Sync(timeout="5s")),  # the shards are there: time enough
        )


def test_a_deadline_names_the_worker_that_did_not_come(pool: WorkerPool) -> None:
    with (
        ServedRun(2) as served,
        pytest.raises(JobFailedError, match=r"worker 1 to join \(1 of 2 workers are there\)"),
    ):
        pool.run(comes_alone, served.address, world=1)
