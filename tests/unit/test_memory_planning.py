"""What a plan is made from: the profile of a model's step, this machine's bandwidths, the model's shapes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from atoll.core.errors import ConfigError, PrepareError, UserError
from atoll.core.memory import Memory
from atoll.memory import planning
from atoll.memory.bandwidth import measure
from atoll.memory.planning import assumed_uses, choose, profile_of
from atoll.memory.profile import Recorder
from atoll.memory.sharedplan import agree
from atoll.moves.search import MemoryPlan, Use, search_plan
from atoll.moves.timeline import Bandwidths
from support.members import Member, together

RATES = Bandwidths(to_device=10e9, to_host=8e9, host_steps=1e9, device_steps=1e9, shared=True)


class Tied(nn.Module):
    """An embedding that is the head too, a layer with a bias, and a parameter that is used bare."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)  # 2
        self.layer = nn.Linear(8, 8)  # 3, 4
        self.scale = nn.Parameter(torch.ones(8))  # 0
        self.unused = nn.Parameter(torch.ones(3))  # 1
        self.again = again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.table(tokens)
        inner = checkpoint(self.layer, inner, use_reentrant=False) if self.again else self.layer(inner)
        logits: torch.Tensor = (inner * self.scale) @ self.table.weight.t()
        return logits.logsumexp(-1).mean()


def record(model: nn.Module) -> tuple[Use, ...]:
    recorder = Recorder(model)
    recorder.start()
    model(torch.arange(20)).backward()
    return recorder.stop()


def order(uses: tuple[Use, ...], *, backward: bool) -> list[tuple[int, ...]]:
    return [use.parameters for use in uses if use.parameters and use.backward == backward]


def test_a_recorded_step_has_its_uses_in_order_and_the_seconds_between_them() -> None:
    uses = record(Tied())
    # The head's weight is transposed in a call of its own.
    assert order(uses, backward=False) == [(2,), (3, 4), (0,), (2,)]
    # An embedding's backward needs no weight, nor does a bias's gradient.
    assert order(uses, backward=True) == [(2,), (0,), (3,)]
    assert all(use.seconds >= 0 for use in uses)
    assert 0 < sum(use.seconds for use in uses) < 60


def test_what_a_checkpoint_computes_again_is_backwards() -> None:
    uses = record(Tied(again=True))
    assert order(uses, backward=False) == [(2,), (3, 4), (0,), (2,)]
    assert order(uses, backward=True)[:3] == [(2,), (0,), (3, 4)]


def test_a_recording_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Tied()
    plain, recorded = [], []
    for kept in (plain, recorded):
        model.zero_grad()
        if kept is recorded:
            record(model)
        else:
            model(torch.arange(20)).backward()
        kept += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for a, b in zip(plain, recorded, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert torch.overrides._get_current_function_mode() is None


def test_a_recorded_profile_gives_a_plan_of_what_was_used() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = profile_of(model, [optimizer], record(model))
    assert profile.state_bytes == {"0": (4, 4)}
    plan = search_plan(profile, RATES, Memory(device="8KiB").budgets())
    assert not plan.fits
    assert plan.predicted.computing == pytest.approx(sum(use.seconds for use in profile.uses))
    assert "not measured" not in plan.reason


def test_each_of_several_optimizers_has_room_for_its_own_state() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    parameters = list(model.parameters())
    sgd = torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:8]}], lr=0.1)
    several = [sgd, torch.optim.AdamW(parameters[8:])]
    assert profile_of(model, several, ()).state_bytes == {"0": (), "1": (), "2": (4, 4)}
    budgets = Memory(device="64KiB").budgets()
    plan = choose(model, several, budgets, bandwidths=RATES)
    whole = choose(model, [torch.optim.AdamW(parameters)], budgets, bandwidths=RATES)
    none = choose(model, [torch.optim.SGD(parameters, lr=0.1)], budgets, bandwidths=RATES)
    assert none.host_bytes < plan.host_bytes < whole.host_bytes


def test_uses_are_assumed_to_go_forward_and_back() -> None:
    uses = assumed_uses(Tied())
    assert order(uses, backward=False) == [(0,), (1,), (2,), (3, 4)]
    assert order(uses, backward=True) == [(3, 4), (2,), (1,), (0,)]
    attention = nn.MultiheadAttention(8, 2)
    assert order(assumed_uses(attention), backward=False) == [(0, 1, 2, 3)]
    bare = nn.ParameterList([torch.ones(2), torch.ones(3)])
    assert order(assumed_uses(bare), backward=False) == [(0,), (1,)]
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared[1].weight = shared[0].weight
    assert order(assumed_uses(shared), backward=False) == [(0, 1), (0, 2)]


def test_a_plan_for_a_model_without_a_profile() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    whole = choose(model, [optimizer], Memory(device="16MiB").budgets(), bandwidths=RATES)
    assert whole.fits
    part = choose(model, [optimizer], Memory(device="64KiB").budgets(), bandwidths=RATES)
    assert not part.fits
    assert part.blocks * part.chunk_bytes <= 65536
    assert "compute is not measured yet" in part.reason
    frozen = choose(model, [], Memory(device="64KiB").budgets(), bandwidths=RATES)
    assert frozen.host_bytes < part.host_bytes  # no optimizer, no state


