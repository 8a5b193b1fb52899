"""One session of the loss-tolerant transport, as an application has it: keys, replay windows and events
around the state machine of `atoll.ltp.session`. Source: docs/ltp.md, "Keys, seals and replays".

Any thread may use a LinkSession. The link's thread drives it (atoll.net.ltplink).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from atoll.core.errors import DeadlineError, RunError
from atoll.ltp.events import Arrived, Asked, Event, Lost, Migrated, Opened, Refused, StripeChanged
from atoll.ltp.paths import MOST_PATHS
from atoll.ltp.replay import ReplayWindow
from atoll.ltp.session import LtpSession, Status
from atoll.net import context as process
from atoll.net.seals import Opener, Sealer
from atoll.net.udp import Address, Bytes, UdpPort
from atoll.wire.datagrams import Flow, Kind, split_untrusted

T = TypeVar("T")
MOST_BURSTS = 16  # of a session in one turn of the link, so that the others get theirs
MOST_WAITING_BYTES = 2**30  # of values that were not taken: beyond it data is dropped, as on a full link
MOST_WAITING_EVENTS = 2**16  # not taken: beyond it data is dropped too, and other events are only counted
LEAST_PAUSE = 0.0002  # seconds from a turn without more to send to the session's next, unasked
CLOSE_SECONDS = 2.0  # for the last word to leave
_ROUND_TRIPS = 3  # for which an old key opens late datagrams
_NEWS = (Refused, Migrated, StripeChanged)  # events that no accounting needs


@dataclass(frozen=True)
class LinkStatus:
    """A session's state, and the datagrams dropped for it, by reason."""

    session: Status
    drops: dict[str, int]
    unsealed: bool
    waiting_bytes: int  # of values that `events` has not given yet


