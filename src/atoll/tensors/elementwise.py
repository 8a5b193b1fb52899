"""A trial that tells whether an optimizer is element-wise.

Chunks may be stepped whole, in parts, or on different machines only if the update of one element depends on
no other (docs/notes/optimizers.md). A list of names would miss subclasses and other libraries'
optimizers. So a probe is stepped twice, once as a matrix and once as flat pieces, and the two results must
agree.

Some optimizers are element-wise for some parameters only: 8-bit ones quantise the state of larger ones in
blocks (from 4,096 elements on, in blocks of 256 or 2,048), and others have a rule for matrices alone, or for
large ones. So there are probes of several sizes and numbers of dimensions, cut inside blocks, and probes of
the shapes that the optimizer's own parameters have.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.tensors.torch_compat import drop_step_hooks
from atoll.tensors.wrapped import clone

_REPLACED = frozenset({"param_groups", "state"})  # of an optimizer, in its copies
_LEAST_RATE = 0.01  # of learning: with a smaller one (0, at the start of a warm-up) all updates look alike


@dataclass(frozen=True)
class _Probe:
    """A trial: a parameter's shape, and the sizes of the flat pieces that are stepped in its place.

    `why` is the reason to report if the results differ. Results within `tolerance`, (relative, absolute), are
    equal.
    """

    shape: tuple[int, ...]
    pieces: tuple[int, ...]
    steps: int
    dtype: torch.dtype
    tolerance: tuple[float, float]
    why: str


_BY_SHAPE = "it steps parameters of shape {} otherwise than their flat halves"
_BY_BLOCKS = "it steps parameters of 4,096 elements and more by blocks, as 8-bit optimizers do"
_EXACT, _ROUNDED = (1e-9, 1e-12), (1e-4, 1e-6)


def _of_shape(shape: tuple[int, ...]) -> _Probe:
    """Return the probe of one shape, cut a little before its middle."""
    numel = math.prod(shape)
    pieces = (max(1, numel // 2 - 1), numel - max(1, numel // 2 - 1))
    return _Probe(shape, pieces, 2, torch.float64, _EXACT, _BY_SHAPE.format(list(shape)))


_PROBES = (
    _Probe(
        (4, 6), (12, 12), 3, torch.float64, _EXACT, "a matrix and its two flattened halves came out different"
    ),
    # One or two blocks by most libraries' block sizes, then several blocks, in the dtype of these optimizers.
    _Probe((64, 64), (1000, 3096), 2, torch.float64, _EXACT, _BY_BLOCKS),
    _Probe((4, 32, 128), (5001, 11383), 2, torch.float32, _ROUNDED, _BY_BLOCKS),
    # A rule for vectors alone, for filters alone, and for matrices whose sides are both 128 or more.
    *(_of_shape(shape) for shape in ((6001,), (8, 16, 5, 7), (129, 130))),
)
_MOST_ELEMENTS = 2**17  # of a probe with the shape of a parameter; a larger one would take long
_MOST_SHAPES = 4


def elementwise_state_keys(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    shapes: Iterable[tuple[int, ...]] = (),
    *,
    trusted: bool = False,
) -> set[str]:
    """Return the keys of per-element state (`exp_avg`), as opposed to per-parameter state (`step`).

    Args:
        optimizer: the optimizer.
        group: one of its param groups, which gives the hyperparameters.
        device: where the trial is made.
        shapes: those of parameters that it steps; the largest that are not too large are tried too.
        trusted: True takes the optimizer's word: it must step flat pieces, whatever comes out.

    Raises NotElementwiseError if the trial does not show that the optimizer is element-wise.
    """
    group = {**group, **fast_enough(group)}
    own = {shape for shape in shapes if 1 < math.prod(shape) <= _MOST_ELEMENTS}
    largest = sorted(own, key=lambda shape: (math.prod(shape), shape))[-_MOST_SHAPES:]
    probes = _PROBES[:1] if trusted else (*_PROBES, *map(_of_shape, largest))
    keys = [_keys_found(probe, optimizer, group, device, trusted=trusted) for probe in probes]
    return keys[0]


def tried_alike(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a key that is equal for param groups that one trial can stand for.

    Param groups that differ only in the learning rate share a trial.
    """
    left_out = ("params", "param_names", "name", "lr", "initial_lr")
    return [
        (key, value.tolist() if isinstance(value, Tensor) else value)
        for key, value in group.items()
        if key not in left_out
    ]


