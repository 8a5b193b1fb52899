"""Errors of a device or host without memory for what a script computes, and the release of what it holds."""

from __future__ import annotations

import inspect
from types import FrameType

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.tensors.torch_compat import release_graphs

# Of RuntimeErrors: torch's allocator on a CPU, CUDA and the libraries that allocate for themselves.
_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error of torch, or of Python, that says that memory has run out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, AtollError) or not isinstance(error, RuntimeError):
        return False
    return any(word in str(error) for word in _WORDS)


def let_go(frame: FrameType, since: int, device: torch.device) -> None:
    """Free what the graphs of a script's tensors hold for backwards that will not be made.

    A variable such as `loss` keeps its graph, and so the activations of a batch that did not fit, until the
    script assigns it again, which is after the next forward. Graphs from before the node numbered `since`
    stay.
    """
    held = frame.f_locals
    values = [value for value in held.values() if isinstance(value, Tensor)]
    release_graphs([tensor.grad_fn for tensor in values if tensor.grad_fn is not None], since)
    if isinstance(held, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        held.clear()  # a copy, before Python 3.13, which would keep these tensors
    empty_cache = getattr(torch.accelerator, "empty_cache", None)  # from torch 2.9 on
    if device.type != "cpu" and empty_cache is not None:
        empty_cache()
