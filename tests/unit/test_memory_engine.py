"""Chunked memory says no in one clear line, leaves everything as it was, and keeps what it promises."""

from __future__ import annotations

import copy
import gc
import io
import re
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from atoll.core.errors import ConfigError, PrepareError, RunError, UserError
from atoll.core.memory import Memory
from atoll.memory.fit import fit
from atoll.memory.fitted import Moving, Resident
from atoll.memory.parameters import ChunkParameter
from atoll.memory.saved import ADDRESSES, hooks_are_active

BLOCK = 4096  # bytes, and a layer's weight of 32 x 32


pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _hooks_end(poisoned: None) -> Iterator[None]:
    yield
    assert not hooks_are_active()


class Layers(nn.Module):
    """Vectors (batch, 32) through `count` linear layers of a block each."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def layers(blocks: int = 3, count: int = 8, **options: Any) -> tuple[Layers, torch.optim.Optimizer, Moving]:
    """Layers of a block each, of which `blocks` fit on the device."""
    torch.manual_seed(0)
    model = Layers(count)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fitted = fit(model, optimizer, memory=memory(blocks), **options)
    assert isinstance(fitted, Moving)
    return model, optimizer, fitted


def memory(blocks: int) -> Memory:
    return Memory(device=str(blocks * BLOCK), host="1GiB", chunk=str(BLOCK), step="host")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_use_that_needs_more_than_the_budget_says_at_once_what_is_enough() -> None:
    model, _, fitted = layers(blocks=3)
    with pytest.raises(
        UserError, match=r"^parameter 'layers\.\d\.weight' does not fit on the device"
    ) as error:
        torch.cat([layer.weight for layer in model.layers[:5]])
    said = one_line(error)
    found = re.search(
        r" beside .*, which are in use or of which views are kept \(test_memory_engine\.py:\d+\); keep no "
        r"views, or raise memory\.device from 12\.0 KiB to at least (\d+) bytes \(20\.0 KiB\); (\d+) bytes "
        r"\(\S+ KiB\) hold all parameters$",
        said,
    )
    assert found, said
    assert model(torch.ones(1, 32)).isfinite().all()  # nothing is stuck
    fitted.close()
    model, _, fitted = layers(blocks=int(found[1]) // BLOCK)
    torch.cat([layer.weight for layer in model.layers[:5]])
    fitted.close()
    model, _, fitted = layers(blocks=int(found[2]) // BLOCK)
    kept = [parameter.view(-1) for parameter in model.parameters()]
    assert torch.cat(kept).isfinite().all()
    del kept
    fitted.close()


def test_views_that_are_kept_are_told_what_all_parameters_take() -> None:
    model, _, fitted = layers(blocks=4)
    whole = re.compile(r"; (\d+) bytes \(\S+ KiB\) hold all|to (\d+) bytes \(\S+ KiB\), which holds all p")
    with pytest.raises(UserError) as error:
        torch.nn.utils.parameters_to_vector(model.parameters())
    found = whole.search(one_line(error))
    assert found, one_line(error)
    del error
    fitted.close()
    model, _, fitted = layers(blocks=int(found[1] or found[2]) // BLOCK)
    assert torch.nn.utils.parameters_to_vector(model.parameters()).isfinite().all()
    fitted.close()


def test_flattening_an_rnn_s_parameters_leaves_them_in_their_chunks() -> None:
    """On CUDA `flatten_parameters()` ends in this call, which moves them into memory of its own."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 8)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with fit(model, None, memory=memory(1)) as fitted:
        weights: list[Any] = list(model.parameters())
        before = [weight.data_ptr() for weight in weights]
        torch._cudnn_rnn_flatten_weight(weights, 4, 8, 2, 8, 0, 1, False, False)
        assert [weight.data_ptr() for weight in weights] == before
        assert fitted.stats().device_peak <= BLOCK
        assert all(torch.equal(model.get_parameter(name), value) for name, value in values.items())


def test_a_budget_below_the_largest_parameter_is_refused_with_the_least() -> None:
    model = nn.Sequential(nn.Linear(32, 256, bias=False), nn.Linear(256, 32, bias=False))
    with pytest.raises(UserError, match=r"largest is '0\.weight'") as error:
        fit(model, None, memory=memory(4))
    one_line(error)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.check
