"""The line of the user's script from which a call comes."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from atoll.core.characters import encoded

_ATOLL = str(Path(__file__).parents[1]) + "/"
_NOT_THE_SCRIPT = tuple(
    {
        _ATOLL,
        "<frozen ",  # importlib and runpy
        *(
            str(Path(sysconfig.get_path(name))) + "/"
            for name in ("purelib", "platlib", "stdlib", "platstdlib")
        ),
        # Packages of another environment, visible through a .pth file or include-system-site-packages.
        *(f"{entry}/" for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")),
    }
)
_PACKAGES = ("/site-packages/", "/dist-packages/")  # folders of packages, anywhere


def script_line() -> str:
    """Return the innermost line of the user's own code on this thread's stack, as "train.py:28".

    Code is the user's own if it lies neither in Atoll, nor in the standard library, nor in an installed
    package. Returns "" on a stack without such a frame, for example on a thread of autograd.
    """
    return _line_of(inspect.currentframe())


def waiting_line() -> str:
    """Return `script_line`, or the main thread's line if this thread runs no code of the user.

    On a GPU a backward ends on a thread of autograd, while the main thread waits for it.
    """
    return script_line() or _line_of(sys._current_frames().get(threading.main_thread().ident or 0))


def script_number(names: tuple[str, ...]) -> int | None:
    """Return the value of the innermost variable of these `names` in the user's own code on this stack.

    Only integers of at least 0 count. On a thread that runs no code of the user, the main thread's stack
    counts. Returns None without such a variable.
    """
    frame = _script_frame(inspect.currentframe())
    if frame is None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if is_script(code.co_filename):
            is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            for name in _variables_of(code, names) if is_function else names:
                value = _variable(frame, name, is_function)
                if type(value) is int and 0 <= value < 2**53:
                    return value
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=256)
def _variables_of(code: CodeType, names: tuple[str, ...]) -> list[str]:
    """Return the `names` that are variables of a function."""
    known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return [name for name in names if name in known]


def _variable(frame: FrameType, name: str, is_function: bool) -> object:
    values = frame.f_locals
    value = values.get(name)
    if is_function and type(values) is dict:
        # Before Python 3.13 a function's f_locals is a copy that the frame retains: the copy must not keep
        # the script's tensors alive.
        values.clear()
    return value


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's own code that `error` passed through, as "train.py:28"."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if is_script(trace.tb_frame.f_code.co_filename) and is_script(_module_file(trace.tb_frame)):
            found = _shown(trace)
        trace = trace.tb_next
    return found


def _module_file(frame: FrameType) -> str:
    """Return the file of a frame's module. Compiled code of Cython gives its frames relative names such as
    "_generator.pyx", which do not say where its module lies."""
    return str(frame.f_globals.get("__file__", ""))


def _shown(trace: TracebackType) -> str:
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def _line_of(frame: FrameType | None) -> str:
    frame = _script_frame(frame)
    if frame is None:
        return ""
    # The name may not be UTF-8, and the line goes to other workers and into records.
    name = encoded(Path(frame.f_code.co_filename).name).decode()
    return f"{name}:{frame.f_lineno}"


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code, from `frame` outwards."""
    while frame is not None and not is_script(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=4096)
def is_script(file: str) -> bool:
    """True if a code file belongs to the user."""
    return not file.startswith(_NOT_THE_SCRIPT) and not any(folder in file for folder in _PACKAGES)


def is_atoll(file: str) -> bool:
    """True if a code file is part of Atoll."""
    return file.startswith(_ATOLL)


def at_script_line(what: str, line: str) -> str:
    """Append the script's line, if known, to a text: "session.save (train.py:31)"."""
    return f"{what} ({line})" if line else what
