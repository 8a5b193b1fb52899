"""The hub's connections to the run's logs: the global one, which shard 0 keeps, and one for each site.

A site's log knows the site's workers; the global log knows each site as one worker, whose rank is the site's
index. The global log's count of samples is authoritative (`hub/book.py`).
"""

from __future__ import annotations

import msgspec

from atoll.core.errors import UserError
from atoll.hub.book import GLOBAL, Book
from atoll.hub.broken import BrokenLinks
from atoll.hub.contributors import Contributors
from atoll.hub.decisions import Decisions
from atoll.hub.loglink import LogLink
from atoll.hub.samples import Samples
from atoll.net.endpoint import Client
from atoll.net.keys import Keys
from atoll.wire.messages import Fenced, Looked


class Logs:
    """Connections to the logs of the run in `book`; `samples` and `broken` handle the logs' messages."""

    def __init__(
        self,
        keys: Keys | None,
        run: str,
        book: Book,
        samples: Samples,
        broken: BrokenLinks,
        contributors: Contributors | None,
        decisions: Decisions,
    ) -> None:
        self._keys, self._run, self._book, self._decisions = keys, run, book, decisions
        self._samples, self._broken, self._contributors = samples, broken, contributors
        self._links = {log: self._link(log) for log in (GLOBAL, *book.members.sites.workers)}

    def _link(self, log: str) -> LogLink:
        name = f"site {log!r}" if log else "shard 0"
        return LogLink(self._keys, self._run, name, lambda line: self._fail(log, line))

    def _fail(self, log: str, line: str) -> None:
        self._decisions.add(f"log of site {log!r}" if log else "log", "not reached", line)

    @property
    def clients(self) -> list[Client]:
        """The open connections."""
        return [link.client for link in self._links.values() if link.client is not None]

    def connect(self, log: str, address: str) -> None:
        """Connect to the shard that keeps this log."""
        if log not in self._links:
            return  # a site that has ended
        try:
            self._links[log].connect(address)
        except UserError as error:  # an address that cannot be used from here
            self._fail(log, str(error))

    def look(self, rank: int, incarnation: int) -> None:
        """Ask a worker's log about the worker's connection; `broken` gets the answer."""
        site = self._book.site_of(incarnation) if self._book.members.sites.workers else ""
        link = self._links.get(site or GLOBAL)
        contributors = self._contributors
        key = contributors.looked_for(rank) if contributors is not None else (rank, incarnation)
        if link is not None and key is not None:
            link.look(*key)

    def take(self) -> None:
        """Handle messages from the logs."""
        for log, link in self._links.items():
            for message in link.take():
                if isinstance(message, Fenced):
                    self._samples.told(log, message)
                else:
                    self._looked(message)

    def _looked(self, looked: Looked) -> None:
        if self._contributors is not None:
            incarnation = self._contributors.worker_of(looked.worker)
            if incarnation is None:
                return
            looked = msgspec.structs.replace(looked, incarnation=incarnation)
        self._broken.looked(looked)

    def flush(self) -> None:
        """Send new fences."""
        for log, link in self._links.items():
            link.flush(self._book.fences.get(log, ()))

    def end(self, site: str) -> None:
        """Disconnect from the log of a site that is gone; the global log settles its workers' samples."""
        link = self._links.pop(site, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
