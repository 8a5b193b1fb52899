"""Several optimizers for one model: each steps its own parameters, when the script calls it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import atoll
from atoll.core.errors import CheckpointError, PrepareError
from atoll.core.memory import Memory
from atoll.tensors.checkpoint import read_checkpoint
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, PACES, alone, model, run_at, run_with

pytestmark = pytest.mark.sampled

WORLD, STEPS = 2, 5
# The kinds that take several:
HERE = ("ring", "hierarchical", "elastic", "server", "ps-hra", "tiers", "server tiers")
REFUSED = ("ps-hra asp", "peers", "peers tiers")


def split(net: nn.Module) -> list[Optimizer]:
    """Momentum for the matrices, in two groups, and AdamW for all else."""
    matrices = [p for p in net.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if p.dim() != 2]
    groups = [{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 0.05, "weight_decay": 0.1}]
    return [SGD(groups, lr=0.1, momentum=0.9), AdamW(others, lr=0.01)]


def schedulers(first: Optimizer, second: Optimizer) -> list[Any]:
    return [StepLR(first, 2, gamma=0.5), CosineAnnealingLR(second, STEPS)]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def loop(
    net: nn.Module, optimizers: list[Optimizer], backward: Callable[[int], None], order: str, steps: range
) -> Iterator[list[Tensor]]:
    """Train in one of these ways, and yield the parameters after each iteration."""
    first, second = optimizers
    drives = schedulers(first, second)
    for step in steps:
        backward(step)
        if order == "both":
            due = [0, 1]
        elif order == "the second first":
            due = [1, 0]
        elif order == "the first every other time":
            due = [0, 1] if step % 2 else [1]
        else:
            assert order == "the second every other time"
            due = [0, 1] if step % 2 else [0]
        for index in due:
            optimizers[index].step()
            optimizers[index].zero_grad()
            drives[index].step()
        yield values(net)


ORDERS = ("both", "the second first", "the first every other time", "the second every other time")


def train(session: atoll.Session, order: str) -> list[list[Tensor]]:
    net = model()
    optimizers = split(net)
    session.prepare(net, optimizers)

    def backward(step: int) -> None:
        net(batch(session.rank, step)).square().mean().backward()

    return list(loop(net, optimizers, backward, order, range(STEPS)))


@functools.cache
def plain(world: int, order: str) -> list[list[Tensor]]:
    net = model()

    def backward(step: int) -> None:
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()

    return list(loop(net, split(net), backward, order, range(STEPS)))


def check(found: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert len(found) == len(right)
    for mine, plainly in zip(found, right, strict=True):
        check_equal(mine, plainly)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", HERE)
def test_each_step_equals_plain_torch(pool: WorkerPool, kind: str, order: str) -> None:
    for found in run_at(pool, kind, train, order, world=WORLD):
        check(found, plain(WORLD, order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_single_worker_of_shards_at_its_own_pace_steps_as_plain_torch_does(
    pool: WorkerPool, kind: str, order: str
) -> None:
    (found,) = run_at(pool, kind, train, order, world=1)
    check(found, plain(1, order))


@pytest.mark.parametrize("order", ORDERS)
def test_a_group_of_a_server_steps_from_tiers(pool: WorkerPool, order: str) -> None:
    config = msgspec.structs.replace(KINDS["ps-hra"], memory=KINDS["tiers"].memory)
    for found in run_with(pool, config, train, order, world=WORLD, shards=1):
        check(found, plain(WORLD, order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_single_worker_of_shards_at_its_own_pace_steps_from_tiers(
    pool: WorkerPool, kind: str, order: str
) -> None:
    config = msgspec.structs.replace({**KINDS, **PACES}[kind], memory=KINDS["tiers"].memory)
    (found,) = run_with(pool, config, train, order, world=1, shards=1)
    check(found, plain(1, order))


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_alone_too(order: str, tiers: bool) -> None:
    check(alone(train, order, tiers=tiers), plain(1, order))


def samples_of(session: atoll.Session, order: str) -> float:
    """The samples of all workers that a loop has consumed."""
    train(session, order)
    session.barrier()
    return session._state.prepared[0].reducer.consumed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["server", "asp"])
def test_samples_are_counted_at_shards_as_in_a_ring(pool: WorkerPool, kind: str, order: str) -> None:
    """A step of gradients that another optimizer has stepped counts none, whichever steps first."""
    assert run_at(pool, kind, samples_of, order) == run_at(pool, "ring", samples_of, order)


def muon_and_adamw(session: atoll.Session) -> list[Tensor]:
    net = model()
    optimizers = by_tensor_and_by_element(net)
    session.prepare(net, optimizers)
    for step in range(3):
        net(batch(session.rank, step)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return values(net)


def by_tensor_and_by_element(net: nn.Module) -> list[Optimizer]:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    return [Muon(matrices, lr=0.02), AdamW([p for p in net.parameters() if p.dim() != 2], lr=0.01)]


@pytest.mark.parametrize("kind", HERE)
def test_one_steps_whole_tensors_and_one_flat_runs(pool: WorkerPool, kind: str) -> None:
    net = model()
    optimizers = by_tensor_and_by_element(net)
    for step in range(3):
        for rank in range(WORLD):
            (net(batch(rank, step)).square().mean() / WORLD).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for found in run_at(pool, kind, muon_and_adamw, world=WORLD):
        check_equal(found, values(net))


# -- what the session does beside steps ----------------------------------------------------------------------


def scripts_acts(session: atoll.Session) -> list[Any]:
    """Clip between the two steps; one worker has no batch in the second iteration."""
    net = model()
    optimizers = split(net)
    session.prepare(net, optimizers)
    norms = []
    for step in range(3):
        if step != 1 or session.rank == 0:
            session.weight(4)
            net(batch(session.rank, step)).square().mean().backward()
        norms.append(float(session.clip_grad_norm_(0.02)))
        optimizers[0].step()
        norms.append(float(session.clip_grad_norm_(0.01)))
        optimizers[1].step()
        for each in optimizers:
            each.zero_grad()
    return [norms, session.iteration, values(net)]


@functools.cache
def plain_acts() -> list[Any]:
    net = model()
    optimizers, norms = split(net), []
    for step in range(3):
        ranks = range(1) if step == 1 else range(WORLD)
        for rank in ranks:
            (net(batch(rank, step)).square().mean() / len(ranks)).backward()
        for optimizer, most in zip(optimizers, (0.02, 0.01), strict=True):
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), most)))
            optimizer.step()
        for each in optimizers:
            each.zero_grad()
    return [norms, 3, values(net)]


@pytest.mark.parametrize("kind", HERE)
def test_clipping_between_steps_and_a_worker_without_a_batch(pool: WorkerPool, kind: str) -> None:
    for norms, iteration, found in run_at(pool, kind, scripts_acts, world=WORLD):
        right = plain_acts()
        assert norms == pytest.approx(right[0], rel=1e-9)
        assert iteration == right[1]
        check_equal(found, right[2])


def scaled(session: atoll.Session) -> list[Tensor]:
    net = model()
    optimizers = split(net)
    session.prepare(net, optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        scaler.scale(net(batch(session.rank, step)).square().mean()).backward()
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        for each in optimizers:
            each.zero_grad()
    return values(net)


@pytest.mark.parametrize("kind", HERE)
def test_a_scaler_steps_both(pool: WorkerPool, kind: str) -> None:
    net = model()
    optimizers = split(net)
    for step in range(3):
        for rank in range(WORLD):
            (net(batch(rank, step)).square().mean() / WORLD).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for found in run_at(pool, kind, scaled, world=WORLD):
        check_equal(found, values(net))


# -- checkpoints ---------------------------------------------------------------------------------------------


def saved(session: atoll.Session, folder: str) -> None:
    net = model()
    optimizers = split(net)
    session.prepare(net, optimizers)
    drives = schedulers(*optimizers)
    for step in range(3):
        net(batch(session.rank, step)).square().mean().backward()
        for each, drive in zip(optimizers, drives, strict=True):
            each.step()
            each.zero_grad()
            drive.step()
    session.save(folder)


def resumed(session: atoll.Session, folder: str) -> list[list[Tensor]]:
    torch.manual_seed(1)
    net = model(seed=1)
    optimizers = split(net)
    session.prepare(net, optimizers)
    drives = schedulers(*optimizers)
    assert session.resume(folder) == 3
    seen = []
    for step in range(3, STEPS):
        net(batch(session.rank, step)).square().mean().backward()
        for each, drive in zip(optimizers, drives, strict=True):
            each.step()
            each.zero_grad()
            drive.step()
        seen.append(values(net))
    return seen


@pytest.mark.parametrize("kind", HERE)
def test_a_checkpoint_holds_both(pool: WorkerPool, kind: str, tmp_path: Path) -> None:
    run_at(pool, kind, saved, str(tmp_path / "it"), world=WORLD)
    for found in run_at(pool, kind, resumed, str(tmp_path / "it"), world=WORLD):
        check(found, plain(WORLD, "both")[3:])


def test_plain_torch_loads_both(pool: WorkerPool, tmp_path: Path) -> None:
    run_at(pool, "ring", saved, str(tmp_path / "it"), world=WORLD)
    held = read_checkpoint(tmp_path / "it")
    net = model(seed=1)
    optimizers = split(net)
    net.load_state_dict(held.model)
    for each, state in zip(optimizers, held.trees["optimizer"], strict=True):
        each.load_state_dict(state)
    for rank in range(WORLD):
        (net(batch(rank, 3)).square().mean() / WORLD).backward()
    for each in optimizers:
        each.step()
    check_equal(values(net), plain(WORLD, "both")[3])


def other_optimizers(session: atoll.Session, folder: str) -> str:
    net = model()
    session.prepare(net, split(net)[::-1])
    with pytest.raises(CheckpointError) as caught:
        session.resume(folder)
    return str(caught.value)


def test_another_order_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    run_at(pool, "ring", saved, str(tmp_path / "it"), world=WORLD)
    for said in run_at(pool, "ring", other_optimizers, str(tmp_path / "it"), world=WORLD):
        assert "holds the state of SGD and AdamW, and the session has prepared AdamW and SGD" in said


# -- what is refused -----------------------------------------------------------------------------------------


def refusal(session: atoll.Session) -> str:
    net = model()
    with pytest.raises(PrepareError) as caught:
        session.prepare(net, split(net))
    return str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_strategies_say_so_in_a_line(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, refusal, world=WORLD):
        assert "one optimizer with a param group for each" in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda net: [SGD([net[0].weight], lr=0.1), SGD([net[0].bias], lr=0.1)], "'2.weight' is in none of"),
        (lambda net: [SGD(net.parameters(), lr=0.1), AdamW(net[2].parameters())], "'2.weight' is in optimiz"),
        (lambda net: [], "an empty list"),
        (lambda net: [SGD(net.parameters(), lr=0.1)] * 2, "given one optimizer twice"),
        (lambda net: [SGD(net.parameters(), lr=0.1), net], "was given a Sequential"),
    ],
)
def test_a_parameter_has_one_owner(make: Callable[[nn.Module], Any], line: str) -> None:
    net = model()
    with atoll.join() as session, pytest.raises(PrepareError, match=re.escape(line)):
        session.prepare(net, make(net))


def test_a_frozen_parameter_needs_no_owner() -> None:
    net = model()
    net[0].requires_grad_(False)
    before = values(net[0])
    optimizers = [
        SGD([net[2].weight], lr=0.1),
        AdamW([p for part in net[3:] for p in part.parameters()] + [net[2].bias]),
    ]
    with atoll.join() as session:
        session.prepare(net, optimizers)
        net(batch(0, 0)).square().mean().backward()
        for each in optimizers:
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(before, values(net[0]), strict=True))


def out_of_step(session: atoll.Session) -> None:
    """Worker 1 has no batch in the second iteration, and steps sums that the others have added to."""
    net = model()
    first, second = split(net)
    session.prepare(net, [first, second])
    for step in range(3):
        session.weight(4)
        if step != 1 or session.rank == 0:
            net(batch(session.rank, step)).square().mean().backward()
        for each in (second, first) if step == 1 else (first,):
            each.step()
        first.zero_grad()
    session.save("nowhere")


def test_a_worker_that_steps_another_iterations_mean_is_told(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match="stepped or clipped 1 times after that"):
        run_at(pool, "ring", out_of_step, world=WORLD)


# -- GANs ----------------------------------------------------------------------------------------------------


class Gan(nn.Module):
    """A generator of two parts, as CycleGAN has two, and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generators = nn.ModuleList([nn.Linear(32, 32), nn.Sequential(nn.Tanh(), nn.Linear(32, 32))])
        self.discriminator = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
        self.double()

    def fake(self, noise: Tensor) -> Tensor:
        return self.generators[1](self.generators[0](noise))

    def optimizers(self) -> list[Optimizer]:
        parts = itertools.chain(*(part.parameters() for part in self.generators))
        return [
            torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999)),
            torch.optim.Adam(parts, lr=0.01, betas=(0.5, 0.999)),
        ]