class LinkSession:
    """A session on a link; made by `LtpLink.open`. `name` is in every error."""

    def __init__(
        self,
        session: LtpSession,
        number: int,
        secret: bytes,
        ports: Sequence[UdpPort],
        wake: Callable[[], None],
        *,
        client: bool,
        seal: bool,
        name: str,
        shared: bool = False,
        told: Callable[[list[Event]], None] | None = None,
        site: str = "",
    ) -> None:
        self.number, self.name, self.site = number, name, site
        self.finished = False  # the link need not drive the session any more
        self.deadline = -math.inf  # when the link is to drive the session next
        self.blocked: UdpPort | None = None  # a port that has no room for the next burst
        self.heard_from: tuple[Address, ...] = ()  # the other end's latest addresses
        self._session, self._ports, self._wake, self._told = session, ports, wake, told
        self._generation = process.generation()
        self._sealed = seal
        keys = {"client": client, "seal": seal}
        self._sealers = [Sealer(secret, stripe=stripe, **keys) for stripe in range(len(ports))]
        self._openers = [Opener(secret, stripe=stripe, **keys) for stripe in range(len(ports))]
        self._windows = [ReplayWindow() for _ in ports]
        self._drops: Counter[str] = Counter()
        self._condition = threading.Condition()  # guards all of this; notified of events, and of the end
        self._events: list[Event] = []
        self._newest_ask: int | None = None  # index of the one Asked in `_events`
        self._waiting_bytes = 0
        self._lost = ""  # why the session is over
        self._cause: BaseException | None = None
        self._left: tuple[UdpPort, Bytes, Address] | None = None  # sealed rows for which there was no room
        self._shared = shared  # the link shares out its rate, and takes what is asked
        self._asked: list[int] = []

    # -- for the application ---------------------------------------------------------------------------------

    def send(
        self,
        chunk: int,
        iteration: int,
        values: npt.NDArray[Any],
        high: npt.NDArray[np.bool_] | None = None,
        reliable: bool = False,
    ) -> int:
        """Send a chunk's values, (elements,), without waiting; return the transfer's id. `high` is by
        block (`Session.send`); `reliable`: all of it arrives in the end. `values` must stay unchanged
        until the transfer's Delivered. Raises UserError for values that cannot be sent, RunError once the
        session is over."""
        return self._do(
            lambda: self._session.send(
                time.monotonic(), chunk, iteration, values, high=high, reliable=reliable
            )
        )

    def _do(self, act: Callable[[], T]) -> T:
        """Call `act` while no other thread uses the session, and let the link send what follows. Raises
        RunError once the session is over."""
        self._check_process()
        with self._condition:
            self._check()
            result = act()
            self.deadline = -math.inf
        self._wake()
        return result

    def events(self, timeout: float) -> list[Event]:
        """Return the events since the last call, in order, waiting up to `timeout` seconds for one; empty
        if none came. Of several Asked only the newest is there. The last event is Lost; after it, this
        raises RunError."""
        self._check_process()
        until = time.monotonic() + timeout
        with self._condition:
            while not self._events:
                self._check_lost()
                left = until - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    break
            return self._taken()

    def _taken(self) -> list[Event]:
        with self._condition:
            events, self._events = self._events, []
            self._newest_ask = None
            self._waiting_bytes = 0
        return events

    def status(self) -> LinkStatus:
        """Return the session's state; also when it is over."""
        self._check_process()
        with self._condition:
            drops = self._drops + self._session.drops
            drops["seal"] += sum(opener.refused for opener in self._openers)
            return LinkStatus(self._session.status(), dict(+drops), not self._sealed, self._waiting_bytes)

    @property
    def forged(self) -> int:
        """Number of datagrams that named this session and were not the other end's, or came twice."""
        return self._drops["stripe"] + self._drops["replayed"] + sum(each.refused for each in self._openers)

    @property
    def over(self) -> bool:
        """True once the session has ended."""
        return bool(self._lost)

    def change_keys(self) -> None:
        """Seal the next datagrams with new keys."""
        self._do(self._session.change_keys)

    def ask(self, size: int) -> None:
        """Ask the other end for a share of its link, for so many bytes; it gets the event Asked."""
        self._do(lambda: self._session.ask(size))

    def grant(self, rate: float, seconds: float) -> None:
        """Give the other end so many bytes per second of this end's link, for so long: it sends no more."""
        self._do(lambda: self._session.grant(rate, seconds))

    def close(self, reason: str = "closed by the application") -> None:
        """End the session, and tell the other end why. Closing twice does no harm."""
        if self._generation != process.generation():
            return  # the parent's
        until = time.monotonic() + CLOSE_SECONDS
        with self._condition:
            if not self._lost:
                self._session.close(time.monotonic(), reason)
                self.deadline = -math.inf
        self._wake()
        with self._condition:
            while not self.finished:
                left = until - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    raise DeadlineError(f"waited {CLOSE_SECONDS:g} s for {self.name} to say that it ends")

    def _check(self) -> None:
        if self._session.ended:
            self._note(self._session.poll_events())
        self._check_lost()

    def _check_lost(self) -> None:
        if self._lost:
            raise RunError(f"{self.name} is over: {self._lost}") from self._cause

    def _check_process(self) -> None:
        """Raise RunError in a forked process. Call before any lock: one that was held at the fork stays so
        in the child."""
        if self._generation != process.generation():
            raise RunError(f"{self.name}: a forked process cannot use its parent's session")

    # -- for the link's thread -------------------------------------------------------------------------------

    def handle(self, now: float, flow: Flow, address: Address) -> None:
        """Take in datagrams that name this session, and came at `now` (monotonic)."""
        with self._condition:
            if self._lost:
                return
            if flow.stripe >= len(self._ports):
                self._drops["stripe"] += len(flow.frames)
                return
            frames, sizes = self._opened(now, flow)
            if not len(frames):
                return
            if address not in self.heard_from:
                self.heard_from = (*self.heard_from, address)[-MOST_PATHS * len(self._ports) :]
            full = self._waiting_bytes > MOST_WAITING_BYTES or len(self._events) > MOST_WAITING_EVENTS
            for batch in split_untrusted(frames, sizes, self._drops):
                if full and batch.kind in (Kind.DATA, Kind.PARITY):
                    self._drops["not taken in time"] += len(batch)
                else:
                    self._session.handle_datagrams(now, address, flow.stripe, batch)
            self.deadline = -math.inf

    def drive(self) -> None:
        """Send what is due, and collect events; then `deadline` is the time of the next call."""
        if self.blocked is None and time.monotonic() < self.deadline:
            return
        with self._condition:
            for _ in range(MOST_BURSTS):
                if not self._send_next(now := time.monotonic()):
                    next_due = self._session.poll_deadline() if self._left is None else math.inf
                    self.deadline = max(next_due, now + LEAST_PAUSE)
                    break
            else:
                self.deadline = now
            events = self._session.poll_events()
            if events:
                self._note(events)
            if self._lost and self._left is None and self.deadline > now:
                self._finish()

    def take_asked(self) -> list[int]:
        """Return what the other end has asked for since the last call: bytes that it has to send, 0: none.
        An opened session counts as asking: its first grant shows the other end that this link shares out
        its rate."""
        with self._condition:
            asked, self._asked = self._asked, []
        return asked

    def hand_out(self) -> None:
        """Call the application with the new events, if it gave a callback; from the link's thread, with no
        lock held, so that it may send."""
        if self._told is not None and self._events:
            self._told(self._taken())

    def share(self, rate: float, seconds: float) -> None:
        """Grant the other end its share of the link."""
        with self._condition:
            if not self._lost:
                self._session.grant(rate, seconds, kept=False)
                self.deadline = -math.inf

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """End the session at once, without a message to the other end."""
        with self._condition:
            if not self._lost:
                self._cause = cause
                self._session.fail(reason)
                self._note(self._session.poll_events())
            self._finish()
        self.hand_out()

    def _opened(self, now: float, flow: Flow) -> tuple[Bytes, npt.NDArray[np.int64]]:
        """Return the rows that are genuine and new, and their sizes."""
        window, opener = self._windows[flow.stripe], self._openers[flow.stripe]
        frames, sizes, numbers = flow.frames, flow.sizes, flow.numbers
        good = self._counted(window.fresh(numbers), "replayed")
        if not good.all():
            frames, sizes, numbers = frames[good], sizes[good], numbers[good]
        opener.keep_old = _ROUND_TRIPS * self._session.control.trip.smoothed
        good = opener.open(frames, sizes, now)  # the opener counts refused seals itself
        if not good.all():
            frames, sizes, numbers = frames[good], sizes[good], numbers[good]
            if not len(frames):
                return frames, sizes
        good = self._counted(window.mark(numbers), "replayed")
        return (frames, sizes) if good.all() else (frames[good], sizes[good])

    def _counted(self, good: npt.NDArray[np.bool_], reason: str) -> npt.NDArray[np.bool_]:
        if not good.all():
            self._drops[reason] += len(good) - int(np.count_nonzero(good))
        return good

    def _send_next(self, now: float) -> bool:
        """Send the next burst, or the rest of the last; False if there is none, or no room."""
        if self._left is None:
            burst = self._session.poll_datagrams(now)
            if burst is None:
                return False
            self._sealers[burst.stripe].seal(burst.frames)
            assert isinstance(burst.path, tuple)  # from `handle`, or `LtpLink.open`
            port, frames, address = self._ports[burst.stripe], burst.frames, burst.path
        else:
            port, frames, address = self._left
        sent = port.send(frames, address)
        whole = sent == len(frames)
        self._left = None if whole else (port, frames[sent:], address)
        self.blocked = None if whole else port
        return whole

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Arrived):
                self._waiting_bytes += event.values.nbytes
            elif isinstance(event, Lost):
                event = self._explained(event)
                self._lost = event.reason
            elif self._shared and isinstance(event, Opened):
                self._asked.append(1)
            elif self._shared and isinstance(event, Asked):
                self._asked.append(event.size)
                continue
            elif isinstance(event, Asked):
                if self._newest_ask is not None:  # the other end may ask as often as it likes
                    self._events[self._newest_ask] = event
                    continue
                self._newest_ask = len(self._events)
            elif len(self._events) > MOST_WAITING_EVENTS and isinstance(event, _NEWS):
                self._drops[f"{type(event).__name__} not taken in time"] += 1
                continue
            self._events.append(event)
        self._condition.notify_all()

    def _explained(self, lost: Lost) -> Lost:
        """Return the event with the port's trouble that kept datagrams from leaving, if there was any."""
        troubles = [port.trouble for port in self._ports if port.trouble]
        return replace(lost, reason=f"{lost.reason} ({troubles[0]})") if troubles else lost

    def _finish(self) -> None:
        self.finished = True
        self.deadline = math.inf
        self._condition.notify_all()
