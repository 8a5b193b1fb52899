"""Several backwards before one step, without `no_sync`: the gradients add up, as in plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from kinds import check_equal
from test_groups_parity import score_for
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Groups
from atoll.core.errors import UserError
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.train.sync.client import Outgoing, ServerClient
from atoll.train.sync.peersworker import NodeWorker
from atoll.wire.device import Contribute
from support.parity import ALONE, await_groups
from support.pool import WorkerPool
from support.runs import KINDS, model, run_at, run_with

pytestmark = pytest.mark.sampled

PARTS = 3  # backwards before a step
SAMPLES = [4, 2, 3]  # by worker, and part: uneven batches
LEFT_OUT = (1, ALONE + 2)  # steps: alone, and in groups

Values = list[list[Tensor]]


def batch(rank: int, step: int, part: int, uneven: bool) -> Tensor:
    made = torch.Generator().manual_seed(1000 * part + 10 * step + rank)
    samples = SAMPLES[(rank + part) % len(SAMPLES)] if uneven else 4
    return torch.randn(samples, 32, dtype=torch.float64, generator=made)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def treat(net: nn.Module, how: str) -> None:
    """Do what the script does to gradients after a backward that is not the last one."""
    if how == "clipped":
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    elif how == "edited":
        parameters = list(net.parameters())
        parameters[0].grad = None
        assert parameters[1].grad is not None
        with torch.no_grad():
            parameters[1].grad.mul_(0.5)


def loop(
    net: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], world: int, steps: range, how: str
) -> Values:
    """Several losses, each with a backward of its own. A step that is left out, as a GradScaler's, leaves
    gradients to which the next one's are added."""
    seen = []
    for step in steps:
        for part in range(PARTS):
            batches = [batch(rank, step, part, how.startswith("uneven")) for rank in range(world)]
            samples = sum(map(len, batches))
            for rank in ranks:
                share = 1.0 if len(ranks) < world else len(batches[rank]) / samples
                if how == "uneven by sums" and len(ranks) == world:
                    share = sum(SAMPLES) / (world * sum(SAMPLES))  # of all parts: each worker has as many
                (net(batches[rank]).square().mean() * share).backward()
            if part < PARTS - 1:
                treat(net, how)
        if how != "left out" or step not in LEFT_OUT:
            optimizer.step()
            optimizer.zero_grad()
        seen.append([p.detach().clone() for p in net.parameters()])
    return seen


def train(session: atoll.Session, steps: int, how: str) -> Values:
    net, optimizer = made()
    session.prepare(net, optimizer)
    seen = []
    for step in range(steps):
        if session._runtime.regrouping is not None and steps > ALONE:
            await_groups(session, step)
        seen += loop(net, optimizer, [session.rank], session.world, range(step, step + 1), how)
    if steps > ALONE:
        assert session._runtime.regrouping is not None
        assert session._runtime.regrouping.contributor != session.rank, "it has not moved to a group"
    return seen


@functools.cache
def plain(world: int, steps: int, how: str) -> Values:
    return loop(*made(), list(range(world)), world, range(steps), how)


def check(found: list[Values], right: Values) -> None:
    for seen in found:
        for now, then in zip(seen, right, strict=True):
            check_equal(now, then)


HOW = ["as they are", "uneven", "clipped", "edited", "left out"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "kind", ["ring", "server", "ps-hra", "tiers", "server tiers", "peers", "peers tiers"]
)
def test_gradients_of_several_backwards_add_up(pool: WorkerPool, kind: str, how: str) -> None:
    """At peers the mean is by the nodes' samples of all backwards, unless the script uses the mean between
    them."""
    if kind.startswith("peers") and how == "uneven":
        how = "uneven by sums"
    check(run_at(pool, kind, train, ALONE, how, world=2), plain(2, ALONE, how))


@pytest.mark.parametrize("how", ["uneven", "edited", "left out"])
@pytest.mark.parametrize("store", ["resident", "tiers"])
def test_in_groups_they_add_up(pool: WorkerPool, store: str, how: str) -> None:
    """A group of two and one worker alone, after the steps in which each is alone."""
    grouping = GroupingSettings(
        2, by="joint", consistency="bsp", regroup=False, score_for=score_for(Grouping([[0, 1], [2]]))
    )
    config = msgspec.structs.replace(KINDS["ps-hra"], groups=Groups(probe=ALONE - 2))
    if store == "tiers":
        config = msgspec.structs.replace(config, memory=KINDS["tiers"].memory)
    steps = 2 * ALONE
    found = run_with(pool, config, train, steps, how, world=3, shards=2, grouping=grouping)
    check(found, plain(3, steps, how))


