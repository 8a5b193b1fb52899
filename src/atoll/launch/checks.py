"""What `atoll run` refuses in a configuration, before anything is started."""

from __future__ import annotations

import re

from atoll.core.config import GROUPED, SERVED, Config, check_groups, check_nodes
from atoll.core.errors import UserError
from atoll.hub.main import check_counts


def check_run(config: Config) -> None:
    """Raise UserError for keys that are right each by itself, and no run together: sites that cannot be
    started, restarts that cannot be."""
    run = config.run
    if run.restarts and run.strategy in ("ring", "hierarchical") and not run.elastic:
        raise UserError(
            f"run.restarts: {run.restarts} restarts of a worker go with run.elastic = true (or strategy "
            "'server'), where each worker is a launch of its own"
        )
    if config.server.replicas > 1 and run.strategy not in SERVED:
        raise UserError(
            f"server.replicas (--replicas): {config.server.replicas} processes for each shard go with "
            f"run.strategy 'server' or 'ps-hra', not {run.strategy!r}"
        )
    if run.sites and run.strategy != "server":
        raise UserError(f"run.sites: {run.sites} sites go with run.strategy 'server', not {run.strategy!r}")
    if config.server.replicas > 1 and run.sites:
        raise UserError(
            f"server.replicas (--replicas): {config.server.replicas} processes for each shard do not go with "
            "run.sites: sites' shards have no standby yet"
        )
    if run.sites > run.workers:
        raise UserError(f"run.sites: {run.sites} sites for {run.workers} workers: each has at least one")
    if config.server.optimizer and not re.fullmatch(r"[\w.]+:\w+", config.server.optimizer):
        raise UserError(
            f"server.optimizer: {config.server.optimizer}: write it as module:Class, such as my.optim:Lion"
        )
    _check_groups(config)
    if run.strategy in (*SERVED, "peers") or run.elastic:  # there is a hub
        check_counts(run.workers, run.shards)


def _check_groups(config: Config) -> None:
    count, run = config.groups.count, config.run
    if run.strategy == "peers":
        check_nodes(count, run.workers)
        return
    if count and run.strategy not in GROUPED:
        raise UserError(
            f"groups.count (--groups): {count} groups go with run.strategy "
            f"{', '.join(map(repr, GROUPED))} or 'peers', not {run.strategy!r}"
        )
    check_groups(count, run.workers)
