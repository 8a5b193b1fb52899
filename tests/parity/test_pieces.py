"""Batches that do not fit into a worker's memory are computed in pieces, and train as one process does.

A model raises torch's own error if it gets more samples than a worker's memory holds: in its forward, or in
the backward of a layer, when gradients of later layers have left for the other workers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.errors import UserError
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from atoll.train.data.order import SampleOrder
from support.fetching import fetched
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

LENGTH, BATCH, EPOCHS = 124, 24, 2  # the last batch of an epoch has 4 samples
WIDTH, DEPTH = 24, 6
Result = tuple[list[np.ndarray[Any, Any]], list[int], list[int], list[int], list[str]]


class Limited(torch.autograd.Function):
    """The identity, which has no memory for the gradient of more than `most` samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int, sent: Any) -> Tensor:
        ctx.most, ctx.sent = most, sent
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if len(gradients[0]) > ctx.most:
            ctx.sent()
            raise torch.OutOfMemoryError("CUDA out of memory: a test says so")
        return gradients[0], None, None


class Net(nn.Module):
    """A chain of layers, with statistics of its inputs in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7 if i == 0 else WIDTH, WIDTH) for i in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.forward_limit = self.backward_limit = 10**9
        self.sent: Any = lambda: None
        self.tried: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.tried.append(len(x))
        self.seen += len(x)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == DEPTH // 2:
                if len(x) > self.forward_limit:
                    raise torch.OutOfMemoryError("CUDA out of memory: a test says so")
                x = Limited.apply(x, self.backward_limit, self.sent)
        out: Tensor = self.head(x)
        return out


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().double()
    return net, torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 7, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(5, (LENGTH,), generator=generator))


def values(model: nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def plain(collected: int = 1) -> list[np.ndarray[Any, Any]]:
    """In one process, without Atoll: the parameters after each step, on the sum of the means of `collected`
    batches. If these are several, an epoch's short batch is left out."""
    inputs, targets = dataset().tensors
    net, optimizer = make()
    trajectory, waiting = [], list[Tensor]()
    for epoch in range(EPOCHS):
        for batch in SampleOrder(LENGTH, 4, True).of(epoch).split(BATCH):
            if collected == 1 or len(batch) == BATCH:
                waiting.append(batch)
            if len(waiting) < collected:
                continue
            optimizer.zero_grad()
            for part in waiting:
                nn.functional.cross_entropy(net(inputs[part]), targets[part]).backward()
            waiting.clear()
            optimizer.step()
            trajectory.append(values(net))
    return trajectory


def config(
    strategy: str = "ring", shares: Any = "even", cap: Any = "auto", consistency: Any = "bsp"
) -> Config:
    of_peers: dict[str, Any] = {"stale_max": 0} if strategy == "peers" else {}
    return Config(
        run=Run(strategy=strategy),
        chunks=Chunks(size="2KiB"),
        groups=Groups(count=0 if strategy in ("ring", "server", "peers") else 2),
        sync=Sync(
            timeout="120s",
            global_batch=BATCH,
            shares=shares,
            memory_cap=cap,
            consistency=consistency,
            **of_peers,
        ),
    )


