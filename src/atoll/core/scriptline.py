"""The line of the user's script that a call comes from."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

_ATOLL = str(Path(__file__).parents[1]) + "/"
_NOT_THE_SCRIPT = tuple(
    {
        _ATOLL,
        "<frozen ",  # importlib and runpy
        *(
            str(Path(sysconfig.get_path(name))) + "/"
            for name in ("purelib", "platlib", "stdlib", "platstdlib")
        ),
        # Packages of another environment that this one sees: by a .pth file, or include-system-site-packages.
        *(f"{entry}/" for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")),
    }
)
_PACKAGES = ("/site-packages/", "/dist-packages/")  # wherever on the path these lie


def script_line() -> str:
    """The innermost line of the user's own code on this thread's stack, as "train.py:28".

    The user's own code is what lies neither in Atoll, nor in the standard library, nor in an installed
    package. Without any such frame (a thread of autograd's has none) the result is "".
    """
    return _line_of(sys._getframe(1))


def waiting_line() -> str:
    """`script_line`, or on a thread without a line of the user's own code, the main thread's: on a GPU a
    backward ends on a thread of autograd's, and the main thread waits for it."""
    return script_line() or _line_of(sys._current_frames().get(threading.main_thread().ident or 0))


def _line_of(frame: FrameType | None) -> str:
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_script(file: str) -> bool:
    """Whether a file of code is the user's own."""
    return not file.startswith(_NOT_THE_SCRIPT) and not any(folder in file for folder in _PACKAGES)


def at_script_line(what: str, line: str) -> str:
    """`what` with the script's line behind it, as far as one is known: "session.save (train.py:31)"."""
    return f"{what} ({line})" if line else what
