"""The barrier at the end of each round of a ring: members confirm that they hold the round's result.

c10d's barrier wakes two threads in each process for each of its steps, which took longer than everything else
(docs/notes/survival.md). Here the worker's own thread writes and reads single bytes, on connections of its
own. In each step it notifies up to three members, and hears from as many (`steps`). So four members need one
step, and sixteen two. If any member cannot connect, all members confirm by an all-reduce.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from atoll.train.group.channel import BrokenRingError, Channel

_RADIX = 4
_SLICE_SECONDS = 0.1  # length of a slice of a wait; after each slice the wait looks at the hub's latest news
_CONNECT_SECONDS = 2.0  # for all members to connect: a lost SYN is sent again after one second
_GREETING_SECONDS = 0.5  # for the greeting of a member that has connected
_WHERE = struct.Struct("<16sH46s")  # a listener's secret, port and address
_GREETING = struct.Struct("<16sI")  # the listener's secret, and the rank of the member that connects


class BarrierStep(NamedTuple):
    """One step of a barrier: the ranks that a member notifies (`told`), and those that it hears from
    (`heard`)."""

    told: list[int]
    heard: list[int]


def steps(rank: int, world: int) -> list[BarrierStep]:
    """Return the steps of member `rank` in a barrier of `world` members. A step ends when the member has
    heard all of its ranks.

    This is a dissemination barrier: a member that begins step s (from 0) has heard, directly or through
    others, of the 4 ** s - 1 members before it. In the whole barrier a member notifies another at most once.

    Source: D. Hensgen, R. Finkel, U. Manber, "Two Algorithms for Barrier Synchronization", International
    Journal of Parallel Programming 17(1), 1988. There each step has one partner; here up to three.
    """
    made, distance = [], 1
    while distance < world:
        away = [distance * count for count in range(1, _RADIX) if distance * count < world]
        made.append(
            BarrierStep([(rank + far) % world for far in away], [(rank - far) % world for far in away])
        )
        distance *= _RADIX
    return made


class Confirmations:
    """The confirmations of the ring over `channel`, on the CPU. The channel's place must have a `watch`.

    The constructor is a collective, and so is `confirm`. Both raise the errors of the channel's waits.

    Attributes:
        trouble: the reason why this worker could not connect; "" if it could.
        without: the names of the workers that could not connect. If there are any, confirmations are
            all-reduces.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._place = channel, channel.place
        self._links: dict[int, socket.socket] = {}
        self._number = 0  # the number of the latest confirmation, modulo 256
        self.trouble = ""
        self._steps = steps(self._place.rank, self._place.world)
        self._partners = {rank for step in self._steps for rank in (*step.told, *step.heard)}
        try:
            self.without = self._meet()
        except BaseException:
            self.close()
            raise
        if self.without:
            self.close()

    def confirm(self, what: str) -> None:
        """Return when all members have called this. `what` names the result that they hold by then."""
        if self.without:
            self._channel.wait(self._channel.sum(torch.zeros(1)), f"the others to hold {what}")
            return
        began = time.perf_counter()
        self._number = (self._number + 1) % 256
        word = bytes((self._number,))
        for step in self._steps:
            for rank in step.told:
                self._tell(rank, word)
            for rank in step.heard:
                self._hear(rank, word, f"the others to hold {what}", began)
        self._channel.seconds_waited += time.perf_counter() - began

    def close(self) -> None:
        """End the connections. The other members see the end even if a forked child holds the connections
        too."""
        links, self._links = self._links, {}
        for link in links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _tell(self, rank: int, word: bytes) -> None:
        try:
            self._links[rank].send(word)
        except OSError as error:
            raise self._lost(rank, str(error)) from error

    def _hear(self, rank: int, word: bytes, what: str, began: float) -> None:
        link = self._links[rank]
        while True:
            try:
                heard = link.recv(1)
            except TimeoutError as error:
                self._channel.look_while_waiting()
                waited = time.perf_counter() - began
                if waited > self._channel.timeout:
                    raise self._channel.explain(RuntimeError("timed out"), what, waited) from error
                continue
            except OSError as error:
                raise self._lost(rank, str(error)) from error
            if heard != word:
                how = f"it said {heard[0]} in place of {word[0]}" if heard else "it closed the connection"
                raise self._lost(rank, how)
            return

    def _lost(self, rank: int, how: str) -> BrokenRingError:
        name = self._place.name_of(rank)
        return BrokenRingError(f"worker {self._place.name} lost touch with worker {name}: {how}")

    # -- the connections ----------------------------------------------------------------------------------

    def _meet(self) -> list[int]:
        """Connect to all partners, as far as possible; return the names of the workers that could not."""
        what = "the others' addresses, to confirm to one another"
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
        try:
            host = self._channel.host
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
        self._links[rank] = link

    def _named(self, ranks: set[int]) -> str:
        return " and ".join(f"worker {self._place.name_of(rank)}" for rank in sorted(ranks))


def _pack(listener: socket.socket | None, secret: bytes) -> bytes:
    host, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    return _WHERE.pack(secret, port, host.encode("ascii"))
