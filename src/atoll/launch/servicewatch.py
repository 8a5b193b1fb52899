"""Consequences of the end of a run's hub, or of one of its shards."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.launch.news import News
from atoll.launch.parts import called, part_of
from atoll.launch.processes import signal_name
from atoll.launch.rules import Rules
from atoll.launch.services import SERVICE_RESTARTS, Services, is_lost
from atoll.launch.words import Words


class ServiceWatch:
    """Starts lost services again, warns of it, and finds the one without which the run cannot go on.

    `sites` has the site of each launch of workers, by rank.
    """

    def __init__(
        self, services: Services, sites: Sequence[str], rules: Rules, words: Words, news: News
    ) -> None:
        self._services, self._sites, self._rules = services, sites, rules
        self._words, self._news = words, news
        self.lost_sites: set[str] = set()

    def look(self, stopping: bool) -> str:
        """Return an ended service without which the run cannot go on, or an empty string.

        Killed services are started again first, unless the run is `stopping`. A site's shard that ends well
        has no workers any more; one that was killed ends the run only with all other sites' shards.
        """
        # Services that were left out come last: a later end is what ends the run.
        for name, code in self._services.ended().items():
            site = name.partition("site-")[2]
            if site and code == 0:
                continue
            if not self._rules.hub_judges and (stopping or name in self._services.left_out):
                continue
            if not stopping and site not in self.lost_sites and self._serves_again(name, code):
                continue
            if self._goes_on_without(name, code, stopping):
                continue
            # A site's shard that comes back too late to take part says so and ends.
            killed = code < 0 or self._services.restarts[name] > 0
            if not site or not killed or self.lost_sites | {site} == set(self._sites):
                return name
            if site not in self.lost_sites:
                self.lost_sites.add(site)
                how = f"was killed by {signal_name(-code)}" if code < 0 else "could not come back"
                message = f"the shard of site {site!r} {how}; the other sites go on without it"
                self._words.warn(self._sites.index(site), message)
        return ""

    def tell_lost(self, name: str) -> None:
        """Report the hub or shard that has ended, and why: the run cannot go on without it."""
        message, status = self._services.why_lost(name)
        self._words.fail(0, message, status)

    def _serves_again(self, name: str, code: int) -> bool:
        """Start a lost hub or shard again, and say so; False if it may not be."""
        if not self._services.can_start_again(name, code):
            return False
        how = f"was killed by {signal_name(-code)}" if code < 0 else "was given up by the hub"
        self._services.restarts[name] += 1
        count = f"{self._services.restarts[name]} of {SERVICE_RESTARTS}"
        self._words.warn(0, f"{called(name)} {how}, and is started again ({count})")
        self._news.lost(part_of(name))
        self._services.start_again(name)
        return True

    def _goes_on_without(self, name: str, code: int, stopping: bool) -> bool:
        """True if the run goes on without a service for good; warn once. Of a shard with two processes the
        other goes on alone; nodes that know one another need no hub."""
        if name == "hub":
            if self._rules.hub_judges or not self._words.has_begun():
                return False
            restarts = self._services.restarts[name]
            often = f", {restarts + 1} times by now" if restarts else ""
            line = f"the hub ended with status {code}{often}; the nodes know one another, and go on without"
            line += " it"
        else:
            if code == 0 or not self._services.has_other_half(name, stopping):
                return False
            if name in self._services.left_out:
                return True
            # Before the run began its options are likely wrong, and the run waits for both processes.
            if stopping or not (is_lost(code) or self._words.has_begun()):
                return False
            place = "first" if name.startswith("server-") else "second"
            who = f"the {place} process of {part_of(name)}"
            line = f"{who} {self._services.how_it_ended(name, code)}; the other one goes on alone"
        self._services.left_out.add(name)
        self._words.warn(0, line)
        return True
