"""Sparse gradients go to the shards without their zeros: the bits of the dense run, in a fraction of its
bytes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.exchange.feedback import Feedback, Written
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.runs import run_at, train_at
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check  # sessions of two workers

TALL, WIDE, STEPS, ROWS = 4_000, 16, 4, 8
DENSE = TALL * WIDE * 4  # bytes of one table


class Twice(torch.autograd.Function):
    """Looks rows up, and leaves a sparse gradient in which a row may come several times."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return 2 * table[ids]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(ids[None], 2 * gradient, ctx.shape, check_invariants=False), None


class Tables(nn.Module):
    """Large tables with sparse gradients of every origin, and a dense layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TALL, WIDE, sparse=True)
        self.bags = nn.EmbeddingBag(TALL, WIDE, mode="mean", sparse=True)
        self.looked_up = nn.Parameter(torch.randn(TALL, WIDE))
        self.own = nn.Parameter(torch.randn(TALL, WIDE))
        self.head = nn.Linear(WIDE, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids) + self.bags(ids[:, None])
        found = found + nn.functional.embedding(ids, self.looked_up, sparse=True) + Twice.apply(self.own, ids)
        return self.head(found.tanh())


TABLES = 4


def batch(step: int, rank: int) -> Tensor:
    ids = torch.randint(TALL, (ROWS,), generator=torch.Generator().manual_seed(10 * step + rank))
    ids[0] = 7  # a row that all workers have
    return ids


def train(session: atoll.Session, dense: bool, in_turn: bool = False) -> tuple[list[Tensor], list[int]]:
    """The values after some steps, and the bytes of each step's pushes by this worker. `dense`: payloads go
    with their zeros. `in_turn`: one worker after the other, since the order counts."""
    net, sent, write = Tables(), [0], Feedback.write

    def counting(*arguments: Any, **options: Any) -> Written:
        written = write(*arguments, **options)
        sent[-1] += written.payload.nbytes
        return written

    with ExitStack() as stack:
        stack.enter_context(patch.object(Feedback, "write", counting))
        if dense:
            stack.enter_context(patch("atoll.exchange.feedback.without_zeros", lambda _: None))
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
        session.prepare(net, optimizer)
        for step in range(STEPS):
            for rank in range(session.world) if in_turn else (session.rank,):
                if rank == session.rank:
                    net(batch(step, rank)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    sent.append(0)
                if in_turn:
                    session.barrier()
        session.barrier()
    return [p.detach().clone() for p in net.parameters()], sent[:-1]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("server", "float32"),
        ("server", "bfloat16"),
        ("ps-hra", "float32"),
        ("asp", "float32"),
        ("asp", "bfloat16"),
        ("ssp", "float32"),
        ("ps-hra asp", "float32"),
    ],
)
def test_the_bits_of_the_dense_run_in_a_fraction_of_its_bytes(
    pool: WorkerPool, kind: str, codec: str
) -> None:
    in_turn, sync = kind == "asp", {"codec": codec, **({"slack": 1} if kind == "ssp" else {})}
    world = 1 if kind in ("ssp", "ps-hra asp") else 2
    right = run_at(pool, kind, train, True, in_turn, world=world, sync=sync)
    found = run_at(pool, kind, train, False, in_turn, world=world, sync=sync)
    for (values, _), (others, _) in zip(found, right, strict=True):
        assert all(map(torch.equal, values, others))
    of_dense = [sum(sent) for sent in zip(*(each for _, each in right), strict=True)]
    of_sparse = [sum(sent) for sent in zip(*(each for _, each in found), strict=True)]
    least = TABLES * DENSE // (2 if codec == "bfloat16" else 1)
    assert all(least <= sent for sent in of_dense), of_dense
    assert all(sent < least / 10 for sent in of_sparse), of_sparse


def test_a_site_s_shard_sends_them_on_without_their_zeros(pool: WorkerPool) -> None:
    found: dict[bool, list[list[Tensor]]] = {}
    for dense in (True, False):
        sent, write = [], Feedback.write

        def counting(*arguments: Any, sent: list[int] = sent, write: Any = write, **options: Any) -> Written:
            written: Written = write(*arguments, **options)
            sent.append(written.payload.nbytes)
            return written

        with ExitStack() as stack:
            stack.enter_context(
                patch.object(Feedback, "write", counting)
            )  # the sites' shards are threads here
            if dense:
                stack.enter_context(patch("atoll.exchange.feedback.without_zeros", lambda _: None))
            served = stack.enter_context(ServedRun(2, sites={"paris": 1, "berlin": 1}))
            found[dense] = [values for values, _ in pool.run(at_a_site, served.address, dense, world=2)]
        assert not served.failures
        least = 2 * STEPS * TABLES * DENSE
        assert sum(sent) >= least if dense else sum(sent) < least / 10
    for values, others in zip(found[False], found[True], strict=True):
        assert all(map(torch.equal, values, others))


def at_a_site(place: Place, address: str, dense: bool) -> tuple[list[Tensor], list[int]]:
    config = Config(run=Run(strategy="server"), sync=Sync(timeout="60s"))
    with served_worker(address, place.rank, site=("paris", "berlin")[place.rank]):
        return train_at(config, None, train, (dense,))  # type: ignore[no-any-return]


def looked_at(session: atoll.Session) -> int:
    """The number of payloads of a dense model in which zeros were looked for."""
    found = []
    net = nn.Sequential(nn.Embedding(TALL, WIDE), nn.Linear(WIDE, 3))
    with patch("atoll.exchange.feedback.without_zeros", found.append):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.prepare(net, optimizer)
        for step in range(2):
            net(batch(step, session.rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return len(found)


@pytest.mark.parametrize("kind", ["server", "asp", "ps-hra"])
def test_a_dense_model_is_not_looked_through(pool: WorkerPool, kind: str) -> None:
    assert run_at(pool, kind, looked_at, world=2) == [0, 0]
