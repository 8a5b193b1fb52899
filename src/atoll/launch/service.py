"""The process of a hub or a shard, as `atoll run` starts it: it ends with its parent.

It ignores SIGTERM. systemd, for example, sends that to all processes of a run at once, and workers still need
hub and shards while they save. The launcher ends it with SIGINT (`END_SIGNAL`).

Run as a module, with the service's name (`hub`, `server-0`, `second-0`, `site-paris`) and its options: a
HubOptions or a ServerOptions as JSON. A hub that scores groupings by a cost model is another module's
(`cli/hub.py`), which calls `main` with the model.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from msgspec.structs import replace

from atoll.core.awaited import show_stack_on_signal
from atoll.core.config import SOCKETS_VARIABLE
from atoll.core.errors import AtollError
from atoll.core.events import NO_WORKER, Ended
from atoll.core.heap import keep_freed_memory
from atoll.core.options import from_argument
from atoll.core.runclock import record_time
from atoll.core.stopping import exit_quickly
from atoll.core.texts import one_line, shortened
from atoll.hub.options import HubOptions
from atoll.launch.parts import called
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent, why_no_thread
from atoll.observe.lastwords import say
from atoll.observe.logstream import LogStreams
from atoll.server.options import ServerOptions

END_SIGNAL = signal.SIGINT
_MESSAGE_CHARACTERS = 2000  # of an error's text, to the launcher

if TYPE_CHECKING:
    from atoll.hub.planner import ScoreFor


def main(arguments: list[str], score_for: ScoreFor | None = None) -> int:
    """Serve until `END_SIGNAL`; return the process's status. `score_for` scores the hub's groupings; None:
    by compute time alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    LogStreams().install()
    show_stack_on_signal()
    name, text = arguments
    try:
        if name == "hub":
            _hub(from_argument(text, HubOptions), score_for)
        else:
            _shard(from_argument(text, ServerOptions))
    except AtollError as error:
        _tell(name, str(error), error.exit_status)
        with contextlib.suppress(OSError):  # the log's disk is full
            print(f"atoll: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        message = _described(error)
        _tell(name, message, 1)
        with contextlib.suppress(OSError):
            traceback.print_exc()
            print(f"atoll: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # do not wait for threads and sockets that the error left open
    return 0


def _described(error: Exception) -> str:
    """Return an unexpected error in one line."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"too many open files, of which it may have {allowed}: raise the limit (ulimit -n)"
    return why_no_thread(error) or one_line(f"{type(error).__name__}: {error}", _MESSAGE_CHARACTERS)


def _tell(name: str, message: str, status: int) -> None:
    """Report to the launcher why this service ends: its log may be on a full disk."""
    message = shortened(message, _MESSAGE_CHARACTERS)
    say(Ended(time=record_time(), worker=NO_WORKER, status=status, call=called(name), message=message))


def _hub(options: HubOptions, score_for: ScoreFor | None) -> None:
    from atoll.hub.main import grouping_of, serve
    from atoll.hub.planner import by_computing

    serve(options, grouping_of(options, score_for or by_computing))


def _shard(options: ServerOptions) -> None:
    keep_freed_memory(messages=True)  # before ZeroMQ and torch start threads, which get heaps of their own
    from atoll.server.coming import announce

    announce(options)
    from atoll.server.main import serve, serve_site  # takes seconds: imports torch

    which = "site" if options.site else f"shard-{options.shard}"
    options = replace(options, listen=_listen(which))
    if options.site:
        serve_site(options)
    else:
        serve(options)


def _listen(name: str) -> str:
    """Return the address at which a shard listens: a socket that only this user reaches, if the launcher
    made a folder for sockets. Each life of a shard has a name of its own, like a port of its own."""
    folder = os.environ.get(SOCKETS_VARIABLE)
    return f"ipc://{folder}/{name}-{os.getpid()}" if folder else "tcp://127.0.0.1:0"


if __name__ == "__main__":
    exit_quickly(main(sys.argv[1:]))
