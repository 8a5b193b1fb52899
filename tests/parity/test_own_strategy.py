"""Pairwise averaging (`examples/own_strategy.py`) under Atoll and in one process of plain torch: equal values
after every step, whoever sums first and wherever the model lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.exchange.synchronizer import Contributors, Exchange
from gpt import GPT
from gpt import loss_of as gpt_loss
from own_strategy import EachStep, partner_of
from support.pool import JobFailedError, WorkerPool
from support.runs import model, run_with

pytestmark = pytest.mark.check  # sessions of several workers

STEPS, SAMPLES, SEED = 6, 4, 5
BUDGET = Memory(device="24KiB", chunk="4096", step="host")  # the model takes more


def configured(strategy: str = "pairs", *, groups: int = 0, tiers: bool = False) -> Config:
    config = Config(run=Run(strategy=strategy), sync=Sync(timeout="60s"), groups=Groups(count=groups))
    return msgspec.structs.replace(config, memory=BUDGET) if tiers else config


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(SAMPLES, 32, generator=generator, dtype=torch.float64)
    return module(batch).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().flatten() for parameter in module.parameters()])


def train(session: atoll.Session) -> tuple[list[torch.Tensor], Any]:
    """The values after each step; and this worker's group."""
    module = model()
    torch.manual_seed(SEED)  # of which all take worker 0's
    module, optimizer = session.prepare(module, optimizer_of(module))
    seen = []
    for step in range(STEPS):
        loss_of(module, session.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(module))
    group = session.group
    return seen, (group.index, group.count, group.rank, group.size)


