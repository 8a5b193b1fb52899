"""A shard's process, from its start until it is stopped: keys, port, place at the hub, folder, service."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from atoll.core.events import AnyEvent, Decided, Warned
from atoll.core.heap import keep_freed_memory
from atoll.core.runclock import record_time
from atoll.core.stopping import told_to_stop
from atoll.net.keys import Keys, read_keys
from atoll.net.tunnel import TunnelServer
from atoll.observe.journal import Journal as Events
from atoll.server.journal import Folder, Journal, JournalError
from atoll.server.links import HubLink
from atoll.server.mirror import Mirror
from atoll.server.options import ServerOptions
from atoll.server.recovery import find, find_site, first_segment
from atoll.server.shard import Shard
from atoll.server.site import SiteShard
from atoll.server.snapshot import Snapshots
from atoll.server.standby import Standby
from atoll.server.telling import Teller
from atoll.tensors.shardoptimizer import warm_up

LARGEST_FRAME = 2**31 - 1  # bytes
_JOURNAL = "journal.jsonl"


def serve(
    options: ServerOptions,
    *,
    ready: Callable[[str], None] = lambda _address: None,
    goes_on: Callable[[str], None] = lambda _line: None,
    stop: threading.Event | None = None,
) -> None:
    """Run one shard until SIGTERM, SIGINT or the end of the run as announced by the hub.

    The shard's directory gets a journal, snapshots and a record of decisions. A shard that is started in the
    directory of a killed one continues from there. If the journal cannot be written, the shard serves on
    without one until a snapshot is complete; if the journal is required, or the shard has a standby, it ends
    with JournalError. Tunnels share the link's rate.

    Args:
        options: the shard's options.
        ready: called with the address once workers can reach it.
        goes_on: called with a line that says where the shard continues from.
        stop: an event that also ends the shard.

    Raises UserError for wrong options, CheckpointError if the directory holds no whole journal, RunError if
    the run cannot go on.
    """
    index, run, folder = options.shard or 0, options.run, options.directory or None
    torch.set_num_threads(1)  # chunks are stepped one by one, and a machine holds several shards
    kept = keep_freed_memory(messages=True)
    keys = read_keys(options.key_file) if options.key_file else None
    with ExitStack() as stack:
        stopped = stack.enter_context(told_to_stop(stop))
        emit: Callable[[AnyEvent], None] = lambda _event: None  # noqa: E731
        snapshots, kept_in, found, journal = None, None, None, None
        warn: Callable[[str], None] = lambda line: emit(Warned(time=record_time(), worker=-1, message=line))  # noqa: E731
        if folder is not None:
            snapshots = Snapshots(
                Path(folder), run=run, shard=index, seconds=options.snapshot_seconds, failed=warn
            )
            kept_in = Folder(Path(folder), run, index)
            stack.callback(kept_in.close)
            if kept_in.incomplete.exists():  # left by a standby whose copy was incomplete
                kept_in.clear()
            found = find(kept_in)
            emit = stack.enter_context(Events(Path(folder) / _JOURNAL))
        name = f"shard {index}"
        server = stack.enter_context(_door(options, keys, name))
        own = options.address or _reachable(server.address)
        identity = kept_in.identity if kept_in is not None else None
        warm_up()  # now, while workers start: at the model's set-up they would all wait for it
        hub = HubLink(
            options.hub,
            keys,
            run=run,
            shard=index,
            own=own,
            timeout=options.timeout,
            incarnation=identity.incarnation if identity is not None and found is not None else 0,
            token=identity.token if identity is not None else "",
        )
        stack.callback(hub.close)
        mirrored = hub.welcome.replicas > 1
        if kept_in is not None:
            kept_in.remember(incarnation=hub.welcome.incarnation)
            journal = Journal(
                kept_in,
                found.next_segment if found is not None else first_segment(kept_in),
                sync=options.sync,
                # Of two processes the other one has the whole state, and goes on alone.
                required=mirrored or options.journal == "required",
            )
        tell = partial(Teller(name, emit).decide, name)

        def make(meanwhile: Callable[[], None] = lambda: None) -> Shard:
            return Shard(
                index,
                server,
                run=run,
                workers=hub.welcome.workers,
                keys=keys,
                hub=hub,
                configured=options.optimizer,
                codec=options.codec,
                fused=options.fused,
                snapshots=snapshots,
                journal=journal,
                mirror=Mirror(index, run, keys, hub, journal, tell) if mirrored else None,
                emit=emit,
                meanwhile=meanwhile,
            )

        until: Callable[[], bool] = lambda: stopped.is_set() or hub.over  # noqa: E731
        shard = None
        if hub.duty is not None and not hub.duty.primary:
            found = None  # a standby takes its primary's state, not this folder's; unmap the files
            standby = Standby(index, run, server, hub, make, journal=journal, snapshots=snapshots)
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
                goes_on(shard.revival.recover(found))
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
    """Note on disk that the run is over. A full disk is an error only if the journal is required."""
    try:
        kept_in.remember(over=True)
    except JournalError:
        if journal is None or journal.required:
            raise


def serve_site(
    options: ServerOptions,
    *,
    ready: Callable[[str], None] = lambda _address: None,
    goes_on: Callable[[str], None] = lambda _line: None,
    stop: threading.Event | None = None,
) -> None:
    """Run the shard of a site until SIGTERM or SIGINT, or until all of the site's workers have left: see
    `serve`.

    The directory gets a journal but no snapshots, since the global shards own the parameters.
    """
    site, run, folder = options.site, options.run, options.directory or None
    torch.set_num_threads(1)
    keep_freed_memory(messages=True)
    keys = read_keys(options.key_file) if options.key_file else None
    with ExitStack() as stack:
        stopped = stack.enter_context(told_to_stop(stop))
        emit: Callable[[AnyEvent], None] = lambda _event: None  # noqa: E731
        kept_in, found, journal = None, None, None
        if folder is not None:
            kept_in = Folder(Path(folder), run, 0, site)
            stack.callback(kept_in.close)
            found = find_site(kept_in)
            journal = Journal(kept_in, found.next_segment if found is not None else 0, sync=options.sync)
            emit = stack.enter_context(Events(Path(folder) / _JOURNAL))
        server = stack.enter_context(_door(options, keys, f"shard of site {site!r}"))
        own = options.address or _reachable(server.address)
        token = kept_in.identity.token if kept_in is not None else ""
        warm_up()
        hub = HubLink(options.hub, keys, run=run, site=site, own=own, timeout=options.timeout, token=token)
        stack.callback(hub.close)
        shard = SiteShard(
            server,
            run=run,
            hub=hub,
            keys=keys,
            timeout=options.timeout,
            journal=journal,
            image_seconds=options.snapshot_seconds,
            link=options.link,
            codec=options.codec,
            emit=emit,
        )
        stack.callback(shard.close)
        if found is not None:
            goes_on(shard.revival.recover(found))
        if journal is not None:
            journal.begin_segment(fresh=found is None)
        ready(own)
        shard.run(lambda: stopped.is_set() or hub.over)
        if kept_in is not None and (hub.over or shard.is_over):
            kept_in.remember(over=True)


def _door(options: ServerOptions, keys: Keys | None, name: str) -> TunnelServer:
    """Open the port for workers."""
    return TunnelServer(
        options.listen,
        keys,
        limit=LARGEST_FRAME,
        name=name,
        link_rate=options.link_rate or None,
        udp_port=options.udp_port,
    )


def _reachable(address: str) -> str:
    """Replace an all-interfaces host in `address` by this machine's name."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:"):
        if address.startswith(everywhere):
            return f"tcp://{platform.node()}:{address.removeprefix(everywhere)}"
    return address
