"""A model that several members hold together trains as the plain one does on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from memory_members import (
    BOTH,
    FAMILIES_HERE,
    Accumulating,
    ClippedByTorch,
    ReducingEach,
    Script,
    check_same_states,
    compare,
    plainly,
    sgd,
    share_between,
    values_of,
)
from torch import Tensor, nn

from atoll.chunks import lay_out_memory
from atoll.core.errors import ConfigError, PrepareError, UserError
from atoll.core.memory import Memory
from atoll.memory import copies, planning
from atoll.memory.fit import fit, plan
from atoll.memory.sharded import Sharded
from atoll.memory.stages import Stages
from atoll.moves.owners import UNIT
from support.families import batch, build, loss_of
from support.members import Member, together
from support.models import TinyGPT
from support.optimizers import SETTINGS
from support.tight import memory, same

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("poisoned")]


def _of_both(families: list[str]) -> list[Any]:
    """All by symmetric sharding, which is the default, and some by asymmetric."""
    also = ("gpt", "experts", "lora")
    rest = [pytest.param(each, "asymmetric", marks=pytest.mark.soak) for each in families if each not in also]
    return [*((each, "auto") for each in families), *((each, "asymmetric") for each in also), *rest]


@pytest.mark.parametrize(("family", "sharding"), _of_both(FAMILIES_HERE))
def test_two_members_train_as_plain_pytorch_does(family: str, sharding: str) -> None:
    share = {"gpt": 0.75, "vit": 0.5, "experts": 0.5, "thrice": 0.75}.get(family, 0.25)
    compare(Script(family, (1.0, 1.0)), share, sharding=sharding)


@pytest.mark.check
@pytest.mark.parametrize("sharding", ["symmetric", pytest.param("asymmetric", marks=pytest.mark.soak)])
@pytest.mark.parametrize(("family", "share"), [("tied", 0.5), ("experts", 0.25), ("lora", 0.75)])
def test_four_members_train_as_plain_pytorch_does(family: str, share: float, sharding: str) -> None:
    compare(Script(family, (1.0,) * 4), share, steps=2, sharding=sharding)


def test_chunks_that_stay_on_the_device_have_new_values_after_each_step() -> None:
    compare(Script("gpt", (1.0, 1.0)), 0.5, resident="0.3")


@pytest.mark.check
@BOTH
def test_values_come_by_the_host_where_a_device_has_memory_of_its_own(
    sharding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[str] = []
    stage = Stages.one

    def noted(stages: Stages, words: str, *wanted: Any) -> Any:
        staged.append(words)
        return stage(stages, words, *wanted)

    monkeypatch.setattr(Stages, "one", noted)
    compare(Script("gpt", (1.0, 1.0)), 0.5, sharding=sharding)
    at_once = len(staged)  # as the model is laid out, and given back
    monkeypatch.setattr(copies, "is_needless", lambda _: False)
    compare(Script("gpt", (1.0, 1.0)), 0.5, sharding=sharding)
    assert len(staged) > 2.5 * at_once


def test_one_member_is_a_world_of_one() -> None:
    script = Script("experts", (1.0,))
    compare(script, 0.5)
    ((_, shared),) = share_between(script, 0.5, lambda m, *rest: script.train(m, *rest, 3))
    model, optimizer = script.build()
    with fit(model, optimizer, memory=memory(model, 0.5)):
        for step in range(3):
            optimizer.zero_grad()
            script.loss(model, 0, step).backward()
            optimizer.step()
    assert same(shared, values_of(model))


class Branching(Script):
    """Which blocks run, in which order, and how often, depends on the member: some have no gradient there."""

    def loss(self, model: Any, rank: int, step: int, micro: int = 0) -> Tensor:
        inputs, targets = batch(self.family, step * len(self.weights) + rank)
        x = model.tokens(inputs) + model.positions
        for index in [[0, 1], [2, 0, 0]][rank] if step else [[1], [1, 1]][rank]:
            x = model.blocks[index](x)
        return loss_of(model.head(model.norm(x)), targets)


def test_members_that_use_other_chunks_in_other_orders() -> None:
    compare(Branching("gpt", (1.0, 1.0)), 0.5, steps=4)


# In the sums of two backwards members and micro-batches come in another order than in the reference.
@pytest.mark.check
@pytest.mark.parametrize("kind", [Accumulating, ReducingEach, ClippedByTorch])
def test_accumulated_and_clipped(kind: type[Accumulating]) -> None:
    compare(kind("gpt", (1.0, 1.0), sgd), 0.25, exact=False)


@pytest.mark.check
@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.0, 2.0), (1.0, 0.0, 0.5)])
def test_weights_of_members(weights: tuple[float, ...]) -> None:
    compare(Script("experts", weights, sgd), 0.5, exact=False)


@pytest.mark.check
def test_half_precision_with_masters() -> None:
    """The reference is a world of one with the same global batch; what is summed is rounded to bfloat16."""

    class Half(Script):
        def build(self) -> tuple[Any, torch.optim.Optimizer]:
            model = build(self.family, self.seed).to(torch.bfloat16)
            return model, self.make(list(model.parameters()))

    script = Half("gpt", (1.0, 1.0))
    alone = Half("gpt", (1.0,))
    found = share_between(script, 0.5, lambda m, *rest: script.train(m, *rest, 3), master=True)

    def both(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(2):
                (script.loss(model, rank, step) / 2).backward()
            fitted.reduce()
            optimizer.step()

    ((_, values),) = share_between(alone, 0.5, both, master=True)
    assert same(found[0][1], found[1][1])
    assert same(found[0][1], values)


@pytest.mark.check
def test_a_disk_tier_of_each_member(tmp_path: Path) -> None:
    compare(ReducingEach("gpt", (1.0, 1.0), sgd), 0.25, host="200KB", disk=f"{tmp_path}:20MB", exact=False)


@pytest.mark.check
@pytest.mark.parametrize("name", ["SGD", "NAdam", "Rprop"])
def test_states_of_the_optimizer_are_seen_by_all_and_load_everywhere(name: str) -> None:
    """Saved by one of two members while the other waits; loaded by plain PyTorch, and by both again."""
    script = Script("gpt", (1.0, 1.0), lambda p: getattr(torch.optim, name)(p, **SETTINGS[name][-1]))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 2)
        saved = None
        if member.rank == 1:
            saved = plainly(model.state_dict()), plainly(optimizer.state_dict())
        fitted.sync("saved")
        first = plainly(model.state_dict()), plainly(optimizer.state_dict())
        script.train(member, model, optimizer, fitted, 2)
        model.load_state_dict(first[0])
        optimizer.load_state_dict(first[1])
        again = plainly(optimizer.state_dict())
        script.train(member, model, optimizer, fitted, 2)
        return saved, first, again

    found = share_between(script, 0.5, body)
    model, optimizer = script.build()
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            script.backward(model, rank, step, None)
        optimizer.step()
    plain = model.state_dict(), optimizer.state_dict()
    assert found[1][0][0] is not None
    for saved in (found[1][0][0], found[0][0][1], found[1][0][1]):
        assert list(saved[0]) == list(plain[0])
        assert all(torch.equal(saved[0][key], plain[0][key]) for key in plain[0])
        check_same_states(saved[1], plain[1])
    check_same_states(found[0][0][2], plain[1])
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            script.backward(model, rank, step, None)
        optimizer.step()
    assert same(found[0][1], values_of(model))
    assert same(found[1][1], values_of(model))


class WithNothing(nn.Module):
    """Parameters without elements before, between and behind others, and one smaller than a part."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (0, 300, 0, 1, 90, 0)
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size,), 0.5)) for size in sizes])

    def forward(self) -> Tensor:
        return torch.cat([part.flatten() for part in self.parts]).square().sum()


