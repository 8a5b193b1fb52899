"""The command's beginning: it may be stopped while the rest is imported, for some tenths of a second."""

from __future__ import annotations

import sys

from atoll.cli.stops import end_at_signals


def main() -> None:
    """The entry point; as `atoll.cli.app`: `main`, which it calls."""
    end_at_signals(sys.argv[1:])
    try:
        from atoll.cli.streams import open_streams

        open_streams()  # before a library opens a file
        from atoll.cli import app
    except KeyboardInterrupt:
        print("atoll: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    app.main()
