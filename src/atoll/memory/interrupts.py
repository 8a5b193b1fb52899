"""Ctrl-C between two uses of parameters, and not within one.

Python raises KeyboardInterrupt wherever the main thread happens to be: between a pin and the `try` that ends
it, or as a lock has just been taken that nobody will then release. So while a model is fitted, a SIGINT that
comes within this package's code (`uninterrupted`) is kept until that code is done. A second one is not: who
waits for what does not come is let go, with what was begun left as it is.
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
    """The main thread's, in which Python handles signals."""

    def __init__(self) -> None:
        self.depth = 0  # calls of what is not to be interrupted
        self.came = False  # a signal, meanwhile
        self.users = 0  # fitted models
        self.handler: Callable[[int, FrameType | None], Any] | None = None  # before ours

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.depth and not self.came:
            self.came = True
            return
        self.came = False
        assert self.handler is not None
        self.handler(signum, frame)

    def tell(self) -> None:
        """Hand on what came, now that the last call is done."""
        if self.came and not self.depth:
            self.came = False
            if self.handler is not None:
                self.handler(signal.SIGINT, None)


_KEPT = _Kept()


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, at whose end a KeyboardInterrupt is raised that came within."""

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
    """Keep Ctrl-C from now on; whether that can be done: on the main thread alone, and where Python handles
    SIGINT. To be ended by `end`, if so."""
    if threading.get_ident() != _MAIN:
        return False
    if not _KEPT.users:
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # it is ignored, or another's than Python's
            return False
        _KEPT.handler = handler
        signal.signal(signal.SIGINT, _KEPT.handle)
    _KEPT.users += 1
    return True


def end() -> None:
    """The last one puts back the handler that was there, if nobody has set another since."""
    _KEPT.users -= 1
    here = threading.get_ident() == _MAIN
    if not _KEPT.users and here and signal.getsignal(signal.SIGINT) == _KEPT.handle:
        signal.signal(signal.SIGINT, _KEPT.handler)
