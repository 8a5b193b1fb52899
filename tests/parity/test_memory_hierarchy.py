"""Groups of members that each hold a replica of the model: against plain PyTorch, which adds gradients up
group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from memory_members import (
    Accumulating,
    ClippedByTorch,
    ReducingEach,
    Script,
    compare,
    plainly,
    sgd,
    share_between,
    values_of,
)
from torch import Tensor

from atoll.chunks import lay_out_memory
from atoll.core.errors import PrepareError
from atoll.memory import planning
from atoll.memory.fit import plan
from atoll.memory.over import over
from atoll.memory.sharded import Sharded
from atoll.moves.owners import UNIT, Groups
from support.families import build
from support.members import Member, together
from support.tight import memory, same

pytestmark = pytest.mark.usefixtures("poisoned")
PAIRS = ((0, 1), (2, 3))
ACROSS = ((0, 2), (1, 3))
UNEQUAL = ((0, 1), (2,))


def nothing(_optimizer: torch.optim.Optimizer) -> Any:
    """What is done between backward and step."""


def plain(script: Script, groups: Groups, steps: int, clip: Any = nothing) -> tuple[list[Tensor], list[Any]]:
    """The values after these steps, and what `clip` gave in each."""
    model, optimizer = script.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    total, seen = sum(script.weights), []
    for step in range(steps):
        of_groups: list[list[Tensor | None]] = []
        for group in groups:
            own: list[Tensor | None] = [None] * len(trained)
            for rank in group:
                if script.weights[rank]:  # else it has no gradients
                    loss = script.loss(model, rank, step)
                    found = torch.autograd.grad(loss, trained, allow_unused=True)
                    own = added(own, [g if g is None else g * (script.weights[rank] / total) for g in found])
            of_groups.append(own)
        for parameter, *gradients in zip(trained, *of_groups, strict=True):
            sums: list[Tensor | None] = [None]
            for gradient in gradients:
                sums = added(sums, [gradient])
            (parameter.grad,) = sums
        seen.append(clip(trained))
        optimizer.step()
    return values_of(model), seen


def added(sums: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(sums, more, strict=True)]


def watching(script: Script, groups: Groups, steps: int) -> Callable[..., Any]:
    """Trains, and sees that values come from the member's own group alone, and that to each other group no
    more goes in a step than the member's parts."""

    def run(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        own, fetch, exchange = (
            next(group for group in groups if member.rank in group),
            member.fetch,
            member.exchange,
        )
        sent = 0

        def fetch_inside(holder: int, *asked: Any) -> None:
            assert holder in own
            fetch(holder, *asked)

        def count(tensor: Tensor, sends: Sequence[int], *rest: Any) -> Any:
            nonlocal sent
            sent += sum(numel for rank, numel in enumerate(sends) if rank not in own)
            return exchange(tensor, sends, *rest)

        member.fetch, member.exchange = fetch_inside, count  # type: ignore[assignment, method-assign]
        told = script.train(member, model, optimizer, fitted, steps)
        bounds = [fitted.sharing.part(each.chunk.id) for each in fitted._trained]
        assert 0 < sent <= (len(groups) - 1) * steps * sum(end - begin for begin, end in bounds)
        return told

    return run


def compare_groups(
    script: Script, groups: Groups, share: float = 0.5, steps: int = 3, **more: Any
) -> list[tuple[Any, list[Tensor]]]:
    """To the bit: all members and groups, and plain PyTorch that adds in the same order."""
    values, _ = plain(script, groups, steps)
    found = share_between(script, share, watching(script, groups, steps), groups, **more)
    for rank, (_, ended) in enumerate(found):
        assert same(ended, values), f"member {rank}"
    return found


HERE = [
    ("gpt", PAIRS, "symmetric"),
    ("experts", ACROSS, "asymmetric"),
    ("tied", UNEQUAL, "symmetric"),
    ("tied", UNEQUAL, "asymmetric"),
]
FAMILIES_IN_GROUPS = [
    ("gpt", PAIRS),
    ("experts", ACROSS),
    ("vit", PAIRS),
    ("lora", PAIRS),
    ("resnet", ACROSS),
    ("lstm", PAIRS),
    ("thrice", UNEQUAL),
    ("experts", ((0, 3), (1,), (2, 4))),
    ("gpt", ((0, 1), (2, 3), (4, 5))),
    ("gpt", ((0, 1, 2), (3,))),
]
EVERY = [(*each, sharding) for each in FAMILIES_IN_GROUPS for sharding in ("symmetric", "asymmetric")]


@pytest.mark.check
@pytest.mark.parametrize(
    ("family", "groups", "sharding"),
    [*HERE, *(pytest.param(*each, marks=pytest.mark.soak) for each in EVERY if each not in HERE)],
)
def test_each_group_holds_a_replica_and_all_train_as_one(family: str, groups: Groups, sharding: Any) -> None:
    weights = (1.0,) * sum(map(len, groups))
    compare_groups(Script(family, weights), groups, 0.75 if family == "gpt" else 0.5, sharding=sharding)


@pytest.mark.parametrize("sharding", ["symmetric", pytest.param("asymmetric", marks=pytest.mark.soak)])
def test_each_member_a_group(sharding: str) -> None:
    """Each holds all of it; what comes from two other groups has its room in rounds."""
    compare_groups(Script("experts", (1.0,) * 3), ((0,), (1,), (2,)), sharding=sharding)


@pytest.mark.check
@pytest.mark.parametrize(
    "weights", [(1.0, 3.0, 0.0, 0.0), pytest.param((1.0, 3.0, 0.0, 2.0), marks=pytest.mark.soak)]
)
def test_members_and_a_group_that_weigh_nothing(weights: tuple[float, ...]) -> None:
    compare_groups(Script("experts", weights), PAIRS)


# In the sums of two backwards members and micro-batches come in another order than in the reference.
@pytest.mark.check
@pytest.mark.parametrize(
    ("kind", "sharding", "groups"),
    [
        (ReducingEach, "symmetric", UNEQUAL),
        pytest.param(Accumulating, "asymmetric", UNEQUAL, marks=pytest.mark.soak),
        pytest.param(ReducingEach, "asymmetric", PAIRS, marks=pytest.mark.soak),
        pytest.param(ClippedByTorch, "symmetric", UNEQUAL, marks=pytest.mark.soak),
    ],
)
def test_accumulated_and_clipped(kind: type[Accumulating], sharding: str, groups: Groups) -> None:
    script = kind("gpt", (1.0,) * sum(map(len, groups)), sgd)
    compare(script, 0.25, exact=False, replicas=groups, sharding=sharding)


@pytest.mark.parametrize("groups", [pytest.param(PAIRS, marks=pytest.mark.soak), UNEQUAL])
def test_the_norm_counts_each_chunk_once(groups: Groups) -> None:
    class Clipped(Script):
        def build(self) -> tuple[Any, torch.optim.Optimizer]:  # in float64 norms of parts round otherwise
            model = build(self.family, self.seed).double()
            return model, self.make(list(model.parameters()))

        def clip(self, model: Any, fitted: Sharded | None) -> Any:
            return None if fitted is None else fitted.clip_grad_norm_(0.05)

    script = Clipped("experts", (1.0,) * sum(map(len, groups)))
    values, norms = plain(script, groups, 3, lambda trained: torch.nn.utils.clip_grad_norm_(trained, 0.05))
    found = share_between(script, 0.5, lambda m, *rest: script.train(m, *rest, 3), groups)
    for told, ended in found:
        assert same((told, ended), found[0])  # to the bit, though a group holds a gradient in other parts
        torch.testing.assert_close(told, norms, rtol=1e-9, atol=0)
        torch.testing.assert_close(ended, values, rtol=0, atol=1e-9)


@pytest.mark.check
@pytest.mark.parametrize("groups", [UNEQUAL, pytest.param(PAIRS, marks=pytest.mark.soak)])
def test_a_disk_tier_of_each_member(tmp_path: Any, groups: Groups) -> None:
    script = Script("gpt", (1.0,) * sum(map(len, groups)))
    compare_groups(script, groups, 0.25, 2, host="200KB", disk=f"{tmp_path}:20MB")


@pytest.mark.check
def test_gradients_and_states_are_read_by_any_member_and_load_into_all() -> None:
    """What the second group reads is to the bit what the first does; what it loads, all train on with."""
    script = Script("experts", (1.0,) * 4)

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 1)
        optimizer.zero_grad()
        script.backward(model, member.rank, 1, fitted)
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        fitted.sync("read")
        optimizer.step()
        saved = plainly(model.state_dict()), plainly(optimizer.state_dict())
        script.train(member, model, optimizer, fitted, 1)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return gradients, list(saved[0].values()), plainly(optimizer.state_dict())

    found = share_between(script, 0.5, body, PAIRS)
    values, _ = plain(script, PAIRS, 2)
    _, optimizer = script.build()
    for (gradients, saved, states), ended in found:
        assert same(gradients, found[0][0][0])
        assert same(ended, values)
        assert same(saved, [*values, *saved[len(values) :]])
        for index, state in states["state"].items():
            assert same(list(state.values()), list(found[0][0][2]["state"][index].values()))
    optimizer.load_state_dict(found[3][0][2])  # plain PyTorch takes it


