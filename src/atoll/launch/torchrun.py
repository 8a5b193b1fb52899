"""A run whose workers live and die together: one launch by torchrun, whose agent starts and stops them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from atoll.core.config import Config
from atoll.core.events import Failed
from atoll.launch.launcher import launcher_command, read_ends
from atoll.launch.news import LaunchNews
from atoll.launch.processes import start_logged
from atoll.observe.rundir import RunDirectory


class TorchrunLaunch:
    """Torchrun's launcher, started. No worker of such a run is lost alone, nor started again."""

    kills_late_workers = True  # torchrun's agent itself kills those whose time is over, and reports them
    goes_on = False  # never without an ended worker

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        script: Sequence[str],
        environment: Mapping[str, str],
        umask: int = -1,
    ) -> None:
        """`script`: its path and its arguments; its files have the umask `umask`."""
        self._directory = directory
        self._process = start_logged(
            "torchrun's launcher",
            launcher_command(config.run.workers, script),
            directory.launcher_log,
            environment,
            umask,
        )

    @property
    def returncode(self) -> int | None:
        """The status, by the last poll."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return the status once all workers have ended; None before."""
        return self._process.poll()

    def send_signal(self, signum: int) -> None:
        """Hand a signal on to every worker."""
        self._process.send_signal(signum)

    def kill(self) -> None:
        """Kill torchrun's launcher."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Return when the launcher has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        return self._process.wait(timeout)

    def late_workers(self) -> list[str]:
        """Return the names of workers that the agent has killed, for not ending in time after SIGTERM."""
        ends = read_ends(self._directory.ends)
        return [f"worker {end.worker}" for end in ends if end.exit_code == -signal.SIGKILL]

    def excuses(self, _failure: Failed) -> bool:
        """False: every worker's error ends the run."""
        return False

    def seen(self) -> LaunchNews:
        """Return no news: all reports of its workers are in their journals."""
        return LaunchNews()

    def losses(self) -> list[str]:
        """Return no losses: no worker is lost alone."""
        return []
