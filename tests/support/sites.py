"""Sites on this machine, joined by the lab's packet emulator: for tests of the emulator, and to measure it.

No processes of its own: sockets are made in a site's network namespace and used from this process, and the
emulator runs in a thread. Needs root, or a user namespace in which this process counts as root.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from atoll.lab.emulator import Emulator
from atoll.lab.namespaces import SiteSpace, dropped_before_emulator, make_site, within
from atoll.lab.topology import LabLink, Phase, Site, Topology

T = TypeVar("T")

STOP_SECONDS = 10.0


def phase(rate: float, **qualities: object) -> Phase:
    """A phase of `rate` bits/s from the start on, with no delay and no faults but those that are given."""
    plain = {
        "at": 0.0, "delay": 0.0, "jitter": 0.0, "distribution": "normal", "queue": 2**20, "loss": 0.0,
        "burst": 1.0, "reorder": 0.0, "reorder_by": 0.001, "duplicate": 0.0, "corrupt": 0.0, "down": False,
    }  # fmt: skip
    return Phase(rate=rate / 8, **{**plain, **qualities})  # type: ignore[arg-type]


def pair(there: Sequence[Phase], back: Sequence[Phase] | None = None, seed: int = 1) -> Topology:
    """Two sites, a and b; `back` is the way from b to a, by default the same as `there`."""
    sites = tuple(Site(name, i, 1, (1.0,), f"10.77.{i}.1") for i, name in enumerate("ab", start=1))
    return Topology(seed, sites, (LabLink(0, 1, tuple(there)), LabLink(1, 0, tuple(back or there))))


def _elsewhere(function: Callable[[], T]) -> T:
    """Call `function` in a thread of its own, whose namespaces it may change."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


class Sites:
    """A topology's sites and links, while entered."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.spaces: list[SiteSpace] = []

    def __enter__(self) -> Sites:
        try:
            for site in self.topology.sites:
                space = _elsewhere(lambda site=site: make_site(site.name, site.address))  # type: ignore[misc]
                self.spaces.append(space)
            self.emulator = Emulator(self.topology, [space.tun for space in self.spaces])
        except BaseException:
            self._close()
            raise
        self._stop, stop = os.pipe()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(stop,), name="emulator")
        self._thread.start()
        return self

    def _run(self, stop: int) -> None:
        try:
            self.emulator.run(stop)
        except BaseException as error:
            self._errors.append(error)
        finally:
            os.close(stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._close()

    def stop(self) -> None:
        """End the emulator; its counters stay."""
        if self._stop >= 0:
            os.close(self._stop)  # the other end hangs up
            self._stop = -1
            self._thread.join(STOP_SECONDS)
            assert not self._thread.is_alive(), "the emulator does not stop"
        if self._errors:
            raise self._errors[0]

    def _close(self) -> None:
        for space in self.spaces:
            for descriptor in (space.network, space.hostname, space.tun):
                os.close(descriptor)
        self.spaces = []

    def inside(self, site: int, function: Callable[[], T]) -> T:
        """Call `function` in the network of a site (from 0)."""

        def call() -> T:
            with within(self.spaces[site]):
                return function()

        return _elsewhere(call)

    def address(self, site: int) -> str:
        return self.topology.sites[site].address

    def socket(self, site: int, kind: socket.SocketKind, port: int | None = None) -> socket.socket:
        """A socket of a site, bound to its address and `port` where one is given."""
        made = self.inside(site, lambda: socket.socket(socket.AF_INET, kind))
        if port is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((self.address(site), port))
        return made

    def start(self, site: int, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command in a site."""
        return self.inside(
            site,
            lambda: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True),
        )

    def unread(self, site: int) -> int:
        """Packets that the site's TUN dropped, since the emulator did not read them in time."""
        return _elsewhere(lambda: dropped_before_emulator(self.spaces[site]))

    def overrun(self, site: int) -> int:
        """Datagrams that arrived at a site and found their socket full: its program was too slow."""
        table = self.inside(site, Path("/proc/thread-self/net/snmp").read_text)
        names, values = (line.split() for line in table.splitlines() if line.startswith("Udp:"))
        return int(values[names.index("RcvbufErrors")])
