"""Several models in one session, each prepared with its own optimizer: GANs as users write them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import Config, Groups
from atoll.core.errors import CheckpointError, PrepareError, UserError
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.tensors.checkpoint import read_checkpoint
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, alone, run_at, run_with
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

WORLD, STEPS = 2, 4
HERE = ("ring", "server", "ps-hra", "hierarchical", "elastic", "tiers", "server tiers")
REFUSED = ("peers", "peers tiers")


class Pair:
    """A generator and a critic, too large for the budgets of the kinds in tiers, with unlike optimizers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.generator = _layers(8, 32, 32, 32, 32, 8)
        self.critic = _layers(8, 32, 32, 32, 32, 1)
        self.of_generator = Adam(self.generator.parameters(), lr=0.003, betas=(0.5, 0.999))
        self.of_critic = SGD(self.critic.parameters(), lr=0.05, momentum=0.9)
        self.schedulers = [StepLR(self.of_generator, 2, gamma=0.5), CosineAnnealingLR(self.of_critic, 9)]

    def prepare(self, session: atoll.Session, **given: Any) -> None:
        session.prepare(self.generator, self.of_generator, name="generator", **given)
        session.prepare(self.critic, self.of_critic, name="critic", **given)

    @property
    def values(self) -> list[Tensor]:
        return [p.detach().clone() for net in (self.generator, self.critic) for p in net.parameters()]


def _layers(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def drawn(rank: int, step: int, rows: int = 4) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, 8, dtype=torch.float64, generator=made)


# -- loops ---------------------------------------------------------------------------------------------------
#
# Each trains on the batches of `ranks`: one worker's own, or in plain PyTorch those of all workers.


def alternating(pair: Pair, ranks: Sequence[int], step: int) -> None:
    """The critic steps, then the generator, whose backward leaves gradients at the critic."""
    pair.of_critic.zero_grad()
    for rank in ranks:
        real, fake = drawn(rank, step), pair.generator(drawn(rank, step + 50)).detach()
        loss = (pair.critic(real) - 1).square().mean() + pair.critic(fake).square().mean()
        (loss / len(ranks)).backward()
    pair.of_critic.step()
    pair.of_generator.zero_grad()
    for rank in ranks:
        cheat = (pair.critic(pair.generator(drawn(rank, step + 50))) - 1).square().mean()
        (cheat / len(ranks)).backward()
    pair.of_generator.step()


def wasserstein(pair: Pair, ranks: Sequence[int], step: int) -> None:
    """The critic makes two steps for each of the generator's, and clamps its weights."""
    for turn in range(2):
        for rank in ranks:
            real, noise = drawn(rank, step + 20 * turn), drawn(rank, step + 20 * turn + 50)
            loss = pair.critic(pair.generator(noise).detach()).mean() - pair.critic(real).mean()
            (loss / len(ranks)).backward()
        pair.of_critic.step()
        pair.of_critic.zero_grad()
        with torch.no_grad():
            for parameter in pair.critic.parameters():
                parameter.clamp_(-0.2, 0.2)
    for parameter in pair.critic.parameters():
        parameter.requires_grad_(False)
    for rank in ranks:
        (-pair.critic(pair.generator(drawn(rank, step + 50))).mean() / len(ranks)).backward()
    pair.of_generator.step()
    pair.of_generator.zero_grad()
    for parameter in pair.critic.parameters():
        parameter.requires_grad_(True)


def at_once(pair: Pair, ranks: Sequence[int], step: int) -> None:
    """One backward reaches both models, and both step its gradients."""
    for rank in ranks:
        made = pair.generator(drawn(rank, step))
        (pair.critic(made).square().mean() / len(ranks)).backward()
    for optimizer in (pair.of_critic, pair.of_generator):
        optimizer.step()
        optimizer.zero_grad()


LOOPS: dict[str, Callable[[Pair, Sequence[int], int], None]] = {
    "alternating": alternating,
    "wasserstein": wasserstein,
    "at once": at_once,
}


