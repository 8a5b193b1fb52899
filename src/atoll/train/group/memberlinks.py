"""TCP connections between members of a group, made over a channel that they share.

The worker's own thread writes and reads here. What c10d sends passes through two threads in each process.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Collection, Sequence

import torch

from atoll.train.group.channel import Channel

_SLICE_SECONDS = 0.1  # length of a slice of a wait; after each slice the wait looks at the hub's latest news
_CONNECT_SECONDS = 2.0  # for all members to connect: a lost SYN is sent again after one second
_GREETING_SECONDS = 0.5  # for the greeting of a member that has connected
_WHERE = struct.Struct("<16sH46s")  # a listener's secret, port and address
_GREETING = struct.Struct("<16sI")  # the listener's secret, and the rank of the member that connects


class MemberLinks:
    """Connections of this member to its `partners`, made over `channel`, on the CPU.

    The constructor is a collective of all members of the channel, and raises the errors of the channel's
    waits. Partners must name one another. `purpose` ends the sentence "the others' addresses, ...".

    Attributes:
        by_rank: the connection to each partner, by its rank, each wait of which lasts 0.1 s at most. Empty if
            any member could not connect.
        trouble: the reason why this worker could not connect; "" if it could.
        without: the names of the workers that could not connect.
    """

    def __init__(self, channel: Channel, partners: Collection[int], purpose: str) -> None:
        self._channel, self._place, self._purpose = channel, channel.place, purpose
        self._partners = partners
        self.by_rank: dict[int, socket.socket] = {}
        self.trouble = ""
        try:
            self.without = self._meet()
        except BaseException:
            self.close()
            raise
        if self.without:
            self.close()

    def close(self) -> None:
        """End the connections. The other members see the end even if a forked child holds the connections
        too."""
        links, self.by_rank = self.by_rank, {}
        for link in links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _meet(self) -> list[int]:
        """Connect to all partners, as far as possible; return the names of the workers that could not."""
        what = f"the others' addresses, {self._purpose}"
        with contextlib.ExitStack() as stack:
            listener = self._listen()
            if listener is not None:
                stack.enter_context(listener)
            secret = secrets.token_bytes(16)
            own = torch.frombuffer(bytearray(_pack(listener, secret)), dtype=torch.uint8)
            parts, work = self._channel.all_gather(own)
            self._channel.wait(work, what)
            places = [_WHERE.unpack(part.numpy().tobytes()) for part in parts]
            if listener is not None and all(port for _, port, _ in places):
                self._connect(listener, secret, places)
        could, work = self._channel.all_gather(torch.tensor([not self.trouble], dtype=torch.uint8))
        self._channel.wait(work, what)
        return [self._place.name_of(rank) for rank, each in enumerate(could) if not each]

    def _listen(self) -> socket.socket | None:
        """Listen at the channel's own address, at which the others have reached this worker already.

        Returns None, with the reason in `trouble`, if that fails.
        """
        host = self._channel.host
        if not host:  # an empty one would listen at every address of the machine
            self.trouble = "it does not know at which address the others reach it"
            return None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, 0), family=family, backlog=self._place.world)
        except OSError as error:
            self.trouble = f"it cannot listen: {error}"
            return None

    def _connect(
        self, listener: socket.socket, secret: bytes, places: Sequence[tuple[bytes, int, bytes]]
    ) -> None:
        """Connect to partners of lower rank, and accept those of higher rank. A failure is noted in
        `trouble`."""
        until = time.monotonic() + min(_CONNECT_SECONDS, self._channel.timeout)
        rank = self._place.rank
        try:
            for other in sorted(each for each in self._partners if each < rank):
                theirs, port, packed = places[other]
                host = str(ipaddress.ip_address(packed.rstrip(b"\0").decode("ascii")))
                link = socket.create_connection((host, port), max(0.01, until - time.monotonic()))
                self._take(other, link)
                link.sendall(_GREETING.pack(theirs, rank))
            awaited = {each for each in self._partners if each > rank}
            while awaited:
                self._channel.look()
                if time.monotonic() > until:
                    raise TimeoutError("nobody came from " + self._named(awaited))
                awaited.discard(self._accept(listener, secret, awaited))
        except (OSError, ValueError) as error:  # ValueError: a partner gave no address
            self.trouble = f"it cannot connect: {error}"

    def _accept(self, listener: socket.socket, secret: bytes, awaited: set[int]) -> int:
        """Accept one connection; return the rank of the partner that has come, or -1."""
        listener.settimeout(_SLICE_SECONDS)
        try:
            link, _ = listener.accept()
        except TimeoutError:
            return -1
        link.settimeout(_GREETING_SECONDS)
        greeting = b""
        with contextlib.suppress(OSError):
            while len(greeting) < _GREETING.size and (more := link.recv(_GREETING.size - len(greeting))):
                greeting += more
        if len(greeting) == _GREETING.size:
            said, rank = _GREETING.unpack(greeting)
            if hmac.compare_digest(said, secret) and rank in awaited:
                self._take(rank, link)
                return int(rank)
        link.close()  # a stranger
        return -1

    def _take(self, rank: int, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(_SLICE_SECONDS)
        self.by_rank[rank] = link

    def _named(self, ranks: set[int]) -> str:
        return " and ".join(f"worker {self._place.name_of(rank)}" for rank in sorted(ranks))


def _pack(listener: socket.socket | None, secret: bytes) -> bytes:
    host, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    return _WHERE.pack(secret, port, host.encode("ascii"))