def tutorial(gan: Gan, optimizers: list[Optimizer], ranks: list[int]) -> list[list[Tensor]]:
    """The loop of PyTorch's DCGAN tutorial; several ranks are several workers in one process."""
    critic, seen = gan.discriminator, []
    for step in range(4):
        critic.zero_grad()
        for rank in ranks:
            (critic(batch(rank, step)).square().mean() / len(ranks)).backward()
        fakes = [gan.fake(batch(rank, step + 100)) for rank in ranks]
        for fake in fakes:
            ((critic(fake.detach()) - 1).square().mean() / len(ranks)).backward()
        optimizers[0].step()
        gan.generators.zero_grad()
        for fake in fakes:
            (critic(fake).square().mean() / len(ranks)).backward()
        optimizers[1].step()
        seen.append(values(gan))
    return seen


def train_pairs(session: atoll.Session) -> list[list[Tensor]]:
    gan = Gan()
    optimizers = gan.optimizers()
    session.prepare(gan.discriminator, optimizers[0])
    session.prepare(gan.generators, optimizers[1])
    return tutorial(gan, optimizers, [session.rank])


def train_list(session: atoll.Session) -> list[list[Tensor]]:
    gan = Gan()
    optimizers = gan.optimizers()
    session.prepare(gan, optimizers)
    return tutorial(gan, optimizers, [session.rank])


