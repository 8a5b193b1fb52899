"""Checks of a configuration by `atoll run`, before anything is started."""

from __future__ import annotations

import re

from atoll.axes.choices import choices_of
from atoll.axes.needs import check
from atoll.core.config import SERVED, Config
from atoll.core.errors import UserError
from atoll.hub.main import check_counts


def check_run(config: Config) -> None:
    """Raise UserError for keys that do not fit together, and for an optimizer that no shard can find."""
    run = config.run
    check("launch", choices_of(config))
    if config.server.optimizer and not re.fullmatch(r"[\w.]+:\w+", config.server.optimizer):
        raise UserError(
            f"server.optimizer: {config.server.optimizer}: write it as module:Class, such as my.optim:Lion"
        )
    if run.strategy in (*SERVED, "peers") or run.elastic:  # there is a hub
        check_counts(run.workers, run.shards)
