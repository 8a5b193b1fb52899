"""The hub's process."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.events import AnyEvent, Decided, EventBus
from atoll.hub.decisions import Decisions
from atoll.hub.service import LIMIT, Hub
from atoll.net.endpoint import Server
from atoll.net.keys import read_keys
from atoll.store.members import RANKS, Membership

ADDRESS_FILE = "hub.address"  # in the run's directory: where the hub listens
DEFAULT_LISTEN = "tcp://127.0.0.1:47700"
HEARTBEAT = 1.0  # seconds
PATIENCE = 10.0  # seconds
SHARDS = 4096  # the most


def serve(
    listen: str = DEFAULT_LISTEN,
    keys_file: str | os.PathLike[str] | None = None,
    run: str = "",
    workers: int = 1,
    shards: int = 1,
    folder: str | os.PathLike[str] | None = None,
    patience: float = PATIENCE,
    heartbeat: float = HEARTBEAT,
    *,
    sites: Mapping[str, int] | None = None,
    until_done: bool = False,
    at_least: int = 1,
    until: Callable[[], bool] = lambda: False,
    ready: Callable[[str], None] = lambda _address: None,
) -> None:
    """Be the hub of a run that begins with `workers` workers and has `shards` shards; without shards the
    workers are a ring, which has no fewer and no more.

    `sites` has the workers of each site, by its name, where the run has levels; together they are `workers`.
    `run` is its name; empty: a new one. Decisions go to `folder` (decisions.jsonl), and as lines to stdout.
    `folder` also gets the address, for `listen` may leave the port open (0). `ready` is called with it once
    others may connect. `patience`: seconds of silence after which a worker counts as dead; `heartbeat`: how
    often they are to be heard. `at_least`: a ring with fewer members left than these ends. It ends when
    `until` says so, by a signal, or with `until_done` when all workers have left or died and the shards,
    which it tells, have ended. Raises UserError for input that is wrong, a port in use too.
    """
    _check(workers, shards, patience, heartbeat)
    if not 1 <= at_least <= workers:
        raise UserError(f"at least {at_least} workers, of a run of {workers}: from 1 to {workers}")
    _check_sites(sites or {}, workers, shards)
    keys = read_keys(keys_file) if keys_file else None
    run = run or f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    with Server(listen, keys, limit=LIMIT, name="hub") as server:
        where = None if not folder else Path(folder)
        bus = EventBus()
        bus.subscribe(_show)
        decisions = Decisions(where, bus)
        hub = Hub(
            server,
            Membership(workers, patience, shards, sites),
            decisions,
            run=run,
            heartbeat=heartbeat,
            keys=keys,
            until_done=until_done,
            at_least=at_least,
        )
        try:
            decisions.add(
                "hub",
                f"listens at {server.address}",
                f"run {run!r} of {workers} workers{_at(sites or {})} and {shards or 'no'} shards, "
                + ("with keys" if keys else "without keys: only this machine can reach it"),
            )
            if where is not None:
                _leave_address(where, server.address)
            ready(server.address)
            hub.serve(until)
        finally:
            hub.close()
            decisions.close()


def _check(workers: int, shards: int, patience: float, heartbeat: float) -> None:
    if not 1 <= workers <= RANKS:
        raise UserError(f"a run of {workers} workers: from 1 to {RANKS}")
    if not 0 <= shards <= SHARDS:
        raise UserError(f"a run of {shards} shards: from 0, for a ring, to {SHARDS}")
    if not 0 < heartbeat < patience / 2:
        raise UserError(
            f"a heartbeat each {heartbeat:g} s and a patience of {patience:g} s: the patience must be more "
            "than two heartbeats"
        )


def _check_sites(sites: Mapping[str, int], workers: int, shards: int) -> None:
    if sites and not shards:
        raise UserError("a run of sites has at least one shard, for all of them; without shards it is a ring")
    for name, count in sites.items():
        if not name or len(name) > 256 or not name.isprintable():
            raise UserError(f"a site called {name!r}: give it a name of printable letters")
        if count < 1:
            raise UserError(f"site {name!r} of {count} workers: each has at least one")
    if sites and sum(sites.values()) != workers:
        parts = " + ".join(f"{count} at {name!r}" for name, count in sites.items())
        raise UserError(f"a run of {workers} workers, and the sites have {sum(sites.values())}: {parts}")


def _at(sites: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count} at {name!r}' for name, count in sites.items())})" if sites else ""


def _leave_address(folder: Path, address: str) -> None:
    path, beside = folder / ADDRESS_FILE, folder / f"{ADDRESS_FILE}.new"
    try:
        beside.write_text(address + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the hub's address: {error.strerror}") from None


def _show(event: AnyEvent) -> None:
    if isinstance(event, Decided):
        at = time.strftime("%H:%M:%S", time.localtime(event.time))
        try:
            print(f"{at} {event.what}: {event.choice} ({event.reason})", flush=True)
        except BrokenPipeError:  # nobody reads it any more; the hub goes on
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
