"""A worker's side of the hub: rank and incarnation, the shards' addresses, leases, and signs of life."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from atoll.core.errors import AtollError, DeadlineError, PeerLostError, RunError
from atoll.core.liveness import own_origin
from atoll.core.texts import one_line
from atoll.net.endpoint import SOON, Client
from atoll.net.heartbeats import Launcher
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON, Answer, RefusedError, ask, late, who_is_missing
from atoll.net.route import own_address
from atoll.train.members.heartbeats import HeartbeatSender
from atoll.train.sync.links import LinkEnd
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Beat,
    Enter,
    Gather,
    Gathered,
    Goodbye,
    Grouped,
    Hello,
    InGroup,
    JoinGroup,
    Lease,
    Leased,
    MeasureLink,
    Reform,
    Reformed,
    Refused,
    RingNews,
    Shards,
    Used,
    Welcome,
    WhereAreShards,
    WireError,
    decode_untrusted,
    encode,
)

LIMIT = 2**21  # bytes of a message, as the hub's
SILENCE = 3.0  # seconds without an answer, after which that is told
_FAREWELL_SECONDS = 5.0  # for a hub that is being started again to know who says goodbye to it
_REASON_CHARACTERS = 300  # of why this worker leaves
_AT_ONCE = 0.2  # seconds that who asks in passing waits for an answer
_LISTEN_SECONDS = 0.1  # between looks at whether heartbeats are to end
_OPENING_SECONDS = 0.05  # between looks whether there is a connection again
_ASK_AGAIN = (0.01, 0.2)  # seconds before the same lease is asked for again: first, and at most


class HubSilence:
    """Tells when the hub at `address` has not answered for a while, and when it answers again: it calls
    `tell(line)`. `meanwhile` ends the first line, and says what becomes of the run."""

    def __init__(self, address: str) -> None:
        self.tell: Callable[[str], None] = lambda _line: None
        self.meanwhile = ""
        self._address = address
        self.since: float | None = None  # when the silence began (monotonic); None: the hub answers
        self._told = False

    def look(self, link: Client, asked: float | None) -> None:
        """Look at `link`, whose oldest question without an answer was sent at `asked` (monotonic)."""
        now = time.monotonic()
        if link.connected and (asked is None or now - asked < SILENCE):
            if self._told:
                self.tell(f"the hub at {self._address} answers again")
            self.since, self._told = None, False
            return
        if self.since is None:
            self.since = now if asked is None or not link.connected else asked
        if not self._told and now - self.since >= SILENCE:
            self._told = True
            silence = f"the hub at {self._address} has not answered for {now - self.since:.1f} s"
            trouble = f" ({link.trouble})" if link.trouble else ""
            self.tell(f"{silence}{trouble}; {self.meanwhile}")


class HubClient:
    """A connection to the hub at `address`. `timeout` in seconds is the deadline of each wait (sync.timeout).

    `run` is the run's name where it is known; the hub's Welcome tells it. All calls come from one thread;
    the heartbeats have a thread and a connection of their own, since a script may compute for minutes. They
    go through `launcher` where it passes them on, and to the hub directly where it does not. That thread also
    looks whether the hub is silent: `silence`.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        run: str = "",
        timeout: float = 600.0,
        launcher: Launcher | None = None,
    ) -> None:
        self.iteration = 0  # how many iterations are committed: the session sets it, heartbeats tell it
        self.welcome: Welcome | None = None
        self.seconds_waited = 0.0  # for leases, in all
        self._address, self._keys, self._run, self._timeout = address, keys, run, timeout
        self._launcher = launcher
        self._client = Client(address, keys, limit=LIMIT, name="hub")
        self._losses = 0
        self._leases = 0  # requests
        self._token = secrets.token_hex(8)  # by which the hub knows a Hello that is sent twice
        self._wishes = 0  # to form a ring, the next one, to enter one, or to join a group
        self._pace = 0.0
        self.size, self.batch = 0, 0.0  # bytes of this worker's gradients, samples of its latest iteration
        self._links: LinkEnd | None = None  # where the hub has links measured
        self._contributor: int | None = None  # the group that this worker has moved to
        self._at_once = threading.Event()  # the next heartbeat is not to wait
        self.late = False  # the ring was under way when this worker came
        self.news: RingNews | None = None  # the latest of a ring, as the heartbeats' thread got it
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._given_up = ""
        self._leaves_because = ""  # what goodbye says, where it is no end of the training
        self.silence = HubSilence(address)
        self._asked: float | None = None  # when a question was asked that the hub answers at once; monotonic

    def join(self, wish: int = -1, site: str = "") -> Welcome:
        """Take part, as rank `wish` (-1: any that is free), at `site` where the run has some; heartbeats
        begin.

        A rank whose worker has just died is free after the hub's patience: that long this waits. Raises
        RefusedError when the rank is taken, or version or run are others, or there is no such site,
        DeadlineError when there is no hub.
        """
        hello = Hello(
            version=VERSION,
            run=self._run,
            role="worker",
            worker=wish,
            pid=os.getpid(),
            site=site,
            token=self._token,
            launcher=self._launcher.name if self._launcher is not None else "",
            origin=own_origin(),
        )
        welcome = self._ask(hello, Welcome, "a rank in the run")
        self.welcome, self._run = welcome, welcome.run
        if welcome.links:
            self._links = LinkEnd(own_address(self._address) or "127.0.0.1")
        self._thread = threading.Thread(
            target=self._beat, args=(welcome,), name="atoll-heartbeat", daemon=True
        )
        self._thread.start()
        return welcome

    def wait_for_links(self) -> None:
        """Return when the links between the run's workers are measured, if the hub has that done: whoever
        trains before would be measured too. Raises DeadlineError when the other workers do not come."""
        if self._links is None:
            return
        until = time.monotonic() + self._timeout
        while (news := self.news) is None or news.links:
            self.check()
            if time.monotonic() >= until:
                what = "the run's other workers, to measure the links to them"
                raise DeadlineError(late(self._client, self._timeout, what))
            time.sleep(_LISTEN_SECONDS)

    def shards(self) -> list[str]:
        """The addresses of the shards that this worker talks to, by index, once all are there: at a site, its
        shard's alone. Raises DeadlineError when they are not."""
        try:
            return list(self._ask(WhereAreShards(), Shards, "the shards' addresses").addresses)
        except DeadlineError as error:
            missing = who_is_missing(self._client)
            if not missing or self.welcome is None:
                raise
            raise DeadlineError(
                f"worker {self.welcome.worker} waited {self._timeout:.1f} s for the shards to come to the "
                f"hub at {self._address} (deadline sync.timeout, {self._timeout:g} s): {missing}"
            ) from error

    def where_shards_are(self) -> list[str] | None:
        """As `shards`, if the hub answers at once; None if it does not, or one shard is not there."""
        try:
            return list(self._ask(WhereAreShards(), Shards, "the shards' addresses", _AT_ONCE).addresses)
        except (DeadlineError, PeerLostError):
            return None

    def gather(self) -> int:
        """Form the run's ring with all its workers; returns the ring's number, which names its keys. With
        `late` set then, it is the number of a ring that was formed without this worker.

        Raises DeadlineError, naming those who did not come.
        """
        self._wishes += 1
        wish = Gather(incarnation=self._incarnation, number=self._wishes, seconds=self._timeout)
        assert self.welcome is not None
        # The hub answers when the time is over: if it does not, it is gone.
        patience = self._timeout + self.welcome.patience
        ring = self._ask(wish, Gathered, "the ring's other workers", patience, number=wish.number)
        if not ring.group:
            rank, world = self.welcome.worker, self.welcome.workers
            who = " and ".join(f"worker {missing}" for missing in ring.missing)
            absent = world - ring.there
            if absent > len(ring.missing):
                who += f" and {absent - len(ring.missing)} others"
            raise DeadlineError(
                f"worker {rank} waited {self._timeout:.1f} s for {who} to join the ring at the hub at "
                f"{self._address} (deadline sync.timeout, {self._timeout:g} s); {ring.there} "
                f"of {world} workers are there"
            )
        self.late = ring.late
        return ring.group

    def reform(
        self, group: int, rank: int, round: int, *, holds: bool, admits: bool, fresh: bool
    ) -> Reformed:
        """Form the ring after `group`, with all its living members; see wire/messages.py: Reform.

        Raises DeadlineError when some of them neither come nor die, and RunError when there is no next ring,
        or none with this worker.
        """
        self._wishes += 1
        wish = Reform(
            incarnation=self._incarnation,
            number=self._wishes,
            group=group,
            rank=rank,
            round=round,
            holds=holds,
            admits=admits,
            fresh=fresh,
        )
        return self._next_ring(wish, f"the other members of ring {group}, to form the next one")

    def enter(self) -> Reformed:
        """Take part in the ring that is under way, when its members admit newcomers."""
        self._wishes += 1
        wish = Enter(incarnation=self._incarnation, number=self._wishes)
        return self._next_ring(wish, "the ring that is under way to let it in, between two iterations")

    def _next_ring(self, wish: Reform | Enter, what: str) -> Reformed:
        try:
            ring = self._ask(wish, Reformed, what, number=wish.number)
        except RefusedError as error:
            raise RunError(str(error)) from None
        if not ring.group:
            raise RunError(f"the ring does not go on: {ring.reason}")
        return ring

    def set_pace(self, seconds: float) -> None:
        """How long this worker computes a sample, in seconds, for a run with groups; 0: not known yet. The
        first pace is told to the hub at once."""
        if seconds > 0 and not self._pace:
            self._at_once.set()
        self._pace = seconds

    @property
    def grouping(self) -> int:
        """The latest grouping that the hub has told is meant for this worker; 0: none."""
        return self.news.grouping if self.news is not None else 0

    def join_group(self, grouping: int, iteration: int, held: Sequence[Used] = ()) -> Grouped:
        """Ask for this worker's group in `grouping`, at the end of its `iteration`-th iteration. `held` is
        what it was given of its leases and has not used: it is the new group's then. With `group` 0 in the
        answer it stays where it is.

        Returns when all members have asked, or the hub does not wait any longer; raises DeadlineError when
        there is no hub.
        """
        self._wishes += 1
        wish = JoinGroup(
            incarnation=self._incarnation,
            number=self._wishes,
            grouping=grouping,
            iteration=iteration,
            held=list(held),
        )
        assert self.welcome is not None
        # The hub answers when the time is over: if it does not, it is gone.
        patience = self._timeout + self.welcome.patience
        what = f"the other members of its group, in grouping {grouping}"
        return self._ask(wish, Grouped, what, patience, number=wish.number)

    def in_group(self, contributor: int) -> None:
        """This worker has moved: the shards know `contributor`, for which it speaks from now on. Each
        heartbeat says so again, so no lost connection loses it."""
        self._contributor = contributor
        self._at_once.set()

    def lease(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float | None = None,
        contributor: int = 0,
        block: int = 0,
    ) -> Leased:
        """Up to `count` positions of an epoch of `length` samples; `contributor` and `block` as
        wire/messages.py: Lease has them, for a group's member.

        While others hold what is left, it asks again for up to `wait` seconds, and then returns an empty
        Leased with over=False. None: up to the timeout, and then it raises DeadlineError. A request whose
        answer is lost with a connection is sent again, and counts once.
        """
        request = Lease(
            incarnation=self._incarnation,
            sampler=sampler,
            epoch=epoch,
            length=length,
            count=count,
            contributor=contributor,
            block=block,
        )
        start, pause = time.monotonic(), _ASK_AGAIN[0]
        while True:
            self._asked = time.monotonic()
            patient = wait is None or self._asked - start < wait
            try:
                request = msgspec.structs.replace(request, patient=patient)
                leased = self._lease(request, f"samples of epoch {epoch}")
            finally:
                self._asked = None
            waited = time.monotonic() - start
            if leased.over or leased.start < leased.stop or leased.block or not patient:
                self.seconds_waited += waited
                return leased
            if wait is None and waited >= self._timeout:
                raise DeadlineError(
                    late(self._client, self._timeout, f"samples of epoch {epoch}, which other workers hold")
                )
            time.sleep(pause if wait is None else max(0.0, min(pause, wait - waited)))
            pause = min(2 * pause, _ASK_AGAIN[1])

    def _lease(self, request: Lease, what: str) -> Leased:
        """Ask once."""
        self._leases += 1
        request = msgspec.structs.replace(request, number=self._leases)
        leased = self._ask(request, Leased, what, number=self._leases)
        is_of_it = (leased.sampler, leased.epoch) == (request.sampler, request.epoch)
        if not is_of_it or not leased.start <= leased.stop <= min(
            request.length, leased.start + request.count
        ):
            raise RunError(
                f"hub at {self._address} leased samples {leased.start} to {leased.stop} of epoch "
                f"{leased.epoch}, where up to {request.count} of the {request.length} of epoch "
                f"{request.epoch} were asked for"
            )
        return leased

    def check(self) -> None:
        """Raises RunError when the hub has given this worker up."""
        if self._given_up:
            raise RunError(f"hub at {self._address}: {self._given_up}")

    def leaves_because(self, reason: str) -> None:
        """Note why this worker leaves before the end; `goodbye` tells the hub."""
        self._leaves_because = one_line(reason, _REASON_CHARACTERS)

    def goodbye(self, finished: bool = False) -> None:
        """Leave in good order: the hub frees what was leased and not used. Heartbeats end. `finished`: at the
        end of the training, as all others."""
        self._stop_beating()
        if self.welcome is not None and not self._given_up:
            with contextlib.suppress(AtollError):  # a hub that is gone misses this worker's heartbeats
                if self._has_lost():
                    self._losses = self._client.losses
                    self._introduce(_FAREWELL_SECONDS)
                reason = "" if finished else self._leaves_because
                farewell = Goodbye(incarnation=self._incarnation, finished=finished, reason=reason)
                self._client.send(encode(farewell))
        self.welcome = None

    def close(self) -> None:
        """Close the connections; without `goodbye` before, the hub takes it for a death. Closing twice does
        no harm."""
        self._stop_beating()
        self._client.close()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.goodbye()
        self.close()

    @property
    def _incarnation(self) -> int:
        if self.welcome is None:
            raise RunError(f"hub at {self._address}: this worker has not joined, or has left")
        return self.welcome.incarnation

    def _ask(
        self,
        message: AnyMessage,
        expected: type[Answer],
        what: str,
        timeout: float | None = None,
        number: int | None = None,
    ) -> Answer:
        """Ask; after a lost connection say who we are on the new one, and ask again. The DeadlineError is of
        the whole wait. What was sent as a connection was lost may go out on the next one, beside what is
        asked again: with `number`, only an answer with that number counts.

        What had not left when the connection was lost goes out before that, and is a stranger's to the hub:
        one refusal after a loss may be of this.
        """
        until = time.monotonic() + (self._timeout if timeout is None else timeout)
        stale = False
        while True:
            self.check()
            try:
                if self._has_lost():
                    self._losses, stale = self._client.losses, True
                    self._introduce(max(0.0, until - time.monotonic()))
                left = max(0.0, until - time.monotonic())
                return ask(self._client, message, expected, left, what, number=number)[0]
            except DeadlineError:
                raise DeadlineError(late(self._client, self._timeout, what)) from None
            except (PeerLostError, RefusedError) as error:
                if self._has_lost():
                    continue
                if not (stale and isinstance(error, RefusedError)):
                    raise
                stale = False

    def _has_lost(self) -> bool:
        """Whether a connection was lost since the hub was told last who is on it."""
        self._client.check()
        return self._client.losses != self._losses

    def _introduce(self, deadline: float) -> None:
        """Tell the hub on a new connection which incarnation this is, so that it knows us on it."""
        if self.welcome is None:
            return
        hello = Hello(
            version=VERSION,
            run=self._run,
            role="worker",
            worker=self.welcome.worker,
            incarnation=self.welcome.incarnation,
            pid=os.getpid(),
        )
        ask(self._client, hello, Welcome, deadline, "its welcome on a new connection")

    def _beat(self, welcome: Welcome) -> None:
        """The thread of heartbeats."""
        with (
            Client(self._address, self._keys, limit=LIMIT, name="hub", reconnect=SOON) as link,
            HeartbeatSender(link, welcome, self._launcher) as sender,
        ):
            pause = 0.0
            while not self._pause(link, pause):
                pause = _OPENING_SECONDS
                if link.connected:  # else they would only heap up
                    self._send_beat(link, sender, welcome.incarnation)
                    pause = sender.pause()
                if self._given_up:
                    return
                self.silence.look(link, self._asked)

    def _send_beat(self, link: Client, sender: HeartbeatSender, incarnation: int) -> None:
        """Send a heartbeat, if it is time to. What the hub is to know beside goes with those that go to the
        hub directly: the first over each connection, and those that are wanted at once."""
        place = self._links.place(incarnation) if self._links is not None else None
        at_once = self._at_once.is_set()
        if at_once:  # before what is to be said is read
            self._at_once.clear()
        beat = Beat(incarnation, self.iteration, self._pace, self.size, self.batch)
        if not sender.look(beat, at_once=at_once, directly=place is not None):
            return
        if place is not None:
            link.send(encode(place))
        contributor = self._contributor
        if contributor is not None:
            link.send(encode(InGroup(incarnation=incarnation, contributor=contributor)))

    def _pause(self, link: Client, seconds: float) -> bool:
        """Take what the hub says for so long, or until a heartbeat is wanted at once; whether the heartbeats
        are to end. Its word that a ring broke frees a member that waits for another one."""
        until = time.monotonic() + seconds
        while not self._stop.is_set():
            if self._at_once.is_set() and link.connected:
                return False
            if self._links is not None and self.welcome is not None and link.connected:
                for word in self._links.measured(self.welcome.incarnation):
                    link.send(encode(word))
            left = until - time.monotonic()
            received = link.receive(max(0.0, min(left, _LISTEN_SECONDS)))
            if received is not None:
                self._note(received[0])
            elif left <= 0:
                return False
        return True

    def _note(self, header: bytes) -> None:
        try:
            message = decode_untrusted(header)
        except WireError:
            return
        if isinstance(message, Refused):
            self._given_up = one_line(message.reason, MOST_REASON)
        elif isinstance(message, RingNews):
            if self._links is not None and self._links.want(message.links):
                self._at_once.set()  # the next heartbeat says where
            self.news = message
        elif isinstance(message, MeasureLink) and self._links is not None:
            self._links.measure(message)

    def _stop_beating(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._links is not None:
            self._links.close()
