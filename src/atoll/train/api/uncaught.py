"""The output of a script that an error of Atoll's ends, if Atoll's command did not start it: one line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from atoll.core.errors import AtollError
from atoll.observe.failing import is_echo, text_of

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun for each of its workers
Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def show_errors_as_one_line() -> None:
    """Let an uncaught AtollError print its one line from now on, and end the process with its exit status.

    Every other exception goes to the hook that was there before. A second call does nothing.
    """
    if getattr(sys.excepthook, "is_atoll", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, AtollError):
            _leave_for_torchrun(error, "".join(traceback.format_exception(kind, error, trace)))
            before(kind, error, trace)
            return
        _leave_for_torchrun(error, f"atoll: {error}")
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_status)

    hook.is_atoll = True  # type: ignore[attr-defined]
    hook.before = before  # type: ignore[attr-defined]
    sys.excepthook = hook


def _leave_for_torchrun(error: BaseException, shown: str) -> None:
    """Leave an error where torchrun looks for it: it shows the first of a machine's errors at its end.

    The file's form is that of `torch.distributed.elastic.multiprocessing.errors.record`, and its time is in
    whole seconds: an error that another worker's end has caused comes a second later, after its cause.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    about = {"py_callstack": shown, "timestamp": str(int(time.time()) + is_echo(error))}
    message = {"message": f"{type(error).__name__}: {text_of(error)}", "extraInfo": about}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))


def script_hook() -> Hook | None:
    """Return the hook that the script has set for errors that nothing catches; None if it has set none."""
    hook = getattr(sys.excepthook, "before", sys.excepthook)
    return None if hook is sys.__excepthook__ else hook
