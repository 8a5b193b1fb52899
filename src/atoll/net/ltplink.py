"""Sessions of the loss-tolerant transport over UDP: one thread receives, opens, hands on, seals and sends.

A link has a port for each stripe, and any number of sessions, told apart by the id in their datagrams. The
thread sleeps until something comes, an application has something to send, or a session's deadline has come.
Source: docs/ltp.md, "Bursts, stripes, and a link's thread".
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import select
import socket as sockets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from atoll.core.errors import DeadlineError, RunError, UserError
from atoll.ltp.arriving import MOST_BYTES
from atoll.ltp.events import Event
from atoll.ltp.grants import Grants
from atoll.ltp.order import Extent
from atoll.ltp.session import LtpSession
from atoll.ltp.settings import LtpSettings
from atoll.net import context as process
from atoll.net.linksession import CLOSE_SECONDS, LinkSession
from atoll.net.packetfilter import MOST_STEPS, only_sessions
from atoll.net.udp import BUFFER_BYTES, Address, Received, UdpPort, resolve, shown_address
from atoll.wire.datagrams import HEADER, LTP_VERSION, MOST_STRIPES, SESSION_AT, headers_untrusted

LONGEST_SLEEP = 1.0  # seconds
POLL_GRAIN = 0.001  # the resolution of `poll` in seconds; shorter sleeps use time.sleep
NO_ROOM_SECONDS = 0.005  # until a port that had no room is tried again, though poll does not say that it has
FLOOD_SECONDS, FLOOD_RATE = 0.1, 500.0  # how often strangers' datagrams are counted; a flood, each second
FORGED_SECONDS = 10.0  # after the last forged datagram of a session, its other end may send from anywhere


class LtpLink:
    """UDP ports at `host` (empty: all addresses of this machine), one for each stripe, and their thread.

    `ports` are their numbers (0: any free one); `.addresses` are the bound ones. `name` is in every error,
    and in the thread's name. `link_rate`, bytes per second: arriving traffic is shared out by grants, so that
    all senders together stay below it. Raises UserError for an address that is in use or not this machine's.
    """

    def __init__(
        self,
        host: str = "",
        ports: Sequence[int] = (0,),
        *,
        name: str = "link",
        buffer_bytes: int = BUFFER_BYTES,
        offload: bool = True,
        link_rate: float | None = None,
    ) -> None:
        if not 1 <= len(ports) <= MOST_STRIPES:
            raise UserError(f"{name}: {len(ports)} ports; a link has between 1 and {MOST_STRIPES}")
        self.name = name
        self._grants = Grants(link_rate) if link_rate is not None else None
        self.drops: Counter[str] = Counter()  # datagrams for none of the sessions, by reason
        self._generation = process.generation()
        self._lock = threading.Lock()  # guards the sessions and the end
        self._sessions: dict[int, LinkSession] = {}
        self._secrets: set[tuple[bytes, bool]] = set()  # hashes of used secrets, and the end that used each
        self._closed = False
        self._over = False  # the thread is to end
        self._failure = ""
        where = host or ("::" if sockets.has_dualstack_ipv6() else "0.0.0.0")
        self._ports: list[UdpPort] = []
        self._pipe: tuple[int, ...] = ()
        try:
            for number in ports:
                self._ports.append(UdpPort((where, number), buffer_bytes, offload=offload))
            self._pipe = self._woken, self._waker = os.pipe()
        except BaseException:
            self._close_handles()
            raise
        for end in self._pipe:
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        for port in self._ports:
            self._poll.register(port, select.POLLIN)
        self._counted_at, self._strange, self._forged = 0.0, 0, 0  # datagrams of no use, as counted when
        self._is_flooded, self._forged_until = False, -math.inf
        # While strangers flood the ports: the sessions that are let in, and from where (empty: anywhere).
        self._filtered: dict[int, tuple[Address, ...]] | None = None
        self._blocked: set[UdpPort] = set()  # ports that had no room
        self._watched: set[UdpPort] = set()  # blocked ports that poll watches for room
        self._thread = threading.Thread(target=self._serve, name=f"atoll link {name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> LtpLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each stripe."""
        return [(str(port.address[0]), int(port.address[1])) for port in self._ports]

    @property
    def offload(self) -> str:
        """The datagrams' way through the system, in words."""
        offload = self._ports[0].offload
        if offload.sends and offload.receives:
            return "many datagrams in a call (UDP_SEGMENT, UDP_GRO)"
        ways = [
            f"{'many datagrams' if how else 'one datagram'} in a call to {what}"
            for how, what in ((offload.sends, "send"), (offload.receives, "receive"))
        ]
        return f"{', '.join(ways)} ({offload.reason})"

    @property
    def trouble(self) -> str:
        """The last thing that kept datagrams from leaving; empty: nothing did."""
        return next((port.trouble for port in self._ports if port.trouble), "")

    def counts(self) -> dict[str, int]:
        """Return the ports' counts, summed over the stripes (atoll.net.udp.Counters)."""
        total: Counter[str] = Counter()
        for port in self._ports:
            total.update(vars(port.count))
        return dict(total)

    def open(
        self,
        session: int,
        secret: bytes,
        addresses: Sequence[tuple[str, int]] | None,
        client: bool,
        *,
        settings: LtpSettings | None = None,
        extents: Mapping[int, Extent] | None = None,
        stripes: int | None = None,
        seal: bool = True,
        most_bytes: int = MOST_BYTES,
        told: Callable[[list[Event]], None] | None = None,
        site: str = "",
    ) -> LinkSession:
        """Open a session whose id and secret (32 bytes) the authenticated channel gave both ends; the channel
        also gave the client the server's `addresses`, one for each stripe. A server gives None: it learns its
        client's addresses.

        `stripes`: the number of ports that the session uses (all). `most_bytes`: bytes that all open incoming
        transfers may take together. `extents`: of the chunks that may come, by id (None: any may). With
        `seal` False nothing is secret or safe: both ends must agree on it. `told` gets events as they happen,
        instead of `LinkSession.events`, from the link's thread: it must not wait, and an error in it ends the
        session. `site`: the sessions of one site have one share of a link that is shared out. Raises
        UserError for arguments that do not fit or a secret that was used, RunError when the link is closed.
        """
        self._check()  # before any lock, for it may be that of a fork
        count = len(self._ports) if stripes is None else stripes
        if not 1 <= count <= len(self._ports):
            raise UserError(f"{self.name}: {count} stripes, on a link with {len(self._ports)} ports")
        paths: list[Address] = []
        if client:
            if addresses is None or len(addresses) != count:
                raise UserError(f"{self.name}: a client gives {count} addresses, one for each stripe")
            paths = [self._reachable(*address) for address in addresses]
        shown = f"{self.name}, session {session}" + (f" with {shown_address(paths[0])}" if client else "")
        made = LinkSession(
            LtpSession(
                settings or LtpSettings(),
                session=session,
                client=client,
                stripes=count,
                extents=extents,
                rng=np.random.default_rng(),
                now=time.monotonic(),
                paths=paths,
                most_bytes=most_bytes,
            ),
            session,
            secret,
            self._ports[:count],
            self._wake,
            client=client,
            seal=seal,
            name=shown,
            shared=self._grants is not None,
            told=told,
            site=site,
        )
        with self._lock:
            self._check()
            if session in self._sessions:
                raise UserError(f"{self.name}: session {session} is open already")
            if seal:
                used = hashlib.sha256(secret).digest(), client
                if used in self._secrets:  # the numbers, and so the nonces, would begin again under its keys
                    raise UserError(
                        f"{self.name}: session {session} has the secret of an earlier one; each has a new one"
                    )
                self._secrets.add(used)
            self._sessions[session] = made
        self._wake()
        return made

    def close(self) -> None:
        """End all sessions and the thread, and close the ports. Closing twice does no harm."""
        if self._generation != process.generation():
            self._lock = threading.Lock()  # a thread of the parent may hold the old one
        with self._lock:
            closed, self._closed = self._closed, True
            sessions = list(self._sessions.values())
        if closed:
            return
        if self._generation == process.generation():
            for session in sessions:
                with contextlib.suppress(DeadlineError):  # its last word is not worth more waiting
                    session.close("its link is closed")
            self._over = True
            self._wake()
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise DeadlineError(f"waited {CLOSE_SECONDS:g} s for {self.name}'s thread to end")
        self._close_handles()

    def _check(self) -> None:
        if self._generation != process.generation():
            raise RunError(f"{self.name}: a forked process cannot use its parent's link")
        if self._failure:
            raise RunError(self._failure)
        if self._closed:
            raise RunError(f"{self.name} is closed")

    def _reachable(self, host: str, port: int) -> Address:
        """Return the address in the form that this link's ports use, in sending and in receiving."""
        family, address = resolve(host, port)
        own = self._ports[0].family
        if family == own:
            return address
        if own == sockets.AF_INET6:  # takes both families; IPv4 has IPv6's form
            return (f"::ffff:{address[0]}", address[1], 0, 0)
        raise UserError(f"{self.name} has an IPv4 address, and {shown_address(address)} is of IPv6")

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it is full: the thread wakes up anyway
            if self._pipe:  # once closed, its number may be another file's
                os.write(self._waker, b"x")

    def _close_handles(self) -> None:
        for port in self._ports:
            port.close()
        with self._lock:
            pipe, self._pipe = self._pipe, ()
        for end in pipe:
            os.close(end)

    # -- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._over:
                self._turn()
        except Exception as error:
            with self._lock:
                self._failure = f"{self.name} has failed: {type(error).__name__}: {error}"
                sessions = list(self._sessions.values())
            for session in sessions:
                session.fail(self._failure, error)

    def _turn(self) -> None:
        """Wait until something is to be done, and do all of it."""
        with self._lock:
            sessions = list(self._sessions.values())
        due = min((session.deadline for session in sessions), default=math.inf)
        writable = self._sleep(min(due, self._grants.poll_deadline()) if self._grants is not None else due)
        sent = {port: port.count.sent for port in writable}
        for port in self._ports:
            behind = not port.drained
            for received in port.receive():
                # The lateness of a thread is no part of a round trip. But if more waits than a turn takes,
                # this end is the bottleneck, and the other is to see its queue.
                self._hand_out(received, time.monotonic() if behind or not port.drained else received.arrived)
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            self._drive(session)
        self._see_to_strangers(sessions)
        if self._grants is not None:
            self._share_out(self._grants, sessions)
        self._blocked = {session.blocked for session in sessions if session.blocked is not None}
        # Where a device's queue is full, a port is ready to write and takes nothing: poll would not wait.
        watched = {port for port in self._blocked if sent.get(port) != port.count.sent}
        for port in watched ^ self._watched:
            self._poll.modify(port, select.POLLIN | (select.POLLOUT if port in watched else 0))
        self._watched = watched

    def _see_to_strangers(self, sessions: Sequence[LinkSession]) -> None:
        """Have the kernel drop useless datagrams if there are many: read here, each costs a hundred times as
        much, and takes the room of a useful one."""
        now = time.monotonic()
        if now > self._counted_at + FLOOD_SECONDS:
            most = FLOOD_RATE * (now - self._counted_at)
            strange, forged = sum(self.drops.values()), sum(session.forged for session in sessions)
            new_forged = forged - self._forged
            # While most forged ones are dropped, those that are let through show that there are more.
            if new_forged > (0 if now < self._forged_until else most):
                self._forged_until = now + FORGED_SECONDS
            self._is_flooded |= strange - self._strange + new_forged > most
            self._counted_at, self._strange, self._forged = now, strange, forged
        if self._is_flooded:
            are_forged = now < self._forged_until
            self._let_in({each.number: each.heard_from if are_forged else () for each in sessions})

    def _let_in(self, sessions: dict[int, tuple[Address, ...]]) -> None:
        """Take datagrams of these sessions alone, and only from these addresses of theirs, if there are
        any."""
        if sessions == self._filtered:
            return
        new: list[bytes] = []
        known: list[bytes] = []
        for number, sources in sessions.items():
            (known if sources else new).append(number.to_bytes(4, "little"))
        places = {source[:2] for sources in sessions.values() for source in sources}
        least = HEADER.itemsize + 1
        steps = only_sessions(LTP_VERSION, least, SESSION_AT, new, known, places)
        if len(steps) > MOST_STEPS:  # the addresses of many sessions
            steps = only_sessions(LTP_VERSION, least, SESSION_AT, new + known)
        if all(port.take_only(steps) for port in self._ports):
            self._filtered = sessions

    def _share_out(self, grants: Grants, sessions: Sequence[LinkSession]) -> None:
        """Grant shares of the link to the sessions that ask."""
        now, by_number = time.monotonic(), {session.number: session for session in sessions}
        for session in sessions:
            for size in session.take_asked():
                if size:
                    grants.handle_ask(now, session.number, site=session.site)
                else:
                    grants.handle_done(now, session.number)
            if session.finished:
                grants.handle_done(now, session.number)
        for grant in grants.poll_grants(now):
            if grant.session in by_number:
                by_number[grant.session].share(grant.rate, grant.seconds)

    def _sleep(self, deadline: float) -> list[UdpPort]:
        """Sleep until `deadline` (monotonic), or until something comes; return the watched ports that are
        writable."""
        seconds = min(deadline - time.monotonic(), LONGEST_SLEEP)
        if self._blocked:
            seconds = min(seconds, NO_ROOM_SECONDS)
        if 0 < seconds < POLL_GRAIN:
            time.sleep(seconds)  # finer than poll; datagrams that come meanwhile are handled together
            seconds = 0.0
        ready = self._poll.poll(int(max(0.0, seconds) * 1e3))
        if any(handle == self._woken for handle, _ in ready):
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        can = {handle for handle, what in ready if what & select.POLLOUT}
        return [port for port in self._watched if port.fileno() in can] if can else []

    def _hand_out(self, received: Received, arrived: float) -> None:
        """Give each session the datagrams that name it."""
        for flow in headers_untrusted(received.frames, received.sizes, self.drops):
            session = self._sessions.get(flow.session)
            if session is None:
                self.drops["no such session"] += len(flow.frames)
                continue
            try:
                session.handle(arrived, flow, received.address)
            except Exception as error:
                session.fail(f"an error of its own: {type(error).__name__}: {error}", error)

    def _drive(self, session: LinkSession) -> None:
        try:
            session.drive()
            session.hand_out()
        except Exception as error:
            session.fail(f"an error of its own: {type(error).__name__}: {error}", error)
        if session.finished:
            with self._lock:
                self._sessions.pop(session.number, None)
