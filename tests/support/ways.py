"""The way out that a refusal's line names, and a script's run by it.

    way = Way().after("... set run.strategy to ring", script, config.run)    # Way(strategy="ring")
    config, script = way.config(config), way.path(script)

A user who is refused follows the line. Some lines ask for a setting of the run that is asked of any such
model: a larger budget, the permission to import an optimizer's class at the shards. Others change what was
asked for: another strategy, no budgets, another script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from atoll.core.config import Config, Run, Sync
from atoll.core.memory import Memory

# "..., 40960 bytes (40 KiB) would do", or "... raise memory.device from 28.0 KiB to at least 57344 bytes".
_LEAST = re.compile(r"(\d+) bytes \([^)]*\) would do|raise memory\.device from [^;,]* (\d+) bytes")
_PERMISSION = re.compile(r"cannot run the optimizer '([\w.]+)\.(\w+)' outside the script.* server\.optimizer")
_PACE = re.compile(r"(?:set )?sync\.consistency to bsp")
_RING = re.compile(r"(?:run\.strategy to|strategy) '?ring\b")
_ASKED = re.compile(r"^# asked: (.+)", re.MULTILINE)  # in a script of `followed`: words of the line
_NO_BUDGETS = re.compile(r"leave (?:out the budgets|the budgets out)")


@dataclass(frozen=True)
class Way:
    """What a run has changed because a refusal's line asked for it.

    Attributes:
        budget: memory.device; empty: as it was.
        optimizer: the "module:Class" that shards may import.
        rewritten: True if the script is the one that the folder `followed` has.
        pace: sync.consistency.
        strategy: run.strategy.
        no_budgets: True if the model is on the device as a whole.
    """

    budget: str = ""
    optimizer: str = ""
    rewritten: bool = False
    pace: str = ""
    strategy: str = ""
    no_budgets: bool = False

    @property
    def stays(self) -> bool:
        """True if strategy, store and script are as they were."""
        return self == Way(budget=self.budget, optimizer=self.optimizer)

    @property
    def words(self) -> str:
        """The changes, for people: "run.strategy = ring, without budgets"."""
        said = [
            self.budget,
            "server.optimizer" * bool(self.optimizer),
            "as in followed/" * self.rewritten,
            f"sync.consistency = {self.pace}" * bool(self.pace),
            f"run.strategy = {self.strategy}" * bool(self.strategy),
            "without budgets" * self.no_budgets,
        ]
        return ", ".join(filter(None, said))

    def after(self, line: str, script: Path, run: Run) -> Way | None:
        """Return the way that also does what a refusal's `line` asks for; None if it names nothing new.

        `run` is the column's.
        """
        if (least := _LEAST.search(line)) is not None:
            asked = replace(self, budget=f"{-(-int(least[1] or least[2]) // 1024)}KiB")
        elif (named := _PERMISSION.search(line)) is not None and named[1] != "__main__":
            asked = replace(self, optimizer=f"{named[1]}:{named[2]}")
        elif not self.rewritten and _is_followed(line, script):
            asked = replace(self, rewritten=True)
        elif _PACE.search(line) and not self.pace:
            asked = replace(self, pace="bsp")
        elif _RING.search(line) and not self.strategy and (run.strategy != "ring" or run.elastic):
            asked = replace(self, strategy="ring")
        elif _NO_BUDGETS.search(line):
            asked = replace(self, no_budgets=True)
        else:
            return None
        return None if asked == self else asked

    def config(self, config: Config) -> Config:
        """Return a column's configuration as this way changes it."""
        if self.strategy:
            config = config.having(run={"strategy": self.strategy, "elastic": False})
            config = msgspec.structs.replace(config, sync=Sync(timeout=config.sync.timeout))
        if self.pace:
            config = config.having(sync={"consistency": self.pace})
        if self.no_budgets:
            return msgspec.structs.replace(config, memory=Memory())
        return config.having(memory={"device": self.budget}) if self.budget else config

    def path(self, script: Path) -> Path:
        """Return the script to run."""
        return _follower(script) if self.rewritten else script


def _follower(script: Path) -> Path:
    return script.parent / "followed" / script.name


def _is_followed(line: str, script: Path) -> bool:
    """True if the folder `followed` has the script as it is when what the `line` asks for is done."""
    path = _follower(script)
    asked = _ASKED.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return asked is not None and asked[1] in line
