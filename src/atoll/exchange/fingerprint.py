"""The fingerprint of a node's CPU side: two nodes with one fingerprint compute the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atoll.chunks import ParameterSpec, lay_out
from atoll.exchange.globalparameters import Contribution, GlobalParameters
from atoll.wire.device import Clip
from atoll.wire.messages import Hyperparameters

_STEPS, _NODES = 3, 3
_SHAPES = ((67, 31), (16,), (), (4099,))  # with and without a partly filled last vector register
_MATRICES = ((67, 31), (16, 16))  # the shapes that every optimizer of whole tensors takes


def fingerprint(
    optimizer: str,
    hyperparameters: Hyperparameters,
    *,
    configured: str = "",
    fused: bool = True,
    by_tensor: bool = False,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> str:
    """Return the fingerprint of this process: "torch 2.13.0+cpu AVX512 9c1b2a...".

    It has the build of torch, the instructions that it uses here, and the digest of a few small steps. They
    are made as the run's steps are: means, clipping, and the optimizer of each param group, in each of
    `dtypes`, which are the model's. Nodes with one fingerprint keep equal global parameters, as far as that
    can be told beforehand; each iteration's digest shows a difference.

    Other arguments are as in GlobalParameters. Raises UserError for an optimizer that cannot be run here.
    """
    specs = [
        ParameterSpec(f"{dtype}.{group}.{index}", shape, dtype, settings=str(group))
        for dtype in dtypes
        for group in range(len(hyperparameters))
        for index, shape in enumerate(_MATRICES if by_tensor else _SHAPES)
    ]
    layout = lay_out(specs, chunk_bytes=2**14)
    parameters = GlobalParameters(
        layout, optimizer, hyperparameters, configured=configured, fused=fused, by_tensor=by_tensor
    )
    for chunk in parameters.chunks:
        parameters.set_values(chunk, _values(layout.chunks[chunk].extent, 7, parameters.values(chunk).dtype))
    for iteration in range(_STEPS):
        parameters.apply(
            iteration, [_contribution(parameters, node, iteration, hyperparameters) for node in range(_NODES)]
        )
    build = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"{build} {parameters.digest.hex()}"


def _contribution(
    parameters: GlobalParameters, node: int, iteration: int, hyperparameters: Hyperparameters
) -> Contribution:
    return Contribution(
        node=node,
        incarnation=0,
        samples=3.0 + node,
        weight=3.0 + node,
        gradients={
            chunk: _values(values.numel(), 11 + node + 5 * iteration, values.dtype)
            for chunk in parameters.chunks
            for values in (parameters.values(chunk),)
        },
        present={chunk: bytes([1]) * parameters.optimizer.slots(chunk) for chunk in parameters.chunks},
        hyperparameters=hyperparameters,
        clip=Clip(max_norm=1.0),
    )


def _values(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers between -0.5 and 0.5 without a pattern. They are made from integers, so they are equal
    on every machine."""
    index = torch.arange(numel, dtype=torch.int64)
    mixed = (index * 2654435761 + seed * 40503) % 1000003
    return (mixed.to(torch.float64) / 1000003 - 0.5).to(dtype)
