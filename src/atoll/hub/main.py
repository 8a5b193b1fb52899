"""The hub's process: checks of its options, start or restart, and service."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.core.descriptors import raise_descriptor_limit
from atoll.core.errors import UserError
from atoll.core.events import AnyEvent, Decided, EventBus
from atoll.core.outlet import Outlet
from atoll.hub.decisions import Decisions
from atoll.hub.journal import FILE, HubJournal
from atoll.hub.options import HubOptions
from atoll.hub.planner import GroupingSettings, ScoreFor, by_computing
from atoll.hub.records import Began
from atoll.hub.service import LIMIT, Hub
from atoll.net.endpoint import Server
from atoll.net.keys import read_keys
from atoll.store.members import Membership
from atoll.store.replicas import REPLICAS
from atoll.store.silence import FLOOR_SECONDS
from atoll.store.workers import RANKS

ADDRESS_FILE = "hub.address"  # in the run's directory: the hub's address
BEATS = 8_000  # heartbeats a second; with more than 2,000 workers each sends fewer
SHARDS = 4096  # the most shards
_READER_SECONDS = 1.0  # seconds for stdout's reader to catch up at the end
_CONNECTIONS = 2  # connections of a worker: one for requests and one for heartbeats
_FILES = 100  # descriptors for everything else


def serve(
    options: HubOptions,
    grouping: GroupingSettings | None = None,
    *,
    until: Callable[[], bool] = lambda: False,
    ready: Callable[[str], None] = lambda _address: None,
) -> None:
    """Run the hub of a run, as `options` say.

    Decisions go to the directory (decisions.jsonl) and, as lines, to stdout. The directory also gets the
    address and the run's journal. The hub ends when `until` returns true or on a signal; with `until_done`
    also once all workers have left or died and the shards, which it notifies, have ended.

    Args:
        options: the hub's options.
        grouping: settings of groups, if workers are in groups; `grouping_of(options)`, say.
        until: returns true to end the hub.
        ready: called with the address once others can connect.

    Raises UserError for wrong input, also for a port in use and a directory of another run.
    """
    workers, shards, sites, replicas = options.workers, options.shards, options.sites, options.replicas
    patience, least_patience = options.patience, options.least_seconds
    heartbeat, at_least = options.heartbeat_seconds, options.at_least
    check_counts(workers, shards)
    if not 0 < heartbeat < patience / 2:
        raise UserError(
            f"a heartbeat each {heartbeat:g} s and a patience of {patience:g} s: the patience must be more "
            "than two heartbeats"
        )
    if not 0 < least_patience <= max(patience, FLOOR_SECONDS):
        raise UserError(
            f"a least patience of {least_patience:g} s: more than 0, and at most the patience, {patience:g} s"
        )
    if not 1 <= at_least <= workers:
        raise UserError(f"at least {at_least} workers, of a run of {workers}: from 1 to {workers}")
    chosen = {"--site": list(sites), "--shards": shards, "--replicas": replicas}
    check("hub", Choices(chosen if grouping is None else {**chosen, "--groups": grouping.count}))
    _check_sites(sites, workers)
    _check_replicas(replicas)
    if grouping is not None:
        _check_groups(grouping, workers)
    # Heartbeats must stay a small part of the hub's work: many workers send theirs less often.
    seldom = max(heartbeat, min(workers / BEATS, patience / 4))
    least_patience, heartbeat = min(least_patience + seldom - heartbeat, max(patience, FLOOR_SECONDS)), seldom
    keys = read_keys(options.key_file) if options.key_file else None
    descriptors = raise_descriptor_limit()
    where = Path(options.directory) if options.directory else None
    with contextlib.ExitStack() as stack:
        journal = HubJournal(where) if where is not None and (where / FILE).exists() else None
        if journal is not None:
            stack.callback(journal.close)
        asked = Began(
            at=0.0,
            run=options.run,
            listen=options.listen,
            address="",
            workers=workers,
            shards=shards,
            sites=list(sites.items()),
            replicas=replicas,
            groups=str(grouping) if grouping is not None else "",
        )
        began = _goes_on(journal, asked) if journal is not None else None
        run = began.run if began is not None else options.run or _new_name()
        server = stack.enter_context(
            Server(began.address if began else options.listen, keys, limit=LIMIT, name="hub")
        )
        if where is not None and journal is None:
            journal = HubJournal(where)  # now that the address is ours
            stack.callback(journal.close)
        if journal is not None and began is None:
            journal.begin(msgspec.structs.replace(asked, run=run, address=server.address))
        bus = EventBus()
        shown = Outlet(sys.stdout)
        stack.callback(_finish, shown)
        bus.subscribe(partial(_show, shown))
        decisions = Decisions(where, bus)
        stack.callback(decisions.close)
        members = Membership(workers, patience, shards, sites, heartbeat, replicas, least_patience)
        cut = journal.cut if journal is not None else 0
        hub = Hub(
            server,
            members,
            decisions,
            run=run,
            keys=keys,
            until_done=options.until_done,
            at_least=at_least,
            journal=journal,
            grouping=grouping,
        )
        stack.callback(hub.close)
        if hub.book.over and not members.roll.known:
            raise UserError(f"{where}: the run {run!r} there is over; give another --directory")
        decisions.add(
            "hub",
            f"listens at {server.address}" + (" again" if began is not None else ""),
            f"run {run!r} of {_count(workers, 'worker')}{_at(sites)} and "
            f"{_count(shards, 'shard') if shards else 'no shards'}{_held(shards, replicas)}, "
            + ("with keys" if keys else "without keys: only this machine can reach it"),
        )
        if descriptors < workers * _CONNECTIONS + _FILES:
            decisions.add(
                "hub",
                f"may open {descriptors} files and connections",
                f"{_count(workers, 'worker')} make up to {workers * _CONNECTIONS} connections: raise the "
                "hard limit (`ulimit -Hn`, as root), or some may not get in",
            )
        if began is not None:
            lost = f"; {cut} bytes at its end, of what nobody was answered, are cut off" if cut else ""
            decisions.add("hub", f"goes on with {_there(members)}", f"its journal in {where} says so{lost}")
        if where is not None:
            _leave_address(where, server.address)
        ready(server.address)
        hub.serve(until)


def grouping_of(options: HubOptions, score_for: ScoreFor = by_computing) -> GroupingSettings | None:
    """Return the grouping settings, with scores by `score_for`; None without groups."""
    if options.groups is None:
        return None
    return GroupingSettings(
        options.groups,
        options.group_by,
        options.group_patience,
        options.regroup,
        options.consistency,
        options.group_links,
        score_for,
        by_speed=options.shares == "auto",
    )


def _new_name() -> str:
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _there(members: Membership) -> str:
    """Describe the present members in a few words."""
    workers, shards = len(members.workers.live()), len(members.shards.live())
    words = [_count(workers, "worker"), _count(shards, "shard")]
    if members.sites.workers:
        words.append(_count(len(members.sites.members), "site"))
    return ", ".join(words)


def _count(number: int, what: str) -> str:
    """Format like `1 shard`, `2 shards`."""
    return f"{number} {what}{'s' * (number != 1)}"


def _held(shards: int, replicas: int) -> str:
    if replicas < 2:
        return ""
    return ", held twice" if shards == 1 else ", each held twice"


def _goes_on(journal: HubJournal, asked: Began) -> Began | None:
    """Return the first record of the run to continue; None for a new journal. Raises UserError if the options
    ask for another run."""
    began = journal.began
    if began is None:
        return None
    where = journal.path.parent
    said = {
        "run": (asked.run or began.run, began.run),
        "listen": (began.listen if asked.listen == began.address else asked.listen, began.listen),
        "workers": (asked.workers, began.workers),
        "shards": (asked.shards, began.shards),
        "replicas": (asked.replicas, began.replicas),
        "site": (asked.sites, began.sites),
        "groups": (asked.groups or "none", began.groups or "none"),
    }
    for option, (now, before) in said.items():
        if now != before:
            raise UserError(
                f"{where}: holds the run {began.run!r}, whose hub was started with --{option} "
                f"{_word(before)} and not {_word(now)}; start it as before, or give another --directory"
            )
    return began


def _word(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(f"{name}={count}" for name, count in value) or "none"


def check_counts(workers: int, shards: int) -> None:
    """Raise UserError for too many or too few workers or shards."""
    if not 1 <= workers <= RANKS:
        raise UserError(f"a run of {workers} workers: from 1 to {RANKS}")
    if not 0 <= shards <= SHARDS:
        raise UserError(f"a run of {shards} shards: from 0, for a ring, to {SHARDS}")


def _check_sites(sites: Mapping[str, int], workers: int) -> None:
    for name, count in sites.items():
        if not name or len(name) > 256 or not name.isprintable():
            raise UserError(f"a site called {name!r}: give it a name of printable letters")
        if count < 1:
            raise UserError(f"site {name!r} of {count} workers: each has at least one")
    if sites and sum(sites.values()) != workers:
        parts = " + ".join(f"{count} at {name!r}" for name, count in sites.items())
        raise UserError(f"a run of {workers} workers, and the sites have {sum(sites.values())}: {parts}")


def _check_replicas(replicas: int) -> None:
    if not 1 <= replicas <= REPLICAS:
        raise UserError(f"--replicas {replicas}: 1, or {REPLICAS} for a standby of each shard")


def _check_groups(grouping: GroupingSettings, workers: int) -> None:
    if not 0 <= grouping.count <= workers:
        raise UserError(
            f"--groups {grouping.count}: from 1 to {workers}, the number of workers; or auto, for as many as "
            "are best"
        )
    if not grouping.patience > 0:
        raise UserError(f"a probe's patience of {grouping.patience:g} s: must be more than 0")


def _at(sites: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count} at {name!r}' for name, count in sites.items())})" if sites else ""


def _leave_address(folder: Path, address: str) -> None:
    path, beside = folder / ADDRESS_FILE, folder / f"{ADDRESS_FILE}.new"
    try:
        if path.exists() and path.read_text(encoding="utf-8") == address + "\n":
            return  # unchanged: do not write, the disk may be full
        beside.write_text(address + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the hub's address: {error.strerror}") from None


def _show(shown: Outlet, event: AnyEvent) -> None:
    """Print a decision. A slow or closed reader does not stop the hub: decisions.jsonl has all."""
    if isinstance(event, Decided):
        at = time.strftime("%H:%M:%S", time.localtime(event.time))
        shown.write(f"{at} {event.what}: {event.choice} ({event.reason})\n")


def _finish(shown: Outlet) -> None:
    shown.drain(_READER_SECONDS)
    shown.close()
