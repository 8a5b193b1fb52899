"""A model that several members hold together trains as the plain one does on the same global batch.

The members are threads here (`tests/support/members.py`); what they share goes through the same calls as
between processes.
"""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from atoll.chunks import lay_out_memory
from atoll.core.errors import AtollError, ConfigError, MismatchError, PrepareError, RunError, UserError
from atoll.core.memory import Memory
from atoll.memory import copies, planning
from atoll.memory.bandwidth import measure
from atoll.memory.fit import fit, plan
from atoll.memory.payloads import VALUES
from atoll.memory.sharded import Sharded
from atoll.memory.stages import Stages
from atoll.moves.owners import UNIT, Groups
from atoll.moves.timeline import Bandwidths
from support.families import FAMILIES, batch, build, loss_of
from support.members import Member, together
from support.models import TinyGPT
from support.optimizers import SETTINGS

CHUNK = 4096
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@functools.cache
def _rates() -> Bandwidths:
    """Measured once for all fits."""
    return measure(torch.device("cpu"), None, tempfile.gettempdir())


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ATOLL_POISON", "1")
    rates = _rates()
    monkeypatch.setattr(planning, "measure", lambda *_: rates)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def memory(model: nn.Module, share: float, **more: Any) -> Memory:
    """A device budget of this share of all values, in whole blocks."""
    need = sum(-(-p.nbytes // CHUNK) for p in model.parameters() if p.nbytes >= CHUNK) * CHUNK
    need += sum(p.nbytes for p in model.parameters() if p.nbytes < CHUNK)
    return Memory(device=str(int(need * share) // CHUNK * CHUNK), chunk=str(CHUNK), step="host", **more)


BOTH = pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


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


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


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


def _of_both(families: list[str]) -> list[Any]:
    """All by symmetric sharding, which is the default, and some by asymmetric."""
    also = ("gpt", "experts", "lora")
    rest = [pytest.param(each, "asymmetric", marks=pytest.mark.soak) for each in families if each not in also]
    return [*((each, "auto") for each in families), *((each, "asymmetric") for each in also), *rest]


@pytest.mark.parametrize(("family", "sharding"), _of_both(FAMILIES_HERE))
def test_two_members_train_as_plain_pytorch_does(family: str, sharding: str) -> None:
    share = {"gpt": 0.75, "vit": 0.5, "experts": 0.5, "thrice": 0.75}.get(family, 0.25)
    compare(Script(family, (1.0, 1.0)), share, sharding=sharding)


@pytest.mark.parametrize("sharding", ["symmetric", pytest.param("asymmetric", marks=pytest.mark.soak)])
@pytest.mark.parametrize(("family", "share"), [("tied", 0.5), ("experts", 0.25), ("lora", 0.75)])
def test_four_members_train_as_plain_pytorch_does(family: str, share: float, sharding: str) -> None:
    compare(Script(family, (1.0,) * 4), share, steps=2, sharding=sharding)


def test_chunks_that_stay_on_the_device_have_new_values_after_each_step() -> None:
    compare(Script("gpt", (1.0, 1.0)), 0.5, resident="0.3")


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


# In the sums of two backwards members and micro-batches come in another order than in the reference.
@pytest.mark.parametrize("kind", [Accumulating, ReducingEach, ClippedByTorch])
def test_accumulated_and_clipped(kind: type[Accumulating]) -> None:
    compare(kind("gpt", (1.0, 1.0), sgd), 0.25, exact=False)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.0, 2.0), (1.0, 0.0, 0.5)])
def test_weights_of_members(weights: tuple[float, ...]) -> None:
    compare(Script("experts", weights, sgd), 0.5, exact=False)


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


def test_a_disk_tier_of_each_member(tmp_path: Path) -> None:
    compare(ReducingEach("gpt", (1.0, 1.0), sgd), 0.25, host="200KB", disk=f"{tmp_path}:20MB", exact=False)


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


def check_gone(fitted: Sharded, rank: int) -> None:
    """After a step, who does not hold all of a gradient cannot rely on it, and is told so."""
    assert fitted.plan.holding is not None
    gradients = []
    for each in fitted.engine.chunks.values():
        begin, end = fitted.plan.holding.part(each.chunk.id, rank)
        for slot, parameter in zip(each.chunk.slots, each.parameters, strict=True):
            is_mine = begin <= slot.offset and slot.offset + slot.numel <= end
            gradients += [parameter.grad] if parameter.grad is not None and not is_mine else []
    assert gradients
    for gradient in gradients:
        with pytest.raises(UserError, match=r"lies with worker \d, .*; read it before optimizer.step\(\)"):
            gradient.norm()


def edit(model: Any, step: int) -> None:
    """What a script makes of all gradients, and of some: each member sees at once what its own has made."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    if step != 1:  # after which gradients are to be gone, and what scripts have views of stays
        model.head.weight.grad.view(-1)[::2] *= 3
    model.positions.grad = torch.ones_like(model.positions) * 0.01
    model.tokens.weight.grad = None


@BOTH
def test_gradients_as_scripts_read_and_write_them(sharding: str) -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        seen: list[Any] = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            script.backward(model, member.rank, step, fitted)
            seen.append([p.grad.clone() for p in model.parameters()])
            edit(model, step)
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            if step == 1:
                check_gone(fitted, member.rank)
        return seen

    found = share_between(script, 0.5, body, sharding=sharding)
    model, optimizer = script.build()
    seen = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for rank in range(2):
            script.backward(model, rank, step, None)
        seen.append([p.grad.clone() for p in model.parameters()])
        edit(model, step)
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    for told, values in found:
        assert same(told, seen)
        assert same(values, values_of(model))


class Centred(Script):
    """Changes each gradient by what all of it comes to, more than once before the members meet, and by a
    view too."""

    def clip(self, model: Any, fitted: Sharded | None) -> Any:
        for parameter in model.parameters():
            parameter.grad -= parameter.grad.mean()
            flat = parameter.grad.view(-1)
            flat.mul_(2.0)
            del flat
            parameter.grad /= parameter.grad.norm() + 1e-6


@pytest.mark.parametrize("sharding", ["symmetric", pytest.param("asymmetric", marks=pytest.mark.soak)])
def test_gradients_that_a_script_changes_more_than_once(sharding: str) -> None:
    compare(Centred("gpt", (1.0, 1.0), sgd), 0.5, steps=2, sharding=sharding)


class Doubled(Script):
    """In double precision, so that what is left out of a sum is seen far above what is rounded."""

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        model = build(self.family, self.seed).double()
        return model, self.make([p for p in model.parameters() if p.requires_grad])


def set_to_zero(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def let_go(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)


def zero_each(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def zero_some(model: Any, optimizer: Any) -> None:
    """Every other one: chunks have some of which the mean goes on."""
    for parameter in list(model.parameters())[::2]:
        if parameter.grad is not None:
            parameter.grad.zero_()


def set_each(model: Any, optimizer: Any) -> None:
    for number, parameter in enumerate(model.parameters()):
        ramp = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
        parameter.grad = (ramp + number) / (100 * parameter.numel())


def zero_then_set(model: Any, optimizer: Any) -> None:
    set_to_zero(model, optimizer)
    set_each(model, optimizer)


def let_go_of_one_and_set_it(model: Any, optimizer: Any) -> None:
    for parameter in (model.head.weight, model.norm.bias):
        parameter.grad = None
        parameter.grad = torch.full_like(parameter, 0.01)


def let_go_of_some(model: Any, optimizer: Any) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None


def halve(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def halve_a_view(model: Any, optimizer: Any) -> None:
    """Which the script goes on to have."""
    optimizer.views = [parameter.grad.view(-1) for parameter in model.parameters()]
    for view in optimizer.views:
        view[::2].mul_(0.5)


def clip_by_torch(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


REDUCED, LOCAL = "a backward that is reduced", "a backward under no_sync"
LOCAL_OF_ONE = "member 0 alone has a backward, and of some parameters alone"
Event = str | Callable[[Any, Any], None]
COURSES: dict[str, list[Event]] = {
    "none": [REDUCED, LOCAL, REDUCED],
    "reduced": [REDUCED, REDUCED, LOCAL, REDUCED],
    "zeros": [REDUCED, LOCAL, set_to_zero, REDUCED],
    "zeros-twice": [REDUCED, LOCAL, set_to_zero, LOCAL, set_to_zero, LOCAL, REDUCED],
    "zeros-of-the-mean": [REDUCED, REDUCED, set_to_zero, LOCAL, REDUCED],
    "let-go": [REDUCED, LOCAL, let_go, REDUCED],
    "let-go-after-zeros": [REDUCED, LOCAL, set_to_zero, let_go, LOCAL, REDUCED],
    "zero_": [REDUCED, LOCAL, zero_each, REDUCED],
    "zero_-of-some": [REDUCED, LOCAL, zero_some, LOCAL, REDUCED],
    "set": [REDUCED, LOCAL, set_each, REDUCED],
    "set-after-zeros": [REDUCED, LOCAL, zero_then_set, LOCAL, REDUCED],
    "set-after-none": [REDUCED, LOCAL, let_go_of_one_and_set_it, REDUCED],
    "halved": [REDUCED, halve, LOCAL, REDUCED],
    "halved-by-a-view": [REDUCED, halve_a_view, LOCAL, REDUCED],
    "clipped": [REDUCED, clip_by_torch, LOCAL, REDUCED],
    "halved-and-clipped": [REDUCED, halve, clip_by_torch, LOCAL, REDUCED, clip_by_torch],
    "zeros-where-one-has-more": [REDUCED, LOCAL_OF_ONE, set_to_zero, REDUCED],
    "set-where-one-has-more": [REDUCED, LOCAL_OF_ONE, set_each, REDUCED],
    "set-where-one-has-the-first": [LOCAL_OF_ONE, REDUCED, let_go, LOCAL_OF_ONE, set_each, REDUCED],
    "set-where-one-has-all": [REDUCED, let_go_of_some, LOCAL_OF_ONE, set_each, REDUCED],
    "none-where-one-has-more": [REDUCED, LOCAL_OF_ONE, REDUCED],
    "zeros-and-nothing-after": [REDUCED, LOCAL, set_to_zero, LOCAL_OF_ONE, "reduce"],
    "stepped-and-set": [REDUCED, "step", let_go, set_each, "reduce", LOCAL, REDUCED],
}


class Course(Doubled):
    """A step in which each member goes through some events; `plain` and `train` compare its end."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__("gpt", (1.0, 1.0), lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
        self.events = events

    def go(self, model: Any, optimizer: Any, ranks: list[int], fitted: Sharded | None) -> None:
        for number, event in enumerate(self.events):
            if not isinstance(event, str):
                event(model, optimizer)
            elif event == "step":
                optimizer.step()
            elif event != "reduce":
                for rank in ranks if event != LOCAL_OF_ONE else ranks[: ranks[0] == 0]:
                    self.one(event, model, rank, number).mul(0.5 if fitted is None else 1.0).backward()
            if event in (REDUCED, "reduce") and fitted is not None:
                fitted.reduce()
        optimizer.step()
        optimizer.views = []

    def one(self, event: str, model: Any, rank: int, number: int) -> Tensor:
        if event != LOCAL_OF_ONE:
            return self.loss(model, rank, number)
        return model.head.weight.square().sum() + model.blocks[1](model.positions[None]).square().mean()


ALSO_ASYMMETRIC = ("zeros", "halved-by-a-view", "zeros-where-one-has-more", "set-where-one-has-all")


def _all_courses() -> list[Any]:
    soak = [pytest.param(name, "asymmetric", marks=pytest.mark.soak) for name in COURSES]
    rest = [each for each in soak if each.values[0] not in ALSO_ASYMMETRIC]
    plain = [(name, "symmetric") for name in COURSES]
    return [*plain, *((name, "asymmetric") for name in ALSO_ASYMMETRIC), *rest]


@pytest.mark.parametrize(("name", "sharding"), _all_courses())
def test_gradients_that_come_after_a_mean_and_what_the_script_makes_of_it(name: str, sharding: str) -> None:
    script = Course(COURSES[name])
    model, optimizer = script.build()
    before = values_of(model)
    script.go(model, optimizer, [0, 1], None)
    found = share_between(
        script, 0.5, lambda m, model, opt, fitted: script.go(model, opt, [m.rank], fitted), sharding=sharding
    )
    for _, values in found:
        torch.testing.assert_close(values, values_of(model), rtol=1e-9, atol=1e-12)
    assert same(found[0][1], found[1][1])
    assert not same(before, found[0][1])


class Slow(torch.optim.SGD):
    """Whose chunks are stepped long after `step()` has returned."""

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread().name == "atoll-stepping":
            time.sleep(0.005)
        return super().step(closure)


def test_gradients_are_set_to_zero_while_chunks_are_still_to_be_stepped() -> None:
    """Nobody holds a gradient's lock while he waits for a step, which takes it too."""
    script = Script("gpt", (1.0, 1.0), lambda parameters: Slow(parameters, lr=0.05))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
        for step in range(3):
            script.backward(model, member.rank, step, fitted)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    found = share_between(script, 0.5, body)
    values, _ = script.plain(3)
    assert same(found[0][1], values)
    assert same(found[1][1], values)


def test_who_is_behind_reads_gradients_that_others_have_let_go_of() -> None:
    """A script that skips a step: a fast member drops the mean, or has more gradients, before a slow one has
    read it."""
    script = Script("gpt", (1.0, 1.0))
    let_go = threading.Barrier(2)

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        seen = []
        for step, drops in enumerate((True, False)):
            script.backward(model, member.rank, step, fitted)
            if member.rank == 0:
                let_go.wait(60)
            seen.append([p.grad.clone() for p in model.parameters()])
            if drops:
                optimizer.zero_grad()
            else:  # the first gradients of another backward, whose end is where all meet
                model.head.weight.sum().backward()
                model.head.weight.grad = None
            if member.rank == 1:
                let_go.wait(60)
        return seen

    found = share_between(script, 0.5, body)
    assert same(found[0][0], found[1][0])


def scale(parameter: nn.Parameter) -> None:
    parameter.mul_(0.99)


def give_other_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.99  # which lies on the device


def scale_past_autograd(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.99)


@pytest.mark.parametrize("write", [scale, give_other_data, scale_past_autograd])
def test_parameters_written_to_and_trained_on_before_all_have_met(
    write: Callable[[nn.Parameter], None],
) -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
        with pytest.raises(
            UserError, match=r"has written to \S+.*, of which worker .* call session\.barrier\(\)"
        ):
            script.loss(model, member.rank, 1)
        fitted.sync("written")
        script.train(member, model, optimizer, fitted, 1)

    share_between(script, 0.5, body)


def clip(most: float) -> Callable[[Sharded], None]:
    return lambda fitted: fitted.clip_grad_norm_(most) and None


def nothing(_: Sharded) -> None:
    """What a member does that has no batch, say."""


def meet(fitted: Sharded) -> None:
    fitted.sync("the barrier")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            clip(0.1),
            nothing,
            r"worker 0 is in clip_grad_norm_\(0\.1\) \(.*\); worker 1 is in optimizer\.step \(.*\)\. All",
        ),
        (
            clip(0.1),
            clip(0.2),
            r"worker 0 is in clip_grad_norm_\(0\.1\) \(.*\); worker 1 is in clip_grad_norm_\(0\.2\) \(.*\)",
        ),
        (
            nothing,
            meet,
            r"worker 0 is in optimizer\.step \(.*\); worker 1 is in the barrier \(.*\)\. All workers",
        ),
    ],
)
def test_members_that_make_unlike_calls_are_told_which(
    first: Callable[[Sharded], None], second: Callable[[Sharded], None], said: str
) -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 1)
        script.backward(model, member.rank, 1, fitted)
        (second if member.rank else first)(fitted)
        optimizer.step()

    with pytest.raises(MismatchError, match=said) as raised:
        share_between(script, 0.5, body)
    assert "\n" not in str(raised.value)


