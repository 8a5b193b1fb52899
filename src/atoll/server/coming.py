"""A shard's first message to the hub, which announces its start. Sent before the slow import of torch."""

from __future__ import annotations

import os

from atoll.core.liveness import own_origin
from atoll.net.endpoint import Client
from atoll.net.keys import Keys, read_keys
from atoll.net.requests import ask
from atoll.server.options import ServerOptions
from atoll.wire.base import GUEST, VERSION, Hello, Welcome
from atoll.wire.messages import encode

_FRAME = 2**21  # bytes of a message of the hub's


def announce(options: ServerOptions) -> None:
    """Send the announcement without waiting for an answer."""
    keys = read_keys(options.key_file) if options.key_file else None
    client = Client(options.hub, keys, limit=_FRAME, name="hub")
    client.send(encode(_hello(options, options.run)))
    client.close()


def ask_run(options: ServerOptions, keys: Keys | None) -> str:
    """Send the announcement and return the name of the run that the hub serves. Raises what `ask` raises."""
    with Client(options.hub, keys, limit=_FRAME, name="hub") as client:
        welcome, _ = ask(client, _hello(options, ""), Welcome, options.timeout, "the run's name")
    return welcome.run


def _hello(options: ServerOptions, run: str) -> Hello:
    shard = -1 if options.shard is None else options.shard
    return Hello(
        version=VERSION,
        run=run,
        role=GUEST,
        shard=shard,
        site=options.site,
        pid=os.getpid(),
        origin=own_origin(),
    )
