"""The base of all messages, and the messages of all roles: Hello, and Welcome or Refused in answer.

Sizes, counts and names are bounded here, before anything is allocated for them. Source: docs/server.md.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from atoll.core.decoding import decoded
from atoll.core.errors import AtollError

VERSION = 27  # of the protocol; both sides must have the same
GUEST = "guest"  # the role of a sender that only asks which run this is; a shard's process gives its index
MOST_AHEAD = 2**20  # how far an incarnation may be beyond the highest known one: incarnations are counted
HEADER_BYTES = 2**26  # the largest header: a layout of a hundred thousand parameters

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
Weight: TypeAlias = Annotated[float, Meta(ge=0)]
StoreKey: TypeAlias = Annotated[str, Meta(max_length=1024)]  # of the rings' store
Value: TypeAlias = Annotated[bytes, Meta(max_length=2**20)]
Hyperparameters: TypeAlias = list[dict[str, Any]]  # for each param group of the optimizer: numbers, booleans


_Kind = TypeVar("_Kind")


class WireError(AtollError):
    """Bytes from outside that are no message of this protocol; the line says why."""


def decode_with(
    decoder: msgspec.msgpack.Decoder[_Kind], raw: bytes | bytearray | memoryview, what: str
) -> _Kind:
    """Return the message in `raw`, called `what` in the error if it is too large. Raises WireError, with
    one line, for anything else."""
    if len(raw) > HEADER_BYTES:
        raise WireError(f"a {what} of {len(raw)} bytes, where {HEADER_BYTES} is the most")
    return decoded(decoder, raw, WireError, "no message of this protocol")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="m", tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """The first message of a connection. `run` is the run's name: a shard of another run refuses it.

    From a shard to the hub, `address` is where workers reach it, `shard` its index, and `incarnation` what
    the hub gave it before it was started again (0: it begins). From a worker to the hub, `incarnation` is
    0, and `worker` the rank it wishes for, or -1 for any; to a shard, both are what the hub gave. `token`
    is a name that the sender has made up for itself: said twice, it is one who comes once; a shard's, a
    site's shard's too, is its directory's. Where shards are held twice, a shard's `life` is a name of its
    process alone, and `since` the incarnation that this process has been given already (0: none). From the
    hub to shard 0, `role` is "hub"; from a shard's primary to its standby, "primary". Where the run has
    sites, a worker names its own, also to its shard, which knows by it who has come to an old port; a
    site's shard is a "site" to the hub, and to the global shards a worker, whose rank is the site's index.
    A node of strategy `peers` says it to the hub, over a connection for votes alone, as "node", with its
    number as `worker`; that is answered only where it is refused. From a worker to the hub, `launcher` is
    the name of the launcher that started it and passes on its heartbeats (see Heartbeats); empty: none
    does. `origin` is where its process is, for a hub of the same machine to look at it when it is silent
    (core/liveness.py). A group of several says Hello to shards as one worker, with what the hub gave the
    group; `member` tells its connections apart: the rank in the run of the member whose connection it is.
    """

    version: int
    run: Name
    role: Name  # "worker", "shard", "site", "hub", "primary", "node"
    worker: int = -1
    incarnation: Count = 0
    shard: int = -1
    address: Name = ""
    pid: Count = 0
    site: Name = ""
    token: Name = ""
    life: Name = ""
    since: Count = 0
    member: Count = 0
    launcher: Name = ""
    origin: Name = ""


class Welcome(Message, frozen=True):
    """The answer to a Hello. From the hub: rank and incarnation, the number of workers that the run starts
    with, the number of shards (0: its workers are a ring), the interval of Heartbeats, and the tolerated
    silence (both in seconds). `replicas` is the number of processes that hold each shard; with 2, a Duty
    follows.

    With sites, `sites` are their names in order; a site's shard gets the number of its site's workers, and a
    global shard the number of sites, which are its workers.

    From a shard: `shard` is its index, and `comes_back` is true if it keeps a journal, so that it may be
    started again when it dies, or has a standby; the shard sends Welcome again when that changes. A site's
    shard names its site in `sites`. From the hub, `links`: it has the links between workers measured, and
    nobody should train until RingNews reports the end: training would be measured too. From the log, `late`:
    the run has begun without this worker, which takes part once it sends Arrive.
    """

    run: Name
    worker: int = -1
    incarnation: Count = 0
    workers: Count = 0
    shards: Count = 0
    heartbeat: Seconds = 0.0
    patience: Seconds = 0.0
    sites: list[Name] = []
    shard: int = -1
    comes_back: bool = False
    late: bool = False
    replicas: Count = 1
    links: bool = False


class Refused(Message, frozen=True):
    """A refusal, with the reason in one line; the request has changed nothing. `request` is the refused
    message's name, and `number` its number; 0: it has none, or is unknown."""

    reason: Text
    request: Name = ""
    number: Count = 0


class Ping(Message, frozen=True):
    """A probe of the connection, which the operating system answers; the receiver does nothing."""


class Used(Message, frozen=True):
    """Positions of an epoch that a commit has used up."""

    sampler: Count
    epoch: Count
    start: Count
    stop: Count
