"""Sparse gradients: each step of every strategy that takes them against plain PyTorch on the joint batch."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn

import atoll
from atoll.core.errors import AtollError
from support.pool import WorkerPool
from support.runs import IN_TIERS, KINDS, alone, run_at

WORLD, STEPS = 2, 5
RINGS = ("ring", "hierarchical", "elastic")
SERVED = ("server", "ps-hra", "peers")
TIERS = tuple(sorted(IN_TIERS))
QUICK = ("ring", "server", "tiers")


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
    """Sparse gradients of every origin, and dense ones beside them."""

    def __init__(self, layers: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.padded = nn.Embedding(40, 6, padding_idx=0, sparse=layers)
        self.bags = nn.EmbeddingBag(40, 6, mode="mean", sparse=layers)
        self.looked_up = nn.Parameter(torch.randn(30, 6))
        self.own = nn.Parameter(torch.randn(20, 6))
        self.seldom = nn.Embedding(20, 6, sparse=layers)
        middle = [layer for _ in range(10) for layer in (nn.Linear(16, 16), nn.Tanh())]
        self.head = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *middle, nn.Linear(16, 1))
        self.double()

    def forward(self, ids: Tensor, step: int) -> Tensor:
        found = self.padded(ids % 40) + self.bags(ids[:, None].expand(-1, 3) % 40)
        found = found + nn.functional.embedding(ids % 30, self.looked_up, sparse=True)
        found = found + Twice.apply(self.own, ids % 20)
        if step % 2:
            found = found + self.seldom(ids % 20)
        # A row whose gradient is all zeros is a row all the same: SparseAdam's moments decay.
        kept = (ids % 3 > 0)[:, None].double()
        return self.head(found * kept).squeeze(1)


def sgd(net: Tables) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1)]


def momentum(net: Tables) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]


def adagrad(net: Tables) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(net.parameters(), lr=0.1)]


def sparse_adam(net: Tables) -> list[torch.optim.Optimizer]:
    dense = list(net.head.parameters())
    sparse = [p for p in net.parameters() if all(p is not each for each in dense)]
    return [torch.optim.SparseAdam(sparse, lr=0.05), torch.optim.Adam(dense, lr=0.05)]


def batch(step: int) -> Tensor:
    ids = torch.randint(1, 10_000, (8,), generator=torch.Generator().manual_seed(step))
    ids[::4] = 0  # padding on one worker alone
    return ids


def train(session: atoll.Session | None, make: Any, clips: bool = False) -> tuple[list[Tensor], list[str]]:
    net = Tables()
    optimizers = make(net)
    if session is not None:
        session.prepare(net, optimizers if len(optimizers) > 1 else optimizers[0])
    kinds = []
    for step in range(STEPS):
        ids = batch(step) if session is None else batch(step)[session.rank :: session.world]
        net(ids, step).square().mean().backward()
        kinds.append(" ".join(_kind(p.grad) for p in net.parameters()))
        if clips and session is not None:
            session.clip_grad_norm_(0.05)
        elif clips:
            _clip(net, 0.05)
        for each in optimizers:
            each.step()
        net.zero_grad()
    if session is not None:
        session.barrier()  # under peers values come with the next use
    return [p.detach().clone() for p in net.parameters()], kinds


def _kind(gradient: Tensor | None) -> str:
    """Return what the script sees of a gradient: the number of its rows, where it is sparse."""
    if gradient is None:
        return "none"
    return f"{gradient.coalesce().indices().shape[1]} rows" if gradient.is_sparse else "dense"


def _clip(net: nn.Module, most: float) -> None:
    """Clip as torch does, whose own function takes no sparse gradients."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    factor = min(1.0, most / (float(torch.stack([v.norm() for v in values]).norm()) + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)


def kinds_of(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in names]


@pytest.mark.parametrize("make", [sgd, momentum, adagrad, sparse_adam])
@pytest.mark.parametrize("kind", kinds_of(RINGS))
def test_each_worker_steps_the_rows_that_any_worker_has(pool: WorkerPool, kind: str, make: Any) -> None:
    right, seen = train(None, make)
    for found, shown in run_at(pool, kind, train, make, world=WORLD):
        check_equal(found, right)
        assert shown == seen


