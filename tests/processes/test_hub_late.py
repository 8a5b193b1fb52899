"""A hub that is late, since it has more to read than it can, takes nobody who lives for dead."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hub_parts import HEARTBEAT, PATIENCE, Service, wait_for

from atoll.hub.lifesigns import LifeSigns
from atoll.net.endpoint import Client
from atoll.net.keys import make_keys, write_keys
from atoll.net.requests import ask
from atoll.wire.messages import VERSION, Heartbeat, Hello, Welcome, encode

WORKERS = 40
TURN = 1.3 * PATIENCE / WORKERS  # seconds for a heartbeat: all of them once take longer than silence is borne


class Beating:
    """Workers that are heard as often as they are to, but for those in `silent`, by rank."""

    def __init__(self, address: str, keys: Any = None) -> None:
        self.silent: set[int] = set()
        self._stop = threading.Event()
        self._links: list[tuple[Client, Welcome]] = []
        for _ in range(WORKERS):
            link = Client(address, keys, limit=2**20, name="hub")
            hello = Hello(version=VERSION, run="", role="worker")
            self._links.append((link, ask(link, hello, Welcome, 60.0, "a welcome")[0]))
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            for link, welcome in self._links:
                if welcome.worker not in self.silent:
                    link.send(encode(Heartbeat(run=welcome.run, incarnation=welcome.incarnation)))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for link, _ in self._links:
            link.abandon()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_hub_that_is_late_buries_nobody_who_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    options: dict[str, Any] = {"workers": WORKERS, "shards": 0}
    keys = None
    if sealed:
        keys = make_keys()
        write_keys(tmp_path / "run.key", keys)
        options["key_file"] = str(tmp_path / "run.key")
    handled: list[int] = []
    slow = threading.Event()
    handle = LifeSigns.handle

    def slowly(self: LifeSigns, peer: bytes, beat: Heartbeat) -> None:
        if slow.is_set():
            time.sleep(TURN)
            handled.append(beat.incarnation)
        handle(self, peer, beat)

    monkeypatch.setattr(LifeSigns, "handle", slowly)
    service = Service(tmp_path / "hub", **options)
    beating = Beating(service.address, keys)
    slow.set()
    wait_for(lambda: len(handled) >= 2 * WORKERS, "two rounds of late heartbeats")
    assert service.decisions("worker died") == []
    slow.clear()
    beating.silent.add(7)
    (died,) = wait_for(lambda: service.decisions("worker died"), "a death that is true")
    assert died.choice == "worker 7, incarnation 8"
    assert service.decisions("hub")[1:] == []  # it has heard itself
    beating.close()
    service.close()


def test_a_hub_of_very_many_workers_hears_each_less_often_and_bears_silence_for_longer(
    tmp_path: Path,
) -> None:
    heard = {}
    for workers in (2000, 10_000, 100_000):
        service = Service(tmp_path / str(workers), workers=workers, shards=0, patience=10.0, heartbeat=0.25)
        link = Client(service.address, None, limit=2**20, name="hub")
        hello = Hello(version=VERSION, run="", role="guest")
        heard[workers] = ask(link, hello, Welcome, 60.0, "a welcome")[0].heartbeat
        link.abandon()
        service.close()
    assert heard == {2000: 0.25, 10_000: 1.25, 100_000: 2.5}  # never so seldom that two fill the patience
