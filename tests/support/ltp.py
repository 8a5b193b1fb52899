"""Two ends of the loss-tolerant transport over a virtual network: an hour of a bad link in seconds, each time
alike.

`Pair` is to two `LtpSession`s what the engine is on a machine: it seals, opens, keeps the replay windows, and
moves the clock on to whatever is next. What a test wants to happen to datagrams is a `Tap`, which sees each
burst before it is sealed or after. `Ledger` keeps the books of a sender with error feedback and of its
receiver: nothing is lost, only late.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from atoll.ltp.blocks import mean_abs
from atoll.ltp.events import Arrived, Delivered, Event, Lost
from atoll.ltp.filling import LastValues
from atoll.ltp.order import Extent
from atoll.ltp.replay import ReplayWindow
from atoll.ltp.session import Burst, LtpSession
from atoll.ltp.settings import LtpSettings
from atoll.net.seals import Opener, Sealer
from atoll.wire.datagrams import Bytes, Flow, Kind, headers_untrusted, payload_bytes, split_untrusted
from support.sim import Delivery, LinkModel, Network, VirtualClock

Way: TypeAlias = Literal["up", "down"]  # from the client to the server, or back
Address: TypeAlias = tuple[str, int, int]  # a machine, a port, and which of its addresses
Mask: TypeAlias = npt.NDArray[np.bool_]
Values: TypeAlias = npt.NDArray[Any]
Sums: TypeAlias = npt.NDArray[np.float64]

SESSION = 7
GIGABIT = LinkModel(rate=125e6, delay=0.02)
SECRET = bytes(range(32))
MOST_IDLE_TURNS = 100  # at one moment, without a datagram or an event: a deadline that is due for ever


@dataclass(frozen=True)
class Passing:
    """A burst on its way out, before it comes to the link: of one kind and one stripe."""

    way: Way
    now: float
    kind: Kind
    stripe: int
    path: Hashable  # where it goes
    first: int  # the place of its first datagram among all of this way, from 0
    first_of_kind: int  # and among those of its kind
    frames: Bytes  # (n, size); a tap may write to it

    @property
    def nth(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first, self.first + len(self.frames))

    @property
    def nth_of_kind(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first_of_kind, self.first_of_kind + len(self.frames))


Tap: TypeAlias = Callable[
    [Passing], Bytes
]  # returns what goes on; datagrams of it may be lost, changed, or more


def lose(
    way: Way | None = None,
    kind: Kind | None = None,
    nth: Callable[[npt.NDArray[np.int64]], Mask] | None = None,
) -> Tap:
    """A tap that loses datagrams of this way and kind; `nth`: which of them, by their place among these."""

    def tap(passing: Passing) -> Bytes:
        if way not in (None, passing.way) or kind not in (None, passing.kind):
            return passing.frames
        places = passing.nth if kind is None else passing.nth_of_kind
        lost = np.ones(len(places), bool) if nth is None else nth(places)
        return passing.frames[~lost]

    return tap


class End:
    """One end: its session, and what the engine keeps for it."""

    def __init__(self, session: LtpSession, client: bool, stripes: int, seal: bool) -> None:
        self.session: LtpSession | None = session  # None: it died
        self.way: Way = "up" if client else "down"  # which way what it sends goes
        self.name = "client" if client else "server"
        numbers = range(stripes)
        self.sealers = [Sealer(SECRET, client=client, stripe=stripe, seal=seal) for stripe in numbers]
        self.openers = [Opener(SECRET, client=client, stripe=stripe, seal=seal) for stripe in numbers]
        self.replay = [ReplayWindow() for _ in numbers]
        self.addresses: list[Address] = [(self.name, stripe, 0) for stripe in numbers]
        self.drops: Counter[str] = Counter()  # what came and was not taken, by the reason
        self.events: list[Event] = []
        self.sent = 0  # datagrams
        self.sent_of: Counter[Kind] = Counter()
        self.sent_bytes: Counter[Hashable] = Counter()  # by where they go
        self.received_bytes: Counter[Hashable] = Counter()  # by where they come from, opened ones


class Pair:
    """A client and a server, and a link between them. `link` is both ways alike unless `back` is given."""

    def __init__(
        self,
        settings: LtpSettings | None = None,
        link: LinkModel = GIGABIT,
        seed: int = 1,
        *,
        back: LinkModel | None = None,
        server_settings: LtpSettings | None = None,
        stripes: int = 1,
        extents: Mapping[int, Extent] | None = None,
        changes: Sequence[tuple[float, LinkModel]] = (),
        outages: Sequence[tuple[float, float]] = (),
        seal: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        rngs = np.random.default_rng(seed).spawn(4)
        self.network = Network(self.clock, rngs[0])
        if back is None:
            self.network.add_link("client", "server", link, changes=changes, outages=outages)
        else:
            self.network.add_link("client", "server", link, changes=changes, outages=outages, both=False)
            self.network.add_link("server", "client", back, both=False)
        settings = settings or LtpSettings()

        def end(settings: LtpSettings, client: bool, rng: np.random.Generator) -> End:
            paths = [("server", stripe, 0) for stripe in range(stripes)] if client else []
            session = LtpSession(
                settings, session=SESSION, client=client, stripes=stripes, extents=extents, rng=rng,
                now=self.clock.now, paths=paths,
            )  # fmt: skip
            return End(session, client, stripes, seal)

        self.client = end(settings, True, rngs[1])
        self.server = end(server_settings or settings, False, rngs[2])
        self.ends: dict[Way, End] = {"up": self.client, "down": self.server}
        self.rng = rngs[3]  # a test's own
        self.opened_taps: list[Tap] = []  # see datagrams before they are sealed
        self.sealed_taps: list[Tap] = []  # and after
        self.watchers: list[Callable[[End, Event], None]] = []
        self._idle_turns = 0
        for name in ("client", "server"):
            self.network.attach(name, self._arrive)

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.clock.now

    def next_event(self) -> float:
        """When something happens next, whoever does it; infinity when all wait for ever."""
        deadlines = [end.session.poll_deadline() for end in self.ends.values() if end.session]
        return float(min(self.network.next_event(), self.clock.next_event(), *deadlines, math.inf))

    def step(self, limit: float = math.inf) -> bool:
        """Go on to what happens next, and do it; False, with the clock at `limit`, when nothing does by
        then."""
        self._flush()
        return self._step(limit)

    def _step(self, limit: float) -> bool:
        at = max(self.next_event(), self.now)
        if at > limit:
            self.clock.advance(limit)
            return False
        if at == math.inf:
            raise AssertionError("nothing will ever happen again: no deadline, and nothing on its way")
        turn = at > self.now
        self.network.run(at)
        if self._flush() or turn:
            self._idle_turns = 0
        self._idle_turns += 1
        if self._idle_turns > MOST_IDLE_TURNS:
            raise AssertionError(f"a deadline is due for ever at {self.now:.6f}: {self.describe()}")
        return True

    def run(self, seconds: float) -> None:
        """Go on for so long."""
        until = self.now + seconds
        self._flush()
        while self._step(until):
            pass

    def run_until(self, condition: Callable[[], bool], limit: float = 60.0) -> float:
        """Go on until `condition` holds; returns how long that took. Raises AssertionError where it does not
        within `limit` seconds of the virtual clock."""
        begun = self.now
        self._flush()
        while not condition():
            if not self._step(begun + limit):
                raise AssertionError(f"not within {limit:g} s: {self.describe()}")
        return self.now - begun

    def describe(self) -> str:
        """What each end says of itself, for a test that failed."""
        told = [
            f"{end.name}: {end.session.status() if end.session else 'dead'}" for end in self.ends.values()
        ]
        return "; ".join([f"at {self.now:.6f}", *told])

    # -- what the engine does --------------------------------------------------------------------------------

    def _flush(self) -> bool:
        """Send what is to be sent, and take in what is told; whether there was any."""
        busy = False
        for end in self.ends.values():
            while end.session and (burst := end.session.poll_datagrams(self.now)) is not None:
                self._send(end, burst)
                busy = True
            busy |= self._take_events(end)
        return busy

    def _take_events(self, end: End) -> bool:
        events = end.session.poll_events() if end.session else []
        end.events += events
        for event in events:
            for watcher in self.watchers:
                watcher(end, event)
        return bool(events)

    def _send(self, end: End, burst: Burst) -> None:
        kind, count = Kind(burst.frames[0, 1]), len(burst.frames)
        assert (burst.frames[:, 1] == kind).all(), "a burst is of one kind"
        passing = Passing(
            end.way,
            self.now,
            kind,
            burst.stripe,
            burst.path,
            end.sent,
            end.sent_of[kind],
            burst.frames.copy(),
        )
        end.sent += count
        end.sent_of[kind] += count
        passing = self._tapped(self.opened_taps, passing)
        end.sealers[burst.stripe].seal(passing.frames)
        passing = self._tapped(self.sealed_taps, passing)
        self.transmit(end.way, end.addresses[burst.stripe], burst.path, passing.frames)

    @staticmethod
    def _tapped(taps: Sequence[Tap], passing: Passing) -> Passing:
        for tap in taps:
            passing = replace(passing, frames=tap(passing))
        return passing

    def transmit(self, way: Way, source: Hashable, target: Hashable, frames: Bytes) -> None:
        """Put sealed datagrams on the link, as from and to these addresses."""
        self.ends[way].sent_bytes[target] += frames.size
        nodes = ("client", "server") if way == "up" else ("server", "client")
        self.network.send(*nodes, frames, (source, target))

    def _arrive(self, now: float, delivery: Delivery) -> None:
        end = self.client if delivery.target == "client" else self.server
        assert isinstance(delivery.label, tuple)
        source, target = delivery.label
        if target not in end.addresses:
            end.drops["nobody at this address"] += len(delivery.frames)
            return
        sizes = np.full(len(delivery.frames), delivery.frames.shape[1], np.int64)
        for flow in headers_untrusted(delivery.frames, sizes, end.drops):
            if flow.session != SESSION or flow.stripe >= len(end.replay):
                end.drops["no such session"] += len(flow.frames)
                continue
            self._open(now, end, source, flow)

    def _open(self, now: float, end: End, source: Hashable, flow: Flow) -> None:
        """A flow's datagrams that are new, whole and genuine go to the session."""
        replay = end.replay[flow.stripe]
        fresh = replay.fresh(flow.numbers)
        frames, sizes, numbers = flow.frames[fresh], flow.sizes[fresh], flow.numbers[fresh]
        good = end.openers[flow.stripe].open(frames, sizes, now)
        taken = replay.mark(numbers[good])
        frames, sizes = frames[good][taken], sizes[good][taken]
        end.drops["seal"] += len(good) - int(good.sum())
        end.drops["replayed"] += len(fresh) - len(good) + len(taken) - int(taken.sum())
        end.received_bytes[source] += int(sizes.sum())
        for batch in split_untrusted(frames, sizes, end.drops):
            if end.session:
                end.session.handle_datagrams(now, source, flow.stripe, batch)

    # -- faults ----------------------------------------------------------------------------------------------

    def kill(self, end: End) -> None:
        """It is gone without a word: what comes to it comes to nobody."""
        self._take_events(end)
        end.session = None
        self.network.detach(end.name)

    def move(self, end: End, stripe: int = 0) -> Address:
        """Another address for one of its ports, as when a router forgets; the old one is nobody's."""
        name, port, count = end.addresses[stripe]
        end.addresses[stripe] = (name, port, count + 1)
        return end.addresses[stripe]