def test_what_cannot_be_fitted() -> None:
    linear = nn.Linear(32, 32)
    with pytest.raises(ConfigError, match="device: the device's budget is missing"):
        fit(linear, None, memory=Memory(host="1GiB"))
    with pytest.raises(PrepareError, match="without parameters"):
        fit(nn.ReLU(), None, memory=memory(4))
    with pytest.raises(PrepareError, match="is compiled: torch.compile bakes in"):
        fit(torch.compile(linear), None, memory=memory(4))
    with pytest.raises(PrepareError, match="TorchScript"):
        fit(torch.jit.trace(linear, torch.ones(1, 32)), None, memory=memory(4))
    model, _, fitted = layers()
    with pytest.raises(PrepareError, match=r"'layers.0.weight' is in a model that was fitted already"):
        fit(model, None, memory=memory(4))
    fitted.close()
    with pytest.raises(PrepareError, match="LBFGS calls the script's closure"):
        fit(model, torch.optim.LBFGS(model.parameters()), memory=memory(3))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def replace(model: Any) -> None:
    model.layers[3].weight = nn.Parameter(torch.zeros(32, 32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace, r"'layers\.3\.weight' was replaced after memory\.fit"),
        (lambda model: model.half(), r"'layers\.0\.weight' got data of another dtype"),
        (
            lambda model: setattr(model.layers[1].weight, "data", torch.zeros(3)),
            r"'layers\.1\.weight' got data of another shape",
        ),
        (lambda model: model.layers[2].weight.resize_(64, 16), r"memory of parameter 'layers\.2\.weight'"),
        (lambda model: nn.Parameter(model.layers[2].weight), r"'layers\.2\.weight' would be another"),
        (
            lambda model: weight_norm(model.layers[3]),
            r"'layers\.3\.weight' would be another one in its memory, as parametrizations",
        ),
    ],
)
def test_a_change_that_would_take_a_parameter_out_of_its_chunk(
    change: Callable[[Layers], None], words: str
) -> None:
    model, optimizer, fitted = layers()
    before = model.layers[0].weight.clone()

    def change_and_step() -> None:
        change(model)
        step(model, optimizer)

    with pytest.raises(UserError, match=words) as error:
        change_and_step()
    one_line(error)
    assert torch.equal(model.layers[0].weight, before)
    fitted.close()


@pytest.mark.parametrize("fused", [True, False])
def test_what_was_frozen_can_be_trained_later_and_so_can_what_is_no_part_of_the_model(fused: bool) -> None:
    results = []
    for fits in (False, True):
        torch.manual_seed(0)
        model, scale = Layers(), nn.Parameter(torch.ones(32))
        model.layers[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.01, fused=fused)
        fitted = fit(model, optimizer, memory=memory(3)) if fits else None
        for number in range(6):
            model.layers[0].requires_grad_(number > 2)
            optimizer.zero_grad()
            (model(torch.ones(2, 32)) * scale).sum().backward()
            optimizer.step()
        if fitted is not None:
            fitted.close()
        results.append([*model.parameters(), scale])
    assert all(map(torch.equal, *results))


def test_everything_fits_needs_no_hooks() -> None:
    torch.manual_seed(0)
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), fused=True) for each in (model, plain)]
    fitted = fit(model, optimizers[0], memory=Memory(device="1MiB", host="1GiB"))
    assert isinstance(fitted, Resident)
    fitted.clip_grad_norm_(1.0)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    addresses = sorted(p.data_ptr() for p in model.parameters())
    assert addresses[-1] - addresses[0] <= fitted.stats().device_peak <= fitted.stats().device_budget
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        step(each, optimizer)
    fitted.close()
    step(model, optimizers[0])
    step(plain, optimizers[1])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_parameter_that_is_away_is_nan_for_whoever_comes_past_the_hooks() -> None:
    model, _, fitted = layers()
    model(torch.ones(1, 32))
    away = model.layers[0].weight
    assert isinstance(away, ChunkParameter)
    with torch._C.DisableTorchFunctionSubclass():
        assert away.shape == (32, 32)
        assert away.isnan().all()
        blind = F.linear(torch.ones(1, 32), away)
    assert blind.isnan().all()
    assert away.isfinite().all()
    fitted.close()


def test_what_tells_of_shapes_moves_nothing() -> None:
    model, _, fitted = layers()
    moves = fitted.stats().moves.get("to_device", 0)
    for parameter in model.parameters():
        assert parameter.shape == (32, 32)
        assert parameter.stride() == (32, 1)
        assert parameter.is_contiguous()
        assert parameter.numel() == parameter.nelement() == 1024
        assert (parameter.dtype, parameter.device.type, parameter.ndim) == (torch.float32, "cpu", 2)
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad is None
        assert isinstance(hash(parameter), int)
    assert sum(p.numel() for p in model.parameters()) == 8 * 1024
    assert fitted.stats().moves.get("to_device", 0) == moves
    fitted.close()


def test_a_view_keeps_its_chunk_and_lets_it_go() -> None:
    model, _, fitted = layers(blocks=3)
    views = [model.layers[index].weight[0].detach() for index in range(2)]
    seen = [view.clone() for view in views]
    model(torch.ones(1, 32))
    assert all(map(torch.equal, views, seen))
    views.append(model.layers[2].weight.data)
    with pytest.raises(UserError, match=r"views are kept"):
        model(torch.ones(1, 32))
    del views
    assert model(torch.ones(1, 32)).isfinite().all()
    fitted.close()


def test_a_saved_weight_that_is_written_into_is_found() -> None:
    """As in plain torch: a backward through values that are not there any more is an error."""
    model, _, fitted = layers()
    out = model(torch.ones(1, 32)).sum()
    with torch.no_grad():
        model.layers[4].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    hidden = torch.tanh(model.layers[0](torch.ones(1, 32)))
    hidden.exp_() if hidden.is_leaf else hidden.detach().exp_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()
    fitted.close()


