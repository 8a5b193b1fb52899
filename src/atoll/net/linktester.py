"""The client of `atoll link test`: opens transports to a server, lets them take turns, and times each
transfer.

A transfer's time begins before its sender is called and ends when the server holds it, by the server's clock;
the two clocks are compared over the channel before each turn. So the server's report, which may be late on a
link that loses packets, is no part of the time.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from atoll.core.errors import PeerLostError, RunError, UserError
from atoll.ltp.settings import LtpSettings
from atoll.net.endpoint import Client, host_and_port
from atoll.net.keys import Keys
from atoll.net.linkoptions import LinkTestOptions
from atoll.net.linkreport import Clocks, LinkReport, Packets, TransportResult, Turn, window_note
from atoll.net.linkserver import FRAME, NAME
from atoll.net.requests import RefusedError
from atoll.net.tcpflows import TcpSender, most_in_flight
from atoll.wire.datagrams import LTP_VERSION
from atoll.wire.linktest import LINK_ROLE
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    ClockRead,
    FlowLost,
    Goodbye,
    Hello,
    LtpOpened,
    Message,
    OpenLtp,
    OpenTcp,
    ReadClock,
    Refused,
    Taken,
    TcpOpened,
    Welcome,
    WireError,
    decode_untrusted,
    encode,
)

_READINGS = 3  # of the clock, before each turn
_LOOK_SECONDS = 0.05
_SLOW_SECONDS = 5.0
_LEAST_SILENCE = 3.0  # seconds: the server speaks each second, and one word may be late

Values = npt.NDArray[np.float32]
Answer = TypeVar("Answer", bound=Message)


class Sender(Protocol):
    """An open transport to the server."""

    number: int  # the flow's

    @property
    def detail(self) -> str:
        """The transport's setting, in words."""

    def send(self, transfer: int, look: Callable[[], None]) -> None:
        """Send a transfer; may return before it has left. Calls `look` during waits, which may raise."""

    def check(self) -> None:
        """Raise PeerLostError if the transport has ended."""

    def settle(self, look: Callable[[], None]) -> None:
        """Wait until nothing of the last transfer is under way any more."""

    def packets(self) -> Packets: ...

    def close(self) -> None: ...


class TcpTransport:
    """Transfers over one TCP connection: `values`' bytes, again and again."""

    def __init__(self, number: int, link: TcpSender, values: Values) -> None:
        self.number, self._link = number, link
        self._data = memoryview(values.view(np.uint8).data)
        self.detail = f"{link.congestion}, one connection"

    def send(self, transfer: int, look: Callable[[], None]) -> None:  # noqa: ARG002
        self._link.send(self._data, look)

    def check(self) -> None:
        """Do nothing: the server reports the connection's end."""

    def settle(self, look: Callable[[], None]) -> None:
        """Do nothing: the server has all of it."""

    def packets(self) -> Packets:
        sent, again = self._link.segments()
        return Packets(sent, again, again)

    def close(self) -> None:
        self._link.close()


