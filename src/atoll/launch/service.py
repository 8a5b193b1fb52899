"""A hub's or a shard's process, as `atoll run` starts it: bound to its parent, and told to serve.

Run as a module: `hub` or `server`, then that command's options.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM; returns the process's status."""
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    try:
        (_hub if arguments[0] == "hub" else _server)(arguments[1:])
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _hub(arguments: list[str]) -> None:
    from atoll.hub.main import serve

    parser = _parser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--patience", type=float, required=True)
    args = parser.parse_args(arguments)
    serve(
        "tcp://127.0.0.1:0",
        None,
        args.run,
        args.workers,
        args.shards,
        args.directory,
        args.patience,
        args.patience / 10,
    )


def _server(arguments: list[str]) -> None:
    from atoll.server.main import serve

    parser = _parser()
    parser.add_argument("--hub", required=True)
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--snapshot-seconds", type=float, required=True)
    parser.add_argument("--optimizer", default="")
    args = parser.parse_args(arguments)
    serve(
        args.shard,
        args.hub,
        run=args.run,
        folder=args.directory / f"shard-{args.shard}",
        optimizer=args.optimizer,
        snapshot_seconds=args.snapshot_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
