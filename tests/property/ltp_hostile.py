"""A peer that has the keys and does what it likes: it writes plaintexts, and no LtpSession of its own
stands in its way. `Victim` is the honest end, alone, with the checks that hold whatever comes."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Hashable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.ltp.events import Arrived, Event
from atoll.ltp.sending import Outgoing
from atoll.ltp.session import Burst, LtpSession
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import (
    HEADER,
    HIGH,
    SEAL_BYTES,
    SLICE,
    Acknowledgement,
    Bytes,
    Kind,
    ack_datagram,
    control_datagram,
    payload_bytes,
    records_of,
    split_untrusted,
    write_headers,
)
from atoll.wire.linkcontrol import AnyControl, Challenge, Closed, decode_untrusted, encode
from ltp_wire import of_float32

SESSION = 9
SETTINGS = LtpSettings(datagram_bytes=300, idle_seconds=5.0)
BLOCK = payload_bytes(300) // 4  # elements of float32
EXTENTS = {0: 40 * BLOCK - 3, 1: 5 * BLOCK, 2: 1, 3: 300 * BLOCK}  # chunk: elements
STRIPES = 2
MOST_BURSTS = 20_000  # that one poll of all that is due may give
MOST_IDLE = (
    40  # polls in a row that give nothing though something is due: each may take a transfer off a list
)
TRIPLE = 3  # what an address that has not answered may get, of what came from it


class Victim:
    """An end whose peer is hostile. Every datagram of the peer has a number of its own, as seals ask for."""

    def __init__(
        self,
        *,
        client: bool = False,
        settings: LtpSettings = SETTINGS,
        extents: dict[int, int] | None = EXTENTS,
        seed: int = 1,
    ) -> None:
        self.session = LtpSession(
            settings,
            session=SESSION,
            client=client,
            stripes=STRIPES,
            extents=of_float32(extents),
            rng=np.random.default_rng(seed),
            now=0.0,
            paths=[("peer", stripe) for stripe in range(STRIPES)] if client else [],
        )
        self.client, self.now = client, 0.0
        self.numbers = [0] * STRIPES
        self.sequence = 0
        self.drops: Counter[str] = Counter()
        self.events: list[Event] = []
        self.received: Counter[Hashable] = Counter()  # bytes, by the address that they came from
        self.sent: Counter[Hashable] = Counter()
        self.believed: set[Hashable] = {("peer", stripe) for stripe in range(STRIPES)} if client else set()
        self.told: list[AnyControl] = []  # control messages that the victim sent
        self.bursts: list[Burst] = []  # that it sent, if `keeps`
        self.keeps = False
        self.honest: set[int] = set()  # transfers all of whose values are said
        self.said: dict[tuple[int, int], set[bytes]] = {}  # what was said of a high block: values
        self.coded: set[int] = set()  # transfers whose parity nobody has said the data of
        self.taken = 0  # datagrams that came as far as the session

    # -- what the peer does ------------------------------------------------------------------------------

    def take(self, frames: Bytes, sizes: npt.NDArray[np.int64] | None = None, stripe: int = 0,
             path: Hashable = None) -> None:  # fmt: skip
        """Opened datagrams, (n, width), with the seal's room; headers but for the kind are written anew."""
        path = ("peer", stripe) if path is None else path
        kinds = frames[:, 1].copy()
        write_headers(frames, Kind.DATA, 0, stripe, SESSION, self.numbers[stripe])
        frames[:, 1] = kinds
        self.numbers[stripe] += len(frames)
        sizes = np.full(len(frames), frames.shape[1]) if sizes is None else sizes
        for batch in split_untrusted(frames, sizes, self.drops):
            self.received[path] += len(batch) * (batch.frames.shape[1] + SEAL_BYTES)
            if batch.kind is Kind.DATA:
                self._note(batch.slices, batch.elements)
            elif batch.kind is Kind.PARITY:
                transfers = np.unique(batch.slices["transfer"]).tolist()
                self.coded.update(each for each in transfers if each not in self.honest)
            self.taken += len(batch)
            self.session.handle_datagrams(self.now, path, stripe, batch)

    def say(self, message: AnyControl, stripe: int = 0, path: Hashable = None) -> None:
        """A control message, with the next sequence."""
        frames = control_datagram(encode(type(message)(**{**_fields(message), "sequence": self.sequence})))
        self.sequence += 1
        frames[:, 1] = Kind.CONTROL
        self.take(frames, stripe=stripe, path=path)

    def acknowledge(self, told: Acknowledgement, stripe: int = 0) -> None:
        frames = ack_datagram(told)
        frames[:, 1] = Kind.ACK
        self.take(frames, stripe=stripe)

    def _note(self, slices: npt.NDArray[Any], elements: Bytes) -> None:
        for one, row in zip(slices, elements, strict=True):
            if one["flags"] & HIGH and one["element"] == 1:
                place = int(one["offset"]) // max(elements.shape[1] // 4, 1)
                values = row[: int(one["count"]) * 4].view(np.float32)
                with np.errstate(all="ignore"):
                    values = values if one["scale"] == 1.0 else values * one["scale"]
                self.said.setdefault((int(one["transfer"]), place), set()).add(values.tobytes())

    def say_all(self, transfer: int, values: npt.NDArray[np.float32]) -> None:
        """What an honest sender says of a transfer's blocks: what the code restores is that."""
        self.honest.add(transfer)
        for place in range(-(-len(values) // BLOCK)):
            block = values[place * BLOCK : (place + 1) * BLOCK].tobytes()
            self.said.setdefault((transfer, place), set()).add(block)

    def forget(self, transfer: int) -> None:
        """Of earlier transfers nothing comes any more."""
        self.said = {key: said for key, said in self.said.items() if key[0] >= transfer}
        self.events, self.told, self.bursts = [], [], self.bursts[-200:]

    # -- what the victim does ----------------------------------------------------------------------------

    def drain(self) -> int:
        """Has it send what is due, and checks what must always hold; returns how many bursts went."""
        count = idle = 0
        while idle == 0 or self.session.poll_deadline() <= self.now:
            idle += 1
            assert idle <= MOST_IDLE, f"a deadline that is due for ever: {self.session.poll_deadline()}"
            while (burst := self.session.poll_datagrams(self.now)) is not None:
                self._check_burst(burst)
                count, idle = count + 1, 1
                assert count < MOST_BURSTS, "poll_datagrams has no end"
        for event in self.session.poll_events():
            self.events.append(event)
            assert len(getattr(event, "reason", "")) < 1000
            if isinstance(event, Arrived):
                self._check_arrived(event)
        assert not math.isnan(self.session.poll_deadline())
        return count

    def pass_time(self, seconds: float) -> None:
        """Goes from deadline to deadline."""
        until = self.now + seconds
        for _ in range(200_000):
            at = self.session.poll_deadline()
            if at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            self.drain()
        raise AssertionError("too many deadlines")

    def _check_burst(self, burst: Burst) -> None:
        frames = burst.frames
        size = frames.size
        self.sent[burst.path] += size
        assert frames.shape[1] <= self.session.settings.datagram_bytes or len(frames) == 1
        if burst.path not in self.believed:
            assert self.sent[burst.path] <= TRIPLE * self.received[burst.path], burst.path
        if frames[0, 1] == Kind.CONTROL:
            for frame in frames:
                self.told.append(decode_untrusted(frame[HEADER.itemsize : -SEAL_BYTES]))
        if self.keeps:
            self.bursts.append(burst)

    def _check_arrived(self, arrived: Arrived) -> None:
        """Every high block is there, and is what the peer said that it is."""
        assert arrived.present[arrived.high].all()
        if arrived.values.dtype != np.float32 or arrived.transfer in self.coded:
            return
        for place in np.flatnonzero(arrived.high).tolist():
            values = arrived.values[place * arrived.block : (place + 1) * arrived.block]
            assert values.tobytes() in self.said.get((arrived.transfer, place), ()), (arrived.transfer, place)

    def got(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def told_of(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def believe(self) -> None:
        """The peer answers the challenges that it got (as from its own address)."""
        from atoll.wire.linkcontrol import Answer

        for message in self.told_of(Challenge):
            self.say(Answer(sequence=0, token=message.token))
            self.believed.add(("peer", 0))
        self.told = [each for each in self.told if not isinstance(each, Challenge)]


def _fields(message: AnyControl) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def closed(transfer: int, **fields: Any) -> Closed:
    return Closed(**{"sequence": 0, "transfer": transfer, "part": 0, "parts": 1, "first": 0, "missing": b"",
                     "fill": "none", "how": "complete", **fields})  # fmt: skip


def genuine(
    transfer: int,
    chunk: int,
    rng: np.random.Generator,
    *,
    reliable: bool = False,
    loss: float = 0.05,
    settings: LtpSettings = SETTINGS,
    elements: int | None = None,
) -> tuple[npt.NDArray[np.float32], list[Bytes]]:
    """A transfer's values and its datagrams as an honest sender writes them: DATA, then PARITY, in bursts."""
    values = rng.normal(size=EXTENTS[chunk] if elements is None else elements).astype(np.float32)
    blocks = -(-len(values) // BLOCK)
    outgoing = Outgoing(settings, transfer, chunk, 1, values, rng.random(blocks) < 0.4, reliable)
    outgoing.begin(loss, 1.0, blocks)
    bursts = []
    while (taken := outgoing.take(0.0, 64)) is not None:
        kind, items = taken
        frames = np.zeros((len(items), outgoing.size), dtype=np.uint8)
        frames[:, 1] = kind
        outgoing.bodies.write(kind, items, frames)
        bursts.append(frames)
    return values, bursts


def slices_of(frames: Bytes) -> npt.NDArray[Any]:
    return records_of(frames, SLICE, HEADER.itemsize)


def held(*roots: object) -> int:
    """Bytes of everything that can be reached from these, but not by way of a module or a class."""
    seen, waiting, total = set[int](), list(roots), 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, np.ndarray) and one.base is not None:
            waiting.append(one.base)
        else:
            waiting += gc.get_referents(one)
    return total
