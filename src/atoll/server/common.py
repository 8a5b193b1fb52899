"""Objects shared by the components of a shard."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.net.endpoint import Server
from atoll.server.durability import Durability
from atoll.server.logkeeper import LogKeeper
from atoll.server.loglines import LogLines
from atoll.server.peers import Peers
from atoll.server.telling import Teller
from atoll.server.training import Training


@dataclass(frozen=True)
class Common:
    """Shared objects of shard `index` of `run`, or of the shard of `site`. `server` accepts workers'
    connections. `lines` queues log entries; `log` is set where the log is kept: on shard 0 and on a site's
    shard. `kept` makes the shard durable."""

    index: int
    run: str
    site: str
    server: Server
    peers: Peers
    kept: Durability
    lines: LogLines
    log: LogKeeper | None
    training: Training
    tell: Teller
