"""Members of a group at its own pace (ps-hra under asp and ssp) take unlike parts of its batches, by speed.

Each step of a group is that of plain PyTorch on the union of its members' batches, whatever their sizes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping, sizes_of
from atoll.hub import placement
from atoll.hub.planner import GroupingSettings, ScoreFor
from atoll.train.api.place import Place
from support.fetching import fetched
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check  # each forms groups, which takes seconds

LENGTH, BATCH, EPOCHS, RATE = 250, 24, 6, 0.1
SECONDS = 10.0  # for each sample of a worker at full speed, by a clock that the test sets
# A step: the parameters before, empty for a worker alone; the batch's indices; and the parameters after.
Step = tuple[bytes, list[int], np.ndarray[Any, Any]]


def config(consistency: Literal["asp", "ssp"], groups: int, shares: str = "auto", **sync: Any) -> Config:
    return Config(
        run=Run(strategy="ps-hra"),
        chunks=Chunks(size="2KiB"),
        groups=Groups(count=groups),
        sync=Sync(timeout="60s", global_batch=BATCH, shares=shares, consistency=consistency, **sync),
    )


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 7, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(5, (LENGTH,), generator=generator), torch.arange(LENGTH))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 5)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def values(model: nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train(
    place: Place,
    how: Config,
    address: str,
    slower: tuple[float, ...],
    fetches: int = 0,
    memory: Memory | None = None,
) -> list[Step]:
    """This worker's steps. Its clock goes on for each sample, `slower` times as far, by its rank."""
    data, steps = dataset(), list[Step]()
    real, ahead = time.perf_counter, [0.0]
    with pytest.MonkeyPatch.context() as patch, served_worker(address, place.rank):
        patch.setattr(time, "perf_counter", lambda: real() + ahead[0])
        with atoll.join(how) as session:
            model, optimizer = make()
            session.prepare(model, optimizer, memory=memory)
            sampler = session.batches(data, seed=4)
            loader = DataLoader(data, batch_sampler=sampler)
            for _ in range(EPOCHS):
                for x, y, indices in fetched(loader, fetches):
                    before = values(model).tobytes() if session.group.size > 1 else b""
                    optimizer.zero_grad()
                    loss = loss_of(model, x, y)
                    ahead[0] += SECONDS * len(x) * slower[place.rank]
                    loss.backward()
                    optimizer.step()
                    steps.append((before, indices.tolist(), values(model)))
    return steps


def score_for(wanted: Grouping) -> ScoreFor:
    """Whatever the workers' speeds, these groups are the best."""
    return lambda _known: lambda grouping: Score(2.0 if grouping == wanted else 1.0)


def run(
    pool: WorkerPool, how: Config, slower: tuple[float, ...], *arguments: Any, shards: int = 1
) -> list[list[Step]]:
    by_rank, world = iter(range(len(slower))), len(slower)
    wanted = Grouping(list(islice(by_rank, size)) for size in sizes_of(world, how.groups.count))
    settings = GroupingSettings(
        how.groups.count,
        by="joint",
        consistency=how.sync.consistency,
        regroup=False,
        score_for=score_for(wanted),
    )
    with pytest.MonkeyPatch.context() as patch, ServedRun(world, shards, grouping=settings) as served:
        patch.setattr(
            placement, "_LEAST_PATIENCE", 60.0
        )  # a worker on a busy machine comes late to its group
        found = pool.run(train, how, served.address, slower, *arguments, world=world)
    assert not served.failures
    return found  # type: ignore[no-any-return]


def check_once(results: list[list[Step]]) -> None:
    """Each sample counts once an epoch. A fill is of sample 0, and counts nothing."""
    batches = [indices for steps in results for _, indices, _ in steps]
    counted = Counter(index for indices in batches for index in set(indices))
    fills = counted[0] - EPOCHS
    assert 0 <= fills <= sum(set(indices) == {0} for indices in batches)
    counted[0] -= fills
    assert counted == Counter(dict.fromkeys(range(LENGTH), EPOCHS))


def joint(results: list[list[Step]]) -> list[list[Step]]:
    """The steps that these workers have made together, in order. At the end, those with batches of the time
    before in hand may make more steps than others."""
    by_before = [{step[0]: step for step in steps if step[0]} for steps in results]
    most = sum(bool(before) for before, _, _ in results[0])
    found = [
        [each[key] for each in by_before] for key in by_before[0] if all(key in each for each in by_before)
    ]
    assert len(found) >= most - 3
    return found