def train_plain(contributors: list[list[int]], period: int = 1) -> list[list[torch.Tensor]]:
    """The same in one process: each contributor's values after each step."""
    modules = [model() for _ in contributors]
    optimizers = [optimizer_of(module) for module in modules]
    names = tuple(range(len(contributors)))
    seen: list[list[torch.Tensor]] = [[] for _ in contributors]
    for step in range(STEPS):
        for ranks, module, optimizer in zip(contributors, modules, optimizers, strict=True):
            for rank in ranks:
                (loss_of(module, rank, step) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % period == 0:
            pairs = {name: partner_of(Contributors(name, names), SEED, step + 1) for name in names}
            before = [[p.detach().clone() for p in module.parameters()] for module in modules]
            for name, partner in pairs.items():
                if partner is not None:
                    assert pairs[partner] == name
                    for parameter, own, other in zip(
                        modules[name].parameters(), before[name], before[partner], strict=True
                    ):
                        parameter.data.copy_((own + other) / 2)
        for name, module in enumerate(modules):
            seen[name].append(flat(module))
    return seen


CASES = {
    "two workers": ([[0], [1]], {}),
    "three workers": ([[0], [1], [2]], {}),
    "two workers in tiers": ([[0], [1]], {"tiers": True}),
    "two groups": ([[0, 1], [2, 3]], {"groups": 2}),
    "groups of two and one": ([[0, 1], [2]], {"groups": 2}),
    "two groups in tiers": ([[0, 1], [2, 3]], {"groups": 2, "tiers": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_pairwise_averaging_is_that_of_plain_torch(pool: WorkerPool, case: str) -> None:
    contributors, options = CASES[case]
    world = sum(map(len, contributors))
    found = run_with(pool, configured(**options), train, world=world)
    expected = train_plain(contributors)
    for index, ranks in enumerate(contributors):
        for place, rank in enumerate(ranks):
            seen, group = found[rank]
            assert group == (index, len(contributors), place, len(ranks))
            for step, (own, other) in enumerate(zip(seen, expected[index], strict=True)):
                assert float((own - other).abs().max()) < 1e-12, f"worker {rank} at step {step}"
    if len(contributors) == 2:  # all replicas are equal after each step, to the bit
        first = found[0][0]
        for seen, _ in found:
            assert all(torch.equal(own, other) for own, other in zip(seen, first, strict=True))


def test_between_exchanges_replicas_train_by_themselves(pool: WorkerPool) -> None:
    found = run_with(pool, configured("pairs-of-8"), train, world=2)
    for rank, expected in enumerate(train_plain([[0], [1]], period=8)):
        for own, other in zip(found[rank][0], expected, strict=True):
            assert float((own - other).abs().max()) < 1e-12
    assert not torch.equal(found[0][0][-1], found[1][0][-1])


def saves(session: atoll.Session, folder: str) -> list[torch.Tensor]:
    module = model()
    torch.manual_seed(SEED)
    module, optimizer = session.prepare(module, optimizer_of(module))
    for step in range(3):
        loss_of(module, session.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.save(folder)
    return [flat(module)]


def goes_on(session: atoll.Session, folder: str) -> tuple[int, list[torch.Tensor], list[torch.Tensor], int]:
    """The iteration, the values as loaded, those after another step; and the seed."""
    module = model(seed=1)
    torch.manual_seed(99)
    module, optimizer = session.prepare(module, optimizer_of(module))
    session.load(folder)
    loaded = flat(module)
    loss_of(module, session.rank, 3).backward()
    optimizer.step()
    seed = session._state.prepared[0].reducer.state_dict().get("seed", -1)
    return session.iteration, [loaded], [flat(module)], seed


def test_all_replicas_go_on_from_worker_0s_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = run_with(pool, configured("pairs-of-8"), saves, folder, world=2)
    assert not torch.equal(saved[0][0], saved[1][0])  # the other replica's values are lost, as the page says
    for iteration, loaded, after, seed in run_with(pool, configured(), goes_on, folder, world=3):
        assert (iteration, seed) == (4, SEED)
        assert torch.equal(loaded[0], saved[0][0])
        assert not torch.equal(after[0], loaded[0])
    ring = run_with(pool, configured("ring"), goes_on, folder, world=2)  # and under another strategy
    assert torch.equal(ring[0][1][0], saved[0][0])
    assert [each[3] for each in ring] == [-1, -1]


def train_unequal(session: atoll.Session) -> None:
    """Worker 1 leaves an exchange out."""
    whole = EachStep.after_step

    def fewer(self: EachStep, step: int) -> Iterator[Exchange]:
        exchanges = list(whole(self, step))
        return iter(exchanges[1:] if step == 2 and session.rank else exchanges)

    with mock.patch.object(EachStep, "after_step", fewer):
        train(session)


def test_unequal_exchanges_end_the_run_with_a_line(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as failed:
        run_with(pool, configured(), train_unequal, world=2)
    for failure in failed.value.failures.values():
        assert failure.kind == "MismatchError"
        assert failure.message.startswith(
            "worker 0 is at swap 1 of exchange 1 after step 2; worker 1 is at swap 1 of exchange 1 after "
            "step 3: the strategy must make the same exchanges on all contributors"
        )


# -- the GPT of the examples, by each codec -----------------------------------------------------------------

WINDOWS, GPT_BUDGET = 2, Memory(device="96KiB", chunk="32KiB", step="host")


def gpt() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    built = GPT(layers=2, heads=2, width=32, context=16)
    return built, torch.optim.AdamW(built.parameters(), lr=0.01)


def windows_of(rank: int, step: int) -> torch.Tensor:
    """Bytes that rise, from a start that moves on: a text that can be learnt."""
    starts = torch.arange(WINDOWS)[:, None] + step + 5 * rank
    return (starts + torch.arange(17)) % 24


def train_gpt(session: atoll.Session) -> tuple[list[float], torch.Tensor]:
    """The loss of each step, and the values at the end."""
    module, optimizer = gpt()
    torch.manual_seed(SEED)
    module, optimizer = session.prepare(module, optimizer)
    losses = []
    for step in range(STEPS):
        loss = gpt_loss(module, windows_of(session.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, flat(module)


def train_gpt_plain(contributors: list[list[int]], codec: torch.dtype) -> tuple[list[list[float]], list[Any]]:
    """The same in one process; what is exchanged is rounded to the codec's dtype, and the rest stays."""
    replicas = [gpt() for _ in contributors]
    losses: list[list[float]] = [[] for _ in range(sum(map(len, contributors)))]
    for step in range(STEPS):
        for ranks, (module, optimizer) in zip(contributors, replicas, strict=True):
            for rank in ranks:
                loss = gpt_loss(module, windows_of(rank, step))
                (loss / len(ranks)).backward()
                losses[rank].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        first, second = (dict(module.named_parameters()) for module, _ in replicas)
        for name in first:
            own, other = first[name].detach().clone(), second[name].detach().clone()
            sent, theirs = own.to(codec).float(), other.to(codec).float()
            first[name].data.copy_(own + ((sent + theirs) / 2 - sent))
            second[name].data.copy_(other + ((sent + theirs) / 2 - theirs))
    return losses, [flat(module) for module, _ in replicas]


GPT_CASES = [
    pytest.param(groups, tiers, codec, marks=() if quick else pytest.mark.soak)
    for groups, tiers, codec, quick in [
        (0, False, "float32", True),
        (0, True, "bfloat16", True),
        (2, False, "bfloat16", True),
        (2, True, "float32", True),
        (0, False, "bfloat16", False),
        (0, True, "float32", False),
        (2, False, "float32", False),
        (2, True, "bfloat16", False),
    ]
]


@pytest.mark.parametrize(("groups", "tiers", "codec"), GPT_CASES)
def test_the_gpt_trains_in_each_store_and_group_by_each_codec(
    pool: WorkerPool, groups: int, tiers: bool, codec: str
) -> None:
    contributors = [[0, 1], [2, 3]] if groups else [[0], [1]]
    config = configured(groups=groups).having(sync={"codec": codec})
    if tiers:
        config = msgspec.structs.replace(config, memory=GPT_BUDGET)
    found = run_with(pool, config, train_gpt, world=sum(map(len, contributors)))
    losses, values = train_gpt_plain(contributors, getattr(torch, codec))
    for index, ranks in enumerate(contributors):
        for rank in ranks:
            own, flat_values = found[rank]
            assert own == pytest.approx(losses[rank], rel=1e-4), f"worker {rank}"
            torch.testing.assert_close(flat_values, values[index], rtol=0, atol=1e-3)
            assert torch.equal(flat_values, found[ranks[0]][1])  # members of a group are equal to the bit
    assert found[0][0][-1] < found[0][0][0]


def train_without_a_batch(session: atoll.Session) -> list[torch.Tensor]:
    """Worker 1 has no batch in the first step."""
    module = model()
    module, optimizer = session.prepare(module, optimizer_of(module))
    for step in range(3):
        if step or not session.rank:
            loss_of(module, session.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [flat(module)]


@pytest.mark.parametrize("tiers", [False, True])
def test_a_worker_without_a_batch_takes_part_in_the_exchange(pool: WorkerPool, tiers: bool) -> None:
    first, second = run_with(pool, configured(tiers=tiers), train_without_a_batch, world=2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], flat(model()))