@pytest.mark.parametrize(
    ("kind", "script"),
    [(kind, script) for kind in HERE for script in (train_list, train_pairs)],
)
def test_the_loop_of_the_dcgan_tutorial(pool: WorkerPool, kind: str, script: Callable[..., Any]) -> None:
    gan = Gan()
    right = tutorial(gan, gan.optimizers(), list(range(WORLD)))
    for found in run_at(pool, kind, script, world=WORLD):
        check(found, right)


def test_a_gan_at_each_workers_own_pace_changes_no_network_under_its_graph(pool: WorkerPool) -> None:
    gan = Gan()
    before = values(gan)
    for found in run_at(pool, "asp", train_list, world=WORLD):
        moved = [bool((now != then).any()) for now, then in zip(found[-1], before, strict=True)]
        assert all(moved)
        assert all(bool(each.isfinite().all()) for each in found[-1])


@pytest.mark.parametrize("script", [train_pairs, train_list])
@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_graph_outlives_a_step_at_each_workers_own_pace_in_tiers(
    pool: WorkerPool, kind: str, script: Callable[..., Any]
) -> None:
    """The other worker's steps change the generators meanwhile, whose graph is kept."""
    config = msgspec.structs.replace({**KINDS, **PACES}[kind], memory=Memory(device="14KiB", chunk="1024"))
    before = values(Gan())
    for found in run_with(pool, config, script, world=WORLD, shards=1):
        moved = [bool((now != then).any()) for now, then in zip(found[-1], before, strict=True)]
        assert all(moved)
        assert all(bool(each.isfinite().all()) for each in found[-1])


@pytest.mark.parametrize("script", [train_pairs, train_list])
def test_a_gan_alone(script: Callable[..., Any]) -> None:
    gan = Gan()
    check(alone(script), tutorial(gan, gan.optimizers(), [0]))
