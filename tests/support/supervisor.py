"""Starts the processes of a run, strikes them, starts again those that were killed, and sees what they leave.

    with Supervisor(folder) as parts:
        parts.add("hub", [sys.executable, "-m", "atoll.cli.app", "hub", ...])
        parts.add("worker 0", [sys.executable, "train.py"], {"ATOLL_HUB": address})
        parts.kill("worker 0")                       # and it is started again
        parts.stop("hub", seconds=2.0)               # SIGSTOP, and SIGCONT when the time is over
        parts.wait_for(lambda: finished(), "the end of the run", deadline=600)
    assert not parts.failures                        # who ended by itself with another status than 0
    assert not leaks(parts.usage)

A process that ends by itself is not started again: the run's own parts must not; but for those of a status in
`again`, with which a shard ends that another has taken the place of. One thread does it all, in `tick`, which
`wait_for` calls.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType

import psutil

from atoll.core.errors import DeadlineError

LOOK_SECONDS = 0.02
USAGE_SECONDS = 2.0  # between looks at what processes hold
END_SECONDS = 10.0  # for processes that were killed to be gone
WARM_SECONDS = 10.0  # after a process has begun its work, which do not count when leaks are looked for
_BYTES_SPARED, _BYTES_SHARE = 32 * 2**20, 0.2
_HANDLES_SPARED = 4
_LEAST_LOOKS = 12  # of a life that is judged: a quarter has a middle then


@dataclass(frozen=True)
class Strike:
    """A fault that was done to a part; `time` is monotonic. `seconds` is how long it stood still; 0: it was
    killed."""

    time: float
    part: str
    seconds: float


@dataclass(frozen=True)
class Failure:
    """A part that ended by itself, with a status that is not 0, and the last line that it said."""

    part: str
    status: int
    said: str


@dataclass(frozen=True)
class Usage:
    """What a process holds at a time (monotonic): `age` is in seconds since it was seen to have begun its
    work, `resident` in bytes."""

    part: str
    pid: int
    time: float
    age: float
    descriptors: int
    threads: int
    resident: int


@dataclass
class _Part:
    command: list[str]
    environment: dict[str, str]
    begins: bytes  # what it says once it has begun its work; empty: it has from its start
    process: subprocess.Popen[bytes]
    started: float  # monotonic
    said_before: int  # bytes in its log before this life
    began: float = -1.0  # when it was seen to have begun, monotonic; below 0: it was not
    wakes: float = 0.0  # when it goes on, monotonic; 0: it is not stopped


@dataclass
class Supervisor:
    """Parts by name; `folder` gets what each says, in NAME.log, all of its lives one after another."""

    folder: Path
    again: frozenset[int] = frozenset()
    strikes: list[Strike] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)  # who ended by itself, with status 0
    restarts: int = 0
    usage: list[Usage] = field(default_factory=list)
    _parts: dict[str, _Part] = field(default_factory=dict)
    _next_look: float = 0.0

    def __enter__(self) -> Supervisor:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        begins: str = "",
    ) -> None:
        """Start a part; `environment` is added to this process's. What it holds is looked at once it has said
        `begins`: until then it imports, which takes long where cores are busy."""
        complete = {**os.environ, **(environment or {})}
        self._parts[name] = self._start(name, list(command), complete, begins.encode())

    def _start(self, name: str, command: list[str], environment: dict[str, str], begins: bytes) -> _Part:
        with self._log(name).open("ab") as log:
            said_before = log.tell()
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _Part(command, environment, begins, process, time.monotonic(), said_before)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def running(self, name: str) -> bool:
        """Whether the part has a process that is neither stopped nor ended."""
        part = self._parts[name]
        return name not in self.finished and not part.wakes and part.process.poll() is None

    def pid(self, name: str) -> int:
        return self._parts[name].process.pid

    def state(self, name: str) -> str:
        """A part in words, for who waits for it: whether it has begun its work, and what it said last."""
        part = self._parts[name]
        begun = (
            "has begun" if part.began >= 0 else f"has not begun, {time.monotonic() - part.started:.0f} s old"
        )
        return f"{name} {begun}, and said last: {self._last_line(name)!r}"

    def kill(self, name: str) -> None:
        """SIGKILL; the next `tick` starts the part again. Who has ended by itself has begun its next life."""
        self.tick()
        self.strikes.append(Strike(time.monotonic(), name, 0.0))
        self._parts[name].process.kill()

    def stop(self, name: str, seconds: float) -> None:
        """SIGSTOP; a `tick` lets it go on after `seconds`."""
        now, part = time.monotonic(), self._parts[name]
        self.strikes.append(Strike(now, name, seconds))
        part.process.send_signal(signal.SIGSTOP)
        part.wakes = now + seconds

    def tick(self) -> None:
        """See to everyone: wake whose time is over, start again who was killed, note who has ended."""
        now = time.monotonic()
        for name, part in self._parts.items():
            if part.wakes and now >= part.wakes:
                part.wakes = 0.0
                part.process.send_signal(signal.SIGCONT)
            status = part.process.poll()
            if status is None or name in self.finished:
                continue
            if status == -signal.SIGKILL or status in self.again:
                self.restarts += status == -signal.SIGKILL
                self._parts[name] = self._start(name, part.command, part.environment, part.begins)
                continue
            self.finished.add(name)
            if status:
                self.failures.append(Failure(name, status, self._last_line(name)))
        if now >= self._next_look:
            self._next_look = now + USAGE_SECONDS
            self._look(now)

    def _last_line(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _look(self, now: float) -> None:
        for name, part in self._parts.items():
            if part.began < 0 and self._has_begun(name, part):
                part.began = now
            if part.began < 0:
                continue
            try:
                process = psutil.Process(part.process.pid)
                self.usage.append(
                    Usage(
                        name,
                        part.process.pid,
                        now,
                        now - part.began,
                        process.num_fds(),
                        process.num_threads(),
                        process.memory_info().rss,
                    )
                )
            except psutil.Error:  # it has just ended
                continue

    def _has_begun(self, name: str, part: _Part) -> bool:
        return part.begins in self._log(name).read_bytes()[part.said_before :]

    def wait_for(self, condition: Callable[[], object], what: str, deadline: float) -> None:
        """Tick until the condition holds; raises DeadlineError after `deadline` seconds."""
        until = time.monotonic() + deadline
        while not condition():
            if time.monotonic() > until:
                raise DeadlineError(f"waited {deadline:g} s for {what}; see {self.folder}")
            self.tick()
            time.sleep(LOOK_SECONDS)

    def pause(self, seconds: float) -> None:
        """Tick for so long."""
        until = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() >= until, "the time to pass", seconds + END_SECONDS)

    def close(self) -> None:
        """End every part, and whatever it has started, by force. Raises DeadlineError if one is left."""
        groups = [part.process.pid for part in self._parts.values()]
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for name, part in self._parts.items():
            try:
                part.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                raise DeadlineError(f"{name} did not end within {END_SECONDS:g} s of SIGKILL") from None
        self._parts.clear()

    def left(self) -> list[int]:
        """Processes in the sessions of parts that have ended: what they left behind."""
        ended = {part.process.pid for part in self._parts.values() if part.process.poll() is not None}
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in ended and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.Error, ProcessLookupError):
                continue
        return found


def leaks(usage: Sequence[Usage], *, spared: Mapping[str, int] | None = None) -> list[str]:
    """What grew, one line each: the middle of the last quarter of looks against that of the first, the first
    ten seconds after each life has begun its work left out.

    Descriptors and threads are a process's own: each life is judged by itself, since the next one may have
    another task. What it comes to must also be more than the role's other lives have in their middle: a life
    in whose beginning others were down, and connections to them with them, is not leaking. Memory is judged
    over all lives of a role ("worker", "hub"), since what a life takes over from the one before, a journal's
    state say, may grow too. `spared` has by role how many descriptors a life may come to hold: those of a
    standby that is promoted.
    """
    roles: dict[str, list[Usage]] = defaultdict(list)
    lives: dict[tuple[str, int], list[Usage]] = defaultdict(list)
    for look in usage:
        if look.age >= WARM_SECONDS:
            lives[look.part, look.pid].append(look)
            roles[_role(look.part)].append(look)
    found = []
    for (part, pid), looks in sorted(lives.items()):
        if len(looks) < _LEAST_LOOKS:
            continue
        promotion = (spared or {}).get(_role(part), 0)
        others = [look for look in roles[_role(part)] if look.pid != pid]
        for what, most in (("descriptors", _HANDLES_SPARED + promotion), ("threads", _HANDLES_SPARED)):
            usual = median(getattr(look, what) for look in others) if len(others) >= _LEAST_LOOKS else 0
            found += _growth(looks, f"{part} (pid {pid})", what, most, usual=usual)
    for role, looks in sorted(roles.items()):
        found += _growth(looks, role, "resident", _BYTES_SPARED, _BYTES_SHARE)
    return found


def _role(part: str) -> str:
    return part.split(" ")[0]


def _growth(
    looks: Sequence[Usage], whose: str, what: str, spared: int, share: float = 0.0, usual: float = 0.0
) -> list[str]:
    """The line that says that this grew by more than that, and beyond the `usual`; none where it did not."""
    quarter = max(1, len(looks) // 4)
    first = median(getattr(look, what) for look in looks[:quarter])
    last = median(getattr(look, what) for look in looks[-quarter:])
    if last <= max(first * (1 + share), usual) + spared:
        return []
    return [f"{whose}: {what} grew from {first:,.0f} to {last:,.0f} over {len(looks)} looks"]
