"""A look at silent processes of this machine, which tells a dead process from one without a CPU.

A missing sign of life alone does not show that. On one machine the system knows more (Linux: /proc). Each
silent process is looked at every half second. One that waits for a CPU counts as alive as long as it waits.
One that computes counts as alive up to the longest tolerated silence. One that does neither counts as dead.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

AGAIN_SECONDS = 0.5  # between two looks at a silent process
_STARVED_SHARE = 0.5  # of a CPU: a runnable process that gets less counts as waiting for a CPU
_FORGET_SECONDS = 5.0  # without a look, after which a silence counts as over
_PROC = Path("/proc")
_BOOT = "sys/kernel/random/boot_id"
# Namespaces: the first changes process ids, the third changes clocks. Sites of a lab differ in the second,
# and count as different machines.
_SPACES = ("self/ns/pid", "self/ns/net", "self/ns/time")
_EXITING, _DUMPING = 0x4, 0x200  # flags of a process (linux/sched.h: PF_EXITING, PF_DUMPCORE)
_WAITS = "its process is alive, waits, and says nothing"
_TICK = os.sysconf("SC_CLK_TCK")  # the system's ticks of CPU time in a second


class Reading(NamedTuple):
    """The system's facts about a process."""

    states: str  # of the threads, a letter each (R, S, D, T, ...), the main thread's first
    cpu: float  # seconds of CPU used
    started: int  # time of the start, in ticks since the boot
    ended: bool  # the process has ended or is about to


@dataclass(frozen=True)
class Judgement:
    """The verdict on a silent process: if `alive`, wait on; `why` is the evidence in words, if any."""

    alive: bool
    why: str = ""


@dataclass(frozen=True)
class _Look:
    """The latest look at a silent process."""

    began: float  # time from which CPU use is measured
    cpu: float  # seconds of CPU used before `began`
    at: float  # time of the look
    is_quiet: bool  # no thread had a CPU or wanted one


@functools.cache
def _machine() -> str:
    """Return a name of this machine, or of this container; empty if the system gives none."""
    try:
        parts = [(_PROC / _BOOT).read_text()]
        parts += [str((_PROC / name).readlink()) for name in _SPACES if (_PROC / name).is_symlink()]
    except OSError:
        return ""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def own_origin() -> str:
    """Return machine, id and start time of this process, for `Vouching`; empty without /proc."""
    return _origin_of(os.getpid())


def _origin_of(pid: int) -> str:
    reading = read_process(pid)
    return f"{_machine()}:{pid}:{reading.started}" if _machine() and reading is not None else ""


def read_process(pid: int) -> Reading | None:
    """Read the facts about a process of this machine; None if there is none."""
    folder = _PROC / str(pid)
    try:
        fields = _fields(pid)
        pending = (folder / "status").read_text(errors="replace")
        threads = [each for each in (folder / "task").iterdir() if each.name != str(pid)]
    except OSError:
        return None
    states = fields[0] + "".join(map(_state, threads))
    ended = fields[0] in "ZX" or bool(int(fields[6]) & (_EXITING | _DUMPING)) or _is_killed(pending)
    return Reading(states, (int(fields[11]) + int(fields[12])) / _TICK, int(fields[19]), ended)


def parent_of(origin: str) -> str:
    """Return the `own_origin` of the parent of a process of this machine; empty if unknown."""
    machine, pid, _ = _parsed(origin)
    if not pid or machine != _machine():
        return ""
    try:
        return _origin_of(int(_fields(pid)[1]))
    except OSError:
        return ""


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which is in parentheses and may hold anything."""
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # the thread has ended meanwhile
        return ""


def _is_killed(status: str) -> bool:
    """True if SIGKILL is pending: the process will end when it next runs."""
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & 1 << (signal.SIGKILL - 1) for mask in masks)


def look_at(pid: int) -> str:
    """Watch a process of this machine for half a second, and say what it does."""
    if not _machine():
        return "nothing is known of its process"
    origin, vouching = _origin_of(pid), Vouching()
    if not (seen := vouching.judge(origin, 0.0, math.inf)).why and origin:
        time.sleep(AGAIN_SECONDS)
        seen = vouching.judge(origin, 0.0, math.inf)
    return seen.why or (_WAITS if seen.alive else "its process has ended")


def describe(origin: str) -> str:
    """Describe a process: "runs (...)", "runs on another machine" or "stands still (SIGSTOP)".

    Empty if the process has ended. `origin` is a result of `own_origin`.
    """
    machine, pid, started = _parsed(origin)
    if not pid or machine != _machine():
        return "runs on another machine"
    reading = read_process(pid)
    if reading is None or reading.ended or reading.started != started:
        return ""
    return (
        "stands still (SIGSTOP)" if reading.states[0] == "T" else f"runs (it got {reading.cpu:.1f} s of CPU)"
    )


def _parsed(origin: str) -> tuple[str, int, int]:
    """Return machine, process id and start time of an `own_origin`; ("", 0, 0) for other texts."""
    machine, _, rest = origin.partition(":")
    pid, _, started = rest.partition(":")
    if not (pid.isdecimal() and started.isdecimal()):
        return "", 0, 0
    return machine, int(pid), int(started)


class Vouching:
    """Judges silent processes, each known by its `own_origin`.

    Call `judge` every `AGAIN_SECONDS`, from the moment at which a process would count as dead. `read` and
    `clock` are the system's, except in tests.
    """

    def __init__(
        self,
        read: Callable[[int], Reading | None] = read_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._looks: dict[str, _Look] = {}

    def judge(self, origin: str, silence: float, most: float) -> Judgement:
        """Judge a process that was silent for `silence` seconds; one that computes has `most` seconds."""
        machine, pid, started = _parsed(origin)
        if not pid:
            return Judgement(False)
        if machine != _machine():
            why = "it is on another machine: if that is only overloaded, raise hub.patience"
            return Judgement(False, why)
        if pid == os.getpid():  # that this process runs says nothing about a silent thread of its own
            return Judgement(False)
        now = self._clock()
        self._looks = {each: look for each, look in self._looks.items() if now - look.at <= _FORGET_SECONDS}
        reading = self._read(pid)
        if reading is None or reading.ended or reading.started != started:
            return Judgement(False, "its process has ended")
        if reading.states[0] == "T":
            return Judgement(False, "its process stands still (SIGSTOP)")
        return self._judge_living(origin, reading, silence, most)

    def _judge_living(self, origin: str, reading: Reading, silence: float, most: float) -> Judgement:
        now, is_quiet = self._clock(), not set(reading.states) & {"R", "D"}
        before = self._looks.get(origin)
        if before is None:  # CPU use shows only between two looks
            self._looks[origin] = _Look(now, reading.cpu, now, is_quiet)
            return Judgement(True)
        seconds, cpu = now - before.began, reading.cpu - before.cpu
        goes_on = seconds < _FORGET_SECONDS
        began = (before.began, before.cpu) if goes_on else (now, reading.cpu)
        self._looks[origin] = _Look(*began, now, is_quiet)
        if is_quiet and not before.is_quiet:  # proves nothing: a sign of life may be under way
            return Judgement(True)
        if is_quiet:
            return Judgement(False, _WAITS)
        got = f"its process is alive and got {cpu:.2f} s of CPU in the last {seconds:.1f} s"
        if "R" in reading.states and cpu < _STARVED_SHARE * seconds:
            return Judgement(True, f"{got}: the machine is overloaded")
        what = "computes, and lets none of its threads speak" if "R" in reading.states else "waits for a disk"
        return Judgement(silence < most, f"{got}: it {what}")