def loop(pair: Pair, ranks: Sequence[int], name: str, steps: range = range(STEPS)) -> Iterator[list[Tensor]]:
    for step in steps:
        LOOPS[name](pair, ranks, step)
        for scheduler in pair.schedulers:
            scheduler.step()
        yield pair.values


@functools.cache
def plain(world: int, name: str) -> list[list[Tensor]]:
    return list(loop(Pair(), range(world), name))


def check(found: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert len(found) == len(right)
    for mine, plainly in zip(found, right, strict=True):
        check_equal(mine, plainly)


def train(session: atoll.Session, name: str) -> tuple[int, list[list[Tensor]]]:
    pair = Pair()
    pair.prepare(session)
    seen = list(loop(pair, [session.rank], name))
    return session.iteration, seen


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kind", HERE)
def test_each_step_equals_plain_torch(pool: WorkerPool, kind: str, name: str) -> None:
    for iteration, found in run_at(pool, kind, train, name, world=WORLD):
        check(found, plain(WORLD, name))
        assert iteration == STEPS  # of the model that was prepared first


@pytest.mark.parametrize("name", ["alternating", "at once"])
@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_single_worker_at_its_own_pace_steps_as_plain_torch_does(
    pool: WorkerPool, kind: str, name: str
) -> None:
    ((iteration, found),) = run_at(pool, kind, train, name, world=1)
    check(found, plain(1, name))
    assert iteration == STEPS


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_too(tiers: bool) -> None:
    check(alone(train, "alternating", tiers=tiers)[1], plain(1, "alternating"))


@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_two_workers_at_their_own_pace_train_both(pool: WorkerPool, kind: str) -> None:
    before = Pair().values
    for _, found in run_at(pool, kind, train, "alternating", world=WORLD):
        assert all(bool((now != then).any()) for now, then in zip(found[-1], before, strict=True))
        assert all(bool(each.isfinite().all()) for each in found[-1])


# -- the weights of batches ----------------------------------------------------------------------------------


def of_unlike_sizes(session: atoll.Session) -> list[list[Tensor]]:
    """Workers have batches of unlike sizes, and the two models are given unlike numbers of samples."""
    pair = Pair()
    pair.prepare(session)
    seen = []
    for step in range(STEPS):
        made = pair.generator(drawn(session.rank, step, 4 + 2 * session.rank))
        real = drawn(session.rank, step + 50, 8 if step % 2 else 4 * session.rank + 2)
        (pair.critic(made).sum() + pair.critic(real).sum()).backward()
        for optimizer in (pair.of_critic, pair.of_generator):
            optimizer.step()
            optimizer.zero_grad()
        seen.append(pair.values)
    return seen


@pytest.mark.parametrize("kind", ["server", "server tiers"])
def test_each_model_weighs_by_its_own_samples(pool: WorkerPool, kind: str) -> None:
    right = run_at(pool, "ring", of_unlike_sizes, world=WORLD)
    for found in run_at(pool, kind, of_unlike_sizes, world=WORLD):
        check(found, right[0])


IN_GROUPS = ALONE + 2  # iterations


def grouped(session: atoll.Session, sizes: Sequence[int], nothing: int) -> list[list[Tensor]]:
    """The generator has as many samples as `sizes` says; the critic has twice as many, or four more. In the
    last iteration worker `nothing` has batches that weigh nothing."""
    pair = Pair()
    pair.prepare(session)
    seen = []
    for step in range(IN_GROUPS):
        await_groups(session, step)
        own = sizes[session.rank]
        if (step, session.rank) == (IN_GROUPS - 1, nothing):
            session.weight(0.0, model=pair.generator)
            session.weight(0.0, model=pair.critic)
        both_backward(pair, session.rank, step, own, own if own % 2 == 0 else 4)
        for optimizer in (pair.of_critic, pair.of_generator):
            optimizer.step()
            optimizer.zero_grad()
        seen.append(pair.values)
    return seen


def both_backward(pair: Pair, rank: int, step: int, made: int, real: int) -> None:
    fake = pair.critic(pair.generator(drawn(rank, step, made)))
    (fake.mean() + pair.critic(drawn(rank, step + 50, real)).square().mean()).backward()


def in_two_groups(pool: WorkerPool, sizes: Sequence[int], nothing: int = -1) -> list[Any]:
    """Run `grouped` on three workers, the first two of which become a group."""
    wanted = Grouping([[0, 1], [2]])
    settings = GroupingSettings(
        2,
        by="joint",
        consistency="bsp",
        regroup=False,
        score_for=lambda _known: lambda grouping: Score(2.0 if grouping == wanted else 1.0),
    )
    config = msgspec.structs.replace(KINDS["ps-hra"], groups=Groups(probe=ALONE - 1))
    return run_with(pool, config, grouped, sizes, nothing, world=3, shards=2, grouping=settings)


@pytest.mark.parametrize("nothing", [-1, 0, 1])
def test_groups_train_both(pool: WorkerPool, nothing: int) -> None:
    sizes, pair, right = (2, 4, 6), Pair(), []
    for step in range(IN_GROUPS):
        weights = [0 if (step, rank) == (IN_GROUPS - 1, nothing) else own for rank, own in enumerate(sizes)]
        for rank, own in enumerate(sizes):
            before = [None if p.grad is None else p.grad.clone() for p in parameters(pair)]
            both_backward(pair, rank, step, own, own)
            for p, old in zip(parameters(pair), before, strict=True):
                part = p.grad if old is None else p.grad - old
                p.grad = part * (weights[rank] / sum(weights)) + (0 if old is None else old)
        for optimizer in (pair.of_critic, pair.of_generator):
            optimizer.step()
            optimizer.zero_grad()
        right.append(pair.values)
    for found in in_two_groups(pool, sizes, nothing):
        check(found, right)


def parameters(pair: Pair) -> list[nn.Parameter]:
    return [*pair.generator.parameters(), *pair.critic.parameters()]


def test_a_group_whose_members_weigh_models_unlike_each_other_says_so(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match="the members of a group weigh the session's models in unlike"):
        in_two_groups(pool, (1, 2, 2))


def one_has_no_batch(session: atoll.Session) -> list[list[Tensor]]:
    """Worker 1 has no batch in the second iteration: it makes the other calls alone."""
    pair = Pair()
    pair.prepare(session)
    seen = []
    for step in range(3):
        if step != 1 or session.rank == 0:
            alternating(pair, [session.rank], step)
        else:
            pair.of_critic.zero_grad()
            pair.of_critic.step()
            pair.of_generator.zero_grad()
            pair.of_generator.step()
        seen.append(pair.values)
    return seen


@pytest.mark.parametrize("kind", ["ring", "server", "ps-hra", "server tiers"])
def test_a_worker_without_a_batch(pool: WorkerPool, kind: str) -> None:
    pair, right = Pair(), []
    for step in range(3):
        alternating(pair, range(1) if step == 1 else range(WORLD), step)
        right.append(pair.values)
    for found in run_at(pool, kind, one_has_no_batch, world=WORLD):
        check(found, right)


def weighs_nothing(session: atoll.Session, which: str, known: bool) -> list[list[Tensor]]:
    """In the second iteration, batches of some models of worker 1 weigh nothing.

    Without `known` nothing is given for the others, whose samples are counted.
    """
    pair = Pair()
    pair.prepare(session)
    seen = []
    for step in range(3):
        for name, model in (("critic", pair.critic), ("generator", pair.generator)):
            if step == session.rank == 1 and which in (name, "both"):
                session.weight(0.0, model=model)
            elif known:
                session.weight(4.0, model=model)
        at_once(pair, [session.rank], step)
        seen.append(pair.values)
    return seen


def without(which: str) -> list[list[Tensor]]:
    """What plain PyTorch makes of `weighs_nothing`."""
    pair, seen = Pair(), []
    for step in range(3):
        of_all, of_one = copy.deepcopy(pair), copy.deepcopy(pair)
        for each, ranks in ((of_all, range(WORLD)), (of_one, range(1))):
            for rank in ranks:
                made = each.generator(drawn(rank, step))
                (each.critic(made).square().mean() / len(ranks)).backward()
        for name in ("critic", "generator"):
            taken = of_one if step == 1 and which in (name, "both") else of_all
            for own, other in zip(
                getattr(pair, name).parameters(), getattr(taken, name).parameters(), strict=True
            ):
                own.grad = other.grad
        pair.of_critic.step()
        pair.of_generator.step()
        seen.append(pair.values)
    return seen


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("which", ["both", "critic", "generator"])
@pytest.mark.parametrize("kind", ["ring", "server", "server tiers"])
def test_batches_that_weigh_nothing(pool: WorkerPool, kind: str, which: str, known: bool) -> None:
    for found in run_at(pool, kind, weighs_nothing, which, known, world=WORLD):
        check(found, without(which))


# -- what the session does beside steps ----------------------------------------------------------------------


def acts(session: atoll.Session) -> list[Any]:
    """Clip each model by itself, give the critic's batches a weight, and accumulate over two backwards."""
    pair = Pair()
    pair.prepare(session)
    norms: list[float] = []
    for step in range(3):
        with session.no_sync():
            (pair.critic(drawn(session.rank, step)).square().mean() / 2).backward()
        session.weight(4.0, model=pair.critic)
        (pair.critic(drawn(session.rank, step + 20)).square().mean() / 2).backward()
        norms.append(float(session.clip_grad_norm_(0.02, model=pair.critic)))
        pair.of_critic.step()
        pair.of_critic.zero_grad()
        pair.critic(pair.generator(drawn(session.rank, step))).square().mean().backward()
        norms.append(float(session.clip_grad_norm_(0.01, model=pair.generator)))
        pair.of_generator.step()
        pair.of_generator.zero_grad()
        pair.of_critic.zero_grad()
    with pytest.raises(UserError, match="several models are prepared"):
        session.clip_grad_norm_(1.0)
    return [norms, pair.values]


@pytest.mark.parametrize("kind", HERE)
def test_each_model_is_clipped_by_itself(pool: WorkerPool, kind: str) -> None:
    pair, norms = Pair(), []
    for step in range(3):
        for rank in range(WORLD):
            for seed in (step, step + 20):
                (pair.critic(drawn(rank, seed)).square().mean() / 2 / WORLD).backward()
        norms.append(float(nn.utils.clip_grad_norm_(pair.critic.parameters(), 0.02)))
        pair.of_critic.step()
        pair.of_critic.zero_grad()
        for rank in range(WORLD):
            (pair.critic(pair.generator(drawn(rank, step))).square().mean() / WORLD).backward()
        norms.append(float(nn.utils.clip_grad_norm_(pair.generator.parameters(), 0.01)))
        pair.of_generator.step()
        pair.of_generator.zero_grad()
        pair.of_critic.zero_grad()
    for found, values in run_at(pool, kind, acts, world=WORLD):
        assert found == pytest.approx(norms, rel=1e-9)
        check_equal(values, pair.values)


def grown(session: atoll.Session) -> list[list[Tensor]]:
    """A third model is prepared after the first steps, and the critic's head is replaced."""
    pair, seen = Pair(), []
    pair.prepare(session)
    third, of_third = a_third()
    for step in range(STEPS):
        pair.of_critic.zero_grad()
        if step == 1:
            session.prepare(third, of_third, name="third")
        if step == 2:
            other_head(pair)
            session.prepare(pair.critic, pair.of_critic)
        alternating(pair, [session.rank], step)
        if step >= 1:
            third(drawn(session.rank, step)).square().mean().backward()
            of_third.step()
            of_third.zero_grad()
        seen.append([*pair.values, *(p.detach().clone() for p in third.parameters())])
    return seen


def a_third() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(5)
    third = nn.Linear(8, 8).double()
    return third, SGD(third.parameters(), lr=0.1)


def other_head(pair: Pair) -> None:
    torch.manual_seed(3)
    pair.critic[-1] = nn.Linear(32, 1).double()
    pair.of_critic = SGD(pair.critic.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("kind", ["ring", "server", "server tiers"])
def test_a_third_one_and_a_changed_one(pool: WorkerPool, kind: str) -> None:
    pair, right = Pair(), []
    third, of_third = a_third()
    for step in range(STEPS):
        if step == 2:
            other_head(pair)
        alternating(pair, range(WORLD), step)
        for rank in range(WORLD) if step >= 1 else ():
            (third(drawn(rank, step)).square().mean() / WORLD).backward()
        of_third.step()
        of_third.zero_grad()
        right.append([*pair.values, *(p.detach().clone() for p in third.parameters())])
    for found in run_at(pool, kind, grown, world=WORLD):
        check(found, right)


def on_dealt_data(session: atoll.Session, turned: bool) -> tuple[int, list[Tensor]]:
    """Two epochs over data that a sampler of the session deals, in batches of which the last is smaller."""
    pair = Pair()
    if turned:
        session.prepare(pair.critic, pair.of_critic)
        session.prepare(pair.generator, pair.of_generator)
    else:
        pair.prepare(session)
    data = drawn(0, 0, 44)
    sampler = session.sampler(data, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)  # type: ignore[arg-type]
    seen = 0
    for _ in range(2):
        for x in loader:
            seen += len(x)
            loss = (
                pair.critic(x).square().mean() + (pair.critic(pair.generator(x).detach()) - 1).square().mean()
            )
            loss.backward()
            pair.of_critic.step()
            pair.of_critic.zero_grad()
            pair.critic(pair.generator(x)).square().mean().backward()
            pair.of_generator.step()
            pair.of_generator.zero_grad()
            pair.of_critic.zero_grad()
    session.barrier()
    return seen, pair.values


@pytest.mark.parametrize("turned", [False, True])
def test_a_sampler_deals_to_both(pool: WorkerPool, turned: bool) -> None:
    right = run_at(pool, "ring", on_dealt_data, turned, world=WORLD)
    for kind in ("server", "ps-hra", "server tiers"):
        found = run_at(pool, kind, on_dealt_data, turned, world=WORLD)
        assert [seen for seen, _ in found] == [seen for seen, _ in right]
        for (_, mine), (_, its) in zip(found, right, strict=True):
            check_equal(mine, its)
    assert sum(seen for seen, _ in run_at(pool, "asp", on_dealt_data, turned, world=WORLD)) == 2 * 44


# -- checkpoints ---------------------------------------------------------------------------------------------


def saved(session: atoll.Session, folder: str) -> None:
    pair = Pair()
    pair.prepare(session)
    list(loop(pair, [session.rank], "alternating", range(2)))
    session.save(folder)


def resumed(session: atoll.Session, folder: str, turned: bool) -> list[list[Tensor]]:
    pair = Pair(seed=1)
    if turned:
        session.prepare(pair.critic, pair.of_critic, name="critic")
        session.prepare(pair.generator, pair.of_generator, name="generator")
    else:
        pair.prepare(session)
    assert session.resume(folder) == 2
    return list(loop(pair, [session.rank], "alternating", range(2, STEPS)))


@pytest.mark.parametrize(
    ("saves", "loads"),
    [("server", "server"), ("ring", "server"), ("server", "ring"), ("ps-hra", "server tiers")],
)
def test_a_checkpoint_goes_from_one_strategy_to_another(
    pool: WorkerPool, saves: str, loads: str, tmp_path: Path
) -> None:
    run_at(pool, saves, saved, str(tmp_path / "it"), world=WORLD)
    for turned in (False, True):
        for found in run_at(pool, loads, resumed, str(tmp_path / "it"), turned, world=WORLD):
            check(found, plain(WORLD, "alternating")[2:])


def counts_samples(session: atoll.Session, folder: str) -> float:
    """The samples of all models of all workers, of two iterations that a checkpoint has, and of one more."""
    pair = Pair()
    pair.prepare(session)
    session.resume(folder)
    for step in range(session.iteration, session.iteration + 1 + (session.iteration == 0)):
        alternating(pair, [session.rank], step)
    session.save(folder)
    return sum(each.reducer.consumed for each in session._state.prepared)


@pytest.mark.parametrize(("first", "then"), [("server", "server"), ("ring", "server tiers")])
def test_the_samples_consumed_go_on_from_a_checkpoint(
    pool: WorkerPool, first: str, then: str, tmp_path: Path
) -> None:
    of_two = run_at(pool, first, counts_samples, str(tmp_path / "it"), world=WORLD)
    of_three = run_at(pool, then, counts_samples, str(tmp_path / "it"), world=WORLD)
    assert of_two[0] > 0
    assert of_two + of_three == [of_two[0]] * WORLD + [of_two[0] * 3 / 2] * WORLD


def samples_of(session: atoll.Session, name: str) -> float:
    """The samples of all models of all workers in a loop."""
    pair = Pair()
    pair.prepare(session)
    for step in range(STEPS):
        LOOPS[name](pair, [session.rank], step)
    session.barrier()
    return sum(each.reducer.consumed for each in session._state.prepared)


@pytest.mark.parametrize("name", ["alternating", "at once"])
@pytest.mark.parametrize("kind", ["server", "asp"])
def test_samples_are_counted_at_shards_as_in_a_ring(pool: WorkerPool, kind: str, name: str) -> None:
    """At each worker's own pace, too, where each model's step is a contribution."""
    assert run_at(pool, kind, samples_of, name, world=WORLD) == run_at(pool, "ring", samples_of, name)


def test_a_checkpoint_is_the_one_that_a_ring_writes(pool: WorkerPool, tmp_path: Path) -> None:
    held = {}
    for kind in ("ring", "server", "server tiers"):
        run_at(pool, kind, saved, str(tmp_path / kind), world=WORLD)
        held[kind] = read_checkpoint(tmp_path / kind)
    for kind in ("server", "server tiers"):
        for name, value in held["ring"].model.items():
            assert float((held[kind].model[name] - value).abs().max()) <= 1e-12
        assert list(held[kind].model) == list(held["ring"].model)
        ours, theirs = held[kind].trees["state"], held["ring"].trees["state"]
        assert [each["name"] for each in ours["models"]] == ["generator", "critic"]
        for key in ("iteration", "optimizers", "schedulers"):
            assert ours[key] == theirs[key]
        assert [each["steps"] for each in ours["reducers"]] == [each["steps"] for each in theirs["reducers"]]


def other_names(session: atoll.Session, folder: str) -> str:
    pair = Pair()
    session.prepare(pair.generator, pair.of_generator, name="painter")
    session.prepare(pair.critic, pair.of_critic, name="critic")
    with pytest.raises(CheckpointError) as caught:
        session.resume(folder)
    return str(caught.value)


def test_other_names_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    run_at(pool, "server", saved, str(tmp_path / "it"), world=WORLD)
    for said in run_at(pool, "server", other_names, str(tmp_path / "it"), world=WORLD):
        assert "holds the models 'critic' and 'generator', and the session has prepared" in said


def loads_a_state(pair: Pair, ranks: Sequence[int]) -> list[list[Tensor]]:
    """The script loads one optimizer's own earlier state between two iterations."""
    seen = list(loop(pair, ranks, "alternating", range(2)))
    kept = copy.deepcopy(pair.of_critic.state_dict())
    seen += loop(pair, ranks, "alternating", range(2, 3))
    pair.of_critic.zero_grad()
    pair.of_critic.load_state_dict(kept)
    return [*seen, *loop(pair, ranks, "alternating", range(3, STEPS))]


def loaded(session: atoll.Session) -> list[list[Tensor]]:
    pair = Pair()
    pair.prepare(session)
    return loads_a_state(pair, [session.rank])


@pytest.mark.parametrize("kind", ["ring", "server", "server tiers"])
def test_one_optimizers_state_is_loaded(pool: WorkerPool, kind: str) -> None:
    right = loads_a_state(Pair(), range(WORLD))
    for found in run_at(pool, kind, loaded, world=WORLD):
        check(found, right)


# -- what is refused -----------------------------------------------------------------------------------------


def refusal(session: atoll.Session) -> str:
    pair = Pair()
    with pytest.raises(PrepareError) as caught:
        pair.prepare(session)
    return str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_strategies_say_so_in_a_line(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, refusal, world=WORLD):
        assert "trains one model in a session" in said
        assert "\n" not in said


def test_groups_at_their_own_pace_say_so_in_a_line(pool: WorkerPool) -> None:
    for said in run_at(pool, "ps-hra asp", refusal, world=WORLD):
        assert "set sync.consistency to bsp, or run.strategy to server" in said


def mistakes(session: atoll.Session) -> list[str]:
    """What a second call says to parameters of the first model, in the model or in the optimizer alone."""
    pair, said = Pair(), []
    session.prepare(pair.generator, pair.of_generator, name="generator")
    both = SGD([*pair.critic.parameters(), *pair.generator.parameters()], lr=0.1)
    shared = nn.Sequential(pair.generator[0], nn.Linear(32, 1).double())
    for model, optimizer, name in (
        (pair.critic, both, ""),
        (shared, SGD(shared.parameters(), lr=0.1), ""),
        (pair.critic, pair.of_critic, "generator"),
    ):
        with pytest.raises(UserError) as caught:
            session.prepare(model, optimizer, name=name)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("kind", ["ring", "server"])
def test_a_parameter_belongs_to_one_model(pool: WorkerPool, kind: str) -> None:
    for in_optimizer, in_model, name in run_at(pool, kind, mistakes, world=1):
        assert "is not in the model; put every module that it steps into one nn.ModuleList" in in_optimizer
        assert "parameter '0.weight' belongs to another prepared model too" in in_model
        assert "another model has that name already" in name


# -- workers that come and go --------------------------------------------------------------------------------


class GoneError(Exception):
    """Worker 1 leaves the run."""


def comes_back(place: Place, config: Config, address: str, folder: Path) -> list[Tensor]:
    """Worker 1 leaves in its third iteration, comes again, and both make three more from there."""
    until, told = time.monotonic() + 60, folder / "entered at"
    with served_worker(address, place.rank):
        if place.rank == 1:
            with contextlib.suppress(GoneError), atoll.join(config) as session:
                pair = Pair()
                pair.prepare(session)
                list(loop(pair, [1], "alternating", range(2)))
                raise GoneError
        with atoll.join(config) as session:
            pair = Pair(seed=place.rank)
            pair.prepare(session)
            session.resume()
            if place.rank == 1:
                (folder / "written").write_text(str(session.iteration))
                (folder / "written").replace(told)
            while not told.exists() or session.iteration < int(told.read_text()) + 3:
                assert time.monotonic() < until
                list(loop(pair, [place.rank], "alternating", range(session.iteration, session.iteration + 1)))
            session.barrier()
            return pair.values


@pytest.mark.parametrize("kind", ["server", "asp"])
def test_a_worker_that_comes_back_finds_both(pool: WorkerPool, kind: str, tmp_path: Path) -> None:
    with ServedRun(WORLD, 1) as served:
        first, second = pool.run(comes_back, KINDS[kind], served.address, tmp_path, world=WORLD)
    assert all(torch.equal(mine, its) for mine, its in zip(first, second, strict=True))
    assert all(bool(each.isfinite().all()) for each in first)
