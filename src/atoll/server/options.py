"""Options of a shard of the parameter server, for the command, `atoll run` and tests."""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.core.config import HUB_VARIABLE, KEYS_VARIABLE, JournalNeed, LinkOptions
from atoll.core.options import RATE, SPAN, Mark

_HIDDEN = Mark(is_hidden=True)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one shard of a run, or of a site's shard.

    Args:
        hub: The hub's address.
        shard: Which shard, from 0.
        site: Or: the site whose shard it is.
        listen: tcp://HOST:PORT, as workers reach it; port 0: any free.
        address: What the hub is told in place of that; empty: where it listens, and for an address of all
            interfaces this machine's name.
        key_file: The run's keys; without them, only processes of this machine can take part.
        run: The run's name; the command asks the hub.
        directory: This shard's own: what it keeps, and goes on from when it is killed.
        optimizer: An optimizer that is not torch.optim's, by its path.
        codec: A codec of another package that gradients may be written by.
        fused: Step by torch's fused optimizers.
        snapshot_seconds: Between snapshots. A site's journal begins anew so often.
        journal: Where it cannot be written, the shard goes on (optional) or ends (required).
        sync: Wait for the disk, so that what is kept survives the machine too.
        timeout: How long to wait for the hub; at a site, for the other sites too.
        link_rate: This shard's link, which those with link.transport = ltp share, by site.
        config: With --site: the configuration whose [link] is its way to the other shards.
        link: That `[link]`, once it is read.
        udp_port: The first UDP port for link.transport = ltp; 0: any free.
    """

    hub: Annotated[str, Mark("ADDRESS", variable=HUB_VARIABLE)]
    shard: Annotated[int | None, Mark("I")] = None
    site: Annotated[str, Mark("NAME")] = ""
    listen: Annotated[str, Mark("ADDRESS")] = "tcp://127.0.0.1:0"
    address: Annotated[str, _HIDDEN] = ""
    key_file: Annotated[str, Mark("FILE", variable=KEYS_VARIABLE)] = ""
    run: Annotated[str, _HIDDEN] = "atoll"
    directory: Annotated[str, Mark("D")] = ""
    optimizer: Annotated[str, Mark("MODULE:CLASS")] = ""
    codec: Annotated[str, Mark("NAME")] = ""
    fused: Annotated[bool, _HIDDEN] = False
    snapshot_seconds: Annotated[float, Mark("S")] = 60.0
    journal: Annotated[JournalNeed, Mark("HOW")] = "optional"
    sync: bool = False
    timeout: Annotated[float, SPAN] = 600.0
    link_rate: Annotated[float, RATE] = 0.0
    config: Annotated[str, Mark("FILE")] = ""
    link: Annotated[LinkOptions, _HIDDEN] = LinkOptions()
    udp_port: Annotated[int, Mark("P")] = 0
