"""The hub and the shards of a run on this machine, as processes: their start, restart and end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from atoll.core.awaited import account_of
from atoll.core.config import KEYS_VARIABLE, SERVED, Config
from atoll.core.errors import GivenUpError
from atoll.core.options import as_argument
from atoll.core.texts import one_line
from atoll.hub.options import HubOptions
from atoll.launch.parts import called
from atoll.launch.processes import signal_name, start_logged
from atoll.launch.service import END_SIGNAL
from atoll.launch.tail import last_lines, last_word
from atoll.observe.rundir import RunDirectory
from atoll.server.options import ServerOptions

SERVICE = "atoll.launch.service"  # the module that a service's process runs
SERVICE_RESTARTS = 3  # times that a hub or a shard that is killed is started again, each
_SHOWN_CHARACTERS = 300  # of a log's last line
_LOOPBACK = "127.0.0.1"
_OTHER_HALF = {"server": "second", "second": "server"}

Start = Callable[..., "subprocess.Popen[bytes]"]  # `start_logged`


class Services:
    """The services of the run in `directory`, by name (`launch/parts.py`).

    A service that was killed, or that the hub gave up, may be started again up to three times, with the same
    options: it goes on from the files in its directory.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        environment: Mapping[str, str],
        hub_module: str,
        start: Start = start_logged,
    ) -> None:
        self._directory, self._config = directory, config
        self._environment, self._hub_module, self._start = environment, hub_module, start
        self._folder = directory.path / "service"
        self._options: dict[str, HubOptions | ServerOptions] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts: Counter[str] = Counter()
        self.left_out: set[str] = set()  # services without which the run goes on

    def start_hub(self, launches: int, sites: Mapping[str, int]) -> None:
        """Start the hub of a run of so many launches; `sites` has the workers of each site."""
        config, groups = self._config, self._config.groups
        shards = self._shard_count
        options = HubOptions(
            workers=launches,
            shards=shards,
            listen=f"tcp://{_LOOPBACK}:0",
            key_file=self._environment.get(KEYS_VARIABLE, ""),
            run=self._directory.name,
            directory=str(self._folder),
            patience=config.patience_seconds,
            sites=dict(sites),
            replicas=config.server.replicas if shards else 1,
            groups=groups.count if config.run.strategy == "ps-hra" else None,
            group_by=groups.by,
            group_patience=config.probe_seconds,
            group_links=config.links_seconds,
            regroup=groups.regroup,
            consistency=config.sync.consistency,
            shares="auto" if config.sync.shares == "auto" else "even",
        )
        self._folder.mkdir(exist_ok=True)
        self._where.unlink(missing_ok=True)
        self._serve("hub", options)

    def address(self) -> str:
        """Return the hub's address; empty until the hub listens."""
        with contextlib.suppress(FileNotFoundError):
            return self._where.read_text(encoding="utf-8").strip()
        return ""

    def start_shards(self, address: str, sites: Mapping[str, int]) -> None:
        """Start each shard's processes, and the shard of each site."""
        config = self._config
        common = ServerOptions(
            hub=address,
            key_file=self._environment.get(KEYS_VARIABLE, ""),
            run=self._directory.name,
            codec=config.sync.codec,
            snapshot_seconds=config.snapshot_seconds,
        )
        shards = replace(
            common,
            optimizer=config.server.optimizer,
            journal=config.server.journal,
            link_rate=config.link.bytes_per_second,
        )
        for shard in range(self._shard_count):
            for kind, beside in (("server", ""), ("second", "-second"))[: config.server.replicas]:
                directory = str(self._folder / f"shard-{shard}{beside}")
                self._serve(f"{kind}-{shard}", replace(shards, shard=shard, directory=directory))
        at_sites = replace(common, timeout=config.timeout_seconds, link=config.link)
        for site in sites:
            directory = str(self._folder / f"site-{site}")
            self._serve(f"site-{site}", replace(at_sites, site=site, directory=directory))

    def ended(self) -> dict[str, int]:
        """Return the exit codes of ended services; those that were left out come last."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        order = sorted(codes, key=self.left_out.__contains__)
        return {name: code for name in order if (code := codes[name]) is not None}

    def can_start_again(self, name: str, code: int) -> bool:
        """True if a service that ended so may be started again: it was lost, and restarts are left."""
        return is_lost(code) and self.restarts[name] < SERVICE_RESTARTS

    def start_again(self, name: str) -> None:
        """Start a service again with the same options."""
        self._serve(name, self._options[name])

    def has_other_half(self, name: str, stopping: bool) -> bool:
        """True if the shard has another process that runs or will be started again."""
        kind, _, shard = name.partition("-")
        other = f"{_OTHER_HALF.get(kind)}-{shard}"
        if other not in self.processes:
            return False
        code = self.processes[other].poll()
        return code is None or (not stopping and self.can_start_again(other, code))

    def how_it_ended(self, name: str, code: int) -> str:
        """Return the end of a shard's process that is not started again, in words."""
        if code < 0:
            return f"was killed by {signal_name(-code)}, {self.restarts[name] + 1} times by now"
        if code == GivenUpError.exit_status:
            return f"was given up by the hub, {self.restarts[name] + 1} times by now"
        said = self._last_word(name) or f"its log is {self._log(name)}"
        return f"ended with status {code}: {said}"

    def why_lost(self, name: str) -> tuple[str, int]:
        """Return the line on a service without which the run cannot go on, and the run's status."""
        code, who = self.processes[name].returncode, called(name)
        said = self._last_word(name) if code >= 0 else ""
        status = code if code > 0 else 1
        if said:
            return (said if said.startswith(who) else f"{who}: {said}"), status
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with status {code}"
        often = f" for the {self.restarts[name] + 1}th time" if self.restarts[name] else ""
        return (
            f"{who} {how}{often}, and the run cannot go on without it; its log is {self._log(name)}",
            status,
        )

    def why_unheard(self, name: str, seconds: float) -> str:
        """Return the line on a service that runs and was awaited in vain."""
        log = self._log(name)
        said = last_lines(log, 1)
        doing = account_of(self.processes[name].pid, log)
        last = f"; it said last: {one_line(said[0], _SHOWN_CHARACTERS)}" if said else "; it has said nothing"
        return f"{called(name)} did not listen within {seconds:g} s: {doing}{last}; its log is {log}"

    def finish(self) -> None:
        """Send the end signal to all services."""
        for process in self.processes.values():
            process.send_signal(END_SIGNAL)

    @property
    def _shard_count(self) -> int:
        return self._config.run.shards if self._config.run.strategy in SERVED else 0

    @property
    def _where(self) -> Path:
        return self._folder / "hub.address"

    def _log(self, name: str) -> Path:
        return self._directory.logs / f"{name}.log"

    def _last_word(self, name: str) -> str:
        """Return a service's last log line on why it ends; empty if there is none."""
        return last_word(self._log(name))

    def _serve(self, name: str, options: HubOptions | ServerOptions) -> None:
        """Start the hub or a shard, with a log of its own."""
        self._options[name] = options
        module = self._hub_module if name == "hub" else SERVICE
        command = [sys.executable, "-m", module, name, as_argument(options)]
        environment = {**self._environment, "OMP_NUM_THREADS": "1"}
        self.processes[name] = self._start(called(name), command, self._log(name), environment)


def is_lost(code: int) -> bool:
    """True if a service that ended so was killed, or given up by the hub."""
    return code < 0 or code == GivenUpError.exit_status
