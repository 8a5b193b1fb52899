"""Code that torch.compile leaves alone.

A script may compile a model after `fit`. What torch.compile then traces is the script's code and, through
`__torch_function__` and hooks, ours, which it would run with parameters that are on the move. Frames that are
marked here are run as they are, with all that they call; the script's own are broken there, and go call by
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """`function`, which torch.compile does not look into."""
    # `torch.compiler.disable` would import the compiler, for seconds, and costs more at each call.
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
