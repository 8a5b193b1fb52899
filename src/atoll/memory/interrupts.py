"""Ctrl-C between two uses of parameters, and not within one.

Python raises KeyboardInterrupt at any point of the main thread: between a pin and the `try` that ends it, or
right after it has taken a lock, which nobody then releases. So while a model is fitted, a SIGINT that comes
within this package's code (`uninterrupted`) is kept until that code is done. A second one is raised at once,
since the code may be waiting for something that does not come; what was begun then stays as it is.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from atoll.tensors.torch_compat import untraced

P = ParamSpec("P")
R = TypeVar("R")

_MAIN = threading.main_thread().ident or 0


class _Kept:
    """The main thread's state, as Python handles signals there.

    Attributes:
        depth: calls of uninterrupted functions, one inside the other.
        came: True if a signal has come meanwhile.
        users: fitted models.
        handler: the handler of SIGINT before ours.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.came = False
        self.users = 0
        self.handler: Callable[[int, FrameType | None], Any] | None = None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.depth and not self.came:
            self.came = True
            return
        self.came = False
        assert self.handler is not None
        self.handler(signum, frame)

    def tell(self) -> None:
        """Hand on a signal that has come, when the last uninterrupted call is done."""
        if self.came and not self.depth:
            self.came = False
            if self.handler is not None:
                self.handler(signal.SIGINT, None)


_KEPT = _Kept()


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with KeyboardInterrupts kept during a call, and raised at its end."""

    @functools.wraps(function)
    @untraced
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        _KEPT.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _KEPT.depth -= 1
            if _KEPT.came:
                _KEPT.tell()

    return called


def begin() -> bool:
    """Keep Ctrl-C from now on; `end` ends it. False, with nothing done, on another thread than the main one,
    or if Python does not handle SIGINT."""
    if threading.get_ident() != _MAIN:
        return False
    if not _KEPT.users:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # SIGINT is ignored, or its handler is not Python's
            return False
        _KEPT.handler = handler
        signal.signal(signal.SIGINT, _KEPT.handle)
    _KEPT.users += 1
    return True


def end() -> None:
    """End one `begin`. The last one restores the earlier handler, unless somebody has set another since."""
    _KEPT.users -= 1
    here = threading.get_ident() == _MAIN
    if not _KEPT.users and here and signal.getsignal(signal.SIGINT) == _KEPT.handle:
        signal.signal(signal.SIGINT, _KEPT.handler)
