"""A script that goes on after a backward that raised trains as plain PyTorch does.

The script drops what the backward has left. Then it computes the batch again, or goes on to another batch, or
makes the step without one. The samples of the batch that raised count neither in the mean nor in the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace as replace_in
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Groups, Sync
from atoll.groups.chooser import Score
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from atoll.train.sync.client import Outgoing, ServerClient
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, PACES, alone, model, run_at, run_with, train_at

MEANS = [kind for kind in KINDS if kind != "asp"]  # where all workers step with one mean
AT_OWN_PACE = ("asp", "ssp", "ps-hra asp")  # where one contributor steps as plain PyTorch does
FEW, MANY = 3, 5  # the samples of workers 1 and 0
LOSS = 11  # behind the last layer: it raises before any gradient has come
FORWARD = -2


@dataclass(frozen=True)
class Case:
    """What a worker's script does in a step in which its backward raises.

    Attributes:
        way: how it computes: by `whole` forwards, by `parts` of the model, in a `checkpoint` that is
            reentrant, or by forwards that are made `before` the backward that raises.
        then: what it does next: `again` the batch, the `next` batch, or `nothing`.
        weight: how it gives the batch's weight: the model's `output` shows it, `once` for the batch, or
            `each` time that it is computed.
        earlier: True if gradients of another batch have come before, under no_sync.
        restarts: True if the script drops these, too, and begins the step anew.
        at: the layer in whose backward it raises; LOSS: in that of the loss; FORWARD: in the last layer's
            forward.
        raising: the workers on which it raises.
        times: how often.
    """

    way: str = "whole"
    then: str = "again"
    weight: str = "output"
    earlier: bool = False
    restarts: bool = False
    at: int = 4
    raising: tuple[int, ...] = (1,)
    times: int = 1

    def numbers(self, rank: int) -> list[int]:
        """The numbers of the batches that a worker's gradients are of."""
        numbers = [0] if self.earlier else []
        if rank not in self.raising or self.then == "again":
            return [*numbers, 1]
        return [*numbers, 2] if self.then == "next" else numbers


CASES = [
    *(Case(at=at, raising=raising) for at in (0, 4, 10) for raising in ((1,), (0, 1))),
    *(
        Case(way, then, weight, raising=raising)
        for way, weight in (
            ("whole", "output"), ("whole", "once"), ("whole", "each"),
            ("parts", "once"), ("parts", "each"), ("checkpoint", "each"), ("before", "output"),
            ("before", "each"),
        )
        for then in ("again", "next", "nothing")
        for raising in ((1,), (0, 1))
        if not (weight == "once" and then == "next") and not (then == "nothing" and len(raising) > 1)
    ),
    *(
        Case(way, then, weight, earlier=True, restarts=restarts)
        for way, weight in (("whole", "output"), ("whole", "each"), ("parts", "each"))
        for then, restarts in (("again", False), ("next", False), ("nothing", False), ("again", True))
    ),
    Case(times=3), Case("parts", weight="each", times=3),
    *(
        Case(way, then, weight, at=at, times=times)
        for way, weight in (("whole", "output"), ("whole", "each"), ("parts", "each"), ("parts", "once"),
                            ("checkpoint", "each"))
        for then in ("again", "next", "nothing")
        for at, times in ((10, 1), (LOSS, 1), (LOSS, 2))
        if not (weight == "once" and then == "next")
    ),
    *(
        Case(way, weight=weight, at=at, earlier=True, restarts=restarts, times=times)
        for way, weight, at in (("whole", "each", LOSS), ("parts", "each", LOSS), ("whole", "output", LOSS),
                                ("whole", "each", FORWARD), ("whole", "output", FORWARD))
        for restarts in (False, True)
        for times in ((1,) if restarts or way == "parts" else (1, 2))
    ),
    *(
        Case("whole", then, weight, at=FORWARD, earlier=earlier, times=times)
        for then in ("again", "next", "nothing")
        for weight in ("output", "once", "each")
        for earlier in (False, True)
        for times in (1, 2)
        if not (weight == "once" and (then == "next" or earlier))
    ),
]  # fmt: skip
OF_ONE = list(dict.fromkeys(replace(case, raising=(0,)) for case in CASES))


