"""The way of a process into a run: `join`, and the session that it returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from atoll.axes.needs import check_configuration
from atoll.core.config import (
    CONFIG_VARIABLE,
    FIRST_VARIABLE,
    HUB_VARIABLE,
    JOINED_VARIABLE,
    KEYS_VARIABLE,
    LAUNCHER_VARIABLE,
    RANK_VARIABLE,
    RUN_VARIABLE,
    SERVED,
    SITE_VARIABLE,
    SOCKETS_VARIABLE,
    Config,
    load_given,
)
from atoll.core.environment import removed, started_with, variable
from atoll.core.errors import ConfigError
from atoll.core.events import ChildEnded, Joining
from atoll.core.runclock import record_time
from atoll.core.scriptline import at_script_line, script_line
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

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The variables by which a worker finds its run, and those that `atoll run` adds.
_PLACED_BY = (
    HUB_VARIABLE,
    KEYS_VARIABLE,
    SOCKETS_VARIABLE,
    LAUNCHER_VARIABLE,
    RUN_VARIABLE,
    RANK_VARIABLE,
    SITE_VARIABLE,
    FIRST_VARIABLE,
    *_TORCHRUN,
)
_LAUNCHED_BY = (DIRECTORY_VARIABLE, CONFIG_VARIABLE)
_NAMED = 4  # the most variables that an error names


def join(config: Config | str | os.PathLike[str] | None = None, *, place: Place | None = None) -> Session:
    """Take this process's place in the run: from torchrun's variables, or alone.

    With ATOLL_HUB set, or strategy `server` or `ps-hra`, the hub gives the place: in a ring if the hub's run
    has no shards, else as a worker of its shards. Under strategy `peers` the nodes are introduced to one
    another (docs/peers.md). torchrun's variables then only assign devices to processes.

    `config` is the path of a TOML file, or an `atoll.core.config.Config`. By default it is $ATOLL_CONFIG,
    else ./atoll.toml, else the defaults count. `place` overrides the environment. Raises ConfigError for a
    bad configuration or environment, for one from which the script has removed variables that a worker needs
    to find its run, in a process that a worker has started, and for a second session at shards
    (docs/how-to/cross-validation.md). Raises DeadlineError when the other workers do not come within
    `sync.timeout`.
    """
    show_errors_as_one_line()
    line = script_line()
    if place is None:
        _check_process(line)
    _tell_of_joining(line)
    if place is None:
        _check_environment(line)
    speed_from()  # finds a mistake before any wait
    given: Mapping[str, str] = {}
    if not isinstance(config, Config):
        config, given = load_given(config)
        if DIRECTORY_VARIABLE in os.environ:  # `atoll run` wrote every key, and has warned itself
            given = {}
    check_configuration(config)
    if place is not None:
        place = place.for_session()
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


def _check_process(line: str) -> None:
    """Raise ConfigError in a process that a worker of the run has started after it had joined.

    That process would join as the same worker once more. Processes to which the script gives places of their
    own may each join.
    """
    place = "|".join(os.environ.get(name, "") for name in (DIRECTORY_VARIABLE, *_PLACED_BY))
    joined, _, where = os.environ.get(JOINED_VARIABLE, "").partition(" ")
    if joined and where == place and joined != str(os.getpid()):
        message = (
            f"{at_script_line('atoll.join', line)} in a process that the worker has started, after it had "
            f"joined itself in process {joined}: keep what such a process is not to run under "
            "`if __name__ == '__main__':`"
        )
        _tell_of_child(message)
        raise ConfigError(message)
    if place.strip("|"):
        os.environ[JOINED_VARIABLE] = f"{os.getpid()} {place}"


def _tell_of_child(message: str) -> None:
    """Report to `atoll run` why this process ends: a DataLoader may have started it."""
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        worker, status = int(rank) + int(os.environ.get(FIRST_VARIABLE, "0")), ConfigError.exit_status
        say(
            ChildEnded(
                time=record_time(), worker=worker, pid=os.getpid(), status=status, message=message, line=""
            )
        )


def _check_environment(line: str) -> None:
    """Raise ConfigError if the script has removed variables by which a worker finds its run.

    Otherwise the worker would train alone, or by other options, without a message.
    """
    before = started_with()
    names = (*_LAUNCHED_BY, *_PLACED_BY) if DIRECTORY_VARIABLE in before else _PLACED_BY
    if not (gone := removed(names, before, os.environ)):
        return
    shown = gone[:_NAMED] + ([f"{len(gone) - _NAMED} more"] if len(gone) > _NAMED else [])
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    raise ConfigError(
        f"the script has removed {listed} from os.environ before {at_script_line('atoll.join', line)}, and a "
        f"worker finds its run by them; keep {', '.join(_TORCHRUN)} and those that begin with ATOLL_"
    )


def _tell_of_joining(line: str) -> None:
    """Report to `atoll run` that this worker waits for the others from now on."""
    folder, rank = variable(DIRECTORY_VARIABLE), variable("RANK") or ""
    if not folder or not rank.isdecimal():
        return
    run, worker = RunDirectory(Path(folder)), int(rank) + int(variable(FIRST_VARIABLE) or "0")
    event = Joining(time=record_time(), worker=worker, line=line, pid=os.getpid())
    say(event)
    with (
        contextlib.suppress(OSError),
        Journal(run.journal(worker)) as journal,
    ):  # a full disk is reported later
        journal(event)


def _join_peers(config: Config, place: Place | None, given: Mapping[str, str]) -> Session:
    """Return the session of a node among others, or of a worker alone if there are no other nodes."""
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
