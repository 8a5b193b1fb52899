"""The entry point of the command, which handles signals while the rest is imported, for some 0.1 s."""

from __future__ import annotations

import sys

from atoll.cli.stops import end_at_signals


def main() -> None:
    """Import and run the command; ends with a line if a signal comes before."""
    end_at_signals(sys.argv[1:])
    try:
        from atoll.cli.streams import open_streams

        open_streams()  # before a library opens a file
        from atoll.cli import app
    except KeyboardInterrupt:
        print("atoll: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    app.main()
