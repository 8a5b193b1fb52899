"""A worker's part in a served run: its place from the hub, its shards, and the data that it leases."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from atoll.core.config import HUB_VARIABLE, KEYS_VARIABLE, RANK_VARIABLE, RUN_VARIABLE, Config
from atoll.core.errors import ConfigError
from atoll.net.keys import Keys, read_keys
from atoll.train.hub_client import HubClient
from atoll.train.leased_sampler import LeasedSampler
from atoll.train.place import Place
from atoll.train.shards import Shards
from atoll.wire.messages import Used

_WITHOUT_HUB = "training goes on while leased samples last"
_WITHOUT_HUB_BSP = "training goes on, but nobody notices a worker's death before sync.timeout"
_LIMIT = 2**31 - 1  # bytes of a frame from a shard, which is as trusted as this worker's own code


class Service:
    """The hub and the shards, as one worker sees them."""

    def __init__(self, config: Config) -> None:
        address = os.environ.get(HUB_VARIABLE, "")
        if not address:
            raise ConfigError(
                f"strategy 'server' needs a hub, and {HUB_VARIABLE} is not set; start the run with `atoll "
                f"run --strategy server`, or set {HUB_VARIABLE}=tcp://HOST:PORT (docs/several-machines.md)"
            )
        keys = _keys()
        run = os.environ.get(RUN_VARIABLE, "")
        self.warn: Callable[[str], None] = print_warning  # the session's, once there is one
        self.hub = HubClient(
            address,
            keys,
            run=run,
            timeout=config.timeout_seconds,
            tell=self._tell,
            meanwhile=_WITHOUT_HUB_BSP if config.sync.consistency == "bsp" else _WITHOUT_HUB,
        )
        try:
            self.welcome = self.hub.join(int(os.environ.get(RANK_VARIABLE, "-1")))
            self.shards = Shards(
                self.hub.shards(),
                keys,
                run=self.welcome.run,
                worker=self.welcome.worker,
                incarnation=self.welcome.incarnation,
                timeout=config.timeout_seconds,
                limit=_LIMIT,
            )
        except BaseException:  # a rank that is held, and never trains, would hold up the others
            self.hub.goodbye()
            self.hub.close()
            raise
        self.samplers: list[LeasedSampler] = []
        self.staleness = 0.0  # of the latest contribution, as the shards measured it; global iterations

    @property
    def place(self) -> Place:
        """This worker's place in the run, as the hub gave it."""
        return Place(
            rank=self.welcome.worker,
            world=self.welcome.workers,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def describe(self, config: Config) -> str:
        """The run's servers in a few words."""
        consistency = config.sync.consistency
        slack = f" with slack {config.sync.slack}" if consistency == "ssp" else ""
        sealed = "sealed with CURVE" if os.environ.get(KEYS_VARIABLE) else "unsealed, on this machine alone"
        return f"{consistency}{slack}, shards: {', '.join(self.shards.addresses)}; {sealed}"

    def used(self) -> list[Used]:
        """The leased positions that this worker's next commit uses up."""
        return [each for sampler in self.samplers for each in sampler.used()]

    def stepped(self, iteration: int) -> None:
        """Note how far this worker is; raises RunError when the hub has given it up."""
        self.hub.iteration = iteration
        self.hub.check()

    def measured_staleness(self, value: float) -> None:
        self.staleness = value

    def _tell(self, line: str) -> None:
        """Something about the hub; on the thread of the heartbeats."""
        welcome = self.hub.welcome
        self.warn(line if welcome is None else f"worker {welcome.worker}: {line}")

    def close(self) -> None:
        """Leave the run: what this worker had leased and not used is the others'."""
        self.hub.goodbye()
        self.shards.close()
        self.hub.close()


def print_warning(line: str) -> None:
    """For a script that no `atoll run` watches."""
    print(f"atoll: {line}", file=sys.stderr, flush=True)


def _keys() -> Keys | None:
    path = os.environ.get(KEYS_VARIABLE, "")
    return read_keys(Path(path)) if path else None