class RaisedError(Exception):
    """A backward raised."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Tensor:
        raise RaisedError


class Script:
    """The loop of a script; without `session` the loop of plain PyTorch, which computes all batches."""

    def __init__(self, session: atoll.Session | None, world: int) -> None:
        self.session, self.world = session, world
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.raises_at = -1
        for index, part in enumerate(self.net):
            part.register_forward_hook(
                lambda _m, _i, out, at=index: _Raises.apply(out) if at == self.raises_at else None
            )
        self.net[10].register_forward_hook(self.in_forward)
        if session is not None:
            session.prepare(self.net, self.optimizer)
        self.samples = 0.0  # of the latest step, of all workers
        self.consumed = 0.0

    def in_forward(self, *_: Any) -> None:
        if self.raises_at == FORWARD:
            raise RaisedError

    def run_samples(self) -> float:
        """The samples of all workers that the run has consumed."""
        assert self.session is not None
        return self.session._state.prepared[0].reducer.consumed

    def compute(self, batch: tuple[Tensor, Tensor], way: str) -> Tensor:
        x, y = batch
        if way == "parts":
            for part in self.net:
                x = part(x)
        elif way == "checkpoint":
            x = checkpoint(self.net, x.clone().requires_grad_(), use_reentrant=True)
        else:
            x = self.net(x)
        loss = mse_loss(x, y)
        return _Raises.apply(loss) if self.raises_at == LOSS else loss  # type: ignore[no-any-return]

    def weigh(self, samples: int) -> None:
        if self.session is not None:
            self.session.weight(samples)

    def worker_s_step(self, case: Case, step: int, rank: int) -> None:
        """The backwards of one worker's step."""
        good = None
        if case.earlier:
            self.earlier(case, step, rank)
        batch = batch_of(step, 1, rank)
        if case.weight == "once":
            self.weigh(len(batch[0]))
        if rank in case.raising:
            again = batch if case.then == "again" else batch_of(step, 2, rank)
            if case.way == "before":
                good = self.compute(again, case.way)
            for _ in range(case.times):
                self.raise_in(case, batch)
            if case.earlier and not case.restarts:  # it keeps what had come before the backward that raised
                for parameter, kept in zip(self.net.parameters(), self.kept, strict=True):
                    parameter.grad = kept
            else:
                self.optimizer.zero_grad()
            if case.then == "nothing":
                return
            if case.earlier and case.restarts:
                self.earlier(case, step, rank)
            batch = again
        if case.weight == "each":
            self.weigh(len(batch[0]))
        (self.compute(batch, case.way) if good is None else good).backward()

    def earlier(self, case: Case, step: int, rank: int) -> None:
        batch = batch_of(step, 0, rank)
        if case.weight != "output":
            self.weigh(len(batch[0]))
        with nullcontext() if self.session is None else self.session.no_sync():
            self.compute(batch, case.way).backward()
        self.kept = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]

    def raise_in(self, case: Case, batch: tuple[Tensor, Tensor]) -> None:
        if case.weight == "each":
            self.weigh(len(batch[0]))
        self.raises_at = case.at
        with pytest.raises(RaisedError):
            self.compute(batch, case.way).backward()
        self.raises_at = -1

    def plain_step(self, case: Case, step: int) -> None:
        """The mean of all workers' batches, weighted by their samples."""
        sums = [torch.zeros_like(p) for p in self.net.parameters()]
        weights = 0
        for rank in range(self.world):
            own = 0
            mean = [torch.zeros_like(p) for p in self.net.parameters()]
            for number in case.numbers(rank):
                batch = batch_of(step, number, rank)
                own += len(batch[0])
                gradients = torch.autograd.grad(self.compute(batch, "whole"), list(self.net.parameters()))
                mean = [a + b for a, b in zip(mean, gradients, strict=True)]
            sums = [a + own * b for a, b in zip(sums, mean, strict=True)]
            weights += own
        for parameter, total in zip(self.net.parameters(), sums, strict=True):
            parameter.grad = total / weights if weights else None
        self.samples = float(weights)

    def step(self, case: Case, number: int) -> dict[str, Any]:
        if self.session is None:
            self.plain_step(case, number)
        else:
            self.worker_s_step(case, number, self.session.rank)
        seen = []
        if case.then != "nothing":
            seen = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.session is not None:
            consumed = self.run_samples()
            self.samples, self.consumed = consumed - self.consumed, consumed
        values = [p.detach().clone() for p in self.net.parameters()]
        return {"seen": seen, "values": values, "samples": self.samples}