def check_steps(steps: list[list[Step]]) -> None:
    """Each is that of plain PyTorch on the union of the members' batches."""
    model, optimizer = make()
    inputs, targets, _ = dataset().tensors
    for number, each in enumerate(steps):
        batches = [indices for _, indices, _ in each if indices != [0]]  # a sample alone may be a fill
        found = []
        for some in (batches, [indices for _, indices, _ in each]):
            union = list(chain(*some))
            before = torch.from_numpy(np.frombuffer(each[0][0]).copy())
            torch.nn.utils.vector_to_parameters(before, model.parameters())
            optimizer.zero_grad()
            loss_of(model, inputs[union], targets[union]).backward()
            optimizer.step()
            found.append(values(model))
            if len(batches) == len(each):
                break
        for _, _, after in each:
            off = [float(np.abs(after - wanted).max()) for wanted in found]
            assert min(off) < 1e-12, ([b for _, b, _ in each], number, len(steps), off)


def check_follow(steps: list[list[Step]], slower: Sequence[float], samples: int) -> None:
    """Parts of whole batches become such that all finish at the same time. Even ones may be over before the
    first batch: members train in their group on what they have fetched alone, and are measured."""
    sizes = [[len(indices) for _, indices, _ in step] for step in steps]
    last = np.array([each for each in sizes if sum(each) == samples][-1])
    speeds = 1 / np.array(slower)
    np.testing.assert_allclose(last, samples * speeds / speeds.sum(), atol=1.5)
    assert max(last * slower) < 0.6 * samples / len(slower) * max(slower)


