"""The members of a group that share one model, as the memory engine needs them (`memory/members.py`).

Collectives are c10d's. Requests of one member to another use connections of their own.
"""

from __future__ import annotations

import ipaddress
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from atoll.core.errors import DeadlineError, PeerLostError, RunError
from atoll.core.stands import Stand
from atoll.groups.grouping import Grouping
from atoll.memory.members import Read, Waitable
from atoll.memory.payloads import Key
from atoll.moves.owners import Groups
from atoll.net.fetches import FetchLink, FetchService, RefusedError
from atoll.train.api.place import Place
from atoll.train.group.channel import Channel, Pending
from atoll.train.group.hierarchy import HierarchicalChannel
from atoll.train.group.inner import AnyRing
from atoll.wire.fetches import SECRET_BYTES, Fetch

_WHERE = struct.Struct(f"<{SECRET_BYTES}sH46s")  # a service's secret, port and address
_CPU = torch.device("cpu")


class _Collective(Waitable):
    """A collective under way, with the words that name it in errors."""

    def __init__(self, channel: Channel, work: Pending, what: str) -> None:
        self._channel, self._work, self._what = channel, work, what

    def wait(self) -> None:
        self._channel.wait(self._work, self._what)


class WorkerMembers:
    """The workers of `place` as members that share a model; see `memory/members.py`: Members.

    The constructor is a collective. Collectives are Gloo's, on the CPU, whatever device trains.

    Attributes:
        rank: this member's rank.
        count: the number of members.
        replicas: the ranks of each group, if sums go group by group; else empty.
        fetched: the bytes of payloads that this member has fetched.
        sent: the bytes that this member has sent in collectives.
    """

    def __init__(
        self,
        place: Place,
        timeout: float,
        number: int = 0,
        replicas: Groups = (),
        ring: AnyRing | None = None,
    ) -> None:
        """Connect to the other members.

        Raises RunError if this worker cannot listen for the others.

        Args:
            place: this worker's place among the members.
            timeout: the deadline of each wait, in seconds.
            number: tells the connections of these members from those of other models of the session.
            replicas: the ranks of each group, if sums are to go group by group.
            ring: the ring of the members, if any.
        """
        self._ring = ring
        self.rank, self.count, self.replicas = place.rank, place.world, replicas
        self.fetched = self.sent = 0
        self._place, self._timeout = place, timeout
        self._lock = threading.Lock()  # guards the next two, and `fetched`
        self._idle: list[list[FetchLink]] = [[] for _ in range(self.count)]
        self._closed = False
        self._channel = self._connect(f"members{number}")
        try:
            self._service = FetchService(self._host(), self.count, timeout)
        except OSError as error:
            self._channel.abandon()
            raise RunError(
                f"worker {place.name} cannot listen at {self._channel.host} for the other members: "
                f"{error.strerror}"
            ) from None
        try:
            self._services = self._meet()
        except BaseException:
            self.close()
            raise

    def _host(self) -> str:
        """Return the address at which the others have reached this worker already. Raises OSError if it is
        not known."""
        host = self._channel.host
        if not host:
            raise OSError(0, "its own address is not known (set GLOO_SOCKET_IFNAME)")
        return host

    def _connect(self, purpose: str) -> Channel:
        """Return the channel for collectives. With `replicas` its sums go group by group."""
        if not self.replicas:
            return Channel(self._place, purpose, self._timeout, _CPU)
        return HierarchicalChannel(self._place, purpose, self._timeout, _CPU, Grouping(self.replicas))

    def _meet(self) -> list[tuple[bytes, tuple[str, int]]]:
        """Return each member's secret and the address at which it listens, by rank. A collective."""
        own = self._service
        said = _WHERE.pack(own.secret, own.port, own.host.encode("ascii"))
        told = self._channel.gather(said, "the other members' addresses")
        services = []
        for rank, each in enumerate(told):
            try:
                secret, port, packed = _WHERE.unpack(each)
                host = ipaddress.ip_address(packed.rstrip(b"\0").decode("ascii"))
            except (struct.error, ValueError):
                raise PeerLostError(f"worker {self._place.name_of(rank)} gave no address") from None
            services.append((secret, (str(host), port)))
        return services

    @property
    def seconds_waited(self) -> float:
        """The seconds waited for collectives so far.

        Fetches begin before their payloads are used; the code that waits for one counts its seconds.
        """
        return self._channel.seconds_waited

    def serve(self, read: Read) -> None:
        @contextmanager
        def read_bytes(fetch: Fetch) -> Iterator[memoryview]:
            with read((fetch.chunk, fetch.kind), fetch.version) as payload:
                yield _bytes_of(payload)

        self._service.serve(read_bytes)

    def fetch(self, holder: int, key: Key, version: int, into: Tensor, what: str) -> None:
        began = time.monotonic()
        until, of = began + self._timeout, f"worker {self._place.name_of(holder)}'s {what}"
        memory = _bytes_of(into)
        try:
            link = self._take(holder, until)
            try:
                link.fetch(Fetch(*key, version, len(memory)), memory, until, self._look)
            except RefusedError as error:
                self._give_back(holder, link)
                raise RefusedError(f"worker {self._place.name} cannot have {of}: {error}") from None
            except BaseException:
                link.close()  # nobody takes bytes that still come
                raise
            self._give_back(holder, link)
        except DeadlineError:
            raise DeadlineError(
                f"worker {self._place.name} waited {time.monotonic() - began:.1f} s for {of} "
                f"(deadline sync.timeout, {self._timeout:g} s; set it higher if the workers are only slow)"
            ) from None
        except PeerLostError as error:
            self._channel.look()  # the place's watch may know more
            if self._place.standing is not None and (known := self._place.standing.known()) is not None:
                raise known from None
            raise PeerLostError(
                f"worker {self._place.name} lost touch with another worker, waiting for {of}: {error}"
            ) from None
        with self._lock:
            self.fetched += len(memory)

    def sum(self, tensor: Tensor, what: str) -> None:
        self.sent += self._channel.sends(tensor.nbytes)
        self._channel.wait(self._channel.sum(tensor), what)

    def meet(self, tensor: Tensor, what: str, where: Callable[[], Stand]) -> None:
        if self._ring is None:
            self.sum(tensor, what)
        else:
            self._ring.round(what, lambda: self.sum(tensor, what), where=where)

    def exchange(
        self, tensor: Tensor, sends: Sequence[int], into: Tensor, takes: Sequence[int], what: str
    ) -> Waitable:
        self.sent += tensor.nbytes - sends[self.rank] * tensor.itemsize
        return _Collective(self._channel, self._channel.exchange(tensor, sends, into, takes), what)

    def gather(self, word: bytes, what: str) -> list[bytes]:
        return self._channel.gather(word, what)

    def close(self) -> None:
        """End the members' connections (see `Members.close`). Closing twice does no harm."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = [link for idle in self._idle for link in idle]
            self._idle = [[] for _ in range(self.count)]
        for link in links:
            link.close()
        self._service.close()
        self._channel.close()

    def _look(self) -> None:
        """Raise an error if the session is closed, or if the group is known to be broken."""
        self._check_open()
        self._channel.look()

    def _check_open(self) -> None:
        if self._closed:
            raise RunError("the session is closed: what other members hold cannot be had any more")

    def _take(self, holder: int, until: float) -> FetchLink:
        """Return a connection to the holder's service, for this thread alone until `_give_back`."""
        with self._lock:
            self._check_open()
            if self._idle[holder]:
                return self._idle[holder].pop()
        secret, address = self._services[holder]
        return FetchLink(f"worker {self._place.name_of(holder)}", address, secret, self.rank, until)

    def _give_back(self, holder: int, link: FetchLink) -> None:
        with self._lock:
            if not self._closed:
                self._idle[holder].append(link)
                return
        link.close()


def _bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a 1-D, contiguous tensor in host memory. Raises ValueError for another tensor."""
    if flat.device.type != "cpu" or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"payloads travel from and to flat host memory, not {flat.device} {flat.shape}")
    return flat.detach().view(torch.uint8).numpy().data
