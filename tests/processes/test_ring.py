"""The ring where a script does something unusual: several workers, each case against one plain process."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.errors import AtollError
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.pool import JobFailedError, WorkerPool

pytestmark = pytest.mark.quick

SMALL = Chunks(size="2KiB")  # several chunks for a tiny model


class Net(nn.Module):
    """Two layers, and between them one that is used twice, plain or under activation checkpointing."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(5, 33), nn.Linear(33, 33), nn.Linear(33, 7)
        self.reentrant = reentrant

    def middle(self, x: Tensor) -> Tensor:
        return self.twice(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for _ in range(2):
            x = (
                self.middle(x)
                if self.reentrant is None
                else checkpoint(self.middle, x, use_reentrant=self.reentrant)
            )
        return self.last(x)


def make(reentrant: bool | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(reentrant).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def share(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + (rank + step) % 3, 5, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plain_training(world: int, steps: int, weights: list[float] | None = None) -> list[Tensor]:
    """Parameters after training in one process on all workers' shares."""
    model, optimizer = make()
    for step in range(steps):
        shares = [share(rank, step) for rank in range(world)]
        of = weights or [float(len(x)) for x in shares]
        optimizer.zero_grad()
        for x, weight in zip(shares, of, strict=True):
            (loss_of(model, x) * weight / sum(of)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_trained_alike(results: list[list[Tensor]], expected: list[Tensor]) -> None:
    for parameters in results:
        for ours, plain in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


Loop = Callable[[Session, nn.Module, torch.optim.Optimizer, int], None]


def train(place: Place, loop: Loop, steps: int, reentrant: bool | None = None) -> list[Tensor]:
    model, optimizer = make(reentrant)
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        session.prepare(model, optimizer)
        for step in range(steps):
            loop(session, model, optimizer, step)
    return [p.detach().clone() for p in model.parameters()]


def usual(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, share(session.rank, step)).backward()
    optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(pool: WorkerPool, reentrant: bool) -> None:
    assert_trained_alike(pool.run(train, usual, 5, reentrant, world=3), plain_training(3, 5))


def through_a_method(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """No hook of the module's forward runs: the weight must be said."""
    x = share(session.rank, step)
    assert isinstance(model, Net)
    session.weight(len(x))
    optimizer.zero_grad()
    model.forward(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("reentrant", [None, True])
def test_a_method_that_is_not_the_module_s_call(pool: WorkerPool, reentrant: bool | None) -> None:
    assert_trained_alike(pool.run(train, through_a_method, 5, reentrant, world=2), plain_training(2, 5))


def each_backward_reduces(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Accumulation without no_sync: dearer, and right all the same."""
    optimizer.zero_grad()
    x = share(session.rank, step)
    for _ in range(2):
        (loss_of(model, x) / 2).backward()
    optimizer.step()


def nothing_reduces_before_step(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    optimizer.zero_grad()
    with session.no_sync():
        loss_of(model, share(session.rank, step)).backward()
    optimizer.step()


def gradients_are_zeroed_in_place(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    model.zero_grad(set_to_none=False) if step % 2 else optimizer.zero_grad(set_to_none=False)
    loss_of(model, share(session.rank, step)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "loop", [each_backward_reduces, nothing_reduces_before_step, gradients_are_zeroed_in_place]
)
def test_other_ways_to_accumulate(pool: WorkerPool, loop: Loop) -> None:
    assert_trained_alike(pool.run(train, loop, 4, world=2), plain_training(2, 4))


def with_weights(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    session.weight([3.0, 0.0, 1.5][session.rank])
    loss_of(model, share(session.rank, step)).backward()
    optimizer.step()


def test_given_weights_count_in_place_of_samples(pool: WorkerPool) -> None:
    assert_trained_alike(pool.run(train, with_weights, 4, world=3), plain_training(3, 4, [3.0, 0.0, 1.5]))


def sits_out(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Worker 1 has no batch in odd steps: it calls step() alone, and must not be waited for in vain."""
    optimizer.zero_grad()
    if session.rank == 1 and step % 2:
        session.weight(0)
    else:
        session.weight(2)
        loss_of(model, share(session.rank, step)).backward()
    optimizer.step()


def test_a_worker_without_a_batch_takes_part_in_the_step(pool: WorkerPool) -> None:
    model, optimizer = make()
    for step in range(4):
        ranks = [0] if step % 2 else [0, 1]
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, share(rank, step)) / len(ranks)).backward()
        optimizer.step()
    assert_trained_alike(pool.run(train, sits_out, 4, world=2), [p.detach() for p in model.parameters()])


def two_models(place: Place) -> list[Tensor]:
    """A generator and a discriminator, whose backwards reach into one another."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    with atoll.join(Config(), place=place) as session:
        for model, optimizer in zip((generator, critic), optimizers, strict=True):
            session.prepare(model, optimizer)
        for step in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            mine = x[session.rank :: session.world]
            optimizers[1].zero_grad()
            critic(generator(mine)).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-critic(generator(mine)).mean()).backward()
            optimizers[0].step()
    return [p.detach().clone() for m in (generator, critic) for p in m.parameters()]


def test_two_models_in_one_session(pool: WorkerPool) -> None:
    alone = two_models(Place())
    assert_trained_alike(pool.run(two_models, world=2), alone)


def two_models_in_one_loss(place: Place) -> list[Tensor]:
    """Of the first model, worker 1 leaves a layer out: its chunk fills later there than the second's."""
    torch.manual_seed(0)
    models = [nn.ModuleList([nn.Linear(4, 4).double() for _ in range(2)]) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        for model, optimizer in zip(models, optimizers, strict=True):
            session.prepare(model, optimizer)
        for step in range(3):
            losses = []
            for rank in range(2) if session.world == 1 else [session.rank]:
                x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)).double()
                y = models[0][0](x) if rank else models[0][1](models[0][0](x))
                losses.append(models[1][1](models[1][0](y)).square().mean())
            (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for m in models for p in m.parameters()]


def test_two_models_whose_gradients_come_in_another_order_on_each_worker(pool: WorkerPool) -> None:
    assert_trained_alike(pool.run(two_models_in_one_loss, world=2), two_models_in_one_loss(Place()))


def takes_gradients_by_hand(place: Place) -> list[Tensor]:
    """torch.autograd.grad leaves nothing in the parameters: nothing is sent, and no weight is spent."""
    model, optimizer = make()
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        session.prepare(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            x = share(session.rank, step).requires_grad_()
            y = model(x)
            if session.is_main:  # not on every worker: it must not be a collective
                torch.autograd.grad(y.sum(), list(model.parameters()), retain_graph=True)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.square().mean() + slope.square().mean()).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_gradients_taken_by_hand_are_not_reduced(pool: WorkerPool) -> None:
    model, optimizer = make()
    for step in range(3):
        optimizer.zero_grad()
        shares = [share(rank, step).requires_grad_() for rank in range(2)]
        for x in shares:
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = y.square().mean() + slope.square().mean()
            (loss * len(x) / sum(len(each) for each in shares)).backward()
        optimizer.step()
    expected = [p.detach() for p in model.parameters()]
    assert_trained_alike(pool.run(takes_gradients_by_hand, world=2), expected)


def two_backwards(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two losses of one forward, each with its own backward; and looks at data that count for nothing."""
    model(torch.ones(50, 5, dtype=torch.float64))  # a forward that no backward follows
    copy.deepcopy(model)(torch.ones(50, 5, dtype=torch.float64)).sum().backward()
    optimizer.zero_grad()
    loss = loss_of(model, share(session.rank, step)) / 2
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def test_only_batches_whose_backward_is_reached_count_and_each_backward_by_its_own(pool: WorkerPool) -> None:
    assert_trained_alike(pool.run(train, two_backwards, 4, world=2), plain_training(2, 4))


def runs_dry(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Worker 1 has no batch in odd steps and says nothing of it."""
    optimizer.zero_grad()
    if session.rank == 0 or step % 2 == 0:
        loss_of(model, share(session.rank, step)).backward()
    optimizer.step()


def test_a_worker_that_has_no_batch_does_not_dilute_the_mean(pool: WorkerPool) -> None:
    model, optimizer = make()
    for step in range(4):
        shares = [share(rank, step) for rank in ([0] if step % 2 else [0, 1])]
        optimizer.zero_grad()
        for x in shares:
            (loss_of(model, x) * len(x) / sum(len(each) for each in shares)).backward()
        optimizer.step()
    assert_trained_alike(pool.run(train, runs_dry, 4, world=2), [p.detach() for p in model.parameters()])


def weightless_nan(place: Place) -> tuple[float, bool]:
    model, optimizer = make()
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        session.prepare(model, optimizer)
        session.weight(1.0 - session.rank)
        loss = loss_of(model, share(session.rank, 0))
        (loss * float("nan") if session.rank else loss).backward()
        optimizer.step()
        mean = session.reduce(float("nan") if session.rank else 3.0, weight=1 - session.rank)
    return mean, all(bool(p.isfinite().all()) for p in model.parameters())


def test_what_weighs_nothing_is_left_out_even_if_it_is_nan(pool: WorkerPool) -> None:
    assert pool.run(weightless_nan, world=2) == [(3.0, True), (3.0, True)]


def joins_with_records_on_one_worker(place: Place, directory: str) -> int:
    config = Config(run=Run(directory=directory if place.rank == 0 else ""))
    with atoll.join(config, place=place) as session:
        session.prepare(*make())
        return session.world


def test_one_worker_may_keep_records_alone(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(joins_with_records_on_one_worker, str(tmp_path / "run"), world=2) == [2, 2]


def test_what_arrives_first_leaves_first_from_the_second_iteration_on(pool: WorkerPool) -> None:
    orders = pool.run(chunk_orders, world=2)
    assert orders[0] == orders[1]
    before, after = orders[0]
    assert before != after
    assert sorted(before) == sorted(after)


def chunk_orders(place: Place) -> tuple[list[int], list[int]]:
    """The order in which chunks leave, before and after the first iteration of a model used back to front."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
    model = BackToFront(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        session.prepare(model, optimizer)
        reducer = session._state.prepared[0].reducer
        before = [bound.chunk.id for bound in reducer.sum.carrier.bounds]
        model(torch.ones(1, 40)).sum().backward()
        return before, [bound.chunk.id for bound in reducer.sum.carrier.bounds]


class BackToFront(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def stays_away(place: Place) -> str:
    """Worker 1 reaches its backward only when worker 0's deadline has passed."""
    assert place.store is not None
    model, optimizer = make()
    place.store.set(f"here {place.rank}", "1")
    place.store.wait(["here 0", "here 1"])  # so that joining is not waited for
    session = atoll.join(Config(chunks=SMALL, sync=Sync(timeout="5s")), place=place)
    session.prepare(model, optimizer)
    if session.rank == 1:
        place.store.wait(["given up"])
    try:
        loss_of(model, share(session.rank, 0)).backward()
    except AtollError as error:
        place.store.set("given up", "1")
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_wait_that_passes_its_deadline_says_who_what_when_and_how_long(pool: WorkerPool) -> None:
    first, second = pool.run(stays_away, world=2)
    waited = re.match(r"DeadlineError: worker 0 waited (\d+\.\d) s for ", first)
    assert waited, first
    assert float(waited[1]) > 1.0  # the deadline counts from when the chunk left, a little before
    for part in ("s for worker 1 on chunk 0", "in iteration 0", "deadline sync.timeout, 5 s"):
        assert part in first
    assert second.startswith(("PeerLostError: worker 1 lost touch", "DeadlineError: worker 1 waited"))
    assert "\n" not in first + second


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("a backward that raises")


def raises_in_backward(place: Place, at_the_start: bool) -> None:
    """A backward raises before, or after, chunks have left; the script goes on."""
    model, optimizer = make()
    assert isinstance(model, Net)
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        session.prepare(model, optimizer)
        x = share(session.rank, 0)
        hidden = model.middle(model.first(x).tanh())
        broken = Explodes.apply(model(x)) if at_the_start else model.last(Explodes.apply(hidden))
        try:
            broken.sum().backward()
        except ValueError:
            optimizer.zero_grad()
        usual(session, model, optimizer, 0)


def test_a_backward_that_raises_before_any_chunk_left_is_forgotten(pool: WorkerPool) -> None:
    pool.run(raises_in_backward, True, world=2)


def test_a_backward_that_raises_after_chunks_left_cannot_be_gone_on_from(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match="a backward raised after 1 of") as caught:
        pool.run(raises_in_backward, False, world=2)
    assert {failure.kind for failure in caught.value.failures.values()} == {"RunError"}


def evaluation(place: Place) -> dict[str, Any]:
    with atoll.join(Config(), place=place) as session:
        rank = session.rank
        return {
            "who": (session.rank, session.world, session.is_main, session.group.size),
            "mean": session.reduce(float(rank)),
            "weighted": session.reduce(float(rank), weight=rank),
            "sum": session.reduce(torch.tensor([rank, 1]), "sum"),
            "extremes": (session.reduce(rank, "min"), session.reduce(rank, "max")),
            "tensors": session.gather(torch.full((rank, 2), rank, dtype=torch.bfloat16)),
            "values": session.gather({"rank": rank, "name": "é"}),
            "infinite": session.gather(float("-inf")),
        }


def test_reduce_and_gather(pool: WorkerPool) -> None:
    for rank, found in enumerate(pool.run(evaluation, world=3)):
        assert found["who"] == (rank, 3, rank == 0, 3)
        assert found["mean"] == 1.0
        assert found["weighted"] == pytest.approx(5 / 3)
        assert found["sum"].tolist() == [3, 3]
        assert found["extremes"] == (0.0, 2.0)
        assert [tuple(t.shape) for t in found["tensors"]] == [(0, 2), (1, 2), (2, 2)]
        assert found["tensors"][2].eq(2).all()
        assert found["tensors"][2].dtype == torch.bfloat16
        assert found["infinite"] == [float("-inf")] * 3
        assert found["values"] == [{"rank": r, "name": "é"} for r in range(3)]


def unlike_reductions(place: Place, by_shape: bool) -> None:
    with atoll.join(Config(sync=Sync(timeout="20s")), place=place) as session:
        if by_shape:
            session.reduce(torch.zeros(2 + session.rank))
        else:
            session.reduce(1.0, "sum" if session.rank else "mean")


@pytest.mark.parametrize(
    ("by_shape", "said"), [(True, r"shape \(3,\)"), (False, r"worker 1 is in .*reduce\(sum of a number\)")]
)
def test_workers_that_reduce_unlike_things_are_told_so(pool: WorkerPool, by_shape: bool, said: str) -> None:
    with pytest.raises(JobFailedError, match=said) as caught:
        pool.run(unlike_reductions, by_shape, world=2)
    assert {failure.kind for failure in caught.value.failures.values()} == {"MismatchError"}


def clip_unlike(place: Place, way: str, meets: str, folder: Path) -> list[Tensor]:
    """In iteration 2 worker 0 has no batch; what it does about clipping then is `way`."""
    with atoll.join(Config(chunks=SMALL), place=place) as session:
        model, optimizer = session.prepare(*make())
        for step in range(3 if meets else 5):
            idle = session.rank == 0 and step == 2
            if not idle:
                loss_of(model, share(session.rank, step)).backward()
            if way == "another norm":
                session.clip_grad_norm_(1e-2 if idle else 1e-3)
            elif way == "torch's own" and not idle:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            elif way == "alike" or not idle:
                session.clip_grad_norm_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
        if meets == "barrier":
            session.barrier()
        elif meets == "save":
            session.save(folder / "checkpoint")
    return [p.detach() for p in model.parameters()]


@pytest.mark.check
@pytest.mark.parametrize(
    ("way", "meets", "said"),
    [
        ("none", "", "left the gradients as they were, and worker 1 clipped the gradients to 0.001, so that"),
        ("none", "barrier", "left the gradients as they were, and worker 1 clipped the gradients to 0.001"),
        ("none", "save", "left the gradients as they were, and worker 1 clipped the gradients to 0.001"),
        ("none", "the end", "left the gradients as they were, and worker 1 clipped the gradients to 0.001"),
        ("another norm", "", "clipped the gradients to 0.01, and worker 1 clipped the gradients to 0.001"),
        ("torch's own", "the end", "left the gradients as they were, and worker 1 changed the gradients"),
    ],
)
def test_members_that_make_something_else_of_the_mean_are_told_so(
    pool: WorkerPool, tmp_path: Path, way: str, meets: str, said: str
) -> None:
    """Each steps its own copy of the model: nothing else would show it."""
    with pytest.raises(JobFailedError, match=f"iteration 2: worker 0 {said}") as caught:
        pool.run(clip_unlike, way, meets, tmp_path, world=2)
    assert [failure.kind for failure in caught.value.failures.values()] == ["UserError"] * 2
    assert not (tmp_path / "checkpoint").exists()


def test_a_member_without_a_batch_may_clip(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(clip_unlike, "alike", "save", tmp_path, world=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_several_sessions_one_after_another_leave_nothing_behind(pool: WorkerPool) -> None:
    """Threads of a closed session's process groups end; the next session is not disturbed."""
    counts = pool.run(threads_after_sessions, world=2)
    for after_one, after_four in counts:
        assert after_four <= after_one


def threads_after_sessions(place: Place) -> tuple[int, int]:
    counts: list[int] = []
    for number in range(4):
        from torch.distributed.distributed_c10d import PrefixStore

        assert place.store is not None
        inner = Place(place.rank, place.world, place.local_rank, PrefixStore(str(number), place.store))
        train(inner, usual, 2)
        if number in (0, 3):  # threads of a group end a little after its session
            counts.append(_settled_threads(counts[0] if counts else None))
    return counts[0], counts[-1]


def _settled_threads(expected: int | None) -> int:
    """The number of this process's threads once it has fallen to `expected`; None: has stopped falling."""
    import psutil

    process = psutil.Process()
    count, since = process.num_threads(), time.monotonic()
    while time.monotonic() - since < (1.0 if expected is None else 30.0):
        now = process.num_threads()
        if expected is not None and now <= expected:
            return now
        if now < count:
            count, since = now, time.monotonic()
        time.sleep(0.02)
    return count


def models_apart(place: Place | None, skips: bool) -> list[Tensor]:
    """Two models, each with a backward of its own; worker 1 has no batch in step 1. Without a place: in one
    process, with all batches. With `skips` worker 1 leaves out the first model's step, too."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 6).double(), nn.Linear(4, 1).double()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]

    def loop(ranks: Sequence[int], alone: bool) -> None:
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                has_none = step == 1 and ranks == [1]
                if has_none and skips and model is models[0]:
                    continue
                batches = [share(rank, step)[:2, :4] for rank in ranks if not (step == 1 and rank == 1)]
                for batch in batches:
                    (loss_of(model, batch) / (len(batches) if alone else 1)).backward()
                optimizer.step()
                optimizer.zero_grad()

    if place is None:
        loop([0, 1], alone=True)
    else:
        with atoll.join(Config(sync=Sync(timeout="60s")), place=place) as session:
            for model, optimizer in zip(models, optimizers, strict=True):
                session.prepare(model, optimizer)
            loop([place.rank], alone=False)
    return [p.detach().clone() for m in models for p in m.parameters()]


def test_a_worker_without_a_batch_steps_each_of_several_models(pool: WorkerPool) -> None:
    """Its steps and the others' backwards ask alike which models have new gradients."""
    assert_trained_alike(
        pool.run(models_apart, False, world=2, deadline=60.0), models_apart(None, skips=False)
    )


def test_a_step_of_one_model_that_is_left_out_is_found(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as caught:
        pool.run(models_apart, True, world=2, deadline=60.0)
    failures = caught.value.failures.values()
    assert {failure.kind for failure in failures} == {"MismatchError"}
    (line,) = {failure.message for failure in failures}
    assert re.match(
        r"worker 0 is at .* of step \d.*; worker 1 is at .* Every worker must make equally ", line
    )
