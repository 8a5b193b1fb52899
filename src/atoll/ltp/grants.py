"""Grants against incast: a receiver shares its link among the senders that have data.

Source: docs/ltp.md, "Grants". Shares are max-min: equal among the sites that have data, and by weight among
the sessions of a site. A grant binds the receiver until it expires, because the message that lowers it may be
lost. A newcomer therefore starts on a small reserve until other grants run out, and the sum of all grants in
force never exceeds the link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from atoll.core.errors import UserError

GRANT_SECONDS = 0.1  # a grant's life: a newcomer's longest wait for its share, and a few round trips
RENEWED = 0.5  # share of a grant's life after which it is renewed: a lost one is replaced in time
ASK_SECONDS = 1.0  # for which a sender counts as having data after its last Ask
RESERVE = 0.05  # share of the link for senders that wait for their share
LEAST_CHANGE = 0.05  # relative change of a share below which a grant waits for its renewal
MOST_SENDERS = 1024
# After the first Ask, in which recent senders are expected to ask too, since all answer one event. If the
# first got the whole link, the others would wait until its grant expires.
EXPECTED_SECONDS = 0.05
LATELY_SECONDS = 10.0

Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class Grant:
    session: int
    rate: float  # bytes per second of datagrams
    seconds: float
    reason: str


@dataclass
class _Sender:
    site: str
    weight: float
    wanted: float  # bytes per second
    until: float  # when it counts as silent
    granted: float = 0.0  # rate of the last grant
    renew_at: float = -math.inf
    # (until, rate) of grants in force: a lower grant may be lost, so a higher one binds until it expires.
    promised: list[tuple[float, float]] = field(default_factory=list)

    def bound(self, now: float) -> float:
        """Return the highest rate that the sender may still use."""
        self.promised = [each for each in self.promised if each[0] > now]
        return max((rate for _, rate in self.promised), default=0.0)


class Grants:
    """Shares of one receiver's link. `link_rate` in bytes per second of datagrams."""

    def __init__(self, link_rate: float) -> None:
        if not 0.0 < link_rate < math.inf:
            raise UserError(f"link_rate = {link_rate:g}: more than 0 bytes per second, and finite")
        self._link_rate = link_rate
        self._senders: dict[int, _Sender] = {}
        self._left: list[tuple[float, float]] = []  # (until, rate) promised to senders that are done
        self._began = -math.inf  # time of the first Ask after an idle time
        self._lately: dict[int, tuple[float, _Sender]] = {}  # recent senders, with the time of their last Ask

    def handle_ask(
        self, now: float, session: int, weight: float = 1.0, wanted: float = math.inf, site: str = ""
    ) -> bool:
        """Record that a sender of `site` has data, at most `wanted` bytes per second.

        Returns False if there are too many senders: this one keeps to its own estimate.
        """
        if not (weight > 0.0 and wanted > 0.0 and math.isfinite(weight)) or math.isnan(wanted):
            raise UserError(f"session {session} asks for {wanted:g} with weight {weight:g}: both are above 0")
        self._expire(now)
        sender = self._senders.get(session)
        if sender is None:
            if len(self._senders) + len(self._left) >= MOST_SENDERS:
                return False
            if not self._senders:
                self._began = now
            if not self._senders or len(self._lately) >= MOST_SENDERS:
                self._forget(now)
            sender = self._senders[session] = _Sender(site, weight, wanted, now + ASK_SECONDS)
        else:
            sender.site, sender.weight, sender.wanted = site, weight, wanted
            sender.until = now + ASK_SECONDS
        self._lately[session] = now, sender
        return True

    def _forget(self, now: float) -> None:
        """Drop senders whose last Ask is older than LATELY_SECONDS."""
        self._lately = {
            session: (when, sender)
            for session, (when, sender) in self._lately.items()
            if when > now - LATELY_SECONDS
        }

    def handle_done(self, now: float, session: int) -> None:
        """Record that a sender has no more data. Its grants stay reserved until they expire."""
        sender = self._senders.pop(session, None)
        if sender is not None and (bound := sender.bound(now)) > 0.0:
            self._left.append((sender.promised[-1][0], bound))

    def poll_grants(self, now: float) -> list[Grant]:
        """Return the grants to send now: for shares that changed, and for grants that run out."""
        self._expire(now)
        if not self._senders:
            return []
        shares = self._shares(now)
        bounds = {session: sender.bound(now) for session, sender in self._senders.items()}
        free = (1.0 - RESERVE) * self._link_rate - sum(bounds.values()) - sum(rate for _, rate in self._left)
        waiting = RESERVE * self._link_rate / MOST_SENDERS
        grants = []
        for session, sender in sorted(self._senders.items()):
            # A rate up to its bound is already promised to this sender; anything above must be free.
            rate = min(shares[session], bounds[session] + max(0.0, free))
            reason = "its share of the link"
            if rate < shares[session] * (1.0 - LEAST_CHANGE):
                reason = "what is free until others' grants expire"
            if rate < waiting:
                rate, reason = waiting, "others' grants have yet to expire"
            if now < sender.renew_at and abs(rate - sender.granted) <= LEAST_CHANGE * sender.granted:
                continue
            free -= max(0.0, rate - bounds[session]) if rate > waiting else 0.0
            sender.granted, sender.renew_at = rate, now + RENEWED * GRANT_SECONDS
            sender.promised = [*sender.promised, (now + GRANT_SECONDS, rate)]
            grants.append(Grant(session, rate, GRANT_SECONDS, reason))
        return grants

    def poll_deadline(self) -> float:
        """Return the time at which `poll_grants` may have something; inf without senders."""
        return min((sender.renew_at for sender in self._senders.values()), default=math.inf)

    def committed(self, now: float) -> float:
        """Return the bytes per second of all grants in force; never above the link."""
        self._expire(now)
        return sum(each.bound(now) for each in self._senders.values()) + sum(rate for _, rate in self._left)

    def _shares(self, now: float) -> dict[int, float]:
        sites: dict[str, dict[int, _Sender]] = {}
        expected = {}
        if now < self._began + EXPECTED_SECONDS:
            expected = {
                session: sender for session, (when, sender) in self._lately.items() if when < self._began
            }
        for session, sender in (expected | self._senders).items():
            sites.setdefault(sender.site, {})[session] = sender
        wanted = {
            site: math.fsum(each.wanted for each in members.values()) for site, members in sites.items()
        }
        of_site = max_min((1.0 - RESERVE) * self._link_rate, wanted, dict.fromkeys(sites, 1.0))
        shares: dict[int, float] = {}
        for site, members in sites.items():
            wishes = {session: each.wanted for session, each in members.items()}
            weights = {session: each.weight for session, each in members.items()}
            shares |= max_min(of_site[site], wishes, weights)
        return shares

    def _expire(self, now: float) -> None:
        for session in [session for session, sender in self._senders.items() if sender.until <= now]:
            self.handle_done(now, session)
        self._left = [each for each in self._left if each[0] > now]


def max_min(total: float, wanted: Mapping[Key, float], weights: Mapping[Key, float]) -> dict[Key, float]:
    """Return max-min fair shares of `total`.

    No share exceeds what is wanted. All unsatisfied keys get the same per weight, which no satisfied key
    exceeds.
    """
    shares: dict[Key, float] = {}
    left, weight = total, sum(weights.values())
    for key in sorted(wanted, key=lambda key: wanted[key] / weights[key]):
        shares[key] = min(wanted[key], left * weights[key] / weight) if weight > 0.0 else 0.0
        left, weight = max(0.0, left - shares[key]), weight - weights[key]
    return shares
