"""What a script that Atoll's own command did not start shows when an error of Atoll's ends it: one line."""

from __future__ import annotations

import sys
from types import TracebackType

from atoll.core.errors import AtollError


def show_errors_as_one_line() -> None:
    """From now on an AtollError that nothing catches prints its line, and the process ends with its status.

    Every other exception goes to the hook that was there before. May be called again; it then does nothing.
    """
    if getattr(sys.excepthook, "is_atoll", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, AtollError):
            before(kind, error, trace)
            return
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_status)

    hook.is_atoll = True  # type: ignore[attr-defined]
    sys.excepthook = hook