@pytest.mark.parametrize("make", [sgd, momentum, adagrad])
@pytest.mark.parametrize("kind", kinds_of((*SERVED, *TIERS)))
def test_steps_of_the_dense_form_are_the_same(pool: WorkerPool, kind: str, make: Any) -> None:
    right, _ = train(None, make)
    for found, _ in run_at(pool, kind, train, make, world=WORLD):
        check_equal(found, right)


@pytest.mark.parametrize("make", [momentum, adagrad, sparse_adam])
def test_alone_it_is_plain_torch(make: Any) -> None:
    right, seen = train(None, make)
    found, shown = alone(train, make)
    check_equal(found, right)
    assert shown == seen


def train_and_go_on(session: atoll.Session, path: Path) -> list[Tensor]:
    """Two steps, a checkpoint, a step that is lost, and the rest from the checkpoint."""
    net = Tables()
    (optimizer,) = momentum(net)
    session.prepare(net, optimizer)

    def step(number: int) -> None:
        ids = batch(number)[session.rank :: session.world]
        net(ids, number).square().mean().backward()
        optimizer.step()
        net.zero_grad()

    step(0)
    step(1)
    session.save(path)
    step(7)
    session.load(path)
    for number in range(2, STEPS):
        step(number)
    session.barrier()
    return [p.detach().clone() for p in net.parameters()]


def test_a_checkpoint_has_sgds_momentum_of_indices_and_values(pool: WorkerPool, tmp_path: Path) -> None:
    right, _ = train(None, momentum)
    check_equal(alone(train_and_go_on, tmp_path / "alone"), right)
    for found in run_at(pool, "ring", train_and_go_on, tmp_path / "ring", world=WORLD):
        check_equal(found, right)


@pytest.mark.parametrize("make", [sgd, momentum, adagrad])
def test_alone_in_tiers_the_dense_form_is_stepped(make: Any) -> None:
    right, _ = train(None, make)
    check_equal(alone(train, make, tiers=True)[0], right)


@pytest.mark.parametrize("kind", kinds_of(("ring", "server", *TIERS)))
def test_clipped_gradients(pool: WorkerPool, kind: str) -> None:
    right, _ = train(None, sgd, clips=True)
    for found, _ in run_at(pool, kind, train, sgd, True, world=WORLD):
        check_equal(found, right)


def accumulate(session: atoll.Session | None, mixed: bool) -> list[Tensor]:
    """Two backwards a step, and a last step for which worker 1 has no batch. `mixed`: one of the two leaves a
    dense gradient, on worker 0."""
    net = Tables()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rank, world = 0, 1
    if session is not None:
        session.prepare(net, optimizer)
        rank, world = session.rank, session.world
    for step in range(3):
        for half in (0, 1) if step < 2 else (0,):
            ids = batch(10 * step + half)[rank::world]
            if step == 2:
                ids = batch(20)[:4]
                if rank == 1:
                    continue
            loss = net(ids, step).square().mean()
            if mixed and rank == 0:
                loss = loss + net.looked_up.square().sum() * (1 if world == 1 else 2)
            if session is not None and half == 0 and step < 2:
                with session.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", kinds_of(("ring", "tiers")))
def test_gradients_that_add_up(pool: WorkerPool, kind: str) -> None:
    right = accumulate(None, False)
    for found in run_at(pool, kind, accumulate, False, world=WORLD):
        check_equal(found, right)


def mixed(session: atoll.Session | None) -> tuple[list[Tensor], list[bool]]:
    """One parameter whose gradient is dense on worker 0 and sparse on worker 1."""
    net, seen = Tables(), []
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    if session is not None:
        session.prepare(net, optimizer)
    for step in range(3):
        parts = [batch(step)[rank::WORLD] for rank in range(WORLD)]
        losses = [net(ids, step).square().mean() for ids in parts]
        losses[0] = losses[0] + net.looked_up.square().sum()
        loss = sum(losses) / WORLD if session is None else losses[session.rank]
        loss.backward()
        assert net.looked_up.grad is not None
        seen.append(net.looked_up.grad.is_sparse)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()], seen


def test_a_gradient_that_is_dense_on_one_worker_is_dense(pool: WorkerPool) -> None:
    right, seen = mixed(None)
    assert not any(seen)
    for found, shown in run_at(pool, "ring", mixed, world=WORLD):
        check_equal(found, right)
        assert shown == seen


