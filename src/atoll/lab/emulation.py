"""The emulator's process, which runs at a priority above all others where permitted, and may own a core.

`inside` starts this module with the lab's spec and file descriptors.
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

from atoll.core.decoding import from_json
from atoll.core.errors import AtollError, RunError, UserError
from atoll.lab.emulator import Emulator, EmulatorCounters, LinkCounters
from atoll.lab.spec import Spec
from atoll.lab.topology import Topology
from atoll.lab.traffic import TRAFFIC, TrafficLog

START_SECONDS = 30.0
_SAMPLER_SECONDS = 5.0  # for the sampler's last sample
_BEGIN_SECONDS = 0.01  # between checks whether the emulator has begun
_COUNTERS = "counters.json"


class Carried(msgspec.Struct, frozen=True):
    """Counters of each direction of a link, in the topology's order, and of the emulator itself."""

    links: list[LinkCounters]
    emulator: EmulatorCounters


class Emulation:
    """Handle on the emulator's process, for `inside`. `tuns` are the sites' devices, in order."""

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
        for handle in (ready, stop, *tuns):  # only the emulator may read the devices
            os.close(handle)

    def carries(self) -> bool:
        """Return True once the emulator has begun. Raises RunError if it has ended."""
        self.check()
        try:
            return bool(os.read(self._ready, 1))
        except BlockingIOError:
            return False

    def check(self) -> None:
        """Raise RunError if the emulator has ended, or UserError if the topology was at fault."""
        code = self._process.poll()
        if code is not None:
            if code == UserError.exit_status:
                raise UserError(self._last_line())
            how = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
            why = f": {said}" if (said := self._last_line()) else ""
            raise RunError(f"the emulator {how}, and the links carry nothing any more{why}")

    def _last_line(self) -> str:
        return (self._log.read_text(errors="replace").strip().splitlines() or [""])[-1]

    def owns(self, pid: int) -> bool:
        return pid == self._process.pid

    def stop(self) -> None:
        """Tell the emulator to end and to write its counters."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def carried(self) -> Carried | None:
        """Return the emulator's counters; None if it was killed before it wrote them."""
        try:
            return from_json(self._counters.read_bytes(), Carried)
        except (OSError, msgspec.DecodeError):
            return None


class _Sampler:
    """Sample the links' counters in a thread of ordinary priority.

    It takes no lock that the emulator's thread could wait for.
    """

    def __init__(self, emulator: Emulator, topology: Topology) -> None:
        self._emulator, self._over = emulator, threading.Event()
        self._log = TrafficLog(topology)
        self._thread = threading.Thread(target=self._sample, name="atoll-lab-sampler", daemon=True)
        self._thread.start()

    def finish(self, path: Path) -> None:
        """Take a last sample, and write all samples to `path`."""
        self._over.set()
        self._thread.join(_SAMPLER_SECONDS)
        with contextlib.suppress(OSError):  # a full disk is no reason to lose a lab's counters
            self._log.write(path)

    def _sample(self) -> None:
        while not (began := self._emulator.totals().started):
            if self._over.wait(_BEGIN_SECONDS):
                return
        finished = False
        while not finished:
            at = time.monotonic() - began
            self._log.add(at, self._emulator.counters())
            finished = self._over.wait(self._log.interval - at % self._log.interval)
        self._log.add(time.monotonic() - began, self._emulator.counters())


def main(arguments: Sequence[str]) -> None:
    """Carry packets until the file descriptor `stop` becomes readable; then write the counters."""
    spec, counters = Spec.read(Path(arguments[0])), Path(arguments[1])
    ready, stop, *tuns = map(int, arguments[2:])
    try:
        emulator = Emulator(spec.topology, tuns)
    except AtollError as error:
        print(error, flush=True)
        sys.exit(error.exit_status)
    os.write(ready, b"+")
    os.close(ready)
    sampler = _Sampler(emulator, spec.topology)
    emulator.run(stop)
    sampler.finish(Path(spec.records) / TRAFFIC)
    beside = counters.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(Carried(emulator.counters(), emulator.totals())))
    beside.replace(counters)


if __name__ == "__main__":
    main(sys.argv[1:])
