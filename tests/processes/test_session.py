"""The session where scripts differ: memory formats, compiled models, mixed precision, policies, mistakes."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Chunks, Config, NonFinite, Sync
from atoll.core.errors import BindingError, NonFiniteGradientError, PrepareError, UserError
from atoll.train.api.place import Place
from support.models import MODELS
from support.parity import Case, Trajectory, differences, train_plain
from support.pool import JobFailedError, WorkerPool

pytestmark = pytest.mark.quick

CONFIG = Config(chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s"))
STEPS = 6


def one_line(error: BaseException) -> str:
    said = str(error)
    assert "\n" not in said
    return said


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = MODELS["odd"].batch(rank, step, dtype=dtype)
    return made.inputs, made.targets


def loss_of(model: nn.Module, step: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x, y = batch(step, rank, dtype)
    return nn.functional.cross_entropy(model(x), y)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# -- memory ------------------------------------------------------------------------------------------------


def images_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    return model.to(memory_format=torch.channels_last)


def test_channels_last_strides_are_kept_and_used() -> None:
    plain, model = images_model(), images_model()
    strides = [p.stride() for p in model.parameters()]
    assert strides[0] != torch.empty(8, 3, 3, 3).stride(), "the model is channels_last to begin with"
    plain_optimizer, optimizer = sgd(plain), sgd(model)
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    with atoll.join(CONFIG) as session:
        session.prepare(model, optimizer)
        for _ in range(STEPS):
            for each in (plain, model):
                each(images).square().mean().backward()
            assert [p.grad.stride() for p in model.parameters() if p.grad is not None] == strides
            for stepper in (plain_optimizer, optimizer):
                stepper.step()
                stepper.zero_grad()
    assert [p.stride() for p in model.parameters()] == strides
    assert [v.stride() for v in model.state_dict().values()] == strides
    assert equal(plain, model)


@pytest.mark.parametrize("how", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_all_its_ways(pool: WorkerPool, how: str, set_to_none: bool) -> None:
    """With set_to_none=False a parameter that had a gradient keeps one of zeros, which counts."""
    case = Case("unused", workers=2, steps=8)
    pool.submit(train_zeroing, case, how, set_to_none, world=2)
    plain = train_plain(case, set_to_none=set_to_none)
    assert not differences(case, plain, pool.collect(), 1e-9)


def train_zeroing(place: Place, case: Case, how: str, set_to_none: bool) -> Trajectory:
    seen = Trajectory()
    with atoll.join(CONFIG, place=place) as session:
        model = case.tiny.build(case.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session.prepare(model, optimizer)
        for step in range(case.steps):
            loss = case.tiny.loss(model, case.tiny.batch(place.rank, step, dtype=case.dtype))
            loss.backward()
            optimizer.step()
            {"optimizer": optimizer, "model": model}[how].zero_grad(set_to_none=set_to_none)
            seen.add(loss.item(), model)
    return seen


def test_a_model_cast_after_prepare_is_found_at_the_next_step() -> None:
    model = mlp()
    with atoll.join(CONFIG) as session:
        _, optimizer = session.prepare(model, sgd(model))
        loss_of(model, 0).backward()
        optimizer.step()
        model.double()
        with pytest.raises(BindingError) as caught:  # noqa: PT012 - whichever of the two sees it first
            loss_of(model, 1, dtype=torch.float64).backward()
            optimizer.step()
        said = one_line(caught.value)
        assert "'0.weight'" in said or "'2.weight'" in said or "bias'" in said
        assert "float64" in said
        assert "before session.prepare" in said


@pytest.mark.parametrize("name", ["gpt", "tied", "batchnorm"])
def test_state_dict_is_what_plain_torch_would_show(name: str) -> None:
    plain, model = MODELS[name].build(), MODELS[name].build()
    with atoll.join(CONFIG) as session:
        session.prepare(model, sgd(model))
        expected, got = plain.state_dict(), model.state_dict()
        assert list(expected) == list(got)
        for key, value in got.items():
            assert torch.equal(value, expected[key])
            assert value.untyped_storage().nbytes() == expected[key].untyped_storage().nbytes(), key
        sizes = []
        for state in (expected, got):
            stream = io.BytesIO()
            torch.save(state, stream)
            sizes.append(len(stream.getvalue()))
        assert sizes[0] == sizes[1]
        changed = {key: value + 1 if value.is_floating_point() else value for key, value in expected.items()}
        model.load_state_dict(changed)
        assert all(torch.equal(value, changed[key]) for key, value in model.state_dict().items())


# -- compiled models and mixed precision -------------------------------------------------------------------

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)


# Inductor compiles for seconds in each worker; what gradients go through is aot_eager's too.
@pytest.mark.check
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.soak])]
)
@pytest.mark.parametrize("prepared_first", [True, False], ids=["prepare-compile", "compile-prepare"])
def test_compiled_workers_train_as_one_process(pool: WorkerPool, backend: str, prepared_first: bool) -> None:
    case = Case("odd", workers=2, steps=STEPS)
    workers = pool.run(train_compiled, case, backend, prepared_first, world=2, deadline=240)
    assert not differences(case, train_plain(case), workers, 1e-9)


def train_compiled(place: Place, case: Case, backend: str, prepared_first: bool) -> Trajectory:
    torch._dynamo.reset()
    seen = Trajectory()
    with atoll.join(CONFIG, place=place) as session:
        model = case.tiny.build(case.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if prepared_first:
            session.prepare(model, optimizer)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        if not prepared_first:
            session.prepare(compiled, optimizer)
        for step in range(case.steps):
            loss = case.tiny.loss(compiled, case.tiny.batch(place.rank, step, dtype=case.dtype))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.add(loss.item(), model)
    return seen


@pytest.mark.check
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.soak])]
)
def test_compiled_alone_is_bit_equal_to_compiled_plain_torch(pool: WorkerPool, backend: str) -> None:
    assert pool.run(compiled_alike, backend, world=1, deadline=240) == [True]


def compiled_alike(place: Place, backend: str) -> bool:
    case = Case("odd", steps=STEPS)
    atoll_s = train_compiled(place, case, backend, prepared_first=True)
    torch._dynamo.reset()
    compiled = torch.compile(case.tiny.build(case.dtype), backend=backend, dynamic=True)
    return not differences(case, train_plain(case, model=compiled), [atoll_s], 0.0)


def train_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, bad: int) -> list[float]:
    """bfloat16 autocast and a GradScaler; worker 0's loss overflows in step `bad`. Each step's scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, step, rank)
        if step == bad and rank == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_autocast_and_grad_scaler_alone_are_bit_equal() -> None:
    plain, model = mlp(), mlp()
    expected = train_scaled(plain, sgd(plain), rank=0, bad=2)
    with atoll.join(CONFIG) as session:
        _, optimizer = session.prepare(model, sgd(model))
        assert train_scaled(model, optimizer, rank=0, bad=2) == expected
    assert expected[1] > expected[2], "the bad step halved the scale"
    assert equal(plain, model)


