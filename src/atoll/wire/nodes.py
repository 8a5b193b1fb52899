"""What the CPU sides of nodes say to one another below the decisions' own messages (wire/peers.py): who they
are, contributions chunk by chunk, and the state that a node takes over. Source: S0, "A node's iteration".

A node says all this on connections that it has made, and hears on those that others have made to it; back on
them go only Greeted and Refused.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

import msgspec
from msgspec import Meta

from atoll.wire.base import (
    HEADER_BYTES,
    Count,
    Hyperparameters,
    Message,
    Name,
    Ping,
    Refused,
    Text,
    Weight,
    WireError,
)
from atoll.wire.device import Clip, NodeAt, Note

MOST_NODES = 1024


class Greet(Message, frozen=True):
    """The first message of a connection, from node `node` to node `to`, both of `run`. `life` is a name of
    its process alone: two processes of one node and incarnation are two nodes with one name. `digest` names
    what it trains, once it is set up for the `number`-th time (empty: not yet).
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


class Greeted(Message, frozen=True):
    """The answer: who this is, and what it trains."""

    node: Count
    incarnation: Count
    digest: Name = ""
    number: Count = 0


class Trains(Message, frozen=True):
    """The sender is set up for the `number`-th time, with what `digest` names."""

    digest: Name
    number: Count


class Word(Message, frozen=True):
    """A message of the decisions' (wire/peers.py), of the `number`-th set-up."""

    number: Count
    body: msgspec.Raw


class About(Message, frozen=True):
    """A contribution's beginning: whose, of which iteration, and what its node says of it (wire/device.py:
    Contribute). Its chunks follow as Piece."""

    node: Count
    incarnation: Count
    iteration: Count
    number: Count
    taken: Count
    samples: Weight
    weight: Weight
    present: Annotated[list[bytes], Meta(max_length=2**20)]
    hyperparameters: Hyperparameters
    clip: Clip | None = None
    note: Note = b""


class Piece(Message, frozen=True):
    """The payload is a chunk of a contribution, up to the end of its last slot; `chunk` counts the trainable
    ones."""

    node: Count
    incarnation: Count
    iteration: Count
    number: Count
    chunk: Count


class Lacks(Message, frozen=True):
    """The sender begins to take over the state: answered by Takeover and its Parts."""

    number: Count


class Takeover(Message, frozen=True):
    """The state at global iteration `iteration`: `parts` pieces of these sizes follow, each a Part.
    `numbers` is what of it is no tensor (node/memory.py), `known` the nodes that its giver knows."""

    number: Count
    iteration: Count
    names: Annotated[list[Text], Meta(max_length=2**20)]
    sizes: Annotated[list[Count], Meta(max_length=2**20)]
    known: Annotated[list[NodeAt], Meta(max_length=MOST_NODES)] = []
    numbers: bytes = b""


class Part(Message, frozen=True):
    """The payload is the `part`-th of a Takeover's."""

    number: Count
    iteration: Count
    part: Count


class Script(Message, frozen=True):
    """The script's state before `iteration` (wire/device.py: Captured), for a node that comes in with it."""

    number: Count
    iteration: Count
    script: Annotated[bytes, Meta(max_length=2**25)]


NodeMessage: TypeAlias = Union[
    Greet, Greeted, Refused, Ping, Trains, Word, About, Piece, Lacks, Takeover, Part, Script
]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)


def encode(message: NodeMessage) -> bytes:
    """The header's bytes."""
    return _encoder.encode(message)


def decode_untrusted(header: bytes | memoryview) -> NodeMessage:
    """The message in `header`; raises WireError, with one line, for anything that is none."""
    if len(header) > HEADER_BYTES:
        raise WireError(f"a header of {len(header)} bytes, where {HEADER_BYTES} is the most")
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no message of this protocol: {str(error)[:200]}") from None
