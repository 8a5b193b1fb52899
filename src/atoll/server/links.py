"""A shard's outgoing connections: to the hub, and to the shard that keeps the log."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from atoll.core.errors import DeadlineError, GivenUpError, PeerLostError, RunError
from atoll.core.liveness import own_origin
from atoll.core.texts import one_line
from atoll.net.endpoint import Client, poll
from atoll.net.hubconnection import HubConnection, HubHeartbeats
from atoll.net.keys import Keys
from atoll.net.requests import MOST_REASON, RefusedError, decode_from
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Duty,
    Entry,
    Follow,
    Goodbye,
    Heartbeat,
    Hello,
    Over,
    Refused,
    Shards,
    Staged,
    Welcome,
    WhereAreShards,
    encode,
)

_FRAME = 2**26  # bytes: no tensor comes this way
_GRACE = 2.0  # seconds
_UNWELCOME = 3.0  # seconds without shard 0's welcome, after which it is looked for again
_LOOK_SECONDS = 0.05  # seconds between checks of a connection that is not open yet


class HubLink:
    """The connection to the hub of shard `shard`, or of the shard of `site`.

    `timeout` is the most seconds to wait for the hub's welcome; `incarnation` the hub's number for this shard
    before a restart; `token` the random name of the shard's directory. `duty` is the hub's latest word on the
    shard's role if every shard has a standby, else None.

    Heartbeats have a thread and a connection of their own, since a shard may be busy for long, receiving a
    large model say. After a lost connection the shard says Hello again, since the hub may be another process.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        *,
        run: str,
        shard: int = -1,
        site: str = "",
        own: str,
        timeout: float,
        incarnation: int = 0,
        token: str = "",
    ) -> None:
        self._hub = HubConnection(address, keys)
        self.client = self._hub.client
        self.addresses: list[str] = []  # the shards' addresses, once all are there
        self.over = False  # the hub says that the run is over
        self.steps = 0  # sent with each heartbeat
        self._stranger = 0  # an incarnation of ours that the hub no longer knows
        self._left = False
        self._hello = Hello(
            version=VERSION,
            run=run,
            role="site" if site else "shard",
            shard=shard,
            site=site,
            address=own,
            incarnation=incarnation,
            token=token,
            life=secrets.token_hex(8),
            pid=os.getpid(),
            origin=own_origin(),
        )
        self._told: Duty | None = None  # the latest Duty on each connection
        self._told_by_beat: Duty | None = None
        try:
            self.welcome = self._hub.join(self._hello, "its welcome", timeout)
            self._wait_for_duty(timeout)
        except BaseException:
            self.client.close()
            raise
        self.client.send(encode(WhereAreShards()))
        self._beats = HubHeartbeats(address, keys, self._beat, self._note)
        self._beats.start()

    def _wait_for_duty(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.welcome.replicas > 1 and self._told is None:
            if time.monotonic() > until:
                raise DeadlineError(
                    f"waited {timeout:.1f} s for {self.client.name} at {self.client.address} on whether "
                    "this is the shard's primary or its standby"
                )
            poll([self.client], _LOOK_SECONDS)
            self.take()

    @property
    def duty(self) -> Duty | None:
        """The hub's latest Duty: whether this process is the primary or the standby."""
        one, other = self._told, self._told_by_beat
        return one if other is None or (one is not None and one.term >= other.term) else other

    @property
    def standing(self) -> int:
        """A number that grows with each process that the hub lets serve as this shard; earlier processes have
        lower ones."""
        duty = self.duty
        return self.welcome.incarnation if duty is None else duty.term

    def say(self, message: AnyMessage) -> None:
        """Send a message if the hub is connected. The caller must repeat it."""
        self._hub.say(message)

    def _beat(self, link: Client, _at_once: bool) -> float:
        welcome = self.welcome
        link.send(encode(Heartbeat(run=welcome.run, incarnation=welcome.incarnation, iteration=self.steps)))
        return welcome.heartbeat or 1.0

    def _note(self, message: AnyMessage) -> bool:
        """Handle the answer to a heartbeat; returns False if the hub refuses this shard, which ends the
        heartbeats."""
        self.over = self.over or isinstance(message, Over)
        if isinstance(message, Duty) and message.term >= self._term(self._told_by_beat):
            self._told_by_beat = message
        if isinstance(message, Refused):
            self._stranger = self.welcome.incarnation
        return not self._hub.refusal

    def _term(self, duty: Duty | None) -> int:
        return duty.term if duty is not None else -1

    def goodbye(self) -> None:
        """Tell the hub that this site leaves the run."""
        self._beats.stop()
        self._left = True
        self.client.send(encode(Goodbye(incarnation=self.welcome.incarnation)))

    def take(self) -> None:
        """Handle messages from the hub, and say Hello again where needed. Raises RefusedError if the hub
        refuses this shard, GivenUpError if a standby exists as well."""
        given_up = self._stranger == self.welcome.incarnation
        # A hub that gave this shard up may take it back, unless another process has its place.
        hello = msgspec.structs.replace(self._hello, since=self.welcome.incarnation)
        if not self._left and self._hub.greet(hello, again=given_up):
            self._stranger = 0
            if not self.addresses:
                self.client.send(encode(WhereAreShards()))
        for message in self._hub.take():
            if isinstance(message, Shards):
                self.addresses = list(message.addresses) or self.addresses
            elif isinstance(message, Welcome):
                self.welcome = message
            elif isinstance(message, Duty):
                self._told = message if message.term >= self._term(self._told) else self._told
        refusal = self._hub.refusal
        if refusal and not self._left:
            if self.welcome.replicas > 1:
                raise GivenUpError(f"hub at {self.client.address}: {refusal}")
            raise RefusedError(f"hub at {self.client.address} refused: {refusal}")

    def ask_where(self) -> None:
        """Ask the hub for the shards' addresses, one of which may have changed; the answer updates
        `addresses`."""
        self._hub.say(WhereAreShards())

    def close(self) -> None:
        """Disconnect. If the run is over, say Goodbye, for which the hub waits."""
        self._beats.stop()
        if self.over and not self._left:
            self.client.send(encode(Goodbye(incarnation=self.welcome.incarnation)))
        self.client.close()


class LogLink:
    """A following shard's connection to shard 0. `apply(entry, header)` takes each log entry.

    If shard 0 keeps a journal it may come back. `is_lost` then says that this connection is to be replaced.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        *,
        run: str,
        shard: int,
        apply: Callable[[Entry, bytes], None],
        incarnation: int = 0,
    ) -> None:
        self.client = Client(address, keys, limit=_FRAME, name="shard 0")
        self._shard, self._apply = shard, apply
        self._welcomed, self._since = False, time.monotonic()
        self._lost_at = 0.0
        self.comes_back = False
        self.is_lost = False
        hello = Hello(version=VERSION, run=run, role="shard", shard=shard, incarnation=incarnation)
        self._send(msgspec.structs.replace(hello, pid=os.getpid()))

    @property
    def _may_come_back(self) -> bool:
        """True if shard 0 announced that it may come back, or has sent no welcome yet."""
        return self.comes_back or not self._welcomed

    def follow(self, after: int) -> None:
        """Request the log's entries from this sequence number on."""
        self._send(Follow(shard=self._shard, after=after))

    def staged(self, worker: int, incarnation: int, iteration: int) -> None:
        """Report to the log that this shard has a whole contribution."""
        self._send(Staged(shard=self._shard, worker=worker, incarnation=incarnation, iteration=iteration))

    def take(self) -> None:
        """Handle received messages. Raises RunError if the log refuses, PeerLostError if shard 0 is gone for
        good."""
        while True:
            received = self.client.receive(0)
            # Checked after receiving: the connection may have been lost and reopened while `apply` ran.
            if self._may_come_back and self.client.losses:
                self.is_lost = True  # a connection that reopened by itself has sent no Hello
                return
            if received is None:
                break
            message = decode_from(self.client, received[0])
            if isinstance(message, Entry):
                self._apply(message, received[0])
            elif isinstance(message, Welcome):
                self.comes_back, self._welcomed = message.comes_back, True
                self.is_lost = message.shard > 0  # another shard has shard 0's old port
            elif isinstance(message, Refused):
                raise RunError(
                    f"shard 0 at {self.client.address} refused: {one_line(message.reason, MOST_REASON)}"
                )
        self.client.check()
        if not self.client.losses:
            waited = time.monotonic() - self._since
            if not self._welcomed and self.client.connected and waited > _UNWELCOME:
                self.is_lost = True  # a standby never answers, nor does a shard 0 that was one then
            return
        if self._may_come_back:
            self.is_lost = True
            return
        # At the end of a run all shards are stopped, and shard 0 may stop first.
        self._lost_at = self._lost_at or time.monotonic()
        if time.monotonic() - self._lost_at > _GRACE:
            raise PeerLostError(
                f"the connection to shard 0 at {self.client.address}, which keeps the log, was lost"
            )

    def close(self) -> None:
        self.client.close()

    def _send(self, message: AnyMessage) -> None:
        self.client.send(encode(message))


def earliest(times: Sequence[float | None], most: float) -> float:
    """Seconds until the first of these monotonic times, between 0 and `most`."""
    now = time.monotonic()
    return max(0.0, min([most, *(each - now for each in times if each is not None)]))
