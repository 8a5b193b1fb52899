"""Nodes of several devices. At sync.stale_max = 0 each step equals plain PyTorch in one process, as with a
ring of as many workers, and all have the same bits; what a session does besides works as elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_peers_parity import same_bits
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.errors import MismatchError, UserError
from atoll.train.api.place import Place
from support.parity import Case, differences, train_atoll, train_peers, train_plain
from support.pool import WorkerPool

WORKERS, NODES = 4, 2


@pytest.mark.check
def test_devices_train_as_one_process_in_float64_and_as_a_ring(pool: WorkerPool) -> None:
    case = Case("odd", "adamw", workers=WORKERS, accumulation=3, clip=True, chunk_size="2KiB", steps=8)
    pool.submit(train_peers, case, 0, NODES, world=WORKERS)
    size = WORKERS // NODES  # the devices of a node share its first one's buffers
    plain = train_plain(case, buffers_of=lambda _step, share: share // size * size)
    nodes = pool.collect()
    found = differences(case, plain, nodes, 1e-9) + same_bits(case, nodes)
    assert not found, "\n".join(found)
    ring = pool.run(train_atoll, case, world=WORKERS)
    for one, other in zip(nodes, ring, strict=True):
        for name, value in one.parameters[-1].items():
            assert abs(value - other.parameters[-1][name]).max(initial=0.0) <= 1e-9, name


class Model(nn.Module):
    """With a buffer, and a parameter that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.middle, self.head = nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.base.requires_grad_(False)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.base(x) * self.scale))  # type: ignore[no-any-return]


def lives(place: Place, folder: str) -> dict[str, Any]:
    """An epoch of 90 samples in batches of 12 over all workers, saved and loaded in its middle, on nodes that
    may be four iterations ahead; and what workers tell one another."""
    data = torch.arange(90.0).reshape(90, 1)
    config = Config(
        run=Run(strategy="peers"),
        sync=Sync(timeout="60s", stale_max=4, global_batch=12, least=2),
        groups=Groups(count=NODES),
    )
    found: dict[str, Any] = {"seen": []}
    with atoll.join(config, place=place) as session:
        torch.manual_seed(place.rank)
        model = Model()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        session.prepare(model, optimizer)
        found["who"] = [session.rank, session.world, session.is_main]
        group = session.group
        found["group"] = [group.index, group.count, group.rank, group.size]
        found["told"] = [
            session.gather(10 * place.rank),
            session.reduce(float(place.rank), "max"),
            session.reduce(torch.tensor([1.0, float(place.rank)]), "mean", weight=1.0 + place.rank).tolist(),
        ]
        found["dealt"] = list(session.sampler(data, shuffle=False))
        loader = DataLoader(data, batch_sampler=session.batches(data, seed=3))
        for part in range(2):
            for batch in session.epoch_of(loader):
                model(batch).square().mean().backward()
                session.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                found["seen"].append(batch.flatten().tolist())
                if part == 0 and len(found["seen"]) == 3:
                    session.save(folder)
                    found["saved"] = values_of(model)
                    break
            if part == 0:
                session.load(folder)
                found["loaded"] = values_of(model)
        before = values_of(model)
        if place.rank in (0, 3):  # alone, with contributions under way, on a leader and on another device
            found["alone"] = state_of(optimizer)
        found["kept"] = values_of(model) == before
        session.barrier()
        found |= {"iteration": session.iteration, "values": values_of(model), "state": state_of(optimizer)}
        found["last"] = session.gather(found["iteration"])
    return found


MISTAKES = {  # what worker 3 gives, and what is said
    "seed": ({"seed": 7}, "session.batches: worker 0 gives seed=3, and worker 3 seed=7; all workers"),
    "shuffle": (
        {"shuffle": False},
        "session.sampler: worker 0 gives shuffle=True, and worker 3 shuffle=False;",
    ),
    "data": ({}, "session.batches: worker 0 gives len(dataset)=90, and worker 3 len(dataset)=80;"),
    "ahead": ({"ahead": 0}, "session.batches: worker 0 gives ahead=None, and worker 3 ahead=0;"),
}


