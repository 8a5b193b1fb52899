"""Parameters as views into chunks: what stays as plain PyTorch has it, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from atoll.chunks import lay_out
from atoll.core.errors import BindingError, PrepareError
from atoll.tensors.binding import BoundChunk, bind_model, carve, check_bindable, specs_of


def bind(model: nn.Module, chunk_bytes: int = 4096) -> list[BoundChunk]:
    parameters = dict(model.named_parameters())
    check_bindable(parameters)
    return bind_model(lay_out(specs_of(parameters, {}), chunk_bytes=chunk_bytes), parameters)


def check_all(chunks: list[BoundChunk]) -> None:
    for chunk in chunks:
        chunk.check()


def odd_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.Linear(7, 11), nn.LayerNorm(11)
    )
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return model


def test_a_carved_view_shares_memory_and_has_a_storage_of_its_own_size() -> None:
    storage = torch.arange(100.0)
    view = carve(storage, 16, torch.empty(3, 4))
    view += 1000
    assert storage[16].item() == 1016
    assert storage[28].item() == 28
    assert view.untyped_storage().nbytes() == 3 * 4 * 4


def test_a_carved_view_outlives_the_name_of_its_storage() -> None:
    view = carve(torch.full((64,), 7.0), 0, torch.empty(64))
    torch.randn(64)  # would reuse the memory, had it been freed
    assert view.eq(7).all()


def test_binding_keeps_values_strides_and_objects() -> None:
    model = odd_model()
    before = copy.deepcopy(model)
    objects = list(model.parameters())
    bind(model)
    for parameter, same, old in zip(model.parameters(), objects, before.parameters(), strict=True):
        assert parameter is same
        assert torch.equal(parameter, old)
        assert parameter.stride() == old.stride()
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        assert parameter.data_ptr() % 64 == 0


def test_binding_again_moves_the_values() -> None:
    model = odd_model()
    before = copy.deepcopy(model)
    for chunk in bind(model):
        old = chunk.flat
        chunk.bind(torch.full_like(old, float("nan")))
        old.fill_(float("nan"))
        chunk.check()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_autograd_sees_an_in_place_change_of_a_bound_parameter() -> None:
    model = nn.Linear(3, 3)
    bind(model)
    out = model(torch.ones(1, 3, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_saving_one_parameter_writes_its_own_bytes_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(300, 300))
    bind(model, chunk_bytes=2**20)
    file = io.BytesIO()
    torch.save(model[0].weight.detach(), file)
    assert len(file.getvalue()) < 4096


def test_state_dict_is_live_as_in_plain_torch() -> None:
    model = odd_model()
    state = model.state_dict()
    bind(model)
    state = model.state_dict()
    with torch.no_grad():
        state["1.weight"].fill_(3)
    assert model[1].weight.eq(3).all()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda model: model.double(), "its dtype went from float32 to float64"),
        (lambda model: setattr(model[1].weight, "data", torch.zeros(11, 8)), r"its shape became \(11, 8\)"),
    ],
)
def test_what_breaks_views_is_found_and_named(spoil: object, said: str) -> None:
    model = odd_model()
    chunks = bind(model)
    spoil(model)  # type: ignore[operator]
    with pytest.raises(BindingError, match=said) as caught:
        check_all(chunks)
    assert "before session.prepare" in str(caught.value)
    assert "\n" not in str(caught.value)


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def meta() -> nn.Module:
    return nn.Linear(3, 3, device="meta")


def expanded() -> nn.Module:
    return nn.ParameterDict({"w": nn.Parameter(torch.zeros(1).expand(3))})


def sharing() -> nn.Module:
    memory = torch.zeros(8)
    return nn.ParameterDict({"w": nn.Parameter(memory[:6]), "v": nn.Parameter(memory[4:])})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lazy, "'weight' is lazy"),
        (meta, "'weight' is on the meta device"),
        (expanded, "'w' has overlapping"),
        (sharing, "'w' and 'v' are two Parameters that share memory"),
    ],
)
def test_what_cannot_be_bound_is_refused_by_name(make: object, said: str) -> None:
    with pytest.raises(PrepareError, match=said):
        check_bindable(dict(make().named_parameters()))  # type: ignore[operator]


def test_a_complex_parameter_lies_in_a_real_chunk() -> None:
    values = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    held = torch.view_as_complex(values.clone()).t()  # strides of its own
    model = nn.ParameterDict({"w": nn.Parameter(held.clone(memory_format=torch.preserve_format))})
    chunks = bind(model)
    assert [(chunk.dtype, chunk.flat.dtype) for chunk in chunks] == [(torch.float32, torch.float32)]
    assert model["w"].dtype == torch.complex64
    assert model["w"].stride() == held.stride()
    assert torch.equal(model["w"], held)
    assert torch.equal(chunks[0].flat[:24], values.reshape(-1))
    chunks[0].check()
    assert model["w"].untyped_storage().nbytes() == 24 * 4


def test_the_views_of_a_released_model_keep_their_memory() -> None:
    model = odd_model()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    bind(model)  # the chunks go out of scope; the parameters must not
    torch.randn(10_000)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
