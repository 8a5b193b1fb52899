"""A parameter server inside a test's own process: hub and shards on threads, workers wherever they are.

    with ServedRun(workers=2, shards=2) as served:
        pool.run(train, served.address, world=2)

and in `train(place, address)`: `with served_worker(address, place.rank): session = atoll.join(config)`. With
`sites={"paris": 1, "berlin": 1}` each site has a shard of its own in front, and a worker names its site.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from unittest import mock

from msgspec.structs import replace

from atoll.core.config import (
    HUB_VARIABLE,
    KEYS_VARIABLE,
    RANK_VARIABLE,
    RUN_VARIABLE,
    SITE_VARIABLE,
    LinkOptions,
)
from atoll.core.errors import DeadlineError
from atoll.hub import main as hub
from atoll.hub.options import HubOptions
from atoll.hub.planner import GroupingSettings
from atoll.server import main as server
from atoll.server.options import ServerOptions

RUN = "test"
START_SECONDS = 60.0
STOP_SECONDS = 30.0


class ServedRun:
    """Hub and shards, while entered; `address` is the hub's. `failures` are what ended one too early.

    Entered once all of them serve; raises what keeps one from it, or DeadlineError.
    """

    def __init__(
        self,
        workers: int,
        shards: int = 1,
        *,
        patience: float = 10.0,
        heartbeat: float = 0.5,
        folder: Path | None = None,
        keys: Path | None = None,
        sites: Mapping[str, int] | None = None,
        site_timeout: float = START_SECONDS,
        site_link: LinkOptions | None = None,
        until_done: bool = False,
        at_least: int = 1,
        grouping: GroupingSettings | None = None,
        codec: str = "",
        optimizer: str = "",
    ) -> None:
        """`patience`, `heartbeat`, `sites`, `until_done`, `at_least` and `grouping` as the hub's; `folder`
        gets what hub and shards keep; `keys` is a key file; `site_timeout` is the sites' deadline for the
        global shards, and `site_link` is how they reach them. `codec` is the one that shards may load beside
        Atoll's own, and `optimizer` the class beside torch's."""
        self._site_link, self._codec, self._optimizer = site_link, codec, optimizer
        self._sites, self._site_timeout = dict(sites or {}), site_timeout
        self._site_stops = {site: threading.Event() for site in self._sites}
        self._keys, self._until_done, self._at_least = keys, until_done, at_least
        self._workers, self._shards, self._grouping = workers, shards, grouping
        self._patience, self._heartbeat, self._folder = patience, heartbeat, folder
        self.address = ""
        self.failures: list[BaseException] = []
        self._stop, self._stop_hub = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ServedRun:
        listening = threading.Event()

        def at(address: str) -> None:
            self.address = address
            listening.set()

        self._start(
            listening,
            lambda: hub.serve(
                HubOptions(
                    listen="tcp://127.0.0.1:0",
                    key_file=str(self._keys or ""),
                    run=RUN,
                    workers=self._workers,
                    shards=self._shards,
                    directory=str(self._folder or ""),
                    patience=self._patience,
                    heartbeat=self._heartbeat,
                    sites=self._sites,
                    until_done=self._until_done,
                    at_least=self._at_least,
                ),
                self._grouping,
                until=lambda: self._stop.is_set() or self._stop_hub.is_set(),
                ready=at,
            ),
        )
        self._await(listening, "the hub")
        serving = {f"shard {index}": partial(self._serve, index) for index in range(self._shards)}
        serving |= {f"the shard of {site}": partial(self._serve_site, site) for site in self._sites}
        up = {name: threading.Event() for name in serving}
        for name, serve in serving.items():
            self._start(up[name], partial(serve, up[name]))
        for name, ready in up.items():
            self._await(ready, name)
        return self

    def _await(self, ready: threading.Event, who: str) -> None:
        came = ready.wait(START_SECONDS)
        if self.failures:
            self.stop()
            raise self.failures[0]
        if not came:
            self.stop()
            raise DeadlineError(f"{who} was not ready within {START_SECONDS:g} s")

    def _serve(self, index: int, ready: threading.Event) -> None:
        options = ServerOptions(
            hub=self.address,
            shard=index,
            codec=self._codec,
            optimizer=self._optimizer,
            timeout=START_SECONDS,
        )
        server.serve(
            self._with_records(options, f"shard-{index}"),
            ready=lambda _address: ready.set(),
            stop=self._stop,
        )

    def _serve_site(self, site: str, ready: threading.Event) -> None:
        link = self._site_link or LinkOptions()
        options = ServerOptions(
            hub=self.address, site=site, codec=self._codec, timeout=self._site_timeout, link=link
        )
        server.serve_site(
            self._with_records(options, f"site-{site}"),
            ready=lambda _address: ready.set(),
            stop=self._site_stops[site],
        )

    def _with_records(self, options: ServerOptions, name: str) -> ServerOptions:
        """The run's name, its keys and a directory of the service's own."""
        directory = str(self._folder / name) if self._folder is not None else ""
        return replace(options, run=RUN, key_file=str(self._keys or ""), directory=directory)

    def _start(self, ready: threading.Event, serve: Callable[[], None]) -> None:
        """On a thread; `ready` is set when it serves, or has failed."""

        def run() -> None:
            try:
                serve()
            except BaseException as error:
                self.failures.append(error)
                ready.set()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop_hub(self) -> None:
        """End the hub alone, as if its machine were gone."""
        self._stop_hub.set()
        self._threads[0].join(STOP_SECONDS)

    def stop(self) -> None:
        """End hub and shards, as if their machine were gone."""
        for site in self._sites:
            self.stop_site(site)
        self._stop.set()
        self.ended()

    def ended(self) -> bool:
        """Whether hub and shards end by themselves, within 30 seconds."""
        until = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stop_site(self, site: str) -> None:
        """End a site's shard, as if its machine were gone."""
        self._site_stops[site].set()


@contextlib.contextmanager
def served_worker(address: str, rank: int, keys: Path | None = None, site: str = "") -> Iterator[None]:
    """Within it `atoll.join` with strategy `server` joins the run at `address`, as `rank`, at `site`."""
    variables = {HUB_VARIABLE: address, RUN_VARIABLE: RUN, RANK_VARIABLE: str(rank), SITE_VARIABLE: site}
    if keys is not None:
        variables[KEYS_VARIABLE] = str(keys)
    with mock.patch.dict(os.environ, variables):
        yield