def fast_enough(group: dict[str, Any]) -> dict[str, Any]:
    """Return a learning rate large enough to show an update, where the group's own is too small."""
    rate = group.get("lr")
    if isinstance(rate, Tensor) and rate.numel() == 1 and abs(rate.item()) < _LEAST_RATE:
        return {"lr": torch.full_like(rate, _LEAST_RATE)}
    if isinstance(rate, (int, float)) and abs(rate) < _LEAST_RATE:
        return {"lr": _LEAST_RATE}
    return {}


def _keys_found(
    probe: _Probe,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    *,
    trusted: bool,
) -> set[str]:
    """Return the keys of the state that is kept for each element of the probe.

    Raises NotElementwiseError where the pieces' results differ from the matrix's; if `trusted`, only where
    the optimizer raises.
    """
    values, gradients = _numbers(probe)
    try:
        (whole,), (state,) = _try(optimizer, group, [values], [[g] for g in gradients], device)
        pieces, states = _try(
            optimizer,
            group,
            list(torch.split(values.reshape(-1), list(probe.pieces))),
            [list(torch.split(g.reshape(-1), list(probe.pieces))) for g in gradients],
            device,
        )
        keys = {k for k, v in state.items() if isinstance(v, Tensor) and v.shape == whole.shape}
        alike = trusted or (
            _alike(whole, pieces, probe)
            and all(_alike(state[key], [each[key] for each in states], probe) for key in keys)
        )
    except NotElementwiseError:
        raise
    except Exception as error:  # whatever an unknown optimizer raises on small dense parameters
        raise NotElementwiseError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if not alike:
        raise NotElementwiseError(probe.why)
    return keys


@cache
def _numbers(probe: _Probe) -> tuple[Tensor, Tensor]:
    """Return the probe's initial values, and its gradients of each step."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(probe.shape, generator=generator, dtype=probe.dtype)
    return values, torch.randn(probe.steps, *probe.shape, generator=generator, dtype=probe.dtype)


def _alike(whole: Tensor, pieces: list[Tensor], probe: _Probe) -> bool:
    """True if the pieces, joined in order, equal `whole` within the probe's tolerance."""
    flat, joined = whole.reshape(-1), torch.cat([piece.reshape(-1) for piece in pieces])
    if flat.dtype != joined.dtype:
        return False
    if not flat.is_floating_point():
        return torch.equal(flat, joined)
    rtol, atol = probe.tolerance
    return torch.allclose(flat, joined, rtol=rtol, atol=atol, equal_nan=True)


class NotElementwiseError(Exception):
    """The optimizer is not shown to be element-wise; the message says why."""


class MovesDataError(NotElementwiseError):
    """The optimizer gives parameters other memory, which no chunk can follow."""


def _try(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[Tensor],
    gradients: list[list[Tensor]],
    device: torch.device,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Step a copy of `optimizer` on fresh parameters; returns the parameters and their states."""
    parameters = [nn.Parameter(value.clone().to(device)) for value in values]
    probe = copy_for(optimizer, group, parameters)
    step, places = type(optimizer).step, [parameter.data_ptr() for parameter in parameters]
    for these in gradients:
        for parameter, gradient in zip(parameters, these, strict=True):
            parameter.grad = gradient.clone().to(device)
        step(probe)
    if [parameter.data_ptr() for parameter in parameters] != places:
        raise MovesDataError("it sets p.data to another tensor; let it write into p, as p.sub_() does")
    return [p.detach() for p in parameters], [probe.state[p] for p in parameters]


def _copied(value: Any) -> Any:
    """Return a copy of what a step may change in place: counts, histories, generators.

    Modules, parameters and other objects stay the optimizer's own.
    """
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return clone(value.detach())
    if isinstance(value, torch.Generator):
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        return made
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, np.ndarray)):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _copied(each) for key, each in value.items()})
        return copied
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_copied, value))
    if isinstance(value, deque):
        return deque(map(_copied, value), value.maxlen)
    return value


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Return a context after which the script's generators of random numbers are as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Call the `train()` of an optimizer that has modes, such as schedule-free ones, before a trial of its
    step."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def copy_for(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer without hooks and state, which steps `parameters` in a trial.

    `group` gives the hyperparameters. Step the copy by `type(optimizer).step(copy)`, which bypasses wrappers
    of the method.
    """
    probe = object.__new__(type(optimizer))
    kept = {name: value for name, value in vars(optimizer).items() if name not in _REPLACED}
    probe.__dict__.update({name: _copied(value) for name, value in kept.items()})
    drop_step_hooks(probe)
    hyperparameters = {key: _copied(value) for key, value in group.items() if key != "params"}
    probe.param_groups = [{**hyperparameters, "params": parameters}]
    probe.state = defaultdict(dict)
    begin_training(probe)
    return probe
