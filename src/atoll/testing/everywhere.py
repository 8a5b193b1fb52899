"""One test at every strategy and store: what hosts the run, and each worker's session.

    with hosting(where, workers=2) as address:
        pool.run(train, where, address, world=2)

and in `train(place, where, address)`: `with joined(place, where, address) as session: ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.testing.served import ServedRun, served_worker
from atoll.train.place import Place
from atoll.train.session import Session

# Memory tiers are those of a ring: its workers hold the model between them.
COLLECTIVE = ("ring", "hierarchical", "tiers", "bsp", "ps-hra")  # all workers make each step of one mean
EVERYWHERE = (*COLLECTIVE, "ssp", "asp", "ps-hra-asp", "peers", "peers-stale")
_STRATEGIES = {
    "tiers": "ring",
    "bsp": "server",
    "ssp": "server",
    "asp": "server",
    "ps-hra-asp": "ps-hra",
    "peers-stale": "peers",
}


@contextmanager
def hosting(where: str, workers: int) -> Iterator[str]:
    """The address of the hub of a run at `where`, one of `EVERYWHERE`; empty where there is none."""
    if _STRATEGIES.get(where, where) not in ("server", "ps-hra"):
        yield ""
        return
    with ServedRun(workers=workers) as served:
        yield served.address


@contextmanager
def joined(place: Place, where: str, address: str, **sync: Any) -> Iterator[Session]:
    """A worker's session at `where`. `sync` are keys of the configuration's table of that name."""
    strategy: Any = _STRATEGIES.get(where, where)
    options: dict[str, Any] = {"timeout": "60s"}
    if strategy == "peers":
        options["stale_max"] = 0 if where == "peers" else 2
    if strategy in ("server", "ps-hra"):
        options["consistency"] = where.rpartition("-")[2] if where != "ps-hra" else "bsp"
    config = Config(
        run=Run(strategy=strategy),
        sync=Sync(**{**options, **sync}),
        groups=Groups(count=place.world if where == "hierarchical" else 0),
        memory=Memory(device="1MiB", step="host") if where == "tiers" else Memory(),
    )
    with served_worker(address, place.rank) if address else nullcontext():
        if address:
            with atoll.join(config) as session:
                yield session
        else:
            with atoll.join(config, place=place) as session:
                yield session
