"""Clients and servers whose messages travel over the loss-tolerant transport: tunnels.

A tunnel lives within one ZeroMQ connection, which authenticates, gives the session's id and secret, and
reports the other end's death. All other messages go through the session, in order; messages sent before it is
open wait. When one of the two is lost, both are. A server has tunnels and plain clients side by side. Source:
docs/ltp.md, "The tunnel".
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from atoll.core.errors import AtollError, RunError, UserError
from atoll.core.events import LinkFigures
from atoll.ltp.arriving import MOST_BYTES
from atoll.ltp.events import Event
from atoll.ltp.settings import LtpSettings
from atoll.net import context as process
from atoll.net.endpoint import (
    CLIENT_OUTGOING,
    CLOSING_SECONDS,
    SERVER_OUTGOING,
    Buffer,
    Client,
    Endpoint,
    Offered,
    Received,
    Server,
    check_size,
    flat,
    host_and_port,
)
from atoll.net.keys import Keys
from atoll.net.linksession import LinkSession
from atoll.net.ltplink import LtpLink
from atoll.net.tunnelend import IDLE_SECONDS, Mailbox, TunnelEnd, block_elements, check_lossy
from atoll.net.tunnelorder import WINDOW_BYTES, Lossy, TunnelMessage
from atoll.wire.datagrams import LTP_VERSION
from atoll.wire.linktest import SECRET_BYTES
from atoll.wire.messages import (
    LinkLost,
    LinkOpened,
    OpenLink,
    Ping,
    Refused,
    WireError,
    decode_untrusted,
    encode,
)

__all__ = ["Lossy", "TunnelClient", "TunnelServer", "Wish", "block_elements"]

NO_UDP_SECONDS = 10.0  # without a datagram from the server, after which a client gives up
LOOK_SECONDS = 1.0  # between a server's checks that tunnels' clients are still there
CHECK_SECONDS = 0.25  # for which such a check is good, if something is to be sent
MOST_TUNNELS = 1024  # of a server
MOST_GONE = 4096  # peers with an ended tunnel, remembered while their connection may stand
_WISH = b"\xa1m\xa8OpenLink"  # the beginning of an OpenLink, after its count of fields


@dataclass(frozen=True)
class Wish:
    """A client's options for its tunnel: the client in words (`who`), its `site`, the settings of both
    ends of the session, and the number of UDP ports (`stripes`)."""

    who: str
    site: str = ""
    settings: LtpSettings = field(default_factory=lambda: LtpSettings(idle_seconds=IDLE_SECONDS))
    stripes: int = 1


class TunnelClient(Client):
    """A client whose messages go through a tunnel.

    Unlike a plain client it does not come back when its connection or its session is lost: `losses` says so,
    and the owner makes another client.
    """

    def __init__(
        self, address: str, keys: Keys | None, *, limit: int, name: str, wish: Wish | None = None
    ) -> None:
        self._mail: Mailbox[TunnelMessage] = Mailbox()
        self._tunnel = TunnelEnd(limit, self._mail.add, self._fail)
        self._wish = wish or Wish(who="a client")
        self._link: LtpLink | None = None
        self._udp_ports: list[int] = []  # where its datagrams go
        self._opening_at = 0.0  # when the wait for the server's first datagram began
        self._link_lost = ""  # why the tunnel is over
        try:
            super().__init__(address, keys, limit=limit, name=name)
        except BaseException:
            self._mail.close()
            raise
        self.wake = self._mail.fileno()
        settings = self._wish.settings
        opening = OpenLink(
            ltp=LTP_VERSION,
            who=self._wish.who,
            site=self._wish.site,
            stripes=self._wish.stripes,
            datagram_bytes=settings.datagram_bytes,
            fill=settings.fill,
            fill_above=settings.fill_above,
            usable=settings.usable,
            target_loss=settings.target_loss,
        )
        super().send(encode(opening))

    @property
    def link(self) -> LinkFigures | None:
        """The tunnel's figures; None before it is open."""
        return self._tunnel.figures(f"{self.name} at {self.address}", self._wish.site)

    @property
    def connected(self) -> bool:
        """True while the other side has let this client in, and datagrams come through."""
        return super().connected and self._tunnel.opened and not self._link_lost

    @property
    def losses(self) -> int:
        """1 once the connection or its session is lost."""
        if super().losses and not self._link_lost:
            self._lose("the connection was lost")
        return int(bool(self._link_lost))

    @property
    def trouble(self) -> str:
        """Why there is no tunnel, in words; empty if there is one."""
        why = self._link_lost or super().trouble
        if why or self._tunnel.opened:
            return why
        return f"no datagram came back from {self._place} yet" if self._udp_ports else "no tunnel is open yet"

    def check(self) -> None:
        """Raise UserError if the other side refuses the key, is no Atoll, or lets no UDP through."""
        super().check()
        waited = time.monotonic() - self._opening_at
        if self._link is None or self._tunnel.opened or self._link_lost or waited < NO_UDP_SECONDS:
            return
        trouble = f" ({self._link.trouble})" if self._link.trouble else ""
        raise UserError(
            f"{self.name} at {self.address}: no datagram came back from {self._place}, within "
            f'{NO_UDP_SECONDS:g} s{trouble}: let UDP through, both ways, or set link.transport = "tcp"'
        )

    def send(self, header: bytes, payload: Buffer | None = None, lossy: Lossy | None = None) -> None:
        """Send, never waiting; `lossy`: not all of the payload needs to arrive. The payload is not copied:
        it must stay unchanged until the other side has answered. Raises RunError if far too many messages
        wait, UserError for a payload that cannot be lossy so."""
        self._alive()
        message = _message(self, header, payload, self._limit)
        if lossy is not None and message.payload is not None:
            check_lossy(lossy, message.payload, self._wish.settings)
            message = replace(message, lossy=lossy)
        if self._tunnel.waiting >= CLIENT_OUTGOING:
            self.check()
            why = self.trouble or "it does not read them"
            raise RunError(f"{CLIENT_OUTGOING} messages wait for {self.name} at {self.address}: {why}")
        self._tunnel.say(message)

    def receive(self, timeout: float) -> tuple[bytes, memoryview | None] | None:
        """Return the next header and payload, waiting for up to `timeout` seconds; None if there are none."""
        self._alive()
        until = time.monotonic() + timeout
        while True:
            message = self._mail.take()
            if message is not None:
                self._tunnel.taken(message)
                return message.header, message.payload
            got = super().receive(0.0)
            if got is not None and self._is_for_application(got[0]):
                return got
            if got is None and (not timeout or not self._wait(until)):
                return None

    def close(self) -> None:
        """Close; unsent messages get up to a second."""
        if not self._closed:
            if self._generation == process.generation():
                self._tunnel.wait_sent(CLOSING_SECONDS)
            self._end(CLOSING_SECONDS)

    def _end(self, linger: float) -> None:
        if self._generation == process.generation():
            self._lose("closed by the application")
        self._mail.close()
        super()._end(linger)

    def _is_for_application(self, header: bytes) -> bool:
        """Handle a message of the ZeroMQ connection; return True for a refusal, which is the
        application's."""
        try:
            message = decode_untrusted(header)
        except WireError:
            message = None
        if isinstance(message, LinkOpened) and self._link is None and not self._link_lost:
            self._open_link(message)
        elif isinstance(message, LinkLost):
            self._lose(message.reason)
        elif isinstance(message, Refused):
            return True
        elif not isinstance(message, Ping):
            self.dropped += 1
        return False

    def _open_link(self, opened: LinkOpened) -> None:
        self._udp_ports = opened.ports
        link = self._link = LtpLink(ports=[0] * len(opened.ports), name=f"tunnel to {self.name}")
        self._opening_at = time.monotonic()
        try:
            self._tunnel.begin(
                lambda told: link.open(
                    opened.session,
                    opened.secret,
                    [(self._host, port) for port in opened.ports],
                    True,
                    settings=self._wish.settings,
                    most_bytes=_most_bytes(self._limit),
                    told=told,
                )
            )
        except BaseException:
            self._lose("it could not be opened")
            raise

    @property
    def _host(self) -> str:
        """The host to which its datagrams go."""
        place = host_and_port(self.address)
        return place[0].replace("localhost", "127.0.0.1") if place is not None else "127.0.0.1"

    @property
    def _place(self) -> str:
        many = "s" * (len(self._udp_ports) > 1)
        return f"{self._host}, UDP port{many} {', '.join(map(str, self._udp_ports))}"

    def _fail(self, reason: str) -> None:
        """Note the end of the session; called from the link's thread."""
        self._link_lost = self._link_lost or reason
        self._mail.add([None])

    def _lose(self, reason: str) -> None:
        self._link_lost = self._link_lost or reason
        self._tunnel.close(reason)
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(AtollError):  # its last word is not worth more waiting
                link.close()