def test_grad_scaler_skips_a_step_on_every_worker_alike(pool: WorkerPool) -> None:
    results = pool.run(train_scaled_together, world=2)
    assert results[0] == results[1]
    scales, values = results[0]
    assert scales[2] == scales[1] / 2, "worker 0's infinity was worker 1's too"
    assert all(math.isfinite(value) for value in values)


def train_scaled_together(place: Place) -> tuple[list[float], list[float]]:
    with atoll.join(CONFIG, place=place) as session:
        model = mlp()
        _, optimizer = session.prepare(model, sgd(model))
        scales = train_scaled(model, optimizer, place.rank, bad=2)
        return scales, [float(p.sum()) for p in model.parameters()]


# -- gradients, schedules, policies ------------------------------------------------------------------------


def clip_by_torch(model: nn.Module, session: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_by_session(model: nn.Module, session: Any) -> None:
    assert float(session.clip_grad_norm_(0.05)) > 0.05


def clip_by_value(model: nn.Module, session: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def edit_in_place(model: nn.Module, session: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5).add_(0.01 * p.detach())


def replace_gradients(model: nn.Module, session: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.sign()


EDITS = [clip_by_torch, clip_by_session, clip_by_value, edit_in_place, replace_gradients]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_of_gradients_count_and_see_the_global_mean(
    pool: WorkerPool, edit: Callable[[nn.Module, Any], None]
) -> None:
    case = Case("odd", workers=2, steps=STEPS)
    pool.submit(train_edited, case, edit, world=2)
    torch_edit = clip_by_torch if edit is clip_by_session else edit
    plain = train_plain(case, edit=lambda model: torch_edit(model, None))
    assert not differences(case, plain, pool.collect(), 1e-9)


def train_edited(place: Place, case: Case, edit: Callable[[nn.Module, Any], None]) -> Trajectory:
    seen = Trajectory()
    with atoll.join(CONFIG, place=place) as session:
        model = case.tiny.build(case.dtype)
        _, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        for step in range(case.steps):
            loss = case.tiny.loss(model, case.tiny.batch(place.rank, step, dtype=case.dtype))
            loss.backward()
            if edit is not clip_by_session:  # this one waits for the ring by itself
                assert all(p.grad is not None for n, p in model.named_parameters() if n != "never")
            edit(model, session)
            optimizer.step()
            optimizer.zero_grad()
            seen.add(loss.item(), model)
    return seen


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", ["OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers_made_before_or_after_prepare(kind: str, made: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "OneCycleLR":  # changes the momentum too
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1)
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss.item()] if kind == "ReduceLROnPlateau" else []))

    plain, model = mlp(), mlp()
    plain_optimizer, optimizer = sgd(plain), sgd(model)
    train(plain, plain_optimizer, schedule(plain_optimizer))
    with atoll.join(CONFIG) as session:
        scheduler = schedule(optimizer) if made == "before" else None
        session.prepare(model, optimizer)
        train(model, optimizer, scheduler or schedule(optimizer))
    assert plain_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1
    assert equal(plain, model)


