"""A hub's or a shard's process, as `atoll run` starts it: bound to its parent, and told to serve.

It takes no notice of SIGTERM. systemd, for one, sends that to all processes of a run at once, and workers
still need hub and shards while they save. The launcher ends it with SIGINT (`END_SIGNAL`).

Run as a module: `hub`, `server` or `site`, then its options. A hub that scores groupings by a cost model is
another module's (`cli/hub.py`), which calls `main` with the model.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.core.config import KEYS_VARIABLE, SOCKETS_VARIABLE, LinkOptions
from atoll.core.errors import AtollError
from atoll.core.events import NO_WORKER, Ended
from atoll.core.runclock import record_time
from atoll.core.texts import one_line, shortened
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent
from atoll.observe.lastwords import say
from atoll.observe.logstream import LogStreams

END_SIGNAL = signal.SIGINT
_MESSAGE_CHARACTERS = 2000  # of an error's text, to the launcher

if TYPE_CHECKING:
    from atoll.hub.planner import ScoreFor


def main(arguments: list[str], score_for: ScoreFor | None = None) -> int:
    """Serve until `END_SIGNAL`; returns the process's status. `score_for` is what a hub scores groupings
    with; None: with what they compute alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    LogStreams().install()
    try:
        kinds: dict[str, Callable[[list[str]], None]] = {"server": _server, "site": _site}
        kinds["hub"] = partial(_hub, score_for)
        kinds[arguments[0]](arguments[1:])
    except AtollError as error:
        _tell(arguments, str(error), error.exit_status)
        with contextlib.suppress(OSError):  # the log's disk is full
            print(f"atoll: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        message = _described(error)
        _tell(arguments, message, 1)
        with contextlib.suppress(OSError):
            traceback.print_exc()
            print(f"atoll: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # whatever the error has left open, nothing waits for it
    return 0


def _described(error: Exception) -> str:
    """An error that nobody expected, in one line."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files, of which it may have {allowed}: raise the limit (ulimit -n)"
    return one_line(f"{type(error).__name__}: {error}", _MESSAGE_CHARACTERS)


def _tell(arguments: list[str], message: str, status: int) -> None:
    """Say why this service ends, where its log may be on a full disk."""
    kind = arguments[0]
    named = {"server": "--shard", "site": "--site"}.get(kind, "")
    which = arguments[arguments.index(named) + 1] if named in arguments else ""
    called = {"server": f"shard {which}", "site": f"the shard of site {which}"}.get(kind, "the hub")
    called = f"the second process of {called}" if "--second" in arguments else called
    message = shortened(message, _MESSAGE_CHARACTERS)
    say(Ended(time=record_time(), worker=NO_WORKER, status=status, call=called, message=message))


def _hub(score_for: ScoreFor | None, arguments: list[str]) -> None:
    from atoll.hub.main import HEARTBEAT, serve
    from atoll.hub.planner import GroupingSettings, by_computing

    parser = _parser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--site", action="append", default=[])  # its name and its workers: NAME=N
    parser.add_argument("--groups", type=int)  # 0: as many as are best; not given: workers are not grouped
    parser.add_argument("--group-by", default="auto")
    parser.add_argument("--group-patience", type=float, default=60.0)
    parser.add_argument("--group-links", type=float, default=0.0)
    parser.add_argument("--no-regroup", action="store_true")
    parser.add_argument("--consistency", default="asp")
    args = parser.parse_args(arguments)
    sites = {name: int(count) for name, _, count in (site.partition("=") for site in args.site)}
    grouping = None
    if args.groups is not None:
        grouping = GroupingSettings(
            args.groups,
            args.group_by,
            args.group_patience,
            not args.no_regroup,
            args.consistency,
            args.group_links,
            score_for or by_computing,
        )
    serve(
        "tcp://127.0.0.1:0",
        os.environ.get(KEYS_VARIABLE),
        args.run,
        args.workers,
        args.shards,
        args.directory,
        args.patience,
        min(HEARTBEAT, args.patience / 10),
        sites=sites,
        replicas=args.replicas,
        grouping=grouping,
    )


def _server(arguments: list[str]) -> None:
    from atoll.server.main import serve

    parser = _parser()
    parser.add_argument("--hub", required=True)
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--snapshot-seconds", type=float, required=True)
    parser.add_argument("--optimizer", default="")
    parser.add_argument("--codec", default="")
    parser.add_argument("--journal", default="optional")
    parser.add_argument("--link-rate", type=float, default=0.0)  # bytes per second; 0: not shared out
    parser.add_argument("--second", action="store_true")  # of a shard that is held twice
    args = parser.parse_args(arguments)
    serve(
        args.shard,
        args.hub,
        keys_file=os.environ.get(KEYS_VARIABLE),
        listen=_listen(f"shard-{args.shard}"),
        run=args.run,
        folder=args.directory / f"shard-{args.shard}{'-second' if args.second else ''}",
        optimizer=args.optimizer,
        codec=args.codec,
        snapshot_seconds=args.snapshot_seconds,
        journal_required=args.journal == "required",
        link_rate=args.link_rate,
    )


def _site(arguments: list[str]) -> None:
    from atoll.server.main import serve_site

    parser = _parser()
    parser.add_argument("--hub", required=True)
    parser.add_argument("--site", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--snapshot-seconds", type=float, required=True)
    parser.add_argument("--link", required=True)  # a LinkOptions, as JSON
    parser.add_argument("--codec", default="")
    args = parser.parse_args(arguments)
    serve_site(
        args.site,
        args.hub,
        keys_file=os.environ.get(KEYS_VARIABLE),
        listen=_listen("site"),
        run=args.run,
        folder=args.directory / f"site-{args.site}",
        snapshot_seconds=args.snapshot_seconds,
        timeout=args.timeout,
        link=msgspec.json.decode(args.link, type=LinkOptions),
        codec=args.codec,
    )


def _listen(name: str) -> str:
    """Where a shard listens: at a socket that only this user reaches, where the launcher made a folder for
    those. Each life of a shard has a name of its own, as it would have a port of its own."""
    folder = os.environ.get(SOCKETS_VARIABLE)
    return f"ipc://{folder}/{name}-{os.getpid()}" if folder else "tcp://127.0.0.1:0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