@BOTH
def test_parameters_without_elements_are_trained_and_have_a_state(sharding: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = WithNothing()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, fitted: Sharded | None) -> Any:
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            if fitted is not None:
                fitted.reduce()
            optimizer.step()
        return plainly(optimizer.state_dict())

    def body(member: Member) -> tuple[Any, list[Tensor]]:
        model, optimizer = make()
        budget = Memory(device="4KiB", chunk="4096", step="host", sharding=sharding)
        with fit(model, optimizer, memory=budget, members=member) as fitted:
            assert isinstance(fitted, Sharded)
            state = train(model, optimizer, fitted)
        return state, values_of(model)

    plain, optimizer = make()
    wanted = train(plain, optimizer, None)
    for state, values in together(3, body):
        check_same_states(state, wanted)
        torch.testing.assert_close(values, values_of(plain))


def test_plans_that_members_agree_on() -> None:
    built = [Script("gpt", (1.0, 1.0)).build() for _ in range(2)]

    def found(devices: tuple[str, str], hosts: tuple[str, str] = ("", ""), wide: bool = False) -> Any:
        def body(member: Member) -> Any:
            model, optimizer = built[member.rank]
            if wide and member.rank:
                model = nn.Linear(8, 8)
                optimizer = torch.optim.AdamW(model.parameters())
            given = Memory(device=devices[member.rank], host=hosts[member.rank])
            return plan(model, optimizer, given, member)

        return together(2, body)

    small, large = found(("128KiB", "192KiB"))
    assert (small.chunk_bytes, small.holding) == (large.chunk_bytes, large.holding)
    assert small.sharding == "symmetric"
    assert "chunks are split evenly over the members" in small.reason
    assert small.blocks < large.blocks
    for chunk in lay_out(small.chunk_bytes):
        begin, middle = small.holding.part(chunk.id, 0)
        assert (begin, small.holding.part(chunk.id, 1)) == (0, (middle, chunk.extent))
        assert abs(2 * middle - chunk.extent) <= 2 * UNIT
    whole = found(("64MiB", "64MiB"))
    assert all(each.fits and "each holds the whole model" in each.reason for each in whole)
    assert not any(each.fits for each in found(("64MiB", "192KiB")))
    with pytest.raises(
        UserError, match=r"^worker 1: the budget of the device is too small: .*bytes .*would do"
    ):
        found(("128KiB", "1KiB"))
    with pytest.raises(
        UserError, match=r"^worker 0: the budget of the host is too small: .*bytes .*would do"
    ):
        found(("128KiB", "128KiB"), ("16KiB", ""))
    shardings = "auto", "asymmetric"
    with pytest.raises(
        ConfigError, match=r"^memory.sharding: worker 1 asks for asymmetric, and worker 0 for symmetric"
    ):
        together(
            2,
            lambda m: plan(*built[m.rank], memory(built[0][0], 0.5, sharding=shardings[m.rank]), m),
        )
    with pytest.raises(PrepareError, match="worker 1 has other parameters"):
        found(("128KiB", "128KiB"), wide=True)


def lay_out(chunk_bytes: int) -> Any:
    model, optimizer = Script("gpt", (1.0,)).build()
    return lay_out_memory(planning.specs_for(model, [optimizer]), chunk_bytes=chunk_bytes).chunks


def test_the_least_host_budget_that_a_refusal_names_would_do() -> None:
    script = Script("gpt", (1.0, 1.0))
    built = [script.build() for _ in range(2)]

    def body(member: Member, host: str) -> Any:
        model, optimizer = built[member.rank]
        return plan(model, optimizer, memory(model, 0.5, host=host), member)

    with pytest.raises(UserError, match=r"host is too small.*; (\d+) bytes") as raised:
        together(2, lambda member: body(member, "16KiB"))
    least = str(raised.value).split("; ")[1].split(" ")[0]
    plans = together(2, lambda member: body(member, least if member.rank == 0 else "1GiB"))
    assert plans[0].host_bytes + plans[0].staging_bytes == int(least)
    alone = planning.choose(
        built[0][0], [built[0][1]], msgspec.structs.replace(memory(built[0][0], 0.5)).budgets()
    )
    assert plans[0].host_bytes < 0.75 * alone.host_bytes  # half a chunk takes a page here
    assert isinstance(built[0][0], TinyGPT)
