"""Notice when child processes end, to the moment: of two ends the earlier one is likelier the cause."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from atoll.core.runclock import record_time

# Called with the child's process id, its status (or minus its signal; None: not known), and the time.
OnEnd = Callable[[int, "int | None", float], None]


class EndWatch:
    """Waits for each child in a thread of its own. The child's owner still reaps it."""

    def __init__(self, on_end: OnEnd) -> None:
        self._on_end = on_end
        self._threads: list[threading.Thread] = []

    def watch(self, pid: int) -> None:
        """Watch the child `pid` from now on."""
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(threading.Thread(target=self._wait, args=(pid,), name="atoll-end", daemon=True))
        self._threads[-1].start()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until the ends of all children are reported."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _wait(self, pid: int) -> None:
        code: int | None = None
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if ended is not None:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        except ChildProcessError:  # its owner was faster
            pass
        self._on_end(pid, code, record_time())