# -- what they weigh where gradients leave at the step -------------------------------------------------------

AT_THE_STEP = [
    "asp",
    "peers",
    *(pytest.param(kind, marks=pytest.mark.check) for kind in ("ssp", "ps-hra asp", "peers stale")),
]
WAYS = ["whole", "parts", "checkpoint"]


def compute(net: nn.Module, x: Tensor, way: str) -> Tensor:
    if way == "parts":
        for part in net.children():
            x = part(x)
    elif way == "checkpoint":
        x = checkpoint(net, x.requires_grad_(), use_reentrant=True)
    else:
        x = net(x)
    return x.square().mean()


def told_by(session: atoll.Session, act: Any) -> tuple[list[tuple[float, float]], float]:
    """What this worker's contributions weigh, and their samples, as shards or peers are told as it acts; and
    the samples of all workers by then."""
    told, commit, send = list[tuple[float, float]](), ServerClient.commit, NodeWorker.send

    def noted(client: ServerClient, out: Outgoing, *arguments: Any) -> None:
        told.append((out.own.weight, out.own.samples))
        commit(client, out, *arguments)

    def sent(node: NodeWorker, message: Any) -> None:
        if isinstance(message, Contribute):
            told.append((message.weight, message.samples))
        send(node, message)

    with patch.object(ServerClient, "commit", noted), patch.object(NodeWorker, "send", sent):
        act()
        session.barrier()
    return told, session._state.prepared[0].reducer.consumed


def one_model(
    session: atoll.Session, way: str, weighs: str, then: str
) -> tuple[list[tuple[float, float]], float]:
    """Three steps. In each the second backward is of the first one's batch too, or comes after the first
    one's gradients were dropped, or adds to them."""
    net, optimizer = made()
    session.prepare(net, optimizer)

    def back(step: int, part: int) -> None:
        x = batch(session.rank, step, part, uneven=True)
        if weighs == "each":
            session.weight(len(x))
        loss = compute(net, x, way)
        loss.backward(retain_graph=then == "twice")
        if then == "twice":
            loss.backward()

    def steps() -> None:
        for step in range(3):
            if weighs == "once":
                session.weight(9)
            back(step, 0)
            if then.startswith("dropped"):
                optimizer.zero_grad(set_to_none=then == "dropped")
            for part in (1, 2):
                back(step, part)
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()

    return told_by(session, steps)


@pytest.mark.parametrize("then", ["added", "dropped", "dropped as zeros", "twice"])
@pytest.mark.parametrize("kind", AT_THE_STEP)
@pytest.mark.parametrize(
    ("way", "weighs"),
    [("whole", "output"), ("whole", "each"), ("parts", "each"), ("parts", "once"), ("checkpoint", "each")],
)
def test_every_backward_before_a_step_counts_once(
    pool: WorkerPool, kind: str, way: str, weighs: str, then: str
) -> None:
    """Samples count as where each backward is reduced at once; a weight is that of the gradients left."""
    workers = run_at(pool, kind, one_model, way, weighs, then, world=2)
    samples = float(sum(SAMPLES))
    for rank, (told, consumed) in enumerate(workers):
        weight = samples
        if then.startswith("dropped") and weighs != "once":
            weight -= SAMPLES[rank]
        assert told == [(weight, samples)] * 3
        assert consumed == 2 * 3 * samples


def several_optimizers(session: atoll.Session, _: str) -> tuple[list[tuple[float, float]], float]:
    """The second optimizer steps after each second backward, the first one after each."""
    net = model()
    parameters = list(net.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:4], parameters[4:])]
    session.prepare(net, optimizers)

    def steps() -> None:
        for step in range(4):
            compute(net, batch(session.rank, step, 0, uneven=True), "whole").backward()
            for optimizer in optimizers if step % 2 else optimizers[:1]:
                optimizer.step()
                optimizer.zero_grad()

    return told_by(session, steps)


