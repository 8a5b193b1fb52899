"""Messages between nodes' CPU sides below the decisions' own (wire/peers.py): greetings, contributions by
chunk, and the state that a newcomer takes over.

A node sends these on connections that it has made, and receives them on those that others have made to it;
only Greeted and Refused go back on a connection. Source: docs/peers.md, "What a step does".
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.core.config import PLAIN_CODEC
from atoll.core.weighing import KNOWN
from atoll.wire.base import (
    Count,
    Hyperparameters,
    Message,
    Name,
    Ping,
    Refused,
    Text,
    Weight,
    WireError,
    decode_with,
)
from atoll.wire.device import Applied, Clip, Note, Processes
from atoll.wire.peers import Key, NodeReport, PeerMessage, flaw
from atoll.wire.peerviews import Life
from atoll.wire.workerstand import WorkerStand, unreadable

MOST_PART = 2**23  # bytes of a node's part in a meeting


class Greet(Message, frozen=True):
    """The first message of a connection, from node `node` to node `to`, both of `run`. `life` is a name of
    its process alone: two processes of one node and incarnation are two nodes with one name. `digest` names
    what it trains, once it is set up for the `number`-th time (empty: not yet). `way`: 0 for words, 1 for
    chunks; a later connection of the same node and way takes an earlier one's place. `codec` is its
    `sync.codec`. `origin` is where its process is, and `devices` where those of its devices are, for nodes of
    the same machine to look at them when it is silent or makes no iteration (core/liveness.py).
    """

    version: int
    run: Name
    node: Count
    incarnation: Count
    to: Count
    address: Name
    life: Name
    digest: Name = ""
    number: Count = 0
    way: Count = 0
    codec: Name = PLAIN_CODEC
    origin: Name = ""
    devices: Processes = []


class Greeted(Message, frozen=True):
    """The answer to Greet: the receiver's node and incarnation, and a digest of what it trains."""

    node: Count
    incarnation: Count
    digest: Name = ""
    number: Count = 0


class Trains(Message, frozen=True):
    """The sender is set up for the `number`-th time, with what `digest` names; `devices` as in Greet."""

    digest: Name
    number: Count
    devices: Processes = []


class Word(Message, frozen=True):
    """A message of the decisions (wire/peers.py: PeerMessage)."""

    body: PeerMessage


class About(Message, frozen=True):
    """An iteration's contribution, with the values that its node gives with it (wire/device.py:
    Contribute). Its chunks follow as Piece."""

    key: Key
    taken: Count
    samples: Weight
    weight: Weight
    present: Annotated[list[bytes], Meta(max_length=2**20)]
    hyperparameters: Hyperparameters
    clip: Clip | None = None
    note: Note = b""
    refused: bool = False
    basis: Name = KNOWN  # as in Contribute
    alike: Weight = 1.0
    mean: bool = False
    clipped: bool = False


class Piece(Message, frozen=True):
    """The payload is a chunk of a contribution, up to the end of its last slot; `chunk` counts the trainable
    ones. `coded`: it is as its node's codec has written it, and else as it is read."""

    key: Key
    chunk: Count
    coded: bool = False


class MeetingPart(Message, frozen=True):
    """A node's part in a meeting on `what`: the payload. `since` is the first meeting that its node takes
    part in."""

    key: Key
    what: Text
    since: Count = 0
    stand: WorkerStand | None = None  # the script's place


class Stands(Message, frozen=True):
    """The sender has applied iteration `iteration`; `digest` is of its global parameters."""

    iteration: Count
    digest: Annotated[bytes, Meta(max_length=64)]


class Lacks(Message, frozen=True):
    """A node that joins, in this life, asks for the state at global iteration `base` or later: answered by
    Takeover and its payloads, once it can be."""

    life: Life
    base: Count


class Takeover(Message, frozen=True):
    """A piece of a node's state for a newcomer. The payload is the state from byte `start` on, of `total`
    bytes.

    See exchange/globalstate.py for the state, which is that of global iteration `iteration`. The script
    counts each iteration `shift` higher, or lower: it may have begun from a checkpoint. The first piece has
    the composition of the latest of those iterations (`applied`). `consumed` counts the samples of all
    iterations, and of the checkpoint.
    """

    iteration: Count
    start: Count
    total: Count
    shift: int = 0
    applied: Annotated[list[Applied], Meta(max_length=2048)] = []
    consumed: Annotated[float, Meta(ge=0)] = 0.0


class Script(Message, frozen=True):
    """The script's state before `iteration` (wire/device.py: Captured), for a node that comes in with it: the
    payload is what lies from byte `start` of it, of `total` bytes; `digest` is of all of them. `meeting` is
    the next one's number there, and `number` counts the set-ups that were made before."""

    iteration: Count
    meeting: Count
    number: Count
    start: Count
    total: Count
    digest: Annotated[bytes, Meta(max_length=64)]


NodeMessage: TypeAlias = Union[
    Greet, Greeted, Refused, Ping, Trains, Word, About, Piece, MeetingPart, Stands, Lacks, Takeover, Script
]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)


def encode(message: NodeMessage) -> bytes:
    """Return the header's bytes."""
    return _encoder.encode(message)


def decode_untrusted(header: bytes | memoryview) -> NodeMessage:
    """Return the message in `header`. Raises WireError, with one line, for anything else."""
    message = decode_with(_decoder, header, "header")
    reason = ""
    if isinstance(message, MeetingPart):
        reason = unreadable(message.stand)
    elif isinstance(message, Word):
        waits = message.body.waits if isinstance(message.body, NodeReport) else None
        reason = unreadable(None if waits is None else waits.stand) or flaw(message.body)
    if reason:
        raise WireError(f"no message of this protocol: {reason}")
    return message
