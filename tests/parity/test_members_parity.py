"""A model that the workers of a ring, or of each group of a hierarchy, hold between them trains as plain
PyTorch does on the global batch: real processes, over families of models, budgets, members, accumulation and
clipping.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.memory.sharded import Sharded
from atoll.train.api.place import Place
from support.families import batch, build, loss_of
from support.parity import MAX_NORM, OPTIMIZERS
from support.pool import WorkerPool
from support.tight import memory, poisoned

TOLERANCE = 1e-9  # as the ring's (test_parity.py)
STEPS = 4


@dataclass(frozen=True)
class Case:
    family: str
    share: float  # of the model that each member's device may hold
    accumulation: int = 1
    clip: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.share:.0%}-x{self.accumulation}{'-clipped' * self.clip}"


@dataclass
class Seen:
    """What a training left behind: the losses of each share, the parameters, each share's buffers."""

    losses: list[list[float]] = field(default_factory=list)  # [step][share]
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)  # [share][name]
    norms: list[float] = field(default_factory=list)


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """In float64, which tells an error from rounding, but for what is in bfloat16: LoRA's frozen base."""
    model = build(case.family)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.double()
    return model, OPTIMIZERS["adamw"](model)[0]


def share_of(case: Case, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """A worker's part of a batch: they are uneven."""
    inputs, targets = batch(case.family, 1000 * step + 100 * micro + rank)
    count = 1 + (rank + step + micro) % 4
    inputs = inputs[:count]
    return inputs.double() if inputs.is_floating_point() and case.family != "lora" else inputs, targets[
        :count
    ]


def train_members(place: Place, case: Case, groups: int = 0) -> Seen:
    """What a user writes, on one member; with `groups`, under strategy `hierarchical`."""
    model, optimizer = make(case)
    seen = Seen()
    config = Config(
        run=Run(strategy="hierarchical" if groups else "ring"),
        groups=Groups(count=groups),
        sync=Sync(timeout="60s"),
    )
    with poisoned(), atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=memory(model, case.share))
        (tiers,) = session._state.tiers
        assert isinstance(tiers.fitted, Sharded)
        for step in range(STEPS):
            losses = []
            for micro in range(case.accumulation):
                last = micro == case.accumulation - 1
                with nullcontext() if last else session.no_sync():
                    inputs, targets = share_of(case, session.rank, step, micro)
                    session.weight(len(inputs))  # of some models the output does not confirm it
                    loss = loss_of(model(inputs), targets)
                    (loss / case.accumulation).backward()
                    losses.append(loss.item())
            if case.clip:
                seen.norms.append(session.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
            seen.losses.append([sum(losses)])
        seen.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.buffers = [{name: b.clone() for name, b in model.named_buffers()}]
        figures = tiers.fitted.stats()
        assert figures.device_peak <= figures.device_budget
        assert session.group.size == 1 or figures.moves["from_members"] > 0
    return seen


def train_plain(case: Case, workers: int, *, apart: bool = False) -> Seen:
    """The reference, in this process: each worker's share in turn. After each step all have the first one's
    buffers; `apart`: each its own."""
    model, optimizer = make(case)
    seen = Seen(buffers=[{name: b.clone() for name, b in model.named_buffers()} for _ in range(workers)])
    for step in range(STEPS):
        batches = [
            [share_of(case, rank, step, micro) for micro in range(case.accumulation)]
            for rank in range(workers)
        ]
        counts = [sum(len(inputs) for inputs, _ in micros) for micros in batches]
        losses, gradients = [], []
        for rank, micros in enumerate(batches):
            for name, held in model.named_buffers():
                held.copy_(seen.buffers[rank][name])
            losses.append(0.0)
            for inputs, targets in micros:
                loss = loss_of(model(inputs), targets)
                (loss / case.accumulation).backward()
                losses[-1] += loss.item()
            gradients.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
            seen.buffers[rank] = {name: b.clone() for name, b in model.named_buffers()}
        if not apart:
            seen.buffers = [seen.buffers[0]] * workers
        for parameter, *shares in zip(model.parameters(), *gradients, strict=True):
            parts = [g * (n / sum(counts)) for g, n in zip(shares, counts, strict=True) if g is not None]
            parameter.grad = torch.stack(parts).sum(0) if parts else None
        if case.clip:
            seen.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.losses.append(losses)
    seen.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return seen


def differences(case: Case, plain: Seen, members: list[Seen]) -> list[str]:
    """What is further off than the tolerance, a line each."""
    found = []
    for rank, seen in enumerate(members):
        pairs = {
            f"loss {step}": (torch.tensor(a[rank]), torch.tensor(b[0]))
            for step, (a, b) in enumerate(zip(plain.losses, seen.losses, strict=True))
        }
        pairs |= {
            f"norm {step}": (torch.tensor(a), torch.tensor(b))
            for step, (a, b) in enumerate(zip(plain.norms, seen.norms, strict=True))
        }
        assert list(plain.parameters) == list(seen.parameters)
        pairs |= {name: (value, seen.parameters[name]) for name, value in plain.parameters.items()}
        pairs |= {name: (value, seen.buffers[0][name]) for name, value in plain.buffers[rank].items()}
        for name, (expected, got) in pairs.items():
            worst = (expected.double() - got.double()).abs().max().item()
            if not worst <= TOLERANCE:  # NaN is a difference too
                found.append(f"{case}, member {rank} of {len(members)}, {name}: differs by {worst:.3g}")
    return found


FAMILIES = ("gpt", "tied", "vit", "resnet", "experts", "lstm", "thrice", "lora")
FOUR = [Case(family, 0.25, 1 + (index % 2), index % 3 == 1) for index, family in enumerate(FAMILIES)]
IN_THE_SUITE = ("gpt", "experts")  # of four members; the other families are in the soak
CASES = [
    (2, [Case(family, 0.5, 1 + (index % 2), index % 3 == 0) for index, family in enumerate(FAMILIES)]),
    (4, [case for case in FOUR if case.family in IN_THE_SUITE]),
    (2, [Case("gpt", 0.25)]),
    (1, [Case("gpt", 0.5, 2, True), Case("resnet", 0.75)]),
]


IN_GROUPS = [  # workers, groups: of equal length, and of unequal
    (4, 2, Case("gpt", 0.5, 2, True)),
    (3, 2, Case("experts", 0.5, 2, True)),
]
SOAK = [
    *((4, 0, case) for case in FOUR if case.family not in IN_THE_SUITE),
    *((2, 0, Case(family, 0.75, 2, True)) for family in IN_THE_SUITE),
    (2, 2, Case("resnet", 0.5, 1, True)),  # of one each
    (4, 3, Case("gpt", 0.5, 2, True)),  # several sums at once between groups
    (4, 4, Case("experts", 0.5)),
    *((4, 2, Case(family, 0.25, 1 + (i % 2), i % 3 == 1)) for i, family in enumerate(FAMILIES)),
    *((3, 2, Case(family, 0.5, 1 + (i % 2), i % 3 == 2)) for i, family in enumerate(FAMILIES)),
]


@pytest.mark.check
@pytest.mark.parametrize(
    ("workers", "groups", "case"),
    [
        *((n, 0, case) for n, cases in CASES for case in cases),
        *IN_GROUPS,
        *(pytest.param(*each, marks=pytest.mark.soak) for each in SOAK),
    ],
    ids=lambda value: str(value),
)
def test_members_train_as_one_process_does(pool: WorkerPool, workers: int, groups: int, case: Case) -> None:
    pool.submit(train_members, case, groups, world=workers)
    plain = train_plain(case, workers)
    members = pool.collect()
    found = differences(case, plain, members)
    assert not found, "\n".join(found)
    for seen in members[1:]:
        assert seen.norms == members[0].norms  # to the bit
        for name, value in seen.parameters.items():
            assert torch.equal(value, members[0].parameters[name]), name


def test_the_comparison_finds_a_nudge_and_a_nan() -> None:
    case = Case("gpt", 0.5)
    plain, same = train_plain(case, 1), train_plain(case, 1)
    assert differences(case, plain, [same]) == []
    same.parameters["tokens.weight"][0, 0] += 1e-8
    assert differences(case, plain, [same]) == ["gpt-50%-x1, member 0 of 1, tokens.weight: differs by 1e-08"]
    same.losses[0][0] = float("nan")
    assert "loss 0: differs by nan" in differences(case, plain, [same])[0]
