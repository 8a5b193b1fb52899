"""A worker's part in a run that has a hub: its place, its shards, and the data that it leases."""

from __future__ import annotations

import os
import sys
from functools import partial

import msgspec

from atoll.axes.choices import choices_of
from atoll.axes.needs import check
from atoll.core.config import (
    HUB_VARIABLE,
    KEYS_VARIABLE,
    RUN_VARIABLE,
    SITE_VARIABLE,
    Config,
    LinkOptions,
)
from atoll.core.errors import AtollError, ConfigError, PeerLostError
from atoll.core.heap import keep_freed_memory
from atoll.core.scriptline import at_script_line, script_line
from atoll.exchange.link import LOG, ShardLink
from atoll.exchange.parties import Parties
from atoll.net.endpoint import is_path
from atoll.net.heartbeats import launcher_from_environment
from atoll.net.keys import Keys
from atoll.net.requests import RefusedError
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.api.pace import Pace
from atoll.train.api.place import Place
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.train.group.rendezvous import GroupRing, HubRing
from atoll.train.group.rounds import RoundMark
from atoll.train.members.hub_client import HubClient
from atoll.train.members.peersintroduction import keys_from_environment, wished_rank
from atoll.wire.messages import VERSION, Goodbye, Hello, Used, Welcome

# The hubs of runs with shards in which a session of this process has come to its end.
_trained_at: set[str] = set()


def enter(config: Config) -> Service | HubRing:
    """Join the run at $ATOLL_HUB: as a worker of its shards, or in the ring of a run without shards.

    Raises ConfigError if the environment or the strategy is wrong, and for a second session at shards; and
    the errors of HubClient.
    """
    address = os.environ.get(HUB_VARIABLE, "")
    if not address:
        check("join", choices_of(config, {"hub": ""}))
    kept = keep_freed_memory(messages=True)
    keys = keys_from_environment()
    refused = ""
    for _ in range(2):
        try:
            return _joined(config, address, keys, kept)
        except _RingIsOverError as error:  # the ring's workers said goodbye after this one had joined
            refused = str(error)
    raise RefusedError(refused)


def _of_first_session(service: Service, config: Config, address: str) -> Service:
    """Return the service. Raises ConfigError for a second session of this process in a run with shards.

    A session that ended with an error may be followed by another one, which resumes. A hub at the address of
    an earlier run's has shards that have not begun, so nobody comes late there.
    """
    again = address in _trained_at and service.shards.late
    line = at_script_line("atoll.join", script_line())
    try:
        check("join", choices_of(service.as_joined(config), {"second session": again, "line": line}))
    except ConfigError:
        service.close()
        raise
    return service


class _RingIsOverError(AtollError):
    """This worker came late to a ring, and the ring was over before it could ask to enter."""


def _joined(config: Config, address: str, keys: Keys | None, kept: bool) -> Service | HubRing:
    hub = HubClient(
        address,
        keys,
        run=os.environ.get(RUN_VARIABLE, ""),
        timeout=config.timeout_seconds,
        launcher=launcher_from_environment(),
        without=partial(_without_hub, config),
    )
    try:
        # A ring's workers report their sites to one another. A hub without sites refuses a named site.
        site = "" if config.run.strategy == "hierarchical" else os.environ.get(SITE_VARIABLE, "")
        wish = wished_rank()
        welcome = hub.join(wish, site)
        facts = {"hub": address, "shards": welcome.shards, "sites": ", ".join(welcome.sites)}
        check("join", choices_of(config, facts))
        if welcome.shards:
            service = Service(config, hub, address, keys, keeps_memory=kept)
            return _of_first_session(service, config, address)
        _tell_of_torchrun(welcome.workers)
        return _ring_of(hub, address, keys, config, wish)
    except BaseException:  # the others would wait for a rank that never trains
        hub.goodbye()
        hub.close()
        raise


def _without_hub(config: Config, welcome: Welcome) -> str:
    """Return, in words, how the run goes on while its hub is away."""
    if not welcome.shards:
        return "the ring trains on, and would not know who of it died"
    if config.sync.consistency == "bsp":
        return "training goes on, but nobody notices a worker's death before sync.timeout"
    return "training goes on while leased samples last"


def _ring_of(hub: HubClient, address: str, keys: Keys | None, config: Config, wish: int) -> HubRing:
    assert hub.welcome is not None
    is_late = wish < 0 and hub.welcome.worker >= hub.welcome.workers  # all of the ring's ranks were taken
    try:
        return HubRing(hub, address, keys, config.timeout_seconds)
    except RefusedError as error:
        if is_late:
            raise _RingIsOverError(str(error)) from None
        raise