def critic_and_generator(session: atoll.Session, way: str) -> tuple[list[tuple[float, float]], float]:
    """A critic has two backwards before its step. The generator's leaves gradients there that are
    dropped."""
    generator, critic = model(), model()
    of_generator, of_critic = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic))
    session.prepare(generator, of_generator)
    session.prepare(critic, of_critic)

    def steps() -> None:
        for step in range(2):
            real, noise = (batch(session.rank, step, part, uneven=True) for part in (0, 1))
            compute(critic, real, way).backward()
            fake = torch.cat([generator(noise).detach()] * 8, 1)
            compute(critic, fake, way).backward()
            of_critic.step()
            of_critic.zero_grad()
            compute(critic, torch.cat([generator(noise)] * 8, 1), "whole").backward()
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()

    return told_by(session, steps)


@pytest.mark.parametrize("kind", ["asp", pytest.param("ssp", marks=pytest.mark.check)])
def test_optimizers_have_the_weight_of_the_gradients_that_they_step(pool: WorkerPool, kind: str) -> None:
    for told, consumed in run_at(pool, kind, several_optimizers, "", world=1):
        assert told == [(4.0, 4.0), (4.0, 4.0), (8.0, 0.0)] * 2
        assert consumed == 16.0


@pytest.mark.parametrize("kind", ["asp", pytest.param("ssp", marks=pytest.mark.check)])
def test_of_several_models_each_backward_counts_once(pool: WorkerPool, kind: str) -> None:
    for told, consumed in run_at(pool, kind, critic_and_generator, "whole", world=1):
        # The critic's batch of 4 and of 2; then 2 at both models.
        assert told == [(6.0, 6.0), (2.0, 4.0)] * 2
        assert consumed == 20.0


def parts_of_a_batch(session: atoll.Session, way: str) -> tuple[list[tuple[float, float]], float]:
    """Several backwards of one batch of the session's sampler, of 4 samples of 6 tokens: by windows of
    tokens, by samples with the tokens first, or of two losses."""
    net, optimizer = made()
    session.prepare(net, optimizer)
    made_by = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8, 6, 32, dtype=torch.float64, generator=made_by))
    loader = DataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=False))

    def steps() -> None:
        for (x,) in loader:
            parts = {
                "windows": x.split(2, 1),
                "tokens first": x.transpose(0, 1).split(2, 1),
                "rows": x.reshape(-1, 32).split(8),
                "two losses": (x, x + 1),
            }[way]
            for part in parts:
                if way != "two losses":
                    session.weight({"tokens first": 12}.get(way, 8))
                compute(net, part, "whole").backward()
            optimizer.step()
            optimizer.zero_grad()

    return told_by(session, steps)


@pytest.mark.parametrize("kind", AT_THE_STEP)
@pytest.mark.parametrize("way", ["windows", "tokens first", "rows", "two losses"])
def test_each_weight_that_the_script_gives_counts(pool: WorkerPool, kind: str, way: str) -> None:
    """The sampler's samples count once, with the first backward."""
    for told, consumed in run_at(pool, kind, parts_of_a_batch, way, world=1):
        assert told == [(4.0 if way == "two losses" else 24.0, 4.0)] * 2
        assert consumed == 8.0


def dropped_by_hand(session: atoll.Session, way: str) -> tuple[list[tuple[float, float]], float]:
    net, optimizer = made()
    session.prepare(net, optimizer)

    def steps() -> None:
        for step in range(2):
            for part in (0, 1):
                x = batch(session.rank, step, part, uneven=True)
                session.weight(len(x))
                compute(net, x, "parts").backward()
                if part == 0:
                    for p in net.parameters():
                        if way == "None":
                            p.grad = None
                        elif p.grad is not None:
                            p.grad.zero_()
            optimizer.step()
            optimizer.zero_grad()

    return told_by(session, steps)


@pytest.mark.parametrize("kind", AT_THE_STEP)
@pytest.mark.parametrize("way", ["None", "zeros"])
def test_gradients_that_a_script_drops_by_hand_weigh_nothing(pool: WorkerPool, kind: str, way: str) -> None:
    for told, _ in run_at(pool, kind, dropped_by_hand, way, world=1):
        assert told == [(float(SAMPLES[1]), float(SAMPLES[0] + SAMPLES[1]))] * 2


