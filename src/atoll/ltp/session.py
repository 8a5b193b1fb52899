"""One end of a session: datagrams in, datagrams out, and the time of the next step.

No socket and no clock: the driver opens and seals datagrams (atoll.net.ltplink). A session joins the parts
that decide: Sender, Receiver, RateControl, and each stripe's SentRecords, Arrivals and Paths. Source:
docs/ltp.md, which has the states and timers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from atoll.core.errors import UserError
from atoll.ltp.acks import Arrivals, ack_delay
from atoll.ltp.arriving import MOST_BYTES, Receiver
from atoll.ltp.asking import Asking
from atoll.ltp.bodies import Items
from atoll.ltp.events import (
    Arrived,
    Asked,
    Burst,
    Delivered,
    Event,
    Lost,
    Mask,
    Migrated,
    Opened,
    Refused,
    Status,
    StripeChanged,
    Values,
)
from atoll.ltp.flights import BURST_SECONDS, MOST_LATE, Flights, Heard
from atoll.ltp.leaving import Sender
from atoll.ltp.order import Extent
from atoll.ltp.outbox import Handled, Outbox
from atoll.ltp.sent import ACK, CONTROL, SettledDatagrams
from atoll.ltp.settings import LtpSettings
from atoll.ltp.ways import Ways
from atoll.wire.base import WireError
from atoll.wire.datagrams import (
    MOST_STRIPES,
    SEAL_BYTES,
    Bytes,
    Datagrams,
    Kind,
    ack_bits,
    ack_bytes,
    ack_datagram,
    control_datagram,
    read_ack,
    write_headers,
)
from atoll.wire.linkcontrol import (
    Answer,
    Ask,
    Bye,
    Challenge,
    Closed,
    Early,
    Grant,
    Hello,
    Need,
    Ping,
    closed_of,
    decode_untrusted,
    need_of,
    padded,
)

__all__ = ["Arrived", "Asked", "Burst", "Delivered", "Event", "Lost", "Migrated", "Opened", "Refused"]
__all__ += ["LtpSession", "Status", "StripeChanged"]

KEEP_ALIVE_SHARE = 1 / 3  # of the idle time, between Pings: one or two may be lost
BYE_COPIES = 3  # sent together, since a Bye is never resent


class LtpSession:
    """One end of a session.

    Args:
        extents: chunks that may arrive; None: any, up to a bound.
        paths: the client's first address for each stripe; empty for a server.
        most_bytes: memory for all open arriving transfers.

    Raises:
        UserError: `stripes` or `paths` do not fit.
    """

    def __init__(
        self,
        settings: LtpSettings,
        *,
        session: int,
        client: bool,
        stripes: int,
        extents: Mapping[int, Extent] | None,
        rng: np.random.Generator,
        now: float,
        paths: Sequence[Hashable] = (),
        most_bytes: int = MOST_BYTES,
    ) -> None:
        if not 1 <= stripes <= MOST_STRIPES:
            raise UserError(f"stripes = {stripes}: between 1 and {MOST_STRIPES}")
        if len(paths) != (stripes if client else 0):
            raise UserError(
                f"{len(paths)} paths: a client gives one for each of its {stripes} stripes, a server none"
            )
        self.settings, self.session = settings, session
        self.drops: Counter[str] = Counter()  # ignored datagrams and messages, by reason
        self._flights = Flights(settings, stripes, rng, now)
        self.control = self._flights.control
        known: Sequence[Hashable | None] = paths if client else [None] * stripes
        self._ways = Ways(known, self._flights, rng, now)
        self._arrivals = [Arrivals(ack_bits(settings.datagram_bytes)) for _ in range(stripes)]
        self._outbox, self._handled = Outbox(), Handled()
        self._sender = Sender(settings)
        self._receiver = Receiver(settings, extents, self.drops, most_bytes)
        self._events: list[Event] = []
        self._opened = self._ended = False
        self._bye: list[Burst] = []
        self._asking = Asking(settings, self._sender, self._flights)
        self._delivered = 0  # bytes received
        self._heard = self._spoke = now
        self._next_send = now
        self._timed = False  # at the last burst only the pace held back more data
        if client:
            for stripe in range(stripes):
                hello = Hello(sequence=self._outbox.sequence)
                self._outbox.put(padded(hello, settings.datagram_bytes), stripe=stripe)

    # -- application ----------------------------------------------------------------------------------------

    def send(
        self,
        now: float,  # noqa: ARG002  # every input has the time
        chunk: int,
        iteration: int,
        values: Values,
        *,
        high: Mask | None = None,
        reliable: bool = False,
    ) -> int:
        """Queue `values`, (elements,), as a transfer; return its id.

        The caller must not change them before Delivered. `high` is a mask by block, (blocks,); None: no block
        but the last, which is always high. Raises UserError.
        """
        if self._ended:
            raise UserError("the session has ended")
        return self._sender.add(chunk, iteration, values, high, reliable)

    def block(self, itemsize: int) -> int:
        """Return the elements in a block, for elements of `itemsize` bytes."""
        return self._sender.block(itemsize)

    def change_keys(self) -> None:
        """Change to the next keys as soon as the other end has acknowledged the present ones."""
        for phase in self._flights.phases:
            phase.wanted = True

    def ask(self, size: int) -> None:
        """Ask for a share of the receiver's link for `size` bytes."""
        self._outbox.put(Ask(sequence=self._outbox.sequence, size=size))

    def grant(self, rate: float, seconds: float, *, kept: bool = True) -> None:
        """Grant the other end `rate` bytes per second of this end's link for `seconds`.

        Without `kept` a lost grant is not resent: a newer one has followed by then.
        """
        self._outbox.put(Grant(sequence=self._outbox.sequence, rate=rate, seconds=seconds), kept=kept)

    def close(self, now: float, reason: str) -> None:
        """End the session, and send the other end the reason."""
        if self._ended:
            return
        message = Bye(sequence=self._outbox.sequence, reason=reason[:128])
        self._outbox.put(message, kept=False)
        entry = self._outbox.take(lambda queued: queued.sequence == message.sequence)
        for stripe, paths in enumerate(self._ways.paths):
            if entry is not None and paths.active is not None:
                frames = np.repeat(control_datagram(entry.body), BYE_COPIES, axis=0)
                if paths.allowance(paths.active) >= frames.size:
                    items = np.zeros(BYE_COPIES, dtype=np.int64)
                    self._bye.append(self._burst(now, stripe, paths.active, Kind.CONTROL, ACK, items, frames))
        self._end(f"closed here: {reason}")

    def fail(self, reason: str) -> None:
        """End the session without a word to the other end, because the driver cannot go on."""
        if not self._ended:
            self._end(reason)

    def poll_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def status(self) -> Status:
        """Return the session's figures."""
        control, receiver = self.control, self._receiver
        return Status(
            rate=control.rate,
            estimate=control.estimate,
            rtt=control.trip.smoothed,
            min_rtt=control.trip.least,
            loss=control.loss,
            target=control.target.value,
            in_flight=self._flights.bytes,
            sent=sum(sent.next for sent in self._flights.stripes),
            lost=self._flights.lost,
            retransmitted=self._sender.retransmitted,
            repaired=receiver.repaired,
            borne=receiver.borne,
            filled=receiver.filled,
            reason=control.decision.reason,
            target_reason=control.target.reason,
        )

    @property
    def ended(self) -> bool:
        """True if the session is over."""
        return self._ended

    # -- input ----------------------------------------------------------------------------------------------

    def handle_datagrams(self, now: float, path: Hashable, stripe: int, batch: Datagrams) -> None:
        """Take opened, fresh datagrams of one kind, size and stripe, in the order of arrival."""
        if self._ended or not len(batch) or not 0 <= stripe < len(self._ways):
            return
        numbers = batch.headers["number"].astype(np.int64)
        size = len(batch) * (batch.frames.shape[1] + SEAL_BYTES)
        self._delivered += size
        self._heard = now
        self._ways.paths[stripe].handle_received(now, path, size, int(numbers.max()))
        if not self._opened:
            self._opened = True
            self._events.append(Opened(self.session, "a sealed datagram came from the other end"))
        delay = ack_delay(self.control.trip.smoothed)
        arrivals = self._arrivals[stripe]
        arrivals.handle_numbers(now, numbers, asks=batch.kind is not Kind.ACK, longest_delay=delay)
        if batch.kind is Kind.ACK:
            for frame in batch.frames:
                self._handle_ack(now, frame)
        elif batch.kind is Kind.CONTROL:
            for body in batch.bodies:
                self._handle_control(now, stripe, path, body)
        else:
            touched = self._receiver.handle_slices(now, batch, self.control.trip.smoothed)
            self._settle(now, touched)
        self._poll_moves(now)

    def _handle_ack(self, now: float, frame: Bytes) -> None:
        ack = read_ack(frame)
        if ack.of >= len(self._ways):
            self.drops["an Ack of an unknown stripe"] += 1
            return
        heard = self._flights.handle_ack(now, ack)
        self._ways.paths[ack.of].round_trip = self.control.trip.smoothed
        self._tell(now, heard)
        if heard.back:
            reason = f"stripe {ack.of} is acknowledged again"
            self._events.append(StripeChanged(ack.of, True, reason))

    def _tell(self, now: float, heard: Heard) -> None:
        """Pass on acknowledged and lost datagrams to the parts that sent them, and to the rate control."""
        self._pass_on(heard.told)
        self._flights.settle(now, heard)

    def _pass_on(self, told: SettledDatagrams) -> None:
        """Pass on acknowledged and lost datagrams to the parts that sent them."""
        for transfer, items in told.acked.items():
            if transfer == CONTROL:
                self._outbox.handle_acked(items.tolist())
            else:
                self._sender.handle_acked(transfer, items)
        for transfer, items in told.lost.items():
            if transfer == CONTROL:
                self._outbox.handle_lost(items.tolist())
            else:
                self._sender.handle_lost(transfer, items)

    def _handle_control(self, now: float, stripe: int, path: Hashable, body: Bytes) -> None:
        try:
            message = decode_untrusted(body)
            if not self._handled.fresh(message.sequence):
                return
            if isinstance(message, Closed):
                self._events += self._sender.handle_closed(message)
            elif isinstance(message, Early):
                self._sender.handle_early(message.transfer)
            elif isinstance(message, Need):
                self._sender.handle_need(now, message, self.control.trip.smoothed)
        except WireError:
            self.drops["no control message"] += 1  # the error's own words would each be a new key
            return
        if isinstance(message, Challenge):
            answer = Answer(sequence=self._outbox.sequence, token=message.token)
            self._outbox.put(answer, kept=False, stripe=stripe, path=path)
        elif isinstance(message, Answer):
            self._ways.paths[stripe].handle_answer(now, path, message.token)
        elif isinstance(message, Grant):
            self.control.handle_grant(now, message.rate, message.seconds)
            self._asking.handle_grant(now)
        elif isinstance(message, Ask):
            self._events.append(Asked(message.size, f"the other end has {message.size} B to send"))
        elif isinstance(message, Bye):
            self._end(f"the other end closed the session: {message.reason}")

    def _settle(self, now: float, touched: list[int]) -> None:
        """Apply the receiver's rules to these arriving transfers."""
        for transfer in touched:
            reorder = max(each.reorder for each in self._arrivals)
            trip = self.control.trip
            done = self._receiver.poll(now, transfer, reorder, trip.smoothed, trip.variation)
            if done.early:
                self._outbox.put(Early(sequence=self._outbox.sequence, transfer=transfer))
            if done.need is not None:
                need = need_of(self._outbox.sequence, transfer, done.need, self.settings.datagram_bytes)
                if need is not None:
                    self._outbox.put(need, kept=False)
            if done.event is not None:
                self._events.append(done.event)
            if done.missing is not None:
                parts = closed_of(
                    self._outbox.sequence,
                    transfer,
                    done.missing,
                    done.fill,
                    done.how,
                    self.settings.datagram_bytes,
                    done.order,
                )
                for part in parts:
                    self._outbox.put(part)
                for each in self._arrivals:
                    each.hurry(now)

    def _poll_moves(self, now: float) -> None:
        for stripe, paths in enumerate(self._ways.paths):
            moved = paths.poll_moves(now)
            if moved is not None:
                self._events.append(Migrated(stripe, moved.path, moved.reason))
                if moved.before is not None:
                    self.control.handle_path_change("the other end has another address")

    # -- output ---------------------------------------------------------------------------------------------

    def poll_datagrams(self, now: float) -> Burst | None:
        """Return the next burst if one is to go now. Call it until it returns None."""
        if self._ended:
            return self._bye.pop(0) if self._bye else None
        self._poll_timers(now)
        if self._ended:
            return None
        return self._poll_ack(now) or self._poll_control(now) or self._poll_data(now)

    def poll_deadline(self) -> float:
        """Return the time at which poll_datagrams may have something; inf: only after input."""
        if self._ended:
            return -math.inf if self._bye else math.inf
        if self._outbox and any(self._ways.takes(message) for message in self._outbox.queued):
            return -math.inf
        waits = [self._heard + self.settings.idle_seconds, self._keep_alive_at, self._flights.timeout_at]
        waits += [self._flights.loss_at, self._flights.stripes_at]
        waits.append(self._flights.waits_since + self.settings.idle_seconds)
        waits += [paths.poll_deadline() for paths in self._ways.paths]
        waits += [
            arrivals.due
            for stripe, arrivals in enumerate(self._arrivals)
            if self._ways.active(stripe, ack_bytes(arrivals.bits)) is not None
        ]
        if any(self._flights.key_asks(stripe) for stripe in range(len(self._ways))):
            return -math.inf
        waits += [self._receiver.deadline, self._sender.due, self._asking.due]
        if (
            self._sender.ready
            and self._flights.room > 0
            and self._ways.of_data(self.settings.datagram_bytes) is not None
        ):
            waits.append(-math.inf if self._flights.probes else self._next_send)
        return min(waits)

    def _poll_timers(self, now: float) -> None:
        if now >= self._heard + self.settings.idle_seconds:
            nothing = "nothing" if self._opened else "no answer"
            self._end(f"{nothing} came from the other end for {self.settings.idle_seconds:g} s")
            return
        if now >= self._flights.waits_since + self.settings.idle_seconds:
            self._end(f"the other end acknowledged nothing for {self.settings.idle_seconds:g} s")
            return
        if self._outbox.full:
            self._end(f"the other end acknowledged none of {self._outbox.waiting} messages")
            return
        for heard in self._flights.poll_lost(now):
            self._tell(now, heard)
        if now >= self._flights.timeout_at:
            self._probe(now)
        if now >= self._flights.stripes_at:
            self._poll_stripes(now)
        if now >= self._sender.due:
            self._sender.poll(now)
        if now >= self._asking.due:
            size = self._asking.ask(now)
            self._outbox.put(Ask(sequence=self._outbox.sequence, size=size), kept=False)
        for stripe in range(len(self._ways)):
            if self._flights.key_asks(stripe):
                self._flights.phases[stripe].handle_asked()
                self._outbox.put(Ping(sequence=self._outbox.sequence), stripe=stripe)
        if now >= self._keep_alive_at:
            self._spoke = now
            self._outbox.put(Ping(sequence=self._outbox.sequence), kept=False)
        self._poll_moves(now)
        if now >= self._receiver.deadline:
            self._settle(now, self._receiver.due(now))
        for stripe, path, token in self._ways.poll_challenges(now):
            challenge = Challenge(sequence=self._outbox.sequence, token=token)
            self._outbox.put(challenge, kept=False, stripe=stripe, path=path)

    @property
    def _keep_alive_at(self) -> float:
        return max(self._spoke, self._heard) + self.settings.idle_seconds * KEEP_ALIVE_SHARE

    def _probe(self, now: float) -> None:
        """Resend the oldest datagrams in flight, beyond rate and window."""
        for stripe, transfer, item in self._flights.handle_timeout(now):
            if transfer == CONTROL and self._outbox.resend(item):
                continue
            if transfer < 0 or not self._sender.probe(transfer, item):
                self._outbox.put(Ping(sequence=self._outbox.sequence), kept=False, stripe=stripe)

    def _poll_stripes(self, now: float) -> None:
        """Send questions on silent stripes, and resend their lost datagrams on the others."""
        due, gone = self._flights.poll_stripes(now)
        for stripe in due.silent:
            reason = f"stripe {stripe} is silent while others are acknowledged: unused until it answers"
            self._events.append(StripeChanged(stripe, False, reason))
        for told in gone:
            self._pass_on(told)
        for stripe in due.questions:
            self._outbox.put(Ping(sequence=self._outbox.sequence), kept=False, stripe=stripe)

    def _poll_ack(self, now: float) -> Burst | None:
        for stripe, arrivals in enumerate(self._arrivals):
            path = self._ways.active(stripe, ack_bytes(arrivals.bits)) if now >= arrivals.due else None
            ack = arrivals.poll_ack(now, stripe, self._delivered) if path is not None else None
            if ack is not None and path is not None:
                items = np.zeros(1, dtype=np.int64)
                return self._burst(now, stripe, path, Kind.ACK, ACK, items, ack_datagram(ack))
        return None

    def _poll_control(self, now: float) -> Burst | None:
        message = self._outbox.take(self._ways.takes) if self._outbox else None
        way = self._ways.of_control(message) if message is not None else None
        if message is None or way is None:
            return None
        items = np.array([message.sequence], dtype=np.int64)
        return self._burst(now, *way, Kind.CONTROL, CONTROL, items, control_datagram(message.body))

    def _poll_data(self, now: float) -> Burst | None:
        if now < self._next_send and not self._flights.probes:
            return None
        timed, self._timed = self._timed, False
        count = min(self._flights.burst, self._flights.room)
        if count <= 0:
            return None
        way = self._ways.of_data(self.settings.datagram_bytes)
        if way is None and self._sender.ready:  # no window begins before some address takes data
            return None
        outgoing = self._sender.next(now, self.control, self._flights.likely_loss, self._flights.burst_length)
        if outgoing is None or way is None:
            self._flights.handle_limited()
            self._flights.probes = 0
            return None
        stripe, path, allowed = way
        taken = outgoing.take(now, min(count, allowed))
        if taken is None:
            return None
        kind, items = taken
        frames = np.empty((len(items), outgoing.size), dtype=np.uint8)
        frames[:, -SEAL_BYTES:] = 0
        outgoing.bodies.write(kind, items, frames)
        self._ways.had_turn(stripe)
        self._flights.probes = max(self._flights.probes - len(items), 0)
        # Catch up after a late timer, or a loaded machine would never reach its rate.
        late = MOST_LATE if timed else BURST_SECONDS
        self._next_send = max(self._next_send, now - late) + frames.size / self.control.rate
        burst = self._burst(now, stripe, path, kind, outgoing.transfer, items, frames)
        self._timed = self._sender.ready
        if not self._timed:
            self._flights.handle_limited()
        return burst

    def _burst(
        self,
        now: float,
        stripe: int,
        path: Hashable,
        kind: Kind,
        transfer: int,
        items: Items,
        frames: Bytes,
    ) -> Burst:
        """Number the datagrams, write their headers, and record them as sent."""
        phase = self._flights.phase(stripe)
        first = self._flights.add(now, stripe, transfer, items, frames.shape[1])
        write_headers(frames, kind, phase, stripe, self.session, first)
        self._ways.paths[stripe].handle_sent(path, frames.size)
        self._spoke = now
        return Burst(path, stripe, frames, phase)

    def _end(self, reason: str) -> None:
        self._ended = True
        delivered, sent = self._sender.end()
        self._events += delivered
        self._events.append(Lost(self.session, reason, sent, self._receiver.end()))
