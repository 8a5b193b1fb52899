"""Report of a worker's error, for its journal and for `atoll run`."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator

from atoll.core.childsignals import death_behind
from atoll.core.errors import AtollError, PeerLostError
from atoll.core.events import Failed
from atoll.core.runclock import record_time
from atoll.core.scriptline import line_of_error
from atoll.core.texts import shortened
from atoll.observe.lastwords import say

MESSAGE_CHARACTERS = 2000  # of an error's text, in the records; the log has all of it
_TRACEBACK_CHARACTERS = 16000
_LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")


def failure_of(worker: int, error: BaseException, whole: str, now: float, *, leaving: bool = False) -> Failed:
    """Return the event of an error whose traceback is `whole`."""
    return Failed(
        time=now,
        worker=worker,
        error=type(error).__name__,
        message=shortened(death_behind(error) or text_of(error), MESSAGE_CHARACTERS, "the log has all"),
        # An AtollError is one line: a stack of Atoll's own frames would only hide it.
        traceback=""
        if isinstance(error, AtollError)
        else shortened(whole, _TRACEBACK_CHARACTERS, "the worker's log has all"),
        exit_status=error.exit_status if isinstance(error, AtollError) else 1,
        echo=is_echo(error),
        line=line_of_error(error),
        leaving=leaving,
    )


@contextlib.contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM inside the `with` block, while this process reports its error.

    torchrun may stop both workers as soon as another one has lost the connection to this one. Does nothing on
    another than the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def say_leaving(worker: int, error: BaseException) -> None:
    """Report the error that makes a worker leave its session, before it leaves: it may be stopped then."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return
    with sigterm_ignored():
        try:
            whole = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip("\n")
        except MemoryError:
            whole = f"{type(error).__name__}: {text_of(error)}"
        say(failure_of(worker, error, whole, record_time(), leaving=True))


def text_of(error: object) -> str:
    """Return the text of an error, whatever its own code does."""
    try:
        return str(error)
    except Exception as second:
        return f"<its text cannot be shown: str() raised {type(second).__name__}>"


def is_echo(error: BaseException) -> bool:
    """True if another worker's end caused the error: a lost peer, or torch's error on a broken connection.

    An error that the script raises while it handles a lost peer is an echo too.
    """
    if isinstance(error, AtollError):
        return isinstance(error, PeerLostError)
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, PeerLostError):
            return True
        seen.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return _says_lost(error)


def _says_lost(error: BaseException) -> bool:
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = text_of(error).lower()
    if type(error).__name__ in ("DistNetworkError", "DistBackendError"):
        return True
    # A broken download has such a text too: torch's errors come from torch's code, or name its source.
    is_torch = ".cc:" in text or not _is_raised_elsewhere(error)
    return is_torch and any(words in text for words in _LOST_PEER)


def _is_raised_elsewhere(error: BaseException) -> bool:
    """True where the innermost frame that the error passed through is neither torch's nor Atoll's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in ("torch", "atoll")
