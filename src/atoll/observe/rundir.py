"""The run directory: where each record of a run lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import UserError

DIRECTORY_VARIABLE = "ATOLL_RUN_DIRECTORY"  # set by `atoll run` for its workers


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory; nothing is made before `create`."""

    path: Path

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> RunDirectory | None:
        """The directory that `atoll run` made for this worker; None outside of it."""
        path = (os.environ if environment is None else environment).get(DIRECTORY_VARIABLE)
        return RunDirectory(Path(path)) if path else None

    @property
    def config(self) -> Path:
        """The configuration as used."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON line per iteration, all workers merged (`observe.metrics.Line`)."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The whole run in one JSON object (`observe.summary.Summary`)."""
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "report.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """What torchrun's launcher wrote."""
        return self.logs / "launcher.log"

    @property
    def ends(self) -> Path:
        """How the workers' processes ended, as the launcher saw it; there only when one failed."""
        return self.logs / "ends.json"

    def ends_of(self, first: int) -> Path:
        """The same of the worker that ended a launch, whose first worker this is, where there are several."""
        return self.logs / f"ends-{first}.json"

    def log(self, worker: int) -> Path:
        """What the worker wrote to stdout and stderr."""
        return self.logs / f"worker-{worker}.log"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    def journal(self, worker: int) -> Path:
        """The worker's own events (`observe.journal`)."""
        return self.workers / f"{worker}.jsonl"

    def journals(self) -> dict[int, Path]:
        """The journals that are there, by worker."""
        found = {int(path.stem): path for path in self.workers.glob("*.jsonl") if path.stem.isdecimal()}
        return dict(sorted(found.items()))

    def require_unused(self) -> None:
        """Raise UserError when it holds a run already, whose records would be mixed with a new one's."""
        if self.summary.exists() or self.journals():
            raise UserError(f"{self.path}: holds a run already; remove it, or give another run.directory")

    def create(self) -> None:
        """Make the directory and those in it; those that are there are left as they are.

        Raises UserError when it cannot be made.
        """
        try:
            for directory in (self.path, self.logs, self.workers):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = error.filename or self.path
            raise UserError(f"{where}: cannot make the run directory: {error.strerror}") from None