def train(
    place: Place,
    how: Config,
    limits: dict[int, tuple[int, int]],
    address: str = "",
    collected: int = 1,
    zeroes: str = "before",
    fetches: int = 0,
    weighs: str = "",
) -> Result:
    """Return the parameters after each step, the samples of each batch, the sizes that the model was tried
    with, how many messages had left at each error in a backward, and the lines that were printed.

    `limits`: the most samples in a worker's forward and backward, by rank.
    """
    data, trajectory, sizes, left = dataset(), list[np.ndarray[Any, Any]](), list[int](), list[int]()
    lines: list[str] = []
    joins: Any = {"place": place}
    with contextlib.ExitStack() as stack:
        if address:
            stack.enter_context(served_worker(address, place.rank))
            joins = {}
        session = stack.enter_context(atoll.join(how, **joins))
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(session._records, "warn", lines.append)
        net, optimizer = make()
        net.forward_limit, net.backward_limit = limits.get(place.rank, (10**9, 10**9))
        session.prepare(net, optimizer)
        net.sent = lambda: left.append(_left(session))
        sampler = session.batches(data, seed=4, drop_last=collected > 1)
        loader, made = DataLoader(data, batch_sampler=sampler), 0
        for _ in range(EPOCHS):
            for batch in fetched(loader, fetches):
                made += 1
                ends = made % collected == 0
                if zeroes == "before" and made % collected == 1 % collected:
                    optimizer.zero_grad()
                if weighs == "outside":
                    session.weight(2.0 * len(batch[0]))
                with contextlib.nullcontext() if ends else session.no_sync():
                    for piece in session.pieces(batch):
                        with piece as (x, y):
                            if zeroes == "inside":
                                optimizer.zero_grad()
                            if weighs == "inside":
                                session.weight(2.0 * len(x))
                            out = net(x)
                            loss = nn.functional.cross_entropy(out, y)
                            loss.backward()
                sizes.append(len(batch[0]))
                if ends:
                    optimizer.step()
                    trajectory.append(values(net))
        assert session.world > 1 or float(net.seen) == sum(sizes)
        if how.sync.consistency == "bsp" and how.run.strategy != "peers":
            dealt: Any = sampler.place()  # type: ignore[union-attr]
            assert dealt["used"] == dealt["given"] == dealt["committed"]
    return trajectory, sizes, net.tried, left, lines


def _left(session: atoll.Session) -> int:
    """The messages that have left in the backward under way."""
    gradients: Any = session._state.prepared[0].reducer.sum.gradients
    left: int = getattr(gradients, "_left", 0)
    return left


def compare(results: list[Result], collected: int = 1) -> None:
    expected = plain(collected)
    for trajectory, *_ in results:
        assert len(trajectory) == len(expected)
        for after, wanted in zip(trajectory, expected, strict=True):
            np.testing.assert_allclose(after, wanted, rtol=0, atol=1e-12)


