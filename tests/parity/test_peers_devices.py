"""Nodes of several devices. At sync.stale_max = 0 each step equals plain PyTorch in one process, as with a
ring of as many workers, and all have the same bits; what a session does besides works as elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_peers_parity import same_bits
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.errors import RunError, UserError
from atoll.testing.parity import Case, differences, train_atoll, train_peers, train_plain
from atoll.testing.pool import WorkerPool
from atoll.train.place import Place

WORKERS, NODES = 4, 2


def test_devices_train_as_one_process_in_float64_and_as_a_ring(pool: WorkerPool) -> None:
    case = Case("odd", "adamw", workers=WORKERS, accumulation=3, clip=True, chunk_size="2KiB", steps=8)
    pool.submit(train_peers, case, 0, NODES, world=WORKERS)
    plain = train_plain(case)
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
        sync=Sync(timeout="60s", stale_max=4, global_batch=12),
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
            for batch in loader:
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


def deals_unlike(place: Place) -> list[str]:
    """What is said of each mistake, and at last of two nodes that make different calls."""
    found = []
    config = Config(
        run=Run(strategy="peers"), sync=Sync(timeout="60s", global_batch=12), groups=Groups(count=NODES)
    )
    try:
        with atoll.join(config, place=place) as session:
            for name, (arguments, _) in MISTAKES.items():
                odd = place.rank == 3
                data = range(80 if odd and name == "data" else 90)
                call: Any = session.sampler if name == "shuffle" else session.batches
                try:
                    call(data, **{"seed": 3, **(arguments if odd else {})})
                    found.append("no error")
                except UserError as error:
                    found.append(str(error))
            (session.sampler if place.rank < 2 else session.batches)(range(90))
    except RunError as error:
        found.append(str(error))
    return found


def test_workers_that_ask_for_other_data_are_told_of_what(pool: WorkerPool) -> None:
    for lines in pool.run(deals_unlike, world=WORKERS):
        *mistakes, last = lines
        for line, (_, said) in zip(mistakes, MISTAKES.values(), strict=True):
            assert line.startswith(said)
        assert "node 0 meets on session.sampler, and node 1 on session.batches" in last


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
    given = sorted(value for each in workers for batch in each["seen"] for value in batch)
    assert given == [float(value) for value in range(90)]
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert [each[0] for each in first["state"]] == [8.0] * 4  # of two layers' weights and biases
    for each in workers:
        assert each["state"] == first["state"]
        assert each.get("alone", first["state"]) == first["state"]
        assert each["kept"]
