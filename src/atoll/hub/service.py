"""The hub's loop: messages in, decisions by the store's state machines, answers out.

Source: S4, "The store".
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.core.errors import UserError
from atoll.hub.decisions import Decisions
from atoll.hub.loglink import LogLink
from atoll.hub.rings import Rings
from atoll.hub.sites import Sites
from atoll.net.endpoint import Endpoint, Received, Server, poll
from atoll.net.keys import Keys
from atoll.store.leases import Leases
from atoll.store.members import Admission, Membership
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Enter,
    Fenced,
    Gather,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Leased,
    Over,
    Reform,
    Refused,
    Shards,
    StoreCall,
    Used,
    Welcome,
    WhereAreShards,
    WireError,
    decode_untrusted,
    encode,
)

GUEST = "guest"  # the role of who only asks which run this is
LIMIT = 2**21  # bytes of a message: the addresses of the most shards
_LOOK_SECONDS = 0.25  # the longest wait for a message
_MESSAGES = 256  # handled in one go, before deaths are looked for
_WAITING = 4096  # peers that wait for an answer: no more are kept


@dataclass
class _Parked:
    """A worker whose rank is still another's, who may be dead: it waits for a while."""

    peer: bytes
    hello: Hello
    until: float


class Clock:
    """Monotonic seconds in which a gap counts for at most `most`: while the hub itself stood still, nobody
    was silent."""

    def __init__(self, most: float, source: Callable[[], float] = time.monotonic) -> None:
        self._most, self._source = most, source
        self._now = self._last = source()

    def now(self) -> float:
        read = self._source()
        self._now += min(read - self._last, self._most)
        self._last = read
        return self._now


