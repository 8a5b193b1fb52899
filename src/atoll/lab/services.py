"""Hub and shards of a lab, started in their site by Atoll's ordinary commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.core.config import HUB_VARIABLE, KEYS_VARIABLE, RANK_VARIABLE, RUN_VARIABLE, SITE_VARIABLE
from atoll.core.errors import RunError
from atoll.lab.topology import HubPlace

START_SECONDS = 120.0  # for all of them to serve; a shard imports torch
_PORT = 47700  # of the hub; shards take the next ones
_ATOLL = [sys.executable, "-c", "from atoll.cli.app import main; main()"]
_KEY_SECONDS = 60.0


class Services:
    """Hub and shards of a lab. The caller has entered the site's namespaces."""

    def __init__(
        self, address: str, place: HubPlace, *, workers: int, run: str, folder: Path, logs: Path
    ) -> None:
        self._folder, self._logs, self._run = folder, logs, run
        self._hub = f"tcp://{address}:{_PORT}"
        self._keys = folder / "run.key"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._grouped = bool(place.groups)
        self._make_keys()
        shards = place.shards
        hub = ["hub", "--workers", str(workers), "--shards", str(shards), "--listen", self._hub]
        if place.patience is not None:
            hub += ["--patience", f"{place.patience:g}", "--least-patience", f"{place.patience:g}"]
        if place.groups:
            hub += ["--groups", place.groups, "--group-by", place.group_by]
            hub += ["--group-links", f"{place.group_links:g}"]
        self._start("hub", [*hub, "--key-file", str(self._keys), "--run", run])
        for shard in range(shards):
            listen = f"tcp://{address}:{_PORT + 1 + shard}"
            options = ["--hub", self._hub, "--key-file", str(self._keys), "--listen", listen]
            self._start(f"shard {shard}", ["server", "--shard", str(shard), *options])

    def environment(self, worker: int, site: str) -> dict[str, str]:
        """Return the variables by which a worker joins. With groups, the hub learns the worker's site."""
        return {
            **({SITE_VARIABLE: site} if self._grouped else {}),
            HUB_VARIABLE: self._hub,
            KEYS_VARIABLE: str(self._keys),
            RUN_VARIABLE: self._run,
            RANK_VARIABLE: str(worker),
        }

    def are_up(self) -> bool:
        """Return True once all processes listen. Raises RunError if one has ended."""
        self.check()
        return all(b" listens at " in self._log(name).read_bytes() for name in self._processes)

    def missing(self) -> str:
        """Name the processes that do not serve yet, with their logs."""
        late = [name for name in self._processes if b" listens at " not in self._log(name).read_bytes()]
        return ", ".join(f"the {name} (its log is {self._log(name)})" for name in late)

    def check(self) -> None:
        """Raise RunError if a process has ended: the run cannot go on without it."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None:
                how = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
                raise RunError(f"the {name} {how}, and the run cannot go on; its log is {self._log(name)}")

    def owns(self, pid: int) -> bool:
        return any(process.pid == pid for process in self._processes.values())

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Send a signal to all processes."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signum)

    def have_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes.values())

    def _make_keys(self) -> None:
        try:
            done = subprocess.run(
                [*_ATOLL, "keys", str(self._keys)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_KEY_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"atoll keys did not make a key file within {_KEY_SECONDS:g} s") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise RunError(f"atoll keys failed: {said[-1] if said else f'status {done.returncode}'}")

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*_ATOLL, *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name.replace(' ', '-')}.log"