class Wide(nn.Module):
    """A table of which most batches have few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TALL, 8, sparse=True)
        self.bias = nn.Parameter(torch.zeros(8))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids) if len(ids) else self.bias.new_zeros(1, 8)
        return (found + self.bias).square().mean()


TALL = 4_000
FEW, MANY, NONE = 6, 6_000, 0  # rows in a batch of both workers
BATCHES = (FEW, FEW, MANY, FEW, FEW, NONE, FEW)
BY_ROWS = (True, True, False, False, True, True, True)  # as many rows are expected as before


def wide(
    session: atoll.Session | None, half: bool = False, tables: int = 1
) -> tuple[list[Tensor], list[int]]:
    """`half`: only worker 0 has a batch. `tables`: the number of models that are trained as one."""
    net = Wide() if tables == 1 else nn.ModuleList(Wide() for _ in range(tables))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    sent, rank, world = [0], 0, 1
    if session is not None:
        session.prepare(net, optimizer)
        rank, world = session.rank, session.world
    for step, rows in enumerate(BATCHES):
        ids = torch.randint(TALL, (rows,), generator=torch.Generator().manual_seed(step))
        weigh = 0.0 if half and rank else 1.0  # worker 1 has no batch
        mine = ids[: rows // 2] if half else ids[rank::world]
        if session is not None:
            session.weight(weigh)
        losses = [each(mine) for each in net.modules() if isinstance(each, Wide)]
        loss = torch.stack(losses).sum()
        (loss if weigh else loss * math.nan).backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            sent.append(session._state.prepared[0].reducer.bytes_sent)
    return [p.detach().clone() for p in net.parameters()], [b - a for a, b in itertools.pairwise(sent)]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", kinds_of(RINGS))
def test_few_rows_are_summed_alone(pool: WorkerPool, kind: str, half: bool) -> None:
    """Whatever rows a batch has, also none and nearly all."""
    right, _ = wide(None, half)
    for found, sent in run_at(pool, kind, wide, half, world=WORLD):
        check_equal(found, right)
        for step, (size, by_rows) in enumerate(zip(sent, BY_ROWS, strict=True)):
            assert (step, size < TALL * 8 * 8 / 20) == (step, by_rows)


def test_all_messages_wait_for_their_rows(pool: WorkerPool) -> None:
    """Three tables: each is a message, and no order of messages is to be measured."""
    right, _ = wide(None, tables=3)
    for found, sent in run_at(pool, "ring", wide, False, 3, world=WORLD):
        check_equal(found, right)
        assert [size < TALL * 8 * 8 / 20 for size in sent] == list(BY_ROWS)


def saved_by_rows(session: atoll.Session, folder: Path) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Which messages wait after an iteration of many rows, and after its checkpoint is loaded; and the values
    after the same iteration of few rows, from either."""
    net = Wide()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    carrier = session._state.prepared[0].reducer.sum.carrier  # type: ignore[attr-defined]

    def step(rows: int, seed: int) -> None:
        ids = torch.randint(TALL, (rows,), generator=torch.Generator().manual_seed(seed))
        net(ids[session.rank :: session.world]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(MANY, 0)
    session.save(folder)
    dense = list(carrier.by_rows)
    step(FEW, 1)
    first = [p.detach().clone() for p in net.parameters()]
    session.load(folder)
    loaded = list(carrier.by_rows)
    step(FEW, 1)
    return [dense, loaded], [first, [p.detach().clone() for p in net.parameters()]]


def test_a_checkpoint_tells_which_messages_wait(pool: WorkerPool, tmp_path: Path) -> None:
    for waiting, (first, again) in run_at(pool, "ring", saved_by_rows, tmp_path / "c", world=WORLD):
        assert waiting == [[], []]
        assert all(map(torch.equal, first, again))


def other_kind(session: atoll.Session) -> str:
    """Only worker 0's layer announces sparse gradients."""
    net = nn.Embedding(TALL, 8, sparse=session.rank == 0)
    try:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    except AtollError as error:
        return str(error)
    return ""


def test_layers_that_announce_differently_are_refused(pool: WorkerPool) -> None:
    for said in run_at(pool, "ring", other_kind, world=WORLD):
        assert "'weight'" in said
        assert "of sparse gradients" in said


class Turned(nn.Module):
    """A complex table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(TALL, 8, dtype=torch.complex128))

    def forward(self, ids: Tensor) -> Tensor:
        return Twice.apply(self.own, ids).abs().square().mean()


def turned(session: atoll.Session | None) -> list[Tensor]:
    net = Turned()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rank, world = 0, 1
    if session is not None:
        session.prepare(net, optimizer)
        rank, world = session.rank, session.world
    for step in range(3):
        net(batch(step)[rank::world] % TALL).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.view_as_real(p.detach()).clone() for p in net.parameters()]


def test_complex_tables_are_summed_dense(pool: WorkerPool) -> None:
    right = turned(None)
    for found in run_at(pool, "ring", turned, world=WORLD):
        check_equal(found, right)


# -- refusals ------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """Sparse gradients that no layer announces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(200, 8, dtype=torch.float64))
        self.others = nn.ParameterList(nn.Parameter(torch.ones(32, 32).double()) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.w, sparse=True)


