"""Eight workers' sessions with one shard over one link, under a virtual clock; the shard shares its link out
by grants, as the engine does (atoll.net.ltplink)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from atoll.ltp.events import Arrived, Asked, Opened
from atoll.ltp.grants import Grants
from atoll.ltp.session import LtpSession
from atoll.ltp.settings import LtpSettings
from atoll.net.seals import Opener, Sealer
from atoll.wire.datagrams import headers_untrusted, payload_bytes, split_untrusted
from support.sim import Delivery, LinkModel, Network, VirtualClock

RATE, DELAY = 125e6, 0.02
DATAGRAM = 1400 / 1428  # of the link's rate, what datagrams have
CHUNK = 0


class Incast:
    """`queue` in bandwidth-delay products; `size` bytes of each answer."""

    def __init__(
        self, size: int, *, workers: int = 8, queue: float = 0.1, granted: bool = True, seed: int = 1
    ) -> None:
        self.clock, rng = VirtualClock(), np.random.default_rng(seed)
        self.network = Network(self.clock, rng)
        held = RATE * 2 * DELAY
        self.network.add_link(
            "workers", "shard", LinkModel(RATE, DELAY, queue=round(queue * held)), both=False
        )
        self.network.add_link("shard", "workers", LinkModel(RATE, DELAY, queue=round(held)), both=False)
        self.grants = Grants(RATE * DATAGRAM) if granted else None
        self.values = np.ones(size // 4, np.float32)
        blocks = -(-size // payload_bytes(LtpSettings().datagram_bytes))
        self.high = np.zeros(blocks, bool)
        self.high[rng.permutation(blocks)[: blocks // 5]] = True
        self.sessions: dict[tuple[str, int], LtpSession] = {}
        self.seals: dict[tuple[str, int], tuple[Sealer, Opener]] = {}
        for number in range(workers):
            for node in ("workers", "shard"):
                client = node == "workers"
                self.sessions[node, number] = LtpSession(
                    LtpSettings(), session=number, client=client, stripes=1, extents=None, now=0.0,
                    rng=np.random.default_rng([seed, number, client]), paths=["shard"] if client else [],
                )  # fmt: skip
                secret = bytes([number]) * 32
                self.seals[node, number] = (
                    Sealer(secret, client=client, stripe=0, seal=False),
                    Opener(secret, client=client, stripe=0, seal=False),
                )
        self.due = dict.fromkeys(self.sessions, 0.0)  # when each is to be driven next
        self.arrived: dict[int, float] = {}
        self.drops: Counter[str] = Counter()
        for node in ("workers", "shard"):
            self.network.attach(node, self._arrive)

    def ask(self) -> list[float]:
        """The shard says its word to all; seconds until each answer is of use."""
        begun = self.clock.now
        self.arrived.clear()
        for (node, number), session in self.sessions.items():
            if node == "shard":
                session.send(begun, CHUNK, 0, np.zeros(1, np.float32), reliable=True)
                self.due[node, number] = begun
        while len(self.arrived) < len(self.sessions) // 2:
            self._step(begun + 30)
            assert self.clock.now < begun + 30, f"{len(self.arrived)} answers in 30 s"
        return [self.arrived[number] - begun for number in sorted(self.arrived)]

    def pause(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self._step(until)

    def _step(self, limit: float) -> None:
        self._flush()
        granting = self.grants.poll_deadline() if self.grants else math.inf
        at = min(self.network.next_event(), *self.due.values(), granting, limit)
        self.network.run(max(at, self.clock.now))
        if self.clock.now < at:
            self.clock.advance(at)
        self._flush()

    def _flush(self) -> None:
        now = self.clock.now
        for node, number in [key for key, due in self.due.items() if due <= now]:
            session, again = self.sessions[node, number], False
            while (burst := session.poll_datagrams(now)) is not None:
                frames = burst.frames.copy()
                self.seals[node, number][0].seal(frames)
                self.network.send(node, "shard" if node == "workers" else "workers", frames, node)
            for event in session.poll_events():
                if node == "workers" and isinstance(event, Arrived):
                    session.send(now, CHUNK, 0, self.values, high=self.high)
                    again = True
                elif node == "shard" and isinstance(event, Arrived):
                    self.arrived[number] = now
                elif node == "shard" and self.grants and isinstance(event, (Asked, Opened)):
                    if isinstance(event, Opened) or event.size:
                        self.grants.handle_ask(now, number)
                    else:
                        self.grants.handle_done(now, number)
            self.due[node, number] = now if again else session.poll_deadline()
        if self.grants:
            for grant in self.grants.poll_grants(now):
                self.sessions["shard", grant.session].grant(grant.rate, grant.seconds, kept=False)
                self.due["shard", grant.session] = now

    def _arrive(self, now: float, delivery: Delivery) -> None:
        sizes = np.full(len(delivery.frames), delivery.frames.shape[1], np.int64)
        for flow in headers_untrusted(delivery.frames, sizes, self.drops):
            frames, sizes_ = flow.frames, flow.sizes
            good = self.seals[delivery.target, flow.session][1].open(frames, sizes_, now)
            for batch in split_untrusted(frames[good], sizes_[good], self.drops):
                self.sessions[delivery.target, flow.session].handle_datagrams(
                    now, delivery.source, flow.stripe, batch
                )
            self.due[delivery.target, flow.session] = now
