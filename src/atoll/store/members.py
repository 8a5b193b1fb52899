"""Membership: the run's workers, shards and sites, as the hub knows them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.core.config import SITE_VARIABLE
from atoll.store.admission import Admission
from atoll.store.places import Shards, Sites
from atoll.store.replicas import Pair
from atoll.store.roll import Member, Roll
from atoll.store.silence import FLOOR_SECONDS
from atoll.store.workers import RankedWorkers
from atoll.wire.messages import Count


class MembershipState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of `Membership`, without the times at which members were heard.

    Attributes:
        newest: the highest incarnation that was given.
        workers: workers by rank.
        shards: shards by index, if each is one process.
        halves: the processes of shards that are held twice, by incarnation.
        pairs: those shards by index.
        sites: sites' shards, by site.
        ended: sites that have ended.
    """

    newest: Count
    workers: dict[int, Member]
    shards: dict[int, Member]
    halves: dict[int, Member]
    pairs: dict[int, Pair]
    sites: dict[str, Member]
    ended: set[str]


class Membership:
    """The members of a run. A run without shards is a ring.

    Shards have incarnations too, so that their heartbeats can be told apart.

    Args:
        workers: the number of workers that the run begins with.
        patience: the longest silence, in seconds, before a member counts as dead.
        sites: the number of workers of each site.
        heartbeat: the seconds between a member's heartbeats.
        replicas: processes that hold each shard: 1 or 2.
        least: seconds of silence that are always borne.

    Attributes:
        roll: all members by incarnation.
        grouped: True if workers may name a site although no site has a shard.
        begun: True once as many workers were there as the run begins with.
    """

    def __init__(
        self,
        workers: int,
        patience: float,
        shards: int = 1,
        sites: Mapping[str, int] | None = None,
        heartbeat: float = 1.0,
        replicas: int = 1,
        least: float = FLOOR_SECONDS,
    ) -> None:
        self.roll = Roll(patience, heartbeat, least)
        self.workers = RankedWorkers(self.roll, workers, ring=not shards)
        self.shards = Shards(self.roll, shards, replicas)
        self.sites = Sites(self.roll, sites or {})
        self.grouped = self.begun = False

    def handle_hello(
        self,
        now: float,
        role: str,
        wish: int = -1,
        shard: int = -1,
        address: str = "",
        site: str = "",
        token: str = "",
        incarnation: int = 0,
        launcher: str = "",
    ) -> Admission:
        """Admit a worker, a shard or a site's shard.

        Args:
            role: "worker", "shard" or "site".
            wish: a worker's wish for a rank; -1 for any.
            shard: a shard's index.
            address: where a shard is.
            site: a site's name.
            token: a name that the asker keeps. A worker with a known token is there already: its answer was
                lost. A shard that was started again has its forerunner's token.
            incarnation: a shard's incarnation before it was started again.
            launcher: the launcher that may pass a worker's heartbeats on.
        """
        if role == "worker":
            refused = self._wrong_site(site)
            if refused:
                return Admission(refused=refused)
            return self.workers.admit(now, wish, token, launcher)
        if role == "shard":
            return self.shards.admit(now, shard, address, incarnation, token)
        if role == "site":
            return self.sites.admit(now, site, address, token)
        return Admission(refused=f"the hub knows no role {role!r}: worker, shard, site")

    def _wrong_site(self, site: str) -> str:
        """Return why a worker of this site may not come in; empty if it may."""
        sites = self.sites
        if not sites.workers:
            if self.grouped:
                return ""
            return (
                f"the run has no sites, and this worker is of site {site!r}: unset {SITE_VARIABLE}, or start "
                "the hub with --site NAME=WORKERS"
                if site
                else ""
            )
        if site in sites.ended:
            return f"site {site!r} has ended, and takes no workers any more"
        if site in sites.workers:
            return ""
        said = f"there is no site {site!r}" if site else "this worker names no site"
        return f"{said}; set {SITE_VARIABLE} to one of: {', '.join(sites.workers)}"

    def state(self) -> MembershipState:
        """Return all that a restart must not lose, for `restore`. It is the parts' own: encode it at once."""
        shards, sites = self.shards, self.sites
        return MembershipState(
            self.roll.newest,
            self.workers.members,
            shards.members,
            shards.halves,
            shards.pairs,
            sites.members,
            sites.ended,
        )

    def restore(self, now: float, state: MembershipState) -> None:
        """Take over a state that `state` has returned. All members in it count as heard now."""
        places = (*state.workers.values(), *state.shards.values(), *state.halves.values())
        of_sites = [(member, self.sites.patience(member)) for member in state.sites.values()]
        self.roll.restart(now, state.newest, [*((member, None) for member in places), *of_sites])
        self.workers.restore(state.workers)
        self.shards.restore(state.shards, state.halves, state.pairs)
        self.sites.restore(state.sites, state.ended)
