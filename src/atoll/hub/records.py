"""What the hub writes down: each input that changes what it knows, and now and then all that it knows.

A record is MessagePack; on disk it is a frame's header (`hub/journal.py`, `logs/frames.py`). `at` is the
hub's own clock, in seconds, which goes on over its restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import msgspec

from atoll.core.decoding import decoded
from atoll.core.errors import AtollError
from atoll.peers.witness import WitnessState
from atoll.store.leases import Key, LeasesState
from atoll.store.members import MembershipState
from atoll.wire.messages import Accept, AnyMessage, Fenced, InGroup, JoinGroup, Lease, Prepare


class DamagedError(AtollError):
    """Bytes that should be a record are none."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="r", tag=True):
    """What every record has."""

    at: float


class Began(Record, frozen=True):
    """The first of a journal: which run it is of, where its hub was told to listen, and where it does."""

    run: str
    listen: str
    address: str
    workers: int
    shards: int
    sites: list[tuple[str, int]]
    replicas: int = 1
    groups: str = ""  # how workers are put into groups, in words; empty: they are not


class Came(Record, frozen=True):
    """A worker, a shard or a site's shard was admitted: what its Hello said."""

    role: str
    wish: int
    shard: int
    address: str
    site: str
    token: str
    before: int = 0  # a shard's forerunner's incarnation
    life: str = ""  # of a shard that is held twice: its process
    since: int = 0  # the incarnation that this process had before it was given up
    launcher: str = ""  # who may pass a worker's heartbeats on
    origin: str = ""  # where its process is


class Left(Record, frozen=True):
    """One of them said goodbye; `finished`: at the end of its session."""

    incarnation: int
    finished: bool = False


class Died(Record, frozen=True):
    """One of them was silent for too long, or another came in its place."""

    incarnation: int


class Asked(Record, frozen=True):
    """A worker asked for samples, and something came of it."""

    rank: int
    lease: Lease


class Told(Record, frozen=True):
    """A log's word on what has been used: the global one's ("") or that of a site."""

    log: str
    fenced: Fenced


class InRing(Record, frozen=True):
    """A worker's word about rings, or a call that changes a ring's keys."""

    message: AnyMessage


class Paired(Record, frozen=True):
    """Of a shard that is held twice: its primary serves (`standby` 0), or has its standby in sync."""

    shard: int
    primary: int
    standby: int = 0


class Promoted(Record, frozen=True):
    """The standby of this shard is its primary from now on."""

    shard: int


class Paced(Record, frozen=True):
    """How long a worker computes a sample, in seconds: at first, and when it has changed."""

    incarnation: int
    pace: float


class Linked(Record, frozen=True):
    """The link between two machines, or inside one, was measured: bytes per second, and seconds one way. Or,
    with a `worker`'s rank: that is at the first of `hosts`."""

    hosts: tuple[str, str]
    worker: int = -1
    bandwidth: float = 0.0
    latency: float = 0.0


class Decided(Record, frozen=True):
    """Who is to be in which group. `placed`: the start is over with it, and who comes later is placed beside
    the others."""

    groups: list[list[int]]
    reason: str
    placed: bool = False


class InGroups(Record, frozen=True):
    """A worker's word on its way from group to group; `patience`: how many seconds it may be let wait."""

    message: JoinGroup | InGroup
    patience: float = 0.0


class Voted(Record, frozen=True):
    """A node of a run without a server asked for the hub's vote on a view, and got it."""

    node: int
    message: Prepare | Accept


class TimePassed(Record, frozen=True):
    """By `at`, groups were given up, or opened."""


class Over(Record, frozen=True):
    """The run is over: shards are told to end."""


@dataclass
class BookState:
    """All that the hub knows, as plain data; see `hub.book.Book`."""

    members: MembershipState
    leases: LeasesState
    site_of: dict[Key, str]
    fences: dict[str, list[Key]]
    dealt: dict[tuple[int, int], dict[int, int]]
    begun: bool
    over: bool
    rings: bytes
    groups: bytes = b""
    witness: WitnessState | None = None


class Knows(Record, frozen=True):
    """All that the records before had led to; they are not needed any more."""

    state: BookState


AnyRecord = Union[
    Began, Came, Left, Died, Asked, Told, InRing, Paired, Promoted, Paced, Linked, Decided, InGroups,
    TimePassed, Voted, Over, Knows,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: AnyRecord) -> bytes:
    """The record's bytes."""
    return _encoder.encode(record)


def decode_record(raw: bytes) -> AnyRecord:
    """The record in `raw`; raises DamagedError where it is none."""
    return decoded(_decoder, raw, DamagedError, "no record of a hub")
