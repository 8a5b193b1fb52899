"""Run one script under every strategy and store: one script must give one result everywhere.

    seen = run_at(pool, "server", train, 0.5, world=2)

calls `train(session, 0.5)` on each of two workers of a parameter server, and returns each worker's result.
Hub and shards run on threads of the calling process. `model()` is large enough to lie in tiers under the
budgets of the kinds in `IN_TIERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.hub.planner import GroupingSettings
from atoll.memory import planning
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import ServedRun, served_worker
from support.tight import rates

_TIMEOUT = "60s"
_BUDGET = Memory(device="24KiB", chunk="4096", step="host")  # the model of `model` takes more


def _config(strategy: str, **options: Any) -> Config:
    run = {"elastic": options.pop("elastic", False)}
    sync = Sync(timeout=_TIMEOUT, **options.pop("sync", {}))
    return Config(run=Run(strategy=strategy, **run), sync=sync, **options)


# The configuration of each kind of run: every strategy and store. A run by torchrun is "ring".
KINDS: dict[str, Config] = {
    "ring": _config("ring"),
    "hierarchical": _config("hierarchical", groups=Groups(count=1)),
    "elastic": _config("ring", elastic=True),
    "server": _config("server", sync={"consistency": "bsp"}),
    "asp": _config("server", sync={"consistency": "asp"}),
    "ps-hra": _config("ps-hra", sync={"consistency": "bsp"}),
    "peers": _config("peers", sync={"stale_max": 0}),
    "tiers": _config("ring", memory=_BUDGET),
    "server tiers": _config("server", sync={"consistency": "bsp"}, memory=_BUDGET),
    "peers tiers": _config("peers", sync={"stale_max": 0}, memory=_BUDGET),
}
IN_TIERS = frozenset(kind for kind in KINDS if kind.endswith("tiers"))
# Further kinds, in which workers may be at different iterations.
PACES: dict[str, Config] = {
    "ssp": _config("server", sync={"consistency": "ssp"}),
    "ps-hra asp": _config("ps-hra", sync={"consistency": "asp"}),
    "peers stale": _config("peers", sync={"stale_max": 2}),
}
TOGETHER = ("ring", "hierarchical", "tiers", "server", "ps-hra", "peers")  # all make each step of one mean
EVERYWHERE = (*TOGETHER, "asp", *PACES)  # every strategy at every pace
SHARDS = {"elastic": 0, "server": 1, "asp": 1, "ssp": 1, "ps-hra": 1, "ps-hra asp": 1, "server tiers": 1}


def run_at(
    pool: WorkerPool,
    kind: str,
    script: Callable[..., Any],
    *arguments: Any,
    world: int = 2,
    sync: Mapping[str, Any] | None = None,
    optimizer: str = "",
) -> list[Any]:
    """Run `script(session, *arguments)` on each of `world` workers; returns the results by rank.

    `kind` selects a strategy and store from KINDS or PACES. `script` and the arguments are pickled. `sync`
    has keys of the configuration's table of that name, and `optimizer` is the class that shards may import.
    Raises JobFailedError if any worker raised.
    """
    config = {**KINDS, **PACES}[kind]
    config = msgspec.structs.replace(config, sync=msgspec.structs.replace(config.sync, **(sync or {})))
    return run_with(
        pool, config, script, *arguments, world=world, shards=SHARDS.get(kind), optimizer=optimizer
    )


def run_with(
    pool: WorkerPool,
    config: Config,
    script: Callable[..., Any],
    *arguments: Any,
    world: int,
    shards: int | None = None,
    grouping: GroupingSettings | None = None,
    optimizer: str = "",
) -> list[Any]:
    """Run `script(session, *arguments)` under a configuration on each of `world` workers; returns the results
    by rank. With `shards` the run has a hub and so many shards; `grouping` is how the hub makes groups, and
    `optimizer` the class that shards may import.
    """
    if shards is None:
        return pool.run(_join, config, "", script, arguments, world=world)
    codec = config.sync.codec
    with ServedRun(world, shards, grouping=grouping, codec=codec, optimizer=optimizer) as served:
        found = pool.run(_join, config, served.address, script, arguments, world=world)
    if served.failures:
        raise served.failures[0]
    return found


def alone(script: Callable[..., Any], *arguments: Any, tiers: bool = False) -> Any:
    """Run the script on a single worker in this process; returns its result."""
    config = _config("ring", memory=_BUDGET) if tiers else _config("ring")
    return train_at(config, Place(), script, arguments)


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return a model of six linear layers, 32 features to 4, 42 KiB in float64."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def _join(place: Place, config: Config, address: str, script: Callable[..., Any], arguments: Any) -> Any:
    with ExitStack() as stack:
        if address:
            stack.enter_context(served_worker(address, place.rank))
        return train_at(config, None if address else place, script, arguments)


def train_at(config: Config, place: Place | None, script: Callable[..., Any], arguments: Any) -> Any:
    """Join the run that this process belongs to, and return the result of `script(session, *arguments)`."""
    known = rates() if config.memory.is_given else None
    with ExitStack() as stack:
        if known is not None:  # they are not measured anew
            stack.enter_context(patch.object(planning, "measure", lambda *_: known))
        session = stack.enter_context(atoll.join(msgspec.structs.replace(config), place=place))
        return script(session, *arguments)
