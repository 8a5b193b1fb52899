"""Records of the hub's journal: each input that changes the hub's state and, now and then, the full state.

A record is MessagePack; on disk it is a frame's header (`hub/journal.py`, `logs/frames.py`). `at` is the
hub's clock in seconds, which continues over restarts.
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
    """Bytes that are no valid record."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="r", tag=True):
    """Base of all records."""

    at: float


class Began(Record, frozen=True):
    """A journal's first record: its run, the address that its hub was told to listen at, and the actual
    one."""

    run: str
    listen: str
    address: str
    workers: int
    shards: int
    sites: list[tuple[str, int]]
    replicas: int = 1
    groups: str = ""  # settings of groups, in words; empty: no groups


class Came(Record, frozen=True):
    """A worker, a shard or a site's shard was admitted; the fields are its Hello's."""

    role: str
    wish: int
    shard: int
    address: str
    site: str
    token: str
    before: int = 0  # incarnation of a shard's earlier process
    life: str = ""  # for a shard with a standby: the process's random name
    since: int = 0  # the incarnation that this process had before it was given up
    launcher: str = ""  # the launcher that may relay a worker's heartbeats
    origin: str = ""  # the process's place (core/liveness.py)


class Left(Record, frozen=True):
    """A member said goodbye; `finished`: at the end of its session."""

    incarnation: int
    finished: bool = False


class Died(Record, frozen=True):
    """A member was silent for too long, or another came in its place."""

    incarnation: int


class LeaseRequest(Record, frozen=True, tag="Asked"):
    """A worker's request for samples that changed the state."""

    rank: int
    lease: Lease


class UsageReport(Record, frozen=True, tag="Told"):
    """A log's report of used samples, from the global log ("") or a site's."""

    log: str
    fenced: Fenced


class InRing(Record, frozen=True):
    """A worker's message about rings, or a call that changes a ring's keys."""

    message: AnyMessage


class Paired(Record, frozen=True):
    """For a shard with a standby: its primary serves (`standby` 0), or has its standby in sync."""

    shard: int
    primary: int
    standby: int = 0


class Promoted(Record, frozen=True):
    """The shard's standby became its primary."""

    shard: int


class Paced(Record, frozen=True):
    """A worker's seconds per sample, at first and when changed."""

    incarnation: int
    pace: float


class Linked(Record, frozen=True):
    """A measured link between two machines or inside one: bytes per second, and seconds one way. With a
    worker's rank in `worker`: that worker's host, the first of `hosts`."""

    hosts: tuple[str, str]
    worker: int = -1
    bandwidth: float = 0.0
    latency: float = 0.0


class Decided(Record, frozen=True):
    """New groups. With `placed` the start is over, and later workers are placed beside the others."""

    groups: list[list[int]]
    reason: str
    placed: bool = False


class InGroups(Record, frozen=True):
    """A worker's message on its move between groups; `patience`: the most seconds that it may wait."""

    message: JoinGroup | InGroup
    patience: float = 0.0


class Voted(Record, frozen=True):
    """The hub's vote on a view, for a node of a run without a server."""

    node: int
    message: Prepare | Accept


class TimePassed(Record, frozen=True):
    """Groups were given up, or opened, by `at`."""


class Over(Record, frozen=True):
    """The run is over: shards are to end."""


@dataclass
class BookState:
    """The full state of a `hub.book.Book`, as plain data."""

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
    """The full state, which replaces all records before."""

    state: BookState


AnyRecord = Union[
    Began, Came, Left, Died, LeaseRequest, UsageReport, InRing, Paired, Promoted, Paced, Linked, Decided,
    InGroups, TimePassed, Voted, Over, Knows,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: AnyRecord) -> bytes:
    """Encode a record."""
    return _encoder.encode(record)


def decode_record(raw: bytes) -> AnyRecord:
    """Decode a record; raises DamagedError if it is invalid."""
    return decoded(_decoder, raw, DamagedError, "no record of a hub")
