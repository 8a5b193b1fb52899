"""Two sessions and a plain network in memory between them: a delay, and what a test has lost or changed."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from atoll.ltp.events import Event
from atoll.ltp.order import Extent
from atoll.ltp.session import Burst, LtpSession
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import HEADER, Bytes, records_of, split_untrusted

EXTENTS = {0: 40_000, 1: 331, 2: 1}  # chunk: elements


def of_float32(extents: dict[int, int] | None) -> dict[int, Extent] | None:
    """Chunks of so many float32."""
    if extents is None:
        return None
    return {chunk: Extent(elements, np.dtype(np.float32)) for chunk, elements in extents.items()}


class Wire:
    """Client and server. `drop(client, burst, now)` says which rows are lost: bool, (n,)."""

    def __init__(
        self,
        settings: LtpSettings | None = None,
        *,
        server_settings: LtpSettings | None = None,
        delay: float = 0.01,
        stripes: int = 1,
        seed: int = 1,
        extents: dict[int, int] | None = EXTENTS,
        drop: Callable[[bool, Burst, float], np.ndarray] | None = None,
    ) -> None:
        settings, known = settings or LtpSettings(), of_float32(extents)
        self.now, self.delay, self.drop = 0.0, delay, drop
        self.jitter: Callable[[], float] = lambda: 0.0
        rng = np.random.default_rng(seed)
        paths = [("server", stripe) for stripe in range(stripes)]
        self.client = LtpSession(
            settings, session=7, client=True, stripes=stripes, extents=known, rng=rng, now=0.0, paths=paths
        )
        self.server = LtpSession(
            server_settings or settings,
            session=7,
            client=False,
            stripes=stripes,
            extents=known,
            rng=rng,
            now=0.0,
        )
        self.from_path = ("client", 0)
        self.events: dict[bool, list[Event]] = {True: [], False: []}
        self.drops: Counter[str] = Counter()
        self.sent: list[tuple[bool, Burst]] = []
        self._seen: dict[tuple[bool, int], set[int]] = {}
        self._order = itertools.count()
        self._way: list[tuple[float, int, bool, object, int, Bytes]] = []

    def end(self, client: bool) -> LtpSession:
        return self.client if client else self.server

    def pump(self) -> None:
        """Has both ends send what is to go now."""
        for client in (True, False):
            for _ in range(1000):
                burst = self.end(client).poll_datagrams(self.now)
                if burst is None:
                    break
                self._send(client, burst)
            else:
                raise AssertionError("poll_datagrams has no end")
            self.events[client] += self.end(client).poll_events()

    def _send(self, client: bool, burst: Burst) -> None:
        self.sent.append((client, burst))
        frames = burst.frames.copy()
        numbers = records_of(frames, HEADER, 0)["number"].tolist()
        seen = self._seen.setdefault((client, burst.stripe), set())
        assert not seen & set(numbers), "a number is sent twice"
        seen.update(numbers)
        if self.drop is not None:
            frames = frames[~self.drop(client, burst, self.now)]
        if len(frames):
            source = self.from_path if client else ("server", burst.stripe)
            at = self.now + self.delay + self.jitter()
            heapq.heappush(self._way, (at, next(self._order), not client, source, burst.stripe, frames))

    def shuffle(self, rng: np.random.Generator) -> None:
        """Reorders what is on its way, rows of different datagrams too."""
        times = [each[0] for each in self._way]
        rng.shuffle(times)
        self._way = [
            (at, order, to_client, path, stripe, frames[rng.permutation(len(frames))])
            for at, (_, order, to_client, path, stripe, frames) in zip(times, self._way, strict=True)
        ]
        heapq.heapify(self._way)

    def step(self) -> bool:
        """Goes on to the next thing that happens; False: nothing will."""
        self.pump()
        due = min(self.client.poll_deadline(), self.server.poll_deadline())
        at = min(self._way[0][0] if self._way else math.inf, due)
        if at == math.inf:
            return False
        self.now = max(self.now, at)
        while self._way and self._way[0][0] <= self.now:
            _, _, to_client, path, stripe, frames = heapq.heappop(self._way)
            sizes = np.full(len(frames), frames.shape[1])
            for batch in split_untrusted(frames, sizes, self.drops):
                self.end(to_client).handle_datagrams(self.now, path, stripe, batch)
        self.pump()
        return True

    def run(self, until: Callable[[], bool], limit: float = 60.0) -> None:
        """Until the condition holds; fails when `limit` seconds of the virtual clock have passed."""
        for turn in range(400_000):
            if until():
                return
            before = self.now
            assert self.step(), f"nothing happens any more at {self.now:.3f} s"
            assert self.now <= limit, f"not reached within {limit} s"
            assert turn < 399_999 or self.now > before
        raise AssertionError("too many steps")

    def got(self, client: bool, kind: type) -> list:
        """The events of one kind at one end."""
        return [event for event in self.events[client] if isinstance(event, kind)]