class Service:
    """The hub that this worker has joined, and its shards, as one worker sees them.

    Attributes:
        keeps_memory: True if freed memory stays with the process.
        site: this worker's site, if sites have shards of their own; else empty.
        hub: the connection to the hub.
        welcome: the hub's answer when this worker joined.
        rings: the rings of this worker's groups, if workers are in groups; else None.
        mark: shows whether this worker is within a round of its ring.
        shards: the link to the shards.
        finished: True if the session came to its end.
        samplers: the samplers that lease data.
        members: the number of living workers, by the shards' latest report; 0: not known yet.
        staleness: the latest contribution's staleness as the shards measured it, in global iterations.
    """

    def __init__(
        self, config: Config, hub: HubClient, address: str, keys: Keys | None, *, keeps_memory: bool = False
    ) -> None:
        assert hub.welcome is not None
        self.keeps_memory = keeps_memory
        # In a run without sites' shards the hub only forms groups by the site.
        self.site = os.environ.get(SITE_VARIABLE, "") if hub.welcome.sites else ""
        self._address = address
        self.hub, self.welcome = hub, hub.welcome
        self.rings: GroupRing | None = None
        self.mark = RoundMark()
        if config.run.strategy == "ps-hra":
            hub.wait_for_links()
            self.rings = GroupRing(hub, address, keys, config.timeout_seconds)
        self.shards = ShardLink(
            self.hub.shards(),
            keys,
            hello=Hello(
                version=VERSION,
                run=self.welcome.run,
                role="worker",
                worker=self.welcome.worker,
                incarnation=self.welcome.incarnation,
                site=self.site,
            ),
            parties=parties_of(self.welcome.worker, self.site),
            timeout=config.timeout_seconds,
            where=self._where_shards_are,
            tell=hub.notices.warn,
            meanwhile=self._check_ring,
            # Inside a site the shard is near; the site's shard uses the long link.
            options=LinkOptions() if self.site else config.link,
        )
        self.shards.greet()
        self.finished = False
        self.samplers: list[LeasedSampler] = []
        self.members = 0
        self.staleness = 0.0

    @property
    def place(self) -> Place:
        """This worker's place in the run, which the hub gave."""
        return Place(
            rank=self.welcome.worker,
            world=self.welcome.workers,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def as_joined(self, config: Config) -> Config:
        """Return the configuration of a run with shards. A worker without groups has strategy `server`."""
        if self.rings is not None:
            return config
        run = msgspec.structs.replace(config.run, strategy="server")
        return msgspec.structs.replace(config, run=run)

    def describe(self, config: Config) -> str:
        """Return a description of the run's servers, in a few words."""
        consistency = config.sync.consistency
        slack = f" with slack {config.sync.slack}" if consistency == "ssp" else ""
        where = f" between sites, at site {self.site!r}" if self.site else ""
        return f"{consistency}{slack}{where}, shards: {', '.join(self.shards.addresses)}; {self._safety()}"

    def _safety(self) -> str:
        """Return how the way to the shards is protected, in words."""
        if all(is_path(address) for address in self.shards.addresses):
            return "sockets of this user alone"
        return "encrypted (CURVE)" if os.environ.get(KEYS_VARIABLE) else "not encrypted (loopback only)"

    def describe_link(self, config: Config) -> str:
        """Return a description of the link to the shards, in a few words, if it is not TCP."""
        link = config.link
        if self.site:
            return (
                f"tcp inside site {self.site!r}; its shard has the way to the others (atoll server --config)"
            )
        if not link.lossy:
            return "ltp, and nothing may be lost"
        late = "goes with the next one" if link.feedback else "is gone"
        return f"ltp: what is lost of a gradient {late}"

    def used(self) -> list[Used]:
        """Return the leased positions that this worker's next commit uses up."""
        return [each for sampler in self.samplers for each in sampler.used()]

    def prepared(self, nbytes: int) -> None:
        """Note that a model is prepared whose gradients have `nbytes` bytes."""
        self.hub.size += nbytes

    def stepped(self, iteration: int, samples: float, pace: Pace | None) -> None:
        """Note this worker's iteration, for its heartbeats. Raises RunError when the hub has given the worker
        up."""
        self.hub.iteration, self.hub.batch = iteration, samples
        if self.rings is not None and pace is not None:  # the hub forms groups of workers that report a pace
            self.hub.set_pace(pace.seconds)
        self.hub.check()

    def finish(self, _iteration: int) -> None:
        """Note that the session came to its end."""
        self.finished = True
        _trained_at.add(self._address)

    def told_members(self, count: int) -> None:
        """Take the number of living workers."""
        self.members = count

    def measured_staleness(self, value: float) -> None:
        self.staleness = value

    def _where_shards_are(self) -> list[str] | None:
        """Return the shards' addresses if the hub knows them, else None. Raises PeerLostError if this
        worker's site has ended."""
        try:
            return self.hub.where_shards_are()
        except RefusedError as error:
            if not self.site:
                raise
            lost = f"the shard of site {self.site!r} at {self.shards.addresses[LOG]}"
            raise PeerLostError(
                f"worker {self.welcome.worker} lost {lost}: {error}; the others go on"
            ) from None

    def _check_ring(self) -> None:
        """Raise BrokenRingError within a round of the group's ring if the hub has reported that the ring lost
        a member.

        The wait may be for that member.
        """
        if self.rings is not None and self.mark.inside:
            self.rings.check()

    def close(self) -> None:
        """Leave the run. Other workers get the positions that this one has leased and not used."""
        if self.site:  # otherwise its shard would wait for it to come back
            self.shards.send(LOG, Goodbye(incarnation=self.shards.incarnation))
        self.hub.goodbye(self.finished)
        self.shards.close()
        if self.rings is not None:
            self.rings.close()
        self.hub.close()


def parties_of(worker: int, site: str = "") -> Parties:
    """Return words for a worker and its shards: those of the run, or the one of its site."""
    end = "its site's, and the others go on" if site else "the run's"
    return Parties(
        own=f"worker {worker}",
        shard=lambda shard: f"the shard of site {site!r}" if site else f"shard {shard}",
        others="workers",
        deadline="sync.timeout",
        end=f"{end}: go on from a checkpoint (session.save)",
    )


def _tell_of_torchrun(workers: int) -> None:
    """Print that the hub's place counts, if torchrun gave this worker a place among several too.

    Nothing is printed under `atoll run`, since nobody has asked for another place.
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK") == "0"
    if several and DIRECTORY_VARIABLE not in os.environ:
        print(
            f"atoll: {HUB_VARIABLE} is set, so the ring is of the hub's {workers} workers, and torchrun's "
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} does not count; unset {HUB_VARIABLE} for torchrun's own",
            file=sys.stderr,
            flush=True,
        )