WEIGHTS = [  # of the workers, by iteration: a device, a node, all but one device, and all weigh nothing
    [2.0, 1.0, 3.0, 1.0],
    [2.0, 0.0, 3.0, 1.0],
    [0.0, 0.0, 3.0, 1.0],
    [4.0, 1.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.5],
    [0.0, 0.0, 0.0, 0.0],
    [2.0, 1.0, 3.0, 1.0],
]


def weighted_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """What weighs nothing is not even a number."""
    torch.manual_seed(100 * step + rank)
    x = torch.randn(5, 3, dtype=torch.float64)
    return model(x).square().mean() * (1.0 if WEIGHTS[step][rank] else float("nan"))  # type: ignore[no-any-return]


def model_to_weigh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def weighs_and_deals_unlike(place: Place, nodes: int) -> dict[str, Any]:
    """What each iteration of `WEIGHTS` makes of the parameters; what is said of each of `MISTAKES`; and at
    last of two nodes that make different calls."""
    found: dict[str, Any] = {"weighed": [], "said": []}
    config = Config(
        run=Run(strategy="peers"),
        sync=Sync(timeout="60s", stale_max=0, global_batch=12, least=2),
        groups=Groups(count=nodes),
    )
    try:
        with atoll.join(config, place=place) as session:
            model, optimizer = session.prepare(*model_to_weigh())
            for step, weights in enumerate(WEIGHTS):
                session.weight(weights[place.rank])
                weighted_loss(model, place.rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                found["weighed"].append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy())
            for name, (arguments, _) in MISTAKES.items():
                odd = place.rank == 3
                data = range(80 if odd and name == "data" else 90)
                call: Any = session.sampler if name == "shuffle" else session.batches
                try:
                    call(data, **{"seed": 3, **(arguments if odd else {})})
                    found["said"].append("no error")
                except UserError as error:
                    found["said"].append(str(error))
            (session.sampler if place.rank < 2 else session.batches)(range(90))
    except MismatchError as error:
        found["said"].append(str(error))
    return found