def test_a_graph_does_not_outlive_close() -> None:
    model, _, fitted = layers()
    out = model(torch.ones(1, 32)).sum()
    fitted.close()
    with pytest.raises(UserError, match="this graph was made before close"):
        out.backward()
    model(torch.ones(1, 32)).sum().backward()


def test_the_second_step_makes_no_more_moves_than_the_optimum() -> None:
    model, optimizer, fitted = layers(blocks=4)
    for _ in range(4):
        step(model, optimizer)
    figures = fitted.stats()
    assert figures.optimum is not None
    assert figures.step_moves["to_device"] == figures.optimum
    assert figures.unforeseen == 0
    assert figures.steps == 4
    assert figures.device_peak <= figures.device_budget
    fitted.close()


def test_with_chunks_of_several_blocks_the_bound_on_blocks_holds() -> None:
    """That of docs/memory.md, for a step whose order is known."""
    torch.manual_seed(0)
    widths = (32, 32, 64, 32, 96, 32, 32)
    model = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(widths)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    fitted = fit(model, optimizer, memory=memory(8))
    assert isinstance(fitted, Moving)
    for _ in range(4):
        step(model, optimizer)
    figures, blocks = fitted.stats(), [fitted.chunk_map.blocks_of(chunk) for chunk in fitted.chunk_map.chunks]
    fitted.close()
    assert sorted(blocks) == [1, 1, 2, 2, 3, 3]
    assert figures.optimum is None
    assert figures.optimum_blocks is not None
    arrivals = 2 * sum(count > 1 for count in blocks)  # of large chunks: in forward and in backward
    most = figures.optimum_blocks + 4 * max(blocks) * arrivals
    assert sum(blocks) <= figures.optimum_blocks <= figures.step_blocks <= most
    assert figures.step_blocks <= 2 * sum(blocks)


@pytest.mark.parametrize("device", [str(3 * BLOCK), "1GiB"])
def test_the_norm_of_the_gradients_is_reported(device: str) -> None:
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with fit(model, optimizer, memory=Memory(device=device, chunk=str(BLOCK))) as fitted:
        assert fitted.stats().gradient_norm is None
        model(torch.ones(1, 32)).sum().backward()
        norm = float(fitted.clip_grad_norm_(1e-3))
        optimizer.step()
        assert fitted.stats().gradient_norm == norm > 1e-3


def test_a_model_is_pickled_whole() -> None:
    model, optimizer, fitted = layers()
    with fitted:
        step(model, optimizer)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert all(type(p) is nn.Parameter for p in loaded.parameters())
        assert torch.equal(loaded(torch.ones(1, 32)), model(torch.ones(1, 32)))
        assert repr(model.layers[0].weight) == repr(loaded.layers[0].weight)
    fitted.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_autograd_grad_by_parameters() -> None:
    torch.manual_seed(0)
    plain = Layers()
    model, _, fitted = layers()
    model.load_state_dict(plain.state_dict())
    for unused in (False, True):
        found = []
        for each in (model, plain):
            weights = [layer.weight for layer in each.layers]
            out = weights[0] @ weights[1].t() if unused else each(torch.ones(2, 32))
            found.append(torch.autograd.grad(out.sum(), weights, allow_unused=True, materialize_grads=unused))
        assert all(map(torch.equal, *found))
    fitted.close()


def test_an_engine_that_nobody_has_goes() -> None:
    known = len(ADDRESSES._places)
    model, optimizer, fitted = layers()
    step(model, optimizer)
    fitted.close()
    del model, optimizer, fitted
    gc.collect()
    assert len(ADDRESSES._places) == known


@pytest.mark.parametrize("planned", [False, True])
def test_a_chunk_that_cannot_be_read_is_told_of_and_comes_the_next_time(
    planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the script's thread, and on the one that brings chunks ahead of their use."""
    model, optimizer, fitted = layers(blocks=4)
    for _ in range(3 if planned else 0):
        step(model, optimizer)
    expected = copy.deepcopy(model)(torch.ones(2, 32))
    store: Any = fitted.engine.home.payloads
    pin, threads = store.pin, set()

    def fail(key: tuple[int, str], **options: Any) -> Any:
        if key == (fails, "values"):
            threads.add(threading.current_thread() is threading.main_thread())
            raise RunError("the disk has a torn block")
        return pin(key, **options)

    (fails,) = (c for c in range(8) if fitted.engine.chunks[c].names == ["layers.5.weight"])
    monkeypatch.setattr(store, "pin", fail)
    with pytest.raises(RunError, match="torn block"):
        model(torch.ones(2, 32))
    assert threads == {not planned}
    monkeypatch.setattr(store, "pin", pin)
    assert model.layers[5].weight.isfinite().all()
    assert torch.equal(model(torch.ones(2, 32)), expected)
    step(model, optimizer)
    fitted.close()


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model, optimizer, fitted = layers()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 31))
    assert not hooks_are_active()
    step(model, optimizer)
    fitted.close()
