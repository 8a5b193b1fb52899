"""Members that hold one model together, and the plain script beside them.

Members are threads (`tests/support/members.py`); what they share goes through the same calls as between
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.memory.fit import fit
from atoll.memory.sharded import Sharded
from atoll.moves.owners import Groups
from support.families import FAMILIES, batch, build, loss_of
from support.members import Member, together
from support.tight import adamw, memory, same

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


BOTH = pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Where sums are rounded in another order: AdamW makes a whole step of a gradient of nothing else."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Script:
    """What a user writes. `train` makes a step of one member; the plain reference makes all members' parts in
    turn, in one process, with `weights` by rank."""

    def __init__(self, family: str, weights: tuple[float, ...], make: Make = adamw, seed: int = 0) -> None:
        self.family, self.weights, self.make, self.seed = family, weights, make, seed

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        model = build(self.family, self.seed)
        return model, self.make([p for p in model.parameters() if p.requires_grad])

    def loss(self, model: Any, rank: int, step: int, micro: int = 0) -> Tensor:
        inputs, targets = batch(self.family, (step * len(self.weights) + rank) * 2 + micro)
        return loss_of(model(inputs), targets)

    def backward(self, model: Any, rank: int, step: int, fitted: Sharded | None) -> None:
        """One member's backwards and reductions; for the reference, of its weighted loss."""
        if fitted is None:
            if self.weights[rank]:  # one of weight 0 counts as having no gradients
                (self.loss(model, rank, step) * (self.weights[rank] / sum(self.weights))).backward()
            return
        self.loss(model, rank, step).backward()
        assert fitted.reduce(self.weights[rank], 4.0) == 4.0 * len(self.weights)

    def clip(self, model: Any, fitted: Sharded | None) -> Any:
        """Between backward and step."""

    def plain(self, steps: int) -> tuple[list[Tensor], list[Any]]:
        model, optimizer = self.build()
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(len(self.weights)):
                self.backward(model, rank, step, None)
            seen.append(self.clip(model, None))
            optimizer.step()
        return values_of(model), seen

    def train(self, member: Member, model: Any, optimizer: Any, fitted: Sharded, steps: int) -> list[Any]:
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            self.backward(model, member.rank, step, fitted)
            seen.append(self.clip(model, fitted))
            optimizer.step()
        return seen


def values_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def share_between(
    script: Script,
    share: float,
    body: Callable[[Member, Any, Any, Sharded], Any],
    replicas: Groups = (),
    **more: Any,
) -> list[tuple[Any, list[Tensor]]]:
    """What `body(member, model, optimizer, fitted)` gives on each member, and the values at its end. Each
    member's host memory keeps to its plan's."""
    count = len(script.weights)
    built = [script.build() for _ in range(count)]  # one after another: they draw from one generator

    def run(member: Member) -> tuple[Any, list[Tensor]]:
        model, optimizer = built[member.rank]
        with fit(model, optimizer, memory=memory(model, share, **more), members=member) as fitted:
            assert isinstance(fitted, Sharded)
            seen = body(member, model, optimizer, fitted)
            figures, plan = fitted.stats(), fitted.plan
        assert figures.device_peak <= figures.device_budget
        assert figures.host_peak <= plan.host_bytes + plan.staging_bytes
        assert figures.host_budget is None or figures.host_peak <= figures.host_budget
        assert plan.holding is not None
        assert all(type(p) is nn.Parameter for p in model.parameters())
        return seen, values_of(model)

    return together(count, run, replicas=replicas)


def compare(script: Script, share: float, steps: int = 3, exact: bool = True, **more: Any) -> None:
    """All members end with the same bits, which are the reference's; or near it, where weights round."""
    values, seen = script.plain(steps)
    found = share_between(script, share, lambda member, *rest: script.train(member, *rest, steps), **more)
    for rank, (told, ended) in enumerate(found):
        assert same((told, ended), found[0]), f"member {rank} is not where member 0 is"
    if exact:
        assert same(found[0][0], seen)
        assert same(found[0][1], values)
    else:
        torch.testing.assert_close(found[0][1], values, rtol=1e-5, atol=1e-6)


FAMILIES_HERE = [name for name in FAMILIES if name != "assorted"]  # which writes to a weight in its forward


class Accumulating(Script):
    """Two backwards to a step; `each`: each is reduced, as without no_sync; else both are at once."""

    each = False
    torch_clips = False

    def backward(self, model: Any, rank: int, step: int, fitted: Sharded | None) -> None:
        for micro in range(2):
            loss = self.loss(model, rank, step, micro)
            if fitted is None:
                (loss * (self.weights[rank] / sum(self.weights))).backward()
            else:
                loss.backward()
                if micro == 1 or self.each:
                    fitted.reduce(self.weights[rank], 1.0)

    def clip(self, model: Any, fitted: Sharded | None) -> Any:
        if fitted is None or self.torch_clips:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        return fitted.clip_grad_norm_(0.5).item()


class ReducingEach(Accumulating):
    each = True


class ClippedByTorch(Accumulating):
    torch_clips = True


def plainly(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: plainly(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plainly(value) for value in state]
    return state


def check_same_states(found: Any, wanted: Any) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for key, state in wanted["state"].items():
        assert found["state"][key].keys() == state.keys()
        for name, value in state.items():
            assert same(found["state"][key][name], value), (key, name)