def train_with_nan(place: Place, policy: NonFinite) -> list[list[float]]:
    """Worker 1's gradient is NaN in step 1; the parameters' sums after each step."""
    config = Config(chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s", nonfinite=policy))
    sums = []
    with atoll.join(config, place=place) as session:
        model = mlp()
        _, optimizer = session.prepare(model, sgd(model))
        for step in range(3):
            loss = loss_of(model, step, place.rank)
            if step == 1 and place.rank == place.world - 1:
                loss = loss + model[2].bias.sum() * math.nan
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sums.append([float(p.detach().sum()) for p in model.parameters()])
    return sums


@pytest.mark.parametrize("world", [1, 2])
def test_nan_stops_every_worker_with_one_line(pool: WorkerPool, world: int) -> None:
    with pytest.raises(JobFailedError) as caught:
        pool.run(train_with_nan, "stop", world=world)
    assert sorted(caught.value.failures) == list(range(world))
    for failure in caught.value.failures.values():
        assert failure.kind == NonFiniteGradientError.__name__
        assert f"'2.bias' on worker {world - 1}" in failure.message
        assert "sync.nonfinite" in failure.message
        assert "\n" not in failure.message


@pytest.mark.parametrize("world", [1, 2])
def test_nan_is_skipped_on_every_worker_alike(pool: WorkerPool, world: int) -> None:
    results = pool.run(train_with_nan, "skip", world=world)
    assert all(result == results[0] for result in results)
    first, second, third = results[0]
    assert first == second, "the iteration with NaN changed nothing"
    assert second != third
    assert all(math.isfinite(value) for value in third)


@pytest.mark.parametrize("world", [1, 2])
def test_nan_is_applied_where_the_policy_is_allow(pool: WorkerPool, world: int) -> None:
    for result in pool.run(train_with_nan, "allow", world=world):
        assert all(math.isfinite(value) for value in result[0])
        assert math.isnan(result[2][3])


# -- what cannot be trained --------------------------------------------------------------------------------


def prepare_differently(place: Place, difference: str) -> None:
    with atoll.join(CONFIG, place=place) as session:
        odd_one = place.rank == 1
        model = nn.Sequential(
            nn.Linear(7, 16),
            nn.Linear(16, 6 if odd_one and difference == "shape" else 5, dtype=torch.float32),
        )
        if odd_one and difference == "dtype":
            model[1].double()
        if odd_one and difference == "frozen":
            model[1].bias.requires_grad_(False)
        if odd_one and difference == "missing":
            model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
        lr = 0.2 if odd_one and difference == "lr" else 0.1
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ("shape", "'1.weight' is (5, 16)"),
        ("dtype", "float64"),
        ("frozen", "'1.bias'"),
        ("missing", "'extra'"),
        ("lr", "'lr'"),
    ],
)
def test_workers_with_different_models_are_told_which_parameter(
    pool: WorkerPool, difference: str, named: str
) -> None:
    with pytest.raises(JobFailedError) as caught:
        pool.run(prepare_differently, difference, world=2)
    assert sorted(caught.value.failures) == [0, 1], "every worker is told, none is left waiting"
    for failure in caught.value.failures.values():
        assert failure.kind == PrepareError.__name__
        assert named in failure.message
        assert "worker 1" in failure.message
        assert "\n" not in failure.message


def test_a_lazy_module_is_refused_by_name() -> None:
    with atoll.join(CONFIG) as session:
        lazy = nn.Sequential(nn.Linear(7, 4), nn.LazyLinear(2))
        with pytest.raises(PrepareError, match=r"'1\.weight' is lazy.*one batch"):
            session.prepare(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))


def test_a_wrapped_model_and_a_foreign_parameter_are_refused() -> None:
    with atoll.join(CONFIG) as session:
        model, other = mlp(), mlp()
        with pytest.raises(PrepareError, match="DataParallel.*inside"):
            session.prepare(nn.DataParallel(model), sgd(model))
        with pytest.raises(PrepareError, match="not in the model"):
            session.prepare(model, sgd(other))
        with pytest.raises(UserError, match=r"session\.prepare"):
            session.clip_grad_norm_(1.0)