@dataclass
class _Tunnel:
    """A server's tunnel with `peer`."""

    peer: bytes
    who: str
    site: str
    end: TunnelEnd
    checked_at: float  # when the connection last stood, monotonic
    reason: str = ""  # why it is over


class TunnelServer(Server):
    """A server that also takes tunnels: a message through one looks as if it had come over the connection,
    but for the lost blocks of a lossy payload.

    `link_rate`, bytes per second: arriving traffic of tunnels is shared out, equally among sites and then
    among the sessions of each, so that all senders together stay below it. `udp_port` is the first of the
    ports for datagrams (0: any free ones); they are opened for the first client that asks, as many as it
    wishes, and later clients get no more. Raises UserError too if that port is in use.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        *,
        limit: int,
        name: str,
        link_rate: float | None = None,
        udp_port: int = 0,
    ) -> None:
        self._link_rate, self._udp_port = link_rate, udp_port
        self._link: LtpLink | None = None
        self._mail: Mailbox[tuple[_Tunnel, TunnelMessage]] = Mailbox()
        try:
            super().__init__(address, keys, limit=limit, name=name)
        except BaseException:
            self._mail.close()
            raise
        self.wake = self._mail.fileno()
        if udp_port:
            try:
                self._make_link(1).close()  # report a port in use at the start
            except BaseException:
                self._end(0)
                raise
        self._tunnels: dict[bytes, _Tunnel] = {}
        self._gone: dict[bytes, None] = {}  # peers whose tunnel is over
        self._looked_at = 0.0
        self._mail_first = True

    def links(self) -> list[LinkFigures]:
        """Return the tunnels' figures."""
        figures = (tunnel.end.figures(tunnel.who, tunnel.site) for tunnel in self._tunnels.values())
        return [each for each in figures if each is not None]

    def receive(self, timeout: float) -> Received | None:
        """Return the next message, waiting for up to `timeout` seconds; None if there is none."""
        self._alive()
        until = time.monotonic() + timeout
        while True:
            self._look_after(time.monotonic())
            self._mail_first = not self._mail_first  # so that neither way starves the other
            received = self._from_mail() if self._mail_first else self._from_socket()
            received = received or (self._from_socket() if self._mail_first else self._from_mail())
            if received is not None or not timeout or not self._wait(until):
                return received

    def _from_mail(self) -> Received | None:
        got = self._mail.take()
        if got is None:
            return None
        tunnel, message = got
        tunnel.end.taken(message)
        return Received(tunnel.peer, message.header, message.payload, message.lost)

    def _from_socket(self) -> Received | None:
        while (received := super().receive(0.0)) is not None:
            if not received.header.startswith(_WISH, 1):
                return received
            try:
                wish = decode_untrusted(received.header)
            except WireError as error:
                self._refuse(received.peer, str(error))
                continue
            assert isinstance(wish, OpenLink)
            self._open_tunnel(received.peer, wish)
        return None

    def offer(
        self, peer: bytes, header: bytes, payload: Buffer | None = None, *, copy: bool = True
    ) -> Offered:
        """Send, never waiting, and return "sent", "full" (try again later) or "gone" (the connection is
        lost)."""
        tunnel = self._tunnels.get(peer)
        if tunnel is None:
            return "gone" if peer in self._gone else super().offer(peer, header, payload, copy=copy)
        self._alive()
        message = _message(self, header, payload, self._limit)
        if copy and message.payload is not None:
            message = replace(message, payload=memoryview(bytes(message.payload)))
        if not self._stands(tunnel, time.monotonic(), CHECK_SECONDS):
            return "gone"
        if tunnel.end.waiting >= SERVER_OUTGOING:
            return "full"
        tunnel.end.say(message)
        return "sent"

    # -- tunnels ---------------------------------------------------------------------------------------------

    def _open_tunnel(self, peer: bytes, wish: OpenLink) -> None:
        self._close_tunnel(peer, "its client opens another one")
        try:
            if wish.ltp != LTP_VERSION:
                raise UserError(
                    f"it speaks version {LTP_VERSION} of the loss-tolerant transport, and this side version "
                    f"{wish.ltp}: install the same Atoll on both"
                )
            if len(self._tunnels) >= MOST_TUNNELS:
                raise UserError(f"it has {MOST_TUNNELS} tunnels, which is the most")
            settings = LtpSettings(
                datagram_bytes=wish.datagram_bytes,
                fill=wish.fill,  # type: ignore[arg-type]  # which it checks
                fill_above=wish.fill_above,
                usable=wish.usable,
                target_loss=wish.target_loss,
                idle_seconds=IDLE_SECONDS,
            )
            if self._link is None:
                self._link = self._make_link(wish.stripes)
            opened = self._open_session(self._link, peer, wish, settings)
        except UserError as error:
            self._refuse(peer, str(error))
            return
        super().offer(peer, encode(opened))

    def _make_link(self, stripes: int) -> LtpLink:
        place = host_and_port(self.address)
        host = place[0] if place is not None else "127.0.0.1"
        last = self._udp_port + stripes - 1
        if last >= 2**16:
            raise UserError(f"UDP ports {self._udp_port} to {last}, one for each stripe: 65535 is the last")
        ports = [self._udp_port + each if self._udp_port else 0 for each in range(stripes)]
        everywhere = host in ("0.0.0.0", "::")
        try:
            return LtpLink("" if everywhere else host, ports, name=self.name, link_rate=self._link_rate)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def _open_session(self, link: LtpLink, peer: bytes, wish: OpenLink, settings: LtpSettings) -> LinkOpened:
        ports = [port for _, port in link.addresses][: wish.stripes]
        secret, session = secrets.token_bytes(SECRET_BYTES), secrets.randbits(32)

        def open_session(told: Callable[[list[Event]], None]) -> LinkSession:
            return link.open(
                session,
                secret,
                None,
                False,
                settings=settings,
                stripes=len(ports),
                most_bytes=_most_bytes(self._limit),
                told=told,
                site=wish.site,
            )

        tunnel = _Tunnel(
            peer,
            wish.who,
            wish.site,
            TunnelEnd(self._limit, lambda came: self._mail.add([(tunnel, each) for each in came])),
            time.monotonic(),
        )
        tunnel.end.begin(open_session)
        self._gone.pop(peer, None)
        self._tunnels[peer] = tunnel
        return LinkOpened(session=session, secret=secret, ports=ports)

    def _stands(self, tunnel: _Tunnel, now: float, good_for: float) -> bool:
        """True if the tunnel's connection and session stand; else the tunnel is closed."""
        if tunnel.end.lost:
            super().offer(tunnel.peer, encode(LinkLost(reason=tunnel.end.lost[:4000])))
            self._close_tunnel(tunnel.peer, tunnel.end.lost)
            return False
        if now < tunnel.checked_at + good_for:
            return True
        tunnel.checked_at = now
        if super().offer(tunnel.peer, encode(Ping())) != "gone":
            return True
        self._close_tunnel(tunnel.peer, "its connection was lost")
        return False

    def _look_after(self, now: float) -> None:
        if now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        for tunnel in list(self._tunnels.values()):
            self._stands(tunnel, now, 0.0)
        for peer in list(self._gone):
            if super().offer(peer, encode(Ping())) == "gone":
                del self._gone[peer]

    def _close_tunnel(self, peer: bytes, reason: str) -> None:
        tunnel = self._tunnels.pop(peer, None)
        if tunnel is not None:
            tunnel.end.close(reason)
            self._gone[peer] = None
            while len(self._gone) > MOST_GONE:
                del self._gone[next(iter(self._gone))]

    def _refuse(self, peer: bytes, reason: str) -> None:
        super().offer(peer, encode(Refused(reason=reason[:4000], request=OpenLink.__name__)))

    def _end(self, linger: float) -> None:
        if self._generation == process.generation() and not self._closed:
            if self._link is not None:
                with contextlib.suppress(AtollError):
                    self._link.close()
            self._mail.close()
        super()._end(linger)


def _message(endpoint: Endpoint, header: bytes, payload: Buffer | None, limit: int) -> TunnelMessage:
    check_size(endpoint, header, payload, limit)
    return TunnelMessage(header, memoryview(flat(payload)) if payload is not None else None)


def _most_bytes(limit: int) -> int:
    """Return the bytes that arriving transfers may take: a window and a message, and their parity."""
    return min(2 * (limit + WINDOW_BYTES), MOST_BYTES)