@pytest.mark.parametrize(
    ("consistency", "slower", "fetches", "shards", "memory"),
    [
        ("asp", (1.0, 4.0), 0, 1, None),
        ("ssp", (4.0, 1.0, 1.0), 0, 2, None),
        ("asp", (4.0, 1.0), 2, 1, None),
        ("asp", (4.0, 1.0), 0, 1, Memory(device="4KiB", chunk="512")),
    ],
)
def test_parts_follow_speeds_and_each_step_is_plain_on_the_union(
    pool: WorkerPool,
    consistency: Literal["asp", "ssp"],
    slower: tuple[float, ...],
    fetches: int,
    shards: int,
    memory: Memory | None,
) -> None:
    results = run(pool, config(consistency, 1), slower, fetches, memory, shards=shards)
    check_once(results)
    steps = joint(results)
    assert len(steps) > 20
    # Until the hub has fenced the members' old contributors, which takes some steps, several of the group's
    # contributions make one step of the shards: docs/server.md.
    check_steps(steps[len(steps) // 2 :])
    check_follow(steps, slower, BATCH)


def test_each_group_s_parts_follow_the_speeds_of_its_own_members(pool: WorkerPool) -> None:
    slower = (4.0, 1.0, 1.0, 4.0)
    results = run(pool, config("asp", 2), slower)
    check_once(results)
    check_follow(joint(results[:2]), slower[:2], BATCH // 2)
    check_follow(joint(results[2:]), slower[2:], BATCH // 2)


def prepare(place: Place, strategy: str, consistency: Literal["asp", "bsp"], address: str) -> None:
    """Worker 1 takes parts by speed, and the others do not."""
    sync = Sync(
        timeout="60s",
        global_batch=BATCH,
        consistency=consistency,
        shares="auto" if place.rank == 1 else "even",
    )
    how = Config(run=Run(strategy=strategy), chunks=Chunks(size="2KiB"), groups=Groups(count=1), sync=sync)
    with served_worker(address, place.rank), atoll.join(how) as session:
        session.prepare(*make())


@pytest.mark.parametrize(
    ("strategy", "consistency"), [("ps-hra", "asp"), ("ps-hra", "bsp"), ("server", "bsp"), ("server", "asp")]
)
def test_workers_with_unlike_shares_end_with_one_line(
    pool: WorkerPool, strategy: str, consistency: str
) -> None:
    grouping = GroupingSettings(1, consistency=consistency) if strategy == "ps-hra" else None
    with ServedRun(3, 1, grouping=grouping) as served, pytest.raises(JobFailedError) as caught:
        pool.run(prepare, strategy, consistency, served.address, world=3)
    assert {each.message for each in caught.value.failures.values()} == {
        "the workers differ: the configuration's 'sync.shares' is even on worker 0 and auto on worker 1; "
        "give every worker the same configuration"
    }
    assert len(caught.value.failures) == 3


def count(place: Place, how: Config, address: str, leaves: int, calls: int) -> tuple[list[int], list[int]]:
    """Return the indices of this worker's batches, and the number of its steps in a group in each loop. A
    loop is left after each iteration whose number `leaves` divides; 0: none is left. The model is called
    `calls` times for each batch."""
    data, trained, loops = dataset(), list[int](), list[int]()
    with served_worker(address, place.rank), atoll.join(how) as session:
        model, optimizer = session.prepare(*make())
        batches = session.batches(data, seed=4)
        loader = DataLoader(data, batch_sampler=batches)
        ended = False
        while not ended or batches.epoch < EPOCHS - 1:
            ended = True
            loops.append(0)
            for x, y, indices in loader:
                loops[-1] += session.group.size > 1
                optimizer.zero_grad()
                sum(loss_of(model, x, y) for _ in range(calls)).backward()  # type: ignore[union-attr]
                optimizer.step()
                trained += indices.tolist()
                if leaves and session.iteration % leaves == 0:
                    ended = False
                    break
    return trained, loops


@pytest.mark.parametrize("shares", ["even", "auto"])
@pytest.mark.parametrize(("leaves", "calls"), [(0, 1), (4, 1), (3, 2)])
def test_members_make_equally_many_batches_that_workers_do_not_divide(
    pool: WorkerPool, shares: str, leaves: int, calls: int
) -> None:
    """Each sample counts once an epoch."""
    how = config("asp", 1, shares)
    how = msgspec.structs.replace(how, sync=msgspec.structs.replace(how.sync, global_batch=10))
    settings = GroupingSettings(1, by="joint", regroup=False, score_for=score_for(Grouping([[0, 1, 2]])))
    with pytest.MonkeyPatch.context() as patch, ServedRun(3, 1, grouping=settings) as served:
        patch.setattr(placement, "_LEAST_PATIENCE", 60.0)
        results = pool.run(count, how, served.address, leaves, calls, world=3)
    assert not served.failures
    together = [[made for made in loops if made] for _, loops in results]
    least = min(map(len, together)) - 1  # the first loop in the group has begun before it
    assert least > 3
    assert together[0][-least:] == together[1][-least:] == together[2][-least:]
    counted = Counter(chain(*(set(trained) for trained, _ in results)))
    assert set(counted) == set(range(LENGTH))
    every = Counter(chain(*(trained for trained, _ in results)))
    epochs = every[1]
    assert epochs >= EPOCHS
    assert set((every - Counter({0: every[0] - epochs})).values()) == {epochs}  # fills are of sample 0


def save(place: Place, how: Config, address: str, folder: str, members: int) -> tuple[int, list[int]]:
    """Save a checkpoint one batch before the end of an epoch, while three batches are fetched ahead. Samples
    that members of the group had alone come in its first epochs. Return the epoch, and this worker's samples
    in it."""
    data = dataset()
    with served_worker(address, place.rank), atoll.join(how) as session:
        model, optimizer = session.prepare(*make())
        batches = session.batches(data, seed=4)
        loader = DataLoader(data, batch_sampler=batches)
        while True:
            trained, is_group = list[int](), session.group.size == members
            for x, y, indices in fetched(loader, 3):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                trained += indices.tolist()
                if batches.epoch == EPOCHS - 1 and len(trained) // len(indices) == len(batches) - 1:
                    assert is_group
                    session.save(folder)
                    return batches.epoch, trained


def resume(place: Place, how: Config, address: str, folder: str) -> tuple[int, list[int]]:
    """Return the epoch in which the run goes on, and the samples that it gives."""
    data = dataset()
    with served_worker(address, place.rank), atoll.join(how) as session:
        session.prepare(*make())
        batches = session.batches(data, seed=4)
        session.load(folder)
        return batches.epoch, [
            index for _, _, each in DataLoader(data, batch_sampler=batches) for index in each.tolist()
        ]


@pytest.mark.parametrize("members", [1, 2])
def test_a_checkpoint_near_an_epoch_s_end_keeps_what_loaders_have_fetched(
    pool: WorkerPool, tmp_path: Path, members: int
) -> None:
    how = config("asp", 1, "even")
    settings = GroupingSettings(1, by="joint", regroup=False)
    with pytest.MonkeyPatch.context() as patch, ServedRun(members, 1, grouping=settings) as served:
        patch.setattr(placement, "_LEAST_PATIENCE", 60.0)
        saved = pool.run(save, how, served.address, str(tmp_path), members, world=members)
    with ServedRun(1, 1, grouping=settings) as served:
        [(epoch, given)] = pool.run(resume, how, served.address, str(tmp_path), world=1)
    assert {epoch} == {each for each, _ in saved}
    assert Counter(given) + Counter(chain(*(trained for _, trained in saved))) == Counter(range(LENGTH))
