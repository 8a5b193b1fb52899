"""Transfers as datagrams, to measure a link with: sessions that take several clients' transfers, and the
sending end."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from atoll.core.errors import AtollError, PeerLostError, RunError, UserError
from atoll.ltp.events import Arrived, Delivered, Lost, Opened, Refused, StripeChanged
from atoll.ltp.order import Extent
from atoll.ltp.settings import LtpSettings
from atoll.net.linkreport import Packets
from atoll.net.linksession import LinkSession
from atoll.net.ltplink import LtpLink
from atoll.net.tcpflows import FlowListener
from atoll.wire.datagrams import payload_bytes
from atoll.wire.linktest import SECRET_BYTES
from atoll.wire.messages import FlowLost, LtpOpened, Taken

CHUNK = 0  # of all transfers
ELEMENT_BYTES = 8  # memory of a session for each element: two transfers may be there at a time
_LOOK_SECONDS = 0.05
_JOIN_SECONDS = 10.0

Values = npt.NDArray[np.float32]


class LtpFlows:
    """Takes transfers at `stripes` UDP ports of `host` from `port` on (0: any free ones), each session's on a
    thread of its own, and reports each through `told`, from there, until `close`.

    Raises UserError if it cannot listen.
    """

    def __init__(
        self, host: str, port: int, told: FlowListener, *, stripes: int = 1, sealed: bool = True
    ) -> None:
        self._told, self._sealed = told, sealed
        numbers = [port + stripe if port else 0 for stripe in range(stripes)]
        if numbers[-1] >= 2**16:
            raise UserError(f"UDP ports {port} to {numbers[-1]}, one for each stripe: 65535 is the last")
        everywhere = host in ("0.0.0.0", "::")
        self._link = LtpLink("" if everywhere else host, numbers, name="link server")
        self.ports = [number for _, number in self._link.addresses]
        self.offload = self._link.offload
        self._open: dict[int, tuple[threading.Event, threading.Thread]] = {}  # by flow
        self._ending: list[threading.Thread] = []  # of flows that were dropped

    def open(self, number: int, elements: int, datagram_bytes: int) -> tuple[int, bytes, bool]:
        """Wait for a session; return its id, its secret, and whether its datagrams are sealed. Raises
        UserError for an impossible size of datagrams."""
        secret, settings = secrets.token_bytes(SECRET_BYTES), LtpSettings(datagram_bytes=datagram_bytes)
        session = self._link.open(
            secrets.randbits(32),
            secret,
            None,
            False,
            settings=settings,
            extents={CHUNK: Extent(elements, np.dtype(np.float32))},
            seal=self._sealed,
            most_bytes=ELEMENT_BYTES * elements + datagram_bytes,  # the last block may be short
        )
        over = threading.Event()
        thread = threading.Thread(
            target=self._take, args=(number, session, over), name=f"atoll link flow {number}", daemon=True
        )
        self._open[number] = over, thread
        thread.start()
        return session.number, secret, self._sealed

    def drop(self, number: int) -> None:
        """End a flow, and its session, soon."""
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        if number in self._open:
            over, thread = self._open.pop(number)
            over.set()
            self._ending.append(thread)

    def close(self) -> None:
        for number in list(self._open):
            self.drop(number)
        for thread in self._ending:
            thread.join(_JOIN_SECONDS)
        self._link.close()

    def _take(self, number: int, session: LinkSession, over: threading.Event) -> None:
        """Report transfers until the session ends, it has refused something, or the flow is dropped."""
        repaired, lost = 0, ""
        with contextlib.suppress(RunError):  # the session is over
            while not over.is_set() and not lost:
                for event in session.events(_LOOK_SECONDS):
                    if isinstance(event, Arrived):
                        at = time.monotonic()
                        before, repaired = repaired, session.status().session.repaired
                        self._told(_taken(number, event, at, repaired - before))
                    elif isinstance(event, Refused):
                        lost = lost or f"it refused a transfer: {event.reason}"
                    elif isinstance(event, Lost):
                        lost = lost or event.reason
        if lost:
            self._told(FlowLost(flow=number, reason=lost))
        with contextlib.suppress(AtollError):  # its last word is not worth more waiting
            session.close(lost or "its client has gone")


def _taken(number: int, arrived: Arrived, at: float, repaired: int) -> Taken:
    present, high = arrived.present, arrived.high
    missing = int(np.count_nonzero(~present)) * arrived.block  # the last block, which may be short, is high
    return Taken(
        flow=number,
        transfer=arrived.iteration,
        at=at,
        size=(len(arrived.values) - missing) * arrived.values.itemsize,
        how=arrived.how,
        highs=int(np.count_nonzero(high)),
        highs_there=int(np.count_nonzero(high & present)),
        lows=int(np.count_nonzero(~high)),
        lows_there=int(np.count_nonzero(~high & present)),
        fill=arrived.fill,
        repaired=repaired,
    )


class LtpTransport:
    """Transfers of `values` over one session. A share `high` of the blocks, drawn anew for each transfer, is
    of high priority; or all of them are, in full-reliability mode.

    Raises PeerLostError if no datagram comes back within `seconds`. `look` is called meanwhile, and may
    raise.
    """

    def __init__(
        self,
        host: str,
        opened: LtpOpened,
        values: Values,
        *,
        high: float,
        reliable: bool,
        seed: int,
        settings: LtpSettings,
        seconds: float,
        look: Callable[[], None],
    ) -> None:
        self.number = opened.flow
        self._values, self._high, self._reliable = values, high, reliable
        self._rng = np.random.default_rng(seed)
        self._blocks = -(-values.nbytes // payload_bytes(settings.datagram_bytes))
        self._next_high = self._mask()
        self._sending = 0  # transfers whose Delivered has not come
        self._opened = False
        self._ports, self._silent = opened.ports, set[int]()
        self._name = f"{host}, UDP port{'s' * (len(opened.ports) > 1)} {', '.join(map(str, opened.ports))}"
        self._link = LtpLink(ports=[0] * len(opened.ports), name="link test")
        try:
            addresses = [(host, port) for port in opened.ports]
            self._session = self._link.open(
                opened.session,
                opened.secret,
                addresses,
                True,
                settings=settings,
                extents={},  # nothing is to come
                seal=opened.sealed,
            )
            self._wait_opened(seconds, look)
        except BaseException:
            self._link.close()
            raise
        stripes = "one port" if len(opened.ports) == 1 else f"{len(opened.ports)} ports"
        how = "all reliable" if reliable else f"{high:.0%} high"
        sealed = "sealed" if opened.sealed else "NOT sealed"
        self._detail = f"{how}, {sealed}, {stripes}; {self._link.offload}"

    @property
    def detail(self) -> str:
        """The transport's setting, in words."""
        silent = f"; UDP port {', '.join(map(str, sorted(self._silent)))} silent" if self._silent else ""
        return self._detail + silent

    def send(self, transfer: int, look: Callable[[], None]) -> None:  # noqa: ARG002
        try:
            self._session.send(CHUNK, transfer, self._values, self._next_high, self._reliable)
        except RunError as error:  # its own word, where the session has failed here
            raise PeerLostError(str(error)) from error
        self._sending += 1

    def check(self) -> None:
        self._take_events(0.0)

    def settle(self, look: Callable[[], None]) -> None:
        """Wait for the server's report on missing blocks: then nothing is under way any more."""
        while self._sending:
            look()
            self._take_events(_LOOK_SECONDS)
        self._next_high = self._mask()  # before the next transfer's time begins: drawing takes a while

    def packets(self) -> Packets:
        status = self._session.status().session
        return Packets(status.sent, status.lost, status.retransmitted)

    def close(self) -> None:
        with contextlib.suppress(AtollError):
            self._session.close("the test is over")
        self._link.close()

    def _mask(self) -> npt.NDArray[np.bool_]:
        high = np.zeros(self._blocks, dtype=np.bool_)
        high[self._rng.permutation(self._blocks)[: round(self._high * self._blocks)]] = True
        return high

    def _wait_opened(self, seconds: float, look: Callable[[], None]) -> None:
        until = time.monotonic() + seconds
        while not self._opened:
            look()
            if time.monotonic() > until:
                trouble = f" ({self._link.trouble})" if self._link.trouble else ""
                raise PeerLostError(
                    f"no datagram came back from {self._name} within {seconds:g} s{trouble}; does a firewall "
                    "let UDP through, both ways?"
                )
            self._take_events(_LOOK_SECONDS)

    def _take_events(self, seconds: float) -> None:
        try:
            events = self._session.events(seconds)
        except RunError as error:  # its own word, where the session has failed here
            raise PeerLostError(str(error)) from error
        for event in events:
            if isinstance(event, Opened):
                self._opened = True
            elif isinstance(event, Delivered):
                self._sending -= 1
            elif isinstance(event, StripeChanged):
                port = self._ports[event.stripe]
                (self._silent.discard if event.used else self._silent.add)(port)
            elif isinstance(event, Lost):
                raise PeerLostError(f"{self._name}: {event.reason}")