def check_dealt(results: list[Result]) -> list[tuple[int, ...]]:
    """See that each sample was in one batch of one worker; return the sizes at each step."""
    steps = list(zip(*(sizes for _, sizes, *_ in results), strict=True))
    of_epoch = len(steps) // EPOCHS
    for number, step in enumerate(steps):
        is_short = number % of_epoch == of_epoch - 1
        fills = sum(size == 1 for size in step) if is_short else 0
        assert sum(step) - fills <= (LENGTH % BATCH if is_short else BATCH) <= sum(step)
    return steps


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("strategy", "world", "shares"), [("ring", 3, "even"), ("hierarchical", 4, "auto")])
def test_a_batch_that_does_not_fit_is_computed_again_in_pieces(
    pool: WorkerPool, strategy: str, world: int, shares: str, where: str
) -> None:
    limit = 3
    limits = {1: (limit, 10**9) if where == "forward" else (10**9, limit)}
    results = pool.run(train, config(strategy, shares), limits, world=world)
    compare(results)
    steps = check_dealt(results)
    whole = BATCH // world
    assert steps[0] == (whole,) * world
    _, sizes, tried, left, lines = results[1]
    cap = {8: 2, 6: 3}[whole]
    # The batch in pieces of half its size, and of a quarter of it if these do not fit: then at most as many.
    halves = [whole, *([whole // 2] if whole == 8 else []), *[cap] * (whole // cap)]
    assert tried[: len(halves)] == halves
    assert max(tried[len(halves) :]) <= cap
    assert max(sizes[3:]) <= cap
    assert len(lines) == len(halves) - whole // cap
    assert all(line.startswith("worker 1 ran out of memory for ") for line in lines)
    assert f"it gets at most {cap} from now on" in lines[-1]
    for worker, (_, sizes, tried, _, said) in enumerate(results):
        if worker != 1:
            assert tried == sizes
            assert not said
    if where == "backward" and strategy == "ring":
        assert left
        assert left[0] > 0  # gradients of later layers were on their way


@pytest.mark.parametrize(("strategy", "world", "shards"), [("server", 3, 2), ("ps-hra", 4, 1)])
def test_at_shards_too(pool: WorkerPool, strategy: str, world: int, shards: int) -> None:
    grouping = GroupingSettings(count=2) if strategy == "ps-hra" else None
    limits = {0: (10**9, 5), 1: (3, 10**9)}
    with ServedRun(world, shards, grouping=grouping) as served:
        results = pool.run(train, config(strategy), limits, served.address, world=world)
    assert not served.failures
    compare(results)
    steps = check_dealt(results)
    assert all(step[0] <= 5 and step[1] <= 3 for step in steps[4:])


@pytest.mark.parametrize("consistency", ["ssp", "asp"])
def test_where_workers_are_not_in_step_too(pool: WorkerPool, consistency: str) -> None:
    """One worker: it alone has a trajectory that does not depend on who was faster."""
    with ServedRun(1, 2) as served:
        results = pool.run(
            train, config("server", consistency=consistency), {0: (7, 5)}, served.address, world=1
        )
    assert not served.failures
    compare(results)


def test_at_nodes_too(pool: WorkerPool) -> None:
    results = pool.run(train, config("peers"), {0: (10**9, 5), 1: (3, 10**9)}, world=3)
    compare(results)


def test_caps_that_do_not_hold_the_batch_leave_pieces(pool: WorkerPool) -> None:
    limits = {0: (5, 10**9), 1: (10**9, 5)}
    results = pool.run(train, config(), limits, world=2)
    compare(results)
    assert all(max(tried[4:]) <= 5 for _, _, tried, _, _ in results)


def test_a_given_cap_cuts_a_batch_at_once() -> None:
    """Where a batch is larger, here because the worker is alone with all of it."""
    result = train(Place(), config(cap=5), {0: (5, 5)})
    compare([result])
    assert result[2][:5] == [4, 5, 5, 5, 5]
    assert not result[4]


def test_batches_that_loaders_had_fetched_before_are_cut(pool: WorkerPool) -> None:
    results = pool.run(train, config(), {2: (3, 10**9)}, "", 1, "before", 2, world=3)
    compare(results)
    check_dealt(results)
    _, sizes, tried, _, lines = results[2]
    assert sizes[:4] == [8] * 4  # dealt before the cap was known
    assert tried[:2] == [8, 4]
    assert max(tried[2:]) <= 2
    assert len(lines) == 2


@pytest.mark.parametrize("zeroes", ["before", "inside"])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_are_there_already_stay(pool: WorkerPool, world: int, zeroes: str) -> None:
    """Those of earlier batches under accumulation. A script that zeroes them inside a piece means those from
    before the batch."""
    collected = 2 if zeroes == "before" else 1
    limits = {0: (10**9, 5)}
    if world == 1:
        results = [train(Place(), config(), limits, "", collected, zeroes)]
    else:
        results = pool.run(train, config(), limits, "", collected, zeroes, world=world)
    compare(results, collected)


@pytest.mark.parametrize("weighs", ["outside", "inside"])
def test_pieces_have_the_weights_that_the_script_gives_them_or_else_those_of_their_samples(
    weighs: str,
) -> None:
    compare([train(Place(), config(), {0: (10**9, 7)}, "", 1, "before", 0, weighs)])


def refused(place: Place, inside: str) -> None:
    with atoll.join(config(), place=place) as session:
        net, optimizer = make()
        session.prepare(net, optimizer)
        for piece in session.pieces(torch.zeros(4, 7, dtype=torch.float64)):
            if inside == "no with":
                continue
            with piece as x:
                net(x).sum().backward()
                if inside == "a step":
                    optimizer.step()
                if inside == "pieces":
                    list(session.pieces(x))
                if inside == "after":  # once the gradients are with the others
                    raise torch.OutOfMemoryError("CUDA out of memory, says the test")


@pytest.mark.parametrize(
    ("inside", "error", "words"),
    [
        ("no with", UserError, "not used in a with statement"),
        ("a step", UserError, "SGD.step.. was called inside a piece of session.pieces"),
        ("pieces", UserError, "called inside a piece"),
        ("after", torch.OutOfMemoryError, "says the test"),
    ],
)
def test_what_cannot_be_a_piece_is_an_error(
    pool: WorkerPool, inside: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(JobFailedError, match=words):
        pool.run(refused, inside, world=2)