def test_what_cannot_be_planned_is_one_line(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        UserError, match=r"^the budget of the device is too small: .*'weight' of 16\.0 KiB; \d+ byte"
    ):
        choose(model, [optimizer], Memory(device="1KiB").budgets(), bandwidths=RATES)
    with pytest.raises(UserError, match=r"^the budget of the host is too small: .* would do, or a disk$"):
        choose(model, [optimizer], Memory(device="20KiB", host="1KiB").budgets(), bandwidths=RATES)
    small = Memory(device="20KiB", host="1KiB", disk=f"{tmp_path}:1MiB").budgets()
    with pytest.raises(UserError, match=r"^the budget of the host is too small: .* would do$"):
        choose(model, [optimizer], small, bandwidths=RATES)
    with pytest.raises(ConfigError, match=r"^disk: .*none does not exist"):
        choose(model, [optimizer], Memory(device="20KiB", disk=f"{tmp_path}/none:1MiB").budgets())
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(PrepareError, match="LBFGS"):
        choose(model, [lbfgs], Memory(device="20KiB").budgets())


@pytest.mark.parametrize(
    ("pins", "least"),
    [
        ({}, r"all its parameters at once"),
        ({"cache": "500"}, r"a cache of 500 blocks"),
        ({"resident": "1.0"}, r"1 of the parameters stay"),
        ({"resident": "0.5"}, r"0\.5 of the parameters stay"),
        ({"resident": "0.5", "cache": "30"}, r"0\.5 of the parameters stay"),
        ({"step": "device"}, r"to step there"),
        ({"step": "1"}, r"to step there"),
        ({"step": "0.5"}, r"0\.5 of the trained parameters step there"),
        ({"step": "0.5", "cache": "30"}, r"0\.5 of the trained .* a cache of 30 blocks"),
    ],
)
def test_what_is_said_that_would_do_does(pins: dict[str, str], least: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for device in ("1KiB", "40KiB") if pins else ("1KiB",):
        with pytest.raises(UserError, match=least) as caught:
            choose(model, [optimizer], Memory(device=device, **pins).budgets(), bandwidths=RATES)
        (said,) = re.findall(r"; (\d+) bytes", str(caught.value))
        choose(model, [optimizer], Memory(device=said, **pins).budgets(), bandwidths=RATES)


def test_a_cache_that_no_budget_helps_is_told_of_without_one() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for device in ("1KiB", "20480", "1MiB"):
        given = Memory(device=device, cache="1", chunk="16KiB", step="host").budgets()
        with pytest.raises(UserError, match=r"^cache: a call needs 2 blocks, and 1 was given; .* auto$"):
            choose(model, [optimizer], given, bandwidths=RATES)
    choose(model, [optimizer], Memory(device="1MiB", cache="2", chunk="16KiB").budgets(), bandwidths=RATES)


def test_where_direct_writes_are_refused_the_disk_is_measured_as_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may open a file for direct transfers, and refuse them."""
    write, names = os.pwrite, []

    def refusing(file: int, data: Any, offset: int) -> int:
        names.extend(tmp_path.iterdir())
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    rates = measure(torch.device("cpu"), None, str(tmp_path), 2**20)
    assert rates.to_disk > 0
    assert rates.from_disk > 0
    assert names == []  # nothing is left, whenever the process dies


def test_bandwidths_are_measured_for_this_optimizer_and_leave_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    stepped: list[object] = []
    optimizer.register_step_post_hook(lambda *call: stepped.append(call))
    rates = measure(torch.device("cpu"), optimizer, str(tmp_path))
    assert rates.shared
    for rate in (rates.to_device, rates.to_host, rates.to_disk, rates.from_disk, rates.host_steps):
        assert 1e6 < rate < 1e13
    assert 0 < rates.latency < 1
    assert list(tmp_path.iterdir()) == []
    assert stepped == []
    assert not optimizer.state
    with pytest.raises(ConfigError, match=r"^memory\.disk: .*none cannot be written to"):
        measure(torch.device("cpu"), optimizer, str(tmp_path / "none"))


def test_members_measure_what_goes_between_them_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(member: Member) -> MemoryPlan:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        return agree(model, [optimizer], Memory(device="64KiB").budgets(), member)

    given: list[float] = []

    def choosing(*arguments: Any, network: float, **more: Any) -> MemoryPlan:
        given.append(network)
        return choose(*arguments, bandwidths=RATES, network=network, **more)

    monkeypatch.setattr(planning, "choose", choosing)
    plans = together(2, measured)
    assert len(set(given)) == 1
    assert given[0] > 0
    for plan in plans:
        assert plan.predicted.nbytes["from_members"] > 0
        assert "not counted" not in plan.reason
