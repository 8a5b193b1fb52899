"""A worker's heartbeats, through its launcher or to the hub directly (`store/heartbeats.py`)."""

from __future__ import annotations

import time

from atoll.net.endpoint import Client
from atoll.net.heartbeats import HeartbeatLine, Launcher
from atoll.store.heartbeats import Route
from atoll.wire.messages import Beat, Heartbeat, ToLauncher, Welcome, encode


class HeartbeatSender:
    """The sending of a worker's heartbeats, to the hub over a link and to the worker's `launcher`, if there
    is one.

    `welcome` is the hub's. One thread calls `look`; no call waits.
    """

    def __init__(self, welcome: Welcome, launcher: Launcher | None) -> None:
        self._run = welcome.run
        self._line = HeartbeatLine(launcher.socket) if launcher is not None else None
        self._route = Route(welcome.heartbeat or 1.0)
        self._losses = 0  # the link's count of lost connections at the last look

    def close(self) -> None:
        """Close the line to the launcher; closing twice does no harm."""
        if self._line is not None:
            self._line.close()

    def look(self, link: Client, beat: Beat, *, at_once: bool = False, directly: bool = False) -> bool:
        """Send a heartbeat if one is due or wanted `at_once`; the `link` to the hub must stand.

        Returns True if a heartbeat went to the hub itself; with `directly` each one does.
        """
        if link.losses != self._losses:
            self._losses = link.losses
            self._route.renew()
        if self._line is not None:
            self._route.confirm(self._line.confirmed())
        now = time.monotonic()
        ways = self._route.look(now, launcher=self._line is not None and self._line.open(), at_once=at_once)
        if ways is None:
            return False
        direct = ways.direct or directly
        if ways.number and self._line is not None:
            said = ToLauncher(self._run, ways.number, now, beat)
            if not self._line.send(said):
                self._route.refuse()
                direct = True
        if direct:
            link.send(
                encode(
                    Heartbeat(
                        run=self._run,
                        incarnation=beat.incarnation,
                        iteration=beat.iteration,
                        pace=beat.pace,
                        size=beat.size,
                        batch=beat.batch,
                    )
                )
            )
        return direct

    def pause(self) -> float:
        """Return the seconds for which `look` has nothing to do."""
        return max(0.0, self._route.next_look() - time.monotonic())
