"""A hook that runs once a parameter's gradient is final in a backward, after the script's own hooks.

A script's post-accumulate hooks may change `p.grad`, and may be registered at any time. torch runs them
inside the node that accumulates the gradient, so a hook on that node runs after all of them.
DistributedDataParallel uses such a hook (docs/notes/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle


def after_gradient(accumulator: Any, hook: Callable[..., None]) -> RemovableHandle:
    """Call `hook(inputs, outputs)` when the parameter has accumulated a gradient, after the script's hooks.

    `accumulator` is the node of the parameter's `GradientEdge`. The caller must keep the node: autograd makes
    a new one, without hooks, when nothing refers to the old one.
    """
    handle: RemovableHandle = accumulator.register_hook(hook)
    return handle
