"""Whether a call that was noted is still under way.

Hooks of torch's around a call are not all run when a KeyboardInterrupt ends it. So what such a hook has begun
is noted with the call's frame: once the frame is gone from the stack, nobody will end it.
"""

from __future__ import annotations

import sys
from types import FrameType


def is_under_way(call: FrameType | None) -> bool:
    """Whether `call` is among those that led here, on this thread."""
    frame: FrameType | None = sys._getframe(1) if call is not None else None
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None