# -- the books ---------------------------------------------------------------------------------------------


@dataclass
class _Sent:
    chunk: int
    values: Values
    high: Mask | None
    reliable: bool
    delivered: Delivered | None = None
    arrived: Arrived | None = None


class Ledger:
    """What one end sends of whole-numbered values with error feedback, and what the other applies; sums of
    them are exact, so that every difference is an error.

    Each Arrived is checked as it comes: high blocks whole and exact, low ones that are present too. So is
    each Delivered, which says what has arrived, or that nothing has. When the session ends, each transfer was
    delivered, or Lost names it.
    """

    def __init__(self, pair: Pair, way: Way = "up", feedback: bool = True) -> None:
        self.pair, self.sender = pair, pair.ends[way]
        self.receiver = pair.server if way == "up" else pair.client
        assert self.sender.session is not None
        self.settings = self.sender.session.settings
        assert not (feedback and self.settings.fill == "rescale"), "both make up for what was lost"
        self._held: dict[int, Values] | None = {} if feedback else None  # by chunk
        self._last = LastValues()
        self.given: dict[int, Sums] = {}  # chunk: everything that was to be sent
        self.applied: dict[int, Sums] = {}
        self.sent: dict[int, _Sent] = {}
        self.order: list[int] = []  # transfers as they arrived
        self._iterations = 0
        pair.watchers.append(self._watch)

    def send(self, chunk: int, gradient: Values, *, share: float | None = 0.2, reliable: bool = False) -> int:
        """A transfer of this gradient and what was held of the chunk; `share` of its blocks are high, those
        with the largest mean |g|."""
        block = payload_bytes(self.settings.datagram_bytes) // gradient.itemsize
        values = gradient.copy()
        self.given[chunk] = self.given.get(chunk, 0) + gradient.astype(np.float64)
        if self._held is not None:
            values += self._held.pop(chunk, np.zeros_like(values))
        high = None if share is None or reliable else high_blocks(mean_abs(values, block), share)
        self._iterations += 1
        assert self.sender.session is not None
        transfer = self.sender.session.send(
            self.pair.now, chunk, self._iterations, values, high=high, reliable=reliable
        )
        self.sent[transfer] = _Sent(chunk, values, high, reliable)
        return transfer

    def _watch(self, end: End, event: Event) -> None:
        if end is self.sender and isinstance(event, Lost):
            self._end(event)
        if getattr(event, "transfer", None) not in self.sent:
            return  # of another ledger
        if end is self.sender and isinstance(event, Delivered):
            self._deliver(event)
        elif end is self.receiver and isinstance(event, Arrived):
            self._apply(event)

    def _deliver(self, event: Delivered) -> None:
        sent = self.sent[event.transfer]
        assert sent.delivered is None, f"transfer {event.transfer} is said to be delivered twice"
        assert event.chunk == sent.chunk
        sent.delivered = event
        if sent.arrived is None:
            assert event.missing.all(), (
                f"transfer {event.transfer} is said to be delivered, and has not arrived"
            )
        else:
            self._compare(sent, event, sent.arrived)
        if self._held is None:
            return
        block = payload_bytes(self.settings.datagram_bytes) // sent.values.itemsize
        last = self._last.of(sent.chunk)
        filled = last if event.fill == "last" and last is not None else 0
        missing = np.repeat(event.missing, block)[: len(sent.values)]
        short = np.where(missing, sent.values - filled, 0).astype(sent.values.dtype)
        self._held[sent.chunk] = self._held.get(sent.chunk, np.zeros_like(short)) + short
        self._last.keep(sent.chunk, sent.values, ~event.missing, block)

    @staticmethod
    def _compare(sent: _Sent, delivered: Delivered, arrived: Arrived) -> None:
        np.testing.assert_array_equal(delivered.missing, ~arrived.present)
        assert delivered.fill == arrived.fill
        if sent.reliable:
            assert arrived.present.all()

    def _end(self, lost: Lost) -> None:
        delivered = {transfer for transfer, sent in self.sent.items() if sent.delivered}
        named = set(lost.sent) & self.sent.keys()
        assert not delivered & named, f"transfers {delivered & named} are delivered and lost"
        left = self.sent.keys() - delivered - named
        assert not left, f"transfers {left} are neither delivered nor lost: {lost.reason}"

    def _apply(self, event: Arrived) -> None:
        sent = self.sent[event.transfer]
        assert sent.arrived is None, f"transfer {event.transfer} arrives twice"
        assert sent.delivered is None, f"transfer {event.transfer} arrives, and its sender knows it as lost"
        sent.arrived = event
        self.order.append(event.transfer)
        assert (event.chunk, event.values.dtype) == (sent.chunk, sent.values.dtype)
        present = np.repeat(event.present, event.block)[: len(sent.values)]
        assert event.present[event.high].all(), "a high block is missing"
        if sent.high is not None:
            assert event.high[sent.high].all(), "a high block is not known as one"
        exact = present if event.fill != "rescaled" else np.repeat(event.high, event.block)[: len(present)]
        np.testing.assert_array_equal(event.values[exact], sent.values[exact])
        used = event.values.astype(np.float64) * (present if event.fill in ("none", "borne") else 1)
        self.applied[event.chunk] = self.applied.get(event.chunk, 0) + used

    @property
    def done(self) -> bool:
        """Whether everything that was sent has arrived, and its sender knows."""
        return all(sent.delivered and sent.arrived for sent in self.sent.values())

    def check(self) -> None:
        """Raises AssertionError unless all arrived, both ends say the same of each transfer, and sent =
        applied + held back, element by element."""
        for transfer, sent in self.sent.items():
            assert sent.arrived is not None, f"transfer {transfer} has not arrived"
            assert sent.delivered is not None, f"the sender does not know that transfer {transfer} arrived"
            self._compare(sent, sent.delivered, sent.arrived)
        if self._held is None:
            return
        for chunk, given in self.given.items():
            held = self._held.get(chunk, np.zeros(len(given))).astype(np.float64)
            np.testing.assert_array_equal(given, self.applied[chunk] + held, err_msg=f"chunk {chunk}")

    @property
    def missing(self) -> int:
        """Blocks that were lost for good, of all transfers."""
        return sum(int((~sent.arrived.present).sum()) for sent in self.sent.values() if sent.arrived)


def high_blocks(means: npt.NDArray[np.float64], share: float) -> Mask:
    """The blocks with the largest means, as many as this share of them and one at least."""
    high = np.zeros(len(means), bool)
    high[np.argsort(-means, kind="stable")[: max(1, round(share * len(means)))]] = True
    return high


def whole_numbers(rng: np.random.Generator, elements: int, dtype: npt.DTypeLike = np.float32) -> Values:
    """A made-up gradient of small whole numbers, none of them 0."""
    signs = rng.integers(0, 2, elements) * 2 - 1
    return (signs * rng.integers(1, 100, elements)).astype(dtype)


def held_bytes(root: object) -> int:
    """Bytes of all arrays and byte strings that can be reached from an object, but not by way of a module or
    a class."""
    seen, waiting, total = set[int](), [root], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            total += one.nbytes if one.base is None else 0
            waiting += [one.base] if one.base is not None else []
        elif isinstance(one, (bytes, bytearray, memoryview)):
            total += len(one)
        else:
            waiting += gc.get_referents(one)
    return total