def test_one_member_evaluates_and_all_write_values() -> None:
    script = Script("gpt", (1.0, 1.0))

    def evaluate(model: Any) -> float:
        with torch.no_grad():
            return float(script.loss(model, 0, 99))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.train(member, model, optimizer, fitted, 2)
        alone = evaluate(model) if member.rank == 0 else None
        fitted.sync("evaluated")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        fitted.sync("written")
        return alone, evaluate(model)

    found = share_between(script, 0.5, body)
    model, _ = script.build()
    values, _ = script.plain(2)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
        alone = evaluate(model)
        for parameter in model.parameters():
            parameter.fill_(0.01)
    assert found[0][0] == (alone, evaluate(model))
    assert found[1][0] == (None, evaluate(model))


def test_gradients_that_are_not_finite_are_seen_by_all() -> None:
    script = Script("gpt", (1.0, 1.0))

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> Any:
        script.backward(model, member.rank, 0, fitted)
        first = fitted.all_finite()
        optimizer.zero_grad()
        scale = float("inf") if member.rank == 1 else 1.0
        (script.loss(model, member.rank, 0) * scale).backward()
        fitted.reduce()
        seen = fitted.all_finite(), fitted.nonfinite()
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            fitted.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return first, seen

    found = share_between(script, 0.5, body)
    for (first, (second, bad)), _ in found:
        assert (first, second) == (True, False)
        assert "." in bad


