"""How much each worker's gradients count in the mean: by samples where every worker's number of them is
certain, alike where it is not. One line says so where the two differ.

Each form calls a model in a way of its own; which part of the mean each worker has is found by solving for
it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore

import atoll
from atoll.core.config import Config, Groups, Memory, Run, Sync
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

SIZES = (3, 9)  # what differs between the two workers
BATCH = 4  # what does not


class Net(nn.Module):
    """Calls its layers in whatever way a form wants."""

    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__()
        deep = [layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.Tanh())]
        self.hidden, self.head = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), *deep), nn.Linear(24, 4)
        self.run = run

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.run(self, *args, **kwargs)


@dataclass(frozen=True)
class Form:
    """`loss(model, size, numbers)` is a worker's, with a model that runs `run`; `shares` are what the two
    workers count in the mean, and `told` whether a line says so. `samples` is what a script would say."""

    run: Callable[..., object]
    loss: Callable[[Net, int, Callable[..., Tensor]], Tensor]
    shares: tuple[float, float] = (0.5, 0.5)
    told: bool = True
    samples: Callable[[int], int] = lambda _size: BATCH


def of_steps(model: Net, x: Tensor) -> Tensor:
    """(L, N, 8) to (N, 4)."""
    result: Tensor = model.head(model.hidden(x).mean(0))
    return result


def loss_of(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return output.square().mean()


def through(model: Net, *args: object, **kwargs: object) -> Tensor:
    return loss_of(model(*args, **kwargs))


def by_submodule(model: Net, size: int, numbers: Callable[..., Tensor]) -> Tensor:
    """Worker 0 calls the model, and worker 1 a part of it."""
    x = numbers(size, 2, 8)
    return through(model, x) if size == SIZES[0] else loss_of(of_rows(model, x))


def of_rows(model: Net, x: Tensor) -> Tensor:
    """(N, L, 8) to (N, 4)."""
    return of_steps(model, x.transpose(0, 1))


FORMS = {
    "by its first dimension": Form(
        of_rows, lambda m, n, make: through(m, make(n, 2, 8)), (0.25, 0.75), told=False, samples=lambda n: n
    ),
    "sequence first": Form(of_steps, lambda m, n, make: through(m, make(n, BATCH, 8))),
    "sequence first to the end": Form(
        lambda m, x: m.head(m.hidden(x)), lambda m, n, make: through(m, make(n, BATCH, 8))
    ),
    "a list": Form(
        lambda m, steps: of_steps(m, torch.stack(steps, 1)),
        lambda m, n, make: through(m, [make(n, 8) for _ in range(BATCH)]),
    ),
    "a scalar first": Form(
        lambda m, scale, x: of_rows(m, x) * scale,
        lambda m, n, make: through(m, torch.tensor(2.0), make(n, 2, 8)),
        (0.25, 0.75),
        told=False,
        samples=lambda n: n,
    ),
    "one number first": Form(
        lambda m, scale, x: of_rows(m, x) * scale,
        lambda m, n, make: through(m, torch.full((1,), 2.0), make(n, 2, 8)),
        told=False,  # both workers have counted 1
        samples=lambda n: n,
    ),
    "keywords": Form(
        lambda m, mask, x: of_rows(m, x) * mask.mean(),
        lambda m, n, make: through(m, mask=torch.ones(n, n), x=make(BATCH, n, 8)),
    ),
    "a loss": Form(
        lambda m, x: of_rows(m, x).square().mean(), lambda m, n, make: m(make(n, 2, 8)), samples=lambda n: n
    ),
    "a part of the model": Form(of_rows, by_submodule, samples=lambda n: n),
    "equal sizes": Form(
        lambda m, x: m.head(m.hidden(x)), lambda m, n, make: through(m, make(5, BATCH, 8)), told=False
    ),
}


def numbers_of(rank: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.double)


def shares_in(model: nn.Module, form: Form, mean: Tensor) -> list[float]:
    """Which part of `mean`, of all parameters' gradients, each worker's gradient is."""
    each = []
    for rank, size in enumerate(SIZES):
        plain = Net(form.run).double()
        plain.load_state_dict(model.state_dict())
        form.loss(plain, size, numbers_of(rank)).backward()
        each.append(torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]))
    found = torch.linalg.lstsq(torch.stack(each, 1), mean[:, None])
    assert torch.dist(torch.stack(each, 1) @ found.solution, mean[:, None]) < 1e-9
    return [float(share) for share in found.solution]


def train(place: Place, names: list[str], config: Config) -> list[tuple[list[list[float]], list[str]]]:
    """For each form, the shares in three iterations, in the last of which the scripts say their samples; and
    what people were told."""
    seen = []
    for number, name in enumerate(names):
        form = FORMS[name]
        apart = replace(place, store=PrefixStore(f"{number}/", place.store))
        with atoll.join(config, place=apart) as session:
            lines: list[str] = []
            session._records.warn = lines.append  # type: ignore[method-assign]
            torch.manual_seed(0)
            model = Net(form.run).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            session.prepare(model, optimizer)
            assert all(tiers.shared is not None for tiers in session._state.tiers)
            assert bool(session._state.tiers) == bool(config.memory.device)
            size, found = SIZES[place.rank], []
            for iteration in range(3):
                if iteration == 2:
                    session.weight(form.samples(size))
                form.loss(model, size, numbers_of(place.rank)).backward()
                mean = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
                found.append(shares_in(model, form, mean))
                optimizer.step()
                optimizer.zero_grad()
            seen.append((found, lines))
    return seen


def check(seen: list[tuple[list[list[float]], list[str]]], names: list[str], *, first: bool) -> None:
    for name, (found, lines) in zip(names, seen, strict=True):
        form = FORMS[name]
        samples = [form.samples(size) for size in SIZES]
        by_samples = [each / sum(samples) for each in samples]
        for shares, right in zip(found, [form.shares, form.shares, by_samples], strict=True):
            assert shares == pytest.approx(right, abs=1e-9), name
        told = [line for line in lines if "count alike" in line]
        assert len(told) == (form.told and first), (name, lines)
        for line in told:
            assert line.startswith("iteration 0: not every worker's number of samples is certain")
            assert "worker 0 counted" in line
            assert "worker 1 counted" in line
            assert "session.weight(len(batch))" in line


TIERS = Memory(device="12KiB", chunk="1KiB", step="host")


@pytest.mark.check
@pytest.mark.parametrize("memory", [Memory(), TIERS], ids=["whole", "tiers"])
@pytest.mark.parametrize("strategy", ["ring", "hierarchical"])
def test_a_ring_weighs_by_samples_where_they_are_certain(
    pool: WorkerPool, strategy: str, memory: Memory
) -> None:
    names = list(FORMS)
    config = Config(
        run=Run(strategy=strategy),
        sync=Sync(timeout="60s"),
        memory=memory,
        groups=Groups(count=2 * (strategy != "ring")),
    )
    for rank, seen in enumerate(pool.run(train, names, config, world=2, deadline=60)):
        check(seen, names, first=rank == 0)


def train_by_sampler(place: Place) -> list[list[float]]:
    """Sequences first, of a length of its own on each worker, in batches of unequal sizes that the session's
    sampler gave: 3 and 2 of each 5. The parts of the mean, and what is counted for the records."""
    config = Config(sync=Sync(timeout="60s", global_batch=5))
    with atoll.join(config, place=place) as session:
        torch.manual_seed(0)
        model = Net(of_steps).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.prepare(model, optimizer)
        batches, found = session.batches(range(10)), []
        for indices in batches:
            assert len(indices) == (3, 2)[place.rank]
            length = SIZES[place.rank]
            through(model, numbers_of(place.rank)(length, len(indices), 8)).backward()
            each = []
            for rank in range(2):
                plain = copy_of(model)
                through(plain, numbers_of(rank)(SIZES[rank], (3, 2)[rank], 8)).backward()
                each.append(gradient_of(plain))
            parts = torch.linalg.lstsq(torch.stack(each, 1), gradient_of(model)[:, None]).solution.flatten()
            found.append([*parts.tolist(), session._state.prepared[0].sets[0].own_samples])
            optimizer.step()
            optimizer.zero_grad()
        assert batches.state_dict([batches.place()] * 2)["epoch"] == 0
        return found


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_sampler_s_number_is_known_where_the_output_has_it(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(train_by_sampler, world=2, deadline=60)):
        for seen in found:
            assert seen == pytest.approx([0.6, 0.4, (3, 2)[rank]], abs=1e-9)


def train_together(place: Place, config: Config, address: str) -> tuple[list[list[float]], list[str]]:
    """All forms in one session, by what the optimizer's steps change: each form's shares in two iterations;
    what people were told."""
    with (
        served_worker(address, place.rank) if address else nullcontext(),
        atoll.join(config, place=None if address else place) as session,
    ):
        lines: list[str] = []
        session._records.warn = lines.append  # type: ignore[method-assign]
        torch.manual_seed(0)
        model, found = Net(of_rows).double(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        size = SIZES[session.rank]
        for form in FORMS.values():
            model.run = form.run
            for _ in range(2):
                session.barrier()
                before = values_of(model)
                old = copy_of(model)
                session.gather(0)  # nobody goes on before all have these parameters
                form.loss(model, size, numbers_of(session.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if config.run.strategy == "peers":  # the steps are applied before the next forward
                    session._state.prepared[0].reducer.settle()
                session.barrier()
                found.append(shares_in(old, form, before - values_of(model)))
        return found, lines


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().clone().flatten() for parameter in model.parameters()])


def copy_of(model: Net) -> Net:
    copied = Net(model.run).double()
    copied.load_state_dict(model.state_dict())
    return copied


def check_together(seen: tuple[list[list[float]], list[str]], *, first: bool) -> None:
    found, lines = seen
    for index, (name, form) in enumerate(FORMS.items()):
        for shares in found[2 * index : 2 * index + 2]:
            assert shares == pytest.approx(form.shares, abs=1e-6), name
    told = [line for line in lines if "count alike" in line]
    assert len(told) == first, lines
    assert not told or "(a guess)" in told[0]


@pytest.mark.check
@pytest.mark.parametrize(
    ("consistency", "device"),
    [
        ("bsp", ""),
        ("asp", "12KiB"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("bsp", "12KiB"), ("asp", ""), ("ssp", ""))
        ),
    ],
)
def test_shards_weigh_by_samples_where_they_are_certain(
    pool: WorkerPool, consistency: str, device: str
) -> None:
    config = Config(
        run=Run(strategy="server"),
        sync=Sync(timeout="60s", consistency=consistency),
        memory=Memory(device=device, chunk="1KiB") if device else Memory(),
    )
    with ServedRun(2, 2) as served:
        seen = pool.run(train_together, config, served.address, world=2, deadline=60)
    for rank, each in enumerate(seen):
        check_together(each, first=rank == 0)


def test_nodes_weigh_by_samples_where_they_are_certain(pool: WorkerPool) -> None:
    config = Config(run=Run(strategy="peers"), sync=Sync(timeout="60s", stale_max=0))
    for rank, each in enumerate(pool.run(train_together, config, "", world=2, deadline=60)):
        check_together(each, first=rank == 0)
