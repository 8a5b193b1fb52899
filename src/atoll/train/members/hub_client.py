"""A worker's client of the hub: rank and incarnation, the shards' addresses, leases, and heartbeats."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from atoll.core.errors import AtollError, DeadlineError, PeerLostError, RunError
from atoll.core.liveness import own_origin
from atoll.core.texts import one_line
from atoll.net.endpoint import Client
from atoll.net.heartbeats import Launcher
from atoll.net.hubconnection import HubConnection, HubHeartbeats
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON, Answer, RefusedError, late, who_is_missing
from atoll.net.route import own_address
from atoll.observe.notices import Notices
from atoll.train.members.heartbeats import HeartbeatSender
from atoll.train.sync.links import LinkEnd
from atoll.wire.messages import (
    MOST_CUT,
    VERSION,
    AnyMessage,
    Beat,
    Cut,
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
    encode,
)

SILENCE = 3.0  # seconds without an answer, after which the silence is reported
_FAREWELL_SECONDS = 5.0  # for a restarted hub to know the worker that says goodbye
_REASON_CHARACTERS = 300  # the most characters of the reason for leaving
_AT_ONCE = 0.2  # seconds to wait for an answer without which the worker can go on
_LOOK_SECONDS = 0.1  # between looks whether links are measured
_ASK_AGAIN = (0.01, 0.2)  # seconds between requests for one lease: at first, and at most

_Wish: TypeAlias = Gather | Reform | Enter | JoinGroup  # answered once other workers have come


class HubSilence:
    """The reports that the hub at `address` has not answered for a while, and that it answers again, by
    `tell(line)`.

    `meanwhile` ends the first line: it says how the run goes on without the hub.

    Attributes:
        since: the time at which the silence began (time.monotonic); None: the hub answers.
    """

    def __init__(self, address: str, tell: Callable[[str], None], meanwhile: str) -> None:
        self._address, self._tell, self._meanwhile = address, tell, meanwhile
        self.since: float | None = None
        self._told = False

    def look(self, link: Client, asked: float | None) -> None:
        """Check `link`. Its oldest question without an answer was sent at `asked` (time.monotonic); None:
        there is none."""
        now = time.monotonic()
        if link.connected and (asked is None or now - asked < SILENCE):
            if self._told:
                self._tell(f"the hub at {self._address} answers again")
            self.since, self._told = None, False
            return
        if self.since is None:
            self.since = now if asked is None or not link.connected else asked
        if not self._told and now - self.since >= SILENCE:
            self._told = True
            silence = f"the hub at {self._address} has not answered for {now - self.since:.1f} s"
            trouble = f" ({link.trouble})" if link.trouble else ""
            self._tell(f"{silence}{trouble}; {self._meanwhile}")


class HubClient:
    """A worker's connection to the hub at `address`.

    All calls come from one thread. Heartbeats have a thread and a connection of their own, since a script may
    compute for minutes. They go through `launcher` if it passes them on, else to the hub directly. Their
    thread also checks whether the hub is silent.

    Args:
        address: the hub's address.
        keys: the keys of the run; None: not encrypted.
        run: the run's name, if it is known; the hub's Welcome gives it.
        timeout: the deadline of each wait, in seconds (sync.timeout).
        launcher: passes heartbeats on; None without one.
        notices: prints warnings.
        without: returns how the run goes on while the hub is silent, in words, given the hub's Welcome.

    Attributes:
        iteration: the number of committed iterations, set by the session and sent in heartbeats.
        welcome: the hub's answer to `join`; None before, and after `goodbye`.
        seconds_waited: the seconds waited for leases so far.
        workers: the number of the run's living workers, by the latest lease; 0: not known yet.
        size: the bytes of this worker's gradients, sent in heartbeats.
        batch: the samples of its latest iteration, sent in heartbeats.
        late: True if the ring was under way when this worker came.
        news: the hub's latest news of a ring, as the heartbeats' thread received it.
        silence: watches for the hub's silence, from `join` on.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        run: str = "",
        timeout: float = 600.0,
        launcher: Launcher | None = None,
        notices: Notices | None = None,
        without: Callable[[Welcome], str] = lambda _welcome: "",
    ) -> None:
        self.iteration = 0
        self.welcome: Welcome | None = None
        self.seconds_waited, self.workers = 0.0, 0
        self._address, self._run = address, run
        self._launcher, self._without, self.notices = launcher, without, notices or Notices()
        self._hub = HubConnection(address, keys, timeout)
        self._leases = 0  # number of requests so far
        self._token = secrets.token_hex(8)  # by it the hub recognizes a Hello that is sent twice
        self._wishes = 0  # number of `_Wish` requests so far
        self._pace = 0.0
        self.size, self.batch = 0, 0.0
        self._links: LinkEnd | None = None  # None if the hub lets no links be measured
        self._contributor: int | None = None  # the group that this worker has moved to
        self.late = False
        self.news: RingNews | None = None
        self._beats = HubHeartbeats(address, keys, self._beat, self._note, self._look)
        self._sender: HeartbeatSender | None = None  # from `join` on
        self._leaves_because = ""  # the reason in goodbye, before the end of the training
        self.silence: HubSilence | None = None
        self._asked: float | None = None  # when a question without an answer was asked, by time.monotonic

    def join(self, wish: int = -1, site: str = "") -> Welcome:
        """Take part as rank `wish` (-1: any that is free), at `site` if the run has sites; heartbeats begin.

        A rank whose worker has just died is free after the hub's patience: the call waits that long. Raises
        RefusedError for a taken rank, another version or run, or an unknown site, and DeadlineError when
        there is no hub.
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
        welcome = self._hub.join(hello, "a rank in the run", self._hub.timeout)
        self._hub.hello = msgspec.structs.replace(
            hello, worker=welcome.worker, incarnation=welcome.incarnation, run=welcome.run
        )
        self.welcome, self.notices.worker = welcome, welcome.worker
        self._known_as = welcome.incarnation
        if welcome.links:
            self._links = LinkEnd(own_address(self._address) or "127.0.0.1")
        self.silence = HubSilence(
            self._address,
            lambda line: self.notices.warn(f"worker {welcome.worker}: {line}"),
            self._without(welcome),
        )
        self._sender = HeartbeatSender(welcome, self._launcher)
        self._beats.start()
        return welcome

    def wait_for_links(self) -> None:
        """Return when the links between the run's workers are measured, if the hub lets them be measured.

        Training before that would change the measurements. Raises DeadlineError when the other workers do not
        come.
        """
        if self._links is None:
            return
        until = time.monotonic() + self._hub.timeout
        while (news := self.news) is None or news.links:
            self.check()
            if time.monotonic() >= until:
                what = "the run's other workers, to measure the links to them"
                raise DeadlineError(late(self._hub.client, self._hub.timeout, what))
            time.sleep(_LOOK_SECONDS)

    def shards(self) -> list[str]:
        """Return the addresses of the shards that this worker talks to, by index, once all shards have come.

        At a site it is the site's shard alone. Raises DeadlineError if they do not come.
        """
        try:
            return list(self._ask(WhereAreShards(), Shards, "the shards' addresses").addresses)
        except DeadlineError as error:
            missing = who_is_missing(self._hub.client)
            if not missing or self.welcome is None:
                raise
            raise DeadlineError(
                f"worker {self.welcome.worker} waited {self._hub.timeout:.1f} s for the shards to come to "
                f"the hub at {self._address} (deadline sync.timeout, {self._hub.timeout:g} s): {missing}"
            ) from error

    def where_shards_are(self) -> list[str] | None:
        """Return the addresses of `shards` if the hub answers at once; None if it does not, or if a shard is
        missing."""
        try:
            return list(self._ask(WhereAreShards(), Shards, "the shards' addresses", _AT_ONCE).addresses)
        except (DeadlineError, PeerLostError):
            return None

    def gather(self) -> int:
        """Form the run's ring with all its workers; return the ring's number, which names the ring's keys.

        If `late` is True afterwards, the ring was formed without this worker. Raises DeadlineError, naming
        the workers that did not come.
        """
        timeout, what = self._hub.timeout, "the ring's other workers"
        ring = self._wish(Gather, Gathered, what, self._longest, seconds=timeout)
        if not ring.group:
            assert self.welcome is not None
            rank, world = self.welcome.worker, self.welcome.workers
            who = " and ".join(f"worker {missing}" for missing in ring.missing)
            absent = world - ring.there
            if absent > len(ring.missing):
                who += f" and {absent - len(ring.missing)} others"
            raise DeadlineError(
                f"worker {rank} waited {timeout:.1f} s for {who} to join the ring at the hub at "
                f"{self._address} (deadline sync.timeout, {timeout:g} s); {ring.there} "
                f"of {world} workers are there"
            )
        self.late = ring.late
        return ring.group

    def reform(
        self, group: int, rank: int, round: int, *, holds: bool, admits: bool, fresh: bool
    ) -> Reformed:
        """Form the ring after `group`, with all its living members; return it. See wire/messages.py: Reform.

        Raises DeadlineError when some members neither come nor die, and RunError when there is no next ring,
        or none with this worker.
        """
        what = f"the other members of ring {group}, to form the next one"
        return self._next_ring(
            Reform, what, group=group, rank=rank, round=round, holds=holds, admits=admits, fresh=fresh
        )

    def enter(self) -> Reformed:
        """Enter the ring that is under way, when its members admit newcomers; return the ring."""
        return self._next_ring(Enter, "the ring that is under way to let it in, between two iterations")

    def _next_ring(self, kind: type[Reform | Enter], what: str, **fields: Any) -> Reformed:
        try:
            ring = self._wish(kind, Reformed, what, self._hub.timeout, **fields)
        except RefusedError as error:
            raise RunError(str(error)) from None
        if not ring.group:
            raise RunError(f"the ring does not go on: {ring.reason}")
        return ring

    @property
    def _longest(self) -> float:
        """The seconds to wait for an answer that the hub gives within sync.timeout. A hub that takes longer
        is gone."""
        return self._hub.timeout + (0.0 if self.welcome is None else self.welcome.patience)

    def _wish(
        self, kind: type[_Wish], expected: type[Answer], what: str, timeout: float, **fields: Any
    ) -> Answer:
        """Send a request that the hub answers once other workers have come; return the answer."""
        self._wishes += 1
        wish = kind(incarnation=self._incarnation, number=self._wishes, **fields)
        return self._ask(wish, expected, what, timeout, self._wishes)

    def set_pace(self, seconds: float) -> None:
        """Set the seconds in which this worker computes a sample, for a run with groups; 0: not known yet.

        The first pace is sent to the hub at once.
        """
        first, self._pace = seconds > 0 and not self._pace, seconds
        if first:
            self._beats.at_once()

    @property
    def grouping(self) -> int:
        """The latest grouping that the hub has announced to this worker; 0 for none."""
        return self.news.grouping if self.news is not None else 0

    def join_group(self, grouping: int, iteration: int, held: Sequence[Used] = ()) -> Grouped:
        """Ask for this worker's group in `grouping`, at the end of its `iteration`-th iteration.

        Returns when all members have asked, or when the hub stops waiting for them. If `group` is 0 in the
        answer, the worker stays in its group. Raises DeadlineError when there is no hub.

        Args:
            grouping: the grouping's number.
            iteration: the number of iterations that this worker has made.
            held: leased positions that this worker has not used; the new group gets them.
        """
        what = f"the other members of its group, in grouping {grouping}"
        return self._wish(
            JoinGroup, Grouped, what, self._longest, grouping=grouping, iteration=iteration, held=list(held)
        )

    def in_group(self, contributor: int) -> None:
        """Announce that this worker has moved, and talks to the shards as `contributor`.

        Heartbeats to the hub repeat the announcement, so it survives a lost connection.
        """
        self._contributor = contributor
        self._beats.at_once()

    def lease(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float | None = None,
        contributor: int = 0,
        block: int = 0,
        cut: Cut | None = None,
        returned: Sequence[Used] = (),
        *,
        idle: bool = False,
    ) -> Leased:
        """Lease up to `count` positions of an epoch of `length` samples.

        While other workers hold the rest, the hub is asked again for up to `wait` seconds; then the result is
        an empty Leased with over=False. None: up to the timeout, and then DeadlineError is raised. A request
        whose answer is lost with a connection is sent again, and counts once.

        Args:
            sampler: the sampler's number in its session.
            epoch: the number of the epoch.
            length: the samples of the epoch.
            count: the most positions to lease.
            wait: seconds to ask again; None: until the timeout.
            contributor: of a group's member, the group (wire/messages.py: Lease).
            block: of a group's member, the block's number (wire/messages.py: Lease).
            cut: of a group's member, the parts in which members take batches (wire/messages.py: Lease).
            returned: leased positions that this worker gives back.
            idle: True in a loop without steps (wire/messages.py: Lease).
        """
        request = Lease(
            incarnation=self._incarnation,
            sampler=sampler,
            epoch=epoch,
            length=length,
            count=count,
            contributor=contributor,
            block=block,
            cut=cut,
            returned=list(returned),
            idle=idle,
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
            request = msgspec.structs.replace(request, returned=[])
            waited = time.monotonic() - start
            if leased.over or leased.start < leased.stop or leased.block or not patient:
                self.seconds_waited += waited
                return leased
            if wait is None and waited >= self._hub.timeout:
                what = f"samples of epoch {epoch}, which other workers hold"
                raise DeadlineError(late(self._hub.client, self._hub.timeout, what))
            time.sleep(pause if wait is None else max(0.0, min(pause, wait - waited)))
            pause = min(2 * pause, _ASK_AGAIN[1])

    def _lease(self, request: Lease, what: str) -> Leased:
        """Ask once. Raises RunError for a lease that does not answer the request."""
        self._leases += 1
        request = msgspec.structs.replace(request, number=self._leases)
        leased = self._ask(request, Leased, what, number=self._leases)
        is_of_it = (leased.sampler, leased.epoch) == (request.sampler, request.epoch)
        most = request.count
        if leased.cut is not None:  # then they are of batches
            whole = sum(leased.cut.parts.values()) or len(leased.cut.parts)
            is_of_it = is_of_it and request.cut is not None and whole < MOST_CUT
            most *= whole
        if not is_of_it or not leased.start <= leased.stop <= min(request.length, leased.start + most):
            raise RunError(
                f"hub at {self._address} leased samples {leased.start} to {leased.stop} of epoch "
                f"{leased.epoch}, where up to {most} of the {request.length} of epoch "
                f"{request.epoch} were asked for"
            )
        self.workers = leased.workers or self.workers
        return leased

    def check(self) -> None:
        """Raise RunError when the hub has given this worker up."""
        self._hub.check()

    def leaves_because(self, reason: str) -> None:
        """Note the reason why this worker leaves before the end; `goodbye` sends it to the hub."""
        self._leaves_because = one_line(reason, _REASON_CHARACTERS)

    def goodbye(self, finished: bool = False) -> None:
        """Leave in good order: heartbeats end, and the hub frees leases that were not used.

        `finished`: the training has come to its end, as it does on all workers.
        """
        self._stop_beating()
        if self.welcome is not None and not self._hub.refusal:
            with contextlib.suppress(AtollError):  # a hub that is gone misses this worker's heartbeats
                self._hub.introduce(_FAREWELL_SECONDS)
                reason = "" if finished else self._leaves_because
                farewell = Goodbye(incarnation=self._incarnation, finished=finished, reason=reason)
                self._hub.client.send(encode(farewell))
        self.welcome = None

    def close(self) -> None:
        """Close the connections. Without `goodbye` before, the hub takes this for a death. Closing twice does
        no harm."""
        self._stop_beating()
        self._hub.client.close()

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
        """Ask the hub (`HubConnection.ask`), for up to sync.timeout seconds by default."""
        deadline = self._hub.timeout if timeout is None else timeout
        return self._hub.ask(message, expected, what, deadline, number)

    def _beat(self, link: Client, at_once: bool) -> float:
        """Send a heartbeat if one is due; return the seconds until the next look.

        The place for link measurements and the group are sent with heartbeats to the hub itself: with the
        first over each connection, and with those that are wanted at once.
        """
        sender, incarnation = self._sender, self._known_as
        assert sender is not None
        place = self._links.place(incarnation) if self._links is not None else None
        beat = Beat(incarnation, self.iteration, self._pace, self.size, self.batch)
        if sender.look(link, beat, at_once=at_once, directly=place is not None):
            if place is not None:
                link.send(encode(place))
            contributor = self._contributor
            if contributor is not None:
                link.send(encode(InGroup(incarnation=incarnation, contributor=contributor)))
        return sender.pause()

    def _look(self, link: Client) -> None:
        """Send the hub the links that were measured, and report its silence."""
        if self._links is not None and link.connected:
            for word in self._links.measured(self._known_as):
                link.send(encode(word))
        if self.silence is not None:
            self.silence.look(link, self._asked)

    def _note(self, message: AnyMessage) -> bool:
        """Take a message of the hub; return False once the hub takes no heartbeats any more.

        News that a ring broke frees a member that waits for another one.
        """
        if isinstance(message, Refused):
            self._hub.refusal = one_line(message.reason, MOST_REASON)
            return False
        if isinstance(message, RingNews):
            if self._links is not None and self._links.want(message.links):
                self._beats.at_once()  # the next heartbeat tells where
            self.news = message
        elif isinstance(message, MeasureLink) and self._links is not None:
            self._links.measure(message)
        return True

    def _stop_beating(self) -> None:
        self._beats.stop()
        if self._sender is not None:
            self._sender.close()
        if self._links is not None:
            self._links.close()