class LinkTester:
    """A connection to the server at `address`. Raises UserError if nobody answers there within the test's
    timeout, or it is no such server, has another key, or speaks another version.

    Once `stop` is set, a wait raises KeyboardInterrupt. Raised by the signal itself, it could come inside a
    callback of zmq, which drops it.
    """

    def __init__(
        self, address: str, keys: Keys | None, test: LinkTestOptions, stop: threading.Event | None = None
    ) -> None:
        self.test, self.clocks = test, Clocks()
        self._stop = stop or threading.Event()
        place = host_and_port(address)
        if place is None:
            raise UserError(f"{address!r} is no address; write HOST:PORT")
        self.host = place[0]
        elements = -(-test.size // 4)
        self.values: Values = np.random.default_rng(test.seed).standard_normal(elements, dtype=np.float32)
        self._numbers = itertools.count(1)
        self._taken: dict[tuple[int, int], Taken] = {}
        self._lost: dict[int, str] = {}  # flow: why
        self._heard = math.inf  # time of the server's last message; inf: none yet
        self._client = Client(address, keys, limit=FRAME, name=NAME)
        try:
            self._greet()
        except BaseException:
            self._client.abandon()
            raise
        self._losses = self._client.losses

    def __enter__(self) -> LinkTester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self._client.send(encode(Goodbye(incarnation=0)))
        self._client.close()

    # -- the channel

    def _greet(self) -> None:
        self._losses = 0
        self._client.send(encode(Hello(version=VERSION, run="", role=LINK_ROLE, pid=os.getpid())))
        answer = self._await(Welcome, self.test.timeout)
        if answer is None:
            trouble = f": {self._client.trouble}" if self._client.trouble else ""
            raise UserError(
                f"no {NAME} answered at {self._client.address} within {self.test.timeout:g} s{trouble}; is "
                "`atoll link serve` running there, and its port open?"
            )

    def _ask(self, message: AnyMessage, expected: type[Answer], what: str) -> Answer:
        """Return the answer to a request. Raises PeerLostError if none comes."""
        self._client.send(encode(message))
        answer = self._await(expected, self.test.timeout, getattr(message, "number", 0))
        if answer is None:
            raise PeerLostError(
                f"waited {self.test.timeout:g} s for {NAME} at {self._client.address} on {what} (deadline "
                f"--timeout)"
            )
        return answer

    def _await(self, expected: type[Answer], seconds: float, number: int = 0) -> Answer | None:
        """Return the next answer of this kind and number; None if none comes in time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            message = self._next(min(left, _LOOK_SECONDS))
            if isinstance(message, expected) and getattr(message, "number", number) == number:
                return message
        return None

    def look(self) -> None:
        """Take the server's messages. Raises PeerLostError if it is gone."""
        while self._next(0.0) is not None:
            pass

    def _next(self, seconds: float) -> AnyMessage | None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        received = self._client.receive(seconds)
        if received is None:
            self._client.check()
            if self._client.losses != self._losses:
                raise PeerLostError(f"{NAME} at {self._client.address} is gone: the connection was lost")
            self._check_silence()
            return None
        self._heard = time.monotonic()
        try:
            message = decode_untrusted(received[0])
        except WireError as error:
            raise RunError(f"{NAME} at {self._client.address} sent {error}") from None
        if isinstance(message, Refused):
            raise RefusedError(f"{NAME} at {self._client.address} refused: {message.reason}")
        if isinstance(message, Taken):
            self._taken[message.flow, message.transfer] = message
        elif isinstance(message, FlowLost):
            self._lost[message.flow] = message.reason
        return message

    def _check_silence(self) -> None:
        """Raise PeerLostError if the server is silent: a dead link ends no connection."""
        bound = max(self.test.timeout, _LEAST_SILENCE)
        if time.monotonic() > self._heard + bound:
            raise PeerLostError(
                f"{NAME} at {self._client.address} is silent: nothing came for {bound:g} s (--timeout), "
                "though it speaks each second"
            )

    def read_clock(self) -> None:
        """Compare the clocks, by a few readings."""
        for _ in range(_READINGS):
            number = next(self._numbers)
            sent = time.monotonic()
            read = self._ask(ReadClock(number=number), ClockRead, "its clock")
            self.clocks.add(sent, read.at, time.monotonic())

    # -- transports

    def open(self, transport: str) -> Sender:
        """Open a transport. Raises UserError if it cannot be had, on this side or there."""
        family, _, variant = transport.partition(":")
        if family == "tcp":
            return self._open_tcp(variant)
        return self._open_ltp(reliable=variant == "reliable")

    def _open_tcp(self, congestion: str) -> Sender:
        number, size = next(self._numbers), self.values.nbytes
        opened = self._ask(OpenTcp(number=number, size=size), TcpOpened, "a TCP connection")
        link = TcpSender((self.host, opened.port), opened.token, congestion, self.test.timeout)
        return TcpTransport(opened.flow, link, self.values)

    def _open_ltp(self, reliable: bool) -> Sender:
        # Not imported for TCP alone: it needs a package more.
        from atoll.net.ltpflows import LtpTransport

        settings, number = LtpSettings(), next(self._numbers)
        wish = OpenLtp(
            number=number,
            version=LTP_VERSION,
            elements=len(self.values),
            datagram_bytes=settings.datagram_bytes,
        )
        opened = self._ask(wish, LtpOpened, "a session")
        return LtpTransport(
            self.host,
            opened,
            self.values,
            high=self.test.high,
            reliable=reliable,
            seed=self.test.seed,
            settings=settings,
            seconds=self.test.timeout,
            look=self.look,
        )

    # -- the measuring

    def measure(self, progress: Callable[[str], None] = lambda _line: None) -> LinkReport:
        """Let the transports take turns. Raises PeerLostError if the server is gone before anything was
        measured; if it goes later, the report has it in `lost`."""
        self.read_clock()
        lost = ""
        senders: dict[str, Sender] = {}
        outcomes = {name: TransportResult(name, "", self.values.nbytes) for name in self.test.transports}
        try:
            for name, outcome in outcomes.items():
                try:
                    senders[name] = self.open(name)
                    outcome.detail = senders[name].detail
                except PeerLostError as error:  # the channel may still work, and the rest is worth measuring
                    self.read_clock()  # raises if the channel is lost too
                    outcome.stopped = str(error)
            self._take_turns(
                [_Turns(self, sender, outcomes[name]) for name, sender in senders.items()], progress
            )
        except PeerLostError as error:
            if not any(outcome.turns for outcome in outcomes.values()):
                raise
            lost = str(error)
        finally:
            for name, sender in senders.items():
                outcomes[name].detail = sender.detail
                sender.close()
        report = LinkReport(
            self._client.address,
            self.values.nbytes,
            self.test.high,
            self.clocks.round_trip,
            list(outcomes.values()),
            lost=lost,
        )
        note = window_note(most_in_flight(), self.clocks.round_trip, report.outcomes)
        report.notes += [note] if note else []
        return report

    def _take_turns(self, turns: list[_Turns], progress: Callable[[str], None]) -> None:
        """Take turns, in an order drawn anew for each round. A far slower transport makes the rest of its
        transfers after the others, whose connections would cool down meanwhile."""
        test, order = self.test, np.random.default_rng(self.test.seed)
        while quick := [each for each in turns if each.left and not each.slow]:
            for place in order.permutation(len(quick)):
                quick[place].take()
            made = min(len(each.outcome.turns) for each in quick)
            progress(f"{made} of {test.count} transfers of each")
        for each in turns:
            while each.left:
                each.take()
                made = len(each.outcome.turns)
                progress(f"{made} of {test.count} transfers of {each.outcome.transport}")

    def wait_taken(self, sender: Sender, transfer: int, until: float) -> Taken | None:
        """Return the server's report on a transfer; None if it does not come before `until` (monotonic)."""
        while time.monotonic() < until:
            if taken := self._taken.pop((sender.number, transfer), None):
                return taken
            self.check_flow(sender)
            sender.check()
            self._next(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
        return None

    def check_flow(self, sender: Sender) -> None:
        """Raise PeerLostError if the server takes no more of this flow."""
        if sender.number in self._lost:
            raise PeerLostError(
                f"{NAME} at {self._client.address} takes no more transfers: {self._lost[sender.number]}"
            )


class _LateError(Exception):
    """A transfer's deadline has passed."""


class _Turns:
    """One transport's turns."""

    def __init__(self, tester: LinkTester, sender: Sender, outcome: TransportResult) -> None:
        self._tester, self._sender, self.outcome = tester, sender, outcome
        self.slow = False  # the last one took very long
        self._made = 0
        self._spent = 0.0
        self._before = sender.packets()

    @property
    def left(self) -> bool:
        """True if the transport is to make more transfers."""
        return not self.outcome.stopped and len(self.outcome.turns) < self._tester.test.count

    def take(self) -> None:
        """Make a transfer. The first ones only warm up, and do not count, unless the budget is spent."""
        outcome, test = self.outcome, self._tester.test
        if self._made <= test.warm:
            self._before = self._sender.packets()
        try:
            made = self._transfer()
        except _LateError as error:
            outcome.stopped = f"{error} within {test.deadline:g} s (--deadline); no more were made"
            return
        except PeerLostError as error:
            self._tester.read_clock()  # raises if the server is gone
            outcome.stopped = f"{error}; no more transfers were made"
            return
        self._spent += made.seconds
        self.slow = made.seconds > _SLOW_SECONDS
        if self._made <= test.warm and self._spent <= test.budget:
            return
        outcome.turns.append(made)
        outcome.packets = self._sender.packets().since(self._before)
        if self._spent > test.budget and self.left:
            outcome.stopped = (
                f"{len(outcome.turns)} of {test.count} transfers: they took more than {test.budget:g} s "
                "(--budget)"
            )

    def _transfer(self) -> Turn:
        tester, sender = self._tester, self._sender
        tester.read_clock()
        transfer, self._made = self._made, self._made + 1
        start = time.monotonic()
        until = start + tester.test.deadline
        sender.send(transfer, partial(self._look, until, "usable"))
        taken = tester.wait_taken(sender, transfer, until)
        if taken is None:
            raise _LateError("a transfer was not usable")
        sender.settle(partial(self._look, until, "over"))
        return Turn(
            seconds=taken.at - tester.clocks.ahead - start,
            there=taken.size,
            how=taken.how,
            highs=taken.highs,
            highs_there=taken.highs_there,
            lows=taken.lows,
            lows_there=taken.lows_there,
            fill=taken.fill,
            repaired=taken.repaired,
        )

    def _look(self, until: float, what: str) -> None:
        """Take the server's messages; raise if the transfer's deadline has passed."""
        self._tester.look()
        self._tester.check_flow(self._sender)
        if time.monotonic() > until:
            raise _LateError(f"a transfer was not {what}")