def batch_of(step: int, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """A worker's batch: each number has its own sizes."""
    samples = (MANY if rank == 0 else FEW) + number
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    x = torch.randn(samples, 32, dtype=torch.float64, generator=generator)
    return x, torch.randn(samples, 4, dtype=torch.float64, generator=generator)


def train(session: atoll.Session | None, cases: list[Case], world: int) -> list[dict[str, Any]]:
    script = Script(session, world)
    found = [script.step(case, number) for number, case in enumerate(cases)]
    if session is not None:
        session.barrier()
    return found


def check(found: list[Any], right: list[dict[str, Any]], cases: list[Case]) -> None:
    wrong = list(differences(found, right, cases))
    assert not wrong, "\n".join(wrong)


def differences(found: list[Any], right: list[dict[str, Any]], cases: list[Case]) -> Iterator[str]:
    for case, *steps in zip(cases, right, *found, strict=True):
        plain, *workers = steps
        for (rank, worker), what in itertools.product(enumerate(workers), ("seen", "values")):
            for got, expected in zip(worker[what], plain[what], strict=False):
                if not torch.allclose(got, expected, rtol=1e-9, atol=1e-12):
                    yield f"{what} of worker {rank}: {float((got - expected).abs().max())} after {case}"
        for rank, worker in enumerate(workers):
            if worker["samples"] != plain["samples"]:
                yield f"{worker['samples']} samples for {plain['samples']} on worker {rank} after {case}"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "ring" else pytest.mark.check) for kind in MEANS]
)
def test_a_script_goes_on_as_in_plain_pytorch(pool: WorkerPool, kind: str) -> None:
    check(run_at(pool, kind, train, CASES, 2), train(None, CASES, 2), CASES)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "asp" else pytest.mark.check) for kind in AT_OWN_PACE]
)
def test_a_worker_at_its_own_pace_goes_on_as_in_plain_pytorch(pool: WorkerPool, kind: str) -> None:
    check(run_at(pool, kind, train, OF_ONE, 1, world=1), train(None, OF_ONE, 1), OF_ONE)


@pytest.mark.parametrize("tiers", [False, pytest.param(True, marks=pytest.mark.check)])
def test_a_worker_alone_goes_on_as_in_plain_pytorch(tiers: bool) -> None:
    check([alone(train, OF_ONE, 1, tiers=tiers)], train(None, OF_ONE, 1), OF_ONE)


def contributions(
    session: atoll.Session, cases: list[Case], script: Script | None = None
) -> dict[int, tuple[float, float]]:
    """By iteration the weight and the samples of this worker's contributions, as the shards are told of
    them."""
    script, sent = script or Script(session, session.world), dict[int, tuple[float, float]]()
    commit = ServerClient.commit

    def noted(client: ServerClient, out: Outgoing, *arguments: Any) -> None:
        sent[out.iteration] = out.own.weight, out.own.samples
        commit(client, out, *arguments)

    with patch.object(ServerClient, "commit", noted):
        for number, case in enumerate(cases):
            script.step(case, number)
            session.barrier()
    return sent


def of_group(session: atoll.Session, cases: list[Case]) -> dict[int, tuple[float, float]]:
    """What `contributions` returns, once the workers are one group."""
    script = Script(session, session.world)
    for step in range(ALONE + 1):
        await_groups(session, step)
        script.step(Case(raising=()), step)
    return contributions(session, cases, script)


