"""How a process becomes one of a run's workers: `join`, and the session that it gives."""

from __future__ import annotations

import os

import msgspec

from atoll.core.config import HUB_VARIABLE, SERVED, Config, check_together, load_config
from atoll.train.node.introduction import introduce
from atoll.train.node.worker import NodeWorker
from atoll.train.place import Place
from atoll.train.service import Service, enter
from atoll.train.session import Session
from atoll.train.speed import speed_from
from atoll.train.uncaught import show_errors_as_one_line


def join(config: Config | str | os.PathLike[str] | None = None, *, place: Place | None = None) -> Session:
    """Take this process's place in the run: from torchrun's variables, or alone.

    With ATOLL_HUB set, or strategy `server`, the place is the hub's to give: in a ring where the hub's run
    has no shards, else as a worker of its shards. torchrun's variables then only say which device is whose.

    `config` is a Config or a file's path; unless given, $ATOLL_CONFIG or ./atoll.toml counts, else the
    defaults. `place` overrides the environment. Raises ConfigError for a bad configuration or environment,
    and DeadlineError when the other workers do not come within `sync.timeout`.
    """
    show_errors_as_one_line()
    speed_from()  # a mistake in it is found before anybody is waited for
    config = config if isinstance(config, Config) else load_config(config)
    check_together(config)
    if config.run.strategy == "peers":
        return _join_peers(config, place)
    if place is None and (config.run.strategy in SERVED or os.environ.get(HUB_VARIABLE)):
        member = enter(config)
        if isinstance(member, Service) and member.ring is None:
            config = msgspec.structs.replace(
                config, run=msgspec.structs.replace(config.run, strategy="server")
            )
        try:
            return Session(config, member.place, member)
        except BaseException:
            member.close()
            raise
    return Session(config, Place.from_environment(config.timeout_seconds) if place is None else place)


def _join_peers(config: Config, place: Place | None) -> Session:
    """As a node among others, or alone where there are none."""
    met = introduce(config, place)
    if met is None:
        return Session(config, Place() if place is None else place)
    introduction, side, devices = met
    node = NodeWorker(introduction, side, config.timeout_seconds, devices)
    try:
        return Session(config, node.introduction.place, node)
    except BaseException:
        node.close()
        raise