class Hub:
    """Serves one run at `server`. `heartbeat` in seconds is what workers and shards are told.

    `run` is the run's name; who names another one is refused, who names none is told it. `turn` is one round
    of the loop, `serve` is the loop. With `until_done` it ends when all workers have left or died, after as
    many were there as the run begins with, and the shards have ended, which are then told to.
    """

    def __init__(
        self,
        server: Server,
        membership: Membership,
        decisions: Decisions,
        *,
        run: str,
        heartbeat: float,
        keys: Keys | None = None,
        until_done: bool = False,
        at_least: int = 1,
    ) -> None:
        self._until_done, self._begun, self._over = until_done, False, False
        self._manned = 0.0  # when workers were last there, by the clock
        self._server, self._members, self._decisions = server, membership, decisions
        self._run, self._heartbeat = run, heartbeat
        self._leases = Leases()
        self._log = LogLink(
            keys, run, self._handle_fenced, lambda line: decisions.add("log", "not reached", line)
        )
        self._sites = Sites(
            list(membership.sites),
            self._leases,
            lambda site, fenced: LogLink(
                keys,
                run,
                fenced,
                lambda line: decisions.add(f"log of site {site!r}", "not reached", line),
                f"site {site!r}",
            ),
            self._tell_fenced,
        )
        self._clock = Clock(max(_LOOK_SECONDS * 2, membership.patience / 4))
        self._rings = Rings(
            membership,
            decisions,
            self._clock.now,
            self._send,
            self._refuse,
            self._give_up,
            heartbeat=heartbeat,
            at_least=at_least,
        )
        self._owners: dict[int, bytes] = {}  # incarnation -> whose connection it is
        self._parked: list[_Parked] = []
        self._asking: dict[bytes, str] = {}  # who waits for shards' addresses: of which site, or of all
        self._known_shards: list[str] | None = None
        self._dealt: dict[tuple[int, int], Counter[int]] = {}  # (sampler, epoch) under way -> rank -> samples
        self.refused = 0  # messages

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until `until`, which is looked at several times a second."""
        while not until() and not self._is_done():
            self.turn(_LOOK_SECONDS)

    def turn(self, timeout: float) -> None:
        """Wait for up to `timeout` seconds for messages, and handle those that are there."""
        endpoints: list[Endpoint] = [self._server]
        if self._log.client is not None:
            endpoints.append(self._log.client)
        endpoints += self._sites.clients
        poll(endpoints, self._rings.soon(timeout))
        for _ in range(_MESSAGES):
            received = self._server.receive(0)
            if received is None:
                break
            self._handle(received)
        self._log.take()
        self._sites.take()
        self._poll_deaths()
        self._poll_parked()
        self._poll_shards()
        self._rings.poll()

    def close(self) -> None:
        """Close the connections to the logs; the server is the caller's."""
        self._log.close()
        self._sites.close()

    # -- messages -----------------------------------------------------------------------------------------

    def _handle(self, received: Received) -> None:
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._refuse(received.peer, str(error), "")
            return
        peer = received.peer
        if isinstance(message, Hello):
            self._handle_hello(peer, message)
        elif isinstance(message, Heartbeat):
            self._handle_heartbeat(peer, message)
        elif isinstance(message, Lease):
            self._handle_lease(peer, message)
        elif isinstance(message, (Gather, StoreCall, Reform, Enter)):
            self._rings.handle(peer, message)
        elif isinstance(message, Goodbye):
            self._handle_goodbye(peer, message)
        elif isinstance(message, WhereAreShards):
            self._handle_where(peer)
        else:
            name = type(message).__name__
            self._refuse(peer, f"the hub takes no {name}", name)

    def _handle_hello(self, peer: bytes, hello: Hello) -> None:
        refusal = self._at_the_door(hello)
        if refusal:
            self._refuse(peer, refusal, "Hello")
            return
        if hello.role == GUEST:
            self._welcome(peer, hello, -1, 0)
            return
        known = self._members.rank_of(hello.incarnation) if hello.incarnation else None
        if known is not None:  # its connection was lost, and is a new one
            self._owners[hello.incarnation] = peer
            self._welcome(peer, hello, known, hello.incarnation)
        elif hello.incarnation and hello.role != "shard":
            self._refuse(peer, self._given_up(hello.incarnation), "Hello")
        elif hello.role == "worker" and self._members.must_wait(hello.worker):
            self._park(peer, hello)
        else:
            self._admit(peer, hello)

    def _at_the_door(self, hello: Hello) -> str:
        """Why this one may not come in, whoever it is."""
        if hello.version != VERSION:
            return (
                f"the hub speaks version {VERSION} of the protocol and the {hello.role[:16]} version "
                f"{hello.version}; install the same version of Atoll everywhere"
            )
        if hello.run not in ("", self._run):
            return f"this hub is of run {self._run!r}, and not of run {hello.run!r}"
        return ""

    def _admit(self, peer: bytes, hello: Hello) -> None:
        admission = self._members.handle_hello(
            self._clock.now(),
            hello.role,
            max(-1, hello.worker),
            hello.shard,
            hello.address,
            hello.site,
            hello.incarnation,
        )
        if admission.refused:
            self._refuse(peer, admission.refused, "Hello")
            return
        again = admission.incarnation in self._owners  # a shard that says Hello once more
        self._owners[admission.incarnation] = peer
        self._welcome(peer, hello, admission.worker, admission.incarnation)
        if hello.role == "worker":
            self._sites.note(admission.worker, admission.incarnation, hello.site)
        elif hello.role == "site":
            self._reach_site(hello.site, hello.address)
        self._begun = self._begun or len(self._members.live()) >= self._members.workers
        if not again:
            self._decisions.add(f"{hello.role} joined", self._name(hello, admission), admission.reason)

    def _welcome(self, peer: bytes, hello: Hello, worker: int, incarnation: int) -> None:
        sites, workers = self._members.sites, self._members.workers
        if sites and hello.role != "worker":  # of the log that this shard follows or keeps
            workers = sites[hello.site] if hello.role == "site" else len(sites)
        welcome = Welcome(
            run=self._run,
            worker=worker,
            incarnation=incarnation,
            workers=workers,
            shards=self._members.shards,
            heartbeat=self._heartbeat,
            patience=self._members.patience,
            sites=list(sites),
        )
        self._send(peer, welcome)

    def _park(self, peer: bytes, hello: Hello) -> None:
        """A worker that was started again may come before its forerunner's death is known."""
        if len(self._parked) >= _WAITING:
            self._refuse(peer, "too many workers wait for a rank", "Hello")
            return
        # A little longer than a death takes to be noticed, counted from now.
        until = self._clock.now() + self._members.patience + self._heartbeat
        self._parked.append(_Parked(peer, hello, until))

    def _poll_parked(self) -> None:
        now = self._clock.now()
        for parked in list(self._parked):
            if now >= parked.until or not self._members.must_wait(parked.hello.worker):
                self._parked.remove(parked)
                self._admit(parked.peer, parked.hello)

    def _handle_heartbeat(self, peer: bytes, beat: Heartbeat) -> None:
        if not self._members.handle_heartbeat(self._clock.now(), beat.incarnation, beat.iteration):
            self._refuse(peer, self._given_up(beat.incarnation), "Heartbeat")
        elif self._over:  # nobody but shards is left
            self._send(peer, Over())
        else:
            self._rings.beat(peer, beat.incarnation)

    def _given_up(self, incarnation: int) -> str:
        return (
            f"the hub knows no incarnation {incarnation}: it was silent for too long, or this is another "
            "hub; start it again"
        )

    def _handle_goodbye(self, peer: bytes, goodbye: Goodbye) -> None:
        if self._owners.get(goodbye.incarnation) != peer:
            self._refuse(peer, "only a worker itself says goodbye", "Goodbye")
            return
        site = self._members.handle_site_goodbye(goodbye.incarnation)
        if site:
            self._fence_site(site, goodbye.incarnation)
            self._decisions.add("site left", f"site {site!r}", "its shard said goodbye")
            return
        shard = self._members.handle_shard_goodbye(goodbye.incarnation)
        if shard is not None:
            del self._owners[goodbye.incarnation]
            self._decisions.add("shard left", f"shard {shard}", "it said goodbye")
        rank = self._members.handle_goodbye(goodbye.incarnation)
        if rank is not None:
            self._fence(rank, goodbye.incarnation, said_goodbye=True, finished=goodbye.finished)
            self._decisions.add("worker left", _worker(rank, goodbye.incarnation), "it said goodbye")

    # -- shards -------------------------------------------------------------------------------------------

    def _handle_where(self, peer: bytes) -> None:
        if not self._members.shards:
            self._refuse(peer, "this run has no shards: its workers are a ring", "WhereAreShards")
            return
        if len(self._asking) >= _WAITING:
            self._refuse(peer, "too many wait for the shards", "WhereAreShards")
            return
        incarnation = next((key for key, owner in self._owners.items() if owner == peer), 0)
        self._asking[peer] = self._sites.site_of(incarnation)

    def _reach_site(self, site: str, address: str) -> None:
        try:
            self._sites.reach(site, address)
        except UserError as error:  # such an address cannot be used from here
            self._decisions.add(f"log of site {site!r}", "not reached", str(error))

    def _poll_shards(self) -> None:
        for peer, site in list(self._asking.items()):
            if site and (address := self._members.site_address(site)):
                self._send(peer, Shards(addresses=[address]))
                del self._asking[peer]
        addresses = self._members.shard_addresses()
        if not addresses:
            return
        if addresses != self._known_shards:
            self._known_shards = addresses
            self._decisions.add("shards", ", ".join(addresses), "all are there; shard 0 keeps the log")
            try:
                self._log.connect(addresses[0])
            except UserError as error:  # such an address cannot be used from here
                self._decisions.add("log", "not reached", str(error))
        for peer in [peer for peer, site in self._asking.items() if not site]:
            self._send(peer, Shards(addresses=addresses))
            del self._asking[peer]

    # -- the end ------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        """With `until_done`: whether workers and shards have ended. The latter hear at their next heartbeat
        that the run is over. Sites' shards end by themselves; one that does not, hears so after a while."""
        if not self._until_done or not self._begun or self._members.live() or self._parked:
            self._manned = self._clock.now()
            return False
        shards, sites = self._members.live_shards(), self._members.live_sites()
        lingering = bool(sites) and self._clock.now() - self._manned < self._members.patience
        if not self._over and not lingering and (self._log.answered or not shards):
            self._over = True
            self._decisions.add("run", "over", "all workers have left or died")
        return self._over and not shards and not sites

    # -- deaths -------------------------------------------------------------------------------------------

    def _poll_deaths(self) -> None:
        now = self._clock.now()
        for rank, incarnation, reason in self._members.poll_deaths(now):
            self._fence(rank, incarnation)
            self._decisions.add("worker died", _worker(rank, incarnation), reason)
        for index, reason in self._members.poll_shard_deaths(now):
            self._decisions.add("shard died", f"shard {index}", reason)
            self._known_shards = None
        for site, incarnation, reason in self._members.poll_site_deaths(now):
            self._sites.end(site)
            self._fence_site(site, incarnation)
            self._decisions.add("site died", f"site {site!r}", f"{reason}; the other sites go on")

    def _give_up(self, incarnation: int, reason: str) -> None:
        """A worker is dead, by what the others of its ring say."""
        rank = self._members.handle_goodbye(incarnation)
        if rank is not None:
            self._decisions.add("worker died", _worker(rank, incarnation), reason)
            self._fence(rank, incarnation)

    def _fence(
        self, rank: int, incarnation: int, *, said_goodbye: bool = False, finished: bool = False
    ) -> None:
        self._owners.pop(incarnation, None)
        self._rings.left(incarnation, said_goodbye=said_goodbye, finished=finished)
        if not self._sites.fence(rank, incarnation) and self._members.shards:
            self._log.fence(rank, incarnation)

    def _fence_site(self, site: str, incarnation: int) -> None:
        """To the global log a site is one worker."""
        self._owners.pop(incarnation, None)
        self._log.fence(self._sites.names.index(site), incarnation)

    def _handle_fenced(self, fenced: Fenced, asked: bool) -> None:
        """The log's word on what an incarnation's commits have used: all of it where the hub asked."""
        if self._sites.names:
            self._handle_site_fenced(fenced, asked)
            return
        if not asked:
            self._leases.handle_used(fenced.worker, fenced.incarnation, fenced.used)
            self._note_used(fenced.used)
            return
        returned = self._leases.handle_fenced(fenced.worker, fenced.incarnation, fenced.used)
        self._note_used(fenced.used)
        self._tell_fenced(fenced, returned)

    def _tell_fenced(self, fenced: Fenced, returned: int) -> None:
        self._decisions.add(
            "fenced",
            _worker(fenced.worker, fenced.incarnation),
            f"{fenced.iteration} iterations of it count; {returned} samples of its leases are free again",
        )

    def _handle_site_fenced(self, fenced: Fenced, asked: bool) -> None:
        if fenced.worker >= len(self._sites.names):
            return  # of nobody whom this hub has sent there
        if asked:
            returned = self._sites.handle_ended(fenced.worker, fenced)
            self._decisions.add(
                "fenced",
                f"site {self._sites.names[fenced.worker]!r}",
                f"{fenced.iteration} iterations of it count; {returned} samples of its leases are free again",
            )
        else:
            self._sites.handle_used(fenced.worker, fenced)
        self._note_used(fenced.used)

    # -- leases -------------------------------------------------------------------------------------------

    def _handle_lease(self, peer: bytes, lease: Lease) -> None:
        rank = self._members.rank_of(lease.incarnation)
        if rank is None or self._owners.get(lease.incarnation) != peer:
            self._refuse(peer, self._given_up(lease.incarnation), "Lease")
            return
        try:
            leased = self._leases.handle_lease(rank, lease.incarnation, lease)
        except UserError as error:
            self._refuse(peer, str(error), "Lease")
            return
        self._send(peer, leased)
        self._note_lease(rank, lease, leased)

    def _note_lease(self, rank: int, lease: Lease, leased: Leased) -> None:
        """An epoch's beginning and end are decisions to tell; its leases are too many."""
        if leased.start >= leased.stop:
            return
        key = (lease.sampler, lease.epoch)
        if key not in self._dealt:
            self._dealt[key] = Counter()
            self._decisions.add(
                _epoch(key), "begun", f"worker {rank} asks first for some of {lease.length} samples"
            )
        self._dealt[key][rank] += leased.stop - leased.start

    def _note_used(self, used: Sequence[Used]) -> None:
        for key in sorted({(part.sampler, part.epoch) for part in used} & self._dealt.keys()):
            progress = self._leases.progress(*key)
            if not progress.free and not progress.leased:
                dealt = sorted(self._dealt.pop(key).items())
                shares = ", ".join(f"worker {rank} {count}" for rank, count in dealt)
                self._decisions.add(_epoch(key), "over", f"every sample was used; leased by rank: {shares}")

    # -- answers ------------------------------------------------------------------------------------------

    def _refuse(self, peer: bytes, reason: str, request: str) -> None:
        self.refused += 1
        self._send(peer, Refused(reason=reason[:4096], request=request))

    def _send(self, peer: bytes, message: AnyMessage) -> None:
        """Send; who is gone, or reads nothing, asks again or is given up by its silence."""
        self._server.send(peer, encode(message))

    def _name(self, hello: Hello, admission: Admission) -> str:
        if hello.role == "shard":
            return f"shard {hello.shard}"
        if hello.role == "site":
            return f"site {hello.site!r}"
        return _worker(admission.worker, admission.incarnation)


def _epoch(key: tuple[int, int]) -> str:
    sampler, epoch = key
    return f"epoch {epoch} of sampler {sampler}"


def _worker(rank: int, incarnation: int) -> str:
    return f"worker {rank}, incarnation {incarnation}"