def in_pieces(session: atoll.Session, then: str) -> tuple[list[tuple[float, float]], float]:
    """Two batches before a step, each in pieces of at most 3 samples."""
    net, optimizer = made()
    session.prepare(net, optimizer)

    def steps() -> None:
        for step in range(3):
            for part in (0, 1):
                for number, piece in enumerate(session.pieces(batch(session.rank, step, part, uneven=True))):
                    with piece as x:
                        if (then, part, number) == ("zeroed", 1, 0):
                            optimizer.zero_grad()
                        compute(net, x, "whole").backward()
            optimizer.step()
            optimizer.zero_grad()

    return told_by(session, steps)


@pytest.mark.parametrize("kind", AT_THE_STEP)
@pytest.mark.parametrize("then", ["added", "zeroed"])
@pytest.mark.parametrize("cap", ["3", "auto"])
def test_batches_in_pieces_add_up(pool: WorkerPool, kind: str, then: str, cap: str) -> None:
    total = float(SAMPLES[0] + SAMPLES[1])
    for told, _ in run_at(pool, kind, in_pieces, then, world=1, sync={"memory_cap": cap}):
        assert told == [(total if then == "added" else float(SAMPLES[1]), total)] * 3


def a_batch_of_weight_0(session: atoll.Session, first: float) -> str:
    net, optimizer = made()
    session.prepare(net, optimizer)
    for part, weight in enumerate((first, 0.0)):
        session.weight(weight)
        loss = compute(net, batch(session.rank, 0, part, uneven=False), "whole")
        try:
            loss.backward()
        except UserError as error:
            return str(error)
    optimizer.step()
    return ""


@pytest.mark.parametrize("kind", ["asp", "peers stale", pytest.param("ssp", marks=pytest.mark.check)])
def test_a_batch_of_weight_0_is_refused_among_gradients_that_count(pool: WorkerPool, kind: str) -> None:
    (line,) = run_at(pool, kind, a_batch_of_weight_0, 4.0, world=1)
    assert line.startswith("the gradients of a batch of weight 0 were added to those of an earlier backward")
    assert run_at(pool, kind, a_batch_of_weight_0, 0.0, world=1) == [""]


def an_empty_slice(session: atoll.Session, _: str) -> tuple[list[tuple[float, float]], float]:
    """Batches of 4 samples in slices of 3: of the last one, which has 2, the second slice is empty."""
    net, optimizer = made()
    session.prepare(net, optimizer)
    data = TensorDataset(torch.randn(6, 32, dtype=torch.float64))
    loader = DataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=False))

    def steps() -> None:
        for (x,) in loader:
            for part in (x[:3], x[3:]):
                compute(net, part, "whole").backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.isfinite(p).all() for p in net.parameters())

    return told_by(session, steps)


@pytest.mark.parametrize("kind", AT_THE_STEP)
def test_an_empty_slice_of_a_batch_adds_nothing(pool: WorkerPool, kind: str) -> None:
    for told, consumed in run_at(pool, kind, an_empty_slice, "", world=1):
        assert [samples for _, samples in told] == [4.0, 2.0]
        assert told[1] == (2.0, 2.0)
        assert consumed == 6.0


def a_fill(session: atoll.Session, _: str) -> tuple[list[tuple[float, float]], float]:
    """Batches of 8 samples, two to a step. The last one has 1 sample: one of two nodes trains on a fill. Each
    sample's gradient is 1."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    session.prepare(net, optimizer)
    data = TensorDataset(torch.ones(9, 1, dtype=torch.float64))
    loader = DataLoader(data, batch_sampler=session.batches(data, shuffle=False))

    def steps() -> None:
        for number, (x,) in enumerate(loader):
            net(x).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    told, consumed = told_by(session, steps)
    assert consumed == 9.0
    return told, net.weight.item()


@pytest.mark.parametrize("kind", ["peers", "peers stale", "peers tiers"])
def test_a_fill_adds_nothing_to_the_batches_before_it(pool: WorkerPool, kind: str) -> None:
    found = run_at(pool, kind, a_fill, "", world=2, sync={"global_batch": 8})
    assert sorted(told for told, _ in found) == [[(4.0, 4.0)], [(5.0, 5.0)]]
    for _, weight in found:
        assert weight == pytest.approx(-(5 * 5 + 4 * 4) / 9)
