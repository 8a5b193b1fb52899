"""Messages that open a tunnel and go through it, on one session of the loss-tolerant transport.

The session's id, ports and secret are given over the authenticated connection (OpenLink, LinkOpened). Then
each end numbers its messages from 0 on. Headers go in batches, each a reliable transfer; a payload is in the
batch too, or a transfer of its own. Source: docs/ltp.md, "The tunnel".
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.core.decoding import decoded
from atoll.wire.base import HEADER_BYTES, Count, Message, Name, Text, WireError
from atoll.wire.datagrams import MOST_STRIPES
from atoll.wire.linktest import SECRET_BYTES

BATCHES = 2**32 - 1  # the chunk of a transfer that is a batch
PAYLOADS = 2**32 - 2  # and of one that is a reliable payload; a lossy one has its own chunk, which is below
WINDOW_MESSAGES = 1024  # messages not yet taken by the other end's application; also the most in a batch
BATCH_BYTES = 2**16  # of headers and payloads in one batch; one message may pass it
MOST_MESSAGES = 2**32  # that an end may number in a session: a transfer's `iteration` names them

_Port = Annotated[int, Meta(ge=1, lt=2**16)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class OpenLink(Message, frozen=True):
    """The client wants its messages to go through a session. `ltp` is the transport's version, `who` the
    client in words; sessions of a `site` have one share of the server's link. The rest is how the server is
    to receive (atoll.ltp.settings)."""

    ltp: Count
    who: Name
    site: Name
    stripes: Annotated[int, Meta(ge=1, le=MOST_STRIPES)]
    datagram_bytes: Count
    fill: Name
    fill_above: _Share
    usable: _Share
    target_loss: _Share


class LinkOpened(Message, frozen=True):
    """The server waits for the client at these UDP ports, a stripe each. Datagrams are sealed."""

    session: Annotated[int, Meta(ge=0, lt=2**32)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    ports: Annotated[list[_Port], Meta(min_length=1, max_length=MOST_STRIPES)]


class LinkLost(Message, frozen=True):
    """The server's session with this client has ended, and the reason."""

    reason: Text


class TunnelEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message. `payload` is in here, or `apart`: it is a transfer of its own, of `size` bytes, whose
    iteration is the message's number; both are None and 0 where there is none."""

    header: bytes
    payload: bytes | None = None
    apart: bool = False
    size: Count = 0


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages from number `first` on, perhaps none. `taken`: how many messages of the other end its
    application here has taken, in all."""

    first: Count
    taken: Count
    entries: Annotated[list[TunnelEntry], Meta(max_length=WINDOW_MESSAGES)]


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Batch] = msgspec.msgpack.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    """Return the bytes of the transfer."""
    return _encoder.encode(batch)


def decode_batch_untrusted(raw: bytes | memoryview) -> Batch:
    """Return the batch in `raw`. Raises WireError, with one line, for anything else."""
    if len(raw) > HEADER_BYTES + 2 * BATCH_BYTES:
        raise WireError(f"a batch of {len(raw)} bytes, where a header of {HEADER_BYTES} is the most")
    batch = decoded(_decoder, raw, WireError, "no batch of messages")
    for entry in batch.entries:
        if len(entry.header) > HEADER_BYTES:
            raise WireError(f"a header of {len(entry.header)} bytes, where {HEADER_BYTES} is the most")
        if entry.apart and (entry.payload is not None or not entry.size):
            raise WireError("a payload that is apart is not in the batch, and has bytes")
        if not entry.apart and entry.size:
            raise WireError("a size is said of a payload that is apart")
    if batch.first + len(batch.entries) > MOST_MESSAGES:
        raise WireError(f"message {batch.first + len(batch.entries)}, where {MOST_MESSAGES} are the most")
    return batch