@pytest.mark.check
def test_a_group_s_contribution_weighs_as_the_batches_in_it(pool: WorkerPool) -> None:
    settings = GroupingSettings(
        1,
        by="joint",
        consistency="asp",
        regroup=False,
        score_for=lambda _known: lambda grouping: Score(2.0 if len(grouping.groups) == 1 else 1.0),
    )
    config = replace_in(PACES["ps-hra asp"], groups=Groups(probe=ALONE - 1))
    found = run_with(pool, config, of_group, CASES, world=2, shards=1, grouping=settings)
    sent = dict(sorted((found[0] | found[1]).items())).values()  # they take turns to talk to the shards
    wrong = []
    for case, told in zip(CASES, sent, strict=True):
        expected = float(sum(len(batch_of(0, n, rank)[0]) for rank in (0, 1) for n in case.numbers(rank)))
        if told != (expected, expected):
            wrong.append(f"the group contributes {told} for {expected} in {case}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "kind", ["asp", *(pytest.param(kind, marks=pytest.mark.check) for kind in ("ssp", "ps-hra asp"))]
)
def test_each_contribution_weighs_as_the_batches_in_it(pool: WorkerPool, kind: str) -> None:
    """Where each worker contributes by itself, its weight is what others' are compared with."""
    wrong = []
    for rank, sent in enumerate(run_at(pool, kind, contributions, CASES, world=2)):
        for case, told in zip(CASES, sent.values(), strict=True):
            expected = float(sum(len(batch_of(0, number, rank)[0]) for number in case.numbers(rank)))
            if told != (expected, expected):
                wrong.append(f"worker {rank} contributes {told} for {expected} in {case}")
    assert not wrong, "\n".join(wrong)


def of_a_sampler(
    session: atoll.Session, makes_batches: bool, then: str
) -> tuple[list[float], dict[str, Any]]:
    """The samples of all workers after each step, and the place in the sampler. The backward of each third
    batch raises first on the last worker, which computes the batch again, or goes on to the next one."""
    script = Script(session, session.world)
    data = TensorDataset(torch.randn(48, 32, dtype=torch.float64), torch.zeros(48, 4, dtype=torch.float64))
    sampler: Any = session.batches(data) if makes_batches else session.sampler(data)
    how = {"batch_sampler": sampler} if makes_batches else {"sampler": sampler, "batch_size": 4}
    consumed = []
    for number, (x, y) in enumerate(DataLoader(data, **how)):
        if number % 3 == 1 and session.rank == session.world - 1:
            script.raise_in(Case(), (x, y))
            script.optimizer.zero_grad()
            if then == "nothing":
                script.optimizer.step()
                consumed.append(script.run_samples())
                continue
        script.compute((x, y), "whole").backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        consumed.append(script.run_samples())
    session.barrier()
    return consumed, sampler.place()


@pytest.mark.parametrize("then", ["again", "nothing"])
@pytest.mark.parametrize("makes_batches", [True, False])
def test_a_sampler_s_batch_counts_once(pool: WorkerPool, makes_batches: bool, then: str) -> None:
    """A batch that a worker leaves out counts with its next one: the sampler's place is behind it."""
    config = Config(sync=Sync(timeout="60s", global_batch=8))
    for consumed, place in run_with(pool, config, of_a_sampler, makes_batches, then, world=2):
        late = 4 if then == "nothing" else 0
        assert consumed == [8.0 * (number + 1) - late * (number % 3 == 1) for number in range(6)]
        assert place["used"] == place["given"]


@pytest.mark.parametrize("then", ["again", "nothing"])
@pytest.mark.parametrize("makes_batches", [True, False])
def test_a_sampler_s_batch_counts_once_on_a_worker_alone(makes_batches: bool, then: str) -> None:
    config = Config(sync=Sync(global_batch=4))
    consumed, place = train_at(config, Place(), of_a_sampler, (makes_batches, then))
    late = 4 if then == "nothing" else 0
    assert consumed == [4.0 * (number + 1) - late * (number % 3 == 1) for number in range(12)]
    assert place["used"] == place["given"]


def saved_between(session: atoll.Session, folder: str, kept: bool) -> list[float]:
    """The samples consumed when the script saves between a backward that raised and the next one, and after
    each step."""
    script, consumed = Script(session, session.world), list[float]()
    for number in range(4):
        case, batch = Case(weight="each"), batch_of(number, 0, session.rank)
        if number % 2:
            if kept:
                script.earlier(case, number, session.rank)
            script.raise_in(case, batch)
            script.optimizer.zero_grad()
            session.save(f"{folder}/{number}")
            consumed.append(script.run_samples())
        script.weigh(len(batch[0]))
        script.compute(batch, case.way).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        consumed.append(script.run_samples())
    return consumed


@pytest.mark.parametrize("kept", [False, True])
def test_a_save_counts_no_batch_that_raised(tmp_path: Path, kept: bool) -> None:
    assert alone(saved_between, str(tmp_path), kept) == [5.0, 5.0, 10.0, 15.0, 15.0, 20.0]


