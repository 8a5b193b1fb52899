"""How a process becomes one of a run's workers: `join`, and the session that it gives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from atoll.axes.needs import check_configuration
from atoll.core.config import FIRST_VARIABLE, HUB_VARIABLE, SERVED, Config, load_given
from atoll.core.events import Joining
from atoll.core.runclock import record_time
from atoll.core.scriptline import script_line
from atoll.observe.journal import Journal
from atoll.observe.lastwords import say
from atoll.observe.rundir import DIRECTORY_VARIABLE, RunDirectory
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from atoll.train.api.speed import speed_from
from atoll.train.api.uncaught import show_errors_as_one_line
from atoll.train.members.peersintroduction import introduce
from atoll.train.sync.peersworker import NodeWorker
from atoll.train.sync.service import enter


def join(config: Config | str | os.PathLike[str] | None = None, *, place: Place | None = None) -> Session:
    """Take this process's place in the run: from torchrun's variables, or alone.

    With ATOLL_HUB set, or strategy `server`, the place is the hub's to give: in a ring where the hub's run
    has no shards, else as a worker of its shards. torchrun's variables then only say which device is whose.

    `config` is a Config or a file's path; unless given, $ATOLL_CONFIG or ./atoll.toml counts, else the
    defaults. `place` overrides the environment. Raises ConfigError for a bad configuration or environment,
    and DeadlineError when the other workers do not come within `sync.timeout`.
    """
    show_errors_as_one_line()
    _tell_of_joining(script_line())
    speed_from()  # a mistake in it is found before anybody is waited for
    given: Mapping[str, str] = {}
    if not isinstance(config, Config):
        config, given = load_given(config)
        if DIRECTORY_VARIABLE in os.environ:  # `atoll run` wrote every key, and has warned itself
            given = {}
    check_configuration(config)
    if config.run.strategy == "peers":
        return _join_peers(config, place, given)
    if place is None and (config.run.strategy in SERVED or os.environ.get(HUB_VARIABLE)):
        member = enter(config)
        try:
            return Session(member.as_joined(config), member.place, member, given)
        except BaseException:
            member.close()
            raise
    if place is None:
        place = Place.from_environment(config.timeout_seconds)
    return Session(config, place, given=given)


def _tell_of_joining(line: str) -> None:
    """Tell `atoll run` that this worker waits for the others from now on."""
    run = RunDirectory.from_environment()
    rank = os.environ.get("RANK", "")
    if run is None or not rank.isdecimal():
        return
    worker = int(rank) + int(os.environ.get(FIRST_VARIABLE, "0"))
    event = Joining(time=record_time(), worker=worker, line=line, pid=os.getpid())
    say(event)
    with (
        contextlib.suppress(OSError),
        Journal(run.journal(worker)) as journal,
    ):  # a full disk is told of later
        journal(event)


def _join_peers(config: Config, place: Place | None, given: Mapping[str, str]) -> Session:
    """As a node among others, or alone where there are none."""
    met = introduce(config, place)
    if met is None:
        return Session(config, Place() if place is None else place, given=given)
    introduction, side, devices = met
    node = NodeWorker(introduction, side, config.timeout_seconds, devices)
    try:
        return Session(config, node.introduction.place, node, given)
    except BaseException:
        node.close()
        raise