class Layer(Lookup):
    """Sparse gradients of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Pairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.shape = w.shape
        return w[0, 0] + w[1, 1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        places = torch.tensor([[0, 1], [0, 1]])
        return torch.sparse_coo_tensor(places, gradient.expand(2), ctx.shape, check_invariants=False)


class Elements(Lookup):
    """Sparse gradients of single elements, not of rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return Pairs.apply(self.w)


def refused(session: atoll.Session, net: type[nn.Module], optimizer: str) -> str:
    model = net()
    if optimizer == "SparseAdam":
        made: torch.optim.Optimizer = torch.optim.SparseAdam(list(model.parameters())[:1], lr=0.1)
    else:
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    try:
        session.prepare(model, made)
        for step in range(2):
            model(torch.tensor([1, 2 + step])).square().sum().backward()
            made.step()
            made.zero_grad()
    except (AtollError, RuntimeError) as error:
        session._leaving.leave()
        return f"{type(error).__name__}: {error}"
    return ""


ADAM = "RuntimeError: Adam does not support sparse gradients, please consider SparseAdam instead"
ROWS = re.compile(
    r"PrepareError: optimizer SparseAdam cannot step the dense sums of sparse gradients \(RuntimeError: "
    r"SparseAdam does not support dense gradients.*\), which strategy '.*' makes; use strategy ring or "
    r"hierarchical, or torch.optim.SGD or Adagrad"
)
ROWS_IN_TIERS = re.compile(
    r"PrepareError: optimizer SparseAdam cannot step the dense form of sparse gradients \(RuntimeError: "
    r"SparseAdam does not support dense gradients.*\), which budgets of memory give it; leave out the "
    r"budgets, or use torch.optim.SGD or Adagrad"
)
GONE = re.compile(
    r".*worker \d (lost touch with another worker, waiting for|cannot have) worker \d's values of "
)
ELEMENTS = (
    "UserError: the gradient of 'w' is sparse in 2 of its dimensions, and workers sum dense gradients and "
    "sparse ones of whole rows; let its function return grad.to_dense()"
)


@pytest.mark.parametrize("net", [Lookup, Layer])
@pytest.mark.parametrize("kind", kinds_of(tuple(KINDS)))
def test_adam_gives_its_own_error(pool: WorkerPool, kind: str, net: type[nn.Module]) -> None:
    assert set(run_at(pool, kind, refused, net, "Adam", world=WORLD)) == {ADAM}


@pytest.mark.parametrize("net", [Lookup, Layer])
@pytest.mark.parametrize("kind", kinds_of((*SERVED, "asp", "server tiers", "peers tiers")))
def test_sparse_adam_is_refused_where_steps_are_made_elsewhere(
    pool: WorkerPool, kind: str, net: type[nn.Module]
) -> None:
    assert all(map(ROWS.match, run_at(pool, kind, refused, net, "SparseAdam", world=WORLD)))


@pytest.mark.parametrize("net", [Lookup, Layer])
def test_sparse_adam_is_refused_in_tiers(pool: WorkerPool, net: type[nn.Module]) -> None:
    assert all(map(ROWS_IN_TIERS.match, run_at(pool, "tiers", refused, net, "SparseAdam", world=WORLD)))
    assert ROWS_IN_TIERS.match(alone(refused, net, "SparseAdam", tiers=True))


@pytest.mark.parametrize("kind", kinds_of(("ring", "server", "peers", *TIERS)))
def test_single_elements_are_refused(pool: WorkerPool, kind: str) -> None:
    said = run_at(pool, kind, refused, Elements, "SGD", world=WORLD)
    assert ELEMENTS in said
    # Whoever still fetches values as the other one has left is told of that.
    assert set(said) == {ELEMENTS} or (kind == "tiers" and any(map(GONE.match, said)))