def after_messages(session: atoll.Session, way: str) -> None:
    """A backward raises when messages have left."""
    script = Script(session, session.world)
    for step in range(4):  # in the first one messages may wait for the end
        case = Case(way if step == 3 else "whole", at=0)
        batch = batch_of(step, 0, session.rank)
        if step == 3:
            script.raise_in(case, batch)
            script.optimizer.zero_grad()
            if way == "weight":
                script.weigh(len(batch[0]))
        if step < 3 or way != "step":
            script.compute(batch, case.way).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()


@pytest.mark.parametrize("way", ["whole", "parts", "step", "weight"])
def test_a_backward_that_raised_after_messages_had_left_ends_the_run(pool: WorkerPool, way: str) -> None:
    config = Config(chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s"))
    with pytest.raises(JobFailedError, match=r"iteration 3: a backward raised after \d+ of \d+ messages had"):
        run_with(pool, config, after_messages, way, world=2)


def two_models(session: atoll.Session | None, world: int) -> list[list[Tensor]]:
    """Two models step in turn; the first one's backward raises on the last worker in each second
    step."""
    scripts = [Script(session, world), Script(session, world)]
    found = []
    for step in range(4):
        for number, script in enumerate(scripts):
            case = Case(raising=(world - 1,) if step % 2 and not number else ())
            script.step(case, 10 * step + number)
        found.append([p.detach().clone() for script in scripts for p in script.net.parameters()])
    if session is not None:
        session.barrier()
    return found


@pytest.mark.parametrize("kind", ["ring", "server", "asp", "alone"])
def test_of_two_models_the_one_whose_backward_raised_goes_on(pool: WorkerPool, kind: str) -> None:
    world = 2 if kind in ("ring", "server") else 1
    right = two_models(None, world)
    found = [alone(two_models, 1)] if kind == "alone" else run_at(pool, kind, two_models, world, world=world)
    for worker in found:
        for step, (got, expected) in enumerate(zip(worker, right, strict=True)):
            for mine, its in zip(got, expected, strict=True):
                assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12), step


def same_output(session: atoll.Session, earlier: str) -> tuple[list[float], float]:
    """What steps weigh, and the samples consumed, where a second backward runs over the output of one that
    raised midway.

    `earlier`: gradients of another batch, which have come before, are `kept` or `dropped`; "": there are
    none. The second backward runs over that batch's output as well.
    """
    script, weights, raises = Script(session, session.world), list[float](), [False]
    net, optimizer, (x, _) = script.net, script.optimizer, batch_of(0, 0, 0)

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        def act(_gradient: Tensor) -> None:
            if raises[0]:
                raise RaisedError

        output.register_hook(act)

    net[6].register_forward_hook(hook)
    for _ in range(3):
        outputs, kept = list[Tensor](), list[Tensor]()
        if earlier:
            outputs.append(net(x[:2]))
            with session.no_sync():
                outputs[0].sum().backward(retain_graph=True)
            kept = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        outputs.append(net(x))
        raises[0] = True
        with pytest.raises(RaisedError):
            outputs[-1].sum().backward(retain_graph=True)
        raises[0] = False
        optimizer.zero_grad()
        if earlier == "kept":
            for parameter, gradient in zip(net.parameters(), kept, strict=True):
                parameter.grad = gradient
        torch.stack([each.sum() for each in outputs]).sum().backward()
        weights.append(session._models.find(net).samples.known or 0.0)
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    return weights, script.run_samples()


@pytest.mark.parametrize("earlier", ["", "kept", "dropped"])
@pytest.mark.parametrize("kind", ["alone", "ring", "asp"])
def test_a_second_backward_over_an_output_counts_it_if_the_first_raised(
    pool: WorkerPool, kind: str, earlier: str
) -> None:
    world, samples = 2 if kind == "ring" else 1, MANY + (2 if earlier else 0)
    found = (
        [alone(same_output, earlier)]
        if kind == "alone"
        else run_at(pool, kind, same_output, earlier, world=world)
    )
    for weights, consumed in found:
        if kind != "alone":  # a mean of one has no weights
            assert weights == [samples] * 3
        assert consumed == 3 * samples * world
