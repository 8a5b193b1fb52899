"""Starts `atoll lab run` as a user would, and finds whatever a lab left behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
DEADLINE = 60.0  # seconds; a lab is up in less than one on an idle machine
TWO = """
seed = 7
[[site]]
name = "paris"
[[site]]
name = "berlin"
[[link]]
between = ["paris", "berlin"]
rate = "1Gbit/s"
delay = "2ms"
"""


def wait_for(condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    until = time.monotonic() + deadline
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {deadline:g} s for {what}"
        time.sleep(0.01)
    return found


class Labs:
    """Starts labs in a directory; their own folders lie below it too, so other labs of this machine do not
    matter. Their processes are found by a mark in the environment, and the namespaces by the processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folders = directory / "runtime" / "atoll-lab"
        self.started: list[subprocess.Popen[str]] = []
        self.namespaces: dict[str, float] = {}  # those that were seen, and when last (_now())
        self._mark = uuid.uuid4().hex
        self._own = _namespaces_of(os.getpid())
        (directory / "runtime").mkdir(mode=0o700)

    def start(
        self, command: Sequence[str], topology: str = TWO, name: str = "lab", **environment: str
    ) -> subprocess.Popen[str]:
        path = self.directory / f"{name}.toml"
        path.write_text(topology)
        code = "from atoll.cli.app import main; main()"
        options = ["--directory", f"records-{name}-{len(self.started)}"]
        process = subprocess.Popen(
            [sys.executable, "-c", code, "lab", "run", *options, str(path), "--", *command],
            cwd=self.directory,
            env={
                **os.environ,
                "ATOLL_TEST_MARK": self._mark,
                "XDG_RUNTIME_DIR": str(self.directory / "runtime"),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str], topology: str = TWO, **environment: str) -> tuple[int, str, str]:
        """The exit status, stdout and stderr of a lab that ends by itself."""
        return self.end(self.start(command, topology, **environment))

    def end(self, process: subprocess.Popen[str], deadline: float = DEADLINE) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=deadline)
        return process.returncode, out, err

    def python(self, source: str, *arguments: str, name: str = "worker") -> list[str]:
        """The command that runs a script with this source."""
        path = self.directory / f"{name}.py"
        path.write_text(source)
        return [sys.executable, str(path), *arguments]

    def record(self, index: int = 0, name: str = "lab") -> dict[str, Any]:
        path = self.directory / f"records-{name}-{index}" / "lab.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def alive(self) -> list[psutil.Process]:
        """The processes that carry the mark, zombies left out; notes their namespaces."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ATOLL_TEST_MARK") != self._mark:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                    seen = _namespaces_of(process.pid) - self._own
                    self.namespaces.update(dict.fromkeys(seen, _now()))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def find(self, *words: str) -> list[psutil.Process]:
        """The live processes whose command line holds all of `words`."""
        found = []
        for process in self.alive():
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def part(self, name: str) -> psutil.Process | None:
        """A process of the last lab's own: `runner`, `unshare`, `inside` or `emulator`."""
        if name == "runner":
            return psutil.Process(self.started[-1].pid)
        words = {
            "unshare": ("unshare --fork", "atoll.lab.inside"),
            "inside": ("-m atoll.lab.inside",),
            "emulator": ("-m atoll.lab.emulation",),
        }[name]
        for process in self.find(*words):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name == "unshare" and process.ppid() == self.started[-1].pid:
                    return process
                # Not one that `inside` has just forked, and that is about to become a worker.
                if name == "inside" and psutil.Process(process.ppid()).name() == "unshare":
                    return process
                if name == "emulator":
                    return process
        return None

    def left(self) -> list[str]:
        """What is left of all labs, once all have ended, or been killed and another one has started."""
        left = [f"process {process}" for process in self.alive()]
        left += [
            f"namespace {link} of {process}"
            for process in psutil.process_iter()
            for link in self._in(process)
        ]
        left += [f"interface {name}" for _, name in socket.if_nameindex() if name.startswith("wan")]
        return left + [f"file {path}" for path in (self.directory / "runtime").rglob("*")]

    def _in(self, process: psutil.Process) -> list[str]:
        """Which namespaces of our labs the process is in. The kernel gives their numbers anew, to other labs
        of this machine too: so only a process counts that was there before its namespace was last seen."""
        born = _born(process.pid) + _TICK
        return [link for link in _namespaces_of(process.pid) if born < self.namespaces.get(link, 0.0)]

    def close(self) -> None:
        left = self.alive()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        for process in self.started:
            process.communicate(timeout=DEADLINE)


def _now() -> float:
    """Seconds since the machine's start, as _born has them; psutil's are rounded to whole ones."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _born(pid: int) -> float:
    """When the process started; infinity if it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.inf
    return int(fields[19]) * _TICK


def _namespaces_of(pid: int) -> set[str]:
    """The process's own namespaces, as `net:[4026531840]`; none if it has gone."""
    found = set()
    for kind in ("net", "pid", "mnt", "uts"):
        try:
            found.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
        except OSError:
            continue
    return found
