"""The emulator's process: it alone may run at a priority above all else, and have a core to itself.

Run as a module by `inside`, with the lab's spec and file descriptors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.core.errors import AtollError, RunError, UserError
from atoll.lab.emulator import Emulator, EmulatorCounters, LinkCounters
from atoll.lab.spec import Spec
from atoll.lab.traffic import TRAFFIC, TrafficLog

START_SECONDS = 30.0
_SAMPLER_SECONDS = 5.0  # for its last line
_COUNTERS = "counters.json"


class Carried(msgspec.Struct, frozen=True):
    """What the emulator counted: each direction of a link, in the topology's order, and itself."""

    links: list[LinkCounters]
    emulator: EmulatorCounters


class Emulation:
    """The emulator's process, seen from `inside`; `tuns` are the sites' devices, in their order."""

    def __init__(self, spec: Path, folder: Path, tuns: Sequence[int]) -> None:
        self._counters, self._log = folder / _COUNTERS, folder / "emulator.log"
        self._ready, ready = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stop, self._stop = os.pipe2(os.O_CLOEXEC)
        given = [ready, stop, *tuns]
        command = [sys.executable, "-m", "atoll.lab.emulation", str(spec), str(self._counters)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=given,
                start_new_session=True,
            )
        for handle in (ready, stop, *tuns):  # theirs alone: what is read twice is read by nobody
            os.close(handle)

    def carries(self) -> bool:
        """Whether it has begun. Raises RunError if it has ended."""
        self.check()
        try:
            return bool(os.read(self._ready, 1))
        except BlockingIOError:
            return False

    def check(self) -> None:
        """Raise RunError if it has ended: nothing reaches any site any more."""
        code = self._process.poll()
        if code is not None:
            if code == UserError.exit_status:
                raise UserError(self._last_line())
            how = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
            why = f": {said}" if (said := self._last_line()) else ""
            raise RunError(f"the emulator {how}, and no link carries anything any more{why}")

    def _last_line(self) -> str:
        return (self._log.read_text(errors="replace").strip().splitlines() or [""])[-1]

    def owns(self, pid: int) -> bool:
        return pid == self._process.pid

    def stop(self) -> None:
        """Tell it to end and to write what it counted."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def carried(self) -> Carried | None:
        """What it counted; None if it was killed before it could write that."""
        try:
            return msgspec.json.decode(self._counters.read_bytes(), type=Carried)
        except (OSError, msgspec.DecodeError):
            return None


class _Sampler:
    """Writes down now and then what the links have done, from a thread of ordinary priority.

    It reads counters that the emulator's thread writes, and takes nothing that this one waits for.
    """

    def __init__(self, emulator: Emulator, spec: Spec) -> None:
        self._emulator, self._spec, self._over = emulator, spec, threading.Event()
        self._thread = threading.Thread(target=self._sample, name="atoll-lab-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write down a last time."""
        self._over.set()
        self._thread.join(_SAMPLER_SECONDS)

    def _sample(self) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end a lab
            log = TrafficLog(Path(self._spec.records) / TRAFFIC, self._spec.topology)
            while not (began := self._emulator.totals().started):
                if self._over.wait(0.001):
                    return
            over = False
            while not over:
                at = time.monotonic() - began
                log.add(at, self._emulator.counters())
                over = self._over.wait(log.interval - at % log.interval)
            log.add(time.monotonic() - began, self._emulator.counters())


def main(arguments: Sequence[str]) -> None:
    """Carry packets until the file descriptor `stop` can be read; then write what was counted."""
    spec, counters = Spec.read(Path(arguments[0])), Path(arguments[1])
    ready, stop, *tuns = map(int, arguments[2:])
    try:
        emulator = Emulator(spec.topology, tuns)
    except AtollError as error:
        print(error, flush=True)
        sys.exit(error.exit_status)
    os.write(ready, b"+")
    os.close(ready)
    sampler = _Sampler(emulator, spec)
    emulator.run(stop)
    sampler.stop()
    beside = counters.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(Carried(emulator.counters(), emulator.totals())))
    beside.replace(counters)


if __name__ == "__main__":
    main(sys.argv[1:])
