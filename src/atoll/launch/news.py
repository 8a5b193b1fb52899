"""News of a run's hub and sites for the command."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.events import AnyEvent, Decided, LinkSeen
from atoll.hub.decisions import HUB, WAITED_FOR, Decision, decision_reader
from atoll.launch.losses import Losses, who_of
from atoll.observe.groups import GROUPS
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory


@dataclass(frozen=True)
class LaunchNews:
    """News of a launch: `news` are the hub's decisions about faults and groups, `links` the state of the
    sites' links to the shards, `words` ends of processes and errors that end the run. `survived` has for
    each worker the time up to which its ends have ended nothing else. `first` is the worker whose output
    counts, in its `life`."""

    news: Sequence[AnyEvent] = ()
    links: Sequence[LinkSeen] = ()
    words: Sequence[AnyEvent] = ()
    survived: Mapping[int, float] = field(default_factory=dict)
    first: int = 0
    life: int = 0


class News:
    """Reads the hub's decisions and the journals of the sites' shards; `losses` are the parts that were
    lost, and came back. If the hub does not judge, its decisions about the lives of others are ignored."""

    def __init__(
        self,
        directory: RunDirectory,
        sites: Collection[str],
        twice: bool,
        hub_judges: bool,
    ) -> None:
        folder = directory.path / "service"
        self.losses = Losses(twice=twice)
        self._hub_judges = hub_judges
        self._began = time.monotonic()
        self._decisions = decision_reader(folder)
        self._journals = [JournalReader(folder / f"site-{site}" / "journal.jsonl") for site in sites]
        self._port_told: set[str] = set()  # kinds of the hub's reports on its port
        self._news: list[AnyEvent] = []

    def look(self) -> list[str]:
        """Read the hub's new decisions; return the parts of the run that it has given up."""
        given_up: list[str] = []
        for each in self._decisions.read():
            if not self._hub_judges:
                if each.what == "hub":
                    self.losses.take(each, self._now())
                continue
            if self.losses.take(each, self._now()) or each.what == GROUPS or self._is_to_be_told(each):
                what = each.what if each.what in ("hub", GROUPS) else f"hub: {each.what}"
                self._news.append(
                    Decided(time=each.time, worker=HUB, what=what, choice=each.choice, reason=each.reason)
                )
            if each.what.endswith(" died"):
                given_up.append(who_of(each))
        return given_up

    def take(self) -> list[AnyEvent]:
        """Return the hub's decisions about faults and groups since the last call."""
        news, self._news = self._news, []
        return news

    def links(self) -> list[LinkSeen]:
        """Return the new reports on the sites' links to the shards."""
        events = (event for journal in self._journals for event in journal.read())
        return [event for event in events if isinstance(event, LinkSeen)]

    def lost(self, who: str) -> None:
        """Record the loss of a part of the run."""
        self.losses.lost(who, self._now())

    def back(self, who: str) -> None:
        """Record the return of a part of the run."""
        self.losses.back(who, self._now())

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _is_to_be_told(self, decision: Decision) -> bool:
        """True if the hub waits for somebody who is silent and lives, and for its first report of each
        kind that its port is full, or that strangers fill it."""
        if decision.what.endswith(f" {WAITED_FOR}"):
            return True
        kind = decision.reason.partition(" ")[0]
        if decision.what != "port" or kind in self._port_told:
            return False
        self._port_told.add(kind)
        return True
