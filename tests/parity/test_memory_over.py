"""Parts of a model that only some of the members share: against plain PyTorch, computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError, ConfigError, PrepareError, UserError
from atoll.memory.fit import fit, plan
from atoll.memory.over import over
from atoll.memory.sharded import Sharded
from support.members import Member, together
from support.tight import adamw, memory, same

pytestmark = pytest.mark.usefixtures("poisoned")
STEPS = 3
PAIRS = ((0, 1), (2, 3))


class Model(nn.Module):
    """A body that all share, and an expert of each group's own; `idle` is used by the first group alone."""

    def __init__(self, group: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 4)
        torch.manual_seed(100 + group)
        self.expert = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
        self.idle = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x = x + self.expert(x) + self.frozen(x)
        if self.group == 0:
            x = x + self.idle(x)
        found: Tensor = self.head(x)
        return found

    @property
    def own(self) -> list[nn.Module]:
        return [self.expert, self.idle, self.frozen]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(6, 16, generator=generator)
    return (model(inputs) - inputs[:, :4].tanh()).square().mean()


def group_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> int:
    return next(i for i, group in enumerate(groups) if rank in group)


def plain(
    weights: tuple[float, ...], groups: tuple[tuple[int, ...], ...], steps: int, clip: float
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The values of each group's model after these steps, and the norms: each group's own parameters beside
    those that all share, with one optimizer for all."""
    models = [Model(group) for group in range(len(groups))]
    shared = {n: p for n, p in models[0].named_parameters() if n.startswith(("body", "head"))}
    for model in models[1:]:
        model.body, model.head = models[0].body, models[0].head
    parameters = []  # in order of names and groups
    for name, parameter in models[0].named_parameters():
        each = [parameter] if name in shared else [model.get_parameter(name) for model in models]
        parameters += [p for p in each if p.requires_grad]
    optimizer = adamw(parameters)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank, weight in enumerate(weights):
            if not weight:  # it has no gradients
                continue
            group = group_of(rank, groups)
            model = models[group]
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(loss_of(model, rank, step), list(trained.values()), allow_unused=True)
            for (name, parameter), gradient in zip(trained.items(), found, strict=True):
                if gradient is None:
                    continue
                total = sum(weights) if name in shared else sum(weights[r] for r in groups[group])
                gradient = gradient * (weight / total)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip))
        optimizer.step()
    return [{n: p.detach().clone() for n, p in model.named_parameters()} for model in models], norms


def build(rank: int, groups: tuple[tuple[int, ...], ...]) -> tuple[Model, torch.optim.Optimizer]:
    group = group_of(rank, groups)
    model = Model(group)
    for part in model.own:
        over(part, groups[group])
    return model, adamw([p for p in model.parameters() if p.requires_grad])


Body = Callable[[Member, Model, torch.optim.Optimizer, Sharded], Any]


def shared_by(
    groups: tuple[tuple[int, ...], ...],
    body: Body,
    sharding: Any = "symmetric",
    share: float = 0.5,
    **more: Any,
) -> list[tuple[Any, dict[str, Tensor]]]:
    """What `body` gives on each member, and its values at the end."""
    count = sum(map(len, groups))
    built = [build(rank, groups) for rank in range(count)]

    def run(member: Member) -> tuple[Any, dict[str, Tensor]]:
        model, optimizer = built[member.rank]
        budgets = memory(model, share, sharding=sharding, **more)
        with fit(model, optimizer, memory=budgets, members=member) as fitted:
            assert isinstance(fitted, Sharded)
            told = body(member, model, optimizer, fitted)
            figures = fitted.stats()
            assert figures.moves["from_members"] > 0 or sharding == "asymmetric"
            assert figures.host_peak <= fitted.plan.host_bytes + fitted.plan.staging_bytes
        return told, {name: p.detach().clone() for name, p in model.named_parameters()}

    return together(count, run)


def train(weights: tuple[float, ...], steps: int = STEPS, clip: float = 0.0) -> Body:
    def body(member: Member, model: Model, optimizer: torch.optim.Optimizer, fitted: Sharded) -> list[Tensor]:
        norms = []
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, member.rank, step).backward()
            assert fitted.reduce(weights[member.rank], 1.0) == len(weights)
            if clip:
                norms.append(fitted.clip_grad_norm_(clip))
            optimizer.step()
        return norms

    return body


@pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    "groups", [PAIRS, ((0, 2), (1, 3)), pytest.param(((0,), (1,), (2,)), marks=pytest.mark.soak)]
)
def test_each_group_trains_its_own_and_all_the_rest(groups: Any, sharding: str) -> None:
    """To the bit: sums are added in order of rank, here as there."""
    weights = (1.0,) * sum(map(len, groups))
    values, _ = plain(weights, groups, STEPS, 0.0)
    found = shared_by(groups, train(weights), sharding)
    for rank, (told, ended) in enumerate(found):
        expected = values[group_of(rank, groups)]
        for name, value in ended.items():
            if len(groups[0]) == 2:
                assert torch.equal(value, expected[name]), (rank, name)
            else:
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert same(told, found[0][0])
    assert not torch.equal(found[0][1]["expert.0.weight"], found[-1][1]["expert.0.weight"])


@pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])
def test_weights_count_within_each_group_and_the_norm_is_of_all(sharding: str) -> None:
    """A member without a say, and groups whose weights sum to other numbers. Each group's own parameters
    count once in the norm, and the rest once."""
    weights = (1.0, 3.0, 0.0, 2.0)
    values, norms = plain(weights, PAIRS, STEPS, 0.05)
    for rank, (told, ended) in enumerate(shared_by(PAIRS, train(weights, clip=0.05), sharding, share=0.75)):
        for name, value in ended.items():
            torch.testing.assert_close(value, values[group_of(rank, PAIRS)][name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(told, norms)


def test_a_group_that_weighs_nothing_in_a_step_leaves_its_own_alone() -> None:
    weights = (1.0, 3.0, 0.0, 0.0)
    values, _ = plain(weights, PAIRS, STEPS, 0.0)
    found = shared_by(PAIRS, train(weights), share=0.75)
    for rank, (_, ended) in enumerate(found):
        for name, value in ended.items():
            torch.testing.assert_close(value, values[group_of(rank, PAIRS)][name], rtol=1e-4, atol=1e-5)
    assert torch.equal(found[3][1]["expert.0.weight"], Model(1).expert[0].weight)


Given = Callable[[Member, Model], None]


def refusal(give: Given, kind: type[AtollError], memories: Any = None) -> str:
    built = [(Model(0), None) for _ in range(4)]

    def run(member: Member) -> None:
        model, _ = built[member.rank]
        give(member, model)
        plan(model, adamw(list(model.parameters())), memories or memory(model, 0.5), member)

    with pytest.raises(kind) as raised:
        together(4, run)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_members_give_unlike_is_refused_in_one_line() -> None:
    def lists(*given: tuple[int, ...]) -> Given:
        return lambda member, model: over(model.expert, given[member.rank])

    of = "atoll.memory.over of 'expert.0.weight': worker"
    said = refusal(lists((0, 1), (0, 1), (0, 3), (2, 3)), PrepareError)
    assert said == f"{of} 2 gives [0, 3], and is not among them itself"
    said = refusal(lists((0, 1), (0, 1), (2, 3), (1, 3)), PrepareError)
    assert said == f"{of} 2 gives [2, 3], and worker 3 [1, 3]; all workers of a list give the same"
    said = refusal(lists((0, 1), (0, 1), (2, 4), (3,)), PrepareError)
    assert said == f"{of} 2 gives [2, 4], and there are 4 workers"
    said = refusal(lists((0,), (1, 2, 3), (1, 2, 3), (1, 2, 3)), PrepareError)
    assert said.startswith(f"{of} 1 gives [1, 2, 3], and worker 0 [0]; the lists are to be equally long")
    said = refusal(
        lambda member, model: over(model.expert, [0, 1]) if member.rank < 2 else None, PrepareError
    )
    assert said.startswith("atoll.memory.over: worker 2 has given it nothing, and worker 0 4 parameters from")
    pinned = msgspec.structs.replace(memory(Model(0), 0.5), step="device")
    said = refusal(lists((0, 1), (0, 1), (2, 3), (2, 3)), ConfigError, pinned)
    assert said.startswith("memory.step: with atoll.memory.over chunks are stepped in host memory")


def test_what_over_itself_refuses() -> None:
    model = Model(0)
    for ranks in ([], [0, 0], [-1], [0.5], [True], "01", 1):
        with pytest.raises(UserError, match="ranks are a list of different whole numbers from 0 on, not "):
            over(model.expert, ranks)  # type: ignore[arg-type]
    over(model.expert, [1, 0])
    over(model.expert, (0, 1))
    with pytest.raises(UserError, match=r"is over \[0, 1\] already, and cannot be over \[2, 3\] too"):
        over(model, [2, 3])
    with pytest.raises(UserError, match="give it a module that has parameters"):
        over(nn.Tanh(), [0, 1])
    with pytest.raises(PrepareError, match=r"has given 'expert\.0\.weight' the workers \[0, 1\], "):
        fit(model, adamw(list(model.parameters())), memory=memory(model, 0.5))


def test_torch_s_own_norm_and_a_gradient_scaler_are_refused() -> None:
    """They would take this group's own for all there is."""

    def body(member: Member, model: Model, optimizer: torch.optim.Optimizer, fitted: Sharded) -> list[str]:
        said = []
        loss_of(model, member.rank, 0).backward()
        fitted.reduce()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for use in (
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: scaler.unscale_(optimizer),
            lambda: scaler.step(optimizer),
        ):
            with pytest.raises(UserError) as raised:
                use()
            said.append(str(raised.value))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        with pytest.raises(UserError, match="this model is prepared already; call it before that"):
            over(model.body, [0, 1, 2, 3])
        fitted.sync("clipped")
        optimizer.step()
        return said

    for said, _ in shared_by(PAIRS, body):
        assert all("sees this group's gradients alone" in line and "\n" not in line for line in said)
