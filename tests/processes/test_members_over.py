"""Sessions in which groups of workers have experts of their own: checkpoints, and what is refused."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from member_lives import outcomes
from safetensors.torch import load_file
from test_members_session import CONFIG, WIDTH, close, seen, told
from torch import Tensor, nn

import atoll
from atoll.core.memory import Memory
from atoll.tensors import checkpoint
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.pool import WorkerPool

BUDGET = Memory(device="34KiB", chunk="8448", step="host")  # of 43 KB of parameters
PAIRS = ((0, 1), (2, 3))
ACROSS = ((0, 2), (1, 3))


class Experts(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(*(part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.expert = nn.Sequential(
            *(part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        found: Tensor = x + self.expert(x)
        return found


def build(rank: int, groups: tuple[tuple[int, ...], ...] | None) -> tuple[Experts, torch.optim.Optimizer]:
    """Each worker builds with a seed of its own: what counts is what the first of each group has."""
    model = Experts(10 + rank)
    if groups is not None:
        atoll.memory.over(model.expert, next(group for group in groups if rank in group))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int
) -> None:
    for turn in range(first, last):
        inputs = torch.randn(
            4, WIDTH, generator=torch.Generator().manual_seed(100 * turn + session.rank), dtype=torch.float64
        )
        optimizer.zero_grad()
        (model(inputs) - inputs.cos()).square().mean().backward()
        session.clip_grad_norm_(0.1)
        optimizer.step()


def train(place: Place, folder: str, first: int, last: int, groups: Any) -> list[dict[str, Tensor]]:
    """What a worker sees at the beginning, after its loading, and at the end."""
    model, optimizer = build(place.rank, groups)
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        found = [seen(model, optimizer)]
        if first:
            session.load(folder)
        found.append(seen(model, optimizer))
        steps(session, model, optimizer, first, last)
        if not first:
            session.save(folder)
        found.append(seen(model, optimizer))
    return found


def test_a_checkpoint_has_all_groups_values_and_goes_on_at_the_same_grouping(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = pool.run(train, folder, 0, 2, PAIRS, world=4)
    begins = [Experts(10 + rank).state_dict() for rank in range(4)]
    for rank, (begin, _, end) in enumerate(saved):
        first = 0 if rank < 2 else 2  # of its group
        for name, value in begin.items():
            assert torch.equal(value, begins[first if name.startswith("expert") else 0][name])
        close(end, saved[first][2], 0.0)
    assert not torch.equal(saved[0][2]["expert.0.weight"], saved[2][2]["expert.0.weight"])
    assert torch.equal(saved[0][2]["body.0.weight"], saved[2][2]["body.0.weight"])
    plain = load_file(f"{folder}/model.safetensors")  # of worker 0's group
    close({name: saved[0][2][name] for name in plain}, plain, 0.0)
    held = load_file(f"{folder}/groups.safetensors")
    assert any(torch.equal(value, saved[2][2]["expert.0.weight"]) for value in held.values())
    gone_on = pool.run(train, folder, 2, 4, PAIRS, world=4)
    straight = pool.run(train, str(tmp_path / "other"), 0, 4, PAIRS, world=4)
    for rank, (_, loaded, end) in enumerate(gone_on):
        close(loaded, saved[rank][2], 0.0)
        close(end, straight[rank][2], 0.0)
    for groups, here in ((ACROSS, "the groups [[0, 2], [1, 3]]"), (None, "all workers alike")):
        for line in pool.run(refused_load, folder, groups, world=4):
            assert f"is of the groups [[0, 1], [2, 3]], and of {here} here (atoll.memory.over); " in line
            assert line.endswith("or load model.safetensors alone, which has worker 0's")
            assert "\n" not in line


def refused_load(place: Place, folder: str, groups: Any) -> Any:
    return told(place, lambda there: train(there, folder, 2, 3, groups))


def without_budgets(place: Place) -> None:
    model, optimizer = build(place.rank, ((0, 1),))
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer)


def unlike_outside(place: Place) -> None:
    """The rest of the model must be the same on all."""
    model, optimizer = build(place.rank, ((0,), (1,)))
    if place.rank:
        model.body.append(nn.Linear(WIDTH, WIDTH).double())
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)


def unlike_lists(place: Place) -> None:
    model, optimizer = build(0, (((0, 1),) if place.rank else ((0,),)))
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            without_budgets,
            "'expert.0.weight' the workers [0, 1], and takes a ring's workers under budgets of",
        ),
        (unlike_outside, "the workers differ: parameter 'body.4.weight' is missing on worker 0 and"),
        (unlike_lists, "atoll.memory.over of 'expert.0.weight': worker 1 gives [0, 1], and worker 0 [0]"),
    ],
)
def test_mistakes_are_one_line_on_all(pool: WorkerPool, part: Any, said: str) -> None:
    for line in pool.run(told, part, world=2):
        assert said in line
        assert "\n" not in line


def dies_as_it_is_read(place: Place, folder: str) -> None:
    """Worker 3, while worker 0 writes the file of groups: it holds a part of what comes there."""
    model, optimizer = build(place.rank, PAIRS)
    with atoll.join(CONFIG, place=place) as session:
        session.prepare(model, optimizer, memory=BUDGET)
        steps(session, model, optimizer, 0, 1)
        session.save(folder)
        steps(session, model, optimizer, 1, 2)
        (tiers,) = session._state.tiers
        assert tiers.shared is not None
        assert tiers._members is not None
        assert place.store is not None
        store, read, write = place.store, tiers.shared.sharing.read, checkpoint.write_tensors

        def tell(path: Path, held: Any) -> Any:
            if path.name == "groups.safetensors":
                store.set("writing", "1")
            return write(path, held)

        def die(key: Any, count: int) -> Any:
            if store.check(["writing"]):
                os.kill(os.getpid(), signal.SIGKILL)
            return read(key, count)

        if place.rank == 0:
            checkpoint.write_tensors = tell
        if place.rank == 3:
            tiers._members.serve(die)
        session.save(folder)


@pytest.mark.soak
def test_a_worker_that_dies_while_a_checkpoint_is_written_leaves_the_older_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    part = functools.partial(dies_as_it_is_read, folder=str(folder))
    for rank, (said, _) in outcomes(part, 4, silent=3).items():
        assert "\n" not in said, rank
        assert "worker 3" in said or "lost touch with" in said, (rank, said)
    assert (folder.parent / ".checkpoint.writing").exists()  # it was in the middle of it
    older = checkpoint.read_checkpoint(folder)
    assert older.trees["state"]["iteration"] == 1
    names = {f"expert.{number}.{what}" for number in (0, 2, 4) for what in ("weight", "bias")}
    assert set(older.trees["groups"][0]) == names