@pytest.fixture(scope="module")
def unlike(pool: WorkerPool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pool.run(weighs_and_deals_unlike, NODES, world=WORKERS)
    return found


def check_weighed(workers: list[dict[str, Any]]) -> None:
    """Against plain PyTorch; where all weigh nothing, no step is made."""
    model, optimizer = model_to_weigh()
    parameters = list(model.parameters())
    for step, weights in enumerate(WEIGHTS):
        if total := sum(weights):
            heavy = [rank for rank, weight in enumerate(weights) if weight]
            loss = sum(weighted_loss(model, rank, step) * (weights[rank] / total) for rank in heavy)
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        expected = torch.cat([p.detach().flatten() for p in parameters]).numpy()
        for worker in workers:
            assert abs(worker["weighed"][step] - expected).max() <= 1e-12, step


def test_what_weighs_nothing_changes_nothing(unlike: list[dict[str, Any]]) -> None:
    check_weighed(unlike)


@pytest.mark.soak
def test_what_weighs_nothing_changes_nothing_on_nodes_of_one_device(pool: WorkerPool) -> None:
    check_weighed(pool.run(weighs_and_deals_unlike, 0, world=WORKERS))


def test_workers_that_ask_for_other_data_are_told_of_what(unlike: list[dict[str, Any]]) -> None:
    for worker in unlike:
        *mistakes, last = worker["said"]
        for line, (_, said) in zip(mistakes, MISTAKES.values(), strict=True):
            assert line.startswith(said)
        assert re.match(
            r"worker 0 is in session\.sampler \(.*\); worker 2 is in session\.batches \(.*\)\. ", last
        )


def state_of(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """All that is there of each parameter."""
    state = optimizer.state_dict()["state"]
    return [[each["step"].item(), *each["exp_avg"].flatten().tolist()] for _, each in sorted(state.items())]


def values_of(model: nn.Module) -> list[list[float]]:
    return [value.detach().flatten().tolist() for value in model.state_dict().values()]


def test_a_session_on_devices(pool: WorkerPool, tmp_path: Path) -> None:
    workers = pool.run(lives, str(tmp_path / "saved"), world=WORKERS)
    first = workers[0]
    assert [each["who"] for each in workers] == [[rank, WORKERS, rank == 0] for rank in range(WORKERS)]
    assert [each["group"] for each in workers] == [[0, 2, 0, 2], [0, 2, 1, 2], [1, 2, 0, 2], [1, 2, 1, 2]]
    for each in workers:
        assert each["told"] == [[0, 10, 20, 30], 3.0, [1.0, 2.0]]  # (0 + 2 + 6 + 12) / 10
        assert each["saved"] == each["loaded"] == first["saved"]
        assert each["values"] == first["values"]
        assert each["iteration"] == 8
        assert each["last"] == [8] * WORKERS
        assert [len(batch) for batch in each["seen"][:7]] == [3] * 7  # a node's part is even over its devices
    assert sorted(value for each in workers for value in each["dealt"]) == [0, 0, 1, 1, *range(2, 90)]
    # The last six samples go to one node: each device of a node is to have two at least. The other node's two
    # devices get a fill, a sample that counts nowhere.
    given = sorted(value for each in workers for batch in each["seen"] if len(batch) > 1 for value in batch)
    assert given == [float(value) for value in range(90)]
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert [each[0] for each in first["state"]] == [8.0] * 4  # of two layers' weights and biases
    for each in workers:
        assert each["state"] == first["state"]
        assert each.get("alone", first["state"]) == first["state"]
        assert each["kept"]


STEPS = 5  # of each part of a run that goes on elsewhere

Kept = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def model_to_keep() -> Kept:
    model, optimizer = model_to_weigh()
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def train_on(kept: Kept, x: torch.Tensor) -> None:
    model, optimizer, scheduler = kept
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def batch_of(step: int) -> torch.Tensor:
    """Eight samples, which are dealt to workers evenly."""
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def numbers_of(kept: Kept) -> torch.Tensor:
    """Parameters and the optimizer's state, one after the other, and the learning rate."""
    model, optimizer, scheduler = kept
    state = optimizer.state_dict()["state"]
    held = [
        values.double().flatten() for _, each in sorted(state.items()) for _, values in sorted(each.items())
    ]
    rate = torch.tensor(scheduler.get_last_lr(), dtype=torch.float64)
    return torch.cat([*(p.detach().flatten() for p in model.parameters()), *held, rate])


def part_of_run(place: Place, nodes: int, begin: str, end: str) -> torch.Tensor:
    """`STEPS` iterations from one checkpoint to the next."""
    config = Config(
        run=Run(strategy="peers"), sync=Sync(timeout="60s", stale_max=0), groups=Groups(count=nodes)
    )
    with atoll.join(config, place=place) as session:
        kept = model_to_keep()
        session.prepare(*kept[:2])
        if begin:
            session.load(begin)
        for step in range(session.iteration, session.iteration + STEPS):
            train_on(kept, batch_of(step)[place.rank :: place.world])
        session.save(end)
        return numbers_of(kept)


@pytest.mark.soak
def test_a_checkpoint_goes_on_at_other_nodes_and_devices_and_in_plain_pytorch(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """On 2 nodes of 2 devices, 4 of 1, 1 of 2 and plain PyTorch: as one process that is never stopped."""
    folders = ["", *(str(tmp_path / name) for name in ("first", "second", "third"))]
    plain, iteration = model_to_keep(), 0
    for index, (nodes, world) in enumerate([(2, 4), (4, 4), (1, 2)]):
        workers = pool.run(part_of_run, nodes, *folders[index : index + 2], world=world)
        for iteration in range(index * STEPS, (index + 1) * STEPS):
            train_on(plain, batch_of(iteration))
        for worker in workers:
            assert abs(worker - numbers_of(plain)).max() <= 1e-14, (nodes, world)
    kept = model_to_keep()
    with atoll.join(Config(), place=Place()) as session:
        session.prepare(*kept[:2])
        session.load(folders[-1])
    for step in range(iteration + 1, iteration + 1 + STEPS):  # the session is over
        train_on(kept, batch_of(step))
        train_on(plain, batch_of(step))
    assert abs(numbers_of(kept) - numbers_of(plain)).max() <= 1e-14
