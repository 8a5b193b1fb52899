"""Runs with sites whose shards, global ones and sites' own, are processes that are killed at points of their
code and started again in their folders."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from losing import LosingServer, lost_by_content
from mortal import DEADLINE, NAMES, Mortal, begin_life, site_of, train_in
from transports import LINK

from atoll.core.config import LinkOptions
from atoll.server import main as server
from atoll.server.options import ServerOptions
from support.pool import WorkerPool
from support.served import RUN


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a shard ("shard 0", "paris") at the `nth` time that it reaches a point in an iteration (or
    later)."""

    who: str
    point: str
    iteration: int
    nth: int = 1


def _live(who: str, address: str, folder: Path, kills: Sequence[Kill], seconds: float, loses: bool) -> None:
    """A shard's life, in a process of its own."""
    begin_life(who, folder, kills)
    options: dict[str, Any] = {
        "run": RUN,
        "directory": str(folder / who),
        "timeout": DEADLINE,
        "snapshot_seconds": seconds,
    }
    goes_on = partial(print, flush=True)
    if who in NAMES:
        # The transport itself loses nothing for good; what it is said to have lost is the same in every run.
        link = LinkOptions(transport="ltp", usable=1.0) if loses else LINK
        server.serve_site(ServerOptions(hub=address, site=who, link=link, **options), goes_on=goes_on)
    else:
        if loses:  # this process is of this shard alone
            server.TunnelServer = partial(LosingServer, lost_by_content)  # type: ignore[misc, assignment]
        shard = int(who.removeprefix("shard "))
        server.serve(ServerOptions(hub=address, shard=shard, **options), goes_on=goes_on)


class MortalSites(Mortal[Kill]):
    """A hub on a thread, and the shards as processes; one that is killed is started again."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        kills: Sequence[Kill] = (),
        shards: int = 2,
        patience: float = 10.0,
        snapshot_seconds: float = 60.0,
        sites: int = 2,
        loses: bool = False,
    ) -> None:
        """`loses`: the global shards' links lose blocks of what the sites send up."""
        self._loses = loses
        self._sites = Counter(site_of(rank, sites) for rank in range(workers))
        super().__init__(folder, workers, shards, kills, patience, sites=self._sites)
        self._seconds = snapshot_seconds

    def _begin_all(self) -> None:
        for who in [*(f"shard {shard}" for shard in range(self._shards)), *self._sites]:
            self._begin(who)

    def kill(self, who: str) -> None:
        self._processes[who].kill()

    def wait_until_fenced(self, names: Sequence[str]) -> None:
        super().wait_until_fenced([*names, *(f"site {site!r}" for site in self._sites)])

    def _life(self, who: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _live, (who, self.address, self.folder, self.kills, self._seconds, self._loses)

    def _goes_on(self, who: str, code: int) -> bool | None:
        if code == 0 and who in self._sites:
            return False  # a site ends with its workers
        return True if code == -signal.SIGKILL else None


def run_with(
    pool: WorkerPool,
    folder: Path,
    kills: list[Kill],
    consistency: str = "bsp",
    workers: int = 3,
    lazy: bool = False,
    edits: bool = False,
    sites: int = 2,
    **options: Any,
) -> list[dict[str, Any]]:
    run = MortalSites(folder, workers, kills, sites=sites, **options)
    return train_in(run, pool, workers, consistency, lazy, edits, sites)