Body = Callable[[Member, Any, Any, Sharded], Any]


def no_reduction(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).loss(model, member.rank, 0).backward()
    optimizer.step()


def another_presence(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).backward(model, member.rank, 0, fitted)
    if member.rank:
        model.head.weight.grad = None
    optimizer.step()


def edited_by_one(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).backward(model, member.rank, 0, fitted)
    if member.rank:
        model.head.weight.grad.mul_(0.5)
    else:
        model.tokens.weight.grad.numpy()  # who looks changes nothing
    optimizer.step()


def other_steps(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    if member.rank:
        optimizer.step()
    fitted.sync("here")


def no_weight(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    Script("gpt", (1.0, 1.0)).loss(model, member.rank, 0).backward()
    fitted.reduce(0.0)


def no_second_reduction(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    script = Script("gpt", (1.0, 1.0))
    script.backward(model, member.rank, 0, fitted)
    script.loss(model, member.rank, 1).backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def read_too_early(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
    script = Script("gpt", (1.0, 1.0))
    script.backward(model, member.rank, 0, fitted)
    script.loss(model, member.rank, 1).backward()
    model.head.weight.grad.mul_(0.5)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (no_second_reduction, UserError, r"the gradient of '.*' is set aside for .* call Fitted.reduce"),
        (read_too_early, UserError, r"^head.weight.grad: gradients have come after the workers' mean, and"),
        (no_reduction, UserError, r"the gradient of '.*' is this worker's own: call Fitted.reduce"),
        (another_presence, UserError, r"1 of 2 workers have a gradient of 'head.weight' after their mean"),
        (
            other_steps,
            MismatchError,
            r"^worker 0 is in here \(.*\); worker 1 is in optimizer\.step \(.*\)\. All",
        ),
        (edited_by_one, UserError, r"^worker 1 has changed the gradient of 'head.weight' after the mean was"),
        (no_weight, UserError, r"step 0: the workers' weights sum to 0"),
    ],
)
def test_mistakes_are_one_line(body: Body, kind: type[AtollError], said: str) -> None:
    with pytest.raises(kind, match=said) as raised:
        share_between(Script("gpt", (1.0, 1.0)), 0.5, body)
    assert "\n" not in str(raised.value)


def test_a_member_that_fails_ends_the_others() -> None:
    """Nothing hangs: those that wait for it are told."""
    script = Script("gpt", (1.0,) * 3)
    ended: list[tuple[int, str]] = []

    def body(member: Member, model: Any, optimizer: Any, fitted: Sharded) -> None:
        try:
            script.train(member, model, optimizer, fitted, 1 if member.rank == 1 else 2)
        except AtollError as error:
            ended.append((member.rank, str(error)))
            raise
        raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        share_between(script, 0.5, body)
    assert {rank for rank, _ in ended} == {0, 2}


def test_a_member_whose_steps_have_ended_says_that_it_has_gone() -> None:
    """Who asks it for values is not told of the end of "the session", which would be taken for its own."""
    ended, told = threading.Event(), list[str]()

    def body(member: Member, _model: Any, _optimizer: Any, fitted: Sharded) -> None:
        def over(_chunk: int) -> None:
            raise RunError("the optimizer's step of 'w' will not come: the session ended before it")

        if member.rank == 0:
            fitted.sharing.wait_stepped = over
        fitted.sync("the test")
        try:
            if member.rank == 1:
                chunk = next(c for c in fitted.engine.chunks if fitted.sharing.others(c))
                with fitted.sharing.pin((chunk, VALUES)):
                    pass
        except RunError as error:
            told.append(str(error))
            raise
        finally:
            ended.set()
        assert ended.wait(60)

    with pytest.raises(RunError):
        share_between(Script("gpt", (1.0,) * 2), 0.5, body)
    assert told == ["worker 0 has gone: it holds its part of the model no more"]


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
    return lay_out_memory(planning.specs_for(model, optimizer), chunk_bytes=chunk_bytes).chunks


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
    alone = planning.choose(*built[0], msgspec.structs.replace(memory(built[0][0], 0.5)).budgets())
    assert plans[0].host_bytes < 0.75 * alone.host_bytes  # half a chunk takes a page here
    assert isinstance(built[0][0], TinyGPT)
