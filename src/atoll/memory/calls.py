"""The calls that led to a hook of ours, and whether a call that was noted is still under way.

Hooks of torch's around a call are not all run when a KeyboardInterrupt ends it. So what such a hook has begun
is noted with the call's frame: once the frame is gone from the stack, nobody will end it.
"""

from __future__ import annotations

import inspect
from types import FrameType


def caller(above: int = 0) -> FrameType | None:
    """Return the frame that called the function that asks, or one `above` it; None where there is none."""
    frame = inspect.currentframe()
    for _ in range(2 + above):
        frame = frame.f_back if frame is not None else None
    return frame


def is_under_way(call: FrameType | None) -> bool:
    """True if `call` is among this thread's callers."""
    frame = inspect.currentframe() if call is not None else None
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None
