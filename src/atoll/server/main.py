"""A shard's process: its keys, its door, its place at the hub, its folder; then it serves until it is told to
stop."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from atoll.core.config import LinkOptions
from atoll.core.events import AnyEvent, Decided, Warned
from atoll.core.heap import keep_freed_memory
from atoll.core.runclock import record_time
from atoll.net.keys import Keys, read_keys
from atoll.net.tunnel import TunnelServer
from atoll.observe.journal import Journal as Events
from atoll.server.journal import Folder, Journal, JournalError
from atoll.server.links import HubLink
from atoll.server.mirror import Mirror
from atoll.server.recovery import find, first_segment
from atoll.server.shard import Shard
from atoll.server.site import SiteShard
from atoll.server.siterecovery import find_site
from atoll.server.snapshot import Heading, Snapshots
from atoll.server.standby import MARK, Standby
from atoll.tensors.shardoptimizer import warm_up

LARGEST_FRAME = 2**31 - 1  # bytes
_JOURNAL = "journal.jsonl"


def serve(
    index: int,
    hub_address: str,
    *,
    keys_file: str | os.PathLike[str] | None = None,
    listen: str = "tcp://127.0.0.1:0",
    address: str = "",
    run: str = "atoll",
    folder: str | os.PathLike[str] | None = None,
    optimizer: str = "",
    codec: str = "",
    fused: bool = False,
    snapshot_seconds: float = 60.0,
    timeout: float = 600.0,
    sync: bool = False,
    journal_required: bool = False,
    link_rate: float = 0.0,
    udp_port: int = 0,
    ready: Callable[[str], None] = lambda _address: None,
    goes_on: Callable[[str], None] = lambda _line: None,
    stop: threading.Event | None = None,
) -> None:
    """Be shard `index` of `run`, until SIGTERM or SIGINT, or the hub says that the run is over.

    It listens at `listen`, and tells the hub that workers reach it at `address` (by itself: where it listens;
    for an address of all interfaces, this machine's name). `folder` is this shard's own: a journal of what it
    was told, snapshots every `snapshot_seconds`, and what it decided; None keeps nothing. A shard that is
    started in the folder of one that was killed goes on where that one stood, and `goes_on(line)` says from
    what. With `sync` the journal is on the disk before anybody is answered, and survives the machine. Where
    the journal cannot be written, the shard serves on without one until a snapshot is whole; where it is
    `journal_required`, or the shard has a standby, it ends with JournalError.
    `optimizer` is the operator's own ("package.module:Class"), and `codec` the one codec that the shard may
    load beside Atoll's own. The hub's welcome is waited for for `timeout`
    seconds. What comes through tunnels is shared out so that it does not pass `link_rate`, bytes per second
    (0: it is not), and comes to UDP ports from `udp_port` on (0: any free ones). `ready(address)` is called
    once workers can reach it; `stop` ends it too.

    Raises UserError for what was given wrong, CheckpointError where the folder holds no whole journal,
    RunError when the run cannot go on.
    """
    torch.set_num_threads(1)  # chunks are stepped one by one, and a machine holds several shards
    kept = keep_freed_memory(messages=True)
    keys = read_keys(keys_file) if keys_file is not None else None
    with ExitStack() as stack:
        stopped = stack.enter_context(_told_to_stop(stop or threading.Event()))
        emit: Callable[[AnyEvent], None] = lambda _event: None  # noqa: E731
        snapshots, kept_in, found, journal = None, None, None, None
        warn: Callable[[str], None] = lambda line: emit(Warned(time=record_time(), worker=-1, message=line))  # noqa: E731
        if folder is not None:
            snapshots = Snapshots(Path(folder), run=run, shard=index, seconds=snapshot_seconds, failed=warn)
            kept_in = Folder(Path(folder), run, index)
            stack.callback(kept_in.close)
            if (kept_in.path / MARK).exists():  # of a standby that did not get all of it
                kept_in.clear()
            found = find(kept_in)
            journal = Journal(
                kept_in,
                found.next_segment if found is not None else first_segment(kept_in),
                sync=sync,
                required=journal_required,
            )
            emit = stack.enter_context(Events(Path(folder) / _JOURNAL))
        name = f"shard {index}"
        server = stack.enter_context(_door(listen, keys, name, link_rate, udp_port))
        own = address or _reachable(server.address)
        identity = kept_in.identity if kept_in is not None else None
        warm_up()  # while the workers are starting: at the model's set-up all of them would wait for it
        hub = HubLink(
            hub_address,
            keys,
            run=run,
            shard=index,
            own=own,
            timeout=timeout,
            incarnation=identity.incarnation if identity is not None and found is not None else 0,
            token=identity.token if identity is not None else "",
        )
        stack.callback(hub.close)
        if journal is not None and hub.welcome.replicas > 1:
            journal.required = True  # the other process has all of it, and goes on alone
        if kept_in is not None:
            kept_in.remember(incarnation=hub.welcome.incarnation)

        def make() -> Shard:
            mirror = Mirror(index, run, keys, hub, journal) if hub.welcome.replicas > 1 else None
            made = Shard(
                index,
                server,
                run=run,
                workers=hub.welcome.workers,
                keys=keys,
                hub=hub,
                configured=optimizer,
                codec=codec,
                fused=fused,
                snapshots=snapshots,
                journal=journal,
                mirror=mirror,
                emit=emit,
            )
            if snapshots is not None and journal is not None:
                snapshots.taken = partial(_drop_older, made, journal)
            return made

        until: Callable[[], bool] = lambda: stopped.is_set() or hub.over  # noqa: E731
        shard = None
        if hub.duty is not None and not hub.duty.primary:
            found = None  # what an earlier life left is not gone on from, and its files are let go
            standby = Standby(
                index,
                run,
                server,
                hub,
                make,
                journal=journal,
                folder=kept_in.path if kept_in is not None else None,
                snapshots=snapshots,
            )
            stack.callback(lambda: standby.shard.close())
            ready(own)
            goes_on(f"{name} is the standby: it takes its primary's state, and serves nobody yet")
            if standby.run(until):
                shard = standby.shard
                goes_on(shard.takes_over())
        else:
            shard = make()
            stack.callback(shard.close)
            if found is not None:
                goes_on(shard.recover(found))
            if journal is not None:
                journal.begin_segment(fresh=found is None)
            ready(own)
        if kept:
            reason = "chunks come and go; giving their memory back costs page faults"
            emit(
                Decided(
                    time=record_time(), worker=-1, what="heap", choice="keeps freed memory", reason=reason
                )
            )
        if shard is not None:
            shard.run(until)
        if kept_in is not None and hub.over:
            _remember_end(kept_in, journal)


def _remember_end(kept_in: Folder, journal: Journal | None) -> None:
    """Note that the run is over. On a full disk only a journal that is required makes that an error."""
    try:
        kept_in.remember(over=True)
    except JournalError:
        if journal is None or journal.required:
            raise


def _drop_older(shard: Shard, journal: Journal, heading: Heading) -> None:
    """A snapshot is whole: with the journal since, it is all that the shard holds."""
    if journal.is_broken or heading.journal not in journal.folder.segments():
        return  # it broke meanwhile
    shard.journal_is_whole()
    (journal.folder.path / MARK).unlink(missing_ok=True)
    journal.drop_before(heading.journal)


def serve_site(
    site: str,
    hub_address: str,
    *,
    keys_file: str | os.PathLike[str] | None = None,
    listen: str = "tcp://127.0.0.1:0",
    address: str = "",
    run: str = "atoll",
    folder: str | os.PathLike[str] | None = None,
    snapshot_seconds: float = 60.0,
    timeout: float = 600.0,
    sync: bool = False,
    link: LinkOptions | None = None,
    codec: str = "",
    link_rate: float = 0.0,
    udp_port: int = 0,
    ready: Callable[[str], None] = lambda _address: None,
    goes_on: Callable[[str], None] = lambda _line: None,
    stop: threading.Event | None = None,
) -> None:
    """Be the shard of `site`, until SIGTERM or SIGINT, or all of the site's workers have left: see `serve`.

    `folder` gets its journal, which begins anew every `snapshot_seconds`; it keeps no snapshots, since the
    parameters are the global shards'. `timeout` in seconds is the deadline of each wait for the hub's welcome
    and for the global shards. `link` is how it reaches those; `codec`,
    `link_rate` and `udp_port` are as there.
    """
    torch.set_num_threads(1)
    keep_freed_memory(messages=True)
    keys = read_keys(keys_file) if keys_file is not None else None
    with ExitStack() as stack:
        stopped = stack.enter_context(_told_to_stop(stop or threading.Event()))
        emit: Callable[[AnyEvent], None] = lambda _event: None  # noqa: E731
        kept_in, found, journal = None, None, None
        if folder is not None:
            kept_in = Folder(Path(folder), run, 0, site)
            stack.callback(kept_in.close)
            found = find_site(kept_in)
            journal = Journal(kept_in, found.next_segment if found is not None else 0, sync=sync)
            emit = stack.enter_context(Events(Path(folder) / _JOURNAL))
        server = stack.enter_context(_door(listen, keys, f"shard of site {site!r}", link_rate, udp_port))
        own = address or _reachable(server.address)
        token = kept_in.identity.token if kept_in is not None else ""
        warm_up()
        hub = HubLink(hub_address, keys, run=run, site=site, own=own, timeout=timeout, token=token)
        stack.callback(hub.close)
        shard = SiteShard(
            server,
            run=run,
            hub=hub,
            keys=keys,
            timeout=timeout,
            journal=journal,
            image_seconds=snapshot_seconds,
            link=link,
            codec=codec,
            emit=emit,
        )
        stack.callback(shard.close)
        if found is not None:
            goes_on(shard.recover_site(found))
        if journal is not None:
            journal.begin_segment(fresh=found is None)
        ready(own)
        shard.run(lambda: stopped.is_set() or hub.over)
        if kept_in is not None and (hub.over or shard.is_over):
            kept_in.remember(over=True)


def _door(listen: str, keys: Keys | None, name: str, link_rate: float, udp_port: int) -> TunnelServer:
    """Where workers come in."""
    return TunnelServer(
        listen, keys, limit=LARGEST_FRAME, name=name, link_rate=link_rate or None, udp_port=udp_port
    )


def _reachable(address: str) -> str:
    """Where others find what listens at `address`."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if address.startswith(everywhere):
            return f"tcp://{platform.node()}:{address.removeprefix(everywhere)}"
    return address


@contextmanager
def _told_to_stop(stop: threading.Event) -> Iterator[threading.Event]:
    """Have SIGTERM and SIGINT set `stop`; a thread other than the main one gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
