"""What the parts of a shard share."""

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
    """Of shard `index` of `run`, or of the shard of `site`. `server` is where workers come in; `log` is what
    shard 0 keeps, and `lines` are the log's; `kept` outlives the process."""

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
