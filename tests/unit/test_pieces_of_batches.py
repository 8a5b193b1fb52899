"""Pieces of batches: the forms that are cut, errors of memory, and what a failed batch leaves in memory."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from atoll.core.errors import RunError
from atoll.tensors.outofmemory import is_out_of_memory, let_go
from atoll.tensors.torch_compat import next_node
from atoll.train.data.cutting import cut_out, samples_of

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Images:
    pixels: Tensor
    sizes: list[int]
    scale: float = 0.5


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
SCALAR, TABLE = torch.tensor(3.0), torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("batch", "known", "expected"),
    [
        (X, (), X[2:5]),
        ([X, Y], (), [X[2:5], Y[2:5]]),
        ((X, {"labels": Y, "table": TABLE, "temperature": SCALAR, "name": "a"}), {6.0}, None),
        (OrderedDict(x=X, y=Y), (), OrderedDict(x=X[2:5], y=Y[2:5])),
        (Pair(X, Y), (), Pair(X[2:5], Y[2:5])),
        (Images(X, list(range(6))), (), Images(X[2:5], [2, 3, 4])),
        (([X[0]] * 6, list("abcdef")), {6.0}, ([X[0]] * 3, list("cde"))),  # images of unlike sizes
    ],
)
def test_a_batch_is_cut_in_its_own_form(batch: Any, known: set[float], expected: Any) -> None:
    assert samples_of(batch, known) == 6
    found = cut_out(batch, 2, 5, 6)
    if expected is None:
        x, rest = found
        assert torch.equal(x, X[2:5])
        assert torch.equal(rest["labels"], Y[2:5])
        assert (rest["table"], rest["temperature"], rest["name"]) == (TABLE, SCALAR, "a")
        return
    assert type(found) is type(batch)
    assert str(found) == str(expected)


@pytest.mark.parametrize("batch", ["text", 4, None, [1, 2], SCALAR])
def test_what_has_no_samples_is_not_cut(batch: Any) -> None:
    assert samples_of(batch, {6.0}) == 0


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: 9"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RunError("worker 1 is out of memory"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_a_real_allocation_that_is_too_large_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_variables_of_the_script_hold_no_activations_of_a_batch_that_failed() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    before = (weight * 2).exp()
    early = before.sum()
    since = next_node()
    activation = (before @ weight).tanh()
    held = ref(activation)
    loss = activation.square().sum() + early
    del activation
    assert held() is not None
    frame = inspect.currentframe()
    assert frame is not None
    let_go(frame, since, torch.device("cpu"))
    assert held() is None
    with pytest.raises(RuntimeError, match="this graph was freed: memory had run out"):
        loss.backward()
    early.backward()  # a graph from before
    assert weight.grad is not None
