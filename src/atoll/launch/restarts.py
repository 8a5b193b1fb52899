"""Restarts at growing intervals of processes that die at once."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

SHORT_SECONDS = 20.0  # a life that ends sooner, without a step, is useless
_LONGEST_PAUSE = 60.0
_LOOK_SECONDS = 0.05


class Pauses:
    """The wait before each restart: none after a useful life, nor after the first useless one; then 1 s, 2
    s, 4 s, and so on up to a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._began = clock()
        self._begins: dict[str, float] = {}
        self._useless: Counter[str] = Counter()  # lives in a row

    def before_restart(self, who: str, was_of_use: bool) -> float:
        """Return the seconds to wait before `who`, whose life has just ended, is started again."""
        now = self.clock()
        if was_of_use or now - self._begins.get(who, self._began) >= SHORT_SECONDS:
            self._useless[who] = 0
        else:
            self._useless[who] += 1
        count = self._useless[who]
        pause = min(_LONGEST_PAUSE, 2.0 ** min(count - 2, 10)) if count > 1 else 0.0
        self._begins[who] = now + pause
        return pause


class DelayedProcess:
    """A process that `start` starts after `pause` seconds, once it is polled then.

    Until then it looks like one that runs; a signal ends it without a start.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._clock, self._due = start, clock, clock() + pause
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: int | None = None

    @property
    def waits(self) -> bool:
        """True until the process is started."""
        return self._process is None and self._ended is None

    @property
    def pid(self) -> int:
        """The process id; -1, which no process has, before the start."""
        return -1 if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Act as the method of `subprocess.Popen` does."""
        return self._ended if self._process is None else self._process.returncode

    def poll(self) -> int | None:
        """Act as the method of `subprocess.Popen` does."""
        if self.waits and self._clock() >= self._due:
            self._process = self._start()
        return self._ended if self._process is None else self._process.poll()

    def send_signal(self, signum: int) -> None:
        """Act as the method of `subprocess.Popen` does."""
        if self._process is not None:
            self._process.send_signal(signum)
        elif self._ended is None:
            self._ended = -signum

    def kill(self) -> None:
        """Act as the method of `subprocess.Popen` does."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Act as the method of `subprocess.Popen` does."""
        until = self._clock() + timeout
        while (code := self.poll()) is None:
            if self._clock() > until:
                raise subprocess.TimeoutExpired("a worker that is to be started again", timeout)
            time.sleep(_LOOK_SECONDS)
        return code


Process: TypeAlias = subprocess.Popen[bytes] | DelayedProcess