def test_what_is_not_finite_in_one_group_is_told_to_all() -> None:
    script = Script("experts", (1.0,) * 4)

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        loss = script.loss(model, member.rank, 0)
        (loss * (float("nan") if member.rank == 3 else 1.0)).backward()
        fitted.reduce()
        return fitted.all_finite(), bool(fitted.nonfinite())

    told = [told for told, _ in share_between(script, 0.5, body, PAIRS)]
    assert not any(finite for finite, _ in told)
    assert told[0][1] == told[2][1]
    assert any(named for _, named in told[:2])


def test_parts_that_groups_have_of_their_own_are_refused_in_one_line() -> None:
    built = [Script("experts", (1.0,) * 4).build() for _ in range(4)]

    def run(member: Member) -> None:
        model, optimizer = built[member.rank]
        over(model, PAIRS[member.rank // 2])
        plan(model, optimizer, memory(model, 0.5), member)

    with pytest.raises(
        PrepareError, match=r"the workers \[\d, \d\], and here each group of workers holds"
    ) as no:
        together(4, run, replicas=PAIRS)
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(("groups", "held"), [(PAIRS, 2), (UNEQUAL, 1)])
def test_the_plan_counts_what_goes_between_groups(groups: Groups, held: int) -> None:
    """In its time too; and a member holds its part of its group's replica."""
    count = sum(map(len, groups))
    built = [Script("gpt", (1.0,) * count).build() for _ in range(count)]

    def run(member: Member) -> Any:
        model, optimizer = built[member.rank]
        return plan(model, optimizer, memory(model, 0.5), member)

    found = together(count, run, replicas=groups)
    model, optimizer = built[0]
    layout = lay_out_memory(planning.specs_for(model, [optimizer]), chunk_bytes=found[0].chunk_bytes)
    largest = 4 * sum(chunk.extent for chunk in layout.trainable) // held
    for each in found:  # but for the elements by which a part is larger than another
        assert 0 <= each.predicted.nbytes["from_groups"] - largest <= 4 * UNIT * len(layout.trainable)
        assert f"of each of {len(groups)} groups" in each.reason
    whole = together(count, lambda member: plan(*built[member.rank], memory(model, 0.5), member))
    assert all("from_groups" not in each.predicted.nbytes for each in whole)
    assert found[-1].predicted.seconds != whole[-1].predicted.seconds
