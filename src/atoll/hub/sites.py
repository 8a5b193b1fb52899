"""What the hub keeps for a run of several sites: which worker is where, each site's log, and whose samples
end with which site."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.hub.loglink import Key, LogLink
from atoll.net.endpoint import Client
from atoll.store.leases import Leases
from atoll.wire.messages import Fenced


class Sites:
    """A site's log knows the site's workers, and the global one knows each site as one worker, whose rank is
    the site's index. What the global log counts is the truth about samples.

    `open_link(name, fenced)` makes a connection to a site's log. `told(worker, fenced, returned)` hears of
    each worker that such a log has fenced, and how many samples came back.
    """

    def __init__(
        self,
        names: Sequence[str],
        leases: Leases,
        open_link: Callable[[str, Callable[[Fenced, bool], None]], LogLink],
        told: Callable[[Fenced, int], None],
    ) -> None:
        self.names = list(names)
        self._leases, self._told = leases, told
        self._site_of: dict[Key, str] = {}  # of every worker that has ever come
        self._links = {name: open_link(name, self._handle_fenced) for name in self.names}

    def note(self, worker: int, incarnation: int, site: str) -> None:
        """A worker has come."""
        if self.names:
            self._site_of[worker, incarnation] = site

    def site_of(self, incarnation: int) -> str:
        """The site of a worker that has ever come; empty for anyone else."""
        return next((site for (_, known), site in self._site_of.items() if known == incarnation), "")

    # -- the sites' logs ----------------------------------------------------------------------------------

    @property
    def clients(self) -> list[Client]:
        """The connections that there are."""
        return [link.client for link in self._links.values() if link.client is not None]

    def reach(self, site: str, address: str) -> None:
        """A site's shard is there. Raises UserError for an address that cannot be used from here."""
        self._links[site].connect(address)

    def fence(self, worker: int, incarnation: int) -> bool:
        """Have the log that knows a worker take nothing from it; False where that is the global one."""
        site = self._site_of.get((worker, incarnation))
        if site in self._links:
            self._links[site].fence(worker, incarnation)
        return bool(self.names)

    def take(self) -> None:
        """Take what the sites' logs have sent."""
        for link in self._links.values():
            link.take()

    def end(self, site: str) -> None:
        """A site is no more: its workers' samples are settled by the global log's word."""
        link = self._links.pop(site, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _handle_fenced(self, fenced: Fenced, asked: bool) -> None:
        """A site's log on what a worker has used there: the global log has yet to count it."""
        if asked:
            returned = self._leases.handle_fenced(fenced.worker, fenced.incarnation, fenced.used, final=False)
            self._told(fenced, returned)

    # -- samples ------------------------------------------------------------------------------------------

    def handle_used(self, index: int, fenced: Fenced) -> None:
        """The global log counts contributions of a site, which used these."""
        for worker, incarnation in self._workers_at(index):
            self._leases.handle_used(worker, incarnation, fenced.used)

    def handle_ended(self, index: int, fenced: Fenced) -> int:
        """The global log takes nothing from a site any more, and `fenced` has all that it used; gives how
        many samples are free again."""
        return sum(
            self._leases.handle_fenced(worker, incarnation, fenced.used)
            for worker, incarnation in self._workers_at(index)
        )

    def _workers_at(self, index: int) -> list[Key]:
        return [key for key, site in self._site_of.items() if site == self.names[index]]
