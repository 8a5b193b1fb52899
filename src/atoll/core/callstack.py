"""The call stack of a hook: who called it, and whether a noted call is still under way.

When a KeyboardInterrupt ends a call, torch does not run all of its hooks. So a hook that begins something
notes the call's frame. Once that frame is gone from the stack, no hook will end what was begun.
"""

from __future__ import annotations

import inspect
from types import FrameType


def caller(above: int = 0) -> FrameType | None:
    """Return the frame that called the caller of this function, or the frame `above` that; None if there is
    none."""
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
