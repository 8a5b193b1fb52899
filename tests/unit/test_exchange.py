"""Which gradients can be sent from where autograd left them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.chunks import lay_out
from atoll.tensors.binding import BoundChunk, bind_model, specs_of
from atoll.train.exchange import gradient_as_it_lies


def chunk_of(*tensors: Tensor) -> BoundChunk:
    parameters = {f"p{index}": nn.Parameter(tensor) for index, tensor in enumerate(tensors)}
    (bound,) = bind_model(lay_out(specs_of(parameters, {}), chunk_bytes=2**20), parameters)
    return bound


def test_one_parameters_gradient_is_taken_where_it_lies() -> None:
    for values in (torch.randn(4, 6), torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)):
        bound = chunk_of(values)
        (parameter,) = bound.parameters
        parameter.grad = torch.randn_like(parameter)  # of the same strides
        flat = gradient_as_it_lies(bound, [True])
        assert flat is not None
        assert flat.data_ptr() == parameter.grad.data_ptr()
        step = nn.Parameter(bound.flat[: bound.chunk.extent].clone())
        step.grad = flat
        torch.optim.SGD([step], lr=1.0).step()
        torch.optim.SGD([parameter], lr=1.0).step()
        assert torch.equal(step, bound.flat[: bound.chunk.extent])


def test_what_lies_otherwise_is_not() -> None:
    bound = chunk_of(torch.randn(4, 6))
    (parameter,) = bound.parameters
    assert gradient_as_it_lies(bound, [True]) is None  # there is none
    parameter.grad = torch.randn(6, 4).t()
    assert gradient_as_it_lies(bound, [True]) is None
    parameter.grad = torch.randn(1, 6).expand(4, 6)
    assert gradient_as_it_lies(bound, [True]) is None
    parameter.grad = torch.randn(4, 6)
    assert gradient_as_it_lies(bound, [False]) is None  # it has no weight
    two = chunk_of(torch.randn(3), torch.randn(4))
    for parameter in two.parameters:
        parameter.grad = torch.randn_like(parameter)
    assert gradient_as_it_lies(two, [True, True]) is None
