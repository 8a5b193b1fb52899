"""The hub's connections to the logs of a run's sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.hub.loglink import LogLink
from atoll.net.endpoint import Client


class Sites:
    """A site's log knows the site's workers, and the global one knows each site as one worker, whose rank is
    the site's index. What the global log counts is the truth about samples (`hub/book.py`).

    `open_link(name)` makes a connection to a site's log.
    """

    def __init__(self, names: Sequence[str], open_link: Callable[[str], LogLink]) -> None:
        self._links = {name: open_link(name) for name in names}

    @property
    def clients(self) -> list[Client]:
        """The connections that there are."""
        return [link.client for link in self._links.values() if link.client is not None]

    def reach(self, site: str, address: str) -> None:
        """A site's shard is there. Raises UserError for an address that cannot be used from here."""
        if site in self._links:
            self._links[site].connect(address)

    def link(self, site: str) -> LogLink | None:
        """The connection to a site's log; None where the site is no more."""
        return self._links.get(site)

    def take(self) -> None:
        """Take what the sites' logs have sent."""
        for link in self._links.values():
            link.take()

    def flush(self) -> None:
        """Send the fences that are new."""
        for link in self._links.values():
            link.flush()

    def end(self, site: str) -> None:
        """A site is no more: its workers' samples are settled by the global log's word."""
        link = self._links.pop(site, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
