"""Stop the workers of torchrun's agent on SIGTERM: each script's own handler runs, and has time to finish.

By itself the agent sends SIGTERM to each worker's whole process group, a DataLoader's workers included, and
kills the remaining processes after 30 s. `Grace` replaces this in the launcher's process. It sends SIGTERM
once, to the workers alone, and kills the remaining processes when `run.grace` is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

_LOOK_SECONDS = 0.05  # between looks whether workers have ended


class Grace:
    """The SIGTERM handling of one launcher. Workers have `seconds` from the first SIGTERM on.

    Call `install` once, before torchrun's own `main`.
    """

    def __init__(
        self, seconds: float, watch: Callable[[int, int, Callable[[], int | None]], None] | None = None
    ) -> None:
        """`watch` is called for each worker that was started: rank, process id, what reads its status."""
        self._seconds, self._watch = seconds, watch
        self._context: Any = None  # torch's PContext: the workers, once they were started
        self._until: float | None = None  # monotonic; None: nobody has asked for the end

    def install(self) -> None:
        """Replace the SIGTERM handler that torch's PContext sets in `start`, which raises.

        `PContext` is not public. Its `start`, `close`, `pids` and `subprocess_handlers` were checked in torch
        2.6 to 2.13.
        """
        from torch.distributed.elastic.multiprocessing.api import PContext

        start, close = PContext.start, PContext.close

        def start_and_watch(context: PContext) -> None:
            start(context)
            self._context = context
            signal.signal(signal.SIGTERM, self._ask)
            if self._watch is not None:
                handlers = getattr(context, "subprocess_handlers", {})
                for rank, pid in context.pids().items():
                    self._watch(rank, pid, partial(_status_of, handlers.get(rank)))

        def wait_and_close(
            context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30
        ) -> None:
            if death_sig is None:  # a worker has failed; stop the others, unless that was asked already
                self._wait()
            close(context, death_sig, timeout)

        PContext.start = start_and_watch  # type: ignore[method-assign, assignment]
        PContext.close = wait_and_close  # type: ignore[method-assign, assignment]

    def _ask(self, _signum: int, _frame: FrameType | None) -> None:
        if self._until is not None:
            return
        self._until = time.monotonic() + self._seconds
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        signal.signal(signal.SIGALRM, self._end)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _end(self, _signum: int, _frame: FrameType | None) -> None:
        for pid in self._pids():
            if _runs(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # each worker leads a session of its own

    def _wait(self) -> None:
        """Wait until all workers have ended or their time is over. Return at once unless they were asked
        to end."""
        while self._until is not None and time.monotonic() < self._until:
            if not any(_runs(pid) for pid in self._pids()):
                return
            time.sleep(_LOOK_SECONDS)

    def _pids(self) -> list[int]:
        return list(self._context.pids().values())


def _status_of(handler: Any) -> int | None:
    """Return the status of a worker that its agent has reaped; None if torch does not give it in this way."""
    status = getattr(getattr(handler, "proc", None), "returncode", None)
    return status if isinstance(status, int) else None


def _runs(pid: int) -> bool:
    """True while a child runs. An ended child is not reaped here: its owner does that."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
